//! What the calls of the contract take and give.

use crate::control_state::{Claim, ControlDigest, Fingerprint, RngKind};
use crate::digest::{LeafDigest, PageDigest, SetDigest};
use crate::id::{Incarnation, MigrationEpoch, OwnerEpoch, RequestId};
use crate::mem::BlockPool;
use crate::page::{BlockLayout, ObjectSetHeader, PageSpan};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A pin, unique in one life of an engine and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinId(pub u64);

/// A stage, unique in one life of an engine and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StageId(pub u64);

/// Whose KV and control state a reading call means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum View {
    /// A running or held request of this engine, through a pin on it.
    Pin(PinId),
    /// A request on its way in.
    Stage(StageId),
}

impl From<PinId> for View {
    fn from(pin: PinId) -> Self {
        Self::Pin(pin)
    }
}

impl From<StageId> for View {
    fn from(stage: StageId) -> Self {
        Self::Stage(stage)
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pin(p) => write!(f, "pin {}", p.0),
            Self::Stage(s) => write!(f, "stage {}", s.0),
        }
    }
}

/// Whether the engine keeps per-request state that is not append-only KV (Mamba, linear attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MutableState {
    /// None: everything is append-only KV.
    None,
    /// One blob per such group, moved inside the fence through
    /// [`export_state`](super::EngineAdapter::export_state) and [`import_state`](super::EngineAdapter::import_state).
    MoveInFence {
        /// Largest blob, in bytes: it adds to the pause.
        max_bytes: u64,
    },
    /// It exists and cannot be moved; requests that have it are refused.
    Unsupported,
}

/// What may happen to the written part of the tail page while a request decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TailWrites {
    /// Slots are only ever appended, so the tail is copied and hashed before the fence.
    AppendOnly,
    /// The tail page is requantized as it grows, so it moves inside the fence as a whole.
    RewritesTail,
}

/// What an engine is and can do. Fixed for one life of the engine.
#[derive(Debug, Clone)]
pub struct Capabilities {
    /// Which life of the engine this is; pin and stage ids belong to it.
    pub incarnation: Incarnation,
    /// Which engine, as field 2 of the control state names it.
    pub engine_kind: u16,
    /// Build and numerics profile.
    pub fingerprint: Fingerprint,
    /// Hash of the model's architecture and configuration, as in the control state.
    pub model: [u8; 32],
    /// Version of the weights loaded.
    pub weights_version: u64,
    /// Hash of the tokenizer.
    pub tokenizer: [u8; 32],
    /// KV groups, canonical page size and digest scheme.
    pub header: ObjectSetHeader,
    /// Longest sequence, in tokens.
    pub max_context: u32,
    /// The random generators it can continue.
    pub rng_kinds: Vec<RngKind>,
    /// Tokens and KV bits of a request do not depend on what shares its batch or where it runs.
    pub batch_invariant: bool,
    /// Part of a sequence can be read while it decodes. Without it there is no STREAM phase:
    /// everything moves inside the fence.
    pub partial_sequence: bool,
    /// State besides KV.
    pub mutable_state: MutableState,
    /// What happens to the tail page.
    pub tail: TailWrites,
    /// The best [`RebuildClass`] that [`rebuild_from_journal`](super::EngineAdapter::rebuild_from_journal) can reach.
    pub rebuild: RebuildClass,
}

/// Where one group's KV lies in this process.
#[derive(Debug, Clone)]
pub struct PoolInfo {
    /// The blocks and their leases.
    pub pool: Arc<BlockPool>,
    /// Where each (layer, head, token) lies in a block, and which layers and heads live here: all
    /// of them unless TP or PP is on.
    pub layout: Arc<BlockLayout>,
}

/// A pin as it stands when it is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pinned {
    /// Its id.
    pub pin: PinId,
    /// The generation of the pinned slots, see promise 3.
    pub generation: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// The most tokens this request can ever hold (prompt plus its output limit, at most the
    /// context); what the destination must have room for.
    pub max_tokens: u64,
    /// First token still held, by group in ascending order of group: 0, or where a sliding window
    /// stood. Pinned tokens are not evicted after this.
    pub first_live: Vec<(u16, u64)>,
}

/// The part of a pinned request that will not change any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sealed {
    /// The watermark: tokens `0..stable_len` are promised, see promise 4.
    pub stable_len: u64,
    /// Tokens accepted so far, prompt included. `stable_len <= accepted`.
    pub accepted: u64,
    /// Must be the [`Pinned::generation`]; if not, what was copied belongs to other tokens.
    pub generation: u64,
    /// A slot below an earlier watermark was rewritten: nothing copied so far may be trusted.
    pub dirty: bool,
}

/// Where a held request stands: the fence point, a step boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boundary {
    /// Output tokens numbered so far, from 1. At least 1.
    pub seal: u64,
    /// Tokens with KV: prompt + seal - 1, for the last sampled token has none yet.
    pub kv_len: u64,
    /// That last token; the first step after resuming feeds it.
    pub pending_token: u32,
    /// Watermark and generation at the boundary; `sealed.stable_len == kv_len`.
    pub sealed: Sealed,
    /// When the last step that wrote this request's KV was done: nanoseconds of `CLOCK_MONOTONIC`,
    /// so that processes of one machine can compare. The fence pause counts from here.
    pub last_step_done_ns: u64,
}

/// The digests of some pages, in one allocation that is meant to be reused.
///
/// Each page has the leaves that live in this rank's shard, in canonical order. With a partial
/// shard the leader combines the ranks' leaves; then [`PageRow::digest`] covers only this rank's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageDigests {
    rows: Vec<(PageRow, Range<usize>)>,
    leaves: Vec<LeafDigest>,
}

/// One page's digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRow {
    /// KV group.
    pub group: u16,
    /// Page index in the request: tokens from `page * page_tokens`.
    pub page: u32,
    /// First slot hashed: 0, but for the first page a sliding window still holds a part of.
    pub first_slot: u16,
    /// Tokens hashed from there, at least 1. Other slots are not part of the digest.
    pub valid_tokens: u16,
    /// Digest over `valid_tokens` and the leaves.
    pub digest: PageDigest,
}

impl PageRow {
    /// The slots hashed.
    pub fn span(&self) -> PageSpan {
        PageSpan {
            page: self.page,
            from: self.first_slot,
            to: self.first_slot.saturating_add(self.valid_tokens),
        }
    }
}

impl PageDigests {
    /// Empty.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets the pages and keeps the memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.leaves.clear();
    }

    /// Adds a page.
    pub fn push(&mut self, row: PageRow, leaves: &[LeafDigest]) {
        let from = self.leaves.len();
        self.leaves.extend_from_slice(leaves);
        self.rows.push((row, from..self.leaves.len()));
    }

    /// Pages held.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// No pages.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The pages in the order they were pushed, each with its leaves.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&PageRow, &[LeafDigest])> {
        self.rows
            .iter()
            .map(|(row, range)| (row, &self.leaves[range.clone()]))
    }

    /// The last page pushed.
    pub fn last(&self) -> Option<(&PageRow, &[LeafDigest])> {
        self.rows
            .last()
            .map(|(row, range)| (row, &self.leaves[range.clone()]))
    }
}

/// An exported control state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlExport {
    /// The ControlStateV1 encoding.
    pub bytes: Vec<u8>,
    /// Its digest; `offset` is what *this* engine counts as numbered output tokens.
    pub digest: ControlDigest,
}

/// What a destination must make room for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportSpec {
    /// The request.
    pub request: RequestId,
    /// The attempt.
    pub epoch: MigrationEpoch,
    /// Geometry and scheme of the object set; must equal the engine's own.
    pub header: ObjectSetHeader,
    /// The source's fingerprint, judged by the engine's policy before anything is reserved.
    pub source: Fingerprint,
    /// Generator that must be continued; a request whose control state says that it draws nothing
    /// (greedy) is taken under any.
    pub rng: RngKind,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// KV capacity to reserve, in tokens ([`Pinned::max_tokens`], or less if the engine can grow
    /// the request after it was activated).
    pub max_tokens: u64,
    /// [`Pinned::first_live`].
    pub first_live: Vec<(u16, u64)>,
}

/// What is attached to the request in the making.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Tokens with KV, for every group.
    pub kv_len: u64,
    /// First token held, by ascending group.
    pub first_live: Vec<(u16, u64)>,
}

/// A request that is complete, checked and one [`activate`](super::EngineAdapter::activate) away from running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Armed {
    /// What is claimed about the continuation.
    pub claim: Claim,
    /// Output tokens replayed through grammar, penalties and detokenizer.
    pub replayed: u64,
    /// The last of them; the first step feeds it.
    pub pending_token: u32,
    /// The grammar mask's digest after the replay, equal to the one in the control state.
    pub mask_digest: Option<[u8; 32]>,
}

/// How a request starts to run here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Activation {
    /// The new ownership, higher than the one in the imported control digest.
    pub owner_epoch: OwnerEpoch,
    /// The first output token number (from 1) to emit again before new ones; tokens below it are
    /// known to be accepted. `seal + 1` emits none again. Duplicates are dropped by the acceptor.
    pub reemit_from: u64,
}

/// Whether an activation was the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activated {
    /// The request became runnable by this call.
    Now {
        /// When: nanoseconds of `CLOCK_MONOTONIC`. The fence pause ends here. 0 if the engine does
        /// not say.
        at_ns: u64,
    },
    /// It already ran under this owner epoch; nothing changed and nothing is emitted again.
    Already,
}

impl Activated {
    /// When the request became runnable, by a call that lasted from `asked` to `answered`: the
    /// engine's own word where it can be right, for the caller may have lost its CPU to the very
    /// step that it set off.
    pub fn between(self, asked: u64, answered: u64) -> u64 {
        match self {
            Self::Now { at_ns } if (asked..=answered).contains(&at_ns) => at_ns,
            _ => answered,
        }
    }
}

/// What a call gave back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Released {
    /// Block references dropped by this very call; 0 when there was nothing left to drop.
    pub blocks: u64,
}

/// A request's control state at a step boundary, for recovery without its worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Output tokens numbered.
    pub seal: u64,
    /// Tokens with KV.
    pub kv_len: u64,
    /// The ControlStateV1 encoding there.
    pub control: Vec<u8>,
    /// Digest of the KV set up to `kv_len`, if the engine keeps the running hash.
    pub set_digest: Option<SetDigest>,
}

/// What a request is rebuilt from when its worker is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalImage {
    /// The request.
    pub request: RequestId,
    /// The attempt; shares the request's floor with migrations.
    pub epoch: MigrationEpoch,
    /// The ownership the checkpoint was taken under.
    pub owner_epoch: OwnerEpoch,
    /// The last checkpoint.
    pub checkpoint: Checkpoint,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// All journaled output tokens, number 1 through J. At least `checkpoint.seal` of them.
    pub output: Vec<u32>,
}

/// What a rebuilt request can be trusted for, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RebuildClass {
    /// The KV, hashed in resident memory, equals the digest in the checkpoint.
    BitExact,
    /// KV was computed again by kernels that promise the same tokens; not compared to a digest.
    TokenExactOnly,
    /// KV was computed again and later tokens may differ. Journaled tokens are kept as they are.
    Recomputed,
}

/// A rebuilt request, to be activated like an imported one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rebuilt {
    /// An armed stage.
    pub stage: StageId,
    /// What it can be trusted for; never better than what was checked.
    pub class: RebuildClass,
    /// Output tokens it holds: J.
    pub seal: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_believed_about_a_launch_only_within_the_call() {
        for (activated, launch) in [
            (Activated::Now { at_ns: 15 }, 15),
            (Activated::Now { at_ns: 9 }, 20),
            (Activated::Now { at_ns: 21 }, 20),
            (Activated::Now { at_ns: 0 }, 20),
            (Activated::Already, 20),
        ] {
            assert_eq!(activated.between(10, 20), launch, "{activated:?}");
        }
    }
}
