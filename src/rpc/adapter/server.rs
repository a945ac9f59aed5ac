//! Serving an engine.

use super::v1::engine_adapter_server::{EngineAdapter as Service, EngineAdapterServer};
use super::v1::{self as pb};
use super::wire::*;
use super::{MAX_SLOT_BYTES, MAX_TOKENS, fault, slots};
use crate::engine::adapter::*;
use crate::id::{Incarnation, OwnerEpoch, RequestId};
use crate::page::TokenView;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use tonic::{Request, Response, Status};

/// An engine as a gRPC service. Every call runs on a thread of its own kind, since calls of the
/// contract may wait.
pub struct EngineService {
    engine: Arc<dyn EngineAdapter>,
    incarnation: Incarnation,
}

impl EngineService {
    /// The service over an engine, ready to be added to a server.
    pub fn new(engine: Arc<dyn EngineAdapter>) -> EngineAdapterServer<Self> {
        let incarnation = engine.capabilities().incarnation;
        EngineAdapterServer::new(Self {
            engine,
            incarnation,
        })
        .max_decoding_message_size(crate::rpc::MAX_MESSAGE)
        .max_encoding_message_size(crate::rpc::MAX_MESSAGE)
    }

    /// Runs a call where it may block. The incarnation never changes in a process, so comparing it
    /// here is as good as under the request's lock.
    async fn run<T: Send + 'static>(
        &self,
        asked: Option<u64>,
        call: impl FnOnce(&dyn EngineAdapter) -> Result<T> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let (asked, own) = (asked.map(Incarnation), self.incarnation);
        if let Some(asked) = asked.filter(|a| *a != own) {
            return Err(fault::to_status(&AdapterError::WrongIncarnation {
                asked,
                own,
            }));
        }
        let engine = self.engine.clone();
        match tokio::task::spawn_blocking(move || call(&*engine)).await {
            Ok(Ok(value)) => Ok(Response::new(value)),
            Ok(Err(error)) => Err(fault::to_status(&error)),
            Err(panic) => Err(fault::to_status(&AdapterError::Bug(panic.to_string()))),
        }
    }
}

fn stage_of(stage: &Option<pb::StageRef>) -> Result<StageId> {
    Ok(StageId(there(*stage)?.stage))
}

fn slot_range(from: u64, to: u64) -> Result<Range<u64>> {
    match from <= to {
        true => Ok(from..to),
        false => Err(AdapterError::Caller(
            "a range of slots ends before it begins",
        )),
    }
}

fn bounded(info: &PoolInfo, tokens: &Range<u64>) -> Result<()> {
    let bytes = (tokens.end - tokens.start).checked_mul(slots::token_bytes(&info.layout));
    // One token may be larger than a part; it still travels alone.
    match bytes.is_some_and(|b| b <= MAX_SLOT_BYTES) || tokens.end - tokens.start == 1 {
        true => Ok(()),
        false => Err(AdapterError::Caller("too many slots for one message")),
    }
}

fn read_slots(engine: &dyn EngineAdapter, r: &pb::ReadSlotsRequest) -> Result<pb::Slots> {
    let (view, group) = (view_of(&there(r.view)?)?, short(r.group)?);
    let all = slot_range(r.from, r.to)?;
    let tokens = slot_range(r.read_from, r.to)?;
    engine.table(view, group, all)?;
    if tokens.is_empty() {
        return Ok(pb::Slots::default());
    }
    let info = engine.pool(group)?;
    bounded(&info, &tokens)?;
    let table = engine.table(view, group, tokens.clone())?;
    let lease = info.pool.read_until(&table, Instant::now() + LEASE_WAIT)?;
    let seen = TokenView::new(&info.layout, &table, tokens.clone())?;
    Ok(pb::Slots {
        data: slots::gather(&seen, &lease, tokens)?,
    })
}

fn write_slots(engine: &dyn EngineAdapter, r: &pb::WriteSlotsRequest) -> Result<pb::Done> {
    let (stage, group) = (stage_of(&r.stage)?, short(r.group)?);
    let tokens = slot_range(r.from, r.to)?;
    let mut lease = engine.stage_write(stage, group, tokens.clone())?;
    if let Some(data) = &r.data {
        let info = engine.pool(group)?;
        bounded(&info, &tokens)?;
        let table = engine.table(stage.into(), group, tokens.clone())?;
        let seen = TokenView::new(&info.layout, &table, tokens.clone())?;
        slots::scatter(data, &seen, &mut lease, tokens)?;
    }
    Ok(pb::Done {})
}

fn pools(engine: &dyn EngineAdapter) -> Result<Vec<pb::GroupPool>> {
    let groups = engine.capabilities().header.groups;
    let pool = |group: u16| {
        let layout = engine.pool(group)?.layout;
        Ok(pb::GroupPool {
            group: group.into(),
            layers: layout.shard().layers.clone(),
            heads: layout.shard().heads.clone(),
            tokens: u64::from(layout.blocks()) * u64::from(layout.block_tokens()),
        })
    };
    groups.iter().map(|g| pool(g.group)).collect()
}

/// `name: Request => Response, its incarnation, what it does;` for each method.
macro_rules! methods {
    ($($name:ident: $req:ty => $res:ty, |$r:ident| $incarnation:expr, |$e:ident| $body:expr;)*) => {
        #[tonic::async_trait]
        impl Service for EngineService {
            $(
                async fn $name(&self, request: Request<$req>) -> Result<Response<$res>, Status> {
                    let $r = request.into_inner();
                    let incarnation = $incarnation;
                    self.run(incarnation, move |$e: &dyn EngineAdapter| $body).await
                }
            )*
        }
    };
}

/// The incarnation inside of a part; where the part is missing, the call itself says so.
macro_rules! of {
    ($part:expr) => {
        $part.as_ref().map(|p| p.incarnation)
    };
}

methods! {
    describe: pb::DescribeRequest => pb::Capabilities, |_r| None, |e| {
        Ok(capabilities(&e.capabilities(), pools(e)?))
    };
    pin: pb::RequestKey => pb::Pinned, |r| Some(r.incarnation), |e| {
        let (request, epoch) = key_of(&r)?;
        e.pin(request, epoch).map(pinned)
    };
    unpin: pb::PinRef => pb::Released, |r| Some(r.incarnation), |e| {
        e.unpin(PinId(r.pin)).map(released)
    };
    seal_through: pb::PinRef => pb::Sealed, |r| Some(r.incarnation), |e| {
        e.seal_through(PinId(r.pin)).map(sealed)
    };
    token_log: pb::TokenLogRequest => pb::Tokens, |r| of!(r.view), |e| {
        let mut tokens = e.token_log(view_of(&there(r.view)?)?, r.from)?;
        tokens.truncate(MAX_TOKENS);
        Ok(pb::Tokens { tokens })
    };
    hash_pages: pb::HashPagesRequest => pb::Pages, |r| of!(r.view), |e| {
        let mut out = PageDigests::new();
        let view = view_of(&there(r.view)?)?;
        e.hash_pages(view, short(r.group)?, r.first_page..r.end_page, r.upto_tokens, &mut out)?;
        Ok(pages(&out))
    };
    hash_tail: pb::HashTailRequest => pb::Pages, |r| of!(r.view), |e| {
        let mut out = PageDigests::new();
        e.hash_tail(view_of(&there(r.view)?)?, r.upto_tokens, &mut out)?;
        Ok(pages(&out))
    };
    read_slots: pb::ReadSlotsRequest => pb::Slots, |r| of!(r.view), |e| read_slots(e, &r);
    hold: pb::HoldRequest => pb::Boundary, |r| of!(r.key), |e| {
        let (request, epoch) = key_of(&there(r.key)?)?;
        e.hold(request, epoch, deadline(r.time_left_ns)).map(boundary)
    };
    release_hold: pb::RequestKey => pb::Done, |r| Some(r.incarnation), |e| {
        let (request, epoch) = key_of(&r)?;
        e.release_hold(request, epoch).map(|()| pb::Done {})
    };
    export_control: pb::ExportControlRequest => pb::Control, |r| of!(r.view), |e| {
        let export = e.export_control(view_of(&there(r.view)?)?, OwnerEpoch(r.owner_epoch))?;
        Ok(pb::Control { data: export.bytes, offset: export.digest.offset })
    };
    export_state: pb::ExportStateRequest => pb::Control, |r| of!(r.view), |e| {
        let data = e.export_state(view_of(&there(r.view)?)?, short(r.group)?)?;
        Ok(pb::Control { data, offset: 0 })
    };
    retire: pb::RequestKey => pb::Released, |r| Some(r.incarnation), |e| {
        let (request, epoch) = key_of(&r)?;
        e.retire(request, epoch).map(released)
    };
    prepare_import: pb::ImportSpec => pb::Stage, |r| of!(r.key), |e| {
        let stage = e.prepare_import(&spec_of(&r)?)?;
        Ok(pb::Stage { stage: stage.0 })
    };
    import_tokens: pb::ImportTokensRequest => pb::Done, |r| of!(r.stage), |e| {
        e.import_tokens(stage_of(&r.stage)?, r.from, &r.tokens).map(|()| pb::Done {})
    };
    write_slots: pb::WriteSlotsRequest => pb::Done, |r| of!(r.stage), |e| write_slots(e, &r);
    reopen: pb::ReopenRequest => pb::Done, |r| of!(r.stage), |e| {
        let (stage, group) = (stage_of(&r.stage)?, short(r.group)?);
        e.reopen(stage, group, slot_range(r.from, r.to)?).map(|()| pb::Done {})
    };
    commit_import: pb::CommitImportRequest => pb::Done, |r| of!(r.stage), |e| {
        e.commit_import(stage_of(&r.stage)?, &manifest_of(&r)?).map(|()| pb::Done {})
    };
    import_control: pb::ImportControlRequest => pb::Done, |r| of!(r.stage), |e| {
        let owner = OwnerEpoch(r.owner_epoch);
        e.import_control(stage_of(&r.stage)?, &r.data, owner).map(|()| pb::Done {})
    };
    import_state: pb::ImportStateRequest => pb::Done, |r| of!(r.stage), |e| {
        let (stage, group) = (stage_of(&r.stage)?, short(r.group)?);
        e.import_state(stage, group, &r.data).map(|()| pb::Done {})
    };
    arm: pb::StageRef => pb::Armed, |r| Some(r.incarnation), |e| e.arm(StageId(r.stage)).map(armed);
    disarm: pb::StageRef => pb::Released, |r| Some(r.incarnation), |e| {
        e.disarm(StageId(r.stage)).map(released)
    };
    abort_import: pb::StageRef => pb::Released, |r| Some(r.incarnation), |e| {
        e.abort_import(StageId(r.stage)).map(released)
    };
    activate: pb::ActivateRequest => pb::Activated, |r| of!(r.stage), |e| {
        let activation = Activation {
            owner_epoch: OwnerEpoch(r.owner_epoch),
            reemit_from: r.reemit_from,
        };
        let activated = e.activate(stage_of(&r.stage)?, activation)?;
        Ok(match activated {
            Activated::Already => pb::Activated { already: true, at_ns: 0 },
            Activated::Now { at_ns } => pb::Activated { already: false, at_ns },
        })
    };
    journal_checkpoint: pb::CheckpointRequest => pb::Checkpoint, |r| Some(r.incarnation), |e| {
        let request = RequestId(fixed(&r.request)?);
        e.journal_checkpoint(request, deadline(r.time_left_ns)).map(checkpoint)
    };
    rebuild_from_journal: pb::JournalImage => pb::Rebuilt, |r| of!(r.key), |e| {
        let rebuilt = e.rebuild_from_journal(&image_of(r)?)?;
        Ok(pb::Rebuilt {
            stage: rebuilt.stage.0,
            class: class(rebuilt.class),
            seal: rebuilt.seal,
        })
    };
}
