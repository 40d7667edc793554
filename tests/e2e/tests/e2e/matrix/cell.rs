//! One cell: a conversation of its own in a workspace of its own, brought to its step.

use std::fs;

use anyhow::{Context as _, bail};
use roundhouse_proto::{
    control::v1::{SendMessageRequest, TurnStatus},
    engine::v1::{CloseSessionRequest, Outcome, event_body::Kind},
};
use roundhouse_test_support::{BRIEF, Control, Follower, NORMAL, Workspace, wait_for, wait_until};
use tokio::task::JoinHandle;

use super::{Engine, Held, Step, ground::Ground};
use crate::damage::files;

/// What the tool writes to, a line for each time it acted.
pub(super) const ACTS: &str = "acts";

pub(super) struct Cell {
    pub(super) step: Step,
    pub(super) conversation: String,
    pub(super) follower: Follower,
    pub(super) workspace: Workspace,
    /// The turn that is at its step, once somebody told its id.
    pub(super) turn: Option<String>,
    /// The message that is on its way, where the answer is not there yet.
    pub(super) sending: Option<JoinHandle<anyhow::Result<String>>>,
    /// The user's messages that have to be there, once each.
    pub(super) said: Vec<String>,
    pub(super) outcome: Option<Outcome>,
}

/// Sends until it is acknowledged, as a client does: the same request again whenever the answer is lost.
async fn send(control: Control, conversation_id: String, text: String) -> anyhow::Result<String> {
    let request = SendMessageRequest {
        request_id: format!("of-{conversation_id}"),
        conversation_id,
        text,
        ..SendMessageRequest::default()
    };
    let sent = wait_for("the message is acknowledged", NORMAL, || async {
        match control.conversations().send_message(request.clone()).await {
            Ok(sent) => Ok(Some(sent.into_inner())),
            Err(status) => Err(status.into()),
        }
    })
    .await?;
    Ok(sent.turn.context("a turn")?.turn_id)
}

impl Cell {
    /// A conversation whose engine is warm after a first turn.
    pub(super) async fn new(ground: &Ground, step: Step) -> anyhow::Result<Self> {
        let stack = &ground.stack;
        let mut agent = ground.agent();
        if step == Step::Permission {
            agent = agent.permissions("ask");
        }
        let workspace = Workspace::create(&stack.root().join("work").join(step.name()), &[agent])?;
        let name = workspace.path().display().to_string();
        let conversation = stack.control.create(&name, "builder").await?.conversation_id;
        let follower = stack.control.follow(&conversation);
        let first = format!("[[text:warm]] first in {}", step.name());
        stack.control.run_answered(&conversation, &first, "warm", NORMAL).await?;
        let said = vec![first];
        Ok(Self { step, conversation, follower, workspace, turn: None, sending: None, said, outcome: None })
    }

    /// A marker at which the engine waits until the gate is open.
    fn gate(&self, ground: &Ground) -> String {
        match ground.engine {
            Engine::Fake => format!("[[gate:{}]]", self.workspace.path().join("go").display()),
            Engine::Claude | Engine::Codex => format!("[[gate:{}]]", self.step.name()),
        }
    }

    /// Lets an engine go on that waits.
    pub(super) fn open_gate(&self, ground: &Ground) -> anyhow::Result<()> {
        ground.stack.model.release_gate(self.step.name());
        self.workspace.write("go", "")
    }

    /// The message of the turn.
    fn text(&self, ground: &Ground) -> String {
        let (gate, name) = (self.gate(ground), self.step.name());
        let act = format!("echo acted >> {ACTS}");
        let until = "until test -e go; do sleep 0.05; done";
        let script = match self.step {
            Step::MidText => format!("[[bash:{act}]][[text:so far ]]{gate}[[text:and on]]"),
            Step::MidTool | Step::Cancel => format!("[[bash:{act}; {until}]][[text:and on]]"),
            Step::Permission => match ground.engine {
                Engine::Fake => format!("[[bash ask:{act}]][[text:and on]]"),
                Engine::Claude => format!("[[bash:{act}]][[text:and on]]"),
                Engine::Codex => format!(
                    "[[tool name=Bash:{{\"command\":\"{act}\",\"sandbox_permissions\":\"require_escalated\",\
                     \"justification\":\"to act\"}}]][[text:and on]]"
                ),
            },
            _ => format!("[[bash:{act}]][[text:and on]]"),
        };
        format!("{script} now in {name}")
    }

    /// Brings the turn to its step; it is held there when this returns.
    pub(super) async fn reach(&mut self, ground: &Ground) -> anyhow::Result<()> {
        let name = self.step.name();
        self.bring(ground).await.with_context(|| format!("on the way to {name}"))?;
        ground.log(&format!("{name} is reached"));
        Ok(())
    }

    async fn bring(&mut self, ground: &Ground) -> anyhow::Result<()> {
        let name = self.step.name();
        let control = &ground.stack.control;
        match self.step {
            Step::Promotion => {
                let gate = self.gate(ground);
                let before = format!("[[text:so far ]]{gate}[[text:done]] before in {name}");
                let first = control.begin(&self.conversation, &before).await?;
                self.says(&first, "so far ").await?;
                self.said.push(before);
            }
            Step::Replacement => self.damage(ground).await?,
            _ => {}
        }
        let text = self.text(ground);
        if let Held::At(point) = self.step.held()
            && self.step != Step::Cancel
        {
            // A keeper writes much; the message is what bears the step's name.
            let bears = if point.starts_with("keeper::") { name } else { "" };
            ground.arm(point, name, bears)?;
        }
        self.said.push(text.clone());
        let mut sending = tokio::spawn(send(control.clone(), self.conversation.clone(), text));
        if !matches!(self.step, Step::BeforeSendCommit | Step::AfterSendCommit) {
            self.turn = Some((&mut sending).await??);
        } else {
            self.sending = Some(sending);
        }
        let turn = self.turn.clone().unwrap_or_default();
        match self.step {
            Step::MidText => self.says(&turn, "so far ").await?,
            Step::MidTool | Step::Cancel => {
                let acts = || self.workspace.lines(ACTS) == 1;
                wait_until("the tool runs", NORMAL, acts).await?;
                let called = |kind: &Kind| matches!(kind, Kind::ToolCall(_)).then_some(());
                self.follower.wait_event(&turn, "a tool call", NORMAL, called).await?;
            }
            Step::Permission => {
                control.wait_status(&turn, TurnStatus::WaitingForPermission, NORMAL).await?;
            }
            Step::Promotion => self.open_gate(ground)?,
            _ => {}
        }
        if let Held::At(point) = self.step.held() {
            if self.step == Step::Cancel {
                ground.arm(point, name, "")?;
                control.cancel(&turn).await?;
            }
            ground.held(point, name).await?;
        }
        Ok(())
    }

    /// Waits until the engine has said this, finished or not.
    async fn says(&self, turn: &str, text: &str) -> anyhow::Result<()> {
        wait_until(&format!("{turn} says {text:?}"), NORMAL, || {
            let finished = |kind: &Kind| matches!(kind, Kind::Text(said) if said.text.contains(text));
            self.follower.partial_text(turn).contains(text) || self.follower.kinds(turn).iter().any(finished)
        })
        .await
    }

    /// Closes the session and takes its native file away.
    async fn damage(&self, ground: &Ground) -> anyhow::Result<()> {
        let stack = &ground.stack;
        let session = stack.control.list_sessions(&self.conversation).await?.pop().context("a session")?;
        let native = session.native_ref.context("a native ref")?.id;
        let request = CloseSessionRequest { session_id: session.session_id };
        stack.runner_client()?.close_session(request).await.context("CloseSession")?;
        let named = files(&stack.runner_state(), |path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.contains(&native) && name.ends_with(".jsonl")
        });
        if named.is_empty() {
            bail!("no session file of {native}");
        }
        for file in named {
            fs::remove_file(file)?;
        }
        wait_until("the session is closed", BRIEF, || {
            // The keeper's directory names no conversation; its engine's working directory is the workspace.
            let here = self.workspace.path();
            !stack
                .census()
                .iter()
                .any(|one| fs::read_link(format!("/proc/{}/cwd", one.pid)).is_ok_and(|cwd| cwd == here))
        })
        .await
    }
}
