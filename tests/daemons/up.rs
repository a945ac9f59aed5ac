//! A deployment started with `moonlive up`, and the command line that talks to it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long anything may take on a busy machine.
pub const LONG: Duration = Duration::from_secs(180);

/// The program.
pub fn moonlive(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moonlive"));
    command.args(args);
    command
}

/// A child that ends with its test.
pub struct Kept(pub Child);

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Kept {
    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        signal(self.0.id(), name);
    }

    /// Waits for its end; its exit code.
    pub fn ended(&mut self) -> Option<i32> {
        let end = Instant::now() + LONG;
        while Instant::now() < end {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("process {} did not end in {LONG:?}", self.0.id());
    }
}

/// Sends a signal by its name.
pub fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill")
        .args([&format!("-{name}"), &pid.to_string()])
        .status();
    assert!(sent.unwrap().success(), "cannot send {name} to {pid}");
}

/// Waits until `done` gives something.
pub fn until<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        if let Some(found) = done() {
            return found;
        }
        assert!(Instant::now() < end, "not within {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Starts a daemon and reads its first line, a JSON object.
pub fn started(mut command: Command) -> (Kept, Value) {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut kept = Kept(child);
    let mut out = BufReader::new(kept.0.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    // What follows is read by nobody; a closed pipe would end a daemon that still writes.
    std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
    let ready = serde_json::from_str(&line)
        .unwrap_or_else(|e| panic!("the first line is {line:?}, no JSON: {e}"));
    (kept, ready)
}

/// A deployment.
pub struct Up {
    /// Its process.
    pub _up: Kept,
    /// Its directory.
    pub dir: PathBuf,
    /// Its HTTP address.
    pub http: std::net::SocketAddr,
    _temp: tempfile::TempDir,
}

impl Up {
    /// Starts two workers that decode a token in four milliseconds.
    pub fn start(extra: &[&str]) -> Self {
        let temp = tempfile::Builder::new().prefix("ml").tempdir().unwrap();
        let dir = temp.path().join("d");
        let mut command = moonlive(&["--json", "up", "--size", "tiny", "--pace", "4ms", "--dir"]);
        command.arg(&dir).args(extra);
        let (up, ready) = started(command);
        let http = ready["http"].as_str().unwrap();
        let d = Self {
            http: http.trim_start_matches("http://").parse().unwrap(),
            _up: up,
            dir,
            _temp: temp,
        };
        // The daemons run; the gateway may still be asking the workers what they serve.
        let wanted = d.deployment()["workers"].as_array().unwrap().len();
        until("workers that take requests", || {
            let all = d.status()["workers"].clone();
            let ready = all.as_array()?.iter().filter(|w| w["ready"] == true);
            (ready.count() == wanted).then_some(())
        });
        d
    }

    /// Runs a command against it.
    pub fn run(&self, args: &[&str]) -> Output {
        moonlive(args).arg("--dir").arg(&self.dir).output().unwrap()
    }

    /// Runs one that must succeed; its lines as JSON.
    pub fn ok(&self, args: &[&str]) -> Vec<Value> {
        let out = self.run(args);
        let (text, errors) = (lossy(&out.stdout), lossy(&out.stderr));
        assert_eq!(out.status.code(), Some(0), "{args:?}: {text}{errors}");
        text.lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect()
    }

    /// `moonlive status`.
    pub fn status(&self) -> Value {
        self.ok(&["--json", "status"]).remove(0)
    }

    /// The request under way, as the status tells it.
    pub fn request(&self) -> Value {
        until("a request with tokens", || {
            let all = self.status()["requests"].clone();
            let live = all
                .as_array()?
                .iter()
                .find(|r| r["finished"] == false)?
                .clone();
            (live["journaled"].as_u64()? > 4).then_some(live)
        })
    }

    /// The request under way: its name, the worker it is on, and the other one of two.
    pub fn placed(&self) -> (String, &'static str, &'static str) {
        let request = self.request();
        let id = request["request"].as_str().unwrap().to_owned();
        match request["owner"].as_str().unwrap() {
            "w0" => (id, "w0", "w1"),
            _ => (id, "w1", "w0"),
        }
    }

    /// What `deployment.json` says.
    pub fn deployment(&self) -> Value {
        let text = std::fs::read_to_string(self.dir.join("deployment.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// The process id of a worker.
    pub fn pid_of(&self, worker: &str) -> u32 {
        let all = self.deployment()["workers"].clone();
        let found = all.as_array().unwrap().iter().find(|w| w["id"] == worker);
        found.unwrap()["pid"].as_u64().unwrap() as u32
    }
}

/// Bytes as text.
pub fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Reads a page over HTTP.
pub fn page(at: &str) -> String {
    use std::io::{Read, Write};
    let rest = at.strip_prefix("http://").unwrap();
    let (host, path) = rest.split_once('/').unwrap();
    let mut stream = std::net::TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    write!(
        stream,
        "GET /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    text
}

/// The value of a line of a metrics page.
pub fn metric(page: &str, name: &str) -> f64 {
    let line = page
        .lines()
        .find(|l| l.starts_with(name) && l[name.len()..].starts_with(' '));
    let line = line.unwrap_or_else(|| panic!("no {name} in\n{page}"));
    line[name.len()..].trim().parse().unwrap()
}

/// One token of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// Its number.
    pub seq: u64,
    /// The token.
    pub token: u64,
}

/// A stream that a thread reads: what came, and why it ended.
pub struct Stream {
    /// The reading thread.
    pub thread: std::thread::JoinHandle<(Vec<Token>, String)>,
}

/// Streams a completion of `tokens` tokens.
pub fn stream(http: std::net::SocketAddr, seed: u64, tokens: u64) -> Stream {
    let body = serde_json::json!({
        "prompt": "Once upon a time", "stream": true, "max_tokens": tokens, "ignore_eos": true,
        "seed": seed, "temperature": 0.8,
    });
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {http}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    read(http, head)
}

/// Reads a stream on from a token.
pub fn read_on(http: std::net::SocketAddr, request: &str, after: u64) -> Stream {
    read(
        http,
        format!(
            "GET /v1/requests/{request}/stream HTTP/1.1\r\nhost: {http}\r\nlast-event-id: {after}\r\nconnection: close\r\n\r\n"
        ),
    )
}

fn read(http: std::net::SocketAddr, head: String) -> Stream {
    use std::io::Write;
    let mut socket = std::net::TcpStream::connect(http).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket.write_all(head.as_bytes()).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut tokens, mut finish) = (Vec::new(), String::new());
        // A cut connection ends the lines: what came until then is what was read.
        for line in BufReader::new(socket).lines().map_while(Result::ok) {
            let Some(data) = line.strip_prefix("data: ") else {
                continue;
            };
            let Ok(v) = serde_json::from_str::<Value>(data) else {
                continue;
            };
            if let Some(why) = v["choices"][0]["finish_reason"].as_str() {
                finish = why.to_owned();
            }
            if let (Some(seq), Some(token)) = (v["seq"].as_u64(), v["token"].as_u64()) {
                tokens.push(Token { seq, token });
            }
        }
        (tokens, finish)
    });
    Stream { thread }
}

impl Stream {
    /// Waits for its end: every token in order, once.
    pub fn whole(self, expect: u64) -> Vec<Token> {
        let (tokens, finish) = self.thread.join().unwrap();
        let numbers: Vec<u64> = tokens.iter().map(|t| t.seq).collect();
        assert_eq!(
            numbers,
            (1..=expect).collect::<Vec<_>>(),
            "finish {finish:?}"
        );
        assert_eq!(finish, "length");
        tokens
    }
}

/// The lines of a log that hold all of these.
pub fn log_lines(file: &Path, all: &[&str]) -> Vec<String> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let fits = |l: &&str| all.iter().all(|part| l.contains(part));
    text.lines().filter(fits).map(str::to_owned).collect()
}
