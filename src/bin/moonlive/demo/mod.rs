//! `moonlive demo`: one request decodes in one process and goes on in another, every page verified
//! on the way, and nobody can tell the difference.

mod ask;
mod compare;
mod fault;
mod live;
mod page;
mod run;
mod say;
mod summary;

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::cli::{DemoArgs, InjectKind, TransportKind};
use crate::cluster::TempDir;
use crate::exit::{Code, coded};

/// Runs the demonstration; an error with exit code 1 where it ends FAIL.
pub fn run(mut args: DemoArgs, json: bool) -> anyhow::Result<()> {
    if args.output == 0 {
        // A fault takes time to be noticed and made good; the stream is to go on meanwhile.
        args.output = if args.inject.is_some() { 800 } else { 200 };
    }
    let args = args;
    check(&args)?;
    let temp = TempDir::new()?;
    if let Some(file) = &args.report {
        page::claim(file)?;
    }
    let say = say::Say::new(json, args.engine.model.is_some());
    let out = args.out.as_deref().map(prepare_out).transpose()?;
    let plan = ask::Plan::new(&args);
    say.opening(&plan, &args);
    let fault = args.inject.map(|kind| fault::draw(kind, &args));
    let baseline = run::run(&run::Setup {
        dir: subdir(temp.path(), "a")?,
        args: &args,
        plan: &plan,
        migrate: false,
        fault: None,
        say: &say,
    })
    .context("the run without a migration")?;
    say.baseline_done(&baseline);
    let live = run::run(&run::Setup {
        dir: subdir(temp.path(), "b")?,
        args: &args,
        plan: &plan,
        migrate: true,
        fault: fault.as_ref(),
        say: &say,
    })
    .context("the run with the migration")?;
    say.live_done(&live);
    let verdict = compare::compare(&plan, &baseline, &live);
    if let Some(out) = &out {
        compare::keep(out, &plan, &baseline, &live)?;
        compare::keep_logs(out, "baseline", &temp.path().join("a"))?;
        compare::keep_logs(out, "migrated", &temp.path().join("b"))?;
    }
    let summary = summary::Summary::new(&args, &plan, &baseline, &live, &verdict, fault.as_ref());
    say.closing(&summary, &verdict, out.as_deref());
    if let Some(file) = &args.report {
        let shown = page::of(&args, &plan, &baseline, &live, &summary);
        crate::report::write(&shown, file)?;
        say.note(&format!("page written: {}", file.display()));
    }
    say.verdict(&summary);
    println_json(json, &summary);
    if summary.pass() {
        Ok(())
    } else {
        Err(coded(Code::Fail, ""))
    }
}

/// The summary object is the last line of standard output under `--json`.
fn println_json(json: bool, summary: &summary::Summary) {
    if json {
        println!("{}", summary.json());
    }
}

fn check(args: &DemoArgs) -> anyhow::Result<()> {
    let wrong = |text: String| Err(coded(Code::Caller, text));
    if args.requests == 0 || args.requests > 64 {
        return wrong(format!("--requests {}: 1 to 64", args.requests));
    }
    if args.output < 64 {
        return wrong(format!(
            "--output {}: at least 64, so that there is a middle",
            args.output
        ));
    }
    if args.transport != TransportKind::Tcp && args.inject == Some(InjectKind::CorruptWire) {
        return wrong(format!("there is no wire over {}", args.transport.name()));
    }
    if args.transport == TransportKind::Local
        && matches!(args.inject.map(fault::of), Some(f) if fault::kills_a_worker(f))
    {
        return wrong(
            "with --transport local both workers are one process: a fault that kills one kills both"
                .into(),
        );
    }
    Ok(())
}

fn subdir(dir: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let path = dir.join(name);
    std::fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
    Ok(path)
}

fn prepare_out(dir: &Path) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    dir.canonicalize()
        .with_context(|| format!("cannot use {}", dir.display()))
}
