//! `doctor`: is everything in place, and if not, which command mends it.

mod host;

use roundhouse_config::Config;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::engine::v1 as engine;
use serde_json::json;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::args::Global;
use crate::client::call;
use crate::commands::configuration;
use crate::commands::engines::{described, login, version};
use crate::exit::Exit;
use crate::json as shapes;
use crate::output::Output;
use crate::status::Failure;
use crate::target::target;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Ok,
    Warning,
    Failed,
}

/// One check.
#[derive(Debug)]
struct Check {
    name: String,
    verdict: Verdict,
    detail: String,
    next: Option<String>,
}

/// All checks, in the order in which they are told.
#[derive(Debug, Default)]
struct Checks(Vec<Check>);

impl Checks {
    fn add(
        &mut self,
        verdict: Verdict,
        name: impl Into<String>,
        detail: impl Into<String>,
        next: Option<&str>,
    ) {
        let next = next.map(str::to_owned);
        self.0.push(Check { name: name.into(), verdict, detail: detail.into(), next });
    }

    fn ok(&mut self, name: impl Into<String>, detail: impl Into<String>) {
        self.add(Verdict::Ok, name, detail, None);
    }

    fn warn(&mut self, name: impl Into<String>, detail: impl Into<String>, next: &str) {
        self.add(Verdict::Warning, name, detail, Some(next));
    }

    fn fail(&mut self, name: impl Into<String>, detail: impl Into<String>, next: &str) {
        self.add(Verdict::Failed, name, detail, Some(next));
    }
}

pub(crate) async fn run(global: &Global, output: Output) -> Result<Exit, Failure> {
    let mut checks = Checks::default();
    let config = match configuration(global) {
        Ok(config) => {
            checks.ok("configuration", "valid");
            config
        }
        Err(failure) => {
            checks.fail("configuration", failure.human().replace('\n', "; "), "roundhouse config check");
            // The rest is looked at all the same.
            Config::default()
        }
    };
    host::programs(&mut checks).await;
    host::engines(&config, &mut checks).await;
    host::directories(&config, &mut checks);
    host::workspaces(&config, &mut checks).await;
    let answers = control_plane(global, &mut checks).await;
    host::ports(&config, answers, &mut checks);

    let failed = checks.0.iter().any(|check| check.verdict == Verdict::Failed);
    output.result(
        || {
            let checks: Vec<_> = checks
                .0
                .iter()
                .map(|check| {
                    json!({
                        "name": check.name, "result": word(check.verdict), "detail": check.detail, "next": check.next,
                    })
                })
                .collect();
            json!({"checks": checks, "broken": failed})
        },
        || checks.0.iter().map(line).collect::<Vec<_>>().join("\n"),
    );
    Ok(if failed { Exit::Failed } else { Exit::Done })
}

const fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Ok => "ok",
        Verdict::Warning => "warning",
        Verdict::Failed => "failed",
    }
}

fn line(check: &Check) -> String {
    let next = check.next.as_ref().map(|next| format!("\n           next: {next}")).unwrap_or_default();
    format!("{:8}  {}: {}{next}", word(check.verdict), check.name, check.detail)
}

/// Asks the control plane. Whether it answers.
async fn control_plane(global: &Global, checks: &mut Checks) -> bool {
    let found = target(global).and_then(|target| Ok((target.client()?, target.server)));
    let (client, server) = match found {
        Ok(found) => found,
        Err(failure) => {
            let next = failure.next.clone().unwrap_or_else(|| "correct --server".to_owned());
            checks.fail("control plane", failure.message.clone(), &next);
            return false;
        }
    };
    let health =
        HealthClient::new(client.channel()).check(call(HealthCheckRequest { service: String::new() })).await;
    match health {
        Ok(answer) if answer.get_ref().status == ServingStatus::Serving as i32 => {
            checks.ok("control plane", format!("serves at {server}"));
        }
        Ok(_) => checks.fail("control plane", format!("{server} does not serve now"), "look at its log"),
        Err(status) => {
            let failure = Failure::from(status);
            let next = failure.next.clone().unwrap_or_default();
            let told = if failure.is_no_connection() {
                format!("none answers at {server}")
            } else {
                format!("{server}: {}", failure.message)
            };
            checks.fail("control plane", told, &next);
            return false;
        }
    }
    match described(&client).await {
        Ok(list) => runners(&list, checks),
        Err(failure) => {
            checks.fail(
                "runners",
                failure.message.clone(),
                failure.next.as_deref().unwrap_or("look at its log"),
            );
        }
    }
    true
}

fn runners(runners: &[control::Runner], checks: &mut Checks) {
    if runners.is_empty() {
        checks.fail(
            "runners",
            "none is known",
            "roundhouse up, or engine-runner --control-plane URL --root DIR",
        );
    }
    for runner in runners {
        let name = format!("runner {}", runner.hostname);
        let state = shapes::runner_state(runner.state);
        match control::runner::State::try_from(runner.state) {
            Ok(control::runner::State::Online) => checks.ok(&name, format!("online, {}", runner.runner_id)),
            Ok(control::runner::State::Draining) => {
                checks.warn(&name, "takes no new turns", "roundhouse runners drain --help tells how it ends");
            }
            Ok(
                control::runner::State::Away
                | control::runner::State::Lost
                | control::runner::State::Unspecified,
            )
            | Err(_) => {
                checks.fail(&name, state.to_lowercase(), "is the engine-runner on that host alive?");
                continue;
            }
        }
        if runner.roots.is_empty() {
            checks.fail(&name, "has no root: no workspace can be used", "name directories with runner.roots");
        }
        match engine::IsolationLevel::try_from(runner.isolation) {
            Ok(engine::IsolationLevel::PidNamespace) => {
                checks.ok(format!("{name}, isolation"), "PID namespace")
            }
            Ok(engine::IsolationLevel::Subreaper | engine::IsolationLevel::None) => checks.warn(
                format!("{name}, isolation"),
                format!(
                    "{}: processes that an engine hides may survive a cancel",
                    shapes::isolation(runner.isolation)
                ),
                &format!(
                    "on that host: {}",
                    host::raise_isolation("user and PID namespaces are not to be had")
                ),
            ),
            Ok(engine::IsolationLevel::Unspecified) | Err(_) => {}
        }
        if runner.engines.is_empty() {
            checks.warn(&name, "has not told its engines yet", "try again in a moment");
        }
        for engine in &runner.engines {
            self::engine(&name, engine, checks);
        }
    }
}

fn engine(runner: &str, engine: &engine::Engine, checks: &mut Checks) {
    let name = format!("{runner}, {}", engine.name);
    if !engine.installed {
        return checks.warn(
            name,
            "not installed",
            &format!("on that host: roundhouse engines install {}", engine.name),
        );
    }
    let detail = format!("{}, {}", version(engine), login(engine));
    if engine.login == engine::LoginKind::None as i32 || engine.login == engine::LoginKind::Unspecified as i32
    {
        let advice = host::login_advice(&engine.name, roundhouse_config::Credentials::Variables);
        checks.warn(name, detail, &format!("on that host: {advice}"));
    } else if !engine.pinned_version.is_empty() && engine.version != engine.pinned_version {
        checks.warn(name, detail, &format!("on that host: roundhouse engines install {}", engine.name));
    } else {
        checks.ok(name, detail);
    }
}
