//! A streaming client: what a user of the HTTP API sees, with the time each token was seen.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::Value;

/// One token as the client got it.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Its number: the event's `id:` line, equal to the object's `seq`.
    pub seq: u64,
    /// The token.
    pub token: u32,
    /// Its text.
    pub text: String,
    /// When it was read off the socket.
    pub at: Instant,
}

/// A finished stream.
#[derive(Debug, Clone, Default)]
pub struct Transcript {
    /// Tokens in order of arrival; duplicates by number are dropped and counted.
    pub tokens: Vec<Seen>,
    /// Why it ended, as the server said; empty if the stream broke.
    pub finish: String,
    /// An error event, if one came.
    pub error: Option<String>,
    /// Events whose number was seen before, with equal content.
    pub duplicates: u64,
}

impl Transcript {
    /// The stream in a form to compare: a line for each token, then the reason of its end.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = String::new();
        for t in &self.tokens {
            out.push_str(&format!("{} {} {:?}\n", t.seq, t.token, t.text));
        }
        out.push_str(&format!("finish {}\n", self.finish));
        out.into_bytes()
    }

    /// The text that the user reads.
    pub fn text(&self) -> String {
        self.tokens.iter().map(|t| t.text.as_str()).collect()
    }

    /// Time between token `seq` and the one before it.
    pub fn gap_before(&self, seq: u64) -> Option<Duration> {
        let at = self.tokens.iter().position(|t| t.seq == seq)?;
        let before = self.tokens.get(at.checked_sub(1)?)?;
        Some(self.tokens[at].at - before.at)
    }
}

/// Posts JSON and returns status and body stream.
async fn send(
    addr: SocketAddr,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> anyhow::Result<hyper::Response<Incoming>> {
    let stream = tokio::net::TcpStream::connect(addr)
        .await
        .with_context(|| format!("nothing answers at http://{addr}"))?;
    stream.set_nodelay(true)?;
    let (mut sender, conn) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        // A connection that breaks shows up in the body of the response.
        let _ = conn.await;
    });
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", addr.to_string());
    let bytes = match body {
        None => Bytes::new(),
        Some(v) => {
            request = request.header("content-type", "application/json");
            Bytes::from(v.to_string())
        }
    };
    Ok(sender.send_request(request.body(Full::new(bytes))?).await?)
}

/// Streams a completion, calling `each` for every new token, until `[DONE]` or the end.
pub async fn stream(
    addr: SocketAddr,
    path: &str,
    body: &Value,
    mut each: impl FnMut(&Seen),
) -> anyhow::Result<Transcript> {
    let response = send(addr, Method::POST, path, Some(body)).await?;
    let status = response.status().as_u16();
    let mut body = response.into_body();
    if status != 200 {
        let text = body.collect().await?.to_bytes();
        bail!("HTTP {status}: {}", String::from_utf8_lossy(&text));
    }
    let mut transcript = Transcript::default();
    let mut pending = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else {
            continue;
        };
        let at = Instant::now();
        pending.extend_from_slice(&data);
        while let Some(end) = find_event_end(&pending) {
            let event: Vec<u8> = pending.drain(..end + 2).collect();
            if take_event(&event[..end], at, &mut transcript, &mut each)? {
                return Ok(transcript);
            }
        }
    }
    Ok(transcript)
}

fn find_event_end(bytes: &[u8]) -> Option<usize> {
    bytes.windows(2).position(|w| w == b"\n\n")
}

/// Takes one event; true at `[DONE]`.
fn take_event(
    event: &[u8],
    at: Instant,
    transcript: &mut Transcript,
    each: &mut impl FnMut(&Seen),
) -> anyhow::Result<bool> {
    let text = std::str::from_utf8(event).context("an event is not UTF-8")?;
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
    let Some(data) = data else { return Ok(false) };
    if data == "[DONE]" {
        return Ok(true);
    }
    let v: Value = serde_json::from_str(data).context("an event's data is not JSON")?;
    if is_error {
        transcript.error = Some(v["error"]["message"].as_str().unwrap_or(data).to_owned());
        return Ok(false);
    }
    let choice = &v["choices"][0];
    if let Some(finish) = choice["finish_reason"].as_str() {
        transcript.finish = finish.to_owned();
    }
    let Some(seq) = v["seq"].as_u64() else {
        return Ok(false);
    };
    if id != Some(seq) {
        bail!("event id {id:?} and its object's seq {seq} differ");
    }
    let token = u32::try_from(v["token"].as_u64().context("a token event without token")?)?;
    let text = choice["text"]
        .as_str()
        .or(choice["delta"]["content"].as_str())
        .unwrap_or("");
    let seen = Seen {
        seq,
        token,
        text: text.to_owned(),
        at,
    };
    let last = transcript.tokens.last().map_or(0, |t| t.seq);
    if seq <= last {
        let old = &transcript.tokens[usize::try_from(seq - 1)?];
        if old.token != token || old.text != seen.text {
            bail!("token {seq} came twice with different content");
        }
        transcript.duplicates += 1;
        return Ok(false);
    }
    if seq != last + 1 {
        bail!("token {seq} came after token {last}: the stream has a gap");
    }
    each(&seen);
    transcript.tokens.push(seen);
    Ok(false)
}
