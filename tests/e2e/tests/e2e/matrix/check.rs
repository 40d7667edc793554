//! What has to hold after the fault, whatever it was: looked at from outside.

use anyhow::{Context as _, ensure};
use roundhouse_e2e::{replay, told};
use roundhouse_proto::{
    control::v1::{GetTurnResponse, ListWorkspacesRequest, Message, Role},
    engine::v1::{Outcome, PermissionDecision},
};
use roundhouse_test_support::{BRIEF, Control, LONG, NORMAL, is_terminal, wait_for};

use super::{
    Step,
    cell::{ACTS, Cell},
    ground::Ground,
};
use crate::{answer_of, expect_outcome, permission, terminals, turn_of};

impl Cell {
    /// Asks everything of the conversation, and has it go on.
    pub(super) async fn check(&mut self, ground: &Ground, allowed: &[Outcome]) -> anyhow::Result<()> {
        let control = &ground.stack.control;
        if let Some(sending) = self.sending.take() {
            self.turn = Some(sending.await??);
        }
        let turn = self.turn.clone().context("no turn was ever told")?;
        if self.step == Step::Permission {
            self.allow(control, &turn).await?;
        }
        let got = self.ended(ground, &turn).await?;
        let outcome = self.outcome.context("an outcome")?;
        ensure!(allowed.contains(&outcome), "{outcome:?} is none of {allowed:?}: {:?}", turn_of(&got));
        let acts = self.workspace.lines(ACTS);
        let most = usize::from(outcome != Outcome::Completed);
        // A death closes the question, which is then not allowed; the engine may live long enough to hear that its input has
        // ended, and to come to its end without the tool.
        let closed = self.step == Step::Permission && acts == 0;
        ensure!(
            closed || acts == 1 || acts + most == 1,
            "the tool acted {acts} times, and the turn is {outcome:?}"
        );
        if outcome == Outcome::Completed {
            ensure!(closed || answer_of(&got).ends_with("and on"), "the answer is {:?}", answer_of(&got));
        } else {
            self.go_on(ground, &turn, &got, acts).await?;
        }
        let next = format!("[[text:further]] later in {}", self.step.name());
        control
            .run_answered(&self.conversation, &next, "further", NORMAL)
            .await
            .context("the next message")?;
        self.said.push(next);
        self.messages(control).await?;
        self.stream(control).await?;
        for turn in control.turns(&self.conversation).await? {
            ensure!(is_terminal(turn.status()), "not ended: {turn:?}");
            ensure!(terminals(&self.follower, &turn.turn_id).len() == 1, "not one end: {turn:?}");
        }
        let open = control.permissions(&self.conversation, false).await?;
        ensure!(open.is_empty(), "still asked: {open:?}");
        Ok(())
    }

    /// Waits for the end of the turn, which must be told once and to all alike.
    async fn ended(&mut self, ground: &Ground, turn: &str) -> anyhow::Result<GetTurnResponse> {
        let terminal = self.follower.wait_terminal(turn, LONG).await?;
        self.outcome = Some(terminal.outcome());
        expect_outcome(&ground.stack, &self.follower, turn, terminal.outcome()).await
    }

    /// Allows what is asked, if it still is.
    async fn allow(&self, control: &Control, turn: &str) -> anyhow::Result<()> {
        wait_for("the permission is answered or the turn has ended", LONG, || async {
            if let Some(open) = control.permissions(&self.conversation, false).await?.pop() {
                permission::answer(control, &open.request_id, PermissionDecision::Allow).await?;
            }
            let got = control.turn(turn).await?;
            let asked = got.turn.as_ref().is_some_and(|turn| !is_terminal(turn.status()));
            Ok((!asked).then_some(()))
        })
        .await
    }

    /// Does what the outcome says is to be done.
    async fn go_on(
        &mut self,
        ground: &Ground,
        turn: &str,
        got: &GetTurnResponse,
        acts: usize,
    ) -> anyhow::Result<()> {
        let control = &ground.stack.control;
        if self.outcome == Some(Outcome::Cancelled) {
            return Ok(());
        }
        let failure = turn_of(got).failure.clone().context("no word on why")?;
        ensure!(!failure.message.is_empty() && !failure.next_action.is_empty(), "no word on it: {failure:?}");
        if self.outcome == Some(Outcome::Lost) {
            // Until its runner has said that nothing of it is left.
            wait_for("the workspace of the lost turn is free", NORMAL, || async {
                let request = ListWorkspacesRequest::default();
                let listed = control.runners().list_workspaces(request).await?.into_inner().workspaces;
                Ok((!listed.iter().any(|one| one.held_by_turn_id == turn)).then_some(()))
            })
            .await?;
        }
        if !failure.retryable || self.step == Step::Cancel {
            return Ok(());
        }
        let again = control.retry(turn).await.with_context(|| format!("the retry of {failure:?}"))?;
        if self.step == Step::Permission {
            self.allow(control, &again).await?;
        }
        let ended = control.wait_end(&again, NORMAL).await?;
        ensure!(answer_of(&ended).ends_with("and on"), "the retry ended so: {:?}", turn_of(&ended));
        let now = self.workspace.lines(ACTS);
        ensure!(now == acts + 1, "the tool acted {now} times after {acts} in the first try");
        Ok(())
    }

    /// Every message that was acknowledged is there once.
    async fn messages(&self, control: &Control) -> anyhow::Result<()> {
        let stored = control.messages(&self.conversation).await?;
        let user = |message: &&Message| message.role() == Role::User;
        let texts: Vec<&str> = stored.iter().filter(user).map(|message| message.text.as_str()).collect();
        ensure!(texts == self.said, "these are stored: {texts:?}, these were sent: {:?}", self.said);
        Ok(())
    }

    /// What a client saw live is what another reads now.
    async fn stream(&self, control: &Control) -> anyhow::Result<()> {
        let stored = replay(control, &self.conversation).await?;
        let last = stored.last().map(|item| item.cursor.clone()).unwrap_or_default();
        wait_for("the follower is through", BRIEF, || async {
            Ok((self.follower.cursor() == last).then_some(()))
        })
        .await?;
        self.follower.check()?;
        let (stored, followed) = (told(stored), told(self.follower.items()));
        let differ = stored.iter().zip(&followed).find(|(one, other)| one != other);
        ensure!(differ.is_none(), "the stream reads otherwise than it was followed: {differ:?}");
        ensure!(stored.len() == followed.len(), "{} items are stored, {} came", stored.len(), followed.len());
        Ok(())
    }
}
