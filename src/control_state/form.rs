//! The numbered fields in their order, and the rules between them.

use super::codec::{Item, Reader, Writer};
use super::error::{CodecError, Field};
use super::state::ControlState;

const MAGIC: [u8; 4] = *b"MLC1";
const VERSION: u16 = 1;

/// Field 0.
struct Header;

impl Item for Header {
    fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
        MAGIC.put(w)?;
        VERSION.put(w)?;
        0u16.put(w)
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
        let magic = <[u8; 4]>::take(r)?;
        if magic != MAGIC {
            return Err(CodecError::BadMagic(magic));
        }
        match u16::take(r)? {
            VERSION => {}
            other => return Err(CodecError::UnknownVersion(other)),
        }
        match u16::take(r)? {
            0 => Ok(Self),
            flags => Err(CodecError::ReservedFlags(flags)),
        }
    }
}

/// The one list of numbered fields, for both directions.
macro_rules! numbered {
    ($($number:literal $member:ident)*) => {
        fn put_fields(state: &ControlState, w: &mut Writer) -> Result<(), CodecError> {
            $( w.field($number, stringify!($member), &state.$member)?; )*
            Ok(())
        }

        fn take_fields(r: &mut Reader<'_>) -> Result<ControlState, CodecError> {
            $( let $member = r.field($number, stringify!($member))?; )*
            Ok(ControlState { $($member),* })
        }
    };
}
numbered! {
    1 identity
    2 engine
    3 model
    4 numerics_profile
    5 lora
    6 tokens
    7 position
    8 limits
    9 sampler
    10 penalties
    11 rng
    12 constraints
    13 grammar
    14 parsers
    15 stops
    16 detokenizer
    17 stream
    18 logprobs
    19 usage
    20 scheduling
    21 kv_groups
    22 mutable_state
    23 extensions
}

impl ControlState {
    /// The state's only encoding.
    ///
    /// Errors: `Nan`; `TooLong` / `TooLarge` for what passes a bound; `NotAscending` and
    /// `Inconsistent` for a state that contradicts itself.
    pub fn encode(&self) -> Result<Vec<u8>, CodecError> {
        self.check()?;
        let mut w = Writer::new();
        w.field(0, "header", &Header)?;
        put_fields(self, &mut w)?;
        w.finish()
    }

    /// Reads an encoding; knows no extension, so a critical one is refused.
    ///
    /// Accepts exactly what [`encode`](Self::encode) writes: encoding the result again gives the
    /// same bytes. Memory stays proportional to `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        Self::decode_knowing(bytes, &[])
    }

    /// [`decode`](Self::decode) for a reader that honours these extensions (namespace, version).
    pub fn decode_knowing(bytes: &[u8], known: &[(&[u8], u16)]) -> Result<Self, CodecError> {
        let mut r = Reader::new(bytes)?;
        r.field::<Header>(0, "header")?;
        let state = take_fields(&mut r)?;
        r.finish()?;
        state.check()?;
        let refused = state
            .extensions
            .iter()
            .find(|e| e.critical && !known.contains(&(&*e.namespace, e.version)));
        match refused {
            None => Ok(state),
            Some(e) => Err(CodecError::UnknownCritical {
                namespace: String::from_utf8_lossy(&e.namespace).into_owned(),
                version: e.version,
            }),
        }
    }

    /// The rules between items, the same for writer and reader.
    fn check(&self) -> Result<(), CodecError> {
        let inconsistent = |field, what| {
            Err(CodecError::Inconsistent {
                field: Field(field),
                what,
            })
        };
        let (prompt, output) = (self.tokens.prompt.count, self.tokens.output.count);
        if output == 0 {
            return inconsistent(6, "no output token, so there is nothing to continue from");
        }
        if prompt.checked_add(output - 1) != Some(self.position.kv_len) {
            return inconsistent(7, "kv_len is not prompt + output - 1");
        }
        if !ascending(self.kv_groups.iter().map(|g| g.group)) {
            return Err(CodecError::NotAscending {
                field: Field(21),
                what: "group",
            });
        }
        if !ascending(self.mutable_state.iter().map(|m| m.group)) {
            return Err(CodecError::NotAscending {
                field: Field(22),
                what: "group",
            });
        }
        if !ascending(self.extensions.iter().map(|e| (&e.namespace, e.version))) {
            return Err(CodecError::NotAscending {
                field: Field(23),
                what: "namespace",
            });
        }
        Ok(())
    }
}

fn ascending<T: PartialOrd>(keys: impl Iterator<Item = T>) -> bool {
    keys.is_sorted_by(|a, b| a < b)
}
