//! Following without a hole: a conversation and its reader in every order in which their steps can come.
//!
//! The hub is the real one; the reader takes the steps of `Follower::run` (grpc/stream.rs) in its order, on a list in place
//! of the store, and stops between any two of them. There is no timer here: a hint that is lost leaves the reader waiting
//! for ever, and is found.

use std::future::Future;
use std::pin::pin;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use super::*;

/// What is stored.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stored {
    Text,
    Terminal,
}

/// What a reader is told.
#[derive(Debug, Clone, PartialEq)]
enum Told {
    Stored(Stored),
    Piece(Piece),
}

/// A step of the turn, as `attach`, `close` and the store's hints take it.
#[derive(Debug, Clone, Copy)]
enum Step {
    Partial(u64, &'static str),
    Reset,
    Finish,
    Commit(Stored),
    Hint,
    End,
}

/// Text that grows, is replaced by its item, and the end.
const REPLACED: [Step; 6] = [
    Step::Partial(0, "gr"),
    Step::Finish,
    Step::Commit(Stored::Text),
    Step::Hint,
    Step::Commit(Stored::Terminal),
    Step::Hint,
];

/// Text that is thrown away and begun anew, and an end that comes before its item.
const THROWN_AWAY: [Step; 6] = [
    Step::Partial(0, "no"),
    Step::Reset,
    Step::Partial(0, "grö"),
    Step::Commit(Stored::Terminal),
    Step::End,
    Step::Hint,
];

async fn point() {
    let mut passed = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut passed, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

async fn read(
    hub: &Arc<Hub>,
    conversation: &ConversationId,
    store: &RwLock<Vec<Stored>>,
    told: &Mutex<Vec<Told>>,
) {
    let mut subscription = hub.subscribe(conversation);
    let mut position = 0;
    loop {
        point().await;
        subscription.mark_seen();
        point().await;
        let page: Vec<Stored> = store.read().unwrap()[position..].to_vec();
        if !page.is_empty() {
            for stored in page {
                told.lock().unwrap().push(Told::Stored(stored));
                position += 1;
                if stored == Stored::Terminal {
                    return;
                }
            }
            continue;
        }
        point().await;
        told.lock().unwrap().extend(subscription.pieces(None).into_iter().map(Told::Piece));
        point().await;
        subscription.changed().await;
    }
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn take(hub: &Hub, conversation: &ConversationId, store: &RwLock<Vec<Stored>>, step: Step) {
    let turn = TurnId::parse("trn_1").unwrap();
    match step {
        Step::Partial(offset, text) => {
            let partial = Partial {
                item_id: "a".into(),
                offset,
                text: text.into(),
                reasoning: false,
                truncated: false,
            };
            hub.partial(conversation, &turn, &partial);
        }
        Step::Reset => hub.reset(conversation, &turn, "a"),
        Step::Finish => hub.finish(conversation, &turn, "a"),
        Step::Commit(stored) => store.write().unwrap().push(stored),
        Step::Hint => hub.stored(conversation),
        Step::End => hub.end(conversation, &turn),
    }
}

/// Plays one schedule; where both sides can go on the next choice decides (true: the turn), beyond the given ones the
/// reader goes first. Answers the choices that were made.
fn play(turn: &[Step], given: &[bool]) -> Vec<bool> {
    let conversation = ConversationId::parse("cnv_1").unwrap();
    let hub = Arc::new(Hub::default());
    let store = RwLock::new(Vec::new());
    let told = Mutex::new(Vec::new());
    let (mut made, mut next, mut over) = (Vec::new(), 0, false);
    {
        let mut reader = pin!(read(&hub, &conversation, &store, &told));
        let flag = Arc::new(Flag(AtomicBool::new(true)));
        let waker = Waker::from(Arc::clone(&flag));
        let mut context = Context::from_waker(&waker);
        loop {
            let reads = !over && flag.0.load(Ordering::SeqCst);
            let act = match (next < turn.len(), reads) {
                (true, true) => {
                    let choice = given.get(made.len()).copied().unwrap_or(false);
                    made.push(choice);
                    choice
                }
                (true, false) => true,
                (false, true) => false,
                (false, false) => break,
            };
            if act {
                take(&hub, &conversation, &store, turn[next]);
                next += 1;
            } else {
                flag.0.store(false, Ordering::SeqCst);
                over = reader.as_mut().poll(&mut context).is_ready();
            }
        }
    }
    let told = told.into_inner().unwrap();
    assert!(over, "the reader waits for ever, {made:?}: {told:#?}");
    whole(&told, turn, &made);
    hub.end(&conversation, &TurnId::parse("trn_1").unwrap());
    assert!(hub.topics().is_empty(), "something is kept, {made:?}");
    made
}

/// Everything stored, once and in order; unfinished text without a gap, and none after its item.
fn whole(told: &[Told], turn: &[Step], made: &[bool]) {
    let mut stored = Vec::new();
    let mut text = String::new();
    for one in told {
        match one {
            Told::Stored(one) => stored.push(*one),
            Told::Piece(Piece::Partial(_, partial)) => {
                assert!(stored.is_empty(), "unfinished text after its item, {made:?}: {told:#?}");
                assert_eq!(partial.offset, text.len() as u64, "{made:?}: {told:#?}");
                text.push_str(&partial.text);
                assert!(["no", "gr", "grö"].contains(&text.as_str()), "{made:?}: {told:#?}");
            }
            Told::Piece(Piece::Reset(..)) => text.clear(),
        }
    }
    let committed: Vec<Stored> = turn
        .iter()
        .filter_map(|step| if let Step::Commit(stored) = step { Some(*stored) } else { None })
        .collect();
    assert_eq!(stored, committed, "{made:?}: {told:#?}");
}

#[test]
fn following_leaves_no_hole_in_any_interleaving() {
    for turn in [REPLACED, THROWN_AWAY] {
        let mut schedules = 0_u32;
        let mut given = Vec::new();
        loop {
            let mut made = play(&turn, &given);
            schedules += 1;
            while made.last() == Some(&true) {
                made.pop();
            }
            let Some(last) = made.last_mut() else { break };
            *last = true;
            given = made;
        }
        assert!(schedules > 1_000, "{schedules} schedules are not all");
    }
}
