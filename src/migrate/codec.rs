//! Bounded codec of the migration messages.
//!
//! A message's encoding does not contain its payload; a frame carries `encode()`, then the payload.
//! Decoding never panics, allocates at most a small multiple of its input, and refuses everything
//! that `encode` would not have written.

use super::msg::{Body, Emission, Msg, Offer, PageClaim, Push};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::route::{Cause, DecodeError, FenceCertificate, Intent, Reader, Writer};

/// Most claims in one offer.
pub const MAX_CLAIMS: usize = 1 << 16;
/// Most tokens in one message.
pub const MAX_TOKENS: usize = 1 << 16;
/// Longest text of one token, in bytes.
pub const MAX_TEXT: usize = 1 << 16;
/// Most replicas.
pub const MAX_REPLICAS: usize = 1 << 10;
/// Longest control state, in bytes.
pub const MAX_CONTROL: u32 = 64 << 20;
/// Most bytes of slots in one push.
pub const MAX_TAIL: u64 = 4 << 30;

const MAGIC: [u8; 4] = *b"MLM1";
const CLAIM_BYTES: usize = 2 + 4 + 2 + 32;
const EMISSION_MIN_BYTES: usize = 8 + 4 + 4 + 1;

impl Msg {
    /// The message's bytes, without its payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::with_capacity(256));
        w.raw(&MAGIC);
        w.raw(&self.request.0);
        w.u64(self.epoch.0);
        match &self.body {
            Body::Prepare { intent } => tagged(&mut w, 0, |w| intent.encode(w)),
            Body::Prepared => w.u8(1),
            Body::Reserve { intent } => tagged(&mut w, 2, |w| intent.encode(w)),
            Body::Ready {
                replicas,
                align_tokens,
            } => tagged(&mut w, 3, |w| {
                w.u16(*replicas);
                w.u32(*align_tokens);
            }),
            Body::Offer(offer) => tagged(&mut w, 4, |w| encode_offer(offer, w)),
            Body::Verified { through } => tagged(&mut w, 5, |w| w.u64(*through)),
            Body::Progress {
                accepted,
                verified,
                converged,
            } => tagged(&mut w, 6, |w| {
                w.u64(*accepted);
                w.u64(*verified);
                w.u8((*converged).into());
            }),
            Body::Go => w.u8(7),
            Body::Push(push) => tagged(&mut w, 8, |w| encode_push(push, w)),
            Body::Cancel { cause } => tagged(&mut w, 9, |w| w.u8(cause.tag())),
            Body::Refuse { cause } => tagged(&mut w, 10, |w| w.u8(cause.tag())),
            Body::Outcome => w.u8(11),
            Body::Emit {
                owner_epoch,
                tokens,
            } => tagged(&mut w, 12, |w| {
                w.u64(owner_epoch.0);
                encode_tokens(tokens, w);
            }),
            Body::Accepted {
                owner_epoch,
                through,
            } => tagged(&mut w, 13, |w| {
                w.u64(owner_epoch.0);
                w.u64(*through);
            }),
            Body::Fenced { floor } => tagged(&mut w, 14, |w| w.u64(floor.0)),
            Body::Rebuild {
                owner_epoch,
                journaled,
            } => tagged(&mut w, 15, |w| {
                w.u64(owner_epoch.0);
                w.u64(*journaled);
            }),
        }
        w.0
    }

    /// Reads exactly one message.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let msg = Self::decode_from(&mut r)?;
        r.end()?;
        Ok(msg)
    }

    /// Reads one message and returns with it what follows: the payload.
    pub fn decode_prefix(bytes: &[u8]) -> Result<(Self, &[u8]), DecodeError> {
        let mut r = Reader::new(bytes);
        let msg = Self::decode_from(&mut r)?;
        let left = r.left();
        Ok((msg, &bytes[bytes.len() - left..]))
    }

    fn decode_from(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        if r.array::<4>("message.magic")? != MAGIC {
            return Err(DecodeError::Version("migration message"));
        }
        let request = RequestId(r.array("message.request")?);
        let epoch = MigrationEpoch(r.u64("message.epoch")?);
        let body = match r.u8("message.kind")? {
            0 => Body::Prepare {
                intent: Intent::decode(r)?,
            },
            1 => Body::Prepared,
            2 => Body::Reserve {
                intent: Intent::decode(r)?,
            },
            3 => Body::Ready {
                replicas: r.u16("ready.replicas")?,
                align_tokens: r.u32("ready.align_tokens")?,
            },
            4 => Body::Offer(decode_offer(r)?),
            5 => Body::Verified {
                through: r.u64("verified.through")?,
            },
            6 => Body::Progress {
                accepted: r.u64("progress.accepted")?,
                verified: r.u64("progress.verified")?,
                converged: r.flag("progress.converged")?,
            },
            7 => Body::Go,
            8 => Body::Push(decode_push(r)?),
            9 => Body::Cancel {
                cause: Cause::from_tag(r.u8("cancel.cause")?)?,
            },
            10 => Body::Refuse {
                cause: Cause::from_tag(r.u8("refuse.cause")?)?,
            },
            11 => Body::Outcome,
            12 => Body::Emit {
                owner_epoch: OwnerEpoch(r.u64("emit.owner_epoch")?),
                tokens: decode_tokens(r)?,
            },
            13 => Body::Accepted {
                owner_epoch: OwnerEpoch(r.u64("accepted.owner_epoch")?),
                through: r.u64("accepted.through")?,
            },
            14 => Body::Fenced {
                floor: OwnerEpoch(r.u64("fenced.floor")?),
            },
            15 => Body::Rebuild {
                owner_epoch: OwnerEpoch(r.u64("rebuild.owner_epoch")?),
                journaled: r.u64("rebuild.journaled")?,
            },
            _ => return Err(DecodeError::Range("message.kind")),
        };
        Ok(Self {
            request,
            epoch,
            body,
        })
    }
}

fn tagged(w: &mut Writer, tag: u8, fields: impl FnOnce(&mut Writer)) {
    w.u8(tag);
    fields(w);
}

fn encode_offer(offer: &Offer, w: &mut Writer) {
    w.u64(offer.from);
    w.u64(offer.to);
    w.u32(offer.claims.len() as u32);
    for claim in &offer.claims {
        w.u16(claim.replica);
        w.u32(claim.page);
        w.u16(claim.valid);
        w.raw(&claim.digest);
    }
}

fn decode_offer(r: &mut Reader<'_>) -> Result<Offer, DecodeError> {
    let (from, to) = (r.u64("offer.from")?, r.u64("offer.to")?);
    if from >= to {
        return Err(DecodeError::Range("offer.to"));
    }
    let n = r.count(MAX_CLAIMS, CLAIM_BYTES, "offer.claims")?;
    let mut claims = Vec::with_capacity(n);
    for _ in 0..n {
        claims.push(PageClaim {
            replica: r.u16("claim.replica")?,
            page: r.u32("claim.page")?,
            valid: r.u16("claim.valid")?,
            digest: r.array("claim.digest")?,
        });
    }
    Ok(Offer { from, to, claims })
}

fn encode_push(push: &Push, w: &mut Writer) {
    push.certificate.encode(w);
    w.u64(push.tail_from);
    w.u32(push.control_bytes);
    w.u64(push.tail_bytes);
    w.u32(push.replicas.len() as u32);
    for digest in &push.replicas {
        w.raw(digest);
    }
    encode_tokens(&push.tokens, w);
}

fn decode_push(r: &mut Reader<'_>) -> Result<Push, DecodeError> {
    let certificate = FenceCertificate::decode(r)?;
    let tail_from = r.u64("push.tail_from")?;
    if tail_from > certificate.kv_len {
        return Err(DecodeError::Range("push.tail_from"));
    }
    let control_bytes = r.u32("push.control_bytes")?;
    if control_bytes > MAX_CONTROL {
        return Err(DecodeError::Range("push.control_bytes"));
    }
    let tail_bytes = r.u64("push.tail_bytes")?;
    if tail_bytes > MAX_TAIL {
        return Err(DecodeError::Range("push.tail_bytes"));
    }
    let n = r.count(MAX_REPLICAS, 32, "push.replicas")?;
    let replicas = (0..n)
        .map(|_| r.array("push.replica"))
        .collect::<Result<_, _>>()?;
    let tokens = decode_tokens(r)?;
    Ok(Push {
        certificate,
        tail_from,
        replicas,
        control_bytes,
        tail_bytes,
        tokens,
    })
}

fn encode_tokens(tokens: &[Emission], w: &mut Writer) {
    w.u32(tokens.len() as u32);
    for t in tokens {
        w.u64(t.seq);
        w.u32(t.token);
        w.bytes(&t.text);
        w.u8(t.finish.is_some().into());
        if let Some(finish) = t.finish {
            w.u8(finish);
        }
    }
}

/// Tokens are numbered without gaps, so a list that is not is no list of ours.
fn decode_tokens(r: &mut Reader<'_>) -> Result<Vec<Emission>, DecodeError> {
    let n = r.count(MAX_TOKENS, EMISSION_MIN_BYTES, "tokens")?;
    let mut tokens: Vec<Emission> = Vec::with_capacity(n);
    for _ in 0..n {
        let seq = r.u64("token.seq")?;
        let follows = match tokens.last() {
            Some(last) => last.seq.checked_add(1) == Some(seq),
            None => seq > 0,
        };
        if !follows {
            return Err(DecodeError::Range("token.seq"));
        }
        tokens.push(Emission {
            seq,
            token: r.u32("token.id")?,
            text: r.bytes(MAX_TEXT, "token.text")?.to_vec(),
            finish: if r.flag("token.finish")? {
                Some(r.u8("token.finish")?)
            } else {
                None
            },
        });
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Incarnation, RouteGeneration, WorkerId, WorkerRef};
    use crate::route::ControlSeal;

    fn worker(name: &str, incarnation: u64) -> WorkerRef {
        let id = WorkerId::new(name).expect("a plain name");
        WorkerRef {
            id,
            incarnation: Incarnation(incarnation),
        }
    }

    fn certificate() -> FenceCertificate {
        let control = ControlSeal {
            hash: [3; 16],
            offset: 17,
            owner_epoch: OwnerEpoch(2),
        };
        FenceCertificate {
            request: RequestId([1; 16]),
            migration_epoch: MigrationEpoch(4),
            owner_epoch: OwnerEpoch(2),
            src: worker("a", 1),
            seal: 17,
            kv_len: 40,
            set_digest: [9; 32],
            control,
        }
    }

    fn samples() -> Vec<Body> {
        let intent = Intent {
            migration_epoch: MigrationEpoch(4),
            generation: RouteGeneration(6),
            owner_epoch: OwnerEpoch(2),
            driver: 77,
            src: worker("a", 1),
            dst: worker("b", 2),
        };
        let token = |seq, text: &str, finish| Emission {
            seq,
            token: 5,
            text: text.as_bytes().to_vec(),
            finish,
        };
        let claim = |replica, page| PageClaim {
            replica,
            page,
            valid: 16,
            digest: [7; 32],
        };
        vec![
            Body::Prepare {
                intent: intent.clone(),
            },
            Body::Prepared,
            Body::Reserve { intent },
            Body::Ready {
                replicas: 2,
                align_tokens: 64,
            },
            Body::Offer(Offer {
                from: 0,
                to: 32,
                claims: vec![claim(0, 0), claim(1, 1)],
            }),
            Body::Verified { through: 32 },
            Body::Progress {
                accepted: 40,
                verified: 32,
                converged: true,
            },
            Body::Go,
            Body::Push(Push {
                certificate: certificate(),
                tail_from: 32,
                replicas: vec![[1; 32], [2; 32]],
                control_bytes: 100,
                tail_bytes: 1 << 20,
                tokens: vec![token(16, "", None), token(17, "é", Some(1))],
            }),
            Body::Cancel {
                cause: Cause::Cancelled,
            },
            Body::Refuse {
                cause: Cause::Engine,
            },
            Body::Outcome,
            Body::Emit {
                owner_epoch: OwnerEpoch(2),
                tokens: vec![token(1, "hi", None)],
            },
            Body::Accepted {
                owner_epoch: OwnerEpoch(2),
                through: 9,
            },
            Body::Fenced {
                floor: OwnerEpoch(3),
            },
            Body::Rebuild {
                owner_epoch: OwnerEpoch(3),
                journaled: 9,
            },
        ]
    }

    fn messages() -> impl Iterator<Item = Msg> {
        samples().into_iter().map(|body| Msg {
            request: RequestId([1; 16]),
            epoch: MigrationEpoch(4),
            body,
        })
    }

    #[test]
    fn every_message_survives_its_encoding() {
        for msg in messages() {
            assert_eq!(Msg::decode(&msg.encode()), Ok(msg));
        }
    }

    #[test]
    fn every_prefix_of_a_message_is_refused_and_its_payload_is_told_apart() {
        for msg in messages() {
            let mut bytes = msg.encode();
            for n in 0..bytes.len() {
                assert!(Msg::decode(&bytes[..n]).is_err(), "{msg:?} cut at {n}");
            }
            bytes.extend_from_slice(b"payload");
            assert_eq!(Msg::decode(&bytes), Err(DecodeError::Trailing(7)));
            assert_eq!(Msg::decode_prefix(&bytes), Ok((msg, &b"payload"[..])));
        }
    }

    #[test]
    fn flipped_bits_never_panic_and_what_decodes_encodes_to_the_same_bytes() {
        for msg in messages() {
            let good = msg.encode();
            for bit in 0..good.len() * 8 {
                let mut bytes = good.clone();
                bytes[bit / 8] ^= 1 << (bit % 8);
                if let Ok(other) = Msg::decode(&bytes) {
                    assert_eq!(other.encode(), bytes);
                }
            }
        }
    }

    #[test]
    fn a_huge_count_is_refused_before_anything_is_reserved() {
        let offer = Body::Offer(Offer {
            from: 0,
            to: 1,
            claims: Vec::new(),
        });
        let msg = Msg {
            request: RequestId([0; 16]),
            epoch: MigrationEpoch(1),
            body: offer,
        };
        let mut bytes = msg.encode();
        let at = bytes.len() - 4;
        bytes[at..].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Msg::decode(&bytes), Err(DecodeError::Range("offer.claims")));
        bytes[at..].copy_from_slice(&60_000u32.to_le_bytes());
        assert_eq!(
            Msg::decode(&bytes),
            Err(DecodeError::Truncated("offer.claims"))
        );
    }

    #[test]
    fn tokens_with_a_gap_are_refused() {
        let token = |seq| Emission {
            seq,
            token: 1,
            text: Vec::new(),
            finish: None,
        };
        for tokens in [
            vec![token(0)],
            vec![token(1), token(3)],
            vec![token(2), token(1)],
        ] {
            let body = Body::Emit {
                owner_epoch: OwnerEpoch(1),
                tokens,
            };
            let msg = Msg {
                request: RequestId([0; 16]),
                epoch: MigrationEpoch(0),
                body,
            };
            assert_eq!(
                Msg::decode(&msg.encode()),
                Err(DecodeError::Range("token.seq"))
            );
        }
    }
}
