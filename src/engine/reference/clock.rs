//! The one clock of the engine: monotonic nanoseconds since the process first asked.

use std::sync::OnceLock;
use std::time::Instant;

/// Nanoseconds on this process's monotonic clock, as in [`super::TokenEvent::step_done_ns`].
pub fn clock_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = START.get_or_init(Instant::now);
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
