//! Token ids, their bytes, and how text becomes ids.

pub(crate) mod bpe;
pub(crate) mod template;
pub(crate) mod toy;

use super::EngineError;
use super::spec::ChatMessage;
use sha2::{Digest, Sha256};

/// Bytes of every token, and which of them mean something to the engine.
#[derive(Debug, Clone)]
pub(crate) struct Vocabulary {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    special: Vec<bool>,
    /// Tokens that end the output.
    pub eos: Vec<u32>,
    /// Token that starts every prompt, if the model has one.
    pub bos: Option<u32>,
}

impl Vocabulary {
    /// From the tokens in order of id: bytes, and whether the token is special.
    pub(crate) fn new(
        tokens: impl IntoIterator<Item = (Vec<u8>, bool)>,
        eos: Vec<u32>,
        bos: Option<u32>,
    ) -> Self {
        let (mut bytes, mut ends, mut special) = (Vec::new(), Vec::new(), Vec::new());
        for (b, s) in tokens {
            bytes.extend_from_slice(&b);
            ends.push(bytes.len() as u32);
            special.push(s);
        }
        Self {
            bytes,
            ends,
            special,
            eos,
            bos,
        }
    }

    /// Tokens.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes a token stands for; none for an id that does not exist.
    pub(crate) fn bytes(&self, token: u32) -> &[u8] {
        let i = token as usize;
        let Some(end) = self.ends.get(i) else {
            return &[];
        };
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        &self.bytes[start as usize..*end as usize]
    }

    /// Whether a token is a marker and no text.
    pub(crate) fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize).copied().unwrap_or(true)
    }

    /// Identity of the vocabulary, for the control state.
    pub(crate) fn digest(&self) -> [u8; 32] {
        let mut h = Sha256::new();
        h.update(b"moonlivekv vocabulary v1");
        h.update((self.ends.len() as u64).to_le_bytes());
        for end in &self.ends {
            h.update(end.to_le_bytes());
        }
        h.update(&self.bytes);
        for s in &self.special {
            h.update([u8::from(*s)]);
        }
        for e in &self.eos {
            h.update(e.to_le_bytes());
        }
        h.update([u8::from(self.bos.is_some())]);
        h.update(self.bos.unwrap_or(0).to_le_bytes());
        h.finalize().into()
    }
}

/// Turns text into ids.
pub(crate) trait Encoder: Send + Sync {
    /// Ids of `text`; special tokens in it are recognized only if `special`.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, EngineError>;
    /// The prompt of a chat, ready for the assistant's answer.
    fn chat(&self, messages: &[ChatMessage]) -> Result<String, EngineError>;
}

/// The ChatML form of a chat, for models that name no template of their own.
pub(crate) fn chatml(messages: &[ChatMessage]) -> String {
    let mut out = String::new();
    for m in messages {
        out.push_str("<|im_start|>");
        out.push_str(&m.role);
        out.push('\n');
        out.push_str(&m.content);
        out.push_str("<|im_end|>\n");
    }
    out.push_str("<|im_start|>assistant\n");
    out
}
