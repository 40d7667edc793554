//! Tokens and cost. A missing counter makes usage incomplete, never zero.

use serde::{Deserialize, Serialize};

/// What one model used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelUsage {
    /// The model, in the engine's words.
    pub model: String,
    /// Tokens sent that no cache knew; unset is unknown.
    pub input_tokens: Option<u64>,
    /// Tokens received; unset is unknown.
    pub output_tokens: Option<u64>,
    /// Tokens read from a cache; unset is unknown.
    pub cache_read_tokens: Option<u64>,
    /// Tokens written to a cache; unset is unknown.
    pub cache_write_tokens: Option<u64>,
    /// Tokens of reasoning, part of the output; unset is unknown.
    pub reasoning_tokens: Option<u64>,
    /// Cost in billionths of a US dollar, as the engine says; unset is unknown, which is not free.
    pub cost_nanos: Option<u64>,
}

/// What a turn, or many, used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// One entry per model.
    pub models: Vec<ModelUsage>,
    /// False when a turn ended without telling all of it.
    pub complete: bool,
}

/// Adds two counters; unknown plus known is the known part (the sum is then marked incomplete).
fn add(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.saturating_add(b)),
        (Some(known), None) | (None, Some(known)) => Some(known),
        (None, None) => None,
    }
}

impl Usage {
    /// Usage that is complete and empty: the start of a sum.
    #[must_use]
    pub const fn zero() -> Self {
        Self { models: Vec::new(), complete: true }
    }

    /// Adds `other`, model by model. Incomplete plus anything is incomplete.
    pub fn add(&mut self, other: &Self) {
        self.complete &= other.complete;
        for more in &other.models {
            match self.models.iter_mut().find(|m| m.model == more.model) {
                None => self.models.push(more.clone()),
                Some(sum) => {
                    let known = |u: &ModelUsage| [u.input_tokens.is_some(), u.output_tokens.is_some()];
                    self.complete &= known(sum) == known(more);
                    sum.input_tokens = add(sum.input_tokens, more.input_tokens);
                    sum.output_tokens = add(sum.output_tokens, more.output_tokens);
                    sum.cache_read_tokens = add(sum.cache_read_tokens, more.cache_read_tokens);
                    sum.cache_write_tokens = add(sum.cache_write_tokens, more.cache_write_tokens);
                    sum.reasoning_tokens = add(sum.reasoning_tokens, more.reasoning_tokens);
                    // A sum of costs of which one is unknown is unknown.
                    sum.cost_nanos = sum.cost_nanos.zip(more.cost_nanos).map(|(a, b)| a.saturating_add(b));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(input: Option<u64>, cost: Option<u64>) -> Usage {
        let model = ModelUsage {
            model: "m".into(),
            input_tokens: input,
            output_tokens: Some(1),
            cost_nanos: cost,
            ..ModelUsage::default()
        };
        Usage { models: vec![model], complete: true }
    }

    #[test]
    fn s42_missing_counters_make_usage_incomplete_not_zero() {
        let mut sum = Usage::zero();
        sum.add(&usage(Some(3), Some(5)));
        sum.add(&usage(Some(4), None));
        assert_eq!((sum.models[0].input_tokens, sum.models[0].output_tokens), (Some(7), Some(2)));
        assert_eq!(sum.models[0].cost_nanos, None, "an unknown cost is not zero");
        assert!(sum.complete);
        sum.add(&usage(None, None));
        assert_eq!(sum.models[0].input_tokens, Some(7));
        assert!(!sum.complete);
    }
}
