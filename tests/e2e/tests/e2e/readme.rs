//! What the README shows is what works: its examples are run, its tables are compared.

use std::{collections::BTreeSet, path::PathBuf, process::Stdio};

use anyhow::{Context as _, ensure};
use roundhouse_test_support::{LONG, Stack, bins, network};
use serde_json::Value;
use tokio::process::Command;

fn readme() -> anyhow::Result<String> {
    Ok(std::fs::read_to_string(bins::repository().join("README.md"))?)
}

/// The code blocks after a heading of the second level, up to the next one, with their language.
fn blocks(heading: &str) -> anyhow::Result<Vec<(String, String)>> {
    let readme = readme()?;
    let section = readme
        .split("\n## ")
        .find(|section| section.lines().next() == Some(heading))
        .with_context(|| format!("README.md has no section {heading}"))?;
    Ok(section
        .split("```")
        .skip(1)
        .step_by(2)
        .filter_map(|block| block.split_once('\n'))
        .map(|(language, text)| (language.to_owned(), text.to_owned()))
        .collect())
}

async fn shell(command: &str, directory: PathBuf) -> anyhow::Result<String> {
    let tools = bins::tool("grpcurl")?.parent().context("a directory")?.to_owned();
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap_or_default());
    let output = Command::new("bash")
        .args(["-euc", command])
        .current_dir(directory)
        .env_clear()
        .env("PATH", path)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output =
        tokio::time::timeout(LONG, output).await.with_context(|| format!("{command} does not end"))??;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{command}: {said}{}", String::from_utf8_lossy(&output.stderr));
    Ok(said)
}

#[tokio::test]
async fn its_grpcurl_examples_run() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let (_, block) = blocks("grpcurl")?.into_iter().next().context("a block")?;
    let mut conversation = String::new();
    let commands: Vec<String> = block.replace("\\\n", " ").lines().map(str::to_owned).collect();
    ensure!(commands.len() >= 4, "{commands:?}");
    for command in commands {
        let mut command = command
            .replace("localhost:7450", stack.control_plane.address())
            .replace("localhost:7460", stack.runner.address())
            .replace("reviewer", "builder")
            .replace("cnv_...", &conversation);
        if command.contains("StreamEvents") {
            // As it stands it follows for ever.
            command = command.replace("\"}'", "\",\"follow\":false}'");
        }
        let said = shell(&command, stack.workspace.path().to_owned()).await?;
        if command.contains("CreateConversation") {
            let made: Value = serde_json::from_str(&said)?;
            made["conversation"]["conversationId"].as_str().context("an id")?.clone_into(&mut conversation);
        }
        ensure!(!said.trim().is_empty(), "{command} says nothing");
    }
    ensure!(!conversation.is_empty(), "no conversation was made");
    Ok(())
}

#[tokio::test]
async fn its_python_example_runs() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let blocks = blocks("Python")?;
    let client = stack.root().join("client");
    std::fs::create_dir(&client)?;
    let generate =
        blocks.iter().find(|(_, text)| text.contains("grpc_tools.protoc")).context("how to generate")?;
    // What it needs is installed with the tools of the tests; the rest is run as it stands, beside the protos.
    let generate: String = generate
        .1
        .lines()
        .filter(|line| !line.starts_with("pip "))
        .fold(String::new(), |all, line| all + line + "\n");
    let generate = generate.replace("_out=.", &format!("_out={}", client.display()));
    shell(&generate, bins::repository()).await?;
    let (_, example) = blocks.iter().find(|(language, _)| language == "python").context("an example")?;
    let question = "What does this repository do?";
    ensure!(example.contains(question) && example.contains("127.0.0.1:7450"), "{example}");
    let example = example
        .replace("127.0.0.1:7450", stack.control_plane.address())
        .replace("/home/me/src/my-project", &stack.workspace_name())
        .replace("reviewer", "builder")
        .replace(question, "[[text:It is empty.]]");
    std::fs::write(client.join("example.py"), example)?;
    let said = shell("python example.py", client).await?;
    let lines: Vec<&str> = said.lines().map(str::trim).collect();
    assert_eq!(lines, ["It is empty.", "OUTCOME_COMPLETED"], "{said}");
    Ok(())
}

async fn roundhouse(args: &[&str]) -> anyhow::Result<std::process::Output> {
    let output = Command::new(bins::bin("roundhouse")?)
        .args(args)
        .env_clear()
        .env("HOME", "/nonexistent")
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    Ok(tokio::time::timeout(LONG, output).await.context("it does not end")??)
}

#[tokio::test]
async fn every_command_it_shows_exists() -> anyhow::Result<()> {
    network::require_loopback_only()?;
    let readme = readme()?;
    let shown: Vec<&str> = readme
        .split("```")
        .skip(1)
        .step_by(2)
        .flat_map(str::lines)
        .filter_map(|line| line.strip_prefix("roundhouse "))
        .map(|line| line.split(" #").next().unwrap_or_default().trim())
        .collect();
    ensure!(shown.len() >= 5, "{shown:?}");
    let program = bins::bin("roundhouse")?.display().to_string();
    for line in shown {
        // With --help a command is read, and not carried out. A shell reads the quotes.
        shell(&format!("{program} {line} --help"), bins::repository()).await?;
    }
    Ok(())
}

/// The keys of a configuration, as `section.key`. What is configured for one engine stands for all.
fn keys(value: &Value, prefix: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, value) in map {
                let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                keys(value, &key, found);
            }
        }
        _ => {
            found.insert(prefix.to_owned());
        }
    }
}

#[tokio::test]
async fn its_table_names_every_setting_and_no_other() -> anyhow::Result<()> {
    network::require_loopback_only()?;
    let output = roundhouse(&["--json", "config", "show"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut settings = BTreeSet::new();
    keys(&serde_json::from_slice(&output.stdout)?, "", &mut settings);
    // What stands under names of a person's own is not shown before there is one; the configuration's own test holds it.
    let named = |key: &String| key.starts_with("engines") || key.starts_with("client.profiles");
    settings.retain(|key| !named(key));
    ensure!(settings.len() > 20, "{settings:?}");
    let readme = readme()?;
    let shown: BTreeSet<String> = readme
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|line| line.split('`').next())
        .filter(|key| ["control_plane.", "runner.", "client."].iter().any(|section| key.starts_with(section)))
        .map(str::to_owned)
        .filter(|key| !named(key))
        .collect();
    assert_eq!(shown, settings);
    Ok(())
}
