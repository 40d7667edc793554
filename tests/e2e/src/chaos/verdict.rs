//! What clients were told, compared with what is there.

use anyhow::{Context as _, ensure};
use roundhouse_proto::{
    control::v1::{Role, TurnStatus},
    engine::v1::{CloseSessionRequest, event_body::Kind},
};
use roundhouse_test_support::{BRIEF, Follower, NORMAL, Stack, wait_for};

use super::{
    Report,
    client::{Client, outcome_of},
};
use crate::{replay, told};

impl Client {
    /// Compares all of the conversation.
    pub(super) async fn check(&mut self, follower: &Follower, report: &mut Report) -> anyhow::Result<()> {
        let place = format!("in {}", self.conversation);
        self.messages().await.context(place.clone())?;
        self.turns(follower, report).await.context(place.clone())?;
        self.stream(follower).await.context(place.clone())?;
        let open = self.control.permissions(&self.conversation, false).await?;
        ensure!(open.is_empty(), "{place}: still asked: {open:?}");
        report.messages += self.said.len();
        Ok(())
    }

    /// Every acknowledged message is there once, in its order, under the id that was told; and a repeat says the same.
    async fn messages(&self) -> anyhow::Result<()> {
        let stored = self.control.messages(&self.conversation).await?;
        let users: Vec<_> = stored
            .iter()
            .filter(|message| message.role() == Role::User)
            .map(|message| (message.message_id.as_str(), message.text.as_str()))
            .collect();
        let said: Vec<_> =
            self.said.iter().map(|said| (said.message_id.as_str(), said.request.text.as_str())).collect();
        ensure!(users == said, "stored are {users:?}, acknowledged were {said:?}");
        for said in &self.said {
            let again = self.control.conversations().send_message(said.request.clone()).await?.into_inner();
            let (message, turn) = (again.message.unwrap_or_default(), again.turn.unwrap_or_default());
            ensure!(
                (&message.message_id, &turn.turn_id) == (&said.message_id, &said.turn_id),
                "a repeat of {said:?} says {message:?} and {turn:?}"
            );
        }
        Ok(())
    }

    /// Every turn has the one end that was told, and the tools acted at most once for each.
    async fn turns(&self, follower: &Follower, report: &mut Report) -> anyhow::Result<()> {
        for (n, said) in self.said.iter().enumerate() {
            for (turn, status) in &said.tries {
                let got = self.control.turn(turn).await?;
                let now = got.turn.context("a turn")?;
                ensure!(now.status() == *status, "told was {status:?}, and now it is {now:?}");
                let ends: Vec<_> = follower
                    .kinds(turn)
                    .into_iter()
                    .filter_map(|kind| match kind {
                        Kind::Terminal(terminal) => Some(terminal.outcome()),
                        _ => None,
                    })
                    .collect();
                ensure!(ends == [outcome_of(*status)], "{turn} is {status:?}, and its stream ends {ends:?}");
                if *status == TurnStatus::Completed {
                    let answer = got.answer.map(|answer| answer.text).unwrap_or_default();
                    ensure!(answer.ends_with(&format!("done {n}")), "{turn} was answered {answer:?}");
                }
                *report.turns.entry(format!("{status:?}")).or_default() += 1;
            }
            let acts = self.workspace.lines(&format!("acts-{n}"));
            let done = said.tries.iter().filter(|(_, status)| *status == TurnStatus::Completed).count();
            ensure!(
                (done..=said.tries.len()).contains(&acts),
                "the tool of message {n} acted {acts} times: {said:?}"
            );
        }
        let told: usize = self.said.iter().map(|said| said.tries.len()).sum();
        // A page is 200 turns; beyond it the ids above are enough.
        let stored = self.control.turns(&self.conversation).await?.len();
        ensure!(stored == told.min(200), "{stored} turns are stored, {told} were told");
        Ok(())
    }

    async fn stream(&self, follower: &Follower) -> anyhow::Result<()> {
        let stored = replay(&self.control, &self.conversation).await?;
        let last = stored.last().map(|item| item.cursor.clone()).unwrap_or_default();
        wait_for("the follower is through", BRIEF, || async {
            Ok((follower.cursor() == last).then_some(()))
        })
        .await?;
        follower.check()?;
        let (stored, followed) = (told(stored), told(follower.items()));
        let differ = stored.iter().zip(&followed).find(|(one, other)| one != other);
        ensure!(differ.is_none(), "the stream reads otherwise than it was followed: {differ:?}");
        ensure!(stored.len() == followed.len(), "{} items are stored, {} came", stored.len(), followed.len());
        Ok(())
    }
}

/// With every session closed that a record knows, nothing may be left alive.
pub(super) async fn nothing_unknown_lives(stack: &Stack, clients: &[Client]) -> anyhow::Result<()> {
    for client in clients {
        for session in stack.control.list_sessions(&client.conversation).await? {
            let request = CloseSessionRequest { session_id: session.session_id };
            wait_for("the session closes", NORMAL, || async {
                match stack.runner_client()?.close_session(request.clone()).await {
                    Ok(_) => Ok(Some(())),
                    Err(status) if status.code() == tonic::Code::NotFound => Ok(Some(())),
                    Err(status) => Err(status.into()),
                }
            })
            .await?;
        }
    }
    stack.wait_nothing_left(BRIEF).await.context("alive, and no record knows it")
}
