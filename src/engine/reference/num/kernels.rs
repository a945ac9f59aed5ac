//! Vector kernels: sums in [`LANES`] lanes, folded as a tree.

use super::elementary::exp32;

/// Partial sums of each reduction: element `i` goes to lane `i % LANES`.
pub(crate) const LANES: usize = 16;

/// Folds the lanes in a fixed tree.
#[inline(always)]
pub(crate) fn fold(mut acc: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            acc[l] += acc[l + width];
        }
        width /= 2;
    }
    acc[0]
}

/// Dot products of `R` rows with `T` vectors, all of one length. Each of the `R * T` results has
/// the bits it would have alone.
#[inline(always)]
pub(crate) fn dot_tile<const R: usize, const T: usize>(
    rows: [&[f32]; R],
    vectors: [&[f32]; T],
) -> [[f32; T]; R] {
    let len = rows[0].len();
    let whole = len / LANES * LANES;
    let mut acc = [[[0.0f32; LANES]; T]; R];
    let mut at = 0;
    while at < whole {
        let mut v = [[0.0f32; LANES]; T];
        for t in 0..T {
            v[t].copy_from_slice(&vectors[t][at..at + LANES]);
        }
        for r in 0..R {
            let mut w = [0.0f32; LANES];
            w.copy_from_slice(&rows[r][at..at + LANES]);
            for t in 0..T {
                for l in 0..LANES {
                    acc[r][t][l] += w[l] * v[t][l];
                }
            }
        }
        at += LANES;
    }
    if whole < len {
        // Padded with zeros rather than indexed: an accumulator that is indexed by a variable would
        // live in memory, at a fifth of the speed.
        let rest = |x: &[f32]| {
            let mut padded = [0.0f32; LANES];
            padded[..len - whole].copy_from_slice(&x[whole..len]);
            padded
        };
        for r in 0..R {
            let w = rest(rows[r]);
            for t in 0..T {
                let v = rest(vectors[t]);
                for l in 0..LANES {
                    acc[r][t][l] += w[l] * v[l];
                }
            }
        }
    }
    let mut out = [[0.0; T]; R];
    for r in 0..R {
        for t in 0..T {
            out[r][t] = fold(acc[r][t]);
        }
    }
    out
}

/// Dot product of two vectors of one length.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    dot_tile([a], [b])[0][0]
}

/// Sum of a vector.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for c in chunks.by_ref() {
        for l in 0..LANES {
            acc[l] += c[l];
        }
    }
    for (a, x) in acc.iter_mut().zip(chunks.remainder()) {
        *a += x;
    }
    fold(acc)
}

/// `out = x / rms(x) * gain`.
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
    let mean = dot(x, x) / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for ((o, x), g) in out.iter_mut().zip(x).zip(gain) {
        *o = x * scale * g;
    }
}

/// `gate = silu(gate) * up`.
#[inline(always)]
pub(crate) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = *g / (1.0 + exp32(-*g)) * u;
    }
}

/// Turns scores into weights `exp(s - max)`; returns their sum (not divided).
#[inline(always)]
pub(crate) fn softmax_in_place(scores: &mut [f32]) -> f32 {
    let mut max = f32::NEG_INFINITY;
    for s in scores.iter() {
        max = if *s > max { *s } else { max };
    }
    for s in scores.iter_mut() {
        *s = exp32(*s - max);
    }
    sum(scores)
}

/// `x += y`.
#[inline(always)]
pub(crate) fn add_assign(x: &mut [f32], y: &[f32]) {
    for (a, b) in x.iter_mut().zip(y) {
        *a += b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32)
            .map(|i| {
                let h = (i ^ seed).wrapping_mul(0x9e37_79b9);
                ((h ^ (h >> 15)) & 0xffff) as f32 / 65536.0 - 0.5
            })
            .collect()
    }

    #[test]
    fn a_dot_product_has_the_same_bits_alone_and_in_a_tile() {
        for len in [16, 64, 576, 100, 7] {
            let rows: Vec<_> = (0..4).map(|i| noise(len, i)).collect();
            let vecs: Vec<_> = (0..4).map(|i| noise(len, 100 + i)).collect();
            let tile: [[f32; 4]; 4] = dot_tile(
                std::array::from_fn(|i| &rows[i][..]),
                std::array::from_fn(|i| &vecs[i][..]),
            );
            for r in 0..4 {
                for t in 0..4 {
                    assert_eq!(tile[r][t].to_bits(), dot(&rows[r], &vecs[t]).to_bits());
                }
            }
        }
    }
}
