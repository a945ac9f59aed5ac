//! The OpenAI-compatible surface as data: requests read and bounded, errors written. No socket here.

use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::id::{ErrorKind, RequestId};
use crate::rpc::v1;

/// Largest request body, in bytes.
pub const MAX_BODY: usize = 4 << 20;
/// Most stop strings, and the longest of them in bytes.
pub const MAX_STOPS: (usize, usize) = (16, 256);
/// Most chat messages.
pub const MAX_MESSAGES: usize = 1024;
/// Most entries of a logit bias.
pub const MAX_BIAS: usize = 1024;
/// Output tokens where the client names no bound.
pub const DEFAULT_MAX_TOKENS: u32 = 256;

/// Which of the two endpoints a request came through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surface {
    /// `/v1/completions`
    Completion,
    /// `/v1/chat/completions`
    Chat,
}

/// A request that cannot be served, in OpenAI's form.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// For a human.
    pub message: String,
    /// OpenAI's class: `invalid_request_error`, `server_error`, ...
    pub class: &'static str,
    /// The parameter at fault.
    pub param: Option<&'static str>,
    /// A stable word for a program.
    pub code: &'static str,
}

impl ApiError {
    /// The client's own mistake.
    pub fn invalid(param: &'static str, message: impl Into<String>) -> Self {
        Self {
            status: 400,
            message: message.into(),
            class: "invalid_request_error",
            param: Some(param),
            code: "invalid_value",
        }
    }

    /// No such request.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self {
            status: 404,
            message: message.into(),
            class: "invalid_request_error",
            param: None,
            code: "not_found",
        }
    }

    /// The request id belongs to a request of another content.
    pub fn taken(request: RequestId) -> Self {
        Self {
            status: 409,
            message: format!(
                "request_id {request} was used for another request: repeat that one as it was, or \
                 choose another id"
            ),
            class: "invalid_request_error",
            param: Some("request_id"),
            code: "request_id_taken",
        }
    }

    /// Nothing serves right now.
    pub fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status: 503,
            message: message.into(),
            class: "server_error",
            param: None,
            code,
        }
    }

    /// The client's own mistake in HTTP itself, under that status.
    pub fn of_http(status: u16, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            class: "invalid_request_error",
            param: None,
            code: match status {
                405 => "method_not_allowed",
                408 => "request_timeout",
                413 => "body_too_long",
                414 => "uri_too_long",
                _ => "bad_request",
            },
        }
    }

    /// Ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self {
            status: 500,
            message: message.into(),
            class: "server_error",
            param: None,
            code: "internal",
        }
    }

    /// From the answer of a worker.
    pub fn from_kind(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        match kind {
            ErrorKind::Caller | ErrorKind::Unsupported => Self {
                param: None,
                ..Self::invalid("", message)
            },
            ErrorKind::Retryable => Self {
                status: 429,
                code: "overloaded",
                ..Self::unavailable("overloaded", message)
            },
            ErrorKind::PeerLost | ErrorKind::DeviceLost { .. } => {
                Self::unavailable("worker_lost", message)
            }
            ErrorKind::Integrity | ErrorKind::Bug => Self::internal(message),
        }
    }

    /// The status as axum's type.
    pub fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// `{"error": {...}}`
    pub fn body(&self) -> Value {
        json!({ "error": {
            "message": self.message, "type": self.class, "param": self.param, "code": self.code,
        }})
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
}

#[derive(Debug, Deserialize)]
struct Message {
    role: String,
    content: Content,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    r#type: String,
    #[serde(default)]
    text: String,
}

impl Content {
    fn text(&self) -> Result<String, ApiError> {
        match self {
            Self::Text(text) => Ok(text.clone()),
            Self::Parts(parts) => match parts.iter().find(|p| p.r#type != "text") {
                Some(p) => Err(ApiError::invalid(
                    "messages",
                    format!(
                        "a message part of type {:?} is not served: only text",
                        p.r#type
                    ),
                )),
                None => Ok(parts.iter().map(|p| p.text.as_str()).collect()),
            },
        }
    }
}

#[derive(Debug, Deserialize)]
struct SeededContext {
    tokens: u32,
    seed: u64,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Debug, Deserialize)]
struct ResponseFormat {
    r#type: String,
}

/// The body of both endpoints: OpenAI's fields, and the extensions that engines agree on.
#[derive(Debug, Deserialize)]
struct Body {
    model: Option<String>,
    prompt: Option<PromptField>,
    /// Instead of a prompt: a context whose KV is filled from a seed, not computed (benches).
    seeded_context: Option<SeededContext>,
    messages: Option<Vec<Message>>,
    #[serde(default)]
    stream: bool,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    min_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    seed: Option<u64>,
    stop: Option<OneOrMany>,
    logit_bias: Option<std::collections::BTreeMap<String, f32>>,
    #[serde(default)]
    ignore_eos: bool,
    n: Option<u32>,
    best_of: Option<u32>,
    echo: Option<bool>,
    logprobs: Option<Value>,
    response_format: Option<ResponseFormat>,
    /// 32 hexadecimal digits; equal ids are the same request, so a client may retry safely.
    request_id: Option<String>,
    /// Everything else: ignored, but for what would change the answer.
    #[serde(flatten)]
    rest: std::collections::BTreeMap<String, Value>,
}

/// Fields that other servers know and that change what is answered: a client that sends one must not
/// get something else silently.
const NOT_SERVED: [&str; 27] = [
    "suffix",
    "grammar",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "json_schema",
    "regex",
    "ebnf",
    "tools",
    "functions",
    "function_call",
    "top_logprobs",
    "prompt_logprobs",
    "use_beam_search",
    "best_of_n",
    "length_penalty",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
    "typical_p",
    "mirostat",
    "prediction",
    "audio",
    "chat_template",
];

/// Whether a field's value asks for nothing.
fn asks_nothing(v: &Value) -> bool {
    match v {
        Value::Null | Value::Bool(false) => true,
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
        Value::String(s) => s.is_empty(),
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::Bool(true) => false,
    }
}

/// One request, read and within bounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// Chosen by the client, or `None`: the gateway draws one.
    pub request: Option<RequestId>,
    /// As the client named it.
    pub model: Option<String>,
    /// What to continue.
    pub prompt: v1::Prompt,
    /// How.
    pub sampling: v1::Sampling,
    /// Server-sent events instead of one object.
    pub stream: bool,
    /// A usage object at the end of the stream.
    pub include_usage: bool,
}

impl Ask {
    /// A hash of all that decides which tokens come: equal for a retry, however it is answered.
    pub fn fingerprint(&self) -> [u8; 32] {
        let what = format!("{:?}", (&self.model, &self.prompt, &self.sampling));
        *blake3::hash(what.as_bytes()).as_bytes()
    }

    /// Reads a body. Each refusal names its parameter.
    pub fn parse(surface: Surface, body: &[u8]) -> Result<Self, ApiError> {
        let body: Body = serde_json::from_slice(body).map_err(|e| ApiError {
            code: "invalid_json",
            ..ApiError::invalid("body", e.to_string())
        })?;
        refuse_unsupported(&body)?;
        let prompt = prompt_of(surface, &body)?;
        let request = match &body.request_id {
            None => None,
            Some(text) => Some(
                text.parse()
                    .map_err(|e| ApiError::invalid("request_id", format!("{e}")))?,
            ),
        };
        let max_tokens = body
            .max_completion_tokens
            .or(body.max_tokens)
            .unwrap_or(DEFAULT_MAX_TOKENS);
        if max_tokens == 0 {
            return Err(ApiError::invalid(
                "max_tokens",
                "max_tokens must be at least 1",
            ));
        }
        check_ranges(&body)?;
        let sampling = v1::Sampling {
            temperature: body.temperature,
            top_k: body.top_k,
            top_p: body.top_p,
            min_p: body.min_p,
            repetition_penalty: body.repetition_penalty,
            presence_penalty: body.presence_penalty,
            frequency_penalty: body.frequency_penalty,
            seed: body.seed,
            max_tokens,
            min_tokens: body.min_tokens.unwrap_or(0),
            ignore_eos: body.ignore_eos,
            stop: stops_of(body.stop)?,
            logit_bias: bias_of(body.logit_bias)?,
            grammar: match body.response_format.map(|f| f.r#type).as_deref() {
                None | Some("text") => String::new(),
                Some("json_object") => "json_object".into(),
                Some(other) => {
                    return Err(ApiError::invalid(
                        "response_format",
                        format!("response_format {other:?} is not served: use text or json_object"),
                    ));
                }
            },
            include_stop: false,
        };
        Ok(Self {
            request,
            model: body.model,
            prompt,
            sampling,
            stream: body.stream,
            include_usage: body.stream_options.is_some_and(|o| o.include_usage),
        })
    }
}

fn refuse_unsupported(body: &Body) -> Result<(), ApiError> {
    if body.n.unwrap_or(1) != 1 || body.best_of.unwrap_or(1) != 1 {
        return Err(ApiError::invalid(
            "n",
            "one choice a request is served: send n requests",
        ));
    }
    for name in NOT_SERVED {
        // One is the neutral value of these.
        let neutral =
            |v: &Value| matches!(name, "length_penalty" | "typical_p") && v.as_f64() == Some(1.0);
        if body
            .rest
            .get(name)
            .is_some_and(|v| !asks_nothing(v) && !neutral(v))
        {
            return Err(ApiError::invalid(
                name,
                format!("{name} is not served: leave it out"),
            ));
        }
    }
    if body.echo == Some(true) {
        return Err(ApiError::invalid(
            "echo",
            "echo is not served: the client has its prompt",
        ));
    }
    if body
        .logprobs
        .as_ref()
        .is_some_and(|v| !matches!(v, Value::Null | Value::Bool(false)))
    {
        return Err(ApiError::invalid("logprobs", "logprobs are not served"));
    }
    Ok(())
}

fn prompt_of(surface: Surface, body: &Body) -> Result<v1::Prompt, ApiError> {
    use v1::prompt::Kind;
    let kind = match surface {
        Surface::Completion => match &body.prompt {
            None if let Some(s) = &body.seeded_context => Kind::Seeded(v1::SeededContext {
                tokens: s.tokens,
                seed: s.seed,
            }),
            None => return Err(ApiError::invalid("prompt", "prompt is missing")),
            Some(PromptField::Text(text)) => Kind::Text(text.clone()),
            Some(PromptField::Tokens(tokens)) if !tokens.is_empty() => {
                Kind::Tokens(v1::TokenList {
                    tokens: tokens.clone(),
                })
            }
            Some(PromptField::Texts(texts)) if texts.len() == 1 => Kind::Text(texts[0].clone()),
            Some(_) => {
                return Err(ApiError::invalid(
                    "prompt",
                    "prompt must be one text or one non-empty list of token ids",
                ));
            }
        },
        Surface::Chat => {
            let messages = body.messages.as_deref().unwrap_or(&[]);
            if messages.is_empty() || messages.len() > MAX_MESSAGES {
                return Err(ApiError::invalid(
                    "messages",
                    format!("messages must hold 1 to {MAX_MESSAGES} entries"),
                ));
            }
            let messages = messages
                .iter()
                .map(|m| {
                    Ok(v1::ChatMessage {
                        role: role_of(&m.role)?.to_owned(),
                        content: m.content.text()?,
                    })
                })
                .collect::<Result<_, ApiError>>()?;
            Kind::Chat(v1::Chat { messages })
        }
    };
    if matches!(&kind, Kind::Text(t) if t.is_empty()) {
        return Err(ApiError::invalid("prompt", "prompt is empty"));
    }
    Ok(v1::Prompt { kind: Some(kind) })
}

/// The role as models know it.
fn role_of(role: &str) -> Result<&str, ApiError> {
    match role {
        "system" | "user" | "assistant" => Ok(role),
        // OpenAI's newer name.
        "developer" => Ok("system"),
        other => Err(ApiError::invalid(
            "messages",
            format!("role {other:?} is not served: system, developer, user or assistant"),
        )),
    }
}

fn check_ranges(body: &Body) -> Result<(), ApiError> {
    let within = |name: &'static str, v: Option<f32>, low: f32, high: f32| match v {
        // A comparison with NaN is false, so NaN is refused too.
        Some(v) if !(low..=high).contains(&v) => Err(ApiError::invalid(
            name,
            format!("{name} must be {low} to {high}, not {v}"),
        )),
        _ => Ok(()),
    };
    within("temperature", body.temperature, 0.0, 100.0)?;
    within("top_p", body.top_p, 0.0, 1.0)?;
    within("min_p", body.min_p, 0.0, 1.0)?;
    within("repetition_penalty", body.repetition_penalty, 0.01, 100.0)?;
    within("presence_penalty", body.presence_penalty, -100.0, 100.0)?;
    within("frequency_penalty", body.frequency_penalty, -100.0, 100.0)
}

fn stops_of(stop: Option<OneOrMany>) -> Result<Vec<String>, ApiError> {
    let stops = match stop {
        None => Vec::new(),
        Some(OneOrMany::One(s)) => vec![s],
        Some(OneOrMany::Many(v)) => v,
    };
    if stops.len() > MAX_STOPS.0 || stops.iter().any(|s| s.is_empty() || s.len() > MAX_STOPS.1) {
        return Err(ApiError::invalid(
            "stop",
            format!(
                "stop takes at most {} texts of 1 to {} bytes",
                MAX_STOPS.0, MAX_STOPS.1
            ),
        ));
    }
    Ok(stops)
}

fn bias_of(
    bias: Option<std::collections::BTreeMap<String, f32>>,
) -> Result<Vec<v1::LogitBias>, ApiError> {
    let bias = bias.unwrap_or_default();
    if bias.len() > MAX_BIAS {
        return Err(ApiError::invalid(
            "logit_bias",
            format!("at most {MAX_BIAS} entries"),
        ));
    }
    bias.into_iter()
        .map(|(token, bias)| {
            let token = token.parse().map_err(|_| {
                ApiError::invalid("logit_bias", format!("{token:?} is no token id"))
            })?;
            if !(-100.0..=100.0).contains(&bias) {
                return Err(ApiError::invalid(
                    "logit_bias",
                    "a bias must be -100 to 100",
                ));
            }
            Ok(v1::LogitBias { token, bias })
        })
        .collect()
}

#[cfg(test)]
#[path = "openai_tests.rs"]
mod tests;
