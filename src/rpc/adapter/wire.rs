//! Values across the border. What comes in is checked: a message that means nothing is the peer's
//! fault and typed so.

use super::v1 as pb;
use crate::control_state::{Claim, Fingerprint, RngKind};
use crate::digest::{LeafDigest, PageDigest, SetDigest};
use crate::engine::adapter::*;
use crate::id::{Incarnation, MigrationEpoch, OwnerEpoch, RequestId};
use crate::page::ObjectSetHeader;
use std::time::{Duration, Instant};

/// Bytes of a fixed length.
pub(super) fn fixed<const N: usize>(bytes: &[u8]) -> Result<[u8; N]> {
    let bad = AdapterError::Caller("a hash or id in the message has the wrong length");
    bytes.try_into().map_err(|_| bad)
}

/// A part that must be there.
pub(super) fn there<T>(part: Option<T>) -> Result<T> {
    part.ok_or(AdapterError::Caller("a part of the message is missing"))
}

pub(super) fn short(number: u32) -> Result<u16> {
    let bad = AdapterError::Caller("a KV group, page size or slot in the message is too large");
    number.try_into().map_err(|_| bad)
}

pub(super) fn rng(number: u32) -> Result<RngKind> {
    RngKind::ALL
        .into_iter()
        .find(|k| *k as u32 == number)
        .ok_or(AdapterError::Caller(
            "the message names a generator that does not exist",
        ))
}

pub(super) fn left_ns(deadline: Instant) -> u64 {
    let left = deadline.saturating_duration_since(Instant::now());
    u64::try_from(left.as_nanos()).unwrap_or(u64::MAX)
}

/// A deadline from the time left; at most an hour ahead.
pub(super) fn deadline(left_ns: u64) -> Instant {
    Instant::now() + Duration::from_nanos(left_ns).min(Duration::from_secs(3600))
}

pub(super) fn key(
    incarnation: Incarnation,
    request: RequestId,
    epoch: MigrationEpoch,
) -> pb::RequestKey {
    pb::RequestKey {
        incarnation: incarnation.0,
        request: request.0.to_vec(),
        epoch: epoch.0,
    }
}

pub(super) fn key_of(key: &pb::RequestKey) -> Result<(RequestId, MigrationEpoch)> {
    Ok((RequestId(fixed(&key.request)?), MigrationEpoch(key.epoch)))
}

pub(super) fn view(incarnation: Incarnation, view: View) -> pb::View {
    let of = match view {
        View::Pin(p) => pb::view::Of::Pin(p.0),
        View::Stage(s) => pb::view::Of::Stage(s.0),
    };
    pb::View {
        incarnation: incarnation.0,
        of: Some(of),
    }
}

pub(super) fn view_of(view: &pb::View) -> Result<View> {
    Ok(match there(view.of)? {
        pb::view::Of::Pin(p) => PinId(p).into(),
        pb::view::Of::Stage(s) => StageId(s).into(),
    })
}

fn first_live(list: &[(u16, u64)]) -> Vec<pb::FirstLive> {
    let one = |(group, token): &(u16, u64)| pb::FirstLive {
        group: (*group).into(),
        token: *token,
    };
    list.iter().map(one).collect()
}

fn first_live_of(list: &[pb::FirstLive]) -> Result<Vec<(u16, u64)>> {
    list.iter()
        .map(|f| Ok((short(f.group)?, f.token)))
        .collect()
}

pub(super) fn pinned(p: Pinned) -> pb::Pinned {
    pb::Pinned {
        pin: p.pin.0,
        generation: p.generation,
        prompt_tokens: p.prompt_tokens,
        max_tokens: p.max_tokens,
        first_live: first_live(&p.first_live),
    }
}

pub(super) fn pinned_of(p: pb::Pinned) -> Result<Pinned> {
    Ok(Pinned {
        pin: PinId(p.pin),
        generation: p.generation,
        prompt_tokens: p.prompt_tokens,
        max_tokens: p.max_tokens,
        first_live: first_live_of(&p.first_live)?,
    })
}

pub(super) fn released(r: Released) -> pb::Released {
    pb::Released { blocks: r.blocks }
}

pub(super) fn sealed(s: Sealed) -> pb::Sealed {
    pb::Sealed {
        stable_len: s.stable_len,
        accepted: s.accepted,
        generation: s.generation,
        dirty: s.dirty,
    }
}

pub(super) fn sealed_of(s: pb::Sealed) -> Sealed {
    Sealed {
        stable_len: s.stable_len,
        accepted: s.accepted,
        generation: s.generation,
        dirty: s.dirty,
    }
}

pub(super) fn boundary(b: Boundary) -> pb::Boundary {
    pb::Boundary {
        seal: b.seal,
        kv_len: b.kv_len,
        pending_token: b.pending_token,
        sealed: Some(sealed(b.sealed)),
        last_step_done_ns: b.last_step_done_ns,
    }
}

pub(super) fn boundary_of(b: pb::Boundary) -> Result<Boundary> {
    Ok(Boundary {
        seal: b.seal,
        kv_len: b.kv_len,
        pending_token: b.pending_token,
        sealed: sealed_of(there(b.sealed)?),
        last_step_done_ns: b.last_step_done_ns,
    })
}

pub(super) fn pages(digests: &PageDigests) -> pb::Pages {
    let page = |(row, leaves): (&PageRow, &[LeafDigest])| pb::Page {
        group: row.group.into(),
        page: row.page,
        first_slot: row.first_slot.into(),
        valid_tokens: row.valid_tokens.into(),
        digest: row.digest.0.to_vec(),
        leaves: leaves.iter().flat_map(|l| l.0).collect(),
    };
    pb::Pages {
        pages: digests.iter().map(page).collect(),
    }
}

/// Appends to `out` only if all pages make sense.
pub(super) fn pages_into(pages: &pb::Pages, out: &mut PageDigests) -> Result<()> {
    let mut rows = Vec::with_capacity(pages.pages.len());
    for page in &pages.pages {
        let (leaves, rest) = page.leaves.as_chunks::<32>();
        if !rest.is_empty() {
            return Err(AdapterError::Caller(
                "a leaf in the message is not 32 bytes long",
            ));
        }
        let row = PageRow {
            group: short(page.group)?,
            page: page.page,
            first_slot: short(page.first_slot)?,
            valid_tokens: short(page.valid_tokens)?,
            digest: PageDigest(fixed(&page.digest)?),
        };
        rows.push((
            row,
            leaves.iter().map(|l| LeafDigest(*l)).collect::<Vec<_>>(),
        ));
    }
    rows.iter().for_each(|(row, leaves)| out.push(*row, leaves));
    Ok(())
}

pub(super) fn spec(incarnation: Incarnation, s: &ImportSpec) -> pb::ImportSpec {
    pb::ImportSpec {
        key: Some(key(incarnation, s.request, s.epoch)),
        header: s.header.encode(),
        engine_build: s.source.engine_build.to_vec(),
        numerics_profile: s.source.numerics_profile.to_vec(),
        rng_kind: s.rng as u32,
        prompt_tokens: s.prompt_tokens,
        max_tokens: s.max_tokens,
        first_live: first_live(&s.first_live),
    }
}

pub(super) fn spec_of(s: &pb::ImportSpec) -> Result<ImportSpec> {
    let (request, epoch) = key_of(&there(s.key.clone())?)?;
    Ok(ImportSpec {
        request,
        epoch,
        header: ObjectSetHeader::decode(&s.header)?,
        source: Fingerprint {
            engine_build: fixed(&s.engine_build)?,
            numerics_profile: fixed(&s.numerics_profile)?,
        },
        rng: rng(s.rng_kind)?,
        prompt_tokens: s.prompt_tokens,
        max_tokens: s.max_tokens,
        first_live: first_live_of(&s.first_live)?,
    })
}

pub(super) fn manifest(stage: pb::StageRef, m: &Manifest) -> pb::CommitImportRequest {
    pb::CommitImportRequest {
        stage: Some(stage),
        kv_len: m.kv_len,
        first_live: first_live(&m.first_live),
    }
}

pub(super) fn manifest_of(m: &pb::CommitImportRequest) -> Result<Manifest> {
    Ok(Manifest {
        kv_len: m.kv_len,
        first_live: first_live_of(&m.first_live)?,
    })
}

pub(super) fn armed(a: Armed) -> pb::Armed {
    pb::Armed {
        state_equal_only: a.claim == Claim::StateEqual,
        replayed: a.replayed,
        pending_token: a.pending_token,
        mask_digest: a.mask_digest.map(|d| d.to_vec()),
    }
}

pub(super) fn armed_of(a: &pb::Armed) -> Result<Armed> {
    Ok(Armed {
        claim: if a.state_equal_only {
            Claim::StateEqual
        } else {
            Claim::BitExact
        },
        replayed: a.replayed,
        pending_token: a.pending_token,
        mask_digest: a.mask_digest.as_deref().map(fixed).transpose()?,
    })
}

pub(super) fn checkpoint(c: Checkpoint) -> pb::Checkpoint {
    pb::Checkpoint {
        seal: c.seal,
        kv_len: c.kv_len,
        control: c.control,
        set_digest: c.set_digest.map(|d| d.0.to_vec()),
    }
}

pub(super) fn checkpoint_of(c: pb::Checkpoint) -> Result<Checkpoint> {
    Ok(Checkpoint {
        seal: c.seal,
        kv_len: c.kv_len,
        control: c.control,
        set_digest: c
            .set_digest
            .as_deref()
            .map(fixed)
            .transpose()?
            .map(SetDigest),
    })
}

pub(super) fn image(incarnation: Incarnation, i: &JournalImage) -> pb::JournalImage {
    pb::JournalImage {
        key: Some(key(incarnation, i.request, i.epoch)),
        owner_epoch: i.owner_epoch.0,
        checkpoint: Some(checkpoint(i.checkpoint.clone())),
        prompt: i.prompt.clone(),
        output: i.output.clone(),
    }
}

pub(super) fn image_of(i: pb::JournalImage) -> Result<JournalImage> {
    let (request, epoch) = key_of(&there(i.key)?)?;
    Ok(JournalImage {
        request,
        epoch,
        owner_epoch: OwnerEpoch(i.owner_epoch),
        checkpoint: checkpoint_of(there(i.checkpoint)?)?,
        prompt: i.prompt,
        output: i.output,
    })
}

pub(super) fn class(c: RebuildClass) -> i32 {
    (match c {
        RebuildClass::BitExact => pb::RebuildClass::BitExact,
        RebuildClass::TokenExactOnly => pb::RebuildClass::TokenExactOnly,
        RebuildClass::Recomputed => pb::RebuildClass::Recomputed,
    }) as i32
}

/// An unknown class claims nothing.
pub(super) fn class_of(number: i32) -> RebuildClass {
    match pb::RebuildClass::try_from(number) {
        Ok(pb::RebuildClass::BitExact) => RebuildClass::BitExact,
        Ok(pb::RebuildClass::TokenExactOnly) => RebuildClass::TokenExactOnly,
        Ok(pb::RebuildClass::Recomputed) | Err(_) => RebuildClass::Recomputed,
    }
}

pub(super) fn capabilities(c: &Capabilities, pools: Vec<pb::GroupPool>) -> pb::Capabilities {
    let (mutable_state, mutable_max_bytes) = match c.mutable_state {
        MutableState::None => (pb::MutableState::None, 0),
        MutableState::MoveInFence { max_bytes } => (pb::MutableState::MoveInFence, max_bytes),
        MutableState::Unsupported => (pb::MutableState::Unsupported, 0),
    };
    pb::Capabilities {
        incarnation: c.incarnation.0,
        engine_kind: c.engine_kind.into(),
        engine_build: c.fingerprint.engine_build.to_vec(),
        numerics_profile: c.fingerprint.numerics_profile.to_vec(),
        model: c.model.to_vec(),
        weights_version: c.weights_version,
        tokenizer: c.tokenizer.to_vec(),
        header: c.header.encode(),
        max_context: c.max_context,
        rng_kinds: c.rng_kinds.iter().map(|k| *k as u32).collect(),
        batch_invariant: c.batch_invariant,
        partial_sequence: c.partial_sequence,
        mutable_state: mutable_state as i32,
        mutable_max_bytes,
        rewrites_tail: c.tail == TailWrites::RewritesTail,
        rebuild: class(c.rebuild),
        pools,
    }
}

pub(super) fn capabilities_of(c: &pb::Capabilities) -> Result<Capabilities> {
    Ok(Capabilities {
        incarnation: Incarnation(c.incarnation),
        engine_kind: short(c.engine_kind)?,
        fingerprint: Fingerprint {
            engine_build: fixed(&c.engine_build)?,
            numerics_profile: fixed(&c.numerics_profile)?,
        },
        model: fixed(&c.model)?,
        weights_version: c.weights_version,
        tokenizer: fixed(&c.tokenizer)?,
        header: ObjectSetHeader::decode(&c.header)?,
        max_context: c.max_context,
        rng_kinds: c.rng_kinds.iter().map(|k| rng(*k)).collect::<Result<_>>()?,
        batch_invariant: c.batch_invariant,
        partial_sequence: c.partial_sequence,
        // An unknown kind of mutable state is one that nobody here can move.
        mutable_state: match pb::MutableState::try_from(c.mutable_state) {
            Ok(pb::MutableState::None) => MutableState::None,
            Ok(pb::MutableState::MoveInFence) => MutableState::MoveInFence {
                max_bytes: c.mutable_max_bytes,
            },
            Ok(pb::MutableState::Unsupported) | Err(_) => MutableState::Unsupported,
        },
        tail: match c.rewrites_tail {
            true => TailWrites::RewritesTail,
            false => TailWrites::AppendOnly,
        },
        rebuild: class_of(c.rebuild),
    })
}
