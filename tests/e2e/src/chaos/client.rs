//! A client that knows nothing of deaths: it repeats what was not answered, and does what it is told to do.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, bail};
use roundhouse_proto::{
    control::v1::{CancelTurnRequest, RetryTurnRequest, SendMessageRequest, TurnStatus},
    engine::v1::Outcome,
};
use roundhouse_test_support::{Control, LONG, Workspace, wait_for};
use tonic::{Code, Status};

use super::Dice;

/// A message that was acknowledged.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) request: SendMessageRequest,
    pub(super) message_id: String,
    pub(super) turn_id: String,
    /// Its turns: the first and its retries, each with the end that was told.
    pub(super) tries: Vec<(String, TurnStatus)>,
}

/// One conversation and what was told of it.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) control: Control,
    pub(super) conversation: String,
    pub(super) workspace: Workspace,
    pub(super) said: Vec<Said>,
    dice: Dice,
}

/// What a death looks like from outside; the call is made again.
fn is_death(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal)
}

impl Client {
    pub(super) fn new(control: Control, conversation: String, workspace: Workspace, dice: Dice) -> Self {
        Self { control, conversation, workspace, said: Vec::new(), dice }
    }

    /// Holds the conversation until it is told to stop. Then one more message has to be answered.
    pub(super) async fn talk(mut self, stop: Arc<AtomicBool>) -> anyhow::Result<Self> {
        while !stop.load(Ordering::SeqCst) {
            let first = self.say().await?;
            // Sometimes there is one more before the first is answered, which waits.
            let second = if self.dice.roll(4) == 0 { Some(self.say().await?) } else { None };
            if self.dice.roll(8) == 0 {
                self.cancel(&self.said[first].turn_id).await?;
            }
            for n in [Some(first), second].into_iter().flatten() {
                self.see_through(n, second.is_none()).await?;
            }
        }
        let last = self.say().await?;
        self.see_through(last, true).await?;
        let mut status = self.said[last].tries.last().map(|(_, status)| *status);
        // A turn that was given up may hold the workspace until its runner has told its end.
        for _ in 0..5 {
            if status == Some(TurnStatus::Completed) {
                return Ok(self);
            }
            let again = self.say().await?;
            self.see_through(again, true).await?;
            status = self.said[again].tries.last().map(|(_, status)| *status);
        }
        bail!("{} does not go on: {:?}", self.conversation, self.said.last())
    }

    /// Sends a message; answers its number.
    async fn say(&mut self) -> anyhow::Result<usize> {
        let n = self.said.len();
        let act = format!("echo acted >> acts-{n}");
        let script = match self.dice.roll(4) {
            0 => format!("[[bash:{act}]][[text:done {n}]]"),
            1 => format!(
                "[[text:I begin]][[pause ms=100]][[bash:{act}; sleep 0.1]][[slow chunks=5 delay=20:bit ]]\
                 [[text:done {n}]]"
            ),
            2 => format!("[[bash:{act}]][[events count=40 bytes=200]][[text:done {n}]]"),
            _ => format!("[[slow chunks=10 delay=20:bit ]][[bash:{act}]][[text:done {n}]]"),
        };
        let request = SendMessageRequest {
            request_id: format!("{}-{n}", self.conversation),
            conversation_id: self.conversation.clone(),
            text: format!("{script} message {n}"),
            ..SendMessageRequest::default()
        };
        let sent = wait_for("the message is acknowledged", LONG, || async {
            match self.control.conversations().send_message(request.clone()).await {
                Ok(sent) => Ok(Some(Ok(sent.into_inner()))),
                Err(status) if is_death(&status) => Err(status.into()),
                Err(status) => Ok(Some(Err(status))),
            }
        })
        .await?
        .context("SendMessage")?;
        let message_id = sent.message.context("a message")?.message_id;
        let turn_id = sent.turn.context("a turn")?.turn_id;
        self.said.push(Said { request, message_id, turn_id, tries: Vec::new() });
        Ok(n)
    }

    async fn cancel(&self, turn: &str) -> anyhow::Result<()> {
        let request = CancelTurnRequest { request_id: format!("cancel-{turn}"), turn_id: turn.to_owned() };
        wait_for("the cancel is taken", LONG, || async {
            match self.control.conversations().cancel_turn(request.clone()).await {
                Ok(_) => Ok(Some(())),
                Err(status) => Err(status.into()),
            }
        })
        .await
    }

    /// Waits for the end of a message's turn, and has it tried again while that is told to help.
    async fn see_through(&mut self, n: usize, last: bool) -> anyhow::Result<()> {
        let mut turn = self.said[n].turn_id.clone();
        loop {
            let ended = self.control.wait_end(&turn, LONG).await?.turn.context("a turn")?;
            self.said[n].tries.push((turn.clone(), ended.status()));
            if ended.status() == TurnStatus::Completed {
                return Ok(());
            }
            let failure = ended.failure.clone().with_context(|| format!("no word on why: {ended:?}"))?;
            if failure.message.is_empty() || failure.next_action.is_empty() {
                bail!("no word on it: {ended:?}");
            }
            let tries = self.said[n].tries.len();
            // Only the conversation's last turn can be tried again.
            if !failure.retryable || !last || tries > 5 || self.dice.roll(3) == 0 {
                return Ok(());
            }
            let request = RetryTurnRequest { request_id: format!("retry-{turn}"), turn_id: turn.clone() };
            let again = wait_for("the retry is acknowledged", LONG, || async {
                match self.control.conversations().retry_turn(request.clone()).await {
                    Ok(again) => Ok(Some(Ok(again.into_inner()))),
                    Err(status) if is_death(&status) => Err(status.into()),
                    Err(status) => Ok(Some(Err(status))),
                }
            })
            .await?
            .with_context(|| format!("RetryTurn of {ended:?}"))?;
            turn = again.turn.context("a turn")?.turn_id;
        }
    }
}

/// The outcome that belongs to a turn's state.
pub(super) fn outcome_of(status: TurnStatus) -> Outcome {
    match status {
        TurnStatus::Completed => Outcome::Completed,
        TurnStatus::Failed => Outcome::Failed,
        TurnStatus::Cancelled => Outcome::Cancelled,
        TurnStatus::Lost => Outcome::Lost,
        _ => Outcome::Unspecified,
    }
}
