//! The messages of a migration. Their codec is in [`super::codec`].
//!
//! The fence path is four of them: [`Body::Go`] (coordinator to source), [`Body::Push`] (source to
//! destination), the commit (a compare-and-swap of the destination on the store), and
//! [`Body::Outcome`] (to everybody: *read the record*; the notice itself is no evidence).

use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::route::{Cause, FenceCertificate, Intent};

/// One message about one request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Msg {
    /// Which request.
    pub request: RequestId,
    /// Which attempt; 0 where the message concerns tokens only.
    pub epoch: MigrationEpoch,
    /// What.
    pub body: Body,
}

/// What a message says.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Body {
    /// Coordinator to source: this intent stands; pin, and let the destination read.
    Prepare {
        /// The intent as written into the record.
        intent: Intent,
    },
    /// Source to coordinator: pinned. Payload: the import specification (geometry, regions).
    Prepared,
    /// Coordinator to destination: reserve. Payload: the import specification.
    Reserve {
        /// The intent as written into the record.
        intent: Intent,
    },
    /// Destination to source and coordinator: staged, the source may offer.
    Ready {
        /// Replicas that will hash and compare, each on its own: tensor-parallel ranks, every rank
        /// that holds a replicated head included.
        replicas: u16,
        /// The destination pulls ahead only from multiples of this many tokens, so that it never
        /// writes a block it is hashing.
        align_tokens: u32,
    },
    /// Source to destination: these tokens are sealed and look like this. Payload: token ids.
    Offer(Offer),
    /// Destination to source: resident and verified, on every replica.
    Verified {
        /// Tokens `0..through`.
        through: u64,
    },
    /// Source to coordinator: how far it is.
    Progress {
        /// Tokens with accepted KV at the source.
        accepted: u64,
        /// Tokens verified at the destination.
        verified: u64,
        /// Little enough is left for a fence.
        converged: bool,
    },
    /// Coordinator to source: fence now.
    Go,
    /// Source to destination: the fence certificate and all that is missing. Payload: control state
    /// bytes, then the remaining slots.
    Push(Push),
    /// Anybody: please move to abort. A wish, no evidence.
    Cancel {
        /// Why.
        cause: Cause,
    },
    /// Source or destination to coordinator: I cannot, and move to abort.
    Refuse {
        /// Why.
        cause: Cause,
    },
    /// Anybody: the record has moved, read it. No evidence by itself.
    Outcome,
    /// Worker to gateway: tokens.
    Emit {
        /// The right to append.
        owner_epoch: OwnerEpoch,
        /// Contiguous, ascending.
        tokens: Vec<Emission>,
    },
    /// Gateway to worker: journaled through here.
    Accepted {
        /// The epoch the tokens were accepted under.
        owner_epoch: OwnerEpoch,
        /// The log J: tokens `1..=through` are journaled.
        through: u64,
    },
    /// Gateway to worker: tokens of this epoch are no longer accepted; read the record.
    Fenced {
        /// The lowest epoch accepted.
        floor: OwnerEpoch,
    },
    /// Gateway to worker: rebuild from the journal. Payload: the journal's image of the request.
    Rebuild {
        /// The epoch the rebuilt request will append under.
        owner_epoch: OwnerEpoch,
        /// The log J when the floor was raised; the next new token is `journaled + 1`.
        journaled: u64,
    },
}

/// A digest of part of a page, as one replica holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageClaim {
    /// Which replica's share of the page.
    pub replica: u16,
    /// Which canonical page.
    pub page: u32,
    /// How many of its tokens are covered, from the first.
    pub valid: u16,
    /// The page digest over those tokens.
    pub digest: [u8; 32],
}

/// A sealed range of tokens, with what its pages must hash to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Offer {
    /// First token.
    pub from: u64,
    /// One past the last.
    pub to: u64,
    /// For each replica, each page that overlaps the range, hashed from its first token up to `to`
    /// at most: by replica, then page.
    pub claims: Vec<PageClaim>,
}

/// What the fence sends.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Push {
    /// The promise.
    pub certificate: FenceCertificate,
    /// The payload's slots are tokens `tail_from..certificate.kv_len`.
    pub tail_from: u64,
    /// For each replica the set digest over its share; with one replica it is the certificate's.
    pub replicas: Vec<[u8; 32]>,
    /// Length of the control state at the start of the payload.
    pub control_bytes: u32,
    /// Length of the slots behind it.
    pub tail_bytes: u64,
    /// All tokens numbered up to the seal and not known to be journaled.
    pub tokens: Vec<Emission>,
}

/// One numbered output token.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Emission {
    /// Its number, from 1.
    pub seq: u64,
    /// Its id.
    pub token: u32,
    /// The text it adds to the stream, which may be empty (held-back stop strings, split UTF-8).
    pub text: Vec<u8>,
    /// Why the stream ends here, as the engine numbers its reasons; `None`: it goes on.
    pub finish: Option<u8>,
}
