//! Bits flipped in destination memory on purpose, before or after the page's verify.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::core::Core;
use crate::engine::adapter::{StageId, View};
use crate::migrate::io::Step;
use crate::node::faults::{Fault, draw};
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
        crate::node::faults::flip(bytes, seed + 3);
        Some((token, layer, head))
    })();
    match flipped {
        Some((token, layer, head)) => {
            tracing::warn!(token, layer, head, "flipped one bit of a resident key");
        }
        None => tracing::error!("no bit could be flipped in the stage"),
    }
}
