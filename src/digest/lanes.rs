//! BLAKE3 with its SIMD lanes laid *across* leaves.
//!
//! The crate's own `update` spreads the chunks of one input over lanes, so short inputs leave lanes
//! idle: leaves of 8 KiB reach 0.7 of its best rate and of 512 B 0.2. Chunk `i` of sixteen leaves
//! fills sixteen lanes whatever the leaf length. `blake3::platform` is doc-hidden, hence the pinned
//! version; tests compare every length with `blake3::keyed_hash`.

use super::simd::Avx512;

use blake3::IncrementCounter;
use blake3::platform::{Platform, words_from_le_bytes_32};

/// Leaves hashed side by side: the widest vector unit's lane count. Narrower units take several
/// passes over the same 16 KiB, which stay in the first-level cache.
pub(super) const LANES: usize = 16;
pub(super) const CHUNK: usize = 1024;
const BLOCK: usize = 64;
const OUT: usize = 32;

pub(super) const CHUNK_START: u8 = 1;
pub(super) const CHUNK_END: u8 = 2;
pub(super) const PARENT: u8 = 4;
pub(super) const ROOT: u8 = 8;
pub(super) const KEYED: u8 = 16;

/// Chaining values or digests of up to [`LANES`] leaves.
pub(super) type Values = [u8; LANES * OUT];

/// Leaf hashing under one key on this machine's vector unit.
#[derive(Clone, Copy)]
pub(super) struct Lanes {
    platform: Platform,
    key: [u32; 8],
}

impl Lanes {
    pub(super) fn new(key: &[u8; 32]) -> Self {
        Self {
            platform: Platform::detect(),
            key: words_from_le_bytes_32(key),
        }
    }

    /// The kernel that reads rows in place, where this machine has it.
    pub(super) fn in_place(&self) -> Option<Avx512> {
        Avx512::detect(self.key)
    }

    /// Chunk number `counter` of each input: each at least `len` (1 to [`CHUNK`]) bytes, of which
    /// `len` are hashed. `root` if it is the leaf's only chunk.
    pub(super) fn chunks(
        &self,
        inputs: &[&[u8]],
        len: usize,
        counter: u64,
        root: bool,
        out: &mut [u8],
    ) {
        let end = if root { CHUNK_END | ROOT } else { CHUNK_END };
        let rest = len % BLOCK;
        if rest == 0 {
            self.blocks(inputs, len / BLOCK, counter, CHUNK_START, end, out);
            return;
        }
        // A last block that is not full has a length of its own in BLAKE3, which the lane function
        // cannot express: whole blocks go through lanes, the last one does not.
        let whole = len / BLOCK;
        if whole > 0 {
            self.blocks(inputs, whole, counter, CHUNK_START, 0, out);
        }
        for (input, cv) in inputs.iter().zip(out.as_chunks_mut::<OUT>().0) {
            let mut words = if whole > 0 {
                words_from_le_bytes_32(cv)
            } else {
                self.key
            };
            let mut block = [0; BLOCK];
            block[..rest].copy_from_slice(&input[whole * BLOCK..len]);
            let flags = KEYED | end | if whole == 0 { CHUNK_START } else { 0 };
            self.platform
                .compress_in_place(&mut words, &block, rest as u8, counter, flags);
            for (bytes, word) in cv.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                *bytes = word.to_le_bytes();
            }
        }
    }

    /// Parents of `left[i]` and `right[i]`, into `right`.
    pub(super) fn parents(&self, left: &[u8], right: &mut [u8], root: bool) {
        debug_assert_eq!(left.len(), right.len());
        let mut nodes = [[0u8; BLOCK]; LANES];
        let lanes = left
            .as_chunks::<OUT>()
            .0
            .iter()
            .zip(right.as_chunks::<OUT>().0);
        let mut n = 0;
        for (node, (l, r)) in nodes.iter_mut().zip(lanes) {
            node[..OUT].copy_from_slice(l);
            node[OUT..].copy_from_slice(r);
            n += 1;
        }
        let refs: [&[u8; BLOCK]; LANES] = std::array::from_fn(|i| &nodes[i]);
        let end = if root { ROOT } else { 0 };
        let (no, flags) = (IncrementCounter::No, KEYED | PARENT);
        self.platform
            .hash_many(&refs[..n], &self.key, 0, no, flags, 0, end, right);
    }

    fn blocks(
        &self,
        inputs: &[&[u8]],
        blocks: usize,
        counter: u64,
        start: u8,
        end: u8,
        out: &mut [u8],
    ) {
        macro_rules! by_size {
            ($($n:literal)*) => {
                match blocks {
                    $($n => self.many::<{ $n * BLOCK }>(inputs, counter, start, end, out),)*
                    _ => unreachable!("a chunk has 1 to 16 blocks"),
                }
            };
        }
        by_size!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16)
    }

    fn many<const N: usize>(
        &self,
        inputs: &[&[u8]],
        counter: u64,
        start: u8,
        end: u8,
        out: &mut [u8],
    ) {
        debug_assert!(inputs.len() <= LANES);
        let mut refs: [&[u8; N]; LANES] = [&[0; N]; LANES];
        for (fixed, input) in refs.iter_mut().zip(inputs) {
            *fixed = input
                .first_chunk()
                .expect("inputs are as long as the chunk");
        }
        let refs = &refs[..inputs.len()];
        let no = IncrementCounter::No;
        self.platform
            .hash_many(refs, &self.key, counter, no, KEYED, start, end, out);
    }
}

/// The chaining values of the left edge of [`LANES`] trees that grow in step.
pub(super) struct Stack {
    levels: Vec<Values>,
    depth: usize,
}

impl Stack {
    /// For leaves of up to `chunks` chunks.
    pub(super) fn new(chunks: usize) -> Self {
        let levels = chunks.max(1).ilog2() as usize + 1;
        Self {
            levels: vec![[0; LANES * OUT]; levels],
            depth: 0,
        }
    }

    pub(super) fn clear(&mut self) {
        self.depth = 0;
    }

    /// Adds the values of chunk number `counter`, which is not the last one.
    pub(super) fn push(&mut self, lanes: &Lanes, counter: u64, values: &mut Values, n: usize) {
        let mut total = counter + 1;
        while total & 1 == 0 {
            self.depth -= 1;
            lanes.parents(
                &self.levels[self.depth][..n * OUT],
                &mut values[..n * OUT],
                false,
            );
            total >>= 1;
        }
        self.levels[self.depth][..n * OUT].copy_from_slice(&values[..n * OUT]);
        self.depth += 1;
    }

    /// Turns the values of the last chunk into digests. With an empty stack they already are.
    pub(super) fn finish(&self, lanes: &Lanes, values: &mut Values, n: usize) {
        for depth in (0..self.depth).rev() {
            lanes.parents(
                &self.levels[depth][..n * OUT],
                &mut values[..n * OUT],
                depth == 0,
            );
        }
    }
}
