//! Quantized weight blocks of GGUF: 32 weights that share a scale.

use super::narrow::f16_to_f32;

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
        let blocks = bytes.chunks_exact(self.bytes());
        for (b, o) in blocks.zip(out.chunks_exact_mut(BLOCK)) {
            let scale = f16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            match self {
                Self::Q8_0 => {
                    for (o, q) in o.iter_mut().zip(&b[2..34]) {
                        *o = f32::from(*q as i8) * scale;
                    }
                }
                Self::Q4_0 => {
                    let (low, high) = o.split_at_mut(16);
                    for ((l, h), q) in low.iter_mut().zip(high).zip(&b[2..18]) {
                        *l = (f32::from(q & 15) - 8.0) * scale;
                        *h = (f32::from(q >> 4) - 8.0) * scale;
                    }
                }
                Self::Q4_1 => {
                    let min = f16_to_f32(u16::from_le_bytes([b[2], b[3]]));
                    let (low, high) = o.split_at_mut(16);
                    for ((l, h), q) in low.iter_mut().zip(high).zip(&b[4..20]) {
                        *l = f32::from(q & 15) * scale + min;
                        *h = f32::from(q >> 4) * scale + min;
                    }
                }
            }
        }
    }
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
