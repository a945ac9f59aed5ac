//! KV slots as bytes: token after token, in the order the proto describes.

use super::MAX_SLOT_BYTES;
use crate::page::{
    Axis, BlockLayout, LayoutSpec, PageError, Resident, ResidentMut, Scales, TokenView, copy_runs,
    plan_copy,
};
use std::ops::Range;

/// The packed form of `tokens` slots of a group and shard, one token a block.
fn packed(of: &BlockLayout, tokens: u32) -> Result<(BlockLayout, Vec<u32>), PageError> {
    let layout = LayoutSpec {
        axes: [Axis::Block, Axis::Layer, Axis::Head, Axis::Kv, Axis::Slot],
        block_tokens: 1,
        blocks: tokens,
        base: 0,
        block_pad: 0,
        scales: Scales::OnKvAxis,
    }
    .build(of.geometry(), of.shard().clone())?;
    Ok((layout, (0..tokens).collect()))
}

/// Bytes of one token in the packed form.
pub(super) fn token_bytes(layout: &BlockLayout) -> u64 {
    layout.block_bytes() / u64::from(layout.block_tokens())
}

/// A range cut into parts whose bytes fit into one message.
pub(super) fn parts(layout: &BlockLayout, tokens: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let each = (MAX_SLOT_BYTES / token_bytes(layout)).max(1);
    let end = tokens.end;
    tokens
        .step_by(each as usize)
        .map(move |from| from..(from + each).min(end))
}

fn count(tokens: &Range<u64>) -> Result<u32, PageError> {
    u32::try_from(tokens.end - tokens.start).map_err(|_| PageError::Overflow)
}

/// The packed bytes of `tokens`, read through `view`.
pub(super) fn gather<R: Resident + ?Sized>(
    view: &TokenView<'_>,
    memory: &R,
    tokens: Range<u64>,
) -> Result<Vec<u8>, PageError> {
    if tokens.is_empty() {
        return Ok(Vec::new());
    }
    let (layout, table) = packed(view.layout(), count(&tokens)?)?;
    let mut out = vec![0; usize::try_from(layout.region_len()).map_err(|_| PageError::Overflow)?];
    let to = TokenView::new(&layout, &table, tokens.clone())?;
    let mut runs = Vec::new();
    plan_copy(view, &to, tokens, &mut runs)?;
    copy_runs(&runs, memory, &mut out)?;
    Ok(out)
}

/// Writes the packed bytes of `tokens` through `view`.
pub(super) fn scatter<D: ResidentMut + ?Sized>(
    bytes: &[u8],
    view: &TokenView<'_>,
    memory: &mut D,
    tokens: Range<u64>,
) -> Result<(), PageError> {
    let (layout, table) = packed(view.layout(), count(&tokens)?)?;
    let want = usize::try_from(layout.region_len()).map_err(|_| PageError::Overflow)?;
    if bytes.len() != want {
        let (what, got) = ("slots", bytes.len());
        return Err(PageError::BufferLen { what, got, want });
    }
    let from = TokenView::new(&layout, &table, tokens.clone())?;
    let mut runs = Vec::new();
    plan_copy(&from, view, tokens, &mut runs)?;
    copy_runs(&runs, bytes, memory)
}
