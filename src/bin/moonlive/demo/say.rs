//! The narration, for a human on a terminal. Silent under `--json`.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moonlivekv::drive::now_ns;
use moonlivekv::rpc::v1;

use super::ask::{Ask, Plan};
use super::compare::Verdict;
use super::run::Outcome;
use super::summary::Summary;
use crate::cli::DemoArgs;

/// Writes the narration.
#[derive(Debug, Clone)]
pub struct Say {
    silent: bool,
    chat: bool,
    /// The terminal's line is in the middle of streamed text.
    midline: Arc<AtomicBool>,
}

fn ms(d: Duration) -> String {
    format!("{:.2} ms", d.as_secs_f64() * 1e3)
}

impl Say {
    /// `chat` streams the text to the terminal.
    pub fn new(silent: bool, chat: bool) -> Self {
        Self {
            silent,
            chat,
            midline: Arc::default(),
        }
    }

    fn line(&self, text: &str) {
        if self.silent {
            return;
        }
        let mut out = std::io::stdout().lock();
        if self.midline.swap(false, Ordering::SeqCst) {
            let _ = writeln!(out);
        }
        let _ = writeln!(out, "{text}");
    }

    /// What is about to happen.
    pub fn opening(&self, plan: &Plan, args: &DemoArgs) {
        let model = match &args.engine.model {
            Some(path) => path.display().to_string(),
            None => format!("reference model, size {}", args.engine.size),
        };
        let what = match (&args.engine.model, &args.prompt) {
            (None, None) => format!("request(s), {} prompt and", args.context),
            (None, Some(_)) => "request(s),".into(),
            (Some(_), _) => "chat(s),".into(),
        };
        self.line(&format!(
            "MoonLiveKV: {} {what} {} output tokens each, {}, over {}; {model}; seed {}",
            plan.asks.len(),
            args.output,
            if args.greedy { "greedy" } else { "sampled" },
            args.transport.name(),
            args.seed
        ));
        self.line("1. without a migration: gateway, coordinator and two workers as processes of their own");
    }

    /// The first run is over.
    pub fn baseline_done(&self, run: &Outcome) {
        self.rate(run);
        self.line("2. the same requests again, in new processes, and each moves while it decodes");
    }

    fn rate(&self, run: &Outcome) {
        let tokens: usize = run.transcripts.iter().map(|t| t.tokens.len()).sum();
        let rate = run
            .tokens_per_s()
            .map_or_else(|| "too few".into(), |r| format!("{r:.1}"));
        self.line(&format!(
            "   {tokens} tokens, {rate} a second after the first"
        ));
    }

    /// The second run is over.
    pub fn live_done(&self, run: &Outcome) {
        self.rate(run);
    }

    /// A token of the run with the migration.
    pub fn token(&self, client: usize, text: &str, live: bool) {
        if self.silent || !self.chat || client != 0 || !live || text.is_empty() {
            return;
        }
        let mut out = std::io::stdout().lock();
        self.midline.store(true, Ordering::SeqCst);
        let _ = write!(out, "{text}").and_then(|()| out.flush());
    }

    /// A migration is asked for.
    pub fn migrating(&self, ask: &Ask, from: &str, to: &str) {
        self.line(&format!(
            "   {} at token {}: {from} -> {to}",
            short(&ask.request.to_string()),
            ask.migrate_at
        ));
    }

    /// A phase began.
    pub fn event(&self, event: &v1::MigrationEvent, started: Instant) {
        if self.silent {
            return;
        }
        if let Some(report) = &event.report {
            self.report(report);
            return;
        }
        // The coordinator's clock is this machine's.
        let ago = Duration::from_nanos(now_ns().saturating_sub(event.at_ns));
        let at = started.elapsed().saturating_sub(ago);
        let detail = if event.detail.is_empty() {
            String::new()
        } else {
            format!("  {}", event.detail)
        };
        self.line(&format!(
            "   {:>9.1} ms  {:<8}{detail}",
            at.as_secs_f64() * 1e3,
            event.phase
        ));
    }

    fn report(&self, r: &v1::MigrationReport) {
        let outcome = if r.migrated {
            "moved"
        } else {
            "stayed where it was"
        };
        self.line(&format!(
            "   {} {outcome}; cause: {}",
            short(&r.request),
            r.cause
        ));
        for p in &r.phases {
            let took = Duration::from_nanos(p.took_ns);
            let fenced = matches!(
                p.phase.as_str(),
                "COPY-TAIL" | "IMPORT-TAIL" | "VERIFY" | "ARM" | "COMMIT" | "RESUME"
            );
            let mark = if fenced {
                "| the request stands still"
            } else {
                ""
            };
            self.line(&format!("     {:<12}{:>12}  {mark}", p.phase, ms(took)));
        }
        if r.migrated {
            self.line(&format!(
                "     fence pause {}: {} pages verified in the destination's memory, {} bytes moved ({} inside the fence, {} leaves hashed there)",
                ms(Duration::from_nanos(r.fence_pause_ns)),
                r.pages_verified,
                r.bytes,
                r.fence_bytes,
                r.leaves_hashed_in_fence
            ));
        }
    }

    /// Something worth a line.
    pub fn note(&self, text: &str) {
        self.line(&format!("   {text}"));
    }

    /// The coordinator does not answer any more.
    pub fn coordinator_lost(&self, status: &tonic::Status) {
        self.line(&format!(
            "   the coordinator is gone ({}); the record decides",
            status.message()
        ));
    }

    /// What was compared.
    pub fn closing(&self, summary: &Summary, verdict: &Verdict, out: Option<&Path>) {
        self.line("3. compared");
        let yes = |b: bool| if b { "equal" } else { "DIFFERENT" };
        self.line(&format!(
            "   streams, byte for byte      {}",
            yes(verdict.identical)
        ));
        self.line(&format!(
            "   KV, {} bytes          {}",
            verdict.kv_bytes,
            yes(verdict.kv_equal)
        ));
        self.line(&format!(
            "   control state               {}",
            yes(verdict.control_equal)
        ));
        for difference in &verdict.differences {
            self.line(&format!("   {difference}"));
        }
        for leak in summary.leaks() {
            self.line(&format!("   left over: {leak}"));
        }
        if let Some(out) = out {
            self.line(&format!(
                "   kept in {}: cmp {}/baseline.stream {}/migrated.stream",
                out.display(),
                out.display(),
                out.display()
            ));
        }
        for line in summary.lines() {
            self.line(&format!("   {line}"));
        }
    }

    /// The last line.
    pub fn verdict(&self, summary: &Summary) {
        self.line(if summary.pass() { "PASS" } else { "FAIL" });
    }
}

fn short(request: &str) -> &str {
    request.get(..8).unwrap_or(request)
}
