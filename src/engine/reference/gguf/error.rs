//! Why a GGUF file is refused.

use super::super::EngineError;

/// A refused GGUF file. Offsets are bytes from the start of the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    /// The first four bytes are not `GGUF`.
    #[error("not a GGUF file (no `GGUF` at its start)")]
    Magic,
    /// Only versions 2 and 3 (little-endian) are read.
    #[error("GGUF version {0} is not supported: convert the file to version 2 or 3, little-endian")]
    Version(u32),
    /// The file ends before what it announces.
    #[error(
        "the file ends at byte {len} inside {what} at byte {at}: it is cut short, fetch it again"
    )]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Where it starts.
        at: u64,
        /// Length of the file.
        len: u64,
    },
    /// A count or length above the bound of this reader.
    #[error("{what} is {got}, more than the {max} that this reader accepts")]
    TooLarge {
        /// Which count.
        what: &'static str,
        /// What the file says.
        got: u64,
        /// The bound.
        max: u64,
    },
    /// An unknown type tag of a metadata value.
    #[error("metadata value of unknown type {0}")]
    ValueType(u32),
    /// Arrays of arrays are not used by any model read here.
    #[error("metadata array of type {0} is not supported")]
    ArrayType(u32),
    /// A boolean that is neither 0 nor 1.
    #[error("a boolean is {0}, neither 0 nor 1")]
    Bool(u8),
    /// A key or tensor name occurs twice.
    #[error("`{0}` occurs twice")]
    Duplicate(String),
    /// A name that is no UTF-8.
    #[error("a name at byte {0} is not UTF-8")]
    Name(u64),
    /// `general.alignment` must be a power of two of at most 64 KiB.
    #[error("alignment {0} is not a power of two of at most 65536")]
    Alignment(u64),
    /// A tensor type that cannot be decoded here.
    #[error(
        "tensor `{name}` has type {tag}; supported are F32 (0), F16 (1), Q4_0 (2), Q4_1 (3), Q8_0 (8), BF16 (30): requantize the model to one of them"
    )]
    TensorType {
        /// Which tensor.
        name: String,
        /// Its type tag.
        tag: u32,
    },
    /// Dimensions that are zero, too large, or no whole number of blocks.
    #[error("tensor `{name}` has impossible dimensions {dims:?}")]
    Dims {
        /// Which tensor.
        name: String,
        /// As the file says.
        dims: Vec<u64>,
    },
    /// A tensor that reaches outside the file or is misaligned.
    #[error(
        "tensor `{name}` (offset {offset}, {bytes} bytes) is misaligned or reaches past the end of the file"
    )]
    TensorPlace {
        /// Which tensor.
        name: String,
        /// Offset from the start of the data section.
        offset: u64,
        /// Length in bytes.
        bytes: u64,
    },
    /// A key or tensor that the model needs is absent.
    #[error("`{0}` is missing")]
    Missing(String),
    /// A key has another type or value than the model needs.
    #[error("`{key}` is {got}, expected {want}")]
    Value {
        /// Which key.
        key: String,
        /// What the file says.
        got: String,
        /// What can be used.
        want: &'static str,
    },
    /// A tensor has other dimensions than the metadata call for.
    #[error("tensor `{name}` has dimensions {got:?}, the metadata call for {want:?}")]
    Shape {
        /// Which tensor.
        name: String,
        /// In the file.
        got: Vec<u64>,
        /// From the metadata.
        want: Vec<u64>,
    },
    /// The model uses something that this engine does not compute.
    #[error("the model needs {0}, which this engine does not compute")]
    Unsupported(String),
    /// A tokenizer that cannot be used.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
}

impl From<GgufError> for EngineError {
    fn from(e: GgufError) -> Self {
        EngineError::Model(e.to_string())
    }
}
