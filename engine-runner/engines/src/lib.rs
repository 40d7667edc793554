//! How each engine is launched, read and spoken to. Lines in, events and replies out.
//!
//! Everything here is pure: no clock, no process, no file system, no runtime. [`Adapter`] is what an engine
//! offers as data and plans, [`Translator`] reads what it prints; [`translate`] says how a turn actor uses
//! both. There is one folder per engine. Nothing outside an engine's folder knows its dialect.

pub mod adapter;
mod checks;
pub mod claude_code;
pub mod codex;
pub mod event;
pub mod failure;
pub mod frame;
pub mod limit;
pub mod plan;
pub mod session_files;
mod stderr;
pub mod translate;
mod wire;

pub use adapter::{Adapter, Capabilities, Support, UsageReport};
pub use event::{Event, ItemKey, TurnOutcome};
pub use failure::{Failure, Reason};
pub use frame::{Exit, Frame, FrameBody};
pub use plan::{
    ConfigurationPlan, CredentialPlan, CredentialRequest, CredentialSource, Effort, EngineHome, EngineLimits,
    HostDirectories, InstallPlan, LaunchPlan, LaunchRequest, NativeRef, OpenMode, Permissions, PipePayload,
    PlanError, SandboxProbe, Secret, VersionProbe,
};
pub use session_files::{FileFacts, Fingerprint, SessionFiles, Verdict};
pub use translate::{
    Carry, Delivery, DeliveryEnd, LineError, OpenFailure, Opened, Output, Partial, PermissionReply,
    SessionCarry, Standing, StdinLine, TokenTotals, Translator, TranslatorOpen, TurnEnd, WaitingFor,
};

/// Every engine this build knows.
pub const ADAPTERS: &[&dyn Adapter] = &[&claude_code::ClaudeCode, &codex::Codex];

/// The engine of this name.
#[must_use]
pub fn adapter(name: &str) -> Option<&'static dyn Adapter> {
    ADAPTERS.iter().copied().find(|adapter| adapter.name() == name)
}
