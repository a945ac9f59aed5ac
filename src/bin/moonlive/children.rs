//! Child processes: started from one thread, ready when they say so, gone when their parent is.
//!
//! A child prints one JSON object on standard output once it serves; what it logs goes to a file.
//! It asks the kernel to be signalled when its parent dies, so no daemon outlives a demonstration
//! that was killed. That signal follows the *thread* that started the child: [`Children`] is
//! therefore kept on the thread that creates it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::exit::{Code, coded};

/// How long a daemon may take from its start to its readiness line.
pub const START_DEADLINE: Duration = Duration::from_secs(60);
/// How long a daemon may take from SIGTERM to its end.
pub const STOP_DEADLINE: Duration = Duration::from_secs(10);

/// One daemon started by this process.
pub struct Daemon {
    /// Name in logs: `w0`, `gateway`.
    pub name: String,
    /// Its readiness line.
    pub ready: serde_json::Value,
    /// Where its standard error goes.
    pub log: PathBuf,
    /// Where in that file this life of it begins.
    log_from: u64,
    child: Child,
}

impl Daemon {
    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A field of its readiness line.
    pub fn field(&self, key: &str) -> anyhow::Result<&str> {
        self.ready[key]
            .as_str()
            .with_context(|| format!("{} did not say its {key}: {}", self.name, self.ready))
    }

    /// The workers in this process: names and control RPCs.
    pub fn rpcs(&self) -> Vec<(String, String)> {
        let all = self.ready["rpcs"].as_object().into_iter().flatten();
        all.filter_map(|(id, at)| Some((id.clone(), at.as_str()?.to_owned())))
            .collect()
    }

    /// Sends a signal; a process that has ended already is no error.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = Pid::from_raw(self.child.id() as i32).context("process id")?;
        match kill_process(pid, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(e).with_context(|| format!("cannot signal {}", self.name)),
        }
    }

    /// Whether it has ended, and how.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// SIGINT, a wait, SIGKILL at the deadline. True where it ended by itself with success.
    pub fn stop(&mut self, deadline: Duration) -> bool {
        let _ = self.signal(Signal::CONT);
        let _ = self.signal(Signal::INT);
        let end = Instant::now() + deadline;
        while Instant::now() < end {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.success(),
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Err(_) => break,
            }
        }
        self.kill();
        false
    }

    /// SIGKILL, and reap.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The last lines that this life of it has logged, for an error message; a log is kept over
    /// many.
    pub fn log_tail(&self) -> String {
        log_tail(&self.log, self.log_from)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.kill();
        }
    }
}

/// The last lines of `log` from byte `from` on.
fn log_tail(log: &Path, from: u64) -> String {
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(log) {
        let end = file.metadata().map_or(0, |m| m.len());
        // Much of a long log is of no use in a message.
        let from = from.max(end.saturating_sub(64 << 10));
        let _ = file
            .seek(SeekFrom::Start(from))
            .and_then(|_| file.take(64 << 10).read_to_end(&mut bytes));
    }
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().rev().take(12).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}

/// Starts daemons. Not `Send`: see the module's words on the parent's death.
pub struct Children {
    dir: PathBuf,
    _here: PhantomData<*const ()>,
}

impl Children {
    /// Logs go to `dir`, which must exist.
    pub fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            _here: PhantomData,
        }
    }

    /// Starts `moonlive ARGS --die-with PID` and returns at once; [`Starting::ready`] waits.
    pub fn start(&self, name: &str, args: &[String]) -> anyhow::Result<Starting> {
        let exe = std::env::current_exe().context("where is this program?")?;
        let log = self.dir.join(format!("{name}.log"));
        let err = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("cannot write {}", log.display()))?;
        let log_from = err.metadata().map_or(0, |m| m.len());
        let mut child = Command::new(exe)
            .args(args)
            .args(["--die-with", &std::process::id().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(err)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let stdout = child.stdout.take().context("standard output was piped")?;
        let (tx, rx) = mpsc::sync_channel(1);
        let name_of = name.to_owned();
        // Reads the first line, then drains, so that the child never blocks on a full pipe.
        std::thread::Builder::new()
            .name(format!("out-{name}"))
            .spawn(move || {
                for line in BufReader::new(stdout).lines() {
                    let Ok(line) = line else { break };
                    if tx.try_send(line).is_err() {
                        // Further lines have no reader; they are for a human who runs it by hand.
                    }
                }
                drop(name_of);
            })?;
        let daemon = Daemon {
            name: name.to_owned(),
            ready: serde_json::Value::Null,
            log,
            log_from,
            child,
        };
        Ok(Starting {
            daemon,
            rx,
            since: Instant::now(),
        })
    }
}

/// A daemon that has not said yet that it serves.
pub struct Starting {
    daemon: Daemon,
    rx: mpsc::Receiver<String>,
    since: Instant,
}

impl Starting {
    /// Waits for the readiness line, until [`START_DEADLINE`] after the start.
    pub fn ready(mut self) -> anyhow::Result<Daemon> {
        let left = START_DEADLINE.saturating_sub(self.since.elapsed());
        let name = self.daemon.name.clone();
        let line = match self.rx.recv_timeout(left) {
            Ok(line) => line,
            Err(why) => return Err(self.not_ready(why)),
        };
        self.daemon.ready = serde_json::from_str(&line)
            .with_context(|| format!("{name} said {line:?} where a JSON object was due"))?;
        Ok(self.daemon)
    }
}

impl Starting {
    /// Why it will not serve, with what it said itself: its own exit status is ours.
    fn not_ready(&mut self, why: mpsc::RecvTimeoutError) -> anyhow::Error {
        let daemon = &mut self.daemon;
        let (name, log) = (daemon.name.clone(), daemon.log.display().to_string());
        if why == mpsc::RecvTimeoutError::Timeout {
            let text = format!(
                "{name} was not ready in {START_DEADLINE:?}; log: {log}; it ends:\n{}",
                daemon.log_tail()
            );
            return coded(Code::Deadline, text);
        }
        // It closed its standard output: its end is a moment away.
        let end = Instant::now() + STOP_DEADLINE;
        let status = loop {
            match daemon.ended() {
                None if Instant::now() < end => std::thread::sleep(Duration::from_millis(2)),
                ended => break ended,
            }
        };
        let tail = daemon.log_tail();
        let last = tail.lines().last().unwrap_or_default();
        let code = status.map_or(Code::PeerLost, Code::of_child);
        let text = match last.strip_prefix("moonlive: ") {
            Some(said) => format!("{name} cannot start: {said}"),
            None => format!("{name} ended before it was ready; log: {log}; it ends:\n{tail}"),
        };
        coded(code, text)
    }
}

/// In the child: ties its life to its parent's, and fails if the parent is gone already.
pub fn die_with(parent: Option<u32>) -> anyhow::Result<()> {
    let Some(parent) = parent else { return Ok(()) };
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))
        .context("cannot tie this process to its parent")?;
    let now = rustix::process::getppid().map(|p| p.as_raw_nonzero().get() as u32);
    if now != Some(parent) {
        bail!("the parent process {parent} has ended");
    }
    Ok(())
}

/// In the child: the readiness line.
pub fn say_ready(fields: serde_json::Value) {
    let mut out = std::io::stdout().lock();
    // A parent that does not listen is no reason to stop serving.
    let _ = writeln!(out, "{fields}").and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_quoted_of_a_log_is_of_this_life_only() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("w0.log");
        std::fs::write(&log, "old 1\nold 2\n").unwrap();
        let from = std::fs::metadata(&log).unwrap().len();
        assert_eq!(log_tail(&log, from), "");
        let mut file = File::options().append(true).open(&log).unwrap();
        for n in 0..20 {
            writeln!(file, "new {n}").unwrap();
        }
        let tail = log_tail(&log, from);
        assert_eq!(tail.lines().count(), 12);
        assert!(
            tail.starts_with("new 8\n") && tail.ends_with("new 19"),
            "{tail}"
        );
    }
}
