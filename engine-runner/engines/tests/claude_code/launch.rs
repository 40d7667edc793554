//! How the engine is started.

use std::{collections::BTreeMap, path::PathBuf};

use pretty_assertions::assert_eq;
use roundhouse_engines::{
    Adapter, CredentialPlan, CredentialRequest, CredentialSource, Effort, EngineLimits, HostDirectories,
    LaunchPlan, LaunchRequest, NativeRef, OpenMode, Permissions, PlanError, Reason, Secret, adapter,
};

use crate::support::NATIVE;

fn claude() -> &'static dyn Adapter {
    adapter("claude-code").unwrap()
}

fn variables(pairs: &[(&str, &str)]) -> BTreeMap<String, Secret> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), Secret::new(*value))).collect()
}

fn credentials(
    source: CredentialSource,
    pairs: &[(&str, &str)],
    host: Option<HostDirectories>,
) -> Result<CredentialPlan, PlanError> {
    claude().credentials(&CredentialRequest {
        source,
        variables: &variables(pairs),
        host,
        private_home: PathBuf::from("/state/homes/w/claude-code/default"),
    })
}

fn key() -> CredentialPlan {
    let pairs = [("ANTHROPIC_API_KEY", "sk-dummy"), ("ANTHROPIC_BASE_URL", "http://127.0.0.1:1")];
    credentials(CredentialSource::Variables, &pairs, None).unwrap()
}

struct Wish {
    open: OpenMode,
    native: NativeRef,
    model: String,
    effort: Option<Effort>,
    permissions: Permissions,
    prompt: String,
    root: bool,
    credentials: CredentialPlan,
    extra: BTreeMap<String, String>,
}

impl Wish {
    fn new() -> Self {
        Self {
            open: OpenMode::Start,
            native: NativeRef { id: NATIVE.into(), file: None },
            model: "claude-opus-5-5".into(),
            effort: Some(Effort::High),
            permissions: Permissions::Ask,
            prompt: "--be careful\nwith this".into(),
            root: false,
            credentials: key(),
            extra: BTreeMap::new(),
        }
    }

    fn plan(&self) -> Result<LaunchPlan, PlanError> {
        claude().launch(&LaunchRequest {
            executable: PathBuf::from("/opt/claude"),
            workspace: PathBuf::from("/srv/ws"),
            temporary: PathBuf::from("/state/tmp/spl_1"),
            user_home: PathBuf::from("/state/homes/w/claude-code/default"),
            path: "/usr/bin:/bin".into(),
            open: self.open,
            native: &self.native,
            model: &self.model,
            effort: self.effort,
            permissions: self.permissions,
            prompt: &self.prompt,
            root: self.root,
            credentials: &self.credentials,
            extra_variables: &self.extra,
            limits: &EngineLimits::default(),
        })
    }
}

#[test]
fn the_whole_command_line() {
    let plan = Wish::new().plan().unwrap();
    assert_eq!(plan.program, PathBuf::from("/opt/claude"));
    assert_eq!(plan.cwd, PathBuf::from("/srv/ws"));
    assert_eq!(
        plan.args,
        [
            "--print",
            "--verbose",
            "--output-format=stream-json",
            "--input-format=stream-json",
            "--include-partial-messages",
            "--replay-user-messages",
            "--strict-mcp-config",
            "--setting-sources=user",
            r#"--settings={"crossSessionInbound":"refuse"}"#,
            "--disallowedTools=SendMessage,ListAgents,CronCreate,CronDelete,CronList,ScheduleWakeup,Monitor,\
             AskUserQuestion",
            "--session-id=99999999-2222-4333-8444-555555555555",
            "--model=claude-opus-5-5",
            "--effort=high",
            "--permission-mode=default",
            "--permission-prompt-tool=stdio",
            "--system-prompt-snapshot=off",
            "--append-system-prompt=--be careful\nwith this",
        ]
    );
}

#[test]
fn the_whole_environment() {
    let plan = Wish::new().plan().unwrap();
    let env: Vec<(&str, &str)> =
        plan.env.iter().map(|(name, value)| (name.as_str(), value.expose())).collect();
    assert_eq!(
        env,
        [
            ("ANTHROPIC_BASE_URL", "http://127.0.0.1:1"),
            ("API_TIMEOUT_MS", "180000"),
            ("CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS", "90000"),
            ("CLAUDE_CODE_DISABLE_AUTO_MEMORY", "1"),
            ("CLAUDE_CODE_DISABLE_BACKGROUND_TASKS", "1"),
            ("CLAUDE_CODE_DISABLE_CLAUDE_MDS", "1"),
            ("CLAUDE_CODE_DISABLE_CRON", "1"),
            ("CLAUDE_CODE_DISABLE_FILE_MENTIONS", "1"),
            ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
            ("CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS", "1"),
            ("CLAUDE_CODE_MAX_RETRIES", "4"),
            ("CLAUDE_CODE_TMPDIR", "/state/tmp/spl_1"),
            ("CLAUDE_CONFIG_DIR", "/state/homes/w/claude-code/default"),
            ("CLAUDE_ENABLE_BYTE_WATCHDOG", "1"),
            ("DISABLE_AUTOUPDATER", "1"),
            ("DISABLE_TELEMETRY", "1"),
            ("HOME", "/state/homes/w/claude-code/default"),
            ("PATH", "/usr/bin:/bin"),
            ("PWD", "/srv/ws"),
            ("TMPDIR", "/state/tmp/spl_1"),
        ]
    );
}

#[test]
fn the_key_goes_by_a_pipe_and_shows_nowhere() {
    let plan = Wish::new().plan().unwrap();
    assert_eq!(plan.pipes.len(), 1);
    assert_eq!(plan.pipes[0].variable, "CLAUDE_CODE_API_KEY_FILE_DESCRIPTOR");
    assert_eq!(plan.pipes[0].bytes.expose(), "sk-dummy");
    assert!(plan.args.iter().all(|arg| !arg.contains("sk-dummy")));
    assert!(plan.env.values().all(|value| !value.expose().contains("sk-dummy")));
    assert!(!format!("{plan:?}").contains("sk-dummy"));
    assert_eq!(plan.secrets, vec![Secret::new("sk-dummy")]);

    let oauth =
        credentials(CredentialSource::Variables, &[("CLAUDE_CODE_OAUTH_TOKEN", "oat")], None).unwrap();
    assert_eq!(oauth.pipes[0].variable, "CLAUDE_CODE_OAUTH_TOKEN_FILE_DESCRIPTOR");
    assert!(oauth.variables.is_empty());
    assert_eq!(oauth.login, "CLAUDE_CODE_OAUTH_TOKEN");
}

#[test]
fn model_effort_and_prompt_are_given_on_resume_as_well() {
    let mut wish = Wish::new();
    wish.open = OpenMode::Resume;
    let args = wish.plan().unwrap().args;
    assert!(args.contains(&format!("--resume={NATIVE}")));
    assert!(!args.iter().any(|arg| arg.starts_with("--session-id")));
    for flag in ["--model=", "--effort=", "--append-system-prompt=", "--system-prompt-snapshot=off"] {
        assert!(args.iter().any(|arg| arg.starts_with(flag)), "{flag}");
    }
    wish.effort = None;
    assert!(!wish.plan().unwrap().args.iter().any(|arg| arg.starts_with("--effort")));
}

#[test]
fn permission_modes_and_root() {
    for (permissions, mode) in [
        (Permissions::Ask, "default"),
        (Permissions::AcceptEdits, "acceptEdits"),
        (Permissions::Bypass, "bypassPermissions"),
    ] {
        for root in [false, true] {
            let wish = Wish { permissions, root, ..Wish::new() };
            let plan = wish.plan().unwrap();
            assert!(plan.args.contains(&format!("--permission-mode={mode}")));
            assert!(plan.args.contains(&"--permission-prompt-tool=stdio".to_owned()));
            let sandbox = plan.env.contains_key("IS_SANDBOX");
            assert_eq!(sandbox, root && permissions == Permissions::Bypass, "{mode} root={root}");
        }
    }
}

#[test]
fn s19_what_cannot_be_an_argument_is_refused() {
    let configuration = |wish: Wish| match wish.plan() {
        Err(error @ PlanError::Configuration { .. }) => {
            let failure = error.to_failure();
            assert_eq!(failure.reason, Reason::Configuration);
            assert!(!failure.what_to_do.is_empty());
        }
        other => panic!("{other:?}"),
    };
    for id in
        ["", "--help", "../x", "99999999222243338444555555555555", "{99999999-2222-4333-8444-555555555555}"]
    {
        configuration(Wish { native: NativeRef { id: id.into(), file: None }, ..Wish::new() });
    }
    for model in ["", "a b", "a\nb", &"m".repeat(161)] {
        configuration(Wish { model: model.into(), ..Wish::new() });
    }
    for effort in [Effort::None, Effort::Minimal, Effort::Ultra] {
        configuration(Wish { effort: Some(effort), ..Wish::new() });
    }
    configuration(Wish { prompt: "p".repeat(200_000), ..Wish::new() });
    configuration(Wish { prompt: "a\0b".into(), ..Wish::new() });
    let extra = BTreeMap::from([("CLAUDE_CONFIG_DIR".to_owned(), "/elsewhere".to_owned())]);
    configuration(Wish { extra, ..Wish::new() });
}

#[test]
fn an_unknown_effort_is_refused_with_the_engines_own_list() {
    let wish = Wish { effort: Some(Effort::Ultra), ..Wish::new() };
    let failure = wish.plan().unwrap_err().to_failure();
    assert_eq!(failure.what_to_do, "Use one of low, medium, high, xhigh, max.");
}

#[test]
fn a_persons_own_login_uses_their_directory_as_it_is() {
    let host = HostDirectories { home: "/home/ann".into(), engine_directory: None };
    let plan = credentials(CredentialSource::Host, &[], Some(host)).unwrap();
    assert_eq!(plan.home.directory, PathBuf::from("/home/ann/.claude"));
    assert!(!plan.home.private);
    assert_eq!(plan.home.variables.get("HOME").map(String::as_str), Some("/home/ann"));
    // It would also move .claude.json.
    assert!(!plan.home.variables.contains_key("CLAUDE_CONFIG_DIR"));
    let configuration = claude().configuration(&plan);
    assert!(configuration.directories.is_empty() && configuration.files.is_empty());

    let launched = Wish { credentials: plan, ..Wish::new() }.plan().unwrap();
    assert_eq!(launched.env["HOME"].expose(), "/home/ann");
    assert!(!launched.env.contains_key("CLAUDE_CONFIG_DIR"));
    // The hardening holds for them as well.
    assert_eq!(launched.env["CLAUDE_CODE_DISABLE_CLAUDE_MDS"].expose(), "1");

    let own = HostDirectories { home: "/home/ann".into(), engine_directory: Some("/home/ann/cc".into()) };
    let plan = credentials(CredentialSource::Host, &[], Some(own)).unwrap();
    assert_eq!(plan.home.directory, PathBuf::from("/home/ann/cc"));
    assert_eq!(plan.home.variables["CLAUDE_CONFIG_DIR"], "/home/ann/cc");
    assert!(matches!(credentials(CredentialSource::Host, &[], None), Err(PlanError::Configuration { .. })));
}

#[test]
fn no_credential_at_all_is_an_auth_failure_before_anything_starts() {
    for pairs in [&[][..], &[("ANTHROPIC_BASE_URL", "http://x")], &[("ANTHROPIC_API_KEY", "")]] {
        let failure = credentials(CredentialSource::Variables, pairs, None).unwrap_err().to_failure();
        assert_eq!(failure.reason, Reason::Auth);
        assert!(failure.what_to_do.contains("ANTHROPIC_API_KEY"));
    }
    let none = credentials(
        CredentialSource::None,
        &[("ANTHROPIC_BASE_URL", "http://x"), ("ANTHROPIC_API_KEY", "sk-dummy")],
        None,
    )
    .unwrap();
    assert_eq!(none.pipes, vec![]);
    assert_eq!(none.variables.keys().collect::<Vec<_>>(), ["ANTHROPIC_BASE_URL"]);
}

#[test]
fn a_variable_that_the_runner_sets_itself_is_a_configuration_error() {
    for name in claude().reserved_variables() {
        let result =
            credentials(CredentialSource::Variables, &[(name, "x"), ("ANTHROPIC_API_KEY", "k")], None);
        assert!(matches!(result, Err(PlanError::Configuration { .. })), "{name}");
    }
    // Everything the plan sets, but for what comes from the configuration, is reserved.
    let plan = Wish { root: true, permissions: Permissions::Bypass, ..Wish::new() }.plan().unwrap();
    let reserved = claude().reserved_variables();
    for name in plan.env.keys().filter(|name| *name != "ANTHROPIC_BASE_URL") {
        assert!(reserved.contains(&name.as_str()), "{name}");
    }
    assert!(plan.pipes.iter().all(|pipe| reserved.contains(&pipe.variable.as_str())));
}

#[test]
fn the_rest_of_the_adapters_data() {
    let claude = claude();
    assert_eq!(claude.parse_version("2.1.332 (Claude Code)\n").as_deref(), Some("2.1.332"));
    assert_eq!(claude.parse_version("command not found"), None);
    let native = claude.new_native_ref(uuid::Uuid::from_u128(7)).unwrap();
    assert_eq!(native.id, "00000000-0000-0000-0000-000000000007");
    let files = claude.session_files(&native).unwrap();
    assert_eq!(files.search, "projects");
    assert_eq!(files.main, "00000000-0000-0000-0000-000000000007.jsonl");
    assert!(claude.capabilities().finished_event_required);
    assert!(adapter("nobody").is_none());
}

#[test]
fn nothing_in_the_workspace_configures_the_engine() {
    // Its settings could redirect the API's address and so send the key away.
    let plan = Wish::new().plan().unwrap();
    for flag in ["--strict-mcp-config", "--setting-sources=user"] {
        assert!(plan.args.iter().any(|arg| arg == flag), "{flag}");
    }
    assert!(!plan.args.iter().any(|arg| arg.starts_with("--mcp-config") || arg.starts_with("--add-dir")));
    assert_eq!(plan.env["CLAUDE_CODE_DISABLE_CLAUDE_MDS"].expose(), "1");
}

#[test]
fn sessions_of_one_home_neither_wake_nor_read_each_other() {
    let plan = Wish::new().plan().unwrap();
    assert!(plan.args.contains(&r#"--settings={"crossSessionInbound":"refuse"}"#.to_owned()));
    let disallowed = plan.args.iter().find_map(|arg| arg.strip_prefix("--disallowedTools=")).unwrap();
    let disallowed: Vec<&str> = disallowed.split(',').collect();
    for tool in ["SendMessage", "ListAgents", "CronCreate", "ScheduleWakeup"] {
        assert!(disallowed.contains(&tool), "{tool}");
    }
    assert_eq!(plan.env["CLAUDE_CODE_DISABLE_AUTO_MEMORY"].expose(), "1");
    assert_eq!(plan.env["CLAUDE_CODE_DISABLE_CRON"].expose(), "1");
    // Sockets and task files of one process lie in its own directory.
    assert_eq!(plan.env["TMPDIR"], plan.env["CLAUDE_CODE_TMPDIR"]);
    assert_eq!(plan.env["TMPDIR"].expose(), "/state/tmp/spl_1");
}

#[test]
fn background_tasks_are_off() {
    assert_eq!(Wish::new().plan().unwrap().env["CLAUDE_CODE_DISABLE_BACKGROUND_TASKS"].expose(), "1");
}

#[test]
fn silent_retries_are_bounded_below_the_idle_time() {
    let plan = Wish::new().plan().unwrap();
    let number = |name: &str| plan.env[name].expose().parse::<u64>().unwrap();
    // Ten minutes of silence end a turn. A single try must be over before, and so must a stream without a byte.
    assert!(number("API_TIMEOUT_MS") < 600_000);
    assert!(number("CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS") < 600_000);
    assert_eq!(plan.env["CLAUDE_ENABLE_BYTE_WATCHDOG"].expose(), "1");
    // With the waits between them, all tries together stay under a quarter of an hour and some seconds.
    assert!(number("CLAUDE_CODE_MAX_RETRIES") <= 4);
}
