//! Attention of one token and one group of query heads over past and new KV.
//!
//! Scores are made and summed by logical position, so neither block size, block order, layout nor
//! the split into chunks shows in a bit of the result.

use super::super::config::KvDtype;
use super::super::num::{decode_row, dot, softmax_in_place};
use super::PastKv;

/// Longest head, in elements.
pub(crate) const MAX_HEAD_DIM: usize = 256;

/// The query heads of one token that share a kv head.
pub(crate) struct Attend<'a> {
    /// `[query head of the group][head_dim]`.
    pub q: &'a [f32],
    /// KV of earlier steps.
    pub past: Option<PastKv<'a>>,
    /// Rows of this step's tokens of the request, up to and with this token:
    /// `[token][kv_dim]`, rounded to the pool's dtype.
    pub new_k: &'a [f32],
    pub new_v: &'a [f32],
    pub kv_dim: usize,
    pub layer: usize,
    pub kv_head: usize,
    pub head_dim: usize,
    pub scale: f32,
    pub dtype: KvDtype,
    /// `[query head of the group][head_dim]`.
    pub out: &'a mut [f32],
}

impl Attend<'_> {
    /// Calls `f(position, row)` for every position in order.
    #[inline(always)]
    fn rows(&self, component: usize, new: &[f32], mut f: impl FnMut(usize, &[f32])) {
        let mut position = 0;
        if let Some(past) = &self.past {
            let mut decoded = [0.0f32; MAX_HEAD_DIM];
            let decoded = &mut decoded[..self.head_dim];
            let per_block = past.block_tokens();
            for index in 0..past.len.div_ceil(per_block) {
                let window = past.window(self.layer, component, index);
                for slot in 0..per_block.min(past.len - position) {
                    decode_row(self.dtype, window.row(slot, self.kv_head), decoded);
                    f(position, decoded);
                    position += 1;
                }
            }
        }
        let at = self.kv_head * self.head_dim;
        for token in new.chunks_exact(self.kv_dim) {
            f(position, &token[at..at + self.head_dim]);
            position += 1;
        }
    }
}

impl pulp::NullaryFnOnce for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn call(mut self) {
        let past = self.past.as_ref().map_or(0, |p| p.len);
        let positions = past + self.new_k.len() / self.kv_dim;
        let mut scores = vec![0.0f32; positions * (self.q.len() / self.head_dim)];
        self.rows(0, self.new_k, |position, k| {
            for (head, q) in self.q.chunks_exact(self.head_dim).enumerate() {
                scores[head * positions + position] = dot(q, k) * self.scale;
            }
        });
        let mut sums = [0.0f32; 64];
        for (s, row) in sums.iter_mut().zip(scores.chunks_exact_mut(positions)) {
            *s = softmax_in_place(row);
        }
        let out = std::mem::take(&mut self.out);
        out.fill(0.0);
        self.rows(1, self.new_v, |position, v| {
            for (head, o) in out.chunks_exact_mut(self.head_dim).enumerate() {
                let weight = scores[head * positions + position];
                for (o, v) in o.iter_mut().zip(v) {
                    *o += weight * v;
                }
            }
        });
        for (o, s) in out.chunks_exact_mut(self.head_dim).zip(sums) {
            let inverse = 1.0 / s;
            o.iter_mut().for_each(|o| *o *= inverse);
        }
    }
}
