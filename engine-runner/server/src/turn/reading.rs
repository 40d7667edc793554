//! Frames in, events out; messages in, lines out.

use std::time::Duration;

use roundhouse_engines::{
    Delivery, Event, Exit, Failure, Frame, FrameBody, LineError, Output, Reason, TurnEnd, TurnOutcome,
};
use roundhouse_process::{self as process, OpState, Refusal, Response, boottime_ns};
use roundhouse_proto::engine::v1::{
    EvidenceEvent, SessionEvent, event_body::Kind, evidence_event::Point, notice_event, phase_event::Phase,
    session_event,
};
use tokio::{sync::oneshot, time::Instant};

use super::{
    actor::{Owed, Purpose, Stage, Turn, Written},
    opening::Released,
};
use crate::{
    engine::engine_frame,
    error::Error,
    git::Worktree,
    grpc::to_proto,
    ids,
    journal::{MessageMark, Record, Source, StopCause},
    keeper::AskError,
    request, spawn_failure,
};

/// How long a message waits for the look at the worktree before the turn. In a large repository it takes seconds.
const LOOK_WAIT: Duration = Duration::from_millis(150);

/// Pause before a line is put to a keeper again that did not answer.
const RESEND: Duration = Duration::from_secs(2);

/// Pause before a line is put again that a broken link may have lost.
const RELINK: Duration = Duration::from_millis(300);

/// Time for an engine's end to show after its pipe did not take a message: most often that was why.
const INPUT_GRACE: Duration = Duration::from_secs(1);

/// Ordinal of what follows the frames of a dead process.
const AFTER_DEATH: u32 = 1_000_000;

impl Turn {
    pub(super) async fn on_frames(&mut self, frames: Vec<process::Frame>) -> Result<(), Error> {
        crate::kill_point!("runner::frames");
        crate::hold_point!("runner::frames_held");
        // What a step that broke has left comes first.
        self.unread.extend(frames);
        while let Some(frame) = self.unread.pop_front() {
            self.on_frame(&frame).await?;
        }
        Ok(())
    }

    async fn on_frame(&mut self, frame: &process::Frame) -> Result<(), Error> {
        let after = self.state.process.as_ref().map_or(0, |process| process.after);
        let Some(engine) = &mut self.engine else { return Ok(()) };
        engine.note_frame(frame);
        if frame.number <= after {
            return Ok(());
        }
        match &frame.body {
            process::FrameBody::StdinIntent { op_id, .. } => {
                self.intents.insert(op_id.clone());
            }
            process::FrameBody::StdinFailed { op_id, written, .. } => {
                if *written == 0 {
                    // Proof that the engine has nothing of it.
                    self.intents.remove(op_id);
                }
                if self.state.message_of(op_id).is_some() && !self.replaying {
                    self.timers.input = Some(Instant::now() + INPUT_GRACE);
                }
            }
            process::FrameBody::Exit(_) => self.exit_seen = true,
            process::FrameBody::SpawnFailed { stage, errno, message } => {
                self.exit_seen = true;
                self.spawn_failed = Some(spawn_failure::of(*stage, *errno, message));
            }
            process::FrameBody::StorageFault(_) => self.force_stop(StopCause::Storage),
            _ => {}
        }
        if let Some(said) = engine_frame(frame) {
            self.feed(said).await?;
        }
        if self.later && !self.replaying {
            self.later = false;
            self.deliver_waiting();
            self.interrupt_again();
        }
        // A settle time that ran out here in an earlier life of this runner.
        let settled = self.spool_id();
        if self.replaying && self.state.settled.get(&settled) == Some(&frame.number) {
            self.settled(frame.number).await?;
        }
        if self.replaying && frame.number >= self.replay_until {
            self.on_replayed().await?;
        }
        Ok(())
    }

    async fn feed(&mut self, frame: Frame<'_>) -> Result<(), Error> {
        let Some(engine) = &mut self.engine else { return Ok(()) };
        let active = engine.adapter.counts_as_activity(&frame);
        let mut outputs = engine.translator.feed(frame);
        if !outputs.is_empty() && crate::fault_point!("runner::more_events") {
            // As a newer translator may: one event more, before all others of the frame.
            let kind = roundhouse_engines::event::NoticeKind::Warning;
            let notice = roundhouse_engines::event::Notice::new(kind, "more", "one more");
            outputs.insert(0, Output::Event { event: Event::Notice(notice) });
        }
        if active && !self.replaying {
            self.restart_idle();
        }
        self.on_outputs(frame.number, 0, outputs).await
    }

    async fn on_outputs(&mut self, frame: u64, first: u32, outputs: Vec<Output>) -> Result<(), Error> {
        let spool = self.spool_id();
        for (ordinal, output) in (first..).zip(outputs) {
            let source = Source::Frame { spool: spool.clone(), frame, ordinal };
            self.on_output(source, output).await?;
        }
        Ok(())
    }

    async fn on_output(&mut self, source: Source, output: Output) -> Result<(), Error> {
        match output {
            Output::Event { event: Event::PermissionRequest(request) } => {
                self.permission_asked(source, &request).await
            }
            Output::Event { event: Event::PermissionAnswer(answer) } => {
                self.permission_withdrawn(source, &answer).await
            }
            Output::Event { event } => match to_proto::event(&event) {
                Some(body) => self.emit(source, body),
                None => Ok(()),
            },
            Output::Partial(partial) => {
                if !self.replaying {
                    self.hub.partial(to_proto::partial(&partial));
                }
                Ok(())
            }
            Output::PartialReset { item } => {
                self.hub.reset(item.0);
                Ok(())
            }
            Output::Reply(line) => {
                self.write(line, Purpose::Control("reply"));
                Ok(())
            }
            Output::Opened(opened) => self.on_opened(source, opened).await,
            Output::OpenFailed(failed) => self.on_open_failed(failed).await,
            Output::Accepted { delivery_id } => {
                let Some(message) = self.state.message_of(&delivery_id) else { return Ok(()) };
                let body = to_proto::phase(Phase::Accepted, &message.message_id);
                self.emit_synced(source, body).await
            }
            Output::DeliveryEnded { .. } => Ok(()),
            Output::Committed { native } => self.emit(
                source,
                to_proto::body(Kind::Session(SessionEvent {
                    state: session_event::State::NativeRef.into(),
                    session_id: self.state.session.as_ref().map(|s| s.session_id.clone()).unwrap_or_default(),
                    native_ref: to_proto::native_ref(&native.id),
                    ..SessionEvent::default()
                })),
            ),
            Output::Settling => {
                self.timers.settle = Some(Instant::now() + self.context.settings.settle_timeout);
                Ok(())
            }
            Output::MustStop { failure } if self.stage == Stage::Opening && self.stopping.is_none() => {
                // Nothing is lost with the process, and who waits for the opening is told why.
                self.release_refused(*failure, true);
                Ok(())
            }
            Output::MustStop { failure } => {
                self.must_stop = Some(*failure);
                self.terminate();
                Ok(())
            }
            Output::TurnEnded(end) => self.on_turn_end(end).await,
            Output::SessionNotice { notice } => {
                tracing::info!(turn = self.id, code = notice.code, "the engine printed output of no turn");
                Ok(())
            }
        }
    }

    /// The engine is done with the turn, or gone.
    async fn on_turn_end(&mut self, end: Box<TurnEnd>) -> Result<(), Error> {
        self.timers.settle = None;
        if self.turn_end.is_some() {
            return Ok(());
        }
        if self.replaying {
            // What the runner itself decided before it died may change what this means: first all of the past.
            self.turn_end = Some(end);
            return Ok(());
        }
        self.conclude(end).await
    }

    /// Decides what the engine's end of the turn means.
    pub(super) async fn conclude(&mut self, end: Box<TurnEnd>) -> Result<(), Error> {
        let untouched = !end.accepted && self.stopping.is_none() && self.must_stop.is_none();
        if untouched {
            if let TurnOutcome::Failed { failure } = &end.outcome
                && failure.reason == Reason::SessionUnusable
            {
                self.release(Released::Unusable(failure.message.clone()));
                return Ok(());
            }
            if end.process_gone && !self.message_may_be_taken() {
                // Nothing of the turn's message was ever written: the session is opened again for it.
                self.reopen();
                return Ok(());
            }
            if end.process_gone && self.can_settle_doubt() {
                return self.settle_doubt().await;
            }
        }
        self.turn_end = Some(end);
        self.begin_ending();
        Ok(())
    }

    /// Whether the engine may have read a message of the turn: its intent is in the spool.
    pub(super) fn message_may_be_taken(&self) -> bool {
        self.state.messages.iter().any(|message| self.intents.contains(&message.delivery_id))
    }

    /// The keeper is dead and all its frames were read.
    pub(super) async fn on_gone(&mut self) -> Result<(), Error> {
        let Some(engine) = &mut self.engine else { return Ok(()) };
        engine.gone = true;
        let frame = engine.last_frame;
        if self.replaying {
            self.on_replayed().await?;
        }
        if self.engine.is_none() {
            return Ok(());
        }
        if !self.exit_seen {
            // Nobody saw how the engine ended: the reader is told just that.
            let spool = self.spool_id();
            self.record(Record::Dead { spool })?;
            let exit = Frame { number: frame + 1, body: FrameBody::Exit(Exit::default()) };
            let Some(engine) = &mut self.engine else { return Ok(()) };
            let outputs = engine.translator.feed(exit);
            self.on_outputs(frame + 1, AFTER_DEATH, outputs).await?;
        }
        match self.stage {
            Stage::Opening if self.stopping.is_some() => self.end_without_engine(),
            Stage::Opening => {
                // Dead before it proved anything, and the reader said nothing of it.
                let failure = roundhouse_engines::Failure::new(
                    Reason::Process,
                    "the engine ended before it had opened its session",
                );
                let failure = self.spawn_failed.take().unwrap_or(failure);
                self.release_refused(failure, true);
            }
            Stage::Open if self.turn_end.is_none() && self.stopping.is_some() => self.end_without_engine(),
            Stage::Open if self.turn_end.is_none() => self.reopen(),
            Stage::Open
            | Stage::NeedSession
            | Stage::Preparing
            | Stage::Releasing
            | Stage::Ending
            | Stage::Ended => {}
        }
        Ok(())
    }

    pub(super) async fn on_send(
        &mut self,
        send: request::Send,
        answer: oneshot::Sender<Result<String, Error>>,
    ) -> Result<(), Error> {
        let delivery_id = ids::delivery_id(&self.id, &send.session_id, &send.message_id);
        let wrong = |text: String| Err(Error::WrongState(text));
        if let Some(repeated) = self.state.sent_before(&send) {
            let _ = answer.send(repeated);
            return Ok(());
        }
        let current =
            self.state.session.as_ref().is_some_and(|session| session.session_id == send.session_id);
        // That it was opened is known already; the frames that say so are read again.
        let reread = self.replaying && self.stage == Stage::Opening && self.state.opened.is_some();
        // The process ended before the message came, and the session is being opened again: the message waits for it.
        let reopening = self.reopened > 0
            && self.state.opened.is_some()
            && matches!(self.stage, Stage::Releasing | Stage::Preparing | Stage::Opening);
        let refusal = if !current {
            Some(format!("session {} is not the turn's", send.session_id))
        } else if self.stopping.is_some() || self.state.stop.is_some() {
            Some(format!("turn {} is being stopped", self.id))
        } else if !(self.stage == Stage::Open || reread || reopening) || self.turn_end.is_some() {
            Some(format!("the session of turn {} is not open", self.id))
        } else if self.state.has_messages() {
            Some(format!("turn {} has its message already", self.id))
        } else {
            None
        };
        if let Some(refusal) = refusal {
            let _ = answer.send(wrong(refusal));
            return Ok(());
        }
        let mark = MessageMark {
            session_id: send.session_id,
            message_id: send.message_id,
            delivery_id: delivery_id.clone(),
            text: send.text,
            boottime_ns: boottime_ns(),
        };
        if let Err(error) = self.record_synced(Record::Message(mark)).await {
            let _ = answer.send(Err(error));
            return Err(Error::Internal("a message could not be journalled".to_owned()));
        }
        crate::kill_point!("runner::message_journalled");
        self.senders.entry(delivery_id).or_default().push(answer);
        self.restart_idle();
        if !self.looked {
            self.timers.look = Some(Instant::now() + LOOK_WAIT);
        }
        self.deliver_waiting();
        Ok(())
    }

    /// The look at the worktree takes too long for the message to wait.
    pub(super) fn look_given_up(&mut self) -> Result<(), Error> {
        if self.looked {
            return Ok(());
        }
        self.looked = true;
        self.before_unknown = true;
        self.deliver_waiting();
        self.warn("The worktree's state before the turn is unknown: it took too long to look at.")
    }

    /// Gives the engine what it has not taken. The keeper writes nothing twice.
    pub(super) fn deliver_waiting(&mut self) {
        // A stop that an earlier life of this runner journalled is seen only when all of the past is read.
        let stopped = self.stopping.is_some() || self.state.stop.is_some();
        let waits = self.replaying || self.beginning || !self.looked;
        if self.stage != Stage::Open || stopped || waits || self.turn_end.is_some() {
            return;
        }
        self.given = self.given || self.state.has_messages();
        let Some(session) = self.state.session.clone() else { return };
        for message in self.state.undelivered() {
            let Some(engine) = &self.engine else { return };
            let mut line = engine.translator.deliver(&Delivery {
                delivery_id: &message.delivery_id,
                context: (!session.context.is_empty()).then_some(session.context.as_str()),
                text: &message.text,
            });
            if crate::fault_point!("runner::no_line") {
                line = Err(LineError::Unsupported);
            }
            match line {
                Ok(line) => self.write(
                    line,
                    Purpose::Message { delivery_id: message.delivery_id, message_id: message.message_id },
                ),
                Err(LineError::NotNow) => self.later = true,
                Err(error) => {
                    self.undeliverable(format!(
                        "the message cannot be put into a line for the engine: {error}"
                    ));
                    return;
                }
            }
        }
    }

    /// The engine will never have the message, so nothing would end the turn but its idle timer, with a wrong reason.
    fn undeliverable(&mut self, why: String) {
        if self.stage != Stage::Open || self.stopping.is_some() || self.turn_end.is_some() {
            return;
        }
        tracing::error!(turn = self.id, why, "a message cannot be given to the engine");
        self.must_stop = Some(Failure::new(Reason::Process, why));
        self.terminate();
    }

    /// How long after this error a line is put again; none when that is of no use.
    fn resend_after(&self, error: AskError) -> Option<Duration> {
        let engine = self.engine.as_ref()?;
        match error {
            AskError::Stuck | AskError::Refused(Refusal::Busy) => Some(RESEND),
            // The link broke while the keeper lives: whether it has the line nobody knows, and it writes none twice.
            AskError::Gone if !engine.keeper.is_dead() => Some(RELINK),
            AskError::Gone | AskError::Refused(_) => None,
        }
    }

    /// Puts to the keeper what it may not have.
    pub(super) fn resend(&mut self) {
        let spool = self.spool_id();
        for owed in std::mem::take(&mut self.owed) {
            if owed.spool == spool {
                self.write(owed.line, Purpose::Control(owed.what));
            }
        }
        self.deliver_waiting();
    }

    pub(super) async fn on_written(&mut self, written: Written) -> Result<(), Error> {
        let Written { purpose, spool, line, result } = written;
        let here = spool == self.spool_id() && matches!(self.stage, Stage::Opening | Stage::Open);
        if let Err(error) = result
            && here
            && let Some(pause) = self.resend_after(error)
        {
            let at = Instant::now() + pause;
            self.timers.resend = Some(self.timers.resend.map_or(at, |known| known.min(at)));
            if let (Purpose::Control(what), Some(line)) = (&purpose, line) {
                self.owed.push(Owed { what, spool, line });
            }
        }
        let (delivery_id, message_id) = match purpose {
            Purpose::Message { delivery_id, message_id } => (delivery_id, message_id),
            Purpose::Control(what) => {
                if let Err(error) = result {
                    tracing::warn!(turn = self.id, what, %error, "a line was not written");
                }
                return Ok(());
            }
        };
        crate::kill_point!("runner::message_written");
        let answer = match result {
            Ok(Response::Delivered { state: OpState::Failed, .. }) => {
                if here {
                    self.timers.input = Some(Instant::now() + INPUT_GRACE);
                }
                Ok(delivery_id.clone())
            }
            Ok(_) => {
                let told =
                    self.state.delivered.contains(&message_id) || self.state.accepted.contains(&message_id);
                if !told && self.state.terminal.is_none() && self.stage != Stage::Ended {
                    self.emit(Source::Synthetic, to_proto::phase(Phase::Delivered, &message_id))?;
                }
                Ok(delivery_id.clone())
            }
            Err(AskError::Stuck | AskError::Refused(Refusal::Busy)) => Err(Error::KeeperStuck),
            Err(AskError::Refused(Refusal::Storage)) => {
                self.force_stop(StopCause::Storage);
                Ok(delivery_id.clone())
            }
            Err(AskError::Refused(refusal @ (Refusal::Argument | Refusal::OpConflict))) => {
                if here {
                    self.undeliverable(format!("the engine's keeper refused the message: {refusal:?}"));
                }
                Ok(delivery_id.clone())
            }
            // The message is durable here; what becomes of it is told by events.
            Err(AskError::Gone | AskError::Refused(_)) => Ok(delivery_id.clone()),
        };
        let mut answer = Some(answer);
        for sender in self.senders.remove(&delivery_id).unwrap_or_default() {
            let again = match &answer {
                Some(Ok(id)) => Some(Ok(id.clone())),
                Some(Err(_)) => Some(Err(Error::KeeperStuck)),
                None => None,
            };
            if let Some(answer) = answer.take() {
                let _ = sender.send(answer);
            }
            answer = again;
        }
        Ok(())
    }

    /// The engine lives on and does not read its input: what it was given it will never have.
    pub(super) fn input_failed(&mut self) {
        if self.stage != Stage::Open || self.stopping.is_some() || self.turn_end.is_some() {
            return;
        }
        if !self.message_may_be_taken() {
            self.reopen();
            return;
        }
        self.must_stop = Some(Failure {
            retryable: true,
            ..Failure::new(Reason::Process, "the engine closed its input before it had read the message")
        });
        self.terminate();
    }

    pub(super) async fn on_worktree(&mut self, worktree: Option<Worktree>) -> Result<(), Error> {
        if self.looked {
            // Too late: the engine may have changed what was seen.
            return Ok(());
        }
        self.looked = true;
        self.timers.look = None;
        if let Some(worktree) = worktree {
            let text = serde_json::to_string(&worktree)
                .map_err(|error| Error::Internal(format!("worktree: {error}")))?;
            self.record(Record::Worktree(text))?;
            self.before = Some(worktree);
        }
        self.tell_evidence_before()?;
        self.deliver_waiting();
        Ok(())
    }

    /// Tells the worktree's state before the turn, once the turn has events at all.
    pub(super) fn tell_evidence_before(&mut self) -> Result<(), Error> {
        let Some(before) = self.before.clone() else { return Ok(()) };
        if self.state.evidence || self.state.opened.is_none() || self.state.terminal.is_some() {
            return Ok(());
        }
        self.emit(
            Source::Synthetic,
            to_proto::body(Kind::Evidence(EvidenceEvent {
                point: Point::Before.into(),
                head: before.head,
                branch: before.branch,
                dirty: Some(!before.dirty.is_empty()),
                ..EvidenceEvent::default()
            })),
        )
    }

    pub(super) async fn settle(&mut self) -> Result<(), Error> {
        let Some(engine) = &self.engine else { return Ok(()) };
        let (spool, frame) = (engine.spool_id.clone(), engine.last_frame);
        self.record(Record::Settled { spool, frame })?;
        self.settled(frame).await
    }

    async fn settled(&mut self, frame: u64) -> Result<(), Error> {
        let Some(engine) = &mut self.engine else { return Ok(()) };
        let outputs = engine.translator.settle();
        // After whatever the frame itself said.
        self.on_outputs(frame, AFTER_DEATH / 2, outputs).await
    }

    /// The engine showed that it is at work: silence counts from now on.
    pub(super) fn restart_idle(&mut self) {
        self.timers.idle = None;
        self.timers.silence = None;
        self.silence_doubted = false;
        // Undecided ones alone: after a decision it is the engine, or its keeper, that is silent.
        let waiting = !self.open_permissions().is_empty();
        if waiting || self.stage != Stage::Open || !self.state.has_messages() || self.turn_end.is_some() {
            return;
        }
        let now = Instant::now();
        let idle = self.state.open.as_ref().map_or(0, |open| open.idle_millis);
        self.timers.idle = Some(now + Duration::from_millis(idle));
        self.timers.silence = Some(now + self.context.settings.silence_warning);
    }

    pub(super) fn silent(&mut self) -> Result<(), Error> {
        let waiting_for = self.engine.as_ref().map(|engine| engine.translator.standing().waiting_for);
        let about = match waiting_for {
            Some(roundhouse_engines::WaitingFor::Tool(tool)) => format!(" (it waits for the tool {tool})"),
            Some(roundhouse_engines::WaitingFor::ModelRetry) => {
                " (it tries a failed request again)".to_owned()
            }
            Some(roundhouse_engines::WaitingFor::Model) => " (it waits for its model)".to_owned(),
            _ => String::new(),
        };
        let silence = self.context.settings.silence_warning;
        self.emit(
            Source::Synthetic,
            to_proto::notice(
                notice_event::Kind::Silence,
                format!("The engine has been silent for {} s{about}.", silence.as_secs()),
            ),
        )
    }
}
