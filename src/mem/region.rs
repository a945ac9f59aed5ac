use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::mem::MemError;

/// Names a region within this process; never reused, so a stale registration cannot match a new
/// mapping at the same address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u64);

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// One mapping, unmapped when its holder drops it.
struct Mapping {
    ptr: NonNull<u8>,
    mapped: usize,
}

// SAFETY: the mapping is plain memory with no thread affinity; who may read or write it at a time
// is decided by the type that holds the `Mapping`, which exposes it only under borrow rules or leases.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared `&Mapping` gives nothing but the pointer's value.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: u64, prot: ProtFlags, fd: Option<BorrowedFd<'_>>) -> Result<Self, MemError> {
        let page = rustix::param::page_size();
        let mapped = usize::try_from(len)
            .ok()
            .filter(|&n| n > 0 && n <= isize::MAX as usize - page)
            .map(|n| n.next_multiple_of(page))
            .ok_or(MemError::RegionLength { len })?;
        let ptr = match fd {
            // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
            Some(fd) => unsafe {
                rustix::mm::mmap(std::ptr::null_mut(), mapped, prot, MapFlags::SHARED, fd, 0)
            },
            // SAFETY: as above.
            None => unsafe {
                rustix::mm::mmap_anonymous(std::ptr::null_mut(), mapped, prot, MapFlags::PRIVATE)
            },
        }
        .map_err(|e| MemError::os("mmap", e))?;
        let ptr = NonNull::new(ptr.cast::<u8>()).ok_or(MemError::RegionLength { len })?;
        Ok(Self { ptr, mapped })
    }

    /// A hint; a kernel that refuses it serves small pages and nothing breaks.
    fn advise_huge(&self) {
        const HUGE: usize = 2 << 20;
        if self.mapped >= HUGE {
            // SAFETY: the range is our own mapping, and this advice does not change its contents.
            let _ = unsafe {
                rustix::mm::madvise(self.ptr.as_ptr().cast(), self.mapped, Advice::LinuxHugepage)
            };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: we made this mapping and own it; borrows and leases of it hold its owner alive, so
        // nobody can reach it any more. Failure would need a wrong range, which we never form.
        let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.mapped) };
    }
}

/// Owned, zero-filled memory: private to the process, or a sealed memfd that peers may map to read.
pub struct Region {
    map: Mapping,
    len: u64,
    id: RegionId,
    fd: Option<OwnedFd>,
}

impl Region {
    /// Private memory of `len` bytes, advised to use huge pages.
    pub fn anonymous(len: u64) -> Result<Self, MemError> {
        let map = Mapping::new(len, ProtFlags::READ | ProtFlags::WRITE, None)?;
        Ok(Self::finish(map, len, None))
    }

    /// Memory of `len` bytes that another process may map *read-only* when given [`Region::fd`].
    ///
    /// Sealed with `F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL` after our own
    /// mapping is made: it cannot be truncated, and nobody, ourselves included, can map it writable
    /// again. `name` shows up in `/proc/*/maps`; at most 200 bytes of it are used.
    pub fn memfd(name: &str, len: u64) -> Result<Self, MemError> {
        let name: String = name.chars().filter(|&c| c != '\0').take(50).collect();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd =
            rustix::fs::memfd_create(name, flags).map_err(|e| MemError::os("memfd_create", e))?;
        if i64::try_from(len).is_err() {
            return Err(MemError::RegionLength { len });
        }
        rustix::fs::ftruncate(&fd, len).map_err(|e| MemError::os("ftruncate", e))?;
        let map = Mapping::new(len, ProtFlags::READ | ProtFlags::WRITE, Some(fd.as_fd()))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)
            .map_err(|e| MemError::os("fcntl(F_ADD_SEALS)", e))?;
        Ok(Self::finish(map, len, Some(fd)))
    }

    fn finish(map: Mapping, len: u64, fd: Option<OwnedFd>) -> Self {
        map.advise_huge();
        let id = RegionId(NEXT_ID.fetch_add(1, Ordering::Relaxed));
        Self { map, len, id, fd }
    }

    /// Makes every page present now, so that first use pays no page fault.
    pub fn prefault(&mut self) -> Result<(), MemError> {
        // SAFETY: our own mapping, which `&mut self` shows nobody else is using.
        let r = unsafe {
            rustix::mm::madvise(
                self.map.ptr.as_ptr().cast(),
                self.map.mapped,
                Advice::LinuxPopulateWrite,
            )
        };
        match r {
            // Kernels before 5.14 do not know it: touch the pages instead.
            Err(rustix::io::Errno::INVAL) => {
                let page = rustix::param::page_size();
                self.as_mut_slice().iter_mut().step_by(page).for_each(|b| {
                    // SAFETY: `b` is a valid `&mut u8`; volatile only keeps the store from vanishing.
                    unsafe { std::ptr::write_volatile(b, *b) }
                });
                Ok(())
            }
            other => other.map_err(|e| MemError::os("madvise(MADV_POPULATE_WRITE)", e)),
        }
    }

    /// Length, bytes.
    #[allow(clippy::len_without_is_empty)] // a region is never empty
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Its name in this process.
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// The descriptor that a peer may map read-only; `None` for private memory.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(|fd| fd.as_fd())
    }

    /// All bytes, for an owner that has not yet moved the region into a pool.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` bytes are mapped and initialised (zero pages); `&self` excludes `&mut`
        // access by borrow rules, pools never call this once they own the region, and the seals keep
        // other processes from writing.
        unsafe { std::slice::from_raw_parts(self.map.ptr.as_ptr(), self.len as usize) }
    }

    /// All bytes, mutably; as [`Region::as_slice`].
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.map.ptr.as_ptr(), self.len as usize) }
    }

    pub(super) fn ptr(&self) -> *mut u8 {
        self.map.ptr.as_ptr()
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("id", &self.id.0)
            .field("len", &self.len)
            .field("memfd", &self.fd.is_some())
            .finish()
    }
}

/// A few 64-bit words in a memfd of their own, written here by atomic stores and read by peers through
/// [`RegionView::load_u64`]: how an owner tells peers that map its memory that a grant has died.
pub struct SharedWords(Region);

impl SharedWords {
    /// `count` words, all zero.
    pub fn new(name: &str, count: usize) -> Result<Self, MemError> {
        let mut region = Region::memfd(name, count as u64 * 8)?;
        region.prefault()?;
        Ok(Self(region))
    }

    /// Length, bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// What to hand to a peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd().expect("made as a memfd")
    }

    /// Stores a word; peers see every write made before it.
    ///
    /// # Panics
    /// If there is no such word.
    pub fn store(&self, index: usize, value: u64) {
        assert!((index as u64) < self.0.len() / 8, "no word {index}");
        // SAFETY: in range and aligned (the mapping starts at a page). The region is private to this
        // type, which reaches it by atomics only, so no plain reference to these bytes exists.
        let word = unsafe { &*self.0.ptr().add(index * 8).cast::<AtomicU64>() };
        word.store(value, Ordering::SeqCst);
    }
}

/// A read-only mapping of *another process's* memfd region.
///
/// Its owner may write while we look, so its bytes are never exposed as `&[u8]`: they can only be
/// copied out. A copy that raced with a write holds whatever mix the hardware gave; the caller's
/// digest decides whether it was the right one.
pub struct RegionView {
    map: Mapping,
    len: u64,
}

impl RegionView {
    /// Maps `len` bytes of a descriptor received from a peer. Refuses one that could be truncated
    /// under us (no `F_SEAL_SHRINK`) or that is shorter than `len`.
    pub fn map(fd: BorrowedFd<'_>, len: u64) -> Result<Self, MemError> {
        let seals =
            rustix::fs::fcntl_get_seals(fd).map_err(|e| MemError::os("fcntl(F_GET_SEALS)", e))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(MemError::PeerRegion {
                why: "it is not sealed against shrinking",
            });
        }
        let stat = rustix::fs::fstat(fd).map_err(|e| MemError::os("fstat", e))?;
        if u64::try_from(stat.st_size).unwrap_or(0) < len {
            return Err(MemError::PeerRegion {
                why: "it is shorter than announced",
            });
        }
        let map = Mapping::new(len, ProtFlags::READ, Some(fd))?;
        map.advise_huge();
        Ok(Self { map, len })
    }

    /// Length, bytes.
    #[allow(clippy::len_without_is_empty)] // a view is never empty
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Copies `out.len()` bytes from `offset`; refuses a range that leaves the view.
    pub fn copy_to(&self, offset: u64, out: &mut [u8]) -> Result<(), MemError> {
        let outside = MemError::OutsideLease {
            offset,
            len: out.len() as u64,
        };
        let end = offset.checked_add(out.len() as u64).ok_or(outside)?;
        if end > self.len {
            return Err(outside);
        }
        // SAFETY: the source range lies inside our live mapping, which the shrink seal keeps backed;
        // `out` is exclusive and is another mapping or the heap, so they do not overlap. No reference
        // to the peer's bytes is formed, so its concurrent writes cannot break an aliasing rule.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.map.ptr.as_ptr().add(offset as usize),
                out.as_mut_ptr(),
                out.len(),
            );
        }
        Ok(())
    }

    /// Reads one aligned 64-bit word that the owner writes atomically.
    pub fn load_u64(&self, offset: u64) -> Result<u64, MemError> {
        let outside = MemError::OutsideLease { offset, len: 8 };
        if !offset.is_multiple_of(8) || offset.checked_add(8).is_none_or(|end| end > self.len) {
            return Err(outside);
        }
        // SAFETY: in range and aligned (the mapping starts at a page); an atomic load of memory that
        // the owner writes by atomic stores, and mapped memory is valid for atomics of 8 bytes. The
        // page is read-only here, and a plain load instruction is all a 64-bit `load` needs.
        let word = unsafe {
            &*self
                .map
                .ptr
                .as_ptr()
                .add(offset as usize)
                .cast::<AtomicU64>()
        };
        Ok(word.load(Ordering::Acquire))
    }
}

impl fmt::Debug for RegionView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionView")
            .field("len", &self.len)
            .finish()
    }
}
