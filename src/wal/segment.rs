//! Writing a segment, and the series of segments in a directory.

use super::dir::{Dir, File};
use super::error::{IoError, WalError};
use super::record::{Record, SEGMENT_HEADER, SegmentHeader, encode, record_bytes};
use super::scan::{Scan, ScanError, scan};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The segments of one log in one directory: `NAME-<number>.log`.
#[derive(Debug, Clone)]
pub struct Series {
    dir: Arc<dyn Dir>,
    name: &'static str,
    log: u32,
}

impl Series {
    /// Names a log: file names begin with `name`, headers hold `log`.
    pub fn new(dir: Arc<dyn Dir>, name: &'static str, log: u32) -> Self {
        Self { dir, name, log }
    }

    /// The directory.
    pub fn dir(&self) -> &Arc<dyn Dir> {
        &self.dir
    }

    fn file_name(&self, number: u64) -> String {
        format!("{}-{number:016x}.log", self.name)
    }

    /// A name for a file that is no segment yet, different each time in this process.
    fn unfinished_name(&self) -> String {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        format!("{}-{n:016x}.new", self.name)
    }

    /// Numbers of the segments there, rising. Segments that were never published are removed.
    pub fn numbers(&self) -> Result<Vec<u64>, IoError> {
        let mut numbers = Vec::new();
        for file in self.dir.list()? {
            let Some(rest) = file
                .strip_prefix(self.name)
                .and_then(|r| r.strip_prefix('-'))
            else {
                continue;
            };
            let number = |digits: &str| u64::from_str_radix(digits, 16).ok();
            if let Some(digits) = rest.strip_suffix(".log") {
                numbers.extend(number(digits).filter(|&n| self.file_name(n) == file));
            } else if rest.ends_with(".new") {
                self.dir.remove(&file)?;
            }
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Removes a segment.
    pub fn remove(&self, number: u64) -> Result<(), IoError> {
        self.dir.remove(&self.file_name(number))
    }

    /// Allocates the file of a segment to come: the slow part of beginning it. On failure nothing is
    /// left behind.
    pub fn allocate(&self, capacity: u64) -> Result<Blank, IoError> {
        let capacity = capacity.max(SEGMENT_HEADER as u64);
        let name = self.unfinished_name();
        let file = self.dir.create(&name, capacity)?;
        Ok(Blank {
            file,
            name,
            capacity,
        })
    }

    /// Removes an allocated file that is not needed.
    pub fn discard(&self, blank: Blank) {
        // Left over, it is removed at the next start.
        let _ = self.dir.remove(&blank.name);
    }

    /// Begins segment `number` in an allocated file; not yet published.
    pub fn begin(&self, blank: Blank, number: u64, first_seq: u64) -> Result<Segment, IoError> {
        let Blank {
            file,
            name,
            capacity,
        } = blank;
        let mut nonce = [0u8; 8];
        getrandom::fill(&mut nonce).map_err(|e| IoError {
            op: "getrandom",
            name: self.dir.name(),
            errno: e.raw_os_error().unwrap_or(0),
        })?;
        let nonce = u64::from_le_bytes(nonce);
        let header = SegmentHeader {
            log: self.log,
            number,
            nonce,
            first_seq,
            capacity,
        };
        let (sector, link) = header.encode();
        Ok(Segment {
            file,
            unfinished: name,
            number,
            nonce,
            capacity,
            staged: sector.to_vec(),
            staged_at: 0,
            next_seq: first_seq,
            link,
            synced: first_seq.saturating_sub(1),
        })
    }

    /// [`allocate`](Self::allocate) and [`begin`](Self::begin) in one.
    pub fn create(&self, number: u64, first_seq: u64, capacity: u64) -> Result<Segment, IoError> {
        self.begin(self.allocate(capacity)?, number, first_seq)
    }

    /// Removes a segment that was begun and shall not be.
    pub fn abandon(&self, segment: Segment) {
        // Left over, it is removed at the next start.
        let _ = self.dir.remove(&segment.unfinished);
    }

    /// Writes and flushes what is staged in a segment begun by [`create`](Self::create). On failure
    /// nothing but an unfinished file exists: [`abandon`](Self::abandon) it.
    pub fn prepare(&self, segment: &mut Segment) -> Result<(), IoError> {
        let batch = segment.take();
        batch.write(&*segment.file)?;
        segment.file.sync()?;
        segment.mark_synced(segment.next_seq.saturating_sub(1));
        segment.give_back(batch);
        Ok(())
    }

    /// Gives a prepared segment its name, durably. After a failure it is unknown which segments a
    /// later start will find: nothing more may be appended to any.
    pub fn publish(&self, segment: &Segment) -> Result<(), IoError> {
        self.dir
            .rename(&segment.unfinished, &self.file_name(segment.number))?;
        self.dir.sync()
    }

    /// Reads segment `number` back without changing anything: for those that others follow.
    pub fn read(
        &self,
        number: u64,
        visit: impl FnMut(Record<'_>) -> Result<(), String>,
    ) -> Result<Scan, WalError> {
        self.read_file(number, visit).map(|(_, _, found)| found)
    }

    fn read_file(
        &self,
        number: u64,
        visit: impl FnMut(Record<'_>) -> Result<(), String>,
    ) -> Result<(Arc<dyn File>, Vec<u8>, Scan), WalError> {
        let name = self.file_name(number);
        let file = self.dir.open(&name)?;
        let bytes = file.read()?;
        let found = scan(&bytes, self.log, visit).map_err(|e| match e {
            ScanError::Foreign { what } => WalError::Foreign {
                file: name.clone(),
                what,
            },
            ScanError::Damaged { offset, what } => WalError::Damaged {
                file: name.clone(),
                offset,
                what,
            },
        })?;
        if found.header.number != number {
            let what = format!("its header says segment {:x}", found.header.number);
            return Err(WalError::Damaged {
                file: name,
                offset: 16,
                what,
            });
        }
        Ok((file, bytes, found))
    }

    /// Reads the last segment back and makes it fit to go on: every record that `visit` saw is
    /// durable afterwards, and behind the last one the file is zero.
    pub fn recover(
        &self,
        number: u64,
        visit: impl FnMut(Record<'_>) -> Result<(), String>,
    ) -> Result<(Segment, Scan), WalError> {
        let (file, mut bytes, found) = self.read_file(number, visit)?;
        // The process that published it may have died before its name was durable.
        self.dir.sync()?;
        // The page cache may hold what a failed flush never brought to the disk, and call it clean:
        // only writing it again makes the next flush carry it.
        let from = found.unproven_from as usize;
        let mut rewrite = from..found.end as usize;
        if found.torn {
            bytes[found.end as usize..].fill(0);
            rewrite.end = bytes.len();
        }
        if !rewrite.is_empty() {
            file.write_at(from as u64, &bytes[rewrite])?;
            file.sync()?;
        }
        let segment = Segment {
            file,
            unfinished: String::new(),
            number,
            nonce: found.header.nonce,
            capacity: bytes.len() as u64,
            staged: Vec::new(),
            staged_at: found.end,
            next_seq: found.next_seq,
            link: found.link,
            synced: found.next_seq.saturating_sub(1),
        };
        Ok((segment, found))
    }
}

/// The allocated file of a segment to come.
#[derive(Debug)]
pub struct Blank {
    file: Arc<dyn File>,
    name: String,
    capacity: u64,
}

/// The writer of one segment. It stages records in memory; its owner takes them as a [`Batch`] and
/// writes and flushes that, outside of whatever lock guards this struct.
#[derive(Debug)]
pub struct Segment {
    file: Arc<dyn File>,
    /// The file's name until it is published.
    unfinished: String,
    number: u64,
    nonce: u64,
    capacity: u64,
    staged: Vec<u8>,
    staged_at: u64,
    next_seq: u64,
    link: u32,
    synced: u64,
}

impl Segment {
    /// True if a record of that many payload bytes has room.
    pub fn fits(&self, payload: usize) -> bool {
        self.end() + record_bytes(payload) as u64 <= self.capacity
    }

    /// Bytes taken, staged ones included.
    pub fn end(&self) -> u64 {
        self.staged_at + self.staged.len() as u64
    }

    /// The segment's size.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The segment's number.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The next record's sequence number.
    pub fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// The file, to write and flush batches to without holding this segment.
    pub fn file(&self) -> Arc<dyn File> {
        Arc::clone(&self.file)
    }

    /// Stages a record, which must [fit](Self::fits); returns its sequence number.
    pub fn push(&mut self, kind: u8, payload: &[&[u8]]) -> u64 {
        debug_assert!(self.fits(payload.iter().map(|p| p.len()).sum()));
        let seq = self.next_seq;
        self.link = encode(
            &mut self.staged,
            self.nonce,
            kind,
            seq,
            self.synced,
            self.link,
            payload,
        );
        self.next_seq += 1;
        seq
    }

    /// True if nothing is staged.
    pub fn is_clean(&self) -> bool {
        self.staged.is_empty()
    }

    /// Takes what is staged, to be written before anything taken later.
    pub fn take(&mut self) -> Batch {
        let bytes = std::mem::take(&mut self.staged);
        let at = self.staged_at;
        self.staged_at += bytes.len() as u64;
        Batch {
            at,
            bytes,
            last_seq: self.next_seq.saturating_sub(1),
        }
    }

    /// Returns a batch's memory for the next one.
    pub fn give_back(&mut self, batch: Batch) {
        let mut bytes = batch.bytes;
        if self.staged.is_empty() && bytes.capacity() > self.staged.capacity() {
            bytes.clear();
            self.staged = bytes;
        }
    }

    /// Notes that every record up to `seq` is durable: later records will testify to it. Only to be
    /// called after a flush that began after those records were written.
    pub fn mark_synced(&mut self, seq: u64) {
        debug_assert!(seq < self.next_seq);
        self.synced = self.synced.max(seq);
    }
}

/// Records on their way to the file.
#[derive(Debug)]
pub struct Batch {
    at: u64,
    bytes: Vec<u8>,
    last_seq: u64,
}

impl Batch {
    /// Hands the records to the operating system, in one write. Durable after the file's next sync.
    pub fn write(&self, file: &dyn File) -> Result<(), IoError> {
        if self.bytes.is_empty() {
            Ok(())
        } else {
            file.write_at(self.at, &self.bytes)
        }
    }

    /// Sequence number of the last record taken so far.
    pub fn last_seq(&self) -> u64 {
        self.last_seq
    }
}
