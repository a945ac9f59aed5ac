//! A gateway killed in the middle of streams: started again on the same directory, it takes them up
//! from its journal, and a client that reads on by number sees every token once.

#[path = "daemons/http.rs"]
#[allow(dead_code, reason = "shared with a test that uses all of it")]
mod http;

use http::send;
use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::Incoming;
use moonlivekv::gateway::sse::{Event, Reader};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ID: &str = "00112233445566778899aabbccddeeff";
const OUTPUT: u64 = 600;
const DEADLINE: Duration = Duration::from_secs(120);

/// One daemon, killed when it is dropped.
struct Daemon {
    child: Child,
    ready: Value,
}

impl Daemon {
    fn start(args: &[&str], dir: &Path) -> Self {
        let log = dir.join(format!("{}.log", args.join("_").replace('/', "-")));
        let log = log.as_os_str().as_encoded_bytes();
        let name = String::from_utf8_lossy(log)
            .chars()
            .take(200)
            .collect::<String>();
        let mut child = Command::new(env!("CARGO_BIN_EXE_moonlive"))
            .args(args)
            .args(["--die-with", &std::process::id().to_string(), "--dir"])
            .arg(dir)
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(name).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        let ready = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{args:?}: {line} {e}"));
        Self { child, ready }
    }

    fn field(&self, name: &str) -> &str {
        self.ready[name].as_str().unwrap()
    }

    /// SIGKILL.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Deployment {
    dir: tempfile::TempDir,
    gateway: Daemon,
    workers: Vec<Daemon>,
}

impl Deployment {
    fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("ml-g-").tempdir().unwrap();
        let gateway = Daemon::start(&["gateway"], dir.path());
        let mut all = Self {
            dir,
            gateway,
            workers: Vec::new(),
        };
        all.add_worker("w0");
        all
    }

    fn add_worker(&mut self, id: &str) {
        let (mesh, store) = (self.gateway.field("mesh"), self.gateway.field("store"));
        let args = [
            "worker",
            "--id",
            id,
            "--gateway",
            mesh,
            "--store",
            store,
            "--size",
            "tiny",
            "--threads",
            "1",
            "--pace",
            "3ms",
        ];
        let worker = Daemon::start(&args, self.dir.path());
        self.workers.push(worker);
    }

    fn at(&self) -> SocketAddr {
        self.gateway.field("http").parse().unwrap()
    }

    /// On the same directory, and the address that clients know.
    fn restart_gateway(&mut self) {
        let http = self.at().to_string();
        self.gateway = Daemon::start(&["gateway", "--http", &http], self.dir.path());
    }
}

fn body() -> Vec<u8> {
    let prompt: Vec<u32> = (0..40).map(|i| 4 + i * 37 % 250).collect();
    json!({
        "prompt": prompt, "stream": true, "max_tokens": OUTPUT, "seed": 11, "ignore_eos": true,
        "temperature": 0.9, "top_k": 40, "repetition_penalty": 1.1, "request_id": ID,
    })
    .to_string()
    .into_bytes()
}

/// What a client has: tokens with their text, and why the stream ended.
#[derive(Debug, Default, Clone, PartialEq)]
struct Seen {
    tokens: Vec<(u64, u32, String)>,
    finish: Option<String>,
}

impl Seen {
    fn last(&self) -> u64 {
        self.tokens.last().map_or(0, |t| t.0)
    }

    /// Reads until `upto` tokens are there, the stream ends, or it breaks; true at `[DONE]`.
    async fn read(&mut self, events: &mut Reader, body: &mut Incoming, upto: u64) -> bool {
        loop {
            while let Some(event) = events.next_event().expect("a sound stream") {
                match event {
                    Event::Token(t) => {
                        assert_eq!(t.seq, self.last() + 1, "lost or repeated");
                        self.tokens.push((t.seq, t.token, t.text));
                    }
                    Event::Finish(why) => self.finish = Some(why),
                    Event::Error(why) => panic!("the gateway gave up: {why}"),
                    Event::Done => return true,
                    Event::Other => {}
                }
            }
            if self.last() >= upto {
                return false;
            }
            match body.frame().await {
                Some(Ok(frame)) => events.push(frame.data_ref().map_or(&[][..], |d| d)),
                Some(Err(_)) | None => return false,
            }
        }
    }
}

async fn ask(at: SocketAddr) -> Incoming {
    let end = Instant::now() + DEADLINE;
    loop {
        let response = send(at, Method::POST, "/v1/completions", &[], body()).await;
        if response.status() == 200 {
            return response.into_body();
        }
        assert!(Instant::now() < end, "{}", response.status());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Reads on after token `last` until the end.
async fn read_on(at: SocketAddr, seen: &mut Seen) {
    let path = format!("/v1/requests/{ID}/stream");
    let last = seen.last().to_string();
    let headers = [("last-event-id", last.as_str())];
    let response = send(at, Method::GET, &path, &headers, vec![]).await;
    assert_eq!(
        response.status(),
        200,
        "the restarted gateway does not know the request"
    );
    let mut body = response.into_body();
    let done = seen.read(&mut Reader::default(), &mut body, u64::MAX).await;
    assert!(done, "the stream broke off at {}", seen.last());
}

/// A stream that nothing happened to.
async fn undisturbed() -> Seen {
    let deployment = Deployment::start();
    let mut seen = Seen::default();
    let mut body = ask(deployment.at()).await;
    assert!(seen.read(&mut Reader::default(), &mut body, u64::MAX).await);
    assert_eq!(seen.last(), OUTPUT);
    seen
}

/// Streams `upto` tokens, kills the gateway, and takes what was still on its way to the client.
async fn cut(deployment: &mut Deployment, upto: u64) -> Seen {
    let mut seen = Seen::default();
    let mut events = Reader::default();
    let mut body = ask(deployment.at()).await;
    assert!(!seen.read(&mut events, &mut body, upto).await, "too quick");
    deployment.gateway.kill();
    assert!(
        !seen.read(&mut events, &mut body, u64::MAX).await,
        "too quick"
    );
    seen
}

async fn in_time<T>(what: impl Future<Output = T>) -> T {
    let limit = tokio::time::timeout(2 * DEADLINE, what);
    limit.await.expect("it ends in time")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_killed_twice_goes_on_with_every_token_once() {
    in_time(async {
        let want = undisturbed().await;
        let mut deployment = Deployment::start();
        let mut seen = cut(&mut deployment, 20).await;
        deployment.restart_gateway();
        let path = format!("/v1/requests/{ID}/stream");
        let (last, mut events) = (seen.last().to_string(), Reader::default());
        let headers = [("last-event-id", last.as_str())];
        let response = send(deployment.at(), Method::GET, &path, &headers, vec![]).await;
        let mut body = response.into_body();
        let upto = seen.last() + 5;
        seen.read(&mut events, &mut body, upto).await;
        deployment.gateway.kill();
        seen.read(&mut events, &mut body, u64::MAX).await;
        deployment.restart_gateway();
        read_on(deployment.at(), &mut seen).await;
        assert_eq!(seen, want);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_dies_while_the_gateway_is_down_loses_nothing() {
    in_time(async {
        let want = undisturbed().await;
        let mut deployment = Deployment::start();
        let mut seen = cut(&mut deployment, 60).await;
        deployment.workers[0].kill();
        deployment.restart_gateway();
        deployment.add_worker("w1");
        read_on(deployment.at(), &mut seen).await;
        assert_eq!(seen, want);
    })
    .await;
}
