//! Between the RPC's messages and the engine's types.

use std::collections::BTreeMap;

use prost::Message;

use crate::engine::reference::{
    ChatMessage, GenerateSpec, GrammarSpec, Prompt, SamplingParams, StopParams,
};
use crate::id::{Incarnation, OwnerEpoch, RequestId, WorkerId, WorkerRef};
use crate::node::faults::Faults;
use crate::rpc::v1;

/// What is wrong with a message, for an `INVALID_ARGUMENT`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {why}")]
pub struct BadField {
    /// Which field.
    pub field: &'static str,
    /// Why.
    pub why: String,
}

fn bad(field: &'static str, why: impl ToString) -> BadField {
    BadField {
        field,
        why: why.to_string(),
    }
}

/// Plans the fault that a test asks for.
pub fn arm(faults: &Faults, ask: &v1::InjectRequest) -> Result<(), tonic::Status> {
    let plan = match ask.plan.as_str() {
        "" => None,
        text => Some(text.parse().map_err(tonic::Status::invalid_argument)?),
    };
    if faults.arm(plan) {
        return Ok(());
    }
    Err(tonic::Status::failed_precondition(
        "this daemon was not started to take injected faults",
    ))
}

/// Reads a request's name.
pub fn request_id(text: &str) -> Result<RequestId, BadField> {
    text.parse().map_err(|e| bad("request", e))
}

/// Reads one life of a worker.
pub fn worker_ref(w: &v1::WorkerRef) -> Result<WorkerRef, BadField> {
    let id = WorkerId::new(w.id.clone()).map_err(|e| bad("worker", e))?;
    Ok(WorkerRef {
        id,
        incarnation: Incarnation(w.incarnation),
    })
}

/// Writes one life of a worker.
pub fn worker_msg(w: &WorkerRef) -> v1::WorkerRef {
    v1::WorkerRef {
        id: w.id.as_str().to_owned(),
        incarnation: w.incarnation.0,
    }
}

fn prompt_of(prompt: Option<v1::Prompt>) -> Result<Prompt, BadField> {
    use v1::prompt::Kind;
    Ok(
        match prompt
            .and_then(|p| p.kind)
            .ok_or_else(|| bad("prompt", "missing"))?
        {
            Kind::Text(text) => Prompt::Text(text),
            Kind::Tokens(list) => Prompt::Tokens(list.tokens),
            Kind::Seeded(s) => Prompt::SeededKv {
                tokens: s.tokens,
                seed: s.seed,
            },
            Kind::Chat(chat) => Prompt::Chat(
                chat.messages
                    .into_iter()
                    .map(|m| ChatMessage {
                        role: m.role,
                        content: m.content,
                    })
                    .collect(),
            ),
        },
    )
}

/// The engine's spec of a submitted request, from the bytes of the message: as the journal's image
/// carries it.
pub fn submitted(bytes: &[u8]) -> Result<GenerateSpec, BadField> {
    let submit = v1::SubmitRequest::decode(bytes).map_err(|e| bad("submit", e))?;
    generate_spec(submit)
}

/// The engine's spec of a submitted request.
pub fn generate_spec(submit: v1::SubmitRequest) -> Result<GenerateSpec, BadField> {
    let request = request_id(&submit.request)?;
    let mut spec = GenerateSpec::new(request, prompt_of(submit.prompt)?);
    spec.owner_epoch = OwnerEpoch(submit.owner_epoch);
    let s = submit.sampling.ok_or_else(|| bad("sampling", "missing"))?;
    let default = SamplingParams::default();
    spec.sampling = SamplingParams {
        temperature: s.temperature.unwrap_or(1.0),
        top_k: s.top_k.unwrap_or(default.top_k),
        top_p: s.top_p.unwrap_or(default.top_p),
        min_p: s.min_p.unwrap_or(default.min_p),
        repetition_penalty: s.repetition_penalty.unwrap_or(default.repetition_penalty),
        presence_penalty: s.presence_penalty.unwrap_or(default.presence_penalty),
        frequency_penalty: s.frequency_penalty.unwrap_or(default.frequency_penalty),
        seed: s.seed,
        logit_bias: s
            .logit_bias
            .iter()
            .map(|b| (b.token, b.bias))
            .collect::<BTreeMap<_, _>>(),
        ..default
    };
    spec.stop = StopParams {
        max_output: s.max_tokens,
        min_output: s.min_tokens,
        ignore_eos: s.ignore_eos,
        stop_strings: s.stop,
        include_stop: s.include_stop,
        ..StopParams::default()
    };
    spec.grammar = match s.grammar.as_str() {
        "" => None,
        "json_object" => Some(GrammarSpec::JsonObject),
        other => match other.strip_prefix("regex:") {
            Some(regex) => Some(GrammarSpec::Regex(regex.to_owned())),
            None => return Err(bad("sampling.grammar", format!("{other:?} is not known"))),
        },
    };
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn submit() -> v1::SubmitRequest {
        v1::SubmitRequest {
            request: RequestId([7; 16]).to_string(),
            owner_epoch: 3,
            prompt: Some(v1::Prompt {
                kind: Some(v1::prompt::Kind::Text("hi".into())),
            }),
            sampling: Some(v1::Sampling {
                max_tokens: 9,
                top_k: Some(4),
                ..Default::default()
            }),
        }
    }

    #[test]
    fn a_submit_becomes_the_engines_spec_with_openais_defaults() {
        let spec = generate_spec(submit()).unwrap();
        assert_eq!(spec.owner_epoch, OwnerEpoch(3));
        assert_eq!(spec.sampling.temperature, 1.0);
        assert_eq!(spec.sampling.top_k, 4);
        assert_eq!(spec.stop.max_output, 9);
    }

    #[test]
    fn a_submit_that_lacks_something_names_it() {
        let field = |edit: fn(&mut v1::SubmitRequest)| {
            let mut s = submit();
            edit(&mut s);
            generate_spec(s).unwrap_err().field
        };
        assert_eq!(field(|s| s.request = "x".into()), "request");
        assert_eq!(field(|s| s.prompt = None), "prompt");
        assert_eq!(field(|s| s.sampling = None), "sampling");
        assert_eq!(
            field(|s| s.sampling.as_mut().unwrap().grammar = "bnf".into()),
            "sampling.grammar"
        );
    }
}
