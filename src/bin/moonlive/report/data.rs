//! What a report shows. The demonstration fills it; nothing here measures.
//!
//! All times are microseconds on one clock, from one zero: the start of the recorded span.

use serde::Serialize;

/// A whole demonstration.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Whether it ended PASS.
    pub pass: bool,
    /// Why it ended so, in a few words: the injected fault, the first difference; may be empty.
    pub cause: String,
    /// The command line that made it.
    pub command: String,
    /// Model, as a human names it.
    pub model: String,
    /// `local`, `shm` or `tcp`.
    pub transport: String,
    /// `resident` or `full`.
    pub verify: String,
    /// CPUs.
    pub machine: String,
    /// One for each request, at least one.
    pub requests: Vec<Request>,
}

/// One request that was decoded, and where it migrated.
#[derive(Debug, Clone, Serialize)]
pub struct Request {
    /// Its id.
    pub id: String,
    /// Prompt length in tokens.
    pub prompt_tokens: u64,
    /// The stream, equal byte for byte to that of a run without a migration.
    pub identical: bool,
    /// Tokens as the client saw them, in order.
    pub tokens: Vec<Token>,
    /// The migration; `None` where the request stayed.
    pub migration: Option<Migration>,
}

/// One token at the client.
#[derive(Debug, Clone, Serialize)]
pub struct Token {
    /// Its number, from 1.
    pub seq: u64,
    /// Its id.
    pub token: u32,
    /// The text it adds.
    pub text: String,
    /// When the client read it.
    pub at_us: f64,
}

/// One migration.
#[derive(Debug, Clone, Serialize)]
pub struct Migration {
    /// Source worker.
    pub from: String,
    /// Destination worker.
    pub to: String,
    /// Whether the route flipped; else it was rolled back.
    pub committed: bool,
    /// Why it was rolled back; empty where it committed.
    pub cause: String,
    /// Last token of the source's; the next one is the destination's.
    pub seal: u64,
    /// KV tokens at the seal.
    pub kv_tokens: u64,
    /// Owner epoch before and after.
    pub owner_epoch: (u64, u64),
    /// Last source step done to destination may launch.
    pub fence_pause_us: Option<f64>,
    /// Phases from PREPARE to RESUME, in order of their start.
    pub phases: Vec<Phase>,
    /// Steps inside the fence, in order; shown enlarged.
    pub fence: Vec<Phase>,
    /// Every canonical page, in order; the tail last.
    pub pages: Vec<Page>,
    /// KV bytes moved while the source went on decoding.
    pub stream_bytes: u64,
    /// KV bytes moved inside the fence.
    pub fence_bytes: u64,
    /// Control state: length and digest.
    pub control: Sealed,
    /// Running digest of all pages.
    pub set: Sealed,
}

/// Who does something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    /// Drives, and decides nothing.
    Coordinator,
    /// Decodes first.
    Source,
    /// Decodes afterwards.
    Destination,
    /// Holds the route record and accepts tokens.
    Gateway,
}

/// A span of work.
#[derive(Debug, Clone, Serialize)]
pub struct Phase {
    /// What: `stream`, `commit`.
    pub name: String,
    /// Who.
    pub lane: Lane,
    /// From.
    pub from_us: f64,
    /// To.
    pub to_us: f64,
}

/// One canonical page and its two digests.
#[derive(Debug, Clone, Serialize)]
pub struct Page {
    /// Its place in the request.
    pub page: u32,
    /// Valid tokens.
    pub tokens: u32,
    /// Bytes of KV.
    pub bytes: u64,
    /// Moved inside the fence, in whole or in part; else while the source went on decoding.
    pub in_fence: bool,
    /// Hexadecimal digest from source-resident memory.
    pub expected: String,
    /// Hexadecimal digest from destination-resident memory; empty where it was not reached.
    pub actual: String,
}

impl Page {
    /// Whether both ends agree.
    pub fn verified(&self) -> bool {
        !self.actual.is_empty() && self.expected == self.actual
    }
}

/// Something that was digested at both ends.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Sealed {
    /// Length in bytes.
    pub bytes: u64,
    /// At the source, hexadecimal.
    pub expected: String,
    /// At the destination, hexadecimal; empty where it was not reached.
    pub actual: String,
}
