//! Cases of events, their effects, sessions, permissions and followers.

use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::event::{ChangeBody, Effect, EventKind, Fact, NewEvent};
use roundhouse_domain::limits::{MAX_BATCH, MAX_EVENT};
use roundhouse_domain::message::Position;
use roundhouse_domain::outcome::Outcome;
use roundhouse_domain::permission::{Decision, PermissionRequest, PermissionResult, SettledBy};
use roundhouse_domain::session::{NativeRef, Opening, Origin, PromptUse, SessionState};
use roundhouse_domain::turn::TurnState;

use super::Backend;
use super::fixture::{
    Fixture, assert_conflict, assert_error, error, event, fresh, key, mark, new_conversation, now, own,
    owner, session_id, terminal,
};
use crate::command::{
    AnswerPermission, AppendEvents, ChooseSession, Diagnosis, ListPermissions, ListSessions, RecordOpening,
    ReplaceSession, SessionPick,
};
use crate::error::Error;
use crate::hint::Hint;
use crate::store::Store;
use crate::view::AnswerOutcome;

/// A batch that comes twice, or overlaps, is stored once; our own events stand between the runner's.
pub async fn s29_events_are_stored_once_and_numbered_without_gap<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let batch = |from: u64, to: u64| (from..=to).map(|n| event(n, Effect::None)).collect::<Vec<_>>();
    let first = f.append(&turn, batch(1, 3)).await;
    assert_eq!((first.stored.len(), first.last_number), (3, 3));
    assert_eq!(f.append(&turn, vec![own("a note")]).await.stored.len(), 1);
    assert_eq!(f.append(&turn, vec![own("a note")]).await.stored.len(), 0);
    let overlap = f.append(&turn, batch(2, 5)).await;
    assert_eq!(overlap.stored.iter().map(|e| e.number.unwrap()).collect::<Vec<_>>(), [4, 5]);
    assert_eq!(f.append(&turn, batch(1, 5)).await.stored, []);
    let events = f.store.list_events(&turn.id, 0, 100).await.unwrap().items;
    assert_eq!(events.iter().map(|e| e.seq).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    let numbers: Vec<_> = events.iter().map(|e| e.number).collect();
    assert_eq!(numbers, [Some(1), Some(2), Some(3), None, Some(4), Some(5)]);
    assert_eq!(events[5].payload, b"event 5");
    assert!(events.windows(2).all(|w| w[0].cursor < w[1].cursor));
    let tail = f.store.list_events(&turn.id, 4, 1).await.unwrap();
    assert_eq!((tail.items[0].seq, tail.more), (5, true));
    let stored = f.turn(&turn).await;
    assert_eq!((stored.last_seq, stored.last_number), (6, 5));
}

/// A lost event is not papered over.
pub async fn a_gap_in_the_runners_numbers_is_refused<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let append = |events| AppendEvents { owner: owner(&turn), events, time: now() };
    let batch = vec![event(1, Effect::None), event(3, Effect::None)];
    let result = f.store.append_events(append(batch)).await;
    assert_conflict!(result, Conflict::EventGap { expected: 2, given: 3 });
    assert_eq!(f.turn(&turn).await.last_seq, 0, "nothing of the batch was stored");
    assert_eq!(f.store.list_events(&turn.id, 0, 10).await.unwrap().items, []);
}

/// Batches, payloads and the place of the terminal event.
pub async fn batches_have_limits<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let append = |events| AppendEvents { owner: owner(&turn), events, time: now() };
    let many = |n: usize| (1..=n as u64).map(|n| event(n, Effect::None)).collect::<Vec<_>>();
    for bad in [
        Vec::new(),
        many(MAX_BATCH + 1),
        vec![NewEvent { payload: vec![0; MAX_EVENT + 1], ..event(1, Effect::None) }],
        vec![terminal()],
        vec![own("")],
    ] {
        assert_error!(f.store.append_events(append(bad)).await, Error::Invalid { .. });
    }
    let mut close = super::fixture::close(&turn, Outcome::Completed, None);
    close.events = vec![event(1, Effect::None)];
    assert_error!(f.store.close_turn(close).await, Error::Invalid { .. });
    assert_eq!(f.append(&turn, many(MAX_BATCH)).await.stored.len(), MAX_BATCH);
    let biggest = NewEvent { payload: vec![7; MAX_EVENT], ..event(MAX_BATCH as u64 + 1, Effect::None) };
    assert_eq!(f.append(&turn, vec![biggest.clone()]).await.stored[0].payload, biggest.payload);
}

/// The engine's own proof moves the watermark; Send's answer moves nothing.
pub async fn accepted_moves_the_watermark_and_the_end_moves_it_again<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let session = f.arrange(&turn).await;
    assert_eq!(session.watermark, Position::START);
    let mark = async || f.store.get_session(&session.id).await.unwrap().watermark;
    f.append(&turn, vec![event(1, Effect::None)]).await;
    assert_eq!((mark().await, f.turn(&turn).await.state), (Position::START, TurnState::Dispatching));
    f.accepted(&turn, 2).await;
    let running = f.turn(&turn).await;
    assert_eq!((mark().await, running.state, running.accepted), (Position(1), TurnState::Running, true));
    f.close(&turn, Outcome::Completed, Some("answer")).await;
    assert_eq!(mark().await, Position(2));
    // An interrupted text may never have reached the engine's own files: it is given again.
    let next = f.send("two").await.turn;
    f.store.set_agent(&owner(&next), super::fixture::agent("coder", "Be brief.")).await.unwrap();
    let pick = SessionPick::Existing(session.id.clone());
    f.store.choose_session(ChooseSession { owner: owner(&next), pick, time: now() }).await.unwrap();
    f.accepted(&next, 1).await;
    f.close(&next, Outcome::Failed(error()), Some("half")).await;
    assert_eq!(mark().await, Position(3));
}

/// The native ref is stored when it is revealed.
pub async fn s13_the_native_ref_is_kept_when_the_turn_fails<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let session = f.arrange(&turn).await;
    let native_ref = NativeRef(b"native".to_vec());
    let effect = Effect::NativeRef { session_id: session.id.clone(), native_ref: native_ref.clone() };
    f.append(&turn, vec![event(1, effect)]).await;
    f.close(&turn, Outcome::Failed(error()), None).await;
    assert_eq!(f.store.get_session(&session.id).await.unwrap().native_ref, Some(native_ref));
}

/// A late checkpoint never turns a session active again, and the first reason stands.
pub async fn s16_unusable_is_for_ever<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let session = f.arrange(&turn).await;
    let id = || session.id.clone();
    let marking = f.store.mark_session_unusable(mark(&session.id, "outside")).await;
    assert_conflict!(marking, Conflict::TurnInProgress);
    f.append(
        &turn,
        vec![
            event(1, Effect::SessionUnusable { session_id: id(), reason: "torn".into() }),
            event(2, Effect::NativeRef { session_id: id(), native_ref: NativeRef(vec![1]) }),
            event(3, Effect::SessionUnusable { session_id: id(), reason: "later".into() }),
        ],
    )
    .await;
    f.close(&turn, Outcome::Failed(error()), None).await;
    let marked = f.store.mark_session_unusable(mark(&session.id, "outside")).await.unwrap();
    assert_eq!(marked.state, SessionState::Unusable("torn".into()));
    assert_eq!(marked.native_ref, None);
    let next = f.send("two").await.turn;
    let pick = SessionPick::Existing(session.id.clone());
    let choose = ChooseSession { owner: owner(&next), pick, time: now() };
    assert_conflict!(f.store.choose_session(choose).await, Conflict::SessionUnfit(_));
}

/// The replacement is bound in the same step; a repeat changes nothing.
pub async fn s61_a_replacement_is_bound_and_said_so<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let old = f.arrange(&turn).await;
    let command = ReplaceSession {
        owner: owner(&turn),
        unusable: old.id.clone(),
        reason: "context lost".into(),
        replacement: session_id(),
        events: vec![own("session unusable")],
        time: now(),
    };
    let new = f.store.replace_session(command.clone()).await.unwrap();
    assert_eq!((new.replaces.as_ref(), new.state.clone()), (Some(&old.id), SessionState::Active));
    assert_eq!(f.store.replace_session(command.clone()).await.unwrap(), new);
    let third = ReplaceSession { replacement: session_id(), ..command };
    assert_conflict!(f.store.replace_session(third).await, Conflict::AlreadySet("session"));
    let old = f.store.get_session(&old.id).await.unwrap();
    assert_eq!(old.state, SessionState::Unusable("context lost".into()));
    let opening = Opening {
        origin: Origin::Replaced,
        prompt: PromptUse::Initial,
        summary: false,
        history: 2,
        omitted: 0,
        through: Some(Position(2)),
    };
    let record = RecordOpening {
        owner: owner(&turn),
        session_id: new.id.clone(),
        opening: opening.clone(),
        native_ref: Some(NativeRef(vec![9])),
        events: vec![own("session replaced")],
        time: now(),
    };
    let opened = f.store.record_opening(record.clone()).await.unwrap();
    assert_eq!((opened.opening.as_ref(), opened.last_seq), (Some(&opening), 2));
    assert_eq!(f.store.record_opening(record.clone()).await.unwrap(), opened);
    assert_eq!(f.store.get_session(&new.id).await.unwrap().native_ref, Some(NativeRef(vec![9])));
    let wrong = RecordOpening { session_id: old.id, ..record };
    assert_conflict!(f.store.record_opening(wrong).await, Conflict::AlreadySet("session"));
    let changes = f.store.changes_after(&f.conversation, 0, 100).await.unwrap().items;
    let opened = changes.iter().filter(|c| matches!(c.body, ChangeBody::Fact(Fact::SessionOpened { .. })));
    assert_eq!(opened.count(), 1);
    let query =
        ListSessions { conversation_id: Some(f.conversation.clone()), limit: 10, ..Default::default() };
    let all = f.store.list_sessions(query.clone()).await.unwrap().items;
    assert_eq!(all.len(), 2);
    let rest = ListSessions {
        workspace_id: Some(f.workspace.id.clone()),
        after: Some(all[0].id.clone()),
        ..query.clone()
    };
    assert_eq!(f.store.list_sessions(rest).await.unwrap().items, all[1..]);
    let elsewhere = roundhouse_domain::id::WorkspaceId::parse("wsp_none").unwrap();
    let elsewhere = ListSessions { workspace_id: Some(elsewhere), ..query };
    assert_eq!(f.store.list_sessions(elsewhere).await.unwrap().items, []);
}

/// Another conversation's session, or one of another workspace, is refused.
pub async fn s10_sessions_are_not_shared<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let session = f.arrange(&turn).await;
    let again = ChooseSession { owner: owner(&turn), pick: SessionPick::New(session_id()), time: now() };
    assert_eq!(f.store.choose_session(again).await.unwrap().id, session.id, "a turn keeps its session");
    let mut stranger = f.message("two");
    stranger.conversation_id = new_conversation(&f.store).await;
    let stranger = f.store.accept_message(stranger).await.unwrap().turn;
    let pick = SessionPick::Existing(session.id.clone());
    let choose = ChooseSession { owner: owner(&stranger), pick, time: now() };
    assert_conflict!(f.store.choose_session(choose).await, Conflict::SessionUnfit(_));
    let without_agent =
        ChooseSession { owner: owner(&stranger), pick: SessionPick::New(session_id()), time: now() };
    assert_error!(f.store.choose_session(without_agent).await, Error::Invalid { field: "turn.agent", .. });
}

fn ask(id: &str) -> Effect {
    Effect::PermissionRequested(PermissionRequest {
        request_id: id.to_owned(),
        tool: "Bash".into(),
        title: "rm -r x".into(),
        deadline: None,
        body: id.as_bytes().to_vec(),
    })
}

fn answer(id: &str, decision: Decision) -> AnswerPermission {
    AnswerPermission {
        request: None,
        permission_id: id.to_owned(),
        decision,
        feedback: "careful".into(),
        actor: "ann".into(),
        time: now(),
    }
}

/// Requests make the turn wait, the last settled one lets it run; the first answer stands; the runner decides.
pub async fn permissions_move_the_turn_and_the_first_answer_stands<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    f.accepted(&turn, 1).await;
    let (a, b) = (format!("spl_{}.1", fresh()), format!("spl_{}.2", fresh()));
    let asked = f.append(&turn, vec![event(2, ask(&a)), event(3, ask(&b))]).await;
    assert_eq!((asked.state, asked.illegal.len()), (TurnState::WaitingForPermission, 0));
    assert_error!(
        f.store.answer_permission(answer("spl_none.1", Decision::Allow)).await,
        Error::NotFound { .. }
    );
    let keyed = AnswerPermission {
        request: Some(key(&format!("answer-{}", fresh()), 1)),
        ..answer(&a, Decision::Allow)
    };
    let first = f.store.answer_permission(keyed.clone()).await.unwrap();
    let AnswerOutcome::Recorded(recorded) = &first else { panic!("{first:?}") };
    assert_eq!(recorded.intent.as_ref().unwrap().decision, Decision::Allow);
    let second = f.store.answer_permission(answer(&a, Decision::Deny)).await.unwrap();
    assert_eq!(second, AnswerOutcome::AnsweredBefore(recorded.clone()));
    assert_eq!(f.turn(&turn).await.state, TurnState::WaitingForPermission, "an intent moves nothing");
    let pending = f.store.pending_answers().await.unwrap();
    assert_eq!(pending.iter().filter(|p| p.turn_id == turn.id).count(), 1);
    let settle = |id: &str| Effect::PermissionSettled {
        request_id: id.to_owned(),
        result: PermissionResult { decision: Decision::Deny, settled_by: SettledBy::Deadline },
    };
    assert_eq!(f.append(&turn, vec![event(4, settle(&a))]).await.state, TurnState::WaitingForPermission);
    assert_eq!(f.append(&turn, vec![event(5, settle(&b))]).await.state, TurnState::Running);
    assert_eq!(f.store.pending_answers().await.unwrap().iter().filter(|p| p.turn_id == turn.id).count(), 0);
    let late = f.store.answer_permission(answer(&b, Decision::Allow)).await.unwrap();
    assert!(
        matches!(late, AnswerOutcome::Settled(p) if p.result.as_ref().unwrap().decision == Decision::Deny)
    );
    assert_eq!(f.store.answer_permission(keyed).await.unwrap(), first, "the first answer to a request id");
    let query = ListPermissions { turn_id: Some(turn.id.clone()), limit: 1, ..Default::default() };
    let page = f.store.list_permissions(query.clone()).await.unwrap();
    assert_eq!((page.items[0].request.request_id.as_str(), page.more), (a.as_str(), true));
    assert_eq!(page.items[0].request.body, a.as_bytes());
    let rest = ListPermissions { after: Some(a), ..query.clone() };
    assert_eq!(f.store.list_permissions(rest).await.unwrap().items[0].request.request_id, b);
    let open = ListPermissions { open_only: true, ..query.clone() };
    assert_eq!(f.store.list_permissions(open.clone()).await.unwrap().items, []);
    let c = format!("spl_{}.3", fresh());
    f.append(&turn, vec![event(6, ask(&c))]).await;
    let conversation_id = Some(f.conversation.clone());
    let open = ListPermissions { conversation_id, turn_id: None, limit: 10, ..open };
    let listed = f.store.list_permissions(open.clone()).await.unwrap().items;
    assert_eq!(listed.iter().map(|p| &p.request.request_id).collect::<Vec<_>>(), [&c]);
    let elsewhere = ListPermissions { conversation_id: Some(new_conversation(&f.store).await), ..open };
    assert_eq!(f.store.list_permissions(elsewhere).await.unwrap().items, []);
    let unknown = ListPermissions { after: Some("spl_none.1".into()), ..query };
    assert_error!(f.store.list_permissions(unknown).await, Error::NotFound { .. });
}

/// A turn that ends leaves nothing to be answered.
pub async fn the_end_settles_open_permissions<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let id = format!("spl_{}.1", fresh());
    f.append(&turn, vec![event(1, ask(&id))]).await;
    f.cancel(&turn).await;
    f.close(&turn, Outcome::Cancelled(None), None).await;
    let permission = f.store.get_permission(&id).await.unwrap();
    let result = PermissionResult { decision: Decision::Deny, settled_by: SettledBy::TurnEnded };
    assert_eq!(permission.result, Some(result));
}

/// In pages of any size followers see the same, without gap.
pub async fn followers_read_every_change_in_order<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let waiting = f.send("two").await.turn;
    f.arrange(&turn).await;
    f.accepted(&turn, 1).await;
    f.close(&turn, Outcome::Completed, Some("answer")).await;
    let all = f.store.changes_after(&f.conversation, 0, 1_000).await.unwrap();
    let cursors: Vec<_> = all.items.iter().map(|c| c.cursor).collect();
    assert_eq!(cursors, (1..=all.newest).collect::<Vec<_>>());
    let mut seen = Vec::new();
    while let Some(change) =
        f.store.changes_after(&f.conversation, seen.len() as u64, 1).await.unwrap().items.into_iter().next()
    {
        seen.push(change);
    }
    assert_eq!(seen, all.items);
    let names: Vec<_> = all
        .items
        .iter()
        .map(|change| match &change.body {
            ChangeBody::Event(event) => event.kind.as_str(),
            ChangeBody::Fact(Fact::MessageStored { .. }) => "message",
            ChangeBody::Fact(Fact::TurnQueued { .. }) => "queued",
            ChangeBody::Fact(Fact::TurnPromoted { .. }) => "promoted",
            ChangeBody::Fact(Fact::TurnState { .. }) => "state",
            ChangeBody::Fact(Fact::SessionChosen { .. }) => "session",
            ChangeBody::Fact(_) => "other",
        })
        .collect();
    let expected = [
        "message", "promoted", "message", "queued", "session", "TEXT", "state", "message", "TERMINAL",
        "promoted",
    ];
    assert_eq!(names, expected);
    let last = all.items.last().unwrap();
    assert!(
        matches!(&last.body, ChangeBody::Fact(Fact::TurnPromoted { turn_id, .. }) if *turn_id == waiting.id)
    );
    assert_eq!(f.store.changes_after(&f.conversation, all.newest, 10).await.unwrap().items, []);
}

/// Pruning never takes what a running turn's followers need.
pub async fn cursors_that_are_pruned_or_unknown_are_told_apart<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let first = f.send("one").await.turn;
    f.close(&first, Outcome::Completed, Some("answer")).await;
    let second = f.send("two").await.turn;
    f.append(&second, vec![event(1, Effect::None)]).await;
    let all = f.store.changes_after(&f.conversation, 0, 1_000).await.unwrap();
    let unknown = f.store.changes_after(&f.conversation, all.newest + 1, 10).await;
    assert_conflict!(unknown, Conflict::CursorUnknown);
    assert_conflict!(f.store.prune_changes(&f.conversation, all.newest + 1).await, Conflict::CursorUnknown);
    let gone = f.store.prune_changes(&f.conversation, all.newest).await.unwrap();
    assert_eq!(gone, all.newest - 1, "the event of the open turn stays");
    assert_eq!(f.store.prune_changes(&f.conversation, 1).await.unwrap(), gone, "never back");
    let pruned = f.store.changes_after(&f.conversation, gone - 1, 10).await;
    assert_conflict!(pruned, Conflict::CursorPruned { .. });
    for from in [0, gone] {
        let kept = f.store.changes_after(&f.conversation, from, 10).await.unwrap();
        assert_eq!(kept.items, all.items[all.items.len() - 1..]);
    }
    f.append(&second, vec![event(2, Effect::None)]).await;
    assert_eq!(f.store.changes_after(&f.conversation, gone, 10).await.unwrap().items.len(), 2);
}

/// When the hint is there, so is what it hints at.
pub async fn hints_follow_commits<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let mut hints = f.store.hints();
    let turn = f.send("one").await.turn;
    f.append(&turn, vec![event(1, Effect::None)]).await;
    f.append(&turn, vec![event(1, Effect::None)]).await;
    f.cancel(&turn).await;
    let newest = f.store.changes_after(&f.conversation, 0, 1_000).await.unwrap().newest;
    let mut seen = Vec::new();
    let mut last = 0;
    while last < newest {
        let hint = hints.next().await.unwrap();
        if let Hint::Changed { conversation_id, cursor } = &hint {
            assert_eq!(conversation_id, &f.conversation);
            assert!(*cursor > last);
            last = *cursor;
        }
        seen.push(hint);
    }
    assert_eq!(seen[0], Hint::Promoted { turn_id: turn.id.clone() });
    assert_eq!(seen.iter().filter(|h| matches!(h, Hint::Changed { .. })).count(), 3, "{seen:?}");
}

/// What is said about an ended turn is kept aside.
pub async fn diagnosis_is_bounded_and_changes_nothing<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    f.close(&turn, Outcome::Lost(error()), None).await;
    let before = (f.turn(&turn).await, f.store.changes_after(&f.conversation, 0, 100).await.unwrap());
    let note = |size: usize| Diagnosis {
        turn_id: turn.id.clone(),
        epoch: turn.epoch,
        runner_id: Some(f.workspace.runner_id.clone()),
        payload: vec![0; size],
        time: now(),
    };
    for n in 0..1_002 {
        assert_eq!(f.store.record_diagnosis(note(10)).await.unwrap(), n < 1_000);
    }
    assert_error!(f.store.record_diagnosis(note(MAX_EVENT + 1)).await, Error::Invalid { .. });
    let after = (f.turn(&turn).await, f.store.changes_after(&f.conversation, 0, 100).await.unwrap());
    assert_eq!(before, after);
    let events = f.store.list_events(&turn.id, 0, 10).await.unwrap().items;
    assert_eq!(events.last().unwrap().kind, EventKind::Terminal);
}
