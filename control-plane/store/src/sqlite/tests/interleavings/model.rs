//! The model: one conversation as its callers know it, and the steps that change both it and the store.

use roundhouse_domain::conflict::Conflict;
use roundhouse_domain::event::{Change, Effect, EventSource, NewEvent};
use roundhouse_domain::message::Role;
use roundhouse_domain::outcome::{Outcome, Reason, TurnError};
use roundhouse_domain::permission::{Decision, PermissionRequest, PermissionResult, SettledBy};
use roundhouse_domain::turn::Turn;

use super::*;
use crate::command::{
    AgentMessage, AnswerPermission, AppendEvents, CloseTurn, ListPermissions, Owner, RequestCancel, RetryTurn,
};
use crate::error::Error;
use crate::view::{AnswerOutcome, CancelOutcome, CloseOutcome};

/// A small generator: the dice fall the same each time for one seed.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// A turn as its callers know it.
struct Known {
    id: String,
    /// Its message, by its number in [`Conversation::sent`].
    message: usize,
    state: TurnState,
    /// The runner's number of its last event.
    number: u64,
    /// Whether it was ever promoted.
    promoted: bool,
    /// Permissions: the id, the answer that counts, whether it is settled.
    permissions: Vec<(String, Option<Decision>, bool)>,
}

/// One conversation: what was told of it, and what must therefore be there.
pub(super) struct Conversation {
    n: u64,
    id: ConversationId,
    sent: Vec<AcceptMessage>,
    turns: Vec<Known>,
    /// Role, text and position of all messages by arrival.
    messages: Vec<(Role, String, Option<u64>)>,
    position: u64,
    /// A send whose caller got no answer, to be repeated after the crash; whether it was stored.
    unanswered: Option<(AcceptMessage, bool)>,
    /// What a follower saw live, page by page.
    seen: Vec<Change>,
    made: u64,
}

fn error() -> TurnError {
    TurnError::new(Reason::Process, "it broke", "retry").retryable()
}

fn event(source: EventSource, kind: EventKind, payload: &str, effect: Effect) -> NewEvent {
    NewEvent { source, kind, payload: payload.as_bytes().to_vec(), time: Timestamp(1), effect }
}

/// The terminal event says the state, so that a reader of the log alone knows it.
fn terminal(state: TurnState) -> NewEvent {
    let source = EventSource::Own { key: "terminal".into() };
    event(source, EventKind::Terminal, state.as_str(), Effect::None)
}

impl Conversation {
    pub(super) async fn create(store: &SqliteStore, n: u64) -> Self {
        let id = ConversationId::parse(format!("cnv_{n}")).unwrap();
        let command = CreateConversation {
            request: None,
            id: id.clone(),
            external_id: None,
            title: String::new(),
            agent_name: None,
            workspace_id: None,
            time: Timestamp(1),
        };
        store.create_conversation(command).await.unwrap();
        Self {
            n,
            id,
            sent: Vec::new(),
            turns: Vec::new(),
            messages: Vec::new(),
            position: 0,
            unanswered: None,
            seen: Vec::new(),
            made: 0,
        }
    }

    fn fresh(&mut self) -> String {
        self.made += 1;
        format!("{}x{}", self.n, self.made)
    }

    fn active_at(&self) -> Option<usize> {
        self.turns.iter().position(|turn| turn.state.is_active())
    }

    /// The turn that owns the lock, as the model knows it.
    pub(super) fn active(&self) -> Option<(String, TurnState)> {
        self.active_at().map(|at| (self.turns[at].id.clone(), self.turns[at].state))
    }

    /// The next turn in line gets the lock, if that is free.
    fn promote(&mut self) {
        if self.active_at().is_some() {
            return;
        }
        let Some(next) = self.turns.iter_mut().find(|turn| turn.state == TurnState::Queued) else { return };
        next.state = TurnState::Dispatching;
        next.promoted = true;
        let text = &self.sent[next.message].body;
        let message = self.messages.iter_mut().find(|(role, body, _)| *role == Role::User && body == text);
        let place = &mut message.unwrap().2;
        if place.is_none() {
            self.position += 1;
            *place = Some(self.position);
        }
    }

    /// One step of those that the dice choose. Answers what it was, and whether the process dies now.
    pub(super) async fn step(&mut self, store: &SqliteStore, dice: &mut Dice) -> (String, bool) {
        if self.unanswered.is_some() {
            return ("waits for the restart".into(), true);
        }
        match dice.roll(20) {
            0..5 => self.send(store, dice).await,
            5 => (self.repeat(store, dice).await, false),
            6..9 => (self.cancel(store, dice).await, false),
            9..12 => (self.append(store, dice).await, false),
            12 => (self.ask(store).await, false),
            13 => (self.answer(store, dice).await, false),
            14 => (self.retry(store).await, false),
            15 => (self.follow(store, dice).await, false),
            16 => (self.late(store, dice).await, false),
            _ => (self.end(store, dice).await, false),
        }
    }

    async fn send(&mut self, store: &SqliteStore, dice: &mut Dice) -> (String, bool) {
        let (text, request) = (self.fresh(), self.fresh());
        let message = AcceptMessage {
            request: RequestKey {
                id: RequestId::parse(format!("req-{request}")).unwrap(),
                rpc: "SendMessage",
                body_hash: [0; 32],
            },
            conversation_id: self.id.clone(),
            message_id: MessageId::parse(format!("msg_{text}")).unwrap(),
            turn_id: TurnId::parse(format!("trn_{text}")).unwrap(),
            actor: "ann".into(),
            body: format!("message {text}"),
            agent_name: None,
            workspace_id: None,
            surface: Trigger::Manual,
            time: Timestamp(1),
        };
        match dice.roll(32) {
            0 => {
                self.unanswered = Some((message, false));
                ("send, and die before the commit".into(), true)
            }
            1 => {
                store.accept_message(message.clone()).await.unwrap();
                self.accepted(message.clone());
                self.unanswered = Some((message, true));
                ("send, and die before the answer".into(), true)
            }
            _ => {
                let accepted = store.accept_message(message.clone()).await.unwrap();
                assert!(!accepted.repeated);
                self.accepted(message);
                let known = self.turns.last().unwrap();
                assert_eq!(
                    (accepted.turn.id.as_str(), accepted.turn.state),
                    (known.id.as_str(), known.state)
                );
                (format!("send {text}: {}", known.state), false)
            }
        }
    }

    fn accepted(&mut self, message: AcceptMessage) {
        self.turns.push(Known {
            id: message.turn_id.to_string(),
            message: self.sent.len(),
            state: TurnState::Queued,
            number: 0,
            promoted: false,
            permissions: Vec::new(),
        });
        self.messages.push((Role::User, message.body.clone(), None));
        self.sent.push(message);
        self.promote();
    }

    /// A caller without an answer asks again, in whatever state everything is.
    async fn repeat(&mut self, store: &SqliteStore, dice: &mut Dice) -> String {
        if self.sent.is_empty() {
            return "nothing to repeat".into();
        }
        let at = usize::try_from(dice.roll(self.sent.len() as u64)).unwrap();
        let again = store.accept_message(self.sent[at].clone()).await.unwrap();
        assert!(again.repeated);
        assert_eq!(again.turn.id, self.sent[at].turn_id);
        format!("repeat {}", again.turn.id)
    }

    async fn cancel(&mut self, store: &SqliteStore, dice: &mut Dice) -> String {
        if self.turns.is_empty() {
            return "nothing to cancel".into();
        }
        let at = usize::try_from(dice.roll(self.turns.len() as u64)).unwrap();
        let turn = &mut self.turns[at];
        let outcome = store.request_cancel(cancel(&turn.id)).await.unwrap();
        let expected = match turn.state {
            TurnState::Queued => {
                turn.state = TurnState::Cancelled;
                CancelOutcome::CancelledWaiting
            }
            state if state.is_terminal() => CancelOutcome::AlreadyEnded(state),
            _ => {
                turn.state = TurnState::Cancelling;
                CancelOutcome::Cancelling
            }
        };
        assert_eq!(outcome, expected, "{}", turn.id);
        format!("cancel {}: {outcome:?}", turn.id)
    }

    /// The runner's events; a batch that was stored before is offered again, as after a lost answer.
    async fn append(&mut self, store: &SqliteStore, dice: &mut Dice) -> String {
        let Some(at) = self.active_at() else { return "nothing runs".into() };
        let accept = dice.roll(2) == 0;
        let turn = &mut self.turns[at];
        let stored = store.get_turn(&TurnId::parse(turn.id.as_str()).unwrap()).await.unwrap();
        let message_id = self.sent[turn.message].message_id.clone();
        let events: Vec<_> = (1..=1 + dice.roll(3))
            .map(|n| {
                let effect = if accept && n == 1 {
                    Effect::Accepted { message_id: message_id.clone() }
                } else {
                    Effect::None
                };
                let source = EventSource::Runner { number: turn.number + n };
                let text = if matches!(effect, Effect::None) { "said" } else { replay::TOOK };
                event(source, EventKind::Text, text, effect)
            })
            .collect();
        let count = events.len();
        for again in [false, true] {
            let command = AppendEvents { owner: owner(&stored), events: events.clone(), time: Timestamp(1) };
            let appended = store.append_events(command).await.unwrap();
            assert_eq!(appended.stored.len(), if again { 0 } else { count });
            assert_eq!(appended.last_number, turn.number + count as u64);
        }
        turn.number += count as u64;
        if accept && turn.state == TurnState::Dispatching {
            turn.state = TurnState::Running;
        }
        format!("{count} events of {}: {}", turn.id, turn.state)
    }

    async fn ask(&mut self, store: &SqliteStore) -> String {
        let Some(at) = self.active_at() else { return "nothing runs".into() };
        let id = format!("spl_{}.1", self.fresh());
        let turn = &mut self.turns[at];
        let stored = store.get_turn(&TurnId::parse(turn.id.as_str()).unwrap()).await.unwrap();
        let request = PermissionRequest {
            request_id: id.clone(),
            tool: "Bash".into(),
            title: "run".into(),
            deadline: None,
            body: Vec::new(),
        };
        turn.number += 1;
        let source = EventSource::Runner { number: turn.number };
        let asked = event(source, EventKind::PermissionRequest, &id, Effect::PermissionRequested(request));
        let command = AppendEvents { owner: owner(&stored), events: vec![asked], time: Timestamp(1) };
        store.append_events(command).await.unwrap();
        turn.permissions.push((id, None, false));
        if turn.state != TurnState::Cancelling {
            turn.state = TurnState::WaitingForPermission;
        }
        format!("{} asks", turn.id)
    }

    /// Two answers that differ: the first one counts. Then, perhaps, the runner's word on it.
    async fn answer(&mut self, store: &SqliteStore, dice: &mut Dice) -> String {
        let asked = self.turns.iter().flat_map(|turn| &turn.permissions).count() as u64;
        if asked == 0 {
            return "nothing was asked".into();
        }
        let pick = usize::try_from(dice.roll(asked)).unwrap();
        let runners_word = dice.roll(2) == 0;
        let turn = self.turns.iter_mut().flat_map(|turn| {
            let id = turn.id.clone();
            (0..turn.permissions.len()).map(move |n| (id.clone(), n)).collect::<Vec<_>>()
        });
        let (turn_id, n) = turn.into_iter().nth(pick).unwrap();
        let turn = self.turns.iter_mut().find(|turn| turn.id == turn_id).unwrap();
        for decision in [Decision::Allow, Decision::Deny] {
            let (id, answered, settled) = &mut turn.permissions[n];
            let command = AnswerPermission {
                request: None,
                permission_id: id.clone(),
                decision,
                feedback: String::new(),
                actor: "ann".into(),
                time: Timestamp(1),
            };
            match store.answer_permission(command).await.unwrap() {
                AnswerOutcome::Recorded(_) => {
                    assert!(answered.is_none() && !*settled, "{id} was answered before");
                    *answered = Some(decision);
                }
                AnswerOutcome::AnsweredBefore(found) => {
                    assert_eq!(found.intent.map(|intent| intent.decision), *answered);
                    assert!(answered.is_some() && !*settled);
                }
                AnswerOutcome::Settled(found) => assert!(*settled, "{found:?}"),
            }
        }
        if runners_word && turn.state.is_active() && !turn.permissions[n].2 {
            let stored = store.get_turn(&TurnId::parse(turn_id.as_str()).unwrap()).await.unwrap();
            turn.number += 1;
            let (id, answered, settled) = &mut turn.permissions[n];
            let result = PermissionResult { decision: answered.unwrap(), settled_by: SettledBy::Answer };
            let effect = Effect::PermissionSettled { request_id: id.clone(), result };
            let source = EventSource::Runner { number: turn.number };
            let said = event(source, EventKind::PermissionAnswer, id.as_str(), effect);
            let command = AppendEvents { owner: owner(&stored), events: vec![said], time: Timestamp(1) };
            store.append_events(command).await.unwrap();
            *settled = true;
            let open = turn.permissions.iter().any(|(_, _, settled)| !settled);
            if turn.state == TurnState::WaitingForPermission && !open {
                turn.state = TurnState::Running;
            }
        }
        format!("answers to {}", turn.permissions[n].0)
    }

    async fn retry(&mut self, store: &SqliteStore) -> String {
        let Some(last) = self.turns.iter().rposition(|turn| turn.promoted) else {
            return "nothing to retry".into();
        };
        let new = self.fresh();
        let (old, message) = (&self.turns[last], self.turns[last].message);
        let command = RetryTurn {
            request: None,
            turn_id: TurnId::parse(old.id.as_str()).unwrap(),
            new_turn_id: TurnId::parse(format!("trn_{new}")).unwrap(),
            surface: Trigger::Manual,
            time: Timestamp(1),
        };
        // The last in the order of promotion may be an earlier one in the order of making, never a later one.
        let may = old.state.is_terminal() && old.state != TurnState::Completed;
        match store.retry_turn(command).await {
            Ok(_) => assert!(may, "{} is {}", old.id, old.state),
            Err(Error::Conflict(Conflict::Retry(_))) => {
                assert!(!may, "{} is {}", old.id, old.state);
                return "retry is refused".into();
            }
            Err(other) => panic!("{other}"),
        }
        self.turns.push(Known {
            id: format!("trn_{new}"),
            message,
            state: TurnState::Queued,
            number: 0,
            promoted: false,
            permissions: Vec::new(),
        });
        self.promote();
        format!("retry as {new}")
    }

    /// A follower reads on from its place.
    async fn follow(&mut self, store: &SqliteStore, dice: &mut Dice) -> String {
        let after = self.seen.last().map_or(0, |change| change.cursor);
        let limit = 1 + usize::try_from(dice.roll(9)).unwrap();
        let changes = store.changes_after(&self.id, after, limit).await.unwrap();
        let read = changes.items.len();
        self.seen.extend(changes.items);
        format!("{read} changes are read")
    }

    /// Whoever lost the lock, or acts on what has ended, changes nothing.
    async fn late(&mut self, store: &SqliteStore, dice: &mut Dice) -> String {
        if self.turns.is_empty() {
            return "nothing is late".into();
        }
        let at = usize::try_from(dice.roll(self.turns.len() as u64)).unwrap();
        let turn = &self.turns[at];
        let stored = store.get_turn(&TurnId::parse(turn.id.as_str()).unwrap()).await.unwrap();
        let mut stale = owner(&stored);
        stale.epoch = roundhouse_domain::id::Epoch(stale.epoch.0 + 1);
        let refused = store.close_turn(close(stale, Outcome::Completed, None)).await;
        assert!(matches!(refused, Err(Error::Conflict(Conflict::StaleEpoch { .. }))), "{refused:?}");
        if turn.state.is_terminal() {
            let outcome = close(owner(&stored), Outcome::Completed, Some("late".into()));
            let late = store.close_turn(outcome).await.unwrap();
            assert_eq!(late, CloseOutcome::AlreadyEnded(Box::new(stored.clone())));
        }
        assert_eq!(store.get_turn(&stored.id).await.unwrap(), stored);
        format!("late writes to {}", turn.id)
    }

    async fn end(&mut self, store: &SqliteStore, dice: &mut Dice) -> String {
        let Some(at) = self.active_at() else { return "nothing runs".into() };
        let said = match dice.roll(4) {
            0 => Outcome::Failed(error()),
            1 => Outcome::Cancelled(None),
            2 => Outcome::Lost(error()),
            _ => Outcome::Completed,
        };
        let answer = (dice.roll(2) == 0).then(|| format!("answer {}", self.fresh()));
        self.end_with(store, at, said, answer).await
    }

    async fn end_with(
        &mut self,
        store: &SqliteStore,
        at: usize,
        said: Outcome,
        answer: Option<String>,
    ) -> String {
        let stored = store.get_turn(&TurnId::parse(self.turns[at].id.as_str()).unwrap()).await.unwrap();
        let command = close(owner(&stored), said.clone(), answer.clone());
        let mut closed = store.close_turn(command).await.unwrap();
        let cancelling = self.turns[at].state == TurnState::Cancelling;
        let mut state = state_of(&said);
        if cancelling && matches!(state, TurnState::Completed | TurnState::Failed) {
            assert_eq!(closed, CloseOutcome::Overruled(TurnState::Cancelled));
            state = TurnState::Cancelled;
            let command = close(owner(&stored), Outcome::Cancelled(None), answer.clone());
            closed = store.close_turn(command).await.unwrap();
        }
        let CloseOutcome::Closed(closed) = closed else { panic!("not closed: {closed:?}") };
        self.turns[at].state = state;
        for (_, _, settled) in &mut self.turns[at].permissions {
            *settled = true;
        }
        if let Some(text) = answer {
            self.position += 1;
            self.messages.push((Role::Agent, text, Some(self.position)));
        }
        self.promote();
        assert_eq!(closed.turn.state, state);
        assert_eq!(closed.promoted.map(|turn| turn.id.to_string()), self.active().map(|(id, _)| id));
        format!("end of {}: {state}", closed.turn.id)
    }

    /// After a crash the caller without an answer asks again.
    pub(super) async fn recover(&mut self, store: &SqliteStore) {
        let Some((message, was_stored)) = self.unanswered.take() else { return };
        let again = store.accept_message(message.clone()).await.unwrap();
        assert_eq!(again.repeated, was_stored, "{}", message.turn_id);
        if !was_stored {
            self.accepted(message);
        }
    }

    /// Lets everything end.
    pub(super) async fn finish(&mut self, store: &SqliteStore, dice: &mut Dice) {
        self.recover(store).await;
        while let Some(at) = self.active_at() {
            let said = if dice.roll(3) == 0 { Outcome::Failed(error()) } else { Outcome::Completed };
            self.end_with(store, at, said, None).await;
        }
        assert!(self.turns.iter().all(|turn| turn.state.is_terminal()), "somebody waits for nobody");
    }

    /// What is stored is what was told, neither more nor less.
    pub(super) async fn check(&self, store: &SqliteStore) {
        let stored = store.list_messages(&self.id, 0, 1_000).await.unwrap().items;
        let told: Vec<_> = stored.iter().map(|m| (m.role, m.body.clone(), m.position.map(|p| p.0))).collect();
        assert_eq!(told, self.messages, "messages of {}", self.id);
        let seqs: Vec<_> = stored.iter().map(|m| m.seq).collect();
        assert_eq!(seqs, (1..=seqs.len() as u64).collect::<Vec<_>>());
        let turns = store.list_turns(&self.id, None, 1_000).await.unwrap().items;
        let there: Vec<_> =
            turns.iter().map(|t| (t.id.to_string(), t.state, t.last_number, t.promotion.is_some())).collect();
        let known: Vec<_> =
            self.turns.iter().map(|t| (t.id.clone(), t.state, t.number, t.promoted)).collect();
        assert_eq!(there, known, "turns of {}", self.id);
        // Every owner of the lock has an epoch of its own, larger than all before.
        let mut owners: Vec<&Turn> = turns.iter().filter(|turn| turn.promotion.is_some()).collect();
        owners.sort_by_key(|turn| turn.promotion);
        assert!(owners.is_sorted_by(|a, b| a.epoch < b.epoch), "epochs of {}", self.id);
        let query = ListPermissions {
            conversation_id: Some(self.id.clone()),
            open_only: true,
            limit: 1_000,
            ..ListPermissions::default()
        };
        let open = store.list_permissions(query).await.unwrap().items;
        let asked = self.turns.iter().flat_map(|turn| &turn.permissions);
        let unsettled: Vec<_> = asked.filter(|(_, _, settled)| !settled).cloned().collect();
        let listed: Vec<_> = open
            .into_iter()
            .map(|p| (p.request.request_id, p.intent.map(|intent| intent.decision), false))
            .collect();
        assert_eq!(listed, unsettled, "permissions of {}", self.id);
    }

    /// The stored log, folded through the machine, is what the rows say.
    pub(super) async fn check_fold(&self, store: &SqliteStore) {
        let all = store.changes_after(&self.id, 0, 1_000).await.unwrap();
        assert_eq!(all.items.len() as u64, all.newest, "one page holds it all");
        let turns = store.list_turns(&self.id, None, 1_000).await.unwrap().items;
        replay::check(&all.items, &turns);
    }

    /// A replay from the beginning is what was seen live, and tells of every turn what its row says.
    pub(super) async fn check_replay(&mut self, store: &SqliteStore) {
        let all = store.changes_after(&self.id, 0, 1_000).await.unwrap();
        assert_eq!(all.items.len() as u64, all.newest, "one page holds it all");
        assert_eq!(&all.items[..self.seen.len()], self.seen, "live and replay differ in {}", self.id);
        let mut states: Vec<(String, TurnState)> = Vec::new();
        let mut ends = std::collections::BTreeMap::<String, usize>::new();
        for change in &all.items {
            let (id, state) = match &change.body {
                ChangeBody::Fact(Fact::TurnQueued { turn_id, .. }) => (turn_id, TurnState::Queued),
                ChangeBody::Fact(Fact::TurnPromoted { turn_id, .. }) => (turn_id, TurnState::Dispatching),
                ChangeBody::Fact(Fact::TurnState { turn_id, state }) => (turn_id, *state),
                ChangeBody::Event(event) if event.kind == EventKind::Terminal => {
                    *ends.entry(event.turn_id.to_string()).or_default() += 1;
                    let text = String::from_utf8(event.payload.clone()).unwrap();
                    (&event.turn_id, TurnState::parse(&text).unwrap())
                }
                _ => continue,
            };
            match states.iter_mut().find(|(known, _)| known == id.as_str()) {
                Some((_, now)) => {
                    assert!(!now.is_terminal(), "{id} is {state} after its end");
                    *now = state;
                }
                None => states.push((id.to_string(), state)),
            }
        }
        let mut known: Vec<_> = self.turns.iter().map(|turn| (turn.id.clone(), turn.state)).collect();
        states.sort();
        known.sort();
        assert_eq!(states, known, "the replay of {}", self.id);
        assert!(ends.len() == known.len() && ends.values().all(|times| *times == 1), "{ends:?}");
    }
}

fn owner(turn: &Turn) -> Owner {
    Owner { turn_id: turn.id.clone(), epoch: turn.epoch }
}

fn state_of(outcome: &Outcome) -> TurnState {
    match outcome {
        Outcome::Completed => TurnState::Completed,
        Outcome::Failed(_) => TurnState::Failed,
        Outcome::Cancelled(_) => TurnState::Cancelled,
        Outcome::Lost(_) => TurnState::Lost,
    }
}

fn cancel(turn_id: &str) -> RequestCancel {
    RequestCancel {
        request: None,
        turn_id: TurnId::parse(turn_id).unwrap(),
        error: None,
        terminal: terminal(TurnState::Cancelled),
        time: Timestamp(1),
    }
}

fn close(owner: Owner, outcome: Outcome, answer: Option<String>) -> CloseTurn {
    let agent_message = answer.map(|body| AgentMessage {
        id: MessageId::parse(format!("msg_{}", body.replace(' ', "_"))).unwrap(),
        actor: "coder".into(),
        body,
        incomplete: outcome != Outcome::Completed,
    });
    let events = vec![terminal(state_of(&outcome))];
    CloseTurn {
        owner,
        outcome,
        agent_message,
        native_ref: None,
        usage: None,
        events,
        free_slot: true,
        time: Timestamp(1),
    }
}
