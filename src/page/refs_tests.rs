use super::*;
use crate::id::RequestId;

fn header() -> ObjectSetHeader {
    let full = GroupGeometry::attention(0, [0, 2, 5], 4, 8, Dtype::Bf16).unwrap();
    let sliding = GroupGeometry {
        group: 1,
        kind: KvKind::SlidingWindow { window: 24 },
        layers: vec![1],
        ..full.clone()
    };
    ObjectSetHeader::new([3; 32], vec![full, sliding], 16, Scheme::default()).unwrap()
}

fn set() -> KvObjectSet {
    let header = header();
    let mut pages = Vec::new();
    for (group, from) in [(0u16, 0u64), (1, 20)] {
        let geometry = header.group(group).unwrap();
        let parts: Vec<Part> = match group {
            0 => (0..2).map(|r| Part::rank(geometry, r, 2)).collect(),
            _ => vec![Part::whole(geometry)],
        };
        for part in parts {
            for page in 0..4 {
                let Some(span) = PageSpan::of(page, 16, &(from..53)) else {
                    continue;
                };
                let key = (page == 2).then(|| format!("kv/{group}/{page}"));
                let page = PageRef::new(&header, group, span, part, 7, [page as u8; 16], key);
                pages.push(page.unwrap());
            }
        }
    }
    let request = RequestId([1; 16]);
    KvObjectSet {
        request,
        header,
        kv_len: 53,
        retained_from: vec![0, 20],
        pages,
    }
}

#[test]
fn a_set_survives_its_encoding_and_every_cut_of_it_is_refused() {
    let set = set();
    set.validate().unwrap();
    assert_eq!(set.pages.len(), 4 + 4 + 3);
    let bytes = set.encode();
    assert_eq!(KvObjectSet::decode(&bytes), Ok(set));
    for cut in 0..bytes.len() {
        assert!(KvObjectSet::decode(&bytes[..cut]).is_err());
    }
    let mut long = bytes.clone();
    long.push(0);
    assert_eq!(
        KvObjectSet::decode(&long),
        Err(PageError::Trailing { extra: 1 })
    );
    // One encoding per set, so a flipped bit is refused or means another set.
    for i in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[i] ^= 1 << bit;
            if let Ok(other) = KvObjectSet::decode(&flipped) {
                assert_eq!(other.encode(), flipped);
            }
        }
    }
}

#[test]
fn a_page_reference_describes_its_packed_bytes() {
    let page = &set().pages[3];
    assert_eq!((page.span.page, page.valid_tokens()), (3, 5));
    assert_eq!((page.kv_heads, page.head_dim), (2, 8));
    assert_eq!(page.shape, [3, 2, 16, 32]);
    assert_eq!(page.strides, [1024, 512, 32, 1]);
    assert_eq!(page.byte_len, 3 * 1024);
}

#[test]
fn sets_with_missing_extra_or_misplaced_pages_are_refused() {
    let good = set();
    let refused = |change: &dyn Fn(&mut KvObjectSet)| {
        let mut set = good.clone();
        change(&mut set);
        assert!(KvObjectSet::decode(&set.encode()).is_err());
        set.validate().unwrap_err()
    };
    assert_eq!(
        refused(&|s| drop(s.pages.remove(3))),
        PageError::NotCanonical {
            what: "page reference"
        }
    );
    assert_eq!(
        refused(&|s| drop(s.pages.pop())),
        PageError::NoSuchPage { page: 3 }
    );
    assert_eq!(
        refused(&|s| drop(s.pages.drain(4..8))),
        PageError::MissingLeaf { layer: 0, head: 2 },
        "one rank's pages do not make a set"
    );
    refused(&|s| s.pages.swap(0, 1));
    refused(&|s| s.pages.rotate_left(4));
    refused(&|s| s.kv_len = 48);
    refused(&|s| s.kv_len = 65);
    refused(&|s| s.retained_from[1] = 0);
    refused(&|s| s.retained_from[1] = 54);
    refused(&|s| s.retained_from[0] = 16);
    refused(&|s| s.pages[0].span.to = 15);
    refused(&|s| s.pages[0].part.tp_size = 3);
    refused(&|s| s.pages.push(s.pages[10].clone()));
    let mut set = good;
    set.pages[0].strides[0] += 1;
    assert_eq!(
        set.validate(),
        Err(PageError::NotCanonical {
            what: "page reference"
        })
    );
}

#[test]
fn page_references_refuse_what_their_header_does_not_have() {
    let header = header();
    let part = Part::whole(&header.groups[0]);
    let new = |group, span, part, key: Option<String>| {
        PageRef::new(&header, group, span, part, 0, [0; 16], key).unwrap_err()
    };
    let span = PageSpan {
        page: 0,
        from: 0,
        to: 16,
    };
    assert_eq!(
        new(9, span, part, None),
        PageError::NoSuchGroup { group: 9 }
    );
    assert!(matches!(
        new(0, PageSpan { to: 17, ..span }, part, None),
        PageError::NoSuchPage { .. }
    ));
    assert!(matches!(
        new(0, PageSpan { from: 16, ..span }, part, None),
        PageError::NoSuchPage { .. }
    ));
    assert!(matches!(
        new(0, PageSpan { from: 1, ..span }, part, None),
        PageError::Geometry(_)
    ));
    assert!(matches!(
        new(0, span, Part { layers: 4, ..part }, None),
        PageError::NotInGeometry { what: "layer", .. }
    ));
    assert!(matches!(
        new(0, span, Part { layers: 0, ..part }, None),
        PageError::Zero { .. }
    ));
    assert!(matches!(
        new(0, span, Part { tp_rank: 1, ..part }, None),
        PageError::TooLarge { .. }
    ));
    assert!(matches!(
        new(
            0,
            span,
            Part {
                tp_size: 2048,
                ..part
            },
            None
        ),
        PageError::TooLarge {
            what: "tensor-parallel size",
            ..
        }
    ));
    assert!(matches!(
        new(0, span, part, Some(String::new())),
        PageError::Zero { .. }
    ));
    assert!(matches!(
        new(0, span, part, Some("x".repeat(257))),
        PageError::TooLarge { .. }
    ));
}
