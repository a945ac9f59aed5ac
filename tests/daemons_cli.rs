//! `moonlive up`, `migrate`, `drain`, `status`, `watch`, counters and signals, against real
//! processes.

#[path = "daemons/up.rs"]
mod up;

use std::process::Stdio;

use serde_json::Value;
use up::{
    Kept, LONG, Up, log_lines, lossy, metric, moonlive, page, read_on, signal, started, stream,
    until,
};

#[test]
fn an_operator_sees_moves_drains_and_counts() {
    let d = Up::start(&["--workers", "2", "--log", "info,phase=debug"]);
    let tokens = stream(d.http, 7, 3000);
    let (id, from, to) = d.placed();
    let mut watch = moonlive(&["--json", "watch", "--dir"]);
    let log = d.dir.join("watch.txt");
    let out = std::fs::File::create(&log).unwrap();
    let _watch = Kept(
        watch
            .arg(&d.dir)
            .stdout(out)
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    until("watch is connected", || {
        let text = std::fs::read_to_string(&log).ok()?;
        text.contains("watching").then_some(())
    });

    let lines = d.ok(&["--json", "migrate", &id, "--to", to]);
    let report = lines.last().unwrap();
    assert_eq!(
        (&report["migrated"], &report["cause"]),
        (&true.into(), &"none".into()),
        "{report}"
    );
    assert_eq!((&report["from"], &report["to"]), (&from.into(), &to.into()));
    for phase in [
        "PREPARE", "RESERVE", "STREAM", "FENCE", "VERIFY", "ARM", "COMMIT", "RESUME",
    ] {
        assert!(
            report["phases_us"][phase].is_u64(),
            "no {phase} in {report}"
        );
    }
    until("the request where it was moved to", || {
        (d.request()["owner"] == to).then_some(())
    });
    until("watch tells of the flip and of the end", || {
        let text = std::fs::read_to_string(&log).ok()?;
        let told = |part: &str| text.lines().any(|l| l.contains(part) && l.contains(&id));
        (told("\"flip\"") && told("\"migrated\":true")).then_some(())
    });

    let lines = d.ok(&["--json", "drain", to, "--deadline", "20s"]);
    let last = lines.last().unwrap();
    assert_eq!(
        (&last["done"], &last["drained"]),
        (&true.into(), &true.into()),
        "{last}"
    );
    let status = d.status();
    let emptied = status["workers"]
        .as_array()
        .unwrap()
        .iter()
        .find(|w| w["id"] == to);
    assert_eq!(emptied.unwrap()["draining"], true, "{status}");
    assert_eq!(d.request()["owner"], from);
    // A worker that is being emptied gets nothing new.
    let second = stream(d.http, 8, 1000);
    until("a second request, beside the first", || {
        let all = d.status()["requests"].clone();
        let all: Vec<Value> = all
            .as_array()?
            .iter()
            .filter(|r| r["finished"] == false)
            .cloned()
            .collect();
        (all.len() == 2 && all.iter().all(|r| r["owner"] == from)).then_some(())
    });

    // Counters: the two moves, as each party saw them.
    let pages = status["metrics"].clone();
    let of = |who: &str| page(pages[who].as_str().unwrap());
    let (w0, c0) = (of(from), of("coordinator"));
    let source =
        "moonlive_worker_migrations_total{role=\"source\",outcome=\"committed\",cause=\"none\"}";
    let destination = source.replace("source", "destination");
    assert_eq!(metric(&w0, source), 1.0);
    assert_eq!(metric(&w0, &destination), 1.0);
    assert_eq!(
        metric(
            &w0,
            "moonlive_worker_fence_seconds_count{role=\"destination\"}"
        ),
        1.0
    );
    assert!(metric(&w0, "moonlive_worker_pool_blocks_used") > 0.0);
    assert!(metric(&w0, "moonlive_worker_pool_blocks_free") > 0.0);
    assert_eq!(metric(&w0, "moonlive_worker_pool_quarantined_bytes"), 0.0);
    assert_eq!(
        metric(&c0, "moonlive_coordinator_fence_pause_seconds_count"),
        2.0
    );
    let ended = "moonlive_coordinator_migrations_total{role=\"coordinator\",outcome=\"committed\",cause=\"none\"}";
    assert_eq!(metric(&c0, ended), 2.0);
    assert!(metric(&of("gateway"), "moonlive_gateway_tokens_accepted_total") > 0.0);

    // Each phase is a span with request, attempt and time, in the log of whoever did it.
    for (file, phase) in [
        (from, "FENCE"),
        (to, "VERIFY"),
        (to, "COMMIT"),
        ("coordinator", "PREPARE"),
    ] {
        let name = format!("phase=\"{phase}\"");
        let found = log_lines(
            &d.dir.join(format!("{file}.log")),
            &[&name, &id, "epoch=1", "close"],
        );
        assert!(!found.is_empty(), "no span of {phase} in the log of {file}");
    }
    second.whole(1000);
    tokens.whole(3000);
}

#[test]
fn a_command_that_cannot_be_done_names_cause_and_remedy() {
    let d = Up::start(&["--workers", "2"]);
    let _tokens = stream(d.http, 7, 3000);
    let (id, owner, _) = d.placed();
    let unknown = "00000000000000000000000000000001";
    let cases: &[(&[&str], i32, &[&str])] = &[
        (
            &["migrate", unknown, "--to", "w1"],
            2,
            &["no-such-request", "moonlive status"],
        ),
        (
            &["migrate", &id, "--to", "w9"],
            2,
            &["w9", "moonlive status"],
        ),
        (&["migrate", "xyz", "--to", "w1"], 2, &["request"]),
        (
            &["migrate", &id, "--to", "w1", "--deadline", "soon"],
            2,
            &["soon", "30s"],
        ),
        (
            &["migrate", &id, "--to", "w1", "--transport", "rdma"],
            2,
            &["rdma", "tcp"],
        ),
        (&["migrate", &id, "--to", owner], 2, &["already owns"]),
        (&["drain", "w9"], 2, &["w9"]),
    ];
    for (args, code, parts) in cases {
        let out = d.run(args);
        let text = lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(*code), "{args:?}: {text}");
        for part in *parts {
            assert!(
                text.contains(part),
                "{args:?} does not say {part:?}: {text}"
            );
        }
    }
    // The request is where it was.
    assert_eq!(d.request()["owner"], owner);
    let nowhere = moonlive(&["status", "--dir", "/nonexistent"])
        .output()
        .unwrap();
    assert_eq!(nowhere.status.code(), Some(2));
    assert!(
        lossy(&nowhere.stderr).contains("moonlive up"),
        "{}",
        lossy(&nowhere.stderr)
    );
    // As one object for a script.
    let out = d.run(&["--json", "migrate", unknown, "--to", "w1"]);
    let error: Value = serde_json::from_str(lossy(&out.stderr).lines().last().unwrap()).unwrap();
    assert_eq!(error["exit"], 2, "{error}");
}

#[test]
fn daemons_refuse_addresses_that_others_reach_unless_told_and_ones_that_nobody_can_dial() {
    let refused = |args: &[&str], part: &str| {
        let out = moonlive(args).output().unwrap();
        let text = lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {text}");
        assert!(text.contains(part), "{args:?}: {text}");
    };
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_str().unwrap();
    refused(
        &["gateway", "--dir", dir, "--listen", "192.0.2.1:0"],
        "--listen-beyond-loopback",
    );
    refused(
        &["gateway", "--dir", dir, "--listen", "0.0.0.0:0"],
        "name the one",
    );
    refused(
        &[
            "coordinator",
            "--dir",
            dir,
            "--store",
            "unix:///x",
            "--listen",
            "127.0.0.1:65535",
        ],
        "65532",
    );
    refused(&["gateway", "--dir", dir, "--log", "loud=very"], "--log");
}

#[test]
fn a_mistake_of_the_caller_is_told_as_such_with_its_remedy() {
    let temp = tempfile::Builder::new().prefix("ml").tempdir().unwrap();
    let at = |name: &str| temp.path().join(name).display().to_string();
    let (file, dir) = (at("file"), at("d"));
    std::fs::write(&file, "no model").unwrap();
    let long = at(&"x".repeat(120));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let worker = |more: &[&'static str]| -> Vec<String> {
        let given = [
            "worker",
            "--id",
            "w0",
            "--gateway",
            "unix:///x",
            "--dir",
            &dir,
        ];
        let given = given.iter().map(|s| (*s).to_owned());
        given.chain(more.iter().map(|s| (*s).to_owned())).collect()
    };
    let up = |more: &[&str]| -> Vec<String> {
        let given = ["up", "--size", "tiny", "--dir", &dir].map(str::to_owned);
        given
            .into_iter()
            .chain(more.iter().map(|s| (*s).to_owned()))
            .collect()
    };
    let plain = |all: &[&str]| -> Vec<String> { all.iter().map(|s| (*s).to_owned()).collect() };
    let cases: Vec<(Vec<String>, i32, &str)> = vec![
        (plain(&["up", "--dir", &file]), 2, "name a directory"),
        (
            plain(&["gateway", "--dir", &format!("{file}/x")]),
            2,
            "name a directory",
        ),
        (plain(&["gateway", "--dir", &long]), 2, "107"),
        (
            plain(&["gateway", "--dir", &dir, "--http", &taken]),
            2,
            "is free",
        ),
        (
            plain(&["gateway", "--dir", &dir, "--listen", &taken]),
            2,
            "choose another",
        ),
        (
            up(&["--model", "/nonexistent.gguf"]),
            2,
            "/nonexistent.gguf",
        ),
        (up(&["--model", &file]), 7, "model refused"),
        (up(&["--workers", "0"]), 2, "1..=64"),
        (up(&["--threads", "0"]), 2, "1..=256"),
        (up(&["--threads", "100000"]), 2, "1..=256"),
        (up(&["--block-tokens", "0"]), 2, "1..=256"),
        (up(&["--blocks", "4000000000"]), 2, "bound"),
        (up(&["--blocks", "200000000"]), 2, "fewer blocks"),
        (up(&["--pace", "2s"]), 2, "at most 1s"),
        (plain(&["up", "--size", "huge", "--dir", &dir]), 2, "medium"),
        (up(&["--log", "loud=very"]), 2, "--log"),
        (worker(&["--store", "nowhere"]), 2, "unix:///PATH"),
        (
            worker(&[
                "--store",
                "unix:///x",
                "--drain-deadline",
                "99999999999999m",
            ]),
            2,
            "86400",
        ),
        (
            plain(&[
                "coordinator",
                "--id",
                "a/b",
                "--dir",
                &dir,
                "--store",
                "unix:///x",
            ]),
            2,
            "--id",
        ),
    ];
    for (args, code, part) in cases {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let out = moonlive(&args).output().unwrap();
        let text = lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {text}");
        assert!(
            text.contains(part),
            "{args:?} does not say {part:?}: {text}"
        );
        // What an earlier start has logged is not told again.
        assert!(text.lines().count() <= 12, "{args:?}: {text}");
    }
}

#[test]
fn a_deployment_that_ended_in_order_leaves_nothing_that_only_misleads() {
    let mut d = Up::start(&["--workers", "2"]);
    stream(d.http, 7, 40).whole(40);
    let id = d.status()["requests"][0]["request"]
        .as_str()
        .unwrap()
        .to_owned();
    let out = d.run(&["migrate", &id, "--to", "w1"]);
    let text = lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{text}");
    assert!(text.contains("has ended"), "{text}");
    // What a request uses is not told as free, shared with the prefix cache or not.
    let tokens = stream(d.http, 8, 2000);
    d.request();
    until("blocks in use", || {
        let workers = d.status()["workers"].clone();
        let used = |w: &Value| {
            let n = |name: &str| w[name].as_u64().unwrap();
            n("blocks_total") - n("blocks_free") - n("blocks_cached")
        };
        let used: u64 = workers.as_array()?.iter().map(used).sum();
        (used >= 4).then_some(())
    });
    tokens.whole(2000);
    d._up.signal("TERM");
    assert_eq!(d._up.ended(), Some(0));
    let left: Vec<String> = std::fs::read_dir(&d.dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.ends_with(".sock") || n == "deployment.json")
        .collect();
    assert_eq!(left, Vec::<String>::new());
    assert_eq!(
        std::fs::read_dir(d.dir.join("requests")).unwrap().count(),
        0
    );
    let out = d.run(&["status"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(lossy(&out.stderr).contains("moonlive up"));
}

#[test]
fn a_deployment_whose_gateway_died_says_how_to_go_on() {
    let temp = tempfile::Builder::new().prefix("ml").tempdir().unwrap();
    let dir = temp.path().join("d");
    let mut command = moonlive(&["--json", "up", "--size", "tiny", "--workers", "1", "--dir"]);
    let errors = temp.path().join("errors");
    let to = std::fs::File::create(&errors).unwrap();
    let (mut up, ready) = started({
        command.arg(&dir).stderr(to);
        command
    });
    // The address that was told is served: no 503 for want of workers.
    let http = ready["http"].as_str().unwrap();
    let http: std::net::SocketAddr = http.trim_start_matches("http://").parse().unwrap();
    stream(http, 1, 5).whole(5);
    let text = std::fs::read_to_string(dir.join("deployment.json")).unwrap();
    let deployment: Value = serde_json::from_str(&text).unwrap();
    signal(
        deployment["gateway"]["pid"].as_u64().unwrap() as u32,
        "KILL",
    );
    assert_eq!(up.ended(), Some(3));
    let said = std::fs::read_to_string(&errors).unwrap();
    assert!(
        said.contains("start it again: `moonlive up --dir"),
        "{said}"
    );
}

/// Links, fence, control RPC, store and bulk over TCP: nothing needs a common directory.
fn moves_over_tcp(listen: &str, scheme: &str) {
    let d = Up::start(&["--workers", "2", "--listen", listen]);
    let deployment = d.deployment();
    for (who, what) in [
        ("gateway", "mesh"),
        ("gateway", "store"),
        ("gateway", "rpc"),
        ("coordinator", "rpc"),
    ] {
        let at = deployment[who][what].as_str().unwrap();
        assert!(at.starts_with(scheme), "{who} listens for {what} at {at}");
    }
    let sockets: Vec<_> = std::fs::read_dir(&d.dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| {
            n.ends_with(".mesh.sock") || n.ends_with(".rpc.sock") || n.ends_with(".store.sock")
        })
        .collect();
    assert_eq!(sockets, Vec::<String>::new());
    let tokens = stream(d.http, 3, 2000);
    let (id, from, to) = d.placed();
    for to in [to, from, to] {
        let lines = d.ok(&["--json", "migrate", &id, "--to", to, "--transport", "tcp"]);
        let report = lines.last().unwrap();
        assert_eq!(
            (&report["migrated"], &report["to"]),
            (&true.into(), &to.into()),
            "{report}"
        );
        assert!(report["fence_pause_us"].as_u64() > Some(0), "{report}");
    }
    tokens.whole(2000);
}

#[test]
fn workers_that_share_nothing_but_a_network_migrate_over_ipv4() {
    moves_over_tcp("127.0.0.1:0", "tcp://127.0.0.1:");
}

#[test]
fn workers_that_share_nothing_but_a_network_migrate_over_ipv6() {
    moves_over_tcp("[::1]:0", "tcp://[::1]:");
}

#[test]
fn a_worker_told_to_end_gives_its_requests_away_first() {
    let d = Up::start(&["--workers", "2"]);
    let tokens = stream(d.http, 9, 2000);
    let (_, from, to) = d.placed();
    let pid = d.pid_of(from);
    signal(pid, "TERM");
    until("the request on the other worker", || {
        (d.request()["owner"] == to).then_some(())
    });
    until("another life of the worker", || {
        (d.pid_of(from) != pid).then_some(())
    });
    let left = log_lines(
        &d.dir.join(format!("{from}.log")),
        &["told to end", "Empty"],
    );
    assert_eq!(left.len(), 1, "the worker did not say that it was empty");
    let status = d.status();
    let gateway = page(status["metrics"]["gateway"].as_str().unwrap());
    // It moved: nothing was computed again from the journal.
    assert_eq!(metric(&gateway, "moonlive_gateway_recoveries_total"), 0.0);
    assert_eq!(
        status["requests"][0]["last_outcome"], "committed",
        "{status}"
    );
    tokens.whole(2000);
}

/// Worker `w0` with a small model, of the gateway that said `ready`.
fn tiny_worker(dir: &str, ready: &Value, more: &[&str]) -> (Kept, Value) {
    let (mesh, store) = (&ready["mesh"], &ready["store"]);
    let mut command = moonlive(&["worker", "--id", "w0", "--dir", dir]);
    command.args(["--gateway", mesh.as_str().unwrap()]);
    command.args(["--store", store.as_str().unwrap()]);
    command.args(["--size", "tiny", "--pace", "2ms"]).args(more);
    started(command)
}

#[test]
fn a_worker_alone_lets_requests_end_until_its_deadline_and_leaves_the_rest_to_the_journal() {
    let dir = tempfile::Builder::new().prefix("ml").tempdir().unwrap();
    let at = dir.path().to_str().unwrap();
    let (mut gateway, g) = started(moonlive(&["gateway", "--dir", at]));
    let (_coordinator, _) = started(moonlive(&[
        "coordinator",
        "--dir",
        at,
        "--store",
        g["store"].as_str().unwrap(),
    ]));
    let worker = |deadline: &str| tiny_worker(at, &g, &["--drain-deadline", deadline]);
    let http: std::net::SocketAddr = g["http"].as_str().unwrap().parse().unwrap();
    let models = || page(&format!("http://{http}/v1/models"));
    let (mut w0, _) = worker("30s");
    until("the worker at the gateway", || {
        models().contains("\"id\"").then_some(())
    });
    // Short enough to end by itself.
    let tokens = stream(http, 4, 500);
    until("tokens", || accepted(http, 5));
    w0.signal("TERM");
    assert_eq!(w0.ended(), Some(0));
    tokens.whole(500);
    // Too long for the deadline: the next life of the worker goes on from the journal.
    let (mut w0, _) = worker("300ms");
    until("the worker at the gateway", || {
        models().contains("\"id\"").then_some(())
    });
    let before = metric(
        &page(&format!("http://{http}/metrics")),
        "moonlive_gateway_tokens_accepted_total",
    );
    let tokens = stream(http, 5, 1500);
    until("tokens", || accepted(http, before as u64 + 5));
    let told = std::time::Instant::now();
    w0.signal("TERM");
    assert_eq!(w0.ended(), Some(0));
    assert!(
        told.elapsed() < LONG / 4,
        "the deadline did not bound it: {:?}",
        told.elapsed()
    );
    let (_w0, _) = worker("1s");
    tokens.whole(1500);
    gateway.signal("TERM");
    assert_eq!(gateway.ended(), Some(0));
}

fn accepted(http: std::net::SocketAddr, n: u64) -> Option<()> {
    let page = page(&format!("http://{http}/metrics"));
    (metric(&page, "moonlive_gateway_tokens_accepted_total") >= n as f64).then_some(())
}

#[test]
fn a_gateway_and_a_coordinator_told_to_end_lose_no_journaled_token() {
    let dir = tempfile::Builder::new().prefix("ml").tempdir().unwrap();
    let at = dir.path().to_str().unwrap();
    let gateway = || started(moonlive(&["gateway", "--dir", at]));
    let (mut g, ready) = gateway();
    let store = ready["store"].as_str().unwrap();
    let (mut coordinator, _) = started(moonlive(&["coordinator", "--dir", at, "--store", store]));
    let (_worker, _) = tiny_worker(at, &ready, &[]);
    let http: std::net::SocketAddr = ready["http"].as_str().unwrap().parse().unwrap();
    until("the worker at the gateway", || {
        page(&format!("http://{http}/v1/models"))
            .contains("\"id\"")
            .then_some(())
    });
    let cut = stream(http, 6, 1500);
    until("tokens", || accepted(http, 100));
    let request = request_id(dir.path());
    coordinator.signal("TERM");
    assert_eq!(coordinator.ended(), Some(0));
    g.signal("TERM");
    assert_eq!(g.ended(), Some(0));
    let (seen, _) = cut.thread.join().unwrap();
    assert!(seen.len() >= 100, "{} tokens", seen.len());
    let (_g, ready) = gateway();
    let http: std::net::SocketAddr = ready["http"].as_str().unwrap().parse().unwrap();
    // From the beginning: every token that the client saw is there, and the stream goes on.
    let all = read_on(http, &request, 0).whole(1500);
    assert_eq!(all[..seen.len()], seen[..]);
}

/// The one request that has files in the gateway's directory.
fn request_id(dir: &std::path::Path) -> String {
    let files = std::fs::read_dir(dir.join("requests")).unwrap();
    let mut ids = files.filter_map(|f| {
        let name = f.unwrap().file_name().into_string().unwrap();
        name.strip_suffix(".submit").map(str::to_owned)
    });
    ids.next().unwrap()
}

#[test]
fn a_log_that_cannot_be_written_ends_no_request() {
    let dir = tempfile::Builder::new().prefix("ml").tempdir().unwrap();
    let at = dir.path().to_str().unwrap();
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
    let mut command = moonlive(&["gateway", "--dir", at, "--log", "trace"]);
    command.stderr(full.unwrap());
    let (_gateway, ready) = started(command);
    let (_worker, _) = tiny_worker(at, &ready, &[]);
    let http: std::net::SocketAddr = ready["http"].as_str().unwrap().parse().unwrap();
    until("the worker at the gateway", || {
        let models = page(&format!("http://{http}/v1/models"));
        models.contains("\"id\"").then_some(())
    });
    stream(http, 6, 50).whole(50);
}
