//! Many turns at once while the services die again and again: what was acknowledged is answered once, whatever happens.

use std::collections::BTreeMap;

use anyhow::Context as _;
use roundhouse_proto::{
    control::v1::{Role, SendMessageRequest},
    engine::v1::Outcome,
};
use roundhouse_test_support::{Agent, BRIEF, Control, LONG, NORMAL, Stack, Workspace, wait_for, wait_until};

use crate::{answer_of, terminals};

const CONVERSATIONS: usize = 3;
const MESSAGES: usize = 5;
const KILLS: usize = 9;

/// Another seed for a look by hand.
const SEED: &str = "ROUNDHOUSE_TEST_SEED";

/// A small generator: the dice fall the same each time, and the seed stands here.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Sends until it is acknowledged, as a client does: the same request again whenever the answer is lost.
async fn send(control: &Control, conversation: &str, n: usize) -> anyhow::Result<String> {
    let request = SendMessageRequest {
        request_id: format!("{conversation}-{n}"),
        conversation_id: conversation.to_owned(),
        text: format!("[[bash:echo ran >> runs-{n}]][[text:done with {n}]] message number {n}."),
        ..SendMessageRequest::default()
    };
    let sent = wait_for("the message is acknowledged", NORMAL, || async {
        match control.conversations().send_message(request.clone()).await {
            Ok(sent) => Ok(Some(sent.into_inner())),
            Err(status) => Err(status.into()),
        }
    })
    .await?;
    Ok(sent.turn.context("a turn")?.turn_id)
}

#[tokio::test]
async fn nothing_acknowledged_is_lost_or_doubled_while_services_die_at_random() -> anyhow::Result<()> {
    let mut stack = Stack::start().await?;
    let seed = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x0bad_5eed);
    stack.log.line("test", &format!("the seed is {seed}"));
    let mut dice = Dice(seed);
    let mut places = Vec::new();
    for n in 0..CONVERSATIONS {
        let path = stack.root().join(format!("work/place-{n}"));
        let workspace = Workspace::create(&path, &[Agent::new("builder")])?;
        let name = workspace.path().display().to_string();
        let conversation = stack.control.create(&name, "builder").await?.conversation_id;
        let follower = stack.control.follow(&conversation);
        places.push((workspace, conversation, follower));
    }

    // Everything is sent while services die, by clients that know nothing of it.
    let senders: Vec<_> = places
        .iter()
        .map(|(_, conversation, _)| {
            let (control, conversation) = (stack.control.clone(), conversation.clone());
            tokio::spawn(async move {
                let mut turns = Vec::new();
                for n in 0..MESSAGES {
                    turns.push(send(&control, &conversation, n).await?);
                }
                anyhow::Ok(turns)
            })
        })
        .collect();
    let mut kills = 0;
    for _ in 0..KILLS {
        // A moment is so many items of the streams further on; a stack that is through has no more moments.
        let seen: usize = places.iter().map(|(_, _, follower)| follower.items().len()).sum();
        let wanted = seen + usize::try_from(dice.roll(14))? + 1;
        let more = wait_until("something happens", BRIEF, || {
            places.iter().map(|(_, _, follower)| follower.items().len()).sum::<usize>() >= wanted
        })
        .await;
        if more.is_err() {
            break;
        }
        kills += 1;
        match dice.roll(5) {
            0 | 1 => {
                stack.runner.kill().await?;
                stack.runner.start_again().await?;
            }
            2 | 3 => {
                stack.control_plane.kill().await?;
                stack.control_plane.start_again().await?;
            }
            _ => {
                stack.kill_both().await?;
                stack.start_both().await?;
            }
        }
    }

    assert!(kills > KILLS / 2, "the turns were through after {kills} kills: make them longer");

    let mut acknowledged = Vec::new();
    for sender in senders {
        acknowledged.push(sender.await??);
    }
    for ((workspace, conversation, follower), turns) in places.iter().zip(&acknowledged) {
        let mut runs = BTreeMap::new();
        for (n, turn) in turns.iter().enumerate() {
            let terminal = follower.wait_terminal(turn, LONG).await?;
            assert_eq!(terminal.outcome(), Outcome::Completed, "message {n}: {terminal:?}");
            assert_eq!(terminals(follower, turn).len(), 1);
            assert_eq!(answer_of(&stack.control.turn(turn).await?), format!("done with {n}"));
            runs.insert(n, workspace.lines(&format!("runs-{n}")));
        }
        assert!(runs.values().all(|times| *times == 1), "each tool ran once: {runs:?}");
        let messages = stack.control.messages(conversation).await?;
        let users = messages.iter().filter(|message| message.role() == Role::User).count();
        assert_eq!((users, messages.len()), (MESSAGES, 2 * MESSAGES), "{messages:?}");
        follower.check()?;
    }
    for n in 0..MESSAGES {
        // One request before the tool and one after it, in each conversation.
        assert_eq!(stack.model.count_for(&format!("message number {n}.")), 2 * CONVERSATIONS, "message {n}");
    }
    Ok(())
}

/// Deaths of everybody, engines included, on an engine that obeys a script; as many as CI has time for.
#[tokio::test]
async fn two_hundred_random_deaths_break_nothing_that_clients_were_told() -> anyhow::Result<()> {
    let seed = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()).unwrap_or(200);
    let options = roundhouse_e2e::chaos::Options { seed, until: roundhouse_e2e::chaos::Until::Kills(200) };
    let report = roundhouse_e2e::chaos::run(options).await?;
    let deaths: usize = report.kills.values().sum();
    assert!(deaths >= 200, "{report}");
    assert!(report.kills.len() >= 8, "everybody died: {report}");
    assert!(report.turns.get("Completed").is_some_and(|completed| *completed >= 20), "under load: {report}");
    Ok(())
}
