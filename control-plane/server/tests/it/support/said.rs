//! What engines say, as the events of a runner.

use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;

pub fn accepted(message: &str) -> Kind {
    Kind::Phase(engine::PhaseEvent {
        phase: engine::phase_event::Phase::Accepted.into(),
        message_id: message.into(),
        detail: String::new(),
    })
}

pub fn text(item: &str, text: &str) -> Kind {
    Kind::Text(engine::TextEvent { item_id: item.into(), text: text.into(), ..Default::default() })
}

pub fn native_ref(session: &str) -> Kind {
    Kind::Session(engine::SessionEvent {
        state: engine::session_event::State::NativeRef.into(),
        session_id: session.into(),
        native_ref: Some(engine::NativeRef { id: format!("native-{session}") }),
        ..Default::default()
    })
}

pub fn completed(result: &str) -> Kind {
    Kind::Terminal(engine::TerminalEvent {
        outcome: engine::Outcome::Completed.into(),
        result: result.into(),
        usage: Some(engine::Usage {
            models: vec![engine::ModelUsage {
                model: "m-1".into(),
                input_tokens: Some(3),
                output_tokens: Some(5),
                ..Default::default()
            }],
            complete: true,
        }),
        session_resumable: true,
        ..Default::default()
    })
}

pub fn failed(message: &str) -> Kind {
    Kind::Terminal(engine::TerminalEvent {
        outcome: engine::Outcome::Failed.into(),
        failure: Some(engine::Failure {
            reason: engine::FailureReason::Process.into(),
            message: message.into(),
            next_action: "retry".into(),
            retryable: true,
            ..Default::default()
        }),
        ..Default::default()
    })
}

pub fn lost(message: &str) -> Kind {
    Kind::Terminal(engine::TerminalEvent {
        outcome: engine::Outcome::Lost.into(),
        failure: Some(engine::Failure {
            reason: engine::FailureReason::Process.into(),
            message: message.into(),
            next_action: "look at the worktree, then retry".into(),
            retryable: true,
            ..Default::default()
        }),
        ..Default::default()
    })
}

pub fn cancelled() -> Kind {
    Kind::Terminal(engine::TerminalEvent { outcome: engine::Outcome::Cancelled.into(), ..Default::default() })
}
