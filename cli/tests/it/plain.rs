//! What needs no server, and servers that are not there.

use pretty_assertions::assert_eq;
use serde_json::json;

use crate::fake::Fake;
use crate::run::{command, finish, run};

#[tokio::test]
async fn a_server_that_is_not_there_is_exit_code_6_with_advice() {
    // Port 1 of loopback is nobody's.
    for command in [
        vec!["conversations", "list"],
        vec!["runners"],
        vec!["send", "-c", "cnv_1", "hi"],
        vec!["events", "--follow", "cnv_1"],
        vec!["permissions", "list"],
        vec!["agents", "list", "-C", "wsp_1"],
    ] {
        let args = [vec!["--server", "http://127.0.0.1:1"], command].concat();
        let ended = run(&args).await;
        assert_eq!((ended.code, ended.stdout.as_str()), (6, ""), "{args:?} {ended:?}");
        assert!(
            ended.stderr.contains("no control plane answers at http://127.0.0.1:1: ")
                && ended.stderr.contains("refused")
                && ended.stderr.contains("roundhouse up"),
            "{}",
            ended.stderr
        );
    }
    let ended = run(&["--json", "--server", "http://127.0.0.1:1", "runners"]).await;
    let error: serde_json::Value = serde_json::from_str(&ended.stderr).expect("JSON");
    assert_eq!((&error["error"]["code"], &error["error"]["exit_code"]), (&json!("UNAVAILABLE"), &json!(6)));
}

#[tokio::test]
async fn a_service_that_is_not_there_or_that_never_answers_is_not_healthy() {
    let ended = run(&["health", "http://127.0.0.1:1"]).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (6, ""), "{ended:?}");
    assert!(ended.stderr.contains("nothing answers at http://127.0.0.1:1"), "{}", ended.stderr);
    // It accepts and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = silent.local_addr().expect("an address").to_string();
    let ended = run(&["health", &url]).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (6, ""), "{ended:?}");
    assert!(ended.stderr.contains("did not answer within 5 s"), "{}", ended.stderr);
}

#[tokio::test]
async fn a_send_whose_fate_is_unknown_says_how_to_repeat_it() {
    let ended =
        run(&["--server", "http://127.0.0.1:1", "send", "-c", "cnv_1", "--request-id", "r-7", "hi"]).await;
    assert!(ended.stderr.contains("--request-id r-7 is harmless"), "{}", ended.stderr);
}

#[tokio::test]
async fn what_cannot_be_understood_is_exit_code_2() {
    for args in [
        &["frobnicate"][..],
        &["send"],
        &["conversations", "list", "--limit", "0"],
        &["--server", "https://x", "runners"],
        &["--server", "ftp://x", "runners"],
        &["send", "-c", "a:b", "hi"],
        &["conversations", "create", "--external-id", "x"],
        &[],
    ] {
        let ended = run(args).await;
        assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{args:?} {ended:?}");
        assert!(!ended.stderr.is_empty());
    }
}

#[tokio::test]
async fn help_and_version_are_data() {
    let ended = run(&["--help"]).await;
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    assert!(ended.stdout.contains("130  the turn was cancelled"), "{}", ended.stdout);
    let ended = run(&["--version"]).await;
    assert_eq!(ended.stdout, format!("roundhouse {}\n", env!("CARGO_PKG_VERSION")));
}

#[tokio::test]
async fn data_that_is_not_written_is_no_success() {
    let full = || std::fs::File::options().write(true).open("/dev/full").expect("is there");
    for args in
        [&["config", "show"][..], &["--json", "config", "show"], &["completions", "bash"], &["--help"]]
    {
        let ended = finish(command(args).stdout(full()).spawn().expect("starts")).await;
        assert_eq!(ended.code, 1, "{args:?} {ended:?}");
        assert!(ended.stderr.contains("standard output"), "{args:?} {}", ended.stderr);
    }
    // A reader that has gone is no reason for words.
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let ended = finish(command(&["config", "show"]).stdout(writer).spawn().expect("starts")).await;
    assert_eq!((ended.code, ended.stderr.as_str()), (141, ""));
}

#[tokio::test]
async fn completions_are_there_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ended = run(&["completions", shell]).await;
        assert!(ended.code == 0 && ended.stdout.contains("conversations"), "{shell}");
    }
    // What bash is given, bash can read.
    let script =
        format!("source <({} completions bash) && complete -p roundhouse", env!("CARGO_BIN_EXE_roundhouse"));
    let output =
        tokio::process::Command::new("bash").args(["-c", &script]).output().await.expect("bash runs");
    assert!(output.status.success(), "{output:?}");
}

#[tokio::test]
async fn a_wrong_configuration_is_told_whole() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("roundhouse.toml");
    std::fs::write(&file, "[client]\nservr = 'x'\n[runner]\nidle_timeout = 3\n").expect("writes");
    let path = file.to_str().expect("UTF-8");
    let ended = run(&["--json", "--config", path, "config", "check"]).await;
    let told = ended.json();
    assert_eq!(
        (ended.code, &told["valid"], told["problems"].as_array().map(Vec::len)),
        (3, &json!(false), Some(2))
    );
    // Another command does not go on with half a configuration.
    let ended = run(&["--config", path, "runners"]).await;
    assert_eq!(ended.code, 3);
    assert!(ended.stderr.contains("client.server"), "{}", ended.stderr);

    let ended = run(&["--set", "runner.idle_timeout=5m", "--json", "config", "show"]).await;
    assert_eq!((ended.code, &ended.json()["runner"]["idle_timeout"]), (0, &json!("5m")), "{ended:?}");
    let ended = run(&["config", "check"]).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "the configuration is valid\n"));
}

#[tokio::test]
async fn secrets_of_the_configuration_are_masked() {
    for json in [&["--json"][..], &[]] {
        let setting = "engines.claude-code.variables.ANTHROPIC_API_KEY=sk-secret-1";
        let ended = run(&[json, &["--set", setting, "config", "show"]].concat()).await;
        assert!(ended.code == 0 && !ended.stdout.contains("sk-secret-1"), "{}", ended.stdout);
        assert!(ended.stdout.contains("ANTHROPIC_API_KEY"), "{}", ended.stdout);
    }
}

#[tokio::test]
async fn a_second_answer_to_a_permission_is_a_conflict() {
    let server = Fake::default().serve();
    let first = run(&["--server", &server.url(), "permissions", "allow", "spl_1.1"]).await;
    assert_eq!((first.code, first.stdout.as_str()), (0, "answered: allow\n"));
    let second =
        run(&["--server", &server.url(), "permissions", "deny", "spl_1.2", "--feedback", "no"]).await;
    assert_eq!((second.code, second.stdout.as_str()), (4, "it was answered before: deny\n"));
}

#[tokio::test]
async fn empty_lists_say_so_and_json_keeps_its_shape() {
    let server = Fake::default().serve();
    let human = run(&["--server", &server.url(), "conversations", "list"]).await;
    assert_eq!((human.code, human.stdout.as_str()), (0, "no conversations\n"));
    let short = run(&["--server", &server.url(), "conversations"]).await;
    assert_eq!((short.code, short.stdout), (0, human.stdout), "without a subcommand it lists");
    let json = run(&["--server", &server.url(), "--json", "conversations", "list"]).await;
    assert_eq!(json.json(), json!({"conversations": [], "next_page_token": ""}));
}

#[tokio::test]
async fn doctor_fails_when_nothing_is_there_and_says_what_to_do() {
    let ended = run(&["--json", "--server", "http://127.0.0.1:1", "doctor"]).await;
    assert_eq!(ended.code, 1);
    let checks = ended.json()["checks"].as_array().cloned().unwrap_or_default();
    let of = |name: &str| checks.iter().find(|check| check["name"] == name).cloned().unwrap_or_default();
    assert_eq!(of("configuration")["result"], "ok");
    assert_eq!(of("control plane")["result"], "failed");
    assert!(of("control plane")["next"].as_str().is_some_and(|next| next.contains("roundhouse up")));
}
