use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::page::testing::*;
use crate::page::{
    Dtype, GroupGeometry, KvKind, KvSplit, LayoutSpec, Major, ObjectSetHeader, Order, PageError,
    PageSpan, Shard, TokenView, assign_sources, copy_runs, plan_copy, plan_copy_of,
};

fn digester(geometry: &GroupGeometry, page_tokens: u16, scheme: Scheme) -> Arc<Digester> {
    let header =
        ObjectSetHeader::new([9; 32], vec![geometry.clone()], page_tokens, scheme).unwrap();
    Arc::new(Digester::new(header).unwrap())
}

fn pages_of(tokens: &Range<u64>, page_tokens: u16) -> Range<u32> {
    let p = u64::from(page_tokens);
    (tokens.start / p) as u32..tokens.end.div_ceil(p) as u32
}

fn leaves(d: &Digester, pool: &Pool) -> Vec<LeafDigest> {
    let pages = pages_of(&pool.tokens, d.header().page_tokens);
    let mut out = vec![LeafDigest::default(); pages.len() * pool.layout.shard().leaves()];
    let mut scratch = Scratch::default();
    d.hash_leaves(
        &pool.view(),
        &pool.bytes,
        pages,
        &mut scratch,
        None,
        &mut out,
    )
    .unwrap();
    out
}

fn pages(d: &Digester, pool: &Pool) -> Vec<PageDigest> {
    let pages = pages_of(&pool.tokens, d.header().page_tokens);
    let mut out = vec![PageDigest::default(); pages.len()];
    let mut scratch = Scratch::default();
    d.hash_pages(
        &pool.view(),
        &pool.bytes,
        pages,
        &mut scratch,
        None,
        &mut out,
    )
    .unwrap();
    out
}

#[derive(Debug, Clone)]
struct Case {
    geometry: Arc<GroupGeometry>,
    a: LayoutSpec,
    b: LayoutSpec,
    shard: Shard,
    tokens: Range<u64>,
    page_tokens: u16,
    scheme: Scheme,
}

fn any_case() -> impl Strategy<Value = Case> {
    let page_tokens = prop_oneof![1u16..40, Just(16), Just(64), Just(256)];
    let scheme = prop::sample::select(Scheme::ALL.to_vec());
    let tokens = (prop_oneof![Just(0u64), 0u64..60], 1u64..150);
    (any_geometry(), tokens, page_tokens, scheme).prop_flat_map(
        |(geometry, (start, len), page_tokens, scheme)| {
            let end = start + len;
            let shard = any_shard(&geometry);
            (any_spec(end), any_spec(end), shard, Just(geometry)).prop_map(
                move |(a, b, shard, geometry)| Case {
                    geometry,
                    a,
                    b,
                    shard,
                    tokens: start..end,
                    page_tokens,
                    scheme,
                },
            )
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_leaf_is_the_keyed_hash_of_its_canonical_bytes(case in any_case()) {
        let Case { geometry, a, shard, tokens, page_tokens, .. } = case;
        let d = digester(&geometry, page_tokens, Scheme::Blake3Leaves);
        let pool = Pool::filled(a.build(&geometry, shard.clone()).unwrap(), tokens.clone(), 1, 42);
        let mut material = vec![1];
        material.extend_from_slice(&page_tokens.to_le_bytes());
        crate::page::encode_geometry(&geometry, &mut material);
        let key = blake3::derive_key("MoonLiveKV v1 leaf", &material);
        let got = leaves(&d, &pool);
        let pages = pages_of(&tokens, page_tokens);
        for (page, got) in pages.zip(got.chunks_exact(shard.leaves())) {
            let span = PageSpan::of(page, page_tokens, &tokens).unwrap();
            for (id, got) in shard.iter().zip(got) {
                let bytes = leaf_bytes(&geometry, 42, id, span.tokens(page_tokens));
                prop_assert_eq!(got.0, *blake3::keyed_hash(&key, &bytes).as_bytes());
            }
        }
    }

    #[test]
    fn digests_do_not_depend_on_layout_block_size_or_what_lies_beside(case in any_case()) {
        let Case { geometry, a, b, tokens, page_tokens, scheme, .. } = case;
        let d = digester(&geometry, page_tokens, scheme);
        let src = Pool::filled(a.build(&geometry, geometry.whole()).unwrap(), tokens.clone(), 1, 42);
        let mut dst = Pool::empty(b.build(&geometry, geometry.whole()).unwrap(), tokens.clone(), 2);
        prop_assert_ne!(pages(&d, &src), pages(&d, &dst));
        let mut runs = Vec::new();
        plan_copy(&src.view(), &dst.view(), tokens, &mut runs).unwrap();
        copy_runs(&runs, &src.bytes, &mut dst.bytes).unwrap();
        prop_assert_eq!(pages(&d, &src), pages(&d, &dst));
    }

    #[test]
    fn ranks_hash_their_leaves_and_the_leader_gets_the_page(
        case in any_case(), size in 1u32..9, prefer in 0usize..9,
    ) {
        let Case { geometry, a, b, tokens, page_tokens, .. } = case;
        let d = digester(&geometry, page_tokens, Scheme::Blake3Leaves);
        let whole = Pool::filled(a.build(&geometry, geometry.whole()).unwrap(), tokens.clone(), 1, 42);
        let shards: Vec<_> = (0..size)
            .map(|rank| Shard::tensor_parallel(&geometry, rank, size))
            .collect::<Result<_, _>>()
            .unwrap_or_else(|_| vec![geometry.whole()]);
        // From the ranks' pools to a whole one and back: through another layout each time.
        let ranks: Vec<Pool> = shards
            .iter()
            .map(|s| {
                let mut rank = Pool::empty(b.build(&geometry, s.clone()).unwrap(), tokens.clone(), 3);
                let mut runs = Vec::new();
                plan_copy(&whole.view(), &rank.view(), tokens.clone(), &mut runs).unwrap();
                copy_runs(&runs, &whole.bytes, &mut rank.bytes).unwrap();
                rank
            })
            .collect();
        let mut back = Pool::empty(a.build(&geometry, geometry.whole()).unwrap(), tokens.clone(), 4);
        let refs: Vec<_> = shards.iter().collect();
        for (rank, part) in assign_sources(&refs, &geometry.whole(), prefer).unwrap() {
            let mut runs = Vec::new();
            plan_copy_of(&ranks[rank].view(), &back.view(), &part, tokens.clone(), &mut runs).unwrap();
            copy_runs(&runs, &ranks[rank].bytes, &mut back.bytes).unwrap();
        }
        prop_assert!(back.holds(42));
        let per_rank: Vec<_> = ranks.iter().map(|r| leaves(&d, r)).collect();
        let mut table = LeafTable::new(&geometry);
        for (i, want) in pages(&d, &whole).into_iter().enumerate() {
            table.clear();
            prop_assert!(table.complete().is_err());
            for (shard, leaves) in shards.iter().zip(&per_rank) {
                table.add(shard, &leaves[i * shard.leaves()..][..shard.leaves()]).unwrap();
            }
            let page = pages_of(&tokens, page_tokens).start + i as u32;
            let span = PageSpan::of(page, page_tokens, &tokens).unwrap();
            prop_assert_eq!(d.page_digest(3, span, table.complete().unwrap()).unwrap(), want);
        }
    }

    #[test]
    fn a_flipped_bit_changes_the_digest_if_and_only_if_its_slot_is_valid(
        case in any_case(), at in any::<prop::sample::Index>(), bit in 0u32..8, hit in any::<bool>(),
    ) {
        let Case { geometry, a, tokens, page_tokens, scheme, .. } = case;
        let d = digester(&geometry, page_tokens, scheme);
        let mut pool = Pool::filled(a.build(&geometry, geometry.whole()).unwrap(), tokens, 1, 42);
        let mut valid = vec![false; pool.bytes.len()];
        for (offset, row) in pool.rows(42) {
            valid[offset..offset + row.len()].fill(true);
        }
        let places: Vec<usize> = (0..valid.len()).filter(|&i| valid[i] == hit).collect();
        if places.is_empty() {
            return Ok(());
        }
        let before = pages(&d, &pool);
        pool.bytes[places[at.index(places.len())]] ^= 1 << bit;
        let after = pages(&d, &pool);
        let changed = before.iter().zip(&after).filter(|(a, b)| a != b).count();
        prop_assert_eq!(changed, usize::from(hit), "exactly the page of the flipped slot");
    }

    #[test]
    fn a_tail_extended_slot_by_slot_equals_one_hashed_at_once(
        case in any_case(), steps in prop::collection::vec(1u16..20, 1..40),
    ) {
        let Case { geometry, a, shard, tokens, page_tokens, scheme, .. } = case;
        let d = digester(&geometry, page_tokens, scheme);
        let pool = Pool::filled(a.build(&geometry, shard.clone()).unwrap(), tokens.clone(), 1, 42);
        let Ok(mut tail) = TailHasher::new(d.clone(), &pool.layout) else {
            prop_assert_eq!(scheme, Scheme::Sha256Flat);
            return Ok(());
        };
        let mut steps = steps.into_iter().cycle();
        let mut got = vec![LeafDigest::default(); shard.leaves()];
        for page in pages_of(&tokens, page_tokens) {
            let full = PageSpan::of(page, page_tokens, &tokens).unwrap();
            tail.reset(page, full.from);
            prop_assert!(tail.leaves(&mut got).is_err(), "no slot, no digest");
            let mut to = full.from;
            while to < full.to {
                let from = to;
                to = full.to.min(to + steps.next().unwrap());
                tail.extend(&pool.view(), &pool.bytes, from..to).unwrap();
                tail.leaves(&mut got).unwrap();
                let upto = tokens.start..PageSpan { to, ..full }.tokens(page_tokens).end;
                let view = TokenView::new(&pool.layout, &pool.table, upto).unwrap();
                let mut want = got.clone();
                want.fill(LeafDigest::default());
                let mut scratch = Scratch::default();
                d.hash_leaves(&view, &pool.bytes, page..page + 1, &mut scratch, None, &mut want).unwrap();
                prop_assert_eq!(&got, &want);
            }
            prop_assert_eq!(tail.span(), full);
        }
    }

    #[test]
    fn threads_change_nothing(case in any_case(), width in 1usize..5) {
        let Case { geometry, a, tokens, page_tokens, scheme, .. } = case;
        let d = digester(&geometry, page_tokens, scheme);
        let pool = Pool::filled(a.build(&geometry, geometry.whole()).unwrap(), tokens.clone(), 1, 42);
        let threads = rayon::ThreadPoolBuilder::new().num_threads(width).build().unwrap();
        let mut scratch = Scratch::new(width);
        let range = pages_of(&tokens, page_tokens);
        let mut got = vec![PageDigest::default(); range.len()];
        d.hash_pages(&pool.view(), &pool.bytes, range, &mut scratch, Some(&threads), &mut got).unwrap();
        prop_assert_eq!(got, pages(&d, &pool));
    }
}

/// Every length that BLAKE3 treats differently: empty blocks, chunk and subtree ends.
#[test]
fn lanes_equal_the_blake3_crate_at_every_length() {
    let key = [7u8; 32];
    let lanes = super::lanes::Lanes::new(&key);
    let data: Vec<u8> = (0..40_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    for len in (1..1200).chain([
        1536, 2047, 2048, 2049, 3072, 3073, 4096, 5000, 8192, 9216, 16385, 31744, 32769,
    ]) {
        for n in [1, 2, 5, 8, 13, 16] {
            let inputs: Vec<&[u8]> = (0..n).map(|i| &data[i * 37..i * 37 + len]).collect();
            let chunks = len.div_ceil(1024);
            let mut stack = super::lanes::Stack::new(chunks);
            let mut values = [0; _];
            for c in 0..chunks {
                let at: Vec<&[u8]> = inputs.iter().map(|i| &i[c * 1024..]).collect();
                let this = (len - c * 1024).min(1024);
                lanes.chunks(&at, this, c as u64, chunks == 1, &mut values);
                if c + 1 < chunks {
                    stack.push(&lanes, c as u64, &mut values, n);
                }
            }
            stack.finish(&lanes, &mut values, n);
            for (i, input) in inputs.iter().enumerate() {
                let want = blake3::keyed_hash(&key, input);
                assert_eq!(
                    values[i * 32..][..32],
                    want.as_bytes()[..],
                    "{len} bytes, lane {i} of {n}"
                );
            }
        }
    }
}

fn small() -> GroupGeometry {
    GroupGeometry::attention(0, 0..2, 2, 16, Dtype::Bf16).unwrap()
}

fn filled(geometry: &GroupGeometry, tokens: Range<u64>) -> Pool {
    let geometry = Arc::new(geometry.clone());
    let layout = LayoutSpec::new(Major::Layer, KvSplit::Planes, Order::Nhd, 16, 40)
        .build(&geometry, geometry.whole())
        .unwrap();
    Pool::filled(layout, tokens, 1, 42)
}

#[test]
fn five_tokens_differ_from_six_with_a_zero_sixth() {
    let geometry = small();
    let d = digester(&geometry, 16, Scheme::Blake3Leaves);
    let mut six = filled(&geometry, 0..6);
    let rows = six.rows(42);
    for (offset, row) in &rows[rows.len() / 6 * 5..] {
        six.bytes[*offset..*offset + row.len()].fill(0);
    }
    let five = Pool {
        tokens: 0..5,
        ..six.clone()
    };
    assert_ne!(pages(&d, &five), pages(&d, &six));
    // The published prototype's flat page cannot tell them apart; the set digest, which binds token
    // ranges, does.
    let d = digester(&geometry, 16, Scheme::Sha256Flat);
    assert_eq!(pages(&d, &five), pages(&d, &six));
    let set = d.set_hasher(&[]).unwrap();
    let page = pages(&d, &five)[0];
    assert_ne!(set.finish(5, &[(0, page)]), set.finish(6, &[(0, page)]));
}

#[test]
fn a_page_digest_says_nothing_of_its_place_but_a_set_digest_does() {
    let geometry = small();
    let d = digester(&geometry, 16, Scheme::Blake3Leaves);
    let pool = filled(&geometry, 0..48);
    let digests = pages(&d, &pool);
    let moved = TokenView::new(&pool.layout, &pool.table[..1], 160..176).unwrap();
    let mut out = [PageDigest::default()];
    d.hash_pages(
        &moved,
        &pool.bytes,
        10..11,
        &mut Scratch::default(),
        None,
        &mut out,
    )
    .unwrap();
    assert_eq!(out[0], digests[0]);
    let set = |order: [usize; 3]| {
        let mut set = d.set_hasher(&[]).unwrap();
        for (page, &i) in order.iter().enumerate() {
            let span = PageSpan {
                page: page as u32,
                from: 0,
                to: 16,
            };
            set.push_sealed(0, span, &digests[i]).unwrap();
        }
        set.finish(48, &[]).unwrap()
    };
    assert_eq!(set([0, 1, 2]), set([0, 1, 2]));
    assert_ne!(set([0, 1, 2]), set([1, 0, 2]));
    assert_ne!(set([0, 1, 2]), set([0, 1, 1]));
}

#[test]
fn geometry_model_scheme_and_page_size_are_bound() {
    let geometry = small();
    let pool = filled(&geometry, 0..6);
    let mut seen = std::collections::BTreeSet::new();
    let mut variants: Vec<(GroupGeometry, u16)> =
        vec![(geometry.clone(), 16), (geometry.clone(), 64)];
    variants.push((
        GroupGeometry {
            dtype: Dtype::F16,
            ..geometry.clone()
        },
        16,
    ));
    variants.push((
        GroupGeometry {
            layers: vec![0, 2],
            ..geometry.clone()
        },
        16,
    ));
    variants.push((
        GroupGeometry {
            kind: KvKind::SlidingWindow { window: 9 },
            ..geometry.clone()
        },
        16,
    ));
    for (g, page_tokens) in &variants {
        let layout = LayoutSpec::new(Major::Layer, KvSplit::Planes, Order::Nhd, 16, 40)
            .build(&Arc::new(g.clone()), g.whole())
            .unwrap();
        let same_bytes = Pool {
            layout: Arc::new(layout),
            ..pool.clone()
        };
        for scheme in [Scheme::Blake3Leaves, Scheme::Sha256Leaves] {
            let d = digester(g, *page_tokens, scheme);
            assert!(seen.insert(pages(&d, &same_bytes)[0]));
            assert!(!leaves(&d, &same_bytes).iter().any(|l| l.0 == [0; 32]));
        }
    }
    // Two adapters, same bytes: same page, another set.
    let set = |model: u8| {
        let header =
            ObjectSetHeader::new([model; 32], vec![geometry.clone()], 16, Scheme::default())
                .unwrap();
        let d = Arc::new(Digester::new(header).unwrap());
        let page = pages(&d, &pool)[0];
        (
            page,
            d.set_hasher(&[]).unwrap().finish(6, &[(0, page)]).unwrap(),
        )
    };
    assert_eq!(set(1).0, set(2).0);
    assert_ne!(set(1).1, set(2).1);
}

#[test]
fn the_set_digest_takes_pages_in_order_and_exact_token_counts_only() {
    let full = small();
    let window = GroupGeometry {
        group: 1,
        kind: KvKind::SlidingWindow { window: 20 },
        layers: vec![7],
        ..small()
    };
    let header = ObjectSetHeader::new([0; 32], vec![full, window], 16, Scheme::default()).unwrap();
    let d = Arc::new(Digester::new(header).unwrap());
    let page = |n: u8| PageDigest([n; 32]);
    let span = |page, from, to| PageSpan { page, from, to };
    assert!(matches!(
        d.set_hasher(&[(0, 5)]),
        Err(DigestError::Page(PageError::Geometry(_)))
    ));
    assert!(d.set_hasher(&[(9, 0)]).is_err());
    // Group 1 has forgotten tokens 0..20: page 1 is retained from slot 4 on.
    let mut set = d.set_hasher(&[(1, 20)]).unwrap();
    assert!(matches!(
        set.push_sealed(0, span(1, 0, 16), &page(1)),
        Err(DigestError::OutOfOrder { .. })
    ));
    assert!(matches!(
        set.push_sealed(0, span(0, 0, 15), &page(1)),
        Err(DigestError::OutOfOrder { .. })
    ));
    assert!(matches!(
        set.push_sealed(0, span(0, 1, 16), &page(1)),
        Err(DigestError::OutOfOrder { .. })
    ));
    set.push_sealed(0, span(0, 0, 16), &page(1)).unwrap();
    set.push_sealed(0, span(1, 0, 16), &page(2)).unwrap();
    assert!(set.push_sealed(1, span(1, 0, 16), &page(3)).is_err());
    set.push_sealed(1, span(1, 4, 16), &page(3)).unwrap();
    assert_eq!((set.next_page(0), set.next_page(1)), (Ok(2), Ok(2)));
    let aligned = set.finish(32, &[]).unwrap();
    assert!(matches!(
        set.finish(32, &[(0, page(4))]),
        Err(DigestError::UnexpectedTail { group: 0 })
    ));
    assert!(matches!(
        set.finish(31, &[]),
        Err(DigestError::TokenCount { .. })
    ));
    assert!(matches!(
        set.finish(33, &[(0, page(4))]),
        Err(DigestError::TokenCount { group: 1, .. })
    ));
    let two = [(0, page(4)), (1, page(5))];
    let tail = set.finish(33, &two).unwrap();
    assert_ne!(tail, aligned);
    assert_eq!(set.finish(33, &[two[1], two[0]]), Ok(tail));
    assert_ne!(set.finish(33, &[(0, page(5)), (1, page(4))]), Ok(tail));
    assert_ne!(set.finish(34, &two), Ok(tail));
    let thrice = [two[0], two[1], two[1]];
    assert!(matches!(
        set.finish(33, &thrice),
        Err(DigestError::UnexpectedTail { group: 1 })
    ));
    // A tail page that is full must have been pushed as sealed.
    assert!(matches!(
        set.finish(48, &two),
        Err(DigestError::UnexpectedTail { group: 0 })
    ));
    assert!(matches!(
        set.finish(48, &[]),
        Err(DigestError::TokenCount { have: 32, .. })
    ));
    // Finishing leaves the running state alone.
    let mut on = set.clone();
    on.push_sealed(0, span(2, 0, 16), &page(4)).unwrap();
    on.push_sealed(1, span(2, 0, 16), &page(5)).unwrap();
    assert_ne!(on.finish(48, &[]), Ok(aligned));
    assert_eq!(set.finish(32, &[]), Ok(aligned));
}

#[test]
fn replicas_that_differ_are_an_integrity_error() {
    let geometry = small();
    let mut table = LeafTable::new(&geometry);
    let shard = |rank| Shard::tensor_parallel(&geometry, rank, 4).unwrap();
    let a = [LeafDigest([1; 32]); 2];
    table.add(&shard(0), &a).unwrap();
    table.add(&shard(1), &a).unwrap();
    let error = table
        .add(&shard(1), &[a[0], LeafDigest([2; 32])])
        .unwrap_err();
    assert_eq!(error, DigestError::ReplicaMismatch { layer: 1, head: 0 });
    assert_eq!(error.kind(), crate::id::ErrorKind::Integrity);
    table.add(&shard(2), &a).unwrap();
    assert!(table.complete().is_ok());
    assert!(table.add(&shard(2), &a[..1]).is_err());
    assert!(
        table
            .add(
                &Shard {
                    layers: vec![5],
                    heads: vec![0]
                },
                &a[..1]
            )
            .is_err()
    );
}

#[test]
fn hashing_refuses_what_it_cannot_answer_for() {
    let geometry = small();
    let d = digester(&geometry, 16, Scheme::Blake3Leaves);
    let pool = filled(&geometry, 0..20);
    let mut scratch = Scratch::default();
    let mut out = vec![PageDigest::default(); 2];
    let mut hash = |view: &TokenView<'_>, bytes: &[u8], pages, out: &mut [PageDigest]| {
        d.hash_pages(view, bytes, pages, &mut scratch, None, out)
    };
    let view = pool.view();
    assert!(hash(&view, &pool.bytes, 0..2, &mut out).is_ok());
    // A page past the tail, a list too short, memory out of reach.
    let error = hash(&view, &pool.bytes, 1..3, &mut out).unwrap_err();
    assert_eq!(error, DigestError::Page(PageError::NoSuchPage { page: 2 }));
    let error = hash(&view, &pool.bytes, 0..2, &mut out[..1]).unwrap_err();
    assert!(matches!(
        error,
        DigestError::Page(PageError::BufferLen { .. })
    ));
    let error = hash(&view, &pool.bytes[..100], 0..2, &mut out).unwrap_err();
    assert!(matches!(
        error,
        DigestError::Page(PageError::Unreachable { .. })
    ));
    // A pool of another model.
    let other = filled(
        &GroupGeometry {
            dtype: Dtype::F16,
            ..geometry.clone()
        },
        0..20,
    );
    let error = hash(&other.view(), &other.bytes, 0..2, &mut out).unwrap_err();
    assert_eq!(error, DigestError::Page(PageError::GeometryMismatch));
    // A rank's pool has not all leaves.
    let g = Arc::new(geometry.clone());
    let half = Shard::tensor_parallel(&g, 0, 2).unwrap();
    let layout = LayoutSpec::new(Major::Layer, KvSplit::Planes, Order::Nhd, 16, 40)
        .build(&g, half)
        .unwrap();
    let rank = Pool::filled(layout, 0..20, 1, 42);
    let error = hash(&rank.view(), &rank.bytes, 0..2, &mut out).unwrap_err();
    assert_eq!(
        error,
        DigestError::Page(PageError::MissingLeaf { layer: 0, head: 1 })
    );
    let flat = digester(&geometry, 16, Scheme::Sha256Flat);
    let mut list = vec![LeafDigest::default(); 8];
    let error = flat
        .hash_leaves(
            &view,
            &pool.bytes,
            0..2,
            &mut Scratch::default(),
            None,
            &mut list,
        )
        .unwrap_err();
    assert_eq!(error, DigestError::NeedsWholePage(Scheme::Sha256Flat));
    assert_eq!(error.kind(), crate::id::ErrorKind::Unsupported);
    let mut tail = TailHasher::new(d.clone(), &pool.layout).unwrap();
    assert!(matches!(
        tail.extend(&view, &pool.bytes, 1..2),
        Err(DigestError::OutOfOrder {
            what: "slot",
            got: 1,
            want: 0
        })
    ));
    assert!(tail.extend(&view, &pool.bytes, 0..17).is_err());
    assert!(tail.extend(&other.view(), &pool.bytes, 0..1).is_err());
}
