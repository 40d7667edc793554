//! Summaries, and what a session is known to have been told.

use roundhouse_domain::conflict::{Conflict, Kind};
use roundhouse_domain::event::{ChangeBody, Fact};
use roundhouse_domain::message::Position;
use roundhouse_domain::outcome::Outcome;
use roundhouse_domain::session::{Opening, Origin, PromptUse, SessionState};

use super::Backend;
use super::fixture::{Fixture, assert_conflict, close, error, fresh, key, mark, now, owner, turn_id};
use crate::command::{ChooseSession, PutSummary, RecordOpening, RequestKey, RetryTurn, SessionPick};
use crate::error::Error;
use crate::store::Store;

fn put<S: Store>(f: &Fixture<S>, expected_version: u64, through: u64, text: &str) -> PutSummary {
    PutSummary {
        request: None,
        conversation_id: f.conversation.clone(),
        expected_version,
        through: Position(through),
        text: text.to_owned(),
        author: "ann".into(),
        time: now(),
    }
}

async fn facts<S: Store>(f: &Fixture<S>) -> Vec<Fact> {
    let changes = f.store.changes_after(&f.conversation, 0, 1_000).await.unwrap();
    let fact = |change: roundhouse_domain::event::Change| match change.body {
        ChangeBody::Fact(fact) => Some(fact),
        ChangeBody::Event(_) => None,
    };
    changes.items.into_iter().filter_map(fact).collect()
}

/// Compare-and-set on the version; the loser changes nothing.
pub async fn s63_of_two_writers_of_a_summary_one_wins<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    f.close(&turn, Outcome::Completed, Some("two")).await;
    let (a, b) = tokio::join!(
        f.store.put_summary(put(&f, 0, 2, "by one")),
        f.store.put_summary(put(&f, 0, 2, "by the other"))
    );
    let (won, lost) = if a.is_ok() { (a, b) } else { (b, a) };
    let won = won.unwrap();
    assert_eq!((won.version, won.through), (1, Position(2)));
    assert_conflict!(lost, Conflict::SummaryVersion { expected: 0, current: 1 });
    assert_eq!(f.store.get_summary(&f.conversation, None).await.unwrap(), won);
    let told = facts(&f).await.iter().filter(|fact| matches!(fact, Fact::SummaryChanged { .. })).count();
    assert_eq!(told, 1);
}

/// A repeat of a step composes the same context, whatever was written meanwhile.
pub async fn s63_a_turn_is_told_of_the_summary_that_it_was_promoted_with<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let first = f.send("one").await.turn;
    assert_eq!(f.store.turn_summary(&first.id).await.unwrap(), None);
    let waiting = f.send("two").await.turn;
    let early = f.store.put_summary(put(&f, 0, 1, "early")).await.unwrap();
    assert_eq!(f.store.turn_summary(&first.id).await.unwrap(), None, "it came after the promotion");
    assert_eq!(f.store.turn_summary(&waiting.id).await.unwrap(), None, "it waits");
    f.close(&first, Outcome::Completed, Some("done")).await;
    assert_eq!(f.store.turn_summary(&waiting.id).await.unwrap().as_ref(), Some(&early));
    f.store.put_summary(put(&f, 1, 2, "late")).await.unwrap();
    assert_eq!(f.store.turn_summary(&waiting.id).await.unwrap(), Some(early));
}

/// Positions and texts are checked, repeats get the first answer, nothing is overwritten.
pub async fn a_summary_is_checked_and_every_version_is_kept<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let missing = f.store.get_summary(&f.conversation, None).await;
    assert!(matches!(missing, Err(Error::NotFound { kind: Kind::Summary, .. })), "{missing:?}");
    f.send("one").await;
    for (command, field) in
        [(put(&f, 0, 2, "x"), "through"), (put(&f, 0, 0, "x"), "through"), (put(&f, 0, 1, " "), "text")]
    {
        let refused = f.store.put_summary(command).await;
        assert!(
            matches!(&refused, Err(Error::Invalid { field: named, .. }) if *named == field),
            "{refused:?}"
        );
    }
    let request = |body| RequestKey { rpc: "PutSummary", ..key(&format!("put-{}", f.conversation), body) };
    let command = PutSummary { request: Some(request(1)), ..put(&f, 0, 1, "first") };
    let first = f.store.put_summary(command.clone()).await.unwrap();
    let second = f.store.put_summary(put(&f, 1, 1, "second")).await.unwrap();
    assert_eq!(f.store.put_summary(command).await.unwrap(), first, "a repeat gets the first answer");
    let other = PutSummary { request: Some(request(2)), ..put(&f, 2, 1, "third") };
    assert_conflict!(f.store.put_summary(other).await, Conflict::RequestIdReused);
    assert_eq!(f.store.get_summary(&f.conversation, Some(1)).await.unwrap(), first);
    assert_eq!(f.store.get_summary(&f.conversation, None).await.unwrap(), second);
    assert!(f.store.get_summary(&f.conversation, Some(3)).await.is_err());
}

/// A person's word is repeatable, is told to followers, and takes nothing back.
pub async fn s16_marking_unusable_is_repeatable_and_told<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let session = f.arrange(&turn).await;
    let request = RequestKey { rpc: "MarkSessionUnusable", ..key(&format!("mark-{}", fresh()), 1) };
    let command =
        crate::command::MarkSessionUnusable { request: Some(request), ..mark(&session.id, "it dreams") };
    let refused = f.store.mark_session_unusable(command.clone()).await;
    assert_conflict!(refused, Conflict::TurnInProgress);
    f.close(&turn, Outcome::Completed, Some("done")).await;
    let marked = f.store.mark_session_unusable(command.clone()).await.unwrap();
    assert_eq!(marked.state, SessionState::Unusable("it dreams".into()));
    // Also while the next turn runs: the call was made before.
    let next = f.send("two").await.turn;
    assert_eq!(f.store.mark_session_unusable(command).await.unwrap().state, marked.state);
    // Its new session stands in for the marked one, and the one after that for nothing.
    assert_eq!(f.arrange(&next).await.replaces, Some(session.id.clone()));
    f.close(&next, Outcome::Completed, None).await;
    let after = f.send("three").await.turn;
    assert_eq!(f.arrange(&after).await.replaces, None);
    let told = facts(&f).await;
    let told = told
        .iter()
        .filter(|f| matches!(f, Fact::SessionUnusable { session_id, .. } if *session_id == session.id));
    assert_eq!(told.count(), 1);
}

/// The context of a retry reaches beyond its message: when the engine took it, it has the failed try's text, too.
pub async fn what_was_given_beside_a_message_is_not_given_again<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let first = f.send("one").await.turn;
    let session = f.arrange(&first).await;
    f.accepted(&first, 1).await;
    f.store.close_turn(close(&first, Outcome::Failed(error()), Some("half"))).await.unwrap();
    let watermark = async || f.store.get_session(&session.id).await.unwrap().watermark;
    assert_eq!(watermark().await, Position(1), "whether the engine kept the half is not known");
    let retry = RetryTurn {
        request: None,
        turn_id: first.id.clone(),
        new_turn_id: turn_id(),
        surface: first.surface,
        time: now(),
    };
    let second = f.store.retry_turn(retry).await.unwrap();
    let pick = SessionPick::Existing(session.id.clone());
    f.store.choose_session(ChooseSession { owner: owner(&second), pick, time: now() }).await.unwrap();
    let opening = Opening {
        origin: Origin::Resumed,
        prompt: PromptUse::Unchanged,
        summary: false,
        history: 1,
        omitted: 0,
        through: Some(Position(2)),
    };
    let record = RecordOpening {
        owner: owner(&second),
        session_id: session.id.clone(),
        opening,
        native_ref: None,
        events: Vec::new(),
        time: now(),
    };
    f.store.record_opening(record).await.unwrap();
    assert_eq!(watermark().await, Position(1), "an opening gives nothing yet");
    f.accepted(&second, 1).await;
    assert_eq!(watermark().await, Position(2));
}
