//! Seeded interleavings of send, end, cancel and crash through the whole control plane: clients with scripts of their own
//! send and cancel while the server dies in the middle of everything, and a scripted engine ends turns this way and
//! that. What the clients were told is then compared with what is there. (A thousand more, step by step and in one
//! order for each seed, are in the store's own tests.)

#![expect(clippy::print_stderr, reason = "the seed is shown with a test that fails")]

use std::collections::{BTreeMap, HashMap};

use pretty_assertions::assert_eq;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::control::v1::{Role, TurnStatus};
use roundhouse_proto::engine::v1::event_body::Kind;
use tokio::sync::watch;

use crate::support::runner::{Call, Reply, Runner, completed, failed, text};
use crate::support::{Client, LIMIT, World, assert_whole, collect, ended, events, kinds, message};

/// Another seed for a look by hand.
const SEED: &str = "ROUNDHOUSE_TEST_SEED";
const ROUNDS: u64 = 3;
/// Interleavings of a round: they share a server and its deaths.
const CONVERSATIONS: u64 = 40;
const MESSAGES: u64 = 4;
const CRASHES: u64 = 4;

/// A small generator: the dice fall the same each time for one seed.
#[derive(Clone)]
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// What a client was told of one of its messages.
struct Told {
    text: String,
    message: String,
    turn: String,
    /// The answer to its cancel, if it sent one: whether the turn had ended before.
    cancelled: Option<bool>,
}

/// The server as clients reach it: another one after each restart.
type Servers = watch::Receiver<Client>;

/// A call that is repeated until a server answers it, as clients do.
async fn until_answered<T, F>(servers: &mut Servers, call: impl Fn(Client) -> F) -> T
where
    F: Future<Output = Result<T, tonic::Status>>,
{
    let repeated = async {
        loop {
            let client = servers.borrow_and_update().clone();
            match call(client).await {
                Ok(answer) => return answer,
                Err(status) => {
                    let code = status.code();
                    let away = [
                        tonic::Code::Unavailable,
                        tonic::Code::Unknown,
                        tonic::Code::Cancelled,
                        tonic::Code::Internal,
                    ];
                    assert!(away.contains(&code), "{status:?}");
                }
            }
            // The next server, or a moment later the same one.
            let _ = tokio::time::timeout(std::time::Duration::from_millis(20), servers.changed()).await;
        }
    };
    tokio::time::timeout(LIMIT, repeated).await.expect("no server answers")
}

/// Sends its messages, and cancels some turns: all of those that would run for ever, and others by chance.
async fn client(mut servers: Servers, conversation: String, workspace: String, mut dice: Dice) -> Vec<Told> {
    let mut told: Vec<Told> = Vec::new();
    for n in 0..MESSAGES {
        let end = ["complete", "complete", "fail", "hold"][usize::try_from(dice.roll(4)).unwrap()];
        let request = message(&conversation, &format!("{n} {end}"), "builder", &workspace);
        let sent = until_answered(&mut servers, |mut client| {
            let request = request.clone();
            async move { Ok(client.send_message(request).await?.into_inner()) }
        })
        .await;
        told.push(Told {
            text: request.text,
            message: sent.message.unwrap().message_id,
            turn: sent.turn.unwrap().turn_id,
            cancelled: None,
        });
        if dice.roll(4) == 0 {
            let at = usize::try_from(dice.roll(told.len() as u64)).unwrap();
            cancel(&mut servers, &mut told[at]).await;
        }
    }
    for one in &mut told {
        if one.text.ends_with("hold") {
            cancel(&mut servers, one).await;
        }
    }
    told
}

async fn cancel(servers: &mut Servers, one: &mut Told) {
    let request = control::CancelTurnRequest {
        request_id: uuid::Uuid::new_v4().to_string(),
        turn_id: one.turn.clone(),
    };
    let answer = until_answered(servers, |mut client| {
        let request = request.clone();
        async move { Ok(client.cancel_turn(request).await?.into_inner()) }
    })
    .await;
    // The first one counts; a later one finds the turn on its way.
    one.cancelled.get_or_insert(answer.already_ended);
}

/// Follows a conversation over all restarts until `turns` of it have ended; no cursor twice.
async fn follow(
    mut servers: Servers,
    conversation: String,
    turns: usize,
) -> Vec<control::StreamEventsResponse> {
    let mut seen: Vec<control::StreamEventsResponse> = Vec::new();
    loop {
        let request = control::StreamEventsRequest {
            conversation_id: conversation.clone(),
            after_cursor: seen.last().map(|item| item.cursor.clone()).unwrap_or_default(),
            ..Default::default()
        };
        let mut stream = until_answered(&mut servers, |mut client| {
            let request = request.clone();
            async move { Ok(client.stream_events(request).await?.into_inner()) }
        })
        .await;
        while let Ok(Some(item)) = stream.message().await {
            seen.push(item);
            let terminals = kinds(&events(&seen)).iter().filter(|k| matches!(k, Kind::Terminal(_))).count();
            if terminals == turns {
                return seen;
            }
        }
    }
}

/// Does what the messages say, once for each turn. A cancel may come first: the runner itself ends those.
async fn engine(runner: Runner) {
    let mut changes = runner.changes();
    let mut read = 0;
    loop {
        let calls: Vec<Call> = runner.state().calls.iter().skip(read).cloned().collect();
        read += calls.len();
        for call in calls {
            let Call::Send(send) = call else { continue };
            if !runner.try_emit(&send.turn_id, text("t1", &send.text)) {
                continue;
            }
            match send.text.rsplit(' ').next() {
                Some("complete") => runner.try_emit(&send.turn_id, completed(&send.text)),
                Some("fail") => runner.try_emit(&send.turn_id, failed("as it was told to")),
                _ => false,
            };
        }
        changes.changed().await.unwrap();
    }
}

async fn round(seed: u64) {
    eprintln!("{SEED}={seed}");
    let mut dice = Dice(seed);
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let obeys = tokio::spawn(engine(world.runner.clone()));
    let (servers, reached) = watch::channel(world.client.clone());
    let mut conversations = Vec::new();
    let (mut clients, mut followers) = (Vec::new(), Vec::new());
    for n in 0..CONVERSATIONS {
        let conversation = world.conversation().await;
        // Some share a workspace, and wait for each other.
        let workspace = format!("/w/{}", n - n % 4 + if n % 4 == 1 { 0 } else { n % 4 });
        let own = Dice(seed ^ (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        clients.push(tokio::spawn(client(reached.clone(), conversation.clone(), workspace, own)));
        let turns = usize::try_from(MESSAGES).unwrap();
        followers.push(tokio::spawn(follow(reached.clone(), conversation.clone(), turns)));
        conversations.push(conversation);
    }
    for _ in 0..CRASHES {
        // A moment is so many calls of the runner further on; if all is through, there is no more moment.
        let wanted = world.runner.state().calls.len() + usize::try_from(1 + dice.roll(120)).unwrap();
        let mut changes = world.runner.changes();
        let further = async {
            while world.runner.state().calls.len() < wanted {
                changes.changed().await.unwrap();
            }
        };
        let all = async {
            while !followers.iter().all(tokio::task::JoinHandle::is_finished) {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            () = further => {}
            () = all => break,
        }
        world.crash().await;
        world.restart().await;
        servers.send_replace(world.client.clone());
        if dice.roll(2) == 0 {
            world.runner.register(world.address()).await.unwrap();
        }
    }
    let whole = std::time::Duration::from_secs(60);
    for ((conversation, client), follower) in conversations.iter().zip(clients).zip(followers) {
        let told = client.await.unwrap();
        let seen = tokio::time::timeout(whole, follower).await.expect("turns do not end").unwrap();
        check(&mut world, conversation, &told, &seen).await;
    }
    settled(&mut world).await;
    obeys.abort();
}

/// What is there is what was told, for one conversation.
async fn check(world: &mut World, conversation: &str, told: &[Told], seen: &[control::StreamEventsResponse]) {
    let messages = world.messages(conversation).await;
    let users: Vec<_> = messages.iter().filter(|m| m.role() == Role::User).collect();
    let there: Vec<_> = users.iter().map(|m| (m.text.as_str(), m.message_id.as_str())).collect();
    let acknowledged: Vec<_> = told.iter().map(|t| (t.text.as_str(), t.message.as_str())).collect();
    assert_eq!(there, acknowledged, "each message once, in the order in which they were acknowledged");
    let positions: Vec<_> = users.iter().filter_map(|m| m.position).collect();
    assert!(positions.is_sorted(), "turns were taken out of order: {positions:?}");
    let replay = {
        let request = control::StreamEventsRequest {
            conversation_id: conversation.into(),
            follow: Some(false),
            ..Default::default()
        };
        collect(world.client.stream_events(request).await.unwrap().into_inner()).await.unwrap()
    };
    assert_eq!(told_by(&replay)[..seen.len()], told_by(seen), "what was seen live is what is replayed");
    let mut by_turn: BTreeMap<String, Vec<control::TurnEvent>> = BTreeMap::new();
    for event in events(&replay) {
        by_turn.entry(event.turn_id.clone()).or_default().push(event);
    }
    assert_eq!(by_turn.len(), told.len(), "no turn but the acknowledged ones");
    for one in told {
        assert_whole(&by_turn[&one.turn]);
        let turn = world.turn(&one.turn).await.turn.unwrap();
        let nominal = if one.text.ends_with("complete") { TurnStatus::Completed } else { TurnStatus::Failed };
        match one.cancelled {
            Some(false) => assert_eq!(turn.status(), TurnStatus::Cancelled, "{}: a cancel is kept", one.text),
            Some(true) | None => assert_eq!(turn.status(), nominal, "{}: {turn:#?}", one.text),
        }
    }
}

/// What items tell of that moment: events whole, of the rest what it is about and the turn's state. What stands beside
/// it is as it is when it is read.
fn told_by(items: &[control::StreamEventsResponse]) -> Vec<(String, String)> {
    let one = |item: &control::StreamEventsResponse| {
        let what = match item.item.as_ref().expect("an item") {
            Item::TurnEvent(event) => format!("{event:?}"),
            Item::Message(message) => format!("message {}: {}", message.message_id, message.text),
            Item::Turn(turn) => format!("turn {}: {:?}", turn.turn_id, turn.status()),
            Item::Session(session) => format!("session {}", session.session_id),
            other => panic!("{other:?}"),
        };
        (item.cursor.clone(), what)
    };
    items.iter().map(one).collect()
}

/// Nothing is left over: every slot is free, the runner was told of every end, and gave each message to one session.
async fn settled(world: &mut World) {
    let turns: Vec<String> = world.runner.state().turns.keys().cloned().collect();
    for turn in &turns {
        world.runner.acknowledged(turn).await;
        assert!(ended(world.turn(turn).await.turn.unwrap().status()));
    }
    let mut runners = world.runners().await;
    let request = control::ListWorkspacesRequest::default();
    let workspaces = runners.list_workspaces(request).await.unwrap().into_inner().workspaces;
    let held: Vec<_> = workspaces.iter().filter(|w| !w.held_by_turn_id.is_empty()).collect();
    assert!(held.is_empty(), "{held:#?}");
    let mut given: HashMap<String, (String, String)> = HashMap::new();
    for send in world.runner.sends() {
        let place = (send.turn_id, send.session_id);
        let before = given.entry(send.message_id).or_insert_with(|| place.clone());
        assert_eq!(*before, place, "a message was given twice");
    }
}

#[tokio::test]
async fn s06_s07_s47_clients_are_told_the_truth_while_the_control_plane_dies() {
    if let Some(seed) = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()) {
        return round(seed).await;
    }
    for n in 0..ROUNDS {
        round(0x0dd5_0000 + n).await;
    }
}
