//! The HTTP API over a real socket, with a backend that makes tokens when told to.

#[path = "daemons/http.rs"]
mod http;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{events, send, whole};
use hyper::Method;
use moonlivekv::gateway::http::{Backend, router};
use moonlivekv::gateway::hub::{Accepted, End, Hub, Live};
use moonlivekv::gateway::listen::{self, HEAD};
use moonlivekv::gateway::openai::{ApiError, Ask, MAX_BODY};
use moonlivekv::id::RequestId;
use parking_lot::Mutex;
use serde_json::{Value, json};

#[derive(Default)]
struct Fake {
    hub: Hub,
    aborted: Mutex<Vec<RequestId>>,
    refuse: Mutex<Option<ApiError>>,
    counted: Mutex<Vec<(&'static str, u16)>>,
    models: Mutex<Vec<String>>,
    ill: Mutex<Option<String>>,
}

impl Backend for Fake {
    fn models(&self) -> Vec<String> {
        self.models.lock().clone()
    }
    fn health(&self) -> Result<(), String> {
        self.ill.lock().clone().map_or(Ok(()), Err)
    }
    async fn start(self: &Arc<Self>, request: RequestId, _: Ask) -> Result<Arc<Live>, ApiError> {
        if let Some(error) = self.refuse.lock().take() {
            return Err(error);
        }
        Ok(self.hub.add(request).unwrap_or_else(|old| old))
    }
    fn abort(self: &Arc<Self>, request: RequestId) {
        self.aborted.lock().push(request);
    }
    fn hub(&self) -> &Hub {
        &self.hub
    }
    fn metrics(&self) -> String {
        "# EOF\n".into()
    }
    fn count(&self, route: &'static str, status: u16) {
        self.counted.lock().push((route, status));
    }
}

const ID: RequestId = RequestId([0xab; 16]);

async fn serve() -> (Arc<Fake>, SocketAddr) {
    serve_within(HEAD).await
}

async fn serve_within(head: Duration) -> (Arc<Fake>, SocketAddr) {
    let fake = Arc::new(Fake::default());
    fake.models.lock().push("m".into());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let router = router(Arc::clone(&fake));
    tokio::spawn(listen::serve(
        listener,
        router,
        head,
        std::future::pending(),
    ));
    (fake, at)
}

fn ask(extra: Value) -> Vec<u8> {
    let mut body = json!({ "prompt": "hi", "request_id": ID.to_string(), "max_tokens": 4 });
    for (k, v) in extra.as_object().unwrap() {
        body[k] = v.clone();
    }
    body.to_string().into_bytes()
}

async fn live(fake: &Fake) -> Arc<Live> {
    for _ in 0..1000 {
        if let Some(live) = fake.hub.get(ID) {
            return live;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("the request did not reach the backend");
}

fn put(live: &Live, seq: u64, text: &str) {
    assert!(live.append(
        seq,
        Accepted {
            token: seq as u32 + 100,
            text: text.into()
        }
    ));
}

fn data(event: &str) -> Value {
    let line = event
        .lines()
        .find_map(|l| l.strip_prefix("data: "))
        .unwrap();
    serde_json::from_str(line).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_streamed_event_carries_its_number_twice_and_the_stream_says_why_it_ends() {
    let (fake, at) = serve().await;
    let body = ask(json!({ "stream": true, "stream_options": { "include_usage": true } }));
    let mut response = send(at, Method::POST, "/v1/completions", &[], body).await;
    assert_eq!(response.headers()["x-request-id"], ID.to_string());
    let live = live(&fake).await;
    live.set_prompt_tokens(3);
    for (seq, text) in [(1, "a"), (2, ""), (3, "b")] {
        put(&live, seq, text);
    }
    live.end(End::Stop);
    let all = events(response.body_mut(), 6).await;
    for (n, event) in all[..3].iter().enumerate() {
        assert!(
            event.lines().any(|l| l == format!("id: {}", n + 1)),
            "{event}"
        );
        assert_eq!(data(event)["seq"], n + 1);
        assert_eq!(data(event)["token"], n + 101);
    }
    assert_eq!(data(&all[3])["choices"][0]["finish_reason"], "stop");
    assert_eq!(data(&all[4])["usage"]["total_tokens"], 6);
    assert_eq!(all[5], "data: [DONE]");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(live.delivered(), 3);
    assert!(
        fake.aborted.lock().is_empty(),
        "a finished stream was aborted"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_aborts_its_request() {
    let (fake, at) = serve().await;
    let mut response = send(
        at,
        Method::POST,
        "/v1/completions",
        &[],
        ask(json!({ "stream": true })),
    )
    .await;
    put(&*live(&fake).await, 1, "a");
    assert_eq!(events(response.body_mut(), 1).await.len(), 1);
    drop(response);
    for _ in 0..1000 {
        if !fake.aborted.lock().is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(*fake.aborted.lock(), [ID]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_can_be_read_on_from_a_token() {
    let (fake, at) = serve().await;
    let live = fake.hub.add(ID).unwrap();
    for seq in 1..=5 {
        put(&live, seq, &format!("{seq}"));
    }
    live.end(End::Length);
    let path = format!("/v1/requests/{ID}/stream");
    let mut response = send(at, Method::GET, &path, &[("last-event-id", "3")], vec![]).await;
    let all = events(response.body_mut(), 4).await;
    assert_eq!(data(&all[0])["seq"], 4);
    assert_eq!(data(&all[1])["seq"], 5);
    let unknown = format!("/v1/requests/{}/stream", RequestId([1; 16]));
    let (status, _) = whole(send(at, Method::GET, &unknown, &[], vec![]).await).await;
    assert_eq!(status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_answer_has_the_text_and_counts_it() {
    let (fake, at) = serve().await;
    let waiting = tokio::spawn(async move {
        let body = ask(
            json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "hi" }] }] }),
        );
        whole(send(at, Method::POST, "/v1/chat/completions", &[], body).await).await
    });
    let live = live(&fake).await;
    put(&live, 1, "Hel");
    put(&live, 2, "lo");
    live.end(End::Length);
    let (status, body) = waiting.await.unwrap();
    let v: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status, 200);
    assert_eq!(v["choices"][0]["message"]["content"], "Hello");
    assert_eq!(v["choices"][0]["finish_reason"], "length");
    assert_eq!(v["usage"]["completion_tokens"], 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_have_openais_form_and_a_status_that_fits() {
    let (fake, at) = serve().await;
    let post = async |path: &str, body: Vec<u8>| {
        let (status, body) = whole(send(at, Method::POST, path, &[], body).await).await;
        let v: Value = serde_json::from_str(&body).unwrap_or(Value::Null);
        (status, v["error"]["code"].as_str().unwrap_or("").to_owned())
    };
    let completions = "/v1/completions";
    assert_eq!(
        post(completions, b"{".to_vec()).await,
        (400, "invalid_json".into())
    );
    assert_eq!(
        post(completions, b"{}".to_vec()).await,
        (400, "invalid_value".into())
    );
    assert_eq!(
        post(completions, ask(json!({ "model": "x" }))).await,
        (404, "not_found".into())
    );
    assert_eq!(post("/v1/nothing", vec![]).await, (404, "not_found".into()));
    // Long enough that it does not fit the sockets' buffers: a server that stops reading resets.
    for len in [MAX_BODY + 1, 4 * MAX_BODY] {
        assert_eq!(
            post(completions, vec![b' '; len]).await,
            (413, "body_too_long".into())
        );
    }
    for (method, path) in [
        (Method::GET, completions),
        (Method::DELETE, "/v1/models"),
        (Method::POST, "/health"),
    ] {
        let (status, body) = whole(send(at, method, path, &[], vec![]).await).await;
        let v: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (status, &v["error"]["code"]),
            (405, &json!("method_not_allowed"))
        );
    }
    let long = format!("/v1/{}", "x".repeat(9000));
    assert_eq!(post(&long, vec![]).await, (414, "uri_too_long".into()));
    for (field, value) in [
        ("suffix", json!("!")),
        ("guided_json", json!({ "type": "object" })),
        ("tools", json!([{}])),
    ] {
        let body = ask(json!({ field: value }));
        let (status, body) = whole(send(at, Method::POST, completions, &[], body).await).await;
        let v: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &v["error"]["param"]), (400, &json!(field)));
    }
    *fake.refuse.lock() = Some(ApiError::unavailable("no_worker", "none"));
    assert_eq!(
        post(completions, ask(json!({}))).await,
        (503, "no_worker".into())
    );
    fake.models.lock().clear();
    assert_eq!(
        post(completions, ask(json!({}))).await,
        (503, "no_worker".into())
    );
    assert!(
        fake.aborted.lock().is_empty(),
        "a request that never began was aborted"
    );
    assert!(fake.counted.lock().contains(&(completions, 400)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_cannot_go_on_says_so() {
    let (fake, at) = serve().await;
    let mut response = send(
        at,
        Method::POST,
        "/v1/completions",
        &[],
        ask(json!({ "stream": true })),
    )
    .await;
    let live = live(&fake).await;
    put(&live, 1, "a");
    live.end(End::Failed);
    let all = events(response.body_mut(), 2).await;
    assert!(all[1].starts_with("event: error"), "{all:?}");
    assert_eq!(data(&all[1])["error"]["code"], "worker_lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_drips_its_request_is_cut_off_and_an_answer_takes_as_long_as_it_takes() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let limit = Duration::from_millis(300);
    let (fake, at) = serve_within(limit).await;
    let mut slow = tokio::net::TcpStream::connect(at).await.unwrap();
    let dripping = async {
        for byte in b"GET /v1/models HTTP/1.1\r\nx-a: "
            .iter()
            .chain([b'a'; 2000].iter())
        {
            if slow.write_all(&[*byte]).await.is_err() {
                break;
            }
            // Whatever it answers, it hangs up.
            let mut said = [0; 256];
            let read = tokio::time::timeout(Duration::from_millis(20), slow.read(&mut said));
            if matches!(read.await, Ok(Ok(0) | Err(_))) {
                break;
            }
        }
    };
    let ended = tokio::time::timeout(Duration::from_secs(20), dripping).await;
    assert!(ended.is_ok(), "a request that drips holds its connection");
    // A stream that says nothing for longer than that is no such thing.
    let body = ask(json!({ "stream": true }));
    let mut response = send(at, Method::POST, "/v1/completions", &[], body).await;
    let live = live(&fake).await;
    put(&live, 1, "a");
    tokio::time::sleep(3 * limit).await;
    put(&live, 2, "b");
    live.end(End::Stop);
    assert_eq!(events(response.body_mut(), 4).await.len(), 4);
}

#[tokio::test]
async fn health_tells_why_nothing_is_accepted() {
    let (fake, at) = serve().await;
    let health = || async move { whole(send(at, Method::GET, "/health", &[], vec![]).await).await };
    assert_eq!(health().await, (200, "ok\n".to_owned()));
    *fake.ill.lock() = Some("the journal failed".into());
    assert_eq!(health().await, (503, "the journal failed\n".to_owned()));
}
