//! Frames of the TCP and shared-memory transports: header, then what the kind says follows.

use super::{Target, patched, seed};
use moonlivekv::mem::RegionKey;
use moonlivekv::transport::Refusal;
use moonlivekv::transport::frame::{
    FrameError, HEADER_LEN, Header, Kind, Mapping, SPANS_MAX, decode_pairs, decode_spans,
    encode_pair, encode_span,
};
use moonlivekv::wire::frame::crc32c;

pub const TARGET: Target = Target {
    name: "transport_frame",
    run,
    outcomes: &[
        "accept",
        "code",
        "header-check",
        "kind",
        "list-bad",
        "list-out-of-range",
        "list-too-large",
        "magic",
        "reserved",
        "short",
        "too-long",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    let header = match Header::decode(data) {
        Ok(header) => header,
        Err(FrameError::Short) => return "short",
        Err(FrameError::HeaderCheck) => return "header-check",
        Err(FrameError::Magic) => return "magic",
        Err(FrameError::Kind(_)) => return "kind",
        Err(FrameError::Reserved) => return "reserved",
        Err(FrameError::TooLong(_)) => return "too-long",
        Err(FrameError::Code(_)) => return "code",
    };
    // Some bytes of a header mean nothing in some kinds; what is read must survive all the same.
    assert_eq!(Header::decode(&header.encode()), Ok(header));
    let payload = &data[HEADER_LEN..];
    let mut spans = Vec::new();
    let list = match header.kind {
        Kind::Get | Kind::Put => decode_spans(payload, header.count, &mut spans),
        Kind::Pull => decode_pairs(payload, header.count, &mut spans),
        Kind::Mapped => Mapping::decode(payload).map(|m| {
            assert_eq!(m.encode(), payload);
            0
        }),
        _ => return "accept",
    };
    match list {
        Ok(total) => {
            if header.kind != Kind::Mapped {
                assert_eq!(spans.iter().map(|s| s.len).sum::<u64>(), total);
                assert!(spans.len() <= SPANS_MAX && spans.iter().all(|s| s.len > 0));
            }
            "accept"
        }
        Err(Refusal::TooLarge) => "list-too-large",
        Err(Refusal::OutOfRange) => "list-out-of-range",
        Err(Refusal::BadRequest) => "list-bad",
        Err(
            other @ (Refusal::UnknownKey
            | Refusal::StaleEpoch
            | Refusal::Access
            | Refusal::Busy
            | Refusal::NotAllocated
            | Refusal::Integrity
            | Refusal::Aborted
            | Refusal::Unsupported),
        ) => panic!("not an error of this decoder: {other:?}"),
    }
}

fn seeds() -> Vec<super::Seed> {
    let header = |kind, count| Header {
        count,
        key: RegionKey::from_bytes([4; 16]),
        epoch: 2,
        ..Header::new(kind, 7)
    };
    let frame = |kind, count, payload: &[u8]| [&header(kind, count).encode(), payload].concat();
    let good = header(Kind::Done, 0).encode();
    let checked = |at, new: &[u8]| {
        let changed = patched(&good, at, new);
        let crc = crc32c(&changed[..60]).to_le_bytes();
        patched(&changed, 60, &crc)
    };
    let spans = |list: &[(u64, u32)]| {
        let mut out = Vec::new();
        list.iter().for_each(|(o, l)| encode_span(*o, *l, &mut out));
        out
    };
    let mut pair = Vec::new();
    let (remote_off, local_off, len) = (64, 128, 4096);
    encode_pair(
        &moonlivekv::transport::Span {
            remote_off,
            local_off,
            len,
        },
        &mut pair,
    );
    let mapping = Mapping {
        region: 1,
        region_len: 4096,
        words_len: 64,
        word: 8,
        ticket: 5,
    }
    .encode();
    vec![
        seed("accept.done", good),
        seed(
            "accept.get",
            frame(Kind::Get, 2, &spans(&[(0, 16), (4096, 512)])),
        ),
        seed("accept.pull", frame(Kind::Pull, 1, &pair)),
        seed("accept.mapped", frame(Kind::Mapped, 0, &mapping)),
        seed("accept.refused", Header::refused(7, Refusal::Busy).encode()),
        seed("short", &good[..63]),
        seed("header-check", patched(&good, 9, &[1])),
        seed("magic", checked(0, b"NOPE")),
        seed("kind", checked(4, &[99])),
        seed("reserved", checked(52, &[1])),
        seed("too-long", checked(48, &[0xff; 4])),
        seed("code", checked(4, &[Kind::Refused as u8, 200])),
        seed("list-bad.none", frame(Kind::Get, 0, &[])),
        seed(
            "list-bad.empty-span",
            frame(Kind::Put, 1, &spans(&[(0, 0)])),
        ),
        seed("list-bad.length", frame(Kind::Pull, 2, &pair)),
        seed("list-bad.mapping", frame(Kind::Mapped, 0, &mapping[1..])),
        seed(
            "list-out-of-range",
            frame(Kind::Get, 1, &spans(&[(u64::MAX, 2)])),
        ),
        seed("list-too-large.spans", frame(Kind::Get, u16::MAX, &[])),
        seed(
            "list-too-large.bytes",
            frame(Kind::Get, 1, &spans(&[(0, u32::MAX)])),
        ),
    ]
}
