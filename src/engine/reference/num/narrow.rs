//! Rows of the KV pool: f32, f16 and bf16, little-endian.

use crate::engine::reference::config::KvDtype;
use half::f16;

/// bf16 bits to f32; exact.
#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// f32 to bf16 bits, to nearest, ties to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    if x.is_nan() {
        0x7fc0
    } else {
        (rounded >> 16) as u16
    }
}

/// f16 bits to f32; exact. Branch-free, so that loops over it vectorise.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = u32::from(bits & 0x7fff) << 13;
    // Re-bias by a multiplication, which also makes subnormals right.
    let magnitude = f32::from_bits(rest) * f32::from_bits(0x7780_0000);
    let special = u32::from(bits & 0x7c00 == 0x7c00) * 0x7f80_0000;
    f32::from_bits(sign | magnitude.to_bits() | special)
}

/// Rounds a row to what the pool can hold.
pub(crate) fn round_row(dtype: KvDtype, row: &mut [f32]) {
    match dtype {
        KvDtype::F32 => {}
        KvDtype::F16 => row
            .iter_mut()
            .for_each(|x| *x = f16::from_f32_const(*x).to_f32_const()),
        KvDtype::Bf16 => row
            .iter_mut()
            .for_each(|x| *x = bf16_to_f32(f32_to_bf16(*x))),
    }
}

/// Writes `row` as bytes; `out` holds exactly as many elements.
pub(crate) fn encode_row(dtype: KvDtype, row: &[f32], out: &mut [u8]) {
    match dtype {
        KvDtype::F32 => {
            for (o, x) in out.chunks_exact_mut(4).zip(row) {
                o.copy_from_slice(&x.to_le_bytes());
            }
        }
        KvDtype::F16 => {
            for (o, x) in out.chunks_exact_mut(2).zip(row) {
                o.copy_from_slice(&f16::from_f32_const(*x).to_bits().to_le_bytes());
            }
        }
        KvDtype::Bf16 => {
            for (o, x) in out.chunks_exact_mut(2).zip(row) {
                o.copy_from_slice(&f32_to_bf16(*x).to_le_bytes());
            }
        }
    }
}

/// Reads a row from bytes; `bytes` holds exactly `out.len()` elements.
#[inline(always)]
pub(crate) fn decode_row(dtype: KvDtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        KvDtype::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        KvDtype::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = f16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
        }
        KvDtype::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = bf16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_converts_as_ieee_says() {
        for bits in 0..=u16::MAX {
            let want = f16::from_bits(bits).to_f32_const();
            let got = f16_to_f32(bits);
            if want.is_nan() {
                assert!(got.is_nan());
            } else {
                assert_eq!(got.to_bits(), want.to_bits(), "{bits:#x}");
                assert_eq!(f16::from_f32_const(got).to_bits(), bits);
            }
            let b = bf16_to_f32(bits);
            let again = f32_to_bf16(b);
            assert!(again == bits || b.is_nan());
            let nudged = f32::from_bits(b.to_bits() | 0x7fff);
            if !nudged.is_nan() {
                assert_eq!(
                    f32_to_bf16(nudged),
                    half::bf16::from_f32(nudged).to_bits(),
                    "{nudged}"
                );
            }
        }
    }

    #[test]
    fn a_row_read_back_is_the_row_that_was_rounded() {
        let row: Vec<f32> = (0..97).map(|i| (i as f32 - 40.0) * 0.123_456_7).collect();
        for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
            let mut rounded = row.clone();
            round_row(dtype, &mut rounded);
            let mut bytes = vec![0; row.len() * dtype.bytes() as usize];
            encode_row(dtype, &row, &mut bytes);
            let mut back = vec![0.0; row.len()];
            decode_row(dtype, &bytes, &mut back);
            assert_eq!(back, rounded);
        }
    }
}
