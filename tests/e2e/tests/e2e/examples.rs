//! The clients under `examples/`: made from the contracts as their README says, and run as a person runs them.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use roundhouse_test_support::{Agent, LONG, NORMAL, Stack, StackOptions, bins, wait_until};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
};

/// The longest that one step of making an example may take. Go compiles all of gRPC.
const MAKING: Duration = Duration::from_secs(240);

/// Set: the Go example is left out, for a machine that has no Go and no Debian packages of it. CI does not set it.
const WITHOUT_GO: &str = "ROUNDHOUSE_TEST_WITHOUT_GO";

/// An example that was made, in a directory of the test.
struct Example {
    directory: PathBuf,
    program: PathBuf,
    first: Vec<String>,
    home: PathBuf,
}

/// What an example said, and the code that it ended with.
struct Said {
    out: Vec<String>,
    err: String,
    code: Option<i32>,
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        // What somebody made here by hand shall not be what is tested.
        if ["gen", "dist", "node_modules", "__pycache__", "ask"].iter().any(|made| name == *made) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to.join(&name))?;
        } else {
            std::fs::copy(entry.path(), to.join(&name))?;
        }
    }
    Ok(())
}

impl Example {
    /// The example of this language, copied beside the contracts.
    fn copied(stack: &Stack, language: &str) -> anyhow::Result<Self> {
        let clone = stack.root().join("clone");
        copy(&bins::repository().join("proto"), &clone.join("proto"))?;
        let directory = clone.join("examples").join(language);
        copy(&bins::repository().join("examples").join(language), &directory)?;
        let home = stack.root().join("home");
        Ok(Self { directory, program: PathBuf::new(), first: Vec::new(), home })
    }

    fn command(&self, program: &Path) -> anyhow::Result<Command> {
        let tools = bins::tool("python")?.parent().context("a directory")?.to_owned();
        let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap_or_default());
        let mut command = Command::new(program);
        command
            .current_dir(&self.directory)
            .env_clear()
            .env("PATH", path)
            .env("HOME", &self.home)
            // What Go has compiled is good for the next run, too.
            .env("GOCACHE", concat!(env!("CARGO_TARGET_TMPDIR"), "/go-cache"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        Ok(command)
    }

    /// Runs one of the commands that its README gives for making it.
    async fn make(&self, program: &str, args: &[&str]) -> anyhow::Result<()> {
        let shown = std::fs::read_to_string(bins::repository().join("examples/README.md"))?;
        let line = [&[program], args].concat().join(" ");
        ensure!(shown.lines().any(|one| one == line), "examples/README.md does not show `{line}`");
        let mut command = self.command(Path::new(program))?;
        let output = command.args(args).stdin(Stdio::null()).output();
        let output = tokio::time::timeout(MAKING, output)
            .await
            .with_context(|| format!("{program} does not end"))?
            .with_context(|| format!("cannot run {program}"))?;
        ensure!(
            output.status.success(),
            "{program} {args:?}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    fn start(&self, stack: &Stack, args: &[&str]) -> anyhow::Result<Child> {
        let mut command = self.command(&self.program)?;
        command.args(&self.first).args(["--server", stack.control_plane.address()]).args(args);
        // Else Python keeps what it prints for itself until it has more.
        command.env("PYTHONUNBUFFERED", "1");
        command.spawn().with_context(|| format!("cannot start {}", self.program.display()))
    }

    /// Runs it, with this typed by a person.
    async fn run(&self, stack: &Stack, args: &[&str], typed: &str) -> anyhow::Result<Said> {
        let mut child = self.start(stack, args)?;
        child.stdin.take().context("a standard input")?.write_all(typed.as_bytes()).await?;
        let output =
            tokio::time::timeout(LONG, child.wait_with_output()).await.context("it does not end")??;
        Ok(Said {
            out: String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
            code: output.status.code(),
        })
    }

    async fn python(stack: &Stack) -> anyhow::Result<Self> {
        let mut example = Self::copied(stack, "python")?;
        example.make("./generate", &[]).await?;
        example.program = "python3".into();
        example.first = vec!["ask.py".to_owned()];
        Ok(example)
    }

    async fn typescript(stack: &Stack) -> anyhow::Result<Self> {
        let mut example = Self::copied(stack, "typescript")?;
        let modules = bins::repository().join("examples/typescript/node_modules");
        ensure!(
            modules.is_dir(),
            "{} is missing: run `npm ci` in examples/typescript (tests/run does)",
            modules.display()
        );
        std::os::unix::fs::symlink(modules, example.directory.join("node_modules"))?;
        example.make("npm", &["run", "generate"]).await?;
        example.make("npm", &["run", "build"]).await?;
        example.program = "node".into();
        example.first = vec!["dist/ask.js".to_owned()];
        Ok(example)
    }

    async fn go(stack: &Stack) -> anyhow::Result<Self> {
        let mut example = Self::copied(stack, "go")?;
        let hint = ".ci/run installs what it needs from Debian";
        example.make("./generate", &[]).await.context(hint)?;
        example.make("./build-with-debian", &[]).await.context(hint)?;
        example.program = example.directory.join("ask");
        Ok(example)
    }
}

impl Said {
    /// The lines after the conversation's id, and that.
    fn after_id(&self) -> anyhow::Result<(String, Vec<&str>)> {
        let id = self.out.first().and_then(|line| line.strip_prefix("conversation: "));
        let id = id.with_context(|| format!("no conversation: {:?} {}", self.out, self.err))?.to_owned();
        Ok((id, self.out[1..].iter().map(String::as_str).collect()))
    }
}

fn options() -> StackOptions {
    StackOptions::default().agents(&[Agent::new("builder"), Agent::new("asker").permissions("ask")])
}

/// Everything that the examples promise.
async fn keeps_its_promises(stack: &mut Stack, example: &Example) -> anyhow::Result<()> {
    let id = answers_and_goes_on(stack, example).await?;
    asks_before_it_allows(stack, example).await?;
    says_why_it_failed(stack, example).await?;
    goes_on_after_a_broken_stream(stack, example).await?;
    sends_once_what_it_sent_twice(stack, example, &id).await
}

async fn answers_and_goes_on(stack: &Stack, example: &Example) -> anyhow::Result<String> {
    let workspace = stack.workspace_name();
    let args = ["--workspace", &workspace, "--agent", "builder", "[[text:It is empty.]] what is here?"];
    let said = example.run(stack, &args, "").await?;
    let (id, lines) = said.after_id()?;
    assert_eq!(lines, ["origin: STARTED", "It is empty.", "outcome: COMPLETED"], "{}", said.err);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));

    let said = example.run(stack, &["--conversation", &id, "[[text:Still.]] and now?"], "").await?;
    let (again, lines) = said.after_id()?;
    assert_eq!(again, id);
    assert_eq!(lines, ["origin: RESUMED", "Still.", "outcome: COMPLETED"], "{}", said.err);
    assert_eq!(stack.control.messages(&id).await?.len(), 4);
    Ok(id)
}

async fn asks_before_it_allows(stack: &Stack, example: &Example) -> anyhow::Result<()> {
    let workspace = stack.workspace_name();
    // One line for each of two questions: neither may swallow what was typed for the other.
    let text = "[[bash:echo made > first]][[bash:echo made > second]][[text:through]] may I?";
    let args = ["--workspace", &workspace, "--agent", "asker", text];
    let said = example.run(stack, &args, "n\ny\n").await?;
    let (_, lines) = said.after_id()?;
    assert_eq!(lines, ["origin: STARTED", "through", "outcome: COMPLETED"], "{}", said.err);
    assert_eq!(said.err.matches("allow? [y/N]").count(), 2, "{}", said.err);
    ensure!(said.err.contains("echo made > first"), "it does not say what is asked: {}", said.err);
    assert_eq!(stack.workspace.read("first"), None, "denied");
    assert_eq!(stack.workspace.read("second").as_deref(), Some("made\n"), "allowed");
    Ok(())
}

async fn says_why_it_failed(stack: &Stack, example: &Example) -> anyhow::Result<()> {
    // A turn that fails.
    let workspace = stack.workspace_name();
    let said = example.run(stack, &["--workspace", &workspace, "--agent", "nobody", "hello"], "").await?;
    let (_, lines) = said.after_id()?;
    assert_eq!((lines.last(), said.code), (Some(&"outcome: FAILED"), Some(1)), "{}", said.err);
    ensure!(said.err.contains("CONFIGURATION: "), "{}", said.err);

    // Calls that fail.
    let nowhere = "cnv_00000000000000000000000000000000";
    let said = example.run(stack, &["--conversation", nowhere, "hello"], "").await?;
    assert_eq!(said.code, Some(1), "{}", said.err);
    ensure!(said.err.contains(" CONVERSATION_NOT_FOUND: "), "{}", said.err);
    let said = example.run(stack, &["--workspace", &workspace, "--agent", "builder", ""], "").await?;
    assert_eq!(said.code, Some(1), "{}", said.err);
    ensure!(said.err.contains(" FIELD_INVALID: ") && said.err.contains("\n  text: "), "{}", said.err);
    Ok(())
}

/// Reads lines up to this one.
async fn read_to(lines: &mut Lines<BufReader<ChildStdout>>, wanted: &str) -> anyhow::Result<Vec<String>> {
    let mut all = Vec::new();
    let reading = async {
        while let Some(line) = lines.next_line().await? {
            all.push(line);
            if all.last().is_some_and(|line| line == wanted) {
                return Ok(());
            }
        }
        anyhow::bail!("it ended")
    };
    tokio::time::timeout(NORMAL, reading)
        .await
        .context("it does not come")
        .and_then(|read| read)
        .with_context(|| format!("waiting for {wanted:?} after {all:?}"))?;
    Ok(all)
}

async fn goes_on_after_a_broken_stream(stack: &mut Stack, example: &Example) -> anyhow::Result<()> {
    let workspace = stack.workspace_name();
    let wait = |file: &str| format!("[[bash:until test -e {file}; do sleep 0.1; done]]");
    let text =
        format!("[[text:one]]{}[[text:two]]{}[[text:three]] wait for me", wait("killed"), wait("stopped"));
    let mut child = example.start(stack, &["--workspace", &workspace, "--agent", "builder", &text])?;
    let mut lines = BufReader::new(child.stdout.take().context("a standard output")?).lines();
    let mut errors = BufReader::new(child.stderr.take().context("a standard error")?).lines();
    let mut out = Vec::new();
    for (said, file) in [("one", "killed"), ("two", "stopped")] {
        out.extend(read_to(&mut lines, said).await?);
        if file == "killed" {
            stack.control_plane.kill().await?;
        } else {
            stack.control_plane.stop("TERM", NORMAL).await?;
        }
        let err = tokio::time::timeout(NORMAL, errors.next_line()).await.context("it says nothing")??;
        ensure!(
            err.as_ref().is_some_and(|err| err.contains("going on after what has come")),
            "{file}: {err:?}"
        );
        stack.control_plane.start_again().await?;
        stack.workspace.write(file, "")?;
    }
    out.extend(read_to(&mut lines, "outcome: COMPLETED").await?);
    let status = tokio::time::timeout(NORMAL, child.wait()).await.context("it does not end")??;
    ensure!(status.success(), "{status}");
    assert_eq!(out[1..], ["origin: STARTED", "one", "two", "three", "outcome: COMPLETED"]);
    Ok(())
}

async fn sends_once_what_it_sent_twice(stack: &mut Stack, example: &Example, id: &str) -> anyhow::Result<()> {
    // The message is stored, and the control plane dies before it says so.
    let before = stack.control.messages(id).await?.len();
    stack.control_plane.kill().await?;
    stack.control_plane.set_env("FAILPOINTS", "control-plane::after-accept=return");
    stack.control_plane.start_again().await?;
    stack.wait_runner().await?;
    let child = example.start(stack, &["--conversation", id, "[[text:once]] ask me once"])?;
    let status = stack.control_plane.wait_exit(NORMAL).await?;
    assert!(!status.success(), "it died where it should: {status}");
    stack.control_plane.clear_env("FAILPOINTS");
    stack.control_plane.start_again().await?;
    let output = tokio::time::timeout(LONG, child.wait_with_output()).await.context("it does not end")??;
    let said = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = said.lines().skip(1).collect();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(lines, ["origin: RESUMED", "once", "outcome: COMPLETED"], "{err}");
    assert_eq!(stack.control.messages(id).await?.len(), before + 2, "one question, one answer");
    assert_eq!(stack.model.count_for("ask me once"), 1);
    wait_until("nothing of it is left", NORMAL, || stack.tool_processes().is_empty()).await
}

#[tokio::test]
async fn the_python_client_keeps_its_promises() -> anyhow::Result<()> {
    let mut stack = Stack::start_with(options()).await?;
    let example = Example::python(&stack).await?;
    keeps_its_promises(&mut stack, &example).await
}

#[tokio::test]
async fn the_typescript_client_keeps_its_promises() -> anyhow::Result<()> {
    let mut stack = Stack::start_with(options()).await?;
    let example = Example::typescript(&stack).await?;
    keeps_its_promises(&mut stack, &example).await
}

#[tokio::test]
async fn the_go_client_keeps_its_promises() -> anyhow::Result<()> {
    if std::env::var_os(WITHOUT_GO).is_some() {
        eprintln!("left out: {WITHOUT_GO} is set");
        return Ok(());
    }
    let mut stack = Stack::start_with(options()).await?;
    let example = Example::go(&stack).await?;
    keeps_its_promises(&mut stack, &example).await
}
