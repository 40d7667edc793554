//! A message of which nobody knows whether it was taken: its keeper is dead, and the engine had said nothing yet. Where the
//! engine's own list of turns can tell, the session is opened again to ask; the message is given again only on proof.

use std::{sync::Arc, time::Duration};

use roundhouse_engines::{Failure, OpenMode, Reason};
use roundhouse_process::close_dead;

use super::{
    actor::{Internal, Stage, Turn},
    opening::Released,
};
use crate::{
    error::{Error, chain},
    journal::Record,
};

/// Time that the sweep of a dead keeper's processes may take.
const SWEEP: Duration = Duration::from_secs(5);

/// How a turn ends whose message may have been taken, and of which nothing more can be known.
pub(super) fn lost(why: &str) -> Failure {
    let message = "the engine and its keeper were gone without a trace of whether the message was taken";
    let message = if why.is_empty() { message.to_owned() } else { format!("{message} ({why})") };
    Failure {
        retryable: true,
        what_to_do: "Look at what the agent changed in the workspace, then retry the turn.".to_owned(),
        ..Failure::new(Reason::Process, message)
    }
}

impl Turn {
    /// Whether the end of the current process leaves a doubt that its engine can settle.
    pub(super) fn can_settle_doubt(&self) -> bool {
        !self.exit_seen
            && self.message_may_be_taken()
            && self.engine.as_ref().is_some_and(|engine| engine.adapter.can_prove_untaken())
    }

    /// Opens the session again, to ask. Nothing of the dead process is left when that begins.
    pub(super) async fn settle_doubt(&mut self) -> Result<(), Error> {
        self.record_synced(Record::Doubt { spool: self.spool_id() }).await?;
        crate::kill_point!("runner::in_doubt");
        let Some(mut engine) = self.engine.take() else { return Ok(()) };
        self.stage = Stage::Releasing;
        self.timers.idle = None;
        self.timers.silence = None;
        self.timers.opening = None;
        tracing::warn!(turn = self.id, spool = engine.spool_id, "whether a message was taken is asked for");
        let home = self.home.take();
        let (context, results) = (Arc::clone(&self.context), self.results.clone());
        self.context.tasks.spawn(async move {
            let _home = match home {
                Some(home) => home,
                None => context.homes.lock(&engine.home).await,
            };
            engine.frames.close();
            if !engine.keeper.until_dead(SWEEP).await {
                engine.release(Duration::ZERO, crate::pool::TERM).await;
            }
            let (dir, owner) = (engine.dir.clone(), context.state.runner_id().to_owned());
            let swept = tokio::task::spawn_blocking(move || close_dead(&dir, &owner, SWEEP)).await;
            if let Ok(Err(error)) = swept {
                tracing::warn!(error = chain(&error), "a dead keeper was not closed");
            }
            let _ = tokio::fs::remove_dir_all(&engine.temporary).await;
            drop(engine);
            let _ = results.send(Internal::Released(Released::Again(Some(OpenMode::Resume)))).await;
        });
        Ok(())
    }

    /// The session is open again: whether the engine proves that it has nothing of the message. False: the turn ends.
    pub(super) fn doubt_is_settled(&mut self) -> Result<bool, Error> {
        // What the doubted process itself said at its opening is read again after a restart, and proves nothing.
        if self.state.doubt.as_ref().is_none_or(|doubted| *doubted == self.spool_id()) {
            return Ok(true);
        }
        if self.engine.as_ref().is_some_and(|engine| engine.translator.proves_untaken()) {
            tracing::info!(turn = self.id, "the engine proves that the message was not taken");
            self.record(Record::Proved)?;
            return Ok(true);
        }
        self.in_doubt = Some(lost("and the engine's list of turns does not prove that it was not"));
        self.begin_ending();
        Ok(false)
    }

    /// The session cannot be opened again, so nothing can be asked.
    pub(super) fn doubt_stays(&mut self, why: &str) {
        self.in_doubt = Some(lost(why));
        self.end_without_engine();
    }
}
