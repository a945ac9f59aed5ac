//! The packed form in which a fence's few remaining slots travel: token after token, each token's
//! layers, and of a layer first all heads of K, then those of V and of the scales. Only slots that
//! hold a token, so a range of tokens is a range of bytes. Both ends walk their own layout row by
//! row; where a layout keeps the heads of a slot side by side they are one copy.

use std::ops::Range;
use std::time::Instant;

use super::kv::KvError;
use crate::engine::adapter::{EngineAdapter, LEASE_WAIT, StageId, View};
use crate::page::{BlockLayout, ObjectSetHeader, PageError};

/// Calls `copy` with offset and length of each piece of one slot, in packed order.
fn pieces<E>(
    layout: &BlockLayout,
    block: u32,
    slot: u64,
    mut copy: impl FnMut(u64, usize) -> Result<(), E>,
) -> Result<(), E> {
    let heads = layout.shard().heads.len() as u64;
    for layer in 0..layout.shard().layers.len() {
        for (i, component) in layout.components().iter().enumerate() {
            let plane = layout.plane(layer, i);
            let row = u64::from(layout.geometry().row_bytes(*component));
            let at = plane.base + u64::from(block) * plane.block_stride + slot * plane.slot_stride;
            if plane.head_stride == row {
                copy(at, (heads * row) as usize)?;
                continue;
            }
            for head in 0..heads {
                copy(at + head * plane.head_stride, row as usize)?;
            }
        }
    }
    Ok(())
}

/// Bytes that `tokens` take here, of one group.
fn bytes_of(layout: &BlockLayout, tokens: &Range<u64>) -> Result<usize, PageError> {
    let token = layout.shard().leaves() as u64 * u64::from(layout.geometry().leaf_token_bytes());
    (tokens.end.checked_sub(tokens.start))
        .and_then(|n| n.checked_mul(token))
        .and_then(|n| usize::try_from(n).ok())
        .ok_or(PageError::Overflow)
}

/// The block and slot of a token, by the table of the blocks from that of token `first` on.
fn place(table: &[u32], block_tokens: u64, first: u64, token: u64) -> Result<(u32, u64), KvError> {
    let at = (token / block_tokens - first / block_tokens) as usize;
    let block = table.get(at).copied().ok_or(PageError::Overflow)?;
    Ok((block, token % block_tokens))
}

/// Appends the packed slots of `tokens`, all groups ascending, read from resident memory.
pub fn gather(
    engine: &dyn EngineAdapter,
    header: &ObjectSetHeader,
    view: View,
    tokens: Range<u64>,
    out: &mut Vec<u8>,
) -> Result<(), KvError> {
    if tokens.is_empty() {
        return Ok(());
    }
    for group in &header.groups {
        let info = engine.pool(group.group)?;
        let table = engine.table(view, group.group, tokens.clone())?;
        let lease = info.pool.read_until(&table, Instant::now() + LEASE_WAIT)?;
        out.reserve(bytes_of(&info.layout, &tokens)?);
        let block_tokens = u64::from(info.layout.block_tokens());
        for token in tokens.clone() {
            let (block, slot) = place(&table, block_tokens, tokens.start, token)?;
            pieces(&info.layout, block, slot, |at, len| {
                out.extend_from_slice(lease.try_bytes(at, len)?);
                Ok::<_, KvError>(())
            })?;
        }
    }
    Ok(())
}

/// Writes packed slots into a stage. `bytes` holds the tokens from `bytes_from`; `tokens` of them
/// are written, the others are not touched.
pub fn land(
    engine: &dyn EngineAdapter,
    header: &ObjectSetHeader,
    stage: StageId,
    bytes: &[u8],
    bytes_from: u64,
    tokens: Range<u64>,
) -> Result<(), KvError> {
    let all = bytes_from..tokens.end;
    let mut groups = Vec::with_capacity(header.groups.len());
    let mut want = 0;
    for group in &header.groups {
        let info = engine.pool(group.group)?;
        let len = bytes_of(&info.layout, &all)?;
        want += len;
        groups.push((group.group, info, len));
    }
    if bytes.len() != want {
        let got = bytes.len();
        return Err(KvError::Length { got, want });
    }
    if tokens.is_empty() {
        return Ok(());
    }
    let mut rest = bytes;
    for (group, info, len) in groups {
        let (mine, others) = rest.split_at(len);
        rest = others;
        let skipped = bytes_of(&info.layout, &(all.start..tokens.start))?;
        let mut from = &mine[skipped..];
        let table = engine.table(View::Stage(stage), group, tokens.clone())?;
        let mut lease = engine.stage_write(stage, group, tokens.clone())?;
        let block_tokens = u64::from(info.layout.block_tokens());
        for token in tokens.clone() {
            let (block, slot) = place(&table, block_tokens, tokens.start, token)?;
            pieces(&info.layout, block, slot, |at, len| {
                let (piece, left) = from.split_at(len);
                from = left;
                lease.try_bytes_mut(at, len)?.copy_from_slice(piece);
                Ok::<_, KvError>(())
            })?;
        }
    }
    Ok(())
}
