//! Messages of the border that carry more than numbers, read as their receiver reads them and
//! written again. For checks of the decoder from outside; no call of an engine goes through here.

use super::wire::*;
use super::{fault, mirror, v1 as pb};
use crate::engine::adapter::{AdapterError, PageDigests};
use crate::id::Incarnation;
use prost::Message;
use tonic::{Code, Status};

/// A message and the value in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carried {
    /// Request and attempt.
    Key,
    /// Pin or stage.
    View,
    /// A pin as it stands.
    Pinned,
    /// Where a held request stands.
    Boundary,
    /// Digests of pages.
    Pages,
    /// What a destination must make room for.
    Spec,
    /// What is attached to a request in the making.
    Manifest,
    /// A request that is ready to run.
    Armed,
    /// A control state for recovery.
    Checkpoint,
    /// What a request is rebuilt from.
    Image,
    /// What an engine is, with the layouts that mirror its pools.
    Capabilities,
    /// Why a call failed.
    Fault,
}

impl Carried {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Key,
        Self::View,
        Self::Pinned,
        Self::Boundary,
        Self::Pages,
        Self::Spec,
        Self::Manifest,
        Self::Armed,
        Self::Checkpoint,
        Self::Image,
        Self::Capabilities,
        Self::Fault,
    ];
}

/// Why bytes carry no value.
#[derive(Debug, thiserror::Error)]
pub enum RereadError {
    /// They are no such message.
    #[error(transparent)]
    Malformed(#[from] prost::DecodeError),
    /// The message means nothing.
    #[error(transparent)]
    Refused(#[from] AdapterError),
}

/// Reads the bytes of one message as its receiver does, and writes what it understood. Allocates in
/// proportion to `bytes`. Of a fault that cannot be understood the error is what a caller gets:
/// [`AdapterError::EngineLost`].
pub fn reread(what: Carried, bytes: &[u8]) -> Result<Vec<u8>, RereadError> {
    Ok(match what {
        Carried::Key => {
            let m = pb::RequestKey::decode(bytes)?;
            let (request, epoch) = key_of(&m)?;
            key(Incarnation(m.incarnation), request, epoch).encode_to_vec()
        }
        Carried::View => {
            let m = pb::View::decode(bytes)?;
            view(Incarnation(m.incarnation), view_of(&m)?).encode_to_vec()
        }
        Carried::Pinned => pinned(pinned_of(pb::Pinned::decode(bytes)?)?).encode_to_vec(),
        Carried::Boundary => boundary(boundary_of(pb::Boundary::decode(bytes)?)?).encode_to_vec(),
        Carried::Pages => {
            let mut digests = PageDigests::new();
            pages_into(&pb::Pages::decode(bytes)?, &mut digests)?;
            pages(&digests).encode_to_vec()
        }
        Carried::Spec => {
            let m = pb::ImportSpec::decode(bytes)?;
            let incarnation = Incarnation(there(m.key.as_ref())?.incarnation);
            spec(incarnation, &spec_of(&m)?).encode_to_vec()
        }
        Carried::Manifest => {
            let m = pb::CommitImportRequest::decode(bytes)?;
            manifest(there(m.stage)?, &manifest_of(&m)?).encode_to_vec()
        }
        Carried::Armed => armed(armed_of(&pb::Armed::decode(bytes)?)?).encode_to_vec(),
        Carried::Checkpoint => {
            checkpoint(checkpoint_of(pb::Checkpoint::decode(bytes)?)?).encode_to_vec()
        }
        Carried::Image => {
            let m = pb::JournalImage::decode(bytes)?;
            let incarnation = Incarnation(there(m.key.as_ref())?.incarnation);
            image(incarnation, &image_of(m)?).encode_to_vec()
        }
        Carried::Capabilities => {
            let m = pb::Capabilities::decode(bytes)?;
            let told = capabilities_of(&m)?;
            for geometry in &told.header.groups {
                let group = u32::from(geometry.group);
                let pool = there(m.pools.iter().find(|p| p.group == group))?;
                mirror::layout(geometry, pool)?;
            }
            capabilities(&told, m.pools).encode_to_vec()
        }
        Carried::Fault => {
            let status = Status::with_details(Code::Internal, "", bytes.to_vec().into());
            let error = fault::from_status(&status, Incarnation(0));
            if let AdapterError::EngineLost(_) = error {
                return Err(error.into());
            }
            fault::to_status(&error).details().to_vec()
        }
    })
}
