//! Whether the destination computes as the source did, and what may then be claimed.

use super::Refusal;
use std::collections::BTreeSet;

/// What decides the bits an engine computes: its build, and its numerics profile (attention
/// backend, KV dtype and scales, rotation, RoPE, sampler version, batch invariance).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint {
    /// Hash of the engine's build.
    pub engine_build: [u8; 32],
    /// Hash of its numerics profile.
    pub numerics_profile: [u8; 32],
}

/// What is claimed about a migrated request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Claim {
    /// State is equal, and what follows is equal bit for bit.
    BitExact,
    /// State is equal; what follows may differ in rounding.
    StateEqual,
}

/// The operator's list of source fingerprints that this destination may take over from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProfilePolicy {
    compatible: BTreeSet<Fingerprint>,
}

impl ProfilePolicy {
    /// Only the same build and profile is accepted.
    pub fn exact() -> Self {
        Self::default()
    }

    /// Also accepts these sources, with the weaker claim (a rolling upgrade, another TP degree).
    pub fn with_compatible(sources: impl IntoIterator<Item = Fingerprint>) -> Self {
        Self {
            compatible: sources.into_iter().collect(),
        }
    }

    /// Judges a source: equal is bit-exact, listed is state-equal, all else is refused.
    pub fn judge(&self, source: &Fingerprint, own: &Fingerprint) -> Result<Claim, Refusal> {
        if source == own {
            Ok(Claim::BitExact)
        } else if self.compatible.contains(source) {
            Ok(Claim::StateEqual)
        } else {
            Err(Refusal::ProfileMismatch)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_is_bit_exact_listed_is_state_equal_and_all_else_is_refused() {
        let own = Fingerprint {
            engine_build: [1; 32],
            numerics_profile: [2; 32],
        };
        let upgraded = Fingerprint {
            engine_build: [9; 32],
            ..own
        };
        let strange = Fingerprint {
            numerics_profile: [9; 32],
            ..own
        };
        let policy = ProfilePolicy::with_compatible([upgraded]);
        assert_eq!(policy.judge(&own, &own), Ok(Claim::BitExact));
        assert_eq!(policy.judge(&upgraded, &own), Ok(Claim::StateEqual));
        assert_eq!(policy.judge(&strange, &own), Err(Refusal::ProfileMismatch));
        let exact = ProfilePolicy::exact();
        assert_eq!(exact.judge(&upgraded, &own), Err(Refusal::ProfileMismatch));
    }
}
