//! A token log as count and hash, kept up to date token by token.

use sha2::{Digest, Sha256};
use std::fmt;

const LOG_DOMAIN: &[u8] = b"moonlivekv token log v1\0";
const MASK_DOMAIN: &[u8] = b"moonlivekv grammar mask v1\0";

/// A token log by its length and its hash: SHA-256 over the 24-byte domain
/// `"moonlivekv token log v1\0"` and then each token as u32 little-endian.
///
/// The log itself streams early; this pins it, so that the fence carries 40 bytes of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenLogHash {
    /// Tokens.
    pub count: u64,
    /// Their hash.
    pub hash: [u8; 32],
}

impl TokenLogHash {
    /// Of a whole log.
    pub fn of(tokens: &[u32]) -> Self {
        let mut hasher = TokenHasher::new();
        hasher.extend(tokens);
        hasher.finish()
    }
}

impl Default for TokenLogHash {
    /// The empty log's.
    fn default() -> Self {
        Self::of(&[])
    }
}

impl fmt::Debug for TokenLogHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenLogHash({} tokens, ", self.count)?;
        for b in &self.hash[..8] {
            write!(f, "{b:02x}")?;
        }
        f.write_str("..)")
    }
}

/// Hashes a growing log. [`finish`](Self::finish) costs the same at any length.
#[derive(Clone)]
pub struct TokenHasher {
    count: u64,
    state: Sha256,
}

impl TokenHasher {
    /// Of the empty log.
    pub fn new() -> Self {
        Self {
            count: 0,
            state: Sha256::new_with_prefix(LOG_DOMAIN),
        }
    }

    /// Appends one token.
    pub fn push(&mut self, token: u32) {
        self.state.update(token.to_le_bytes());
        self.count += 1;
    }

    /// Appends tokens.
    pub fn extend(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|t| self.push(*t));
    }

    /// The log so far; the hasher goes on.
    pub fn finish(&self) -> TokenLogHash {
        TokenLogHash {
            count: self.count,
            hash: self.state.clone().finalize().into(),
        }
    }
}

impl Default for TokenHasher {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for TokenHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.finish().fmt(f)
    }
}

/// Digest of the set of tokens a grammar allows next: SHA-256 over the domain
/// `"moonlivekv grammar mask v1\0"`, the vocabulary size as u32 little-endian, and one bit a token,
/// token t at bit t % 8 of byte t / 8, zero where it is not allowed and past the end.
///
/// `allowed` is asked for tokens `0..vocab` in order.
pub fn mask_digest(vocab: u32, allowed: impl Fn(u32) -> bool) -> [u8; 32] {
    let mut state = Sha256::new_with_prefix(MASK_DOMAIN);
    state.update(vocab.to_le_bytes());
    let mut chunk = [0u8; 64];
    for start in (0..vocab).step_by(512) {
        let end = vocab.min(start.saturating_add(512));
        chunk.fill(0);
        for token in start..end {
            let bit = (token - start) as usize;
            chunk[bit / 8] |= u8::from(allowed(token)) << (bit % 8);
        }
        state.update(&chunk[..((end - start) as usize).div_ceil(8)]);
    }
    state.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_hash_is_the_hash_of_the_whole_and_goes_on() {
        let mut hasher = TokenHasher::new();
        let tokens: Vec<u32> = (0..100).map(|i| i * 7919).collect();
        for (n, token) in tokens.iter().enumerate() {
            assert_eq!(hasher.finish(), TokenLogHash::of(&tokens[..n]));
            hasher.push(*token);
        }
        assert_eq!(hasher.finish(), TokenLogHash::of(&tokens));
        assert_ne!(TokenLogHash::of(&[1, 2]), TokenLogHash::of(&[2, 1]));
    }

    #[test]
    fn a_mask_digest_tells_every_bit_and_the_vocabulary_size_apart() {
        let none = mask_digest(1000, |_| false);
        let mut seen = std::collections::BTreeSet::from([none, mask_digest(1001, |_| false)]);
        for t in 0..1000 {
            assert!(seen.insert(mask_digest(1000, |x| x == t)), "token {t}");
        }
    }
}
