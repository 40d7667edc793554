//! What every engine must offer, as data or pure functions.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    path::{Path, PathBuf},
};

use uuid::Uuid;

use crate::{
    frame::Frame,
    plan::{
        ConfigurationPlan, CredentialPlan, CredentialRequest, Effort, InstallPlan, LaunchPlan, LaunchRequest,
        NativeRef, Permissions, PlanError, SandboxProbe, VersionProbe,
    },
    session_files::SessionFiles,
    translate::{Translator, TranslatorOpen},
};

/// Whether an engine can do something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// It can.
    Supported,
    /// It cannot: a request for it is refused before anything is allocated.
    Unsupported,
    /// Nobody knows: try.
    Unknown,
}

/// How an engine reports what it used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageReport {
    /// With its events, per turn.
    PerEvent,
    /// As a total of the session.
    PerSession,
    /// Not at all.
    None,
}

/// What an engine can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// A session can be resumed in a new process.
    pub resumable: Support,
    /// A session can be copied.
    pub forkable: Support,
    /// A message can be given to a running turn.
    pub live_input: Support,
    /// A running turn can be stopped without ending the process.
    pub interrupt: Support,
    /// Permission requests reach us.
    pub permission_requests: Support,
    /// A changed agent prompt reaches a resumed session.
    pub prompt_change_on_resume: Support,
    /// A session can go on with another model.
    pub model_change_on_resume: Support,
    /// The models that a session can go on with; empty: any.
    pub continuable_models: Vec<&'static str>,
    /// One process serves many turns.
    pub warm: Support,
    /// How usage is reported.
    pub usage: UsageReport,
    /// Without the engine's own final event a turn fails, even on exit 0.
    pub finished_event_required: bool,
    /// The effort levels it has, lowest first.
    pub efforts: Vec<Effort>,
    /// The permission modes it has.
    pub permissions: Vec<Permissions>,
}

/// One engine. Stateless; get it with [`crate::adapter()`].
pub trait Adapter: Debug + Send + Sync {
    /// The engine's name in agent files, events and configuration, for example `claude-code`.
    fn name(&self) -> &'static str;

    /// What the engine can do.
    fn capabilities(&self) -> Capabilities;

    /// The executable to look for in `PATH`, for example `claude`.
    fn executable(&self) -> &'static str;

    /// How to install the pinned CLI.
    fn install(&self) -> InstallPlan;

    /// How to ask an executable for its version.
    fn version_probe(&self) -> VersionProbe;

    /// Reads the version out of what the probe printed.
    fn parse_version(&self, stdout: &str) -> Option<String>;

    /// Whether a session that ran on `from` can go on with `to`.
    fn can_continue_with(&self, from: &str, to: &str) -> Support;

    /// The native session a STARTED session will have, when the engine lets us choose its id.
    fn new_native_ref(&self, fresh: Uuid) -> Option<NativeRef>;

    /// How the engine gets its credentials, and where its home is.
    ///
    /// # Errors
    /// [`PlanError::Configuration`] for a variable that the runner sets itself, [`PlanError::Auth`] when
    /// there is no credential at all.
    fn credentials(&self, request: &CredentialRequest<'_>) -> Result<CredentialPlan, PlanError>;

    /// What to put into an engine home before the first start. Never anything for a person's own.
    fn configuration(&self, credentials: &CredentialPlan) -> ConfigurationPlan;

    /// How to start the engine.
    ///
    /// # Errors
    /// [`PlanError::Configuration`] for an effort level or a permission mode it lacks, for an id, model or
    /// prompt that cannot be an argument, and for variables that the runner sets itself.
    fn launch(&self, request: &LaunchRequest<'_>) -> Result<LaunchPlan, PlanError>;

    /// Where the files of a session lie; unset when the engine keeps none that we can read.
    fn session_files(&self, native: &NativeRef) -> Option<SessionFiles>;

    /// Makes the reader of one turn of one process. The same input and frames give the same outputs.
    fn translator(&self, open: &TranslatorOpen) -> Box<dyn Translator>;

    /// Whether a frame shows that the engine is alive and at work, so that the idle timer starts anew.
    /// Keep-alive lines and standard error do not; notices that a request is tried again do.
    fn counts_as_activity(&self, frame: &Frame<'_>) -> bool;

    /// Whether a text reports a usage or rate limit. Counts only if the turn then fails; beats
    /// [`Adapter::is_unavailable_text`]. Notices of retries do not match.
    fn is_quota_text(&self, text: &str) -> bool;

    /// Whether a text reports that the engine's service is away. Notices of retries do not match.
    fn is_unavailable_text(&self, text: &str) -> bool;

    /// Variables that the runner sets itself; configuring one of them is an error.
    fn reserved_variables(&self) -> &'static [&'static str];

    /// Executables to prefer to the one found (its path with all links resolved): what is found in `PATH` may be a
    /// launcher that starts the engine as a child, and a killed launcher leaves that child behind. The first that
    /// is there is the one; none means that the found one is right.
    fn executable_behind(&self, _found: &Path) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Whether a resumed session can tell whether it has a message: then, and only then, is
    /// [`Translator::proves_untaken`] asked.
    fn can_prove_untaken(&self) -> bool {
        false
    }

    /// How to learn whether the engine's own sandbox can run on this host, for diagnosis. At each opening the
    /// translator finds it out by itself; a mode that needs the sandbox is then refused as CONFIGURATION.
    fn sandbox_probe(&self) -> Option<SandboxProbe> {
        None
    }

    /// Empty directories that the engine's sandbox may leave in a workspace. Remove those that were not there before
    /// the process started and are empty once it is gone or idle.
    fn leftovers(&self) -> &'static [&'static str] {
        &[]
    }
}

/// Refuses variables that the runner sets itself.
pub(crate) fn refuse_reserved<V>(
    reserved: &[&str],
    variables: &BTreeMap<String, V>,
) -> Result<(), PlanError> {
    match variables.keys().find(|name| reserved.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(PlanError::Configuration {
            message: format!("the variable {name} is set by the runner itself"),
            what_to_do: format!("Remove {name} from the engine's configured variables."),
        }),
    }
}
