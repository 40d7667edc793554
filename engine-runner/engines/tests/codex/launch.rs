//! How the engine is started.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use pretty_assertions::assert_eq;
use roundhouse_engines::{
    CredentialPlan, CredentialRequest, CredentialSource, Effort, EngineLimits, Exit, HostDirectories,
    InstallPlan, LaunchPlan, LaunchRequest, NativeRef, OpenMode, Permissions, PlanError, Reason, Secret,
    Support,
};

use crate::support::codex;

fn credentials(
    source: CredentialSource,
    pairs: &[(&str, &str)],
    host: Option<HostDirectories>,
) -> Result<CredentialPlan, PlanError> {
    let variables = pairs.iter().map(|(name, value)| ((*name).to_owned(), Secret::new(*value))).collect();
    codex().credentials(&CredentialRequest {
        source,
        variables: &variables,
        host,
        private_home: PathBuf::from("/state/homes/w/codex/default"),
    })
}

fn key() -> CredentialPlan {
    let pairs =
        [("OPENAI_API_KEY", "sk-dummy"), ("OPENAI_BASE_URL", "http://127.0.0.1:1/v1/"), ("PLAIN", "p")];
    credentials(CredentialSource::Variables, &pairs, None).unwrap()
}

fn launch(change: impl FnOnce(&mut LaunchRequest<'_>)) -> Result<LaunchPlan, PlanError> {
    with(&key(), change)
}

fn with(
    credentials: &CredentialPlan,
    change: impl FnOnce(&mut LaunchRequest<'_>),
) -> Result<LaunchPlan, PlanError> {
    let native = NativeRef { id: String::new(), file: None };
    let extra = BTreeMap::from([("LANG".to_owned(), "C.UTF-8".to_owned())]);
    let mut request = LaunchRequest {
        executable: "/opt/codex".into(),
        workspace: "/srv/example/my \"ws\"".into(),
        temporary: "/state/tmp/1".into(),
        user_home: "/state/home".into(),
        path: "/usr/bin".into(),
        open: OpenMode::Start,
        native: &native,
        model: "gpt-5-mock",
        effort: Some(Effort::High),
        permissions: Permissions::Ask,
        prompt: "be careful",
        root: false,
        credentials,
        extra_variables: &extra,
        limits: &EngineLimits::default(),
    };
    change(&mut request);
    codex().launch(&request)
}

/// The values of `-c`.
fn settings(plan: &LaunchPlan) -> Vec<&str> {
    assert_eq!(plan.args[0], "app-server");
    plan.args[1..]
        .chunks(2)
        .map(|pair| {
            assert_eq!(pair[0], "-c");
            pair[1].as_str()
        })
        .collect()
}

#[test]
fn the_native_binary_is_installed_and_found_behind_the_launcher() {
    let InstallPlan::Npm { package, executable } = codex().install() else { panic!() };
    assert_eq!(package, "@openai/codex");
    let path = Path::new("/p/node_modules/.bin").join(executable);
    assert!(path.to_str().unwrap().contains("/vendor/") && path.ends_with("bin/codex"), "{}", path.display());
    let behind = codex().executable_behind(Path::new("/usr/lib/node_modules/@openai/codex/bin/codex.js"));
    assert_eq!(behind.len(), 2);
    assert!(behind[0].starts_with("/usr/lib/node_modules/@openai/codex/node_modules/@openai"));
    assert!(behind[1].starts_with("/usr/lib/node_modules/@openai") && behind[1].ends_with("bin/codex"));
    assert!(codex().executable_behind(Path::new("/opt/codex")).is_empty());
}

#[test]
fn unbounded_retries_are_switched_off_and_the_limits_are_the_runners() {
    let plan = launch(|_| {}).unwrap();
    let settings = settings(&plan);
    assert!(settings.contains(&"features.unbounded_connection_retries=false"));
    let provider =
        settings.iter().find(|setting| setting.starts_with("model_providers.roundhouse={")).unwrap();
    for part in [
        r#"base_url="http://127.0.0.1:1/v1""#,
        r#"wire_api="responses""#,
        r#"env_key="OPENAI_API_KEY""#,
        "request_max_retries=4",
        "stream_max_retries=4",
        "stream_idle_timeout_ms=90000",
    ] {
        assert!(provider.contains(part), "{part} in {provider}");
    }
}

#[test]
fn nothing_of_the_workspace_and_nothing_by_itself() {
    let plan = launch(|_| {}).unwrap();
    let settings = settings(&plan);
    for setting in [
        "project_doc_max_bytes=0",
        "skills.include_instructions=false",
        "skills.bundled.enabled=false",
        "features.goals=false",
        "features.multi_agent=false",
        "features.plugins=false",
        "features.apps=false",
        "analytics.enabled=false",
        r#"projects={"/srv/example/my \"ws\""={trust_level="untrusted"}}"#,
    ] {
        assert!(settings.contains(&setting), "{setting} in {settings:?}");
    }
}

#[test]
fn the_key_is_kept_from_the_tools_environment_from_arguments_and_from_the_setup() {
    let plan = launch(|_| {}).unwrap();
    assert_eq!(plan.env["OPENAI_API_KEY"].expose(), "sk-dummy");
    assert!(settings(&plan).contains(&r#"shell_environment_policy.exclude=["OPENAI_API_KEY"]"#));
    assert!(plan.args.iter().all(|arg| !arg.contains("sk-dummy")));
    assert!(!plan.setup.as_ref().unwrap().to_string().contains("sk-dummy"));
    assert_eq!(plan.secrets, [Secret::new("sk-dummy")]);
    assert!(!format!("{plan:?}").contains("sk-dummy"));
    // The real engine: a tool looked for it and found nothing.
    let told = crate::support::render(&crate::support::run("key_hidden"));
    assert!(told.contains(r#""text":"0\n0\nexit code 1""#), "{told}");
}

#[test]
fn the_environment_is_built_from_nothing() {
    let plan = launch(|_| {}).unwrap();
    let names: Vec<&str> = plan.env.keys().map(String::as_str).collect();
    assert_eq!(names, ["CODEX_HOME", "HOME", "LANG", "OPENAI_API_KEY", "PATH", "PLAIN", "PWD", "TMPDIR"]);
    assert_eq!(plan.env["CODEX_HOME"].expose(), "/state/homes/w/codex/default");
    assert_eq!(plan.cwd, Path::new("/srv/example/my \"ws\""));
}

#[test]
fn the_setup_holds_what_the_thread_is_told() {
    let plan = launch(|request| request.permissions = Permissions::AcceptEdits).unwrap();
    assert_eq!(
        plan.setup.unwrap(),
        serde_json::json!({"workspace": "/srv/example/my \"ws\"", "model": "gpt-5-mock", "effort": "high",
            "permissions": "accept-edits", "prompt": "be careful"})
    );
    for effort in codex().capabilities().efforts {
        let plan = launch(|request| request.effort = Some(effort)).unwrap();
        assert_eq!(plan.setup.unwrap()["effort"], effort.name());
    }
}

#[test]
fn a_person_s_own_login_keeps_its_own_provider_and_home() {
    let host = HostDirectories { home: "/home/me".into(), engine_directory: None };
    let plan = credentials(CredentialSource::Host, &[], Some(host)).unwrap();
    assert_eq!((plan.home.directory.as_path(), plan.home.private), (Path::new("/home/me/.codex"), false));
    assert_eq!(plan.home.variables["HOME"], "/home/me");
    let launched = with(&plan, |_| {}).unwrap();
    assert!(settings(&launched).iter().all(|setting| !setting.contains("model_provider")));
    assert!(codex().configuration(&plan).files.is_empty(), "nothing is written there");
    assert!(credentials(CredentialSource::Host, &[], None).is_err());
}

#[test]
fn credentials_are_needed_unless_none_is_asked_for() {
    let error = credentials(CredentialSource::Variables, &[], None).unwrap_err();
    assert_eq!(error.to_failure().reason, Reason::Auth);
    let plan =
        credentials(CredentialSource::None, &[("OPENAI_API_KEY", "sk"), ("PLAIN", "p")], None).unwrap();
    assert_eq!(plan.variables.len(), 1);
    let launched = with(&plan, |_| {}).unwrap();
    assert!(launched.args.iter().all(|arg| !arg.contains("env_key")));
    let other = credentials(CredentialSource::Variables, &[("CODEX_API_KEY", "k")], None).unwrap();
    assert_eq!(other.login, "CODEX_API_KEY");
}

#[test]
fn what_cannot_be_is_refused_before_anything_starts() {
    let reason = |result: Result<LaunchPlan, PlanError>| result.unwrap_err().to_failure().reason;
    for id in ["", "nonsense", "-x", "01A22E6D-CFEE-7261-A446-4F986CC2A999"] {
        let native = NativeRef { id: id.into(), file: None };
        let refused = with(&key(), |request| {
            request.open = OpenMode::Resume;
            let native: &'static NativeRef = Box::leak(Box::new(native));
            request.native = native;
        });
        assert_eq!(
            reason(refused),
            Reason::Configuration,
            "{id:?}: an unknown name would start a new thread"
        );
    }
    assert_eq!(reason(launch(|request| request.model = "a b")), Reason::Configuration);
    assert_eq!(reason(launch(|request| request.workspace = "relative".into())), Reason::Configuration);
    let limits: &'static EngineLimits =
        Box::leak(Box::new(EngineLimits { max_turns: Some(3), ..EngineLimits::default() }));
    assert_eq!(reason(launch(|request| request.limits = limits)), Reason::Unsupported);
    for name in codex().reserved_variables() {
        assert!(
            credentials(CredentialSource::Variables, &[("OPENAI_API_KEY", "k"), (name, "x")], None).is_err()
        );
    }
    let bad = credentials(
        CredentialSource::Variables,
        &[("OPENAI_API_KEY", "k"), ("OPENAI_BASE_URL", "http://x\n")],
        None,
    )
    .unwrap();
    assert_eq!(reason(with(&bad, |_| {})), Reason::Configuration);
}

#[test]
fn the_sandbox_probe_says_which_modes_are_refused() {
    let probe = codex().sandbox_probe().unwrap();
    assert_eq!(probe.args[0], "sandbox");
    assert_eq!(probe.needed_for, [Permissions::Ask, Permissions::AcceptEdits]);
    assert_eq!(probe.read("codex", Exit { code: Some(0), signal: None }, ""), None);
    let refused =
        probe.read("codex", Exit { code: Some(1), signal: None }, "bwrap: No permissions\n").unwrap();
    assert_eq!(refused.to_failure().reason, Reason::Configuration);
    assert!(refused.to_string().contains("bwrap: No permissions"));
}

#[test]
fn versions_and_capabilities() {
    assert_eq!(codex().parse_version("codex-cli 0.171.0\n").as_deref(), Some("0.171.0"));
    assert_eq!(codex().parse_version("WARNING: x\ncodex-cli 0.171.0").as_deref(), Some("0.171.0"));
    assert_eq!(codex().parse_version("hello"), None);
    let can = codex().capabilities();
    assert_eq!(
        (can.resumable, can.interrupt, can.live_input),
        (Support::Supported, Support::Supported, Support::Supported)
    );
    assert_eq!((can.forkable, can.finished_event_required), (Support::Unsupported, true));
}
