//! `up`: both services here, until Ctrl-C.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use roundhouse_proto::control::v1 as control;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::engine_runner_service_client::EngineRunnerServiceClient;
use serde_json::json;
use tonic::transport::Endpoint;

use crate::args::{Global, UpArgs};
use crate::children::{CONTROL_PLANE, Log, RUNNER, Service, Spec};
use crate::client::{Client, call};
use crate::commands::configuration;
use crate::commands::conversations::pairs;
use crate::commands::engines::{login, version};
use crate::exit::Exit;
use crate::interrupts::Interrupts;
use crate::json;
use crate::output::Output;
use crate::status::Failure;

/// How long the runner may take to register.
const REGISTER_LIMIT: Duration = Duration::from_secs(15);
/// A service that dies more often than this within [`RESTART_WINDOW`] is not started again.
const MAX_RESTARTS: usize = 5;
const RESTART_WINDOW: Duration = Duration::from_secs(60);

/// Told when somebody does not wait for the stop.
pub(crate) const NOT_AWAITED: &str = "not waiting: killing both services and the engines";

/// Both services, and who stops them.
pub(crate) struct Stack {
    pub(crate) control_plane: Service,
    pub(crate) runner: Service,
}

impl Stack {
    /// Starts the control plane, then the runner, which must be told its address.
    pub(crate) async fn start(
        control_plane: Spec,
        runner: impl FnOnce(&str) -> Spec,
    ) -> Result<Self, Failure> {
        let mut control_plane = Service::start(control_plane).await?;
        match Service::start(runner(&control_plane.url())).await {
            Ok(runner) => Ok(Self { control_plane, runner }),
            Err(failure) => {
                control_plane.stop().await;
                Err(failure)
            }
        }
    }

    /// Waits until the runner is registered, and asks it what it has.
    pub(crate) async fn describe(&self) -> Result<engine::DescribeRunnerResponse, Failure> {
        registered(&self.control_plane, &self.runner).await
    }

    /// Stops the runner, then the control plane. Whether both went in good order. Cancellation safe.
    pub(crate) async fn stop(&mut self) -> bool {
        let runner = self.runner.stop().await;
        let control_plane = self.control_plane.stop().await;
        runner && control_plane
    }

    /// Ends both and every engine at once.
    pub(crate) async fn end_at_once(self) -> Result<(), Failure> {
        // Both are killed, whatever becomes of the first.
        let runner = self.runner.end_at_once().await;
        self.control_plane.end_at_once().await?;
        runner
    }
}

/// Waits until a runner is registered with a control plane, and asks it what it has.
pub(crate) async fn registered(
    control_plane: &Service,
    runner: &Service,
) -> Result<engine::DescribeRunnerResponse, Failure> {
    let client = Client::new(&control_plane.url())?;
    let channel = Endpoint::from_shared(runner.url())
        .map_err(|error| Failure::new(Exit::Failed, error.to_string()))?
        .connect_lazy();
    let mut service = EngineRunnerServiceClient::new(channel);
    let described = service.describe_runner(call(engine::DescribeRunnerRequest {})).await?.into_inner();
    let (bound, ours) = (described.control_plane_id.as_str(), control_plane.control_plane_id());
    if !bound.is_empty() && bound != ours {
        let told = format!(
            "the runner's state directory belongs to control plane {bound}, and the control plane here is {ours}"
        );
        return Err(Failure::new(Exit::Conflict, told).next(
            "give both their own state directories, or unbind the runner: `roundhouse runners reset`",
        ));
    }
    let since = Instant::now();
    loop {
        let list = client.runners().list_runners(call(control::ListRunnersRequest {})).await?.into_inner();
        let online = control::runner::State::Online as i32;
        if list.runners.iter().any(|runner| runner.runner_id == described.runner_id && runner.state == online)
        {
            return Ok(described);
        }
        if since.elapsed() > REGISTER_LIMIT {
            return Err(Failure::new(
                Exit::Unreachable,
                "the runner did not register with the control plane",
            )
            .next("its log says why"));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) async fn run(global: &Global, args: UpArgs, output: Output) -> Result<Exit, Failure> {
    let config = configuration(global)?;
    let roots = roots(&args, config.runner.roots.is_empty())?;
    let mut shared: Vec<OsString> = Vec::new();
    if let Some(file) = &global.config {
        shared.extend(["--config".into(), file.into()]);
    }
    for setting in &global.settings {
        shared.extend(["--set".into(), setting.into()]);
    }
    if args.insecure_listen {
        shared.push("--insecure-listen".into());
    }
    if output.is_json() {
        shared.extend(["--log-format".into(), "json".into()]);
    }
    let control_plane_listen = args.listen.clone().unwrap_or_else(|| config.control_plane.listen.clone());
    let runner_listen = args.runner_listen.clone().unwrap_or_else(|| config.runner.listen.clone());
    for (listen, allowed) in [
        (&control_plane_listen, config.control_plane.insecure_listen),
        (&runner_listen, config.runner.insecure_listen),
    ] {
        only_loopback(listen, allowed || args.insecure_listen)?;
    }
    let with_state = |name: &str| {
        let mut all = shared.clone();
        if let Some(directory) = &args.state_dir {
            all.extend(["--state-dir".into(), directory.join(name).into()]);
        }
        all
    };
    let control_plane = Spec {
        name: "control plane",
        service: CONTROL_PLANE,
        args: [with_state("control-plane"), vec!["--log".into(), "warn".into()]].concat(),
        listen: control_plane_listen,
        log: Log::Inherit,
        own_settings_only: false,
        engines_of: None,
    };
    let runner_state =
        args.state_dir.as_ref().map_or_else(|| config.runner.state_dir.clone(), |all| all.join("runner"));
    let runner = |url: &str| {
        let mut all = with_state("runner");
        all.extend([
            "--stop-turns".into(),
            "--log".into(),
            "warn".into(),
            "--control-plane".into(),
            url.into(),
        ]);
        for (flag, root) in &roots {
            all.extend([OsString::from(flag), root.into()]);
        }
        Spec {
            name: "engine runner",
            service: RUNNER,
            args: all,
            listen: runner_listen,
            log: Log::Inherit,
            own_settings_only: false,
            engines_of: Some(runner_state.clone()),
        }
    };

    let mut interrupts = Interrupts::new()?;
    let mut stack = Stack::start(control_plane, runner).await?;
    let described = tokio::select! {
        described = stack.describe() => described,
        _ = interrupts.next() => {
            stack.stop().await;
            return Ok(Exit::Done);
        }
    };
    match described {
        Ok(described) => tell(&stack, &described, &config.client.server, output),
        Err(failure) => {
            stack.stop().await;
            let bound = failure.exit == Exit::Conflict;
            return Err(if bound { failure.next(unbind(&runner_state)) } else { failure });
        }
    }
    supervise(stack, interrupts, output).await
}

/// What to do about a runner whose state directory belongs to another control plane.
fn unbind(directory: &Path) -> String {
    format!(
        "if that control plane is gone for good: `roundhouse runners reset --state-dir {}`, then start again; \
         else name the state directories that belong together",
        directory.display()
    )
}

/// Refuses an address that others could reach, before a service is started for it. What is no address is the service's
/// to refuse.
fn only_loopback(listen: &str, others_too: bool) -> Result<(), Failure> {
    let Ok(address) = listen.parse::<std::net::SocketAddr>() else { return Ok(()) };
    if others_too || address.ip().is_loopback() {
        return Ok(());
    }
    let told = format!("{listen} is not a loopback address: anybody who reaches it could run agents here");
    Err(Failure::new(Exit::Policy, told)
        .next("listen on 127.0.0.1, or say --insecure-listen if the network protects it"))
}

/// The roots for the runner's command line: the named ones, or the current directory when none are configured.
fn roots(args: &UpArgs, none_configured: bool) -> Result<Vec<(&'static str, PathBuf)>, Failure> {
    let plain = args.roots.iter().map(|root| ("--root", root.clone()));
    let trusted = args.trusted_roots.iter().map(|root| ("--trust-root", root.clone()));
    let mut named: Vec<_> = plain.chain(trusted).collect();
    if named.is_empty() && none_configured {
        named.push(("--root", PathBuf::from(".")));
    }
    for (flag, root) in &mut named {
        *root = std::fs::canonicalize(&root)
            .map_err(|error| Failure::new(Exit::Invalid, format!("{flag} {}: {error}", root.display())))?;
    }
    Ok(named)
}

/// Says that all is ready: on standard output, so that a script can wait for it.
fn tell(stack: &Stack, described: &engine::DescribeRunnerResponse, default_server: &str, output: Output) {
    let server = stack.control_plane.url();
    if output.is_json() {
        // One line, so that a script can wait for it.
        return output.item(&json!({
            "ready": true,
            "control_plane": stack.control_plane.grpc(),
            "runner": stack.runner.grpc(),
            "runner_id": described.runner_id,
            "roots": described.roots.iter().map(json::root).collect::<Vec<_>>(),
            "engines": described.engines.iter().map(json::engine_facts).collect::<Vec<_>>(),
        }));
    }
    let mut lines = vec![
        ("control plane", server.clone()),
        ("engine runner", format!("{} ({})", stack.runner.url(), described.runner_id)),
    ];
    for root in &described.roots {
        let trust = if root.trusted { " (trusted)" } else { "" };
        lines.push(("root", format!("{}{trust}", root.path)));
    }
    for engine in &described.engines {
        lines.push(("engine", format!("{} {}: {}", engine.name, version(engine), login(engine))));
    }
    let named = if server == default_server { String::new() } else { format!(" --server {server}") };
    lines.push(("grpcurl", format!("grpcurl -plaintext {} list", stack.control_plane.grpc())));
    lines.push(("send", format!("roundhouse{named} send --wait --agent NAME \"...\"")));
    output.data(&format!("{}\nready; Ctrl-C stops both and leaves nothing behind", pairs(&lines)));
    if described.engines.iter().all(|engine| !engine.installed) {
        output.note("no engine is installed: `roundhouse engines install`");
    }
}

/// Keeps both alive until an interrupt. One that is killed is started again: its state is on disk, and turns go on.
async fn supervise(mut stack: Stack, mut interrupts: Interrupts, output: Output) -> Result<Exit, Failure> {
    let mut restarts: Vec<Instant> = Vec::new();
    let failure = loop {
        let (service, status) = tokio::select! {
            _ = interrupts.next() => break None,
            status = stack.control_plane.ended() => (&mut stack.control_plane, status),
            status = stack.runner.ended() => (&mut stack.runner, status),
        };
        let told = status.map_or_else(|failure| failure.human(), |status| status.to_string());
        let name = service.name();
        restarts.retain(|at| at.elapsed() < RESTART_WINDOW);
        if restarts.len() >= MAX_RESTARTS {
            break Some(Failure::new(Exit::Failed, format!("{name} ended too often, last by {told}")));
        }
        restarts.push(Instant::now());
        output.note(&format!("{name} ended ({told}); starting it again"));
        let restarted = tokio::select! {
            restarted = service.restart() => restarted,
            _ = interrupts.next() => break None,
        };
        match restarted {
            Ok(()) => output.note(&format!("{name} is back")),
            Err(failure) => break Some(failure),
        }
    };
    if !output.is_json() {
        output.note("stopping");
    }
    let orderly = tokio::select! {
        orderly = stack.stop() => Some(orderly),
        _ = interrupts.next() => None,
    };
    let Some(orderly) = orderly else {
        if !output.is_json() {
            output.note(NOT_AWAITED);
        }
        stack.end_at_once().await?;
        return Ok(Exit::Cancelled);
    };
    match failure {
        Some(failure) => Err(failure),
        None if orderly => Ok(Exit::Done),
        None => Err(Failure::new(Exit::Failed, "a service did not stop in good order; its log says why")),
    }
}
