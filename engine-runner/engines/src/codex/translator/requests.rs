//! What the engine asks of us. Every request is answered: one that is not would be waited for without end.

use serde_json::{Value, json};

use crate::{
    event::{Decider, Decision, Event, PermissionAnswered, PermissionRequest},
    limit::{self, BoundedText},
    translate::{Output, PermissionReply},
    wire,
};

use super::{super::stdin, Asked, CodexTranslator, MANY, Stage};

impl CodexTranslator {
    /// A request of the engine.
    pub(super) fn server_request(
        &mut self,
        frame: u64,
        native_id: &Value,
        method: &str,
        params: &Value,
        out: &mut Vec<Output>,
    ) {
        let tool = match method {
            "item/commandExecution/requestApproval" => "exec_command",
            "item/fileChange/requestApproval" => "apply_patch",
            _ => {
                out.push(Output::Reply(stdin::refuse_request(frame, native_id)));
                return;
            }
        };
        let ours = self.stage == Stage::Open
            && self.open.turn_id.is_some()
            && self.turn.status.is_none()
            && self.asked.len() < MANY
            && self.of_turn(params);
        if !ours {
            // Nobody can be asked: it belongs to no turn that runs.
            let deny = PermissionReply::Deny { feedback: "" };
            out.push(Output::Reply(stdin::answer_permission(frame, native_id, None, deny)));
            return;
        }
        let request_id = format!("{}.{frame}", self.open.spool_id);
        let item = limit::short(wire::text_or(params, "itemId", ""));
        let call_id = self.tools.told_id(&item).map(str::to_owned);
        let field = |key: &str| params.get(key).cloned().unwrap_or(Value::Null);
        let input = match tool {
            "exec_command" => {
                json!({"command": field("command"), "cwd": field("cwd"), "kind": field("kind")})
            }
            _ => json!({"grant_root": field("grantRoot")}),
        };
        let event = Event::PermissionRequest(PermissionRequest {
            request_id: request_id.clone(),
            call_id,
            tool: tool.to_owned(),
            input: BoundedText::event(&input.to_string()),
            description: wire::word(params, "reason").map(limit::short),
            blocked_path: wire::word(params, "grantRoot").map(limit::short),
        });
        self.asked.push(Asked { request_id, native_id: native_id.clone(), item, frame, answered: false });
        out.push(Output::Event { event });
    }

    /// The engine says that a request needs no answer any more.
    pub(super) fn request_resolved(&mut self, params: &Value, out: &mut Vec<Output>) {
        let Some(native_id) = params.get("requestId") else { return };
        let Some(place) = self.asked.iter().position(|asked| asked.native_id == *native_id) else { return };
        let asked = self.asked.remove(place);
        if !asked.answered && self.stage == Stage::Open {
            self.tools.never_ran(&asked.item);
            out.push(Output::Event { event: withdrawn(asked.request_id) });
        }
    }
}

/// Nobody needs to answer any more.
pub(super) fn withdrawn(request_id: String) -> Event {
    Event::PermissionAnswer(PermissionAnswered {
        request_id,
        decision: Decision::Withdrawn,
        decided_by: Decider::Engine,
        feedback: None,
    })
}
