//! What the runner does for an engine that names its own sessions, opens them in steps and can be asked what it has.

use std::path::PathBuf;

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{
    CloseSessionRequest, DescribeRunnerRequest, ListSessionsRequest, Outcome, PermissionMode, Support,
    event_body::Kind, phase_event::Phase, start_or_resume_response::Result as Opened,
};
use roundhouse_test_support::wait_until;

use crate::rig::{BOUND, Client, Rig, Turn, With, kind, names, reason, signal, terminal};

async fn rig() -> (Rig, Client) {
    with(With::codex()).await
}

async fn with(with: With) -> (Rig, Client) {
    let rig = Rig::with(with).await.unwrap();
    let client = rig.client().await.unwrap();
    (rig, client)
}

fn turn(rig: &Rig, number: u64) -> Turn {
    Turn::new(rig, "cnv_1", "ses_1", &format!("trn_{number}"), number)
}

/// Runs a turn to its end; how its session was opened, and its answer.
async fn answered(client: &mut Client, turn: &Turn, text: &str) -> (Opened, String) {
    let opened = turn.open(client).await.unwrap().result();
    turn.send(client, text).await.unwrap();
    let events = turn.follow(client, 0, false).await.unwrap().all().await.unwrap();
    turn.acknowledge(client).await.unwrap();
    let end = terminal(&events).unwrap();
    assert_eq!(end.outcome(), Outcome::Completed, "{:?}", names(&events));
    (opened, end.result)
}

async fn close(client: &mut Client, session: &str) {
    client.close_session(CloseSessionRequest { session_id: session.to_owned() }).await.unwrap();
}

/// Files of the engine's home with this in their names.
fn files(rig: &Rig, word: &str) -> Vec<PathBuf> {
    let (mut found, mut open) = (Vec::new(), vec![rig.state.join("homes")]);
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            match path.is_dir() {
                true => open.push(path),
                false if entry.file_name().to_string_lossy().contains(word) => found.push(path),
                false => {}
            }
        }
    }
    found
}

/// The home itself: where the engine's own files lie.
fn home(rig: &Rig) -> PathBuf {
    let rollout = files(rig, "rollout-").pop().unwrap();
    rollout.ancestors().find(|path| path.ends_with("sessions")).unwrap().parent().unwrap().to_owned()
}

async fn native_id(client: &mut Client) -> String {
    let sessions = client.list_sessions(ListSessionsRequest::default()).await.unwrap().into_inner().sessions;
    sessions[0].native_ref.clone().map(|native| native.id).unwrap_or_default()
}

#[tokio::test]
async fn the_runner_tells_what_codex_can_do() {
    let (_rig, mut client) = rig().await;
    let described = client.describe_runner(DescribeRunnerRequest {}).await.unwrap().into_inner();
    let engine = described.engines.iter().find(|engine| engine.name == "codex").unwrap();
    assert!(engine.installed && engine.version.starts_with("0.") && !engine.pinned_version.is_empty());
    assert_eq!(engine.login_detail, "OPENAI_API_KEY");
    let can = engine.capabilities.as_ref().unwrap();
    assert_eq!(
        (can.resumable(), can.forkable(), can.live_input()),
        (Support::Supported, Support::Unsupported, Support::Supported)
    );
    assert!(can.effort_levels.contains(&"minimal".to_owned()));
}

#[tokio::test]
async fn s13_the_id_that_the_engine_chose_is_known_from_the_opening_on() {
    let (rig, mut client) = rig().await;
    let first = turn(&rig, 1);
    let opened = first.open(&mut client).await.unwrap();
    assert_eq!(opened.result(), Opened::Started);
    let chosen = opened.native_ref.unwrap().id;
    assert!(uuid::Uuid::try_parse(&chosen).is_ok(), "{chosen}");
    first.send(&mut client, "[[text:one]]").await.unwrap();
    first.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    first.acknowledge(&mut client).await.unwrap();
    assert_eq!(native_id(&mut client).await, chosen);
    close(&mut client, "ses_1").await;
    assert_eq!(
        answered(&mut client, &turn(&rig, 2), "[[recall]]").await,
        (Opened::Resumed, "[[text:one]] | [[recall]]".to_owned())
    );
    assert_eq!(native_id(&mut client).await, chosen);
}

/// Such a thread is nowhere; the next opening makes another one, whose id takes the place of the first.
#[tokio::test]
async fn a_thread_that_never_had_a_turn_is_started_anew_under_its_new_id() {
    let (rig, mut client) = rig().await;
    let first = turn(&rig, 1);
    let before = first.open(&mut client).await.unwrap().native_ref.unwrap().id;
    first.cancel(&mut client).await.unwrap();
    first.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    first.acknowledge(&mut client).await.unwrap();
    close(&mut client, "ses_1").await;
    let (opened, answer) = answered(&mut client, &turn(&rig, 2), "[[text:two]]").await;
    assert_eq!((opened, answer.as_str()), (Opened::Started, "two"));
    let after = native_id(&mut client).await;
    assert!(after != before && !after.is_empty(), "{before} {after}");
    close(&mut client, "ses_1").await;
    assert_eq!(answered(&mut client, &turn(&rig, 3), "[[text:three]]").await.0, Opened::Resumed);
}

#[tokio::test]
async fn s14_a_rollout_is_found_by_its_ending_and_its_loss_is_told() {
    let (rig, mut client) = rig().await;
    answered(&mut client, &turn(&rig, 1), "[[text:one]]").await;
    close(&mut client, "ses_1").await;
    let found = files(&rig, "rollout-");
    assert_eq!(found.len(), 1, "{found:?}");
    std::fs::remove_file(&found[0]).unwrap();
    let opened = turn(&rig, 2).open(&mut client).await.unwrap();
    assert_eq!(opened.result(), Opened::Unusable);
    assert!(opened.unusable_reason.contains("missing"), "{opened:?}");
}

/// An interrupt that comes before the engine has said that the turn has started would be refused.
#[tokio::test]
async fn s44_an_interrupt_waits_until_the_turn_has_started() {
    let place = tempfile::tempdir().unwrap();
    let gate = place.path().join("gate");
    let script: &'static str =
        Box::leak(format!("@accepted\n[[gate:{}]]\n", gate.display()).into_boxed_str());
    let options = With { script: Some(script), ..With::codex().and("cancel_interrupt_grace", "30s") };
    let (rig, mut client) = with(options).await;
    let first = turn(&rig, 1);
    first.open(&mut client).await.unwrap();
    first.send(&mut client, "[[text:said]] [[stall]]").await.unwrap();
    wait_until("the engine has the message", BOUND, || !rig.engine_log("turn/start").is_empty())
        .await
        .unwrap();
    first.cancel(&mut client).await.unwrap();
    wait_until("the interrupt is held back", BOUND, || !rig.engine_log("thread/loaded/list").is_empty())
        .await
        .unwrap();
    assert!(rig.engine_log("turn/interrupt").is_empty());
    std::fs::write(&gate, "").unwrap();
    let events = first.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Cancelled, "{:?}", names(&events));
    assert_eq!(rig.engine_log("turn/interrupt").len(), 1);
    first.acknowledge(&mut client).await.unwrap();
    // It was no step of the ladder: the process is there for the next turn.
    assert_eq!(
        answered(&mut client, &turn(&rig, 2), "[[text:on]]").await,
        (Opened::AlreadyOpen, "on".to_owned())
    );
}

#[tokio::test]
async fn s15_broken_indexes_are_removed_and_the_session_goes_on() {
    let (rig, mut client) = rig().await;
    answered(&mut client, &turn(&rig, 1), "[[text:one]]").await;
    // Another session of the home idles; it is in the way, and loses nothing.
    let other = |number: u64| Turn::new(&rig, "cnv_2", "ses_2", &format!("trn_2{number}"), number);
    answered(&mut client, &other(1), "[[text:two]]").await;
    close(&mut client, "ses_1").await;
    let home = home(&rig);
    std::fs::write(home.join("state_5.sqlite"), "no database").unwrap();
    std::fs::write(home.join("state_5.sqlite-wal"), "").unwrap();
    assert_eq!(
        answered(&mut client, &turn(&rig, 2), "[[recall]]").await,
        (Opened::Resumed, "[[text:one]] | [[recall]]".to_owned())
    );
    assert!(!home.join("state_5.sqlite").exists() && !home.join("state_5.sqlite-wal").exists());
    assert_eq!(
        answered(&mut client, &other(2), "[[recall]]").await,
        (Opened::Resumed, "[[text:two]] | [[recall]]".to_owned())
    );
}

/// What cannot be mended (here: comes back at once) is the home's trouble, and burns no session.
#[tokio::test]
async fn s15_indexes_that_stay_broken_refuse_the_opening_once_they_were_removed() {
    let wrapper = "#!/bin/sh\ncase \"$1\" in app-server) \
        test -e \"$CODEX_HOME/broken\" && echo 'no database' > \"$CODEX_HOME/state_5.sqlite\";; esac\n\
        exec {engine} \"$@\"\n";
    let (rig, mut client) = with(With { wrapper: Some(wrapper), ..With::codex() }).await;
    answered(&mut client, &turn(&rig, 1), "[[text:one]]").await;
    close(&mut client, "ses_1").await;
    let home = home(&rig);
    std::fs::write(home.join("broken"), "").unwrap();
    let starts = rig.engine_log("\"start\"").len();
    let refused = turn(&rig, 2).open(&mut client).await.unwrap_err();
    assert_eq!(reason(&refused), "ENGINE_START_FAILED", "{refused:?}");
    assert_eq!(rig.engine_log("\"start\"").len(), starts + 2, "tried once more, and not for ever");
    std::fs::remove_file(home.join("broken")).unwrap();
    std::fs::remove_file(home.join("state_5.sqlite")).unwrap();
    assert_eq!(
        answered(&mut client, &turn(&rig, 3), "[[text:on]]").await,
        (Opened::Resumed, "on".to_owned())
    );
}

/// Stops the engine: from here on it reads nothing, and what it is given waits in its pipe.
fn hold(rig: &Rig) {
    let engines: Vec<u32> = rig
        .processes()
        .into_iter()
        .filter(|(_, command)| command.contains("app-server"))
        .map(|(pid, _)| pid)
        .collect();
    assert_eq!(engines.len(), 1, "{:?}", rig.processes());
    signal(engines[0], "STOP").unwrap();
}

/// Kills runner and keeper once the message of turn 2 was given, and starts the runner again.
async fn keeper_and_runner_die(rig: &mut Rig, turn: &Turn, client: &mut Client) {
    let mut follower = turn.follow(client, 0, false).await.unwrap();
    follower
        .until(|kind| matches!(kind, Kind::Phase(phase) if phase.phase() == Phase::Delivered))
        .await
        .unwrap();
    let keeper = turn.inspect(client).await.unwrap().process.unwrap().keeper_pid;
    rig.service.kill().await.unwrap();
    signal(u32::try_from(keeper).unwrap(), "KILL").unwrap();
    wait_until("nothing is left", BOUND, || rig.processes().is_empty()).await.unwrap();
    rig.again().await.unwrap();
}

#[tokio::test]
async fn s47_a_message_that_the_engine_proves_not_to_have_is_given_again() {
    let (mut rig, mut client) = rig().await;
    answered(&mut client, &turn(&rig, 1), "[[text:one]]").await;
    hold(&rig);
    let second = turn(&rig, 2);
    assert_eq!(second.open(&mut client).await.unwrap().result(), Opened::AlreadyOpen);
    second.send(&mut client, "[[append path=ran:x]] [[text:two]]").await.unwrap();
    keeper_and_runner_die(&mut rig, &second, &mut client).await;
    let mut client = rig.client().await.unwrap();
    let events = second.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let end = terminal(&events).unwrap();
    assert_eq!((end.outcome(), end.result.as_str()), (Outcome::Completed, "two"), "{:?}", names(&events));
    assert_eq!(rig.engine_log("\"start\"").len(), 2, "the first process never had it");
    assert_eq!(rig.engine_log("turn/start").len(), 2, "once for each turn");
    let accepted = events
        .iter()
        .filter(|event| matches!(kind(event), Some(Kind::Phase(phase)) if phase.phase() == Phase::Accepted));
    assert_eq!(accepted.count(), 1);
    second.acknowledge(&mut client).await.unwrap();
    assert_eq!(
        answered(&mut client, &turn(&rig, 3), "[[recall]]").await.1,
        "[[text:one]] | [[append path=ran:x]] [[text:two]] | [[recall]]"
    );
}

#[tokio::test]
async fn s47_a_message_that_the_engine_may_have_taken_is_lost_and_never_given_again() {
    let place = tempfile::tempdir().unwrap();
    let gate = place.path().join("gate");
    // Every turn waits between its acceptance and its start.
    let script: &'static str =
        Box::leak(format!("@accepted\n[[gate:{}]]\n", gate.display()).into_boxed_str());
    let (mut rig, mut client) = with(With { script: Some(script), ..With::codex() }).await;
    std::fs::write(&gate, "").unwrap();
    answered(&mut client, &turn(&rig, 1), "[[text:one]]").await;
    std::fs::remove_file(&gate).unwrap();
    let second = turn(&rig, 2);
    second.open(&mut client).await.unwrap();
    second.send(&mut client, "[[append path=ran:x]] [[text:two]]").await.unwrap();
    wait_until("the engine has it", BOUND, || rig.engine_log("turn/start").len() == 2).await.unwrap();
    keeper_and_runner_die(&mut rig, &second, &mut client).await;
    let mut client = rig.client().await.unwrap();
    let events = second.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let end = terminal(&events).unwrap();
    assert_eq!(end.outcome(), Outcome::Lost, "{:?}", names(&events));
    let failure = end.failure.unwrap();
    assert!(failure.retryable && !failure.next_action.is_empty(), "{failure:?}");
    assert_eq!(rig.engine_log("turn/start").len(), 2, "it is not given again");
    second.acknowledge(&mut client).await.unwrap();
    std::fs::write(&gate, "").unwrap();
    let (opened, answer) = answered(&mut client, &turn(&rig, 3), "[[text:three]]").await;
    assert_eq!((opened, answer.as_str()), (Opened::AlreadyOpen, "three"), "the session that was asked stays");
}

/// The runner dies once more while it asks: what was in doubt stays in doubt until the engine has answered.
async fn a_doubt_outlives_the_runner(failpoint: &str) {
    let (mut rig, mut client) = rig().await;
    answered(&mut client, &turn(&rig, 1), "[[text:one]]").await;
    hold(&rig);
    let second = turn(&rig, 2);
    second.open(&mut client).await.unwrap();
    second.send(&mut client, "[[append path=ran:x]] [[text:two]]").await.unwrap();
    let mut follower = second.follow(&mut client, 0, false).await.unwrap();
    follower
        .until(|kind| matches!(kind, Kind::Phase(phase) if phase.phase() == Phase::Delivered))
        .await
        .unwrap();
    let keeper = second.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    rig.service.kill().await.unwrap();
    signal(u32::try_from(keeper).unwrap(), "KILL").unwrap();
    wait_until("nothing is left", BOUND, || rig.processes().is_empty()).await.unwrap();
    rig.service.set_env("FAILPOINTS", &format!("{failpoint}=return"));
    // It may be ready before it dies, or not.
    if rig.service.start_again().await.is_ok() {
        rig.service.wait_exit(BOUND).await.unwrap();
    }
    rig.again().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let events = second.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let end = terminal(&events).unwrap();
    assert_eq!((end.outcome(), end.result.as_str()), (Outcome::Completed, "two"), "{:?}", names(&events));
    assert_eq!(std::fs::read_to_string(rig.work.join("ran")).unwrap(), "x\n");
}

#[tokio::test]
async fn s47_a_doubt_outlives_the_runner_that_was_about_to_ask() {
    a_doubt_outlives_the_runner("runner::in_doubt").await;
}

#[tokio::test]
async fn s47_a_doubt_outlives_the_runner_that_had_begun_to_ask() {
    a_doubt_outlives_the_runner("runner::after_spawn").await;
}

#[tokio::test]
async fn empty_mount_points_go_and_what_was_there_or_is_not_empty_stays() {
    let (rig, mut client) = rig().await;
    std::fs::create_dir(rig.work.join(".aws")).unwrap();
    let text = "[[bash:mkdir -p .git .codex .agents && touch .agents/kept]] [[text:made]]";
    let bypass = turn(&rig, 1);
    answered(&mut client, &bypass, text).await;
    let there = |name: &str| rig.work.join(name).exists();
    assert_eq!([".git", ".codex", ".agents", ".aws"].map(there), [false, false, true, true]);
}

#[tokio::test]
async fn a_process_that_is_not_quiet_is_not_offered_the_next_turn() {
    let (rig, mut client) = rig().await;
    let text = "[[text:one]] [[line:{\"method\":\"turn/started\",\"params\":{\"turn\":{\"id\":\"alien\"}}}]]";
    answered(&mut client, &turn(&rig, 1), text).await;
    let (opened, answer) = answered(&mut client, &turn(&rig, 2), "[[text:two]]").await;
    assert_eq!((opened, answer.as_str()), (Opened::Resumed, "two"));
    assert_eq!(rig.engine_log("\"start\"").len(), 2);
}

#[tokio::test]
async fn a_sandbox_that_cannot_run_is_refused_as_configuration_before_the_first_turn() {
    let options = With {
        variables: vec![("FAKE_ENGINE_SANDBOX", "broken".to_owned())],
        ..With::codex().and("allow_bypass", true)
    };
    let (rig, mut client) = with(options).await;
    for (number, mode) in [(1, PermissionMode::Ask), (2, PermissionMode::AcceptEdits)] {
        let mut refused = turn(&rig, number);
        refused.request.options.as_mut().unwrap().permissions = mode.into();
        let status = refused.open(&mut client).await.unwrap_err();
        assert_eq!(reason(&status), "CONFIGURATION", "{status:?}");
    }
    assert!(rig.engine_log("turn/start").is_empty(), "no turn with dead commands");
    let mut bypass = turn(&rig, 3);
    bypass.request.options.as_mut().unwrap().permissions = PermissionMode::Bypass.into();
    assert_eq!(answered(&mut client, &bypass, "[[bash:echo x > made]] [[text:ran]]").await.1, "ran");
}

#[tokio::test]
async fn every_request_of_the_engine_is_answered_in_a_turn_and_after_it() {
    // What it asks after its turn reaches a runner for which there is no turn any more.
    let wrapper = "#!/bin/sh\ncase \"$1\" in app-server) {engine} \"$@\" | while IFS= read -r line; do \
        printf '%s\\n' \"$line\"; case \"$line\" in *turn/completed*) \
        printf '%s\\n' '{\"id\":77,\"method\":\"item/tool/call\",\"params\":{}}';; esac; done;; \
        *) exec {engine} \"$@\";; esac\n";
    let (rig, mut client) = with(With { wrapper: Some(wrapper), ..With::codex() }).await;
    answered(&mut client, &turn(&rig, 1), "[[tool name=strange ask:{}]] [[text:one]]").await;
    wait_until("the late request is answered", BOUND, || {
        !rig.engine_log("refuse").is_empty() || rig.engine_log("\\\"id\\\":77").len() == 1
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn s61_a_changed_prompt_is_told_to_the_thread_and_the_opening_says_so() {
    let (rig, mut client) = rig().await;
    answered(&mut client, &turn(&rig, 1), "[[text:one]]").await;
    let mut second = turn(&rig, 2);
    second.request.agent_prompt = "You are another test.".to_owned();
    let opened = second.open(&mut client).await.unwrap();
    assert_eq!((opened.result(), opened.prompt_applied), (Opened::Resumed, true));
    assert_eq!(rig.engine_log("thread/inject_items").len(), 1);
    second.send(&mut client, "[[text:two]]").await.unwrap();
    second.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    second.acknowledge(&mut client).await.unwrap();
    // Told once, also over another process.
    close(&mut client, "ses_1").await;
    let mut third = turn(&rig, 3);
    third.request.agent_prompt = "You are another test.".to_owned();
    let opened = third.open(&mut client).await.unwrap();
    assert_eq!((opened.result(), opened.prompt_applied), (Opened::Resumed, false));
    assert_eq!(rig.engine_log("thread/inject_items").len(), 1);
}
