//! The other process of a measurement.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use super::{BLOCK, CHILD_ENV, MeasureError, Options};
use crate::mem::{BlockPool, MemError, Region, RemoteRegion};
use crate::transport::{
    Access, Endpoint, Scope, ShmOptions, ShmTransport, TcpOptions, TcpTransport, Transport,
};

/// Serves as the peer if this process was started as one, and then does not return. Call it first
/// thing in `main`.
pub fn serve_if_asked() {
    if let Some(ws) = std::env::var(CHILD_ENV).ok().and_then(|v| v.parse().ok()) {
        let code = match serve(ws) {
            Ok(()) => 0,
            Err(e) => {
                eprintln!("transfer peer: {e}");
                1
            }
        };
        std::process::exit(code);
    }
}

pub(super) fn pattern(offset: u64) -> u64 {
    (offset ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xff51_afd7_ed55_8ccd)
}

pub(super) fn filled(mut region: Region) -> Result<Region, MemError> {
    region.prefault()?;
    for (i, word) in region.as_mut_slice().chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&pattern(i as u64 * 8).to_le_bytes());
    }
    Ok(region)
}

/// The peer: owns the memory, serves both paths and the raw loop, until its standard input closes.
fn serve(ws: u64) -> Result<(), MeasureError> {
    let source = BlockPool::contiguous(filled(Region::memfd("bench-source", ws)?)?, BLOCK)?;
    source.alloc(source.blocks() as usize)?;
    let mut staging = Region::anonymous(ws)?;
    staging.prefault()?;
    let staging = BlockPool::contiguous(staging, BLOCK)?;
    staging.alloc(staging.blocks() as usize)?;
    let raw = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let raw_addr = raw.local_addr()?;
    let mut sink = Region::anonymous(ws)?;
    sink.prefault()?;
    std::thread::spawn(move || {
        for stream in raw.incoming() {
            // One at a time, until its peer closes.
            let _ = stream.and_then(|s| raw_sink(s, sink.as_mut_slice()));
        }
    });
    let tcp = TcpTransport::bind(TcpOptions::default())?;
    let socket = std::env::temp_dir().join(format!("moonlive-bench-{}.sock", std::process::id()));
    let shm = ShmTransport::bind(ShmOptions::at(socket))?;
    let hex = |r: RemoteRegion| {
        r.encode()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect::<String>()
    };
    let fd = source
        .fd()
        .map_or(-1, |fd| std::os::fd::AsRawFd::as_raw_fd(&fd));
    let mut line = format!("{raw_addr} {fd}");
    for t in [&tcp as &dyn Transport, &shm] {
        let get = t.register(&source, Access::RemoteRead, Scope::Pool)?;
        let put = t.register(&staging, Access::RemoteWrite, Scope::Pool)?;
        line += &format!(" {} {} {}", t.endpoint(), hex(get), hex(put));
    }
    println!("{line}");
    std::io::stdout().flush()?;
    // Each line asks for the CPU time used so far; the end of input ends the process.
    for asked in std::io::stdin().lock().lines() {
        asked?;
        println!("{}", cpu_seconds());
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn raw_sink(mut s: TcpStream, memory: &mut [u8]) -> std::io::Result<()> {
    s.set_nodelay(true)?;
    let mut size = [0u8; 8];
    s.read_exact(&mut size)?;
    let size = u64::from_le_bytes(size) as usize;
    let mut at = 0;
    while s.read_exact(&mut memory[at..at + size]).is_ok() {
        s.write_all(&[0; 8])?;
        at = if at + 2 * size > memory.len() {
            0
        } else {
            at + size
        };
    }
    Ok(())
}

pub(super) fn cpu_seconds() -> f64 {
    // SAFETY: all-zero is a valid `rusage`, and `getrusage` only writes into it.
    let usage = unsafe {
        let mut u: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut u);
        u
    };
    let s = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    s(usage.ru_utime) + s(usage.ru_stime)
}

/// CPU seconds of the whole machine, idle and waiting excluded.
pub(super) fn machine_cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1);
    let ticks: Vec<f64> = fields.filter_map(|f| f.parse().ok()).collect();
    // user nice system, irq softirq; steal is not ours to see.
    let busy = ticks.iter().take(3).sum::<f64>() + ticks.iter().skip(5).take(2).sum::<f64>();
    busy / rustix::param::clock_ticks_per_second() as f64
}

pub(super) struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<std::process::ChildStdout>,
    pub(super) raw: SocketAddr,
    pub(super) memory: std::fs::File,
    pub(super) paths: Vec<(Endpoint, RemoteRegion, RemoteRegion)>,
}

impl Peer {
    pub(super) fn start(o: &Options) -> Result<Self, MeasureError> {
        let mut command = (o.peer)()?;
        command.env(CHILD_ENV, o.working_set.to_string());
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take();
        let Some(output) = child.stdout.take() else {
            return Err(MeasureError::Answer(String::new()));
        };
        let mut output = BufReader::new(output);
        let mut line = String::new();
        output.read_line(&mut line)?;
        let bad = || MeasureError::Answer(line.trim().into());
        let words: Vec<&str> = line.split_whitespace().collect();
        let [raw, fd, rest @ ..] = words.as_slice() else {
            return Err(bad());
        };
        // The peer's memory by another road than the one being measured.
        let memory = std::fs::File::open(format!("/proc/{}/fd/{fd}", child.id()))?;
        let mut paths = Vec::new();
        for p in rest.chunks_exact(3) {
            let region = |hex: &str| {
                let bytes: Option<Vec<u8>> = (0..hex.len() / 2)
                    .map(|i| u8::from_str_radix(hex.get(2 * i..2 * i + 2)?, 16).ok())
                    .collect();
                bytes.and_then(|b| RemoteRegion::decode(&b).ok())
            };
            paths.push((
                p[0].parse().map_err(|_| bad())?,
                region(p[1]).ok_or_else(bad)?,
                region(p[2]).ok_or_else(bad)?,
            ));
        }
        let raw = raw.parse().map_err(|_| bad())?;
        Ok(Self {
            child,
            input,
            output,
            raw,
            memory,
            paths,
        })
    }

    pub(super) fn cpu(&mut self) -> Result<f64, MeasureError> {
        if let Some(input) = &mut self.input {
            writeln!(input, "cpu")?;
        }
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        line.trim().parse().map_err(|_| MeasureError::Answer(line))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.input = None;
        // It ends with its input; if it hangs, it is ended.
        let until = Instant::now() + Duration::from_secs(5);
        while self.child.try_wait().is_ok_and(|s| s.is_none()) {
            if Instant::now() > until {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
