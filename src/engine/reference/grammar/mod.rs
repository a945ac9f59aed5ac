//! Constraints on the bytes of the output, as automata over bytes.
//!
//! A token is allowed if its bytes lead to a state from which the grammar can still be met; the
//! end-of-sequence tokens are allowed where the grammar may end. The matcher's state is never
//! serialized: replaying the accepted tokens rebuilds it, and the digest of the next mask shows
//! that it arrived where it was.

mod json;

use super::EngineError;
use super::spec::GrammarSpec;
use super::tokenizer::Vocabulary;
use crate::control_state::mask_digest;
use json::Json;
use regex_automata::util::primitives::StateID;
use regex_automata::{Anchored, dfa::Automaton, dfa::dense, util::start};
use std::sync::Arc;

/// Longest regular expression, in bytes.
const MAX_SOURCE: usize = 16 << 10;
/// Most memory of a compiled one.
const MAX_DFA: usize = 8 << 20;
/// Named in ControlStateV1.
const BACKEND: &str = "moonlivekv-bytes";
/// Changes whenever a mask could change.
const BACKEND_VERSION: &str = "1";

#[allow(
    clippy::large_enum_variant,
    reason = "one per request that has a grammar"
)]
enum Kind {
    Regex(dense::DFA<Vec<u32>>, StateID),
    Json,
}

/// A compiled grammar.
pub(crate) struct Grammar {
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Regex(StateID),
    Json(Json),
}

impl Grammar {
    /// Compiles, within bounds.
    pub(crate) fn compile(spec: &GrammarSpec) -> Result<Self, EngineError> {
        let kind = match spec {
            GrammarSpec::JsonObject => Kind::Json,
            GrammarSpec::Regex(source) => {
                if source.len() > MAX_SOURCE {
                    return Err(EngineError::Grammar(format!(
                        "{} bytes of regular expression; at most {MAX_SOURCE}",
                        source.len()
                    )));
                }
                let dfa = dense::Builder::new()
                    .configure(
                        dense::Config::new()
                            .start_kind(regex_automata::dfa::StartKind::Anchored)
                            .dfa_size_limit(Some(MAX_DFA))
                            .determinize_size_limit(Some(MAX_DFA))
                            .minimize(source.len() <= 1024),
                    )
                    .thompson(
                        regex_automata::nfa::thompson::Config::new().nfa_size_limit(Some(MAX_DFA)),
                    )
                    .build(&format!("(?:{source})\\z"))
                    .map_err(|e| EngineError::Grammar(describe(&e)))?;
                let start = dfa
                    .start_state(&start::Config::new().anchored(Anchored::Yes))
                    .map_err(|e| EngineError::Grammar(e.to_string()))?;
                Kind::Regex(dfa, start)
            }
        };
        Ok(Self { kind })
    }

    fn start(&self) -> State {
        match &self.kind {
            Kind::Regex(_, start) => State::Regex(*start),
            Kind::Json => State::Json(Json::start()),
        }
    }

    fn step(&self, state: &State, bytes: &[u8]) -> Option<State> {
        match (&self.kind, state) {
            (Kind::Regex(dfa, _), State::Regex(id)) => {
                let mut id = *id;
                for b in bytes {
                    id = dfa.next_state(id, *b);
                    if dfa.is_dead_state(id) || dfa.is_quit_state(id) {
                        return None;
                    }
                }
                Some(State::Regex(id))
            }
            (Kind::Json, State::Json(json)) => {
                let mut json = json.clone();
                bytes
                    .iter()
                    .all(|b| json.push(*b))
                    .then_some(State::Json(json))
            }
            _ => None,
        }
    }

    fn may_end(&self, state: &State) -> bool {
        match (&self.kind, state) {
            (Kind::Regex(dfa, _), State::Regex(id)) => dfa.is_match_state(dfa.next_eoi_state(*id)),
            (Kind::Json, State::Json(json)) => json.complete(),
            _ => false,
        }
    }
}

fn describe(e: &dense::BuildError) -> String {
    let mut text = e.to_string();
    let mut source = std::error::Error::source(e);
    while let Some(e) = source {
        text.push_str(": ");
        text.push_str(&e.to_string());
        source = e.source();
    }
    text
}

/// A grammar at work on one request.
#[derive(Clone)]
pub(crate) struct Matcher {
    grammar: Arc<Grammar>,
    vocabulary: Arc<Vocabulary>,
    state: State,
    /// Tokens accepted.
    pub accepted: u32,
    /// An end-of-sequence token was accepted.
    pub terminated: bool,
    mask: Vec<u64>,
}

impl Matcher {
    /// At the start of the output.
    pub(crate) fn new(grammar: Arc<Grammar>, vocabulary: Arc<Vocabulary>) -> Self {
        let state = grammar.start();
        let mut matcher = Self {
            grammar,
            vocabulary,
            state,
            accepted: 0,
            terminated: false,
            mask: Vec::new(),
        };
        matcher.refresh();
        matcher
    }

    /// Moves past a token; false if the grammar does not allow it (nothing changes then).
    pub(crate) fn accept(&mut self, token: u32) -> bool {
        if !self.allows(token) {
            return false;
        }
        if self.vocabulary.eos.contains(&token) {
            self.terminated = true;
        } else if let Some(next) = self.grammar.step(&self.state, self.vocabulary.bytes(token)) {
            self.state = next;
        }
        self.accepted += 1;
        self.refresh();
        true
    }

    /// Moves past tokens accepted before, refreshing the mask once; false if one is not allowed.
    pub(crate) fn replay(&mut self, tokens: &[u32]) -> bool {
        let ok = tokens.iter().all(|token| {
            let eos = self.vocabulary.eos.contains(token);
            let next = if self.terminated {
                None
            } else if eos {
                let may = self.grammar.may_end(&self.state);
                self.terminated = may;
                may.then(|| self.state.clone())
            } else if self.vocabulary.is_special(*token) {
                None
            } else {
                let bytes = self.vocabulary.bytes(*token);
                (!bytes.is_empty())
                    .then(|| self.grammar.step(&self.state, bytes))
                    .flatten()
            };
            let Some(next) = next else { return false };
            self.state = next;
            self.accepted += 1;
            true
        });
        self.refresh();
        ok
    }

    /// Nothing can follow but the end.
    pub(crate) fn exhausted(&self) -> bool {
        self.mask.iter().all(|word| *word == 0)
    }

    /// Bit t: token t is allowed next.
    pub(crate) fn mask(&self) -> &[u64] {
        &self.mask
    }

    /// Whether a token is allowed next.
    pub(crate) fn allows(&self, token: u32) -> bool {
        let word = self.mask.get(token as usize / 64).copied().unwrap_or(0);
        word >> (token % 64) & 1 == 1
    }

    /// Identity of the next mask.
    pub(crate) fn mask_digest(&self) -> [u8; 32] {
        mask_digest(self.vocabulary.len() as u32, |t| self.allows(t))
    }

    fn refresh(&mut self) {
        let n = self.vocabulary.len();
        self.mask.clear();
        self.mask.resize(n.div_ceil(64), 0);
        if self.terminated {
            return;
        }
        let first: Vec<bool> = (0..=255u8)
            .map(|b| self.grammar.step(&self.state, &[b]).is_some())
            .collect();
        for token in 0..n as u32 {
            let bytes = self.vocabulary.bytes(token);
            let ok = !self.vocabulary.is_special(token)
                && bytes.first().is_some_and(|b| first[usize::from(*b)])
                && (bytes.len() == 1 || self.grammar.step(&self.state, bytes).is_some());
            if ok {
                self.mask[token as usize / 64] |= 1 << (token % 64);
            }
        }
        if self.grammar.may_end(&self.state) {
            for token in &self.vocabulary.eos {
                if let Some(word) = self.mask.get_mut(*token as usize / 64) {
                    *word |= 1 << (token % 64);
                }
            }
        }
    }
}

/// How a grammar is named in ControlStateV1 field 13: (kind, source).
pub(crate) fn to_wire(spec: &GrammarSpec) -> (u16, Vec<u8>) {
    match spec {
        GrammarSpec::Regex(source) => (0, source.as_bytes().to_vec()),
        GrammarSpec::JsonObject => (1, Vec::new()),
    }
}

/// The inverse of [`to_wire`]; `None` for what this engine does not have.
pub(crate) fn from_wire(kind: u16, source: &[u8]) -> Option<GrammarSpec> {
    match kind {
        0 => Some(GrammarSpec::Regex(String::from_utf8(source.to_vec()).ok()?)),
        1 if source.is_empty() => Some(GrammarSpec::JsonObject),
        _ => None,
    }
}

/// Backend and its version, for field 13.
pub(crate) fn backend() -> (&'static str, &'static str) {
    (BACKEND, BACKEND_VERSION)
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::toy;
    use super::*;

    fn matcher(spec: GrammarSpec) -> Matcher {
        let grammar = Grammar::compile(&spec).unwrap();
        Matcher::new(Arc::new(grammar), Arc::new(toy::vocabulary()))
    }

    fn accepts(spec: &GrammarSpec, text: &str) -> bool {
        let mut m = matcher(spec.clone());
        text.bytes().all(|b| m.accept(u32::from(b))) && m.allows(toy::EOS)
    }

    #[test]
    fn a_regex_allows_what_it_matches_and_nothing_else() {
        let spec = GrammarSpec::Regex("a(é|🙂){2,3}b?".into());
        for ok in ["aéé", "aé🙂é", "a🙂🙂b"] {
            assert!(accepts(&spec, ok), "{ok}");
        }
        for bad in ["", "a", "aé", "aéééé", "aéébb", "béé"] {
            assert!(!accepts(&spec, bad), "{bad}");
        }
        // Alternatives are one group: the end belongs to both.
        assert!(!accepts(&GrammarSpec::Regex("x|y".into()), "xy"));
    }

    #[test]
    fn json_mode_allows_objects_only() {
        let spec = GrammarSpec::JsonObject;
        for ok in [
            "{}",
            r#"{"a": [1, -2.5e+3, "x\n\u00e9🙂", true, null, {}], "b":{"c":[]}}"#,
        ] {
            assert!(accepts(&spec, ok), "{ok}");
        }
        for bad in [
            "[]",
            "{",
            "{a:1}",
            r#"{"a":01}"#,
            r#"{"a":1,}"#,
            "{}}",
            "{}{}",
            r#"{"a" 1}"#,
        ] {
            assert!(!accepts(&spec, bad), "{bad}");
        }
    }

    #[test]
    fn replay_rebuilds_the_same_mask() {
        let mut a = matcher(GrammarSpec::JsonObject);
        let mut log = Vec::new();
        for b in br#"{"key": [1, 2"# {
            assert!(a.accept(u32::from(*b)));
            log.push(u32::from(*b));
        }
        let mut b = matcher(GrammarSpec::JsonObject);
        assert_ne!(a.mask_digest(), b.mask_digest());
        assert!(b.replay(&log));
        assert_eq!(a.mask_digest(), b.mask_digest());
        assert_eq!(a.accepted, b.accepted);
        assert!(!b.replay(&[u32::from(b'}')]), "a list is open");
    }

    #[test]
    fn grammars_out_of_bounds_are_refused() {
        for bad in [
            "(",
            "(?=x)y",
            &"x".repeat(MAX_SOURCE + 1),
            "(\\w{200}){200}",
        ] {
            let spec = GrammarSpec::Regex(bad.into());
            assert!(matches!(
                Grammar::compile(&spec),
                Err(EngineError::Grammar(_))
            ));
        }
    }
}
