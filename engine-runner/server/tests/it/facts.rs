//! What the runner says about itself, its workspaces and its records; how it starts and refuses to start.

use std::process::Command;

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{
    self as proto, DescribeRunnerRequest, DrainRequest, InspectWorkspaceRequest, IsolationLevel,
    ListAgentFilesRequest, LoginKind, ReadSpoolRequest, Support, event_body::Kind, spool_frame,
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::rig::{Rig, Turn, With, kind, names, reason, terminal};

#[tokio::test]
async fn the_runner_describes_itself() {
    let mut rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let first = client.describe_runner(DescribeRunnerRequest {}).await.unwrap().into_inner();
    assert!(first.runner_id.starts_with("run_") && !first.boot_id.is_empty());
    assert_eq!(first.protocol_version, roundhouse_proto::PROTOCOL_VERSION);
    assert_eq!(first.roots.len(), 1);
    assert!(!first.roots[0].trusted);
    assert_ne!(first.isolation(), IsolationLevel::Unspecified);
    let engine = first.engines.iter().find(|engine| engine.name == "claude-code").unwrap();
    assert!(engine.installed && !engine.version.is_empty() && !engine.pinned_version.is_empty());
    assert_eq!((engine.login(), engine.login_detail.is_empty()), (LoginKind::Variables, false));
    assert!(!engine.login_detail.contains("sk-test"));
    let capabilities = engine.capabilities.as_ref().unwrap();
    assert_eq!(capabilities.resumable(), Support::Supported);
    assert!(capabilities.effort_levels.contains(&"high".to_owned()));
    rig.service.kill().await.unwrap();
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let again = client.describe_runner(DescribeRunnerRequest {}).await.unwrap().into_inner();
    assert_eq!(again.runner_id, first.runner_id);
}

#[tokio::test]
async fn health_is_served_per_service() {
    let rig = Rig::start().await.unwrap();
    let channel =
        tonic::transport::Endpoint::from_shared(rig.service.url()).unwrap().connect().await.unwrap();
    let mut health = HealthClient::new(channel);
    let request = HealthCheckRequest { service: "roundhouse.engine.v1.EngineRunnerService".into() };
    let answer = health.check(request).await.unwrap().into_inner();
    assert_eq!(answer.status(), ServingStatus::Serving);
}

#[tokio::test]
async fn two_runners_on_one_state_directory_are_refused_and_so_is_an_open_listener() {
    let rig = Rig::start().await.unwrap();
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_engine-runner"))
            .args(args)
            .env_clear()
            .env("HOME", rig.path("home"))
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let state = rig.state.display().to_string();
    let (code, said) = run(&["--state-dir", &state, "--listen", "127.0.0.1:0"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("another engine-runner is using the state directory"), "{said}");
    let other = rig.path("other").display().to_string();
    let (code, said) = run(&["--state-dir", &other, "--listen", "0.0.0.0:0"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("--insecure-listen"), "{said}");
    let (code, said) = run(&["--state-dir", &other, "--set", "runner.warm_tll=1s"]);
    assert_eq!(code, Some(3));
    assert!(said.contains("warm_ttl"), "{said}");
    let (code, _) = run(&["reset", "--state-dir", &other]);
    assert_eq!(code, Some(0));
    let (code, said) = run(&["reset", "--state-dir", &state]);
    assert_eq!(code, Some(1), "{said}");
}

#[tokio::test]
async fn agent_files_and_workspaces_are_shown() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    std::fs::create_dir(rig.work.join(".agents")).unwrap();
    std::fs::write(rig.work.join(".agents/a.md"), "text").unwrap();
    let workspace = || rig.work.display().to_string();
    let files = client
        .list_agent_files(ListAgentFilesRequest { workspace: workspace(), ..Default::default() })
        .await
        .unwrap();
    let files = files.into_inner();
    assert_eq!((files.files.len(), files.files[0].content.as_slice()), (1, &b"text"[..]));
    let inspect = |paths: &[&str]| InspectWorkspaceRequest {
        workspace: workspace(),
        paths: paths.iter().map(|path| (*path).to_owned()).collect(),
    };
    let facts = client.inspect_workspace(inspect(&[".agents/a.md", "none"])).await.unwrap().into_inner();
    assert_eq!(
        (facts.is_git, facts.dirty, facts.files[0].size, facts.files[1].exists),
        (false, None, 4, false)
    );
    let refused = client.inspect_workspace(inspect(&["../x"])).await.unwrap_err();
    assert_eq!(reason(&refused), "FIELD_INVALID");
    let refused = client
        .list_agent_files(ListAgentFilesRequest { workspace: "/".into(), ..Default::default() })
        .await
        .unwrap_err();
    assert_eq!(reason(&refused), "WORKSPACE_NOT_FOUND");
}

#[tokio::test]
async fn evidence_tells_what_changed_in_a_git_worktree() {
    let rig = Rig::start().await.unwrap();
    let git = |args: &[&str]| {
        let status = Command::new("git")
            .args(["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"])
            .args(args)
            .current_dir(&rig.work)
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .status()
            .unwrap();
        assert!(status.success());
    };
    git(&["init", "-q"]);
    std::fs::write(rig.work.join("a"), "1").unwrap();
    git(&["add", "."]);
    git(&["commit", "-q", "-m", "one"]);
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let events = turn.run(&mut client, "[[append path=new.txt:x]] [[text:ok]]").await.unwrap();
    let evidence: Vec<_> = events
        .iter()
        .filter_map(|event| match kind(event) {
            Some(Kind::Evidence(evidence)) => Some(evidence.clone()),
            _ => None,
        })
        .collect();
    assert_eq!(evidence.len(), 2, "{:?}", names(&events));
    assert_eq!((evidence[0].branch.as_str(), evidence[0].dirty), ("main", Some(false)));
    assert_eq!(
        (evidence[1].dirty, evidence[1].changed_files.clone()),
        (Some(true), vec!["new.txt".to_owned()])
    );
    assert_eq!(evidence[0].head, evidence[1].head);
}

#[tokio::test]
async fn the_spool_is_readable_and_no_known_secret_is_in_it() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let text = "[[text:sk-test-dummy-key-of-a-test]] [[bash:env]] [[huge bytes=400000]]";
    let events = turn.run(&mut client, text).await.unwrap();
    terminal(&events).unwrap();
    for event in &events {
        assert!(!format!("{event:?}").contains("sk-test-dummy-key"), "{event:?}");
    }
    let request = ReadSpoolRequest { session_id: "ses_1".into(), spool_id: String::new() };
    let mut stream = client.read_spool(request).await.unwrap().into_inner();
    let mut frames = Vec::new();
    while let Some(part) = stream.message().await.unwrap() {
        let size: usize = part.frames.iter().map(|frame| frame.data.len()).sum();
        assert!(size <= 256 * 1024, "{size}");
        frames.extend(part.frames);
    }
    assert!(frames.iter().enumerate().all(|(index, frame)| frame.number == index as u64 + 1));
    for wanted in [spool_frame::Kind::Spawn, spool_frame::Kind::Stdout, spool_frame::Kind::StdinIntent] {
        assert!(frames.iter().any(|frame| frame.kind() == wanted), "{wanted:?}");
    }
    let all: Vec<u8> = frames.into_iter().flat_map(|frame| frame.data).collect();
    assert!(!String::from_utf8_lossy(&all).contains("sk-test-dummy-key"));
}

#[tokio::test]
async fn draining_refuses_new_turns_and_lets_running_ones_finish() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let running = client.drain(DrainRequest { undrain: false }).await.unwrap().into_inner().running_turns;
    assert_eq!(running, 1);
    let other = Turn::new(&rig, "cnv_2", "ses_2", "trn_2", 1);
    let refused = other.open(&mut client).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused).as_str()), (tonic::Code::Unavailable, "DRAINING"));
    turn.send(&mut client, "[[text:done]]").await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), proto::Outcome::Completed);
    client.drain(DrainRequest { undrain: true }).await.unwrap();
    other.run(&mut client, "[[text:ok]]").await.unwrap();
}

#[tokio::test]
async fn only_a_trusted_root_lets_its_workspaces_set_variables() {
    for trust in [false, true] {
        let rig = Rig::with(With { trust, ..With::default() }).await.unwrap();
        std::fs::create_dir(rig.work.join(".roundhouse")).unwrap();
        std::fs::write(rig.work.join(".roundhouse/.env"), "MINE=yes\n").unwrap();
        let mut client = rig.client().await.unwrap();
        let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        let events = format!("{:?}", turn.run(&mut client, "[[bash:env]]").await.unwrap());
        assert!(events.contains("ROUNDHOUSE_KEEPER="), "{events}");
        assert_eq!(events.contains("MINE=yes"), trust, "{events}");
    }
}

#[tokio::test]
async fn a_log_in_a_file_has_no_colours() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.run(&mut client, "[[text:x]]").await.unwrap();
    let log = std::fs::read_to_string(rig.path("runner.log")).unwrap();
    assert!(log.contains("turn opened"));
    assert!(!log.contains('\u{1b}'), "{log}");
}

/// A turn in a git repository that a failpoint makes slow to look at.
#[cfg(feature = "failpoints")]
async fn slow_look(point: &'static str) -> Vec<String> {
    let rig = Rig::with(With::failpoint(point)).await.unwrap();
    assert!(Command::new("git").args(["init", "-q"]).current_dir(&rig.work).status().unwrap().success());
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let before = std::time::Instant::now();
    turn.send(&mut client, "[[text:done]]").await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert!(before.elapsed() < std::time::Duration::from_secs(15), "{point}: {:?}", before.elapsed());
    names(&events)
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn a_message_does_not_wait_for_a_slow_look_at_the_worktree() {
    let order = slow_look("runner::look_before=20000*pause").await;
    assert!(!order.contains(&"evidence POINT_BEFORE".to_owned()), "{order:?}");
    assert!(order.contains(&"evidence POINT_AFTER".to_owned()), "{order:?}");
    assert_eq!(order.iter().filter(|name| *name == "notice KIND_WARNING").count(), 1, "{order:?}");
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn an_end_does_not_wait_long_for_a_slow_look_at_the_worktree() {
    let order = slow_look("runner::look_after=20000*pause").await;
    assert!(!order.contains(&"evidence POINT_AFTER".to_owned()), "{order:?}");
    assert_eq!(order.iter().filter(|name| *name == "notice KIND_WARNING").count(), 1, "{order:?}");
    assert_eq!(order.last().map(String::as_str), Some("terminal OUTCOME_COMPLETED"));
}
