//! Cases of turns: promotion, ends, cancel, epochs, retry.

use roundhouse_domain::agent_file::Trigger;
use roundhouse_domain::conflict::{Conflict, Kind};
use roundhouse_domain::event::Effect;
use roundhouse_domain::id::Epoch;
use roundhouse_domain::message::{Position, Role};
use roundhouse_domain::outcome::Outcome;
use roundhouse_domain::turn::{RetryRefusal, TurnState};
use roundhouse_domain::usage::{ModelUsage, Usage};

use super::Backend;
use super::fixture::{
    Fixture, agent, assert_conflict, assert_error, cancel, close, error, event, fresh, key, new_conversation,
    now, owner, session_id, turn_id,
};
use crate::command::{
    AppendEvents, ArrangeTurn, ChooseSession, Owner, RequestCancel, RetryTurn, SessionPick,
};
use crate::error::Error;
use crate::store::Store;
use crate::view::{ArrangeOutcome, CancelOutcome, CloseOutcome, SlotOutcome};

/// After success, failure, cancel and loss, in the order of arrival, each with its own agent.
pub async fn s06_the_next_turn_is_promoted_after_every_end<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let mut running = f.send("0").await.turn;
    let mut waiting = Vec::new();
    for n in 1..=4 {
        let mut message = f.message(&n.to_string());
        message.agent_name = (n % 2 == 0).then(|| format!("agent-{n}"));
        waiting.push(f.store.accept_message(message).await.unwrap().turn);
    }
    let ends =
        [Outcome::Completed, Outcome::Failed(error()), Outcome::Cancelled(None), Outcome::Lost(error())];
    for (end, next) in ends.into_iter().zip(&waiting) {
        let promoted = f.close(&running, end.clone(), None).await.promoted.unwrap();
        assert_eq!((&promoted.id, promoted.state), (&next.id, TurnState::Dispatching), "after {end:?}");
        assert!(promoted.epoch > running.epoch);
        assert!(promoted.promotion > running.promotion);
        running = promoted;
    }
    let agents: Vec<_> = f.store.list_turns(&f.conversation, None, 10).await.unwrap().items;
    let agents: Vec<_> = agents.iter().map(|t| t.agent_name.as_deref().unwrap()).collect();
    // One without an agent takes the one the conversation used last.
    assert_eq!(agents, ["coder", "coder", "agent-2", "agent-2", "agent-4"]);
    assert_eq!(f.close(&running, Outcome::Completed, None).await.promoted, None);
    assert_eq!(f.store.open_turns().await.unwrap(), vec![]);
}

/// A turn that was cancelled waiting has a terminal event, no position, and does not hold up others.
pub async fn s06_a_cancelled_waiting_turn_lets_the_next_one_through<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let running = f.send("0").await.turn;
    let (second, third) = (f.send("1").await, f.send("2").await);
    assert_eq!(f.cancel(&second.turn).await, CancelOutcome::CancelledWaiting);
    let ended = f.turn(&second.turn).await;
    assert_eq!((ended.state, ended.last_seq, ended.promotion), (TurnState::Cancelled, 1, None));
    assert!(ended.end_time.is_some());
    let closed = f.close(&running, Outcome::Completed, None).await;
    assert_eq!(closed.promoted.unwrap().id, third.turn.id);
    assert_eq!(f.store.get_message(&second.message.id).await.unwrap().position, None);
    assert_eq!(f.store.get_message(&third.message.id).await.unwrap().position, Some(Position(2)));
}

/// Outcome, answer, usage and events are there when the next turn is promoted.
pub async fn s04_the_next_turn_sees_what_the_one_before_saved<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let first = f.send("one").await.turn;
    let session = f.arrange(&first).await;
    f.accepted(&first, 1).await;
    let second = f.send("two").await.turn;
    let mut command = close(&first, Outcome::Completed, Some("answer"));
    command.events.insert(0, event(2, Effect::None));
    let CloseOutcome::Closed(closed) = f.store.close_turn(command).await.unwrap() else {
        panic!("not closed")
    };
    assert_eq!(closed.stored.iter().map(|e| e.seq).collect::<Vec<_>>(), [2, 3]);
    let answer = closed.agent_message.unwrap();
    assert_eq!((answer.role, answer.position, answer.incomplete), (Role::Agent, Some(Position(2)), false));
    assert_eq!(closed.turn.agent_message_id, Some(answer.id));
    let dispatch = f.store.begin_dispatch(&second.id).await.unwrap();
    assert_eq!(dispatch.sessions.len(), 1);
    assert_eq!(dispatch.sessions[0].id, session.id);
    assert_eq!(dispatch.sessions[0].watermark, Position(2));
    assert_eq!(dispatch.message.position, Some(Position(3)));
    assert_eq!(dispatch.workspace.as_ref(), Some(&f.workspace));
    assert_eq!(dispatch.turn, closed.promoted.unwrap());
}

/// No late input changes how a turn ended.
pub async fn s07_an_ended_turn_absorbs<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    f.arrange(&turn).await;
    let ended = f.close(&turn, Outcome::Failed(error()), Some("so far")).await.turn;
    let late = f.try_close(&turn, Outcome::Completed, Some("late")).await;
    assert_eq!(late, CloseOutcome::AlreadyEnded(Box::new(ended.clone())));
    let append = AppendEvents { owner: owner(&turn), events: vec![event(1, Effect::None)], time: now() };
    assert_conflict!(f.store.append_events(append).await, Conflict::TurnEnded(TurnState::Failed));
    assert_eq!(f.cancel(&turn).await, CancelOutcome::AlreadyEnded(TurnState::Failed));
    let result = f.store.set_agent(&owner(&turn), agent("other", "x")).await;
    assert_conflict!(result, Conflict::TurnEnded(_));
    assert_conflict!(f.store.take_slot(&owner(&turn), now()).await, Conflict::TurnEnded(_));
    assert_conflict!(f.store.begin_dispatch(&turn.id).await, Conflict::TurnEnded(_));
    assert_eq!(f.turn(&turn).await, ended);
    assert_eq!(f.store.list_messages(&f.conversation, 0, 10).await.unwrap().items.len(), 2);
}

/// Once CANCELLING is stored, an engine that finished meanwhile keeps its text and the turn ends CANCELLED.
pub async fn s07_a_cancelled_turn_ends_cancelled_or_lost<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    for (said, stored) in
        [(Outcome::Completed, TurnState::Cancelled), (Outcome::Failed(error()), TurnState::Cancelled)]
    {
        let turn = f.send("stop me").await.turn;
        f.accepted(&turn, 1).await;
        assert_eq!(f.cancel(&turn).await, CancelOutcome::Cancelling);
        assert_eq!(f.turn(&turn).await.state, TurnState::Cancelling);
        let overruled = f.try_close(&turn, said, Some("text")).await;
        assert_eq!(overruled, CloseOutcome::Overruled(stored));
        assert_eq!(f.turn(&turn).await.last_seq, 1, "nothing was stored");
        let closed = f.close(&turn, Outcome::Cancelled(None), Some("text")).await;
        assert_eq!(closed.turn.state, TurnState::Cancelled);
        assert_eq!(closed.agent_message.unwrap().body, "text");
    }
    let turn = f.send("lose me").await.turn;
    f.cancel(&turn).await;
    assert_eq!(f.close(&turn, Outcome::Lost(error()), None).await.turn.state, TurnState::Lost);
}

/// A cancel is defined at every time, and repeatable by its request id.
pub async fn s44_cancel_twice_after_the_end_and_for_an_unknown_turn<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    assert_error!(f.store.request_cancel(cancel(&turn_id())).await, Error::NotFound { kind: Kind::Turn, .. });
    let turn = f.send("one").await.turn;
    let name = format!("cancel-{}", fresh());
    let keyed = || RequestCancel { request: Some(key(&name, 1)), ..cancel(&turn.id) };
    assert_eq!(f.store.request_cancel(keyed()).await.unwrap(), CancelOutcome::Cancelling);
    assert_eq!(f.cancel(&turn).await, CancelOutcome::Cancelling);
    f.close(&turn, Outcome::Cancelled(None), None).await;
    assert_eq!(f.cancel(&turn).await, CancelOutcome::AlreadyEnded(TurnState::Cancelled));
    assert_eq!(f.store.request_cancel(keyed()).await.unwrap(), CancelOutcome::Cancelling, "the first answer");
    let next = f.send("two").await.turn;
    f.cancel(&turn).await;
    assert_eq!(
        f.turn(&next).await.state,
        TurnState::Dispatching,
        "a late cancel never touches the next turn"
    );
}

/// Every write on behalf of a turn is fenced.
pub async fn s48_a_stale_epoch_changes_nothing<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let before = f.turn(&turn).await;
    let stale = Owner { turn_id: turn.id.clone(), epoch: Epoch(turn.epoch.0 + 1) };
    let append = AppendEvents { owner: stale.clone(), events: vec![event(1, Effect::None)], time: now() };
    assert_conflict!(f.store.append_events(append).await, Conflict::StaleEpoch { .. });
    let mut end = close(&turn, Outcome::Completed, Some("no"));
    end.owner = stale.clone();
    assert_conflict!(f.store.close_turn(end).await, Conflict::StaleEpoch { .. });
    assert_conflict!(f.store.take_slot(&stale, now()).await, Conflict::StaleEpoch { .. });
    assert_conflict!(f.store.free_slot(&stale).await, Conflict::StaleEpoch { .. });
    assert_conflict!(f.store.set_agent(&stale, agent("a", "b")).await, Conflict::StaleEpoch { .. });
    let pick = SessionPick::New(session_id());
    let choose = ChooseSession { owner: stale.clone(), pick, time: now() };
    assert_conflict!(f.store.choose_session(choose).await, Conflict::StaleEpoch { .. });
    let result = f.store.assign_workspace(&stale, &f.workspace.id).await;
    assert_conflict!(result, Conflict::StaleEpoch { .. });
    assert_eq!(f.turn(&turn).await, before);
}

/// What a lost worker still says is stale at once; its workspace is not given to others.
pub async fn s48_a_lost_turn_moves_the_epoch_and_keeps_its_slot<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    assert_eq!(f.store.take_slot(&owner(&turn), now()).await.unwrap(), SlotOutcome::Taken);
    let lost =
        f.store.mark_lost(owner(&turn), error(), None, super::fixture::terminal(), now()).await.unwrap();
    assert!(matches!(lost, CloseOutcome::Closed(_)));
    let conversation = f.store.get_conversation(&f.conversation).await.unwrap().conversation;
    assert!(conversation.epoch > turn.epoch);
    let held = f.store.held_slots(Some(&f.workspace.runner_id)).await.unwrap();
    assert_eq!((held.len(), held[0].state), (1, TurnState::Lost));
    let next = f.send("two").await.turn;
    assert!(next.epoch > conversation.epoch);
    match f.store.take_slot(&owner(&next), now()).await.unwrap() {
        SlotOutcome::Held(holder) => {
            assert_eq!((holder.turn_id, holder.state), (turn.id.clone(), TurnState::Lost))
        }
        other => panic!("{other:?}"),
    }
    assert!(f.store.free_slot(&owner(&turn)).await.unwrap(), "its runner is back");
    assert!(!f.store.free_slot(&owner(&turn)).await.unwrap());
    assert_eq!(f.store.take_slot(&owner(&next), now()).await.unwrap(), SlotOutcome::Taken);
}

/// Slot, agent and session are one step, and a step that cannot be taken leaves nothing.
pub async fn an_arrangement_is_all_or_nothing<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    assert!(f.store.begin_dispatch(&turn.id).await.unwrap().slot_free);
    let arrange = |turn: &roundhouse_domain::turn::Turn, pick: SessionPick| ArrangeTurn {
        owner: owner(turn),
        agent: Some(agent("reviewer", "Look.")),
        pick,
        time: now(),
    };
    let unknown = arrange(&turn, SessionPick::Existing(session_id()));
    assert!(f.store.arrange_turn(unknown).await.is_err());
    assert_eq!(f.store.held_slots(None).await.unwrap(), [], "the slot was not kept");
    assert_eq!(f.turn(&turn).await.agent, None);
    let pick = SessionPick::New(session_id());
    let first = f.store.arrange_turn(arrange(&turn, pick)).await.unwrap();
    let ArrangeOutcome::Arranged(arranged) = &first else { panic!("{first:?}") };
    assert_eq!(arranged.0.agent.as_ref().map(|agent| agent.name.as_str()), Some("reviewer"));
    assert_eq!(arranged.0.session_id.as_ref(), Some(&arranged.1.id));
    assert_eq!(f.turn(&turn).await, arranged.0);
    assert_eq!(f.store.held_slots(None).await.unwrap().len(), 1);
    let again = f.store.arrange_turn(arrange(&turn, SessionPick::New(session_id()))).await.unwrap();
    let ArrangeOutcome::Arranged(again) = again else { panic!("{again:?}") };
    assert_eq!(again.1.id, arranged.1.id, "the first one stands");
    // Another conversation in the same workspace waits, and has nothing.
    let mut message = f.message("two");
    message.conversation_id = new_conversation(&f.store).await;
    let other = f.store.accept_message(message).await.unwrap().turn;
    assert!(!f.store.begin_dispatch(&other.id).await.unwrap().slot_free);
    let waits = f.store.arrange_turn(arrange(&other, SessionPick::New(session_id()))).await.unwrap();
    assert!(matches!(waits, ArrangeOutcome::Waits(SlotOutcome::Held(_))), "{waits:?}");
    assert_eq!(f.turn(&other).await, other);
    let stale = Owner { epoch: Epoch(0), ..owner(&turn) };
    let stale = ArrangeTurn { owner: stale, ..arrange(&turn, SessionPick::New(session_id())) };
    assert_conflict!(f.store.arrange_turn(stale).await, Conflict::StaleEpoch { .. });
}

fn retry(turn: &roundhouse_domain::turn::Turn) -> RetryTurn {
    RetryTurn {
        request: None,
        turn_id: turn.id.clone(),
        new_turn_id: turn_id(),
        surface: Trigger::Manual,
        time: now(),
    }
}

/// The user message stands once, then the interrupted text, then the answer of the retry.
pub async fn retry_keeps_message_position_and_agent<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let first = f.send("question").await;
    f.arrange(&first.turn).await;
    f.accepted(&first.turn, 1).await;
    f.close(&first.turn, Outcome::Failed(error()), Some("half an ans")).await;
    let mut command = retry(&first.turn);
    let name = format!("retry-{}", fresh());
    command.request = Some(key(&name, 1));
    let second = f.store.retry_turn(command.clone()).await.unwrap();
    assert_eq!(second.state, TurnState::Dispatching);
    assert_eq!(second.retry_of.as_ref(), Some(&first.turn.id));
    assert_eq!(second.message_id, first.message.id);
    assert_eq!(second.agent.as_ref().unwrap().name, "coder", "S9: the same snapshot");
    assert!(second.epoch > first.turn.epoch);
    assert_eq!((second.session_id.as_ref(), second.accepted), (None, false));
    let repeat = f.store.retry_turn(RetryTurn { new_turn_id: turn_id(), ..command }).await.unwrap();
    assert_eq!(repeat.id, second.id);
    f.close(&second, Outcome::Completed, Some("an answer")).await;
    let history = f.store.history(&f.conversation, Position::START, 10).await.unwrap().items;
    let history: Vec<_> = history.iter().map(|m| (m.body.as_str(), m.incomplete)).collect();
    assert_eq!(history, [("question", false), ("half an ans", true), ("an answer", false)]);
    assert_conflict!(f.store.retry_turn(retry(&second)).await, Conflict::Retry(RetryRefusal::Completed));
}

/// The window closes with the next promotion; a turn that never started is sent again instead.
pub async fn retry_is_refused_once_a_later_turn_started<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let first = f.send("one").await.turn;
    assert_conflict!(f.store.retry_turn(retry(&first)).await, Conflict::Retry(RetryRefusal::NotEnded(_)));
    let (second, third) = (f.send("two").await.turn, f.send("three").await.turn);
    f.cancel(&third).await;
    f.close(&first, Outcome::Failed(error()), None).await;
    assert_conflict!(f.store.retry_turn(retry(&first)).await, Conflict::Retry(RetryRefusal::NotLast));
    assert_conflict!(f.store.retry_turn(retry(&third)).await, Conflict::Retry(RetryRefusal::NotLast));
    let second = f.turn(&second).await;
    f.close(&second, Outcome::Lost(error()), None).await;
    let again = f.store.retry_turn(retry(&second)).await.unwrap();
    assert_eq!(again.state, TurnState::Dispatching);
    assert_conflict!(f.store.retry_turn(retry(&second)).await, Conflict::Retry(RetryRefusal::NotLast));
}

/// Editing the file never alters a dispatched turn.
pub async fn s09_the_first_agent_snapshot_stands<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let first = f.store.set_agent(&owner(&turn), agent("coder", "one")).await.unwrap();
    let second = f.store.set_agent(&owner(&turn), agent("coder", "two")).await.unwrap();
    assert_eq!(first.agent, second.agent);
    assert_eq!(second.agent.unwrap().prompt(), "one");
    assert_conflict!(
        f.store.assign_workspace(&owner(&turn), &other_workspace(&f).await).await,
        Conflict::AlreadySet(_)
    );
}

async fn other_workspace<S: Store>(f: &Fixture<S>) -> roundhouse_domain::id::WorkspaceId {
    let runner = f.workspace.runner_id.clone();
    let other = roundhouse_domain::workspace::Workspace::new(runner, "/elsewhere");
    f.store.ensure_workspace(other, now()).await.unwrap().id
}

/// Failed turns count, too.
pub async fn usage_is_summed_over_turns<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let usage = |input| Usage {
        models: vec![ModelUsage {
            model: "m".into(),
            input_tokens: Some(input),
            output_tokens: Some(1),
            cost_nanos: Some(10),
            ..ModelUsage::default()
        }],
        complete: true,
    };
    let first = f.send("one").await.turn;
    f.accepted(&first, 1).await;
    f.append(&first, vec![event(2, Effect::Usage(usage(3)))]).await;
    assert_eq!(f.turn(&first).await.usage, usage(3));
    f.append(&first, vec![event(3, Effect::Usage(usage(5)))]).await;
    f.close(&first, Outcome::Failed(error()), None).await;
    let second = f.send("two").await.turn;
    f.accepted(&second, 1).await;
    let mut command = close(&second, Outcome::Completed, None);
    command.usage = Some(usage(7));
    f.store.close_turn(command).await.unwrap();
    let never_started = f.send("three").await.turn;
    f.close(&never_started, Outcome::Failed(error()), None).await;
    let total = f.store.usage_total(&f.conversation).await.unwrap();
    assert_eq!((total.models[0].input_tokens, total.models[0].cost_nanos), (Some(12), Some(20)));
    assert!(total.complete);
}

/// Pages of turns.
pub async fn turns_are_listed_oldest_first_in_pages<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let mut ids = Vec::new();
    for n in 0..5 {
        ids.push(f.send(&n.to_string()).await.turn.id);
    }
    let first = f.store.list_turns(&f.conversation, None, 3).await.unwrap();
    assert!(first.more);
    let last = first.items.last().unwrap().id.clone();
    let second = f.store.list_turns(&f.conversation, Some(&last), 3).await.unwrap();
    assert!(!second.more);
    let seen: Vec<_> = first.items.into_iter().chain(second.items).map(|t| t.id).collect();
    assert_eq!(seen, ids);
}
