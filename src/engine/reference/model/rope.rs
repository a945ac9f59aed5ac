//! Rotary position embedding from a table made once, in f64.

use super::super::num::{exp64, ln64, sin_cos64};

/// Cosines and sines of every (position, frequency).
pub(crate) struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// For `positions` positions and heads of `dim` elements.
    pub(crate) fn new(positions: usize, dim: usize, theta: f64) -> Self {
        let half = dim / 2;
        let step = ln64(theta) * 2.0 / dim as f64;
        let frequency: Vec<f64> = (0..half).map(|i| exp64(-step * i as f64)).collect();
        let mut cos = Vec::with_capacity(positions * half);
        let mut sin = Vec::with_capacity(positions * half);
        for p in 0..positions {
            for f in &frequency {
                let (s, c) = sin_cos64(p as f64 * f);
                cos.push(c as f32);
                sin.push(s as f32);
            }
        }
        Self { half, cos, sin }
    }

    /// Rotates one head at `position`. `adjacent`: pairs are (0, 1), (2, 3) ...; otherwise the
    /// first half pairs with the second.
    #[inline(always)]
    pub(crate) fn rotate(&self, head: &mut [f32], position: usize, adjacent: bool) {
        let at = position * self.half;
        let cos = &self.cos[at..at + self.half];
        let sin = &self.sin[at..at + self.half];
        if adjacent {
            for ((pair, c), s) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
                let (a, b) = (pair[0], pair[1]);
                pair[0] = a * c - b * s;
                pair[1] = a * s + b * c;
            }
        } else {
            let (first, second) = head.split_at_mut(self.half);
            for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                let (x, y) = (*a, *b);
                *a = x * c - y * s;
                *b = x * s + y * c;
            }
        }
    }
}
