//! What the journal holds of one request: pure.

use super::error::Refusal;
use crate::id::{OwnerEpoch, RequestId, WorkerRef};

/// One token to append, borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenRef<'a> {
    /// Its id.
    pub token: u32,
    /// The text it adds to the stream; may be empty.
    pub text: &'a [u8],
    /// Why the stream ends here, as the engine numbers its reasons; `None`: it goes on.
    pub finish: Option<u8>,
}

/// One journaled token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its number, from 1.
    pub seq: u64,
    /// Its id.
    pub token: u32,
    /// The text it adds to the stream.
    pub text: Vec<u8>,
    /// Why the stream ends here.
    pub finish: Option<u8>,
}

impl Entry {
    /// The entry without its number.
    pub fn as_ref(&self) -> TokenRef<'_> {
        TokenRef {
            token: self.token,
            text: &self.text,
            finish: self.finish,
        }
    }
}

/// Bytes that a token takes beside its text.
const TOKEN_BYTES: u64 = 12;

/// Floor, log and cursor of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) floor: OwnerEpoch,
    pub(super) owner: WorkerRef,
    /// D.
    pub(super) delivered: u64,
    tokens: Vec<u32>,
    /// Where each token's text ends in `text`.
    ends: Vec<u64>,
    text: Vec<u8>,
    /// Set by the last token.
    finish: Option<u8>,
}

/// What an append brings that is new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fresh {
    /// Tokens to skip: equal ones are there already.
    pub(super) skip: usize,
}

impl Request {
    pub(super) fn new(floor: OwnerEpoch, owner: WorkerRef) -> Self {
        Self {
            floor,
            owner,
            delivered: 0,
            tokens: Vec::new(),
            ends: Vec::new(),
            text: Vec::new(),
            finish: None,
        }
    }

    /// J.
    pub(super) fn journaled(&self) -> u64 {
        self.tokens.len() as u64
    }

    pub(super) fn finished(&self) -> bool {
        self.finish.is_some()
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> u64 {
        self.text.len() as u64 + self.tokens.len() as u64 * TOKEN_BYTES
    }

    /// Token `seq`, which must be journaled.
    pub(super) fn get(&self, seq: u64) -> TokenRef<'_> {
        let i = (seq - 1) as usize;
        let begin = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        TokenRef {
            token: self.tokens[i],
            text: &self.text[begin..self.ends[i] as usize],
            finish: if seq == self.journaled() {
                self.finish
            } else {
                None
            },
        }
    }

    /// Tokens `from..=through` that are journaled.
    pub(super) fn range(
        &self,
        from: u64,
        through: u64,
    ) -> impl Iterator<Item = (u64, TokenRef<'_>)> {
        (from.max(1)..=through.min(self.journaled())).map(|seq| (seq, self.get(seq)))
    }

    /// Judges tokens numbered from `first` that come under `epoch`.
    pub(super) fn judge(
        &self,
        epoch: OwnerEpoch,
        first: u64,
        tokens: &[TokenRef<'_>],
    ) -> Result<Fresh, Refusal> {
        let floor = self.floor;
        if epoch < floor {
            return Err(Refusal::Fenced { epoch, floor });
        }
        if epoch > floor {
            return Err(Refusal::AboveFloor { epoch, floor });
        }
        let next = self.journaled() + 1;
        if first == 0 || first > next {
            return Err(Refusal::Gap { next, got: first });
        }
        let skip = usize::try_from(next - first)
            .unwrap_or(usize::MAX)
            .min(tokens.len());
        for (token, seq) in tokens[..skip].iter().zip(first..) {
            if self.get(seq) != *token {
                return Err(Refusal::Conflict { seq });
            }
        }
        let fresh = &tokens[skip..];
        if self.finished() && !fresh.is_empty() {
            return Err(Refusal::Finished {
                seq: self.journaled(),
            });
        }
        if let Some(end) = fresh.iter().position(|t| t.finish.is_some())
            && end + 1 < fresh.len()
        {
            return Err(Refusal::Finished {
                seq: next + end as u64,
            });
        }
        Ok(Fresh { skip })
    }

    /// Appends a token that was judged.
    pub(super) fn push(&mut self, token: TokenRef<'_>) {
        self.tokens.push(token.token);
        self.text.extend_from_slice(token.text);
        self.ends.push(self.text.len() as u64);
        self.finish = token.finish;
    }

    /// Judges a floor; `true` if it is news.
    pub(super) fn judge_floor(
        &self,
        floor: OwnerEpoch,
        owner: &WorkerRef,
    ) -> Result<bool, Refusal> {
        if floor < self.floor {
            return Err(Refusal::Fenced {
                epoch: floor,
                floor: self.floor,
            });
        }
        if floor == self.floor && *owner != self.owner {
            return Err(Refusal::FloorTaken {
                floor,
                owner: self.owner.to_string(),
            });
        }
        Ok(floor > self.floor)
    }

    /// Moves D; what it has passed already is no news.
    pub(super) fn deliver(&mut self, seq: u64) -> Result<(), Refusal> {
        let journaled = self.journaled();
        if seq > journaled {
            return Err(Refusal::BeyondLog { seq, journaled });
        }
        self.delivered = self.delivered.max(seq);
        Ok(())
    }
}

pub(super) fn entries(request: &Request, from: u64, through: u64) -> Vec<Entry> {
    request
        .range(from, through)
        .map(|(seq, t)| Entry {
            seq,
            token: t.token,
            text: t.text.to_vec(),
            finish: t.finish,
        })
        .collect()
}

pub(super) fn unknown(request: RequestId) -> Refusal {
    Refusal::Unknown(request)
}
