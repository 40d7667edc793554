//! How Claude Code is started: arguments, environment, credentials.
//!
//! A workspace is hostile: its settings could redirect the API's address and so send the key away, run hooks,
//! start MCP servers. `--strict-mcp-config --setting-sources=user` turns all of that off; CLAUDE.md files are
//! turned off by a variable. Flags are always one argument (`--flag=value`): variadic flags would swallow what
//! follows them.

use std::collections::BTreeMap;

use uuid::Uuid;

use crate::{
    adapter::refuse_reserved,
    checks::{is_secret, model, path_text},
    limit,
    plan::{
        CredentialPlan, CredentialRequest, CredentialSource, Effort, EngineHome, LaunchPlan, LaunchRequest,
        OpenMode, Permissions, PipePayload, PlanError, Secret,
    },
};

/// The levels of `--effort`.
pub(super) const EFFORTS: [Effort; 5] =
    [Effort::Low, Effort::Medium, Effort::High, Effort::Xhigh, Effort::Max];

/// Tools that are taken away: a message to or from another session must never wake an idle process into a turn
/// that nobody asked for, and no timer may either. A question with choices cannot be answered here; the agent
/// asks in its text instead.
const DISALLOWED_TOOLS: &str =
    "SendMessage,ListAgents,CronCreate,CronDelete,CronList,ScheduleWakeup,Monitor,AskUserQuestion";

/// The longest prompt that fits one argument (the kernel allows 128 KiB for one, with its flag and end).
const PROMPT_LIMIT: usize = 120_000;

/// Variables that the runner sets itself.
pub(super) const RESERVED: &[&str] = &[
    "API_TIMEOUT_MS",
    "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS",
    "CLAUDE_CODE_API_KEY_FILE_DESCRIPTOR",
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS",
    "CLAUDE_CODE_DISABLE_CLAUDE_MDS",
    "CLAUDE_CODE_DISABLE_CRON",
    "CLAUDE_CODE_DISABLE_FILE_MENTIONS",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS",
    "CLAUDE_CODE_MAX_RETRIES",
    "CLAUDE_CODE_OAUTH_TOKEN_FILE_DESCRIPTOR",
    "CLAUDE_CODE_RESUME_INTERRUPTED_TURN",
    "CLAUDE_CODE_TMPDIR",
    "CLAUDE_CONFIG_DIR",
    "CLAUDE_ENABLE_BYTE_WATCHDOG",
    "DISABLE_AUTOUPDATER",
    "DISABLE_TELEMETRY",
    "HOME",
    "IS_SANDBOX",
    "PATH",
    "PWD",
    "TMPDIR",
];

const KEY: &str = "ANTHROPIC_API_KEY";

/// Credentials that travel by a pipe, and the variable that names its end. In the environment every tool of the
/// engine would see them. `ANTHROPIC_AUTH_TOKEN` has no such way.
const PIPED: [(&str, &str); 2] = [
    (KEY, "CLAUDE_CODE_API_KEY_FILE_DESCRIPTOR"),
    ("CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN_FILE_DESCRIPTOR"),
];

/// Variables that say that requests are signed in another way than by a key of Anthropic's.
const OTHER_PROVIDERS: [&str; 3] =
    ["CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"];

pub(super) fn credentials(request: &CredentialRequest<'_>) -> Result<CredentialPlan, PlanError> {
    refuse_reserved(RESERVED, request.variables)?;
    let home = engine_home(request)?;
    let mut variables = request.variables.clone();
    let mut pipes = Vec::new();
    // No value at all is as good as an unset one, and an empty key would say "not logged in".
    variables.retain(|_, value| !value.expose().is_empty());
    let login = match request.source {
        CredentialSource::None => {
            variables.retain(|name, _| !is_secret(name));
            "none".to_owned()
        }
        CredentialSource::Host => "the person's own login".to_owned(),
        CredentialSource::Variables => {
            let named = [KEY, "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"]
                .into_iter()
                .find(|name| variables.contains_key(*name));
            let other = OTHER_PROVIDERS.into_iter().find(|name| variables.contains_key(*name));
            match named.or(other) {
                Some(name) => name.to_owned(),
                None => {
                    return Err(PlanError::Auth {
                        message: "no credential for claude-code is configured".to_owned(),
                        what_to_do: format!(
                            "Set {KEY} (or ANTHROPIC_AUTH_TOKEN, or CLAUDE_CODE_OAUTH_TOKEN) under \
                             [engines.claude-code], or credentials = \"host\" to use your own login."
                        ),
                    });
                }
            }
        }
    };
    let secrets =
        variables.iter().filter(|(name, _)| is_secret(name)).map(|(_, value)| value.clone()).collect();
    for (name, variable) in PIPED {
        if let Some(bytes) = variables.remove(name) {
            pipes.push(PipePayload { variable: variable.to_owned(), bytes });
        }
    }
    Ok(CredentialPlan { variables, pipes, home, secrets, login })
}

/// Where the engine's files lie. A person's own directory is used as the person uses it: `CLAUDE_CONFIG_DIR`
/// also moves `.claude.json`, so it is set only if the person sets it.
fn engine_home(request: &CredentialRequest<'_>) -> Result<EngineHome, PlanError> {
    if request.source != CredentialSource::Host {
        let directory = request.private_home.clone();
        let text = path_text(&directory)?;
        return Ok(EngineHome {
            directory,
            private: true,
            variables: BTreeMap::from([("CLAUDE_CONFIG_DIR".to_owned(), text)]),
        });
    }
    let Some(host) = &request.host else {
        return Err(PlanError::Configuration {
            message: "credentials = \"host\" needs a home directory, and the runner has none".to_owned(),
            what_to_do: "Start the runner as a user with a home directory, or configure a key.".to_owned(),
        });
    };
    let mut variables = BTreeMap::from([("HOME".to_owned(), path_text(&host.home)?)]);
    let directory = match &host.engine_directory {
        Some(directory) => {
            variables.insert("CLAUDE_CONFIG_DIR".to_owned(), path_text(directory)?);
            directory.clone()
        }
        None => host.home.join(".claude"),
    };
    Ok(EngineHome { directory, private: false, variables })
}

pub(super) fn launch(request: &LaunchRequest<'_>) -> Result<LaunchPlan, PlanError> {
    Ok(LaunchPlan {
        program: request.executable.clone(),
        args: arguments(request)?,
        env: environment(request)?,
        cwd: request.workspace.clone(),
        pipes: request.credentials.pipes.clone(),
        secrets: request.credentials.secrets.clone(),
        setup: None,
    })
}

fn arguments(request: &LaunchRequest<'_>) -> Result<Vec<String>, PlanError> {
    let id = session_uuid(&request.native.id)?;
    let mut args: Vec<String> = [
        "--print",
        "--verbose",
        "--output-format=stream-json",
        "--input-format=stream-json",
        "--include-partial-messages",
        "--replay-user-messages",
        "--strict-mcp-config",
        "--setting-sources=user",
        r#"--settings={"crossSessionInbound":"refuse"}"#,
    ]
    .map(str::to_owned)
    .to_vec();
    args.push(format!("--disallowedTools={DISALLOWED_TOOLS}"));
    args.push(match request.open {
        OpenMode::Start => format!("--session-id={id}"),
        OpenMode::Resume => format!("--resume={id}"),
    });
    args.push(format!("--model={}", model(request.model)?));
    if let Some(effort) = request.effort {
        if !EFFORTS.contains(&effort) {
            return Err(PlanError::Configuration {
                message: format!("claude-code has no effort level {}", effort.name()),
                what_to_do: format!("Use one of {}.", EFFORTS.map(Effort::name).join(", ")),
            });
        }
        args.push(format!("--effort={}", effort.name()));
    }
    match request.permissions {
        Permissions::Ask => args.push("--permission-mode=default".to_owned()),
        Permissions::AcceptEdits => args.push("--permission-mode=acceptEdits".to_owned()),
        Permissions::Bypass => args.push("--permission-mode=bypassPermissions".to_owned()),
    }
    // Also with bypassPermissions: without a host the engine refuses by itself what it still asks about.
    args.push("--permission-prompt-tool=stdio".to_owned());
    // A session keeps the prompt of its first request unless told otherwise, and "off" alone drops it.
    args.push("--system-prompt-snapshot=off".to_owned());
    if !request.prompt.is_empty() {
        args.push(format!("--append-system-prompt={}", prompt(request.prompt)?));
    }
    if let Some(turns) = request.limits.max_turns {
        args.push(format!("--max-turns={turns}"));
    }
    Ok(args)
}

fn environment(request: &LaunchRequest<'_>) -> Result<BTreeMap<String, Secret>, PlanError> {
    refuse_reserved(RESERVED, request.extra_variables)?;
    refuse_reserved(RESERVED, &request.credentials.variables)?;
    let temporary = path_text(&request.temporary)?;
    let mut env: BTreeMap<String, Secret> = BTreeMap::new();
    let mut set = |name: &str, value: String| {
        env.insert(name.to_owned(), Secret::new(value));
    };
    for (name, value) in request.extra_variables {
        set(name, value.clone());
    }
    set("HOME", path_text(&request.user_home)?);
    for (name, value) in &request.credentials.home.variables {
        set(name, value.clone());
    }
    set("PATH", request.path.clone());
    set("PWD", path_text(&request.workspace)?);
    // Both together: the engine's own temporary files follow one, those of its tools the other.
    set("TMPDIR", temporary.clone());
    set("CLAUDE_CODE_TMPDIR", temporary);
    set("CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS", "1".to_owned());
    set("CLAUDE_CODE_DISABLE_BACKGROUND_TASKS", "1".to_owned());
    set("CLAUDE_CODE_DISABLE_CLAUDE_MDS", "1".to_owned());
    // Notes that the engine keeps per project would be read by every other session of the same workspace.
    set("CLAUDE_CODE_DISABLE_AUTO_MEMORY", "1".to_owned());
    set("CLAUDE_CODE_DISABLE_CRON", "1".to_owned());
    set("CLAUDE_CODE_DISABLE_FILE_MENTIONS", "1".to_owned());
    set("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1".to_owned());
    set("DISABLE_TELEMETRY", "1".to_owned());
    set("DISABLE_AUTOUPDATER", "1".to_owned());
    set("CLAUDE_CODE_MAX_RETRIES", request.limits.max_retries.to_string());
    set("API_TIMEOUT_MS", request.limits.request_timeout.as_millis().to_string());
    set("CLAUDE_ENABLE_BYTE_WATCHDOG", "1".to_owned());
    set("CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS", request.limits.stream_idle_timeout.as_millis().to_string());
    if request.root && request.permissions == Permissions::Bypass {
        // The engine refuses this pair unless told that it runs in a sandbox. The runner's own allow_bypass
        // is the decision; this only repeats it.
        set("IS_SANDBOX", "1".to_owned());
    }
    env.extend(request.credentials.variables.iter().map(|(name, value)| (name.clone(), value.clone())));
    Ok(env)
}

/// A session id must be a UUID, which also keeps it from being read as a flag or a path.
fn session_uuid(id: &str) -> Result<String, PlanError> {
    match Uuid::try_parse(id) {
        Ok(uuid) if uuid.hyphenated().to_string() == id => Ok(id.to_owned()),
        _ => Err(PlanError::Configuration {
            message: format!("{:?} is not a session id of claude-code", limit::prefix(id, 80)),
            what_to_do: "A claude-code session id is a lower-case hyphenated UUID.".to_owned(),
        }),
    }
}

fn prompt(text: &str) -> Result<&str, PlanError> {
    if text.len() > PROMPT_LIMIT || text.contains('\0') {
        return Err(PlanError::Configuration {
            message: format!(
                "the agent's prompt has {} bytes or a zero byte; at most {PROMPT_LIMIT} fit an argument",
                text.len()
            ),
            what_to_do: "Shorten the prompt in the agent file.".to_owned(),
        });
    }
    Ok(text)
}
