//! Migrations in one process, by hand through the adapter: at every token boundary, with every
//! sampler, grammar, stop string and split character, the stream is the one of a request that never
//! moved, and the control state that the destination exports is the source's.

mod engine;

use engine::{Host, alone, id, migrate, prepare, stream, stream_round};
use moonlivekv::control_state::ControlState;
use moonlivekv::engine::adapter::{Activation, AdapterError, EngineAdapter, View};
use moonlivekv::engine::reference::{
    EngineConfig, GenerateSpec, GrammarSpec, KvOrder, PenaltyScope, Prompt,
};
use moonlivekv::id::{MigrationEpoch, OwnerEpoch};

fn source() -> EngineConfig {
    EngineConfig {
        max_context: 512,
        ..EngineConfig::tiny(11)
    }
}

/// Another block size, order and placement than the source's.
fn destination() -> EngineConfig {
    EngineConfig {
        block_tokens: 64,
        order: KvOrder::Hnd,
        block_shuffle_seed: 5,
        prefill_chunk: 19,
        ..source()
    }
}

/// One request for each thing that has state of its own.
fn requests() -> Vec<(&'static str, GenerateSpec)> {
    let base = |n: u8, output: u32| {
        let mut spec = GenerateSpec::new(id(n), Prompt::Text("the water was near the old".into()));
        spec.stop.max_output = output;
        spec.sampling.seed = Some(1000 + u64::from(n));
        spec
    };
    let mut all = vec![("greedy", base(1, 24))];
    let mut s = base(2, 24);
    s.sampling.temperature = 1.0;
    all.push(("temperature", s));
    let mut s = base(3, 24);
    s.sampling.temperature = 1.3;
    s.sampling.top_k = 40;
    s.sampling.top_p = 0.9;
    s.sampling.min_p = 0.02;
    s.sampling.typical_p = 0.95;
    s.sampling.repetition_penalty = 1.2;
    s.sampling.frequency_penalty = 0.3;
    s.sampling.presence_penalty = 0.4;
    s.sampling.logit_bias = [(300, 2.5), (301, -3.0)].into();
    s.sampling.bad_words = vec![vec![310], vec![262, 263]];
    s.stop.stop_ids = [317].into();
    all.push(("everything", s));
    let mut s = base(4, 24);
    s.sampling.temperature = 1.0;
    s.sampling.penalty_scope = PenaltyScope::Window;
    s.sampling.penalty_window = 9;
    s.sampling.repetition_penalty = 1.5;
    all.push(("window", s));
    let mut s = base(5, 40);
    s.grammar = Some(GrammarSpec::Regex("(🙂|é| the){4,9}!".into()));
    s.sampling.temperature = 1.5;
    all.push(("split characters", s));
    let mut s = base(6, 60);
    s.grammar = Some(GrammarSpec::JsonObject);
    s.sampling.temperature = 1.2;
    s.stop.min_output = 5;
    all.push(("json", s));
    let mut s = base(7, 40);
    s.sampling.temperature = 1.0;
    s.grammar = Some(GrammarSpec::Regex("(E|N|EN|x){12,20}END.*".into()));
    s.stop.stop_strings = vec!["END".into(), "xxEN".into()];
    all.push(("stop strings", s));
    let mut s = base(8, 30);
    s.sampling.temperature = 2.0;
    s.sampling.allowed_tokens = Some([0xf0, 0x9f, 0x99, 0x82, 0xc3, 0xa9, 256, 65].into());
    s.stop.ignore_eos = true;
    s.stop.skip_special = false;
    all.push(("broken characters and markers", s));
    all
}

#[test]
fn a_stream_is_the_same_wherever_it_is_cut() {
    for (name, spec) in requests() {
        let want = stream(&alone(&source(), &spec));
        assert!(want.len() > 3, "{name}: {want:?}");
        for cut in 1..want.len() as u64 {
            let (src, dst) = (Host::stepper(source()), Host::stepper(destination()));
            src.engine.submit(spec.clone()).unwrap();
            assert!(src.step_until(spec.request, cut), "{name} cut {cut}");
            migrate(
                &src.engine,
                &dst.engine,
                spec.request,
                MigrationEpoch(1),
                OwnerEpoch(1),
            );
            let mut events = src.finish();
            assert_eq!(events.len() as u64, cut);
            let after = dst.finish();
            assert!(after.iter().all(|e| e.owner_epoch == OwnerEpoch(2)));
            events.extend(after);
            assert_eq!(stream(&events), want, "{name} cut {cut}");
        }
    }
}

#[test]
fn a_request_can_move_at_every_token_and_back() {
    for (name, spec) in requests() {
        let want = stream(&alone(&source(), &spec));
        let hosts = [Host::stepper(source()), Host::stepper(destination())];
        hosts[0].engine.submit(spec.clone()).unwrap();
        let mut events = Vec::new();
        let mut at = 0;
        let mut n = 1;
        while hosts[at].step_until(spec.request, n) {
            events.extend(hosts[at].tokens());
            let moved = migrate(
                &hosts[at].engine,
                &hosts[1 - at].engine,
                spec.request,
                MigrationEpoch(n),
                OwnerEpoch(n),
            );
            assert_eq!(moved.seal, n);
            at = 1 - at;
            n += 1;
        }
        events.extend(hosts[at].tokens());
        assert_eq!(stream(&events), want, "{name}");
        for host in &hosts {
            host.engine.clear_prefix_cache();
            let s = host.engine.status();
            assert_eq!(
                (s.pool.used, s.promised_blocks, s.pins, s.running),
                (0, 0, 0, 0)
            );
        }
    }
}

#[test]
fn a_control_state_after_a_migration_is_that_of_a_request_that_never_moved() {
    for (name, spec) in requests() {
        let control = |cut: Option<u64>, at: u64| -> Option<Vec<u8>> {
            let (src, dst) = (Host::stepper(source()), Host::stepper(source()));
            src.engine.submit(spec.clone()).unwrap();
            let host = match cut {
                Some(cut) => {
                    assert!(src.step_until(spec.request, cut));
                    migrate(
                        &src.engine,
                        &dst.engine,
                        spec.request,
                        MigrationEpoch(1),
                        OwnerEpoch(1),
                    );
                    &dst
                }
                None => &src,
            };
            if !host.step_until(spec.request, at) {
                return None;
            }
            let point = host.engine.journal_checkpoint(spec.request, engine::soon());
            Some(point.unwrap().control)
        };
        for at in [3, 7, 12] {
            assert_eq!(control(None, at), control(Some(2), at), "{name} at {at}");
        }
    }
}

#[test]
fn undelivered_tokens_are_emitted_again_as_they_were() {
    for (name, spec) in requests() {
        let want = alone(&source(), &spec);
        let cut = (want.len() as u64 - 1).min(9);
        let (src, dst) = (Host::stepper(source()), Host::stepper(destination()));
        src.engine.submit(spec.clone()).unwrap();
        assert!(src.step_until(spec.request, cut));
        let (epoch, owner) = (MigrationEpoch(4), OwnerEpoch(1));
        let (pinned, stage) = prepare(&src.engine, &dst.engine, spec.request, epoch);
        let done = stream_round(&src.engine, &dst.engine, &pinned, stage, 0);
        let moved = engine::fence(
            &src.engine,
            &dst.engine,
            spec.request,
            epoch,
            owner,
            &pinned,
            stage,
            done,
        );
        let activation = Activation {
            owner_epoch: OwnerEpoch(2),
            reemit_from: 3.min(moved.seal + 1),
        };
        dst.engine.activate(stage, activation).unwrap();
        assert_eq!(
            stream(&dst.finish()),
            stream(&want)[2.min(moved.seal as usize)..],
            "{name}"
        );
    }
}

/// What the destination is told ahead of a fence, each with whether it is true.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ahead {
    Earlier,
    OtherTerms,
    BeyondTheLog,
    Garbage,
}

#[test]
fn a_request_rebuilt_ahead_of_its_fence_is_the_one_rebuilt_in_it() {
    for (name, spec) in requests() {
        let want = alone(&source(), &spec);
        for ahead in [
            Ahead::Earlier,
            Ahead::OtherTerms,
            Ahead::BeyondTheLog,
            Ahead::Garbage,
        ] {
            let (src, dst) = (Host::stepper(source()), Host::stepper(destination()));
            src.engine.submit(spec.clone()).unwrap();
            assert!(src.step_until(spec.request, 2));
            let (epoch, owner) = (MigrationEpoch(4), OwnerEpoch(1));
            let (pinned, stage) = prepare(&src.engine, &dst.engine, spec.request, epoch);
            let done = stream_round(&src.engine, &dst.engine, &pinned, stage, 0);
            let mut preview = src.engine.rehearse_export(pinned.pin).unwrap();
            if ahead == Ahead::OtherTerms {
                let mut state = ControlState::decode(&preview).unwrap();
                state.limits.max_output += 1;
                state.rng.seed ^= 1;
                preview = state.encode().unwrap();
            }
            if ahead == Ahead::Garbage {
                preview.reverse();
            }
            if ahead != Ahead::BeyondTheLog {
                let log = src.engine.token_log(pinned.pin.into(), 0).unwrap();
                dst.engine.import_tokens(stage, 0, &log).unwrap();
            }
            for _ in 0..3 {
                dst.engine.rehearse_import(stage, &preview);
            }
            for _ in 0..3 {
                src.step();
            }
            if src.engine.request(spec.request).is_none() {
                continue; // it ended meanwhile
            }
            let done = stream_round(&src.engine, &dst.engine, &pinned, stage, done);
            let (request, s, d) = (spec.request, &src.engine, &dst.engine);
            let moved = engine::fence(s, d, request, epoch, owner, &pinned, stage, done);
            let activation = Activation {
                owner_epoch: OwnerEpoch(2),
                reemit_from: 1,
            };
            dst.engine.activate(stage, activation).unwrap();
            assert!(moved.seal >= 5, "{name}");
            assert_eq!(stream(&dst.finish()), stream(&want), "{name}, {ahead:?}");
        }
    }
}

#[test]
fn a_failed_attempt_leaves_the_source_as_if_nothing_had_happened() {
    let (_, spec) = requests().swap_remove(2);
    let want = stream(&alone(&source(), &spec));
    let (src, dst) = (Host::stepper(source()), Host::stepper(destination()));
    src.engine.submit(spec.clone()).unwrap();
    src.step_until(spec.request, 5);
    let free = dst.engine.status().pool.free;
    for n in 1..=6u64 {
        let epoch = MigrationEpoch(n);
        let (pinned, stage) = prepare(&src.engine, &dst.engine, spec.request, epoch);
        let done = stream_round(&src.engine, &dst.engine, &pinned, stage, 0);
        src.step();
        if n % 2 == 0 {
            engine::fence(
                &src.engine,
                &dst.engine,
                spec.request,
                epoch,
                OwnerEpoch(1),
                &pinned,
                stage,
                done,
            );
            assert_eq!(src.step(), 0, "a held request must not step");
            assert!(dst.engine.abort_import(stage).is_err(), "armed");
        }
        assert!(dst.engine.disarm(stage).unwrap().blocks > 0);
        assert_eq!(dst.engine.disarm(stage).unwrap().blocks, 0);
        assert_eq!(dst.engine.status().pool.free, free);
        src.engine.release_hold(spec.request, epoch).unwrap();
        src.engine.unpin(pinned.pin).unwrap();
    }
    assert_eq!(dst.step(), 0);
    assert_eq!(stream(&src.finish()), want);
}

#[test]
fn any_bit_flipped_in_a_valid_slot_changes_the_digest() {
    let src = Host::stepper(source());
    let (_, spec) = requests().swap_remove(0);
    src.engine.submit(spec.clone()).unwrap();
    src.step_until(spec.request, 7);
    let pin = src.engine.pin(spec.request, MigrationEpoch(1)).unwrap();
    let len = src.engine.seal_through(pin.pin).unwrap().stable_len;
    let view = View::Pin(pin.pin);
    let page = u64::from(source().page_tokens);
    let pages = len.div_ceil(page) as u32;
    let before = engine::hashed(&src.engine, view, 0..pages, len);
    let info = src.engine.pool(0).unwrap();
    let table = src.engine.table(view, 0, 0..len).unwrap();
    let per_block = u64::from(info.layout.block_tokens());
    let row = info.layout.geometry().k_bytes as usize;
    let mut flipped = 0;
    for token in 0..len {
        let block = table[(token / per_block) as usize];
        for layer in 0..4u32 {
            for head in 0..2u32 {
                for c in [
                    moonlivekv::page::Component::K,
                    moonlivekv::page::Component::V,
                ] {
                    let slot = (token % per_block) as u32;
                    let at = info.layout.locate(layer, head, c, block, slot).unwrap();
                    let bit = (token * 31 + u64::from(layer * 7 + head)) as usize % (row * 8);
                    let flip = || {
                        let mut w = info.pool.write(&[block]).unwrap();
                        w.bytes_mut(at, row)[bit / 8] ^= 1 << (bit % 8);
                    };
                    flip();
                    let p = (token / page) as u32;
                    let now = engine::hashed(&src.engine, view, p..p + 1, len);
                    let (was, _) = before.iter().nth(p as usize).unwrap();
                    let (is, _) = now.iter().next().unwrap();
                    assert_ne!(is.digest, was.digest, "token {token} layer {layer}");
                    flip();
                    flipped += 1;
                }
            }
        }
    }
    assert_eq!(engine::hashed(&src.engine, view, 0..pages, len), before);
    assert_eq!(flipped, len * 4 * 2 * 2);
}

#[test]
fn a_flipped_exponent_bit_changes_later_tokens() {
    let (_, mut spec) = requests().swap_remove(1);
    spec.stop.max_output = 60;
    let want = stream(&alone(&source(), &spec));
    let mut changed = 0;
    for token in [0u64, 3, 6] {
        for layer in 0..4u32 {
            let host = Host::stepper(source());
            host.engine.submit(spec.clone()).unwrap();
            host.step_until(spec.request, 4);
            let pin = host.engine.pin(spec.request, MigrationEpoch(1)).unwrap();
            let info = host.engine.pool(0).unwrap();
            let table = host
                .engine
                .table(View::Pin(pin.pin), 0, 0..token + 1)
                .unwrap();
            let at = info
                .layout
                .locate(
                    layer,
                    0,
                    moonlivekv::page::Component::V,
                    table[0],
                    token as u32,
                )
                .unwrap();
            let mut w = info.pool.write(&[table[0]]).unwrap();
            // bf16: bit 14 is the top of the exponent.
            w.bytes_mut(at, 64)
                .chunks_exact_mut(2)
                .for_each(|e| e[1] ^= 0x40);
            drop(w);
            changed += u32::from(stream(&host.finish()) != want);
        }
    }
    assert_eq!(changed, 12);
}

#[test]
fn stale_epochs_and_wrong_states_are_refused() {
    let (_, spec) = requests().swap_remove(0);
    let (src, dst) = (Host::stepper(source()), Host::stepper(destination()));
    src.engine.submit(spec.clone()).unwrap();
    src.step_until(spec.request, 3);
    let (old, old_stage) = prepare(&src.engine, &dst.engine, spec.request, MigrationEpoch(1));
    let (_, stage) = prepare(&src.engine, &dst.engine, spec.request, MigrationEpoch(2));
    let stale = |r: Result<(), AdapterError>| matches!(r, Err(AdapterError::StaleEpoch { .. }));
    assert!(stale(src.engine.seal_through(old.pin).map(drop)));
    assert!(stale(dst.engine.import_tokens(old_stage, 0, &[1])));
    assert!(stale(dst.engine.stage_write(old_stage, 0, 0..1).map(drop)));
    assert!(stale(
        src.engine
            .hold(spec.request, MigrationEpoch(1), engine::soon())
            .map(drop)
    ));
    assert!(matches!(
        dst.engine.arm(stage),
        Err(AdapterError::StageState { .. })
    ));
    assert_eq!(
        src.engine.retire(spec.request, MigrationEpoch(2)).map(drop),
        Err(AdapterError::NotHeld)
    );
    assert!(dst.engine.abort_import(old_stage).unwrap().blocks > 0);
    src.engine.unpin(old.pin).unwrap();
}

#[test]
fn a_lost_request_is_rebuilt_from_its_journal() {
    for (name, spec) in requests() {
        let want = alone(&source(), &spec);
        let cut = (want.len() as u64 - 1).min(6);
        let src = Host::stepper(source());
        src.engine.submit(spec.clone()).unwrap();
        assert!(src.step_until(spec.request, 2));
        let checkpoint = src
            .engine
            .journal_checkpoint(spec.request, engine::soon())
            .unwrap();
        let tokens: Vec<u32> = want.iter().map(|e| e.token).collect();
        let image = moonlivekv::engine::adapter::JournalImage {
            request: spec.request,
            epoch: MigrationEpoch(3),
            owner_epoch: OwnerEpoch(1),
            checkpoint,
            prompt: src.engine.tokenize(&spec.prompt).unwrap(),
            output: tokens[..cut as usize].to_vec(),
        };
        let dst = Host::stepper(destination());
        let rebuilt = dst.engine.rebuild_from_journal(&image).unwrap();
        assert_eq!(
            rebuilt.class,
            moonlivekv::engine::adapter::RebuildClass::BitExact
        );
        assert_eq!(dst.engine.rebuild_from_journal(&image).unwrap(), rebuilt);
        let activation = Activation {
            owner_epoch: OwnerEpoch(2),
            reemit_from: 1,
        };
        dst.engine.activate(rebuilt.stage, activation).unwrap();
        assert_eq!(stream(&dst.finish()), stream(&want), "{name}");
    }
}
