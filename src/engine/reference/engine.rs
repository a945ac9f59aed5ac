//! The engine's serving side: start, submit, abort, status.

use super::build::build;
use super::entry::Phase;
use super::event::{CloseReason, TokenEvent, TokenSink};
use super::identity::ModelInfo;
use super::live::{Live, Params, validate};
use super::model::{StepOutput, seeded_tokens};
use super::shared::{Inner, Shared, Slot};
use super::spec::{GenerateSpec, Prompt};
use super::step::StepReport;
use super::{EngineConfig, EngineError};
use crate::id::{Incarnation, RequestId};
use crate::mem::PoolStats;
use parking_lot::{Condvar, Mutex};
use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A running engine. Cheap to clone; the last handle that is dropped stops it.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
    driver: Arc<Driver>,
}

/// What an engine is busy with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineStatus {
    /// Requests that compute, held ones included.
    pub running: usize,
    /// Of those, held by a migration.
    pub held: usize,
    /// Requests that wait for blocks.
    pub waiting: usize,
    /// Requests on their way in.
    pub staged: usize,
    /// Pins.
    pub pins: usize,
    /// Blocks of the pool.
    pub pool: PoolStats,
    /// Blocks promised to admitted requests and not taken yet.
    pub promised_blocks: u64,
    /// Blocks that only the prefix cache or it too holds.
    pub cached_blocks: usize,
    /// Blocks without owner whose lease is still out.
    pub deferred_blocks: usize,
    /// Steps taken.
    pub steps: u64,
}

/// Where one request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestStatus {
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Output tokens so far.
    pub output_tokens: u64,
    /// The right under which it emits.
    pub owner_epoch: crate::id::OwnerEpoch,
    /// Waits for blocks.
    pub waiting: bool,
    /// Held by a migration.
    pub held: bool,
    /// Somebody waits for its next step boundary: no step of it begins.
    pub boundary_wanted: bool,
}

/// The driver thread; joined when the last handle goes.
struct Driver {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// For engines without a thread: the step's memory.
    stepper: Option<Mutex<StepOutput>>,
}

impl Driver {
    fn stop(&self) {
        self.shared.inner.lock().stop = true;
        self.shared.work.notify_all();
        let Some(thread) = self.thread.lock().take() else {
            return;
        };
        // A sink that owns the last handle is dropped on the driver itself.
        if thread.thread().id() != std::thread::current().id() {
            // A panic there has been reported by its own hook.
            let _ = thread.join();
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("model", &self.shared.parts.info.name)
            .field("incarnation", &self.shared.incarnation)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Loads the model, maps the pool and starts the driver thread.
    pub fn start(config: EngineConfig, sink: Arc<dyn TokenSink>) -> Result<Self, EngineError> {
        let shared = Self::prepare(config, sink)?;
        let driving = shared.clone();
        let thread = std::thread::Builder::new()
            .name("engine-driver".into())
            .spawn(move || driving.drive())
            .map_err(|e| EngineError::Config(format!("cannot start the driver thread: {e}")))?;
        Ok(Self::handle(shared, Some(thread), None))
    }

    /// As [`Self::start`], without a thread: nothing happens but in [`Self::step`].
    pub fn stepper(config: EngineConfig, sink: Arc<dyn TokenSink>) -> Result<Self, EngineError> {
        let shared = Self::prepare(config, sink)?;
        Ok(Self::handle(shared, None, Some(Mutex::default())))
    }

    fn prepare(config: EngineConfig, sink: Arc<dyn TokenSink>) -> Result<Arc<Shared>, EngineError> {
        let (parts, blocks) = build(&config)?;
        let mut nonce = [0; 8];
        getrandom::fill(&mut nonce)
            .map_err(|e| EngineError::Config(format!("no randomness from the system: {e}")))?;
        Ok(Arc::new(Shared {
            config,
            parts,
            sink,
            incarnation: Incarnation(u64::from_le_bytes(nonce)),
            inner: Mutex::new(Inner::new(blocks)),
            work: Condvar::new(),
            boundary: Condvar::new(),
            scratch: Mutex::new(Vec::new()),
        }))
    }

    fn handle(
        shared: Arc<Shared>,
        thread: Option<JoinHandle<()>>,
        stepper: Option<Mutex<StepOutput>>,
    ) -> Self {
        let driver = Arc::new(Driver {
            shared: shared.clone(),
            thread: Mutex::new(thread),
            stepper,
        });
        Self { shared, driver }
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Takes a request. Its tokens go to the sink; it waits for blocks where there are none.
    ///
    /// Errors: `OutOfRange`, `Grammar`, `NeverFits`, `QueueFull`, `Duplicate`, `ShutDown`.
    pub fn submit(&self, spec: GenerateSpec) -> Result<(), EngineError> {
        let info = &self.shared.parts.info;
        validate(&spec, info.vocab)?;
        let prompt = self.tokenize(&spec.prompt)?;
        if prompt.is_empty() || prompt.len() >= info.max_context as usize {
            return Err(EngineError::OutOfRange {
                what: "prompt tokens",
                value: prompt.len().to_string(),
                bounds: format!("1 ..= {}", info.max_context - 1),
            });
        }
        if let Some(bad) = prompt.iter().find(|t| **t as usize >= info.vocab) {
            return Err(EngineError::OutOfRange {
                what: "prompt token",
                value: bad.to_string(),
                bounds: format!("0 ..= {}", info.vocab - 1),
            });
        }
        let fill = match spec.prompt {
            Prompt::SeededKv { seed, .. } if !info.synthetic => Some((seed, prompt.len() - 1)),
            _ => None,
        };
        let params = Params::of(&spec, info.max_context);
        let vocabulary = &self.shared.parts.vocabulary;
        let live = Live::new(spec.request, spec.owner_epoch, params, prompt, vocabulary)?;
        let mut entry = self
            .shared
            .entry(live)
            .map_err(|e| EngineError::Bug(e.to_string()))?;
        entry.fill = fill;
        if self.shared.config.prefix_cache && fill.is_none() {
            entry.keys = Some(Vec::new());
        }
        let inner = &mut *self.shared.inner.lock();
        if inner.stop {
            return Err(EngineError::ShutDown);
        }
        let need = inner.blocks.for_tokens(entry.max_tokens);
        let have = inner.blocks.usable();
        if need > have {
            return Err(EngineError::NeverFits { need, have });
        }
        let waiting = inner.waiting.len();
        if waiting >= self.shared.config.max_waiting {
            return Err(EngineError::QueueFull { waiting });
        }
        let staged = |s: &super::stage::Stage| s.request == spec.request && s.is_pending();
        if inner.current.contains_key(&spec.request) || inner.stages.values().any(staged) {
            return Err(EngineError::Duplicate(spec.request));
        }
        inner.forget_end(spec.request);
        let slot = Slot(inner.fresh());
        inner.waiting.insert((Reverse(entry.priority), slot));
        inner.current.insert(spec.request, slot);
        inner.entries.insert(slot, entry);
        self.shared.work.notify_one();
        Ok(())
    }

    /// Ends a request: at once, or after the step it is in, or, while a migration holds it, when
    /// the hold is released. The sink hears of it. Blocks that a pin holds stay until it goes.
    pub fn abort(&self, request: RequestId) -> Result<(), EngineError> {
        let inner = &mut *self.shared.inner.lock();
        let Ok((slot, entry)) = inner.request(request) else {
            return Err(EngineError::UnknownRequest(request));
        };
        if entry.in_flight || entry.hold.is_some() {
            entry.abort = true;
        } else {
            self.shared.close(inner, slot, CloseReason::Aborted);
            self.shared.work.notify_one();
        }
        Ok(())
    }

    /// The events of a request from output token `from_seq` on, as they were emitted (without
    /// their times). Works on running and held requests, between steps.
    pub fn replay(
        &self,
        request: RequestId,
        from_seq: u64,
    ) -> Result<Vec<TokenEvent>, EngineError> {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let mut inner = self.shared.inner.lock();
        let unknown = EngineError::UnknownRequest(request);
        let Ok((slot, _)) = inner.request(request) else {
            return Err(unknown);
        };
        self.shared.drain(&mut inner, slot, deadline);
        let live = match inner.request(request) {
            Ok((_, entry)) => entry.live.clone(),
            Err(_) => return Err(unknown),
        };
        drop(inner);
        let live = live.ok_or(EngineError::Pool("a step did not end within 10 s".into()))?;
        Ok(live.events(from_seq, &self.shared.parts.vocabulary))
    }

    /// One step of an engine without a thread.
    ///
    /// Errors: `Config` for an engine that has one.
    pub fn step(&self) -> Result<StepReport, EngineError> {
        match &self.driver.stepper {
            Some(out) => Ok(self.shared.step(&mut out.lock())),
            None => Err(EngineError::Config(
                "this engine's own thread takes its steps".into(),
            )),
        }
    }

    /// What the engine is busy with.
    pub fn status(&self) -> EngineStatus {
        let inner = &mut *self.shared.inner.lock();
        inner.blocks.reap();
        EngineStatus {
            running: inner.running.len(),
            held: inner.entries.values().filter(|e| e.hold.is_some()).count(),
            waiting: inner.waiting.len(),
            staged: inner.stages.values().filter(|s| s.is_pending()).count(),
            pins: inner.pins.len(),
            pool: self.shared.parts.pool.stats(),
            promised_blocks: inner.blocks.promised(),
            cached_blocks: inner.blocks.cached(),
            deferred_blocks: inner.blocks.deferred(),
            steps: inner.steps,
        }
    }

    /// Where a request stands; `None` if it is not here or has ended.
    pub fn request(&self, request: RequestId) -> Option<RequestStatus> {
        let inner = &mut *self.shared.inner.lock();
        let (_, e) = inner.request(request).ok()?;
        Some(RequestStatus {
            prompt_tokens: e.prompt_len as u64,
            output_tokens: e.seal(),
            owner_epoch: e.owner_epoch,
            waiting: e.phase == Phase::Waiting,
            held: e.hold.is_some(),
            boundary_wanted: e.boundary_wanted > 0,
        })
    }

    /// The requests that have not ended, in order of arrival.
    pub fn requests(&self) -> Vec<RequestId> {
        let inner = self.shared.inner.lock();
        let mut all: Vec<_> = inner
            .current
            .iter()
            .map(|(id, slot)| (*slot, *id))
            .collect();
        all.sort_unstable();
        all.into_iter().map(|(_, id)| id).collect()
    }

    /// The loaded model.
    pub fn model(&self) -> &ModelInfo {
        &self.shared.parts.info
    }

    /// The configuration it was started with.
    pub fn config(&self) -> &EngineConfig {
        &self.shared.config
    }

    /// The ids of a prompt.
    pub fn tokenize(&self, prompt: &Prompt) -> Result<Vec<u32>, EngineError> {
        let parts = &self.shared.parts;
        let with_bos = |ids: Vec<u32>| parts.vocabulary.bos.into_iter().chain(ids).collect();
        Ok(match prompt {
            Prompt::Tokens(ids) => ids.clone(),
            Prompt::Text(text) => with_bos(parts.encoder.encode(text, false)?),
            Prompt::Chat(messages) => {
                let text = parts.encoder.chat(messages)?;
                parts.encoder.encode(&text, true)?
            }
            Prompt::SeededKv { tokens, seed } => {
                if *tokens > parts.info.max_context {
                    return Err(EngineError::OutOfRange {
                        what: "prompt tokens",
                        value: tokens.to_string(),
                        bounds: format!("1 ..= {}", parts.info.max_context - 1),
                    });
                }
                seeded_tokens(*tokens as usize, parts.info.vocab, *seed)
            }
        })
    }

    /// The bytes of some tokens, special ones included.
    pub fn detokenize(&self, ids: &[u32]) -> Vec<u8> {
        let v = &self.shared.parts.vocabulary;
        ids.iter().flat_map(|t| v.bytes(*t)).copied().collect()
    }

    /// Drops every prefix block that no request uses.
    pub fn clear_prefix_cache(&self) {
        self.shared.inner.lock().blocks.clear_cache();
    }

    /// Stops the driver after the step it is in. Requests stay where they are; nothing is emitted
    /// any more. Also done when the last handle is dropped.
    pub fn shutdown(&self) {
        self.driver.stop();
    }
}
