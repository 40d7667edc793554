//! Other people's clients: grpcurl as published, and a Python client made from the protos.

use std::{path::PathBuf, process::Stdio};

use anyhow::{Context as _, bail, ensure};
use roundhouse_test_support::{LONG, NORMAL, Stack, bins};
use serde_json::Value;
use tokio::process::Command;

async fn output_of(program: PathBuf, args: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(&program)
        .args(args)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output =
        tokio::time::timeout(LONG, output).await.context("it does not end")?.context("it does not start")?;
    if !output.status.success() {
        bail!(
            "{} {args:?} ended with {}: {}{}",
            program.display(),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

async fn grpcurl(args: &[&str]) -> anyhow::Result<String> {
    let mut all = vec!["-plaintext"];
    all.extend_from_slice(args);
    output_of(bins::tool("grpcurl")?, &all).await
}

#[tokio::test]
async fn grpcurl_lists_describes_and_calls_both_services() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let (control, runner) = (stack.control_plane.address().to_owned(), stack.runner.address().to_owned());

    let listed = grpcurl(&[&control, "list"]).await?;
    for service in ["ConversationService", "SessionService", "AgentService", "RunnerService"] {
        ensure!(listed.lines().any(|line| line == format!("roundhouse.control.v1.{service}")), "{listed}");
    }
    ensure!(
        listed.contains("grpc.health.v1.Health") && listed.contains("grpc.reflection.v1alpha"),
        "{listed}"
    );
    ensure!(!listed.contains("EngineRunnerService"), "it lists what it does not serve: {listed}");
    let listed = grpcurl(&[&runner, "list"]).await?;
    ensure!(listed.lines().any(|line| line == "roundhouse.engine.v1.EngineRunnerService"), "{listed}");
    ensure!(!listed.contains("roundhouse.control"), "it lists what it does not serve: {listed}");

    // A refusal can be read without the protos: its reason is not an opaque blob.
    let refused = grpcurl(&[
        "-d",
        r#"{"turn_id":"trn_00000000000000000000000000000000"}"#,
        &control,
        "roundhouse.control.v1.ConversationService/GetTurn",
    ])
    .await
    .err()
    .context("there is no such turn")?;
    ensure!(format!("{refused:#}").contains("TURN_NOT_FOUND"), "{refused:#}");

    let described = grpcurl(&[&control, "describe", "roundhouse.control.v1.SendMessageRequest"]).await?;
    ensure!(described.contains("string request_id = 1"), "{described}");
    let described =
        grpcurl(&[&runner, "describe", "roundhouse.engine.v1.EngineRunnerService.StartOrResume"]).await?;
    ensure!(described.contains("StartOrResumeRequest"), "{described}");

    for address in [&control, &runner] {
        let health = grpcurl(&[address, "grpc.health.v1.Health/Check"]).await?;
        ensure!(health.contains("SERVING"), "{health}");
    }
    let described = grpcurl(&[&runner, "roundhouse.engine.v1.EngineRunnerService/DescribeRunner"]).await?;
    let described: Value = serde_json::from_str(&described)?;
    for name in ["claude-code", "codex"] {
        let engines = described["engines"].as_array().context("engines")?;
        let engine = engines.iter().find(|engine| engine["name"] == name).context(name)?;
        ensure!(engine["installed"] == true, "{described}");
        ensure!(engine["capabilities"]["resumable"] == "SUPPORT_SUPPORTED", "{described}");
    }

    // A whole turn, with nothing but grpcurl.
    let service = "roundhouse.control.v1.ConversationService";
    let body = serde_json::json!({"workspace": stack.workspace_name(), "agent": "builder"}).to_string();
    let made = grpcurl(&["-d", &body, &control, &format!("{service}/CreateConversation")]).await?;
    let made: Value = serde_json::from_str(&made)?;
    let conversation = made["conversation"]["conversationId"].as_str().context("an id")?.to_owned();
    let body =
        serde_json::json!({"conversation_id": conversation, "text": "[[text:by hand]] hello"}).to_string();
    let sent = grpcurl(&["-d", &body, &control, &format!("{service}/SendMessage")]).await?;
    let sent: Value = serde_json::from_str(&sent)?;
    let turn = sent["turn"]["turnId"].as_str().context("an id")?.to_owned();
    let body = serde_json::json!({"conversation_id": conversation, "turn_id": turn}).to_string();
    let stream = grpcurl(&["-d", &body, &control, &format!("{service}/StreamEvents")]).await?;
    ensure!(stream.contains("\"outcome\": \"OUTCOME_COMPLETED\"") && stream.contains("by hand"), "{stream}");

    // An error says what it is.
    let body = serde_json::json!({"turn_id": "trn_00000000000000000000000000000000"}).to_string();
    let error = grpcurl(&["-d", &body, &control, &format!("{service}/GetTurn")])
        .await
        .expect_err("not found")
        .to_string();
    ensure!(error.contains("NotFound"), "{error}");
    Ok(())
}

/// Sends a message and follows it to its end; prints each kind of event, and the answer.
const CLIENT: &str = r#"
import sys
import grpc
from roundhouse.control.v1 import conversation_pb2, conversation_pb2_grpc
from roundhouse.engine.v1 import event_pb2

address, workspace, text = sys.argv[1:4]
with grpc.insecure_channel(address) as channel:
    service = conversation_pb2_grpc.ConversationServiceStub(channel)
    made = service.CreateConversation(
        conversation_pb2.CreateConversationRequest(workspace=workspace, agent="builder"))
    conversation_id = made.conversation.conversation_id
    sent = service.SendMessage(
        conversation_pb2.SendMessageRequest(conversation_id=conversation_id, text=text, request_id="py-1"))
    seq = 0
    for item in service.StreamEvents(conversation_pb2.StreamEventsRequest(
            conversation_id=conversation_id, turn_id=sent.turn.turn_id), timeout=60):
        if item.WhichOneof("item") == "turn_event":
            event = item.turn_event
            assert event.seq == seq + 1, (event.seq, seq)
            seq = event.seq
            print(event.body.WhichOneof("kind"))
            if event.body.HasField("terminal"):
                assert event.body.terminal.outcome == event_pb2.OUTCOME_COMPLETED, event
    print("answer:", service.GetTurn(conversation_pb2.GetTurnRequest(turn_id=sent.turn.turn_id)).answer.text)
"#;

#[tokio::test]
async fn a_python_client_made_from_the_protos_follows_a_message_to_its_end() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let python = bins::tool("python")?;
    let generated = stack.root().join("python");
    std::fs::create_dir(&generated)?;
    let protos = bins::repository().join("proto");
    let mut args = vec!["-m".to_owned(), "grpc_tools.protoc".to_owned(), format!("-I{}", protos.display())];
    for kind in ["python_out", "grpc_python_out"] {
        args.push(format!("--{kind}={}", generated.display()));
    }
    for package in ["roundhouse/control/v1", "roundhouse/engine/v1"] {
        for entry in std::fs::read_dir(protos.join(package))? {
            args.push(entry?.path().display().to_string());
        }
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    output_of(python.clone(), &args).await.context("the client is generated")?;
    std::fs::write(generated.join("client.py"), CLIENT)?;
    let client = generated.join("client.py").display().to_string();
    let args =
        [&client, stack.control_plane.address(), &stack.workspace_name(), "[[text:from a snake]] hello"];
    let printed =
        tokio::time::timeout(NORMAL, output_of(python, &args)).await.context("it does not end")??;
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.last(), Some(&"answer: from a snake"), "{printed}");
    assert_eq!(lines.iter().filter(|line| **line == "terminal").count(), 1, "{printed}");
    assert!(lines.contains(&"text") && lines.contains(&"usage"), "{printed}");
    Ok(())
}
