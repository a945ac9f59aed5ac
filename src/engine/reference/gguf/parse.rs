//! The GGUF container: metadata and tensor directory, read without copying and without trust.
//!
//! Layout (little-endian): `GGUF`, version u32, tensor count u64, metadata count u64; metadata as
//! key string, type u32, value; tensors as name, dimension count u32, dimensions u64, type u32,
//! offset u64; padding to `general.alignment`; tensor data. A string is a u64 length and bytes.
//! Source: the GGUF specification in the `ggml` project's docs.
//!
//! Every count is checked against what the file can still hold before anything is allocated, so
//! memory stays within a small multiple of the file's length.

use super::GgufError;
use std::collections::BTreeMap;
use std::ops::Range;

/// Most metadata entries, and most tensors.
pub const MAX_ENTRIES: u64 = 1 << 16;
/// Longest key or tensor name, in bytes.
pub const MAX_NAME: u64 = 1 << 10;

/// A metadata value that borrows from the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// Any unsigned integer.
    Uint(u64),
    /// Any signed integer.
    Int(i64),
    /// f32 or f64.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// Bytes of a string; UTF-8 by convention, unchecked.
    Str(&'a [u8]),
    /// An array of one of the above.
    Array(Array<'a>),
}

/// An array of scalars or strings, walked on demand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    tag: u32,
    count: u64,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Elements.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// No elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The elements in order. They were all walked at parse time.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let tag = self.tag;
        let mut r = Reader {
            bytes: self.bytes,
            at: 0,
        };
        (0..self.count).map_while(move |_| r.value(tag).ok())
    }
}

/// Encodings of weights that can be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorType {
    /// 4 bytes a weight.
    F32,
    /// IEEE half.
    F16,
    /// Brain float.
    Bf16,
    /// 32 weights in 18 bytes.
    Q4_0,
    /// 32 weights in 20 bytes.
    Q4_1,
    /// 32 weights in 34 bytes.
    Q8_0,
}

impl TensorType {
    fn from_tag(tag: u32) -> Option<Self> {
        Some(match tag {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    /// Weights and bytes of one block.
    pub fn block(self) -> (u64, u64) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q8_0 => (32, 34),
        }
    }
}

/// Where a tensor lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Encoding.
    pub kind: TensorType,
    /// Dimensions, fastest first: a matrix is `[inputs, outputs]`.
    pub dims: Vec<u64>,
    /// Bytes of the file that hold it.
    pub range: Range<usize>,
}

/// A parsed file.
#[derive(Debug)]
pub struct Gguf<'a> {
    /// The whole file.
    pub file: &'a [u8],
    /// Metadata by key.
    pub meta: BTreeMap<&'a str, Value<'a>>,
    /// Tensors by name.
    pub tensors: BTreeMap<&'a str, TensorInfo>,
}

impl<'a> Gguf<'a> {
    /// Reads the directory of a file. Tensor data are located, not looked at.
    pub fn parse(file: &'a [u8]) -> Result<Self, GgufError> {
        let mut r = Reader { bytes: file, at: 0 };
        if r.take("the magic", 4)? != b"GGUF" {
            return Err(GgufError::Magic);
        }
        let version = r.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version(version));
        }
        let tensor_count = r.count("the number of tensors", MAX_ENTRIES)?;
        let meta_count = r.count("the number of metadata entries", MAX_ENTRIES)?;

        let mut meta = BTreeMap::new();
        for _ in 0..meta_count {
            let key = r.name("a metadata key")?;
            let tag = r.u32("a metadata type")?;
            let value = r.any(tag)?;
            if meta.insert(key, value).is_some() {
                return Err(GgufError::Duplicate(key.to_owned()));
            }
        }
        let alignment = match meta.get("general.alignment") {
            None => 32,
            Some(Value::Uint(a)) if a.is_power_of_two() && *a <= 1 << 16 => *a,
            Some(Value::Uint(a)) => return Err(GgufError::Alignment(*a)),
            Some(_) => return Err(GgufError::Alignment(0)),
        };

        let mut directory = Vec::new();
        for _ in 0..tensor_count {
            directory.push(r.tensor()?);
        }
        let data = (r.at as u64).next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for entry in directory {
            let name = entry.name;
            let info = entry.place(data, alignment, file.len() as u64)?;
            if tensors.insert(name, info).is_some() {
                return Err(GgufError::Duplicate(name.to_owned()));
            }
        }
        Ok(Self {
            file,
            meta,
            tensors,
        })
    }

    /// Bytes of a tensor of this file.
    pub fn data(&self, info: &TensorInfo) -> &'a [u8] {
        &self.file[info.range.clone()]
    }
}

/// A tensor as the directory names it.
struct Entry<'a> {
    name: &'a str,
    kind: TensorType,
    dims: Vec<u64>,
    offset: u64,
}

impl Entry<'_> {
    fn place(self, data: u64, alignment: u64, file_len: u64) -> Result<TensorInfo, GgufError> {
        let (weights, bytes) = self.kind.block();
        let length = self
            .dims
            .iter()
            .try_fold(1u64, |n, d| n.checked_mul(*d))
            .filter(|n| *n > 0 && self.dims[0].is_multiple_of(weights))
            .and_then(|n| (n / weights).checked_mul(bytes));
        let Some(length) = length else {
            return Err(GgufError::Dims {
                name: self.name.to_owned(),
                dims: self.dims,
            });
        };
        let start = data.checked_add(self.offset);
        let end = start.and_then(|s| s.checked_add(length));
        match (start, end) {
            (Some(start), Some(end))
                if self.offset.is_multiple_of(alignment) && end <= file_len =>
            {
                Ok(TensorInfo {
                    kind: self.kind,
                    dims: self.dims,
                    range: start as usize..end as usize,
                })
            }
            _ => Err(GgufError::TensorPlace {
                name: self.name.to_owned(),
                offset: self.offset,
                bytes: length,
            }),
        }
    }
}

const TAG_STRING: u32 = 8;
const TAG_ARRAY: u32 = 9;

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, what: &'static str, n: u64) -> Result<&'a [u8], GgufError> {
        let rest = &self.bytes[self.at..];
        match usize::try_from(n).ok().and_then(|n| rest.get(..n)) {
            Some(part) => {
                self.at += part.len();
                Ok(part)
            }
            None => Err(GgufError::Truncated {
                what,
                at: self.at as u64,
                len: self.bytes.len() as u64,
            }),
        }
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(what, N as u64)?);
        Ok(out)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn count(&mut self, what: &'static str, max: u64) -> Result<u64, GgufError> {
        let got = self.u64(what)?;
        if got > max {
            return Err(GgufError::TooLarge { what, got, max });
        }
        Ok(got)
    }

    fn string(&mut self) -> Result<&'a [u8], GgufError> {
        let n = self.u64("the length of a string")?;
        self.take("a string", n)
    }

    fn name(&mut self, what: &'static str) -> Result<&'a str, GgufError> {
        let n = self.count(what, MAX_NAME)?;
        let at = self.at as u64;
        std::str::from_utf8(self.take(what, n)?).map_err(|_| GgufError::Name(at))
    }

    fn any(&mut self, tag: u32) -> Result<Value<'a>, GgufError> {
        if tag != TAG_ARRAY {
            return self.value(tag);
        }
        let tag = self.u32("the type of an array")?;
        if tag == TAG_ARRAY {
            return Err(GgufError::ArrayType(tag));
        }
        let count = self.u64("the length of an array")?;
        // The smallest element has one byte: a longer array cannot be in this file.
        let left = (self.bytes.len() - self.at) as u64;
        if count > left {
            return Err(GgufError::TooLarge {
                what: "the length of an array",
                got: count,
                max: left,
            });
        }
        let start = self.at;
        for _ in 0..count {
            self.value(tag)?;
        }
        Ok(Value::Array(Array {
            tag,
            count,
            bytes: &self.bytes[start..self.at],
        }))
    }

    fn value(&mut self, tag: u32) -> Result<Value<'a>, GgufError> {
        let what = "a metadata value";
        Ok(match tag {
            0 => Value::Uint(u8::from_le_bytes(self.array(what)?).into()),
            1 => Value::Int(i8::from_le_bytes(self.array(what)?).into()),
            2 => Value::Uint(u16::from_le_bytes(self.array(what)?).into()),
            3 => Value::Int(i16::from_le_bytes(self.array(what)?).into()),
            4 => Value::Uint(self.u32(what)?.into()),
            5 => Value::Int(i32::from_le_bytes(self.array(what)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(what)?).into()),
            7 => match self.array::<1>(what)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(GgufError::Bool(other)),
            },
            TAG_STRING => Value::Str(self.string()?),
            10 => Value::Uint(self.u64(what)?),
            11 => Value::Int(i64::from_le_bytes(self.array(what)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            other => return Err(GgufError::ValueType(other)),
        })
    }

    fn tensor(&mut self) -> Result<Entry<'a>, GgufError> {
        let name = self.name("a tensor name")?;
        let n = self.u32("the number of dimensions")?;
        if !(1..=4).contains(&n) {
            return Err(GgufError::TooLarge {
                what: "the number of dimensions",
                got: n.into(),
                max: 4,
            });
        }
        let mut dims = Vec::with_capacity(n as usize);
        for _ in 0..n {
            dims.push(self.u64("a dimension")?);
        }
        let tag = self.u32("a tensor type")?;
        let kind = TensorType::from_tag(tag).ok_or_else(|| GgufError::TensorType {
            name: name.to_owned(),
            tag,
        })?;
        let offset = self.u64("a tensor offset")?;
        Ok(Entry {
            name,
            kind,
            dims,
            offset,
        })
    }
}
