//! What a journal says about its turn: a pure fold over its records, the same live and after a restart.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use roundhouse_proto::engine::v1::{
    EventBody, TerminalEvent, event_body::Kind, evidence_event::Point, notice_event, phase_event::Phase,
};

use crate::{
    error::Error,
    ids,
    journal::{
        AnswerMark, MessageMark, OpenedMark, PermissionMark, ProcessOpen, Record, SessionOpen, Source,
        StopCause, TurnOpen,
    },
    request,
};

/// A permission request of the turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Permission {
    /// Its deadline.
    pub mark: PermissionMark,
    /// What the runner decided.
    pub answer: Option<AnswerMark>,
    /// The event `permission_answer` is in the journal, whoever decided.
    pub told: bool,
    /// What it said.
    pub allowed: bool,
}

/// A turn as its journal tells it.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// The turn itself.
    pub open: Option<TurnOpen>,
    /// The current session.
    pub session: Option<SessionOpen>,
    /// The newest process of the current session.
    pub process: Option<ProcessOpen>,
    /// Processes started so far for the current session.
    pub starts: u32,
    /// How the current session was opened.
    pub opened: Option<OpenedMark>,
    /// Why the current session is unusable, when it is.
    pub unusable: Option<String>,
    /// The messages accepted, for all sessions.
    pub messages: Vec<MessageMark>,
    /// Messages that the event `phase{delivered}` tells of.
    pub delivered: BTreeSet<String>,
    /// Messages that the event `phase{accepted}` tells of.
    pub accepted: BTreeSet<String>,
    /// Why the turn is being stopped.
    pub stop: Option<StopCause>,
    /// Permission requests.
    pub permissions: BTreeMap<String, Permission>,
    /// Settle times that ran out, by spool: after which frame.
    pub settled: HashMap<String, u64>,
    /// Whether this process (its spool), which is gone, took the message is not known.
    pub doubt: Option<String>,
    /// The worktree before the turn.
    pub worktree: Option<String>,
    /// What is kept of the session, as its record says.
    pub kept: Option<String>,
    /// `evidence` before the turn is in the journal.
    pub evidence: bool,
    /// `evidence` after the turn is in the journal.
    pub evidence_after: bool,
    /// Warnings that are in the journal.
    pub warned: BTreeSet<String>,
    /// The last number.
    pub last: u64,
    /// The last journalled position per spool.
    pub(super) positions: HashMap<String, (u64, u32)>,
    /// What the journal has of the last journalled frame, and of which spool it is.
    pub(super) newest: Option<(String, u64, Vec<EventBody>)>,
    /// How the turn ended.
    pub terminal: Option<TerminalEvent>,
}

impl State {
    /// The state after these records.
    #[must_use]
    pub(crate) fn fold<'a>(records: impl IntoIterator<Item = &'a Record>) -> Self {
        let mut state = Self::default();
        for record in records {
            state.apply(record);
        }
        state
    }

    /// Takes one more record.
    pub(crate) fn apply(&mut self, record: &Record) {
        match record {
            Record::Open(open) => self.open = Some((**open).clone()),
            Record::Session(session) => {
                if self.session.as_ref().is_none_or(|known| known.session_id != session.session_id) {
                    self.opened = None;
                    self.starts = 0;
                    self.process = None;
                }
                self.session = Some((**session).clone());
                self.unusable = None;
            }
            Record::Process(process) => {
                self.starts += 1;
                self.process = Some((**process).clone());
            }
            Record::Begun { frame } => {
                if let Some(process) = &mut self.process {
                    process.after = *frame;
                }
            }
            Record::Opened(mark) => self.opened = Some(mark.clone()),
            Record::Unusable { session_id, reason } => {
                if self.session.as_ref().is_some_and(|session| session.session_id == *session_id) {
                    self.unusable = Some(reason.clone());
                    self.process = None;
                }
            }
            Record::Message(mark) => self.messages.push(mark.clone()),
            Record::Stop(cause) => {
                // A cancel beats a timer: it is what somebody asked for.
                if self.stop.is_none() || *cause == StopCause::Cancel {
                    self.stop = Some(*cause);
                }
            }
            Record::Permission(mark) => {
                self.permissions.entry(mark.request_id.clone()).or_insert_with(|| Permission {
                    mark: mark.clone(),
                    answer: None,
                    told: false,
                    allowed: false,
                });
            }
            Record::Answer(mark) => {
                if let Some(permission) = self.permissions.get_mut(&mark.request_id) {
                    permission.answer.get_or_insert_with(|| mark.clone());
                }
            }
            Record::Settled { spool, frame } => {
                self.settled.insert(spool.clone(), *frame);
            }
            Record::Dead { .. } => {}
            Record::Kept(record) => self.kept = Some(record.clone()),
            Record::Doubt { spool } => self.doubt = Some(spool.clone()),
            Record::Proved => self.doubt = None,
            Record::Worktree(worktree) => self.worktree = Some(worktree.clone()),
            Record::Skip { to } => self.last = self.last.max(*to),
            Record::Entry(entry) => {
                self.last = entry.number;
                if let Source::Frame { spool, frame, ordinal } = &entry.source {
                    self.positions.insert(spool.clone(), (*frame, *ordinal));
                    match &mut self.newest {
                        Some((known, number, bodies)) if known == spool && number == frame => {
                            bodies.push(entry.body.clone());
                        }
                        newest => *newest = Some((spool.clone(), *frame, vec![entry.body.clone()])),
                    }
                }
                self.apply_kind(entry.body.kind.as_ref());
            }
        }
    }

    fn apply_kind(&mut self, kind: Option<&Kind>) {
        match kind {
            Some(Kind::Phase(phase)) => match phase.phase() {
                Phase::Delivered => {
                    self.delivered.insert(phase.message_id.clone());
                }
                Phase::Accepted => {
                    self.accepted.insert(phase.message_id.clone());
                }
                Phase::Unspecified | Phase::Dispatched | Phase::Starting | Phase::Cancelling => {}
            },
            Some(Kind::PermissionAnswer(answer)) => {
                if let Some(permission) = self.permissions.get_mut(&answer.request_id) {
                    permission.told = true;
                    permission.allowed =
                        answer.decision() == roundhouse_proto::engine::v1::PermissionDecision::Allow;
                }
            }
            Some(Kind::Evidence(evidence)) => match evidence.point() {
                Point::After => self.evidence_after = true,
                Point::Before | Point::Unspecified => self.evidence = true,
            },
            Some(Kind::Notice(notice)) if notice.kind() == notice_event::Kind::Warning => {
                self.warned.insert(notice.message.clone());
            }
            Some(Kind::Terminal(terminal)) => self.terminal = Some(terminal.clone()),
            _ => {}
        }
    }

    /// Whether an output of a frame is in the journal already, or was left out of it for good: outputs come in order,
    /// so all up to the last journalled one are settled.
    #[must_use]
    pub(crate) fn has(&self, source: &Source) -> bool {
        match source {
            Source::Synthetic => false,
            Source::Frame { spool, frame, ordinal } => {
                self.positions.get(spool).is_some_and(|last| (*frame, *ordinal) <= *last)
            }
        }
    }

    /// As [`State::has`], for an output of a frame that is read again. A newer program may make more of a frame than the
    /// one did that journalled it, and then the places of its outputs are others: what the journal has of the newest frame
    /// is known by what it says, each event once.
    pub(crate) fn had(&mut self, source: &Source, body: &EventBody) -> bool {
        let before = self.has(source);
        let Source::Frame { spool, frame, .. } = source else { return before };
        let Some((known, number, bodies)) = &mut self.newest else { return before };
        if known != spool || number != frame {
            return before;
        }
        match bodies.iter().position(|told| told == body) {
            Some(at) => {
                bodies.remove(at);
                true
            }
            None => before,
        }
    }

    /// The messages for the current session that the engine is not known to have taken.
    #[must_use]
    pub(crate) fn undelivered(&self) -> Vec<MessageMark> {
        let Some(session) = &self.session else { return Vec::new() };
        self.messages
            .iter()
            .filter(|message| message.session_id == session.session_id)
            .filter(|message| !self.accepted.contains(&message.message_id))
            .cloned()
            .collect()
    }

    /// The messages for the current session.
    #[must_use]
    pub(crate) fn has_messages(&self) -> bool {
        let session = self.session.as_ref().map(|session| session.session_id.as_str());
        self.messages.iter().any(|message| Some(message.session_id.as_str()) == session)
    }

    /// The message of a delivery.
    #[must_use]
    pub(crate) fn message_of(&self, delivery_id: &str) -> Option<&MessageMark> {
        self.messages.iter().find(|message| message.delivery_id == delivery_id)
    }

    /// The answer to a Send of a message that was accepted before: its delivery id, or a refusal when the text is another
    /// one. The same in every state of the turn. None: it is not known.
    #[must_use]
    pub(crate) fn sent_before(&self, send: &request::Send) -> Option<Result<String, Error>> {
        let delivery_id = ids::delivery_id(&send.turn_id, &send.session_id, &send.message_id);
        let known = self.message_of(&delivery_id)?;
        Some(if known.text == send.text { Ok(delivery_id) } else { Err(Error::other_text()) })
    }

    /// The answer to an AnswerPermission that comes after the turn's end: not the first, and whether the tool was allowed.
    ///
    /// # Errors
    /// [`Error::PermissionNotFound`].
    pub(crate) fn answered_before(&self, request_id: &str) -> Result<(bool, bool), Error> {
        match self.permissions.get(request_id) {
            Some(known) => Ok((false, known.allowed)),
            None => Err(Error::PermissionNotFound(request_id.to_owned())),
        }
    }

    /// Whether any event has a number: then a client may know of the turn.
    #[must_use]
    pub(crate) fn has_events(&self) -> bool {
        self.last > 0
    }
}

#[cfg(test)]
mod tests {
    use roundhouse_proto::engine::v1::{EventBody, PhaseEvent};

    use super::*;
    use crate::journal::{Decider, Entry};

    fn entry(number: u64, frame: u64, ordinal: u32) -> Record {
        Record::Entry(Box::new(Entry {
            number,
            at_millis: 0,
            source: Source::Frame { spool: "spl_1".into(), frame, ordinal },
            body: EventBody {
                kind: Some(Kind::Phase(PhaseEvent {
                    phase: Phase::Accepted.into(),
                    message_id: "msg_1".into(),
                    detail: String::new(),
                })),
            },
        }))
    }

    #[test]
    fn s29_what_is_journalled_is_not_numbered_again() {
        let state = State::fold(&[entry(1, 4, 1)]);
        let at = |spool: &str, frame, ordinal| Source::Frame { spool: spool.into(), frame, ordinal };
        assert!(
            state.has(&at("spl_1", 4, 0)) && state.has(&at("spl_1", 4, 1)) && state.has(&at("spl_1", 3, 9))
        );
        assert!(!state.has(&at("spl_1", 4, 2)) && !state.has(&at("spl_1", 5, 0)));
        assert!(!state.has(&at("spl_2", 1, 0)) && !state.has(&Source::Synthetic));
        assert!(state.accepted.contains("msg_1") && state.last == 1 && state.has_events());
    }

    #[test]
    fn a_cancel_beats_a_timer_and_the_first_answer_holds() {
        let mark = PermissionMark { request_id: "p".into(), boot_id: String::new(), deadline_boottime_ns: 1 };
        let answer = |allow| {
            Record::Answer(AnswerMark {
                request_id: "p".into(),
                allow,
                feedback: String::new(),
                decider: Decider::Client,
            })
        };
        let state = State::fold(&[
            Record::Stop(StopCause::Idle),
            Record::Stop(StopCause::Cancel),
            Record::Stop(StopCause::Deadline),
            Record::Permission(mark),
            answer(true),
            answer(false),
        ]);
        assert_eq!(state.stop, Some(StopCause::Cancel));
        assert!(state.permissions["p"].answer.as_ref().unwrap().allow);
    }
}
