//! A whole model file: metadata, weights, tokenizer and chat template, all used once.

use super::{Target, seed};
use moonlivekv::engine::reference::gguf::{GgufError, try_model};

pub const TARGET: Target = Target {
    name: "gguf_model",
    run,
    outcomes: &[
        "accept",
        "directory",
        "missing",
        "shape",
        "tokenizer",
        "too-large",
        "unsupported",
        "value",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    match try_model(data, "hello w<|im_end|> 12\u{e9}") {
        Ok(_) => "accept",
        Err(e) => match e {
            GgufError::Missing(_) => "missing",
            GgufError::Value { .. } => "value",
            GgufError::Shape { .. } => "shape",
            GgufError::Unsupported(_) => "unsupported",
            GgufError::Tokenizer(_) => "tokenizer",
            GgufError::TooLarge { .. } => "too-large",
            // Of the directory, which has a target of its own.
            GgufError::Magic
            | GgufError::Version(_)
            | GgufError::Truncated { .. }
            | GgufError::ValueType(_)
            | GgufError::ArrayType(_)
            | GgufError::Bool(_)
            | GgufError::Duplicate(_)
            | GgufError::Name(_)
            | GgufError::Alignment(_)
            | GgufError::TensorType { .. }
            | GgufError::Dims { .. }
            | GgufError::TensorPlace { .. } => "directory",
        },
    }
}

fn text(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s].concat()
}

fn texts(list: &[&str]) -> Vec<u8> {
    let mut out = [&8u32.to_le_bytes()[..], &(list.len() as u64).to_le_bytes()].concat();
    list.iter().for_each(|s| out.extend(text(s.as_bytes())));
    out
}

fn words(list: &[u32]) -> Vec<u8> {
    let mut out = [&4u32.to_le_bytes()[..], &(list.len() as u64).to_le_bytes()].concat();
    list.iter().for_each(|v| out.extend(v.to_le_bytes()));
    out
}

/// One layer, one head of two elements, eight tokens.
#[derive(Clone)]
struct File {
    meta: Vec<(&'static str, u32, Vec<u8>)>,
    tensors: Vec<(&'static str, Vec<u64>)>,
}

impl File {
    fn tiny() -> Self {
        let word = |v: u32| v.to_le_bytes().to_vec();
        let tokens = ["h", "e", "l", "o", "he", "ll", "\u{120}w", "<|im_end|>"];
        let string = |s: &str| text(s.as_bytes());
        Self {
            meta: vec![
                ("general.architecture", 8, string("llama")),
                ("llama.block_count", 4, word(1)),
                ("llama.context_length", 4, word(32)),
                ("llama.embedding_length", 4, word(2)),
                ("llama.feed_forward_length", 4, word(2)),
                ("llama.attention.head_count", 4, word(1)),
                (
                    "llama.attention.layer_norm_rms_epsilon",
                    6,
                    1e-5f32.to_le_bytes().to_vec(),
                ),
                ("tokenizer.ggml.model", 8, string("gpt2")),
                ("tokenizer.ggml.pre", 8, string("smollm")),
                ("tokenizer.ggml.tokens", 9, texts(&tokens)),
                (
                    "tokenizer.ggml.token_type",
                    9,
                    words(&[1, 1, 1, 1, 1, 1, 1, 3]),
                ),
                ("tokenizer.ggml.merges", 9, texts(&["h e", "l l"])),
                ("tokenizer.ggml.eos_token_id", 4, word(7)),
            ],
            tensors: vec![
                ("token_embd.weight", vec![2, 8]),
                ("blk.0.attn_norm.weight", vec![2]),
                ("blk.0.attn_q.weight", vec![2, 2]),
                ("blk.0.attn_k.weight", vec![2, 2]),
                ("blk.0.attn_v.weight", vec![2, 2]),
                ("blk.0.attn_output.weight", vec![2, 2]),
                ("blk.0.ffn_norm.weight", vec![2]),
                ("blk.0.ffn_gate.weight", vec![2, 2]),
                ("blk.0.ffn_up.weight", vec![2, 2]),
                ("blk.0.ffn_down.weight", vec![2, 2]),
                ("output_norm.weight", vec![2]),
            ],
        }
    }

    fn set(mut self, key: &'static str, tag: u32, value: Vec<u8>) -> Self {
        self.meta.retain(|(k, ..)| *k != key);
        self.meta.push((key, tag, value));
        self
    }

    fn word(self, key: &'static str, value: u32) -> Self {
        self.set(key, 4, value.to_le_bytes().to_vec())
    }

    fn string(self, key: &'static str, value: &str) -> Self {
        self.set(key, 8, text(value.as_bytes()))
    }

    fn without(mut self, name: &str) -> Self {
        self.meta.retain(|(k, ..)| *k != name);
        self.tensors.retain(|(n, _)| *n != name);
        self
    }

    fn tensor(mut self, name: &'static str, dims: &[u64]) -> Self {
        self.tensors.retain(|(n, _)| *n != name);
        self.tensors.push((name, dims.to_vec()));
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.meta.len() as u64).to_le_bytes());
        for (key, tag, value) in &self.meta {
            out.extend(text(key.as_bytes()));
            out.extend(tag.to_le_bytes());
            out.extend(value);
        }
        let mut data = Vec::new();
        for (name, dims) in &self.tensors {
            data.resize(data.len().next_multiple_of(32), 0);
            out.extend(text(name.as_bytes()));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(0u32.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            for i in 0..dims.iter().product::<u64>() {
                data.extend((i as f32 - 1.5).to_le_bytes());
            }
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }
}

fn seeds() -> Vec<super::Seed> {
    let tiny = File::tiny;
    let made = |name: &str, file: File| seed(name, file.bytes());
    let template =
        "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{% endfor %}";
    vec![
        made("accept", tiny()),
        made(
            "accept.template",
            tiny().string("tokenizer.chat_template", template),
        ),
        made(
            "accept.template-refuses",
            tiny().string("tokenizer.chat_template", "{{ raise_exception('no') }}"),
        ),
        made(
            "accept.llama3-split",
            tiny().string("tokenizer.ggml.pre", "llama-bpe"),
        ),
        made("accept.own-head", tiny().tensor("output.weight", &[2, 8])),
        seed("directory", b"GGML".to_vec()),
        made("missing.key", tiny().without("llama.block_count")),
        made("missing.tensor", tiny().without("blk.0.attn_q.weight")),
        made("value.type", tiny().word("general.architecture", 1)),
        made("value.zero", tiny().word("llama.block_count", 0)),
        made(
            "value.nan",
            tiny().set("llama.rope.freq_base", 6, f32::NAN.to_le_bytes().to_vec()),
        ),
        made("value.eos", tiny().word("tokenizer.ggml.eos_token_id", 8)),
        made("shape", tiny().word("llama.feed_forward_length", 4)),
        made(
            "unsupported.architecture",
            tiny().string("general.architecture", "mamba"),
        ),
        made(
            "unsupported.heads",
            tiny().word("llama.attention.head_count", 2),
        ),
        made("unsupported.bias", tiny().tensor("blk.0.attn_q.bias", &[2])),
        made(
            "tokenizer.model",
            tiny().string("tokenizer.ggml.model", "llama"),
        ),
        made("tokenizer.pre", tiny().string("tokenizer.ggml.pre", "x")),
        made(
            "tokenizer.merge",
            tiny().set("tokenizer.ggml.merges", 9, texts(&["h x"])),
        ),
        made(
            "tokenizer.template",
            tiny().string("tokenizer.chat_template", "{% for %}"),
        ),
        made(
            "tokenizer.size",
            tiny().tensor("token_embd.weight", &[2, 9]),
        ),
        made(
            "too-large.vocabulary",
            tiny().tensor("token_embd.weight", &[2, (1 << 20) + 1]),
        ),
    ]
}
