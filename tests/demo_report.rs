//! `moonlive demo --report`: the page is there, needs nothing but itself, shows what happened, and
//! nothing that a user or a model says becomes markup.

use std::process::Command;

/// Elements that have no end.
const VOID: [&str; 2] = ["!doctype", "meta"];

/// Checks that every element that begins ends, in order.
fn well_formed(page: &str) -> Result<(), String> {
    let mut open: Vec<String> = Vec::new();
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        let end = rest[at..].find('>').ok_or("a tag without an end")?;
        let tag = &rest[at + 1..at + end];
        if tag.contains(" src=") || tag.contains(" on") {
            return Err(format!("<{tag}> loads or runs something"));
        }
        rest = &rest[at + end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            match open.pop() {
                Some(last) if last == name => {}
                other => return Err(format!("</{name}> ends {other:?}")),
            }
            continue;
        }
        let name = tag.split([' ', '/', '\n']).next().unwrap_or("").to_owned();
        if name == "script" || name == "style" {
            let close = format!("</{name}>");
            let to = rest.find(&close).ok_or("a script that does not end")?;
            rest = &rest[to + close.len()..];
        } else if !tag.ends_with('/') && !VOID.contains(&name.as_str()) {
            open.push(name);
        }
    }
    if open.is_empty() {
        Ok(())
    } else {
        Err(format!("left open: {open:?}"))
    }
}

fn demo(file: &std::path::Path, extra: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_moonlive"))
        .args(["demo", "--json", "--size", "tiny", "--context", "96"])
        .args(["--output", "120", "--report"])
        .arg(file)
        .args(extra)
        .output()
        .unwrap()
}

#[test]
fn the_page_shows_the_run_and_needs_nothing_but_itself() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("page.html");
    let evil = "<script>alert(1)</script><img src=x onerror=alert(2)>";
    let out = demo(&file, &["--prompt", evil, "--requests", "2"]);
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{said}");
    let page = std::fs::read_to_string(&file).unwrap();
    well_formed(&page).unwrap();
    for loads in ["http://", "https://", "url(", "@import", "<link", "<img"] {
        assert!(!page.contains(loads), "it would load something: {loads}");
    }
    for href in page.split("href=\"").skip(1) {
        assert!(href.starts_with("#r"), "a link that leaves the page");
    }
    // The one script is data.
    assert_eq!(page.matches("<script").count(), 1);
    assert!(page.contains("<script type=\"application/json\""));
    assert!(
        page.contains("&lt;script&gt;alert(1)"),
        "the command line is not shown"
    );
    for phase in [
        "PREPARE",
        "RESERVE",
        "STREAM",
        "FENCE",
        "COPY-TAIL",
        "IMPORT-TAIL",
        "VERIFY",
        "ARM",
        "COMMIT",
        "RESUME",
        "GC",
    ] {
        assert!(
            page.contains(&format!("<title>{phase}: ")),
            "no {phase} on the time line"
        );
    }
    for part in [
        "PASS",
        "<svg",
        "Inside the fence",
        "compare-and-swap",
        "identical",
    ] {
        assert!(page.contains(part), "no {part:?}");
    }
    // Both streams stand there token by token, and the flip is marked in each.
    assert_eq!(page.matches("class=\"mark\"").count(), 2);
    let (json, _) = page
        .split_once("id=\"data\">")
        .unwrap()
        .1
        .split_once("</script>")
        .unwrap();
    let data: serde_json::Value = serde_json::from_str(json).unwrap();
    for request in data["requests"].as_array().unwrap() {
        let tokens = request["tokens"].as_array().unwrap();
        assert_eq!(tokens.len(), 120);
        let times: Vec<f64> = tokens
            .iter()
            .map(|t| t["at_us"].as_f64().unwrap())
            .collect();
        assert!(times.is_sorted());
        // The fence happened while the stream ran, on the same clock.
        let fence = request["migration"]["fence"].as_array().unwrap();
        let from = fence[0]["from_us"].as_f64().unwrap();
        assert!(
            times[0] < from && from < times[119],
            "{from} outside the stream"
        );
    }
}

#[test]
fn a_file_that_cannot_be_written_is_told_before_the_run() {
    let began = std::time::Instant::now();
    let out = demo(std::path::Path::new("/nonexistent/page.html"), &[]);
    assert!(!out.status.success());
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(
        said.contains("--report") && said.contains("/nonexistent"),
        "{said}"
    );
    assert!(out.stdout.is_empty() && began.elapsed().as_secs() < 20);
}
