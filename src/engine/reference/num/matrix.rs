//! Weight matrices and their product with a batch of vectors.

use super::blocks::BlockKind;
use super::kernels::dot_tile;
use super::narrow::{bf16_to_f32, f16_to_f32};
use rayon::prelude::*;
use std::sync::Arc;

/// Who computes: the calling thread, or a pool of the engine's own.
///
/// Work is split by *outputs*, each made by one thread in one order, so results do not depend on
/// the number of threads.
#[derive(Clone)]
pub(crate) struct Threads(Option<Arc<rayon::ThreadPool>>, usize);

impl Threads {
    /// A pool of `n` threads; none for 0 or 1.
    pub(crate) fn new(n: usize) -> Result<Self, String> {
        if n <= 1 {
            return Ok(Self(None, 1));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(n)
            .thread_name(|i| format!("engine-math-{i}"))
            .build()
            .map_err(|e| format!("cannot start {n} threads: {e}"))?;
        Ok(Self(Some(Arc::new(pool)), n))
    }

    /// Runs `f` where [`Self::split`] is cheap.
    pub(crate) fn enter<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.0 {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }

    /// Calls `f(first item, items)` for runs of items of `len` elements that cover `out`.
    pub(crate) fn split<T: Send>(
        &self,
        out: &mut [T],
        len: usize,
        cost_per_item: usize,
        f: impl Fn(usize, &mut [T]) + Sync,
    ) {
        /// Below this many multiplications a hand-over costs more than it brings.
        const WORTH_A_THREAD: usize = 1 << 16;
        let items = out.len() / len.max(1);
        if self.1 <= 1 || items < 2 || items * cost_per_item < 2 * WORTH_A_THREAD {
            f(0, out);
            return;
        }
        let per_part = (WORTH_A_THREAD / cost_per_item.max(1))
            .max(items.div_ceil(self.1 * 4))
            .max(1);
        out.par_chunks_mut(per_part * len)
            .enumerate()
            .for_each(|(i, part)| f(i * per_part, part));
    }
}

/// Runs `op` with the widest SIMD of this machine; bits do not depend on which that is.
#[inline]
pub(crate) fn with_simd<R>(op: impl pulp::NullaryFnOnce<Output = R>) -> R {
    pulp::Arch::new().dispatch(op)
}

/// How weights rest in memory. Their f32 values are the same in every form.
#[derive(Debug, Clone, PartialEq)]
enum Storage {
    F32(Vec<f32>),
    F16(Vec<u16>),
    Bf16(Vec<u16>),
    Blocks(BlockKind, Vec<u8>),
}

/// A row-major matrix of weights: `rows` outputs from `cols` inputs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Matrix {
    rows: usize,
    cols: usize,
    storage: Storage,
}

impl Matrix {
    /// From f32 values, `rows * cols` of them.
    pub(crate) fn from_f32(rows: usize, cols: usize, values: Vec<f32>) -> Self {
        assert_eq!(values.len(), rows * cols, "matrix of {rows} x {cols}");
        Self {
            rows,
            cols,
            storage: Storage::F32(values),
        }
    }

    /// From f16 (`bf16 = false`) or bf16 bits.
    pub(crate) fn from_half(rows: usize, cols: usize, bits: Vec<u16>, bf16: bool) -> Self {
        assert_eq!(bits.len(), rows * cols, "matrix of {rows} x {cols}");
        let storage = if bf16 {
            Storage::Bf16(bits)
        } else {
            Storage::F16(bits)
        };
        Self {
            rows,
            cols,
            storage,
        }
    }

    /// From quantized blocks; `cols` is a multiple of the block length.
    pub(crate) fn from_blocks(rows: usize, cols: usize, kind: BlockKind, bytes: Vec<u8>) -> Self {
        assert_eq!(cols % super::blocks::BLOCK, 0, "whole blocks");
        assert_eq!(
            bytes.len(),
            rows * (cols / super::blocks::BLOCK) * kind.bytes(),
            "matrix of {rows} x {cols}"
        );
        Self {
            rows,
            cols,
            storage: Storage::Blocks(kind, bytes),
        }
    }

    /// Inputs.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// One row as f32.
    #[inline(always)]
    pub(crate) fn row_into(&self, row: usize, out: &mut [f32]) {
        let (from, to) = (row * self.cols, (row + 1) * self.cols);
        match &self.storage {
            Storage::F32(w) => out.copy_from_slice(&w[from..to]),
            Storage::F16(w) => {
                for (o, b) in out.iter_mut().zip(&w[from..to]) {
                    *o = f16_to_f32(*b);
                }
            }
            Storage::Bf16(w) => {
                for (o, b) in out.iter_mut().zip(&w[from..to]) {
                    *o = bf16_to_f32(*b);
                }
            }
            Storage::Blocks(kind, bytes) => {
                let row_bytes = self.cols / super::blocks::BLOCK * kind.bytes();
                kind.decode(&bytes[row * row_bytes..(row + 1) * row_bytes], out);
            }
        }
    }

    /// `out[t] = self * x[t]` for `n` vectors; `x` is n x cols, `out` becomes n x rows.
    pub(crate) fn mul(&self, threads: &Threads, x: &[f32], n: usize, out: &mut Vec<f32>) {
        debug_assert_eq!(x.len(), n * self.cols);
        if n == 1 {
            out.clear();
            out.resize(self.rows, 0.0);
            threads.split(out, 1, self.cols, |first, part| {
                with_simd(Product {
                    m: self,
                    x,
                    n,
                    first,
                    out: part,
                });
            });
            return;
        }
        let mut columns = vec![0.0; n * self.rows];
        threads.split(&mut columns, n, n * self.cols, |first, part| {
            with_simd(Product {
                m: self,
                x,
                n,
                first,
                out: part,
            });
        });
        out.clear();
        out.resize(n * self.rows, 0.0);
        threads.split(out, self.rows, self.rows, |first, part| {
            for (i, vector) in part.chunks_exact_mut(self.rows).enumerate() {
                for (row, o) in vector.iter_mut().enumerate() {
                    *o = columns[row * n + first + i];
                }
            }
        });
    }
}

/// Rows `first..` of a matrix times all vectors, into `out` (rows x n).
struct Product<'a> {
    m: &'a Matrix,
    x: &'a [f32],
    n: usize,
    first: usize,
    out: &'a mut [f32],
}

impl pulp::NullaryFnOnce for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        const ROWS: usize = 4;
        let cols = self.m.cols;
        let n = self.n;
        let mut decoded = match &self.m.storage {
            Storage::F32(_) => Vec::new(),
            _ => vec![0.0f32; ROWS * cols],
        };
        for (group, out) in self.out.chunks_mut(ROWS * n).enumerate() {
            let first = self.first + group * ROWS;
            let count = out.len() / n;
            let rows: &[f32] = match &self.m.storage {
                Storage::F32(w) => &w[first * cols..(first + count) * cols],
                _ => {
                    for (i, row) in decoded.chunks_exact_mut(cols).take(count).enumerate() {
                        self.m.row_into(first + i, row);
                    }
                    &decoded[..count * cols]
                }
            };
            let row = |i: usize| &rows[i * cols..(i + 1) * cols];
            let vector = |t: usize| &self.x[t * cols..(t + 1) * cols];
            if count == ROWS {
                let four = [row(0), row(1), row(2), row(3)];
                let mut t = 0;
                // 4 x 2 is the largest tile that the compiler keeps in registers with 8 lanes as
                // well as with 16; 4 x 4 ran at a thirtieth of its rate.
                while t + 2 <= n {
                    let y = dot_tile::<4, 2>(four, [vector(t), vector(t + 1)]);
                    for r in 0..ROWS {
                        out[r * n + t..r * n + t + 2].copy_from_slice(&y[r]);
                    }
                    t += 2;
                }
                while t < n {
                    let y = dot_tile::<4, 1>(four, [vector(t)]);
                    for r in 0..ROWS {
                        out[r * n + t] = y[r][0];
                    }
                    t += 1;
                }
            } else {
                for r in 0..count {
                    for t in 0..n {
                        out[r * n + t] = dot_tile::<1, 1>([row(r)], [vector(t)])[0][0];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32)
            .map(|i| {
                let h = (i ^ seed.wrapping_mul(77)).wrapping_mul(0x9e37_79b9);
                ((h ^ (h >> 15)) & 0xffff) as f32 / 65536.0 - 0.5
            })
            .collect()
    }

    #[test]
    fn a_product_has_the_same_bits_for_any_batch_and_any_number_of_threads() {
        let (rows, cols, n) = (1030, 96, 11);
        let m = Matrix::from_f32(rows, cols, noise(rows * cols, 1));
        let x = noise(n * cols, 2);
        let one = Threads::new(1).unwrap();
        let mut alone = Vec::new();
        for t in 0..n {
            let mut y = Vec::new();
            m.mul(&one, &x[t * cols..(t + 1) * cols], 1, &mut y);
            alone.extend(y);
        }
        for threads in [1, 2, 3] {
            let mut out = Vec::new();
            m.mul(&Threads::new(threads).unwrap(), &x, n, &mut out);
            assert_eq!(
                bytemuck::cast_slice::<_, u32>(&out),
                bytemuck::cast_slice::<_, u32>(&alone)
            );
        }
    }

    #[test]
    fn a_product_does_not_depend_on_how_weights_rest_in_memory() {
        let (rows, cols) = (9, 64);
        let bits: Vec<u16> = noise(rows * cols, 3)
            .iter()
            .map(|x| half::f16::from_f32(*x).to_bits())
            .collect();
        let values = bits.iter().map(|b| f16_to_f32(*b)).collect();
        let x = noise(cols, 4);
        let threads = Threads::new(1).unwrap();
        let (mut a, mut b) = (Vec::new(), Vec::new());
        Matrix::from_half(rows, cols, bits, false).mul(&threads, &x, 1, &mut a);
        Matrix::from_f32(rows, cols, values).mul(&threads, &x, 1, &mut b);
        assert_eq!(a, b);
    }
}
