//! Weights drawn from a seed: the same on every machine, no download.

use super::super::config::{KvDtype, SeededSize};
use super::super::num::{Matrix, Threads};
use super::super::rng::mix64;
use super::super::tokenizer::toy;
use super::llama::LlamaSpec;
use super::{Layer, Llama, RopePairs, Shape};

/// Builds the model of a size. It is untied: a tied random head would answer every token with
/// itself.
pub(crate) fn seeded_llama(
    size: SeededSize,
    seed: u64,
    dtype: KvDtype,
    max_context: usize,
    threads: Threads,
) -> Llama {
    let (layers, width, heads, kv_heads, head_dim, ffn) = match size {
        SeededSize::Tiny => (4, 128, 4, 2, 32, 352),
        SeededSize::Small => (8, 256, 8, 4, 32, 704),
        SeededSize::Medium => (12, 512, 8, 4, 64, 1408),
    };
    let shape = Shape {
        layers,
        kv_heads,
        head_dim,
        vocab: toy::VOCAB,
        max_context,
    };
    let mut tensor = Draw { seed, tensor: 0 };
    let unit = (3.0 / width as f32).sqrt();
    let embedding = tensor.matrix(toy::VOCAB, width, 1.0);
    let all = (0..layers)
        .map(|_| Layer {
            attention_norm: vec![1.0; width],
            // Sharper than at random, so that attention looks at something.
            q: tensor.matrix(heads * head_dim, width, 2.0 * unit),
            k: tensor.matrix(kv_heads * head_dim, width, 2.0 * unit),
            v: tensor.matrix(kv_heads * head_dim, width, unit),
            o: tensor.matrix(width, heads * head_dim, unit),
            ffn_norm: vec![1.0; width],
            gate: tensor.matrix(ffn, width, unit),
            up: tensor.matrix(ffn, width, unit),
            down: tensor.matrix(width, ffn, (3.0 / ffn as f32).sqrt()),
        })
        .collect();
    let mut head = tensor.values(toy::VOCAB, width, 2.5 * unit);
    for (token, row) in head.chunks_exact_mut(width).enumerate() {
        // Words come more readily than raw bytes, so that output can be read.
        let gain = toy::loudness(token as u32);
        row.iter_mut().for_each(|w| *w *= gain);
    }
    let spec = LlamaSpec {
        shape,
        heads,
        eps: 1e-5,
        theta: 10_000.0,
        pairs: RopePairs::Adjacent,
        dtype,
        threads,
    };
    let head = Matrix::from_f32(toy::VOCAB, width, head);
    Llama::new(spec, embedding, all, vec![1.0; width], Some(head))
}

struct Draw {
    seed: u64,
    tensor: u64,
}

impl Draw {
    /// Uniform in `-scale..scale`.
    fn values(&mut self, rows: usize, cols: usize, scale: f32) -> Vec<f32> {
        self.tensor += 1;
        let key = mix64(self.seed ^ mix64(self.tensor));
        (0..(rows * cols) as u64)
            .map(|i| {
                let bits = mix64(key.wrapping_add(i)) >> 40;
                (bits as f32 / (1 << 23) as f32 - 1.0) * scale
            })
            .collect()
    }

    fn matrix(&mut self, rows: usize, cols: usize, scale: f32) -> Matrix {
        Matrix::from_f32(rows, cols, self.values(rows, cols, scale))
    }
}
