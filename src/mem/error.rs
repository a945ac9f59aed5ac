use crate::id::ErrorKind;
use crate::mem::Why;

/// Why memory could not be mapped, allocated or leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemError {
    /// The system refused a call; `errno` is its number.
    #[error("{call} failed with errno {errno}{}", remedy(*errno))]
    System {
        /// The call that failed.
        call: &'static str,
        /// Its errno.
        errno: i32,
    },
    /// A region must hold at least one byte and at most `isize::MAX`.
    #[error("a region of {len} bytes cannot be mapped")]
    RegionLength {
        /// The length asked for, bytes.
        len: u64,
    },
    /// A descriptor received from a peer does not back what the peer promised.
    #[error("refused to map a peer's region: {why}")]
    PeerRegion {
        /// What is wrong with it.
        why: &'static str,
    },
    /// An extent leaves its region, is empty, or overlaps another one.
    #[error("extent [{offset}, +{len}) of block {block} {why}")]
    Extent {
        /// The block it was given for.
        block: u32,
        /// Offset in the region, bytes.
        offset: u64,
        /// Length, bytes.
        len: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Fewer free blocks than asked for; free some or wait.
    #[error("{wanted} blocks wanted, {free} free: release blocks or enlarge the pool")]
    Exhausted {
        /// Blocks asked for.
        wanted: usize,
        /// Blocks free at that moment.
        free: usize,
    },
    /// No block has this number.
    #[error("block {block} does not exist: the pool has {blocks}")]
    NoSuchBlock {
        /// The number given.
        block: u32,
        /// Blocks in the pool.
        blocks: u32,
    },
    /// The block is free: nobody owns what is in it.
    #[error("block {block} is free; allocate it before use")]
    NotAllocated {
        /// The block.
        block: u32,
    },
    /// The block is taken out of service for ever.
    #[error("block {block} is quarantined ({why})")]
    Quarantined {
        /// The block.
        block: u32,
        /// Why it was taken out.
        why: Why,
    },
    /// A lease that excludes this one is live, or a writer waits for the block.
    #[error("block {block} is leased to another {by}; retry when that lease ends")]
    Busy {
        /// The first block in the way.
        block: u32,
        /// `reader`, `writer` or `waiting writer`.
        by: &'static str,
    },
    /// A range does not lie inside the blocks of this lease.
    #[error("range [{offset}, +{len}) does not lie inside the leased blocks")]
    OutsideLease {
        /// Offset in the region, bytes.
        offset: u64,
        /// Length, bytes.
        len: u64,
    },
}

fn remedy(errno: i32) -> &'static str {
    match errno {
        libc::ENOMEM => " (out of memory: lower the pool size or raise the limit)",
        libc::EMFILE | libc::ENFILE => " (too many open files: raise `ulimit -n`)",
        libc::EPERM => " (not permitted)",
        _ => "",
    }
}

impl MemError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::System { errno, .. } if *errno == libc::ENOMEM => ErrorKind::Retryable,
            Self::System { .. } => ErrorKind::Unsupported,
            Self::Exhausted { .. } | Self::Busy { .. } => ErrorKind::Retryable,
            Self::RegionLength { .. }
            | Self::PeerRegion { .. }
            | Self::Extent { .. }
            | Self::NoSuchBlock { .. }
            | Self::NotAllocated { .. }
            | Self::Quarantined { .. }
            | Self::OutsideLease { .. } => ErrorKind::Caller,
        }
    }

    pub(super) fn os(call: &'static str, errno: rustix::io::Errno) -> Self {
        Self::System {
            call,
            errno: errno.raw_os_error(),
        }
    }
}
