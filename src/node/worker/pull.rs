//! One pull: plan the copy between two layouts, lease the destination's blocks, read.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::core::Core;
use super::slot::RemoteTable;
use crate::drive::instant_at;
use crate::engine::adapter::{StageId, View};
use crate::id::{MigrationEpoch, RequestId};
use crate::migrate::destination::Pulled;
use crate::node::bulk::{Granted, PullReport};
use crate::node::kv::KvError;
use crate::node::spec::SourceSpec;
use crate::page::{CopyRun, TokenView, plan_copy};
use crate::transport::Span;

/// What to pull, and whence.
pub struct Work {
    /// Into which stage.
    pub stage: StageId,
    /// The source's pools and grants.
    pub spec: Arc<SourceSpec>,
    /// The source's block tables.
    pub remote: Arc<RemoteTable>,
    /// Which tokens.
    pub tokens: Range<u64>,
    /// Give up then.
    pub deadline_ns: u64,
    /// A second try: the pages may have been hashed and found different.
    pub again: bool,
    /// Set to end early.
    pub cancelled: Arc<AtomicBool>,
}

/// Connects to the source's bulk listeners before the first offer comes.
pub fn warm(core: &Arc<Core>, spec: &SourceSpec) {
    let path = spec.options.path;
    let grants: Vec<_> = spec
        .pools
        .iter()
        .filter_map(|p| Granted::decode(&p.grant).ok())
        .collect();
    let bulk = Arc::clone(&core.bulk);
    core.jobs.run(move || {
        for granted in grants {
            if let Err(error) = bulk.warm(path, &granted.endpoint) {
                tracing::debug!(%error, "the source's bulk listener does not answer");
            }
        }
    });
}

/// Pulls all groups; the outcome is the worst one's.
pub fn pull(core: &Core, request: RequestId, epoch: MigrationEpoch, work: &Work) -> Pulled {
    for pool in 0..work.spec.pools.len() {
        let report = match pull_group(core, work, pool) {
            Ok(report) => report,
            Err(error) => {
                tracing::warn!(%error, %request, "cannot pull");
                return Pulled::Failed;
            }
        };
        core.measures.add(request, epoch, "bytes", report.bytes);
        if let Some(path) = report.path {
            core.measures.transport(request, epoch, path.name());
        }
        if let Some(error) = report.error {
            tracing::warn!(%error, %request, from = work.tokens.start, "a pull failed");
            core.measures.add(request, epoch, "pulls-failed", 1);
        }
        if report.outcome != Pulled::Landed {
            return report.outcome;
        }
    }
    Pulled::Landed
}

fn pull_group(core: &Core, work: &Work, pool: usize) -> Result<PullReport, KvError> {
    use crate::engine::adapter::AdapterError;
    let source = &work.spec.pools[pool];
    let bad = |what| KvError::Engine(AdapterError::Caller(what));
    let granted = Granted::decode(&source.grant).map_err(|_| bad("the grant cannot be read"))?;
    let table = work.remote.tables.iter().find(|(g, _)| *g == source.group);
    let (_, table) = table.ok_or_else(|| bad("the offer has no table for this group"))?;
    let src = TokenView::new(&source.layout, table, work.remote.tokens.clone())?;
    let info = core.adapter.pool(source.group)?;
    let (tokens, view) = (work.tokens.clone(), View::Stage(work.stage));
    let mine = core.adapter.table(view, source.group, tokens.clone())?;
    let dst = TokenView::new(&info.layout, &mine, tokens.clone())?;
    let mut runs: Vec<CopyRun> = Vec::new();
    plan_copy(&src, &dst, tokens.clone(), &mut runs)?;
    let spans = runs
        .into_iter()
        .map(|r| Span {
            remote_off: r.src_off,
            local_off: r.dst_off,
            len: r.len,
        })
        .collect();
    if work.again {
        core.adapter
            .reopen(work.stage, source.group, tokens.clone())?;
    }
    let lease = core.adapter.stage_write(work.stage, source.group, tokens)?;
    let deadline = instant_at(work.deadline_ns);
    let path = work.spec.options.path;
    Ok(core
        .bulk
        .pull(path, &granted, spans, lease, deadline, &work.cancelled))
}
