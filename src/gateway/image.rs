//! The journal's image of a request: all that another worker needs to go on with it. The payload of
//! the protocol's `Rebuild`.

use prost::Message;

use crate::id::{MigrationEpoch, OwnerEpoch};
use crate::migrate::msg::Emission;
use crate::route::{DecodeError, Reader, Writer};
use crate::rpc::v1;

const MAGIC: [u8; 4] = *b"MLJ1";
const MAX_SUBMIT: usize = 8 << 20;
const MAX_CONTROL: usize = 8 << 20;
const MAX_TOKENS: usize = 1 << 22;
const MAX_TEXT: usize = 1 << 20;

/// A request's control state at a step boundary, as its worker told it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// The ownership it was taken under.
    pub owner_epoch: OwnerEpoch,
    /// Output tokens numbered.
    pub seal: u64,
    /// Tokens with KV.
    pub kv_len: u64,
    /// The ControlStateV1 encoding there.
    pub control: Vec<u8>,
    /// Digest of the KV up to there, where the worker keeps it.
    pub set_digest: Option<[u8; 32]>,
}

impl Checkpoint {
    fn put(&self, w: &mut Writer) {
        w.u64(self.owner_epoch.0);
        w.u64(self.seal);
        w.u64(self.kv_len);
        w.bytes(&self.control);
        w.u8(self.set_digest.is_some().into());
        if let Some(digest) = &self.set_digest {
            w.raw(digest);
        }
    }

    fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            owner_epoch: OwnerEpoch(r.u64("checkpoint.owner_epoch")?),
            seal: r.u64("checkpoint.seal")?,
            kv_len: r.u64("checkpoint.kv_len")?,
            control: r.bytes(MAX_CONTROL, "checkpoint.control")?.to_vec(),
            set_digest: match r.flag("checkpoint.set_digest")? {
                true => Some(r.array("checkpoint.set_digest")?),
                false => None,
            },
        })
    }

    /// The payload of a `CHECKPOINT` frame, behind the request's name.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        self.put(&mut w);
        w.0
    }

    /// Reads that payload; bounded.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let checkpoint = Self::get(&mut r)?;
        r.end()?;
        Ok(checkpoint)
    }
}

/// Everything needed to rebuild.
#[derive(Debug, Clone, PartialEq)]
pub struct Image {
    /// As the client asked for it, its seed resolved.
    pub submit: v1::SubmitRequest,
    /// Above every migration attempt so far.
    pub epoch: MigrationEpoch,
    /// The last checkpoint. Without one the request is computed again from its prompt, and the
    /// tokens that were journaled are compared with those that come out.
    pub checkpoint: Option<Checkpoint>,
    /// All journaled tokens, from number 1.
    pub tokens: Vec<Emission>,
}

impl Image {
    /// The payload's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.raw(&MAGIC);
        w.bytes(&self.submit.encode_to_vec());
        w.u64(self.epoch.0);
        w.u8(self.checkpoint.is_some().into());
        if let Some(checkpoint) = &self.checkpoint {
            checkpoint.put(&mut w);
        }
        w.u32(self.tokens.len() as u32);
        for t in &self.tokens {
            w.u32(t.token);
            w.u8(t.finish.map_or(u8::MAX, |f| f));
            w.bytes(&t.text);
        }
        w.0
    }

    /// Reads the payload; bounded.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        if r.array::<4>("image.magic")? != MAGIC {
            return Err(DecodeError::Version("journal image"));
        }
        let submit = v1::SubmitRequest::decode(r.bytes(MAX_SUBMIT, "image.submit")?)
            .map_err(|_| DecodeError::Range("image.submit"))?;
        let epoch = MigrationEpoch(r.u64("image.epoch")?);
        let checkpoint = if r.flag("image.checkpoint")? {
            Some(Checkpoint::get(&mut r)?)
        } else {
            None
        };
        let n = r.count(MAX_TOKENS, 9, "image.tokens")?;
        let mut tokens = Vec::with_capacity(n);
        for seq in 1..=n as u64 {
            let token = r.u32("image.token")?;
            let finish = Some(r.u8("image.finish")?).filter(|f| *f != u8::MAX);
            let text = r.bytes(MAX_TEXT, "image.text")?.to_vec();
            tokens.push(Emission {
                seq,
                token,
                text,
                finish,
            });
        }
        r.end()?;
        Ok(Self {
            submit,
            epoch,
            checkpoint,
            tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_survives_its_bytes_and_every_cut_of_them_is_refused() {
        let token = |seq| Emission {
            seq,
            token: seq as u32 + 7,
            text: b"x".to_vec(),
            finish: None,
        };
        let image = Image {
            submit: v1::SubmitRequest {
                request: "ab".into(),
                owner_epoch: 3,
                ..Default::default()
            },
            epoch: MigrationEpoch(4),
            checkpoint: Some(Checkpoint {
                owner_epoch: OwnerEpoch(1),
                seal: 1,
                kv_len: 9,
                control: vec![1, 2, 3],
                set_digest: Some([7; 32]),
            }),
            tokens: vec![
                token(1),
                Emission {
                    finish: Some(1),
                    ..token(2)
                },
            ],
        };
        let bytes = image.encode();
        assert_eq!(Image::decode(&bytes), Ok(image));
        for cut in 0..bytes.len() {
            assert!(Image::decode(&bytes[..cut]).is_err());
        }
    }
}
