//! The real model, where `MOONLIVE_MODEL` names its file (`tools/fetch-model` prints it; CI sets
//! it): it answers in English, and its answer does not change when the request moves mid-sentence.

mod engine;

use engine::{Host, alone, id, migrate, stream, text};
use moonlivekv::engine::reference::{
    ChatMessage, EngineConfig, GenerateSpec, GrammarSpec, KvOrder, ModelSource, Prompt,
};
use moonlivekv::id::{MigrationEpoch, OwnerEpoch};

fn config() -> Option<EngineConfig> {
    let Some(path) = std::env::var_os("MOONLIVE_MODEL") else {
        eprintln!("MOONLIVE_MODEL is not set: the real model was not run");
        return None;
    };
    let model = ModelSource::Gguf { path: path.into() };
    Some(EngineConfig {
        max_context: 1024,
        blocks: 256,
        threads: 2,
        ..EngineConfig::new(model)
    })
}

fn chat(question: &str, output: u32) -> GenerateSpec {
    let content = question.to_string();
    let role = "user".to_string();
    let mut spec = GenerateSpec::new(id(1), Prompt::Chat(vec![ChatMessage { role, content }]));
    spec.stop.max_output = output;
    spec
}

#[test]
fn the_real_model_answers_in_english() {
    let Some(config) = config() else { return };
    let answer = text(&alone(&config, &chat("What is the capital of France?", 24)));
    assert!(answer.contains("Paris"), "{answer}");
}

#[test]
fn a_real_answer_does_not_change_when_it_moves_mid_sentence() {
    let Some(config) = config() else { return };
    let destination = EngineConfig {
        block_tokens: 64,
        order: KvOrder::Hnd,
        block_shuffle_seed: 3,
        threads: 1,
        ..config.clone()
    };
    let mut greedy = chat("Why is the sky blue?", 24);
    greedy.stop.stop_strings = vec!["\n\n".into()];
    let mut sampled = chat("Tell me about the sea.", 24);
    sampled.sampling.temperature = 0.8;
    sampled.sampling.top_p = 0.95;
    sampled.sampling.repetition_penalty = 1.1;
    let mut json = chat("Describe a cat as JSON.", 24);
    json.grammar = Some(GrammarSpec::JsonObject);
    for spec in [greedy, sampled, json] {
        let want = stream(&alone(&config, &spec));
        let hosts = [
            Host::stepper(config.clone()),
            Host::stepper(destination.clone()),
        ];
        hosts[0].engine.submit(spec.clone()).unwrap();
        let (mut at, mut n) = (0, 1);
        let mut events = Vec::new();
        while hosts[at].step_until(spec.request, 5 * n) {
            events.extend(hosts[at].tokens());
            let (src, dst) = (&hosts[at].engine, &hosts[1 - at].engine);
            migrate(src, dst, spec.request, MigrationEpoch(n), OwnerEpoch(n));
            at = 1 - at;
            n += 1;
        }
        events.extend(hosts[at].tokens());
        assert!(n > 2, "it moved more than once");
        assert_eq!(stream(&events), want);
    }
}
