//! An engine's errors as causes of the protocol.

use crate::engine::adapter::AdapterError;
use crate::route::Cause;

/// Who met the error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The owner of the request.
    Source,
    /// The worker it moves to.
    Destination,
}

/// The cause that an adapter's error gives an attempt up for.
pub fn of(error: &AdapterError, side: Side) -> Cause {
    match error {
        AdapterError::Finished => Cause::RequestEnded,
        AdapterError::SealedDirty => Cause::SealDirty,
        AdapterError::DrainDeadline => Cause::Timeout,
        AdapterError::OutOfBlocks { .. } => Cause::NoSpace,
        AdapterError::Refused(_) | AdapterError::Incompatible(_) => Cause::ProfileMismatch,
        AdapterError::MutableState { .. } => Cause::ProfileMismatch,
        AdapterError::ReplayMismatch(_) | AdapterError::Control(_) => Cause::ControlMismatch,
        AdapterError::DeviceLost { .. } | AdapterError::EngineLost(_) | AdapterError::Bug(_) => {
            Cause::Engine
        }
        _ => match side {
            Side::Source => Cause::SourceRefused,
            Side::Destination => Cause::DestinationRefused,
        },
    }
}
