//! How soon a thread gets a CPU once what it waits for is there.
//!
//! On a machine with few CPUs the thread that a frame wakes finds each of them at work for somebody
//! else, and the kernel (EEVDF, Linux 6.6 and later) lets that one finish its slice: a hundred
//! microseconds and more on top of a pause that is to be a few hundred. A thread that asks for
//! shorter slices than the others may preempt them when it wakes (from Linux 6.12 on). It gets no
//! larger share of the CPU by that, and needs no privilege for it.

/// The shortest slice that the kernel grants.
const SLICE_NS: u64 = 100_000;

/// `struct sched_attr` as of Linux 3.14 (`SCHED_ATTR_SIZE_VER0`); `man 2 sched_setattr`.
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Asks for short slices for the calling thread, for as long as it lives. Where the kernel does not
/// know of them, or the thread is not scheduled by the ordinary policy, all stays as it is.
#[allow(unsafe_code)]
pub fn ask_for_short_slices() {
    const SIZE: u32 = size_of::<SchedAttr>() as u32;
    let mut attr = SchedAttr::default();
    // SAFETY: the kernel writes at most `SIZE` bytes to `attr`, which has as many and any value of
    // which is sound; it outlives the call. Thread 0 is the calling one.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, SIZE, 0u32) };
    if got != 0 || attr.policy != libc::SCHED_OTHER as u32 {
        return;
    }
    attr.size = SIZE;
    attr.runtime = SLICE_NS;
    // SAFETY: the kernel reads `attr.size` bytes of `attr`, which has as many. It changes when this
    // thread runs and nothing else.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0u32) };
    if set != 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "no short slices for this thread");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asking_for_short_slices_keeps_the_policy_and_the_share() {
        std::thread::spawn(|| {
            let nice = || rustix::process::getpriority_process(None).unwrap();
            rustix::process::setpriority_process(None, nice() + 1).unwrap();
            let before = nice();
            ask_for_short_slices();
            assert_eq!(nice(), before);
        })
        .join()
        .unwrap();
    }
}
