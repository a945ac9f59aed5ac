//! Answers in OpenAI's form: whole, or streamed token by token.

use serde::Serialize;
use serde_json::{Value, json};

use super::openai::Surface;
use crate::id::RequestId;

/// Tokens counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens made.
    pub completion_tokens: u32,
    /// Their sum.
    pub total_tokens: u32,
}

/// Writes answers of one request.
#[derive(Debug, Clone)]
pub struct Writer {
    /// Which endpoint.
    pub surface: Surface,
    /// The request.
    pub request: RequestId,
    /// Seconds since 1970, for the client's eyes only.
    pub created: u64,
    /// The model's name.
    pub model: String,
}

impl Writer {
    fn id(&self) -> String {
        match self.surface {
            Surface::Completion => format!("cmpl-{}", self.request),
            Surface::Chat => format!("chatcmpl-{}", self.request),
        }
    }

    /// One streamed token. `seq` is in the object as in the event's `id:` line, so that a client
    /// can drop a token that is delivered twice.
    pub fn chunk(&self, seq: u64, token: u32, text: &str) -> String {
        let finish: Option<&str> = None;
        let choice = match self.surface {
            Surface::Completion => {
                json!({ "index": 0, "text": text, "logprobs": null, "finish_reason": finish })
            }
            Surface::Chat if seq == 1 => {
                json!({ "index": 0, "delta": { "role": "assistant", "content": text }, "finish_reason": finish })
            }
            Surface::Chat => {
                json!({ "index": 0, "delta": { "content": text }, "finish_reason": finish })
            }
        };
        let object = match self.surface {
            Surface::Completion => "text_completion",
            Surface::Chat => "chat.completion.chunk",
        };
        json!({
            "id": self.id(), "object": object, "created": self.created, "model": self.model,
            "seq": seq, "token": token, "choices": [choice],
        })
        .to_string()
    }

    /// The object that ends a stream: no text, only why it ended.
    pub fn finish_chunk(&self, finish: &str) -> String {
        let (object, choice) = match self.surface {
            Surface::Completion => (
                "text_completion",
                json!({ "index": 0, "text": "", "logprobs": null, "finish_reason": finish }),
            ),
            Surface::Chat => (
                "chat.completion.chunk",
                json!({ "index": 0, "delta": {}, "finish_reason": finish }),
            ),
        };
        json!({
            "id": self.id(), "object": object, "created": self.created, "model": self.model,
            "choices": [choice],
        })
        .to_string()
    }

    /// The usage object that ends a stream where the client asked for it.
    pub fn usage_chunk(&self, usage: Usage) -> String {
        let object = match self.surface {
            Surface::Completion => "text_completion",
            Surface::Chat => "chat.completion.chunk",
        };
        json!({
            "id": self.id(), "object": object, "created": self.created, "model": self.model,
            "choices": [], "usage": usage,
        })
        .to_string()
    }

    /// The whole answer of a request that does not stream.
    pub fn whole(&self, text: &str, finish: &str, usage: Usage) -> Value {
        let (object, choice) = match self.surface {
            Surface::Completion => (
                "text_completion",
                json!({ "index": 0, "text": text, "logprobs": null, "finish_reason": finish }),
            ),
            Surface::Chat => (
                "chat.completion",
                json!({ "index": 0, "message": { "role": "assistant", "content": text }, "finish_reason": finish }),
            ),
        };
        json!({
            "id": self.id(), "object": object, "created": self.created, "model": self.model,
            "choices": [choice], "usage": usage,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_streamed_object_carries_its_sequence_number() {
        let w = Writer {
            surface: Surface::Chat,
            request: RequestId([1; 16]),
            created: 1,
            model: "m".into(),
        };
        let v: Value = serde_json::from_str(&w.chunk(9, 5, "x")).unwrap();
        assert_eq!(v["seq"], 9);
        assert_eq!(v["choices"][0]["delta"]["content"], "x");
        assert_eq!(v["choices"][0]["finish_reason"], Value::Null);
        let v: Value = serde_json::from_str(&w.finish_chunk("stop")).unwrap();
        assert_eq!(v["choices"][0]["finish_reason"], "stop");
    }
}
