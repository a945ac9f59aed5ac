//! Quantized weight blocks of GGUF: 32 weights that share a scale.

use super::narrow::f16_to_f32;
use std::hint::black_box;

/// Weights per block of every kind here.
pub(crate) const BLOCK: usize = 32;

/// How the 32 weights of a block are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockKind {
    /// f16 scale, 32 signed bytes.
    Q8_0,
    /// f16 scale, 32 nibbles offset by 8.
    Q4_0,
    /// f16 scale and minimum, 32 nibbles.
    Q4_1,
}

impl BlockKind {
    /// Bytes of one block.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
        }
    }

    /// Weights of whole blocks, as f32; `bytes` and `out` hold the same blocks.
    #[inline(always)]
    pub(crate) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        // This is what decoding a token waits for. Each block alone becomes vector code; left to
        // itself the compiler vectorises across blocks instead, by single bytes, at a fifth of the
        // speed: `black_box` keeps it from seeing one block after the other, and the functions
        // below tell it that a block and its weights do not overlap.
        let out = out.as_chunks_mut::<BLOCK>().0.iter_mut();
        match self {
            Self::Q8_0 => {
                let blocks = bytes.as_chunks().0.iter();
                blocks.zip(out).for_each(|(b, o)| q8_0(black_box(b), o));
            }
            Self::Q4_0 => {
                let blocks = bytes.as_chunks().0.iter();
                blocks.zip(out).for_each(|(b, o)| q4_0(black_box(b), o));
            }
            Self::Q4_1 => {
                let blocks = bytes.as_chunks().0.iter();
                blocks.zip(out).for_each(|(b, o)| q4_1(black_box(b), o));
            }
        }
    }
}

#[inline(always)]
fn q8_0(b: &[u8; 34], o: &mut [f32; BLOCK]) {
    let scale = half(b, 0);
    for i in 0..32 {
        o[i] = f32::from(b[2 + i] as i8) * scale;
    }
}

#[inline(always)]
fn q4_0(b: &[u8; 18], o: &mut [f32; BLOCK]) {
    let scale = half(b, 0);
    for i in 0..16 {
        o[i] = (f32::from(b[2 + i] & 15) - 8.0) * scale;
        o[i + 16] = (f32::from(b[2 + i] >> 4) - 8.0) * scale;
    }
}

#[inline(always)]
fn q4_1(b: &[u8; 20], o: &mut [f32; BLOCK]) {
    let (scale, min) = (half(b, 0), half(b, 2));
    for i in 0..16 {
        o[i] = f32::from(b[4 + i] & 15) * scale + min;
        o[i + 16] = f32::from(b[4 + i] >> 4) * scale + min;
    }
}

/// The f16 at a byte of a block.
#[inline(always)]
fn half<const N: usize>(block: &[u8; N], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_decode_as_gguf_says() {
        let half = half::f16::from_f32(0.5).to_bits().to_le_bytes();
        let two = half::f16::from_f32(-2.0).to_bits().to_le_bytes();
        let mut out = [0.0; BLOCK];

        let mut b = half.to_vec();
        b.extend((0..32u8).map(|i| i.wrapping_sub(16)));
        BlockKind::Q8_0.decode(&b, &mut out);
        assert_eq!((out[0], out[31]), (-8.0, 7.5));

        let nibbles: Vec<u8> = (0..16u8).map(|i| i | ((15 - i) << 4)).collect();
        let mut b = half.to_vec();
        b.extend(&nibbles);
        BlockKind::Q4_0.decode(&b, &mut out);
        assert_eq!((out[0], out[15], out[16], out[31]), (-4.0, 3.5, 3.5, -4.0));

        let mut b = half.to_vec();
        b.extend(two);
        b.extend(&nibbles);
        BlockKind::Q4_1.decode(&b, &mut out);
        assert_eq!((out[0], out[15], out[16], out[31]), (-2.0, 5.5, 5.5, -2.0));
    }
}
