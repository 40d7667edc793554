//! Codex, driven by `codex app-server`: JSON-RPC, one message per line, in one warm process per session.

mod classify;
mod launch;
mod setup;
mod stdin;
mod translator;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use uuid::Uuid;

use crate::{
    adapter::{Adapter, Capabilities, Support, UsageReport},
    frame::{Frame, FrameBody},
    plan::{
        ConfigurationPlan, CredentialPlan, CredentialRequest, InstallPlan, LaunchPlan, LaunchRequest,
        NativeRef, Permissions, PlanError, SandboxProbe, VersionProbe,
    },
    session_files::SessionFiles,
    translate::{Translator, TranslatorOpen},
};

/// The adapter of Codex.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Codex;

impl Adapter for Codex {
    fn name(&self) -> &'static str {
        "codex"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            resumable: Support::Supported,
            // The engine can, but nothing here plans it yet.
            forkable: Support::Unsupported,
            live_input: Support::Supported,
            interrupt: Support::Supported,
            permission_requests: Support::Supported,
            prompt_change_on_resume: Support::Supported,
            model_change_on_resume: Support::Supported,
            continuable_models: Vec::new(),
            warm: Support::Supported,
            usage: UsageReport::PerEvent,
            finished_event_required: true,
            efforts: launch::EFFORTS.to_vec(),
            permissions: vec![Permissions::Ask, Permissions::AcceptEdits, Permissions::Bypass],
        }
    }

    fn executable(&self) -> &'static str {
        "codex"
    }

    fn install(&self) -> InstallPlan {
        InstallPlan::Npm { package: "@openai/codex", executable: launch::NATIVE }
    }

    fn version_probe(&self) -> VersionProbe {
        VersionProbe { args: &["--version"], timeout: Duration::from_secs(20) }
    }

    fn parse_version(&self, stdout: &str) -> Option<String> {
        // `codex-cli 0.171.0`
        let mut words = stdout.split_whitespace().skip_while(|word| !word.starts_with("codex"));
        let version = words.nth(1)?;
        let plausible =
            version.starts_with(|c: char| c.is_ascii_digit()) && version.contains('.') && version.len() <= 64;
        plausible.then(|| version.to_owned())
    }

    fn can_continue_with(&self, _from: &str, _to: &str) -> Support {
        Support::Supported
    }

    fn new_native_ref(&self, _fresh: Uuid) -> Option<NativeRef> {
        // The engine chooses the id; the opening tells it.
        None
    }

    fn credentials(&self, request: &CredentialRequest<'_>) -> Result<CredentialPlan, PlanError> {
        launch::credentials(request)
    }

    fn configuration(&self, _credentials: &CredentialPlan) -> ConfigurationPlan {
        // All that must hold is an argument, or is said when the thread is opened.
        ConfigurationPlan::default()
    }

    fn launch(&self, request: &LaunchRequest<'_>) -> Result<LaunchPlan, PlanError> {
        launch::launch(request)
    }

    fn session_files(&self, native: &NativeRef) -> Option<SessionFiles> {
        // sessions/<year>/<month>/<day>/rollout-<time>-<thread id>.jsonl
        let known = native.file.as_deref().and_then(|file| {
            let (directory, name) = file.rsplit_once('/')?;
            let (search, _) = directory.rsplit_once('/')?;
            Some((search.to_owned(), name.to_owned()))
        });
        Some(match known {
            Some((search, main)) => {
                SessionFiles { search, main, side_directory: None, depth: 1, main_is_ending: false }
            }
            None if native.id.is_empty() => return None,
            None => SessionFiles {
                search: "sessions".to_owned(),
                main: format!("-{}.jsonl", native.id),
                side_directory: None,
                depth: 3,
                main_is_ending: true,
            },
        })
    }

    fn translator(&self, open: &TranslatorOpen) -> Box<dyn Translator> {
        Box::new(translator::CodexTranslator::new(open.clone()))
    }

    fn counts_as_activity(&self, frame: &Frame<'_>) -> bool {
        match frame.body {
            FrameBody::Stdout(line) => stdin::shows_work(line),
            FrameBody::Spawn
            | FrameBody::Exit(_)
            | FrameBody::OversizedLine { .. }
            | FrameBody::StdinWritten { .. } => true,
            FrameBody::Stderr(_) | FrameBody::StdinIntent { .. } | FrameBody::Signal { .. } => false,
        }
    }

    fn is_quota_text(&self, text: &str) -> bool {
        classify::is_quota_text(text)
    }

    fn is_unavailable_text(&self, text: &str) -> bool {
        classify::is_unavailable_text(text)
    }

    fn reserved_variables(&self) -> &'static [&'static str] {
        launch::RESERVED
    }

    fn executable_behind(&self, found: &Path) -> Vec<PathBuf> {
        launch::executable_behind(found)
    }

    fn can_prove_untaken(&self) -> bool {
        true
    }

    fn sandbox_probe(&self) -> Option<SandboxProbe> {
        Some(launch::sandbox_probe())
    }

    fn leftovers(&self) -> &'static [&'static str] {
        launch::LEFTOVERS
    }
}
