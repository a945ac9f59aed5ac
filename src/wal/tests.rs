use super::record::{RECORD_HEADER, SEGMENT_HEADER, record_bytes};
use super::sim::{Fault, SimDir};
use super::*;
use proptest::prelude::*;
use std::sync::Arc;

const LOG: u32 = 0x7e57;
const EIO: i32 = 5;

fn series(dir: &SimDir) -> Series {
    Series::new(Arc::new(dir.clone()), "t", LOG)
}

fn fresh(dir: &SimDir, capacity: u64) -> Segment {
    let series = series(dir);
    let mut segment = series.create(1, 1, capacity).unwrap();
    series.prepare(&mut segment).unwrap();
    series.publish(&segment).unwrap();
    segment
}

/// A payload without zero bytes that names its record.
fn body(seq: u64, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| 1 + ((seq as usize * 31 + i * 7) % 255) as u8)
        .collect()
}

fn append(segment: &mut Segment, len: usize, sync: bool) {
    let seq = segment.next_seq();
    assert_eq!(segment.push(7, &[&body(seq, len)]), seq);
    let batch = segment.take();
    batch.write(&*segment.file()).unwrap();
    if sync {
        segment.file().sync().unwrap();
        segment.mark_synced(batch.last_seq());
    }
    segment.give_back(batch);
}

fn read(dir: &SimDir) -> Result<(Segment, Vec<(u64, usize)>), WalError> {
    let mut records = Vec::new();
    let (segment, _) = series(dir).recover(1, |record| {
        assert_eq!(record.kind, 7);
        assert_eq!(record.payload, &body(record.seq, record.payload.len())[..]);
        records.push((record.seq, record.payload.len()));
        Ok(())
    })?;
    Ok((segment, records))
}

fn file(dir: &SimDir) -> (String, Vec<u8>) {
    let name = "t-0000000000000001.log".to_owned();
    let bytes = dir.content(&name).unwrap();
    (name, bytes)
}

#[test]
fn records_come_back_in_order_and_appending_goes_on() {
    let dir = SimDir::new();
    let mut segment = fresh(&dir, 1 << 16);
    let lens = [0, 1, 30, 31, 32, 33, 511, 512, 513, 4000];
    for len in lens {
        append(&mut segment, len, true);
    }
    for round in 0..3 {
        let (mut segment, records) = read(&dir).unwrap();
        assert_eq!(records.len(), lens.len() + round);
        assert!(
            records
                .iter()
                .zip(1u64..)
                .all(|(&(seq, _), want)| seq == want)
        );
        append(&mut segment, 100, true);
    }
    assert_eq!(series(&dir).numbers().unwrap(), [1]);
}

#[test]
fn a_write_cut_at_any_byte_is_dropped_and_everything_before_it_stays() {
    let len = 700;
    for cut in 0..record_bytes(len) {
        let dir = SimDir::new();
        let mut segment = fresh(&dir, 1 << 13);
        append(&mut segment, 300, true);
        append(&mut segment, 40, true);
        dir.inject(move |_| Fault::Cut(cut));
        segment.push(7, &[&body(3, len)]);
        segment.take().write(&*segment.file()).unwrap_err();
        dir.heal();
        let (mut segment, records) = read(&dir).unwrap();
        assert_eq!(records, [(1, 300), (2, 40)], "cut at {cut}");
        // What was cut is gone for good: another record takes its place.
        append(&mut segment, 10, true);
        assert_eq!(
            read(&dir).unwrap().1,
            [(1, 300), (2, 40), (3, 10)],
            "cut at {cut}"
        );
    }
}

#[test]
fn each_flipped_bit_is_damage_and_named_with_its_offset() {
    let dir = SimDir::new();
    let mut segment = fresh(&dir, 1 << 12);
    let mut starts = vec![0, SEGMENT_HEADER as u64];
    for len in [5, 64, 600, 9] {
        append(&mut segment, len, true);
        starts.push(segment.end());
    }
    let (name, sound) = file(&dir);
    let end = segment.end() as usize;
    for bit in 0..end * 8 {
        let mut bytes = sound.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        dir.set_content(&name, bytes);
        let got = read(&dir).map(|(_, records)| records);
        let start = starts
            .iter()
            .rev()
            .find(|&&s| s as usize <= bit / 8)
            .unwrap();
        match got {
            Err(WalError::Damaged { offset, .. }) => assert_eq!(offset, *start, "bit {bit}"),
            Err(WalError::Foreign { .. }) => assert!(bit < 64, "bit {bit}"),
            other => panic!("bit {bit}: {other:?}"),
        }
    }
    // Behind the end nothing was acknowledged: a stray bit there is wiped.
    let mut bytes = sound.clone();
    bytes[end + 100] = 4;
    dir.set_content(&name, bytes);
    assert_eq!(read(&dir).unwrap().1.len(), 4);
    assert_eq!(file(&dir).1, sound);
}

#[test]
fn an_acknowledged_record_that_is_gone_is_never_taken_for_the_end() {
    let dir = SimDir::new();
    let mut segment = fresh(&dir, 1 << 13);
    let mut ends = vec![segment.end() as usize];
    for len in [480, 480, 480, 480] {
        append(&mut segment, len, true);
        ends.push(segment.end() as usize);
    }
    let (name, sound) = file(&dir);
    for lost in 0..3 {
        let mut bytes = sound.clone();
        bytes[ends[lost]..ends[lost + 1]].fill(0);
        dir.set_content(&name, bytes);
        let got = read(&dir).map(|(_, records)| records);
        let Err(WalError::Damaged { offset, .. }) = got else {
            panic!("{got:?}")
        };
        assert_eq!(offset, ends[lost] as u64);
    }
    // The file is cut off below the log's end.
    dir.set_content(&name, sound[..ends[2]].to_vec());
    assert!(matches!(read(&dir), Err(WalError::Damaged { .. })));
}

#[test]
fn records_of_one_unflushed_write_may_be_lost_in_any_order() {
    let dir = SimDir::new();
    let mut segment = fresh(&dir, 1 << 13);
    append(&mut segment, 480, true);
    for _ in 0..3 {
        let seq = segment.next_seq();
        segment.push(7, &[&body(seq, 480)]);
    }
    segment.take().write(&*segment.file()).unwrap();
    // The first sector of the batch never arrives, the later ones do.
    let mut n = 0;
    let after = dir.after_power_loss(dir.trace().len(), &mut || {
        n += 1;
        n > 1
    });
    let (mut segment, records) = read(&after).unwrap();
    assert_eq!(records, [(1, 480)]);
    append(&mut segment, 20, true);
    assert_eq!(read(&after).unwrap().1, [(1, 480), (2, 20)]);
}

#[test]
fn what_a_failed_flush_left_in_the_page_cache_is_written_again_before_it_is_believed() {
    let dir = SimDir::new();
    let mut segment = fresh(&dir, 1 << 13);
    append(&mut segment, 400, true);
    segment.push(7, &[&body(2, 400)]);
    let batch = segment.take();
    batch.write(&*segment.file()).unwrap();
    dir.inject(|_| Fault::Fail(EIO));
    segment.file().sync().unwrap_err();
    dir.heal();
    // The process restarts and finds the record in the page cache ...
    assert_eq!(read(&dir).unwrap().1, [(1, 400), (2, 400)]);
    // ... so the record has to survive what comes then.
    let after = dir.after_power_loss(dir.trace().len(), &mut || false);
    assert_eq!(read(&after).unwrap().1, [(1, 400), (2, 400)]);
}

#[test]
fn a_value_that_looks_like_a_record_is_not_taken_for_one() {
    let dir = SimDir::new();
    let mut segment = fresh(&dir, 1 << 13);
    append(&mut segment, 10, true);
    let (_, bytes) = file(&dir);
    let mut forged = bytes[SEGMENT_HEADER..SEGMENT_HEADER + RECORD_HEADER].to_vec();
    forged[8] = 9;
    forged.extend([0; 4 * RECORD_HEADER]);
    segment.push(7, &[&forged, &[0; 64]]);
    let batch = segment.take();
    let cut = record_bytes(forged.len() + 64) - 1;
    dir.inject(move |_| Fault::Cut(cut));
    batch.write(&*segment.file()).unwrap_err();
    dir.heal();
    assert_eq!(read(&dir).unwrap().1, [(1, 10)]);
}

#[test]
fn a_segment_of_another_log_or_number_is_refused() {
    let dir = SimDir::new();
    fresh(&dir, 1 << 12);
    let other = Series::new(Arc::new(dir.clone()), "t", LOG + 1);
    assert!(matches!(
        other.recover(1, |_| Ok(())),
        Err(WalError::Foreign { .. })
    ));
    dir.rename("t-0000000000000001.log", "t-0000000000000002.log")
        .unwrap();
    let got = series(&dir).recover(2, |_| Ok(()));
    assert!(matches!(got, Err(WalError::Damaged { offset: 16, .. })));
    assert!(matches!(
        series(&dir).recover(1, |_| Ok(())),
        Err(WalError::Io(_))
    ));
}

#[test]
fn a_segment_never_published_is_removed() {
    let dir = SimDir::new();
    fresh(&dir, 4096);
    let series = series(&dir);
    drop(series.create(2, 1, 4096).unwrap());
    assert_eq!(dir.list().unwrap().len(), 2);
    assert_eq!(series.numbers().unwrap(), [1]);
    assert_eq!(dir.list().unwrap(), ["t-0000000000000001.log"]);
    let segment = series.create(3, 1, 4096).unwrap();
    series.abandon(segment);
    assert_eq!(dir.list().unwrap().len(), 1);
}

#[test]
fn one_process_holds_a_directory() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("deep/er");
    let dir = DiskDir::open(&path).unwrap();
    assert!(matches!(DiskDir::open(&path), Err(WalError::Locked { .. })));
    drop(dir);
    DiskDir::open(&path).unwrap();
}

/// Writes of all lengths at all offsets, some by an earlier opening, against bytes in memory.
#[test]
fn a_file_written_past_the_page_cache_holds_what_was_written() {
    const LEN: usize = 64 << 10;
    let temp = tempfile::tempdir().unwrap();
    let mut seed = 7u64;
    let mut draw = |n: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
        (seed >> 33) as usize % n
    };
    let mut want = vec![0u8; LEN];
    let mut dir = DiskDir::open_direct(temp.path()).unwrap();
    let mut file = dir.create("f", LEN as u64).unwrap();
    for round in 0..600u32 {
        let longest = [40, 700, 5000, 20_000][draw(4)];
        let len = 1 + draw(longest);
        let at = match draw(3) {
            0 => draw(LEN / 4096) * 4096,
            _ => draw(LEN - longest),
        };
        let len = len.min(LEN - at);
        let bytes: Vec<u8> = (0..len).map(|_| draw(256) as u8).collect();
        file.write_at(at as u64, &bytes).unwrap();
        want[at..at + len].copy_from_slice(&bytes);
        if draw(9) == 0 {
            file.sync().unwrap();
        }
        if draw(25) == 0 {
            drop((file, dir));
            dir = DiskDir::open_direct(temp.path()).unwrap();
            file = dir.open("f").unwrap();
        }
        assert!(file.read().unwrap() == want, "round {round}");
    }
}

#[test]
fn a_real_directory_keeps_records() {
    let temp = tempfile::tempdir().unwrap();
    let log = Series::new(DiskDir::open(temp.path()).unwrap(), "t", LOG);
    let mut segment = log.create(1, 1, 3 << 20).unwrap();
    log.prepare(&mut segment).unwrap();
    log.publish(&segment).unwrap();
    append(&mut segment, 10, true);
    append(&mut segment, 5000, false);
    drop(segment);
    let mut n = 0;
    let (segment, found) = log
        .recover(1, |_| {
            n += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!((n, found.torn, segment.capacity()), (2, false, 3 << 20));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever a power loss forgets: every record flushed is there, the rest is a prefix, and the
    /// log never calls that damage.
    #[test]
    fn power_loss_keeps_what_was_flushed(
        steps in prop::collection::vec((0usize..1200, 1usize..4, any::<bool>()), 1..12),
        keeps in prop::collection::vec(any::<bool>(), 64),
        at in 0.0f64..1.0,
    ) {
        let dir = SimDir::new();
        let mut segment = fresh(&dir, 1 << 16);
        let begin = dir.trace().len();
        // After how many operations how many records are flushed.
        let mut flushed = vec![(begin, 0)];
        let mut written = 0;
        for (len, many, sync) in steps {
            for _ in 0..many {
                let seq = segment.next_seq();
                segment.push(7, &[&body(seq, len)]);
                written = seq;
            }
            let batch = segment.take();
            batch.write(&*segment.file()).unwrap();
            if sync {
                segment.file().sync().unwrap();
                segment.mark_synced(batch.last_seq());
                flushed.push((dir.trace().len(), written));
            }
        }
        let total = dir.trace().len();
        let ops = begin + ((total - begin) as f64 * at).round() as usize;
        let want = flushed.iter().rev().find(|&&(o, _)| o <= ops).unwrap().1;
        let mut i = 0;
        let after = dir.after_power_loss(ops, &mut || {
            i += 1;
            keeps[i % keeps.len()]
        });
        let (_, records) = read(&after).unwrap();
        prop_assert!(records.len() as u64 >= want && records.len() as u64 <= written);
    }

    /// Any bytes at all are read to an end without panic.
    #[test]
    fn scanning_never_panics(junk in prop::collection::vec(any::<u8>(), 0..3000), flip in any::<u16>()) {
        let _ = scan(&junk, LOG, |_| Ok(()));
        let dir = SimDir::new();
        let mut segment = fresh(&dir, 4096);
        append(&mut segment, 77, true);
        let (_, mut bytes) = file(&dir);
        let at = flip as usize % (bytes.len() - SEGMENT_HEADER) + SEGMENT_HEADER;
        for (b, j) in bytes[at..].iter_mut().zip(&junk) {
            *b = *j;
        }
        let _ = scan(&bytes, LOG, |_| Ok(()));
    }
}
