//! One-expression breaks of the protocol. Without the feature `mutants` the macro *is* its first
//! expression; with it, a test switches one break on for its own thread and must then see the
//! simulator or the model check find it.

/// `mutant!("name", right, wrong)`: `right`, unless a test asked this thread for the break `name`.
macro_rules! mutant {
    ($name:literal, $right:expr, $wrong:expr) => {{
        #[cfg(feature = "mutants")]
        {
            if $crate::route::mutants::on($name) {
                $wrong
            } else {
                $right
            }
        }
        #[cfg(not(feature = "mutants"))]
        {
            $right
        }
    }};
}
pub(crate) use mutant;

#[cfg(feature = "mutants")]
mod chosen {
    use std::cell::Cell;

    thread_local! {
        static CHOSEN: Cell<Option<&'static str>> = const { Cell::new(None) };
    }

    /// Whether this thread runs with the break `name`.
    pub fn on(name: &str) -> bool {
        CHOSEN.with(|c| c.get() == Some(name))
    }

    /// All breaks.
    pub const ALL: [&str; 18] = [
        "unfence-on-timer",
        "unfence-on-unchanged-record",
        "disarm-on-word",
        "lost-reply-is-failure",
        "compare-omits-migration-epoch",
        "compare-omits-incarnation",
        "abort-leaves-revision",
        "arm-before-verify",
        "tail-skipped",
        "replica-skipped",
        "verify-before-write-ends",
        "epoch-checked-at-admission-only",
        "accepts-lower-epoch",
        "recovery-without-floor",
        "tail-tokens-not-re-emitted",
        "seal-off-by-one",
        "source-freed-before-decision",
        "double-resume",
    ];

    /// Switches one break on for this thread, or all off.
    pub fn choose(name: Option<&'static str>) {
        CHOSEN.with(|c| c.set(name));
    }
}

#[cfg(feature = "mutants")]
pub use chosen::{ALL, choose, on};
