//! Records of the metadata store's log in their order, as recovery reads them.

use super::records::{framed, records};
use super::route_record::label;
use super::{Target, longer, patched, seed, shorter};
use moonlivekv::metastore::{ReplayError, replay_records};

pub const TARGET: Target = Target {
    name: "store_record",
    run,
    outcomes: &[
        "accept",
        "incomplete",
        "order",
        "range",
        "trailing",
        "truncated",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    let all = records(data);
    match replay_records(all.iter().copied()) {
        Ok(alive) => {
            assert!(alive < all.len(), "a record from nowhere");
            "accept"
        }
        Err(ReplayError::Malformed(e)) => label(&e),
        Err(ReplayError::Order(_)) => "order",
        Err(ReplayError::Incomplete) => "incomplete",
    }
}

const PUT: u8 = 1;
const DELETE: u8 = 2;
const ENTRY: u8 = 3;
const OPS: u8 = 4;
const SNAPSHOT_END: u8 = 5;

fn entry(revision: u64, key: &str, value: &[u8]) -> Vec<u8> {
    let mut out = revision.to_le_bytes().to_vec();
    out.extend((key.len() as u16).to_le_bytes());
    out.extend(key.as_bytes());
    out.extend(value);
    out
}

fn change(revision: u64, key: &str, value: &[u8]) -> Vec<u8> {
    let mut out = revision.to_le_bytes().to_vec();
    out.extend([9; 16]);
    out.extend((key.len() as u16).to_le_bytes());
    out.extend(key.as_bytes());
    out.extend(value);
    out
}

fn end(revision: u64, entries: u64) -> Vec<u8> {
    [revision.to_le_bytes(), entries.to_le_bytes()].concat()
}

fn seeds() -> Vec<super::Seed> {
    let one = (ENTRY, entry(3, "a", b"value"));
    let two = (ENTRY, entry(4, "b", b""));
    let ops = (OPS, [&[1; 16][..], &3u64.to_le_bytes()].concat());
    let done = (SNAPSHOT_END, end(4, 2));
    let snapshot = [one.clone(), two.clone(), ops.clone(), done.clone()];
    let after = |more: &[(u8, Vec<u8>)]| framed(&[&snapshot[..], more].concat());
    let put = change(5, "a", b"new");
    vec![
        seed("accept.empty", framed(&[(SNAPSHOT_END, end(0, 0))])),
        seed("accept.snapshot", after(&[])),
        seed(
            "accept.changes",
            after(&[(PUT, put.clone()), (DELETE, change(6, "b", b""))]),
        ),
        seed("incomplete.nothing", []),
        seed("incomplete.no-end", framed(&snapshot[..3])),
        seed("order.keys", framed(&[two.clone(), one.clone()])),
        seed(
            "order.count",
            framed(&[one.clone(), (SNAPSHOT_END, end(4, 2))]),
        ),
        seed(
            "order.newer",
            framed(&[one.clone(), (SNAPSHOT_END, end(2, 1))]),
        ),
        seed("order.early", framed(&[(PUT, put.clone())])),
        seed("order.second-snapshot", after(&[ops])),
        seed("order.gap", after(&[(PUT, change(7, "a", b""))])),
        seed(
            "order.last-revision",
            framed(&[(SNAPSHOT_END, end(u64::MAX, 0)), (PUT, change(0, "a", b""))]),
        ),
        seed("order.kind", after(&[(0, vec![])])),
        seed("range.no-key", after(&[(PUT, change(5, "", b""))])),
        seed("range.utf-8", after(&[(PUT, patched(&put, 26, &[0xff]))])),
        seed(
            "trailing.delete",
            after(&[(DELETE, longer(&change(5, "a", b"")))]),
        ),
        seed(
            "trailing.end",
            framed(&[(SNAPSHOT_END, longer(&end(0, 0)))]),
        ),
        seed("truncated.key", after(&[(PUT, patched(&put, 24, &[200]))])),
        seed("truncated.ops", framed(&[(OPS, vec![1; 23])])),
        seed(
            "truncated.end",
            framed(&[(SNAPSHOT_END, shorter(&end(0, 0)))]),
        ),
    ]
}
