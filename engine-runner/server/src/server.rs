//! The program: from settings to a listening server, and its orderly end.

use std::{
    collections::HashSet,
    ffi::OsString,
    io::{IsTerminal as _, Write as _},
    net::SocketAddr,
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use clap::Parser as _;
use roundhouse_config::Config;
use roundhouse_process::{IsolationLevel, IsolationReport};
use roundhouse_proto::{
    FILE_DESCRIPTOR_SET, MAX_MESSAGE_BYTES,
    engine::v1::engine_runner_service_server::EngineRunnerServiceServer,
};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    task::JoinHandle,
};
use tokio_stream::StreamExt as _;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::server::NamedService as _;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Server, server::TcpIncoming};

use crate::{
    args::{Act, Args, LogFormat},
    container,
    context::{Context, Homes},
    epochs::Epochs,
    error::{Error, chain},
    grpc::{addressee, lingering::Lingering, service::Service},
    install::Versions,
    journal::StopCause,
    pool::{self, Pool},
    prune, registration,
    runner::Runner,
    slots::Slots,
    spares::Spares,
    startup,
    state_dir::{StateDir, StateError},
    turn::Command,
    workspace::Roots,
};

/// Exit code for a wrong command line.
const USAGE: u8 = 2;

/// Exit code for a wrong configuration.
const INVALID: u8 = 3;

/// Time that idle engines have to close, all together.
const CLOSE_LIMIT: Duration = Duration::from_secs(20);

/// Time that cancelled turns have to end: the whole ladder.
const CANCEL_LIMIT: Duration = Duration::from_secs(40);

/// Time that open calls have at the end: enough for a slow reader to take what its stream still holds.
const SERVER_LIMIT: Duration = Duration::from_secs(5);

/// Time in which a runner that is no container's main process has stopped, whatever its engines do.
pub const STOP_LIMIT: Duration =
    CANCEL_LIMIT.saturating_add(CLOSE_LIMIT).saturating_add(SERVER_LIMIT).saturating_add(RUNTIME_LIMIT);

/// Pause between two rounds of reaping.
const REAP: Duration = Duration::from_millis(if cfg!(feature = "failpoints") { 500 } else { 5000 });

/// Time that the runtime has for what blocks.
const RUNTIME_LIMIT: Duration = Duration::from_secs(2);

/// Why the runner does not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The state directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// What lies in it.
    #[error("failed to take up what an earlier runner left")]
    Recover(#[source] Error),
    /// The listener's address.
    #[error("{0} is not an address and a port")]
    Address(String),
    /// The listener.
    #[error("failed to listen on {address}")]
    Listen {
        /// Where.
        address: String,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The listener would be open to others.
    #[error(
        "{0} is not a loopback address: anybody who reaches it could run agents here. Listen on 127.0.0.1, or say \
         --insecure-listen if the network protects it"
    )]
    Insecure(SocketAddr),
    /// The server ended by itself.
    #[error("the server failed: {0}")]
    Server(String),
    /// A signal cannot be awaited.
    #[error("failed to await signals")]
    Signals(#[source] std::io::Error),
}

/// A runner that is ready.
#[derive(Debug)]
pub struct Prepared {
    runner: Arc<Runner>,
    address: SocketAddr,
    server: JoinHandle<Result<(), String>>,
    stop_server: CancellationToken,
}

/// Starts a runner: takes up what is there, then listens. `keeper_executable` is what runs as keeper; none is this very
/// executable.
///
/// # Errors
/// [`RunError`].
pub async fn prepare(config: Config, keeper_executable: Option<PathBuf>) -> Result<Prepared, RunError> {
    let settings = config.runner;
    let address = settings
        .listen
        .parse::<SocketAddr>()
        .or_else(|_| settings.listen.replace("localhost", "127.0.0.1").parse())
        .map_err(|_| RunError::Address(settings.listen.clone()))?;
    if !address.ip().is_loopback() {
        if !settings.insecure_listen {
            return Err(RunError::Insecure(address));
        }
        tracing::warn!(%address, "listening without protection: anybody who reaches this address can run agents");
    }
    let state = StateDir::open(&settings.state_dir)?;
    let mut isolation = probe(keeper_executable.as_deref());
    if crate::fault_point!("runner::no_namespaces") {
        isolation.level = IsolationLevel::Subreaper;
    }
    if isolation.level == IsolationLevel::Subreaper
        && let Err(error) = roundhouse_process::become_subreaper()
    {
        tracing::warn!(error = chain(&error), "orphans of engines will not come back to the runner");
    }
    let epochs = Epochs::open(state.epochs()).map_err(RunError::Recover)?;
    let spares = Arc::new(Spares::new(state.turns()));
    spares.take_up().map_err(RunError::Recover)?;
    let roots = Roots::new(state.runner_id(), &settings.roots);
    let context = Arc::new(Context {
        engines: config.engines,
        roots,
        epochs,
        spares,
        slots: Slots::default(),
        pool: Pool::default(),
        homes: Homes::default(),
        records: crate::session_record::RecordLocks::default(),
        isolation,
        boot_id: roundhouse_process::boot_id(),
        keeper_executable,
        versions: Versions::default(),
        draining: AtomicBool::new(false),
        shutdown: CancellationToken::new(),
        halt: CancellationToken::new(),
        tasks: TaskTracker::new(),
        state,
        settings,
    });
    let runner = Runner::new(Arc::clone(&context));
    startup::recover(&runner).await.map_err(RunError::Recover)?;
    let listener = TcpListener::bind(address)
        .await
        .map_err(|source| RunError::Listen { address: address.to_string(), source })?;
    let address =
        listener.local_addr().map_err(|source| RunError::Listen { address: address.to_string(), source })?;
    let stop_server = CancellationToken::new();
    let server = serve(Arc::clone(&runner), listener, stop_server.clone()).await?;
    if std::process::id() == 1 || context.isolation.level != IsolationLevel::PidNamespace {
        context.tasks.spawn(reap(Arc::clone(&context)));
    }
    context.tasks.spawn(pool::watch_memory(Arc::clone(&context)));
    context.tasks.spawn(prune::keep(Arc::clone(&runner)));
    context.spares.refill(&context.tasks, &context.halt);
    context.tasks.spawn(startup::read_again(Arc::clone(&runner)));
    if !context.settings.control_plane.is_empty() {
        let advertised = if context.settings.advertise.is_empty() {
            format!("http://{address}")
        } else {
            context.settings.advertise.clone()
        };
        let control_plane = context.settings.control_plane.clone();
        context.tasks.spawn(registration::keep(Arc::clone(&runner), control_plane, advertised));
    }
    Ok(Prepared { runner, address, server, stop_server })
}

/// Reaps orphans that come to this process because it is a subreaper or the main process of a container. Whoever waits
/// for a child of its own does so at once; what is still there at the next round is nobody's.
async fn reap(context: Arc<Context>) {
    let mut waiting: HashSet<i32> = HashSet::new();
    loop {
        tokio::select! {
            () = context.shutdown.cancelled() => return,
            () = tokio::time::sleep(REAP) => {}
        }
        let seen = std::cell::RefCell::new(HashSet::new());
        roundhouse_process::reap_orphans(|pid| {
            seen.borrow_mut().insert(pid);
            !waiting.contains(&pid)
        });
        waiting = seen.into_inner();
    }
}

fn probe(executable: Option<&std::path::Path>) -> IsolationReport {
    roundhouse_process::probe(executable).unwrap_or_else(|error| IsolationReport {
        level: IsolationLevel::None,
        user_namespace: false,
        detail: format!("the probe failed: {}", chain(&error)),
    })
}

async fn serve(
    runner: Arc<Runner>,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<JoinHandle<Result<(), String>>, RunError> {
    let failed = |error: &dyn std::fmt::Display| RunError::Server(error.to_string());
    let id = runner.context.state.runner_id().to_owned();
    let service = EngineRunnerServiceServer::new(Service::new(runner))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let service = InterceptedService::new(service, move |request| addressee::check(&id, request));
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<EngineRunnerServiceServer<Service>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // The details of a status, so that a client without the protos can read them.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
            // The descriptors hold the control plane's services, too; what is listed is what is served here.
            .with_service_name(EngineRunnerServiceServer::<Service>::NAME)
            .with_service_name("grpc.health.v1.Health")
            .with_service_name("grpc.reflection.v1.ServerReflection")
            .with_service_name("grpc.reflection.v1alpha.ServerReflection")
    };
    let reflection_v1 = reflection().build_v1().map_err(|error| failed(&error))?;
    let reflection_v1alpha = reflection().build_v1alpha().map_err(|error| failed(&error))?;
    let router = Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
        .initial_stream_window_size(1024 * 1024)
        .initial_connection_window_size(16 * 1024 * 1024)
        .add_service(health_service)
        .add_service(reflection_v1)
        .add_service(reflection_v1alpha)
        .add_service(service);
    let connections = TaskTracker::new();
    let tracker = connections.clone();
    let incoming = TcpIncoming::from(listener)
        .with_nodelay(Some(true))
        .map(move |stream| stream.map(|stream| Lingering::new(stream, &tracker)));
    Ok(tokio::spawn(async move {
        let served = router.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await;
        connections.close();
        connections.wait().await;
        served.map_err(|error| chain(&error))
    }))
}

impl Prepared {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The runner's id.
    #[must_use]
    pub fn runner_id(&self) -> &str {
        self.runner.context.state.runner_id()
    }

    /// Waits for a failure of the server.
    async fn failed(&mut self) -> String {
        match (&mut self.server).await {
            Ok(Ok(())) => "it stopped".to_owned(),
            Ok(Err(error)) => error,
            Err(error) => error.to_string(),
        }
    }

    /// Stops: takes no new turns, closes idle engines, and leaves running turns to their keepers, unless they are to be
    /// stopped or would die with the container.
    pub async fn stop(self) {
        let context = Arc::clone(&self.runner.context);
        context.shutdown.cancel();
        let main_process = container::is_main_process();
        if main_process && !context.settings.stop_turns {
            let running = self.runner.running();
            tracing::info!(turns = running.len(), "waiting for running turns");
            let wait = futures::future::join_all(running.iter().map(|handle| self.runner.until_gone(handle)));
            let _ = tokio::time::timeout(context.settings.drain_timeout, wait).await;
        }
        if main_process || context.settings.stop_turns {
            let running = self.runner.running();
            let cancel = futures::future::join_all(running.iter().map(|handle| async {
                handle.ask(|answer| Command::Stop(StopCause::Cancel, None, answer)).await;
                self.runner.until_gone(handle).await;
            }));
            if tokio::time::timeout(CANCEL_LIMIT, cancel).await.is_err() {
                tracing::error!("turns did not end in time");
            }
        }
        if tokio::time::timeout(CLOSE_LIMIT, context.pool.close_all()).await.is_err() {
            tracing::error!("idle engines did not close in time");
        }
        context.halt.cancel();
        crate::kill_point!("runner::halted");
        self.stop_server.cancel();
        // A graceful end can hang on an open stream; the streams themselves were ended above.
        let mut server = self.server;
        if tokio::time::timeout(SERVER_LIMIT, &mut server).await.is_err() {
            server.abort();
        }
    }

    /// Lets go of everything at once, as far as one process can play the end of another: tasks stop where they are,
    /// keepers go on. For tests.
    pub async fn abandon(self) {
        self.runner.context.shutdown.cancel();
        self.runner.context.halt.cancel();
        self.server.abort();
        let _ = self.server.await;
    }
}

/// Unbinds the runner of a state directory from its control plane. Answers what it was bound to.
///
/// # Errors
/// [`StateError::InUse`] while a runner runs there.
pub fn reset(config: &Config) -> Result<Option<String>, StateError> {
    let state = StateDir::open(&config.runner.state_dir)?;
    let bound = state.control_plane_id();
    state.bind(None)?;
    Ok(bound)
}

/// Runs the runner until it is told to stop. `args` begins with the program's name. The caller's `main` must have
/// called [`roundhouse_process::reexec`] before anything else.
///
/// Exit codes: 0 stopped on request, 1 failed, 2 wrong command line, 3 wrong configuration.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args = match Args::try_parse_from(args) {
        Ok(args) => args,
        Err(error) => {
            let code = if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
            // Nobody can be told if this fails.
            let _ = error.print();
            return code;
        }
    };
    if let Err(error) = init_log(&args) {
        complain(&format!("the log filter is wrong: {error}"));
        return ExitCode::from(USAGE);
    }
    let config = match args.load() {
        Ok(config) => config,
        Err(problems) => {
            refuse(&problems.to_string(), args.ready_json);
            return ExitCode::from(INVALID);
        }
    };
    if let Some(Act::Reset) = args.command {
        return match reset(&config) {
            Ok(Some(bound)) => say(&format!("this runner is no longer bound to {bound}")),
            Ok(None) => say("this runner was bound to no control plane"),
            Err(error) => {
                complain(&chain(&error));
                ExitCode::FAILURE
            }
        };
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(&format!("the runtime cannot be started: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let code = match runtime.block_on(run(config, args.ready_json)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            refuse(&chain(&error), args.ready_json);
            ExitCode::FAILURE
        }
    };
    runtime.shutdown_timeout(RUNTIME_LIMIT);
    code
}

async fn run(config: Config, ready_json: bool) -> Result<(), RunError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(RunError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(RunError::Signals)?;
    let mut prepared = prepare(config, None).await?;
    if say(&ready_line(&prepared, ready_json)) == ExitCode::FAILURE {
        tracing::warn!("the ready line could not be printed");
    }
    let failure = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        failure = prepared.failed() => Some(failure),
    };
    if let Some(failure) = failure {
        return Err(RunError::Server(failure));
    }
    tokio::select! {
        () = prepared.stop() => Ok(()),
        // A second signal does not wait.
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

fn ready_line(prepared: &Prepared, json: bool) -> String {
    let (address, runner_id) = (prepared.address(), prepared.runner_id());
    if json {
        serde_json::json!({ "ready": true, "grpc": address.to_string(), "runner_id": runner_id }).to_string()
    } else {
        format!("engine-runner {runner_id} is ready on {address}; try: grpcurl -plaintext {address} list")
    }
}

fn say(line: &str) -> ExitCode {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Why it does not run: to whoever waits for the ready line, in its place, and else to standard error.
fn refuse(text: &str, ready_json: bool) {
    let line = serde_json::json!({ "ready": false, "error": text }).to_string();
    if !ready_json || writeln!(std::io::stdout().lock(), "{line}").is_err() {
        complain(text);
    }
}

fn complain(text: &str) {
    // Nobody can be told if this fails.
    let _ = writeln!(std::io::stderr().lock(), "engine-runner: {text}");
}

fn init_log(args: &Args) -> Result<(), String> {
    let filter = tracing_subscriber::EnvFilter::try_new(&args.log).map_err(|error| error.to_string())?;
    // Colours are for people: a file or a pipe gets plain text.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    // A second subscriber in one process (tests) is not an error worth stopping for.
    let _ = match args.log_format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    Ok(())
}
