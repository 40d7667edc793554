//! Engines that print without end: the memory of keeper and runner stays where it is.

use std::fmt::Write as _;

use anyhow::{Context as _, ensure};
use roundhouse_proto::engine::v1::{FailureReason, Outcome};
use roundhouse_test_support::{LONG, NORMAL, Stack, StackOptions, census};

use crate::{answer_of, turn_of};

/// Most memory that a keeper may ever have had. An unoptimised build's own pages are about 10 MB of it; a line may be
/// 16 MiB, and its buffer twice that while it grows.
const KEEPER_MOST: u64 = 48_000_000;
/// Most that its runner may ever have had: about 25 MB are the program's own.
const RUNNER_MOST: u64 = 80_000_000;

/// The most memory that a process ever had, in bytes.
fn most(pid: u32) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))
        .with_context(|| format!("process {pid} is gone"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}

/// Looks at the keepers and the runner of a stack.
fn flat(stack: &Stack) -> anyhow::Result<()> {
    let mut told = String::new();
    let mut keepers = 0;
    for process in stack.census().iter().filter(|one| one.role == census::Role::Keeper) {
        let bytes = most(process.pid)?;
        writeln!(told, "keeper {bytes}")?;
        ensure!(bytes < KEEPER_MOST, "{told}");
        keepers += 1;
    }
    ensure!(keepers > 0, "no keeper lives");
    let bytes = most(stack.runner.pid().context("the runner runs")?)?;
    writeln!(told, "runner {bytes}")?;
    ensure!(bytes < RUNNER_MOST, "{told}");
    Ok(())
}

#[tokio::test]
async fn memory_is_flat_on_a_gigabyte_of_standard_error() -> anyhow::Result<()> {
    let stack = Stack::start_with(StackOptions::default().fake_engine()?).await?;
    let conversation = stack.conversation().await?;
    let text = "[[stderr bytes=1000000000]][[text:through]] noise";
    let got = stack.control.run(&conversation, text, LONG).await?;
    ensure!(answer_of(&got) == "through", "{got:?}");
    flat(&stack)?;
    let spool: u64 = files(&stack.runner_state())?;
    ensure!(spool < 8_000_000, "{spool} bytes were kept of it");
    let next = stack.control.run(&conversation, "[[text:on]] next", NORMAL).await?;
    ensure!(answer_of(&next) == "on", "{next:?}");
    Ok(())
}

/// Bytes in the files below a directory.
fn files(directory: &std::path::Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            bytes += files(&entry.path())?;
        } else if kind.is_file() {
            bytes += entry.metadata()?.len();
        }
    }
    Ok(bytes)
}

#[tokio::test]
async fn memory_is_flat_on_300_megabytes_of_a_line_without_end() -> anyhow::Result<()> {
    let options = StackOptions::default().set("runner.cancel_term_grace", "60s").fake_engine()?;
    let stack = Stack::start_with(options).await?;
    let conversation = stack.conversation().await?;
    // It prints all of it, whatever it is told meanwhile, and then ends by itself.
    let done = stack.workspace.path().join("done");
    let text = format!(
        "[[ignore:term,int,hup,interrupt,eof]][[text:before]][[long bytes=300000000 open]][[append path={}:all]]\
         [[exit code=0]] flood",
        done.display()
    );
    let follower = stack.control.follow(&conversation);
    let turn = stack.control.begin(&conversation, &text).await?;
    let ended = follower.wait_terminal(&turn, LONG);
    tokio::pin!(ended);
    // The keeper goes with its engine: it is looked at while it lives.
    let mut looks = 0;
    let end = loop {
        tokio::select! {
            end = &mut ended => break end?,
            () = tokio::time::sleep(std::time::Duration::from_millis(20)) => {
                if stack.census().iter().any(|one| one.role == census::Role::Keeper) {
                    // It may end between the two looks.
                    match flat(&stack) {
                        Ok(()) => looks += 1,
                        Err(error) if error.to_string().contains("gone") || error.to_string().contains("no keeper") => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
    };
    ensure!(looks > 0, "the keeper was never seen");
    ensure!(stack.workspace.lines("done") == 1, "it did not print all of it");
    ensure!(end.outcome() == Outcome::Failed, "{end:?}");
    let got = stack.control.turn(&turn).await?;
    let failure = turn_of(&got).failure.clone().context("a failed turn says why")?;
    ensure!(failure.reason() == FailureReason::OutputInvalid, "{failure:?}");
    ensure!(!failure.next_action.is_empty(), "{failure:?}");
    let next = stack.control.run(&conversation, "[[text:on]] next", NORMAL).await?;
    ensure!(answer_of(&next) == "on", "{next:?}");
    follower.check()
}
