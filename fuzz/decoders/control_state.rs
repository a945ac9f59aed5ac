//! ControlStateV1.

use super::{Target, seed};
use moonlivekv::control_state::{CodecError, ControlState, MAX_ENCODING_BYTES};

pub const TARGET: Target = Target {
    name: "control_state",
    run,
    outcomes: &[
        "accept",
        "bad-enum",
        "bad-magic",
        "field-trailing",
        "inconsistent",
        "nan",
        "negative-zero",
        "not-ascending",
        "reserved-flags",
        "too-large",
        "too-long",
        "trailing",
        "truncated",
        "unknown-critical",
        "unknown-version",
    ],
    // The others are golden vectors.
    seeds: || vec![seed("too-large", vec![0; MAX_ENCODING_BYTES + 1])],
};

fn run(data: &[u8]) -> &'static str {
    match ControlState::decode(data) {
        Ok(state) => {
            let again = state.encode().expect("what was decoded can be encoded");
            assert_eq!(again, data, "a second spelling of one state was accepted");
            "accept"
        }
        Err(e) => match e {
            CodecError::Truncated(_) => "truncated",
            CodecError::FieldTrailing { .. } => "field-trailing",
            CodecError::Trailing { .. } => "trailing",
            CodecError::TooLarge { .. } => "too-large",
            CodecError::TooLong { .. } => "too-long",
            CodecError::BadMagic(_) => "bad-magic",
            CodecError::UnknownVersion(_) => "unknown-version",
            CodecError::ReservedFlags(_) => "reserved-flags",
            CodecError::BadEnum { .. } => "bad-enum",
            CodecError::NotAscending { .. } => "not-ascending",
            CodecError::Nan { .. } => "nan",
            CodecError::NegativeZero { .. } => "negative-zero",
            CodecError::UnknownCritical { .. } => "unknown-critical",
            CodecError::Inconsistent { .. } => "inconsistent",
        },
    }
}
