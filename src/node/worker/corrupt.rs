//! Bits flipped on purpose: in destination memory, before or after the page's verify, and in the
//! slots that go ahead of the push.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::core::Core;
use crate::engine::adapter::{StageId, View};
use crate::id::MigrationEpoch;
use crate::migrate::io::Step;
use crate::node::faults::{Fault, draw, flip};
use crate::page::{Component, TokenView};

/// `corrupt-resident-early`: after the bytes landed, before they are hashed.
pub fn before_verify(core: &Core, stage: StageId, tokens: &Range<u64>) {
    if let Some(seed) = core.faults.due(Fault::CorruptResidentEarly, Step::Stream) {
        flip_resident(core, stage, tokens, seed);
    }
}

/// `corrupt-resident-late`: after the page was hashed and found equal.
pub fn after_verify(core: &Core, stage: StageId, tokens: &Range<u64>) {
    if let Some(seed) = core.faults.due(Fault::CorruptResidentLate, Step::Stream) {
        flip_resident(core, stage, tokens, seed);
    }
}

/// Sends the slots that go ahead of the push, as an injected fault wants them. Gives what the source
/// is to believe: whether they left.
pub fn ahead(
    core: &Core,
    epoch: MigrationEpoch,
    slots: &[u8],
    send: impl Fn(MigrationEpoch, &[u8]) -> bool,
) -> bool {
    let due = |fault| core.faults.due(fault, Step::CopyTail);
    let flipped = |seed| {
        let mut slots = slots.to_vec();
        flip(&mut slots, seed);
        slots
    };
    if due(Fault::LoseAhead).is_some() {
        return true;
    }
    if let Some(seed) = due(Fault::CorruptAhead) {
        return send(epoch, &flipped(seed));
    }
    if let Some(seed) = due(Fault::StaleAhead) {
        for other in [epoch.0.wrapping_sub(1), epoch.0.wrapping_add(1)] {
            send(MigrationEpoch(other), &flipped(seed));
        }
    }
    send(epoch, slots)
}

/// Flips one bit of one row of one token, drawn by the seed, through the pool itself: as a stray
/// write of a broken device would, past every check of the engine.
fn flip_resident(core: &Core, stage: StageId, tokens: &Range<u64>, seed: u64) {
    let Some(group) = core.capabilities.header.groups.first() else {
        return;
    };
    let flipped = (|| {
        let info = core.adapter.pool(group.group).ok()?;
        let table = core
            .adapter
            .table(View::Stage(stage), group.group, tokens.clone())
            .ok()?;
        let view = TokenView::new(&info.layout, &table, tokens.clone()).ok()?;
        let token = tokens.start + draw(seed) % (tokens.end - tokens.start);
        let (block, slot) = view.place(token).ok()?;
        let shard = info.layout.shard();
        let pick = |ids: &[u32], n| ids[(draw(seed + n) % ids.len() as u64) as usize];
        let (layer, head) = (pick(&shard.layers, 1), pick(&shard.heads, 2));
        let row = info
            .layout
            .locate(layer, head, Component::K, block, slot)
            .ok()?;
        let len = group.row_bytes(Component::K) as usize;
        let deadline = Instant::now() + Duration::from_secs(2);
        let mut lease = info.pool.write_until(&[block], deadline).ok()?;
        let bytes = lease.try_bytes_mut(row, len).ok()?;
        flip(bytes, seed + 3);
        Some((token, layer, head))
    })();
    match flipped {
        Some((token, layer, head)) => {
            tracing::warn!(token, layer, head, "flipped one bit of a resident key");
        }
        None => tracing::error!("no bit could be flipped in the stage"),
    }
}
