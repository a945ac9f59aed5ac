//! Reading the gateway's event stream, for clients: the other end of [`super::answer`]. No socket
//! here.

use serde_json::Value;

/// Longest event, in bytes.
pub const MAX_EVENT: usize = 1 << 20;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A token.
    Token(Token),
    /// The stream ends, and why.
    Finish(String),
    /// The gateway could not go on.
    Error(String),
    /// `[DONE]`: nothing follows.
    Done,
    /// A comment, usage, or anything newer than this reader.
    Other,
}

/// One streamed token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// Its number: the event's `id:` line, equal to the object's `seq`.
    pub seq: u64,
    /// The token.
    pub token: u32,
    /// Its text.
    pub text: String,
    /// Why the stream ends with it, where it does.
    pub finish: Option<String>,
}

/// What is wrong with an event.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// Longer than [`MAX_EVENT`].
    #[error("an event has more than {MAX_EVENT} bytes")]
    TooLong,
    /// Not text.
    #[error("an event is not UTF-8")]
    Utf8,
    /// Its data is no JSON.
    #[error("an event's data is not JSON: {0}")]
    Json(String),
    /// It carries two numbers.
    #[error("event id {id:?} and its object's seq {seq} differ")]
    Number {
        /// Of the `id:` line.
        id: Option<u64>,
        /// Of the object.
        seq: u64,
    },
    /// A number without a token.
    #[error("event {seq} has no token id")]
    Token {
        /// Its number.
        seq: u64,
    },
}

/// Cuts a stream of bytes into events.
#[derive(Debug, Default)]
pub struct Reader {
    pending: Vec<u8>,
    /// Bytes of `pending` in which no event ends.
    searched: usize,
}

impl Reader {
    /// Takes what came off the socket.
    pub fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// The next whole event, if there is one. After an error the stream means nothing any more.
    pub fn next_event(&mut self) -> Result<Option<Event>, SseError> {
        let from = self.searched.saturating_sub(1);
        let end = self.pending[from..].windows(2).position(|w| w == b"\n\n");
        let Some(end) = end.map(|at| from + at) else {
            self.searched = self.pending.len();
            return match self.searched > MAX_EVENT {
                true => Err(SseError::TooLong),
                false => Ok(None),
            };
        };
        let event = match end > MAX_EVENT {
            true => Err(SseError::TooLong),
            false => parse(&self.pending[..end]),
        };
        self.pending.drain(..end + 2);
        self.searched = 0;
        event.map(Some)
    }
}

/// Reads one event, without the empty line that ends it.
fn parse(event: &[u8]) -> Result<Event, SseError> {
    let text = std::str::from_utf8(event).map_err(|_| SseError::Utf8)?;
    let (mut id, mut data, mut is_error) = (None, None, false);
    for line in text.lines() {
        if let Some(v) = line.strip_prefix("id: ") {
            id = v.parse::<u64>().ok();
        } else if let Some(v) = line.strip_prefix("data: ") {
            data = Some(v);
        } else if line == "event: error" {
            is_error = true;
        }
    }
    let Some(data) = data else {
        return Ok(Event::Other);
    };
    if data == "[DONE]" {
        return Ok(Event::Done);
    }
    let v: Value = serde_json::from_str(data).map_err(|e| SseError::Json(e.to_string()))?;
    if is_error {
        let message = v["error"]["message"].as_str().unwrap_or(data);
        return Ok(Event::Error(message.to_owned()));
    }
    let choice = &v["choices"][0];
    let finish = choice["finish_reason"].as_str().map(str::to_owned);
    let Some(seq) = v["seq"].as_u64() else {
        return Ok(finish.map_or(Event::Other, Event::Finish));
    };
    if id != Some(seq) {
        return Err(SseError::Number { id, seq });
    }
    let token = v["token"].as_u64().and_then(|t| u32::try_from(t).ok());
    let text = choice["text"]
        .as_str()
        .or(choice["delta"]["content"].as_str())
        .unwrap_or("");
    Ok(Event::Token(Token {
        seq,
        token: token.ok_or(SseError::Token { seq })?,
        text: text.to_owned(),
        finish,
    }))
}

#[cfg(test)]
mod tests {
    use super::super::answer::Writer;
    use super::super::openai::Surface;
    use super::*;
    use crate::id::RequestId;

    #[test]
    fn events_cut_anywhere_are_those_that_were_written() {
        let w = Writer {
            surface: Surface::Chat,
            request: RequestId([1; 16]),
            created: 1,
            model: "m".into(),
        };
        let mut stream = b": a comment\n\n".to_vec();
        for (seq, text) in [(1, "caf\u{e9}\n\n"), (2, "")] {
            let object = w.chunk(seq, 7, text);
            stream.extend(format!("id: {seq}\ndata: {object}\n\n").bytes());
        }
        stream.extend(format!("data: {}\n\n", w.finish_chunk("stop")).bytes());
        stream.extend(b"data: [DONE]\n\n");
        let token = |seq, text: &str| {
            Event::Token(Token {
                seq,
                token: 7,
                text: text.into(),
                finish: None,
            })
        };
        let want = [
            Event::Other,
            token(1, "caf\u{e9}\n\n"),
            token(2, ""),
            Event::Finish("stop".into()),
            Event::Done,
        ];
        for cut in 0..stream.len() {
            let mut reader = Reader::default();
            let mut got = Vec::new();
            for part in [&stream[..cut], &stream[cut..]] {
                reader.push(part);
                while let Some(event) = reader.next_event().unwrap() {
                    got.push(event);
                }
            }
            assert_eq!(got, want, "cut at {cut}");
        }
    }

    #[test]
    fn an_event_that_never_ends_is_refused_and_not_kept() {
        let mut reader = Reader::default();
        reader.push(&[b'x'; MAX_EVENT]);
        assert_eq!(reader.next_event(), Ok(None));
        reader.push(b"x");
        assert_eq!(reader.next_event(), Err(SseError::TooLong));
    }
}
