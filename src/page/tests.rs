use std::sync::Arc;

use proptest::prelude::*;

use super::testing::*;
use super::*;

fn seven_b() -> Arc<GroupGeometry> {
    Arc::new(GroupGeometry::attention(0, 0..28, 4, 128, Dtype::Bf16).unwrap())
}

#[derive(Debug, Clone)]
struct Case {
    geometry: Arc<GroupGeometry>,
    src: LayoutSpec,
    dst: LayoutSpec,
    src_shard: Shard,
    dst_shard: Shard,
    have: (u64, u64),
    copy: (u64, u64),
}

/// Any two layouts of one model; the tokens the source has and a part of them to copy.
fn any_case() -> impl Strategy<Value = Case> {
    let tokens = (
        0u64..60,
        1u64..90,
        any::<prop::sample::Index>(),
        any::<prop::sample::Index>(),
    );
    (any_geometry(), tokens).prop_flat_map(|(geometry, (start, len, a, b))| {
        let end = start + len;
        let (mut from, mut to) = (
            start + a.index(len as usize + 1) as u64,
            start + b.index(len as usize + 1) as u64,
        );
        if from > to {
            std::mem::swap(&mut from, &mut to);
        }
        let shards = (any_shard(&geometry), any_shard(&geometry));
        (any_spec(end), any_spec(end), shards, Just(geometry)).prop_map(
            move |(src, dst, (src_shard, dst_shard), geometry)| Case {
                geometry,
                src,
                dst,
                src_shard,
                dst_shard,
                have: (start, end),
                copy: (from, to),
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_plan_moves_each_valid_byte_once_and_touches_nothing_else(case in any_case()) {
        let Case { geometry, src, dst, src_shard, dst_shard, have, copy } = case;
        let common = src_shard.intersection(&dst_shard);
        let src = Pool::filled(src.build(&geometry, src_shard).unwrap(), have.0..have.1, 1, 42);
        let mut dst = Pool::empty(dst.build(&geometry, dst_shard).unwrap(), have.0..have.1, 2);
        let mut runs = Vec::new();
        let planned = plan_copy(&src.view(), &dst.view(), copy.0..copy.1, &mut runs);
        let Some(common) = common else {
            let missing = matches!(planned, Err(PageError::MissingLeaf { .. }));
            prop_assert!(missing);
            return Ok(());
        };
        planned.unwrap();
        let want = (copy.1 - copy.0) * common.leaves() as u64 * u64::from(geometry.leaf_token_bytes());
        prop_assert_eq!(runs.iter().map(|r| r.len).sum::<u64>(), want);
        // Maximally merged, in order of the source.
        for pair in runs.windows(2) {
            prop_assert!(pair[0].src_off + pair[0].len <= pair[1].src_off);
            prop_assert!(
                pair[0].src_off + pair[0].len != pair[1].src_off
                    || pair[0].dst_off + pair[0].len != pair[1].dst_off
            );
        }
        let before = dst.bytes.clone();
        copy_runs(&runs, &src.bytes, &mut dst.bytes).unwrap();
        let mut written = vec![false; dst.bytes.len()];
        for run in &runs {
            for w in &mut written[run.dst_off as usize..(run.dst_off + run.len) as usize] {
                prop_assert!(!*w, "byte written twice");
                *w = true;
            }
        }
        for (i, w) in written.iter().enumerate() {
            prop_assert!(*w || dst.bytes[i] == before[i]);
        }
        for token in copy.0..copy.1 {
            let (block, slot) = dst.view().place(token).unwrap();
            for (layer, head) in common.iter() {
                for c in geometry.components() {
                    let at = dst.layout.locate(layer, head, c, block, slot).unwrap() as usize;
                    for i in 0..geometry.row_bytes(c) {
                        prop_assert_eq!(dst.bytes[at + i as usize], content(42, layer, head, c, token, i));
                    }
                }
            }
        }
    }

    #[test]
    fn extents_hold_exactly_the_rows_and_blocks_are_disjoint(case in any_case()) {
        let layout = case.src.build(&case.geometry, case.src_shard).unwrap();
        let mut owner = vec![None; layout.region_len() as usize];
        for block in 0..layout.blocks() {
            let mut last = None;
            for (offset, len) in layout.extents(block).unwrap() {
                prop_assert!(last.is_none_or(|end| end < offset), "pieces not maximal or not ascending");
                last = Some(offset + len);
                for o in &mut owner[offset as usize..(offset + len) as usize] {
                    prop_assert_eq!(o.replace(block), None);
                }
            }
        }
        let mut rows = 0;
        for block in 0..layout.blocks() {
            for slot in 0..layout.block_tokens() {
                for (layer, head) in layout.shard().iter() {
                    for c in case.geometry.components() {
                        let at = layout.locate(layer, head, c, block, slot).unwrap() as usize;
                        let len = case.geometry.row_bytes(c) as usize;
                        rows += len;
                        for o in &mut owner[at..at + len] {
                            prop_assert_eq!(o.take(), Some(block), "rows share bytes");
                        }
                    }
                }
            }
        }
        prop_assert_eq!(rows as u64, layout.block_bytes() * u64::from(layout.blocks()));
        prop_assert!(owner.iter().all(Option::is_none), "an extent holds bytes of no row");
    }

    /// Random strides: whatever is accepted has disjoint rows.
    #[test]
    fn no_accepted_strides_overlap(
        planes in prop::collection::vec((0u64..40, 0u64..40, 0u64..16, 0u64..16), 2..5),
        blocks in 1u32..4, slots in 1u32..4, heads in 1u32..3, k in 1u32..5, v in 1u32..5,
    ) {
        let layers = (planes.len() / 2) as u32;
        let geometry = Arc::new(GroupGeometry {
            group: 0, kind: KvKind::Attention, dtype: Dtype::Opaque { tag: 8 },
            layers: (0..layers).collect(), kv_heads: heads,
            k_bytes: k, v_bytes: v, k_scale_bytes: 0, v_scale_bytes: 0,
        });
        let planes: Vec<_> = planes.into_iter().take(layers as usize * 2)
            .map(|(base, block_stride, slot_stride, head_stride)| Plane { base, block_stride, slot_stride, head_stride })
            .collect();
        let mut overlap = false;
        let mut used = vec![false; 400];
        for (i, p) in planes.iter().enumerate() {
            let row = if i % 2 == 0 { k } else { v };
            for b in 0..u64::from(blocks) { for s in 0..u64::from(slots) { for h in 0..u64::from(heads) {
                let at = p.base + b * p.block_stride + s * p.slot_stride + h * p.head_stride;
                for u in &mut used[at as usize..][..row as usize] { overlap |= std::mem::replace(u, true); }
            }}}
        }
        match BlockLayout::from_planes(geometry.clone(), geometry.whole(), blocks, slots, planes, 400) {
            Ok(_) => prop_assert!(!overlap),
            Err(PageError::Overlap { .. }) => {}
            Err(e) => prop_assert!(false, "{e}"),
        }
    }

    #[test]
    fn packed_pages_round_trip_and_zero_what_is_not_valid(case in any_case(), page_tokens in 1u16..40) {
        let Case { geometry, src, dst, src_shard, have, .. } = case;
        let tokens = have.0..have.1;
        let src = Pool::filled(src.build(&geometry, src_shard.clone()).unwrap(), tokens.clone(), 1, 42);
        let mut dst = Pool::empty(dst.build(&geometry, src_shard.clone()).unwrap(), tokens.clone(), 2);
        let token_bytes = geometry.leaf_token_bytes() as usize;
        let leaf = usize::from(page_tokens) * token_bytes;
        let pages = have.1.div_ceil(page_tokens.into()) as u32;
        for page in 0..pages {
            let Some(span) = PageSpan::of(page, page_tokens, &tokens) else { continue };
            let mut packed = vec![0xee; leaf * src_shard.leaves()];
            export_page(&src.view(), &src.bytes, span, page_tokens, &mut packed).unwrap();
            for (got, id) in packed.chunks_exact(leaf).zip(src_shard.iter()) {
                let mut want = vec![0; usize::from(span.from) * token_bytes];
                want.extend(leaf_bytes(&geometry, 42, id, span.tokens(page_tokens)));
                want.resize(leaf, 0);
                prop_assert_eq!(got, &want[..]);
            }
            let view = TokenView::new(&dst.layout, &dst.table, tokens.clone()).unwrap();
            import_page(&packed, span, page_tokens, &view, &mut dst.bytes).unwrap();
        }
        prop_assert!(dst.holds(42));
    }

    #[test]
    fn unused_slots_are_those_after_the_tail_and_no_others(case in any_case()) {
        let Case { geometry, src, src_shard, have, .. } = case;
        let pool = Pool::filled(src.build(&geometry, src_shard).unwrap(), have.0..have.1, 1, 42);
        let mut unused = Vec::new();
        unused_slots(&pool.view(), &mut unused).unwrap();
        let bt = u64::from(pool.layout.block_tokens());
        let free = (bt - have.1 % bt) % bt;
        let bytes = free * pool.layout.shard().leaves() as u64 * u64::from(geometry.leaf_token_bytes());
        prop_assert_eq!(unused.iter().map(|u| u.1).sum::<u64>(), bytes);
        let mut pool = pool;
        for (offset, len) in unused {
            pool.bytes[offset as usize..(offset + len) as usize].fill(0);
        }
        prop_assert!(pool.holds(42));
    }

    #[test]
    fn header_bytes_decode_to_the_header_or_to_an_error(
        geometry in any_geometry(), page_tokens in 1u16..=256, cut in any::<prop::sample::Index>(),
        flip in any::<prop::sample::Index>(), bit in 0u32..8, noise in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let header = ObjectSetHeader::new([7; 32], vec![(*geometry).clone()], page_tokens, Scheme::Blake3Leaves).unwrap();
        let bytes = header.encode();
        prop_assert_eq!(ObjectSetHeader::decode(&bytes), Ok(header));
        let cut = cut.index(bytes.len());
        let truncated = ObjectSetHeader::decode(&bytes[..cut]);
        prop_assert!(truncated.is_err());
        let mut flipped = bytes.clone();
        flipped[flip.index(bytes.len())] ^= 1 << bit;
        // One encoding per header: whatever still decodes is another header and re-encodes to it.
        for bytes in [flipped, noise] {
            if let Ok(other) = ObjectSetHeader::decode(&bytes) {
                prop_assert_eq!(other.encode(), bytes);
            }
        }
    }
}

/// vllm#37940: other tensor-parallel size and other head order at once.
#[test]
fn every_element_arrives_across_nhd_hnd_and_tensor_parallel_sizes() {
    let geometry = Arc::new(GroupGeometry::attention(0, [0], 4, 128, Dtype::F32).unwrap());
    let unique = |head: u32, c: Component, token: u64, dim: u32| {
        (((c as u32 * 16 + token as u32) * 4 + head) * 128 + dim).to_le_bytes()
    };
    let spec = |order| LayoutSpec::new(Major::Layer, KvSplit::Planes, order, 16, 3);
    for (order_src, order_dst) in [(Order::Nhd, Order::Hnd), (Order::Hnd, Order::Nhd)] {
        for (n, m) in [(2u32, 1u32), (1, 2), (2, 8), (8, 2), (4, 4)] {
            let shards = |size: u32| -> Vec<Shard> {
                (0..size)
                    .map(|r| Shard::tensor_parallel(&geometry, r, size).unwrap())
                    .collect()
            };
            let (from, to) = (shards(n), shards(m));
            let sources: Vec<Pool> = from
                .iter()
                .map(|shard| {
                    let layout = spec(order_src).build(&geometry, shard.clone()).unwrap();
                    let mut pool = Pool::empty(layout, 0..16, 1);
                    let (block, _) = pool.view().place(0).unwrap();
                    for (_, head) in shard.iter() {
                        for c in [Component::K, Component::V] {
                            for token in 0..16 {
                                let at =
                                    pool.layout.locate(0, head, c, block, token).unwrap() as usize;
                                for dim in 0..128 {
                                    pool.bytes[at + dim as usize * 4..][..4]
                                        .copy_from_slice(&unique(head, c, token.into(), dim));
                                }
                            }
                        }
                    }
                    pool
                })
                .collect();
            let refs: Vec<&Shard> = from.iter().collect();
            for (rank, shard) in to.iter().enumerate() {
                let layout = spec(order_dst).build(&geometry, shard.clone()).unwrap();
                let mut dst = Pool::empty(layout, 0..16, 2);
                let mut bytes = 0;
                for (source, part) in assign_sources(&refs, shard, rank).unwrap() {
                    let mut runs = Vec::new();
                    let src = &sources[source];
                    plan_copy_of(&src.view(), &dst.view(), &part, 0..16, &mut runs).unwrap();
                    bytes += runs.iter().map(|r| r.len).sum::<u64>();
                    copy_runs(&runs, &src.bytes, &mut dst.bytes).unwrap();
                }
                assert_eq!(
                    bytes,
                    shard.leaves() as u64 * 16 * 2 * 512,
                    "each leaf once"
                );
                let (block, _) = dst.view().place(0).unwrap();
                for (_, head) in shard.iter() {
                    for c in [Component::K, Component::V] {
                        for token in 0..16 {
                            let at = dst.layout.locate(0, head, c, block, token).unwrap() as usize;
                            for dim in 0..128 {
                                let got = &dst.bytes[at + dim as usize * 4..][..4];
                                assert_eq!(got, unique(head, c, token.into(), dim));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// vllm#19338: ranks of one worker with unequal pools.
#[test]
fn ranks_may_have_unequal_block_counts() {
    let geometry = seven_b();
    let mut sizes = Vec::new();
    for (rank, blocks) in [(0, 111_680), (1, 111_488)] {
        let shard = Shard::tensor_parallel(&geometry, rank, 2).unwrap();
        let layout = LayoutSpec::new(Major::Layer, KvSplit::Planes, Order::Nhd, 16, blocks)
            .build(&geometry, shard.clone())
            .unwrap();
        let last = layout.extents(blocks - 1).unwrap().last().unwrap();
        assert_eq!(last.0 + last.1, layout.region_len());
        assert_eq!(
            TokenView::new(&layout, &[blocks], 0..16).unwrap_err(),
            PageError::BlockOutOfRange {
                block: blocks,
                blocks
            }
        );
        let dst = LayoutSpec::new(Major::Block, KvSplit::InRow, Order::Hnd, 64, 7)
            .build(&geometry, geometry.whole())
            .unwrap();
        let table = [blocks - 1, 0, 5, blocks / 2];
        let from = TokenView::new(&layout, &table, 0..64).unwrap();
        let to = TokenView::new(&dst, &[3], 0..64).unwrap();
        let mut runs = Vec::new();
        plan_copy(&from, &to, 0..64, &mut runs).unwrap();
        sizes.push(runs.iter().map(|r| r.len).sum::<u64>());
    }
    assert_eq!(sizes.iter().sum::<u64>(), 64 * geometry.token_bytes());
}

#[test]
fn equal_layouts_and_neighbouring_blocks_give_one_run() {
    let geometry = seven_b();
    let layout = LayoutSpec::new(Major::Block, KvSplit::InBlock, Order::Nhd, 16, 8)
        .build(&geometry, geometry.whole())
        .unwrap();
    let src = TokenView::new(&layout, &[1, 2, 3], 0..48).unwrap();
    let dst = TokenView::new(&layout, &[4, 5, 6], 0..48).unwrap();
    let mut runs = Vec::new();
    plan_copy(&src, &dst, 0..48, &mut runs).unwrap();
    let block = 16 * geometry.token_bytes();
    assert_eq!(
        runs,
        [CopyRun {
            src_off: block,
            dst_off: 4 * block,
            len: 3 * block
        }]
    );
    // A tail: only valid tokens travel.
    runs.clear();
    plan_copy(&src, &dst, 32..37, &mut runs).unwrap();
    assert_eq!(runs.len(), 56);
    assert_eq!(
        runs.iter().map(|r| r.len).sum::<u64>(),
        5 * geometry.token_bytes()
    );
}

#[test]
fn bad_views_and_plans_are_refused_with_the_cause() {
    let geometry = seven_b();
    let spec = LayoutSpec::new(Major::Layer, KvSplit::Planes, Order::Nhd, 16, 8);
    let layout = spec.build(&geometry, geometry.whole()).unwrap();
    let uncovered = TokenView::new(&layout, &[0, 1], 0..33).unwrap_err();
    assert_eq!(
        uncovered,
        PageError::TokensNotCovered {
            from: 0,
            to: 33,
            have_from: 0,
            have_to: 32
        }
    );
    let view = TokenView::new(&layout, &[2, 3], 16..48).unwrap();
    assert_eq!(view.place(16), Ok((2, 0)));
    assert!(matches!(
        view.place(15),
        Err(PageError::TokensNotCovered { .. })
    ));
    assert!(matches!(view.place(u64::MAX), Err(PageError::Overflow)));
    assert_eq!(view.blocks_of(31..33), Ok(&[2u32, 3][..]));
    let twice = TokenView::new(&layout, &[2, 2], 16..48).unwrap();
    let mut runs = Vec::new();
    assert_eq!(
        plan_copy(&view, &twice, 16..48, &mut runs),
        Err(PageError::DuplicateBlock { block: 2 })
    );
    let other = Arc::new(GroupGeometry::attention(0, 0..28, 4, 64, Dtype::F32).unwrap());
    let other = spec.build(&other, other.whole()).unwrap();
    let other = TokenView::new(&other, &[2, 3], 16..48).unwrap();
    assert_eq!(
        plan_copy(&view, &other, 16..48, &mut runs),
        Err(PageError::GeometryMismatch)
    );
    let missing = assign_sources(
        &[&Shard {
            layers: vec![0],
            heads: vec![0, 1],
        }],
        &Shard {
            layers: vec![0],
            heads: vec![1, 2],
        },
        0,
    );
    assert_eq!(missing, Err(PageError::MissingLeaf { layer: 0, head: 2 }));
    assert_eq!(
        assign_sources(&[], &geometry.whole(), 0),
        Err(PageError::MissingLeaf { layer: 0, head: 0 })
    );
    assert_eq!(
        layout.locate(99, 0, Component::K, 0, 0),
        Err(PageError::NotInShard {
            what: "layer",
            id: 99
        })
    );
    assert!(matches!(
        layout.locate(0, 0, Component::K, 0, 16),
        Err(PageError::SlotOutOfRange { slot: 16, .. })
    ));
    assert!(layout.extents(8).is_err());
}

#[test]
fn bad_geometries_and_strides_are_refused_with_the_cause() {
    let good = (*seven_b()).clone();
    let refused = |change: fn(&mut GroupGeometry)| {
        let mut g = good.clone();
        change(&mut g);
        g.validate().unwrap_err()
    };
    assert_eq!(
        refused(|g| g.layers.clear()),
        PageError::Zero { what: "layers" }
    );
    assert_eq!(
        refused(|g| g.kv_heads = 0),
        PageError::Zero { what: "kv_heads" }
    );
    assert_eq!(
        refused(|g| g.layers.swap(3, 4)),
        PageError::NotAscending {
            what: "layers",
            at: 4
        }
    );
    assert!(matches!(
        refused(|g| g.k_bytes = u32::MAX),
        PageError::TooLarge { .. }
    ));
    assert!(matches!(refused(|g| g.v_bytes = 0), PageError::Geometry(_)));
    assert!(matches!(
        refused(|g| g.k_bytes = 255),
        PageError::Geometry(_)
    ));
    assert!(matches!(
        refused(|g| g.kind = KvKind::Mla),
        PageError::Geometry(_)
    ));
    assert_eq!(
        refused(|g| g.kind = KvKind::SlidingWindow { window: 0 }),
        PageError::Zero { what: "window" }
    );
    let geometry = seven_b();
    let build = |spec: LayoutSpec| spec.build(&geometry, geometry.whole());
    let spec = LayoutSpec::new(Major::Layer, KvSplit::Planes, Order::Nhd, 16, 8);
    let refused = |change: fn(&mut LayoutSpec)| {
        let mut s = spec;
        change(&mut s);
        build(s).unwrap_err()
    };
    assert_eq!(
        refused(|s| s.blocks = 0),
        PageError::Zero { what: "blocks" }
    );
    assert_eq!(
        refused(|s| s.block_tokens = 0),
        PageError::Zero {
            what: "block_tokens"
        }
    );
    assert!(matches!(
        refused(|s| s.block_tokens = 257),
        PageError::TooLarge { .. }
    ));
    assert_eq!(refused(|s| s.axes[0] = Axis::Slot), PageError::Axes);
    assert_eq!(refused(|s| s.base = u64::MAX), PageError::Overflow);
    assert_eq!(refused(|s| s.block_pad = u64::MAX / 2), PageError::Overflow);
    let layout = build(spec).unwrap();
    let planes: Vec<_> = (0..28)
        .flat_map(|l| [*layout.plane(l, 0), *layout.plane(l, 1)])
        .collect();
    let from = |planes, len| {
        BlockLayout::from_planes(geometry.clone(), geometry.whole(), 8, 16, planes, len)
    };
    assert!(from(planes.clone(), layout.region_len()).is_ok());
    assert_eq!(
        from(planes.clone(), layout.region_len() - 1).unwrap_err(),
        PageError::OutOfRegion {
            end: layout.region_len(),
            len: layout.region_len() - 1
        }
    );
    assert_eq!(
        from(planes[1..].to_vec(), u64::MAX).unwrap_err(),
        PageError::PlaneCount { got: 55, want: 56 }
    );
    let mut bad = planes.clone();
    bad[3].block_stride -= 1;
    assert!(matches!(
        from(bad, u64::MAX),
        Err(PageError::Overlap { .. })
    ));
    let mut bad = planes;
    bad[3].head_stride = 0;
    assert!(matches!(
        from(bad, u64::MAX),
        Err(PageError::Overlap { .. })
    ));
}

#[test]
fn kinds_that_cannot_be_moved_safely_are_refused_by_type() {
    let header = |kind: u8| {
        let g = vec![(*seven_b()).clone()];
        let mut bytes = ObjectSetHeader::new([0; 32], g, 16, Scheme::default())
            .unwrap()
            .encode();
        bytes[44] = kind;
        ObjectSetHeader::decode(&bytes).unwrap_err()
    };
    for (tag, why) in [
        (3, Unsupported::CircularBuffer),
        (4, Unsupported::MutableState),
        (5, Unsupported::RewritesTail),
        (6, Unsupported::KvKind(6)),
    ] {
        let error = header(tag);
        assert_eq!(error, PageError::Unsupported(why));
        assert_eq!(error.kind(), crate::id::ErrorKind::Unsupported);
    }
}

/// vLLM's latent cache, plain and packed; the one "head" is on every tensor-parallel rank.
#[test]
fn latent_attention_has_one_leaf_per_layer_on_every_rank() {
    for (row, dtype) in [(1152, Dtype::Bf16), (656, Dtype::Fp8E4M3)] {
        let geometry = Arc::new(GroupGeometry::mla(1, 0..61, row, dtype).unwrap());
        let shards: Vec<_> = (0..4)
            .map(|r| Shard::tensor_parallel(&geometry, r, 4).unwrap())
            .collect();
        assert!(shards.iter().all(|s| *s == geometry.whole()));
        assert_eq!(geometry.leaves(), 61);
        assert_eq!(geometry.token_bytes(), 61 * u64::from(row));
        let layout = LayoutSpec::new(Major::Layer, KvSplit::InRow, Order::Nhd, 64, 4)
            .build(&geometry, geometry.whole())
            .unwrap();
        assert_eq!(layout.extents(0).unwrap().len(), 61);
    }
}
