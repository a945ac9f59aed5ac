//! Real weights: Llama-family GGUF files, with their tokenizer.

mod error;
mod load;
mod parse;
#[cfg(test)]
mod tests;

pub use error::GgufError;
pub(crate) use load::load;
pub use load::try_model;
pub use parse::{Array, Gguf, MAX_ENTRIES, MAX_NAME, TensorInfo, TensorType, Value};
