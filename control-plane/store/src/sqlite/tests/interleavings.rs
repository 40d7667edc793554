//! A thousand seeded interleavings of send, end, cancel and crash, each step held against a model of what the callers
//! were told. A crash drops all that is in memory: the store goes on from a copy of its files as they lay at that moment,
//! and is closed only then. The seed is printed, and gives the same steps again ([`SEED`]).

mod model;
mod replay;

use std::path::Path;

use roundhouse_domain::event::{ChangeBody, EventKind, Fact};
use roundhouse_domain::turn::TurnState;

use self::model::{Conversation, Dice};
use super::*;

/// Another seed for a look by hand.
const SEED: &str = "ROUNDHOUSE_TEST_SEED";
/// Each conversation is one interleaving; those of a round share a database and its crashes.
const ROUNDS: u64 = 25;
const CONVERSATIONS: u64 = 40;
/// Steps of a round, so many per conversation in the mean.
const STEPS: u64 = CONVERSATIONS * 14;

/// What a round did, told when it fails.
struct Trace {
    seed: u64,
    steps: Vec<String>,
}

impl Drop for Trace {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let last = self.steps.len().saturating_sub(40);
            eprintln!("{SEED}={} after {} steps, the last of them:", self.seed, self.steps.len());
            eprintln!("{}", self.steps[last..].join("\n"));
        }
    }
}

/// The files as a crash leaves them: the log is copied after the database, and is not begun anew at this size, so
/// that whatever a checkpoint writes meanwhile stands in the log, too.
fn crash(from: &Path, to: &Path) -> SqliteStore {
    std::fs::create_dir(to).unwrap();
    for name in ["control.db", "control.db-wal"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
    SqliteStore::open(to.join("control.db")).unwrap()
}

async fn round(seed: u64) {
    let mut trace = Trace { seed, steps: Vec::new() };
    let mut dice = Dice(seed);
    let folder = tempfile::tempdir().unwrap();
    let mut lives = 0;
    let place = |life: u64| folder.path().join(life.to_string());
    std::fs::create_dir(place(0)).unwrap();
    let mut store = SqliteStore::open(place(0).join("control.db")).unwrap();
    let mut all = Vec::new();
    for n in 0..CONVERSATIONS {
        all.push(Conversation::create(&store, n).await);
    }
    for step in 0..STEPS {
        let at = usize::try_from(dice.roll(CONVERSATIONS)).unwrap();
        let (what, dies) = all[at].step(&store, &mut dice).await;
        trace.steps.push(format!("{step}: conversation {at}: {what}"));
        if dies || dice.roll(90) == 0 {
            trace.steps.push("crash".to_owned());
            lives += 1;
            let again = crash(&place(lives - 1), &place(lives));
            // Only now may the old one tidy up.
            store.close().await;
            store = again;
            check_open(&store, &all).await;
            for conversation in &mut all {
                conversation.recover(&store).await;
                conversation.check(&store).await;
                conversation.check_fold(&store).await;
            }
        }
    }
    for conversation in &mut all {
        conversation.finish(&store, &mut dice).await;
        conversation.check(&store).await;
        conversation.check_fold(&store).await;
        conversation.check_replay(&store).await;
    }
    assert_eq!(store.open_turns().await.unwrap(), vec![], "everything has ended");
    store.close().await;
}

/// What a dispatcher finds after a crash: exactly the turns that own a lock, in the order of their promotion.
async fn check_open(store: &SqliteStore, all: &[Conversation]) {
    let open = store.open_turns().await.unwrap();
    let promotions: Vec<_> = open.iter().map(|turn| turn.promotion.unwrap()).collect();
    assert!(promotions.is_sorted(), "{promotions:?}");
    let mut found: Vec<_> = open.into_iter().map(|turn| (turn.id.to_string(), turn.state)).collect();
    let mut expected: Vec<_> = all.iter().filter_map(Conversation::active).collect();
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
}

/// A quarter of the rounds: those that leave this rest.
async fn quarter(rest: u64) {
    match std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) if rest == 0 => round(seed).await,
        Some(_) => {}
        None => {
            for n in (0..ROUNDS).filter(|n| n % 4 == rest) {
                round(0x5eed_0000 + n).await;
            }
        }
    }
}

/// A thousand interleavings, in four tests that may run beside each other.
mod s02_s06_s07_a_thousand_interleavings_of_send_end_cancel_and_crash {
    #[tokio::test]
    async fn first_quarter() {
        super::quarter(0).await;
    }

    #[tokio::test]
    async fn second_quarter() {
        super::quarter(1).await;
    }

    #[tokio::test]
    async fn third_quarter() {
        super::quarter(2).await;
    }

    #[tokio::test]
    async fn fourth_quarter() {
        super::quarter(3).await;
    }
}
