//! Order statistics of samples, and ratios of interleaved rounds.

/// What is said about a set of durations, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Summary {
    /// Samples.
    pub n: u64,
    /// Smallest.
    pub min: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest.
    pub max: f64,
}

impl Summary {
    /// Sorts and summarizes; all zero for no samples.
    pub fn of(mut ns: Vec<u64>) -> Self {
        ns.sort_unstable();
        let at = |q: f64| percentile(&ns, q);
        Self {
            n: ns.len() as u64,
            min: at(0.0),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: at(1.0),
        }
    }
}

/// The `q` quantile of ascending samples by nearest rank, so that it is a value that occurred.
pub fn percentile(sorted: &[u64], q: f64) -> f64 {
    if sorted.is_empty() {
        return 0.0;
    }
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1] as f64
}

/// A 95 % interval of the `q` quantile by order statistics (normal approximation of the binomial):
/// no assumption about the distribution.
pub fn interval(sorted: &[u64], q: f64) -> (f64, f64) {
    let n = sorted.len() as f64;
    let half = 1.96 * (n * q * (1.0 - q)).sqrt();
    let at = |rank: f64| percentile(sorted, (rank / n.max(1.0)).clamp(0.0, 1.0));
    (at((n * q - half).floor()), at((n * q + half).ceil()))
}

/// The median of some figures; 0 for none.
pub fn median(mut xs: Vec<f64>) -> f64 {
    xs.sort_by(f64::total_cmp);
    match xs.len() {
        0 => 0.0,
        n if n % 2 == 1 => xs[n / 2],
        n => (xs[n / 2 - 1] + xs[n / 2]) / 2.0,
    }
}

/// Rounds of one case beside rounds of its ceiling, taken alternately.
#[derive(Debug, Clone, Default)]
pub struct Paired {
    rounds: Vec<(f64, f64)>,
}

impl Paired {
    /// One round of each.
    pub fn push(&mut self, ours: f64, ceiling: f64) {
        self.rounds.push((ours, ceiling));
    }

    /// How many.
    pub fn n(&self) -> u64 {
        self.rounds.len() as u64
    }

    /// The rounds: ours, ceiling.
    pub fn pairs(&self) -> &[(f64, f64)] {
        &self.rounds
    }

    /// Median of ours.
    pub fn ours(&self) -> f64 {
        median(self.rounds.iter().map(|r| r.0).collect())
    }

    /// Median of the ceiling.
    pub fn ceiling(&self) -> f64 {
        median(self.rounds.iter().map(|r| r.1).collect())
    }

    /// Median of the rounds' ratios: noise that lasts longer than a round hits both and cancels.
    pub fn ratio(&self) -> f64 {
        median(
            self.rounds
                .iter()
                .filter(|r| r.1 > 0.0)
                .map(|r| r.0 / r.1)
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred_and_include_both_ends() {
        let ns: Vec<u64> = (1..=200).collect();
        let s = Summary::of(ns.clone());
        assert_eq!(
            (s.n, s.min, s.p50, s.p99, s.max),
            (200, 1.0, 100.0, 198.0, 200.0)
        );
        let (lo, hi) = interval(&ns, 0.5);
        assert!(lo < 100.0 && hi > 100.0 && lo > 80.0 && hi < 120.0);
        assert_eq!(Summary::of(Vec::new()), Summary::default());
    }

    #[test]
    fn a_slow_spell_that_hits_both_leaves_the_ratio() {
        let mut p = Paired::default();
        for slow in [1.0, 1.0, 0.2, 0.2, 1.0] {
            p.push(0.9 * slow, slow);
        }
        assert!((p.ratio() - 0.9).abs() < 1e-9);
        assert_eq!(p.ours(), 0.9);
        assert_eq!(p.ceiling(), 1.0);
    }
}
