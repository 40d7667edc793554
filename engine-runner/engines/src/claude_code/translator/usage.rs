//! What a turn used: the sum of what each result says was used since the one before it.
//!
//! A result's own `usage` leaves out sub-agents and is zero after an abort, and the session totals are restored on a
//! resume; the delta per result has none of these faults. What was streamed after the last result is known only
//! from the stream, and marks the usage incomplete.

use serde_json::Value;

use crate::event::{ModelUsage, Usage};

/// The sum so far.
#[derive(Debug, Default)]
pub(super) struct UsageSum {
    models: Vec<ModelUsage>,
    counters_missing: bool,
    /// Requests since the last result, as their streams told.
    streamed: Vec<ModelUsage>,
}

fn entry<'a>(models: &'a mut Vec<ModelUsage>, name: &str) -> &'a mut ModelUsage {
    let place = match models.iter().position(|model| model.model == name) {
        Some(place) => place,
        None => {
            models.push(ModelUsage { model: name.to_owned(), ..ModelUsage::default() });
            models.len() - 1
        }
    };
    &mut models[place]
}

fn add(slot: &mut Option<u64>, more: Option<u64>) {
    if let Some(more) = more {
        *slot = Some(slot.unwrap_or(0).saturating_add(more));
    }
}

fn merge(into: &mut ModelUsage, more: &ModelUsage) {
    add(&mut into.input_tokens, more.input_tokens);
    add(&mut into.output_tokens, more.output_tokens);
    add(&mut into.cache_read_tokens, more.cache_read_tokens);
    add(&mut into.cache_write_tokens, more.cache_write_tokens);
    add(&mut into.cost_nano_usd, more.cost_nano_usd);
}

/// The estimate is a fraction of a dollar; a whole number of billionths adds up without drift.
fn nano_usd(value: Option<&Value>) -> Option<u64> {
    let dollars = value?.as_f64().filter(|dollars| dollars.is_finite() && *dollars >= 0.0)?;
    format!("{:.0}", dollars * 1e9).parse().ok()
}

impl UsageSum {
    /// A result line.
    pub(super) fn result(&mut self, line: &Value) {
        self.streamed.clear();
        let Some(models) = line.get("model_usage_since_last_result").and_then(Value::as_object) else {
            self.counters_missing = true;
            return;
        };
        for (name, counters) in models {
            let counter = |key: &str| counters.get(key).and_then(Value::as_u64);
            let more = ModelUsage {
                model: name.clone(),
                input_tokens: counter("inputTokens"),
                output_tokens: counter("outputTokens"),
                cache_read_tokens: counter("cacheReadInputTokens"),
                cache_write_tokens: counter("cacheCreationInputTokens"),
                cost_nano_usd: nano_usd(counters.get("costUSD")),
            };
            self.counters_missing |= more.input_tokens.is_none() || more.output_tokens.is_none();
            merge(entry(&mut self.models, name), &more);
        }
    }

    /// The beginning of a streamed message.
    pub(super) fn message_start(&mut self, message: &Value) {
        let counters = message.get("usage");
        let counter = |key: &str| counters.and_then(|usage| usage.get(key)).and_then(Value::as_u64);
        self.streamed.push(ModelUsage {
            model: message.get("model").and_then(Value::as_str).unwrap_or("unknown").to_owned(),
            input_tokens: counter("input_tokens"),
            output_tokens: counter("output_tokens"),
            cache_read_tokens: counter("cache_read_input_tokens"),
            cache_write_tokens: counter("cache_creation_input_tokens"),
            cost_nano_usd: None,
        });
    }

    /// The end of a streamed message says how much came out of it.
    pub(super) fn message_delta(&mut self, usage: Option<&Value>) {
        let output = usage.and_then(|usage| usage.get("output_tokens")).and_then(Value::as_u64);
        if let (Some(last), Some(output)) = (self.streamed.last_mut(), output) {
            last.output_tokens = Some(output);
        }
    }

    /// The sum. `reported` says that the engine's own account covers the turn.
    pub(super) fn total(&self, reported: bool) -> Usage {
        let mut models = self.models.clone();
        for streamed in &self.streamed {
            merge(entry(&mut models, &streamed.model), streamed);
        }
        let complete = reported && !self.counters_missing && self.streamed.is_empty();
        Usage { models, complete }
    }
}
