//! Requests as clients send them.

use super::*;

fn ask(surface: Surface, v: Value) -> Result<Ask, ApiError> {
    Ask::parse(surface, v.to_string().as_bytes())
}

#[test]
fn a_refusal_names_the_parameter_at_fault() {
    let base = |k: &str, v: Value| {
        let mut m = json!({ "prompt": "hi" });
        m[k] = v;
        ask(Surface::Completion, m).unwrap_err().param.unwrap()
    };
    assert_eq!(base("prompt", json!("")), "prompt");
    assert_eq!(base("prompt", json!([])), "prompt");
    assert_eq!(base("n", json!(2)), "n");
    assert_eq!(base("top_p", json!(1.5)), "top_p");
    assert_eq!(base("temperature", json!(-1)), "temperature");
    assert_eq!(base("max_tokens", json!(0)), "max_tokens");
    assert_eq!(base("stop", json!([""])), "stop");
    assert_eq!(base("logit_bias", json!({ "x": 1.0 })), "logit_bias");
    assert_eq!(base("request_id", json!("12")), "request_id");
    for name in NOT_SERVED {
        assert_eq!(base(name, json!("x")), name);
    }
    let chat = |role: &str| {
        let messages = json!([{ "role": role, "content": "hi" }]);
        ask(Surface::Chat, json!({ "messages": messages }))
    };
    for role in ["tool", "function", "User", ""] {
        assert_eq!(chat(role).unwrap_err().param, Some("messages"), "{role:?}");
    }
    assert!(chat("developer").is_ok() && chat("system").is_ok());
    assert_eq!(
        base("response_format", json!({ "type": "xml" })),
        "response_format"
    );
    assert_eq!(
        ask(Surface::Chat, json!({})).unwrap_err().param,
        Some("messages")
    );
    assert_eq!(
        Ask::parse(Surface::Chat, b"{").unwrap_err().code,
        "invalid_json"
    );
}

#[test]
fn a_retry_is_told_from_another_request_under_the_same_id() {
    let of = |v: Value| ask(Surface::Completion, v).unwrap().fingerprint();
    let first = of(json!({ "prompt": "hi", "max_tokens": 5, "seed": 1 }));
    let again = json!({ "prompt": "hi", "max_tokens": 5, "seed": 1, "stream": true });
    assert_eq!(of(again), first, "how it is answered is no part of it");
    for other in [
        json!({ "prompt": "bye", "max_tokens": 5, "seed": 1 }),
        json!({ "prompt": "hi", "max_tokens": 6, "seed": 1 }),
        json!({ "prompt": "hi", "max_tokens": 5, "seed": 2 }),
        json!({ "prompt": "hi", "max_tokens": 5, "seed": 1, "model": "m" }),
    ] {
        assert_ne!(of(other), first);
    }
}

#[test]
fn both_surfaces_read_what_openai_clients_send() {
    let a = ask(
        Surface::Completion,
        json!({ "model": "m", "prompt": [1, 2, 3], "stream": true, "stop": "\n", "seed": 7,
                "stream_options": { "include_usage": true }, "unknown": {}, "user": "u",
                "suffix": null, "tools": [], "metadata": { "a": "b" } }),
    )
    .unwrap();
    assert!(a.stream && a.include_usage);
    assert_eq!(a.sampling.stop, ["\n"]);
    assert_eq!(a.sampling.max_tokens, DEFAULT_MAX_TOKENS);
    let c = ask(
        Surface::Chat,
        json!({ "messages": [{ "role": "user", "content": "hi" }], "max_completion_tokens": 5 }),
    )
    .unwrap();
    assert_eq!(c.sampling.max_tokens, 5);
    assert!(matches!(c.prompt.kind, Some(v1::prompt::Kind::Chat(_))));
}
