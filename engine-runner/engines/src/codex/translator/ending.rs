//! How a turn ends, and what is told then.

use crate::{
    event::{Answer, Event, Notice, NoticeKind, TextEvent, TurnOutcome},
    failure::{Failure, Reason},
    frame::Exit,
    limit::{self, BoundedText},
    translate::{DeliveryEnd, Output, TurnEnd},
};

use super::{
    super::{classify, stdin},
    Asking, CodexTranslator, Stage,
    requests::withdrawn,
};

impl CodexTranslator {
    /// The engine said that the turn is over.
    pub(super) fn turn_over(&mut self, status: String, out: &mut Vec<Output>) {
        let stopped = status != "completed";
        self.turn.status = Some(status);
        self.commit(out);
        let ended: Vec<(String, DeliveryEnd)> = self
            .given
            .iter_mut()
            .filter(|given| given.end.is_none())
            .map(|given| {
                // What it had not taken yet is not taken any more.
                let end = match given.accepted && !stopped {
                    true => DeliveryEnd::Completed,
                    false => DeliveryEnd::Cancelled,
                };
                given.end = Some(end);
                (given.id.clone(), end)
            })
            .collect();
        out.extend(ended.into_iter().map(|(delivery_id, end)| Output::DeliveryEnded { delivery_id, end }));
        for asked in self.asked.iter().filter(|asked| !asked.answered) {
            self.tools.never_ran(&asked.item);
        }
        if (stopped || self.tools.commands_running())
            && let (Some(turn_id), Some(thread)) = (self.open.turn_id.as_deref(), self.thread())
        {
            out.push(Output::Reply(stdin::clean(turn_id, thread)));
            if !stopped {
                let text = "commands that still ran at the end of the turn are ended with it";
                self.notice(Notice::new(NoticeKind::Warning, "commands_ended", text), out);
            }
            self.cleaning = Asking::Asked;
        }
        // A tool may have made a skill, whose name in the next message would then be expanded.
        if self.tools.called > 0
            && let Some(turn_id) = self.open.turn_id.as_deref()
        {
            out.push(Output::Reply(stdin::recheck_skills(turn_id)));
            self.checking = Asking::Asked;
        }
        self.maybe_end(out);
    }

    /// Ends the turn if nothing is owed any more.
    pub(super) fn maybe_end(&mut self, out: &mut Vec<Output>) {
        if self.stage != Stage::Open || self.turn.status.is_none() {
            return;
        }
        let owed = match self.cleaning {
            Asking::NotAsked => false,
            Asking::Asked => true,
            // Their ends come right after the answer.
            Asking::Answered => self.tools.commands_running(),
        };
        if owed || self.checking == Asking::Asked {
            if !self.settling {
                self.settling = true;
                out.push(Output::Settling);
            }
            return;
        }
        let outcome = self.outcome();
        self.finish(outcome, out);
    }

    /// The settle time ran out: what is known has to do.
    pub(super) fn settled(&mut self, out: &mut Vec<Output>) {
        let notice = Notice::new(
            NoticeKind::Warning,
            "not_settled",
            "the engine ended the turn but did not end its commands in time",
        );
        self.notice(notice, out);
        let outcome = self.outcome();
        self.finish(outcome, out);
    }

    /// The engine refused the only message: there is no turn.
    pub(super) fn refused_turn(&mut self, failure: Failure, out: &mut Vec<Output>) {
        let outcome = match self.interrupted {
            true => TurnOutcome::Cancelled,
            false => TurnOutcome::Failed { failure },
        };
        self.finish(outcome, out);
    }

    /// How the turn ended, by what the engine said.
    fn outcome(&self) -> TurnOutcome {
        let failed = |failure| TurnOutcome::Failed { failure };
        if let Some(failure) = &self.doomed {
            return failed(failure.clone());
        }
        match self.turn.status.as_deref() {
            Some("completed") => TurnOutcome::Completed,
            Some("interrupted") if self.interrupted => TurnOutcome::Cancelled,
            Some("interrupted") => failed(Failure {
                native_code: Some("interrupted".to_owned()),
                ..Failure::new(Reason::Process, "the engine stopped the turn although nobody asked it to")
            }),
            _ => failed(match &self.turn.error {
                Some(error) => classify::turn_failure(error, self.rejected_until),
                None => Failure::new(Reason::Process, "the engine failed the turn and did not say why"),
            }),
        }
    }

    /// The process ended.
    pub(super) fn exit(&mut self, exit: Exit, out: &mut Vec<Output>) {
        if self.gone {
            return;
        }
        self.stderr.end_line();
        self.gone = true;
        match self.stage {
            Stage::Ended => {}
            Stage::Opening => self.exit_in_opening(exit, out),
            Stage::Open => {
                let outcome = if let Some(doom) = self.doomed.take() {
                    TurnOutcome::Failed {
                        failure: Failure { exit_code: exit.code, signal: exit.signal, ..doom },
                    }
                } else if self.turn.status.is_some() {
                    if exit.code != Some(0) {
                        let message = format!("the engine ended after its turn: {exit:?}");
                        self.notice(Notice::new(NoticeKind::Warning, "exit_after_result", &message), out);
                    }
                    self.outcome()
                } else if self.interrupted {
                    TurnOutcome::Cancelled
                } else {
                    let failure = classify::exit_failure(exit, &self.stderr, self.turn.error.as_ref());
                    TurnOutcome::Failed { failure }
                };
                for given in self.given.iter_mut().filter(|given| given.end.is_none()) {
                    given.end = Some(DeliveryEnd::Lost);
                    out.push(Output::DeliveryEnded { delivery_id: given.id.clone(), end: DeliveryEnd::Lost });
                }
                self.finish(outcome, out);
            }
        }
    }

    /// Tells what is left to tell, in a fixed order, and ends the turn.
    fn finish(&mut self, outcome: TurnOutcome, out: &mut Vec<Output>) {
        for left in self.items.drain() {
            if !left.reasoning {
                limit::join(&mut self.said, &mut self.said_bytes, &left.text);
            }
            let text = TextEvent {
                item: left.key,
                body: BoundedText::event(&left.text),
                incomplete: true,
                parent_call: None,
            };
            let event = if left.reasoning { Event::Reasoning(text) } else { Event::Text(text) };
            out.push(Output::Event { event });
        }
        out.extend(self.tools.close().into_iter().map(|event| Output::Event { event }));
        for asked in std::mem::take(&mut self.asked) {
            if !asked.answered {
                out.push(Output::Event { event: withdrawn(asked.request_id) });
            }
        }
        let accepted = self.given.iter().any(|given| given.accepted);
        let whole = !accepted || self.turn.status.as_deref() == Some("completed");
        let model = self.session.model.as_deref().unwrap_or("unknown");
        let mut usage = self.usage.total(model, whole);
        // A turn that the engine never took used nothing.
        usage.complete |= !accepted;
        if accepted {
            out.push(Output::Event { event: Event::Usage(usage.clone()) });
        }
        let answer = self.answer_for(&outcome);
        self.stage = Stage::Ended;
        self.settling = false;
        // The translator may live on for long beside an idle process.
        self.said = String::new();
        self.answer = None;
        out.push(Output::TurnEnded(Box::new(TurnEnd {
            outcome,
            answer,
            usage,
            accepted,
            tools_called: self.tools.called,
            process_gone: self.gone,
            unknown_lines: self.unknown_lines,
        })));
    }

    /// The engine's own answer; failing that, what it said, marked as cut short unless the turn completed.
    fn answer_for(&mut self, outcome: &TurnOutcome) -> Option<Answer> {
        let completed = *outcome == TurnOutcome::Completed;
        if let Some(answer) = self.answer.take().filter(|_| completed) {
            return Some(Answer { body: BoundedText::answer(&answer), incomplete: false });
        }
        let said = std::mem::take(&mut self.said);
        let body = BoundedText {
            truncated: (said.len() as u64) < self.said_bytes,
            full_bytes: self.said_bytes,
            text: said,
        };
        (completed || self.said_bytes > 0).then_some(Answer { body, incomplete: !completed })
    }
}
