//! exp, ln, sin and cos from additions and multiplications only.

/// e^x in f32, relative error below 2e-7; 0 below -87.3, saturates above 88.3.
///
/// Branch-free, so that loops over it vectorise.
#[inline(always)]
pub(crate) fn exp32(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts: the first has trailing zeros, so n * LN2_HI is exact.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > 88.3 { 88.3 } else { x };
    let clamped = if clamped < -87.3 { -87.3 } else { clamped };
    let shifted = clamped * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HI;
    let r = r - n * LN2_LO;
    let p = 1.987_569_1e-4_f32;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_58e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    let scale = f32::from_bits(
        (shifted
            .to_bits()
            .wrapping_sub(ROUND.to_bits())
            .wrapping_add(127))
            << 23,
    );
    let y = p * scale;
    if x < -87.3 { 0.0 } else { y }
}

/// e^x in f64, relative error near one ulp for |x| < 700; saturates beyond.
pub(crate) fn exp64(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x < -700.0 {
        return 0.0;
    }
    let x = if x > 700.0 { 700.0 } else { x };
    const LN2_HI: f64 = 6.931_471_803_691_238e-1;
    const LN2_LO: f64 = 1.908_214_929_270_587_7e-10;
    let n = (x * std::f64::consts::LOG2_E).round();
    let r = (x - n * LN2_HI) - n * LN2_LO;
    // Taylor up to r^14 / 14!, |r| <= 0.35.
    let mut p = 1.0;
    let mut k = 14.0;
    while k >= 1.0 {
        p = 1.0 + p * r / k;
        k -= 1.0;
    }
    p * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// Natural logarithm in f64 of a normal positive number; minus infinity for anything not above 0.
pub(crate) fn ln64(x: f64) -> f64 {
    if x.is_nan() || x <= 0.0 {
        return f64::NEG_INFINITY;
    }
    if x.is_infinite() {
        return f64::INFINITY;
    }
    let (x, bias) = if x < f64::MIN_POSITIVE {
        (x * 18_014_398_509_481_984.0, 54)
    } else {
        (x, 0)
    };
    let bits = x.to_bits();
    let mut e = ((bits >> 52) as i64) - 1023 - bias;
    let mut m = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        e += 1;
    }
    // ln m = 2 atanh s, |s| <= 0.172.
    let s = (m - 1.0) / (m + 1.0);
    let s2 = s * s;
    let mut p = 0.0;
    let mut k = 25.0;
    while k >= 1.0 {
        p = p * s2 + 1.0 / k;
        k -= 2.0;
    }
    e as f64 * std::f64::consts::LN_2 + 2.0 * s * p
}

/// (sin x, cos x) in f64 for 0 <= x < 2^24, error near one ulp of 1.
pub(crate) fn sin_cos64(x: f64) -> (f64, f64) {
    // pi / 2 in three parts of 33 bits: n * part is exact for n < 2^20.
    const P1: f64 = 1.570_796_326_734_125_6;
    const P2: f64 = 6.077_100_506_303_966e-11;
    const P3: f64 = 2.022_266_248_795_950_7e-21;
    let n = (x * std::f64::consts::FRAC_2_PI).round();
    let r = ((x - n * P1) - n * P2) - n * P3;
    let r2 = r * r;
    let (mut s, mut c) = (1.0, 1.0);
    let mut k = 20.0;
    while k >= 2.0 {
        c = 1.0 - c * r2 / (k * (k - 1.0));
        s = 1.0 - s * r2 / (k * (k + 1.0));
        k -= 2.0;
    }
    let s = s * r;
    match (n as i64) & 3 {
        0 => (s, c),
        1 => (c, -s),
        2 => (-s, -c),
        _ => (-c, s),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elementary_functions_are_close_to_the_real_ones() {
        for i in -8600..8800 {
            let x = i as f32 / 100.0;
            let want = f64::from(x).exp();
            assert!((f64::from(exp32(x)) / want - 1.0).abs() < 3e-7, "exp32 {x}");
            let want = f64::from(x).exp();
            assert!((exp64(f64::from(x)) / want - 1.0).abs() < 1e-14);
        }
        for i in 1..20000 {
            let x = f64::from(i) * 0.37;
            assert!((ln64(x) - x.ln()).abs() < 1e-14 * (1.0 + x.ln().abs()));
            assert!((ln64(1.0 / x) + x.ln()).abs() < 1e-14 * (1.0 + x.ln().abs()));
            let (s, c) = sin_cos64(x * 50.0);
            assert!((s - (x * 50.0).sin()).abs() < 1e-14 && (c - (x * 50.0).cos()).abs() < 1e-14);
        }
        assert_eq!(exp32(-1000.0), 0.0);
        assert_eq!(exp64(-1000.0), 0.0);
        assert_eq!(ln64(0.0), f64::NEG_INFINITY);
    }

    #[test]
    fn elementary_functions_give_the_same_bits_on_every_machine() {
        // Golden bits, made on x86-64; another architecture must meet them.
        let mut h = 0xcbf2_9ce4_8422_2325_u64;
        let mut mix = |v: u64| h = (h ^ v).wrapping_mul(0x0000_0100_0000_01b3);
        for i in -3000..3000 {
            let x = f64::from(i) * 0.029;
            mix(u64::from(exp32(x as f32).to_bits()));
            mix(exp64(x).to_bits());
            mix(ln64(x.abs() + 1e-9).to_bits());
            let (s, c) = sin_cos64(x.abs() * 977.0);
            mix(s.to_bits());
            mix(c.to_bits());
        }
        assert_eq!(h, GOLDEN, "{h:#x}");
    }
    const GOLDEN: u64 = 0x4c6f_e9f8_7b91_1e50;
}
