//! The numbers a deployment may turn. None of them is needed for safety.

/// Durations (nanoseconds) and sizes that bound the machines' waits and work.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Limits {
    /// A step before the fence may take this long before the party moves to abort.
    pub step_ns: u64,
    /// The whole of STREAM may take this long.
    pub stream_ns: u64,
    /// From the fence to the decision; then the source moves to abort.
    pub fence_ns: u64,
    /// Wait before asking an unreachable store again.
    pub retry_ns: u64,
    /// Wait before sending an unanswered message again.
    pub resend_ns: u64,
    /// Pause between two looks at how far decoding went, once streaming has caught up.
    pub round_ns: u64,
    /// One pull may take this long.
    pub pull_ns: u64,
    /// Most tokens in one offer.
    pub offer_tokens: u32,
    /// Offers under way at once: one is hashed while the next one travels.
    pub window: u16,
    /// A fence may leave at most this many unverified tokens.
    pub go_tokens: u32,
    /// Times a page that differs is fetched again.
    pub pull_retries: u16,
    /// Times an unanswered message is sent again.
    pub resends: u16,
    /// STREAM may use this many bytes per second (0: unbounded).
    pub stream_bytes_per_s: u64,
    /// Bytes that may go at once after a pause.
    pub stream_burst_bytes: u64,
    /// Inside the fence, hash everything again.
    pub verify_full: bool,
}

impl Default for Limits {
    fn default() -> Self {
        const MS: u64 = 1_000_000;
        Self {
            step_ns: 5_000 * MS,
            stream_ns: 600_000 * MS,
            fence_ns: 1_000 * MS,
            retry_ns: 20 * MS,
            resend_ns: 250 * MS,
            round_ns: 5 * MS,
            pull_ns: 10_000 * MS,
            offer_tokens: 1024,
            window: 3,
            go_tokens: 64,
            pull_retries: 2,
            resends: 3,
            stream_bytes_per_s: 0,
            stream_burst_bytes: 64 << 20,
            verify_full: false,
        }
    }
}
