//! A series of measured times.

use std::time::Duration;

/// Times of one thing, in the order measured.
#[derive(Debug, Default, Clone)]
pub(crate) struct Series(Vec<Duration>);

impl Series {
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    pub(crate) fn extend(&mut self, other: &Self) {
        self.0.extend_from_slice(&other.0);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The value below which `share` (0 to 1) of the times lie. Zero for an empty series.
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1);
        let index = (0..=last).find(|index| *index as f64 >= share * last as f64).unwrap_or(last);
        sorted.get(index).copied().unwrap_or_default()
    }

    pub(crate) fn median(&self) -> Duration {
        self.quantile(0.5)
    }

    pub(crate) fn min(&self) -> Duration {
        self.quantile(0.0)
    }

    pub(crate) fn max(&self) -> Duration {
        self.quantile(1.0)
    }

    /// A row of a table: median, least and most, in milliseconds.
    pub(crate) fn print(&self, name: &str) {
        let [median, min, max] = [self.median(), self.min(), self.max()].map(crate::millis);
        println!("| {name} | {median:.1} | {min:.1} | {max:.1} |");
    }

    /// How many times longer the median of this one is.
    pub(crate) fn ratio(&self, other: &Self) -> f64 {
        self.median().as_secs_f64() / other.median().as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_a_known_series() {
        let mut series = Series::default();
        for millis in [5, 1, 4, 2, 3] {
            series.push(Duration::from_millis(millis));
        }
        assert_eq!(series.median(), Duration::from_millis(3));
        assert_eq!(series.min(), Duration::from_millis(1));
        assert_eq!(series.max(), Duration::from_millis(5));
        assert_eq!(series.len(), 5);
    }
}
