//! The reference engine alone: the same request gives the same tokens and the same KV bits, however
//! it is batched, chunked, laid out or threaded.

mod engine;

use engine::{Host, alone, hashed, id, stream, text};
use moonlivekv::engine::adapter::{EngineAdapter, View};
use moonlivekv::engine::reference::{
    EngineConfig, EngineError, FinishReason, GenerateSpec, KvDtype, KvOrder, Prompt,
};
use moonlivekv::id::MigrationEpoch;

fn prompt(n: u32, seed: u32) -> Prompt {
    Prompt::Tokens((0..n).map(|i| 260 + (i * 7 + seed * 13) % 200).collect())
}

fn spec(n: u8, tokens: u32, output: u32) -> GenerateSpec {
    let mut spec = GenerateSpec::new(id(n), prompt(tokens, u32::from(n)));
    spec.stop.max_output = output;
    spec.sampling.temperature = 0.9;
    spec.sampling.seed = Some(u64::from(n));
    spec
}

/// The page digests of a request at its end, through a pin.
fn kv(config: &EngineConfig, spec: &GenerateSpec, others: &[GenerateSpec]) -> Vec<String> {
    let host = Host::stepper(config.clone());
    for other in others {
        host.engine.submit(other.clone()).unwrap();
    }
    host.engine.submit(spec.clone()).unwrap();
    host.step();
    let pin = host.engine.pin(spec.request, MigrationEpoch(1)).unwrap();
    host.finish();
    let len = host.engine.seal_through(pin.pin).unwrap().stable_len;
    let pages = len.div_ceil(u64::from(config.page_tokens)) as u32;
    hashed(&host.engine, View::Pin(pin.pin), 0..pages, len)
        .iter()
        .map(|(row, _)| format!("{row:?}"))
        .collect()
}

#[test]
fn a_request_is_the_same_whatever_shares_its_batch() {
    let config = EngineConfig::tiny(3);
    let mine = spec(1, 37, 40);
    let want = stream(&alone(&config, &mine));
    assert_eq!(want.len(), 40);
    let host = Host::stepper(config.clone());
    let others: Vec<_> = (2..9)
        .map(|n| spec(n, u32::from(n) * 9, 10 + u32::from(n)))
        .collect();
    for other in &others[..4] {
        host.engine.submit(other.clone()).unwrap();
    }
    host.step();
    host.engine.submit(mine.clone()).unwrap();
    for other in &others[4..] {
        host.engine.submit(other.clone()).unwrap();
    }
    let events = host.finish();
    let of = |n: u8| -> Vec<_> {
        events
            .iter()
            .filter(|e| e.request == id(n))
            .cloned()
            .collect()
    };
    assert_eq!(stream(&of(1)), want);
    for other in &others {
        let n = other.request.0[0];
        assert_eq!(
            stream(&of(n)),
            stream(&alone(&config, other)),
            "request {n}"
        );
    }
    assert_eq!(kv(&config, &mine, &others), kv(&config, &mine, &[]));
}

#[test]
fn tokens_and_kv_bits_do_not_depend_on_chunks_blocks_layout_or_threads() {
    for dtype in [KvDtype::Bf16, KvDtype::F16, KvDtype::F32] {
        let base = EngineConfig {
            kv_dtype: dtype,
            ..EngineConfig::tiny(5)
        };
        let mine = spec(1, 75, 30);
        let (want, want_kv) = (stream(&alone(&base, &mine)), kv(&base, &mine, &[]));
        let variants = [
            EngineConfig {
                prefill_chunk: 1,
                ..base.clone()
            },
            EngineConfig {
                prefill_chunk: 13,
                block_tokens: 7,
                ..base.clone()
            },
            EngineConfig {
                block_tokens: 64,
                order: KvOrder::Hnd,
                block_shuffle_seed: 9,
                ..base.clone()
            },
            EngineConfig {
                block_tokens: 1,
                block_shuffle_seed: 77,
                ..base.clone()
            },
            EngineConfig {
                threads: 3,
                order: KvOrder::Hnd,
                prefix_cache: false,
                shared_memory: true,
                ..base.clone()
            },
        ];
        for v in variants {
            assert_eq!(stream(&alone(&v, &mine)), want, "{v:?}");
            assert_eq!(kv(&v, &mine, &[]), want_kv, "{v:?}");
        }
    }
}

#[test]
fn a_shared_prefix_gives_the_same_tokens_and_is_counted() {
    let config = EngineConfig::tiny(3);
    let mut a = spec(1, 100, 8);
    let mut b = spec(2, 100, 8);
    b.prompt = a.prompt.clone();
    (a.sampling.seed, b.sampling.seed) = (Some(5), Some(5));
    let host = Host::stepper(config.clone());
    host.engine.submit(a).unwrap();
    let first = host.finish();
    host.engine.submit(b.clone()).unwrap();
    let second = host.finish();
    assert_eq!(first[0].cached_tokens, 0);
    assert_eq!(second[0].cached_tokens, 96);
    assert_eq!(stream(&first), stream(&second));
    // Another salt shares nothing.
    b.request = id(3);
    b.cache_salt = Some(b"tenant".to_vec());
    host.engine.submit(b).unwrap();
    assert_eq!(host.finish()[0].cached_tokens, 0);
}

#[test]
fn requests_wait_for_blocks_and_what_never_fits_is_refused() {
    let config = EngineConfig {
        blocks: 8,
        ..EngineConfig::tiny(3)
    };
    let host = Host::stepper(config.clone());
    match host.engine.submit(spec(9, 100, 29)) {
        Err(EngineError::NeverFits { need: 9, have: 8 }) => {}
        other => panic!("{other:?}"),
    }
    for n in 1..=4 {
        host.engine.submit(spec(n, 60, 20)).unwrap();
    }
    host.step();
    let status = host.engine.status();
    assert_eq!((status.running, status.waiting), (1, 3));
    let events = host.finish();
    for n in 1..=4 {
        let of: Vec<_> = events
            .iter()
            .filter(|e| e.request == id(n))
            .cloned()
            .collect();
        assert_eq!(
            stream(&of),
            stream(&alone(&EngineConfig::tiny(3), &spec(n, 60, 20)))
        );
    }
    host.engine.clear_prefix_cache();
    let status = host.engine.status();
    assert_eq!((status.pool.free, status.promised_blocks), (8, 0));
    assert_eq!(
        host.engine
            .submit(spec(1, 4, 4))
            .and_then(|()| host.engine.submit(spec(1, 4, 4))),
        Err(EngineError::Duplicate(id(1)))
    );
}

#[test]
fn an_aborted_request_gives_its_blocks_back() {
    let host = Host::stepper(EngineConfig {
        prefix_cache: false,
        ..EngineConfig::tiny(3)
    });
    let free = host.engine.status().pool.free;
    host.engine.submit(spec(1, 40, 1000)).unwrap();
    host.step();
    host.step();
    assert!(host.engine.status().pool.free < free);
    host.engine.abort(id(1)).unwrap();
    assert_eq!(host.engine.status().pool.free, free);
    assert_eq!(
        host.engine.abort(id(1)),
        Err(EngineError::UnknownRequest(id(1)))
    );
    assert_eq!(host.step(), 0);
}

#[test]
fn a_context_that_is_full_ends_the_output() {
    let config = EngineConfig {
        max_context: 64,
        ..EngineConfig::tiny(3)
    };
    let mut mine = spec(1, 60, 1000);
    mine.stop.ignore_eos = true;
    let events = alone(&config, &mine);
    assert_eq!(events.len(), 4);
    assert_eq!(events[3].finish, Some(FinishReason::Length));
}

#[test]
fn seeded_words_can_be_read() {
    let mut mine = spec(1, 5, 60);
    mine.prompt = Prompt::Text("the water was".into());
    let out = text(&alone(&EngineConfig::tiny(3), &mine));
    let words = out
        .split(' ')
        .filter(|w| w.chars().all(|c| c.is_ascii_lowercase()))
        .count();
    assert!(words > 20, "{out}");
}
