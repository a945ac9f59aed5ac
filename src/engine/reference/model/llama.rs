//! The Llama decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

use super::super::config::KvDtype;
use super::super::num::{
    Matrix, Threads, add_assign, encode_row, rms_norm, round_row, silu_mul, with_simd,
};
use super::attention::{Attend, MAX_RUN};
use super::rope::RopeTable;
use super::{Model, SeqInput, Shape, StepOutput, fill_kv};

/// Which elements of a head rotate together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RopePairs {
    /// Neighbours, as GGUF's `llama` stores them.
    Adjacent,
    /// First half with second half.
    #[allow(dead_code, reason = "other GGUF architectures pair halves")]
    Halves,
}

/// Weights of one layer.
pub(crate) struct Layer {
    pub attention_norm: Vec<f32>,
    pub q: Matrix,
    pub k: Matrix,
    pub v: Matrix,
    pub o: Matrix,
    pub ffn_norm: Vec<f32>,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

/// A whole model with its weights.
pub(crate) struct Llama {
    shape: Shape,
    heads: usize,
    width: usize,
    eps: f32,
    pairs: RopePairs,
    rope: RopeTable,
    embedding: Matrix,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// `None`: tied to the embedding.
    head: Option<Matrix>,
    dtype: KvDtype,
    threads: Threads,
}

/// The parts of a [`Llama`] besides its matrices.
pub(crate) struct LlamaSpec {
    pub shape: Shape,
    pub heads: usize,
    pub eps: f32,
    pub theta: f64,
    pub pairs: RopePairs,
    pub dtype: KvDtype,
    pub threads: Threads,
}

impl Llama {
    /// Puts a model together. Callers have checked that the matrices fit the shape.
    pub(crate) fn new(
        spec: LlamaSpec,
        embedding: Matrix,
        layers: Vec<Layer>,
        norm: Vec<f32>,
        head: Option<Matrix>,
    ) -> Self {
        let rope = RopeTable::new(spec.shape.max_context, spec.shape.head_dim, spec.theta);
        Self {
            shape: spec.shape,
            heads: spec.heads,
            width: embedding.cols(),
            eps: spec.eps,
            pairs: spec.pairs,
            rope,
            embedding,
            layers,
            norm,
            head,
            dtype: spec.dtype,
            threads: spec.threads,
        }
    }

    /// Query heads.
    pub(crate) fn heads(&self) -> usize {
        self.heads
    }

    fn norm_rows(&self, x: &[f32], gain: &[f32], out: &mut Vec<f32>) {
        out.clear();
        out.resize(x.len(), 0.0);
        with_simd(NormRows {
            x,
            gain,
            eps: self.eps,
            out,
        });
    }

    fn compute(&self, seqs: &[SeqInput<'_>], places: &Places, out: &mut StepOutput) {
        let n = places.rows.len();
        let kv_dim = self.shape.kv_dim();
        let token_bytes = self.shape.token_bytes(self.dtype);
        let row_bytes = kv_dim * self.dtype.bytes() as usize;
        let adjacent = self.pairs == RopePairs::Adjacent;

        let mut x = vec![0.0; n * self.width];
        for (row, place) in x.chunks_exact_mut(self.width).zip(&places.rows) {
            self.embedding.row_into(place.token as usize, row);
        }
        let mut normed = Vec::new();
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        let (mut gate, mut up, mut y) = (Vec::new(), Vec::new(), Vec::new());
        let mut mixed = vec![0.0; n * self.heads * self.shape.head_dim];
        for (index, layer) in self.layers.iter().enumerate() {
            self.norm_rows(&x, &layer.attention_norm, &mut normed);
            layer.q.mul(&self.threads, &normed, n, &mut q);
            layer.k.mul(&self.threads, &normed, n, &mut k);
            layer.v.mul(&self.threads, &normed, n, &mut v);
            with_simd(|| {
                for (t, place) in places.rows.iter().enumerate() {
                    let q = &mut q[t * self.heads * self.shape.head_dim..]
                        [..self.heads * self.shape.head_dim];
                    for head in q.chunks_exact_mut(self.shape.head_dim) {
                        self.rope.rotate(head, place.position, adjacent);
                    }
                    let k = &mut k[t * kv_dim..(t + 1) * kv_dim];
                    for head in k.chunks_exact_mut(self.shape.head_dim) {
                        self.rope.rotate(head, place.position, adjacent);
                    }
                }
                round_row(self.dtype, &mut k);
                round_row(self.dtype, &mut v);
                for (t, place) in places.rows.iter().enumerate() {
                    let at = place.out * token_bytes + index * 2 * row_bytes;
                    let (ko, vo) = out.kv[at..at + 2 * row_bytes].split_at_mut(row_bytes);
                    encode_row(self.dtype, &k[t * kv_dim..(t + 1) * kv_dim], ko);
                    encode_row(self.dtype, &v[t * kv_dim..(t + 1) * kv_dim], vo);
                }
            });
            self.attend(seqs, places, index, (&q, &k, &v), &mut mixed);
            layer.o.mul(&self.threads, &mixed, n, &mut y);
            add_assign(&mut x, &y);
            self.norm_rows(&x, &layer.ffn_norm, &mut normed);
            layer.gate.mul(&self.threads, &normed, n, &mut gate);
            layer.up.mul(&self.threads, &normed, n, &mut up);
            with_simd(|| silu_mul(&mut gate, &up));
            layer.down.mul(&self.threads, &gate, n, &mut y);
            add_assign(&mut x, &y);
        }
        let mut last = Vec::with_capacity(places.logits.len() * self.width);
        for row in &places.logits {
            last.extend_from_slice(&x[row * self.width..(row + 1) * self.width]);
        }
        if !last.is_empty() {
            self.norm_rows(&last, &self.norm, &mut normed);
            let head = self.head.as_ref().unwrap_or(&self.embedding);
            head.mul(&self.threads, &normed, places.logits.len(), &mut out.logits);
        }
    }

    /// The logits after every token of one text: `[token][vocabulary]`.
    #[cfg(test)]
    pub(crate) fn every_logit(&self, tokens: &[u32]) -> Vec<f32> {
        let mut out = StepOutput::default();
        out.kv
            .resize(tokens.len() * self.shape.token_bytes(self.dtype), 0);
        let seq = SeqInput {
            tokens,
            start: 0,
            past: None,
            want_logits: false,
            fill: None,
        };
        let places = Places {
            logits: (0..tokens.len()).collect(),
            ..Places::of(std::slice::from_ref(&seq))
        };
        self.threads
            .enter(|| self.compute(&[seq], &places, &mut out));
        out.logits
    }

    fn attend(
        &self,
        seqs: &[SeqInput<'_>],
        places: &Places,
        layer: usize,
        (q, k, v): (&[f32], &[f32], &[f32]),
        mixed: &mut [f32],
    ) {
        let kv_heads = self.shape.kv_heads;
        let head_dim = self.shape.head_dim;
        let kv_dim = self.shape.kv_dim();
        let group = self.heads / kv_heads * head_dim;
        let width = self.heads * head_dim;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let n = places.rows.len();
        let positions = places.rows.iter().map(|p| p.position + 1).sum::<usize>();
        let cost = 2 * group * positions.div_ceil(n.max(1));
        // By kv head, then by token: consecutive tokens share the reading of their past.
        let mut by_head = vec![0.0; mixed.len()];
        self.threads
            .split(&mut by_head, group, cost, |first, part| {
                let mut done = 0;
                while done * group < part.len() {
                    let (kv_head, t) = ((first + done) / n, (first + done) % n);
                    let place = &places.rows[t];
                    let left = part.len() / group - done;
                    let run = places.rows[t..]
                        .iter()
                        .take(left.min(MAX_RUN))
                        .take_while(|p| p.seq == place.seq)
                        .count();
                    let mut heads = [&[][..]; MAX_RUN];
                    for (i, q_of) in heads.iter_mut().enumerate().take(run) {
                        *q_of = &q[(t + i) * width + kv_head * group..][..group];
                    }
                    let seq = &seqs[place.seq];
                    let from = t - (place.position - seq.start);
                    with_simd(Attend {
                        first: place.position,
                        q: &heads[..run],
                        past: seq.past,
                        new_k: &k[from * kv_dim..(t + run) * kv_dim],
                        new_v: &v[from * kv_dim..(t + run) * kv_dim],
                        kv_dim,
                        layer,
                        kv_head,
                        head_dim,
                        scale,
                        dtype: self.dtype,
                        out: &mut part[done * group..(done + run) * group],
                    });
                    done += run;
                }
            });
        for (t, row) in mixed.chunks_exact_mut(width).enumerate() {
            for (kv_head, o) in row.chunks_exact_mut(group).enumerate() {
                let at = (kv_head * n + t) * group;
                o.copy_from_slice(&by_head[at..at + group]);
            }
        }
    }
}

impl Model for Llama {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn forward(&self, seqs: &[SeqInput<'_>], out: &mut StepOutput) {
        let tokens: usize = seqs.iter().map(|s| s.tokens.len()).sum();
        let token_bytes = self.shape.token_bytes(self.dtype);
        out.kv.clear();
        out.kv.resize(tokens * token_bytes, 0);
        out.logits.clear();
        let mut at = 0;
        for seq in seqs {
            if let Some(seed) = seq.fill {
                for (i, token) in seq.tokens.iter().enumerate() {
                    let row = &mut out.kv[(at + i) * token_bytes..][..token_bytes];
                    fill_kv(&self.shape, self.dtype, seed, seq.start + i, *token, row);
                }
            }
            at += seq.tokens.len();
        }
        if seqs.iter().any(|s| s.fill.is_none()) {
            let places = Places::of(seqs);
            self.threads.enter(|| self.compute(seqs, &places, out));
        }
    }
}

/// One row of the batch.
struct Place {
    seq: usize,
    position: usize,
    token: u32,
    /// Which token of the batch it is, filled ones counted.
    out: usize,
}

struct Places {
    rows: Vec<Place>,
    /// Rows whose logits are wanted.
    logits: Vec<usize>,
}

impl Places {
    fn of(seqs: &[SeqInput<'_>]) -> Self {
        let mut rows = Vec::new();
        let mut logits = Vec::new();
        let mut out = 0;
        for (seq, input) in seqs.iter().enumerate() {
            if input.fill.is_none() {
                for (i, token) in input.tokens.iter().enumerate() {
                    rows.push(Place {
                        seq,
                        position: input.start + i,
                        token: *token,
                        out: out + i,
                    });
                }
                if input.want_logits {
                    logits.push(rows.len() - 1);
                }
            }
            out += input.tokens.len();
        }
        Self { rows, logits }
    }
}

struct NormRows<'a> {
    x: &'a [f32],
    gain: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl pulp::NullaryFnOnce for NormRows<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let width = self.gain.len();
        let rows = self.x.chunks_exact(width);
        for (x, o) in rows.zip(self.out.chunks_exact_mut(width)) {
            rms_norm(x, self.gain, self.eps, o);
        }
    }
}
