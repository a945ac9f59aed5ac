//! A streaming client: what a user of the HTTP API sees, with the time each token was seen.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use moonlivekv::gateway::sse::{self, Event};
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
    let mut events = sse::Reader::default();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else {
            continue;
        };
        let at = Instant::now();
        events.push(&data);
        while let Some(event) = events.next_event()? {
            match event {
                Event::Token(token) => take_token(token, at, &mut transcript, &mut each)?,
                Event::Finish(finish) => transcript.finish = finish,
                Event::Error(error) => transcript.error = Some(error),
                Event::Done => return Ok(transcript),
                Event::Other => {}
            }
        }
    }
    Ok(transcript)
}

fn take_token(
    token: sse::Token,
    at: Instant,
    transcript: &mut Transcript,
    each: &mut impl FnMut(&Seen),
) -> anyhow::Result<()> {
    if let Some(finish) = token.finish {
        transcript.finish = finish;
    }
    let seen = Seen {
        seq: token.seq,
        token: token.token,
        text: token.text,
        at,
    };
    let (seq, last) = (seen.seq, transcript.tokens.last().map_or(0, |t| t.seq));
    if seq <= last {
        let old = (seq.checked_sub(1))
            .and_then(|i| transcript.tokens.get(usize::try_from(i).ok()?))
            .with_context(|| format!("token {seq} is not numbered from 1"))?;
        if old.token != seen.token || old.text != seen.text {
            bail!("token {seq} came twice with different content");
        }
        transcript.duplicates += 1;
        return Ok(());
    }
    if seq != last + 1 {
        bail!("token {seq} came after token {last}: the stream has a gap");
    }
    each(&seen);
    transcript.tokens.push(seen);
    Ok(())
}
