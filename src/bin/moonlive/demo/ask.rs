//! What the clients ask for: the same in both runs, drawn by the seed.

use moonlivekv::id::RequestId;
use moonlivekv::node::faults::draw;
use serde_json::{Value, json};

use crate::cli::DemoArgs;

/// Output tokens before the end at which KV and control state are written for comparison.
const BEFORE_END: u64 = 12;
/// Ids below this are in every vocabulary; the very first ones are special.
const VOCABULARY: std::ops::Range<u64> = 4..256;
/// What the user says where nobody says otherwise.
const QUESTION: &str =
    "Tell me a short story about a lighthouse keeper who finds a message in a bottle.";

/// One client's request.
#[derive(Debug, Clone)]
pub struct Ask {
    /// Its name, the same in both runs.
    pub request: RequestId,
    /// The HTTP path.
    pub path: &'static str,
    /// The body.
    pub body: Value,
    /// The output token after which it migrates.
    pub migrate_at: u64,
}

/// All of them.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The requests.
    pub asks: Vec<Ask>,
    /// Output token at which KV and control state are written.
    pub dump_at: u64,
}

impl Plan {
    /// Draws the requests.
    pub fn new(args: &DemoArgs) -> Self {
        let output = u64::from(args.output);
        let asks = (0..u64::from(args.requests))
            .map(|n| ask(args, n))
            .collect();
        Self {
            asks,
            dump_at: output - BEFORE_END,
        }
    }
}

fn ask(args: &DemoArgs, n: u64) -> Ask {
    let seed = draw(args.seed.wrapping_mul(1_000_003).wrapping_add(n));
    let mut id = [0u8; 16];
    id[..8].copy_from_slice(&draw(seed).to_le_bytes());
    id[8..].copy_from_slice(&draw(seed ^ 1).to_le_bytes());
    let request = RequestId(id);
    let output = u64::from(args.output);
    // Somewhere in the second quarter: mid-decode, with enough to come for the comparison.
    let migrate_at = output / 4 + draw(seed ^ 2) % (output / 4);
    let mut body = json!({
        "stream": true, "max_tokens": args.output, "seed": draw(seed ^ 3) >> 1,
        "request_id": request.to_string(), "ignore_eos": true,
        "temperature": if args.greedy { 0.0 } else { 0.8 }, "top_k": 50, "top_p": 0.95,
        "repetition_penalty": 1.05,
    });
    let path = match (&args.engine.model, &args.prompt) {
        (None, None) => {
            let span = VOCABULARY.end - VOCABULARY.start;
            let token = |i: u64| VOCABULARY.start + draw(seed ^ (i << 8) ^ 0x5eed) % span;
            let tokens: Vec<u64> = (0..u64::from(args.context)).map(token).collect();
            body["prompt"] = json!(tokens);
            "/v1/completions"
        }
        (None, Some(prompt)) => {
            body["prompt"] = json!(prompt);
            "/v1/completions"
        }
        (Some(_), prompt) => {
            let text = prompt.as_deref().unwrap_or(QUESTION);
            body["messages"] = json!([{ "role": "user", "content": text }]);
            "/v1/chat/completions"
        }
    };
    Ask {
        request,
        path,
        body,
        migrate_at,
    }
}
