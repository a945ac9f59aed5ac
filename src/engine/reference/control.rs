//! Between a live request and its ControlStateV1.

use super::event::FinishReason;
use super::grammar::{self, Grammar, Matcher};
use super::identity::{DETOK_KIND, ENGINE_KIND};
use super::kvlog::GROUP;
use super::live::{Carried, Live, Params, validate};
use super::rng::CounterRng;
use super::sample;
use super::shared::Shared;
use super::spec::{GenerateSpec, PenaltyScope, Prompt, SamplingParams, StopParams};
use super::stage::Prepared;
use super::text::Front;
use crate::control_state as cs;
use crate::control_state::{ControlState, PenaltySemantics, Refusal, RngKind};
use crate::digest::SetDigest;
use crate::engine::adapter::AdapterError;
use crate::id::OwnerEpoch;
use std::sync::Arc;

/// Room for tokens beyond those replayed, so that the first few copy nothing.
const ROOM: usize = 64;

fn name(bytes: &[u8]) -> Result<cs::Name, AdapterError> {
    cs::Name::new(bytes).map_err(|e| AdapterError::Bug(e.to_string()))
}

fn blob(bytes: &[u8]) -> Result<cs::Blob, AdapterError> {
    cs::Blob::new(bytes).map_err(|e| AdapterError::Bug(e.to_string()))
}

/// The generator that a request draws from.
pub(crate) fn rng_kind(sampling: &SamplingParams) -> RngKind {
    if sampling.temperature > 0.0 {
        RngKind::Counter
    } else {
        RngKind::Greedy
    }
}

impl Shared {
    /// The control state of a request at a step boundary, from what the engine holds.
    pub(crate) fn control_of(
        &self,
        live: &Live,
        set_digest: SetDigest,
    ) -> Result<ControlState, AdapterError> {
        let seal = live.seal();
        let Some(pending) = live.tokens.last().copied().filter(|_| seal > 0) else {
            return Err(Refusal::NoOutputYet.into());
        };
        let info = &self.parts.info;
        let params = &live.params;
        let (sampling, stop) = (&params.sampling, &params.stop);
        let kv_len = live.tokens.len() as u64 - 1;
        let (engine_kind, fingerprint, extensions) = match &live.carried {
            Some(c) => (c.engine_kind, c.fingerprint, c.extensions.clone()),
            None => (ENGINE_KIND, self.parts.fingerprint, Vec::new()),
        };
        let grammar = match (&live.matcher, params.grammar_wire()) {
            (Some(m), Some((kind, source))) => {
                let (backend, version) = grammar::backend();
                Some(cs::Grammar {
                    kind,
                    backend: name(backend.as_bytes())?,
                    backend_version: name(version.as_bytes())?,
                    source: blob(&source)?,
                    start_index: 0,
                    accepted: m.accepted,
                    terminated: m.terminated,
                    next_mask_digest: m.mask_digest(),
                })
            }
            _ => None,
        };
        let stop_strings: Result<Vec<_>, _> = stop
            .stop_strings
            .iter()
            .map(|s| blob(s.as_bytes()))
            .collect();
        Ok(ControlState {
            identity: cs::Identity {
                request_id: live.request,
                // One state per output token: the token's number names it.
                state_seq: seal,
            },
            engine: cs::EngineIdentity {
                engine_kind,
                engine_build: fingerprint.engine_build,
            },
            model: cs::ModelIdentity {
                model: info.model,
                weights_version: info.weights_version,
                tokenizer: info.tokenizer,
            },
            numerics_profile: fingerprint.numerics_profile,
            lora: None,
            tokens: cs::Tokens {
                prompt: live.prompt_hash,
                output: live.output_hash.finish(),
                pending_token: pending,
            },
            position: cs::Position {
                kv_len,
                next_pos: kv_len as i64,
            },
            limits: cs::Limits {
                max_output: stop.max_output,
                min_output: stop.min_output,
                max_context: params.max_context,
                ignore_eos: stop.ignore_eos,
                eos_ids: info.eos.iter().copied().collect(),
                stop_ids: stop.stop_ids.clone(),
            },
            sampler: cs::Sampler {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
                typical_p: sampling.typical_p,
                sampler_order: sample::ORDER.to_vec(),
            },
            penalties: cs::Penalties {
                repetition: sampling.repetition_penalty,
                frequency: sampling.frequency_penalty,
                presence: sampling.presence_penalty,
                penalty_window: sampling.penalty_window,
                penalty_semantics: match sampling.penalty_scope {
                    PenaltyScope::PromptAndOutput => PenaltySemantics::PromptAndOutput,
                    PenaltyScope::OutputOnly => PenaltySemantics::OutputOnly,
                    PenaltyScope::Window => PenaltySemantics::Window,
                },
            },
            rng: cs::Rng {
                rng_kind: rng_kind(sampling),
                seed: live.rng.seed,
                draws: live.rng.draws,
                rng_state: cs::Blob::default(),
            },
            constraints: cs::Constraints {
                logit_bias: sampling.logit_bias.clone(),
                allowed: sampling.allowed_tokens.clone(),
                bad_words: sampling.bad_words.clone(),
            },
            grammar,
            parsers: cs::Parsers::default(),
            stops: cs::Stops {
                stop_strings: stop_strings?,
                include_stop: stop.include_stop,
                skip_special: stop.skip_special,
                spaces_between: false,
            },
            detokenizer: detokenizer(&live.front)?,
            stream: stream(&live.front),
            logprobs: None,
            usage: cs::Usage {
                usage_prompt: live.prompt_len as u32,
                usage_completion: seal as u32,
                usage_cached: live.cached_tokens,
                include_usage: params.include_usage,
            },
            scheduling: cs::Scheduling {
                priority: params.priority,
                remaining_ns: None,
                cache_salt: params.cache_salt.as_deref().map(blob).transpose()?,
            },
            kv_groups: vec![cs::KvGroup {
                group: GROUP,
                kind: 0,
                tokens_per_page: self.parts.digester.header().page_tokens.into(),
                first_live_pos: 0,
                committed: kv_len,
                set_digest: set_digest.0,
            }],
            mutable_state: Vec::new(),
            extensions,
        })
    }

    /// Builds a live request from a control state, its token log and the hash of the log's prompt
    /// part, by replay. The second value
    /// says whether the grammar allowed every token. Text offsets and masks are *rebuilt*, not
    /// copied: comparing the result's own control state with `state` shows whether they agree.
    pub(crate) fn live_from(
        &self,
        state: &ControlState,
        log: &[u32],
        prompt_hash: cs::TokenLogHash,
        owner_epoch: OwnerEpoch,
    ) -> Result<(Box<Live>, bool), AdapterError> {
        self.refuse_foreign(state)?;
        let prompt_len = state.tokens.prompt.count as usize;
        if log.len() as u64 != state.tokens.prompt.count + state.tokens.output.count {
            return Err(AdapterError::ReplayMismatch("the number of tokens"));
        }
        let (prompt, output) = log.split_at(prompt_len);
        let params = params_of(state)?;
        let mut spec = GenerateSpec::new(state.identity.request_id, Prompt::Tokens(Vec::new()));
        spec.sampling = params.sampling.clone();
        spec.stop = params.stop.clone();
        spec.cache_salt = params.cache_salt.clone();
        validate(&spec, self.parts.info.vocab)
            .map_err(|_| AdapterError::Incompatible("a sampling or stop parameter"))?;
        let matcher = match &params.grammar {
            Some(spec) => Some(Matcher::new(
                Arc::new(
                    Grammar::compile(spec)
                        .map_err(|_| AdapterError::Incompatible("the grammar"))?,
                ),
                self.parts.vocabulary.clone(),
            )),
            None => None,
        };
        let mut live = Box::new(Live {
            request: state.identity.request_id,
            owner_epoch,
            prompt_hash,
            output_hash: cs::TokenHasher::new(),
            tokens: prompt.to_vec(),
            prompt_len,
            rng: CounterRng {
                seed: state.rng.seed,
                draws: state.rng.draws,
            },
            matcher,
            front: Front::default(),
            cached_tokens: state.usage.usage_cached,
            carried: Some(Carried {
                engine_kind: state.engine.engine_kind,
                fingerprint: state.fingerprint(),
                extensions: state.extensions.clone(),
            }),
            finish: None,
            params: Arc::new(params),
        });
        live.tokens.reserve(output.len() + ROOM);
        let allowed = live.replay(output, &self.parts.vocabulary);
        agrees(&live, state)?;
        Ok((live, allowed))
    }

    /// The same from a request rebuilt up to an earlier boundary of the same terms, by a replay of
    /// the tokens since: `log` is what comes behind its own.
    pub(crate) fn go_on(
        &self,
        prepared: Prepared,
        state: &ControlState,
        log: &[u32],
        owner_epoch: OwnerEpoch,
    ) -> Result<(Box<Live>, bool), AdapterError> {
        self.refuse_foreign(state)?;
        let Prepared {
            mut live, allowed, ..
        } = prepared;
        live.owner_epoch = owner_epoch;
        live.rng.draws = state.rng.draws;
        let allowed = live.replay(log, &self.parts.vocabulary) && allowed;
        agrees(&live, state)?;
        Ok((live, allowed))
    }

    /// Refuses what this engine has no like of.
    pub(super) fn refuse_foreign(&self, s: &ControlState) -> Result<(), AdapterError> {
        let info = &self.parts.info;
        let differs = |what| Err(AdapterError::Incompatible(what));
        if s.model.model != info.model {
            return differs("the model");
        }
        if s.model.weights_version != info.weights_version {
            return differs("the version of the weights");
        }
        if s.model.tokenizer != info.tokenizer {
            return differs("the tokenizer");
        }
        if s.lora.is_some() {
            return differs("the low-rank adapter");
        }
        if !s.limits.eos_ids.iter().eq(info.eos.iter()) {
            return differs("the set of end-of-sequence tokens");
        }
        if s.limits.max_context > info.max_context {
            return differs("the longest context");
        }
        if s.sampler.sampler_order != sample::ORDER {
            return differs("the order of the sampler's steps");
        }
        match s.rng.rng_kind {
            RngKind::Greedy | RngKind::Counter if s.rng.rng_state == cs::Blob::default() => {}
            _ => return Err(Refusal::OpaqueRng.into()),
        }
        if (s.rng.rng_kind == RngKind::Counter) != (s.sampler.temperature > 0.0) {
            return differs("the generator that goes with the temperature");
        }
        if let Some(g) = &s.grammar {
            let (backend, version) = grammar::backend();
            if g.backend != name(backend.as_bytes())?
                || g.backend_version != name(version.as_bytes())?
                || g.start_index != 0
            {
                return differs("the grammar's matcher");
            }
        }
        if s.parsers != cs::Parsers::default() {
            return differs("the reasoning or tool-call parser");
        }
        if s.stops.spaces_between || s.detokenizer.detok_kind != DETOK_KIND {
            return differs("the detokenizer");
        }
        if s.stream.output_kind != cs::OutputKind::Delta || s.stream.stream_interval != 1 {
            return differs("the kind of stream");
        }
        if s.logprobs.is_some() {
            return differs("the support for log-probabilities");
        }
        if let Some(m) = s.mutable_state.first() {
            return Err(AdapterError::MutableState { group: m.group });
        }
        let [group] = &s.kv_groups[..] else {
            return differs("the number of KV groups");
        };
        if (group.group, group.kind, group.first_live_pos) != (GROUP, 0, 0)
            || group.tokens_per_page != u32::from(self.parts.digester.header().page_tokens)
        {
            return differs("the KV group");
        }
        Ok(())
    }
}

/// What was rebuilt ends where the state says.
fn agrees(live: &Live, state: &ControlState) -> Result<(), AdapterError> {
    if live.prompt_hash != state.tokens.prompt {
        return Err(AdapterError::ReplayMismatch("the prompt's token log"));
    }
    if live.output_hash.finish() != state.tokens.output {
        return Err(AdapterError::ReplayMismatch("the output's token log"));
    }
    if live.tokens.last() != Some(&state.tokens.pending_token) {
        return Err(AdapterError::ReplayMismatch("the pending token"));
    }
    if live.finish.is_some_and(|f| f != FinishReason::Abort) {
        return Err(AdapterError::ReplayMismatch("the end of the output"));
    }
    Ok(())
}

fn detokenizer(front: &Front) -> Result<cs::Detokenizer, AdapterError> {
    Ok(cs::Detokenizer {
        detok_kind: DETOK_KIND,
        prefix_offset: front.prefix_offset,
        read_offset: front.read_offset,
        last_special: front.last_special,
        held_text: blob(front.held.as_bytes())?,
        pending_utf8: cs::Utf8Head::new(front.pending.clone())
            .map_err(|e| AdapterError::Bug(e.to_string()))?,
    })
}

fn stream(front: &Front) -> cs::Stream {
    cs::Stream {
        sent_bytes: front.sent_bytes,
        sent_tokens: front.sent_tokens,
        stream_seq: front.sent_tokens,
        output_kind: cs::OutputKind::Delta,
        stream_interval: 1,
    }
}

fn params_of(s: &ControlState) -> Result<Params, AdapterError> {
    let text = |b: &cs::Blob| {
        String::from_utf8(b.to_vec())
            .map_err(|_| AdapterError::Incompatible("a stop string that is no text"))
    };
    let stop_strings: Result<Vec<_>, _> = s.stops.stop_strings.iter().map(text).collect();
    let grammar = match &s.grammar {
        Some(g) => Some(
            grammar::from_wire(g.kind, &g.source)
                .ok_or(AdapterError::Incompatible("the kind of grammar"))?,
        ),
        None => None,
    };
    Ok(Params {
        sampling: SamplingParams {
            temperature: s.sampler.temperature,
            top_k: s.sampler.top_k,
            top_p: s.sampler.top_p,
            min_p: s.sampler.min_p,
            typical_p: s.sampler.typical_p,
            repetition_penalty: s.penalties.repetition,
            frequency_penalty: s.penalties.frequency,
            presence_penalty: s.penalties.presence,
            penalty_window: s.penalties.penalty_window,
            penalty_scope: match s.penalties.penalty_semantics {
                PenaltySemantics::PromptAndOutput => PenaltyScope::PromptAndOutput,
                PenaltySemantics::OutputOnly => PenaltyScope::OutputOnly,
                PenaltySemantics::Window => PenaltyScope::Window,
            },
            logit_bias: s.constraints.logit_bias.clone(),
            allowed_tokens: s.constraints.allowed.clone(),
            bad_words: s.constraints.bad_words.clone(),
            seed: Some(s.rng.seed),
        },
        stop: StopParams {
            max_output: s.limits.max_output,
            min_output: s.limits.min_output,
            ignore_eos: s.limits.ignore_eos,
            stop_ids: s.limits.stop_ids.clone(),
            stop_strings: stop_strings?,
            include_stop: s.stops.include_stop,
            skip_special: s.stops.skip_special,
        },
        grammar,
        priority: s.scheduling.priority,
        cache_salt: s.scheduling.cache_salt.as_ref().map(|b| b.to_vec()),
        include_usage: s.usage.include_usage,
        max_context: s.limits.max_context,
    })
}
