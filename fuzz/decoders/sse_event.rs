//! A gateway's event stream, as a client reads it. The first byte says where the stream is cut.

use super::{Target, seed};
use moonlivekv::gateway::sse::{Event, MAX_EVENT, Reader, SseError};

pub const TARGET: Target = Target {
    name: "sse_event",
    run,
    outcomes: &["accept", "json", "number", "token", "too-long", "utf-8"],
    seeds,
};

fn all(parts: &[&[u8]]) -> Result<Vec<Event>, SseError> {
    let mut reader = Reader::default();
    let mut events = Vec::new();
    for part in parts {
        reader.push(part);
        while let Some(event) = reader.next_event()? {
            events.push(event);
        }
    }
    Ok(events)
}

fn run(data: &[u8]) -> &'static str {
    let (cut, stream) = match data.split_first() {
        Some((cut, stream)) => (usize::from(*cut).min(stream.len()), stream),
        None => (0, data),
    };
    let result = all(&[&stream[..cut], &stream[cut..]]);
    assert_eq!(result, all(&[stream]), "a cut at {cut} shows");
    match result {
        Ok(_) => "accept",
        Err(SseError::TooLong) => "too-long",
        Err(SseError::Utf8) => "utf-8",
        Err(SseError::Json(_)) => "json",
        Err(SseError::Number { .. }) => "number",
        Err(SseError::Token { .. }) => "token",
    }
}

fn seeds() -> Vec<super::Seed> {
    let stream = |name: &str, text: &str| seed(name, [b" ", text.as_bytes()].concat());
    vec![
        stream(
            "accept.completion",
            "id: 1\ndata: {\"seq\":1,\"token\":5,\"choices\":[{\"text\":\"a\\n\\n\",\"finish_reason\":null}]}\n\ndata: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n",
        ),
        stream(
            "accept.chat",
            "id: 2\ndata: {\"seq\":2,\"token\":5,\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n",
        ),
        stream(
            "accept.error",
            "event: error\ndata: {\"error\":{\"message\":\"lost\"}}\n\n",
        ),
        stream("accept.comment", ": keep-alive\n\n"),
        stream("json", "data: {\n\n"),
        stream("number.other", "id: 3\ndata: {\"seq\":1,\"token\":5}\n\n"),
        stream("number.none", "data: {\"seq\":1,\"token\":5}\n\n"),
        stream("token.none", "id: 1\ndata: {\"seq\":1}\n\n"),
        stream(
            "token.large",
            "id: 1\ndata: {\"seq\":1,\"token\":4294967296}\n\n",
        ),
        seed("too-long", vec![b'x'; MAX_EVENT + 2]),
        seed("utf-8", b" data: \xff\n\n".to_vec()),
    ]
}
