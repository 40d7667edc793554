//! Cases of runners, workspaces, slots and epochs.

use roundhouse_domain::conflict::{Conflict, Kind};
use roundhouse_domain::id::{ControlPlaneId, Epoch, WorkspaceId};
use roundhouse_domain::outcome::Outcome;
use roundhouse_domain::runner::RunnerClaims;
use roundhouse_domain::time::Timestamp;
use roundhouse_domain::turn::Turn;
use roundhouse_domain::workspace::Workspace;

use super::Backend;
use super::fixture::{
    Fixture, assert_conflict, assert_error, close, conversation_id, error, fresh, key, new_conversation, now,
    owner, runner_id, runner_info, turn_id,
};
use crate::command::{FreeWorkspace, RegisterRunner, RequestKey, SetDraining};
use crate::error::Error;
use crate::store::Store;
use crate::view::{FreeOutcome, SlotOutcome};

/// A turn of a conversation of its own in a workspace.
async fn turn_in<S: Store>(f: &Fixture<S>, workspace: &WorkspaceId) -> Turn {
    let mut message = f.message("work");
    message.conversation_id = new_conversation(&f.store).await;
    message.workspace_id = Some(workspace.clone());
    f.store.accept_message(message).await.unwrap().turn
}

async fn place<S: Store>(f: &Fixture<S>, path: &str) -> Workspace {
    let workspace = Workspace::new(f.workspace.runner_id.clone(), path);
    f.store.ensure_workspace(workspace, now()).await.unwrap()
}

/// One turn per directory, its parents and its children; the first promoted comes first.
pub async fn slots_hold_parents_and_children_and_go_by_promotion<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let (child, stranger) = (place(&f, "/w/child").await, place(&f, "/wide").await);
    let holder = turn_in(&f, &child.id).await;
    let take = async |turn: &Turn| f.store.take_slot(&owner(turn), now()).await.unwrap();
    assert_eq!(take(&holder).await, SlotOutcome::Taken);
    assert_eq!(take(&holder).await, SlotOutcome::Taken, "twice is once");
    let first = turn_in(&f, &f.workspace.id).await;
    let second = turn_in(&f, &f.workspace.id).await;
    let elsewhere = turn_in(&f, &stranger.id).await;
    assert_eq!(take(&elsewhere).await, SlotOutcome::Taken);
    match take(&first).await {
        SlotOutcome::Held(who) => {
            assert_eq!((who.turn_id, who.workspace), (holder.id.clone(), child.clone()))
        }
        other => panic!("{other:?}"),
    }
    f.close(&holder, Outcome::Completed, None).await;
    assert_eq!(take(&second).await, SlotOutcome::Behind(first.id.clone()));
    assert_eq!(take(&first).await, SlotOutcome::Taken);
    let view = f.store.get_workspace(&f.workspace.id).await.unwrap();
    assert_eq!((view.holder.unwrap().turn_id, view.waiting), (first.id.clone(), 1));
    let mut end = close(&first, Outcome::Completed, None);
    end.free_slot = false;
    f.store.close_turn(end).await.unwrap();
    assert!(matches!(take(&second).await, SlotOutcome::Held(who) if who.turn_id == first.id));
    assert!(f.store.free_slot(&owner(&first)).await.unwrap());
    assert_eq!(take(&second).await, SlotOutcome::Taken);
    let runner = Some(&f.workspace.runner_id);
    assert_eq!(f.store.held_slots(runner).await.unwrap().len(), 2);
    let mut seen = Vec::new();
    loop {
        let page = f.store.list_workspaces(runner, seen.last(), 2).await.unwrap();
        seen.extend(page.items.into_iter().map(|v| v.workspace.id));
        if !page.more {
            break;
        }
    }
    let mut all = vec![f.workspace.id.clone(), child.id, stranger.id];
    all.sort();
    assert_eq!(seen, all);
    let forged = Workspace { path: "/other".into(), ..f.workspace.clone() };
    assert_error!(
        f.store.ensure_workspace(forged, now()).await,
        Error::Invalid { field: "workspace.id", .. }
    );
}

/// A person frees what a lost turn holds, naming it.
pub async fn free_workspace_needs_the_right_turn_and_its_end<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let free = |turn: &Turn| FreeWorkspace {
        request: None,
        workspace_id: f.workspace.id.clone(),
        turn_id: turn.id.clone(),
        reason: "the host is gone".into(),
        actor: "ann".into(),
        time: now(),
    };
    assert_eq!(f.store.free_workspace(free(&turn)).await.unwrap(), FreeOutcome::WasFree);
    f.store.take_slot(&owner(&turn), now()).await.unwrap();
    assert_conflict!(f.store.free_workspace(free(&turn)).await, Conflict::TurnInProgress);
    f.close(&turn, Outcome::Lost(error()), None).await;
    let other = f.send("two").await.turn;
    assert_conflict!(f.store.free_workspace(free(&other)).await, Conflict::OtherHolder);
    let request = Some(key(&format!("free-{}", fresh()), 1));
    let command = FreeWorkspace { request, ..free(&turn) };
    assert_eq!(f.store.free_workspace(command.clone()).await.unwrap(), FreeOutcome::Freed);
    assert_eq!(f.store.free_workspace(command).await.unwrap(), FreeOutcome::Freed, "the first answer");
    assert_eq!(f.store.take_slot(&owner(&other), now()).await.unwrap(), SlotOutcome::Taken);
}

/// What a runner says of itself is kept as said.
pub async fn runners_register_beat_and_drain<B: Backend>(backend: &B) {
    let store = backend.open().await;
    let id = runner_id();
    assert_error!(store.heartbeat(&id, now()).await, Error::NotFound { kind: Kind::Runner, .. });
    let register = |time| RegisterRunner { info: runner_info(&id), claims: RunnerClaims::default(), time };
    let first = store.register_runner(register(now())).await.unwrap().runner;
    assert_eq!((&first.info, first.draining), (&runner_info(&id), false));
    let beat = store.heartbeat(&id, Timestamp(i64::MAX - 1)).await.unwrap();
    assert_eq!(store.heartbeat(&id, Timestamp(1)).await.unwrap().heartbeat_time, beat.heartbeat_time);
    let request = RequestKey { rpc: "DrainRunner", ..key(&format!("drain-{id}"), 1) };
    let drain = |draining, request: Option<&RequestKey>| SetDraining {
        request: request.cloned(),
        runner_id: id.clone(),
        draining,
        time: now(),
    };
    assert!(!store.answered_before(&request).await.unwrap());
    assert!(store.set_draining(drain(true, Some(&request))).await.unwrap().draining);
    assert!(store.answered_before(&request).await.unwrap());
    assert_conflict!(
        store.answered_before(&RequestKey { body_hash: [9; 32], ..request.clone() }).await,
        Conflict::RequestIdReused
    );
    assert!(!store.set_draining(drain(false, None)).await.unwrap().draining);
    assert!(!store.set_draining(drain(true, Some(&request))).await.unwrap().draining, "a late repeat");
    store.set_draining(drain(true, None)).await.unwrap();
    let again = store.register_runner(register(now())).await.unwrap().runner;
    assert!(!again.draining, "registering again ends draining");
    assert_eq!(again.create_time, first.create_time);
    assert!(again.register_time > first.register_time);
    assert_eq!(store.get_runner(&id).await.unwrap(), again);
    assert!(store.list_runners().await.unwrap().contains(&again));
}

/// After a restored backup our counters would be lower for ever.
pub async fn a_runners_claims_raise_epochs<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    let register = async |epoch: u64| {
        let stranger = (conversation_id(), Epoch(3));
        let claims = RunnerClaims {
            epochs: vec![(f.conversation.clone(), Epoch(epoch)), stranger.clone()],
            turns: vec![turn.id.clone(), turn_id()],
        };
        let command = RegisterRunner { info: runner_info(&f.workspace.runner_id), claims, time: now() };
        let reconciled = f.store.register_runner(command).await.unwrap().reconciled;
        assert_eq!(reconciled.unknown.epochs, [stranger]);
        assert_eq!(reconciled.unknown.turns.len(), 1);
        reconciled.raised
    };
    assert_eq!(register(turn.epoch.0).await, [], "the owner itself is no reason");
    assert_eq!(f.turn(&turn).await.epoch, turn.epoch);
    let raised = register(turn.epoch.0 + 10).await;
    assert_eq!(raised, [(turn.id.clone(), Epoch(turn.epoch.0 + 11))]);
    let now_owner = f.turn(&turn).await;
    assert_eq!(now_owner.epoch, raised[0].1);
    assert_conflict!(f.store.take_slot(&owner(&turn), now()).await, Conflict::StaleEpoch { .. });
    f.close(&now_owner, Outcome::Completed, None).await;
    register(turn.epoch.0 + 50).await;
    assert!(f.send("two").await.turn.epoch > Epoch(turn.epoch.0 + 50));
}

/// The runner keeps a result until it is told that it is stored.
pub async fn ended_turns_wait_for_acknowledgement<B: Backend>(backend: &B) {
    let f = Fixture::new(backend).await;
    let turn = f.send("one").await.turn;
    f.arrange(&turn).await;
    assert_conflict!(f.store.acknowledge_turn(&turn.id, now()).await, Conflict::TurnInProgress);
    f.close(&turn, Outcome::Completed, None).await;
    let runner = &f.workspace.runner_id;
    let waiting = f.store.unacknowledged_turns(runner).await.unwrap();
    assert_eq!(waiting.iter().map(|t| &t.id).collect::<Vec<_>>(), [&turn.id], "S50");
    assert_eq!(f.store.unacknowledged_turns(&runner_id()).await.unwrap(), []);
    f.store.acknowledge_turn(&turn.id, Timestamp(7)).await.unwrap();
    f.store.acknowledge_turn(&turn.id, Timestamp(9)).await.unwrap();
    assert_eq!(f.turn(&turn).await.acknowledge_time, Some(Timestamp(7)));
    assert_eq!(f.store.unacknowledged_turns(runner).await.unwrap(), []);
}

/// The first candidate wins, also after a restart.
pub async fn the_control_plane_id_is_made_once<B: Backend>(backend: &B) {
    let store = backend.open().await;
    let id = |n: u64| ControlPlaneId::parse(format!("ctl_{n}")).unwrap();
    let first = store.control_plane_id(id(fresh())).await.unwrap();
    assert_eq!(store.control_plane_id(id(fresh())).await.unwrap(), first);
    store.close().await;
    assert_eq!(backend.open().await.control_plane_id(id(fresh())).await.unwrap(), first);
}
