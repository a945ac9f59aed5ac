//! Byte-level BPE as GPT-2 and its heirs use it, from the lists in a GGUF file.

use super::super::EngineError;
use super::super::gguf::GgufError;
use super::super::spec::ChatMessage;
use super::Encoder;
use super::template::ChatTemplate;
use fancy_regex::Regex;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// A token as the file lists it.
pub(crate) struct TokenRow<'a> {
    text: &'a [u8],
    kind: u64,
}

impl<'a> TokenRow<'a> {
    const CONTROL: u64 = 3;
    const USER_DEFINED: u64 = 4;

    /// From its text and its `token_type`.
    pub(crate) fn new(text: &'a [u8], kind: u64) -> Self {
        Self { text, kind }
    }

    /// A marker that is no text.
    pub(crate) fn is_control(&self) -> bool {
        self.kind == Self::CONTROL
    }

    /// The token as it stands in the file.
    pub(crate) fn text(&self) -> &'a [u8] {
        self.text
    }

    /// Matched as a whole before the text is split, not built by merges.
    fn is_whole(&self) -> bool {
        matches!(self.kind, Self::CONTROL | Self::USER_DEFINED)
    }

    /// Bytes it stands for, and whether it is a marker.
    pub(crate) fn bytes(&self) -> (Vec<u8>, bool) {
        let bytes = match self.is_whole() {
            true => self.text.to_vec(),
            false => from_printable(self.text),
        };
        (bytes, self.is_control())
    }
}

/// GPT-2 writes each byte as a printable character: these bytes as themselves, the others as the
/// characters from U+0100 on, in order.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// Bytes of a text in that writing; text that is not in it is taken as it is.
fn from_printable(text: &[u8]) -> Vec<u8> {
    let others: Vec<u8> = (0..=255).filter(|b| !is_printable(*b)).collect();
    let byte = |c: char| match u32::from(c) {
        n @ 0..=255 => Some(n as u8).filter(|b| is_printable(*b)),
        n => others.get(n as usize - 256).copied(),
    };
    std::str::from_utf8(text)
        .ok()
        .and_then(|s| s.chars().map(byte).collect())
        .unwrap_or_else(|| text.to_vec())
}

/// How text is cut into pieces that merges do not cross.
struct Split {
    /// Digits stand alone, before the pattern is applied.
    digits: bool,
    pattern: Regex,
}

impl Split {
    const GPT2: &str =
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
    const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    /// By the name a GGUF file gives in `tokenizer.ggml.pre`.
    fn named(pre: &str) -> Result<Self, GgufError> {
        let (digits, pattern) = match pre {
            "gpt-2" | "default" => (false, Self::GPT2),
            "smollm" | "starcoder" => (true, Self::GPT2),
            "llama-bpe" | "llama3" => (false, Self::LLAMA3),
            "qwen2" => (false, Self::QWEN2),
            other => {
                return Err(GgufError::Tokenizer(format!(
                    "pre-tokenizer `{other}` is not supported (gpt-2, smollm, llama-bpe and qwen2 are)"
                )));
            }
        };
        let pattern = Regex::new(pattern).map_err(|e| GgufError::Tokenizer(e.to_string()))?;
        Ok(Self { digits, pattern })
    }

    fn pieces<'t>(&self, text: &'t str, out: &mut Vec<&'t str>) -> Result<(), EngineError> {
        if !self.digits {
            return self.matches(text, out);
        }
        let mut rest = text;
        while let Some((at, digit)) = rest.char_indices().find(|(_, c)| c.is_numeric()) {
            self.matches(&rest[..at], out)?;
            out.push(&rest[at..at + digit.len_utf8()]);
            rest = &rest[at + digit.len_utf8()..];
        }
        self.matches(rest, out)
    }

    fn matches<'t>(&self, text: &'t str, out: &mut Vec<&'t str>) -> Result<(), EngineError> {
        for piece in self.pattern.find_iter(text) {
            let piece = piece.map_err(|e| EngineError::OutOfRange {
                what: "prompt",
                value: e.to_string(),
                bounds: "text that can be split into words".into(),
            })?;
            out.push(piece.as_str());
        }
        Ok(())
    }
}

/// No token. Some vocabularies lack control bytes; those bytes of a prompt are left out, as the
/// models' own tokenizers do.
const ABSENT: u32 = u32::MAX;

/// Text to ids.
pub(crate) struct BpeEncoder {
    split: Split,
    /// Token of each byte alone; [`ABSENT`] where the vocabulary has none.
    of_byte: [u32; 256],
    /// Rank and result of joining two tokens.
    merges: HashMap<(u32, u32), (u32, u32)>,
    /// Tokens matched as a whole, by their first byte, longest first; true: only if asked for.
    whole: HashMap<u8, Vec<(Vec<u8>, u32, bool)>>,
    template: ChatTemplate,
}

impl BpeEncoder {
    /// From the file's lists; `merges` are two tokens with a space between, best first.
    pub(crate) fn new(
        rows: &[TokenRow<'_>],
        merges: &[&[u8]],
        pre: &str,
        template: ChatTemplate,
    ) -> Result<Self, GgufError> {
        let wrong = |what: String| GgufError::Tokenizer(what);
        let mut by_bytes = HashMap::new();
        let mut by_text = HashMap::new();
        let mut whole: HashMap<u8, Vec<(Vec<u8>, u32, bool)>> = HashMap::new();
        for (id, row) in rows.iter().enumerate() {
            let (bytes, control) = row.bytes();
            if row.is_whole() {
                if let Some(first) = bytes.first() {
                    let same = whole.entry(*first).or_default();
                    same.push((bytes, id as u32, control));
                }
            } else {
                by_bytes.entry(bytes).or_insert(id as u32);
                by_text.entry(row.text).or_insert(id as u32);
            }
        }
        for same in whole.values_mut() {
            same.sort_by_key(|(bytes, id, _)| (Reverse(bytes.len()), *id));
        }
        let mut of_byte = [ABSENT; 256];
        for (byte, id) in of_byte.iter_mut().enumerate() {
            if let Some(token) = by_bytes.get([byte as u8].as_slice()) {
                *id = *token;
            }
        }
        let mut table = HashMap::with_capacity(merges.len());
        let mut joined = Vec::new();
        for (rank, merge) in merges.iter().enumerate() {
            let bad = || {
                wrong(format!(
                    "merge {rank} joins no two tokens of the vocabulary"
                ))
            };
            let cut = merge
                .iter()
                .skip(1)
                .position(|b| *b == b' ')
                .ok_or_else(bad)?
                + 1;
            let (left, right) = (&merge[..cut], &merge[cut + 1..]);
            joined.clear();
            joined.extend_from_slice(left);
            joined.extend_from_slice(right);
            let id = |text: &[u8]| by_text.get(text).copied().ok_or_else(bad);
            let pair = (id(left)?, id(right)?);
            table.entry(pair).or_insert((rank as u32, id(&joined)?));
        }
        Ok(Self {
            split: Split::named(pre)?,
            of_byte,
            merges: table,
            whole,
            template,
        })
    }

    /// The longest token that starts here and is matched as a whole.
    fn marker(&self, rest: &[u8], special: bool) -> Option<(u32, usize)> {
        let same = self.whole.get(rest.first()?)?;
        let found = same
            .iter()
            .find(|(bytes, _, control)| (special || !control) && rest.starts_with(bytes))?;
        Some((found.1, found.0.len()))
    }

    /// Joins the bytes of a piece by rank. O(n log n): a hostile piece of any length is harmless.
    fn merge(&self, piece: &[u8], out: &mut Vec<u32>) {
        const NONE: usize = usize::MAX;
        let n = piece.len();
        let mut ids: Vec<u32> = piece.iter().map(|b| self.of_byte[*b as usize]).collect();
        let mut next: Vec<usize> = (1..=n).map(|i| if i == n { NONE } else { i }).collect();
        let mut before: Vec<usize> = (0..n).map(|i| i.wrapping_sub(1)).collect();
        let mut alive = vec![true; n];
        let mut heap = BinaryHeap::new();
        let offer = |heap: &mut BinaryHeap<_>, ids: &[u32], left: usize, right: usize| {
            if let Some((rank, id)) = self.merges.get(&(ids[left], ids[right])) {
                heap.push(Reverse((*rank, left, right, ids[left], ids[right], *id)));
            }
        };
        for i in 1..n {
            offer(&mut heap, &ids, i - 1, i);
        }
        while let Some(Reverse((_, left, right, was_left, was_right, id))) = heap.pop() {
            let current = alive[left]
                && alive[right]
                && next[left] == right
                && ids[left] == was_left
                && ids[right] == was_right;
            if !current {
                continue;
            }
            ids[left] = id;
            alive[right] = false;
            next[left] = next[right];
            if next[left] != NONE {
                before[next[left]] = left;
                offer(&mut heap, &ids, left, next[left]);
            }
            if before[left] != NONE {
                offer(&mut heap, &ids, before[left], left);
            }
        }
        let mut at = 0;
        while at != NONE && at < n {
            if ids[at] != ABSENT {
                out.push(ids[at]);
            }
            at = next[at];
        }
    }

    fn plain(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EngineError> {
        let mut pieces = Vec::new();
        self.split.pieces(text, &mut pieces)?;
        for piece in pieces {
            self.merge(piece.as_bytes(), out);
        }
        Ok(())
    }
}

impl Encoder for BpeEncoder {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, EngineError> {
        let mut out = Vec::new();
        let (mut from, mut at) = (0, 0);
        while at < text.len() {
            let hit = match text.is_char_boundary(at) {
                true => self.marker(&text.as_bytes()[at..], special),
                false => None,
            };
            match hit.filter(|(_, len)| text.is_char_boundary(at + len)) {
                Some((id, len)) => {
                    self.plain(&text[from..at], &mut out)?;
                    out.push(id);
                    at += len;
                    from = at;
                }
                None => at += 1,
            }
        }
        self.plain(&text[from..], &mut out)?;
        Ok(out)
    }

    fn chat(&self, messages: &[ChatMessage]) -> Result<String, EngineError> {
        self.template.render(messages)
    }
}
