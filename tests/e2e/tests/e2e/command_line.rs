//! The `roundhouse` command as people and scripts run it.

use std::{path::Path, process::Stdio};

use anyhow::{Context as _, ensure};
use roundhouse_test_support::{Agent, LONG, NORMAL, Stack, StackOptions, bins};
use serde_json::Value;
use tokio::process::Command;

/// What a command did.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Done {
    /// The data, which has to be one JSON value.
    pub(crate) fn json(&self) -> anyhow::Result<Value> {
        serde_json::from_str(&self.stdout).with_context(|| format!("this should be JSON: {self:?}"))
    }
}

fn command(home: &Path, args: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(bins::bin("roundhouse")?);
    command
        .args(args)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("HOME", home)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    Ok(command)
}

async fn run(home: &Path, args: &[&str]) -> anyhow::Result<Done> {
    let output =
        tokio::time::timeout(LONG, command(home, args)?.output()).await.context("it does not end")??;
    Ok(Done {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Runs `roundhouse --json` against a stack.
pub(crate) async fn ask(stack: &Stack, args: &[&str]) -> anyhow::Result<Done> {
    let url = stack.control_plane.url();
    let mut all = vec!["--server", &url, "--json"];
    all.extend_from_slice(args);
    run(&stack.root().join("home"), &all).await
}

#[tokio::test]
async fn a_conversation_from_the_command_line() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let workspace = stack.workspace_name();
    let sent =
        ask(&stack, &["send", "--wait", "-a", "builder", "-C", &workspace, "[[text:from afar]] hello"])
            .await?;
    ensure!(sent.code == Some(0), "{sent:?}");
    let sent = sent.json()?;
    assert_eq!(sent["answer"]["text"], "from afar");
    assert_eq!(sent["turn"]["status"], "COMPLETED");
    let conversation = sent["conversation_id"].as_str().context("an id")?;
    let turn = sent["turn"]["turn_id"].as_str().context("an id")?;

    let messages = ask(&stack, &["messages", conversation]).await?.json()?;
    assert_eq!(messages["messages"].as_array().map(Vec::len), Some(2));
    let turns = ask(&stack, &["turns", conversation]).await?.json()?;
    assert_eq!(turns["turns"][0]["turn_id"], turn);
    let one = ask(&stack, &["turns", turn]).await?.json()?;
    assert_eq!(one["answer"]["text"], "from afar");
    let sessions = ask(&stack, &["sessions", conversation]).await?.json()?;
    assert_eq!(sessions["sessions"][0]["state"], "ACTIVE");
    let runners = ask(&stack, &["runners"]).await?.json()?;
    assert_eq!(runners["runners"][0]["state"], "ONLINE");
    let workspaces = ask(&stack, &["workspaces", "list"]).await?.json()?;
    assert_eq!(workspaces["workspaces"][0]["path"], workspace);
    let agents = ask(&stack, &["agents", "list", "-C", &workspace]).await?.json()?;
    assert_eq!(agents["agents"][0]["name"], "builder");
    let list = ask(&stack, &["conversations", "list"]).await?.json()?;
    assert_eq!(list["conversations"][0]["conversation_id"], conversation);

    let events = ask(&stack, &["events", conversation, "--turn", turn, "--follow"]).await?;
    ensure!(events.code == Some(0), "{events:?}");
    let kinds: Vec<Value> = events
        .stdout
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .with_context(|| format!("a value a line: {events:?}"))?;
    assert_eq!(kinds.last().map(|last| last["event"].clone()), Some(Value::from("terminal")), "{kinds:?}");
    Ok(())
}

#[tokio::test]
async fn a_person_reads_the_answer_on_standard_output_and_the_rest_beside_it() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let url = stack.control_plane.url();
    let workspace = stack.workspace_name();
    let text = "[[bash:echo in-the-tool]][[text:only this]] hello";
    let args = ["--server", &url, "send", "--wait", "-a", "builder", "-C", &workspace, text];
    let done = run(&stack.root().join("home"), &args).await?;
    ensure!(done.code == Some(0), "{done:?}");
    assert_eq!(done.stdout.trim(), "only this", "{done:?}");
    ensure!(done.stderr.contains("Bash"), "what happens is told beside it: {done:?}");
    Ok(())
}

#[tokio::test]
async fn exit_codes_tell_what_happened() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let workspace = stack.workspace_name();
    let send = ["send", "--wait", "-a", "builder", "-C", &workspace];
    let with = |text: &'static str| -> Vec<&str> { send.iter().copied().chain([text]).collect() };

    let failed = ask(&stack, &with("[[error 403:no]] fail")).await?;
    assert_eq!(failed.code, Some(1), "a failed turn: {failed:?}");
    let usage = ask(&stack, &["send", "--no-such-flag"]).await?;
    assert_eq!(usage.code, Some(2), "{usage:?}");
    let name = "x".repeat(300);
    let invalid =
        ask(&stack, &["send", "--actor", &name, "-a", "builder", "-C", &workspace, "hello"]).await?;
    assert_eq!(invalid.code, Some(3), "a name that is too long: {invalid:?}");
    let missing = ask(&stack, &["turns", "trn_00000000000000000000000000000000"]).await?;
    assert_eq!(missing.code, Some(4), "{missing:?}");
    let home = stack.root().join("home");
    // Port 9 of loopback: nobody listens there, and nobody else can be reached.
    let unreachable = run(&home, &["--server", "http://127.0.0.1:9", "runners"]).await?;
    assert_eq!(unreachable.code, Some(6), "{unreachable:?}");

    // A turn that somebody else cancels while it is waited for.
    let url = stack.control_plane.url();
    let mut args = vec!["--server", &url, "--json"];
    args.extend(with("[[text:some]][[gate:never]] wait for it"));
    let waiting = command(&home, &args)?.spawn()?;
    stack.model.wait_gate("never", NORMAL).await?;
    let conversations = ask(&stack, &["conversations", "list"]).await?.json()?;
    let turn =
        conversations["conversations"][0]["active_turn_id"].as_str().context("an active turn")?.to_owned();
    let cancelled = ask(&stack, &["cancel", "--wait", &turn]).await?;
    ensure!(cancelled.code == Some(0), "{cancelled:?}");
    let output =
        tokio::time::timeout(NORMAL, waiting.wait_with_output()).await.context("it does not end")??;
    assert_eq!(output.status.code(), Some(130), "{output:?}");

    let retried = ask(&stack, &["retry", &turn]).await?;
    ensure!(retried.code == Some(0), "{retried:?}");
    Ok(())
}

#[tokio::test]
async fn a_permission_is_answered_from_the_command_line() -> anyhow::Result<()> {
    let options = StackOptions::default().agents(&[Agent::new("builder").permissions("ask")]);
    let stack = Stack::start_with(options).await?;
    let conversation = stack.conversation().await?;
    let turn = stack.control.begin(&conversation, "[[bash:echo x > made]][[text:through]] may I").await?;
    let mut request = String::new();
    roundhouse_test_support::wait_for("the request is listed", NORMAL, || async {
        let listed = ask(&stack, &["permissions", "list"]).await?.json()?;
        Ok(listed["permissions"][0]["request_id"].as_str().map(str::to_owned))
    })
    .await?
    .clone_into(&mut request);
    let allowed = ask(&stack, &["permissions", "allow", &request]).await?;
    ensure!(allowed.code == Some(0), "{allowed:?}");
    stack.control.wait_end(&turn, NORMAL).await?;
    assert_eq!(stack.workspace.read("made").as_deref(), Some("x\n"));
    let late = ask(&stack, &["permissions", "deny", &request]).await?;
    assert_eq!(late.code, Some(4), "another answer was first: {late:?}");
    Ok(())
}

#[tokio::test]
async fn up_starts_both_services_and_leaves_no_process_after_ctrl_c() -> anyhow::Result<()> {
    up_and_down("INT").await
}

#[tokio::test]
async fn up_leaves_no_process_after_kill_9() -> anyhow::Result<()> {
    up_and_down("KILL").await
}

#[tokio::test]
async fn up_that_gives_up_on_its_runner_leaves_no_process() -> anyhow::Result<()> {
    let mut stack = Stack::start().await?;
    stack.kill_both().await?;
    let (mut up, url, _) = self::up(&stack).await?;
    let workspace = stack.workspace_name();
    let home = stack.root().join("home");
    let text = "[[text:on its way]][[gate:never]] for ever";
    let sent = run(&home, &["--server", &url, "send", "-a", "builder", "-C", &workspace, text]).await?;
    ensure!(sent.code == Some(0), "{sent:?}");
    stack.model.wait_gate("never", NORMAL).await?;
    // The runner is killed as often as it is started, until `up` has had enough.
    let ended = async {
        loop {
            if let Ok(status) = tokio::time::timeout(std::time::Duration::from_millis(50), up.wait()).await {
                return status;
            }
            for one in stack.census().iter().filter(|one| one.command.contains(" __runner ")) {
                let _ = roundhouse_test_support::signal(one.pid, "KILL");
            }
        }
    };
    let status = tokio::time::timeout(NORMAL, ended).await.context("it goes on")??;
    assert_eq!(status.code(), Some(1));
    // The engine waits for a gate that never opens; a killed process needs a moment to be gone.
    stack.wait_nothing_left(NORMAL).await
}

#[tokio::test]
async fn a_second_ctrl_c_on_up_leaves_nothing_in_the_middle_of_a_turn_and_the_next_start_closes_it()
-> anyhow::Result<()> {
    // The tool takes no notice of an interrupt or a SIGTERM, so that the first Ctrl-C has to wait for it.
    let mut stack = Stack::start().await?;
    stack.kill_both().await?;
    let (mut up, url, pid) = self::up(&stack).await?;
    let workspace = stack.workspace_name();
    let home = stack.root().join("home");
    let text = "[[bash:trap '' INT TERM; echo yes > running; while :; do sleep 1; done]] deaf";
    let sent =
        run(&home, &["--server", &url, "--json", "send", "-a", "builder", "-C", &workspace, text]).await?;
    let turn = sent.json()?["turn"]["turn_id"].as_str().context("an id")?.to_owned();
    roundhouse_test_support::wait_until("the tool runs", NORMAL, || {
        stack.workspace.read("running").is_some()
    })
    .await?;
    roundhouse_test_support::signal(pid, "INT")?;
    // Whether the first is being waited for cannot be seen from outside, so the second comes until it is heard.
    let ended = async {
        loop {
            if let Ok(status) = tokio::time::timeout(std::time::Duration::from_millis(50), up.wait()).await {
                return status;
            }
            let _ = roundhouse_test_support::signal(pid, "INT");
        }
    };
    let status = tokio::time::timeout(NORMAL, ended).await.context("it waits")??;
    assert_eq!(status.code(), Some(130));
    // Nothing of it ends by itself, and a killed process needs a moment to be gone.
    stack.wait_nothing_left(NORMAL).await?;

    // The turn is not lost with it.
    let (mut up, url, pid) = self::up(&stack).await?;
    let shown = roundhouse_test_support::wait_for("the turn has ended", NORMAL, || async {
        let shown = run(&home, &["--server", &url, "--json", "turns", &turn]).await?.json()?;
        let status = shown["turn"]["status"].as_str().unwrap_or_default().to_owned();
        Ok(matches!(status.as_str(), "FAILED" | "CANCELLED").then_some(shown))
    })
    .await?;
    ensure!(shown["turn"]["end_time"].is_string(), "{shown}");
    roundhouse_test_support::signal(pid, "INT")?;
    tokio::time::timeout(NORMAL, up.wait()).await.context("it does not end")??;
    stack.wait_nothing_left(NORMAL).await
}

/// A running `up`, with its address and process id. A stack lends its model, its workspace and its directory.
async fn up(stack: &Stack) -> anyhow::Result<(tokio::process::Child, String, u32)> {
    let config = stack.root().join("roundhouse.toml").display().to_string();
    let state = stack.root().join("up");
    let settings = [
        format!("control_plane.state_dir={}", state.join("control-plane").display()),
        format!("runner.state_dir={}", state.join("runner").display()),
        "control_plane.listen=127.0.0.1:0".to_owned(),
        "runner.listen=127.0.0.1:0".to_owned(),
    ];
    let mut args = vec!["--config", &config, "--json"];
    for setting in &settings {
        args.extend(["--set", setting]);
    }
    args.push("up");
    let mut up = command(&stack.root().join("home"), &args)?.spawn()?;
    let pid = up.id().context("it runs")?;
    stack.log.forward("up", up.stderr.take().context("piped")?);
    let mut lines =
        tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(up.stdout.take().context("piped")?));
    let ready =
        tokio::time::timeout(NORMAL, lines.next_line()).await.context("never ready")??.context("it ended")?;
    let ready: Value = serde_json::from_str(&ready).with_context(|| format!("the ready line: {ready}"))?;
    let address = ready["control_plane"].as_str().with_context(|| format!("an address: {ready}"))?;
    let url = if address.starts_with("http") { address.to_owned() } else { format!("http://{address}") };
    // What it says later is nobody's here, and must not fill the pipe.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    Ok((up, url, pid))
}

async fn up_and_down(signal: &str) -> anyhow::Result<()> {
    // A stack lends its model, its workspace and its directory; its own services stop first.
    let mut stack = Stack::start().await?;
    stack.kill_both().await?;
    let (mut up, url, pid) = self::up(&stack).await?;
    let workspace = stack.workspace_name();
    let home = stack.root().join("home");
    let send = ["--server", &url, "send", "--wait", "-a", "builder", "-C", &workspace, "[[text:up]] hello"];
    let sent = run(&home, &send).await?;
    ensure!(sent.code == Some(0) && sent.stdout.trim() == "up", "{sent:?}");
    ensure!(stack.census().len() >= 4, "up, two services and an engine live");

    // In the middle of a turn, too.
    let running =
        command(&home, &["--server", &url, "send", "-a", "builder", "-C", &workspace, "[[hang]] never"])?;
    let sent = { running }.output().await?;
    ensure!(sent.status.success(), "{sent:?}");
    stack.model.wait_for_text("never", 1, NORMAL).await?;
    roundhouse_test_support::signal(pid, signal)?;
    tokio::time::timeout(NORMAL, up.wait())
        .await
        .with_context(|| format!("SIG{signal} does not end it"))??;
    stack.wait_nothing_left(NORMAL).await
}
