//! How floors and tokens stand in the log, and what a sequence of segments means. Pure.
//!
//! Every record begins with the request's id. A request's life is `OPEN`, then `FLOOR`s and
//! `TOKENS`, then `FORGET`. So that old segments can go while a request lives, its whole state may
//! be written again as `RESTATE` records, the last one marked; what is appended between them stands
//! in them too. After old segments are
//! gone, a request's middle may stand in the log without its beginning: such an *orphan* means
//! nothing until it is restated or forgotten, and one that is neither in the end is damage.

use super::memory::{Request, TokenRef};
use crate::id::{OwnerEpoch, RequestId};
use crate::route::{DecodeError, Reader, Writer};
use crate::wal::Record;
use std::collections::{HashMap, HashSet};

/// This room's logs.
pub(super) const LOG: u32 = 0x6a6f_7572;

pub(super) const OPEN: u8 = 1;
pub(super) const FLOOR: u8 = 2;
pub(super) const TOKENS: u8 = 3;
pub(super) const FORGET: u8 = 4;
pub(super) const RESTATE: u8 = 5;

/// Bytes of a `TOKENS` record beside its tokens.
pub(super) const TOKENS_HEAD: usize = 16 + 8 + 8 + 8 + 4;
/// Bytes of a token beside its text.
pub(super) const TOKEN_HEAD: usize = 4 + 2 + 4;
fn put_token(w: &mut Writer, token: TokenRef<'_>) {
    w.u32(token.token);
    w.u8(token.finish.is_some().into());
    w.u8(token.finish.unwrap_or(0));
    w.bytes(token.text);
}

fn read_tokens<'a>(r: &mut Reader<'a>) -> Result<Vec<TokenRef<'a>>, DecodeError> {
    let n = r.count(u32::MAX as usize, TOKEN_HEAD, "tokens")?;
    let mut tokens = Vec::with_capacity(n);
    for _ in 0..n {
        let token = r.u32("token")?;
        let finish = match (r.flag("finish.there")?, r.u8("finish")?) {
            (true, finish) => Some(finish),
            (false, 0) => None,
            (false, _) => return Err(DecodeError::Range("finish")),
        };
        let text = r.bytes(r.left(), "text")?;
        tokens.push(TokenRef {
            token,
            text,
            finish,
        });
    }
    Ok(tokens)
}

/// `OPEN` and `FLOOR`.
pub(super) fn encode_floor(w: &mut Writer, id: RequestId, request: &Request) {
    w.raw(&id.0);
    w.u64(request.floor.0);
    w.u64(request.delivered);
    w.worker(&request.owner);
}

/// `TOKENS`.
pub(super) fn encode_tokens(
    w: &mut Writer,
    id: RequestId,
    request: &Request,
    tokens: &[TokenRef<'_>],
) {
    w.raw(&id.0);
    w.u64(request.floor.0);
    w.u64(request.delivered);
    w.u64(request.journaled() + 1);
    w.u32(tokens.len() as u32);
    for token in tokens {
        put_token(w, *token);
    }
}

/// `RESTATE`, with tokens from `from` on, until it has `chunk` bytes; returns the first token of the next one, or `None` if this
/// is the last. Whatever is journaled meanwhile belongs to the next ones.
pub(super) fn encode_restate(
    w: &mut Writer,
    id: RequestId,
    request: &Request,
    from: u64,
    chunk: usize,
) -> Option<u64> {
    w.raw(&id.0);
    w.u64(request.floor.0);
    w.u64(request.delivered);
    w.worker(&request.owner);
    w.u64(from);
    let (last_at, count_at) = (w.0.len(), w.0.len() + 1);
    w.u8(0);
    w.u32(0);
    let mut next = from;
    for (_, token) in request.range(from, u64::MAX) {
        put_token(w, token);
        next += 1;
        if w.0.len() >= chunk {
            break;
        }
    }
    let last = next > request.journaled();
    w.0[last_at] = last.into();
    w.0[count_at..count_at + 4].copy_from_slice(&((next - from) as u32).to_le_bytes());
    if last { None } else { Some(next) }
}

/// Builds the requests from records in order.
#[derive(Debug, Default)]
pub(super) struct Replay {
    /// Those alive, each with the number of the oldest segment it needs.
    pub(super) requests: HashMap<RequestId, (Request, u64)>,
    orphans: HashSet<RequestId>,
    /// Restated so far, and since which segment.
    restating: Option<(RequestId, Request, u64)>,
}

impl Replay {
    /// Takes one record of segment `number`.
    pub(super) fn record(&mut self, number: u64, record: Record<'_>) -> Result<(), String> {
        self.take(number, record.kind, record.payload)
            .map_err(|e| e.to_string())
    }

    /// The requests, if each one's beginning was there.
    pub(super) fn finish(self) -> Result<HashMap<RequestId, (Request, u64)>, ReplayError> {
        match self.orphans.iter().next() {
            Some(&id) => Err(ReplayError::Orphan(id)),
            None => Ok(self.requests),
        }
    }

    fn take(&mut self, number: u64, kind: u8, payload: &[u8]) -> Result<(), ReplayError> {
        let r = &mut Reader::new(payload);
        let id = RequestId(r.array("request")?);
        match kind {
            OPEN => {
                let floor = OwnerEpoch(r.u64("floor")?);
                let delivered = r.u64("delivered")?;
                let request = Request::new(floor, r.worker("owner")?);
                if self.requests.contains_key(&id) || self.orphans.contains(&id) || delivered != 0 {
                    return Err(wrong("a request is opened twice"));
                }
                self.requests.insert(id, (request, number));
            }
            FLOOR => {
                let floor = OwnerEpoch(r.u64("floor")?);
                let delivered = r.u64("delivered")?;
                let owner = r.worker("owner")?;
                match self.requests.get_mut(&id) {
                    Some((request, _)) => {
                        if floor <= request.floor {
                            return Err(wrong("a floor does not rise"));
                        }
                        (request.floor, request.owner) = (floor, owner);
                        request.deliver(delivered).map_err(refused)?;
                    }
                    None => {
                        self.orphans.insert(id);
                    }
                }
            }
            TOKENS => {
                let epoch = OwnerEpoch(r.u64("epoch")?);
                let delivered = r.u64("delivered")?;
                let first = r.u64("first")?;
                let tokens = read_tokens(r)?;
                match self.requests.get_mut(&id) {
                    Some((request, _)) => {
                        if first != request.journaled() + 1 {
                            return Err(wrong("tokens do not follow those before"));
                        }
                        request.deliver(delivered).map_err(refused)?;
                        request.judge(epoch, first, &tokens).map_err(refused)?;
                        tokens.iter().for_each(|&token| request.push(token));
                    }
                    None => {
                        self.orphans.insert(id);
                    }
                }
            }
            FORGET => {
                self.requests.remove(&id);
                self.orphans.remove(&id);
            }
            RESTATE => self.restated(number, id, r)?,
            _ => return Err(wrong("unknown kind of record")),
        }
        if r.left() > 0 {
            return Err(DecodeError::Trailing(r.left()).into());
        }
        Ok(())
    }

    fn restated(
        &mut self,
        number: u64,
        id: RequestId,
        r: &mut Reader<'_>,
    ) -> Result<(), ReplayError> {
        let floor = OwnerEpoch(r.u64("floor")?);
        let delivered = r.u64("delivered")?;
        let owner = r.worker("owner")?;
        let from = r.u64("from")?;
        let last = r.flag("last")?;
        let tokens = read_tokens(r)?;
        let (mut request, since) = match self.restating.take() {
            // A restatement cut by a crash is begun again; the request's old records still count.
            Some((of, mut request, since)) if of == id && from > 1 => {
                // Raised meanwhile, at most.
                (request.floor, request.owner) = (floor.max(request.floor), owner);
                (request, since)
            }
            _ => (Request::new(floor, owner), number),
        };
        request.judge(floor, from, &tokens).map_err(refused)?;
        if from != request.journaled() + 1 {
            return Err(wrong("a restatement does not follow its own beginning"));
        }
        tokens.iter().for_each(|&token| request.push(token));
        if !last {
            self.restating = Some((id, request, since));
            return Ok(());
        }
        request.deliver(delivered).map_err(refused)?;
        if let Some((old, _)) = self.requests.get(&id) {
            let mut old = old.clone();
            old.delivered = request.delivered;
            if old != request {
                return Err(wrong("a restatement differs from what it restates"));
            }
        }
        self.orphans.remove(&id);
        self.requests.insert(id, (request, since));
        Ok(())
    }
}

/// Why sound records make no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// A record's payload cannot be read.
    #[error(transparent)]
    Malformed(#[from] DecodeError),
    /// A record does not fit those before it.
    #[error("{0}")]
    Order(&'static str),
    /// A record does what the journal refuses.
    #[error("a record should have been refused: {0}")]
    Refused(super::Refusal),
    /// A request's beginning is missing.
    #[error("the beginning of request {0} is missing")]
    Orphan(RequestId),
}

fn wrong(what: &'static str) -> ReplayError {
    ReplayError::Order(what)
}

fn refused(refusal: super::Refusal) -> ReplayError {
    ReplayError::Refused(refusal)
}

/// What records, by kind and payload, mean in their order: the body of a fuzz target. Returns how
/// many requests live in the end.
pub fn replay_records<'a>(
    records: impl IntoIterator<Item = (u8, &'a [u8])>,
) -> Result<usize, ReplayError> {
    let mut replay = Replay::default();
    for (kind, payload) in records {
        replay.take(1, kind, payload)?;
    }
    Ok(replay.finish()?.len())
}
