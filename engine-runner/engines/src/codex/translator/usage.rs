//! What a turn used, from totals that the engine counts over the whole thread.
//!
//! The total goes on over resumes and is said again right after one, so a turn's share is the total at its end less
//! the one before it. Where nobody knows the one before, the shares of the single requests are added up.

use serde_json::Value;

use crate::{
    event::{ModelUsage, Usage},
    translate::TokenTotals,
};

/// The totals of one turn.
#[derive(Debug, Default)]
pub(super) struct UsageSum {
    /// The total before the turn.
    base: Option<TokenTotals>,
    /// The total as last said.
    last: Option<TokenTotals>,
    /// The shares of the turn's requests, added up.
    sum: TokenTotals,
    /// A report of the turn came.
    reported: bool,
    counters_missing: bool,
}

fn counters(value: Option<&Value>) -> Option<TokenTotals> {
    let value = value?;
    let counter = |key: &str| value.get(key).and_then(Value::as_u64);
    Some(TokenTotals {
        input: counter("inputTokens")?,
        cached_input: counter("cachedInputTokens").unwrap_or(0),
        cache_write: counter("cacheWriteInputTokens").unwrap_or(0),
        output: counter("outputTokens")?,
    })
}

fn plus(a: TokenTotals, b: TokenTotals) -> TokenTotals {
    TokenTotals {
        input: a.input.saturating_add(b.input),
        cached_input: a.cached_input.saturating_add(b.cached_input),
        cache_write: a.cache_write.saturating_add(b.cache_write),
        output: a.output.saturating_add(b.output),
    }
}

fn minus(a: TokenTotals, b: TokenTotals) -> Option<TokenTotals> {
    Some(TokenTotals {
        input: a.input.checked_sub(b.input)?,
        cached_input: a.cached_input.checked_sub(b.cached_input)?,
        cache_write: a.cache_write.checked_sub(b.cache_write)?,
        output: a.output.checked_sub(b.output)?,
    })
}

impl UsageSum {
    pub(super) fn new(base: Option<TokenTotals>) -> Self {
        Self { base, last: base, ..Self::default() }
    }

    /// A report. `own` says that it belongs to this turn; others are of turns before it.
    pub(super) fn report(&mut self, report: Option<&Value>, own: bool) {
        let total = counters(report.and_then(|report| report.get("total")));
        if !own {
            if !self.reported {
                self.base = total.or(self.base);
                self.last = self.base;
            }
            return;
        }
        let share = counters(report.and_then(|report| report.get("last")));
        self.counters_missing |= total.is_none() || share.is_none();
        self.reported = true;
        // An interrupt repeats the report before it.
        if let Some(share) = share
            && (total.is_none() || total != self.last)
        {
            self.sum = plus(self.sum, share);
        }
        self.last = total.or(self.last);
    }

    /// The total as last said.
    pub(super) fn last(&self) -> Option<TokenTotals> {
        self.last
    }

    /// The turn's share. `whole` says that the engine ended the turn by itself: it reports nothing for a request
    /// that was stopped.
    pub(super) fn total(&self, model: &str, whole: bool) -> Usage {
        if !self.reported {
            return Usage { models: Vec::new(), complete: false };
        }
        let difference = match (self.base, self.last) {
            (Some(base), Some(last)) => minus(last, base),
            _ => None,
        };
        let share = difference.unwrap_or(self.sum);
        if !whole && share == TokenTotals::default() {
            // A stopped request repeats the report before it: what it used is unknown, not zero.
            return Usage { models: Vec::new(), complete: false };
        }
        let entry = ModelUsage {
            model: model.to_owned(),
            input_tokens: Some(share.input.saturating_sub(share.cached_input)),
            output_tokens: Some(share.output),
            cache_read_tokens: Some(share.cached_input),
            cache_write_tokens: Some(share.cache_write),
            cost_nano_usd: None,
        };
        Usage { models: vec![entry], complete: whole && !self.counters_missing }
    }
}
