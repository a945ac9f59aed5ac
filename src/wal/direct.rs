//! Small writes straight to the device, past the page cache.
//!
//! A change of the metadata store is a few hundred bytes and is flushed at once, with somebody
//! waiting. Through the page cache that is a copy, a walk over the file's dirty pages and a write,
//! most of it in code and data that no cache holds any more when the change comes: together with
//! its flush a quarter more than a write of the whole block past the cache
//! (`moonlive bench store` measures both).
//!
//! Invariants: `block` is what the file holds at `at`, so a block is written whole with what it held
//! before; nobody else writes the file. What the page cache may still have of the file the kernel
//! keeps in step: it writes back before, and drops after, each such write.

use super::error::IoError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// Bytes of a block: a multiple of any device's own.
pub(super) const BLOCK: usize = 4096;
/// Longer writes go through the page cache: they are not what anybody waits for.
const LONGEST: usize = 2 * BLOCK;

#[repr(C, align(4096))]
struct Block([u8; BLOCK]);

/// A file's way past the page cache.
pub(super) struct Direct {
    fd: OwnedFd,
    block: Box<Block>,
    /// Offset of `block` in the file, once there is one.
    at: Option<u64>,
    /// From here on the file holds zeros.
    end: u64,
}

impl Direct {
    /// `None` where the file system has no such way. `end`: from there on the file holds zeros.
    pub(super) fn open(dir: impl AsFd, name: &str, end: u64) -> Option<Self> {
        let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(dir, name, flags, Mode::empty()).ok()?;
        Some(Self {
            fd,
            block: Box::new(Block([0; BLOCK])),
            at: None,
            end,
        })
    }

    /// Writes `bytes` at `offset`; `Ok(false)`: not by this way, nothing was written by it. `read`
    /// reads a block from its offset in the file and says how much of it there is.
    pub(super) fn write(
        &mut self,
        offset: u64,
        bytes: &[u8],
        read: impl Fn(u64, &mut [u8]) -> Result<usize, IoError>,
        fail: impl Fn(Errno) -> IoError,
    ) -> Result<bool, IoError> {
        let end = offset + bytes.len() as u64;
        let (known, mut rest, mut offset) = (self.end, bytes, offset);
        self.end = self.end.max(end);
        if bytes.len() > LONGEST {
            self.at = None;
            return Ok(false);
        }
        while !rest.is_empty() {
            let start = offset / BLOCK as u64 * BLOCK as u64;
            if self.at != Some(start) {
                self.at = None;
                let there = match start >= known {
                    true => 0,
                    false => read(start, &mut self.block.0)?,
                };
                self.block.0[there..].fill(0);
            }
            // Until the write has succeeded nobody may build on the block.
            self.at = None;
            let inside = (offset - start) as usize;
            let n = rest.len().min(BLOCK - inside);
            self.block.0[inside..inside + n].copy_from_slice(&rest[..n]);
            match self.put(start) {
                Ok(()) => {}
                // A device with larger blocks, or a file system that takes the flag and no more.
                Err(Errno::INVAL) if rest.len() == bytes.len() => return Ok(false),
                Err(e) => return Err(fail(e)),
            }
            self.at = Some(start);
            offset += n as u64;
            rest = &rest[n..];
        }
        Ok(true)
    }

    fn put(&self, at: u64) -> Result<(), Errno> {
        loop {
            match rustix::io::pwrite(&self.fd, &self.block.0, at) {
                Ok(BLOCK) => return Ok(()),
                // Not cut short by anything but a full device.
                Ok(_) => return Err(Errno::NOSPC),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
    }
}
