//! Sessions over many processes: warm, resumed, replaced, and never silently forgetful.

use std::path::PathBuf;

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::{
    FailureReason, ListSessionsRequest, Outcome, event_body::Kind, start_or_resume_response::Result as Opened,
};
use roundhouse_test_support::wait_until;

use crate::rig::{BOUND, Client, Rig, Turn, With, kind, names, reason, terminal};

/// The session's own file in the engine's home.
fn session_file(rig: &Rig) -> PathBuf {
    fn find(directory: &std::path::Path) -> Option<PathBuf> {
        for entry in std::fs::read_dir(directory).ok()?.flatten() {
            let path = entry.path();
            if path.is_dir() {
                if let Some(found) = find(&path) {
                    return Some(found);
                }
            } else if path.extension().is_some_and(|extension| extension == "jsonl") {
                return Some(path);
            }
        }
        None
    }
    find(&rig.state.join("homes")).expect("a session file")
}

async fn close(client: &mut Client) {
    let request = roundhouse_proto::engine::v1::CloseSessionRequest { session_id: "ses_1".into() };
    assert!(client.close_session(request).await.unwrap().into_inner().was_open);
}

async fn ask(client: &mut Client, turn: &Turn, text: &str) -> String {
    turn.send(client, text).await.unwrap();
    let events = turn.follow(client, 0, false).await.unwrap().all().await.unwrap();
    turn.acknowledge(client).await.unwrap();
    let ended = terminal(&events).unwrap();
    assert_eq!(ended.outcome(), Outcome::Completed, "{:?}", names(&events));
    ended.result
}

#[tokio::test]
async fn a_ttl_between_turns_raises_no_false_alarm() {
    let rig = Rig::with(With::set("warm_ttl", "10ms")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    for number in 1..=6 {
        let turn = Turn::new(&rig, "cnv_1", "ses_1", &format!("trn_{number}"), number);
        let opened = turn.open(&mut client).await.unwrap().result();
        assert_eq!(opened, if number == 1 { Opened::Started } else { Opened::Resumed });
        let result = ask(&mut client, &turn, &format!("number {number} [[recall]]")).await;
        for earlier in 1..=number {
            assert!(result.contains(&format!("number {earlier}")), "{number}: {result}");
        }
        wait_until("the engine is closed", BOUND, || rig.processes().is_empty()).await.unwrap();
    }
}

#[tokio::test]
async fn s14_damaged_files_are_found_before_a_resume_and_the_same_turn_goes_on_in_another_session() {
    type Damage = (&'static str, fn(&PathBuf));
    let damages: [Damage; 6] = [
        ("cut", |path| {
            let length = std::fs::metadata(path).unwrap().len();
            std::fs::File::options().write(true).open(path).unwrap().set_len(length / 2).unwrap();
        }),
        ("garbage row", |path| {
            let text = std::fs::read_to_string(path).unwrap();
            let mut rows: Vec<_> = text.lines().collect();
            let middle = rows.len() / 2;
            rows[middle] = "{garbage";
            std::fs::write(path, rows.join("\n") + "\n").unwrap();
        }),
        ("garbage first row", |path| {
            let text = std::fs::read_to_string(path).unwrap();
            std::fs::write(path, format!("x{}", &text[1..])).unwrap();
        }),
        ("zero length", |path| std::fs::write(path, "").unwrap()),
        ("deleted", |path| std::fs::remove_file(path).unwrap()),
        ("a directory", |path| {
            std::fs::remove_file(path).unwrap();
            std::fs::create_dir(path).unwrap();
        }),
    ];
    for (what, damage) in damages {
        let rig = Rig::start().await.unwrap();
        let mut client = rig.client().await.unwrap();
        let first = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
        first.open(&mut client).await.unwrap();
        ask(&mut client, &first, "[[text:one]]").await;
        close(&mut client).await;
        damage(&session_file(&rig));
        let mut second = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
        let opened = second.open(&mut client).await.unwrap();
        assert_eq!(opened.result(), Opened::Unusable, "{what}");
        assert!(!opened.unusable_reason.is_empty(), "{what}");
        // Asked again, the answer is the same.
        assert_eq!(second.open(&mut client).await.unwrap().result(), Opened::Unusable, "{what}");
        second.request.session_id = "ses_2".into();
        second.request.replaces = "ses_1".into();
        second.request.context = "what was said before".into();
        assert_eq!(second.open(&mut client).await.unwrap().result(), Opened::Started, "{what}");
        second.send(&mut client, "[[recall]]").await.unwrap();
        let events = second.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
        let order = names(&events);
        assert_eq!(order[0], "session STATE_UNUSABLE", "{what}: {order:?}");
        let replaced = events.iter().filter_map(kind).any(|kind| {
            matches!(kind, Kind::Session(s) if s.replaces == "ses_1" && s.history_given && s.origin == 3)
        });
        assert!(replaced, "{what}: {order:?}");
        assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed);
        second.acknowledge(&mut client).await.unwrap();
        // Nothing makes it usable again.
        let third = Turn::new(&rig, "cnv_1", "ses_1", "trn_3", 3);
        assert_eq!(third.open(&mut client).await.unwrap().result(), Opened::Unusable, "{what}");
    }
}

#[tokio::test]
async fn an_unusable_session_that_nobody_replaces_fails_its_turn() {
    let rig = Rig::with(With::set("unusable_wait", "300ms")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let first = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    first.open(&mut client).await.unwrap();
    ask(&mut client, &first, "[[text:one]]").await;
    close(&mut client).await;
    std::fs::remove_file(session_file(&rig)).unwrap();
    let second = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    second.open(&mut client).await.unwrap();
    let events = second.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    assert_eq!(ended.failure.unwrap().reason(), FailureReason::SessionUnusable);
}

#[tokio::test]
async fn s11_another_prompt_model_or_effort_gets_another_process_on_the_same_session() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let first = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    first.open(&mut client).await.unwrap();
    ask(&mut client, &first, "first [[text:one]]").await;
    let mut second = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    second.request.agent_prompt = "You are another test.".into();
    let opened = second.open(&mut client).await.unwrap();
    assert_eq!((opened.result(), opened.prompt_applied), (Opened::Resumed, true));
    assert!(ask(&mut client, &second, "second [[recall]]").await.contains("first"));
    let mut third = Turn::new(&rig, "cnv_1", "ses_1", "trn_3", 3);
    third.request.agent_prompt = "You are another test.".into();
    third.request.effort = Some("high".into());
    let opened = third.open(&mut client).await.unwrap();
    assert_eq!((opened.result(), opened.prompt_applied), (Opened::Resumed, false));
    assert!(ask(&mut client, &third, "[[recall]]").await.contains("second"));
    let starts = rig.engine_log("\"start\"");
    assert_eq!(starts.len(), 3);
    assert!(starts[1].contains("You are another test.") && starts[2].contains("high"), "{starts:?}");
}

#[tokio::test]
async fn the_least_recently_used_engine_makes_room() {
    let rig = Rig::with(With::set("max_warm_engines", 2)).await.unwrap();
    let mut client = rig.client().await.unwrap();
    for number in 1..=3 {
        let turn =
            Turn::new(&rig, &format!("cnv_{number}"), &format!("ses_{number}"), &format!("trn_{number}"), 1);
        turn.run(&mut client, "[[text:x]]").await.unwrap();
    }
    let list = client.list_sessions(ListSessionsRequest::default()).await.unwrap().into_inner().sessions;
    let warm: Vec<_> = list.iter().map(|session| (session.session_id.as_str(), session.warm)).collect();
    assert_eq!(warm, [("ses_1", false), ("ses_2", true), ("ses_3", true)]);
    let page = |token: &str| ListSessionsRequest { page_size: 2, page_token: token.into() };
    let first = client.list_sessions(page("")).await.unwrap().into_inner();
    let second = client.list_sessions(page(&first.next_page_token)).await.unwrap().into_inner();
    assert_eq!((first.sessions.len(), second.sessions.len(), second.next_page_token.as_str()), (2, 1, ""));
}

#[tokio::test]
async fn a_session_belongs_to_one_conversation_and_its_turns_come_one_by_one() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let first = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    first.open(&mut client).await.unwrap();
    let second = Turn::new(&rig, "cnv_1", "ses_2", "trn_2", 1);
    assert_eq!(reason(&second.open(&mut client).await.unwrap_err()), "TURN_IN_PROGRESS");
    ask(&mut client, &first, "[[text:one]]").await;
    let foreign = Turn::new(&rig, "cnv_2", "ses_1", "trn_3", 1);
    assert_eq!(reason(&foreign.open(&mut client).await.unwrap_err()), "WRONG_STATE");
    // The refused opening left neither a turn nor a held slot.
    second.open(&mut client).await.unwrap();
}

#[tokio::test]
async fn an_engine_that_is_missing_is_refused_by_name() {
    let rig = Rig::with(With {
        args: vec!["--set", "engines.claude-code.executable=/nonexistent"],
        ..With::default()
    })
    .await
    .unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    assert_eq!(reason(&turn.open(&mut client).await.unwrap_err()), "ENGINE_MISSING");
}

#[tokio::test]
async fn an_idle_engine_that_died_is_replaced_before_the_message_is_given() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.open(&mut client).await.unwrap();
    let keeper = turn.inspect(&mut client).await.unwrap().process.unwrap().keeper_pid;
    crate::rig::signal(u32::try_from(keeper).unwrap(), "KILL").unwrap();
    wait_until("another process is there", BOUND, || rig.engine_log("\"start\"").len() == 2).await.unwrap();
    let mut result = turn.send(&mut client, "[[text:fine]]").await;
    for _ in 0..200 {
        if result.is_ok() {
            break;
        }
        // Not open again yet: a caller tries again.
        turn.open(&mut client).await.unwrap();
        result = turn.send(&mut client, "[[text:fine]]").await;
    }
    result.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().result, "fine", "{:?}", names(&events));
}

#[tokio::test]
async fn a_warm_process_serves_more_than_its_spool_could_hold_at_once() {
    let rig = Rig::with(With::set("spool_limit_bytes", 3_000_000)).await.unwrap();
    let mut client = rig.client().await.unwrap();
    for number in 1..=6 {
        let turn = Turn::new(&rig, "cnv_1", "ses_1", &format!("trn_{number}"), number);
        turn.open(&mut client).await.unwrap();
        assert_eq!(ask(&mut client, &turn, "[[huge bytes=400000]]").await.len(), 400_000);
    }
    assert_eq!(rig.engine_log("\"start\"").len(), 1);
    // A single turn that is larger fails, and says why.
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_9", 9);
    turn.open(&mut client).await.unwrap();
    turn.send(&mut client, "[[huge bytes=4000000]] [[text:more]] [[stall]]").await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(
        terminal(&events).unwrap().failure.unwrap().reason(),
        FailureReason::Storage,
        "{:?}",
        names(&events)
    );
}

/// The session's own record.
fn record(rig: &Rig) -> (PathBuf, serde_json::Value) {
    let path = rig.state.join("sessions/ses_1/session.json");
    let value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    (path, value)
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn what_the_end_of_a_turn_keeps_of_its_session_is_not_overwritten_by_its_opening() {
    // The opening's write has read the record, and does not come to writing before the turn is over.
    let rig = Rig::with(With::failpoint("runner::remember_opened=1500*pause")).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let turn = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    turn.run(&mut client, "[[text:one]]").await.unwrap();
    // Both writes are over when the session can be closed: its record is not written after that.
    close(&mut client).await;
    tokio::time::sleep(std::time::Duration::from_millis(2000)).await;
    let (_, record) = record(&rig);
    assert_eq!(record["carry"]["committed"], true, "{record:#}");
    assert!(record["fingerprint"].is_object(), "{record:#}");
}

#[tokio::test]
async fn s14_a_session_that_the_caller_knows_to_be_written_is_never_begun_anew() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let first = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let events = first.run(&mut client, "[[text:one]]").await.unwrap();
    let native = events.iter().filter_map(kind).find_map(|kind| match kind {
        Kind::Session(session) if session.state() as i32 == 2 => session.native_ref.clone(),
        _ => None,
    });
    close(&mut client).await;
    std::fs::remove_file(session_file(&rig)).unwrap();
    // The runner itself knows of no row: as it does when its host lost power at the wrong moment.
    let (path, mut record) = record(&rig);
    record["carry"]["committed"] = false.into();
    record.as_object_mut().unwrap().remove("fingerprint");
    std::fs::write(&path, record.to_string()).unwrap();
    let mut second = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    second.request.native_ref = Some(native.unwrap());
    let opened = second.open(&mut client).await.unwrap();
    assert_eq!(opened.result(), Opened::Unusable);
    assert!(opened.unusable_reason.contains("file_missing"), "{opened:?}");
}

#[tokio::test]
async fn s15_without_its_record_nothing_proves_a_session_whole_and_the_same_turn_goes_on_in_another() {
    let rig = Rig::start().await.unwrap();
    let mut client = rig.client().await.unwrap();
    let first = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    let events = first.run(&mut client, "[[text:one]]").await.unwrap();
    let native = events.iter().filter_map(kind).find_map(|kind| match kind {
        Kind::Session(session) if session.state() as i32 == 2 => session.native_ref.clone(),
        _ => None,
    });
    close(&mut client).await;
    // Both are damaged at once: the file's last rows, and the record that would tell.
    let file = session_file(&rig);
    let rows = std::fs::read_to_string(&file).unwrap();
    let kept: Vec<&str> = rows.lines().collect();
    std::fs::write(&file, format!("{}\n", kept[..kept.len() - 1].join("\n"))).unwrap();
    std::fs::remove_file(record(&rig).0).unwrap();
    let mut second = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    second.request.native_ref = native;
    let opened = second.open(&mut client).await.unwrap();
    assert_eq!(opened.result(), Opened::Unusable);
    assert!(opened.unusable_reason.contains("record_missing"), "{opened:?}");
    let mut other = second.clone();
    other.request.session_id = "ses_2".to_owned();
    other.request.replaces = "ses_1".to_owned();
    other.request.native_ref = None;
    assert_eq!(other.open(&mut client).await.unwrap().result(), Opened::Started);
    assert_eq!(ask(&mut client, &other, "[[text:two]]").await, "two");
    assert!(file.exists(), "the old file is kept");
}

#[tokio::test]
async fn s15_a_file_that_the_runner_may_not_read_is_told_as_such_and_replaced_in_the_same_turn() {
    use std::os::unix::fs::PermissionsExt as _;
    // Root may read everything, so this runner is nobody.
    let rig = Rig::with(With { user: Some(65_534), ..With::default() }).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let first = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    first.open(&mut client).await.unwrap();
    ask(&mut client, &first, "[[text:one]]").await;
    close(&mut client).await;
    let file = session_file(&rig);
    let before = std::fs::read(&file).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o000)).unwrap();
    let mut second = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    let opened = second.open(&mut client).await.unwrap();
    assert_eq!(opened.result(), Opened::Unusable, "never resumed as if nothing were wrong");
    assert!(opened.unusable_reason.contains("file_unreadable"), "{opened:?}");
    assert!(opened.unusable_reason.contains("Permission denied"), "{opened:?}");
    second.request.session_id = "ses_2".into();
    second.request.replaces = "ses_1".into();
    second.request.context = "what was said before".into();
    assert_eq!(second.open(&mut client).await.unwrap().result(), Opened::Started);
    second.send(&mut client, "[[recall]]").await.unwrap();
    let events = second.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(names(&events)[0], "session STATE_UNUSABLE");
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), before, "the old file is as it was");
}

/// Reads its first line alone where a file says so, and lives on.
const DEAF_ONCE: &str = r#"#!/bin/sh
case "$*" in
    *--print*) [ -e "${0%/*}/deaf" ] || exec {engine} "$@" ;;
    *) exec {engine} "$@" ;;
esac
exec 3<&0 0</dev/null
{ head -n 1 <&3; exec 3<&-; exec sleep 600; } | {engine} "$@" 3<&- &
exec 3<&-
wait $!
"#;

/// A turn whose session is lost after its message was sent and before the engine took it.
async fn lost_before_it_was_taken(with: With) -> (Rig, Turn) {
    let rig = Rig::with(With { wrapper: Some(DEAF_ONCE), ..with }).await.unwrap();
    let mut client = rig.client().await.unwrap();
    let first = Turn::new(&rig, "cnv_1", "ses_1", "trn_1", 1);
    first.open(&mut client).await.unwrap();
    ask(&mut client, &first, "[[text:one]]").await;
    close(&mut client).await;
    std::fs::write(rig.path("deaf"), "").unwrap();
    let second = Turn::new(&rig, "cnv_1", "ses_1", "trn_2", 2);
    assert_eq!(second.open(&mut client).await.unwrap().result(), Opened::Resumed);
    std::fs::remove_file(session_file(&rig)).unwrap();
    std::fs::remove_file(rig.path("deaf")).unwrap();
    second.send(&mut client, "[[append path=ran.txt:x]] [[text:taken]]").await.unwrap();
    (rig, second)
}

#[tokio::test]
async fn a_session_that_is_lost_after_send_and_before_it_was_taken_waits_for_another_one() {
    let (rig, mut turn) = lost_before_it_was_taken(With::default()).await;
    let mut client = rig.client().await.unwrap();
    let mut follower = turn.follow(&mut client, 0, false).await.unwrap();
    let unusable = |kind: &Kind| matches!(kind, Kind::Session(session) if session.state() as i32 == 3);
    let seen = follower.until(unusable).await.unwrap();
    assert!(!names(&seen).iter().any(|name| name.contains("ACCEPTED")), "{:?}", names(&seen));
    turn.request.session_id = "ses_2".into();
    turn.request.replaces = "ses_1".into();
    turn.request.context = "what was said before".into();
    assert_eq!(turn.open(&mut client).await.unwrap().result(), Opened::Started);
    turn.send(&mut client, "[[append path=ran.txt:x]] [[text:taken]]").await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    assert_eq!((ended.outcome(), ended.result.as_str()), (Outcome::Completed, "taken"));
    let order = names(&events);
    assert_eq!(order.iter().filter(|name| name.contains("ACCEPTED")).count(), 1, "{order:?}");
    assert_eq!(std::fs::read_to_string(rig.work.join("ran.txt")).unwrap(), "x\n");
}

#[tokio::test]
async fn a_session_that_is_lost_after_send_and_that_nobody_replaces_fails_its_turn() {
    let (rig, turn) = lost_before_it_was_taken(With::set("unusable_wait", "300ms")).await;
    let mut client = rig.client().await.unwrap();
    let events = turn.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    let ended = terminal(&events).unwrap();
    let failure = ended.failure.clone().unwrap();
    assert_eq!((ended.outcome(), failure.reason()), (Outcome::Failed, FailureReason::SessionUnusable));
    assert!(!rig.work.join("ran.txt").exists(), "nothing was given to an engine");
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn idle_engines_make_room_when_memory_is_short_and_their_sessions_go_on() {
    const PLENTY: &str = "MemTotal: 1000 kB\nMemAvailable: 500 kB\n";
    const LITTLE: &str = "MemTotal: 1000 kB\nMemAvailable: 50 kB\n";
    let prepare = |path: &std::path::Path| {
        std::fs::write(path.join("meminfo"), PLENTY).unwrap();
        vec![("FAILPOINT_MEMORY", path.display().to_string())]
    };
    let rig = Rig::with(With { prepare: Some(prepare), ..With::default() }).await.unwrap();
    let mut client = rig.client().await.unwrap();
    for number in 1..=2 {
        let turn =
            Turn::new(&rig, &format!("cnv_{number}"), &format!("ses_{number}"), &format!("trn_{number}"), 1);
        turn.run(&mut client, &format!("number {number} [[text:x]]")).await.unwrap();
    }
    let busy = Turn::new(&rig, "cnv_3", "ses_3", "trn_3", 1);
    busy.open(&mut client).await.unwrap();
    let gate = rig.path("gate");
    busy.send(&mut client, &format!("[[text:a]] [[gate:{}]] [[text:b]]", gate.display())).await.unwrap();
    let mut follower = busy.follow(&mut client, 0, false).await.unwrap();
    follower.until(|kind| matches!(kind, Kind::Text(_))).await.unwrap();
    let engines = || rig.processes().iter().filter(|(_, command)| command.contains("fake-engine")).count();
    let warm = async |client: &mut Client| {
        let list = client.list_sessions(ListSessionsRequest::default()).await.unwrap().into_inner();
        list.sessions.iter().filter(|session| session.warm).map(|s| s.session_id.clone()).collect::<Vec<_>>()
    };
    assert_eq!(warm(&mut client).await, ["ses_1", "ses_2", "ses_3"]);
    // Replaced in one step: the runner may be reading.
    std::fs::write(rig.path("meminfo.new"), LITTLE).unwrap();
    std::fs::rename(rig.path("meminfo.new"), rig.path("meminfo")).unwrap();
    wait_until("the idle engines are closed", BOUND, || engines() == 1).await.unwrap();
    // A process is gone a moment before it is forgotten.
    let mut tick = tokio::time::interval(std::time::Duration::from_millis(10));
    let mut left = warm(&mut client).await;
    let deadline = tokio::time::Instant::now() + BOUND;
    while left != ["ses_3"] && tokio::time::Instant::now() < deadline {
        tick.tick().await;
        left = warm(&mut client).await;
    }
    assert_eq!(left, ["ses_3"], "one that works is left alone");
    std::fs::write(&gate, "").unwrap();
    let events = busy.follow(&mut client, 0, false).await.unwrap().all().await.unwrap();
    assert_eq!(terminal(&events).unwrap().outcome(), Outcome::Completed, "{:?}", names(&events));
    std::fs::write(rig.path("meminfo.new"), PLENTY).unwrap();
    std::fs::rename(rig.path("meminfo.new"), rig.path("meminfo")).unwrap();
    let next = Turn::new(&rig, "cnv_1", "ses_1", "trn_4", 2);
    assert_eq!(next.open(&mut client).await.unwrap().result(), Opened::Resumed);
    assert!(ask(&mut client, &next, "[[recall]]").await.contains("number 1"));
}
