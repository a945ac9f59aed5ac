//! The header before each framed message.

use super::{Target, patched, seed};
use moonlivekv::wire::frame::crc32c;
use moonlivekv::wire::{Corrupt, FrameHeader, HEADER_BYTES};

pub const TARGET: Target = Target {
    name: "wire_header",
    run,
    outcomes: &[
        "accept",
        "header-crc",
        "magic",
        "reserved",
        "short",
        "version",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    let Some(bytes) = data.first_chunk::<HEADER_BYTES>() else {
        return "short";
    };
    match FrameHeader::decode(bytes) {
        Ok(header) => {
            assert_eq!(header.encode(), *bytes);
            "accept"
        }
        Err(Corrupt::Magic { .. }) => "magic",
        Err(Corrupt::HeaderCrc { .. }) => "header-crc",
        Err(Corrupt::Version { .. }) => "version",
        Err(Corrupt::Reserved { .. }) => "reserved",
    }
}

fn seeds() -> Vec<super::Seed> {
    let good = FrameHeader {
        kind: 3,
        flags: 1,
        len: 700,
        id: 99,
        payload_crc: 0x1234_5678,
    }
    .encode();
    let checked = |at, new: &[u8]| {
        let changed = patched(&good, at, new);
        let crc = crc32c(&changed[..28]).to_le_bytes();
        patched(&changed, 28, &crc)
    };
    vec![
        seed("accept", good),
        seed("short", &good[..31]),
        seed("magic", patched(&good, 0, b"HTTP")),
        seed("header-crc", patched(&good, 12, &[0xff; 4])),
        seed("version", checked(4, &[2])),
        seed("reserved", checked(5, &[1])),
    ]
}
