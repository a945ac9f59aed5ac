//! Bounded little-endian codec, shared by the route record and the migration messages.
//!
//! A decoder never allocates more than its input can justify: a count is checked against the bytes
//! that are left before anything is reserved for it.

use super::Revision;
use super::record::*;
use crate::id::{
    Incarnation, MigrationEpoch, OwnerEpoch, RequestId, RouteGeneration, WorkerId, WorkerRef,
};

/// Why bytes are not what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The input ends inside a field.
    #[error("input ends inside {0}")]
    Truncated(&'static str),
    /// Bytes follow the last field.
    #[error("{0} bytes follow the last field")]
    Trailing(usize),
    /// The magic or version is not ours.
    #[error("unknown format or version of {0}")]
    Version(&'static str),
    /// An enum tag, flag or length is outside its range.
    #[error("{0} is out of range")]
    Range(&'static str),
    /// A worker name is not 1 to 64 plain characters.
    #[error("malformed worker name")]
    Name,
}

/// Appends fields to a buffer.
#[derive(Debug, Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    /// One byte.
    pub fn u8(&mut self, v: u8) {
        self.0.push(v);
    }
    /// Two bytes.
    pub fn u16(&mut self, v: u16) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    /// Four bytes.
    pub fn u32(&mut self, v: u32) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    /// Eight bytes.
    pub fn u64(&mut self, v: u64) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    /// Raw bytes without a length.
    pub fn raw(&mut self, v: &[u8]) {
        self.0.extend_from_slice(v);
    }
    /// Bytes behind their `u32` length.
    pub fn bytes(&mut self, v: &[u8]) {
        self.u32(v.len() as u32);
        self.raw(v);
    }
    /// A worker's name and incarnation.
    pub fn worker(&mut self, w: &WorkerRef) {
        self.u8(w.id.as_str().len() as u8);
        self.raw(w.id.as_str().as_bytes());
        self.u64(w.incarnation.0);
    }
}

/// Reads fields from a slice.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }
    /// Bytes not read yet.
    pub fn left(&self) -> usize {
        self.0.len()
    }
    /// The next `n` bytes.
    pub fn raw(&mut self, n: usize, what: &'static str) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self
            .0
            .split_at_checked(n)
            .ok_or(DecodeError::Truncated(what))?;
        self.0 = rest;
        Ok(head)
    }
    /// A fixed-size array.
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], DecodeError> {
        let (head, rest) = self
            .0
            .split_first_chunk()
            .ok_or(DecodeError::Truncated(what))?;
        self.0 = rest;
        Ok(*head)
    }
    /// One byte.
    pub fn u8(&mut self, what: &'static str) -> Result<u8, DecodeError> {
        Ok(self.array::<1>(what)?[0])
    }
    /// Two bytes.
    pub fn u16(&mut self, what: &'static str) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }
    /// Four bytes.
    pub fn u32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }
    /// Eight bytes.
    pub fn u64(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }
    /// A flag: exactly 0 or 1.
    pub fn flag(&mut self, what: &'static str) -> Result<bool, DecodeError> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(DecodeError::Range(what)),
        }
    }
    /// Bytes behind a `u32` length of at most `max`.
    pub fn bytes(&mut self, max: usize, what: &'static str) -> Result<&'a [u8], DecodeError> {
        let n = self.u32(what)? as usize;
        if n > max {
            return Err(DecodeError::Range(what));
        }
        self.raw(n, what)
    }
    /// A `u32` count of items of at least `min_size` bytes each, at most `max` of them; refused
    /// before anything is reserved for it if the input cannot hold that many.
    pub fn count(
        &mut self,
        max: usize,
        min_size: usize,
        what: &'static str,
    ) -> Result<usize, DecodeError> {
        let n = self.u32(what)? as usize;
        if n > max {
            return Err(DecodeError::Range(what));
        }
        if n.saturating_mul(min_size) > self.left() {
            return Err(DecodeError::Truncated(what));
        }
        Ok(n)
    }
    /// A worker's name and incarnation.
    pub fn worker(&mut self, what: &'static str) -> Result<WorkerRef, DecodeError> {
        let n = self.u8(what)? as usize;
        let name = std::str::from_utf8(self.raw(n, what)?).map_err(|_| DecodeError::Name)?;
        let id = WorkerId::new(name).map_err(|_| DecodeError::Name)?;
        Ok(WorkerRef {
            id,
            incarnation: Incarnation(self.u64(what)?),
        })
    }
    /// Refuses bytes after the last field.
    pub fn end(self) -> Result<(), DecodeError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(DecodeError::Trailing(self.0.len()))
        }
    }
}

const MAGIC: [u8; 4] = *b"MLR1";

/// Longest encoding of a route record, in bytes.
pub const MAX_RECORD_BYTES: usize = 1024;

impl Intent {
    /// Appends this intent.
    pub fn encode(&self, w: &mut Writer) {
        w.u64(self.migration_epoch.0);
        w.u64(self.generation.0);
        w.u64(self.owner_epoch.0);
        w.u64(self.driver);
        w.worker(&self.src);
        w.worker(&self.dst);
    }

    /// Reads an intent.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            migration_epoch: MigrationEpoch(r.u64("intent.migration_epoch")?),
            generation: RouteGeneration(r.u64("intent.generation")?),
            owner_epoch: OwnerEpoch(r.u64("intent.owner_epoch")?),
            driver: r.u64("intent.driver")?,
            src: r.worker("intent.src")?,
            dst: r.worker("intent.dst")?,
        })
    }
}

impl ControlSeal {
    /// Appends this digest.
    pub fn encode(&self, w: &mut Writer) {
        w.raw(&self.hash);
        w.u64(self.offset);
        w.u64(self.owner_epoch.0);
    }

    /// Reads a control digest.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            hash: r.array("control.hash")?,
            offset: r.u64("control.offset")?,
            owner_epoch: OwnerEpoch(r.u64("control.owner_epoch")?),
        })
    }
}

impl FenceCertificate {
    /// Appends this certificate.
    pub fn encode(&self, w: &mut Writer) {
        w.raw(&self.request.0);
        w.u64(self.migration_epoch.0);
        w.u64(self.owner_epoch.0);
        w.worker(&self.src);
        w.u64(self.seal);
        w.u64(self.kv_len);
        w.raw(&self.set_digest);
        self.control.encode(w);
    }

    /// Reads a certificate.
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            request: RequestId(r.array("certificate.request")?),
            migration_epoch: MigrationEpoch(r.u64("certificate.migration_epoch")?),
            owner_epoch: OwnerEpoch(r.u64("certificate.owner_epoch")?),
            src: r.worker("certificate.src")?,
            seal: r.u64("certificate.seal")?,
            kv_len: r.u64("certificate.kv_len")?,
            set_digest: r.array("certificate.set_digest")?,
            control: ControlSeal::decode(r)?,
        })
    }
}

impl Cause {
    /// All causes, in the order of their wire tags.
    pub const ALL: [Cause; 15] = [
        Cause::Cancelled,
        Cause::Timeout,
        Cause::SourceRefused,
        Cause::DestinationRefused,
        Cause::NoSpace,
        Cause::PageMismatch,
        Cause::SetMismatch,
        Cause::ControlMismatch,
        Cause::SealDirty,
        Cause::RequestEnded,
        Cause::TransportFailed,
        Cause::ProfileMismatch,
        Cause::PeerLost,
        Cause::Draining,
        Cause::Engine,
    ];

    /// The wire tag.
    pub fn tag(self) -> u8 {
        Self::ALL.iter().position(|c| *c == self).unwrap_or(0) as u8
    }

    /// The cause of a wire tag.
    pub fn from_tag(tag: u8) -> Result<Self, DecodeError> {
        Self::ALL
            .get(tag as usize)
            .copied()
            .ok_or(DecodeError::Range("cause"))
    }
}

impl RouteRecord {
    /// The bytes kept in the store; at most [`MAX_RECORD_BYTES`].
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::with_capacity(256));
        w.raw(&MAGIC);
        w.raw(&self.request.0);
        w.u64(self.generation.0);
        w.worker(&self.owner);
        w.u64(self.owner_epoch.0);
        match self.origin {
            Origin::Admitted => w.u8(0),
            Origin::Migrated(m) => {
                w.u8(1);
                w.u64(m.0);
            }
            Origin::Recovered => w.u8(2),
        }
        w.u8(match self.phase {
            RoutePhase::Serving => 0,
            RoutePhase::Recovering => 1,
            RoutePhase::Finished => 2,
        });
        w.u64(self.migration_epoch.0);
        w.u8(self.intent.is_some().into());
        if let Some(intent) = &self.intent {
            intent.encode(&mut w);
        }
        w.u8(self.last.is_some().into());
        if let Some(last) = &self.last {
            w.u64(last.migration_epoch.0);
            match &last.outcome {
                Outcome::Committed(cert) => {
                    w.u8(0);
                    cert.encode(&mut w);
                }
                Outcome::Aborted { by, cause } => {
                    w.u8(1);
                    w.u8(match by {
                        Party::Source => 0,
                        Party::Destination => 1,
                        Party::Coordinator => 2,
                    });
                    w.u8(cause.tag());
                }
                Outcome::Superseded => w.u8(2),
            }
        }
        w.0
    }

    /// Reads a record; anything but exactly one well-formed record is refused.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        if r.array::<4>("record.magic")? != MAGIC {
            return Err(DecodeError::Version("route record"));
        }
        let record = Self {
            request: RequestId(r.array("record.request")?),
            generation: RouteGeneration(r.u64("record.generation")?),
            owner: r.worker("record.owner")?,
            owner_epoch: OwnerEpoch(r.u64("record.owner_epoch")?),
            origin: match r.u8("record.origin")? {
                0 => Origin::Admitted,
                1 => Origin::Migrated(MigrationEpoch(r.u64("record.origin")?)),
                2 => Origin::Recovered,
                _ => return Err(DecodeError::Range("record.origin")),
            },
            phase: match r.u8("record.phase")? {
                0 => RoutePhase::Serving,
                1 => RoutePhase::Recovering,
                2 => RoutePhase::Finished,
                _ => return Err(DecodeError::Range("record.phase")),
            },
            migration_epoch: MigrationEpoch(r.u64("record.migration_epoch")?),
            intent: if r.flag("record.intent")? {
                Some(Intent::decode(&mut r)?)
            } else {
                None
            },
            last: if r.flag("record.last")? {
                Some(decode_decision(&mut r)?)
            } else {
                None
            },
        };
        r.end()?;
        Ok(record)
    }
}

fn decode_decision(r: &mut Reader<'_>) -> Result<Decision, DecodeError> {
    Ok(Decision {
        migration_epoch: MigrationEpoch(r.u64("decision.migration_epoch")?),
        outcome: match r.u8("decision.outcome")? {
            0 => Outcome::Committed(FenceCertificate::decode(r)?),
            1 => Outcome::Aborted {
                by: match r.u8("decision.by")? {
                    0 => Party::Source,
                    1 => Party::Destination,
                    2 => Party::Coordinator,
                    _ => return Err(DecodeError::Range("decision.by")),
                },
                cause: Cause::from_tag(r.u8("decision.cause")?)?,
            },
            2 => Outcome::Superseded,
            _ => return Err(DecodeError::Range("decision.outcome")),
        },
    })
}

impl Revision {
    /// Appends this revision.
    pub fn encode(self, w: &mut Writer) {
        w.u64(self.0);
    }
}
