//! `roundhouse chat` at a real terminal, with the real engine behind it.

use anyhow::{Context as _, ensure};
use roundhouse_test_support::{Agent, NORMAL, Stack, StackOptions, bins};
use serde_json::Value;

use crate::terminal::Terminal;

fn chat(stack: &Stack, args: &[&str]) -> anyhow::Result<Terminal> {
    let url = stack.control_plane.url();
    let home = stack.root().join("home");
    let all: Vec<&str> = ["--server", &url, "chat"].iter().chain(args).copied().collect();
    Terminal::start(bins::bin("roundhouse")?.as_os_str(), &all, &[("HOME", home.as_os_str())])
}

async fn asking() -> anyhow::Result<Stack> {
    Stack::start_with(StackOptions::default().agents(&[Agent::new("builder").permissions("ask")])).await
}

#[tokio::test]
async fn s26_a_chat_goes_through_a_permission_a_restart_and_a_cancel_without_gap_or_repeat()
-> anyhow::Result<()> {
    let mut stack = asking().await?;
    let workspace = stack.workspace_name();
    let mut chat = chat(&stack, &["--no-history", "-a", "builder", "-C", &workspace])?;
    chat.expect("next agent: builder").await?;
    chat.expect("> ").await?;
    chat.keys("[[bash:echo x > made]][[text:it is made]] may I\r")?;
    chat.expect("STARTED").await?;
    chat.expect("echo x > made").await?;
    chat.expect("y or n?").await?;
    chat.keys("y\n")?;
    chat.expect("it is made").await?;
    chat.expect("── completed").await?;
    assert_eq!(stack.workspace.read("made").as_deref(), Some("x\n"));

    // The control plane dies in the middle of an answer, and one more line is typed while it is away.
    chat.expect("> ").await?;
    chat.keys("[[text:the first half]][[gate:half]][[text: and the second]] tell me\r")?;
    chat.expect("RESUMED").await?;
    chat.expect("the first half").await?;
    stack.control_plane.kill().await?;
    chat.expect("waiting for the server").await?;
    chat.keys("[[text:typed while it was away]] another\n")?;
    chat.expect("trying again until it is answered").await?;
    stack.control_plane.start_again().await?;
    // What was typed is stored and waits while the first is still at work.
    chat.expect("queued").await?;
    stack.model.release_gate("half");
    chat.expect(" and the second").await?;
    chat.expect("── completed").await?;
    chat.expect("typed while it was away").await?;
    chat.expect("── completed").await?;

    chat.expect("> ").await?;
    chat.keys("[[text:some]][[gate:never]] wait for it\r")?;
    stack.model.wait_gate("never", NORMAL).await?;
    chat.expect("some").await?;
    chat.keys("\u{3}")?;
    chat.expect("cancelling").await?;
    chat.expect("── cancelled").await?;
    chat.expect("> ").await?;
    chat.keys("/agent\r")?;
    chat.expect("claude-code").await?;
    chat.expect("> ").await?;
    chat.keys("/sessions\r")?;
    chat.expect("ses_").await?;
    chat.expect("> ").await?;
    chat.keys("/quit\r")?;
    let (code, all) = chat.ended().await?;
    ensure!(code == Some(0), "{code:?}: {all}");
    ensure!(all.matches("the first half").count() == 2, "once typed and once said: {all}");
    ensure!(stack.model.count_for("another") == 1, "sent again, worked on once");
    Ok(())
}

#[tokio::test]
async fn a_conversation_is_exported_by_position_with_what_was_interrupted_marked() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    let held = stack.control.begin(&conversation, "[[text:half of it]][[gate:never]] one").await?;
    stack.model.wait_gate("never", NORMAL).await?;
    let next = stack.control.begin(&conversation, "[[text:whole]] two").await?;
    let export = async |format: &str| {
        let mut command = tokio::process::Command::new(bins::bin("roundhouse")?);
        let url = stack.control_plane.url();
        command.args(["--server", &url, "export", &conversation, format]).env_clear();
        command.env("HOME", stack.root().join("home"));
        let output = tokio::time::timeout(NORMAL, command.output()).await.context("it does not end")??;
        ensure!(output.status.success(), "{output:?}");
        anyhow::Ok(String::from_utf8(output.stdout)?)
    };
    let early: Value = serde_json::from_str(&export("json").await?)?;
    let last = early["messages"].as_array().and_then(|messages| messages.last()).context("a message")?;
    assert_eq!((&last["position"], &last["text"]), (&Value::Null, &Value::from("[[text:whole]] two")));
    stack.control.cancel(&held).await?;
    stack.control.wait_end(&next, NORMAL).await?;
    let late: Value = serde_json::from_str(&export("json").await?)?;
    let told: Vec<_> = late["messages"]
        .as_array()
        .context("messages")?
        .iter()
        .map(|message| (message["position"].clone(), message["role"].clone(), message["incomplete"].clone()))
        .collect();
    let expected = [(1, "USER", false), (2, "AGENT", true), (3, "USER", false), (4, "AGENT", false)];
    let expected = expected.map(|(position, role, incomplete)| {
        (Value::from(position), Value::from(role), Value::from(incomplete))
    });
    assert_eq!(told, expected, "{late}");
    let text = export("md").await?;
    ensure!(text.contains("## 2. builder (incomplete: the turn was interrupted)\n\nhalf of it\n"), "{text}");
    Ok(())
}
