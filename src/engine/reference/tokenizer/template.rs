//! How a chat becomes one prompt: the template that the model file brings, or ChatML.

use super::super::EngineError;
use super::super::gguf::GgufError;
use super::super::spec::ChatMessage;
use super::bpe::TokenRow;
use super::chatml;

/// Longest template accepted, in bytes.
const MAX_TEMPLATE: usize = 256 << 10;

/// A checked template.
pub(crate) struct ChatTemplate {
    #[cfg(feature = "program")]
    source: Option<Source>,
}

#[cfg(feature = "program")]
struct Source {
    environment: minijinja::Environment<'static>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// ChatML.
    pub(crate) fn chatml() -> Self {
        Self {
            #[cfg(feature = "program")]
            source: None,
        }
    }

    /// A Jinja template from a model file. Built without templates (the library alone), a template
    /// that is not ChatML's is refused rather than replaced.
    pub(crate) fn from_source(
        source: &[u8],
        rows: &[TokenRow<'_>],
        eos: &[u32],
        bos: Option<u32>,
    ) -> Result<Self, GgufError> {
        let wrong = |what: String| GgufError::Tokenizer(format!("chat template: {what}"));
        if source.len() > MAX_TEMPLATE {
            return Err(wrong(format!(
                "{} bytes, at most {MAX_TEMPLATE} are read",
                source.len()
            )));
        }
        let text = std::str::from_utf8(source).map_err(|_| wrong("not UTF-8".into()))?;
        Self::compile(text, rows, eos, bos).map_err(wrong)
    }

    #[cfg(not(feature = "program"))]
    fn compile(text: &str, _: &[TokenRow<'_>], _: &[u32], _: Option<u32>) -> Result<Self, String> {
        match text.contains("<|im_start|>") {
            true => Ok(Self::chatml()),
            false => Err("needs the feature `program`".into()),
        }
    }

    #[cfg(feature = "program")]
    fn compile(
        text: &str,
        rows: &[TokenRow<'_>],
        eos: &[u32],
        bos: Option<u32>,
    ) -> Result<Self, String> {
        let mut environment = minijinja::Environment::new();
        environment.set_fuel(Some(1_000_000));
        environment.add_function("raise_exception", |message: String| -> Result<String, _> {
            Err(minijinja::Error::new(
                minijinja::ErrorKind::InvalidOperation,
                message,
            ))
        });
        environment
            .add_template_owned("chat", text.to_owned())
            .map_err(|e| e.to_string())?;
        let name = |id: Option<u32>| {
            id.and_then(|id| rows.get(id as usize))
                .map(|r| String::from_utf8_lossy(r.text()).into_owned())
                .unwrap_or_default()
        };
        Ok(Self {
            source: Some(Source {
                environment,
                bos: name(bos),
                eos: name(eos.first().copied()),
            }),
        })
    }

    /// The prompt, ready for the assistant's answer.
    pub(crate) fn render(&self, messages: &[ChatMessage]) -> Result<String, EngineError> {
        #[cfg(feature = "program")]
        if let Some(source) = &self.source {
            let list: Vec<_> = messages
                .iter()
                .map(|m| {
                    minijinja::Value::from_pairs([
                        ("role", m.role.as_str()),
                        ("content", m.content.as_str()),
                    ])
                })
                .collect();
            let context = minijinja::context! {
                messages => list,
                add_generation_prompt => true,
                bos_token => source.bos.as_str(),
                eos_token => source.eos.as_str(),
            };
            let rendered = source
                .environment
                .get_template("chat")
                .and_then(|t| t.render(context));
            return rendered.map_err(|e| EngineError::OutOfRange {
                what: "messages",
                value: e.to_string(),
                bounds: "what the model's chat template accepts".into(),
            });
        }
        Ok(chatml(messages))
    }
}
