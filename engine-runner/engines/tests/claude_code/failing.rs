//! Failed requests and limits: a success that is none, and what is no failure.

use pretty_assertions::assert_eq;
use roundhouse_engines::{
    Event, Exit, Reason, TurnOutcome,
    event::{NoticeKind, QuotaStatus},
};
use serde_json::json;

use crate::support::{
    DELIVERY, Owned, begun, claude, closing, end, ends, events, failure, kinds, lifecycle, play, play_frames,
    run, state, transcript,
};

#[test]
fn s35_subtype_success_with_is_error_is_a_failure() {
    let told = run("err_500");
    assert_eq!(failure(&told).reason, Reason::Process);
    assert!(failure(&told).unavailable);
    assert_eq!(failure(&told).native_status, Some(500));
    assert!(end(&told).answer.is_none(), "the error's text is not an answer");
    assert!(events(&told).iter().all(|event| !matches!(event, Event::Text(_))));
}

#[test]
fn every_row_of_the_error_table_has_its_reason() {
    for (name, reason, unavailable, retryable, code) in [
        ("err_401", Reason::Auth, false, false, "authentication_failed"),
        ("err_403", Reason::Auth, false, false, "authentication_failed"),
        ("err_no_key", Reason::Auth, false, false, "authentication_failed"),
        ("err_404", Reason::Configuration, false, false, "model_not_found"),
        ("err_400", Reason::Process, false, false, "invalid_request_error"),
        ("err_429", Reason::Quota, false, true, "rate_limit"),
        ("err_500", Reason::Process, true, true, "server_error"),
        ("err_529", Reason::Process, true, true, "server_error"),
        ("err_server_down", Reason::Process, true, true, "connection_failed"),
        ("err_hang", Reason::Process, true, true, "server_error"),
        ("err_cut_after_a_block", Reason::Process, true, true, "connection_failed"),
        ("err_maxtok", Reason::OutputInvalid, false, false, "max_output_tokens"),
        ("err_refuse", Reason::OutputInvalid, false, false, "refusal"),
        ("max_turns", Reason::Deadline, false, true, "max_turns"),
    ] {
        let told = run(name);
        let failure = failure(&told);
        let facts = (failure.reason, failure.unavailable, failure.retryable, failure.native_code.as_deref());
        assert_eq!(facts, (reason, unavailable, retryable, Some(code)), "{name}");
        assert!(!failure.message.is_empty() && !failure.what_to_do.is_empty(), "{name}");
        assert_eq!(failure.retry_at_unix_seconds, None, "{name}: no number, no time");
        assert!(end(&told).usage.complete, "{name}");
    }
    for (name, reason, code) in [
        ("err_credit", Reason::Quota, "billing_error"),
        ("err_limit", Reason::Quota, "rate_limit"),
        ("err_toolong", Reason::ContextTooLong, "prompt_too_long"),
        ("max_turns", Reason::Deadline, "max_turns"),
        ("max_budget", Reason::Quota, "max_budget"),
    ] {
        let told = play(&transcript(name));
        let failure = failure(&told);
        assert_eq!((failure.reason, failure.native_code.as_deref()), (reason, Some(code)), "{name}");
    }
}

/// What the engine refuses itself bears no status: nobody was asked.
#[test]
fn a_message_that_the_engine_finds_too_long_is_no_failure_of_a_process() {
    let mut run = transcript("err_toolong");
    for frame in &mut run.frames {
        let Owned::Out(line) = frame else { continue };
        let mut value: serde_json::Value = serde_json::from_slice(line).unwrap();
        for name in ["api_error_status", "api_error_type", "terminal_reason"] {
            value.as_object_mut().unwrap().remove(name);
        }
        *frame = Owned::line(&value);
    }
    let told = play(&run);
    let failure = failure(&told);
    let facts = (failure.reason, failure.retryable, failure.native_code.as_deref());
    assert_eq!(facts, (Reason::ContextTooLong, false, Some("prompt_too_long")));
    assert!(failure.what_to_do.contains("Shorten"), "{}", failure.what_to_do);
}

#[test]
fn a_recovered_request_is_a_success_with_a_notice() {
    for name in ["err_once529", "err_cutonce", "err_cut"] {
        let told = run(name);
        assert_eq!(end(&told).outcome, TurnOutcome::Completed, "{name}");
        assert_eq!(kinds(&told, NoticeKind::Retry), 1, "{name}");
    }
}

#[test]
fn s36_limit_events_inform_and_only_a_failed_turn_is_quota() {
    let limit = |status: &str| {
        Owned::line(&json!({"type": "rate_limit_event", "rate_limit_info":
            {"status": status, "resetsAt": 1_800_000_000, "rateLimitType": "five_hour", "utilization": 0.95}}))
    };
    let mut frames = begun();
    frames.extend([limit("allowed"), limit("allowed_warning"), limit("rejected")]);
    frames.extend(closing("fine"));
    let told = play_frames(frames);
    assert_eq!(end(&told).outcome, TurnOutcome::Completed);
    let quotas: Vec<QuotaStatus> = events(&told)
        .iter()
        .filter_map(|event| match event {
            Event::Quota(quota) => Some(quota.status),
            _ => None,
        })
        .collect();
    assert_eq!(quotas, [QuotaStatus::Warning, QuotaStatus::Exceeded]);
}

#[test]
fn s39_the_reset_time_comes_from_a_number_only() {
    let failed = |extra: serde_json::Value| {
        let mut line = json!({"type": "assistant", "parent_tool_use_id": null, "error": "rate_limit",
            "is_api_error_message": true, "api_error_status": 429,
            "message": {"id": "e", "model": "<synthetic>", "content":
                [{"type": "text", "text": "You've hit your limit · resets 3am (UTC)"}]}});
        line.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let mut frames = begun();
        frames.push(Owned::line(&line));
        frames.push(Owned::line(&json!({"type": "result", "subtype": "success", "is_error": true,
            "terminal_reason": "api_error", "result": "x", "model_usage_since_last_result": {}})));
        frames.extend([lifecycle(DELIVERY, "cancelled"), state("idle")]);
        failure(&play_frames(frames)).clone()
    };
    assert_eq!(failed(json!({})).retry_at_unix_seconds, None);
    let named = failed(json!({"api_error": "usage_limit_reached", "api_error_params":
        {"rate_limit_info": {"status": "rejected", "resetsAt": 1_800_000_000}}}));
    assert_eq!(named.reason, Reason::Quota);
    assert_eq!(named.retry_at_unix_seconds, Some(1_800_000_000));
}

#[test]
fn s38_notices_of_retries_match_neither_quota_nor_unavailable() {
    for text in ["429 rate limit, retrying in 3 s", "Overloaded; will retry", "connection lost, reconnecting"]
    {
        assert!(!claude().is_quota_text(text) && !claude().is_unavailable_text(text), "{text}");
    }
    assert!(claude().is_quota_text("API Error: Request rejected (429) · You have hit your usage limit"));
    assert!(claude().is_unavailable_text("API Error: Connection refused (ECONNREFUSED)"));
    assert!(!claude().is_quota_text("wrote the rate-of-change table"));
}

#[test]
fn s36_quota_on_standard_error_counts_when_the_process_fails_and_beats_unavailable() {
    let stderr = || Owned::Err(b"API Error: 503 Service Unavailable\nusage limit reached\n".to_vec());
    let mut frames = begun();
    frames.push(stderr());
    frames.push(Owned::Exit(Exit { code: Some(1), signal: None }));
    let told = play_frames(frames);
    assert_eq!(failure(&told).reason, Reason::Quota);
    assert_eq!(failure(&told).message, "usage limit reached");
    assert_eq!(failure(&told).exit_code, Some(1));
    assert!(failure(&told).stderr_tail.contains("503"));

    let mut frames = begun();
    frames.push(stderr());
    frames.extend(closing("fine"));
    assert_eq!(end(&play_frames(frames)).outcome, TurnOutcome::Completed);
}

#[test]
fn s37_unavailable_is_a_flag_on_process() {
    let mut frames = begun();
    frames.push(Owned::Err(b"API Error: 503 Service Unavailable".to_vec()));
    frames.push(Owned::Exit(Exit { code: None, signal: Some(6) }));
    let told = play_frames(frames);
    assert_eq!((failure(&told).reason, failure(&told).unavailable), (Reason::Process, true));
    assert_eq!(failure(&told).signal, Some(6));
}

#[test]
fn s42_usage_is_the_sum_of_what_came_since_the_last_result() {
    // The session's totals are restored on a resume; counting them again would double the first turn.
    let told = run("resume_ok");
    let usage = &end(&told).usage;
    assert_eq!(usage.models.len(), 1);
    assert_eq!(usage.models[0].input_tokens, Some(100));
    assert_eq!(usage.models[0].cost_nano_usd, Some(954_000));

    // Two results in one turn.
    let told = run("steer_text");
    assert_eq!(end(&told).usage.models[0].input_tokens, Some(200));
    assert_eq!(end(&told).usage.models[0].cost_nano_usd, Some(1_908_000));
}

#[test]
fn s42_an_aborted_turn_counts_although_its_own_usage_is_zero() {
    let told = run("interrupt_text");
    let first = ends(&told)[0];
    assert_eq!(first.usage.models[0].output_tokens, Some(7));
    assert!(first.usage.complete);
}

#[test]
fn s42_a_killed_turn_has_incomplete_usage_not_none() {
    let told = run("sig_kill_tool");
    let usage = &end(&told).usage;
    assert!(!usage.complete);
    assert_eq!(usage.models[0].input_tokens, Some(100));
    assert_eq!(usage.models[0].cost_nano_usd, None, "unknown cost is not zero");
}

#[test]
fn s42_sub_agents_are_in_the_usage() {
    assert_eq!(end(&run("sub_agent")).usage.models[0].input_tokens, Some(300));
}
