//! The codec's alphabet: how each kind of item is written and read, once, for both directions.
//!
//! Canonical by construction: each [`Item`] has one spelling, and its reader accepts only that one.
//! A reader never allocates from a claimed count: memory grows with bytes that are really there.

use super::error::{CodecError, Field};
use super::kinds::{OutputKind, PenaltySemantics, RngKind};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

/// Longest encoding read or written, in bytes.
pub const MAX_ENCODING_BYTES: usize = 16 << 20;
/// Longest name or parser id, in bytes.
pub const MAX_NAME_BYTES: usize = 256;
/// Longest blob, in bytes.
pub const MAX_BLOB_BYTES: usize = 1 << 20;
/// Most items of a vector, set or map.
pub const MAX_ITEMS: usize = 1 << 20;

/// Bytes of bounded length.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes<const MAX: usize>(Vec<u8>);

/// A name or parser id.
pub type Name = Bytes<MAX_NAME_BYTES>;
/// A blob: text, a grammar's source, opaque state.
pub type Blob = Bytes<MAX_BLOB_BYTES>;
/// The first bytes of a UTF-8 sequence whose end has not been decoded yet.
pub type Utf8Head = Bytes<3>;

/// Bytes past their bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes where at most {max} are accepted")]
pub struct TooLong {
    /// Length offered.
    pub len: usize,
    /// Largest accepted.
    pub max: usize,
}

impl<const MAX: usize> Bytes<MAX> {
    /// Wraps bytes that are not too long.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, TooLong> {
        let bytes = bytes.into();
        if bytes.len() > MAX {
            return Err(TooLong {
                len: bytes.len(),
                max: MAX,
            });
        }
        Ok(Self(bytes))
    }

    /// The bytes themselves.
    pub fn into_vec(self) -> Vec<u8> {
        self.0
    }
}

impl<const MAX: usize> Deref for Bytes<MAX> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Writes items; knows where it is, for errors.
pub(super) struct Writer {
    out: Vec<u8>,
    pub(super) field: Field,
    pub(super) what: &'static str,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self {
            out: Vec::with_capacity(1024),
            field: Field(0),
            what: "",
        }
    }

    /// One numbered field: its length, then its items.
    pub(super) fn field<T: Item>(
        &mut self,
        number: u8,
        what: &'static str,
        item: &T,
    ) -> Result<(), CodecError> {
        self.field = Field(number);
        self.what = what;
        let at = self.out.len();
        self.out.extend_from_slice(&[0; 4]);
        item.put(self)?;
        let len = self.out.len() - at - 4;
        // `raw` keeps the total near 16 MiB, so this is exact.
        self.out[at..at + 4].copy_from_slice(&(len as u32).to_le_bytes());
        Ok(())
    }

    pub(super) fn finish(self) -> Result<Vec<u8>, CodecError> {
        match self.out.len() {
            len if len > MAX_ENCODING_BYTES => Err(CodecError::TooLarge {
                len,
                max: MAX_ENCODING_BYTES,
            }),
            _ => Ok(self.out),
        }
    }

    fn raw(&mut self, bytes: &[u8]) -> Result<(), CodecError> {
        let len = self.out.len() + bytes.len();
        if len > MAX_ENCODING_BYTES {
            return Err(CodecError::TooLarge {
                len,
                max: MAX_ENCODING_BYTES,
            });
        }
        self.out.extend_from_slice(bytes);
        Ok(())
    }

    fn count(&mut self, len: usize) -> Result<(), CodecError> {
        if len > MAX_ITEMS {
            return Err(CodecError::TooLong {
                field: self.field,
                what: self.what,
                len: len as u64,
                max: MAX_ITEMS as u64,
            });
        }
        self.raw(&(len as u32).to_le_bytes())
    }
}

/// Reads items; knows where it is, for errors.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
    pub(super) field: Field,
    pub(super) what: &'static str,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Result<Self, CodecError> {
        if bytes.len() > MAX_ENCODING_BYTES {
            return Err(CodecError::TooLarge {
                len: bytes.len(),
                max: MAX_ENCODING_BYTES,
            });
        }
        Ok(Self {
            rest: bytes,
            field: Field(0),
            what: "",
        })
    }

    /// One numbered field, which must use its length up.
    pub(super) fn field<T: Item>(
        &mut self,
        number: u8,
        what: &'static str,
    ) -> Result<T, CodecError> {
        self.field = Field(number);
        self.what = what;
        let len = u32::take(self)? as usize;
        let body = self.bytes(len)?;
        let mut inner = Reader {
            rest: body,
            field: self.field,
            what,
        };
        let value = T::take(&mut inner)?;
        match inner.rest.len() {
            0 => Ok(value),
            extra => Err(CodecError::FieldTrailing {
                field: self.field,
                extra,
            }),
        }
    }

    pub(super) fn finish(self) -> Result<(), CodecError> {
        match self.rest.len() {
            0 => Ok(()),
            extra => Err(CodecError::Trailing { extra }),
        }
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8], CodecError> {
        let (head, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or(CodecError::Truncated(self.field))?;
        self.rest = rest;
        Ok(head)
    }

    fn count(&mut self) -> Result<usize, CodecError> {
        let len = u32::take(self)? as usize;
        if len > MAX_ITEMS {
            return Err(CodecError::TooLong {
                field: self.field,
                what: self.what,
                len: len as u64,
                max: MAX_ITEMS as u64,
            });
        }
        Ok(len)
    }

    fn bad_enum(&self, value: impl Into<u32>) -> CodecError {
        CodecError::BadEnum {
            field: self.field,
            what: self.what,
            value: value.into(),
        }
    }
}

/// Something with one canonical spelling.
pub(super) trait Item: Sized {
    fn put(&self, w: &mut Writer) -> Result<(), CodecError>;
    fn take(r: &mut Reader<'_>) -> Result<Self, CodecError>;
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Item for $t {
            fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
                w.raw(&self.to_le_bytes())
            }
            fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
                <[u8; size_of::<$t>()]>::take(r).map(<$t>::from_le_bytes)
            }
        }
    )*};
}
integers!(u16, u32, u64, i32, i64);

impl<const N: usize> Item for [u8; N] {
    fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
        w.raw(self)
    }
    fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
        let mut out = [0; N];
        out.copy_from_slice(r.bytes(N)?);
        Ok(out)
    }
}

impl Item for bool {
    fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
        w.raw(&[u8::from(*self)])
    }
    fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
        match <[u8; 1]>::take(r)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(r.bad_enum(other)),
        }
    }
}

impl Item for f32 {
    fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
        if self.is_nan() {
            return Err(CodecError::Nan {
                field: w.field,
                what: w.what,
            });
        }
        // -0 and +0 compute alike here and must not give two digests.
        let canonical = if *self == 0.0 { 0.0 } else { *self };
        canonical.to_bits().put(w)
    }
    fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
        let value = Self::from_bits(u32::take(r)?);
        let (field, what) = (r.field, r.what);
        if value.is_nan() {
            Err(CodecError::Nan { field, what })
        } else if value == 0.0 && value.is_sign_negative() {
            Err(CodecError::NegativeZero { field, what })
        } else {
            Ok(value)
        }
    }
}

impl<const MAX: usize> Item for Bytes<MAX> {
    fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
        // At most MAX, which `new` saw to.
        (self.0.len() as u32).put(w)?;
        w.raw(&self.0)
    }
    fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
        let len = u32::take(r)?;
        if len as usize > MAX {
            return Err(CodecError::TooLong {
                field: r.field,
                what: r.what,
                len: len.into(),
                max: MAX as u64,
            });
        }
        Ok(Self(r.bytes(len as usize)?.to_vec()))
    }
}

impl<T: Item> Item for Option<T> {
    fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
        self.is_some().put(w)?;
        self.as_ref().map_or(Ok(()), |v| v.put(w))
    }
    fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
        bool::take(r)?.then(|| T::take(r)).transpose()
    }
}

impl<T: Item> Item for Vec<T> {
    fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
        w.count(self.len())?;
        self.iter().try_for_each(|v| v.put(w))
    }
    fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
        let what = r.what;
        let mut out = Self::new();
        for _ in 0..r.count()? {
            r.what = what;
            out.push(T::take(r)?);
        }
        Ok(out)
    }
}

impl Item for BTreeSet<u32> {
    fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
        w.count(self.len())?;
        self.iter().try_for_each(|v| v.put(w))
    }
    fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
        let mut out = Self::new();
        for _ in 0..r.count()? {
            let key = u32::take(r)?;
            if out.last().is_some_and(|last| *last >= key) {
                return Err(CodecError::NotAscending {
                    field: r.field,
                    what: r.what,
                });
            }
            out.insert(key);
        }
        Ok(out)
    }
}

impl Item for BTreeMap<u32, f32> {
    fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
        w.count(self.len())?;
        self.iter().try_for_each(|(k, v)| {
            k.put(w)?;
            v.put(w)
        })
    }
    fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
        let mut out = Self::new();
        for _ in 0..r.count()? {
            let key = u32::take(r)?;
            if out.last_key_value().is_some_and(|(last, _)| *last >= key) {
                return Err(CodecError::NotAscending {
                    field: r.field,
                    what: r.what,
                });
            }
            out.insert(key, f32::take(r)?);
        }
        Ok(out)
    }
}

macro_rules! enums {
    ($($t:ty as $wire:ty),*) => {$(
        impl Item for $t {
            fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
                w.raw(&(*self as $wire).to_le_bytes())
            }
            fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
                let value = <$wire>::from_le_bytes(Item::take(r)?);
                Self::ALL
                    .into_iter()
                    .find(|known| *known as $wire == value)
                    .ok_or_else(|| r.bad_enum(value))
            }
        }
    )*};
}
enums!(RngKind as u16, PenaltySemantics as u16, OutputKind as u8);

/// Makes a struct an [`Item`]: its items in the order listed, in both directions.
macro_rules! items {
    ($($t:ident { $($item:ident),* $(,)? })*) => {$(
        impl Item for $t {
            fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
                $( w.what = stringify!($item); self.$item.put(w)?; )*
                Ok(())
            }
            fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
                $( r.what = stringify!($item); let $item = Item::take(r)?; )*
                Ok(Self { $($item),* })
            }
        }
    )*};
}
pub(super) use items;
