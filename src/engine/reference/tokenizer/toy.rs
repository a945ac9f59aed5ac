//! The vocabulary of seeded models: every byte, four markers, and some words to be read.

use super::super::EngineError;
use super::super::spec::ChatMessage;
use super::{Encoder, Vocabulary, chatml};
use std::collections::HashMap;

const MARKERS: [&str; 4] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"];
/// Id of the end of the text.
pub(crate) const EOS: u32 = 256;
/// Id of the first word.
pub(crate) const FIRST_WORD: u32 = 260;

/// Words, each a token with a space before it, and some pieces without.
const WORDS: &str = "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were when we there can an your which their said if do will each about how up out them then she many some so these would other into has more her two like him see time could no make than first been its who now people my made over did down only way find use may water long little very after words called just where most know get through back much before go good new write our used me man too any day same right look think also around another came come work three word must because does part even place well such here take why help put different away again off went old number great tell men say small every found still between name should home big give air line set own under read last never us left end along while might next sound below saw something thought both few those always looked show large often together asked house world going want school important until form food keep children feet land side without boy once animals life enough took sometimes four head above kind began almost live page got earth need far hand high year mother light parts country father let night following picture being study second eyes soon times story boys since white days ever paper hard near sentence better best across during today others however sure means knew try told young miles sun ways thing whole hear example heard several change answer room sea against top turned learn point city play toward five using himself usually";

/// Pieces without a space, some of them half a character.
const PIECES: [&[u8]; 20] = [
    b".",
    b",",
    b"!",
    b"?",
    b"\n",
    b"ing",
    b"ed",
    b"s",
    b"ly",
    b"er",
    b"{",
    b"}",
    b"\"",
    b":",
    b"[",
    b"]",
    b"\xf0\x9f",
    b"\x99\x82",
    b"\xc3",
    b"\xa9",
];

const fn count_words() -> usize {
    let text = WORDS.as_bytes();
    let (mut n, mut i) = (1, 0);
    while i < text.len() {
        if text[i] == b' ' {
            n += 1;
        }
        i += 1;
    }
    n
}

/// Tokens in the vocabulary.
pub(crate) const VOCAB: usize = FIRST_WORD as usize + count_words() + PIECES.len();

/// How readily a random model says a token.
pub(crate) fn loudness(token: u32) -> f32 {
    let first_piece = (VOCAB - PIECES.len()) as u32;
    match token {
        t if t < FIRST_WORD => 0.3,
        t if t < first_piece + 4 => 1.0,
        t if t < first_piece + 10 => 0.8,
        _ => 0.3,
    }
}

/// The vocabulary.
pub(crate) fn vocabulary() -> Vocabulary {
    let bytes = (0..=255u8).map(|b| (vec![b], false));
    let markers = MARKERS.iter().map(|m| (m.as_bytes().to_vec(), true));
    let words = WORDS
        .split(' ')
        .map(|w| (format!(" {w}").into_bytes(), false));
    let pieces = PIECES.iter().map(|p| (p.to_vec(), false));
    let all = bytes.chain(markers).chain(words).chain(pieces);
    Vocabulary::new(all, vec![EOS], None)
}

/// Longest match from left to right.
pub(crate) struct ToyEncoder {
    by_bytes: HashMap<Vec<u8>, u32>,
    longest: usize,
}

impl ToyEncoder {
    /// An encoder for [`vocabulary`].
    pub(crate) fn new() -> Self {
        let v = vocabulary();
        let text = (0..v.len() as u32).filter(|t| !v.is_special(*t));
        let by_bytes: HashMap<_, _> = text.map(|t| (v.bytes(t).to_vec(), t)).collect();
        let longest = by_bytes.keys().map(Vec::len).max().unwrap_or(1);
        Self { by_bytes, longest }
    }
}

impl Encoder for ToyEncoder {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, EngineError> {
        let mut rest = text.as_bytes();
        let mut out = Vec::new();
        'next: while !rest.is_empty() {
            if special {
                for (i, marker) in MARKERS.iter().enumerate() {
                    if let Some(after) = rest.strip_prefix(marker.as_bytes()) {
                        out.push(EOS + i as u32);
                        rest = after;
                        continue 'next;
                    }
                }
            }
            for len in (1..=self.longest.min(rest.len())).rev() {
                if let Some(token) = self.by_bytes.get(&rest[..len]) {
                    out.push(*token);
                    rest = &rest[len..];
                    continue 'next;
                }
            }
            return Err(EngineError::Bug("every byte is a token".into()));
        }
        Ok(out)
    }

    fn chat(&self, messages: &[ChatMessage]) -> Result<String, EngineError> {
        Ok(chatml(messages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_the_toy_vocabulary() {
        let v = vocabulary();
        assert_eq!(v.len(), VOCAB);
        let text = "the water was é 🙂 over there.\n<|im_end|>";
        let ids = ToyEncoder::new().encode(text, false).unwrap();
        let back: Vec<u8> = ids.iter().flat_map(|t| v.bytes(*t).to_vec()).collect();
        assert_eq!(back, text.as_bytes());
        let ids = ToyEncoder::new().encode(text, true).unwrap();
        assert_eq!(ids.last(), Some(&258));
        assert!(v.is_special(258) && v.is_special(u32::MAX) && !v.is_special(300));
    }
}
