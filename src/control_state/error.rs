//! Why a state cannot be read or written ([`CodecError`]) or may not be moved ([`Refusal`]).

use crate::id::ErrorKind;
use std::fmt;

/// The number of a field, as the codec's table counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Field(pub u8);

impl Field {
    /// What the field holds, for messages.
    pub fn name(self) -> &'static str {
        const NAMES: [&str; 24] = [
            "header",
            "request",
            "engine",
            "model",
            "numerics profile",
            "lora",
            "tokens",
            "position",
            "limits",
            "sampler",
            "penalties",
            "rng",
            "token constraints",
            "grammar",
            "parsers",
            "stop strings",
            "detokenizer",
            "stream",
            "logprobs",
            "usage",
            "scheduling",
            "kv groups",
            "mutable state",
            "extensions",
        ];
        NAMES.get(usize::from(self.0)).copied().unwrap_or("unknown")
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "field {} ({})", self.0, self.name())
    }
}

/// Bytes that are not the canonical encoding of any state, or a state that has no encoding.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The bytes end inside a field or before the last one.
    #[error("{0}: the bytes end too early; the state was cut short on its way")]
    Truncated(Field),
    /// A field's own length covers more bytes than its items use.
    #[error("{field}: {extra} bytes left over after its last item")]
    FieldTrailing {
        /// Where.
        field: Field,
        /// Bytes not used.
        extra: usize,
    },
    /// Bytes follow the last field.
    #[error("{extra} bytes after the last field; the encoding ends there")]
    Trailing {
        /// Bytes not used.
        extra: usize,
    },
    /// The whole encoding is longer than any legal state.
    #[error("{len} bytes of control state; at most {max} are accepted")]
    TooLarge {
        /// Bytes offered.
        len: usize,
        /// Largest accepted.
        max: usize,
    },
    /// A name, blob, vector or map longer than its bound.
    #[error("{field}: {len} {what} where at most {max} are accepted")]
    TooLong {
        /// Where.
        field: Field,
        /// What is counted.
        what: &'static str,
        /// Length claimed.
        len: u64,
        /// Largest accepted.
        max: u64,
    },
    /// The first four bytes are not `MLC1`.
    #[error("not a control state: magic {0:02x?} instead of \"MLC1\"")]
    BadMagic([u8; 4]),
    /// A version that this build does not read.
    #[error("control state version {0} is not known to this build (it reads 1); upgrade it")]
    UnknownVersion(u16),
    /// A reserved flag is set.
    #[error("reserved header flags {0:#06x} are set; a newer writer needs a newer reader")]
    ReservedFlags(u16),
    /// A closed enum, `bool` or `opt` tag with a value that has no meaning.
    #[error("{field}: {what} has no value {value}")]
    BadEnum {
        /// Where.
        field: Field,
        /// Which enum.
        what: &'static str,
        /// The value found.
        value: u32,
    },
    /// The keys of a set or map do not rise strictly.
    #[error("{field}: {what} are not strictly ascending")]
    NotAscending {
        /// Where.
        field: Field,
        /// Which set or map.
        what: &'static str,
    },
    /// A float is NaN.
    #[error("{field}: {what} is NaN")]
    Nan {
        /// Where.
        field: Field,
        /// Which item.
        what: &'static str,
    },
    /// A float is -0, which the canonical form writes as +0.
    #[error("{field}: {what} is -0, which the canonical form writes as +0")]
    NegativeZero {
        /// Where.
        field: Field,
        /// Which item.
        what: &'static str,
    },
    /// A critical extension that this build does not know.
    #[error(
        "critical extension {namespace} version {version} is not known to this build; \
         move the request to a worker that knows it"
    )]
    UnknownCritical {
        /// Its namespace, as text (bytes that are not UTF-8 replaced).
        namespace: String,
        /// Its version.
        version: u16,
    },
    /// Items that contradict each other.
    #[error("{field}: {what}")]
    Inconsistent {
        /// Where.
        field: Field,
        /// The rule broken.
        what: &'static str,
    },
}

impl CodecError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::UnknownVersion(_) | Self::ReservedFlags(_) | Self::UnknownCritical { .. } => {
                ErrorKind::Unsupported
            }
            _ => ErrorKind::Integrity,
        }
    }
}

/// Why a request may not be moved live; it keeps running where it is.
///
/// What cannot be proven equal at the other end is refused here by name, not tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// Draft tokens are in flight and the engine does not drop them at a hold.
    #[error(
        "speculative decoding keeps drafts past the accepted length; \
         use an engine that drops drafts at a hold, or turn speculation off for this request"
    )]
    SpecDecode,
    /// Image, audio or video inputs stand outside the token log.
    #[error("multimodal inputs are not part of the control state; let the request finish here")]
    Multimodal,
    /// Prompt given as embeddings, so the token log cannot pin it.
    #[error("the prompt was given as embeddings, which no token log can pin; let it finish here")]
    PromptEmbeds,
    /// Several sequences share one request.
    #[error(
        "n > 1, best-of and beam search share KV between sequences; move them when only one is left"
    )]
    FanoutOrBeam,
    /// Prompt log-probabilities are still owed.
    #[error("prompt log-probabilities are still owed; retry once they are delivered")]
    PromptLogprobs,
    /// Code of the user's runs in the sampler.
    #[error(
        "a custom logits processor keeps state that cannot be exported; let the request finish here"
    )]
    CustomLogitsProcessor,
    /// The random generator's state cannot be read.
    #[error("the engine cannot export its random state; turn on per-request seeded sampling")]
    OpaqueRng,
    /// A stop condition is a regular expression.
    #[error("stop conditions by regular expression keep matcher state; use stop strings")]
    StopRegex,
    /// The context was shifted, so positions and KV were rewritten.
    #[error("the context was shifted and KV rewritten in place; turn context shift off")]
    ContextShift,
    /// KV lies in a ring that overwrites itself.
    #[error("KV lies in a ring that is overwritten in place; no watermark holds there")]
    MutableRing,
    /// Source and destination do not compute alike, and no policy lists them as compatible.
    #[error(
        "engine build or numerics profile differ and are not listed as compatible; \
         choose a worker of the same build and profile, or list the pair in the profile policy"
    )]
    ProfileMismatch,
    /// Work on the request has not drained.
    #[error("work of this request is still in flight; retry when it has drained")]
    InFlight,
    /// No output token exists, so there is nothing to continue from.
    #[error("no output token yet; retry after the first one, or submit the request elsewhere")]
    NoOutputYet,
}

impl Refusal {
    /// All refusals, in the order of the specification.
    pub const ALL: [Self; 13] = [
        Self::SpecDecode,
        Self::Multimodal,
        Self::PromptEmbeds,
        Self::FanoutOrBeam,
        Self::PromptLogprobs,
        Self::CustomLogitsProcessor,
        Self::OpaqueRng,
        Self::StopRegex,
        Self::ContextShift,
        Self::MutableRing,
        Self::ProfileMismatch,
        Self::InFlight,
        Self::NoOutputYet,
    ];

    /// What a caller can do about it.
    pub fn kind(self) -> ErrorKind {
        match self {
            Self::InFlight | Self::NoOutputYet | Self::PromptLogprobs | Self::FanoutOrBeam => {
                ErrorKind::Retryable
            }
            _ => ErrorKind::Unsupported,
        }
    }
}
