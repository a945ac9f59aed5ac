//! The bodies of all fuzz targets, shared by the fuzzer's programs and by the replay of the corpus
//! in `tests/fuzz_corpus.rs`.

mod completion_body;
mod control_state;
mod daemon_payload;
mod endpoint;
mod engine_message;
mod gguf;
mod gguf_model;
mod journal_record;
mod kv_object_set;
mod migration_message;
mod object_set_header;
mod records;
mod remote_region;
mod route_record;
mod sse_event;
mod store_message;
mod store_record;
mod submit_request;
mod transport_frame;
mod wal_segment;
mod wire_header;

/// One decoder under test.
pub struct Target {
    /// Its name: of the program, of the corpus' folder.
    pub name: &'static str,
    /// Decodes, checks what was accepted (by panic), and names the outcome.
    pub run: fn(&[u8]) -> &'static str,
    /// Every outcome there is.
    pub outcomes: &'static [&'static str],
    /// Inputs made by code, named `OUTCOME` or `OUTCOME.what`. The small ones are committed as files
    /// too, for the fuzzer to start from.
    pub seeds: fn() -> Vec<Seed>,
}

/// A named input.
pub type Seed = (String, Vec<u8>);

/// All decoders.
pub const TARGETS: &[Target] = &[
    completion_body::TARGET,
    control_state::TARGET,
    daemon_payload::TARGET,
    endpoint::TARGET,
    engine_message::TARGET,
    gguf::TARGET,
    gguf_model::TARGET,
    journal_record::TARGET,
    kv_object_set::TARGET,
    migration_message::TARGET,
    object_set_header::TARGET,
    remote_region::TARGET,
    route_record::TARGET,
    sse_event::TARGET,
    store_message::TARGET,
    store_record::TARGET,
    submit_request::TARGET,
    transport_frame::TARGET,
    wal_segment::TARGET,
    wire_header::TARGET,
];

/// Runs one target; what a fuzzer's program calls.
#[allow(dead_code, reason = "the replay goes through TARGETS itself")]
pub fn run(name: &str, data: &[u8]) {
    let target = TARGETS.iter().find(|t| t.name == name);
    (target.expect("a known target").run)(data);
}

/// A seed.
fn seed(name: &str, bytes: impl Into<Vec<u8>>) -> Seed {
    (name.to_owned(), bytes.into())
}

/// `bytes` with `new` written over what is at `at`.
fn patched(bytes: &[u8], at: usize, new: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    out[at..at + new.len()].copy_from_slice(new);
    out
}

/// The bytes and something after them.
fn longer(bytes: &[u8]) -> Vec<u8> {
    [bytes, &[0]].concat()
}

/// All but the last byte.
fn shorter(bytes: &[u8]) -> Vec<u8> {
    bytes[..bytes.len() - 1].to_vec()
}
