//! Changes inputs as a fuzzer without coverage would: from kept ones, by a seeded generator.

/// A well-spread sequence (SplitMix64).
pub struct Dice(pub u64);

impl Dice {
    fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.any() % n as u64) as usize
    }
}

/// Numbers at which length fields, counts and offsets break.
const EDGES: [u64; 14] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    1 << 20,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 32,
    i64::MAX as u64,
    u64::MAX,
];

/// Longest input that is made.
const LONGEST: usize = 64 << 10;

/// One to eight changes of `input`; parts of `other` may be put in.
pub fn mutate(input: &[u8], other: &[u8], dice: &mut Dice) -> Vec<u8> {
    let mut out = input[..input.len().min(LONGEST)].to_vec();
    for _ in 0..=dice.below(8) {
        change(&mut out, other, dice);
    }
    out.truncate(LONGEST);
    out
}

fn change(out: &mut Vec<u8>, other: &[u8], dice: &mut Dice) {
    if out.is_empty() {
        out.extend_from_slice(&other[..other.len().min(LONGEST)]);
        out.push(dice.any() as u8);
        return;
    }
    let at = dice.below(out.len());
    match dice.below(9) {
        0 => out[at] ^= 1 << dice.below(8),
        1 => out[at] = dice.any() as u8,
        2 => out[at] = out[at].wrapping_add(dice.below(9) as u8).wrapping_sub(4),
        3 => {
            let edge = EDGES[dice.below(EDGES.len())].to_le_bytes();
            let width = [1, 2, 4, 8][dice.below(4)].min(out.len() - at);
            out[at..at + width].copy_from_slice(&edge[..width]);
        }
        4 => out.truncate(at),
        5 => {
            out.drain(at..(at + 1 + dice.below(8)).min(out.len()));
        }
        6 => {
            let to = (at + 1 + dice.below(32)).min(out.len());
            let again = out[at..to].to_vec();
            out.splice(at..at, again);
        }
        7 if !other.is_empty() => {
            let from = dice.below(other.len());
            let to = (from + 1 + dice.below(64)).min(other.len());
            let end = (at + to - from).min(out.len());
            out.splice(at..end, other[from..to].iter().copied());
        }
        _ => out.insert(at, dice.any() as u8),
    }
}
