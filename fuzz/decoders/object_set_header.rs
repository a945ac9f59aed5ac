//! The header of an object set.

use super::{Target, longer, patched, seed, shorter};
use moonlivekv::page::{Dtype, GroupGeometry, KvKind, ObjectSetHeader, PageError, Scheme};

pub const TARGET: Target = Target {
    name: "object_set_header",
    run,
    outcomes: &[
        "accept",
        "geometry",
        "magic",
        "not-ascending",
        "not-canonical",
        "too-large",
        "trailing",
        "truncated",
        "unsupported",
        "zero",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    match ObjectSetHeader::decode(data) {
        Ok(header) => {
            assert_eq!(header.encode(), data, "a second spelling was accepted");
            header.validate().expect("what was decoded is valid");
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
            // `PageError` is open to new variants, so one that this decoder gives fails here.
            other => panic!("not an error of this decoder: {other:?}"),
        },
    }
}

fn seeds() -> Vec<super::Seed> {
    let attention = GroupGeometry::attention(0, [0, 2], 4, 128, Dtype::Bf16).expect("valid");
    let mla = GroupGeometry::mla(3, [1], 1152, Dtype::Bf16).expect("valid");
    let groups = vec![attention, mla];
    let good = ObjectSetHeader::new([9; 32], groups, 16, Scheme::Blake3Leaves)
        .expect("valid")
        .encode();
    // magic 4, version, scheme, page_tokens 2, model 32, count 2; then group 2, kind, window 4 ...
    let first = 42;
    let window = KvKind::SlidingWindow { window: 4096 };
    let mut sliding = GroupGeometry::attention(1, [5], 1, 64, Dtype::Fp8E4M3).expect("valid");
    sliding.kind = window;
    sliding.k_scale_bytes = 4;
    sliding.v_scale_bytes = 4;
    let scaled = ObjectSetHeader::new([1; 32], vec![sliding], 256, Scheme::Sha256Flat);
    vec![
        seed("accept.two-groups", good.clone()),
        seed("accept.sliding", scaled.expect("valid").encode()),
        seed("magic", patched(&good, 0, b"MLKX")),
        seed("unsupported.version", patched(&good, 4, &[9])),
        seed("unsupported.scheme", patched(&good, 5, &[77])),
        seed("unsupported.mutable", patched(&good, first + 2, &[4])),
        seed("unsupported.dtype", patched(&good, first + 7, &[200])),
        seed("zero.page-tokens", patched(&good, 6, &[0, 0])),
        seed("zero.groups", patched(&good, 40, &[0, 0])),
        seed("too-large.page-tokens", patched(&good, 6, &[1, 1])),
        seed("too-large.groups", patched(&good, 40, &[65, 0])),
        seed("not-ascending.groups", patched(&good, first, &[9, 0])),
        seed("not-canonical.window", patched(&good, first + 3, &[1])),
        seed(
            "geometry.v-of-mla",
            patched(&good, good.len() - 4 - 4 - 4 - 4 - 4, &[4]),
        ),
        seed("trailing", longer(&good)),
        seed("truncated", shorter(&good)),
        seed("truncated.nothing", []),
    ]
}
