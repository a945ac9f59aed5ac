//! Canonical pages: which tokens a page holds, its packed form, and what a tail leaves unused.

use std::ops::Range;
use std::sync::Arc;

use super::{
    Axis, BlockLayout, CopyRun, GroupGeometry, LayoutSpec, PageError, Resident, Scales, Shard,
    TokenView, plan_copy,
};

/// The valid slots of one canonical page: `from .. to` of `0 .. page_tokens`.
///
/// `from` is 0 except for the first retained page of a sliding-window group; `to` is the page size
/// except for the tail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageSpan {
    /// Page number in the request.
    pub page: u32,
    /// First valid slot.
    pub from: u16,
    /// One past the last valid slot.
    pub to: u16,
}

impl PageSpan {
    /// The part of page `page` that `tokens` fills; `None` if it fills none of it.
    pub fn of(page: u32, page_tokens: u16, tokens: &Range<u64>) -> Option<Self> {
        let first = u64::from(page) * u64::from(page_tokens);
        let from = tokens.start.max(first);
        let to = tokens.end.min(first + u64::from(page_tokens));
        // Both lie within the page, so they fit in 16 bits.
        (from < to).then(|| Self {
            page,
            from: (from - first) as u16,
            to: (to - first) as u16,
        })
    }

    /// Valid tokens.
    pub fn valid(&self) -> u16 {
        self.to.saturating_sub(self.from)
    }

    /// The request's tokens it holds.
    pub fn tokens(&self, page_tokens: u16) -> Range<u64> {
        let first = u64::from(self.page) * u64::from(page_tokens);
        first + u64::from(self.from)..first + u64::from(self.to)
    }

    /// Whether it ends at the page's end: nothing can be added to it.
    pub fn sealed(&self, page_tokens: u16) -> bool {
        self.to == page_tokens
    }
}

/// Write access to parts of a pool's region; the counterpart of [`Resident`].
pub trait ResidentMut {
    /// The bytes `offset .. offset + len`, or `None` if this access does not cover all of them.
    fn bytes_mut(&mut self, offset: u64, len: usize) -> Option<&mut [u8]>;
}

impl ResidentMut for [u8] {
    fn bytes_mut(&mut self, offset: u64, len: usize) -> Option<&mut [u8]> {
        let from = usize::try_from(offset).ok()?;
        self.get_mut(from..from.checked_add(len)?)
    }
}

impl ResidentMut for Vec<u8> {
    fn bytes_mut(&mut self, offset: u64, len: usize) -> Option<&mut [u8]> {
        self.as_mut_slice().bytes_mut(offset, len)
    }
}

/// Carries out a plan between two memories of this process.
pub fn copy_runs<S, D>(runs: &[CopyRun], src: &S, dst: &mut D) -> Result<(), PageError>
where
    S: Resident + ?Sized,
    D: ResidentMut + ?Sized,
{
    for run in runs {
        let unreachable = |offset| PageError::Unreachable {
            offset,
            len: run.len,
        };
        let len = usize::try_from(run.len).map_err(|_| PageError::Overflow)?;
        let from = src
            .bytes(run.src_off, len)
            .ok_or(unreachable(run.src_off))?;
        let to = dst
            .bytes_mut(run.dst_off, len)
            .ok_or(unreachable(run.dst_off))?;
        to.copy_from_slice(from);
    }
    Ok(())
}

/// The packed form of canonical pages as a layout of its own, one block per page: leaf after leaf,
/// token after token, K, V, K scales, V scales. Exporting to it is a plan like any other.
pub fn packed_layout(
    geometry: &Arc<GroupGeometry>,
    shard: Shard,
    page_tokens: u16,
    pages: u32,
) -> Result<BlockLayout, PageError> {
    LayoutSpec {
        axes: [Axis::Block, Axis::Layer, Axis::Head, Axis::Slot, Axis::Kv],
        block_tokens: page_tokens.into(),
        blocks: pages,
        base: 0,
        block_pad: 0,
        scales: Scales::OnKvAxis,
    }
    .build(geometry, shard)
}

/// Writes the packed form of `span` into `out` (`page_tokens` times the shard's bytes per token
/// long); slots that are not valid become zero, whatever the pool holds there.
pub fn export_page<R: Resident + ?Sized>(
    view: &TokenView<'_>,
    mem: &R,
    span: PageSpan,
    page_tokens: u16,
    out: &mut [u8],
) -> Result<(), PageError> {
    let layout = view.layout();
    let packed = packed_layout(layout.geometry(), layout.shard().clone(), page_tokens, 1)?;
    check_len(&packed, out.len())?;
    let tokens = span.tokens(page_tokens);
    let to = TokenView::page(&packed, span.page, page_tokens, &tokens)?;
    let mut runs = Vec::new();
    plan_copy(view, &to, tokens, &mut runs)?;
    out.fill(0);
    copy_runs(&runs, mem, out)
}

/// The reverse of [`export_page`]: writes the valid slots of a packed page into a pool, and nothing
/// else of it.
pub fn import_page<D: ResidentMut + ?Sized>(
    packed_bytes: &[u8],
    span: PageSpan,
    page_tokens: u16,
    view: &TokenView<'_>,
    mem: &mut D,
) -> Result<(), PageError> {
    let layout = view.layout();
    let packed = packed_layout(layout.geometry(), layout.shard().clone(), page_tokens, 1)?;
    check_len(&packed, packed_bytes.len())?;
    let tokens = span.tokens(page_tokens);
    let from = TokenView::page(&packed, span.page, page_tokens, &tokens)?;
    let mut runs = Vec::new();
    plan_copy(&from, view, tokens, &mut runs)?;
    copy_runs(&runs, packed_bytes, mem)
}

fn check_len(packed: &BlockLayout, got: usize) -> Result<(), PageError> {
    let want = usize::try_from(packed.region_len()).map_err(|_| PageError::Overflow)?;
    if got == want {
        Ok(())
    } else {
        Err(PageError::BufferLen {
            what: "packed page",
            got,
            want,
        })
    }
}

/// Appends `(offset, len)` of the rows after the view's last token in its last block: what an
/// engine zeroes to canonicalize its own tail (unused slots read as zero). Rows of other tokens are
/// never among them.
pub fn unused_slots(view: &TokenView<'_>, out: &mut Vec<(u64, u64)>) -> Result<(), PageError> {
    let layout = view.layout();
    let bt = u64::from(layout.block_tokens());
    let end = view.tokens().end;
    if view.tokens().is_empty() || end.is_multiple_of(bt) {
        return Ok(());
    }
    // A plan from the block onto itself lists exactly the rows, merged.
    let last = view.blocks_of(end - 1..end)?;
    let whole = TokenView::new(layout, last, 0..bt)?;
    let mut runs = Vec::new();
    plan_copy(&whole, &whole, end % bt..bt, &mut runs)?;
    out.extend(runs.iter().map(|r| (r.dst_off, r.len)));
    Ok(())
}
