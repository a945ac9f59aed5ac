//! A progress bar on standard error: only where that is a terminal, never between JSON lines.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar of known length.
pub struct Progress(ProgressBar);

impl Progress {
    /// Starts one; draws nothing where standard error is not a terminal.
    pub fn start(steps: u64) -> Self {
        // indicatif hides itself where the stream is no terminal; ten frames a second at most, so
        // that drawing does not show up in what is measured.
        let bar =
            ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr_with_hz(10));
        if let Ok(style) = ProgressStyle::with_template(
            "{bar:28} {pos:>5}/{len} {elapsed:>4} eta {eta:>4}  {wide_msg}",
        ) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self(bar)
    }

    /// Names what runs now.
    pub fn say(&self, what: impl Into<String>) {
        self.0.set_message(what.into());
    }

    /// One step done.
    pub fn step(&self) {
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
