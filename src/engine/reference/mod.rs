//! The reference engine: a small, real Llama-architecture decoder over a paged KV pool.
//!
//! It exists so that a live migration can be *judged*: it is batch-invariant, so the tokens and KV
//! bits of a request are the same whatever shares its batch, however its prompt is chunked, wherever
//! its blocks lie, however many threads compute, and on whichever machine. Each number is made by
//! additions and multiplications in one fixed order, with no fused multiply-add and no function of
//! the platform's libm.
//!
//! ```text
//! let engine = Engine::start(EngineConfig::tiny(7), sink)?;      // driver thread
//! let engine = Engine::stepper(EngineConfig::tiny(7), sink)?;    // no thread: engine.step()
//! engine.submit(GenerateSpec::new(id, Prompt::Text("...".into())))?;
//! engine.abort(id)?;                       // frees its blocks, sink.closed(id, Aborted)
//! engine.replay(id, from_seq)?;            // events again, e.g. those not known to be delivered
//! engine.status();                         // running, waiting, held, staged, pool use
//! engine.model();                          // names, digests, vocabulary size, context length
//! engine.tokenize(&prompt)?; engine.detokenize(&ids);
//! engine.shutdown();                       // also on drop of the last handle
//! ```
//! [`Engine`] is a cheap handle (`Clone`, `Send`, `Sync`) and implements the
//! `EngineAdapter` contract.

#![deny(unsafe_code)]

mod adapter;
mod arm;
mod blocks;
mod build;
mod clock;
mod config;
mod control;
mod dest;
mod engine;
mod entry;
mod error;
mod event;
pub mod gguf;
mod grammar;
mod hashing;
mod identity;
mod kvlog;
mod live;
mod model;
mod num;
mod recover;
mod rehearse;
mod rng;
mod sample;
mod shared;
mod source;
mod spec;
mod stage;
mod step;
mod text;
mod tokenizer;
mod views;

pub use clock::clock_ns;
pub use config::{EngineConfig, KvDtype, KvOrder, ModelSource, SeededSize, SyntheticGeometry};
pub use engine::{Engine, EngineStatus, RequestStatus};
pub use error::EngineError;
pub use event::{CloseReason, EngineEvent, FinishReason, TokenEvent, TokenSink};
pub use gguf::{Gguf, GgufError};
pub use identity::{ENGINE_KIND, ModelInfo};
pub use spec::{
    ChatMessage, GenerateSpec, GrammarSpec, PenaltyScope, Prompt, SamplingParams, StopParams,
};
pub use step::StepReport;
