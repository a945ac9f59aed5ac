//! Attention of a run of tokens and one group of query heads over past and new KV.
//!
//! KV is read in tiles of [`LANES`] consecutive positions, counted from the start of the request. A
//! score is summed over the head's elements in order, one lane for each position; a value is summed
//! over positions in order. So neither block size, block order, layout, nor the split into chunks
//! and runs shows in a bit of the result.

use super::super::config::KvDtype;
use super::super::num::{LANES, decode_row, softmax_in_place};
use super::PastKv;

/// Longest head, in elements.
pub(crate) const MAX_HEAD_DIM: usize = 256;
/// Most query heads of one kv head.
pub(crate) const MAX_GROUP: usize = 64;
/// Most tokens that share the reading of a tile.
pub(crate) const MAX_RUN: usize = 8;

/// The query heads that share a kv head, for consecutive tokens of one request.
pub(crate) struct Attend<'a> {
    /// Position of the first token.
    pub first: usize,
    /// `[token]`: its query heads of the group, `[query head][head_dim]`.
    pub q: &'a [&'a [f32]],
    /// KV of earlier steps.
    pub past: Option<PastKv<'a>>,
    /// Rows of this step's tokens of the request, up to and with the last one of the run:
    /// `[token][kv_dim]`, rounded to the pool's dtype.
    pub new_k: &'a [f32],
    pub new_v: &'a [f32],
    pub kv_dim: usize,
    pub layer: usize,
    pub kv_head: usize,
    pub head_dim: usize,
    pub scale: f32,
    pub dtype: KvDtype,
    /// `[token][query head of the group][head_dim]`.
    pub out: &'a mut [f32],
}

impl Attend<'_> {
    /// Calls `f(lane, row)` for each of the positions `from..to` of one tile.
    #[inline(always)]
    fn rows(&self, component: usize, from: usize, to: usize, mut f: impl FnMut(usize, &[f32])) {
        let past_len = self.past.as_ref().map_or(0, |p| p.len);
        let mut position = from;
        if let Some(past) = &self.past {
            let mut decoded = [0.0f32; MAX_HEAD_DIM];
            let decoded = &mut decoded[..self.head_dim];
            let per_block = past.block_tokens();
            while position < to.min(past_len) {
                let window = past.window(self.layer, component, position / per_block);
                let end = (position / per_block + 1) * per_block;
                while position < end.min(to).min(past_len) {
                    let row = window.row(position % per_block, self.kv_head);
                    decode_row(self.dtype, row, decoded);
                    f(position - from, decoded);
                    position += 1;
                }
            }
        }
        let new = if component == 0 {
            self.new_k
        } else {
            self.new_v
        };
        while position < to {
            let at = (position - past_len) * self.kv_dim + self.kv_head * self.head_dim;
            f(position - from, &new[at..at + self.head_dim]);
            position += 1;
        }
    }
}

impl pulp::NullaryFnOnce for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn call(mut self) {
        let dim = self.head_dim;
        let run = self.q.len();
        let group = self.q[0].len() / dim;
        let queries = run * group;
        let positions = self.first + run;
        let stride = positions.next_multiple_of(LANES);
        let mut scores = vec![0.0f32; queries * stride];

        let mut keys = [[0.0f32; LANES]; MAX_HEAD_DIM];
        for tile in (0..positions).step_by(LANES) {
            // Element by element, a lane for each position; lanes past the end stay unused.
            self.rows(0, tile, (tile + LANES).min(positions), |lane, row| {
                for (k, x) in keys.iter_mut().zip(row) {
                    k[lane] = *x;
                }
            });
            for (t, heads) in self.q.iter().enumerate() {
                if self.first + t < tile {
                    continue;
                }
                for (h, q) in heads.chunks_exact(dim).enumerate() {
                    let mut acc = [0.0f32; LANES];
                    for (q, k) in q.iter().zip(&keys) {
                        for l in 0..LANES {
                            acc[l] += q * k[l];
                        }
                    }
                    let at = (t * group + h) * stride + tile;
                    for (s, a) in scores[at..at + LANES].iter_mut().zip(acc) {
                        *s = a * self.scale;
                    }
                }
            }
        }

        let mut sums = [0.0f32; MAX_RUN * MAX_GROUP];
        for (i, row) in scores.chunks_exact_mut(stride).enumerate() {
            // A token sees itself and what is before it.
            let (seen, unseen) = row.split_at_mut(self.first + i / group + 1);
            sums[i] = softmax_in_place(seen);
            unseen.fill(0.0);
        }

        let out = std::mem::take(&mut self.out);
        out.fill(0.0);
        let mut values = [[0.0f32; MAX_HEAD_DIM]; LANES];
        for tile in (0..positions).step_by(LANES) {
            let lanes = LANES.min(positions - tile);
            self.rows(1, tile, tile + lanes, |lane, row| {
                values[lane][..dim].copy_from_slice(row);
            });
            for (i, o) in out.chunks_exact_mut(dim).enumerate() {
                let last = self.first + i / group;
                if last < tile {
                    continue;
                }
                let lanes = lanes.min(last + 1 - tile);
                let weights = &scores[i * stride + tile..i * stride + tile + lanes];
                accumulate(weights, &values, o);
            }
        }
        for (o, s) in out.chunks_exact_mut(dim).zip(sums) {
            let inverse = 1.0 / s;
            o.iter_mut().for_each(|o| *o *= inverse);
        }
    }
}

/// Adds `weights[lane] * values[lane]`, lane after lane.
#[inline(always)]
fn accumulate(weights: &[f32], values: &[[f32; MAX_HEAD_DIM]; LANES], out: &mut [f32]) {
    let (chunks, rest) = out.as_chunks_mut::<LANES>();
    let whole = chunks.len() * LANES;
    for (c, out) in chunks.iter_mut().enumerate() {
        let mut acc = *out;
        for (w, v) in weights.iter().zip(values) {
            for l in 0..LANES {
                acc[l] += w * v[c * LANES + l];
            }
        }
        *out = acc;
    }
    for (i, out) in rest.iter_mut().enumerate() {
        for (w, v) in weights.iter().zip(values) {
            *out += w * v[whole + i];
        }
    }
}
