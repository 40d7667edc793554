//! The lines of the dialect, as values.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The answer to a request.
pub(crate) fn answer(id: &Value, result: &Value) -> Value {
    json!({"id": id, "result": result})
}

/// The refusal of a request.
pub(crate) fn refusal(id: &Value, code: i64, message: &str) -> Value {
    json!({"error": {"code": code, "message": message}, "id": id})
}

/// A notification.
pub(crate) fn notification(method: &str, params: Value) -> Value {
    json!({"method": method, "params": params, "emittedAtMs": now_ms()})
}

/// Token counts, as a script gives them and added up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tokens {
    /// With what a cache served and took.
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) read: u64,
    pub(crate) created: u64,
}

impl Tokens {
    /// What an answer counts unless the script says otherwise: 100 in, 25 out, 20 read, 10 created.
    pub(crate) const USUAL: Self = Self { input: 130, output: 25, read: 20, created: 10 };

    pub(crate) fn add(&mut self, other: Self) {
        self.input += other.input;
        self.output += other.output;
        self.read += other.read;
        self.created += other.created;
    }

    /// As a notification counts.
    pub(crate) fn told(self) -> Value {
        json!({
            "totalTokens": self.input + self.output, "inputTokens": self.input, "cachedInputTokens": self.read,
            "cacheWriteInputTokens": self.created, "outputTokens": self.output, "reasoningOutputTokens": 0,
        })
    }

    /// As a rollout counts.
    pub(crate) fn kept(self) -> Value {
        json!({
            "input_tokens": self.input, "cached_input_tokens": self.read, "cache_write_input_tokens": self.created,
            "output_tokens": self.output, "reasoning_output_tokens": 0, "total_tokens": self.input + self.output,
        })
    }

    /// From a rollout.
    pub(crate) fn read(kept: &Value) -> Self {
        let number = |name: &str| kept[name].as_u64().unwrap_or(0);
        Self {
            input: number("input_tokens"),
            output: number("output_tokens"),
            read: number("cached_input_tokens"),
            created: number("cache_write_input_tokens"),
        }
    }
}

/// `account/rateLimits/updated`, with the end of a limit that is used up.
pub(crate) fn rate_limits(resets_at: Option<u64>) -> Value {
    let primary = resets_at.map(|at| json!({"usedPercent": 100, "windowDurationMins": 300, "resetsAt": at}));
    json!({"rateLimits": {
        "limitId": "codex", "limitName": null, "normalModelSlug": null, "primary": primary, "secondary": null,
        "credits": null, "individualLimit": null, "spendControlReached": null, "planType": null,
        "rateLimitReachedType": null,
    }})
}

/// What an error is called and how it is worded, for a status of the model's service.
pub(crate) fn failure(status: u64, message: Option<String>) -> (Value, String) {
    let with_status = |name: &str| json!({name: {"httpStatusCode": status}});
    let or = |usual: String| message.clone().unwrap_or(usual);
    match status {
        401 | 403 => {
            let word = if status == 401 { "Unauthorized" } else { "Forbidden" };
            let said = or("scripted failure".to_owned());
            (with_status("httpConnectionFailed"), format!("unexpected status {status} {word}: {said}"))
        }
        404 => (json!("modelNotFound"), or("The requested model does not exist.".to_owned())),
        429 => (
            with_status("responseTooManyFailedAttempts"),
            or("exceeded retry limit, last status: 429 Too Many Requests".to_owned()),
        ),
        500 => (
            json!("internalServerError"),
            or("We’re currently experiencing high demand, which may cause temporary errors.".to_owned()),
        ),
        503 | 529 => (
            json!("serverOverloaded"),
            or("Selected model is at capacity. Please try a different model.".to_owned()),
        ),
        _ => (json!("other"), or("scripted failure".to_owned())),
    }
}

/// An error, as a turn and a notification tell it.
pub(crate) fn error(info: &Value, message: &str, details: Option<&str>) -> Value {
    json!({"message": message, "codexErrorInfo": info, "additionalDetails": details, "misalignment": null})
}
