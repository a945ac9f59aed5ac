//! Errors across the border: the variant survives, so a caller acts on what happened and not on text.

use super::v1::{self as pb, fault::Of};
use crate::control_state::Refusal;
use crate::engine::adapter::{AdapterError, PinId, StageId, StageState, What};
use crate::id::{ErrorKind, Incarnation, MigrationEpoch, OwnerEpoch, RequestId};
use prost::Message as _;
use std::collections::BTreeSet;
use std::sync::Mutex;
use tonic::{Code, Status};

/// Different texts kept for variants whose text is `'static`; an engine that sends more is given a
/// common one.
const MAX_TEXTS: usize = 256;

/// Texts that live for ever, at most [`MAX_TEXTS`] of them.
struct Texts(Mutex<BTreeSet<&'static str>>);

static TEXTS: Texts = Texts(Mutex::new(BTreeSet::new()));

impl Texts {
    fn lasting(&self, text: &str) -> &'static str {
        let mut texts = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(known) = texts.get(text) {
            return known;
        }
        if texts.len() >= MAX_TEXTS || text.len() > 200 {
            return "what the engine named in its log";
        }
        let text: &'static str = Box::leak(text.to_owned().into_boxed_str());
        texts.insert(text);
        text
    }
}

fn lasting(text: &str) -> &'static str {
    TEXTS.lasting(text)
}

fn pair(asked: u64, have: u64) -> pb::Pair {
    pb::Pair { asked, have }
}

fn state(s: StageState) -> i32 {
    (match s {
        StageState::Open => pb::State::Open,
        StageState::Committed => pb::State::Committed,
        StageState::Loaded => pb::State::Loaded,
        StageState::Armed => pb::State::Armed,
        StageState::Active => pb::State::Active,
    }) as i32
}

fn state_of(number: i32) -> Option<StageState> {
    Some(match pb::State::try_from(number).ok()? {
        pb::State::Open => StageState::Open,
        pb::State::Committed => StageState::Committed,
        pb::State::Loaded => StageState::Loaded,
        pb::State::Armed => StageState::Armed,
        pb::State::Active => StageState::Active,
    })
}

fn what(w: &What) -> pb::What {
    use pb::what::Of;
    let of = match w {
        What::Request(r) => Of::Request(r.0.to_vec()),
        What::Pin(p) => Of::Pin(p.0),
        What::Stage(s) => Of::Stage(s.0),
        What::Group(g) => Of::Group((*g).into()),
    };
    pb::What { of: Some(of) }
}

fn what_of(w: pb::What) -> Option<What> {
    use pb::what::Of;
    Some(match w.of? {
        Of::Request(r) => What::Request(RequestId(r.try_into().ok()?)),
        Of::Pin(p) => What::Pin(PinId(p)),
        Of::Stage(s) => What::Stage(StageId(s)),
        Of::Group(g) => What::Group(g.try_into().ok()?),
    })
}

fn kind(k: ErrorKind) -> pb::Kind {
    match k {
        ErrorKind::Retryable => pb::Kind::Retryable,
        ErrorKind::PeerLost | ErrorKind::DeviceLost { .. } => pb::Kind::PeerLost,
        ErrorKind::Integrity => pb::Kind::Integrity,
        ErrorKind::Unsupported => pb::Kind::Unsupported,
        ErrorKind::Caller => pb::Kind::Caller,
        ErrorKind::Bug => pb::Kind::Bug,
    }
}

fn kind_of(number: i32) -> ErrorKind {
    match pb::Kind::try_from(number) {
        Ok(pb::Kind::Retryable) => ErrorKind::Retryable,
        Ok(pb::Kind::PeerLost) => ErrorKind::PeerLost,
        Ok(pb::Kind::Integrity) => ErrorKind::Integrity,
        Ok(pb::Kind::Unsupported) => ErrorKind::Unsupported,
        Ok(pb::Kind::Caller) => ErrorKind::Caller,
        Ok(pb::Kind::Bug) | Err(_) => ErrorKind::Bug,
    }
}

/// An error as the server sends it.
pub(super) fn to_status(error: &AdapterError) -> Status {
    use AdapterError as E;
    let slot = |group: u16, token| pb::Slot {
        group: group.into(),
        token,
    };
    let done = pb::Done {};
    let of = match error {
        E::Unknown(w) => Of::Unknown(what(w)),
        E::WrongIncarnation { own, .. } => Of::WrongIncarnation(own.0),
        E::StaleEpoch { asked, floor } => Of::StaleEpoch(pair(asked.0, floor.0)),
        E::OwnerEpoch { asked, current } => Of::OwnerEpoch(pair(asked.0, current.0)),
        E::Finished => Of::Finished(done),
        E::NotHeld => Of::NotHeld(done),
        E::DrainDeadline => Of::DrainDeadline(done),
        E::SealedDirty => Of::SealedDirty(done),
        E::OutOfRange { asked, limit } => Of::OutOfRange(pair(*asked, *limit)),
        E::OutOfBlocks { needed, free } => Of::OutOfBlocks(pair(*needed, *free)),
        E::Frozen { group, token } => Of::Frozen(slot(*group, *token)),
        E::NotHashed { group, token } => Of::NotHashed(slot(*group, *token)),
        E::StageState { is, needs } => Of::StageState(pb::States {
            is: state(*is),
            needs: state(*needs),
        }),
        E::Conflict(text) => Of::Conflict((*text).into()),
        E::Refused(refusal) => {
            let number = Refusal::ALL.iter().position(|r| r == refusal);
            Of::Refused(number.map_or(u32::MAX, |n| n as u32))
        }
        E::Incompatible(text) => Of::Incompatible((*text).into()),
        E::MutableState { group } => Of::MutableState((*group).into()),
        E::ReplayMismatch(text) => Of::ReplayMismatch((*text).into()),
        E::Busy => Of::Busy(done),
        E::DeviceLost { xid } => Of::DeviceLost(xid.unwrap_or(0)),
        E::Caller(text) => Of::Caller((*text).into()),
        E::Bug(text) => Of::Bug(text.clone()),
        E::Control(_)
        | E::Mem(_)
        | E::Page(_)
        | E::Digest(_)
        | E::Remote { .. }
        | E::EngineLost(_) => Of::Other(kind(error.kind()) as i32),
    };
    let code = match error.kind() {
        ErrorKind::Retryable => Code::Unavailable,
        ErrorKind::PeerLost | ErrorKind::DeviceLost { .. } => Code::Aborted,
        ErrorKind::Integrity => Code::DataLoss,
        ErrorKind::Unsupported => Code::FailedPrecondition,
        ErrorKind::Caller => Code::InvalidArgument,
        ErrorKind::Bug => Code::Internal,
    };
    let fault = pb::Fault {
        text: error.to_string(),
        of: Some(of),
    };
    Status::with_details(code, error.to_string(), fault.encode_to_vec().into())
}

/// What a status means; one without a fault comes from the connection, not from the engine.
pub(super) fn from_status(status: &Status, asked: Incarnation) -> AdapterError {
    let lost = || AdapterError::EngineLost(format!("{}: {}", status.code(), status.message()));
    if status.details().is_empty() {
        return lost();
    }
    match pb::Fault::decode(status.details()) {
        Ok(fault) => from_fault(fault, asked).unwrap_or_else(lost),
        Err(_) => lost(),
    }
}

fn from_fault(fault: pb::Fault, incarnation: Incarnation) -> Option<AdapterError> {
    use AdapterError as E;
    let group = |g: u32| u16::try_from(g).ok();
    Some(match fault.of? {
        Of::Unknown(w) => E::Unknown(what_of(w)?),
        Of::WrongIncarnation(own) => E::WrongIncarnation {
            asked: incarnation,
            own: Incarnation(own),
        },
        Of::StaleEpoch(p) => E::StaleEpoch {
            asked: MigrationEpoch(p.asked),
            floor: MigrationEpoch(p.have),
        },
        Of::OwnerEpoch(p) => E::OwnerEpoch {
            asked: OwnerEpoch(p.asked),
            current: OwnerEpoch(p.have),
        },
        Of::Finished(_) => E::Finished,
        Of::NotHeld(_) => E::NotHeld,
        Of::DrainDeadline(_) => E::DrainDeadline,
        Of::SealedDirty(_) => E::SealedDirty,
        Of::OutOfRange(p) => E::OutOfRange {
            asked: p.asked,
            limit: p.have,
        },
        Of::OutOfBlocks(p) => E::OutOfBlocks {
            needed: p.asked,
            free: p.have,
        },
        Of::Frozen(s) => E::Frozen {
            group: group(s.group)?,
            token: s.token,
        },
        Of::NotHashed(s) => E::NotHashed {
            group: group(s.group)?,
            token: s.token,
        },
        Of::StageState(s) => E::StageState {
            is: state_of(s.is)?,
            needs: state_of(s.needs)?,
        },
        Of::Conflict(text) => E::Conflict(lasting(&text)),
        Of::Refused(number) => E::Refused(*Refusal::ALL.get(number as usize)?),
        Of::Incompatible(text) => E::Incompatible(lasting(&text)),
        Of::MutableState(g) => E::MutableState { group: group(g)? },
        Of::ReplayMismatch(text) => E::ReplayMismatch(lasting(&text)),
        Of::Busy(_) => E::Busy,
        Of::DeviceLost(xid) => E::DeviceLost {
            xid: (xid != 0).then_some(xid),
        },
        Of::Caller(text) => E::Caller(lasting(&text)),
        Of::Bug(text) => E::Bug(text),
        Of::Other(number) => E::Remote {
            kind: kind_of(number),
            text: fault.text,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_crosses_the_border_as_itself() {
        let all = [
            AdapterError::Unknown(What::Request(RequestId([7; 16]))),
            AdapterError::Unknown(What::Pin(PinId(3))),
            AdapterError::Unknown(What::Stage(StageId(4))),
            AdapterError::Unknown(What::Group(5)),
            AdapterError::WrongIncarnation {
                asked: Incarnation(1),
                own: Incarnation(2),
            },
            AdapterError::StaleEpoch {
                asked: MigrationEpoch(1),
                floor: MigrationEpoch(2),
            },
            AdapterError::OwnerEpoch {
                asked: OwnerEpoch(1),
                current: OwnerEpoch(2),
            },
            AdapterError::Finished,
            AdapterError::NotHeld,
            AdapterError::DrainDeadline,
            AdapterError::SealedDirty,
            AdapterError::OutOfRange { asked: 1, limit: 2 },
            AdapterError::OutOfBlocks { needed: 1, free: 2 },
            AdapterError::Frozen { group: 1, token: 2 },
            AdapterError::NotHashed { group: 1, token: 2 },
            AdapterError::StageState {
                is: StageState::Armed,
                needs: StageState::Open,
            },
            AdapterError::StageState {
                is: StageState::Active,
                needs: StageState::Loaded,
            },
            AdapterError::StageState {
                is: StageState::Committed,
                needs: StageState::Open,
            },
            AdapterError::Conflict("a token"),
            AdapterError::Incompatible("the model"),
            AdapterError::MutableState { group: 9 },
            AdapterError::ReplayMismatch("the mask"),
            AdapterError::Busy,
            AdapterError::DeviceLost { xid: Some(79) },
            AdapterError::DeviceLost { xid: None },
            AdapterError::Caller("no"),
            AdapterError::Bug("yes".into()),
        ];
        let refusals = Refusal::ALL.map(AdapterError::Refused);
        for error in all.into_iter().chain(refusals) {
            let back = from_status(&to_status(&error), Incarnation(1));
            assert_eq!(back, error);
        }
        let other = AdapterError::Remote {
            kind: ErrorKind::Integrity,
            text: "bits".into(),
        };
        assert_eq!(from_status(&to_status(&other), Incarnation(1)), other);
    }

    #[test]
    fn a_status_that_is_not_the_engines_means_that_it_is_lost() {
        for status in [
            Status::unavailable("connection refused"),
            Status::with_details(Code::Internal, "x", vec![0xff, 0xff].into()),
            Status::with_details(
                Code::Internal,
                "x",
                pb::Fault::default().encode_to_vec().into(),
            ),
        ] {
            let error = from_status(&status, Incarnation(1));
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        }
    }

    #[test]
    fn texts_that_last_are_bounded() {
        let texts = Texts(Mutex::default());
        for i in 0..2 * MAX_TEXTS {
            texts.lasting(&format!("text {i}"));
        }
        assert_eq!(texts.lasting("text 7"), "text 7");
        assert_eq!(
            texts.lasting("text 300"),
            "what the engine named in its log"
        );
        assert_eq!(texts.0.lock().unwrap().len(), MAX_TEXTS);
    }
}
