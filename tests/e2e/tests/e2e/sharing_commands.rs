//! The commands about what is shared: summaries, sessions, runners.

use anyhow::{Context as _, ensure};
use roundhouse_proto::{RUNNER_ID_HEADER, engine::v1::DescribeRunnerRequest};
use roundhouse_test_support::{NORMAL, Stack, reason_of};
use serde_json::Value;
use tonic::{Code, Request};

use crate::command_line::ask;

#[tokio::test]
async fn summaries_sessions_and_runners_from_the_command_line() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let conversation = stack.conversation().await?;
    stack.control.run_answered(&conversation, "[[text:a]] question-one", "a", NORMAL).await?;

    // Summaries: none, one, and a writer who came too late.
    let none = ask(&stack, &["summary", "get", &conversation]).await?;
    ensure!(none.code == Some(4) && none.stderr.contains("SUMMARY_NOT_FOUND"), "{none:?}");
    let put = |expected: &'static str, text: &'static str| {
        ["summary", "put", &conversation, text, "--through", "2", "--expected-version", expected]
            .map(str::to_owned)
    };
    let run = async |args: &[String]| ask(&stack, &args.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let stored = run(&put("0", "They said hello.")).await?;
    ensure!(stored.code == Some(0), "{stored:?}");
    assert_eq!(stored.json()?["summary"]["version"], 1);
    let late = run(&put("0", "Late.")).await?;
    ensure!(late.code == Some(4) && late.stderr.contains("--expected-version 1"), "{late:?}");
    let got = ask(&stack, &["summary", "get", &conversation]).await?.json()?;
    assert_eq!(
        (&got["summary"]["text"], &got["summary"]["through"]),
        (&"They said hello.".into(), &2.into())
    );
    let events = ask(&stack, &["events", &conversation]).await?;
    ensure!(events.stdout.contains("\"kind\":\"summary\""), "{events:?}");

    // Sessions.
    let sessions = ask(&stack, &["sessions", &conversation]).await?.json()?;
    let session = sessions["sessions"][0]["session_id"].as_str().context("an id")?.to_owned();
    let silent = ask(&stack, &["sessions", "unusable", &session]).await?;
    ensure!(silent.code == Some(2), "a reason is asked for: {silent:?}");
    let marked = ask(&stack, &["sessions", "unusable", &session, "--reason", "it dreams"]).await?.json()?;
    assert_eq!(marked["session"]["state"], "UNUSABLE");
    assert_eq!(marked["session"]["unusable_reason"], "it dreams");

    // Runners.
    let runners = ask(&stack, &["runners"]).await?.json()?;
    let runner = &runners["runners"][0];
    let host = runner["hostname"].as_str().context("a host name")?.to_owned();
    let drained = ask(&stack, &["runners", "drain", &host]).await?.json()?;
    assert_eq!(
        (&drained["runner"]["state"], &drained["runner"]["runner_id"]),
        (&"DRAINING".into(), &runner["runner_id"])
    );
    // What is sent now waits, and is worked on once the draining has ended: in a new session that is told the summary.
    let waiting = stack.control.begin(&conversation, "[[text:b]] question-two").await?;
    let turn = ask(&stack, &["turns", &waiting]).await?.json()?;
    assert_ne!(turn["turn"]["status"], Value::from("COMPLETED"));
    let id = runner["runner_id"].as_str().context("an id")?.to_owned();
    let undrained = ask(&stack, &["runners", "undrain", &id]).await?.json()?;
    assert_eq!(undrained["runner"]["state"], "ONLINE");
    let ended = stack.control.wait_end(&waiting, NORMAL).await?.turn.context("a turn")?;
    assert!(ended.summary_given && ended.session_id != session, "{ended:?}");
    let request = stack.model.requests_for("question-two").pop().context("a request")?.conversation();
    assert_eq!((request.occurrences("They said hello."), request.occurrences("question-one")), (1, 0));
    let nobody = ask(&stack, &["runners", "drain", "no-such-host"]).await?;
    ensure!(nobody.code == Some(4), "{nobody:?}");
    Ok(())
}

/// The control plane says with each call which runner it means; whoever says nothing means whoever answers.
#[tokio::test]
async fn a_runner_refuses_a_call_that_is_meant_for_another_one() -> anyhow::Result<()> {
    let stack = Stack::start().await?;
    let mut runner = stack.runner_client()?;
    let ours = runner.describe_runner(DescribeRunnerRequest {}).await?.into_inner().runner_id;
    for (meant, answered) in [(ours.as_str(), true), ("run_another", false)] {
        let mut request = Request::new(DescribeRunnerRequest {});
        request.metadata_mut().insert(RUNNER_ID_HEADER, meant.parse()?);
        match runner.describe_runner(request).await {
            Ok(_) => assert!(answered, "{meant}"),
            Err(status) => {
                assert!(!answered, "{status}");
                assert_eq!(status.code(), Code::FailedPrecondition);
                assert_eq!(reason_of(&status), "RUNNER_CONFLICT");
                assert!(status.message().contains(&ours), "{status}");
            }
        }
    }
    Ok(())
}
