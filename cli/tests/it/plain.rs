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
async fn a_send_whose_fate_is_unknown_says_how_to_repeat_it_and_no_other_does() {
    let server = Fake::default().serve();
    server.fake.state().refuse_send = Some(tonic::Status::unavailable("going down"));
    let args = ["send", "-c", "cnv_1", "--request-id", "r-7", "hi"];
    let ended = run(&[&["--server", &server.url()], &args[..]].concat()).await;
    assert!(ended.stderr.contains("--request-id r-7 is harmless"), "{}", ended.stderr);
    // Without a connection nothing was sent.
    let ended = run(&[&["--server", "http://127.0.0.1:1"], &args[..]].concat()).await;
    assert!(ended.code == 6 && !ended.stderr.contains("--request-id"), "{}", ended.stderr);
}

#[tokio::test]
async fn ids_of_the_wrong_kind_are_told_in_words_of_the_command_line() {
    for (args, told) in [
        (&["cancel", "foo"][..], "\"foo\" is no turn\nnext: ids of turns start with trn_; `roundhouse turns"),
        (&["retry", "cnv_1"], "\"cnv_1\" is no turn"),
        (&["turns", "foo"], "\"foo\" names no conversation\nnext: write its id (cnv_...)"),
        (&["events", "trn_1"], "\"trn_1\" names no conversation"),
        (&["send", "-c", "foo", "hi"], "\"foo\" names no conversation"),
        (&["permissions", "allow", "1"], "\"1\" is no permission request"),
        (&["workspaces", "free", "/w", "--turn", "trn_1", "--reason", "x"], "\"/w\" is no workspace"),
    ] {
        // Nothing is asked of a server for it.
        let ended = run(&[&["--server", "http://127.0.0.1:1"], args].concat()).await;
        assert_eq!(ended.code, 2, "{args:?} {ended:?}");
        assert!(ended.stderr.contains(told), "{args:?} {ended:?}");
    }
}

#[tokio::test]
async fn what_speaks_no_grpc_is_unreachable_and_says_what_may_be_wrong() {
    use std::io::{Read as _, Write as _};
    // A server of another protocol: it answers as HTTP/1, or breaks off without a word.
    for answer in [&b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"[..], b""] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("has an address").to_string();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let mut head = [0u8; 64];
                let _ = stream.read(&mut head);
                let _ = stream.write_all(answer);
            }
        });
        let ended = run(&["--server", &address, "runners"]).await;
        assert_eq!(ended.code, 6, "{ended:?}");
        assert!(ended.stderr.contains("next: ") && ended.stderr.contains("--server"), "{ended:?}");
        if !answer.is_empty() {
            assert!(ended.stderr.contains("speaks no gRPC"), "{ended:?}");
        }
    }
    // Nobody at all.
    let ended = run(&["--server", "127.0.0.1:1", "runners"]).await;
    assert_eq!(ended.code, 6, "{ended:?}");
    assert!(ended.stderr.contains("`roundhouse up` starts one"), "{ended:?}");
}

#[tokio::test]
async fn a_token_goes_with_every_call_and_is_never_printed() {
    use std::os::unix::fs::PermissionsExt as _;
    let server = Fake::default().serve();
    let dir = tempfile::tempdir().expect("a directory");
    let token = dir.path().join("token");
    std::fs::write(&token, "s3cret-of-a-file\n").expect("writes");
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).expect("can be set");
    let config = dir.path().join("roundhouse.toml");
    let text =
        format!("[client.profiles.work]\nserver = '{}'\ntoken_file = '{}'\n", server.url(), token.display());
    std::fs::write(&config, text).expect("writes");
    let config = config.to_str().expect("UTF-8");
    let show = ["conversations", "show", "cnv_1"];
    let by_profile = run(&[&["--config", config, "--profile", "work"], &show[..]].concat()).await;
    let by_flag =
        run(&[&["--server", &server.url(), "--token", "s3cret-of-a-flag"], &show[..]].concat()).await;
    let mut by_variable = command(&[&["--server", &server.url()], &show[..]].concat());
    by_variable.env("ROUNDHOUSE_TOKEN", "s3cret-of-a-variable");
    let by_variable = finish(by_variable.spawn().expect("starts")).await;
    let none = run(&[&["--server", &server.url()], &show[..]].concat()).await;
    for ended in [&by_profile, &by_flag, &by_variable, &none] {
        assert_eq!(ended.code, 0, "{ended:?}");
    }
    let of = |text: &str| Some(format!("Bearer s3cret-of-a-{text}"));
    assert_eq!(server.fake.state().tokens, [of("file"), of("flag"), of("variable"), None]);
    // Nor where something goes wrong.
    let wrong = run(&["--server", "http://127.0.0.1:1", "--token", "s3cret", "runners"]).await;
    let bad = run(&["--server", &server.url(), "--token", "s3cret two", "runners"]).await;
    let shown = run(&["--config", config, "config", "show"]).await;
    for ended in [wrong, bad, shown] {
        assert!(!ended.stderr.contains("s3cret") && !ended.stdout.contains("s3cret"), "{ended:?}");
    }
    let unknown = run(&["--config", config, "--profile", "wrok", "runners"]).await;
    assert!(unknown.code == 2 && unknown.stderr.contains("known: work"), "{unknown:?}");
}

#[tokio::test]
async fn doctor_says_of_each_trouble_what_mends_it_and_shows_no_key() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = dir.path().join("roundhouse.toml");
    let text = "[engines.claude-code]\nexecutable = '/bin/false'\n\
                [engines.claude-code.variables]\nANTHROPIC_API_KEY = 'sk-not-to-be-seen'\n\
                [client]\nserver = 'http://127.0.0.1:1'\n[control_plane]\nlisten = '127.0.0.1:0'\n\
                [runner]\nlisten = '127.0.0.1:0'\n";
    std::fs::write(&config, text).expect("writes");
    let mut doctor = command(&["--json", "--config", config.to_str().expect("UTF-8"), "doctor"]);
    doctor.env("XDG_STATE_HOME", dir.path());
    let ended = finish(doctor.spawn().expect("starts")).await;
    let told = ended.json();
    assert_eq!((ended.code, &told["broken"]), (1, &json!(true)), "{ended:?}");
    assert!(!ended.stdout.contains("not-to-be-seen") && !ended.stderr.contains("not-to-be-seen"));
    let checks = told["checks"].as_array().expect("checks");
    for check in checks {
        assert_eq!(check["result"] == "ok", check["next"].is_null(), "{check}");
    }
    let of = |name: &str| {
        let found = checks.iter().find(|check| check["name"] == name);
        found.unwrap_or_else(|| panic!("no check of {name}: {checks:?}"))
    };
    assert_eq!(of("configuration")["result"], "ok");
    assert_eq!(of("login claude-code")["result"], "ok");
    assert_eq!(of("port of the runner")["result"], "ok");
    let engine = of("engine claude-code");
    assert_eq!(
        (&engine["result"], &engine["next"]),
        (&json!("failed"), &json!("roundhouse engines install claude-code"))
    );
    let server = of("control plane");
    assert_eq!(server["detail"], "none answers at http://127.0.0.1:1");
    assert!(server["next"].as_str().expect("a text").contains("roundhouse up"), "{server}");
    for name in ["isolation", "state of the control plane", "state of the runner", "git"] {
        of(name);
    }
    let human = finish({
        let mut doctor = command(&["--config", config.to_str().expect("UTF-8"), "doctor"]);
        doctor.env("XDG_STATE_HOME", dir.path());
        doctor.spawn().expect("starts")
    })
    .await;
    assert!(human.stdout.contains("failed    control plane: none answers at"), "{human:?}");
}

#[tokio::test]
async fn every_shell_gets_a_completion_script_that_knows_all_commands() {
    for (shell, check) in [
        ("bash", Some("bash")),
        ("zsh", Some("zsh")),
        ("fish", Some("fish")),
        ("elvish", None),
        ("powershell", None),
    ] {
        let ended = run(&["completions", shell]).await;
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{shell}");
        for word in ["chat", "export", "doctor", "permissions", "insecure-listen"] {
            assert!(ended.stdout.contains(word), "{shell} does not know {word}");
        }
        // A shell that is here reads it without a complaint.
        let Some(program) = check else { continue };
        let dir = tempfile::tempdir().expect("a directory");
        let script = dir.path().join("script");
        std::fs::write(&script, &ended.stdout).expect("writes");
        match tokio::process::Command::new(program).arg("-n").arg(&script).output().await {
            Ok(read) => assert!(read.status.success(), "{program}: {read:?}"),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{program}: {error}"),
        }
    }
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
