//! `EngineAdapter`: what a serving engine must offer so that a request it decodes can be moved,
//! and what it promises while that happens.
//!
//! # Parties and phases
//!
//! The *source executor* and the *destination executor* of a migration call the adapter of their
//! own engine; nobody calls an engine remotely except through them. One adapter stands for one
//! rank's pool. Phases, in order: PREPARE, RESERVE, STREAM, FENCE, COPY-TAIL, IMPORT-TAIL, VERIFY,
//! ARM, COMMIT, RESUME, GC.
//!
//! ```text
//! source:       pin  (seal_through  table  token_log  hash_pages  hash_tail)*
//!               hold  seal_through  hash_tail  export_control  --decision-->  retire | release_hold, unpin
//! destination:  prepare_import  (import_tokens  stage_write  hash_pages  hash_tail)*
//!               commit_import  hash_tail  import_control  export_control  arm
//!               --decision-->  activate | disarm            (abort_import any time before arm)
//! ```
//!
//! # Promises that hold across calls
//!
//! 1. **Epochs.** Each request has a *floor*: the highest [`MigrationEpoch`] any call has carried
//!    for it. `pin`, `hold`, `prepare_import` and `retire` carry an epoch; a [`PinId`] or
//!    [`StageId`] carries the epoch it was made with. Under the request's own lock, immediately
//!    before it mutates, each call compares its epoch with the floor: lower is
//!    [`AdapterError::StaleEpoch`] and changes nothing, higher raises the floor. A check made at
//!    admission only is worth nothing: the lock may have been waited for. Calls that only give
//!    back (`unpin`, `abort_import`, `disarm`) are taken at any epoch, since a dead attempt must
//!    be able to free what it holds, and touch nothing but their own pin or stage.
//! 2. **Incarnation.** Pin and stage ids belong to one life of the engine and are never reused in
//!    it. Where calls cross a process border they also carry [`Capabilities::incarnation`], checked
//!    under the same lock ([`AdapterError::WrongIncarnation`]).
//! 3. **A pin is a lease over (group, token range, generation).** From `pin` to `unpin` no block
//!    that holds a pinned token is freed, evicted, moved or swapped: not when the client aborts,
//!    not when the request finishes, not when a window slides. The range grows as the request
//!    decodes. The generation changes when, and only when, a slot is given to other tokens.
//! 4. **Seal watermark.** Slots below [`Sealed::stable_len`] are written by kernels that are done
//!    (*device-complete*), hold accepted tokens, and are not rewritten while pinned. A rewrite
//!    sets [`Sealed::dirty`] for good on that pin, and a fence must then not be completed.
//! 5. **A stage is exclusive and unreachable.** Its blocks are in no compute block table, no prefix
//!    cache and no other stage until [`EngineAdapter::activate`] returned. It bypasses the local
//!    prefix cache in both directions.
//! 6. **Digests read resident memory**, through the table that the engine itself will compute
//!    with, at the time of the call. Never a digest that came with the data, never a cached one
//!    (save [`EngineAdapter::hash_tail`]'s leaf states over slots that promises 4 and 7 hold still).
//! 7. **A hashed slot of a stage is frozen**: `stage_write` on it is refused from then on, so
//!    nobody writes between a page's verification and the decision.
//! 8. **Fencing never frees.** `hold` keeps KV, sampler and front-end state as they are; after
//!    `release_hold` the request goes on exactly as if it had never been held.
//! 9. **Giving back is idempotent, taking is keyed.** `unpin`, `abort_import`, `disarm`, `retire`,
//!    repeated or on something long gone, return `Ok` with [`Released`] 0. `pin` and
//!    `prepare_import` repeated with the same key return the same id; with the same key but other
//!    arguments, [`AdapterError::Conflict`]. Blocks whose lease is still out (a late write of a
//!    dead transfer) are freed only when that lease ends.
//! 10. **Unknown is typed**: a call on something that never existed or is gone returns
//!     [`AdapterError::Unknown`], except where promise 9 says otherwise.
//!
//! The conformance suite in [`super::conformance`] holds an engine to these, clause by clause.
//!
//! # Waiting
//!
//! `hold` waits up to its deadline. Calls that read KV may wait up to [`LEASE_WAIT`] for a block
//! that is being written at that moment, then fail as retryable. No other call waits.

mod error;
mod types;

pub use error::{AdapterError, Result, StageState, What};
pub use types::{
    Activated, Activation, Armed, Boundary, Capabilities, Checkpoint, ControlExport, ImportSpec,
    JournalImage, Manifest, MutableState, PageDigests, PageRow, PinId, Pinned, PoolInfo,
    RebuildClass, Rebuilt, Released, Sealed, StageId, TailWrites, View,
};

use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::mem::WriteLease;
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long a call that reads KV may wait for a block that is being written.
pub const LEASE_WAIT: Duration = Duration::from_millis(250);

/// The contract between MoonLiveKV and a serving engine. Read the [module's promises](self) first;
/// the methods only say what each adds to them.
///
/// All calls may come from any thread, also at the same time. Calls on one request are ordered by
/// its lock; calls on different requests do not wait for each other, nor for a decode step, except
/// where a doc says so.
pub trait EngineAdapter: Send + Sync {
    /// What this engine is. Called by both executors before PREPARE, and by `status`.
    /// Takes no lock and cannot fail; equal in every call of one life.
    fn capabilities(&self) -> Capabilities;

    /// Where a group's KV lies, for transports to register and planners to read.
    ///
    /// Called once at start by the worker. The answer does not change in one life of the engine.
    /// Errors: `Unknown(Group)`.
    fn pool(&self, group: u16) -> Result<PoolInfo>;

    // ---- source ----

    /// Takes a lease on all KV of a request, now and as it grows (promise 3).
    ///
    /// Source executor, PREPARE. Raises the floor. Decode goes on undisturbed. Idempotent by
    /// (request, epoch): a repeat returns the same pin. A pin of a lower epoch stays and holds its
    /// memory until it is unpinned, but every other call on it is `StaleEpoch`.
    ///
    /// Errors: `Unknown(Request)`; `StaleEpoch`; `Refused` for a request that cannot be moved, told
    /// here and not in the fence; `MutableState`; `Finished`.
    fn pin(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Pinned>;

    /// Ends the lease. Source executor, GC, after the decision; or after a failed attempt.
    ///
    /// Idempotent, at any epoch. Ends neither a hold nor the request; if the request ended in the
    /// meantime, its blocks are freed now. A lease that a reader still has on a block outlives this.
    ///
    /// Errors: none for an unknown pin (`Released` 0).
    fn unpin(&self, pin: PinId) -> Result<Released>;

    /// Moves the watermark as far as it goes and reports it (promise 4).
    ///
    /// Source executor, in each round of STREAM and at the fence. Never waits for a step: it reports
    /// what is device-complete now. The watermark of a pin never falls. With
    /// [`TailWrites::RewritesTail`] it stands at a page boundary until the request is held.
    ///
    /// Errors: `Unknown(Pin)`; `StaleEpoch`. Dirt is reported in the value, not as an error.
    fn seal_through(&self, pin: PinId) -> Result<Sealed>;

    /// The block ids that hold `tokens` of a group: entry i is the i-th *engine* block of the range
    /// that starts at `tokens.start` rounded down to a block. For this process only: ids never
    /// travel, except to the peer's planner as offsets.
    ///
    /// Both executors, STREAM to IMPORT-TAIL. On a pin, up to the watermark; the ids stay valid as
    /// long as the pin. On a stage, up to its capacity; the table is the one that will compute
    /// after activate, the same before and after `commit_import`. Slots before the first live token
    /// have no block: the range must not reach there.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `OutOfRange`.
    fn table(&self, view: View, group: u16, tokens: Range<u64>) -> Result<Vec<u32>>;

    /// Prompt and output tokens from number `from` (0 = first prompt token) to the last accepted
    /// one, so that they stream early and the fence carries only the last few.
    ///
    /// Source executor in STREAM and at the fence; on a stage, what was imported so far.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `OutOfRange` if `from` is past the end.
    fn token_log(&self, view: View, from: u64) -> Result<Vec<u32>>;

    /// Hashes whole pages of a group from resident memory, now, with nothing cached (promise 6),
    /// and appends them to `out` in ascending order. `upto_tokens` is the sequence's length as the
    /// caller counts it; the page that holds its end counts as valid only up to there.
    ///
    /// Source executor: expected digests, up to the watermark. Destination executor: actual ones,
    /// STREAM and VERIFY; freezes what it hashed (promise 7). `--verify full` calls it again over
    /// everything inside the fence. Idempotent. On an error `out` is as before.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `OutOfRange` past the watermark or the stage's capacity, or
    /// before the first live page; `SealedDirty`; `Busy`; `DeviceLost`.
    fn hash_pages(
        &self,
        view: View,
        group: u16,
        pages: Range<u32>,
        upto_tokens: u64,
        out: &mut PageDigests,
    ) -> Result<()>;

    /// Hashes, for every group in ascending order, the page that holds token `upto_tokens - 1`, up
    /// to there: a partial page, or a full one where `upto_tokens` ends it.
    ///
    /// Incremental: the view keeps each leaf's state, so a call costs the slots since the last call
    /// on this view. A caller that crosses a page boundary asks for the boundary first and so gets
    /// the full page cheaply too. Callers, freezing and errors as [`hash_pages`](Self::hash_pages);
    /// also `Caller` for `upto_tokens` 0. Going back to fewer tokens of the same page is allowed
    /// and hashes them anew.
    fn hash_tail(&self, view: View, upto_tokens: u64, out: &mut PageDigests) -> Result<()>;

    /// Stops the request at a step boundary (promise 8).
    ///
    /// Source executor, FENCE. Raises the floor. Returns when no kernel that writes this request's
    /// KV is in flight, every sampled token is numbered and handed to emission, and no draft is
    /// left; other requests keep decoding. From then on the request is in no batch and emits
    /// nothing until `release_hold`. Idempotent: repeated by the holding epoch it returns the same
    /// boundary; a higher epoch takes the hold over, and the old one can no longer release it.
    ///
    /// Errors: `Unknown(Request)`; `StaleEpoch`; `Finished` (also when the last step before the
    /// boundary ended it); `Refused(NoOutputYet)`; `DrainDeadline`, after which the request runs.
    fn hold(
        &self,
        request: RequestId,
        epoch: MigrationEpoch,
        deadline: Instant,
    ) -> Result<Boundary>;

    /// Lets a held request go on as if nothing had happened.
    ///
    /// Source executor, only on evidence that the decision left ownership here (an abort in the
    /// route record), or before any intent existed. Idempotent for the epoch that held: `Ok` if the
    /// request is not held.
    ///
    /// Errors: `Unknown(Request)`; `StaleEpoch` (a newer attempt holds it).
    fn release_hold(&self, request: RequestId, epoch: MigrationEpoch) -> Result<()>;

    /// A fence of this pin is near: whatever its export will use may be touched now, while the
    /// request still decodes. Returns a control state of some boundary just passed, for
    /// [`rehearse_import`](Self::rehearse_import) at the other end, or `None`.
    ///
    /// Source executor, before `hold`. A hint: changes nothing that any other call can see, and an
    /// engine need not do anything.
    fn rehearse_export(&self, pin: PinId) -> Option<Vec<u8>> {
        let _ = pin;
        None
    }

    /// A fence that will import into this stage is near: the same at the destination. `preview` is
    /// what [`rehearse_export`](Self::rehearse_export) gave, or anything at all: an engine may
    /// rebuild ahead from it, but what `import_control` then brings must come out as if it had not.
    fn rehearse_import(&self, stage: StageId, preview: &[u8]) {
        let _ = (stage, preview);
    }

    /// Encodes the control state at the boundary, engine part and front-end part together.
    ///
    /// Source executor at the fence, on a pin whose request is held by the pin's epoch.
    /// Destination executor in VERIFY, on a loaded or armed stage: encoded again from the state the
    /// engine *holds*, never from the bytes that were imported. The two must be equal byte for byte.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `NotHeld`; `StageState`; `OwnerEpoch` if the request stands
    /// at another one here; `Refused`.
    fn export_control(&self, view: View, owner_epoch: OwnerEpoch) -> Result<ControlExport>;

    /// Reads one group's mutable blob at the boundary. Callers and errors as
    /// [`export_control`](Self::export_control); `MutableState` unless the capabilities say
    /// [`MutableState::MoveInFence`].
    fn export_state(&self, view: View, group: u16) -> Result<Vec<u8>> {
        let _ = view;
        Err(AdapterError::MutableState { group })
    }

    /// Drops a request that now runs elsewhere, its hold and its own references to KV. Pins on it
    /// still hold until they are unpinned.
    ///
    /// Source executor, GC, only on evidence that ownership went to the other side. It needs the
    /// request held, so that a running request cannot be dropped by a late message. Idempotent:
    /// `Released` 0 for an unknown request.
    ///
    /// Errors: `StaleEpoch`; `NotHeld`.
    fn retire(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Released>;

    // ---- destination ----

    /// Reserves room for a request on its way in (promise 5).
    ///
    /// Destination executor, RESERVE. Raises the floor. Idempotent by (request, epoch). A stage of a
    /// lower epoch keeps its memory until it is aborted or disarmed, but can do nothing else.
    ///
    /// Errors: `StaleEpoch`; `Conflict` (same key, other arguments, or the request runs here);
    /// `Incompatible`; `Refused(ProfileMismatch | OpaqueRng)`; `MutableState`; `OutOfBlocks`.
    fn prepare_import(&self, spec: &ImportSpec) -> Result<StageId>;

    /// Appends tokens number `from ..` (0 = first prompt token) to the stage's log.
    ///
    /// Destination executor, STREAM and at the fence. Idempotent: tokens already there must be
    /// equal and are skipped; a gap is refused.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `StageState` once loaded; `OutOfRange` for a gap or past
    /// `max_tokens + 1`; `Conflict` for a token that differs.
    fn import_tokens(&self, stage: StageId, from: u64, tokens: &[u32]) -> Result<()>;

    /// Exclusive access to the blocks that hold `tokens` of a group, to land bytes in.
    ///
    /// Destination executor, STREAM and COPY-TAIL. The lease is given under the request's lock and
    /// keeps its blocks from being freed or hashed; to overlap landing and hashing, take ranges
    /// that end at engine block boundaries. Slots outside `tokens` must not be written through it.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `StageState` once committed; `OutOfRange`; `Frozen`; `Busy`.
    fn stage_write(&self, stage: StageId, group: u16, tokens: Range<u64>) -> Result<WriteLease>;

    /// Takes back digests that came out wrong: the slots of `tokens` may be written again, and must
    /// be hashed again before `arm`. The one exception to promise 7, and no hole in it: a page that
    /// differs from its claim was never verified.
    ///
    /// Destination executor, STREAM, before a second pull. An engine that does not offer it makes a
    /// damaged page end the attempt instead.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `StageState` once committed; `OutOfRange`; `Busy` while one
    /// of the slots is being hashed; `Caller` where it is not offered.
    fn reopen(&self, stage: StageId, group: u16, tokens: Range<u64>) -> Result<()> {
        let _ = (stage, group, tokens);
        Err(AdapterError::Caller(
            "this engine does not take digests back: start a new attempt",
        ))
    }

    /// Attaches the pages to the request in the making, in ascending order of position, and closes
    /// the stage for writing. Slots past `kv_len` in the last block read as zero afterwards.
    ///
    /// Destination executor, IMPORT-TAIL. All groups get the same `kv_len`, so a group that came
    /// out shorter is refused here. Idempotent with an equal manifest.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `Conflict`; `StageState`; `OutOfRange` past the capacity;
    /// `Incompatible` for a first live token that is not the one reserved for; `Busy` while a
    /// write lease is out.
    fn commit_import(&self, stage: StageId, manifest: &Manifest) -> Result<()>;

    /// Loads the control state into the engine.
    ///
    /// Destination executor, after `commit_import`. Checks every count and hash in it against what
    /// was imported: token log, `kv_len`, model, weights, tokenizer, generator, profile. Idempotent
    /// with equal bytes and owner epoch.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `StageState`; `Conflict`; `Control`; `Refused`;
    /// `Incompatible`; `ReplayMismatch` naming the part that contradicts.
    fn import_control(&self, stage: StageId, bytes: &[u8], owner_epoch: OwnerEpoch) -> Result<()>;

    /// Writes one group's mutable blob. Destination executor, before `arm`; errors as
    /// [`import_control`](Self::import_control), and `MutableState`.
    fn import_state(&self, stage: StageId, group: u16, bytes: &[u8]) -> Result<()> {
        let _ = (stage, bytes);
        Err(AdapterError::MutableState { group })
    }

    /// Makes the request ready to run, and does not run it.
    ///
    /// Destination executor, ARM, after it verified every page and the control digest. Replays the
    /// output tokens through grammar, penalties and detokenizer and compares the mask digest and
    /// the text offsets with the control state. Refuses while any slot below `kv_len` was never
    /// hashed in this stage. Idempotent.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `StageState`; `NotHashed`; `ReplayMismatch`; `Refused`.
    fn arm(&self, stage: StageId) -> Result<Armed>;

    /// Drops a stage, armed or not, and frees its blocks.
    ///
    /// Destination executor, only on evidence that ownership stayed with the source (an armed stage
    /// may have been committed by a compare-and-swap whose reply was lost). Idempotent, any epoch.
    ///
    /// Errors: `StageState { is: Active }` for a request that runs, which it leaves alone.
    fn disarm(&self, stage: StageId) -> Result<Released>;

    /// Drops a stage that is not armed, and frees its blocks. Destination executor, any time before
    /// ARM, without evidence. Idempotent, any epoch; at once, even while transfers are under way
    /// (their blocks follow when their leases end).
    ///
    /// Errors: `StageState` for an armed stage or a request that runs; both are left alone.
    fn abort_import(&self, stage: StageId) -> Result<Released>;

    /// Makes an armed request runnable: from here on it computes, emits and may be pinned.
    ///
    /// Destination executor, RESUME, only after the commit's compare-and-swap is known to have
    /// succeeded. First emits output tokens from `reemit_from` again, then decodes. Idempotent for
    /// the same owner epoch.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `StageState`; `OwnerEpoch` if not higher than the imported
    /// one, or if it runs under another; `OutOfRange` for `reemit_from` 0 or past `seal + 1`.
    fn activate(&self, stage: StageId, activation: Activation) -> Result<Activated>;

    // ---- recovery ----

    /// The control state at the next step boundary, without holding the request.
    ///
    /// Source worker, periodically, and after admission once there is an output token.
    ///
    /// Errors: `Unknown(Request)`; `Refused`; `Finished`; `DrainDeadline`.
    fn journal_checkpoint(&self, request: RequestId, deadline: Instant) -> Result<Checkpoint>;

    /// Rebuilds a lost request from journal and checkpoint into an armed stage.
    ///
    /// The worker chosen by recovery, after the acceptor's floor was raised. KV is computed again
    /// (or loaded and hashed), output tokens up to J are replayed and never sampled anew. The class
    /// says what was *checked*: recomputed KV is `BitExact` only if it was hashed in resident
    /// memory and equals [`Checkpoint::set_digest`]. Idempotent by (request, epoch). May take as
    /// long as a prefill; it does not hold the request's lock meanwhile, and re-checks the floor
    /// before it publishes the stage.
    ///
    /// Errors: as `prepare_import`, `import_control` and `arm`; `Conflict` if the journal
    /// contradicts the checkpoint.
    fn rebuild_from_journal(&self, image: &JournalImage) -> Result<Rebuilt>;
}
