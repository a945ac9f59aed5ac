//! The serving side of an engine, as a worker uses it. The migrating side is `EngineAdapter`.

use crate::engine::reference::{Engine, EngineError, GenerateSpec, Prompt};
use crate::id::RequestId;

/// How loaded an engine is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that decode.
    pub running: u32,
    /// Requests that wait for memory.
    pub waiting: u32,
    /// Blocks of the pool.
    pub blocks_total: u64,
    /// Blocks free.
    pub blocks_free: u64,
    /// Blocks that the prefix cache alone holds, given up when somebody needs them.
    pub blocks_cached: u64,
    /// Bytes that will never be used again.
    pub quarantined_bytes: u64,
    /// Requests on their way in.
    pub stages: u32,
    /// Requests pinned for a migration.
    pub pins: u32,
    /// What is here: name, tokens with KV, output tokens, state.
    pub requests: Vec<(RequestId, u64, u64, String)>,
}

/// An engine that serves.
pub trait Serving: Send + Sync {
    /// Admits a request; its prompt's length in tokens. Tokens go to the sink given at start.
    fn submit(&self, spec: GenerateSpec) -> Result<u32, EngineError>;
    /// Ends a request; `false` where it is not here.
    fn abort(&self, request: RequestId) -> Result<bool, EngineError>;
    /// A prompt as token ids.
    fn tokenize(&self, prompt: &Prompt) -> Result<Vec<u32>, EngineError>;
    /// Whether somebody waits for the request's next step boundary.
    fn boundary_wanted(&self, request: RequestId) -> bool;
    /// How loaded it is.
    fn load(&self) -> Load;
    /// The model's name.
    fn model(&self) -> String;
    /// Ends it.
    fn shutdown(&self);
}

impl Serving for Engine {
    fn submit(&self, spec: GenerateSpec) -> Result<u32, EngineError> {
        let request = spec.request;
        let prompt = spec.prompt.clone();
        Engine::submit(self, spec)?;
        // Asked of the engine where it still knows; a request that ended at once is counted again.
        let known = self.request(request).map(|r| r.prompt_tokens);
        let tokens = match known {
            Some(n) => n,
            None => Engine::tokenize(self, &prompt)?.len() as u64,
        };
        Ok(u32::try_from(tokens).unwrap_or(u32::MAX))
    }

    fn abort(&self, request: RequestId) -> Result<bool, EngineError> {
        match Engine::abort(self, request) {
            Ok(()) => Ok(true),
            Err(EngineError::UnknownRequest(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn tokenize(&self, prompt: &Prompt) -> Result<Vec<u32>, EngineError> {
        Engine::tokenize(self, prompt)
    }

    fn boundary_wanted(&self, request: RequestId) -> bool {
        self.request(request).is_some_and(|r| r.boundary_wanted)
    }

    fn load(&self) -> Load {
        let status = self.status();
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let requests = self.requests().into_iter().filter_map(|id| {
            let r = self.request(id)?;
            let state = match (r.waiting, r.held) {
                (true, _) => "waiting",
                (_, true) => "held",
                _ => "running",
            };
            let kv = (r.prompt_tokens + r.output_tokens).saturating_sub(1);
            Some((id, kv, r.output_tokens, state.to_owned()))
        });
        Load {
            running: narrow(status.running),
            waiting: narrow(status.waiting),
            blocks_total: status.pool.total as u64,
            blocks_free: status.pool.free as u64,
            blocks_cached: status.cached_blocks as u64,
            quarantined_bytes: status.pool.quarantined_bytes,
            stages: narrow(status.staged),
            pins: narrow(status.pins),
            requests: requests.collect(),
        }
    }

    fn model(&self) -> String {
        Engine::model(self).name.clone()
    }

    fn shutdown(&self) {
        Engine::shutdown(self);
    }
}
