//! ControlStateV1 against golden vectors that an independent generator wrote
//! (`tools/golden/gen_control.py`), in both directions.

use moonlivekv::control_state::*;
use moonlivekv::id::{OwnerEpoch, RequestId};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const VECTORS: &str = "tests/golden/control_state.json";

fn vectors() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(VECTORS);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn unhex(v: &Value) -> Vec<u8> {
    let text = v.as_str().unwrap();
    (0..text.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap())
        .collect()
}

/// Reads one JSON value as the item that the state's member wants.
trait Read: Sized {
    fn read(v: &Value) -> Self;
}

macro_rules! read_integers {
    ($($t:ty => $as:ident),*) => {$(
        impl Read for $t {
            fn read(v: &Value) -> Self {
                v.$as().unwrap().try_into().unwrap()
            }
        }
    )*};
}
read_integers!(u16 => as_u64, u32 => as_u64, u64 => as_u64, i32 => as_i64, i64 => as_i64);

impl Read for bool {
    fn read(v: &Value) -> Self {
        v.as_u64().unwrap() == 1
    }
}

/// Floats are given by their bits.
impl Read for f32 {
    fn read(v: &Value) -> Self {
        f32::from_bits(u32::read(v))
    }
}

impl<const N: usize> Read for [u8; N] {
    fn read(v: &Value) -> Self {
        unhex(v).try_into().unwrap()
    }
}

impl<const MAX: usize> Read for Bytes<MAX> {
    fn read(v: &Value) -> Self {
        Bytes::new(unhex(v)).unwrap()
    }
}

impl Read for RequestId {
    fn read(v: &Value) -> Self {
        RequestId(Read::read(v))
    }
}

impl<T: Read> Read for Option<T> {
    fn read(v: &Value) -> Self {
        (!v.is_null()).then(|| T::read(v))
    }
}

impl<T: Read> Read for Vec<T> {
    fn read(v: &Value) -> Self {
        v.as_array().unwrap().iter().map(T::read).collect()
    }
}

impl<T: Read + Ord> Read for std::collections::BTreeSet<T> {
    fn read(v: &Value) -> Self {
        Vec::read(v).into_iter().collect()
    }
}

impl<K: Read + Ord, V: Read> Read for std::collections::BTreeMap<K, V> {
    fn read(v: &Value) -> Self {
        let pair = |p: &Value| (K::read(&p[0]), V::read(&p[1]));
        v.as_array().unwrap().iter().map(pair).collect()
    }
}

macro_rules! read_enums {
    ($($t:ty as $wire:ty),*) => {$(
        impl Read for $t {
            fn read(v: &Value) -> Self {
                let number = v.as_u64().unwrap() as $wire;
                <$t>::ALL.into_iter().find(|k| *k as $wire == number).unwrap()
            }
        }
    )*};
}
read_enums!(RngKind as u16, PenaltySemantics as u16, OutputKind as u8);

macro_rules! read_structs {
    ($($t:ident { $($member:ident),* $(,)? })*) => {$(
        impl Read for $t {
            fn read(v: &Value) -> Self {
                $t { $($member: Read::read(&v[stringify!($member)])),* }
            }
        }
    )*};
}
read_structs! {
    TokenLogHash { count, hash }
    Identity { request_id, state_seq }
    EngineIdentity { engine_kind, engine_build }
    ModelIdentity { model, weights_version, tokenizer }
    Lora { name, digest, scale }
    Tokens { prompt, output, pending_token }
    Position { kv_len, next_pos }
    Limits { max_output, min_output, max_context, ignore_eos, eos_ids, stop_ids }
    Sampler { temperature, top_k, top_p, min_p, typical_p, sampler_order }
    Penalties { repetition, frequency, presence, penalty_window, penalty_semantics }
    Rng { rng_kind, seed, draws, rng_state }
    Constraints { logit_bias, allowed, bad_words }
    Grammar {
        kind, backend, backend_version, source, start_index, accepted, terminated,
        next_mask_digest,
    }
    Reasoning { parser, ended, end_index, budget }
    ToolParser { name, emitted_bytes, state }
    Parsers { reasoning, tool_parser }
    Stops { stop_strings, include_stop, skip_special, spaces_between }
    Detokenizer { detok_kind, prefix_offset, read_offset, last_special, held_text, pending_utf8 }
    Stream { sent_bytes, sent_tokens, stream_seq, output_kind, stream_interval }
    Logprobs { top, ids, cumulative_bits, unsent }
    Usage { usage_prompt, usage_completion, usage_cached, include_usage }
    Scheduling { priority, remaining_ns, cache_salt }
    KvGroup { group, kind, tokens_per_page, first_live_pos, committed, set_digest }
    MutableBlob { group, at_pos, digest, len }
    Extension { namespace, version, critical, payload }
    ControlState {
        identity, engine, model, numerics_profile, lora, tokens, position, limits, sampler,
        penalties, rng, constraints, grammar, parsers, stops, detokenizer, stream, logprobs,
        usage, scheduling, kv_groups, mutable_state, extensions,
    }
}

#[test]
fn states_encode_to_the_golden_bytes_and_decode_from_them() {
    let vectors = vectors();
    let accept = vectors["accept"].as_array().unwrap();
    assert!(accept.len() >= 3);
    for case in accept {
        let (name, state) = (&case["name"], ControlState::read(&case["state"]));
        let golden = unhex(&case["encoding"]);
        assert_eq!(state.encode().unwrap(), golden, "{name}");
        assert_eq!(ControlState::decode(&golden).unwrap(), state, "{name}");
        let digest = &case["digest"];
        let expected = ControlDigest {
            hash: Read::read(&digest["hash"]),
            offset: u64::read(&digest["offset"]),
            owner_epoch: OwnerEpoch(u64::read(&digest["owner_epoch"])),
        };
        let actual = ControlDigest::of(&golden, state.seal(), expected.owner_epoch);
        assert_eq!(actual, expected, "{name}");
    }
}

#[test]
fn what_the_format_forbids_is_refused_by_name() {
    let vectors = vectors();
    let reject = vectors["reject"].as_array().unwrap();
    assert!(reject.len() >= 30);
    for case in reject {
        let error = ControlState::decode(&unhex(&case["encoding"])).unwrap_err();
        let debug = format!("{error:?}");
        let variant = debug.split([' ', '(', '{']).next().unwrap();
        assert_eq!(variant, case["error"], "{}: {error}", case["name"]);
    }
}

#[test]
fn token_logs_and_masks_hash_to_the_golden_digests() {
    let vectors = vectors();
    for case in vectors["token_logs"].as_array().unwrap() {
        let tokens = Vec::<u32>::read(&case["tokens"]);
        assert_eq!(TokenLogHash::of(&tokens), TokenLogHash::read(case));
    }
    for case in vectors["masks"].as_array().unwrap() {
        let allowed = Vec::<u32>::read(&case["allowed"]);
        let digest = mask_digest(u32::read(&case["vocab"]), |t| allowed.contains(&t));
        assert_eq!(digest, <[u8; 32]>::read(&case["digest"]));
    }
}

#[test]
fn the_generator_still_writes_the_committed_vectors() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("python3")
        .arg(root.join("tools/golden/gen_control.py"))
        .output()
        .expect("python3 runs the generator");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let committed = std::fs::read(root.join(VECTORS)).unwrap();
    assert!(
        output.stdout == committed,
        "run: python3 tools/golden/gen_control.py {VECTORS}"
    );
}
