//! What the engine's errors mean.

use pretty_assertions::assert_eq;
use roundhouse_engines::{
    Event, Reason, TurnOutcome,
    event::{NoticeKind, QuotaStatus},
};
use serde_json::json;

use crate::support::{
    Owned, answer, begun, codex, completed, end, ends, events, exit, failure, kinds, note, notices,
    play_frames, run, said, tokens, transcript,
};

#[test]
fn every_row_of_the_error_table_has_its_reason() {
    for (name, reason, unavailable, retryable, code) in [
        ("err_500", Reason::Process, true, true, "internalServerError"),
        ("err_503_overloaded", Reason::Process, true, true, "serverOverloaded"),
        ("err_401", Reason::Auth, false, false, "httpConnectionFailed"),
        ("err_403", Reason::Auth, false, false, "httpConnectionFailed"),
        ("err_400", Reason::Process, false, false, "other"),
        ("err_404", Reason::Configuration, false, false, "modelNotFound"),
        ("err_429", Reason::Quota, false, true, "responseTooManyFailedAttempts"),
        ("err_quota", Reason::Quota, false, true, "usageLimitExceeded"),
        ("err_usage_limit", Reason::Quota, false, true, "usageLimitExceeded"),
        ("err_rate_event", Reason::Quota, false, true, "rateLimitExceeded"),
        ("err_context", Reason::ContextTooLong, false, false, "contextWindowExceeded"),
        ("err_incomplete", Reason::OutputInvalid, false, false, "other"),
        ("err_cut", Reason::Process, true, true, "other"),
        ("err_hang_stream", Reason::Process, true, true, "other"),
        ("err_server_down", Reason::Process, true, true, "httpConnectionFailed"),
        ("err_after_tool", Reason::Process, false, false, "other"),
    ] {
        let told = run(name);
        let failure = failure(&told);
        let facts = (failure.reason, failure.unavailable, failure.retryable, failure.native_code.as_deref());
        assert_eq!(facts, (reason, unavailable, retryable, Some(code)), "{name}");
        assert!(!failure.message.is_empty() && !failure.what_to_do.is_empty(), "{name}");
        assert!(!end(&told).process_gone, "{name}: the process serves the next turn");
    }
}

#[test]
fn words_that_were_not_recorded_have_their_reasons() {
    let of = |info: serde_json::Value, message: &str| {
        let mut frames = begun();
        frames.push(completed("failed", json!({"message": message, "codexErrorInfo": info})));
        frames.push(answer("clean.trn_1", &json!({})));
        failure(&play_frames(frames)).clone()
    };
    for (info, reason, unavailable) in [
        (json!("unauthorized"), Reason::Auth, false),
        (json!("sandboxError"), Reason::Configuration, false),
        (json!("cyberPolicy"), Reason::OutputInvalid, false),
        (json!("tooManyDenials"), Reason::PermissionDenied, false),
        (json!("badRequest"), Reason::Process, false),
        (json!("sessionBudgetExceeded"), Reason::Quota, false),
        (json!({"httpConnectionFailed": {"httpStatusCode": null}}), Reason::Process, true),
        (json!({"responseStreamDisconnected": {"httpStatusCode": 429}}), Reason::Quota, false),
        (json!({"responseStreamConnectionFailed": {"httpStatusCode": 502}}), Reason::Process, true),
        (json!({"of_the_future": {}}), Reason::Process, false),
        (json!(null), Reason::Process, false),
    ] {
        let failed = of(info.clone(), "it went wrong");
        assert_eq!((failed.reason, failed.unavailable), (reason, unavailable), "{info}");
    }
    assert_eq!(of(json!("other"), "Missing environment variable: `OPENAI_API_KEY`.").reason, Reason::Auth);
}

#[test]
fn the_error_before_a_failed_end_without_one_counts() {
    let mut frames = begun();
    frames.push(note(
        "error",
        json!({"willRetry": false, "error": {"message": "no", "codexErrorInfo": "usageLimitExceeded"}}),
    ));
    frames.extend([completed("failed", json!(null)), answer("clean.trn_1", &json!({}))]);
    assert_eq!(failure(&play_frames(frames)).reason, Reason::Quota);
}

#[test]
fn a_recovered_request_is_a_success_with_a_notice() {
    let told = run("err_cut_once");
    assert_eq!(end(&told).outcome, TurnOutcome::Completed);
    let notices = notices(&told, "api_retry");
    assert_eq!(notices.len(), 1);
    let retry = notices[0].retry.as_ref().unwrap();
    assert_eq!((retry.attempt, retry.max_attempts), (1, Some(2)));
}

#[test]
fn unbounded_retries_are_off_and_a_service_that_is_away_ends_the_turn() {
    let told = run("err_server_down");
    assert!(failure(&told).unavailable);
    assert!(kinds(&told, NoticeKind::Retry) <= 1);
    assert!(
        notices(&told, "api_retry").iter().all(|notice| !notice.message.text.contains("waiting for network"))
    );
}

#[test]
fn s39_the_reset_time_comes_from_a_number_only() {
    assert_eq!(failure(&run("err_usage_limit")).retry_at_unix_seconds, Some(1_800_000_000));
    assert_eq!(failure(&run("err_quota")).retry_at_unix_seconds, None);
    assert_eq!(failure(&run("err_rate_event")).retry_at_unix_seconds, None, "a time in a text is none");
}

#[test]
fn s36_limit_reports_inform_and_only_a_failed_turn_is_quota() {
    let limits = |used: u64| {
        Owned::line(&json!({"method": "account/rateLimits/updated", "params": {"rateLimits":
            {"limitId": "codex", "primary": {"usedPercent": used, "resetsAt": 1_800_000_000}, "secondary": null}}}))
    };
    let mut frames = begun();
    frames.extend([limits(10), limits(95), limits(95), limits(100), said("m", "fine")]);
    frames.push(completed("completed", json!(null)));
    let told = play_frames(frames);
    assert_eq!(end(&told).outcome, TurnOutcome::Completed);
    let quotas: Vec<(QuotaStatus, Option<u32>)> = events(&told)
        .iter()
        .filter_map(|event| match event {
            Event::Quota(quota) => Some((quota.status, quota.used_thousandths)),
            _ => None,
        })
        .collect();
    assert_eq!(quotas, [(QuotaStatus::Warning, Some(950)), (QuotaStatus::Exceeded, Some(1_000))]);
}

#[test]
fn s38_notices_of_retries_match_neither_quota_nor_unavailable() {
    for text in [
        "Reconnecting... 1/5 (429 Too Many Requests)",
        "Reconnecting... waiting for network",
        "overloaded, will retry",
    ] {
        assert!(!codex().is_quota_text(text) && !codex().is_unavailable_text(text), "{text}");
    }
    assert!(codex().is_quota_text("exceeded retry limit, last status: 429 Too Many Requests"));
    assert!(codex().is_quota_text("You've hit your usage limit."));
    assert!(
        codex().is_unavailable_text("stream disconnected before completion: idle timeout waiting for SSE")
    );
    assert!(codex().is_unavailable_text("Selected model is at capacity. Please try a different model."));
    assert!(!codex().is_quota_text("wrote the rate-of-change table"));
}

#[test]
fn s36_quota_on_standard_error_counts_when_the_process_fails_and_beats_unavailable() {
    let mut frames = begun();
    frames.push(Owned::Err(b"503 Service Unavailable\nquota exceeded\n".to_vec()));
    frames.push(exit(Some(1), None));
    let told = play_frames(frames);
    assert_eq!((failure(&told).reason, failure(&told).message.as_str()), (Reason::Quota, "quota exceeded"));
    assert!(failure(&told).stderr_tail.contains("503"));
}

#[test]
fn s42_cumulative_usage_is_counted_against_what_was_before() {
    // Two turns in one process, and one after a resume: the totals go on, the turns do not.
    let told = run("two_turns");
    let input = |at: usize| ends(&told)[at].usage.models[0].input_tokens;
    assert_eq!((input(0), input(1)), (Some(940), Some(1_940)));
    let resumed = run("resume_same");
    assert_eq!(end(&resumed).usage.models[0].input_tokens, Some(960));
    assert_eq!(end(&resumed).usage.models[0].cost_nano_usd, None, "unknown cost is not zero");
}

#[test]
fn s42_without_a_baseline_the_requests_are_added_up() {
    let mut run = crate::support::recording("resume_same");
    run.open.carry.session.as_mut().unwrap().usage_total = None;
    // And the engine does not repeat the total after the resume.
    let report = run.frames.iter().position(
        |frame| matches!(frame, Owned::Out(line) if String::from_utf8_lossy(line).contains("thread/tokenUsage")),
    );
    run.frames.remove(report.unwrap());
    assert_eq!(end(&crate::support::play(&run)).usage.models[0].input_tokens, Some(960));
}

#[test]
fn s42_a_report_that_is_repeated_counts_once() {
    let mut frames = begun();
    let turn = crate::support::TURN;
    frames.extend([tokens(10, 10, turn), tokens(10, 10, turn), tokens(25, 15, turn), said("m", "x")]);
    frames.push(completed("completed", json!(null)));
    let usage = end(&play_frames(frames)).usage.clone();
    assert_eq!(usage.models[0].input_tokens, Some(25));
    assert!(usage.complete);
}

#[test]
fn s42_a_stopped_turn_is_incomplete_and_still_counts() {
    let told = run("interrupt_tool");
    let usage = &ends(&told)[0].usage;
    assert!(!usage.complete, "nothing is reported for the request that was stopped");
    assert_eq!(usage.models[0].input_tokens, Some(940));
}

#[test]
fn s42_what_a_stopped_request_used_is_unknown_and_not_zero() {
    let told = run("two_turns");
    let carry = crate::support::play_to(&crate::support::recording("two_turns")).1.carry();
    assert!(ends(&told)[1].usage.complete);
    let total = carry.session.unwrap().usage_total.unwrap();
    let mut open = crate::support::open(Some(roundhouse_engines::OpenMode::Start), "");
    open.opening = None;
    open.carry.session = Some(roundhouse_engines::SessionCarry {
        native: Some(roundhouse_engines::NativeRef { id: crate::support::THREAD.into(), file: None }),
        usage_total: Some(total),
        ..Default::default()
    });
    let frames: Vec<Owned> = begun().split_off(crate::support::initialized().len());
    let mut reader = crate::support::translator(&open);
    crate::support::feed(reader.as_mut(), &frames);
    let report = json!({"inputTokens": total.input, "cachedInputTokens": total.cached_input, "outputTokens": total.output});
    let outputs = crate::support::feed(
        reader.as_mut(),
        &[
            note("thread/tokenUsage/updated", json!({"tokenUsage": {"total": report, "last": report}})),
            Owned::Intent("interrupt.trn_1".into()),
            completed("interrupted", json!(null)),
            answer("clean.trn_1", &json!({})),
        ],
    );
    let Some(roundhouse_engines::Output::TurnEnded(end)) = outputs.last() else { panic!("{outputs:?}") };
    assert_eq!(end.outcome, TurnOutcome::Cancelled);
    assert!(end.usage.models.is_empty() && !end.usage.complete);
}

#[test]
fn compaction_is_a_notice() {
    let mut frames = begun();
    frames.push(crate::support::item("completed", json!({"type": "contextCompaction", "id": "x"})));
    frames.extend([said("m", "x"), completed("completed", json!(null))]);
    assert_eq!(kinds(&play_frames(frames), NoticeKind::Compaction), 1);
    for name in ["compaction", "compaction_in_turn"] {
        let told = run(name);
        assert_eq!(kinds(&told, NoticeKind::Compaction), 1, "{name}");
        assert_eq!(ends(&told).len(), 2, "{name}");
    }
}

#[test]
fn s42_the_requests_of_a_compaction_count() {
    let input = |name: &str, at: usize| ends(&run(name))[at].usage.models[0].input_tokens;
    // The summary's request and the answer's.
    assert_eq!(input("compaction", 1), Some(1_920));
    assert_eq!(input("compaction_in_turn", 0), Some(251_820));
}

#[test]
fn the_supplied_runs_of_every_error_end_once_with_a_reason() {
    let mut failed = 0;
    for name in crate::support::names("lines").iter().filter(|name| name.starts_with("errors.")) {
        let told = crate::support::play(&transcript(name));
        for end in ends(&told) {
            if let TurnOutcome::Failed { failure } = &end.outcome {
                failed += 1;
                assert!(failure.native_code.is_some(), "{name}");
            }
        }
    }
    assert!(failed >= 10, "{failed}");
}
