//! How quiet the machine was: the share of its CPU time that went to processes not of this run.
//!
//! `/proc` counts CPU time in ticks of 10 ms, so a share over less than a tenth of a second means
//! nothing and is not given. Where the hypervisor takes time away (`steal`), that counts as others'.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Ticks a second in `/proc`, fixed by the kernel's ABI.
const TICKS: f64 = 100.0;
/// Shorter spans are not judged.
const SHORTEST: Duration = Duration::from_millis(100);

/// Meters one span, from [`Quiet::start`] to [`Quiet::stop`].
#[derive(Debug, Clone)]
pub struct Quiet {
    pids: Vec<u32>,
    began: Instant,
    busy: u64,
    ours: u64,
    other: Option<f64>,
}

impl Quiet {
    /// Starts. This process and `pids` are ours; processes must live until the stop.
    pub fn start(pids: &[u32]) -> Self {
        let mut pids = pids.to_vec();
        pids.push(std::process::id());
        Self {
            ours: pids.iter().filter_map(|p| process_ticks(*p)).sum(),
            busy: busy_ticks().unwrap_or(0),
            began: Instant::now(),
            pids,
            other: None,
        }
    }

    /// Ends the span.
    pub fn stop(&mut self) {
        let wall = self.began.elapsed();
        if wall < SHORTEST {
            return;
        }
        let ours: u64 = self.pids.iter().filter_map(|p| process_ticks(*p)).sum();
        let Some(busy) = busy_ticks() else { return };
        let others =
            (busy.saturating_sub(self.busy) as f64) - (ours.saturating_sub(self.ours) as f64);
        self.other = Some((others / (wall.as_secs_f64() * TICKS * cpus() as f64)).clamp(0.0, 1.0));
    }

    /// The others' share, from 0 to 1; `None` where it could not be told.
    pub fn other(&self) -> Option<f64> {
        self.other
    }
}

/// CPUs that this process may use.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// `model name`, number of CPUs.
pub fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|l| l.strip_prefix("model name"))
        .map_or("unknown CPU", |l| l.trim_start_matches([' ', '\t', ':']));
    format!("{} x {model}", cpus())
}

/// CPU seconds that the threads of a live process have used so far, to the nanosecond; of threads
/// that have ended nothing is known.
pub fn process_cpu_seconds(pid: u32) -> Option<f64> {
    let mut ns = 0u64;
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat"));
        // A thread that ended between the two is gone with its time.
        let used = text
            .ok()
            .and_then(|t| t.split(' ').next()?.parse::<u64>().ok());
        ns += used.unwrap_or(0);
    }
    Some(ns as f64 / 1e9)
}

/// CPU time of this process so far, all threads, in seconds.
pub fn own_cpu_seconds() -> f64 {
    let t = clock_gettime(ClockId::ProcessCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

fn process_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; fields count from behind it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let tick = |i: usize| fields.get(i)?.parse::<u64>().ok();
    Some(tick(11)? + tick(12)?)
}

fn busy_ticks() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let fields: Vec<u64> = stat
        .lines()
        .next()?
        .split_ascii_whitespace()
        .skip(1)
        .filter_map(|f| f.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal; guest time is in user already.
    let all: u64 = fields.iter().take(8).sum();
    Some(all - fields.get(3)? - fields.get(4)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_work_is_not_counted_as_others() {
        let before = process_cpu_seconds(std::process::id()).unwrap();
        let mut quiet = Quiet::start(&[]);
        let mut x = 1u64;
        while quiet.began.elapsed() < Duration::from_millis(300) {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        quiet.stop();
        assert!(process_cpu_seconds(std::process::id()).unwrap() > before);
        let other = quiet.other().unwrap();
        assert!((0.0..=1.0).contains(&other));
        assert!(machine().contains(" x "));
    }

    #[test]
    fn a_span_too_short_to_judge_is_not_judged() {
        let mut quiet = Quiet::start(&[]);
        quiet.stop();
        assert_eq!(quiet.other(), None);
    }
}
