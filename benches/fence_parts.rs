//! `cargo bench --bench fence_parts [-- CONTEXT]`: what each part of a fence costs an engine by
//! itself, in one process and one thread: no link, no store, caches as warm as repetition makes
//! them. The geometry is Qwen2.5-7B's. A line a part: the median and the 99th percentile in
//! microseconds over some hundred fences with one unverified slot each.

#[path = "../tests/engine/mod.rs"]
mod engine;

use engine::{Host, hashed, id, soon};
use moonlivekv::engine::adapter::{Activation, EngineAdapter, Manifest, PageDigests, View};
use moonlivekv::engine::reference::{
    EngineConfig, GenerateSpec, ModelSource, Prompt, SyntheticGeometry,
};
use moonlivekv::id::{MigrationEpoch, OwnerEpoch};
use moonlivekv::node::{kv, packed};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const FENCES: u64 = 300;

#[derive(Default)]
struct Parts(BTreeMap<&'static str, Vec<f64>>);

impl Parts {
    fn time<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let out = work();
        let us = start.elapsed().as_nanos() as f64 / 1e3;
        self.0.entry(name).or_default().push(us);
        out
    }
}

fn config(context: u32, shuffle: u64) -> EngineConfig {
    let mut config = EngineConfig::new(ModelSource::Synthetic {
        geometry: SyntheticGeometry::QWEN2_5_7B,
        seed: 1,
        step_time: Duration::ZERO,
    });
    config.block_tokens = 16;
    config.blocks = 2 * (context + 2048) / 16 + 64;
    config.block_shuffle_seed = shuffle;
    config.shared_memory = true;
    config
}

fn main() {
    let mut numbers = std::env::args().skip(1).filter_map(|a| a.parse().ok());
    let context: u32 = numbers.next_back().unwrap_or(1024);
    let hosts = [
        Host::stepper(config(context, 3)),
        Host::stepper(config(context, 4)),
    ];
    let request = id(7);
    let tokens = context;
    let mut spec = GenerateSpec::new(request, Prompt::SeededKv { tokens, seed: 5 });
    spec.stop.max_output = 1024;
    spec.stop.ignore_eos = true;
    hosts[0].engine.submit(spec).expect("submit");
    assert!(hosts[0].step_until(request, 2));
    let mut parts = Parts::default();
    let mut owner = hosts[0].engine.request(request).expect("runs").owner_epoch;
    for n in 0..FENCES {
        let at = n as usize % 2;
        let (src, dst) = (&hosts[at].engine, &hosts[1 - at].engine);
        let epoch = MigrationEpoch(n + 1);
        let (pinned, stage) = engine::prepare(src, dst, request, epoch);
        let done = engine::stream_round(src, dst, &pinned, stage, 0);
        hosts[at].step();
        one(
            &mut parts,
            src,
            dst,
            (request, epoch, owner),
            (&pinned, stage, done),
        );
        owner = OwnerEpoch(owner.0 + 1);
        src.retire(request, epoch).expect("retire");
        src.unpin(pinned.pin).expect("unpin");
        assert!(hosts[1 - at].step() > 0);
    }
    let mut sum = 0.0;
    for (name, mut us) in parts.0 {
        us.sort_by(f64::total_cmp);
        let (p50, p99) = (us[us.len() / 2], us[us.len() * 99 / 100]);
        sum += p50;
        println!("{name:24} p50 {p50:8.1}  p99 {p99:8.1}");
    }
    println!("{:24} p50 {sum:8.1}  ({context} tokens)", "sum of medians");
}

type Names = (moonlivekv::id::RequestId, MigrationEpoch, OwnerEpoch);

fn one(
    parts: &mut Parts,
    src: &moonlivekv::engine::reference::Engine,
    dst: &moonlivekv::engine::reference::Engine,
    (request, epoch, owner): Names,
    (pinned, stage, done): (
        &moonlivekv::engine::adapter::Pinned,
        moonlivekv::engine::adapter::StageId,
        u64,
    ),
) {
    let header = src.capabilities().header;
    let (pin, staged) = (View::Pin(pinned.pin), View::Stage(stage));
    let b = parts.time("1 hold", || src.hold(request, epoch, soon()).expect("hold"));
    let slots = done..b.kv_len;
    assert_eq!(slots.end - slots.start, 1);
    let mut pages = PageDigests::new();
    parts.time("2 source hash", || {
        kv::hash_range(src, &header, pin, slots.clone(), &mut pages).expect("hash");
    });
    let control = parts.time("3 export control", || {
        src.export_control(pin, owner).expect("export")
    });
    let mut bytes = Vec::new();
    parts.time("4 gather", || {
        packed::gather(src, &header, pin, slots.clone(), &mut bytes).expect("gather");
    });
    let log = src.token_log(pin, 0).expect("log");
    parts.time("5 import tokens", || {
        dst.import_tokens(stage, b.kv_len, &log[b.kv_len as usize..])
            .expect("tokens")
    });
    parts.time("5 land", || {
        packed::land(dst, &header, stage, &bytes, slots.start, slots.clone()).expect("land");
    });
    let mut again = PageDigests::new();
    parts.time("6 destination hash", || {
        kv::hash_range(dst, &header, staged, slots.clone(), &mut again).expect("hash");
    });
    assert!(pages.iter().eq(again.iter()));
    let manifest = Manifest {
        kv_len: b.kv_len,
        first_live: vec![(0, 0)],
    };
    parts.time("7 commit import", || {
        dst.commit_import(stage, &manifest).expect("commit")
    });
    parts.time("8 import control", || {
        dst.import_control(stage, &control.bytes, owner)
            .expect("import");
    });
    let held = parts.time("8 re-export", || {
        dst.export_control(staged, owner).expect("export")
    });
    assert_eq!(held, control);
    parts.time("9 arm", || dst.arm(stage).expect("arm"));
    let go = Activation {
        owner_epoch: OwnerEpoch(owner.0 + 1),
        reemit_from: b.seal + 1,
    };
    parts.time("9 activate", || dst.activate(stage, go).expect("activate"));
    let _ = hashed;
}
