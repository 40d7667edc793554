//! Claude Code, driven by its bidirectional `stream-json` protocol in one warm process per session.

mod classify;
mod launch;
mod stdin;
mod translator;

use std::time::Duration;

use uuid::Uuid;

use crate::{
    adapter::{Adapter, Capabilities, Support, UsageReport},
    frame::{Frame, FrameBody},
    plan::{
        ConfigurationPlan, CredentialPlan, CredentialRequest, InstallPlan, LaunchPlan, LaunchRequest,
        NativeRef, Permissions, PlanError, VersionProbe,
    },
    session_files::SessionFiles,
    translate::{Translator, TranslatorOpen},
};

/// The adapter of Claude Code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaudeCode;

impl Adapter for ClaudeCode {
    fn name(&self) -> &'static str {
        "claude-code"
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
        "claude"
    }

    fn install(&self) -> InstallPlan {
        InstallPlan::Npm { package: "@anthropic-ai/claude-code", executable: "claude" }
    }

    fn version_probe(&self) -> VersionProbe {
        VersionProbe { args: &["--version"], timeout: Duration::from_secs(20) }
    }

    fn parse_version(&self, stdout: &str) -> Option<String> {
        let first = stdout.split_whitespace().next()?;
        let plausible =
            first.starts_with(|c: char| c.is_ascii_digit()) && first.contains('.') && first.len() <= 64;
        plausible.then(|| first.to_owned())
    }

    fn can_continue_with(&self, _from: &str, _to: &str) -> Support {
        Support::Supported
    }

    fn new_native_ref(&self, fresh: Uuid) -> Option<NativeRef> {
        Some(NativeRef { id: fresh.hyphenated().to_string(), file: None })
    }

    fn credentials(&self, request: &CredentialRequest<'_>) -> Result<CredentialPlan, PlanError> {
        launch::credentials(request)
    }

    fn configuration(&self, _credentials: &CredentialPlan) -> ConfigurationPlan {
        // The engine makes its own files on first use, and everything we ask of it travels in arguments and
        // environment. A person's own directory must not be written in any case.
        ConfigurationPlan::default()
    }

    fn launch(&self, request: &LaunchRequest<'_>) -> Result<LaunchPlan, PlanError> {
        launch::launch(request)
    }

    fn session_files(&self, native: &NativeRef) -> Option<SessionFiles> {
        Some(SessionFiles {
            search: "projects".to_owned(),
            main: format!("{}.jsonl", native.id),
            side_directory: Some(native.id.clone()),
            depth: 1,
            main_is_ending: false,
        })
    }

    fn translator(&self, open: &TranslatorOpen) -> Box<dyn Translator> {
        Box::new(translator::ClaudeTranslator::new(open.clone()))
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
}
