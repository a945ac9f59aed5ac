//! From a parsed file to a model, its vocabulary and its encoder.

use super::super::EngineError;
use super::super::config::KvDtype;
use super::super::model::{
    Layer, Llama, LlamaSpec, MAX_GROUP, MAX_HEAD_DIM, Model, RopePairs, SeqInput, Shape, StepOutput,
};
use super::super::num::{BlockKind, Matrix, Threads};
use super::super::spec::ChatMessage;
use super::super::tokenizer::bpe::{BpeEncoder, TokenRow};
use super::super::tokenizer::template::ChatTemplate;
use super::super::tokenizer::{Encoder, Vocabulary};
use super::{Gguf, GgufError, TensorInfo, TensorType, Value};
use sha2::{Digest, Sha256};
use std::path::Path;

/// Longest context this engine builds position tables for.
const MAX_CONTEXT: u64 = 1 << 18;
/// Bounds of the shape; generous for any Llama that a CPU runs.
const MAX_LAYERS: u64 = 1 << 10;
const MAX_WIDTH: u64 = 1 << 16;
const MAX_VOCAB: u64 = 1 << 20;

/// A model from a file.
pub(crate) struct Loaded {
    /// The decoder.
    pub model: Llama,
    /// Token bytes and markers.
    pub vocabulary: Vocabulary,
    /// Text to ids.
    pub encoder: BpeEncoder,
    /// `general.name`, or the file's name.
    pub name: String,
    /// SHA-256 of the whole file: identity of architecture and weights.
    pub digest: [u8; 32],
}

/// Reads and checks `path`. `max_context` 0 = as long as the model was made for.
pub(crate) fn load(
    path: &Path,
    dtype: KvDtype,
    max_context: usize,
    threads: Threads,
) -> Result<Loaded, EngineError> {
    let file = std::fs::read(path).map_err(|e| EngineError::Io {
        path: path.display().to_string(),
        error: e.to_string(),
    })?;
    let mut loaded = load_bytes(&file, dtype, max_context, threads)?;
    if loaded.name.is_empty() {
        loaded.name = path
            .file_stem()
            .map_or_else(|| "gguf".into(), |s| s.to_string_lossy().into_owned());
    }
    Ok(loaded)
}

/// As [`load`], from the file's bytes; a model that names itself nothing has an empty name.
fn load_bytes(
    file: &[u8],
    dtype: KvDtype,
    max_context: usize,
    threads: Threads,
) -> Result<Loaded, GgufError> {
    let gguf = Gguf::parse(file)?;
    let (vocabulary, encoder) = tokenizer(&gguf)?;
    let model = Builder { gguf: &gguf }.model(dtype, max_context, threads)?;
    if vocabulary.len() != model.shape().vocab {
        return Err(GgufError::Tokenizer(
            "its size differs from the embedding's".into(),
        ));
    }
    let name = match gguf.meta.get("general.name") {
        Some(Value::Str(s)) => String::from_utf8_lossy(s).into_owned(),
        _ => String::new(),
    };
    Ok(Loaded {
        model,
        vocabulary,
        encoder,
        name,
        digest: Sha256::digest(file).into(),
    })
}

/// Loads a model from bytes and uses all of it once: its chat template on `text` from a user, its
/// tokenizer on that, one step on the first tokens. The body of a fuzz target. Returns how many
/// tokens the chat has; 0 where the file's template or tokenizer refuses it.
pub fn try_model(file: &[u8], text: &str) -> Result<usize, GgufError> {
    /// Enough for one step; a file may announce any context.
    const CONTEXT: usize = 16;
    let threads = Threads::new(1).map_err(GgufError::Unsupported)?;
    let loaded = load_bytes(file, KvDtype::F32, CONTEXT, threads)?;
    let message = ChatMessage {
        role: "user".into(),
        content: text.into(),
    };
    let prompt = loaded.encoder.chat(&[message]);
    let Ok(tokens) = prompt.and_then(|p| loaded.encoder.encode(&p, true)) else {
        return Ok(0);
    };
    let length = loaded.model.shape().max_context.min(tokens.len());
    if length > 0 {
        let seq = SeqInput {
            tokens: &tokens[..length],
            start: 0,
            past: None,
            want_logits: true,
            fill: None,
        };
        loaded.model.forward(&[seq], &mut StepOutput::default());
    }
    Ok(tokens.len())
}

/// Builds a decoder from a parsed file.
struct Builder<'g, 'f> {
    gguf: &'g Gguf<'f>,
}

impl Builder<'_, '_> {
    fn model(
        &self,
        dtype: KvDtype,
        max_context: usize,
        threads: Threads,
    ) -> Result<Llama, GgufError> {
        let arch = self.gguf.text("general.architecture")?;
        if arch != "llama" {
            return Err(GgufError::Unsupported(format!(
                "architecture `{arch}` (only `llama` is)"
            )));
        }
        if let Some(kind) = self.gguf.meta.get("llama.rope.scaling.type")
            && *kind != Value::Str(b"none")
        {
            return Err(GgufError::Unsupported("scaled rotary positions".into()));
        }
        if self.gguf.uint("llama.expert_count", 0, 0, u64::MAX)? > 0 {
            return Err(GgufError::Unsupported("mixture of experts".into()));
        }
        let layers = self.need("llama.block_count", MAX_LAYERS)?;
        let width = self.need("llama.embedding_length", MAX_WIDTH)?;
        let ffn = self.need("llama.feed_forward_length", 4 * MAX_WIDTH)?;
        let heads = self.need("llama.attention.head_count", MAX_WIDTH)?;
        let kv_heads = self
            .gguf
            .uint("llama.attention.head_count_kv", heads, 1, MAX_WIDTH)?;
        let context = self
            .need("llama.context_length", u64::MAX)?
            .min(MAX_CONTEXT);
        let whole =
            heads % kv_heads == 0 && width % heads == 0 && (width / heads).is_multiple_of(2);
        let small = width / heads <= MAX_HEAD_DIM as u64 && heads / kv_heads <= MAX_GROUP as u64;
        if !whole || !small {
            return Err(GgufError::Unsupported(format!(
                "width {width} with {heads} heads and {kv_heads} kv heads"
            )));
        }
        let head_dim = width / heads;
        for key in [
            "llama.rope.dimension_count",
            "llama.attention.key_length",
            "llama.attention.value_length",
        ] {
            if self.gguf.uint(key, head_dim, 1, MAX_WIDTH)? != head_dim {
                return Err(GgufError::Unsupported(format!(
                    "`{key}` other than {head_dim}"
                )));
            }
        }
        let eps = self
            .gguf
            .float("llama.attention.layer_norm_rms_epsilon", None)?;
        let theta = self.gguf.float("llama.rope.freq_base", Some(10_000.0))?;
        let usable = eps > 0.0 && eps < 1.0 && theta > 1.0 && theta < 1e12;
        if !usable {
            return Err(GgufError::Unsupported(format!(
                "epsilon {eps} or base {theta}"
            )));
        }

        let vocab = self
            .gguf
            .tensor("token_embd.weight")?
            .dims
            .get(1)
            .copied()
            .unwrap_or(1);
        if vocab > MAX_VOCAB {
            return Err(GgufError::TooLarge {
                what: "the vocabulary",
                got: vocab,
                max: MAX_VOCAB,
            });
        }
        let kv = kv_heads * head_dim;
        let mut used = 0;
        let mut matrix = |name: &str, inputs, outputs| {
            used += 1;
            self.matrix(name, inputs, outputs)
        };
        let embedding = matrix("token_embd.weight", width, vocab)?;
        let mut all = Vec::with_capacity(layers as usize);
        for i in 0..layers {
            let mut m = |part: &str, inputs, outputs| {
                matrix(&format!("blk.{i}.{part}.weight"), inputs, outputs)
            };
            all.push(Layer {
                attention_norm: self.vector(&format!("blk.{i}.attn_norm.weight"), width)?,
                q: m("attn_q", width, width)?,
                k: m("attn_k", width, kv)?,
                v: m("attn_v", width, kv)?,
                o: m("attn_output", width, width)?,
                ffn_norm: self.vector(&format!("blk.{i}.ffn_norm.weight"), width)?,
                gate: m("ffn_gate", width, ffn)?,
                up: m("ffn_up", width, ffn)?,
                down: m("ffn_down", ffn, width)?,
            });
        }
        let head = match self.gguf.tensors.contains_key("output.weight") {
            true => Some(matrix("output.weight", width, vocab)?),
            false => None,
        };
        let norm = self.vector("output_norm.weight", width)?;
        // Biases, rotary factors, extra norms: what is in the file and not used would change the
        // model's output, so it is refused rather than ignored.
        used += 2 * layers as usize + 1;
        if self.gguf.tensors.len() != used {
            return Err(GgufError::Unsupported(format!(
                "{} tensors besides those of a plain Llama",
                self.gguf.tensors.len() - used
            )));
        }
        let max_context = match max_context as u64 {
            0 => context,
            asked => asked.min(context),
        };
        let spec = LlamaSpec {
            shape: Shape {
                layers: layers as usize,
                kv_heads: kv_heads as usize,
                head_dim: head_dim as usize,
                vocab: vocab as usize,
                max_context: max_context as usize,
            },
            heads: heads as usize,
            eps: eps as f32,
            theta,
            // GGUF stores Llama's q and k so that neighbours rotate together.
            pairs: RopePairs::Adjacent,
            dtype,
            threads,
        };
        Ok(Llama::new(spec, embedding, all, norm, head))
    }

    fn need(&self, key: &str, max: u64) -> Result<u64, GgufError> {
        if !self.gguf.meta.contains_key(key) {
            return Err(GgufError::Missing(key.to_owned()));
        }
        self.gguf.uint(key, 0, 1, max)
    }

    fn shaped(&self, name: &str, want: Vec<u64>) -> Result<&TensorInfo, GgufError> {
        let info = self.gguf.tensor(name)?;
        if info.dims != want {
            return Err(GgufError::Shape {
                name: name.to_owned(),
                got: info.dims.clone(),
                want,
            });
        }
        Ok(info)
    }

    fn vector(&self, name: &str, len: u64) -> Result<Vec<f32>, GgufError> {
        let info = self.shaped(name, vec![len])?;
        let m = to_matrix(self.gguf.data(info), info.kind, 1, len as usize);
        let mut out = vec![0.0; len as usize];
        m.row_into(0, &mut out);
        Ok(out)
    }

    fn matrix(&self, name: &str, inputs: u64, outputs: u64) -> Result<Matrix, GgufError> {
        let info = self.shaped(name, vec![inputs, outputs])?;
        Ok(to_matrix(
            self.gguf.data(info),
            info.kind,
            outputs as usize,
            inputs as usize,
        ))
    }
}

fn to_matrix(bytes: &[u8], kind: TensorType, rows: usize, cols: usize) -> Matrix {
    let halves = || {
        let pairs = bytes.chunks_exact(2);
        pairs.map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    };
    match kind {
        TensorType::F32 => {
            let words = bytes.chunks_exact(4);
            let values = words.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            Matrix::from_f32(rows, cols, values.collect())
        }
        TensorType::F16 => Matrix::from_half(rows, cols, halves(), false),
        TensorType::Bf16 => Matrix::from_half(rows, cols, halves(), true),
        TensorType::Q4_0 => Matrix::from_blocks(rows, cols, BlockKind::Q4_0, bytes.to_vec()),
        TensorType::Q4_1 => Matrix::from_blocks(rows, cols, BlockKind::Q4_1, bytes.to_vec()),
        TensorType::Q8_0 => Matrix::from_blocks(rows, cols, BlockKind::Q8_0, bytes.to_vec()),
    }
}

/// Names of tokens that end a turn or a text in Llama-family chat models.
const ENDS: [&str; 5] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "</s>",
];

fn tokenizer(gguf: &Gguf<'_>) -> Result<(Vocabulary, BpeEncoder), GgufError> {
    let model = gguf.text("tokenizer.ggml.model")?;
    if model != "gpt2" {
        return Err(GgufError::Tokenizer(format!(
            "model `{model}` is not supported (only `gpt2`, byte-level BPE, is)"
        )));
    }
    let pre = match gguf.meta.contains_key("tokenizer.ggml.pre") {
        true => gguf.text("tokenizer.ggml.pre")?,
        false => "gpt-2",
    };
    let tokens = gguf.strings("tokenizer.ggml.tokens", MAX_VOCAB)?;
    let merges = gguf.strings("tokenizer.ggml.merges", MAX_VOCAB)?;
    let kinds: Vec<u64> = match gguf.meta.get("tokenizer.ggml.token_type") {
        None => vec![1; tokens.len()],
        Some(Value::Array(a)) if a.len() == tokens.len() as u64 => a
            .iter()
            .map(|v| match v {
                Value::Uint(t) => t,
                Value::Int(t) => t.try_into().unwrap_or(0),
                _ => 0,
            })
            .collect(),
        Some(_) => {
            return Err(GgufError::Tokenizer(
                "token types do not match the tokens".into(),
            ));
        }
    };
    let rows: Vec<TokenRow<'_>> = tokens
        .iter()
        .zip(&kinds)
        .map(|(text, kind)| TokenRow::new(text, *kind))
        .collect();

    let last = tokens.len() as u64 - 1;
    let optional = |key: &str| match gguf.meta.contains_key(key) {
        true => gguf.uint(key, 0, 0, last).map(|t| Some(t as u32)),
        false => Ok(None),
    };
    let mut eos = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        eos.extend(optional(key)?);
    }
    for (id, row) in rows.iter().enumerate() {
        if row.is_control() && ENDS.iter().any(|e| e.as_bytes() == row.text()) {
            eos.push(id as u32);
        }
    }
    eos.sort_unstable();
    eos.dedup();
    let add_bos = match gguf.meta.get("tokenizer.ggml.add_bos_token") {
        Some(Value::Bool(b)) => *b,
        _ => pre == "llama-bpe",
    };
    let bos = match add_bos {
        true => optional("tokenizer.ggml.bos_token_id")?,
        false => None,
    };
    let template = match gguf.meta.get("tokenizer.chat_template") {
        Some(Value::Str(s)) => {
            ChatTemplate::from_source(s, &rows, &eos, optional("tokenizer.ggml.bos_token_id")?)?
        }
        _ => ChatTemplate::chatml(),
    };
    let encoder = BpeEncoder::new(&rows, &merges, pre, template)?;
    let vocabulary = Vocabulary::new(rows.iter().map(TokenRow::bytes), eos, bos);
    Ok((vocabulary, encoder))
}

impl<'a> Gguf<'a> {
    fn text(&self, key: &str) -> Result<&'a str, GgufError> {
        match self.meta.get(key) {
            None => Err(GgufError::Missing(key.to_owned())),
            Some(Value::Str(s)) => {
                std::str::from_utf8(s).map_err(|_| self.wrong(key, "UTF-8 text"))
            }
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    /// An integer within `min..=max`, or `default` if the key is absent.
    fn uint(&self, key: &str, default: u64, min: u64, max: u64) -> Result<u64, GgufError> {
        let got = match self.meta.get(key) {
            None => return Ok(default),
            Some(Value::Uint(u)) => *u,
            Some(Value::Int(i)) if *i >= 0 => *i as u64,
            Some(_) => return Err(self.wrong(key, "an unsigned integer")),
        };
        if got < min || got > max {
            return Err(self.wrong(key, "a number that this engine can use"));
        }
        Ok(got)
    }

    fn float(&self, key: &str, default: Option<f64>) -> Result<f64, GgufError> {
        match (self.meta.get(key), default) {
            (Some(Value::Float(f)), _) if f.is_finite() => Ok(*f),
            (Some(_), _) => Err(self.wrong(key, "a finite float")),
            (None, Some(default)) => Ok(default),
            (None, None) => Err(GgufError::Missing(key.to_owned())),
        }
    }

    fn strings(&self, key: &str, max: u64) -> Result<Vec<&'a [u8]>, GgufError> {
        let Some(Value::Array(array)) = self.meta.get(key) else {
            return Err(GgufError::Missing(key.to_owned()));
        };
        if array.is_empty() || array.len() > max {
            return Err(self.wrong(key, "a list that this engine can use"));
        }
        let text = array.iter().map(|v| match v {
            Value::Str(s) => Ok(s),
            _ => Err(self.wrong(key, "a list of strings")),
        });
        text.collect()
    }

    fn tensor(&self, name: &str) -> Result<&TensorInfo, GgufError> {
        self.tensors
            .get(name)
            .ok_or_else(|| GgufError::Missing(name.to_owned()))
    }

    fn wrong(&self, key: &str, want: &'static str) -> GgufError {
        let got = match self.meta.get(key) {
            Some(Value::Array(a)) => format!("a list of {}", a.len()),
            Some(Value::Str(s)) => format!("a string of {} bytes", s.len()),
            Some(v) => format!("{v:?}"),
            None => "absent".into(),
        };
        GgufError::Value {
            key: key.to_owned(),
            got,
            want,
        }
    }
}
