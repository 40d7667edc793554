//! Reads one turn of one Claude Code process.

use crate::{
    frame::Frame,
    translate::{
        Carry, Delivery, LineError, Output, Partial, PermissionReply, Standing, StdinLine, Translator,
        TranslatorOpen, WaitingFor,
    },
};

use super::stdin;

/// The state of one turn in one process.
#[derive(Debug)]
pub(super) struct ClaudeTranslator {
    open: TranslatorOpen,
}

impl ClaudeTranslator {
    pub(super) fn new(open: TranslatorOpen) -> Self {
        Self { open }
    }
}

impl Translator for ClaudeTranslator {
    fn feed(&mut self, _frame: Frame<'_>) -> Vec<Output> {
        Vec::new()
    }

    fn settle(&mut self) -> Vec<Output> {
        Vec::new()
    }

    fn opening(&self) -> Vec<StdinLine> {
        self.open.opening.map(|_| stdin::initialize()).into_iter().collect()
    }

    fn deliver(&self, delivery: &Delivery<'_>) -> Result<StdinLine, LineError> {
        stdin::deliver(delivery)
    }

    fn interrupt(&self) -> Result<StdinLine, LineError> {
        self.open.turn_id.as_deref().map(stdin::interrupt).ok_or(LineError::Unsupported)
    }

    fn answer_permission(
        &self,
        _request_id: &str,
        reply: PermissionReply<'_>,
    ) -> Result<StdinLine, LineError> {
        let _ = stdin::answer_permission(0, "", reply);
        let _ = stdin::refuse_request(0, "");
        Err(LineError::NoSuchRequest)
    }

    fn standing(&self) -> Standing {
        Standing {
            opened: false,
            accepted: false,
            quiescent: false,
            pending_permissions: Vec::new(),
            waiting_for: WaitingFor::Opening,
            ended: false,
        }
    }

    fn partials(&self) -> Vec<Partial> {
        Vec::new()
    }

    fn carry(&self) -> Carry {
        self.open.carry.clone()
    }
}
