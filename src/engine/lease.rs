//! Leases as the access that hashing and copying ask for: the one place where memory meets pages.

use crate::mem::{ReadLease, WriteLease};
use crate::page::{Resident, ResidentMut};

/// Nobody writes the leased blocks while a slice lives, which is what [`Resident`] asks for.
impl Resident for ReadLease {
    fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]> {
        self.try_bytes(offset, len).ok()
    }
}

impl Resident for WriteLease {
    fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]> {
        self.try_bytes(offset, len).ok()
    }
}

impl ResidentMut for WriteLease {
    fn bytes_mut(&mut self, offset: u64, len: usize) -> Option<&mut [u8]> {
        self.try_bytes_mut(offset, len).ok()
    }
}
