//! Promises of the codec over drawn states; golden vectors are in `tests/golden_control.rs`.

use super::*;
use crate::id::{OwnerEpoch, RequestId};
use rand::{Rng as _, RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};

/// Draws states that reach every option, enum value and shape of collection.
pub(super) struct Draw(ChaCha8Rng);

impl Draw {
    pub(super) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    fn flag(&mut self) -> bool {
        self.0.random_bool(0.5)
    }

    /// Small and huge values alike.
    fn word(&mut self) -> u64 {
        let shift = self.0.random_range(0..64);
        self.0.next_u64() >> shift
    }

    fn float(&mut self) -> f32 {
        match self.0.random_range(0..6) {
            0 => 0.0,
            1 => -0.0,
            2 => f32::INFINITY,
            3 => f32::NEG_INFINITY,
            _ => Some(f32::from_bits(self.0.next_u32()))
                .filter(|f| !f.is_nan())
                .unwrap_or(0.7),
        }
    }

    fn hash<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        self.0.fill_bytes(&mut out);
        out
    }

    fn bytes<const MAX: usize>(&mut self, most: usize) -> Bytes<MAX> {
        let mut out = vec![0; self.0.random_range(0..=most)];
        self.0.fill_bytes(&mut out);
        Bytes::new(out).unwrap()
    }

    fn some<T>(&mut self, make: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.flag().then(|| make(self))
    }

    fn many<T>(&mut self, mut make: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.0.random_range(0..4)).map(|_| make(self)).collect()
    }

    fn ids(&mut self) -> BTreeSet<u32> {
        self.many(|d| d.word() as u32).into_iter().collect()
    }

    fn groups<T>(&mut self, mut make: impl FnMut(&mut Self, u16) -> T) -> Vec<T> {
        let groups: BTreeSet<u16> = self.many(|d| d.word() as u16).into_iter().collect();
        groups.into_iter().map(|g| make(self, g)).collect()
    }

    pub(super) fn state(&mut self) -> ControlState {
        let (prompt, output) = (self.word() >> 1, 1 + (self.word() >> 2));
        ControlState {
            identity: Identity {
                request_id: RequestId(self.hash()),
                state_seq: self.word(),
            },
            engine: EngineIdentity {
                engine_kind: self.word() as u16,
                engine_build: self.hash(),
            },
            model: ModelIdentity {
                model: self.hash(),
                weights_version: self.word(),
                tokenizer: self.hash(),
            },
            numerics_profile: self.hash(),
            lora: self.some(|d| Lora {
                name: d.bytes(9),
                digest: d.hash(),
                scale: d.float(),
            }),
            tokens: Tokens {
                prompt: TokenLogHash {
                    count: prompt,
                    hash: self.hash(),
                },
                output: TokenLogHash {
                    count: output,
                    hash: self.hash(),
                },
                pending_token: self.word() as u32,
            },
            position: Position {
                kv_len: prompt + output - 1,
                next_pos: self.word() as i64,
            },
            limits: Limits {
                max_output: self.word() as u32,
                min_output: self.word() as u32,
                max_context: self.word() as u32,
                ignore_eos: self.flag(),
                eos_ids: self.ids(),
                stop_ids: self.ids(),
            },
            sampler: Sampler {
                temperature: self.float(),
                top_k: self.word() as u32,
                top_p: self.float(),
                min_p: self.float(),
                typical_p: self.float(),
                sampler_order: self.many(|d| d.word() as u16),
            },
            penalties: Penalties {
                repetition: self.float(),
                frequency: self.float(),
                presence: self.float(),
                penalty_window: self.word() as i32,
                penalty_semantics: PenaltySemantics::ALL[self.0.random_range(0..3)],
            },
            rng: Rng {
                rng_kind: RngKind::ALL[self.0.random_range(0..6)],
                seed: self.word(),
                draws: self.word(),
                rng_state: self.bytes(20),
            },
            constraints: Constraints {
                logit_bias: self
                    .many(|d| (d.word() as u32, d.float()))
                    .into_iter()
                    .collect::<BTreeMap<_, _>>(),
                allowed: self.some(Self::ids),
                bad_words: self.many(|d| d.many(|d| d.word() as u32)),
            },
            grammar: self.some(|d| Grammar {
                kind: d.word() as u16,
                backend: d.bytes(8),
                backend_version: d.bytes(8),
                source: d.bytes(40),
                start_index: d.word() as u32,
                accepted: d.word() as u32,
                terminated: d.flag(),
                next_mask_digest: d.hash(),
            }),
            parsers: Parsers {
                reasoning: self.some(|d| Reasoning {
                    parser: d.bytes(8),
                    ended: d.flag(),
                    end_index: d.some(|d| d.word() as u32),
                    budget: d.some(|d| d.word() as u32),
                }),
                tool_parser: self.some(|d| ToolParser {
                    name: d.bytes(8),
                    emitted_bytes: d.word(),
                    state: d.bytes(20),
                }),
            },
            stops: Stops {
                stop_strings: self.many(|d| d.bytes(5)),
                include_stop: self.flag(),
                skip_special: self.flag(),
                spaces_between: self.flag(),
            },
            detokenizer: Detokenizer {
                detok_kind: self.word() as u16,
                prefix_offset: self.word() as u32,
                read_offset: self.word() as u32,
                last_special: self.flag(),
                held_text: self.bytes(12),
                pending_utf8: self.bytes(3),
            },
            stream: Stream {
                sent_bytes: self.word(),
                sent_tokens: self.word(),
                stream_seq: self.word(),
                output_kind: OutputKind::ALL[self.0.random_range(0..3)],
                stream_interval: self.word() as u32,
            },
            logprobs: self.some(|d| Logprobs {
                top: d.word() as i32,
                ids: d.ids(),
                cumulative_bits: d.word(),
                unsent: d.bytes(16),
            }),
            usage: Usage {
                usage_prompt: self.word() as u32,
                usage_completion: self.word() as u32,
                usage_cached: self.word() as u32,
                include_usage: self.flag(),
            },
            scheduling: Scheduling {
                priority: self.word() as i32,
                remaining_ns: self.some(Self::word),
                cache_salt: self.some(|d| d.bytes(8)),
            },
            kv_groups: self.groups(|d, group| KvGroup {
                group,
                kind: d.word() as u16,
                tokens_per_page: d.word() as u32,
                first_live_pos: d.word(),
                committed: d.word(),
                set_digest: d.hash(),
            }),
            mutable_state: self.groups(|d, group| MutableBlob {
                group,
                at_pos: d.word(),
                digest: d.hash(),
                len: d.word(),
            }),
            extensions: self.groups(|d, version| Extension {
                namespace: Name::new(*b"x.example").unwrap(),
                version,
                critical: false,
                payload: d.bytes(20),
            }),
        }
    }
}

#[test]
fn a_state_survives_and_its_encoding_is_the_only_one() {
    for seed in 0..2000 {
        let state = Draw::new(seed).state();
        let bytes = state.encode().unwrap();
        let back = ControlState::decode(&bytes).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert_eq!(back, state, "seed {seed}");
        assert_eq!(back.encode().unwrap(), bytes, "seed {seed}");
    }
}

/// Canonical: no byte of an encoding is slack. Whatever a flip decodes to is another state, and its
/// own encoding is exactly the flipped bytes.
#[test]
fn no_changed_byte_decodes_to_the_same_state() {
    let mut decoded = 0u64;
    for seed in 0..12 {
        let state = Draw::new(seed).state();
        let good = state.encode().unwrap();
        for at in 0..good.len() {
            for flip in [1u8, 2, 4, 8, 16, 32, 64, 128, 255] {
                let mut bad = good.clone();
                bad[at] ^= flip;
                if let Ok(other) = ControlState::decode(&bad) {
                    decoded += 1;
                    assert_eq!(other.encode().unwrap(), bad, "seed {seed} byte {at}");
                    assert_ne!(other, state, "seed {seed} byte {at} flip {flip}");
                }
            }
        }
    }
    assert!(decoded > 10_000, "too few flips gave a state: {decoded}");
}

#[test]
fn every_cut_and_every_suffix_is_refused() {
    let bytes = Draw::new(3).state().encode().unwrap();
    for len in 0..bytes.len() {
        let error = ControlState::decode(&bytes[..len]).unwrap_err();
        assert!(matches!(error, CodecError::Truncated(_)), "{len}: {error}");
    }
    let mut longer = bytes;
    longer.push(0);
    let extra = CodecError::Trailing { extra: 1 };
    assert_eq!(ControlState::decode(&longer), Err(extra));
}

#[test]
fn the_encoder_refuses_what_the_decoder_would() {
    let good = Draw::new(5).state();
    let nan = |change: fn(&mut ControlState)| {
        let mut state = good.clone();
        change(&mut state);
        state.encode().unwrap_err()
    };
    let temperature = nan(|s| s.sampler.temperature = f32::NAN);
    let what = "temperature";
    assert_eq!(
        temperature,
        CodecError::Nan {
            field: Field(9),
            what
        }
    );
    let bias = nan(|s| s.constraints.logit_bias = [(1, f32::NAN)].into());
    assert!(matches!(
        bias,
        CodecError::Nan {
            field: Field(12),
            ..
        }
    ));
    let kv_len = nan(|s| s.position.kv_len += 1);
    assert!(matches!(
        kv_len,
        CodecError::Inconsistent {
            field: Field(7),
            ..
        }
    ));
    let group = nan(|s| s.kv_groups = vec![KvGroup::default(); 2]);
    assert!(matches!(
        group,
        CodecError::NotAscending {
            field: Field(21),
            ..
        }
    ));
    let blank = ControlState::default().encode().unwrap_err();
    assert!(matches!(
        blank,
        CodecError::Inconsistent {
            field: Field(6),
            ..
        }
    ));
    let crowd = nan(|s| s.sampler.sampler_order = vec![0; MAX_ITEMS + 1]);
    assert!(matches!(
        crowd,
        CodecError::TooLong {
            field: Field(9),
            ..
        }
    ));
    let large = nan(|s| s.stops.stop_strings = vec![Blob::new([0; 1 << 20]).unwrap(); 17]);
    assert!(matches!(large, CodecError::TooLarge { .. }));
}

#[test]
fn negative_zero_has_the_digest_of_zero() {
    let mut state = Draw::new(8).state();
    state.sampler.temperature = 0.0;
    let plus = state.encode().unwrap();
    state.sampler.temperature = -0.0;
    assert_eq!(state.encode().unwrap(), plus);
}

#[test]
fn extensions_are_refused_if_critical_and_preserved_byte_for_byte_if_not() {
    let mut state = Draw::new(13).state();
    let ours = |critical| Extension {
        namespace: Name::new(*b"org.example/tree").unwrap(),
        version: 4,
        critical,
        payload: Blob::new(*b"\x00\xff kept as it is").unwrap(),
    };
    state.extensions = vec![ours(false)];
    let bytes = state.encode().unwrap();
    let back = ControlState::decode(&bytes).unwrap();
    assert_eq!(back.extensions, state.extensions);
    assert_eq!(back.encode().unwrap(), bytes);

    state.extensions = vec![ours(true)];
    let bytes = state.encode().unwrap();
    let refused = CodecError::UnknownCritical {
        namespace: "org.example/tree".into(),
        version: 4,
    };
    assert_eq!(ControlState::decode(&bytes), Err(refused.clone()));
    let other_version: (&[u8], u16) = (b"org.example/tree", 5);
    let known: (&[u8], u16) = (b"org.example/tree", 4);
    assert_eq!(
        ControlState::decode_knowing(&bytes, &[other_version]),
        Err(refused)
    );
    assert_eq!(ControlState::decode_knowing(&bytes, &[known]), Ok(state));
}

/// A length that promises more than is there must not reserve memory for the promise.
#[test]
fn a_count_without_bytes_costs_nothing() {
    let bytes = Draw::new(21).state().encode().unwrap();
    let huge = vec![0u8; MAX_ENCODING_BYTES + 1];
    assert!(matches!(
        ControlState::decode(&huge),
        Err(CodecError::TooLarge { .. })
    ));
    // Every u32 in turn becomes a large count or length; each must fail fast or decode as itself.
    for at in 0..bytes.len() - 4 {
        for claim in [u32::MAX, MAX_ITEMS as u32, MAX_BLOB_BYTES as u32] {
            let mut bad = bytes.clone();
            bad[at..at + 4].copy_from_slice(&claim.to_le_bytes());
            if let Ok(state) = ControlState::decode(&bad) {
                assert_eq!(state.encode().unwrap(), bad);
            }
        }
    }
}

#[test]
fn the_parts_of_a_digest_are_compared_each_for_itself() {
    let bytes = Draw::new(1).state().encode().unwrap();
    let digest = ControlDigest::of(&bytes, 7, OwnerEpoch(2));
    assert_eq!(digest.difference(&digest), None);
    let cases = [
        (ControlDigest::of(&bytes, 7, OwnerEpoch(3)), "owner epoch"),
        (ControlDigest::of(&bytes, 8, OwnerEpoch(2)), "offset"),
        (
            ControlDigest::of(&bytes[1..], 7, OwnerEpoch(2)),
            "state hash",
        ),
    ];
    for (other, part) in cases {
        assert_ne!(digest, other);
        assert_eq!(digest.difference(&other), Some(part));
    }
}

#[test]
fn every_refusal_names_cause_and_remedy() {
    for refusal in Refusal::ALL {
        let text = refusal.to_string();
        assert!(
            text.contains([';', ',']) && text.len() > 40,
            "{refusal:?} says only: {text}"
        );
    }
}
