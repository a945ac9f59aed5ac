//! A model without arithmetic: KV rows and logits are hashes of where they stand.
//!
//! For benchmarks with the KV geometry of a model too large to compute here. It goes through the
//! same scheduler, pool and adapter, and is as deterministic, so KV bytes and control state can be
//! compared after a migration; what it cannot show is that later tokens depend on the KV.

use super::super::config::{KvDtype, SyntheticGeometry};
use super::super::num::Threads;
use super::super::rng::mix64;
use super::super::tokenizer::toy;
use super::{Model, SeqInput, Shape, StepOutput};
use std::time::{Duration, Instant};

/// See the [module](self).
pub(crate) struct Synthetic {
    shape: Shape,
    seed: u64,
    step_time: Duration,
    dtype: KvDtype,
    threads: Threads,
}

impl Synthetic {
    /// A model of this geometry.
    pub(crate) fn new(
        geometry: SyntheticGeometry,
        seed: u64,
        step_time: Duration,
        dtype: KvDtype,
        max_context: usize,
        threads: Threads,
    ) -> Self {
        let shape = Shape {
            layers: geometry.layers as usize,
            kv_heads: geometry.kv_heads as usize,
            head_dim: geometry.head_dim as usize,
            vocab: toy::VOCAB,
            max_context,
        };
        Self {
            shape,
            seed,
            step_time,
            dtype,
            threads,
        }
    }
}

impl Model for Synthetic {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn reads_past(&self) -> bool {
        false
    }

    fn forward(&self, seqs: &[SeqInput<'_>], out: &mut StepOutput) {
        let began = Instant::now();
        let token_bytes = self.shape.token_bytes(self.dtype);
        let tokens: Vec<(usize, u32)> = seqs
            .iter()
            .flat_map(|s| s.tokens.iter().enumerate().map(|(i, t)| (s.start + i, *t)))
            .collect();
        out.kv.resize(tokens.len() * token_bytes, 0);
        self.threads.enter(|| {
            let (kv, len) = (&mut out.kv[..], token_bytes);
            self.threads.split(kv, len, len / 8, |first, part| {
                for (i, row) in part.chunks_exact_mut(token_bytes).enumerate() {
                    let (position, token) = tokens[first + i];
                    fill_kv(&self.shape, self.dtype, self.seed, position, token, row);
                }
            });
        });
        out.logits.clear();
        let mut decodes = false;
        for seq in seqs.iter().filter(|s| s.want_logits) {
            decodes = true;
            let position = (seq.start + seq.tokens.len()) as u64;
            let last = u64::from(seq.tokens.last().copied().unwrap_or(0));
            let key = mix64(self.seed ^ mix64(position << 32 | last));
            out.logits.extend((0..self.shape.vocab as u32).map(|token| {
                let bits = mix64(key.wrapping_add(u64::from(token))) >> 40;
                bits as f32 / (1 << 20) as f32 * toy::loudness(token)
            }));
        }
        if decodes && let Some(rest) = self.step_time.checked_sub(began.elapsed()) {
            std::thread::sleep(rest);
        }
    }
}

/// All K and V rows of one token, drawn from (seed, position, token); every element is in
/// +-[0.5, 1), so attention over it stays finite. `out` is one token of [`StepOutput::kv`].
pub(crate) fn fill_kv(
    shape: &Shape,
    dtype: KvDtype,
    seed: u64,
    position: usize,
    token: u32,
    out: &mut [u8],
) {
    let (keep, set) = match dtype {
        KvDtype::F32 => (0x807f_ffff_807f_ffff, 0x3f00_0000_3f00_0000),
        KvDtype::F16 => (0x83ff_83ff_83ff_83ff, 0x3800_3800_3800_3800),
        KvDtype::Bf16 => (0x807f_807f_807f_807f, 0x3f00_3f00_3f00_3f00_u64),
    };
    let row = shape.kv_dim() * dtype.bytes() as usize;
    let key = mix64(seed ^ mix64((position as u64) << 32 | u64::from(token)));
    for (i, row) in out.chunks_exact_mut(row).enumerate() {
        let mut state = mix64(key.wrapping_add(i as u64));
        for word in row.chunks_mut(8) {
            // Weyl sequence and one multiplication: fast, and no two rows alike.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let bits = (state ^ (state >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let bits = ((bits ^ (bits >> 32)) & keep) | set;
            word.copy_from_slice(&bits.to_le_bytes()[..word.len()]);
        }
    }
}

/// `n` token ids of plain words, drawn from a seed.
pub(crate) fn seeded_tokens(n: usize, vocab: usize, seed: u64) -> Vec<u32> {
    let words = toy::FIRST_WORD as usize..vocab.min(toy::VOCAB);
    (0..n as u64)
        .map(|i| {
            let draw = mix64(mix64(seed).wrapping_add(i)) as usize;
            (words.start + draw % words.len().max(1)) as u32
        })
        .collect()
}
