//! The HTTP API: `/v1/completions`, `/v1/chat/completions`, streaming or not, and `/metrics`.
//!
//! A stream can be resumed: `GET /v1/requests/{id}/stream` with `Last-Event-ID` goes on after that
//! token, for tokens are numbered and kept while the request lives. A client that goes away without
//! a `Last-Event-ID` of its own aborts its request.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use super::answer::{Usage, Writer};
use super::hub::{self, End, Hub, Live};
use super::openai::{ApiError, Ask, MAX_BODY, Surface};
use crate::id::RequestId;

/// Longest path and query, in bytes.
pub const MAX_URI: usize = 8 << 10;
/// How long a body may take to arrive.
pub const BODY: Duration = Duration::from_secs(30);
/// Bytes of a body that is too long after which no more of it is read.
const MAX_DISCARDED: usize = 64 << 20;

/// What the HTTP layer needs of the rest of the gateway.
pub trait Backend: Send + Sync + 'static {
    /// Names of the models served now.
    fn models(&self) -> Vec<String>;
    /// Whether requests are served; if not, why, and what to do.
    fn health(&self) -> Result<(), String> {
        Ok(())
    }
    /// Places a request on a worker. On success its tokens appear in the hub.
    fn start(
        self: &Arc<Self>,
        request: RequestId,
        ask: Ask,
    ) -> impl Future<Output = Result<Arc<Live>, ApiError>> + Send;
    /// Ends a request on behalf of its client; does not wait.
    fn abort(self: &Arc<Self>, request: RequestId);
    /// The requests.
    fn hub(&self) -> &Hub;
    /// The Prometheus page.
    fn metrics(&self) -> String;
    /// A line for each HTTP answer.
    fn count(&self, route: &'static str, status: u16);
}

/// The routes over a backend.
pub fn router<B: Backend>(backend: Arc<B>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::<B>))
        .route("/v1/chat/completions", post(chat::<B>))
        .route("/v1/models", get(models::<B>))
        .route("/v1/requests/{id}/stream", get(resume::<B>))
        .route("/health", get(health::<B>))
        .route("/metrics", get(metrics::<B>))
        .fallback(async || ApiError::not_found("no such endpoint").into_response())
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            ApiError::of_http(405, format!("{} takes no {method}", uri.path())).into_response()
        })
        .layer(middleware::from_fn(short_uri))
        .with_state(backend)
}

/// Refuses an address that is longer than any of ours.
async fn short_uri(request: Request, next: Next) -> Response {
    let uri = request.uri();
    let len = uri.path_and_query().map_or(0, |p| p.as_str().len());
    if len > MAX_URI {
        let text = format!("the address has {len} bytes: at most {MAX_URI}");
        return ApiError::of_http(414, text).into_response();
    }
    next.run(request).await
}

/// Reads a body within [`BODY`], at most [`MAX_BODY`] bytes. One that is longer is read to its end,
/// within bounds, so that the client hears why instead of a reset.
async fn read_body(headers: &HeaderMap, body: Body) -> Result<Bytes, ApiError> {
    let told = headers.get(header::CONTENT_LENGTH);
    let told: Option<usize> = told.and_then(|v| v.to_str().ok()?.parse().ok());
    let too_long = || ApiError::of_http(413, format!("a body has at most {MAX_BODY} bytes"));
    // This client waits to be asked for its body.
    if headers.contains_key(header::EXPECT) && told.is_some_and(|n| n > MAX_BODY) {
        return Err(too_long());
    }
    let reading = async {
        let mut stream = body.into_data_stream();
        let (mut kept, mut len) = (Vec::with_capacity(told.unwrap_or(0).min(64 << 10)), 0);
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(|_| {
                ApiError::of_http(400, "the body ended early or is not chunked right")
            })?;
            len += piece.len();
            if len > MAX_DISCARDED {
                break;
            } else if len > MAX_BODY {
                kept = Vec::new();
            } else {
                kept.extend_from_slice(&piece);
            }
        }
        match len > MAX_BODY {
            true => Err(too_long()),
            false => Ok(Bytes::from(kept)),
        }
    };
    match tokio::time::timeout(BODY, reading).await {
        Ok(read) => read,
        Err(_) => Err(ApiError::of_http(
            408,
            format!("the body was not here in {} s", BODY.as_secs()),
        )),
    }
}

async fn health<B: Backend>(State(backend): State<Arc<B>>) -> Response {
    match backend.health() {
        Ok(()) => "ok\n".into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status(), axum::Json(self.body())).into_response()
    }
}

async fn models<B: Backend>(State(backend): State<Arc<B>>) -> Response {
    let data: Vec<_> = backend
        .models()
        .into_iter()
        .map(|id| serde_json::json!({ "id": id, "object": "model", "owned_by": "moonlivekv" }))
        .collect();
    axum::Json(serde_json::json!({ "object": "list", "data": data })).into_response()
}

async fn metrics<B: Backend>(State(backend): State<Arc<B>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], backend.metrics()).into_response()
}

async fn completions<B: Backend>(
    State(backend): State<Arc<B>>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let body = read_body(&headers, body).await;
    answer(backend, Surface::Completion, "/v1/completions", body).await
}

async fn chat<B: Backend>(
    State(backend): State<Arc<B>>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let body = read_body(&headers, body).await;
    answer(backend, Surface::Chat, "/v1/chat/completions", body).await
}

async fn answer<B: Backend>(
    backend: Arc<B>,
    surface: Surface,
    route: &'static str,
    body: Result<Bytes, ApiError>,
) -> Response {
    let served = match body {
        Ok(body) => serve(&backend, surface, &body).await,
        Err(error) => Err(error),
    };
    let response = served.unwrap_or_else(IntoResponse::into_response);
    backend.count(route, response.status().as_u16());
    response
}

async fn serve<B: Backend>(
    backend: &Arc<B>,
    surface: Surface,
    body: &[u8],
) -> Result<Response, ApiError> {
    let ask = Ask::parse(surface, body)?;
    let served = backend.models();
    let model = match (&ask.model, served.first()) {
        (_, None) => return Err(ApiError::unavailable("no_worker", "no worker is connected")),
        (Some(asked), _) if served.contains(asked) => asked.clone(),
        (Some(asked), _) => {
            return Err(ApiError::not_found(format!(
                "model {asked:?} is not served; GET /v1/models lists what is"
            )));
        }
        (None, Some(first)) => first.clone(),
    };
    let request = match ask.request {
        Some(id) => id,
        None => fresh_id()?,
    };
    let created = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    let writer = Writer {
        surface,
        request,
        created,
        model,
    };
    let (stream, include_usage) = (ask.stream, ask.include_usage);
    let guard = AbortOnDrop {
        backend: Arc::clone(backend),
        request,
        armed: true,
    };
    let live = match backend.start(request, ask).await {
        Ok(live) => live,
        Err(e) => {
            guard.disarm();
            return Err(e);
        }
    };
    if stream {
        return Ok(stream_from(live, 1, writer, include_usage, Some(guard)));
    }
    whole(live, &writer, guard).await
}

fn fresh_id() -> Result<RequestId, ApiError> {
    let mut id = [0u8; 16];
    getrandom::fill(&mut id)
        .map_err(|e| ApiError::internal(format!("the system gives no randomness: {e}")))?;
    Ok(RequestId(id))
}

/// Aborts the request when the client's connection goes away before the end.
struct AbortOnDrop<B: Backend> {
    backend: Arc<B>,
    request: RequestId,
    armed: bool,
}

impl<B: Backend> AbortOnDrop<B> {
    fn disarm(mut self) {
        self.armed = false;
    }
}

impl<B: Backend> Drop for AbortOnDrop<B> {
    fn drop(&mut self) {
        if self.armed {
            self.backend.abort(self.request);
        }
    }
}

async fn whole<B: Backend>(
    live: Arc<Live>,
    writer: &Writer,
    guard: AbortOnDrop<B>,
) -> Result<Response, ApiError> {
    let mut reader = live.reader(1);
    let (mut text, mut count) = (String::new(), 0);
    let end = loop {
        match reader.next().await {
            hub::Next::Token(seq, token) => {
                text.push_str(&token.text);
                count = seq;
            }
            hub::Next::End(end) => break end,
        }
    };
    live.delivered_through(count);
    guard.disarm();
    if end == End::Failed {
        return Err(ApiError::unavailable(
            "worker_lost",
            "the request could not be finished",
        ));
    }
    Ok(axum::Json(writer.whole(&text, end.as_str(), usage(&live, count))).into_response())
}

fn usage(live: &Live, completion: u64) -> Usage {
    let completion_tokens = u32::try_from(completion).unwrap_or(u32::MAX);
    let prompt_tokens = live.prompt_tokens();
    Usage {
        prompt_tokens,
        completion_tokens,
        total_tokens: prompt_tokens + completion_tokens,
    }
}

fn stream_from<B: Backend>(
    live: Arc<Live>,
    from: u64,
    writer: Writer,
    include_usage: bool,
    guard: Option<AbortOnDrop<B>>,
) -> Response {
    // One slot: a permit for the next event means the connection has taken the one before, which is
    // what the cursor D counts.
    let (tx, rx) = mpsc::channel::<Result<Event, Infallible>>(1);
    let request = writer.request;
    tokio::spawn(async move {
        let done = pump(&live, from, &writer, include_usage, &tx).await;
        if let (true, Some(guard)) = (done, guard) {
            guard.disarm();
        }
    });
    let keep = KeepAlive::new().interval(Duration::from_secs(15));
    let mut response = Sse::new(ReceiverStream::new(rx))
        .keep_alive(keep)
        .into_response();
    if let Ok(value) = request.to_string().parse() {
        response.headers_mut().insert("x-request-id", value);
    }
    response
}

/// Writes events until the end (`true`) or until the client is gone (`false`).
async fn pump(
    live: &Arc<Live>,
    from: u64,
    writer: &Writer,
    include_usage: bool,
    tx: &mpsc::Sender<Result<Event, Infallible>>,
) -> bool {
    let mut reader = live.reader(from);
    let mut handed = from.saturating_sub(1);
    let mut ahead = tokio::select! {
        next = reader.next() => next,
        () = tx.closed() => return false,
    };
    loop {
        let Ok(permit) = tx.reserve().await else {
            return false;
        };
        live.delivered_through(handed);
        let (seq, token) = match ahead {
            hub::Next::Token(seq, token) => (seq, token),
            hub::Next::End(end) => {
                permit.send(Ok(last_event(writer, end)));
                return finish(live, writer, include_usage, handed, tx).await;
            }
        };
        permit.send(Ok(Event::default().id(seq.to_string()).data(writer.chunk(
            seq,
            token.token,
            &token.text,
        ))));
        handed = seq;
        ahead = tokio::select! {
            next = reader.next() => next,
            () = tx.closed() => return false,
        };
    }
}

fn last_event(writer: &Writer, end: End) -> Event {
    match end {
        End::Failed => {
            let e = ApiError::unavailable("worker_lost", "the request could not be finished");
            Event::default().event("error").data(e.body().to_string())
        }
        end => Event::default().data(writer.finish_chunk(end.as_str())),
    }
}

async fn finish(
    live: &Live,
    writer: &Writer,
    include_usage: bool,
    handed: u64,
    tx: &mpsc::Sender<Result<Event, Infallible>>,
) -> bool {
    if include_usage {
        let usage = writer.usage_chunk(usage(live, handed));
        if tx.send(Ok(Event::default().data(usage))).await.is_err() {
            return true;
        }
    }
    live.delivered_through(handed);
    let _ = tx.send(Ok(Event::default().data("[DONE]"))).await;
    true
}

async fn resume<B: Backend>(
    State(backend): State<Arc<B>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let request: RequestId = id
        .parse()
        .map_err(|e| ApiError::not_found(format!("{e}")))?;
    let live = backend
        .hub()
        .get(request)
        .ok_or_else(|| ApiError::not_found(format!("request {request} is not known here")))?;
    let last = match headers.get("last-event-id") {
        None => 0,
        Some(v) => v
            .to_str()
            .ok()
            .and_then(|v| v.parse::<u64>().ok())
            .ok_or_else(|| ApiError::invalid("Last-Event-ID", "a token's number, from 1"))?,
    };
    let writer = Writer {
        surface: Surface::Completion,
        request,
        created: 0,
        model: backend.models().into_iter().next().unwrap_or_default(),
    };
    Ok(stream_from::<B>(
        live,
        last.saturating_add(1),
        writer,
        false,
        None,
    ))
}
