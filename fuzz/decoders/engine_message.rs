//! Messages of an engine in another process. The first byte chooses the message.

use super::{Target, longer, seed};
use moonlivekv::engine::adapter::AdapterError as E;
use moonlivekv::page::{Dtype, GroupGeometry, ObjectSetHeader, Scheme};
use moonlivekv::rpc::adapter::{Carried, RereadError, reread};

pub const TARGET: Target = Target {
    name: "engine_message",
    run,
    outcomes: &[
        "accept",
        "engine-lost",
        "generator",
        "leaf",
        "length",
        "malformed",
        "missing",
        "number",
        "page",
        "pool",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    let Some((which, bytes)) = data.split_first() else {
        return "malformed";
    };
    let what = Carried::ALL[usize::from(*which) % Carried::ALL.len()];
    match reread(what, bytes) {
        Ok(once) => {
            let twice = reread(what, &once).expect("what was accepted");
            assert_eq!(once, twice, "what was written is read as something else");
            "accept"
        }
        Err(RereadError::Malformed(_)) => "malformed",
        Err(RereadError::Refused(error)) => label(&error),
    }
}

fn label(error: &E) -> &'static str {
    match error {
        E::EngineLost(_) => "engine-lost",
        E::Page(_) => "page",
        E::Caller("a hash or id in the message has the wrong length") => "length",
        E::Caller("a part of the message is missing") => "missing",
        E::Caller("a KV group, page size or slot in the message is too large") => "number",
        E::Caller("the message names a generator that does not exist") => "generator",
        E::Caller("a leaf in the message is not 32 bytes long") => "leaf",
        E::Caller("the engine's pool is too large to mirror") => "pool",
        E::Caller(_)
        | E::Unknown(_)
        | E::WrongIncarnation { .. }
        | E::StaleEpoch { .. }
        | E::OwnerEpoch { .. }
        | E::Finished
        | E::NotHeld
        | E::DrainDeadline
        | E::SealedDirty
        | E::OutOfRange { .. }
        | E::OutOfBlocks { .. }
        | E::Frozen { .. }
        | E::NotHashed { .. }
        | E::StageState { .. }
        | E::Conflict(_)
        | E::Refused(_)
        | E::Incompatible(_)
        | E::MutableState { .. }
        | E::Control(_)
        | E::ReplayMismatch(_)
        | E::Busy
        | E::Mem(_)
        | E::Digest(_)
        | E::DeviceLost { .. }
        | E::Remote { .. }
        | E::Bug(_) => panic!("not an error of this decoder: {error:?}"),
    }
}

/// A field of protocol buffers: a number.
pub fn number(field: u8, mut value: u64) -> Vec<u8> {
    let mut out = vec![field << 3];
    if field > 15 {
        out = vec![(field << 3) | 0x80, field >> 4];
    }
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

/// A field of protocol buffers: bytes, text or a message.
pub fn bytes(field: u8, value: &[u8]) -> Vec<u8> {
    let mut out = number(field, value.len() as u64);
    out[0] |= 2;
    out.extend(value);
    out
}

/// A field of protocol buffers: eight bytes.
fn fixed64(field: u8, value: u64) -> Vec<u8> {
    [&[(field << 3) | 1][..], &value.to_le_bytes()].concat()
}

fn header() -> Vec<u8> {
    let geometry = GroupGeometry::attention(3, [0, 2], 2, 8, Dtype::F16).expect("valid");
    let header = ObjectSetHeader::new([9; 32], vec![geometry], 16, Scheme::Blake3Leaves);
    header.expect("valid").encode()
}

fn capabilities(rng: u64, header: &[u8], pool: &[u8]) -> Vec<u8> {
    [
        fixed64(1, 7),
        number(2, 1),
        bytes(3, &[1; 32]),
        bytes(4, &[2; 32]),
        bytes(5, &[3; 32]),
        bytes(7, &[4; 32]),
        bytes(8, header),
        number(9, 4096),
        bytes(10, &[rng as u8]),
        number(12, 1),
        number(13, 1),
        number(14, 99),
        bytes(17, pool),
    ]
    .concat()
}

fn pool(tokens: u64) -> Vec<u8> {
    let lists = [bytes(2, &[0, 2]), bytes(3, &[0, 1])].concat();
    [number(1, 3), lists, number(4, tokens)].concat()
}

fn seeds() -> Vec<super::Seed> {
    let of = |what: Carried, parts: &[Vec<u8>]| {
        let at = Carried::ALL.iter().position(|c| *c == what);
        let at = at.expect("one of them") as u8;
        [&[at][..], &parts.concat()].concat()
    };
    let key = [fixed64(1, 7), bytes(2, &[5; 16]), number(3, 4)].concat();
    let live = |group| bytes(5, &[number(1, group), number(2, 32)].concat());
    let page = |slot, leaves: usize| {
        let body = [
            number(1, 3),
            number(2, 1),
            number(3, slot),
            number(4, 16),
            bytes(5, &[6; 32]),
            bytes(6, &vec![7; leaves]),
        ];
        bytes(1, &body.concat())
    };
    let sealed = bytes(4, &[number(1, 20), number(2, 21)].concat());
    let spec = |header: &[u8], rng| {
        let parts = [
            bytes(1, &key),
            bytes(2, header),
            bytes(3, &[1; 32]),
            bytes(4, &[2; 32]),
            number(5, rng),
            number(6, 9),
            number(7, 90),
            bytes(8, &[number(1, 3), number(2, 16)].concat()),
        ];
        of(Carried::Spec, &parts)
    };
    let point = [number(1, 2), number(2, 11), bytes(3, b"control")].concat();
    let image = |point: &[u8]| {
        let parts = [
            bytes(1, &key),
            number(2, 3),
            bytes(3, point),
            bytes(4, &[1, 2, 3]),
            bytes(5, &[4, 5]),
        ];
        of(Carried::Image, &parts)
    };
    let (header, told) = (header(), Carried::Capabilities);
    let fault = |part: Vec<u8>| of(Carried::Fault, &[bytes(1, b"it is so"), part]);
    let pair = [number(1, 1), number(2, 2)].concat();
    let accepted = [
        ("key", of(Carried::Key, std::slice::from_ref(&key))),
        ("view-of-a-pin", of(Carried::View, &[number(2, 9)])),
        ("view-of-a-stage", of(Carried::View, &[number(3, 9)])),
        ("pinned", of(Carried::Pinned, &[number(1, 9), live(3)])),
        ("boundary", of(Carried::Boundary, &[number(1, 5), sealed])),
        ("pages", of(Carried::Pages, &[page(0, 64), page(2, 0)])),
        ("spec", spec(&header, 1)),
        (
            "manifest",
            of(Carried::Manifest, &[bytes(1, &number(2, 8)), number(2, 20)]),
        ),
        (
            "armed",
            of(Carried::Armed, &[number(1, 1), bytes(4, &[8; 32])]),
        ),
        (
            "checkpoint",
            of(Carried::Checkpoint, &[point.clone(), bytes(4, &[7; 32])]),
        ),
        ("image", image(&point)),
        (
            "capabilities",
            of(told, &[capabilities(1, &header, &pool(640))]),
        ),
        ("fault-unknown-pin", fault(bytes(2, &number(2, 4)))),
        ("fault-stale-epoch", fault(bytes(4, &pair))),
        ("fault-finished", fault(bytes(6, &[]))),
        ("fault-conflict", fault(bytes(15, b"a token"))),
        ("fault-refused", fault(number(16, 3))),
        ("fault-other", fault(number(24, 2))),
    ];
    let mut all: Vec<_> = accepted
        .into_iter()
        .map(|(name, bytes)| seed(&format!("accept.{name}"), bytes))
        .collect();
    let short_key = of(Carried::Key, &[fixed64(1, 7), bytes(2, &[5; 15])]);
    all.extend([
        seed("length.request", short_key),
        seed("length.mask", of(Carried::Armed, &[bytes(4, &[8; 31])])),
        seed("missing.view", of(Carried::View, &[fixed64(1, 7)])),
        seed("missing.sealed", of(Carried::Boundary, &[number(1, 5)])),
        seed("missing.key", of(Carried::Image, &[number(2, 3)])),
        seed(
            "missing.pool",
            of(told, &[capabilities(1, &header, &number(1, 4))]),
        ),
        seed("number.group", of(Carried::Pinned, &[live(1 << 16)])),
        seed("number.slot", of(Carried::Pages, &[page(1 << 16, 32)])),
        seed("generator.spec", spec(&header, 99)),
        seed(
            "generator.capabilities",
            of(told, &[capabilities(99, &header, &pool(640))]),
        ),
        seed("leaf", of(Carried::Pages, &[page(0, 33)])),
        seed("page.header", spec(&header[1..], 1)),
        seed(
            "page.shard",
            of(
                told,
                &[capabilities(
                    1,
                    &header,
                    &[pool(640), bytes(2, &[9])].concat(),
                )],
            ),
        ),
        seed(
            "pool",
            of(told, &[capabilities(1, &header, &pool(u64::MAX))]),
        ),
        seed("malformed.cut", of(Carried::Spec, &[vec![0x0a, 9]])),
        seed("malformed.longer", longer(&spec(&header, 1))),
        seed("malformed.nothing", []),
        seed("engine-lost.nothing", of(Carried::Fault, &[])),
        seed("engine-lost.no-kind", fault(vec![])),
        seed("engine-lost.refusal", fault(number(16, 200))),
        seed("engine-lost.group", fault(number(18, 1 << 20))),
        seed("engine-lost.cut", of(Carried::Fault, &[vec![0x0a, 200]])),
    ]);
    all
}
