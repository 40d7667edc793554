//! How a turn ends, and what is told then.

use crate::{
    event::{
        Answer, Decider, Decision, Event, Notice, NoticeKind, PermissionAnswered, TextEvent, TurnOutcome,
    },
    failure::{Failure, Reason},
    frame::Exit,
    limit::{self, BoundedText},
    translate::{DeliveryEnd, Output, TurnEnd},
};

use super::{super::classify, ClaudeTranslator, EngineState, Stage, UNSEEN, items::BlockKind};

impl ClaudeTranslator {
    /// Ends the turn if nothing is owed any more.
    pub(super) fn maybe_end(&mut self, out: &mut Vec<Output>) {
        if self.stage != Stage::Open || self.given.is_empty() {
            return;
        }
        let all_ended = self.given.iter().all(|given| given.end.is_some());
        let started = self.given.iter().any(|given| given.started);
        let idle = self.engine == EngineState::Idle;
        if !all_ended {
            // Idle with a result, but without the word on a delivery that the engine took: give it time.
            let all_started = self.given.iter().all(|given| given.started || given.end.is_some());
            if idle && all_started && self.result_since_start {
                self.start_settling(out);
            }
            return;
        }
        let stopped =
            self.interrupted && self.given.iter().all(|given| given.end == Some(DeliveryEnd::Cancelled));
        let result_owed = started && !self.result_since_start && !stopped;
        if !idle || result_owed {
            self.start_settling(out);
            return;
        }
        let outcome = self.outcome();
        self.finish(outcome, out);
    }

    fn start_settling(&mut self, out: &mut Vec<Output>) {
        if !self.settling {
            self.settling = true;
            out.push(Output::Settling);
        }
    }

    /// The settle time ran out: what is known has to do.
    pub(super) fn settled(&mut self, out: &mut Vec<Output>) {
        let notice = Notice::new(
            NoticeKind::Warning,
            "not_settled",
            "the engine said that it was done but did not become idle in time",
        );
        self.notice(notice, out);
        for given in self.given.iter_mut().filter(|given| given.end.is_none()) {
            given.end = Some(DeliveryEnd::Completed);
            out.push(Output::DeliveryEnded { delivery_id: given.id.clone(), end: DeliveryEnd::Completed });
        }
        let outcome = self.outcome();
        self.finish(outcome, out);
    }

    /// How the turn ended, by what the engine said.
    fn outcome(&self) -> TurnOutcome {
        let failed = |failure| TurnOutcome::Failed { failure };
        if let Some(failure) = &self.doomed {
            return failed(failure.clone());
        }
        if let Some(result) = self.last_result.as_ref().filter(|_| self.result_since_start) {
            return match result.is_error {
                false => TurnOutcome::Completed,
                true if result.aborted() && self.interrupted => TurnOutcome::Cancelled,
                true => failed(classify::result_failure(result, self.rejected_until)),
            };
        }
        if self.interrupted {
            return TurnOutcome::Cancelled;
        }
        if self.given.iter().any(|given| given.started) {
            return failed(Failure {
                native_code: Some("no_result".to_owned()),
                ..Failure::new(Reason::Process, "the engine ended the turn without a result")
            });
        }
        if self.given.iter().all(|given| given.end == Some(DeliveryEnd::Cancelled)) {
            return failed(Failure {
                native_code: Some("dropped".to_owned()),
                ..Failure::new(Reason::Process, "the engine dropped the message before it began with it")
            });
        }
        failed(Failure {
            native_code: Some("duplicate_delivery".to_owned()),
            what_to_do: "Retry the turn: the message is then given under a new id.".to_owned(),
            ..Failure::new(
                Reason::Process,
                "the engine has seen this delivery before and does not work on it again",
            )
        })
    }

    /// The process ended.
    pub(super) fn exit(&mut self, exit: Exit, out: &mut Vec<Output>) {
        if self.engine == EngineState::Gone {
            return;
        }
        if self.stderr.end_line() {
            self.writes_lost("the engine could not save all of the session's file", out);
        }
        self.engine = EngineState::Gone;
        match self.stage {
            Stage::Ended => {}
            Stage::Opening => self.open_failed(&[], exit, out),
            Stage::Open if self.open.turn_id.is_none() => self.stage = Stage::Ended,
            Stage::Open => {
                let waiting = self.given.iter().any(|given| given.end.is_none() && !given.started);
                let outcome = if self.result_since_start && !waiting && self.doomed.is_none() {
                    if exit.code != Some(0) {
                        let message = format!("the engine ended after its result: {exit:?}");
                        let notice = Notice::new(NoticeKind::Warning, "exit_after_result", &message);
                        self.notice(notice, out);
                    }
                    self.outcome()
                } else if let Some(doom) = self.doomed.take() {
                    TurnOutcome::Failed {
                        failure: Failure { exit_code: exit.code, signal: exit.signal, ..doom },
                    }
                } else if self.interrupted {
                    TurnOutcome::Cancelled
                } else {
                    let failure = classify::exit_failure(exit, &self.stderr, self.api_error.as_ref());
                    TurnOutcome::Failed { failure }
                };
                let settled = self.result_since_start && !waiting;
                let end = if settled { DeliveryEnd::Completed } else { DeliveryEnd::Lost };
                for given in self.given.iter_mut().filter(|given| given.end.is_none()) {
                    given.end = Some(end);
                    out.push(Output::DeliveryEnded { delivery_id: given.id.clone(), end });
                }
                self.finish(outcome, out);
            }
        }
    }

    /// The session could not be opened.
    pub(super) fn open_failed(&mut self, errors: &[String], exit: Exit, out: &mut Vec<Output>) {
        self.stage = Stage::Ended;
        self.stderr.end_line();
        let mode = self.open.opening.unwrap_or(crate::plan::OpenMode::Resume);
        let committed = self.open.carry.committed;
        let mut failed = classify::open_failure(mode, committed, errors, &self.stderr, exit);
        if let Some(doom) = self.doomed.take() {
            failed.failure = Failure { exit_code: exit.code, signal: exit.signal, ..doom };
            failed.retry_as = None;
        }
        out.push(Output::OpenFailed(failed));
    }

    /// Tells what is left to tell, in a fixed order, and ends the turn.
    fn finish(&mut self, outcome: TurnOutcome, out: &mut Vec<Output>) {
        for left in self.items.drain() {
            if left.kind == BlockKind::Text && left.parent.is_none() {
                limit::join(&mut self.said, &mut self.said_bytes, &left.text);
            }
            let text = TextEvent {
                item: left.key,
                body: BoundedText::event(&left.text),
                incomplete: true,
                parent_call: left.parent,
            };
            let event = match left.kind {
                BlockKind::Reasoning => Event::Reasoning(text),
                BlockKind::Text | BlockKind::Other => Event::Text(text),
            };
            out.push(Output::Event { event });
        }
        out.extend(self.tools.close().into_iter().map(|event| Output::Event { event }));
        for asked in std::mem::take(&mut self.asked) {
            if !asked.answered {
                let event = Event::PermissionAnswer(PermissionAnswered {
                    request_id: asked.request_id,
                    decision: Decision::Withdrawn,
                    decided_by: Decider::Engine,
                    feedback: None,
                });
                out.push(Output::Event { event });
            }
        }
        let accepted = self.given.iter().any(|given| given.started);
        let usage = self.usage.total(self.result_since_start || !accepted);
        if accepted {
            out.push(Output::Event { event: Event::Usage(usage.clone()) });
        }
        let answer = self.answer_for(&outcome);
        self.stage = Stage::Ended;
        self.settling = false;
        // The translator may live on for long beside an idle process.
        self.said = String::new();
        self.run = String::new();
        self.answer = String::new();
        out.push(Output::TurnEnded(Box::new(TurnEnd {
            outcome,
            answer,
            usage,
            accepted,
            tools_called: self.tools.called,
            process_gone: self.engine == EngineState::Gone,
            unknown_lines: self.unknown_lines,
        })));
    }

    /// The engine's result; failing that, what it said, marked as cut short.
    fn answer_for(&mut self, outcome: &TurnOutcome) -> Option<Answer> {
        let bounded = |text: &mut String, bytes: u64| BoundedText {
            truncated: (text.len() as u64) < bytes,
            full_bytes: bytes,
            text: std::mem::take(text),
        };
        if *outcome == TurnOutcome::Completed && self.answered {
            let body = bounded(&mut self.answer, self.answer_bytes);
            return Some(Answer { body, incomplete: false });
        }
        let completed = *outcome == TurnOutcome::Completed;
        (completed || self.said_bytes > 0)
            .then(|| Answer { body: bounded(&mut self.said, self.said_bytes), incomplete: !completed })
    }

    /// A result came before the opening was proved, or the handshake was refused.
    pub(super) fn refused_opening(&mut self, errors: &[String], out: &mut Vec<Output>) {
        let errors: Vec<String> = errors.iter().map(|text| limit::short(text)).collect();
        self.open_failed(&errors, UNSEEN, out);
    }
}
