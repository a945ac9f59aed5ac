//! The reference engine through the adapter's conformance suite: as steppers and, gated, as engines
//! with a driver thread; and each spoilt version of it is found out.

mod engine;

use engine::Host;
use moonlivekv::engine::adapter::EngineAdapter;
use moonlivekv::engine::conformance::{
    Driver, Emitted, Fault, Outcome, Pair, Plan, run, run_clause,
};
use moonlivekv::engine::reference::{
    EngineConfig, EngineEvent, GenerateSpec, GrammarSpec, KvDtype, KvOrder, ModelSource, Prompt,
    SyntheticGeometry,
};
use moonlivekv::id::RequestId;
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

struct Reference {
    host: Host,
    seen: RefCell<Vec<(RequestId, Emitted)>>,
}

impl Reference {
    fn boxed(config: EngineConfig) -> Box<dyn Driver> {
        Box::new(Self {
            host: Host::stepper(config),
            seen: RefCell::default(),
        })
    }
}

impl Driver for Reference {
    fn adapter(&self) -> Arc<dyn EngineAdapter> {
        Arc::new(self.host.engine.clone())
    }

    fn start(&mut self, request: RequestId, plan: &Plan) -> Result<(), String> {
        let prompt = self.host.engine.tokenize(&Prompt::SeededKv {
            tokens: plan.prompt_tokens,
            seed: plan.seed,
        });
        let mut spec =
            GenerateSpec::new(request, Prompt::Tokens(prompt.map_err(|e| e.to_string())?));
        spec.stop.max_output = plan.max_output;
        spec.stop.ignore_eos = true;
        spec.sampling.seed = Some(plan.seed);
        spec.sampling.bad_words = vec![vec![256]];
        if plan.sampled {
            spec.sampling.temperature = 1.1;
            spec.sampling.top_k = 60;
            spec.sampling.repetition_penalty = 1.1;
            spec.sampling.presence_penalty = 0.2;
        }
        if plan.constrained {
            spec.grammar = Some(GrammarSpec::Regex("([a-z ]|é)*".into()));
            spec.stop.stop_strings = vec!["aaaaaaaaaaZ".into(), " éZ".into()];
        }
        self.host.engine.submit(spec).map_err(|e| e.to_string())
    }

    fn step(&mut self) {
        self.host.step();
    }

    fn emitted(&self, request: RequestId) -> Vec<Emitted> {
        let mut seen = self.seen.borrow_mut();
        for event in self.host.events.try_iter() {
            if let EngineEvent::Token(t) = event {
                let emitted = Emitted {
                    owner_epoch: t.owner_epoch,
                    seq: t.seq,
                    token: t.token,
                };
                seen.push((t.request, emitted));
            }
        }
        let of = seen.iter().filter(|(r, _)| *r == request);
        of.map(|(_, e)| *e).collect()
    }

    fn abort(&mut self, request: RequestId) {
        // A request that is gone wants no more anyway.
        let _ = self.host.engine.abort(request);
    }

    fn rewrite_sealed_slot(&mut self, _: RequestId, _: u64) -> bool {
        false
    }
}

fn source() -> EngineConfig {
    EngineConfig {
        max_context: 512,
        blocks: 64,
        prefix_cache: false,
        ..EngineConfig::tiny(21)
    }
}

fn destination() -> EngineConfig {
    EngineConfig {
        block_tokens: 24,
        order: KvOrder::Hnd,
        block_shuffle_seed: 3,
        ..source()
    }
}

fn pair() -> Pair {
    Pair {
        source: Reference::boxed(source()),
        destination: Reference::boxed(destination()),
    }
}

#[test]
fn the_reference_engine_holds_every_clause() {
    let report = run(pair);
    assert!(report.holds(), "{report}");
    let skipped: Vec<_> = report.not_applicable().map(|(c, _)| c.id).collect();
    // Nothing in this engine ever rewrites a sealed slot.
    assert!(skipped.len() <= 1, "{report}");
    println!("{report}");
}

#[test]
fn every_element_type_and_the_synthetic_model_hold_every_clause() {
    for dtype in [KvDtype::F32, KvDtype::F16] {
        let with = |config: EngineConfig| EngineConfig {
            kv_dtype: dtype,
            ..config
        };
        let report = run(|| Pair {
            source: Reference::boxed(with(source())),
            destination: Reference::boxed(with(destination())),
        });
        assert!(report.holds(), "{report}");
    }
    let with = |config: EngineConfig| EngineConfig {
        model: ModelSource::Synthetic {
            geometry: SyntheticGeometry {
                layers: 3,
                kv_heads: 4,
                head_dim: 16,
            },
            seed: 4,
            step_time: Duration::ZERO,
        },
        ..config
    };
    let report = run(|| Pair {
        source: Reference::boxed(with(source())),
        destination: Reference::boxed(with(destination())),
    });
    assert!(report.holds(), "{report}");
}

#[test]
fn a_spoilt_reference_engine_is_found_out() {
    for fault in Fault::ALL {
        match run_clause(fault.clause(), || fault.spoil(pair())) {
            Some(Outcome::Broken(_) | Outcome::NotApplicable(_)) => {}
            other => panic!("{fault:?} went unseen by {}: {other:?}", fault.clause()),
        }
    }
}
