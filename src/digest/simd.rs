//! BLAKE3 over sixteen leaves at once, straight from where their rows lie. AVX-512 only; elsewhere
//! [`super::lanes`] does the same through the blake3 crate.
//!
//! The crate's `hash_many` wants each chunk contiguous, so rows must be copied together first, and
//! while it hashes nothing fetches the next rows, which lie scattered where no hardware prefetcher
//! foresees them: 0.6 of contiguous BLAKE3 in cold memory, 0.8 to 0.9 with hints between chunks.
//! This kernel takes a pointer per row, asks for the next rows between the blocks of these, and
//! loads a block while it compresses the one before: 1.0 to 1.05.
//!
//! The one room of unsafe code among the pure ones: loads from slices after their lengths were
//! checked, a store, and calls of functions compiled for AVX-512 after it was detected.

#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::lanes::{CHUNK_START, KEYED, LANES, PARENT, ROOT};

pub(super) const BLOCK: usize = 64;

const IV: [u32; 4] = [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a];

/// Proof that this machine has AVX-512, and the key words.
#[derive(Clone, Copy)]
pub(super) struct Avx512 {
    key: [u32; 8],
}

/// Word `i` of the chaining values of sixteen leaves is vector `i`.
#[derive(Clone, Copy)]
pub(super) struct Values([__m512i; 8]);

/// One block of each of sixteen leaves: vector `i` is its word `i`, lane by lane.
#[derive(Clone, Copy)]
pub(super) struct Words([__m512i; 16]);

/// A row, cut into blocks.
pub(super) type Row<'m> = &'m [[u8; BLOCK]];

impl Avx512 {
    pub(super) fn detect(key: [u32; 8]) -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self { key })
    }

    /// The values every chunk begins with.
    pub(super) fn start(&self) -> Values {
        // SAFETY: `self` exists only where AVX-512 was detected.
        unsafe { splat(&self.key) }
    }

    /// The first block of each of `rows`, ready for [`rows`](Self::rows).
    pub(super) fn load(&self, rows: &[Row<'_>; LANES]) -> Words {
        assert!(rows.iter().all(|row| !row.is_empty()));
        // SAFETY: `self` exists only where AVX-512 was detected.
        unsafe { load_words(rows) }
    }

    /// Compresses the blocks of one row per lane, all of `rows[0]`'s length, into `values`. `at` is
    /// the number of blocks of their chunk before them, `chunk` its number in the leaf; the last
    /// block gets `end` (0, or the chunk-end flag with or without the root flag).
    ///
    /// `words` are the first block of `rows` ([`load`](Self::load)) and become the first one of
    /// `soon`, the rows of the next call; these may be empty if there is none.
    pub(super) fn rows(
        &self,
        (values, words): (&mut Values, &mut Words),
        rows: &[Row<'_>; LANES],
        soon: &[Row<'_>; LANES],
        (chunk, at): (u32, usize),
        end: u8,
    ) {
        // SAFETY: `self` exists only where AVX-512 was detected.
        unsafe { compress_rows(values, words, rows, soon, chunk, at, end) }
    }

    /// Parents of `left` and `right`, lane by lane, into `right`.
    pub(super) fn parents(&self, left: &Values, right: &mut Values, root: bool) {
        // SAFETY: `self` exists only where AVX-512 was detected.
        unsafe { compress_parents(&self.key, left, right, root) }
    }
}

impl Values {
    /// The digests, lane by lane.
    pub(super) fn digests(&self) -> [[u8; 32]; LANES] {
        let mut out = [[0; 32]; LANES];
        for (i, vector) in self.0.iter().enumerate() {
            let mut words = [0u32; LANES];
            // SAFETY: a `Values` exists only where AVX-512 was detected; `words` is 64 bytes.
            unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), *vector) };
            for (digest, word) in out.iter_mut().zip(words) {
                digest[i * 4..][..4].copy_from_slice(&word.to_le_bytes());
            }
        }
        out
    }
}

#[target_feature(enable = "avx512f")]
fn splat(words: &[u32; 8]) -> Values {
    let mut out = [_mm512_setzero_si512(); 8];
    for i in 0..8 {
        out[i] = set(words[i]);
    }
    Values(out)
}

/// Half of four independent quarter-rounds over columns or diagonals, step by step so that they
/// overlap. Macros, because functions for a target feature cannot be forced inline, and everything
/// here must stay in registers.
macro_rules! half {
    ($v:ident, $m:ident, $d:literal, $b:literal,
     $(($ia:literal $ib:literal $ic:literal $id:literal $im:literal))*) => {
        $($v[$ia] = _mm512_add_epi32($v[$ia], $m[$im]);)*
        $($v[$ia] = _mm512_add_epi32($v[$ia], $v[$ib]);)*
        $($v[$id] = _mm512_ror_epi32::<$d>(_mm512_xor_si512($v[$id], $v[$ia]));)*
        $($v[$ic] = _mm512_add_epi32($v[$ic], $v[$id]);)*
        $($v[$ib] = _mm512_ror_epi32::<$b>(_mm512_xor_si512($v[$ib], $v[$ic]));)*
    };
}

/// One round; the literals are the round's order of message words.
macro_rules! round {
    ($v:ident, $m:ident, $s0:literal $s1:literal $s2:literal $s3:literal $s4:literal $s5:literal
     $s6:literal $s7:literal $s8:literal $s9:literal $s10:literal $s11:literal $s12:literal
     $s13:literal $s14:literal $s15:literal) => {
        half!($v, $m, 16, 12, (0 4 8 12 $s0) (1 5 9 13 $s2) (2 6 10 14 $s4) (3 7 11 15 $s6));
        half!($v, $m, 8, 7, (0 4 8 12 $s1) (1 5 9 13 $s3) (2 6 10 14 $s5) (3 7 11 15 $s7));
        half!($v, $m, 16, 12, (0 5 10 15 $s8) (1 6 11 12 $s10) (2 7 8 13 $s12) (3 4 9 14 $s14));
        half!($v, $m, 8, 7, (0 5 10 15 $s9) (1 6 11 12 $s11) (2 7 8 13 $s13) (3 4 9 14 $s15));
    };
}

/// The state before the first round.
macro_rules! start {
    ($cv:ident, $chunk:ident, $flags:ident) => {
        [
            $cv[0],
            $cv[1],
            $cv[2],
            $cv[3],
            $cv[4],
            $cv[5],
            $cv[6],
            $cv[7],
            set(IV[0]),
            set(IV[1]),
            set(IV[2]),
            set(IV[3]),
            set($chunk),
            _mm512_setzero_si512(),
            set(BLOCK as u32),
            set($flags.into()),
        ]
    };
}

/// First half of a 16 by 16 transposition, four rows at a time: 128-bit part `p` of
/// `tiles[first + j]` gets word `4 p + j` of block `n` of the rows `first .. first + 4`.
macro_rules! tile {
    ($tiles:ident, $first:literal, $rows:ident, $n:expr) => {
        // SAFETY: the callers checked that every row has a block `n`; unaligned loads are allowed.
        let [r0, r1, r2, r3] = unsafe {
            [
                _mm512_loadu_si512($rows[$first].get_unchecked($n).as_ptr().cast()),
                _mm512_loadu_si512($rows[$first + 1].get_unchecked($n).as_ptr().cast()),
                _mm512_loadu_si512($rows[$first + 2].get_unchecked($n).as_ptr().cast()),
                _mm512_loadu_si512($rows[$first + 3].get_unchecked($n).as_ptr().cast()),
            ]
        };
        let (a0, a1) = (_mm512_unpacklo_epi32(r0, r1), _mm512_unpackhi_epi32(r0, r1));
        let (a2, a3) = (_mm512_unpacklo_epi32(r2, r3), _mm512_unpackhi_epi32(r2, r3));
        $tiles[$first] = _mm512_unpacklo_epi64(a0, a2);
        $tiles[$first + 1] = _mm512_unpackhi_epi64(a0, a2);
        $tiles[$first + 2] = _mm512_unpacklo_epi64(a1, a3);
        $tiles[$first + 3] = _mm512_unpackhi_epi64(a1, a3);
    };
}

/// Second half: words `j`, `j + 4`, `j + 8` and `j + 12` of all rows, from the tiles `j` of each
/// four.
macro_rules! words {
    ($words:ident, $j:literal, $tiles:ident) => {
        let even_lo = _mm512_shuffle_i32x4::<0x88>($tiles[$j], $tiles[$j + 4]);
        let odd_lo = _mm512_shuffle_i32x4::<0xdd>($tiles[$j], $tiles[$j + 4]);
        let even_hi = _mm512_shuffle_i32x4::<0x88>($tiles[$j + 8], $tiles[$j + 12]);
        let odd_hi = _mm512_shuffle_i32x4::<0xdd>($tiles[$j + 8], $tiles[$j + 12]);
        $words[$j] = _mm512_shuffle_i32x4::<0x88>(even_lo, even_hi);
        $words[$j + 8] = _mm512_shuffle_i32x4::<0xdd>(even_lo, even_hi);
        $words[$j + 4] = _mm512_shuffle_i32x4::<0x88>(odd_lo, odd_hi);
        $words[$j + 12] = _mm512_shuffle_i32x4::<0xdd>(odd_lo, odd_hi);
    };
}

#[target_feature(enable = "avx512f")]
fn load_words(rows: &[Row<'_>; LANES]) -> Words {
    let mut tiles = [_mm512_setzero_si512(); 16];
    let mut words = tiles;
    tile!(tiles, 0, rows, 0);
    tile!(tiles, 4, rows, 0);
    tile!(tiles, 8, rows, 0);
    tile!(tiles, 12, rows, 0);
    words!(words, 0, tiles);
    words!(words, 1, tiles);
    words!(words, 2, tiles);
    words!(words, 3, tiles);
    Words(words)
}

#[target_feature(enable = "avx512f")]
fn compress_rows(
    values: &mut Values,
    words: &mut Words,
    rows: &[Row<'_>; LANES],
    soon: &[Row<'_>; LANES],
    chunk: u32,
    at: usize,
    end: u8,
) {
    let blocks = rows[0].len();
    let hints = soon[0].len();
    // Checked here once instead of sixteen times in each block.
    assert!(rows.iter().all(|row| row.len() == blocks));
    assert!(soon.iter().all(|row| row.len() == hints));
    let mut cv = values.0;
    let mut m = words.0;
    for b in 0..blocks {
        let mut flags = KEYED;
        if at + b == 0 {
            flags |= CHUNK_START;
        }
        if b + 1 == blocks {
            flags |= end;
        }
        // The block to load under this one. At the very end any will do.
        let (next, n) = match (b + 1 < blocks, hints > 0) {
            (true, _) => (rows, b + 1),
            (false, true) => (soon, 0),
            (false, false) => (rows, b),
        };
        if b < hints {
            for row in soon {
                // SAFETY: every row of `soon` has `hints` blocks.
                let line = unsafe { row.get_unchecked(b) };
                _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
            }
        }
        let mut v = start!(cv, chunk, flags);
        let mut tiles = [_mm512_setzero_si512(); 16];
        let mut then = tiles;
        // A compression is one long chain of dependent steps and leaves half of the vector unit
        // idle: loading and transposing the next block fits in between.
        tile!(tiles, 0, next, n);
        round!(v, m, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        tile!(tiles, 4, next, n);
        round!(v, m, 2 6 3 10 7 0 4 13 1 11 12 5 9 14 15 8);
        tile!(tiles, 8, next, n);
        round!(v, m, 3 4 10 12 13 2 7 14 6 5 9 0 11 15 8 1);
        tile!(tiles, 12, next, n);
        round!(v, m, 10 7 12 9 14 3 13 15 4 0 11 2 5 8 1 6);
        words!(then, 0, tiles);
        round!(v, m, 12 13 9 11 15 10 14 8 7 2 5 3 0 1 6 4);
        words!(then, 1, tiles);
        round!(v, m, 9 14 11 5 8 12 15 1 13 3 0 10 2 6 4 7);
        words!(then, 2, tiles);
        round!(v, m, 11 15 5 0 1 9 8 6 14 10 2 12 3 4 7 13);
        words!(then, 3, tiles);
        for i in 0..8 {
            cv[i] = _mm512_xor_si512(v[i], v[i + 8]);
        }
        m = then;
    }
    values.0 = cv;
    words.0 = m;
}

#[target_feature(enable = "avx512f")]
#[inline]
fn set(word: u32) -> __m512i {
    _mm512_set1_epi32(word as i32)
}

#[target_feature(enable = "avx512f")]
fn compress_parents(key: &[u32; 8], left: &Values, right: &mut Values, root: bool) {
    let mut m = [_mm512_setzero_si512(); 16];
    m[..8].copy_from_slice(&left.0);
    m[8..].copy_from_slice(&right.0);
    let flags = KEYED | PARENT | if root { ROOT } else { 0 };
    let cv = splat(key).0;
    let chunk = 0;
    let mut v = start!(cv, chunk, flags);
    round!(v, m, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    round!(v, m, 2 6 3 10 7 0 4 13 1 11 12 5 9 14 15 8);
    round!(v, m, 3 4 10 12 13 2 7 14 6 5 9 0 11 15 8 1);
    round!(v, m, 10 7 12 9 14 3 13 15 4 0 11 2 5 8 1 6);
    round!(v, m, 12 13 9 11 15 10 14 8 7 2 5 3 0 1 6 4);
    round!(v, m, 9 14 11 5 8 12 15 1 13 3 0 10 2 6 4 7);
    round!(v, m, 11 15 5 0 1 9 8 6 14 10 2 12 3 4 7 13);
    for i in 0..8 {
        right.0[i] = _mm512_xor_si512(v[i], v[i + 8]);
    }
}
