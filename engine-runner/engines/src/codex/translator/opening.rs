//! Opening the thread: handshake, the questions about sandbox and skills, start or resume, and the changed prompt.
//!
//! ```text
//! initialize, sandbox? , skills  ->  thread/start | thread/resume  ->  changed prompt?  ->  opened
//! ```
//!
//! The session is open when every step was answered. A sandbox that cannot run is found here, before a turn could
//! "succeed" with dead commands.

use serde_json::Value;

use crate::{
    event::{Notice, NoticeKind},
    failure::{Failure, Reason},
    frame::Exit,
    limit,
    plan::{NativeRef, OpenMode, PlanError},
    translate::{OpenFailure, Opened, Output, TranslatorOpen},
    wire,
};

use super::{
    super::{classify, setup::Setup, stdin},
    CodexTranslator, MANY, Stage,
};

/// How far the opening is.
#[derive(Debug)]
pub(super) struct Opening {
    /// The engine's home, as the handshake said.
    home: Option<String>,
    sandbox_owed: bool,
    thread_opened: bool,
    prompt_owed: bool,
    /// The newest turn at the end of the last turn, if anybody knows; within it, none before the first turn.
    known_turn: Option<Option<String>>,
    /// The newest turn that the engine listed.
    listed_turn: Option<Option<String>>,
}

impl Opening {
    pub(super) fn new(open: &TranslatorOpen, setup: Option<&Setup>) -> Self {
        Self {
            home: None,
            sandbox_owed: setup.is_some_and(Setup::needs_sandbox),
            thread_opened: false,
            prompt_owed: false,
            known_turn: open.carry.session.as_ref().map(|session| session.last_turn.clone()),
            listed_turn: None,
        }
    }

    pub(super) fn proves_untaken(&self) -> bool {
        self.thread_opened && self.known_turn.is_some() && self.known_turn == self.listed_turn
    }
}

/// The names of the skills that a list holds.
pub(super) fn skill_names(result: Option<&Value>) -> Vec<String> {
    let mut names: Vec<String> = result
        .map_or(&[][..], |result| wire::list(result, "data"))
        .iter()
        .flat_map(|entry| wire::list(entry, "skills"))
        .filter_map(|skill| wire::word(skill, "name"))
        .take(MANY)
        .map(limit::short)
        .collect();
    names.sort();
    names.dedup();
    names
}

impl CodexTranslator {
    /// An answer to a request of the opening. `result` is unset for a refusal.
    pub(super) fn opening_answer(
        &mut self,
        id: &str,
        result: Option<&Value>,
        error: &str,
        out: &mut Vec<Output>,
    ) {
        if self.stage != Stage::Opening {
            return;
        }
        match (id, result) {
            (stdin::INITIALIZE, Some(result)) => self.handshake_done(result),
            (stdin::INITIALIZE, None) => {
                let message = format!("the engine refused the handshake: {error}");
                self.open_failed_with(Failure::new(Reason::Process, message), out);
            }
            (stdin::SANDBOX, result) => self.sandbox_answered(result, error, out),
            // Without the list the thread is opened all the same: the names are then expanded.
            (stdin::SKILLS, result) => self.skills_listed(result, out),
            (stdin::THREAD, Some(result)) => self.thread_opened(result, out),
            (stdin::THREAD, None) => {
                let failed = classify::open_failure(self.mode(), self.open.carry.committed, error);
                self.open_failed(failed, out);
            }
            (stdin::PROMPT, Some(_)) => {
                self.opening.prompt_owed = false;
                self.session.prompt = self.setup.as_ref().map(Setup::prompt_digest);
                self.maybe_opened(out);
            }
            (stdin::PROMPT, None) => {
                let message = format!("the engine did not take the agent's changed prompt: {error}");
                self.open_failed_with(Failure::new(Reason::Process, message), out);
            }
            _ => {}
        }
    }

    fn mode(&self) -> OpenMode {
        self.open.opening.unwrap_or(OpenMode::Resume)
    }

    fn handshake_done(&mut self, result: &Value) {
        self.opening.home = wire::word(result, "codexHome").map(limit::short);
        // `roundhouse/0.171.0 (Debian ...) ...`
        let agent = wire::text_or(result, "userAgent", "");
        let version = agent.split_whitespace().next().and_then(|word| word.rsplit_once('/'));
        self.carry.engine_version = version.map(|(_, version)| limit::short(version));
    }

    fn sandbox_answered(&mut self, result: Option<&Value>, error: &str, out: &mut Vec<Output>) {
        let works = result.is_some_and(|result| result.get("exitCode").and_then(Value::as_i64) == Some(0));
        if works {
            self.opening.sandbox_owed = false;
            self.maybe_opened(out);
            return;
        }
        let said = result.map_or(error, |result| wire::text_or(result, "stderr", ""));
        let failure = PlanError::no_sandbox("codex", said).to_failure();
        self.open_failed_with(Failure { native_code: Some("sandbox".to_owned()), ..failure }, out);
    }

    fn skills_listed(&mut self, result: Option<&Value>, out: &mut Vec<Output>) {
        let Some(setup) = &self.setup else { return };
        let names = skill_names(result);
        let resume = (self.mode() == OpenMode::Resume).then_some(self.open.native.id.as_str());
        out.push(Output::Reply(stdin::thread(setup, resume, &names)));
        self.session.switched_off = names;
    }

    fn thread_opened(&mut self, result: &Value, out: &mut Vec<Output>) {
        let thread = result.get("thread").unwrap_or(&Value::Null);
        let Some(id) = wire::word(thread, "id").map(limit::short) else {
            let message = "the engine opened a session and did not say which";
            self.open_failed_with(Failure::new(Reason::Process, message), out);
            return;
        };
        if self.mode() == OpenMode::Resume && id != self.open.native.id {
            // The session that was asked for is not this one, and this one is nobody's.
            let message = format!("the engine opened the session {id} instead of the one asked for");
            self.open_failed_with(Failure::new(Reason::SessionUnusable, message), out);
            return;
        }
        let file = match (wire::word(thread, "path"), self.opening.home.as_deref()) {
            (Some(path), Some(home)) => {
                match path.strip_prefix(home).and_then(|rest| rest.strip_prefix('/')) {
                    Some(file) => Some(limit::short(file)),
                    None => {
                        self.open_failed(classify::elsewhere(&limit::short(path)), out);
                        return;
                    }
                }
            }
            _ => self.open.native.file.clone(),
        };
        self.session.native = Some(NativeRef { id: id.clone(), file });
        self.session.model = wire::word(result, "model").map(limit::short);
        self.opening.thread_opened = true;
        if self.mode() == OpenMode::Resume {
            let page = result.get("initialTurnsPage").and_then(|page| page.get("data"));
            self.opening.listed_turn = page
                .and_then(Value::as_array)
                .map(|turns| turns.first().and_then(|turn| wire::word(turn, "id")).map(limit::short));
            self.tell_prompt(&id, out);
        } else {
            self.session.prompt = self.setup.as_ref().map(Setup::prompt_digest);
        }
        self.maybe_opened(out);
    }

    /// A resumed thread holds the prompt of its first start; another one must be said to it.
    fn tell_prompt(&mut self, thread: &str, out: &mut Vec<Output>) {
        let Some(setup) = &self.setup else { return };
        if self.session.prompt.as_ref() != Some(&setup.prompt_digest()) {
            self.opening.prompt_owed = true;
            out.push(Output::Reply(stdin::inject_prompt(thread, &setup.changed_prompt())));
        }
    }

    fn maybe_opened(&mut self, out: &mut Vec<Output>) {
        let opening = &self.opening;
        if opening.sandbox_owed || opening.prompt_owed || !opening.thread_opened {
            return;
        }
        self.stage = if self.open.turn_id.is_some() { Stage::Open } else { Stage::Ended };
        out.push(Output::Opened(Opened {
            native: self.native(),
            engine_version: self.carry.engine_version.clone(),
            models: Vec::new(),
        }));
        if self.skills_changed {
            let notice = Notice::new(
                NoticeKind::Warning,
                "skills_changed",
                "skills changed while the session was opened",
            );
            self.notice(notice, out);
        }
    }

    fn open_failed_with(&mut self, failure: Failure, out: &mut Vec<Output>) {
        self.open_failed(OpenFailure { failure, retry_as: None, discard: Vec::new() }, out);
    }

    /// The session could not be opened.
    fn open_failed(&mut self, failed: OpenFailure, out: &mut Vec<Output>) {
        self.stage = Stage::Ended;
        self.items.abandon(&mut Vec::new());
        out.push(Output::OpenFailed(failed));
    }

    /// The process ended before it had opened the session.
    pub(super) fn exit_in_opening(&mut self, exit: Exit, out: &mut Vec<Output>) {
        let mut failed = classify::open_exit_failure(&self.stderr, exit);
        if let Some(doom) = self.doomed.take() {
            failed.failure = Failure { exit_code: exit.code, signal: exit.signal, ..doom };
        }
        self.open_failed(failed, out);
    }
}
