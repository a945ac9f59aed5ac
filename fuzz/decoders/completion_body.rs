//! Bodies of the gateway's HTTP requests. The first byte's lowest bit chooses the surface.

use super::{Target, seed};
use moonlivekv::gateway::openai::{Ask, MAX_BIAS, MAX_MESSAGES, MAX_STOPS, Surface};
use moonlivekv::rpc::v1::prompt::Kind;

pub const TARGET: Target = Target {
    name: "completion_body",
    run,
    outcomes: &[
        "accept",
        "echo",
        "frequency-penalty",
        "invalid-json",
        "logit-bias",
        "logprobs",
        "max-tokens",
        "messages",
        "min-p",
        "n",
        "presence-penalty",
        "prompt",
        "repetition-penalty",
        "request-id",
        "response-format",
        "stop",
        "temperature",
        "top-p",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    let (surface, body) = match data.split_first() {
        Some((first, body)) if first & 1 == 1 => (Surface::Chat, body),
        Some((_, body)) => (Surface::Completion, body),
        None => (Surface::Completion, data),
    };
    let refusal = match Ask::parse(surface, body) {
        Ok(ask) => {
            check(surface, &ask);
            return "accept";
        }
        Err(refusal) => refusal,
    };
    assert_eq!(refusal.status, 400, "{refusal:?}");
    assert!(refusal.body()["error"]["message"].is_string());
    if refusal.code == "invalid_json" {
        return "invalid-json";
    }
    match refusal.param.expect("a refusal names its parameter") {
        "echo" => "echo",
        "frequency_penalty" => "frequency-penalty",
        "logit_bias" => "logit-bias",
        "logprobs" => "logprobs",
        "max_tokens" => "max-tokens",
        "messages" => "messages",
        "min_p" => "min-p",
        "n" => "n",
        "presence_penalty" => "presence-penalty",
        "prompt" => "prompt",
        "repetition_penalty" => "repetition-penalty",
        "request_id" => "request-id",
        "response_format" => "response-format",
        "stop" => "stop",
        "temperature" => "temperature",
        "top_p" => "top-p",
        other => panic!("an unknown parameter: {other}"),
    }
}

/// What the engine may rely on.
fn check(surface: Surface, ask: &Ask) {
    let s = &ask.sampling;
    assert!(s.max_tokens > 0);
    assert!(s.stop.len() <= MAX_STOPS.0);
    assert!(s.stop.iter().all(|t| (1..=MAX_STOPS.1).contains(&t.len())));
    assert!(s.logit_bias.len() <= MAX_BIAS);
    assert!(s.logit_bias.iter().all(|b| b.bias.abs() <= 100.0));
    let within = |v: Option<f32>, low: f32, high: f32| v.is_none_or(|v| v >= low && v <= high);
    assert!(within(s.temperature, 0.0, 100.0) && within(s.top_p, 0.0, 1.0));
    assert!(within(s.min_p, 0.0, 1.0) && within(s.repetition_penalty, 0.01, 100.0));
    assert!(within(s.presence_penalty, -100.0, 100.0));
    assert!(within(s.frequency_penalty, -100.0, 100.0));
    match (surface, ask.prompt.kind.as_ref().expect("a prompt")) {
        (Surface::Chat, Kind::Chat(c)) => {
            assert!((1..=MAX_MESSAGES).contains(&c.messages.len()));
        }
        (Surface::Completion, Kind::Text(t)) => assert!(!t.is_empty()),
        (Surface::Completion, Kind::Tokens(t)) => assert!(!t.tokens.is_empty()),
        (Surface::Completion, Kind::Seeded(_)) => {}
        other => panic!("a prompt of the other surface: {other:?}"),
    }
}

fn seeds() -> Vec<super::Seed> {
    let completion = |name: &str, body: &str| seed(name, [b"0", body.as_bytes()].concat());
    let chat = |name: &str, body: &str| seed(name, [b"1", body.as_bytes()].concat());
    let with = |name: &str, field: &str| completion(name, &format!(r#"{{"prompt":"hi",{field}}}"#));
    vec![
        completion("accept.text", r#"{"prompt":"hi"}"#),
        completion("accept.tokens", r#"{"prompt":[1,2,3],"stream":true}"#),
        completion("accept.one-text", r#"{"prompt":["hi"]}"#),
        completion(
            "accept.seeded",
            r#"{"seeded_context":{"tokens":64,"seed":7},"max_tokens":9}"#,
        ),
        with(
            "accept.everything",
            r#""model":"m","max_tokens":5,"min_tokens":1,"temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.1,"repetition_penalty":1.1,"presence_penalty":-1,"frequency_penalty":1,"seed":18446744073709551615,"stop":["a","b"],"logit_bias":{"5":-100},"ignore_eos":true,"n":1,"best_of":1,"echo":false,"logprobs":null,"stream_options":{"include_usage":true},"request_id":"00112233445566778899aabbccddeeff","response_format":{"type":"json_object"}"#,
        ),
        chat(
            "accept.chat",
            r#"{"messages":[{"role":"system","content":"be brief"},{"role":"user","content":[{"type":"text","text":"hi"}]}]}"#,
        ),
        completion("invalid-json.cut", r#"{"prompt":"#),
        completion("invalid-json.type", r#"{"prompt":{}}"#),
        completion("invalid-json.number", r#"{"prompt":"a","seed":-1}"#),
        completion("invalid-json.deep", &"[".repeat(300)),
        seed("invalid-json.nothing", []),
        completion("prompt.missing", "{}"),
        completion("prompt.empty", r#"{"prompt":""}"#),
        completion("prompt.empty-list", r#"{"prompt":[]}"#),
        completion("prompt.two-texts", r#"{"prompt":["a","b"]}"#),
        chat("messages.missing", r#"{"prompt":"hi"}"#),
        chat(
            "messages.image",
            r#"{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}"#,
        ),
        with("n", r#""n":2"#),
        with("echo", r#""echo":true"#),
        with("logprobs", r#""logprobs":3"#),
        with("max-tokens", r#""max_tokens":0"#),
        with("request-id", r#""request_id":"12""#),
        with("temperature", r#""temperature":-1"#),
        with("top-p", r#""top_p":1.5"#),
        with("min-p", r#""min_p":-0.5"#),
        with("repetition-penalty", r#""repetition_penalty":0"#),
        with("presence-penalty", r#""presence_penalty":101"#),
        with("frequency-penalty.huge", r#""frequency_penalty":1e300"#),
        with("stop.empty", r#""stop":"""#),
        with("logit-bias.token", r#""logit_bias":{"x":1}"#),
        with("logit-bias.value", r#""logit_bias":{"1":101}"#),
        with("response-format", r#""response_format":{"type":"xml"}"#),
    ]
}
