//! The one clock of the engine: `CLOCK_MONOTONIC` of the machine.

/// Nanoseconds of `CLOCK_MONOTONIC`, as in [`super::TokenEvent::step_done_ns`]. The kernel's value
/// itself, not one relative to this process's start: two processes of one machine may compare them.
pub fn clock_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Monotonic time is never negative.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
