//! Everything that decides the next token and the next byte of text of one request.

use super::event::{FinishReason, TokenEvent};
use super::grammar::{Grammar, Matcher};
use super::rng::{CounterRng, mix64};
use super::sample::{Context, sample};
use super::spec::{GenerateSpec, GrammarSpec, SamplingParams, StopParams};
use super::text::Front;
use super::tokenizer::Vocabulary;
use super::{EngineError, grammar};
use crate::control_state::{Extension, Fingerprint, TokenHasher, TokenLogHash};
use crate::id::{OwnerEpoch, RequestId};
use std::sync::Arc;

/// What stays as it is for the life of a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Params {
    pub sampling: SamplingParams,
    pub stop: StopParams,
    pub grammar: Option<GrammarSpec>,
    pub priority: i32,
    pub cache_salt: Option<Vec<u8>>,
    pub include_usage: bool,
    /// Longest sequence, prompt and output.
    pub max_context: u32,
}

/// What an import brought that this engine hands on as it is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Carried {
    /// The source's engine and numerics, until this engine becomes the source.
    pub engine_kind: u16,
    pub fingerprint: Fingerprint,
    pub extensions: Vec<Extension>,
}

/// See the [module](self). One owner at a time: the request's entry, or the step it is in.
#[derive(Clone)]
pub(crate) struct Live {
    pub request: RequestId,
    pub owner_epoch: OwnerEpoch,
    pub params: Arc<Params>,
    /// Prompt, then output.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub prompt_hash: TokenLogHash,
    pub output_hash: TokenHasher,
    pub rng: CounterRng,
    pub matcher: Option<Matcher>,
    pub front: Front,
    pub cached_tokens: u32,
    pub carried: Option<Carried>,
    pub finish: Option<FinishReason>,
}

impl Live {
    /// A request that has made nothing yet.
    pub(crate) fn new(
        request: RequestId,
        owner_epoch: OwnerEpoch,
        mut params: Params,
        prompt: Vec<u32>,
        vocabulary: &Arc<Vocabulary>,
    ) -> Result<Self, EngineError> {
        // Resolved here, so that a migrated or recovered request draws on unchanged.
        let seed = params.sampling.seed.unwrap_or_else(|| {
            let (a, b) = request.0.split_at(8);
            let word = |w: &[u8]| w.iter().fold(0u64, |v, b| v << 8 | u64::from(*b));
            mix64(word(a) ^ mix64(word(b)))
        });
        params.sampling.seed = Some(seed);
        let matcher = match &params.grammar {
            Some(spec) => Some(Matcher::new(
                Arc::new(Grammar::compile(spec)?),
                vocabulary.clone(),
            )),
            None => None,
        };
        Ok(Self {
            request,
            owner_epoch,
            params: Arc::new(params),
            prompt_len: prompt.len(),
            prompt_hash: TokenLogHash::of(&prompt),
            output_hash: TokenHasher::new(),
            tokens: prompt,
            rng: CounterRng { seed, draws: 0 },
            matcher,
            front: Front::default(),
            cached_tokens: 0,
            carried: None,
            finish: None,
        })
    }

    /// Output tokens so far, which is the number of the last one.
    pub(crate) fn seal(&self) -> u64 {
        (self.tokens.len() - self.prompt_len) as u64
    }

    /// Draws the next token and takes it.
    pub(crate) fn step(
        &mut self,
        logits: &mut [f32],
        vocabulary: &Vocabulary,
        step_done_ns: u64,
    ) -> TokenEvent {
        let (prompt, output) = self.tokens.split_at(self.prompt_len);
        let early = (output.len() as u64) < u64::from(self.params.stop.min_output);
        let mut banned = Vec::new();
        if early {
            banned.extend(&vocabulary.eos);
            banned.extend(&self.params.stop.stop_ids);
        }
        let context = Context {
            prompt,
            output,
            banned: &banned,
            mask: self.matcher.as_ref().map(Matcher::mask),
            fallback: vocabulary.eos.first().copied().unwrap_or(0),
        };
        let token = sample(&self.params.sampling, &context, logits, &mut self.rng);
        self.accept(token, vocabulary, step_done_ns)
    }

    /// Takes an output token, drawn or replayed: every state here moves past it.
    pub(crate) fn accept(
        &mut self,
        token: u32,
        vocabulary: &Vocabulary,
        step_done_ns: u64,
    ) -> TokenEvent {
        if let Some(m) = &mut self.matcher {
            // The fallback may stand outside the grammar; it ends the output.
            m.accept(token);
        }
        self.advance(token, vocabulary, step_done_ns, false)
    }

    /// Takes output tokens made before, with one look at the grammar's mask at the end. `false` if
    /// the grammar refuses one of them.
    pub(crate) fn replay(&mut self, tokens: &[u32], vocabulary: &Vocabulary) -> bool {
        let allowed = self.matcher.as_mut().is_none_or(|m| m.replay(tokens));
        for token in tokens {
            self.advance(*token, vocabulary, 0, false);
        }
        allowed
    }

    /// `end`: the output is known to have ended with this token.
    fn advance(
        &mut self,
        token: u32,
        vocabulary: &Vocabulary,
        step_done_ns: u64,
        end: bool,
    ) -> TokenEvent {
        self.tokens.push(token);
        self.output_hash.push(token);
        let seq = self.seal();
        let stop = &self.params.stop;
        let check = seq >= u64::from(stop.min_output);
        let eos = vocabulary.eos.contains(&token);
        let dead = self.matcher.as_ref().is_some_and(|m| m.exhausted());
        let ends =
            check && ((eos && !stop.ignore_eos) || stop.stop_ids.contains(&token)) || dead || end;
        let full = seq >= u64::from(stop.max_output)
            || self.tokens.len() >= self.params.max_context as usize;
        let pushed = self.front.push(
            vocabulary.bytes(token),
            vocabulary.is_special(token),
            stop,
            check,
            ends || full,
        );
        self.finish = if ends || pushed.stopped {
            Some(FinishReason::Stop)
        } else if full {
            Some(FinishReason::Length)
        } else {
            None
        };
        TokenEvent {
            request: self.request,
            owner_epoch: self.owner_epoch,
            seq,
            token,
            text: pushed.text,
            finish: self.finish,
            cached_tokens: self.cached_tokens,
            step_done_ns,
        }
    }

    /// The events of this output from number `from` on, as they were emitted.
    pub(crate) fn events(&self, from: u64, vocabulary: &Vocabulary) -> Vec<TokenEvent> {
        let mut again = Self {
            tokens: self.tokens[..self.prompt_len].to_vec(),
            output_hash: TokenHasher::new(),
            // Text does not depend on the grammar, except that its end ends the output.
            matcher: None,
            front: Front::default(),
            finish: None,
            ..self.clone()
        };
        let mut events = Vec::new();
        for token in &self.tokens[self.prompt_len..] {
            let end = self.finish == Some(FinishReason::Stop)
                && again.tokens.len() + 1 == self.tokens.len();
            let event = again.advance(*token, vocabulary, 0, end);
            if event.seq >= from {
                events.push(event);
            }
        }
        events
    }
}

/// Checks everything a client can get wrong.
pub(crate) fn validate(spec: &GenerateSpec, vocab: usize) -> Result<(), EngineError> {
    let s = &spec.sampling;
    let range = |what, value: f32, low: f32, high: f32| {
        if value.is_finite() && value >= low && value <= high {
            return Ok(());
        }
        Err(EngineError::OutOfRange {
            what,
            value: value.to_string(),
            bounds: format!("{low} ..= {high}"),
        })
    };
    range("temperature", s.temperature, 0.0, 100.0)?;
    range("top_p", s.top_p, 0.0, 1.0)?;
    range("min_p", s.min_p, 0.0, 1.0)?;
    range("typical_p", s.typical_p, 0.0, 1.0)?;
    range("repetition_penalty", s.repetition_penalty, 0.01, 100.0)?;
    range("frequency_penalty", s.frequency_penalty, -100.0, 100.0)?;
    range("presence_penalty", s.presence_penalty, -100.0, 100.0)?;
    for bias in s.logit_bias.values() {
        range("logit_bias", *bias, -1e6, 1e6)?;
    }
    let count = |what, value: usize, low: usize, high: usize| {
        if (low..=high).contains(&value) {
            return Ok(());
        }
        Err(EngineError::OutOfRange {
            what,
            value: value.to_string(),
            bounds: format!("{low} ..= {high}"),
        })
    };
    let max_output = spec.stop.max_output as usize;
    count("max_output", max_output, 1, u32::MAX as usize)?;
    count("min_output", spec.stop.min_output as usize, 0, max_output)?;
    count("stop_strings", spec.stop.stop_strings.len(), 0, MAX_STOPS)?;
    for text in &spec.stop.stop_strings {
        count("length of a stop string", text.len(), 1, MAX_STOP_BYTES)?;
    }
    count("stop_ids", spec.stop.stop_ids.len(), 0, MAX_SET)?;
    count("logit_bias entries", s.logit_bias.len(), 0, MAX_SET)?;
    count("bad_words", s.bad_words.len(), 0, MAX_STOPS)?;
    for word in &s.bad_words {
        count("length of a bad word", word.len(), 1, MAX_STOP_BYTES)?;
    }
    if let Some(allowed) = &s.allowed_tokens {
        count("allowed_tokens", allowed.len(), 1, vocab)?;
    }
    if let Some(salt) = &spec.cache_salt {
        count("length of cache_salt", salt.len(), 0, MAX_STOP_BYTES)?;
    }
    Ok(())
}

const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;
const MAX_SET: usize = 4096;

impl Params {
    /// The static part of a client's request.
    pub(crate) fn of(spec: &GenerateSpec, max_context: u32) -> Self {
        Self {
            sampling: spec.sampling.clone(),
            stop: spec.stop.clone(),
            grammar: spec.grammar.clone(),
            priority: spec.priority,
            cache_salt: spec.cache_salt.clone(),
            include_usage: spec.include_usage,
            max_context,
        }
    }

    /// The most tokens a request of this prompt can ever hold.
    pub(crate) fn max_tokens(&self, prompt: usize) -> u64 {
        (prompt as u64 + u64::from(self.stop.max_output)).min(u64::from(self.max_context))
    }

    /// Names of the grammar for the control state.
    pub(crate) fn grammar_wire(&self) -> Option<(u16, Vec<u8>)> {
        self.grammar.as_ref().map(grammar::to_wire)
    }
}
