//! Two engines in one process, and a migration between them by hand: the adapter's calls in the
//! order of the contract, bytes copied with leases. No protocol, no transport.
#![allow(dead_code)]

use moonlivekv::engine::adapter::{
    Activation, ControlExport, EngineAdapter, ImportSpec, Manifest, PageDigests, Pinned, StageId,
    View,
};
use moonlivekv::engine::reference::{
    Engine, EngineConfig, EngineEvent, GenerateSpec, TokenEvent, TokenSink,
};
use moonlivekv::id::{MigrationEpoch, OwnerEpoch, RequestId};
use moonlivekv::page::{CopyRun, TokenView, plan_copy};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub struct Host {
    pub engine: Engine,
    pub events: crossbeam_channel::Receiver<EngineEvent>,
}

impl Host {
    /// An engine that steps only in [`Host::step`].
    pub fn stepper(config: EngineConfig) -> Self {
        let (sink, events) = channel();
        let engine = Engine::stepper(config, sink).expect("engine");
        Self { engine, events }
    }

    /// An engine with its driver thread.
    pub fn started(config: EngineConfig) -> Self {
        let (sink, events) = channel();
        let engine = Engine::start(config, sink).expect("engine");
        Self { engine, events }
    }

    pub fn step(&self) -> usize {
        self.engine.step().expect("stepper").requests
    }

    /// Steps until nothing is left to do; the events in order.
    pub fn finish(&self) -> Vec<TokenEvent> {
        while self.step() > 0 {}
        self.tokens()
    }

    /// The token events so far.
    pub fn tokens(&self) -> Vec<TokenEvent> {
        self.events
            .try_iter()
            .filter_map(|e| match e {
                EngineEvent::Token(t) => Some(t),
                EngineEvent::Closed(..) => None,
            })
            .collect()
    }

    /// Steps until `request` has `n` output tokens or has ended; true if it has them and goes on.
    pub fn step_until(&self, request: RequestId, n: u64) -> bool {
        loop {
            match self.engine.request(request) {
                None => return false,
                Some(r) if r.output_tokens >= n => return true,
                Some(_) => assert!(self.step() > 0, "stuck"),
            }
        }
    }
}

fn channel() -> (Arc<dyn TokenSink>, crossbeam_channel::Receiver<EngineEvent>) {
    let (tx, rx) = crossbeam_channel::unbounded();
    (Arc::new(tx), rx)
}

pub fn id(n: u8) -> RequestId {
    RequestId([n; 16])
}

/// Everything that makes a stream, without times.
pub fn stream(events: &[TokenEvent]) -> Vec<(u64, u32, String, String)> {
    events
        .iter()
        .map(|e| {
            let finish = e.finish.map_or(String::new(), |f| format!("{f:?}"));
            (e.seq, e.token, e.text.clone(), finish)
        })
        .collect()
}

pub fn text(events: &[TokenEvent]) -> String {
    events.iter().map(|e| e.text.as_str()).collect()
}

/// Runs `spec` alone on a fresh engine.
pub fn alone(config: &EngineConfig, spec: &GenerateSpec) -> Vec<TokenEvent> {
    let host = Host::stepper(config.clone());
    host.engine.submit(spec.clone()).expect("submit");
    host.finish()
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// What a migration leaves to look at.
pub struct Moved {
    pub stage: StageId,
    pub control: ControlExport,
    pub pages: u64,
    pub seal: u64,
}

/// Copies tokens `from..to` of a pinned request into a stage.
pub fn copy(src: &Engine, dst: &Engine, pin: View, stage: StageId, tokens: std::ops::Range<u64>) {
    if tokens.is_empty() {
        return;
    }
    let (from, to) = (src.pool(0).unwrap(), dst.pool(0).unwrap());
    let src_table = src.table(pin, 0, tokens.clone()).unwrap();
    let dst_table = dst.table(View::Stage(stage), 0, tokens.clone()).unwrap();
    let src_view = TokenView::new(&from.layout, &src_table, tokens.clone()).unwrap();
    let dst_view = TokenView::new(&to.layout, &dst_table, tokens.clone()).unwrap();
    let mut runs: Vec<CopyRun> = Vec::new();
    plan_copy(&src_view, &dst_view, tokens.clone(), &mut runs).unwrap();
    let read = from.pool.read_until(&src_table, soon()).unwrap();
    let mut write = dst.stage_write(stage, 0, tokens).unwrap();
    for run in &runs {
        let len = run.len as usize;
        write
            .bytes_mut(run.dst_off, len)
            .copy_from_slice(read.bytes(run.src_off, len));
    }
}

/// PREPARE and RESERVE.
pub fn prepare(
    src: &Engine,
    dst: &Engine,
    request: RequestId,
    epoch: MigrationEpoch,
) -> (Pinned, StageId) {
    let pinned = src.pin(request, epoch).expect("pin");
    let caps = src.capabilities();
    let spec = ImportSpec {
        request,
        epoch,
        header: caps.header.clone(),
        source: caps.fingerprint,
        rng: rng_of(src, &pinned, request, epoch),
        prompt_tokens: pinned.prompt_tokens,
        max_tokens: pinned.max_tokens,
        first_live: pinned.first_live.clone(),
    };
    let stage = dst.prepare_import(&spec).expect("prepare");
    (pinned, stage)
}

/// The generator of a request, from a checkpoint.
fn rng_of(
    src: &Engine,
    _: &Pinned,
    request: RequestId,
    _: MigrationEpoch,
) -> moonlivekv::control_state::RngKind {
    let point = src
        .journal_checkpoint(request, soon())
        .expect("journal checkpoint");
    moonlivekv::control_state::ControlState::decode(&point.control)
        .expect("decodes")
        .rng
        .rng_kind
}

/// Streams what is sealed, and checks it page by page.
pub fn stream_round(src: &Engine, dst: &Engine, pinned: &Pinned, stage: StageId, done: u64) -> u64 {
    let pin = View::Pin(pinned.pin);
    let sealed = src.seal_through(pinned.pin).unwrap();
    assert!(!sealed.dirty && sealed.generation == pinned.generation);
    copy(src, dst, pin, stage, done..sealed.stable_len);
    let tokens = src.token_log(pin, 0).unwrap();
    dst.import_tokens(stage, 0, &tokens).unwrap();
    let page = u64::from(src.capabilities().header.page_tokens);
    let full = sealed.stable_len / page;
    if full > done / page {
        let pages = (done / page) as u32..full as u32;
        assert_eq!(
            hashed(src, pin, pages.clone(), full * page),
            hashed(dst, View::Stage(stage), pages, full * page)
        );
    }
    if !sealed.stable_len.is_multiple_of(page) {
        assert_eq!(
            tail(src, pin, sealed.stable_len),
            tail(dst, View::Stage(stage), sealed.stable_len)
        );
    }
    sealed.stable_len
}

pub fn hashed(e: &Engine, view: View, pages: std::ops::Range<u32>, upto: u64) -> PageDigests {
    let mut out = PageDigests::new();
    e.hash_pages(view, 0, pages, upto, &mut out).unwrap();
    out
}

pub fn tail(e: &Engine, view: View, upto: u64) -> PageDigests {
    let mut out = PageDigests::new();
    e.hash_tail(view, upto, &mut out).unwrap();
    out
}

/// From hold to armed, after `done` tokens were streamed.
#[allow(clippy::too_many_arguments, reason = "a table row of a test")]
pub fn fence(
    src: &Engine,
    dst: &Engine,
    request: RequestId,
    epoch: MigrationEpoch,
    owner: OwnerEpoch,
    pinned: &Pinned,
    stage: StageId,
    done: u64,
) -> Moved {
    let pin = View::Pin(pinned.pin);
    let boundary = src.hold(request, epoch, soon()).expect("hold");
    assert_eq!(boundary.sealed.stable_len, boundary.kv_len);
    assert_eq!(boundary.kv_len, pinned.prompt_tokens + boundary.seal - 1);
    let page = u64::from(src.capabilities().header.page_tokens);
    stream_round(src, dst, pinned, stage, done);
    let control = src.export_control(pin, owner).expect("export");
    assert_eq!(control.digest.offset, boundary.seal);
    let manifest = Manifest {
        kv_len: boundary.kv_len,
        first_live: vec![(0, 0)],
    };
    dst.commit_import(stage, &manifest).expect("commit_import");
    dst.import_control(stage, &control.bytes, owner)
        .expect("import_control");
    let again = dst
        .export_control(View::Stage(stage), owner)
        .expect("re-export");
    assert_eq!(again, control, "the destination holds another state");
    let armed = dst.arm(stage).expect("arm");
    assert_eq!(armed.replayed, boundary.seal);
    assert_eq!(armed.pending_token, boundary.pending_token);
    Moved {
        stage,
        control,
        pages: boundary.kv_len.div_ceil(page),
        seal: boundary.seal,
    }
}

/// A whole migration at the present token; the destination does not run before this returns.
pub fn migrate(
    src: &Engine,
    dst: &Engine,
    request: RequestId,
    epoch: MigrationEpoch,
    owner: OwnerEpoch,
) -> Moved {
    let (pinned, stage) = prepare(src, dst, request, epoch);
    let done = stream_round(src, dst, &pinned, stage, 0);
    let moved = fence(src, dst, request, epoch, owner, &pinned, stage, done);
    dst.activate(
        stage,
        Activation {
            owner_epoch: owner.next(),
            reemit_from: moved.seal + 1,
        },
    )
    .expect("activate");
    src.retire(request, epoch).expect("retire");
    src.unpin(pinned.pin).expect("unpin");
    moved
}
