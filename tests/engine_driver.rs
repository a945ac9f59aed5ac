//! The engine with its driver thread: holds take effect at step boundaries, migrations between two
//! running engines leave every stream as it was, and nothing is left behind.

mod engine;

use engine::{Host, alone, fence, id, prepare, stream, stream_round};
use moonlivekv::engine::adapter::{Activation, AdapterError, EngineAdapter};
use moonlivekv::engine::reference::{
    CloseReason, EngineConfig, EngineEvent, GenerateSpec, KvOrder, ModelSource, Prompt,
    SyntheticGeometry, TokenEvent, clock_ns,
};
use moonlivekv::id::{MigrationEpoch, OwnerEpoch, RequestId};
use std::time::{Duration, Instant};

fn config() -> EngineConfig {
    EngineConfig {
        max_context: 2048,
        ..EngineConfig::tiny(31)
    }
}

fn spec(n: u8, output: u32) -> GenerateSpec {
    let tokens = (0..20 + u32::from(n)).map(|i| 260 + i * 11 % 190).collect();
    let mut spec = GenerateSpec::new(id(n), Prompt::Tokens(tokens));
    spec.stop.max_output = output;
    spec.stop.ignore_eos = true;
    spec.sampling.temperature = 1.0;
    spec.sampling.seed = Some(n.into());
    spec
}

/// Waits for events until `done`.
fn collect(host: &Host, into: &mut Vec<TokenEvent>, mut done: impl FnMut(&[TokenEvent]) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done(into) {
        match host
            .events
            .recv_deadline(deadline)
            .expect("an event in time")
        {
            EngineEvent::Token(t) => into.push(t),
            EngineEvent::Closed(_, CloseReason::Retired | CloseReason::Aborted) => {}
            EngineEvent::Closed(id, reason) => panic!("{id} {reason:?}"),
        }
    }
}

fn count(events: &[TokenEvent], request: RequestId) -> u64 {
    events.iter().filter(|e| e.request == request).count() as u64
}

#[test]
fn streams_are_the_same_across_migrations_between_running_engines() {
    let configs = [
        config(),
        EngineConfig {
            block_tokens: 32,
            order: KvOrder::Hnd,
            threads: 2,
            ..config()
        },
    ];
    let hosts = configs.clone().map(Host::started);
    let specs: Vec<GenerateSpec> = (1..=3).map(|n| spec(n, 150)).collect();
    for s in &specs {
        hosts[0].engine.submit(s.clone()).unwrap();
    }
    let mut events = vec![Vec::new(), Vec::new()];
    let mut at = [0usize; 4];
    for round in 1..=6u64 {
        for s in &specs {
            let n = s.request.0[0] as usize;
            let (from, to) = (at[n], 1 - at[n]);
            let have: u64 = events.iter().map(|e| count(e, s.request)).sum();
            collect(&hosts[from], &mut events[from], |e| {
                count(e, s.request) > 0 && have < 150
            });
            let (epoch, owner) = (MigrationEpoch(round), OwnerEpoch(round));
            let (src, dst) = (&hosts[from].engine, &hosts[to].engine);
            let (pinned, stage) = prepare(src, dst, s.request, epoch);
            let mut done = 0;
            for _ in 0..3 {
                done = stream_round(src, dst, &pinned, stage, done);
            }
            let moved = fence(src, dst, s.request, epoch, owner, &pinned, stage, done);
            let activation = Activation {
                owner_epoch: owner.next(),
                reemit_from: moved.seal + 1,
            };
            dst.activate(stage, activation).unwrap();
            src.retire(s.request, epoch).unwrap();
            src.unpin(pinned.pin).unwrap();
            at[n] = to;
        }
    }
    for s in &specs {
        let n = s.request.0[0] as usize;
        let host = at[n];
        let last = |e: &[TokenEvent]| {
            e.iter()
                .any(|e| e.request == s.request && e.finish.is_some())
        };
        collect(&hosts[host], &mut events[host], last);
    }
    for (host, events) in hosts.iter().zip(&mut events) {
        events.extend(host.tokens());
    }
    for s in &specs {
        let mut mine: Vec<_> = events
            .iter()
            .flatten()
            .filter(|e| e.request == s.request)
            .cloned()
            .collect();
        mine.sort_by_key(|e| e.seq);
        assert!(
            mine.windows(2)
                .all(|w| w[0].owner_epoch <= w[1].owner_epoch)
        );
        assert_eq!(stream(&mine), stream(&alone(&config(), s)));
    }
    for host in &hosts {
        host.engine.clear_prefix_cache();
        let s = host.engine.status();
        assert_eq!(
            (s.pool.used, s.pins, s.running, s.deferred_blocks),
            (0, 0, 0, 0)
        );
    }
}

#[test]
fn a_hold_takes_effect_at_the_end_of_the_step_in_flight_and_all_its_events_are_out() {
    let step_time = Duration::from_millis(3);
    let host = Host::started(EngineConfig {
        model: ModelSource::Synthetic {
            geometry: SyntheticGeometry::QWEN2_5_7B,
            seed: 1,
            step_time,
        },
        ..config()
    });
    for n in 1..=2 {
        let mut s = spec(n, 1000);
        s.sampling.temperature = 0.0;
        host.engine.submit(s).unwrap();
    }
    let mut events = Vec::new();
    for round in 1..=20u64 {
        let have = count(&events, id(1));
        collect(&host, &mut events, |e| count(e, id(1)) > have);
        let b = host
            .engine
            .hold(id(1), MigrationEpoch(round), engine::soon())
            .unwrap();
        let waited = clock_ns() - b.last_step_done_ns;
        assert!(waited < 200_000_000, "{waited} ns after the step's end");
        events.extend(host.tokens());
        assert_eq!(count(&events, id(1)), b.seal);
        // The neighbour goes on; the held request does not.
        let other = count(&events, id(2));
        collect(&host, &mut events, |e| count(e, id(2)) > other + 2);
        assert_eq!(count(&events, id(1)), b.seal);
        let again = host
            .engine
            .hold(id(1), MigrationEpoch(round), engine::soon())
            .unwrap();
        assert_eq!(again, b);
        host.engine
            .release_hold(id(1), MigrationEpoch(round))
            .unwrap();
    }
}

#[test]
fn a_hold_that_cannot_drain_in_time_says_so_and_the_request_runs_on() {
    let host = Host::started(EngineConfig {
        model: ModelSource::Synthetic {
            geometry: SyntheticGeometry {
                layers: 1,
                kv_heads: 1,
                head_dim: 8,
            },
            seed: 1,
            step_time: Duration::from_millis(400),
        },
        ..config()
    });
    let mut s = spec(1, 1000);
    s.sampling.temperature = 0.0;
    host.engine.submit(s).unwrap();
    let mut events = Vec::new();
    collect(&host, &mut events, |e| !e.is_empty());
    std::thread::sleep(Duration::from_millis(50));
    let soon = Instant::now() + Duration::from_millis(20);
    let held = host.engine.hold(id(1), MigrationEpoch(1), soon);
    assert_eq!(held, Err(AdapterError::DrainDeadline));
    collect(&host, &mut events, |e| e.len() > 2);
}

#[test]
fn an_abort_during_a_hold_waits_for_the_decision() {
    let host = Host::started(config());
    host.engine.submit(spec(1, 1000)).unwrap();
    let mut events = Vec::new();
    collect(&host, &mut events, |e| e.len() > 3);
    let pin = host.engine.pin(id(1), MigrationEpoch(1)).unwrap();
    let b = host
        .engine
        .hold(id(1), MigrationEpoch(1), engine::soon())
        .unwrap();
    host.engine.abort(id(1)).unwrap();
    host.engine
        .export_control(pin.pin.into(), OwnerEpoch(1))
        .unwrap();
    assert_eq!(
        host.engine.hold(id(1), MigrationEpoch(1), engine::soon()),
        Ok(b)
    );
    host.engine.release_hold(id(1), MigrationEpoch(1)).unwrap();
    assert!(host.engine.request(id(1)).is_none());
    assert!(
        host.events
            .iter()
            .any(|e| e == EngineEvent::Closed(id(1), CloseReason::Aborted))
    );
    assert!(
        host.engine.status().pool.used > 0,
        "the pin holds its blocks"
    );
    assert!(host.engine.unpin(pin.pin).unwrap().blocks > 0);
}

#[test]
fn the_last_handle_stops_the_driver() {
    let host = Host::started(config());
    host.engine.submit(spec(1, 2000)).unwrap();
    let events = host.events.clone();
    drop(host);
    let deadline = Instant::now() + Duration::from_secs(30);
    while events.recv_deadline(deadline).is_ok() {}
    assert!(Instant::now() < deadline, "the driver still emits");
}
