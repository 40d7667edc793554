//! The shapes are a promise: a key that is renamed or gone breaks somebody's script.

use pretty_assertions::assert_eq;
use roundhouse_proto::engine::v1::event_body::Kind;

use super::*;

fn keys(value: &Value) -> String {
    value.as_object().map(|map| map.keys().cloned().collect::<Vec<_>>().join(" ")).unwrap_or_default()
}

#[test]
fn the_keys_of_each_shape_are_these() {
    let shapes = [
        (
            conversation(&Default::default()),
            "conversation_id external_id title archived create_time update_time workspace_id agent active_turn_id \
             waiting attention last_seq",
        ),
        (external_id(&Default::default()), "project provider id"),
        (attention(&Default::default()), "reason turn_id next_action held_by_turn_id"),
        (
            message(&Default::default()),
            "message_id conversation_id seq position role actor text truncated incomplete turn_id create_time",
        ),
        (
            turn(&Default::default()),
            "turn_id conversation_id message_id retry_of status agent workspace_id engine model effort session_id \
             origin history_given summary_given prompt_change agent_sha256 epoch create_time start_time end_time \
             failure usage last_event_seq answer_message_id",
        ),
        (
            failure(&Default::default()),
            "reason message next_action retryable retry_at exit_code signal stderr_tail native_code spool_id \
             unavailable",
        ),
        (usage(&Default::default()), "models complete"),
        (
            session(&Default::default()),
            "session_id conversation_id workspace_id agent engine model state unusable_reason native_ref replaces \
             origin watermark create_time update_time",
        ),
        (
            runner(&Default::default()),
            "runner_id hostname address state roots last_seen_time version running_turns warm_engines engines \
             isolation",
        ),
        (root(&Default::default()), "path trusted"),
        (
            engine_facts(&Default::default()),
            "name installed version pinned_version executable login login_detail capabilities",
        ),
        (
            workspace(&Default::default()),
            "workspace_id runner_id path held_by_turn_id held_by_lost_turn waiting_turns",
        ),
        (
            agent(&Default::default()),
            "name description engine model reasoning_effort permissions enabled triggers sha256 prompt_characters",
        ),
        (agent_problem(&Default::default()), "file_name line field message"),
        (
            permission(&Default::default()),
            "request_id conversation_id turn_id state request decision decider create_time",
        ),
        (stream_item(&Default::default()), "cursor at kind"),
    ];
    for (shape, expected) in shapes {
        assert_eq!(keys(&shape), expected);
    }
}

#[test]
fn the_keys_of_each_event_are_these() {
    let events = [
        (
            Kind::Session(Default::default()),
            "session",
            "state session_id origin native_ref reason replaces history_given summary_given",
        ),
        (Kind::Phase(Default::default()), "phase", "phase message_id detail"),
        (Kind::Text(Default::default()), "text", "item_id text truncated incomplete sub_agent"),
        (Kind::Reasoning(Default::default()), "reasoning", "item_id text truncated"),
        (Kind::ToolCall(Default::default()), "tool_call", "call_id name input truncated sub_agent"),
        (Kind::ToolResult(Default::default()), "tool_result", "call_id is_error output truncated"),
        (Kind::FileChange(Default::default()), "file_change", "path change call_id"),
        (
            Kind::PermissionRequest(Default::default()),
            "permission_request",
            "request_id tool input truncated title deadline call_id",
        ),
        (
            Kind::PermissionAnswer(Default::default()),
            "permission_answer",
            "request_id decision decider feedback",
        ),
        (Kind::Usage(Default::default()), "usage", "usage"),
        (Kind::Quota(Default::default()), "quota", "status resets_at message"),
        (Kind::Notice(Default::default()), "notice", "kind message"),
        (
            Kind::Evidence(Default::default()),
            "evidence",
            "point head branch dirty commits changed_files truncated",
        ),
        (
            Kind::Terminal(Default::default()),
            "terminal",
            "outcome result truncated failure usage duration_ms session_resumable",
        ),
    ];
    for (kind, name, expected) in events {
        let (told, body) = event(&engine::EventBody { kind: Some(kind) });
        assert_eq!((told, keys(&body).as_str()), (name, expected));
    }
}

#[test]
fn states_lose_their_prefix_and_unknown_ones_are_numbered() {
    assert_eq!(turn_status(control::TurnStatus::WaitingForPermission.into()), "WAITING_FOR_PERMISSION");
    assert_eq!(failure_reason(engine::FailureReason::IdleTimeout.into()), "IDLE_TIMEOUT");
    assert_eq!(isolation(engine::IsolationLevel::PidNamespace.into()), "PID_NAMESPACE");
    assert_eq!(turn_status(99), "UNKNOWN(99)");
}

#[test]
fn what_is_absent_is_null_and_what_is_zero_is_zero() {
    let known = engine::ModelUsage { input_tokens: Some(0), ..Default::default() };
    let told = usage(&engine::Usage { models: vec![known], complete: true });
    assert_eq!(
        (&told["models"][0]["input_tokens"], &told["models"][0]["output_tokens"]),
        (&json!(0), &Value::Null)
    );
    let waiting = message(&control::Message::default());
    assert_eq!((&waiting["position"], &waiting["text"]), (&Value::Null, &json!("")));
    let empty = engine::TextEvent { text: String::new(), ..Default::default() };
    assert_eq!(event(&engine::EventBody { kind: Some(Kind::Text(empty)) }).1["text"], json!(""));
}

#[test]
fn times_are_rfc_3339_and_tool_inputs_are_json() {
    let made = prost_types::Timestamp { seconds: 1_700_000_000, nanos: 120_000_000 };
    let told = message(&control::Message { create_time: Some(made), ..Default::default() });
    assert_eq!(told["create_time"], json!("2023-11-14T22:13:20.12Z"));
    let out_of_range = prost_types::Timestamp { seconds: i64::MAX, nanos: 0 };
    let told = message(&control::Message { create_time: Some(out_of_range), ..Default::default() });
    assert_eq!(told["create_time"], Value::Null);
    let call = |input: &str| {
        let call = engine::ToolCallEvent { input_json: input.to_owned(), ..Default::default() };
        event(&engine::EventBody { kind: Some(Kind::ToolCall(call)) }).1["input"].clone()
    };
    assert_eq!(call("{\"a\":[1]}"), json!({"a": [1]}));
    assert_eq!(call("{\"a\":[1"), json!("{\"a\":[1"), "what was cut is no JSON any more, and stays as it is");
}
