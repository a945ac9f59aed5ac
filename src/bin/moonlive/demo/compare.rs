//! The judgement: what the two runs' clients saw, and what the two runs' memory held.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Context;
use moonlivekv::control_state::ControlState;
use moonlivekv::id::RequestId;

use super::ask::Plan;
use super::run::Outcome;

/// What was found equal and what was not.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Every client's stream is byte for byte the same in both runs.
    pub identical: bool,
    /// KV bytes are equal wherever both runs wrote them, and they did for every request.
    pub kv_equal: bool,
    /// Control states likewise.
    pub control_equal: bool,
    /// KV bytes compared.
    pub kv_bytes: u64,
    /// What differs, in words.
    pub differences: Vec<String>,
}

/// Compares two runs.
pub fn compare(plan: &Plan, baseline: &Outcome, live: &Outcome) -> Verdict {
    let mut v = Verdict {
        identical: true,
        kv_equal: true,
        control_equal: true,
        ..Verdict::default()
    };
    for (n, ask) in plan.asks.iter().enumerate() {
        let (a, b) = (&baseline.transcripts[n], &live.transcripts[n]);
        let (left, right) = (a.bytes(), b.bytes());
        if left != right || a.finish.is_empty() {
            v.identical = false;
            v.differences
                .push(first_difference(&ask.request, &left, &right));
        }
        if let Some(error) = &b.error {
            v.differences
                .push(format!("request {}: {error}", ask.request));
        }
        memory(ask.request, baseline, live, &mut v);
    }
    v
}

fn first_difference(request: &RequestId, left: &[u8], right: &[u8]) -> String {
    let (left, right) = (
        String::from_utf8_lossy(left),
        String::from_utf8_lossy(right),
    );
    let mut lines = left.lines().zip(right.lines()).enumerate();
    match lines.find(|(_, (a, b))| a != b) {
        Some((n, (a, b))) => {
            format!(
                "request {request}: line {} is {a:?} without and {b:?} with the migration",
                n + 1
            )
        }
        None => format!(
            "request {request}: {} lines without, {} with the migration",
            left.lines().count(),
            right.lines().count()
        ),
    }
}

fn seals(run: &Outcome, request: RequestId) -> BTreeSet<u64> {
    run.dumps
        .keys()
        .filter(|(r, _)| *r == request)
        .map(|(_, seal)| *seal)
        .collect()
}

fn memory(request: RequestId, baseline: &Outcome, live: &Outcome, v: &mut Verdict) {
    let common: Vec<u64> = seals(baseline, request)
        .intersection(&seals(live, request))
        .copied()
        .collect();
    if common.is_empty() {
        v.kv_equal = false;
        v.control_equal = false;
        v.differences
            .push(format!("request {request}: no KV was written by both runs"));
        return;
    }
    for seal in common {
        let (a, b) = (
            &baseline.dumps[&(request, seal)],
            &live.dumps[&(request, seal)],
        );
        match (std::fs::read(&a.0), std::fs::read(&b.0)) {
            (Ok(left), Ok(right)) => {
                v.kv_bytes += left.len() as u64;
                if left != right {
                    let at = left.iter().zip(&right).position(|(x, y)| x != y);
                    v.kv_equal = false;
                    v.differences.push(format!(
                        "request {request}: KV at output token {seal} differs from byte {at:?} on"
                    ));
                }
            }
            _ => v.kv_equal = false,
        }
        match (control(&a.1), control(&b.1)) {
            (Ok(left), Ok(right)) if left == right => {}
            (Ok(_), Ok(_)) => {
                v.control_equal = false;
                v.differences.push(format!(
                    "request {request}: the control state at output token {seal} differs"
                ));
            }
            (Err(e), _) | (_, Err(e)) => {
                v.control_equal = false;
                v.differences.push(format!("request {request}: {e:#}"));
            }
        }
    }
}

/// A control state without what must differ: how often it was frozen for export, and the time left.
fn control(path: &Path) -> anyhow::Result<Vec<u8>> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut state = ControlState::decode(&bytes)
        .map_err(|e| anyhow::anyhow!("{} is no control state: {e}", path.display()))?;
    state.identity.state_seq = 0;
    state.scheduling.remaining_ns = None;
    state
        .encode()
        .map_err(|e| anyhow::anyhow!("the control state does not encode: {e}"))
}

/// Keeps the daemons' logs of one run.
pub fn keep_logs(out: &Path, name: &str, dir: &Path) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let is_log = path.extension().is_some_and(|e| e == "log");
        if let (true, Some(file)) = (is_log, path.file_name().and_then(|f| f.to_str())) {
            let to = out.join(format!("{name}-{file}"));
            std::fs::copy(&path, &to).with_context(|| format!("cannot write {}", to.display()))?;
        }
    }
    Ok(())
}

/// Keeps both runs' transcripts and dumps for `cmp`.
pub fn keep(out: &Path, plan: &Plan, baseline: &Outcome, live: &Outcome) -> anyhow::Result<()> {
    for (name, run) in [("baseline", baseline), ("migrated", live)] {
        let (mut streams, mut texts) = (Vec::new(), String::new());
        for (ask, t) in plan.asks.iter().zip(&run.transcripts) {
            streams.extend_from_slice(format!("request {}\n", ask.request).as_bytes());
            streams.extend(t.bytes());
            texts.push_str(&t.text());
            texts.push('\n');
        }
        let write = |file: String, bytes: &[u8]| {
            let path = out.join(file);
            std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))
        };
        write(format!("{name}.stream"), &streams)?;
        write(format!("{name}.txt"), texts.as_bytes())?;
        for ((request, seal), (kv, control)) in &run.dumps {
            write(format!("{name}-{request}-{seal}.kv"), &std::fs::read(kv)?)?;
            write(
                format!("{name}-{request}-{seal}.control"),
                &std::fs::read(control)?,
            )?;
        }
    }
    Ok(())
}
