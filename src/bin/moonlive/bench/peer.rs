//! The other process of a transfer bench: owns memory, serves it over each path, ends with its parent.
//!
//! The parent writes one JSON object a line to its standard input and reads one back. End of input
//! ends the process, so it cannot outlive a bench that was killed.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use moonlivekv::transport::Path;
use serde::{Deserialize, Serialize};

use super::ceiling::{self, RawSink};
use super::paths::{Grants, Served};
use super::quiet::own_cpu_seconds;

/// What the parent asks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ask {
    /// Serve a fresh working set cut into blocks of this many bytes.
    Serve { path: String, block: u64 },
    /// A raw acknowledged sink.
    RawSink,
    /// Map-able memory for the plain shared-memory copy.
    Shared,
    /// CPU seconds used so far.
    Cpu,
}

/// What the child answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Served(Grants),
    RawSink { port: u16 },
    Shared { fd: i32 },
    Cpu { seconds: f64 },
}

fn path_named(name: &str) -> anyhow::Result<Path> {
    [Path::Local, Path::Shm, Path::Tcp]
        .into_iter()
        .find(|p| p.name() == name)
        .with_context(|| format!("no path is called {name:?}"))
}

/// The child's main: answers until its input ends.
pub fn serve() -> anyhow::Result<()> {
    let mut served: Option<Served> = None;
    // Kept alive until the end: the parent maps it through our descriptor.
    let mut shared = Vec::new();
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Ask::Serve { path, block } => {
                // The old one first: two working sets at once would not fit a small machine.
                drop(served.take());
                let new = Served::start(path_named(&path)?, block)?;
                let grants = new.grants();
                served = Some(new);
                Answer::Served(grants)
            }
            Ask::RawSink => {
                let (sink, port) = RawSink::bind()?;
                // Ends with its connection, or with the process.
                std::thread::Builder::new()
                    .name("raw-sink".into())
                    .spawn(move || sink.serve())?;
                Answer::RawSink { port }
            }
            Ask::Shared => {
                use std::os::fd::AsRawFd;
                let len = ceiling::WORKING_SET as u64;
                let mut region = moonlivekv::mem::Region::memfd("moonlive-bench", len)?;
                ceiling::fill(region.as_mut_slice(), 2);
                let fd = region.fd().map(|fd| fd.as_raw_fd()).context("a memfd")?;
                shared.push(region);
                Answer::Shared { fd }
            }
            Ask::Cpu => Answer::Cpu {
                seconds: own_cpu_seconds(),
            },
        };
        serde_json::to_writer(&mut out, &answer)?;
        out.write_all(b"\n")?;
        out.flush()?;
    }
    Ok(())
}

/// The parent's handle.
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts the process.
    pub fn start() -> anyhow::Result<Self> {
        let exe = std::env::current_exe().context("where is this program?")?;
        let mut child = Command::new(exe)
            .args(["bench", "peer"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the other process of the bench")?;
        Ok(Self {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().context("standard output was piped")?),
            child,
        })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// See [`Served`].
    pub fn serve(&mut self, path: Path, block: u64) -> anyhow::Result<Grants> {
        let path = path.name().to_owned();
        match self.ask(&Ask::Serve { path, block })? {
            Answer::Served(grants) => Ok(grants),
            other => anyhow::bail!("the peer answered {other:?}"),
        }
    }

    /// See [`RawSink`].
    pub fn raw_sink(&mut self) -> anyhow::Result<u16> {
        match self.ask(&Ask::RawSink)? {
            Answer::RawSink { port } => Ok(port),
            other => anyhow::bail!("the peer answered {other:?}"),
        }
    }

    /// The descriptor number of a working set in shared memory.
    pub fn shared(&mut self) -> anyhow::Result<i32> {
        match self.ask(&Ask::Shared)? {
            Answer::Shared { fd } => Ok(fd),
            other => anyhow::bail!("the peer answered {other:?}"),
        }
    }

    /// Its CPU seconds so far.
    pub fn cpu_seconds(&mut self) -> anyhow::Result<f64> {
        match self.ask(&Ask::Cpu)? {
            Answer::Cpu { seconds } => Ok(seconds),
            other => anyhow::bail!("the peer answered {other:?}"),
        }
    }

    fn ask(&mut self, ask: &Ask) -> anyhow::Result<Answer> {
        let input = self.input.as_mut().context("the peer's input is open")?;
        let mut line = serde_json::to_string(ask)?;
        line.push('\n');
        input.write_all(line.as_bytes()).context("the peer has ended")?;
        let mut line = String::new();
        let n = self.output.read_line(&mut line)?;
        anyhow::ensure!(n > 0, "the other process of the bench ended; see its message above");
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while std::time::Instant::now() < end {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
