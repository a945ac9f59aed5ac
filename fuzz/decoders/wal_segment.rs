//! A segment of the append log under store and journal, as recovery reads it.

use super::{Target, patched, seed};
use moonlivekv::wal::record::{RECORD_HEADER, SEGMENT_HEADER, record_bytes};
use moonlivekv::wal::{ScanError, SegmentHeader, scan};
use moonlivekv::wire::frame::crc32c;

pub const TARGET: Target = Target {
    name: "wal_segment",
    run,
    outcomes: &["accept", "damaged", "foreign", "torn"],
    seeds,
};

const LOG: u32 = 0x4d4c;

fn run(data: &[u8]) -> &'static str {
    let mut last = None;
    let result = scan(data, LOG, |record| {
        assert!(
            last.is_none_or(|seq| seq + 1 == record.seq),
            "a gap was accepted"
        );
        assert!(record.synced < record.seq);
        last = Some(record.seq);
        Ok(())
    });
    match result {
        Ok(scan) => {
            assert!(scan.end <= data.len() as u64 && scan.unproven_from <= scan.end);
            assert_eq!(
                last.map_or(scan.header.first_seq, |seq| seq + 1),
                scan.next_seq
            );
            if scan.torn { "torn" } else { "accept" }
        }
        Err(ScanError::Foreign { .. }) => "foreign",
        Err(ScanError::Damaged { offset, .. }) => {
            assert!(offset <= data.len() as u64);
            "damaged"
        }
    }
}

/// A record by the format's description, not by the writer's code.
fn record(link: &mut u32, nonce: u64, seq: u64, back: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0u8; RECORD_HEADER];
    out[0..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    out[4..8].copy_from_slice(&back.to_le_bytes());
    out[8..16].copy_from_slice(&seq.to_le_bytes());
    out[16..20].copy_from_slice(&link.to_le_bytes());
    out[20..24].copy_from_slice(&crc32c(payload).to_le_bytes());
    out[28] = 1;
    out[31] = MARK;
    let covered = [&nonce.to_le_bytes(), &out[..24], &out[28..32]].concat();
    *link = crc32c(&covered);
    out[24..28].copy_from_slice(&link.to_le_bytes());
    out.extend_from_slice(payload);
    out.resize(record_bytes(payload.len()), MARK);
    out
}

const MARK: u8 = 0xa5;

fn seeds() -> Vec<super::Seed> {
    let header = SegmentHeader {
        log: LOG,
        number: 3,
        nonce: 0x1122_3344,
        first_seq: 10,
        capacity: 2048,
    };
    let (head, first_link) = header.encode();
    let mut link = first_link;
    let mut body = record(&mut link, header.nonce, 10, 1, b"one");
    let second = body.len();
    body.extend(record(&mut link, header.nonce, 11, 1, &[7; 70]));
    let fill = |mut bytes: Vec<u8>| {
        bytes.resize(header.capacity as usize, 0);
        bytes
    };
    let good = fill([&head[..], &body].concat());
    let other = SegmentHeader { log: 9, ..header }.encode().0;
    let at = SEGMENT_HEADER + second;
    vec![
        seed("accept.empty", fill(head.to_vec())),
        seed("accept.two-records", good.clone()),
        seed("foreign.magic", fill(b"MLWAL009".to_vec())),
        seed("foreign.log", fill(other.to_vec())),
        seed("damaged.header", patched(&good, 500, &[1])),
        seed("damaged.short", good[..1024].to_vec()),
        seed("damaged.link", patched(&good, at + 16, &[0xff; 4])),
        seed(
            "damaged.payload",
            patched(&good, SEGMENT_HEADER + RECORD_HEADER, b"x"),
        ),
        // The last record's end is missing.
        seed(
            "torn.tail",
            patched(&good, at + RECORD_HEADER + 60, &[0; 36]),
        ),
    ]
}
