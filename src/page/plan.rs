//! The copy planner: which bytes of one pool go where in another. Pure, and exact: only valid
//! tokens, only heads and layers that both sides hold.

use std::ops::Range;

use super::{BlockLayout, PageError, Plane, Shard, TokenView};

/// Copy `len` bytes from `src_off` of the source's region to `dst_off` of the destination's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CopyRun {
    /// Offset in the source region.
    pub src_off: u64,
    /// Offset in the destination region.
    pub dst_off: u64,
    /// Bytes.
    pub len: u64,
}

/// Appends to `out` the runs that bring `tokens` of all layers and heads that *both* sides hold
/// from `src` to `dst`; ascending by source offset, merged wherever both sides are contiguous.
///
/// Between unlike layouts there is about one run per row (token, layer, head, component): plan long
/// requests in parts.
///
/// Errors if the views are of different groups, do not cover `tokens`, share no leaf, or if the
/// destination's table names a block twice.
pub fn plan_copy(
    src: &TokenView<'_>,
    dst: &TokenView<'_>,
    tokens: Range<u64>,
    out: &mut Vec<CopyRun>,
) -> Result<(), PageError> {
    match src.layout().shard().intersection(dst.layout().shard()) {
        Some(common) => plan_copy_of(src, dst, &common, tokens, out),
        None => {
            let shard = dst.layout().shard();
            Err(PageError::MissingLeaf {
                layer: shard.layers[0],
                head: shard.heads[0],
            })
        }
    }
}

/// As [`plan_copy`], restricted to the leaves `what`, which both sides must hold. With
/// [`assign_sources`] this gathers one destination from several ranks, each leaf once.
pub fn plan_copy_of(
    src: &TokenView<'_>,
    dst: &TokenView<'_>,
    what: &Shard,
    tokens: Range<u64>,
    out: &mut Vec<CopyRun>,
) -> Result<(), PageError> {
    let (sl, dl) = (src.layout(), dst.layout());
    if sl.geometry() != dl.geometry() {
        return Err(PageError::GeometryMismatch);
    }
    what.validate(sl.geometry())?;
    src.check(&tokens)?;
    dst.check(&tokens)?;
    no_duplicates(dst.blocks_of(tokens.clone())?)?;
    let heads = head_intervals(sl, dl, &what.heads)?;
    let mut layers = Vec::with_capacity(what.layers.len());
    for &id in &what.layers {
        let missing = PageError::NotInShard { what: "layer", id };
        let s = sl.shard().layer_index(id).ok_or(missing.clone())?;
        layers.push((s, dl.shard().layer_index(id).ok_or(missing)?));
    }
    let first = out.len();
    let mut at = tokens.start;
    while at < tokens.end {
        let (sb, ss) = src.place_unchecked(at);
        let (db, ds) = dst.place_unchecked(at);
        let room = (sl.block_tokens() - ss).min(dl.block_tokens() - ds);
        let n = u64::from(room).min(tokens.end - at);
        let step = Step {
            src: (sb, ss),
            dst: (db, ds),
            slots: n,
        };
        for &(s, d) in &layers {
            step.layer((sl, s), (dl, d), &heads, out);
        }
        at += n;
    }
    merge(out, first);
    Ok(())
}

/// Which source rank provides which leaves of `need`, each leaf exactly once: pairs of an index
/// into `sources` and a part of it. Where several hold a leaf (replicated heads), the search begins
/// at `sources[prefer % len]`, so that destination ranks can spread over replicas.
pub fn assign_sources(
    sources: &[&Shard],
    need: &Shard,
    prefer: usize,
) -> Result<Vec<(usize, Shard)>, PageError> {
    let mut parts: Vec<(usize, Shard)> = Vec::new();
    for &layer in &need.layers {
        let mut of_layer: Vec<(usize, Vec<u32>)> = Vec::new();
        for &head in &need.heads {
            let holder = (0..sources.len())
                .map(|i| (prefer % sources.len() + i) % sources.len())
                .find(|&i| {
                    sources[i].layer_index(layer).is_some() && sources[i].head_index(head).is_some()
                })
                .ok_or(PageError::MissingLeaf { layer, head })?;
            match of_layer.iter_mut().find(|(i, _)| *i == holder) {
                Some((_, heads)) => heads.push(head),
                None => of_layer.push((holder, vec![head])),
            }
        }
        for (source, heads) in of_layer {
            match parts
                .iter_mut()
                .find(|(i, part)| *i == source && part.heads == heads)
            {
                Some((_, part)) => part.layers.push(layer),
                None => parts.push((
                    source,
                    Shard {
                        layers: vec![layer],
                        heads,
                    },
                )),
            }
        }
    }
    Ok(parts)
}

/// `slots` consecutive tokens that lie in one block on each side.
struct Step {
    src: (u32, u32),
    dst: (u32, u32),
    slots: u64,
}

impl Step {
    fn layer(
        &self,
        (sl, s): (&BlockLayout, usize),
        (dl, d): (&BlockLayout, usize),
        heads: &[(u64, u64, u64)],
        out: &mut Vec<CopyRun>,
    ) {
        let n = sl.components().len();
        let row = |c: usize| u64::from(sl.geometry().row_bytes(sl.components()[c]));
        let mut c = 0;
        while c < n {
            let (sp, dp) = (sl.plane(s, c), dl.plane(d, c));
            let mut len = row(c);
            c += 1;
            // Components side by side on both sides are one wider row.
            while c < n && sp.adjoins(len, sl.plane(s, c)) && dp.adjoins(len, dl.plane(d, c)) {
                len += row(c);
                c += 1;
            }
            for &(sh, dh, count) in heads {
                self.rows((sp, sh), (dp, dh), count, len, out);
            }
        }
    }

    fn rows(
        &self,
        (sp, sh): (&Plane, u64),
        (dp, dh): (&Plane, u64),
        heads: u64,
        mut len: u64,
        out: &mut Vec<CopyRun>,
    ) {
        let start = |p: &Plane, (block, slot): (u32, u32), head: u64| {
            p.base
                + u64::from(block) * p.block_stride
                + u64::from(slot) * p.slot_stride
                + head * p.head_stride
        };
        let src = start(sp, self.src, sh);
        let dst = start(dp, self.dst, dh);
        let mut dims = [
            (self.slots, sp.slot_stride, dp.slot_stride),
            (heads, sp.head_stride, dp.head_stride),
        ];
        // A dimension whose step is the run's own length on both sides lengthens the run.
        for _ in 0..2 {
            for (n, s, d) in &mut dims {
                if *n > 1 && *s == len && *d == len {
                    len *= *n;
                    *n = 1;
                }
            }
        }
        for i in 0..dims[0].0 {
            for j in 0..dims[1].0 {
                out.push(CopyRun {
                    src_off: src + i * dims[0].1 + j * dims[1].1,
                    dst_off: dst + i * dims[0].2 + j * dims[1].2,
                    len,
                });
            }
        }
    }
}

/// Local indices of the heads on both sides, as intervals consecutive on both.
fn head_intervals(
    sl: &BlockLayout,
    dl: &BlockLayout,
    heads: &[u32],
) -> Result<Vec<(u64, u64, u64)>, PageError> {
    let mut out: Vec<(u64, u64, u64)> = Vec::new();
    for &id in heads {
        let missing = PageError::NotInShard { what: "head", id };
        let s = sl.shard().head_index(id).ok_or(missing.clone())? as u64;
        let d = dl.shard().head_index(id).ok_or(missing)? as u64;
        match out.last_mut() {
            Some((s0, d0, n)) if *s0 + *n == s && *d0 + *n == d => *n += 1,
            _ => out.push((s, d, 1)),
        }
    }
    Ok(out)
}

fn no_duplicates(table: &[u32]) -> Result<(), PageError> {
    let mut sorted = table.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|w| w[0] == w[1]) {
        Some(w) => Err(PageError::DuplicateBlock { block: w[0] }),
        None => Ok(()),
    }
}

/// Sorts `out[first..]` by source and joins runs that continue one another on both sides.
fn merge(out: &mut Vec<CopyRun>, first: usize) {
    out[first..].sort_unstable_by_key(|r| (r.src_off, r.dst_off));
    let mut kept = first;
    for i in first..out.len() {
        let run = out[i];
        if kept > first {
            let last = &mut out[kept - 1];
            if last.src_off + last.len == run.src_off && last.dst_off + last.len == run.dst_off {
                last.len += run.len;
                continue;
            }
        }
        out[kept] = run;
        kept += 1;
    }
    out.truncate(kept);
}
