//! What travels as payloads beside the protocol's messages: the token log and block table of an
//! offer, and the fence's push.

use crate::id::OwnerEpoch;
use crate::route::{DecodeError, Reader, Writer};

const MAX_TOKENS: usize = 1 << 22;
const MAX_BLOCKS: usize = 1 << 22;
const MAX_GROUPS: usize = 64;
const MAX_CONTROL: usize = 8 << 20;

/// The payload of an offer: token ids of `from..to`, and for each group the source's blocks that
/// hold those tokens. Block ids mean offsets in the pool of the import specification to the
/// destination's copy planner, and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OfferParcel {
    /// First token.
    pub from: u64,
    /// Ids of the tokens from there.
    pub tokens: Vec<u32>,
    /// By group: the table that starts at the block of `from`.
    pub tables: Vec<(u16, Vec<u32>)>,
}

fn put_words(w: &mut Writer, words: &[u32]) {
    w.u32(words.len() as u32);
    words.iter().for_each(|v| w.u32(*v));
}

fn get_words(r: &mut Reader<'_>, max: usize, what: &'static str) -> Result<Vec<u32>, DecodeError> {
    let n = r.count(max, 4, what)?;
    let raw = r.raw(n * 4, what)?;
    Ok(raw
        .chunks_exact(4)
        .map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]]))
        .collect())
}

impl OfferParcel {
    /// The payload's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.u64(self.from);
        put_words(&mut w, &self.tokens);
        w.u32(self.tables.len() as u32);
        for (group, table) in &self.tables {
            w.u16(*group);
            put_words(&mut w, table);
        }
        w.0
    }

    /// Reads the payload; bounded.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let from = r.u64("offer.from")?;
        let tokens = get_words(&mut r, MAX_TOKENS, "offer.tokens")?;
        let n = r.count(MAX_GROUPS, 6, "offer.tables")?;
        let mut tables = Vec::with_capacity(n);
        for _ in 0..n {
            tables.push((
                r.u16("offer.group")?,
                get_words(&mut r, MAX_BLOCKS, "offer.table")?,
            ));
        }
        r.end()?;
        Ok(Self {
            from,
            tokens,
            tables,
        })
    }

    /// The table of a group.
    pub fn table(&self, group: u16) -> Option<&[u32]> {
        self.tables
            .iter()
            .find(|(g, _)| *g == group)
            .map(|(_, t)| t.as_slice())
    }
}

/// The control section of a push: token ids that the offers did not carry, and the control state.
/// The tail's slots follow it in the payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PushParcel {
    /// Number of the first token id (0 = the first prompt token).
    pub tokens_from: u64,
    /// Ids from there through the pending token.
    pub tokens: Vec<u32>,
    /// The ownership that the control state names.
    pub owner_epoch: OwnerEpoch,
    /// ControlStateV1.
    pub control: Vec<u8>,
}

impl PushParcel {
    /// The section's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::with_capacity(
            32 + self.tokens.len() * 4 + self.control.len(),
        ));
        w.u64(self.tokens_from);
        put_words(&mut w, &self.tokens);
        w.u64(self.owner_epoch.0);
        w.bytes(&self.control);
        w.0
    }

    /// Reads the section, which may be followed by the tail's slots; returns those.
    pub fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), DecodeError> {
        let mut r = Reader::new(bytes);
        let tokens_from = r.u64("push.tokens_from")?;
        let tokens = get_words(&mut r, MAX_TOKENS, "push.tokens")?;
        let owner_epoch = OwnerEpoch(r.u64("push.owner_epoch")?);
        let control = r.bytes(MAX_CONTROL, "push.control")?.to_vec();
        let left = r.left();
        let tail = r.raw(left, "push.tail")?;
        Ok((
            Self {
                tokens_from,
                tokens,
                owner_epoch,
                control,
            },
            tail,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_survives_its_bytes_and_every_cut_of_them_is_refused() {
        let offer = OfferParcel {
            from: 32,
            tokens: vec![5, 6, 7],
            tables: vec![(0, vec![9, 1]), (3, vec![])],
        };
        let bytes = offer.encode();
        assert_eq!(OfferParcel::decode(&bytes), Ok(offer));
        for cut in 0..bytes.len() {
            assert!(OfferParcel::decode(&bytes[..cut]).is_err());
        }
    }

    #[test]
    fn a_push_gives_back_its_section_and_the_slots_behind_it() {
        let push = PushParcel {
            tokens_from: 3,
            tokens: vec![1, 2],
            owner_epoch: OwnerEpoch(4),
            control: vec![9; 40],
        };
        let mut bytes = push.encode();
        let section = bytes.len();
        bytes.extend_from_slice(&[7; 10]);
        let (read, tail) = PushParcel::decode(&bytes).unwrap();
        assert_eq!((read, tail), (push, &[7u8; 10][..]));
        for cut in 0..section {
            assert!(PushParcel::decode(&bytes[..cut]).is_err());
        }
    }

    #[test]
    fn a_count_that_the_input_cannot_hold_reserves_nothing() {
        let mut w = Writer::default();
        w.u64(0);
        w.u32(u32::MAX);
        assert!(OfferParcel::decode(&w.0).is_err());
        assert!(PushParcel::decode(&w.0).is_err());
    }
}
