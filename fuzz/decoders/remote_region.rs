//! The grant of a region, as a peer hands it out.

use super::{Target, longer, patched, seed, shorter};
use moonlivekv::mem::{RegionKey, RemoteRegion, RemoteRegionError};

pub const TARGET: Target = Target {
    name: "remote_region",
    run,
    outcomes: &["accept", "length", "range", "tag"],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    match RemoteRegion::decode(data) {
        Ok(region) => {
            assert_eq!(region.encode(), data);
            assert!(region.base.checked_add(region.len).is_some());
            "accept"
        }
        Err(RemoteRegionError::Length { .. }) => "length",
        Err(RemoteRegionError::Tag(_)) => "tag",
        Err(RemoteRegionError::Range { .. }) => "range",
    }
}

fn seeds() -> Vec<super::Seed> {
    let (key, base, len, epoch) = (RegionKey::from_bytes([7; 16]), 4096, 65536, 3);
    let good = RemoteRegion {
        key,
        base,
        len,
        epoch,
    }
    .encode();
    vec![
        seed("accept", good),
        seed("length.short", shorter(&good)),
        seed("length.long", longer(&good)),
        seed("tag", patched(&good, 0, b"MLR2")),
        seed("range.empty", patched(&good, 28, &[0; 8])),
        seed("range.overflow", patched(&good, 20, &[0xff; 8])),
    ]
}
