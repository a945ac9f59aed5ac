//! Bounded little-endian reading: no panic, no allocation before the bytes are known to be there.

use super::PageError;

pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, n: usize, what: &'static str) -> Result<&'a [u8], PageError> {
        match self.0.split_at_checked(n) {
            Some((head, rest)) => {
                self.0 = rest;
                Ok(head)
            }
            None => Err(PageError::Truncated {
                what,
                need: n - self.0.len(),
            }),
        }
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        what: &'static str,
    ) -> Result<[u8; N], PageError> {
        match self.0.split_first_chunk::<N>() {
            Some((head, rest)) => {
                self.0 = rest;
                Ok(*head)
            }
            None => Err(PageError::Truncated {
                what,
                need: N - self.0.len(),
            }),
        }
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, PageError> {
        Ok(self.array::<1>(what)?[0])
    }

    pub(crate) fn u16(&mut self, what: &'static str) -> Result<u16, PageError> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, PageError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, PageError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn end(self) -> Result<(), PageError> {
        match self.0.len() {
            0 => Ok(()),
            extra => Err(PageError::Trailing { extra }),
        }
    }
}
