//! Permissions: asked by the engine, decided here and nowhere else, timed on a clock that nobody sets.

use std::time::Duration;

use jiff::Timestamp;
use roundhouse_engines::{PermissionReply, event};
use roundhouse_process::boottime_ns;
use roundhouse_proto::engine::v1::{
    EventBody, PermissionAnswerEvent, PermissionDecider, PermissionDecision, event_body::Kind,
};
use tokio::time::Instant;

use super::actor::{Purpose, Turn};
use crate::{
    error::Error,
    grpc::to_proto,
    journal::{AnswerMark, Decider, PermissionMark, Record, Source},
    request,
};

/// The longest sleep until the next look at a deadline: the clock that counts goes on while the host is suspended, the
/// timer's does not.
const LOOK: Duration = Duration::from_secs(30);

/// What the engine is told when nobody answered.
const UNANSWERED: &str = "Nobody answered this request in time, so it was denied.";

/// The event that tells a decision.
fn told(mark: AnswerMark) -> EventBody {
    let decision = if mark.allow { PermissionDecision::Allow } else { PermissionDecision::Deny };
    let decider = match mark.decider {
        Decider::Client => PermissionDecider::Client,
        Decider::Deadline => PermissionDecider::Deadline,
    };
    to_proto::body(Kind::PermissionAnswer(PermissionAnswerEvent {
        request_id: mark.request_id,
        decision: decision.into(),
        decider: decider.into(),
        feedback: mark.feedback,
    }))
}

impl Turn {
    pub(super) async fn permission_asked(
        &mut self,
        source: Source,
        request: &event::PermissionRequest,
    ) -> Result<(), Error> {
        let timeout = self.context.settings.permission_timeout;
        let nanos = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        if !self.state.permissions.contains_key(&request.request_id) {
            self.record(Record::Permission(PermissionMark {
                request_id: request.request_id.clone(),
                boot_id: self.context.boot_id.clone(),
                deadline_boottime_ns: boottime_ns().saturating_add(nanos),
            }))?;
        }
        let millis = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
        let deadline = Timestamp::now().as_millisecond().saturating_add(millis);
        self.emit_synced(source, to_proto::permission_request(request, deadline)).await?;
        self.restart_idle();
        self.arm_permissions();
        if self.stopping.is_some() && !self.replaying {
            self.deny_all().await?;
        }
        Ok(())
    }

    /// The engine took a request back, or died with it.
    pub(super) async fn permission_withdrawn(
        &mut self,
        source: Source,
        answer: &event::PermissionAnswered,
    ) -> Result<(), Error> {
        let told = self.state.permissions.get(&answer.request_id).is_some_and(|known| known.told);
        if !told && let Some(body) = to_proto::event(&event::Event::PermissionAnswer(answer.clone())) {
            self.emit(source, body)?;
        }
        self.restart_idle();
        self.arm_permissions();
        Ok(())
    }

    /// Somebody answers. Says whether this answer decides, and what holds.
    pub(super) async fn on_answer(&mut self, answer: &request::Answer) -> Result<(bool, bool), Error> {
        let Some(permission) = self.state.permissions.get(&answer.request_id) else {
            return Err(Error::PermissionNotFound(answer.request_id.clone()));
        };
        if permission.told || permission.answer.is_some() {
            let allowed = permission.answer.as_ref().map_or(permission.allowed, |mark| mark.allow);
            return Ok((false, allowed));
        }
        self.decide(&answer.request_id, answer.allow, &answer.feedback, Decider::Client).await?;
        Ok((true, answer.allow))
    }

    /// Decides: on disk first, then told, then given to the engine.
    async fn decide(
        &mut self,
        request_id: &str,
        allow: bool,
        feedback: &str,
        decider: Decider,
    ) -> Result<(), Error> {
        let mark =
            AnswerMark { request_id: request_id.to_owned(), allow, feedback: feedback.to_owned(), decider };
        self.record(Record::Answer(mark.clone()))?;
        crate::kill_point!("runner::permission_decided");
        self.emit_synced(Source::Synthetic, told(mark)).await?;
        crate::kill_point!("runner::permission_journalled");
        self.give_answer(request_id);
        self.arm_permissions();
        self.restart_idle();
        Ok(())
    }

    /// Gives a decision to the engine, if it still waits for it. The keeper writes nothing twice.
    fn give_answer(&mut self, request_id: &str) {
        let Some(answer) = self.state.permissions.get(request_id).and_then(|known| known.answer.clone())
        else {
            return;
        };
        let Some(engine) = &self.engine else { return };
        let reply = if answer.allow {
            PermissionReply::Allow
        } else {
            PermissionReply::Deny { feedback: &answer.feedback }
        };
        match engine.translator.answer_permission(request_id, reply) {
            Ok(line) => self.write(line, Purpose::Control("permission answer")),
            Err(error) => tracing::debug!(turn = self.id, %error, "a permission needs no answer any more"),
        }
    }

    /// Gives all decisions again that the engine may not have, and tells those that were not told: after a restart.
    pub(super) async fn repeat_answers(&mut self) -> Result<(), Error> {
        let decided: Vec<(String, AnswerMark, bool)> = self
            .state
            .permissions
            .iter()
            .filter_map(|(id, known)| known.answer.clone().map(|mark| (id.clone(), mark, known.told)))
            .collect();
        for (id, mark, was_told) in decided {
            if !was_told {
                self.emit_synced(Source::Synthetic, told(mark)).await?;
            }
            self.give_answer(&id);
        }
        self.arm_permissions();
        Ok(())
    }

    pub(super) fn open_permissions(&self) -> Vec<(String, PermissionMark)> {
        self.state
            .permissions
            .iter()
            .filter(|(_, known)| known.answer.is_none() && !known.told)
            .map(|(id, known)| (id.clone(), known.mark.clone()))
            .collect()
    }

    /// Time left of a deadline. Of another boot nothing is left: the engine that asked is gone.
    fn left(&self, mark: &PermissionMark) -> Duration {
        if mark.boot_id != self.context.boot_id {
            return Duration::ZERO;
        }
        Duration::from_nanos(mark.deadline_boottime_ns.saturating_sub(boottime_ns()))
    }

    fn arm_permissions(&mut self) {
        let next = self.open_permissions().iter().map(|(_, mark)| self.left(mark)).min();
        self.timers.permission = next.map(|left| Instant::now() + left.min(LOOK));
    }

    pub(super) async fn permissions_timed_out(&mut self) -> Result<(), Error> {
        for (id, mark) in self.open_permissions() {
            if self.left(&mark).is_zero() {
                self.decide(&id, false, UNANSWERED, Decider::Deadline).await?;
            }
        }
        self.arm_permissions();
        Ok(())
    }

    /// The turn is being stopped: nobody needs to decide any more. The interrupt takes the requests back.
    pub(super) async fn deny_all(&mut self) -> Result<(), Error> {
        for (id, _) in self.open_permissions() {
            self.emit(
                Source::Synthetic,
                to_proto::body(Kind::PermissionAnswer(PermissionAnswerEvent {
                    request_id: id,
                    decision: PermissionDecision::Deny.into(),
                    decider: PermissionDecider::Cancel.into(),
                    feedback: String::new(),
                })),
            )?;
        }
        self.arm_permissions();
        Ok(())
    }
}
