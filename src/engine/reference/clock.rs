//! The one clock of the engine.

use rustix::time::{ClockId, clock_gettime};

/// The system's monotonic clock in ns: comparable between processes of one machine, as the fence
/// pause (last step at the source, first at the destination) must be.
pub fn clock_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}
