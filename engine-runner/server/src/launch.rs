//! From a session that is wanted to an engine process: first a plan that touches nothing but the session's files, then
//! the start itself. Between the two the turn writes into its journal which process will be its own.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use roundhouse_config::{Credentials, EngineSettings};
use roundhouse_engines::{
    Adapter, Carry, CredentialRequest, CredentialSource, Effort, EngineLimits, Failure, FileFacts,
    Fingerprint, LaunchRequest, NativeRef, OpenMode, Permissions, PlanError, Reason, SessionFiles, Support,
    Verdict,
};
use roundhouse_process::{
    EnvVar, KeeperHandle, KeeperLimits, KeeperPlan, PipePayload, Request, Response, Secret, SpawnError,
    close_dead, spawn_keeper,
};

use crate::{
    context::Context,
    engine::Engine,
    environment,
    error::{Error, chain},
    fingerprint::{self, Hashed},
    ids, install,
    journal::{ProcessOpen, SessionOpen},
    keeper::{Attach, attach},
    session_record::{Launched, SessionRecord},
    spawn_failure,
    state_dir::make_dir,
    workspace::{Workspace, open_regular, sha256_prefix},
};

/// A process that can be started.
#[derive(Debug)]
pub(crate) struct Planned {
    /// The new spool.
    pub spool_id: String,
    /// What the keeper is told.
    pub keeper: KeeperPlan,
    /// How the session is opened.
    pub mode: OpenMode,
    /// The native session.
    pub native: NativeRef,
    /// What earlier processes of the session left.
    pub carry: Carry,
    /// The engine home.
    pub home: PathBuf,
    /// The dialect.
    pub adapter: &'static dyn Adapter,
    /// What it is launched with.
    pub launched: Launched,
    /// The session's record, not yet written.
    pub record: SessionRecord,
}

/// What planning found.
#[derive(Debug)]
pub(crate) enum Plan {
    /// A process can be started.
    Start(Box<Planned>),
    /// The native session cannot be used.
    Unusable(String),
}

/// What planning depends on.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    /// The conversation.
    pub conversation_id: String,
    /// The workspace.
    pub workspace: Workspace,
    /// The session.
    pub session: SessionOpen,
    /// Opens the session this way, whatever the files say: the engine itself asked for it.
    pub force: Option<OpenMode>,
}

fn refused(failure: Failure) -> Error {
    Error::Refused { failure: Box::new(failure), started: false }
}

fn refused_plan(error: &PlanError) -> Error {
    refused(error.to_failure())
}

/// The engine of this name, if it can do what is wanted.
///
/// # Errors
/// [`Error::Refused`] with UNSUPPORTED, [`Error::Policy`] for bypass.
pub(crate) fn check(context: &Context, session: &SessionOpen) -> Result<&'static dyn Adapter, Error> {
    let adapter = roundhouse_engines::adapter(&session.engine).ok_or_else(|| {
        refused(Failure::new(
            Reason::Unsupported,
            format!("this runner knows no engine {:?}", session.engine),
        ))
    })?;
    if session.permissions == Permissions::Bypass && !context.settings.allow_bypass {
        return Err(Error::Policy(
            "permissions bypass needs allow_bypass in the runner's configuration".to_owned(),
        ));
    }
    let capabilities = adapter.capabilities();
    if !capabilities.permissions.contains(&session.permissions) {
        return Err(refused(Failure::new(
            Reason::Unsupported,
            format!("{} has no such permission mode", session.engine),
        )));
    }
    if let Some(effort) = session.effort.as_deref().and_then(Effort::from_name)
        && !capabilities.efforts.contains(&effort)
    {
        let levels: Vec<&str> = capabilities.efforts.iter().map(|level| level.name()).collect();
        return Err(refused(Failure::new(
            Reason::Configuration,
            format!("{} has no effort {}; it has {}", session.engine, effort.name(), levels.join(", ")),
        )));
    }
    Ok(adapter)
}

/// Refuses a session that belongs to another conversation, workspace or engine.
///
/// # Errors
/// [`Error::WrongState`]; [`Error::Storage`].
pub(crate) fn check_owner(context: &Context, wanted: &Wanted) -> Result<(), Error> {
    let session = &wanted.session;
    let Some(record) = SessionRecord::load(&context.state, &session.session_id)? else { return Ok(()) };
    let same = record.conversation_id == wanted.conversation_id
        && record.workspace == wanted.workspace.path
        && record.engine == session.engine;
    if same {
        return Ok(());
    }
    Err(Error::WrongState(format!(
        "session {} belongs to another conversation, workspace or engine",
        session.session_id
    )))
}

/// Plans a process for a session. Blocking: reads files, and hashes the session's.
///
/// # Errors
/// [`Error::Refused`] with the reason that the turn would fail with; [`Error::Policy`]; [`Error::Storage`].
pub(crate) fn plan(context: &Context, wanted: &Wanted) -> Result<Plan, Error> {
    let session = &wanted.session;
    let adapter = check(context, session)?;
    let settings = context.engine_settings(&session.engine);
    let identity = if ids::is_valid(&settings.identity) {
        settings.identity.clone()
    } else {
        return Err(refused(Failure::new(
            Reason::Configuration,
            format!("engines.{}.identity is not an id", session.engine),
        )));
    };
    let known = SessionRecord::load(&context.state, &session.session_id)?;
    if let Some(record) = &known {
        if let Some(reason) = &record.unusable {
            return Ok(Plan::Unusable(reason.clone()));
        }
        if record.carry.writes_lost {
            return Ok(Plan::Unusable(
                "context_lost: the engine could not write its session file".to_owned(),
            ));
        }
        if adapter.can_continue_with(&record.launched.model, &session.model) == Support::Unsupported {
            return Err(refused(Failure::new(
                Reason::Unsupported,
                format!("a session on {} cannot go on with {}", record.launched.model, session.model),
            )));
        }
    }
    if known.is_none() && session.native_id.is_some() && has_files(adapter, session) {
        // Rows may be missing, and what would tell is gone with the record. In doubt it is all told again.
        return Ok(Plan::Unusable(
            "record_missing: this runner has lost its record of the session, so nothing proves its file whole"
                .to_owned(),
        ));
    }
    let found = install::find(adapter, &settings, &context.state.engines()).ok_or_else(|| {
        refused(Failure::new(
            Reason::EngineMissing,
            format!("the executable of {} is not installed on this runner", session.engine),
        ))
    })?;
    let executable = behind(adapter, found);
    let variables =
        environment::variables(&settings, &wanted.workspace).map_err(|error| refused_plan(&error))?;
    let private_home = context.state.home(&wanted.workspace.id, &session.engine, &identity);
    let credentials = adapter
        .credentials(&CredentialRequest {
            source: match settings.credentials {
                Credentials::None => CredentialSource::None,
                Credentials::Variables => CredentialSource::Variables,
                Credentials::Host => CredentialSource::Host,
            },
            variables: &variables,
            host: environment::host_directories(&session.engine),
            private_home: private_home.clone(),
        })
        .map_err(|error| refused_plan(&error))?;
    let home = credentials.home.directory.clone();
    let (native, carry) = match &known {
        Some(SessionRecord { native: Some(native), carry, .. }) => (native.clone(), carry.clone()),
        _ => match &session.native_id {
            // A session that this runner has lost its record of: its files alone can tell.
            Some(id) => {
                (NativeRef { id: id.clone(), file: None }, Carry { committed: true, ..Carry::default() })
            }
            None => {
                let native = adapter.new_native_ref(uuid::Uuid::new_v4());
                (native.unwrap_or(NativeRef { id: String::new(), file: None }), Carry::default())
            }
        },
    };
    let known_native = known.as_ref().is_some_and(|record| record.opened) || session.native_id.is_some();
    let mode = match wanted.force {
        Some(mode) => mode,
        None if !known_native => OpenMode::Start,
        None => {
            let fingerprint = known.as_ref().and_then(|record| record.fingerprint.as_ref());
            // A native session that somebody asks for by name was told to be written: it cannot be new.
            let written = carry.committed || session.native_id.is_some();
            match resumable(adapter, &home, &native, fingerprint, written) {
                Resumable::Yes => OpenMode::Resume,
                Resumable::NeverWritten => OpenMode::Start,
                Resumable::No(reason) => return Ok(Plan::Unusable(reason)),
            }
        }
    };
    let spool_id = ids::new_spool_id();
    let effort = session.effort.as_deref().and_then(Effort::from_name);
    let launch = adapter
        .launch(&LaunchRequest {
            executable,
            workspace: wanted.workspace.path.clone(),
            temporary: context.state.temporary(&spool_id),
            user_home: private_home.join("user"),
            path: environment::path(),
            open: mode,
            native: &native,
            model: &session.model,
            effort,
            permissions: session.permissions,
            prompt: &session.prompt,
            root: is_root(),
            credentials: &credentials,
            extra_variables: &environment::extra_variables(),
            limits: &EngineLimits::default(),
        })
        .map_err(|error| refused_plan(&error))?;
    let carry = Carry { setup: launch.setup.clone(), ..carry };
    prepare_home(adapter, &private_home, &credentials).map_err(Error::storage("prepare the engine home"))?;
    let launched = Launched {
        model: session.model.clone(),
        effort: session.effort.clone(),
        permissions: session.permissions,
        prompt_sha256: session.prompt_sha256.clone(),
    };
    let prompt_changed = mode == OpenMode::Resume
        && known.as_ref().is_some_and(|record| record.launched.prompt_sha256 != session.prompt_sha256)
        && adapter.capabilities().prompt_change_on_resume == Support::Supported;
    let record = SessionRecord {
        session_id: session.session_id.clone(),
        conversation_id: wanted.conversation_id.clone(),
        workspace: wanted.workspace.path.clone(),
        engine: session.engine.clone(),
        identity,
        home: home.clone(),
        native: (!native.id.is_empty()).then(|| native.clone()),
        opened: known.as_ref().is_some_and(|record| record.opened),
        launched: launched.clone(),
        prompt_changed,
        // What a process is told at its opening belongs to that process alone.
        carry: Carry { setup: None, ..carry.clone() },
        revision: known.as_ref().map_or(0, |record| record.revision),
        fingerprint: known.and_then(|record| record.fingerprint),
        spool_id: Some(spool_id.clone()),
        unusable: None,
    };
    let keeper = keeper_plan(context, &spool_id, launch);
    Ok(Plan::Start(Box::new(Planned {
        spool_id,
        keeper,
        mode,
        native,
        carry,
        home,
        adapter,
        launched,
        record,
    })))
}

/// Whether the session that the caller names lies in files that this runner checks before it is resumed.
fn has_files(adapter: &dyn Adapter, session: &SessionOpen) -> bool {
    let native = session.native_id.clone().map(|id| NativeRef { id, file: None });
    native.is_some_and(|native| adapter.session_files(&native).is_some())
}

/// The engine itself, where what was found only launches it.
fn behind(adapter: &dyn Adapter, found: PathBuf) -> PathBuf {
    let resolved = found.canonicalize().unwrap_or_else(|_| found.clone());
    adapter.executable_behind(&resolved).into_iter().find(|path| path.is_file()).unwrap_or(found)
}

/// Whether this process, and so the engine, runs as root. Told by the owner of a process's own directory in /proc.
fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0)
}

fn keeper_plan(context: &Context, spool_id: &str, launch: roundhouse_engines::LaunchPlan) -> KeeperPlan {
    let mut keeper = KeeperPlan::new(spool_id, context.state.runner_id(), launch.program);
    keeper.args = launch.args.into_iter().map(Into::into).collect();
    keeper.env = launch.env.iter().map(|(name, value)| EnvVar::new(name, value.expose())).collect();
    keeper.cwd = launch.cwd;
    if cfg!(feature = "failpoints") {
        // A test that has the runner find less finds its keepers at the same level.
        keeper.isolation.at_most = context.isolation.level;
    }
    keeper.secrets = launch.secrets.iter().map(|secret| Secret::new(secret.expose())).collect();
    keeper.pipe_payloads = launch
        .pipes
        .into_iter()
        .map(|pipe| PipePayload { env_name: pipe.variable.into(), bytes: Secret::new(pipe.bytes.expose()) })
        .collect();
    // The runner ends idle engines itself. The keeper's own limit is for a runner that is gone, and must not run out before
    // the first turn is there.
    let settings = &context.settings;
    let idle_ttl = settings.warm_ttl.max(settings.engine_start_timeout + settings.keeper_timeout);
    keeper.limits = KeeperLimits {
        line_max: context.settings.max_line_bytes,
        spool_max: context.settings.spool_limit_bytes,
        idle_ttl,
        // No sooner than a runner that is there would end the turn, or decide what the engine waits for.
        quiet_ttl: idle_ttl.max(settings.idle_timeout).max(settings.permission_timeout),
        ..KeeperLimits::default()
    };
    keeper
}

/// Makes the engine home and what is to lie in it before the first start. A person's own is never written to.
fn prepare_home(
    adapter: &dyn Adapter,
    private_home: &Path,
    credentials: &roundhouse_engines::CredentialPlan,
) -> io::Result<()> {
    use std::{io::Write as _, os::unix::fs::OpenOptionsExt as _};
    make_dir(&private_home.join("user"))?;
    if !credentials.home.private {
        return Ok(());
    }
    let home = &credentials.home.directory;
    make_dir(home)?;
    let plan = adapter.configuration(credentials);
    for directory in &plan.directories {
        make_dir(&home.join(directory))?;
    }
    for (name, content) in &plan.files {
        let created =
            std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(home.join(name));
        match created {
            Ok(mut file) => file.write_all(content.as_bytes())?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

enum Resumable {
    Yes,
    /// No row of it ever came to disk, as far as the engine itself told: it is made under the same id.
    NeverWritten,
    No(String),
}

fn resumable(
    adapter: &dyn Adapter,
    home: &Path,
    native: &NativeRef,
    fingerprint: Option<&Fingerprint>,
    committed: bool,
) -> Resumable {
    if let Some(fingerprint) = fingerprint {
        return match fingerprint.check(&facts(home, fingerprint)) {
            Verdict::Intact => Resumable::Yes,
            Verdict::Lost { code, detail } => Resumable::No(format!("{code}: {detail}")),
            Verdict::Unknown { detail } => {
                tracing::warn!(detail, "a session's file could not be checked");
                Resumable::Yes
            }
        };
    }
    let Some(files) = adapter.session_files(native) else { return Resumable::Yes };
    if !find_files(home, &files).is_empty() {
        Resumable::Yes
    } else if committed {
        Resumable::No(format!("file_missing: {} is not in the engine's home", files.main))
    } else {
        Resumable::NeverWritten
    }
}

/// The main files of a session, relative to the home.
fn find_files(home: &Path, files: &SessionFiles) -> Vec<String> {
    let mut found = Vec::new();
    collect_files(home, files, &files.search, files.depth, &mut found);
    found.sort();
    found
}

/// Looks `depth` directories below `directory` (relative to the home).
fn collect_files(home: &Path, files: &SessionFiles, directory: &str, depth: usize, found: &mut Vec<String>) {
    if depth == 0 && !files.main_is_ending {
        let path = format!("{directory}/{}", files.main);
        if home.join(&path).symlink_metadata().is_ok() {
            found.push(path);
        }
        return;
    }
    let Ok(entries) = std::fs::read_dir(home.join(directory)) else { return };
    for entry in entries.filter_map(Result::ok) {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = format!("{directory}/{name}");
        if depth > 0 {
            collect_files(home, files, &path, depth - 1, found);
        } else if files.is_main(&path) {
            found.push(path);
        }
    }
}

fn facts(home: &Path, fingerprint: &Fingerprint) -> FileFacts {
    let path = home.join(&fingerprint.file);
    let mut file = match open_regular(&path) {
        Ok(file) => file,
        Err(error) => return no_file(&error),
    };
    let length = match file.metadata() {
        Ok(metadata) => metadata.len(),
        Err(error) => return FileFacts::Transient { detail: error.to_string() },
    };
    if length < fingerprint.length {
        return FileFacts::File { length, prefix_sha256: None };
    }
    match sha256_prefix(&mut file, fingerprint.length) {
        Ok((hash, read)) if read == fingerprint.length => {
            FileFacts::File { length, prefix_sha256: Some(hash) }
        }
        Ok((_, read)) => FileFacts::File { length: read, prefix_sha256: None },
        Err(error) => FileFacts::Transient { detail: error.to_string() },
    }
}

fn no_file(error: &io::Error) -> FileFacts {
    let detail = error.to_string();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => FileFacts::Missing,
        io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput | io::ErrorKind::IsADirectory => {
            FileFacts::Unreadable { detail }
        }
        _ if error.raw_os_error() == Some(40) => FileFacts::Unreadable { detail: "is a symlink".to_owned() },
        _ => FileFacts::Transient { detail },
    }
}

/// The hash of a session's file as it is now, carried on from an earlier one; none when it cannot be found or read.
/// Blocking.
#[must_use]
pub(crate) fn fingerprint(
    adapter: &dyn Adapter,
    home: &Path,
    native: &NativeRef,
    recorded: Option<&str>,
    earlier: Option<Hashed>,
) -> Option<Hashed> {
    let files = adapter.session_files(native)?;
    let found = find_files(home, &files);
    let path = files.choose(recorded.or(native.file.as_deref()), &found)?;
    fingerprint::hash(home, path, earlier).ok()
}

/// Starts a planned process and takes hold of it. The home's lock is to be held.
///
/// # Errors
/// [`Error::Refused`] when it cannot be started; nothing is left running then.
pub(crate) async fn start(
    context: &Arc<Context>,
    planned: Planned,
    open: &ProcessOpen,
    turn_id: &str,
) -> Result<Box<Engine>, Error> {
    let session_id = planned.record.session_id.clone();
    let dir = context.state.spool(&session_id, &planned.spool_id);
    let temporary = context.state.temporary(&planned.spool_id);
    let spools = context.state.spools(&session_id);
    let (keeper_plan, mut record) = (planned.keeper, planned.record);
    let shared = Arc::clone(context);
    let (spool_dir, temporary_dir) = (dir.clone(), temporary.clone());
    let handle = tokio::task::spawn_blocking(move || {
        make_dir(&spools).map_err(Error::storage("create the spool's directory"))?;
        make_dir(&temporary_dir).map_err(Error::storage("create the temporary directory"))?;
        let session_id = record.session_id.clone();
        shared.records.with(&session_id, || {
            // What was written since the plan was made stands.
            if let Some(known) = SessionRecord::load(&shared.state, &session_id)? {
                record.opened |= known.opened;
                record.unusable = known.unusable;
                record.revision = record.revision.max(known.revision);
            }
            record.store(&shared.state)
        })?;
        crate::kill_point!("runner::before_spawn");
        spawn_keeper(&spool_dir, &keeper_plan, shared.keeper_executable.as_deref()).map_err(|error| {
            let message = format!("the engine could not be started: {}", chain(&error));
            refused(match &error {
                SpawnError::Plan(_) => Failure::new(Reason::Configuration, message),
                SpawnError::Directory(_) => Failure::new(Reason::Storage, message),
                SpawnError::Start(system) => spawn_failure::of_keeper(system, message),
                SpawnError::NotReady(_) => Failure::new(Reason::Process, message),
            })
        })
    })
    .await
    .map_err(|error| Error::Internal(format!("start task: {error}")))??;
    crate::kill_point!("runner::after_spawn");
    let reach = Attach {
        dir: dir.clone(),
        owner: context.state.runner_id().to_owned(),
        after: Some(0),
        timeout: context.settings.keeper_timeout,
        handle: Some(handle),
    };
    let (keeper, frames, status) = match attach(reach).await {
        Ok(attached) => attached,
        Err(error) => {
            let failure = format!("the keeper cannot be reached: {}", chain(&error));
            return Err(not_started(context, dir, temporary, failure).await);
        }
    };
    let mut engine = Box::new(Engine {
        session_id,
        spool_id: planned.spool_id,
        dir,
        home: planned.home,
        temporary,
        launched: planned.launched,
        native: planned.native,
        adapter: planned.adapter,
        translator: planned.adapter.translator(&open.translator),
        keeper,
        frames,
        init_pid: 0,
        engine_pid: 0,
        last_frame: 0,
        hashed: None,
        gone: false,
        token: context.pool.token(),
    });
    engine.note_status(&status);
    match engine.keeper.ask(Request::BeginTurn { turn_id: turn_id.to_owned() }).await {
        Ok(Response::Turn { .. }) => Ok(engine),
        Ok(_) => Err(Error::Internal("a keeper answered a turn's begin with something else".to_owned())),
        Err(error) => {
            let (dir, temporary) = (engine.dir.clone(), engine.temporary.clone());
            drop(engine);
            Err(not_started(context, dir, temporary, format!("the keeper failed: {error}")).await)
        }
    }
}

/// Time for the end of a keeper that did not come to serve.
const CLOSE: Duration = Duration::from_secs(5);

/// Why a new keeper does not serve: the engine that it could not start, or itself, which is ended then.
async fn not_started(context: &Context, dir: PathBuf, temporary: PathBuf, otherwise: String) -> Error {
    let owner = context.state.runner_id().to_owned();
    let told = tokio::task::spawn_blocking(move || {
        let ended = KeeperHandle::find(&dir).and_then(|handle| {
            // One that could not start its engine is on its way out and has told why before it let go of its socket.
            if spawn_failure::read(&dir).is_none() {
                handle.kill()?;
            }
            handle.wait(CLOSE)
        });
        let told = spawn_failure::read(&dir);
        match close_dead(&dir, &owner, CLOSE) {
            Ok(_) => {
                let _ = std::fs::remove_dir_all(&temporary);
            }
            Err(error) => {
                tracing::warn!(dir = %dir.display(), ?ended, error = chain(&error), "a keeper that does not serve stays");
            }
        }
        told
    });
    refused(told.await.ok().flatten().unwrap_or_else(|| Failure::new(Reason::Process, otherwise)))
}

/// Why a live keeper is not taken up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdoptError {
    /// This program has no adapter for its engine.
    #[error("an engine that is not known")]
    UnknownEngine,
    /// It cannot be reached.
    #[error("the keeper is not reached")]
    Link(#[from] roundhouse_process::LinkError),
}

impl From<AdoptError> for String {
    fn from(error: AdoptError) -> Self {
        chain(&error)
    }
}

/// Takes hold of a live keeper of an earlier runner.
///
/// # Errors
/// [`AdoptError`].
pub(crate) async fn adopt(
    context: &Arc<Context>,
    record: &SessionRecord,
    spool_id: &str,
    open: &roundhouse_engines::TranslatorOpen,
    after: Option<u64>,
) -> Result<(Box<Engine>, u64), AdoptError> {
    let adapter = roundhouse_engines::adapter(&record.engine).ok_or(AdoptError::UnknownEngine)?;
    let dir = context.state.spool(&record.session_id, spool_id);
    let (keeper, frames, status) = attach(Attach {
        dir: dir.clone(),
        owner: context.state.runner_id().to_owned(),
        after,
        timeout: context.settings.keeper_timeout,
        handle: None,
    })
    .await?;
    let mut engine = Box::new(Engine {
        session_id: record.session_id.clone(),
        spool_id: spool_id.to_owned(),
        dir,
        home: record.home.clone(),
        temporary: context.state.temporary(spool_id),
        launched: record.launched.clone(),
        native: open.native.clone(),
        adapter,
        translator: adapter.translator(open),
        keeper,
        frames,
        init_pid: 0,
        engine_pid: 0,
        last_frame: after.unwrap_or(status.position.frame),
        hashed: None,
        gone: false,
        token: context.pool.token(),
    });
    engine.note_status(&status);
    Ok((engine, status.position.frame))
}

/// What a login would be, for DescribeRunner and `doctor`: kind and sentence. Blocking.
#[must_use]
pub(crate) fn login(
    context: &Context,
    adapter: &dyn Adapter,
) -> (roundhouse_proto::engine::v1::LoginKind, String) {
    use roundhouse_proto::engine::v1::LoginKind;
    let settings = context.engine_settings(adapter.name());
    let kind = match settings.credentials {
        Credentials::None => LoginKind::None,
        Credentials::Variables => LoginKind::Variables,
        Credentials::Host => LoginKind::Host,
    };
    match login_of(adapter, &settings) {
        Ok(login) => (kind, login),
        Err(error) => (LoginKind::None, error.to_string()),
    }
}

/// Which login these settings give an engine, in words; or why none.
pub(crate) fn login_of(adapter: &dyn Adapter, settings: &EngineSettings) -> Result<String, PlanError> {
    let nowhere =
        Workspace { id: "wsp_none".to_owned(), path: PathBuf::from("/nonexistent"), trusted: false };
    let variables = environment::variables(settings, &nowhere)?;
    let source = match settings.credentials {
        Credentials::None => CredentialSource::None,
        Credentials::Variables => CredentialSource::Variables,
        Credentials::Host => CredentialSource::Host,
    };
    let plan = adapter.credentials(&CredentialRequest {
        source,
        variables: &variables,
        host: environment::host_directories(adapter.name()),
        private_home: PathBuf::from("/nonexistent"),
    })?;
    Ok(plan.login)
}
