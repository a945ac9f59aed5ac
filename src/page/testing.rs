//! For tests: KV content as a function, pools filled with it through nothing but `locate`, and
//! random layouts.

use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;

/// The byte of a row that every pool holding it must hold.
pub(crate) fn content(seed: u64, layer: u32, head: u32, c: Component, token: u64, at: u32) -> u8 {
    let mut x = seed ^ 0x9e37_79b9_7f4a_7c15;
    for v in [
        u64::from(layer),
        u64::from(head),
        c as u64,
        token,
        u64::from(at),
    ] {
        x = (x ^ v).wrapping_mul(0xff51_afd7_ed55_8ccd);
        x ^= x >> 32;
    }
    (x >> 24) as u8
}

/// A pool of one rank, its request's block table and its tokens.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    pub(crate) layout: Arc<BlockLayout>,
    pub(crate) table: Vec<u32>,
    pub(crate) tokens: Range<u64>,
    pub(crate) bytes: Vec<u8>,
}

impl Pool {
    /// A pool full of noise with a permuted table for `tokens`, nothing of the request in it.
    pub(crate) fn empty(layout: BlockLayout, tokens: Range<u64>, noise: u64) -> Self {
        let bt = u64::from(layout.block_tokens());
        let n = tokens.end.div_ceil(bt).saturating_sub(tokens.start / bt) as usize;
        let mut blocks: Vec<u32> = (0..layout.blocks()).collect();
        assert!(n <= blocks.len(), "test pool too small");
        for i in (1..blocks.len()).rev() {
            let j = content(noise, 1, 2, Component::K, i as u64, 3) as usize * 257 + i * 31;
            blocks.swap(i, j % (i + 1));
        }
        blocks.truncate(n);
        let bytes = (0..layout.region_len())
            .map(|i| content(noise, 7, 7, Component::VScale, i, 0))
            .collect();
        Self {
            layout: Arc::new(layout),
            table: blocks,
            tokens,
            bytes,
        }
    }

    /// The same, then every valid row written with the request's content.
    pub(crate) fn filled(layout: BlockLayout, tokens: Range<u64>, noise: u64, seed: u64) -> Self {
        let mut pool = Self::empty(layout, tokens, noise);
        for (offset, want) in pool.rows(seed) {
            pool.bytes[offset..offset + want.len()].copy_from_slice(&want);
        }
        pool
    }

    pub(crate) fn view(&self) -> TokenView<'_> {
        TokenView::new(&self.layout, &self.table, self.tokens.clone()).unwrap()
    }

    /// Offset and content of every valid row.
    pub(crate) fn rows(&self, seed: u64) -> Vec<(usize, Vec<u8>)> {
        let view = self.view();
        let geometry = self.layout.geometry();
        let mut out = Vec::new();
        for token in self.tokens.clone() {
            let (block, slot) = view.place(token).unwrap();
            for (layer, head) in self.layout.shard().iter() {
                for c in geometry.components() {
                    let offset = self.layout.locate(layer, head, c, block, slot).unwrap();
                    let row = (0..geometry.row_bytes(c))
                        .map(|at| content(seed, layer, head, c, token, at))
                        .collect();
                    out.push((offset as usize, row));
                }
            }
        }
        out
    }

    pub(crate) fn holds(&self, seed: u64) -> bool {
        self.rows(seed)
            .iter()
            .all(|(at, row)| self.bytes[*at..*at + row.len()] == row[..])
    }
}

/// The canonical bytes of one leaf: valid tokens of `tokens`, each K, V, K scales, V scales.
pub(crate) fn leaf_bytes(
    g: &GroupGeometry,
    seed: u64,
    leaf: (u32, u32),
    tokens: Range<u64>,
) -> Vec<u8> {
    let mut out = Vec::new();
    for token in tokens {
        for c in g.components() {
            out.extend((0..g.row_bytes(c)).map(|at| content(seed, leaf.0, leaf.1, c, token, at)));
        }
    }
    out
}

pub(crate) fn any_geometry() -> impl Strategy<Value = Arc<GroupGeometry>> {
    let layers = prop::collection::btree_set(0u32..9, 1..4);
    let row = prop_oneof![1u32..90, Just(64), Just(256), Just(512)];
    let scale = prop_oneof![3 => Just(0u32), 1 => 1u32..9];
    let sliding = prop_oneof![Just(0u32), Just(0), 1u32..50];
    let attention = (
        layers.clone(),
        1u32..6,
        row.clone(),
        row,
        scale.clone(),
        scale,
        sliding,
    )
        .prop_map(
            |(layers, kv_heads, k_bytes, v_bytes, k_scale_bytes, v_scale_bytes, window)| {
                let kind = if window > 0 {
                    KvKind::SlidingWindow { window }
                } else {
                    KvKind::Attention
                };
                GroupGeometry {
                    group: 3,
                    kind,
                    dtype: Dtype::Fp8E4M3,
                    layers: layers.into_iter().collect(),
                    kv_heads,
                    k_bytes,
                    v_bytes,
                    k_scale_bytes,
                    v_scale_bytes,
                }
            },
        );
    let mla = (layers, prop_oneof![Just(1152u32), Just(656), 1u32..700])
        .prop_map(|(layers, row)| GroupGeometry::mla(3, layers, row, Dtype::Fp8E4M3).unwrap());
    prop_oneof![4 => attention, 1 => mla].prop_map(Arc::new)
}

pub(crate) fn any_axes() -> impl Strategy<Value = [Axis; 5]> {
    Just(vec![
        Axis::Layer,
        Axis::Kv,
        Axis::Block,
        Axis::Head,
        Axis::Slot,
    ])
    .prop_shuffle()
    .prop_map(|axes| axes.try_into().unwrap())
}

/// A layout with room for `tokens` tokens; its shard is left to the caller.
pub(crate) fn any_spec(tokens: u64) -> impl Strategy<Value = LayoutSpec> {
    let block_tokens = prop_oneof![1u32..24, Just(1), Just(16), Just(64)];
    let scales = prop_oneof![Just(None), any_axes().prop_map(Some)];
    (
        any_axes(),
        block_tokens,
        0u64..70,
        prop_oneof![Just(0u64), 1u64..40],
        scales,
        0u32..4,
    )
        .prop_map(
            move |(axes, block_tokens, base, block_pad, scales, spare)| LayoutSpec {
                axes,
                block_tokens,
                blocks: tokens.div_ceil(block_tokens.into()) as u32 + 2 + spare,
                base,
                block_pad,
                scales: scales.map_or(Scales::OnKvAxis, Scales::Apart),
            },
        )
}

/// A non-empty part of the geometry.
pub(crate) fn any_shard(geometry: &GroupGeometry) -> impl Strategy<Value = Shard> + use<> {
    let layers = prop::sample::subsequence(geometry.layers.clone(), 1..=geometry.layers.len());
    let heads: Vec<u32> = (0..geometry.kv_heads).collect();
    let n = heads.len();
    (layers, prop::sample::subsequence(heads, 1..=n))
        .prop_map(|(layers, heads)| Shard { layers, heads })
}
