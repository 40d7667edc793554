//! Several hosts: a control plane and two runners, each with an address of its own, and cables that can be pulled.

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use roundhouse_models::Models;
use roundhouse_proto::{
    PROTOCOL_VERSION,
    control::v1::{
        DrainRunnerRequest, ListWorkspacesRequest, RegisterRunnerRequest, SendMessageRequest, TurnStatus,
        Workspace, attention::Reason, runner::State,
    },
    engine::v1::{FailureReason, Origin, Outcome},
};
use roundhouse_test_support::{
    BRIEF, Follower, HOST_NAME, Host, Hosts, LONG, NORMAL, StackOptions, reason_of, wait_for, wait_until,
    with_hosts,
};

use crate::{answer_of, expect_outcome_at, terminals, turn_of};

/// Both runners with fake-engine, and a control plane that soon misses a heartbeat.
fn fake() -> anyhow::Result<[StackOptions; 2]> {
    let options = StackOptions::default().set("control_plane.heartbeat_interval", "500ms").fake_engine()?;
    Ok([options.clone(), options])
}

/// Sends a message to a workspace, with the agent `builder`; answers its turn's id.
async fn send_to(hosts: &Hosts, conversation: &str, host: &Host, text: &str) -> anyhow::Result<String> {
    let request = SendMessageRequest {
        conversation_id: conversation.to_owned(),
        text: text.to_owned(),
        workspace: host.workspace_name(),
        ..SendMessageRequest::default()
    };
    let sent = hosts.control.conversations().send_message(request).await.context("SendMessage")?.into_inner();
    Ok(sent.turn.context("SendMessage answered without a turn")?.turn_id)
}

async fn conversation_on(hosts: &Hosts, host: &Host) -> anyhow::Result<String> {
    Ok(hosts.control.create(&host.workspace_name(), "builder").await?.conversation_id)
}

/// All that a host's model was told in the one request for this turn.
fn asked(model: &Models, text: &str) -> anyhow::Result<String> {
    let requests = model.requests_for(text);
    ensure!(requests.len() == 1, "{} requests for {text:?}", requests.len());
    Ok(String::from_utf8_lossy(requests[0].body()).into_owned())
}

/// A gate of fake-engine: a file that it waits for.
fn gate(host: &Host) -> PathBuf {
    host.workspace.path().join("gate")
}

/// A script that says something, waits at the gate, writes a line, and says something more.
fn gated(host: &Host, text: &str) -> String {
    let line = host.workspace.path().join("ran");
    format!(
        "[[text:before]][[gate:{}]][[append path={}:once]][[text: after]] {text}",
        gate(host).display(),
        line.display()
    )
}

/// Begins a gated turn and waits until it stands at its gate.
async fn held(
    hosts: &Hosts,
    follower: &Follower,
    conversation: &str,
    host: &Host,
    text: &str,
) -> anyhow::Result<String> {
    use roundhouse_proto::engine::v1::event_body::Kind;
    let turn = send_to(hosts, conversation, host, &gated(host, text)).await?;
    follower
        .wait_event(&turn, "its first text", NORMAL, |kind| matches!(kind, Kind::Text(_)).then_some(()))
        .await?;
    Ok(turn)
}

#[test]
fn a_conversation_goes_from_one_host_to_another_and_back() -> anyhow::Result<()> {
    // The real engine, on both hosts; each host has its own model, which knows what was asked there alone.
    with_hosts([StackOptions::default(), StackOptions::default()], |hosts| async move {
        let [one, two] = &hosts.runners;
        let listed = hosts.list().await?;
        let mut addresses: Vec<_> = listed.iter().map(|runner| runner.address.as_str()).collect();
        addresses.sort_unstable();
        ensure!(addresses == ["http://10.77.0.11:7460", "http://10.77.0.12:7460"], "{listed:?}");
        ensure!(listed[0].runner_id != listed[1].runner_id);

        let conversation = conversation_on(&hosts, one).await?;
        let follower = hosts.control.follow(&conversation);
        let play = async |host: &Host, text: &str, answer: &str, origin: Origin| {
            let turn = send_to(&hosts, &conversation, host, text).await?;
            let got = expect_outcome_at(&hosts.control, &follower, &turn, Outcome::Completed).await?;
            ensure!(answer_of(&got) == answer && turn_of(&got).origin() == origin, "{got:?}");
            anyhow::Ok(got)
        };
        let first = play(one, "first question [[text:answer-one]]", "answer-one", Origin::Started).await?;
        let second = play(two, "second question [[text:answer-two]]", "answer-two", Origin::Started).await?;
        ensure!(turn_of(&second).history_given, "{second:?}");
        let seed = asked(&two.model, "second question")?;
        // The answer stands in the question, too: as what the script is to say.
        ensure!(seed.matches("first question").count() == 1, "{seed}");
        ensure!(seed.matches("answer-one").count() == 2, "{seed}");

        let third =
            play(one, "third question [[text:answer-three]]", "answer-three", Origin::Resumed).await?;
        ensure!(turn_of(&third).session_id == turn_of(&first).session_id);
        let missed = asked(&one.model, "third question")?;
        ensure!(missed.matches("first question").count() == 1, "natively, and not once more: {missed}");
        ensure!(missed.matches("second question").count() == 1, "{missed}");
        ensure!(missed.matches("answer-two").count() == 2, "{missed}");
        ensure!(one.model.count_for("second question") == 0 && two.model.count_for("first question") == 0);
        follower.check()
    })
}

#[test]
fn a_runner_is_the_same_after_a_restart_and_under_another_name_of_its_host() -> anyhow::Result<()> {
    with_hosts(fake()?, |mut hosts| async move {
        let conversation = conversation_on(&hosts, &hosts.runners[0]).await?;
        let first = hosts.control.run(&conversation, "[[text:one]] first", NORMAL).await?;
        ensure!(answer_of(&first) == "one", "{first:?}");
        let before = hosts.wait_state("host-1", State::Online).await?;

        let runner = &mut hosts.runners[0].runner;
        runner.stop("TERM", NORMAL).await?;
        runner.set_env(HOST_NAME, "renamed");
        runner.start_again().await?;
        let after = hosts.wait_state("renamed", State::Online).await?;
        ensure!((&after.runner_id, &after.address) == (&before.runner_id, &before.address), "{after:?}");
        ensure!(hosts.list().await?.len() == 2, "it is no third runner: {:?}", hosts.list().await?);

        let again = hosts.control.run(&conversation, "[[recall]] again", NORMAL).await?;
        ensure!(turn_of(&again).origin() == Origin::Resumed, "{again:?}");
        ensure!(turn_of(&again).workspace_id == turn_of(&first).workspace_id);
        ensure!(answer_of(&again).contains("[[text:one]] first"), "{again:?}");
        // The path on the host by its new name is the same workspace; by the old one it is nothing.
        let path = hosts.runners[0].workspace.path().display();
        let named = hosts.control.create(&format!("renamed:{path}"), "builder").await?;
        ensure!(named.workspace_id == turn_of(&first).workspace_id, "{named:?}");
        let old = hosts.control.create(&format!("host-1:{path}"), "builder").await.expect_err("renamed");
        let status = old.downcast_ref::<tonic::Status>().context("a status")?;
        ensure!(reason_of(status) == "RUNNER_NOT_FOUND", "{status:?}");
        Ok(())
    })
}

#[test]
fn a_runner_that_speaks_another_protocol_is_refused_with_a_sentence() -> anyhow::Result<()> {
    with_hosts(fake()?, |hosts| async move {
        for theirs in [PROTOCOL_VERSION + 1, PROTOCOL_VERSION - 1] {
            let request = RegisterRunnerRequest {
                runner_id: "run_00000000000000000000000000000000".to_owned(),
                address: "http://10.77.0.1:7460".to_owned(),
                protocol_version: theirs,
                hostname: "host-3".to_owned(),
                ..RegisterRunnerRequest::default()
            };
            let status =
                hosts.control.runners().register_runner(request).await.expect_err("another protocol");
            ensure!(reason_of(&status) == "PROTOCOL_VERSION", "{status:?}");
            ensure!(status.code() == tonic::Code::FailedPrecondition, "{status:?}");
            for version in [theirs, PROTOCOL_VERSION] {
                ensure!(status.message().contains(&version.to_string()), "{status:?}");
            }
        }
        ensure!(hosts.list().await?.len() == 2);
        Ok(())
    })
}

#[test]
fn s48_a_turn_goes_on_while_its_host_is_cut_off_and_its_stream_afterwards() -> anyhow::Result<()> {
    with_hosts(fake()?, |hosts| async move {
        let host = &hosts.runners[0];
        let conversation = conversation_on(&hosts, host).await?;
        let follower = hosts.control.follow(&conversation);
        let turn = held(&hosts, &follower, &conversation, host, "through the cut").await?;

        host.cut()?;
        let cut = std::time::Instant::now();
        std::fs::write(gate(host), "")?;
        wait_until("the engine works on", NORMAL, || host.workspace.lines("ran") == 1).await?;
        hosts.wait_state("host-1", State::Away).await?;
        // Long enough for both ends to find their connections dead; until then TCP alone would mend it.
        wait_for("no connection is taken for alive", LONG, || async {
            Ok((!hosts.connected(host)?).then_some(()))
        })
        .await?;
        // A question after ten seconds, ten for its answer, and some for a busy machine.
        ensure!(cut.elapsed() < std::time::Duration::from_secs(30), "found after {:?}", cut.elapsed());
        let got = hosts.control.turn(&turn).await?;
        ensure!(turn_of(&got).status() == TurnStatus::Running, "nobody can know better yet: {got:?}");
        // The other host is not concerned.
        let other = conversation_on(&hosts, &hosts.runners[1]).await?;
        let elsewhere = hosts.control.run(&other, "[[text:here]] elsewhere", NORMAL).await?;
        ensure!(answer_of(&elsewhere) == "here", "{elsewhere:?}");

        host.join()?;
        let got = expect_outcome_at(&hosts.control, &follower, &turn, Outcome::Completed).await?;
        ensure!(answer_of(&got).ends_with(" after"), "{got:?}");
        hosts.wait_state("host-1", State::Online).await?;
        ensure!(host.workspace.lines("ran") == 1, "the tool ran again");
        let next = hosts.control.run(&conversation, "[[text:on]] next", NORMAL).await?;
        ensure!((answer_of(&next), turn_of(&next).origin()) == ("on", Origin::Resumed), "{next:?}");
        follower.check()
    })
}

async fn workspace(hosts: &Hosts, host: &Host) -> anyhow::Result<Workspace> {
    let path = host.workspace.path().display().to_string();
    let request = ListWorkspacesRequest { runner_id: String::new() };
    let listed = hosts.control.runners().list_workspaces(request).await?.into_inner().workspaces;
    listed.into_iter().find(|one| one.path == path).context("the workspace is listed")
}

#[test]
fn s48_a_host_that_stays_away_loses_its_turn_and_its_workspace_is_held_until_it_is_back() -> anyhow::Result<()>
{
    let [one, two] = fake()?;
    let one = one.set("control_plane.runner_lost_after", "3s");
    with_hosts([one, two], |hosts| async move {
        let [host, other] = &hosts.runners;
        let conversation = conversation_on(&hosts, host).await?;
        let follower = hosts.control.follow(&conversation);
        let turn = held(&hosts, &follower, &conversation, host, "gone").await?;

        host.cut()?;
        let got = expect_outcome_at(&hosts.control, &follower, &turn, Outcome::Lost).await?;
        let failure = turn_of(&got).failure.clone().context("a lost turn says why")?;
        ensure!(failure.reason() == FailureReason::RunnerLost, "{failure:?}");
        ensure!(!failure.message.is_empty() && !failure.next_action.is_empty(), "{failure:?}");
        hosts.wait_state("host-1", State::Lost).await?;
        let slot = workspace(&hosts, host).await?;
        ensure!((slot.held_by_turn_id.as_str(), slot.held_by_lost_turn) == (turn.as_str(), true), "{slot:?}");
        // Who wants that workspace is told at once; the conversation itself goes on, on the other host.
        let busy = hosts.control.run(&conversation, "[[text:x]] meanwhile", NORMAL).await?;
        let failure = turn_of(&busy).failure.clone().context("a failed turn says why")?;
        ensure!(failure.reason() == FailureReason::WorkspaceBusy, "{failure:?}");
        ensure!(!failure.next_action.is_empty(), "{failure:?}");
        let there = send_to(&hosts, &conversation, other, "[[text:there]] on the other host").await?;
        let there = expect_outcome_at(&hosts.control, &follower, &there, Outcome::Completed).await?;
        ensure!(turn_of(&there).history_given && answer_of(&there) == "there", "{there:?}");

        // Behind the cut the engine ends its turn, and nobody hears of it in time.
        std::fs::write(gate(host), "")?;
        wait_until("the engine works on", NORMAL, || host.workspace.lines("ran") == 1).await?;

        host.join()?;
        wait_for("the workspace is free", NORMAL, || async {
            Ok(workspace(&hosts, host).await?.held_by_turn_id.is_empty().then_some(()))
        })
        .await?;
        let back = send_to(&hosts, &conversation, host, "[[text:back]] again").await?;
        let back = expect_outcome_at(&hosts.control, &follower, &back, Outcome::Completed).await?;
        ensure!(answer_of(&back) == "back", "{back:?}");
        let lost = hosts.control.turn(&turn).await?;
        ensure!(turn_of(&lost).status() == TurnStatus::Lost, "what came too late changed it: {lost:?}");
        ensure!(!answer_of(&lost).contains("after"), "{lost:?}");
        ensure!(terminals(&follower, &turn).len() == 1 && host.workspace.lines("ran") == 1);
        follower.check()
    })
}

#[test]
fn a_workspace_is_one_turns_at_a_time_whichever_conversation_and_hosts_do_not_wait_for_each_other()
-> anyhow::Result<()> {
    with_hosts(fake()?, |hosts| async move {
        let [host, other] = &hosts.runners;
        let conversation = conversation_on(&hosts, host).await?;
        let follower = hosts.control.follow(&conversation);
        let turn = held(&hosts, &follower, &conversation, host, "first").await?;

        let second = conversation_on(&hosts, host).await?;
        let waiting = hosts.control.begin(&second, "[[text:second]] my turn").await?;
        wait_for("the second waits for the workspace, and it is told who holds it", BRIEF, || async {
            let got = hosts.control.turn(&waiting).await?;
            let told = got.waiting.filter(|one| one.reason() == Reason::WaitingForWorkspace);
            Ok(told.filter(|one| one.held_by_turn_id == turn))
        })
        .await?;
        let elsewhere = conversation_on(&hosts, other).await?;
        let got = hosts.control.run(&elsewhere, "[[text:free]] elsewhere", NORMAL).await?;
        ensure!(answer_of(&got) == "free", "{got:?}");

        std::fs::write(gate(host), "")?;
        expect_outcome_at(&hosts.control, &follower, &turn, Outcome::Completed).await?;
        let got = hosts.control.wait_end(&waiting, NORMAL).await?;
        ensure!(answer_of(&got) == "second", "{got:?}");
        Ok(())
    })
}

#[test]
fn a_drained_runner_ends_what_runs_and_takes_nothing_new_until_that_is_undone() -> anyhow::Result<()> {
    let [one, two] = fake()?;
    let one = one.set("control_plane.runner_away_timeout", "2s");
    with_hosts([one, two], |hosts| async move {
        let host = &hosts.runners[0];
        let conversation = conversation_on(&hosts, host).await?;
        let follower = hosts.control.follow(&conversation);
        let turn = held(&hosts, &follower, &conversation, host, "to the end").await?;
        let runner_id = hosts.wait_state("host-1", State::Online).await?.runner_id;
        let drain = async |undrain: bool| {
            let request =
                DrainRunnerRequest { runner_id: runner_id.clone(), undrain, ..DrainRunnerRequest::default() };
            let answer = hosts.control.runners().drain_runner(request).await.context("DrainRunner")?;
            answer.into_inner().runner.context("DrainRunner answers with the runner")
        };
        let drained = drain(false).await?;
        ensure!((drained.state(), drained.running_turns) == (State::Draining, 1), "{drained:?}");
        std::fs::write(gate(host), "")?;
        expect_outcome_at(&hosts.control, &follower, &turn, Outcome::Completed).await?;

        let refused = hosts.control.run(&conversation, "[[text:x]] not now", NORMAL).await?;
        let failure = turn_of(&refused).failure.clone().context("a failed turn says why")?;
        ensure!(failure.reason() == FailureReason::RunnerLost && failure.retryable, "{failure:?}");
        ensure!(failure.message.contains("drain"), "{failure:?}");

        drain(true).await?;
        hosts.wait_state("host-1", State::Online).await?;
        let retried = hosts.control.retry(&turn_of(&refused).turn_id).await?;
        let got = expect_outcome_at(&hosts.control, &follower, &retried, Outcome::Completed).await?;
        ensure!(answer_of(&got) == "x", "{got:?}");
        Ok(())
    })
}
