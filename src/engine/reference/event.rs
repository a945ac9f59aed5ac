//! What an engine tells the world: one event per output token.

use crate::id::{OwnerEpoch, RequestId};

/// One output token. Events of a request arrive in order, `seq` without gaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenEvent {
    /// Whose token.
    pub request: RequestId,
    /// The right under which it was made.
    pub owner_epoch: OwnerEpoch,
    /// Number of this output token, from 1.
    pub seq: u64,
    /// The token.
    pub token: u32,
    /// Text that became certain with it; often empty (half a character, a possible stop string).
    pub text: String,
    /// Set on the last event.
    pub finish: Option<FinishReason>,
    /// Prompt tokens whose KV came from the prefix cache (usage).
    pub cached_tokens: u32,
    /// Monotonic time at which the step that drew it was done, ns (see [`super::clock_ns`]).
    pub step_done_ns: u64,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// End of sequence, a stop id or a stop string.
    Stop,
    /// `max_output` or the context is used up.
    Length,
    /// Aborted by its owner.
    Abort,
}

/// Receives events on the driver thread, between steps. It must not block and must not call back
/// into the engine. Before `hold` returns, every event up to the seal has been handed over.
pub trait TokenSink: Send + Sync {
    /// Takes one event.
    fn token(&self, event: TokenEvent);
    /// A request ended without a further token (aborted, or retired after it moved away).
    fn closed(&self, request: RequestId, reason: CloseReason);
}

/// How a request left the engine without a last token of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CloseReason {
    /// Aborted.
    Aborted,
    /// Its decision went to another worker.
    Retired,
    /// The engine failed on it; it can be recovered from the journal.
    Failed,
}

impl TokenSink for crossbeam_channel::Sender<EngineEvent> {
    fn token(&self, event: TokenEvent) {
        // A receiver that is gone wants nothing any more.
        let _ = self.send(EngineEvent::Token(event));
    }
    fn closed(&self, request: RequestId, reason: CloseReason) {
        let _ = self.send(EngineEvent::Closed(request, reason));
    }
}

/// [`TokenSink`] as a value, for channels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineEvent {
    /// A token.
    Token(TokenEvent),
    /// The end of a request without a token.
    Closed(RequestId, CloseReason),
}
