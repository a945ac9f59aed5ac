//! The set of all pages of a request.

use super::{Target, longer, patched, seed, shorter};
use moonlivekv::id::RequestId;
use moonlivekv::page::{
    Dtype, GroupGeometry, KvObjectSet, ObjectSetHeader, PageError, PageRef, PageSpan, Part, Scheme,
};

pub const TARGET: Target = Target {
    name: "kv_object_set",
    run,
    outcomes: &[
        "accept",
        "geometry",
        "magic",
        "missing-leaf",
        "no-such-group",
        "no-such-page",
        "not-ascending",
        "not-canonical",
        "not-in-geometry",
        "too-large",
        "trailing",
        "truncated",
        "unsupported",
        "zero",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    match KvObjectSet::decode(data) {
        Ok(set) => {
            assert_eq!(set.encode(), data, "a second spelling was accepted");
            set.validate().expect("what was decoded is valid");
            "accept"
        }
        Err(e) => match e {
            PageError::Unsupported(_) => "unsupported",
            PageError::Zero { .. } => "zero",
            PageError::TooLarge { .. } => "too-large",
            PageError::NotAscending { .. } => "not-ascending",
            PageError::Geometry(_) => "geometry",
            PageError::Truncated { .. } => "truncated",
            PageError::Trailing { .. } => "trailing",
            PageError::Magic { .. } => "magic",
            PageError::NotCanonical { .. } => "not-canonical",
            PageError::NoSuchPage { .. } => "no-such-page",
            PageError::NoSuchGroup { .. } => "no-such-group",
            PageError::NotInGeometry { .. } => "not-in-geometry",
            PageError::MissingLeaf { .. } => "missing-leaf",
            // `PageError` is open to new variants, so one that this decoder gives fails here.
            other => panic!("not an error of this decoder: {other:?}"),
        },
    }
}

/// Two ranks, 20 tokens in pages of 16; the first page of the second rank is in a store.
fn good() -> KvObjectSet {
    let geometry = GroupGeometry::attention(0, [0, 2], 4, 8, Dtype::Bf16).expect("valid");
    let parts = [Part::rank(&geometry, 0, 2), Part::rank(&geometry, 1, 2)];
    let header = ObjectSetHeader::new([9; 32], vec![geometry], 16, Scheme::Blake3Leaves);
    let header = header.expect("valid");
    let mut pages = Vec::new();
    for part in parts {
        for (page, to) in [(0, 16), (1, 4)] {
            let span = PageSpan { page, from: 0, to };
            let key = (part.tp_rank == 1 && page == 0).then(|| "kv/1".to_owned());
            let page = PageRef::new(&header, 0, span, part, 5, [7; 16], key);
            pages.push(page.expect("valid"));
        }
    }
    let request = RequestId([1; 16]);
    KvObjectSet {
        request,
        header,
        kv_len: 20,
        retained_from: vec![0],
        pages,
    }
}

fn seeds() -> Vec<super::Seed> {
    let set = good();
    let bytes = set.encode();
    let mut empty = set.clone();
    empty.kv_len = 0;
    empty.pages.clear();
    let mut half = set.clone();
    half.pages.truncate(2);
    let mut swapped = set.clone();
    swapped.pages.rotate_left(2);
    // magic 4, version, request 16, header length 4, header; then kv_len 8, retained 8, count 4.
    let kv_len = 25 + set.header.encode().len();
    let retained = kv_len + 8;
    let count = retained + 8;
    // group 2, rank 2, size 2, first layer 4, layers 4, page 4, from 2, to 2, generation 8, ...
    let page = count + 4;
    vec![
        seed("accept.two-ranks", bytes.clone()),
        seed("accept.no-token", empty.encode()),
        seed("missing-leaf.one-rank", half.encode()),
        seed("not-canonical.order-of-ranks", swapped.encode()),
        seed("magic", patched(&bytes, 0, b"MLKX")),
        seed("unsupported.version", patched(&bytes, 4, &[9])),
        seed("unsupported.kind", patched(&bytes, 25 + 44, &[3])),
        seed("zero.header-page-tokens", patched(&bytes, 25 + 6, &[0, 0])),
        seed("not-ascending.layers", patched(&bytes, kv_len - 4, &[0])),
        seed("truncated.header", patched(&bytes, 21, &[10])),
        seed("not-canonical.longer", patched(&bytes, kv_len, &[33])),
        seed("not-canonical.shorter", patched(&bytes, kv_len, &[19])),
        seed("geometry.retained", patched(&bytes, retained, &[16])),
        seed("too-large.retained", patched(&bytes, retained, &[21])),
        seed(
            "too-large.count",
            patched(&bytes, count, &[255, 255, 255, 255]),
        ),
        seed("truncated.count", patched(&bytes, count, &[5])),
        seed("trailing.count", patched(&bytes, count, &[3])),
        seed("no-such-group", patched(&bytes, page, &[1])),
        seed("too-large.rank", patched(&bytes, page + 2, &[2])),
        seed("zero.size", patched(&bytes, page + 4, &[0])),
        seed("not-in-geometry.layers", patched(&bytes, page + 10, &[3])),
        seed("no-such-page.slots", patched(&bytes, page + 20, &[17])),
        seed("geometry.from", patched(&bytes, page + 18, &[1])),
        seed("trailing", longer(&bytes)),
        seed("truncated", shorter(&bytes)),
        seed("truncated.nothing", []),
    ]
}
