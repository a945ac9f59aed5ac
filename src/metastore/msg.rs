//! What client and server of a store say to each other. Pure, bounded codec.
//!
//! A request's frame flags hold the milliseconds it may take; an answer has the request's kind with
//! the high bit set, or [`ERROR`].

use super::error::StoreError;
use super::types::{
    Cas, CasOutcome, Change, Event, LeaseOutcome, LeaseTerm, Listing, MAX_KEY, MAX_VALUE, OpId,
    Versioned, WatchBatch,
};
use crate::route::{DecodeError, Reader, Revision, Writer};
use std::time::Duration;

/// Bit that marks answers.
pub const ANSWER: u16 = 0x8000;
/// Kind of an answer that is an error.
pub const ERROR: u16 = 0xffff;
/// Longest message, in bytes: a page of a listing or a batch of events, and one value more.
pub const MAX_MESSAGE: u32 = (1 << 20) + 4 * (MAX_VALUE as u32);
/// Bytes after which a listing is continued in another message.
pub const PAGE_BYTES: usize = 1 << 20;

const GET: u16 = 1;
const CAS: u16 = 2;
const LIST: u16 = 3;
const WATCH: u16 = 4;
const ACQUIRE: u16 = 5;
const RENEW: u16 = 6;
const RELEASE: u16 = 7;
const KEEP_AWAKE: u16 = 8;

/// A question to a store.
#[derive(Debug, Clone, Copy)]
pub enum Request<'a> {
    /// See [`MetaStore::get`](super::MetaStore::get).
    Get {
        /// The key.
        key: &'a str,
    },
    /// See [`MetaStore::cas`](super::MetaStore::cas).
    Cas(Cas<'a>),
    /// One page of [`MetaStore::list`](super::MetaStore::list).
    List {
        /// The prefix.
        prefix: &'a str,
        /// The last key of the page before.
        after: Option<&'a str>,
    },
    /// See [`MetaStore::watch`](super::MetaStore::watch).
    Watch {
        /// The prefix.
        prefix: &'a str,
        /// The revision considered last.
        after: Revision,
    },
    /// See [`MetaStore::lease_acquire`](super::MetaStore::lease_acquire).
    Acquire {
        /// The lease.
        name: &'a str,
        /// Who wants it.
        holder: &'a str,
        /// For how long.
        ttl: Duration,
    },
    /// See [`MetaStore::lease_renew`](super::MetaStore::lease_renew).
    Renew {
        /// The lease.
        name: &'a str,
        /// Who has it.
        holder: &'a str,
        /// Since when.
        term: LeaseTerm,
    },
    /// See [`MetaStore::lease_release`](super::MetaStore::lease_release).
    Release {
        /// The lease.
        name: &'a str,
        /// Who has it.
        holder: &'a str,
        /// Since when.
        term: LeaseTerm,
    },
    /// See [`MetaStore::keep_awake`](super::MetaStore::keep_awake). Answered when it is over.
    KeepAwake {
        /// The key.
        key: &'a str,
    },
}

/// A store's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// To a get.
    Record(Option<Versioned>),
    /// To a compare-and-swap.
    Cas(CasOutcome),
    /// To a list.
    Page {
        /// The entries.
        page: Listing,
        /// More follow behind the last one.
        more: bool,
    },
    /// To a watch.
    Watch(WatchBatch),
    /// To an acquire.
    Lease(LeaseOutcome),
    /// To a renew.
    Renewed(bool),
    /// To a release.
    Released,
    /// To a keep-awake.
    KeptAwake,
    /// To any.
    Error(StoreError),
}

fn text(w: &mut Writer, text: &str) {
    w.u16(text.len() as u16);
    w.raw(text.as_bytes());
}

fn read_text<'a>(
    r: &mut Reader<'a>,
    max: usize,
    what: &'static str,
) -> Result<&'a str, DecodeError> {
    let len = r.u16(what)? as usize;
    if len > max {
        return Err(DecodeError::Range(what));
    }
    std::str::from_utf8(r.raw(len, what)?).map_err(|_| DecodeError::Range(what))
}

fn revision_or_none(w: &mut Writer, revision: Option<Revision>) {
    w.u8(revision.is_some().into());
    w.u64(revision.map_or(0, |r| r.0));
}

fn read_revision_or_none(r: &mut Reader<'_>) -> Result<Option<Revision>, DecodeError> {
    let there = r.flag("revision.there")?;
    let revision = r.u64("revision")?;
    match (there, revision) {
        (true, revision) => Ok(Some(Revision(revision))),
        (false, 0) => Ok(None),
        (false, _) => Err(DecodeError::Range("revision")),
    }
}

impl<'a> Request<'a> {
    /// The frame's kind.
    pub fn kind(&self) -> u16 {
        match self {
            Self::Get { .. } => GET,
            Self::Cas(_) => CAS,
            Self::List { .. } => LIST,
            Self::Watch { .. } => WATCH,
            Self::Acquire { .. } => ACQUIRE,
            Self::Renew { .. } => RENEW,
            Self::Release { .. } => RELEASE,
            Self::KeepAwake { .. } => KEEP_AWAKE,
        }
    }

    /// Appends the frame's payload.
    pub fn encode(&self, w: &mut Writer) {
        match *self {
            Self::Get { key } | Self::KeepAwake { key } => text(w, key),
            Self::Cas(cas) => {
                w.raw(&cas.op.0);
                revision_or_none(w, cas.expected);
                text(w, cas.key);
                match cas.change {
                    Change::Delete => w.u8(0),
                    Change::Put(value) => {
                        w.u8(1);
                        w.bytes(value);
                    }
                }
            }
            Self::List { prefix, after } => {
                text(w, prefix);
                w.u8(after.is_some().into());
                text(w, after.unwrap_or(""));
            }
            Self::Watch { prefix, after } => {
                text(w, prefix);
                w.u64(after.0);
            }
            Self::Acquire { name, holder, ttl } => {
                text(w, name);
                text(w, holder);
                w.u64(ttl.as_millis() as u64);
            }
            Self::Renew { name, holder, term } | Self::Release { name, holder, term } => {
                text(w, name);
                text(w, holder);
                w.u64(term.0);
            }
        }
    }

    /// Reads a request.
    pub fn decode(kind: u16, payload: &'a [u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(payload);
        let request = match kind {
            GET => Self::Get {
                key: read_text(&mut r, MAX_KEY, "key")?,
            },
            CAS => {
                let op = OpId(r.array("op")?);
                let expected = read_revision_or_none(&mut r)?;
                let key = read_text(&mut r, MAX_KEY, "key")?;
                let change = if r.flag("change")? {
                    Change::Put(r.bytes(MAX_VALUE, "value")?)
                } else {
                    Change::Delete
                };
                Self::Cas(Cas {
                    key,
                    expected,
                    change,
                    op,
                })
            }
            LIST => {
                let prefix = read_text(&mut r, MAX_KEY, "prefix")?;
                let there = r.flag("after.there")?;
                let after = read_text(&mut r, MAX_KEY, "after")?;
                if !there && !after.is_empty() {
                    return Err(DecodeError::Range("after"));
                }
                Self::List {
                    prefix,
                    after: there.then_some(after),
                }
            }
            WATCH => Self::Watch {
                prefix: read_text(&mut r, MAX_KEY, "prefix")?,
                after: Revision(r.u64("after")?),
            },
            ACQUIRE => Self::Acquire {
                name: read_text(&mut r, MAX_KEY, "name")?,
                holder: read_text(&mut r, MAX_KEY, "holder")?,
                ttl: Duration::from_millis(r.u64("ttl")?),
            },
            KEEP_AWAKE => Self::KeepAwake {
                key: read_text(&mut r, MAX_KEY, "key")?,
            },
            RENEW | RELEASE => {
                let name = read_text(&mut r, MAX_KEY, "name")?;
                let holder = read_text(&mut r, MAX_KEY, "holder")?;
                let term = LeaseTerm(r.u64("term")?);
                if kind == RENEW {
                    Self::Renew { name, holder, term }
                } else {
                    Self::Release { name, holder, term }
                }
            }
            _ => return Err(DecodeError::Version("request kind")),
        };
        r.end()?;
        Ok(request)
    }
}

fn versioned(w: &mut Writer, record: &Versioned) {
    w.u64(record.revision.0);
    w.bytes(&record.value);
}

fn read_versioned(r: &mut Reader<'_>) -> Result<Versioned, DecodeError> {
    let revision = Revision(r.u64("revision")?);
    let value = r.bytes(MAX_VALUE, "value")?.to_vec();
    Ok(Versioned { revision, value })
}

fn versioned_or_none(w: &mut Writer, record: &Option<Versioned>) {
    w.u8(record.is_some().into());
    if let Some(record) = record {
        versioned(w, record);
    }
}

fn read_versioned_or_none(r: &mut Reader<'_>) -> Result<Option<Versioned>, DecodeError> {
    if r.flag("record.there")? {
        read_versioned(r).map(Some)
    } else {
        Ok(None)
    }
}

/// Least bytes of a listing's entry and of an event.
const LEAST_ITEM: usize = 2 + 8 + 1;

impl Answer {
    /// The frame's kind.
    pub fn kind(&self) -> u16 {
        match self {
            Self::Record(_) => GET | ANSWER,
            Self::Cas(_) => CAS | ANSWER,
            Self::Page { .. } => LIST | ANSWER,
            Self::Watch(_) => WATCH | ANSWER,
            Self::Lease(_) => ACQUIRE | ANSWER,
            Self::Renewed(_) => RENEW | ANSWER,
            Self::Released => RELEASE | ANSWER,
            Self::KeptAwake => KEEP_AWAKE | ANSWER,
            Self::Error(_) => ERROR,
        }
    }

    /// Appends the frame's payload.
    pub fn encode(&self, w: &mut Writer) {
        match self {
            Self::Record(record) => versioned_or_none(w, record),
            Self::Cas(CasOutcome::Applied { revision }) => {
                w.u8(1);
                w.u64(revision.0);
            }
            Self::Cas(CasOutcome::Conflict { current }) => {
                w.u8(0);
                versioned_or_none(w, current);
            }
            Self::Page { page, more } => {
                w.u8((*more).into());
                w.u64(page.revision.0);
                w.u32(page.entries.len() as u32);
                for (key, record) in &page.entries {
                    text(w, key);
                    versioned(w, record);
                }
            }
            Self::Watch(WatchBatch::Resync) => w.u8(0),
            Self::Watch(WatchBatch::Events { events, upto }) => {
                w.u8(1);
                w.u64(upto.0);
                w.u32(events.len() as u32);
                for event in events {
                    text(w, &event.key);
                    w.u64(event.revision.0);
                    w.u8(event.value.is_some().into());
                    if let Some(value) = &event.value {
                        w.bytes(value);
                    }
                }
            }
            Self::Lease(LeaseOutcome::Granted { term }) => {
                w.u8(1);
                w.u64(term.0);
            }
            Self::Lease(LeaseOutcome::Held { by, left }) => {
                w.u8(0);
                text(w, by);
                w.u64(left.as_millis() as u64);
            }
            Self::Renewed(renewed) => w.u8((*renewed).into()),
            Self::Released | Self::KeptAwake => {}
            Self::Error(error) => encode_error(w, error),
        }
    }

    /// Reads an answer.
    pub fn decode(kind: u16, payload: &[u8]) -> Result<Self, DecodeError> {
        let r = &mut Reader::new(payload);
        let answer = if kind == ERROR {
            Self::Error(decode_error(r)?)
        } else if kind & ANSWER != 0 {
            Self::decode_answer(kind & !ANSWER, r)?
        } else {
            return Err(DecodeError::Version("answer kind"));
        };
        match r.left() {
            0 => Ok(answer),
            left => Err(DecodeError::Trailing(left)),
        }
    }

    fn decode_answer(kind: u16, r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match kind {
            GET => Self::Record(read_versioned_or_none(r)?),
            CAS => Self::Cas(if r.flag("applied")? {
                CasOutcome::Applied {
                    revision: Revision(r.u64("revision")?),
                }
            } else {
                CasOutcome::Conflict {
                    current: read_versioned_or_none(r)?,
                }
            }),
            LIST => {
                let more = r.flag("more")?;
                let revision = Revision(r.u64("revision")?);
                let n = r.count(MAX_MESSAGE as usize, LEAST_ITEM, "entries")?;
                let mut entries = Vec::with_capacity(n);
                for _ in 0..n {
                    let key = read_text(r, MAX_KEY, "key")?.to_owned();
                    entries.push((key, read_versioned(r)?));
                }
                Self::Page {
                    page: Listing { revision, entries },
                    more,
                }
            }
            WATCH => Self::Watch(if r.flag("events")? {
                let upto = Revision(r.u64("upto")?);
                let n = r.count(MAX_MESSAGE as usize, LEAST_ITEM, "events")?;
                let mut events = Vec::with_capacity(n);
                for _ in 0..n {
                    let key = read_text(r, MAX_KEY, "key")?.to_owned();
                    let revision = Revision(r.u64("revision")?);
                    let value = match r.flag("value.there")? {
                        true => Some(r.bytes(MAX_VALUE, "value")?.to_vec()),
                        false => None,
                    };
                    events.push(Event {
                        key,
                        revision,
                        value,
                    });
                }
                WatchBatch::Events { events, upto }
            } else {
                WatchBatch::Resync
            }),
            ACQUIRE => Self::Lease(if r.flag("granted")? {
                LeaseOutcome::Granted {
                    term: LeaseTerm(r.u64("term")?),
                }
            } else {
                let by = read_text(r, MAX_KEY, "by")?.to_owned();
                LeaseOutcome::Held {
                    by,
                    left: Duration::from_millis(r.u64("left")?),
                }
            }),
            RENEW => Self::Renewed(r.flag("renewed")?),
            RELEASE => Self::Released,
            KEEP_AWAKE => Self::KeptAwake,
            _ => return Err(DecodeError::Version("answer kind")),
        })
    }
}

/// Longest text of an error, in bytes.
const MAX_CAUSE: usize = 1024;

fn encode_error(w: &mut Writer, error: &StoreError) {
    let mut put = |code: u8, a: u64, b: u64, cause: &str| {
        let mut end = cause.len().min(MAX_CAUSE);
        while !cause.is_char_boundary(end) {
            end -= 1;
        }
        w.u8(code);
        w.u64(a);
        w.u64(b);
        text(w, &cause[..end]);
    };
    match error {
        StoreError::InDoubt { cause } => put(1, 0, 0, cause),
        StoreError::Unavailable { cause } => put(2, 0, 0, cause),
        StoreError::Poisoned { cause } => put(3, 0, 0, cause),
        StoreError::Full { bytes, max } => put(4, *bytes, *max, ""),
        StoreError::Key { len } => put(5, *len as u64, 0, ""),
        StoreError::Value { len } => put(6, *len as u64, 0, ""),
        StoreError::Protocol { what } => put(7, 0, 0, what),
        // Arises only where a log is opened; a client need not tell it from a store that is away.
        StoreError::Log(e) => put(2, 0, 0, &e.to_string()),
    }
}

fn decode_error(r: &mut Reader<'_>) -> Result<StoreError, DecodeError> {
    let code = r.u8("error.code")?;
    let (a, b) = (r.u64("error.a")?, r.u64("error.b")?);
    let cause = read_text(r, MAX_CAUSE, "error.cause")?.to_owned();
    // What an error does not carry is empty: each has one spelling.
    Ok(match (code, a, b, cause.is_empty()) {
        (1, 0, 0, _) => StoreError::InDoubt { cause },
        (2, 0, 0, _) => StoreError::Unavailable { cause },
        (3, 0, 0, _) => StoreError::Poisoned { cause },
        (4, bytes, max, true) => StoreError::Full { bytes, max },
        (5, len, 0, true) => StoreError::Key { len: len as usize },
        (6, len, 0, true) => StoreError::Value { len: len as usize },
        (7, 0, 0, _) => StoreError::Protocol { what: cause },
        (1..=7, ..) => return Err(DecodeError::Range("error")),
        _ => return Err(DecodeError::Range("error.code")),
    })
}
