//! Counter-based randomness: the state is (seed, draws), so it moves in sixteen bytes.

/// The finalizer of splitmix64: a bijection that scatters every bit.
#[inline(always)]
pub(crate) fn mix64(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Philox 4x32-10 (Salmon et al., 2011): draw `n` is a pure function of (seed, n).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CounterRng {
    /// Key; fixed at admission.
    pub seed: u64,
    /// Draws made so far.
    pub draws: u64,
}

impl CounterRng {
    /// The next number, uniform in `[0, 1)` with 53 bits.
    pub(crate) fn uniform(&mut self) -> f64 {
        let block = philox(
            [self.draws as u32, (self.draws >> 32) as u32, 0, 0],
            [self.seed as u32, (self.seed >> 32) as u32],
        );
        self.draws += 1;
        let bits = u64::from(block[0]) << 32 | u64::from(block[1]);
        (bits >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn philox(mut c: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xd251_1f53;
        let b = u64::from(c[2]) * 0xcd9e_8d57;
        c = [
            (b >> 32) as u32 ^ c[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ c[3] ^ key[1],
            a as u32,
        ];
        key[0] = key[0].wrapping_add(0x9e37_79b9);
        key[1] = key[1].wrapping_add(0xbb67_ae85);
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_meets_its_published_vectors() {
        // From Random123's kat_vectors.
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn a_draw_depends_on_seed_and_count_alone() {
        let mut a = CounterRng { seed: 9, draws: 0 };
        let all: Vec<f64> = (0..8).map(|_| a.uniform()).collect();
        let mut b = CounterRng { seed: 9, draws: 5 };
        assert_eq!(b.uniform(), all[5]);
        let mut c = CounterRng { seed: 10, draws: 5 };
        assert_ne!(c.uniform(), all[5]);
        assert!(all.iter().all(|x| (0.0..1.0).contains(x)));
    }
}
