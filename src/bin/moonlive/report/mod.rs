//! `moonlive demo --report FILE.html`: one page that shows a migration, with nothing to load.

mod data;
mod html;
mod timeline;

use std::fmt::Write;
use std::path::Path;

use anyhow::Context;

pub use data::{Lane, Migration, Phase, Report, Request, Token};
use html::{bytes, escape, micros, script_json, thousands};

/// Writes the page.
pub fn write(report: &Report, file: &Path) -> anyhow::Result<()> {
    std::fs::write(file, render(report)?)
        .with_context(|| format!("cannot write {}", file.display()))
}

/// The page as text.
fn render(report: &Report) -> anyhow::Result<String> {
    let mut out = String::new();
    let verdict = match report.pass {
        true => "PASS",
        false => "FAIL",
    };
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>{verdict}: a request moved while it was decoding</title>\n<style>{}</style></head>\
         <body><main>\n",
        include_str!("page.css")
    );
    head(report, verdict, &mut out);
    if report.requests.len() > 1 {
        out.push_str("<nav>");
        for (i, r) in report.requests.iter().enumerate() {
            let _ = write!(out, "<a href=\"#r{i}\">{}</a>", escape(short(&r.id)));
        }
        out.push_str("</nav>\n");
    }
    for (i, request) in report.requests.iter().enumerate() {
        section(i, report.requests.len(), request, &mut out);
    }
    let _ = write!(
        out,
        "<footer>Made by <code>{}</code> on {}. Times are of one monotonic clock shared by all \
         processes. The figures behind this page are in its source, as JSON.</footer>\n\
         </main><script type=\"application/json\" id=\"data\">{}</script></body></html>\n",
        escape(&report.command),
        escape(&report.machine),
        script_json(report)?
    );
    Ok(out)
}

fn head(report: &Report, verdict: &str, out: &mut String) {
    let class = match report.pass {
        true => "",
        false => " fail",
    };
    let moved: Vec<&Migration> = report
        .requests
        .iter()
        .filter_map(|r| r.migration.as_ref().filter(|m| m.committed))
        .collect();
    let title = match (report.requests.len(), moved.len()) {
        (1, 1) => "A request moved while it was decoding".to_owned(),
        (1, _) => "A request stayed where it was, and lost nothing".to_owned(),
        (n, m) => format!("{m} of {n} requests moved while they were decoding"),
    };
    let _ = writeln!(
        out,
        "<h1><span class=\"verdict{class}\">{verdict}</span>{title}</h1>\
         <p class=\"lead\">{}, KV over {}, verify {}.{}</p>",
        escape(&report.model),
        escape(&report.transport),
        escape(&report.verify),
        match report.cause.as_str() {
            "" => String::new(),
            cause => format!(" {}.", escape(cause)),
        }
    );
    out.push_str("<div class=\"facts\">");
    for (big, small) in facts(report, &moved) {
        let _ = write!(
            out,
            "<div class=\"fact\"><b>{big}</b><span>{small}</span></div>"
        );
    }
    out.push_str("</div>\n");
}

/// The figures at the top: a large one, and what it is.
fn facts(report: &Report, moved: &[&Migration]) -> Vec<(String, String)> {
    let mut out = Vec::new();
    let mut pauses: Vec<f64> = moved.iter().filter_map(|m| m.fence_pause_us).collect();
    pauses.sort_by(f64::total_cmp);
    if let Some(p50) = pauses.get(pauses.len() / 2) {
        let of = match pauses.len() {
            1 => "fence pause".to_owned(),
            n => format!("median fence pause of {n}"),
        };
        let what = format!("{of}: last source step done to destination may launch");
        out.push((micros(*p50), what));
    }
    if let Some((flip, usual)) = report.requests.iter().find_map(gap) {
        let what = format!(
            "between two tokens at the client, across the flip; {} is usual",
            micros(usual)
        );
        out.push((micros(flip), what));
    }
    let (verified, pages) = moved
        .iter()
        .fold((0, 0), |a, m| (a.0 + m.pages_verified, a.1 + m.pages));
    out.push((
        format!("{} / {}", thousands(verified), thousands(pages)),
        "pages verified in the destination's own memory".into(),
    ));
    let (streamed, fenced): (u64, u64) = moved
        .iter()
        .fold((0, 0), |a, m| (a.0 + m.stream_bytes, a.1 + m.fence_bytes));
    out.push((
        bytes(streamed + fenced),
        format!("of KV moved, {} of it inside the fence", bytes(fenced)),
    ));
    let tokens: usize = report.requests.iter().map(|r| r.tokens.len()).sum();
    let word = match report.requests.iter().all(|r| r.identical) {
        true => "identical",
        false => "different",
    };
    out.push((
        word.into(),
        format!(
            "{} tokens, byte for byte against a run that stayed",
            thousands(tokens as u64)
        ),
    ));
    out
}

/// The client's gap across the flip and the median of its other gaps, in microseconds.
fn gap(request: &Request) -> Option<(f64, f64)> {
    let migration = request.migration.as_ref().filter(|m| m.committed)?;
    let mut usual = Vec::new();
    let mut flip = None;
    for pair in request.tokens.windows(2) {
        let gap = pair[1].at_us - pair[0].at_us;
        match pair[1].seq == migration.seal + 1 {
            true => flip = Some(gap),
            false => usual.push(gap),
        }
    }
    usual.sort_by(f64::total_cmp);
    Some((flip?, *usual.get(usual.len() / 2)?))
}

/// The first eight characters of an id: enough to tell a few apart.
fn short(id: &str) -> &str {
    id.char_indices().nth(8).map_or(id, |(end, _)| &id[..end])
}

fn section(i: usize, of: usize, request: &Request, out: &mut String) {
    let _ = write!(out, "<section id=\"r{i}\">");
    if of > 1 {
        let _ = write!(
            out,
            "<h1 style=\"margin-top:52px\">Request <code>{}</code></h1>",
            escape(&request.id)
        );
    }
    if let Some(migration) = &request.migration {
        lines(request, migration, out);
    }
    stream(request, out);
    out.push_str("</section>\n");
}

fn lines(request: &Request, m: &Migration, out: &mut String) {
    let (from, to) = (escape(&m.from), escape(&m.to));
    let end = match m.committed {
        true => format!(
            "{} leaves hashed there inside the fence",
            thousands(m.fence_leaves)
        ),
        false => format!("rolled back: {}; {from} went on", escape(&m.cause)),
    };
    let prompt = request
        .prompt_tokens
        .map(|n| format!("{} tokens of prompt, ", thousands(n)))
        .unwrap_or_default();
    let _ = write!(
        out,
        "<h2>From {from} to {to}</h2><p class=\"note\">{prompt}{} tokens of KV at the \
         seal; {end}. Time runs from the first phase; each mark in the last lane is a token that \
         reached the client.</p><div class=\"card\">{}</div><div class=\"key\">\
         <span><i style=\"background:var(--src)\"></i>source</span>\
         <span><i style=\"background:var(--dst)\"></i>destination</span>\
         <span><i style=\"background:var(--gw)\"></i>gateway and store</span>\
         <span><i style=\"background:var(--co)\"></i>coordinator</span>\
         <span><i style=\"background:var(--fence)\"></i>fenced</span></div>",
        thousands(m.kv_tokens),
        timeline::whole(request, m)
    );
    let enlarged = timeline::fence(m);
    if !enlarged.is_empty() {
        let _ = write!(
            out,
            "<h2>Inside the fence</h2><p class=\"note\">The same clock, enlarged: from the source's \
             last finished step until the destination may launch.</p><div class=\"card\">{enlarged}</div>"
        );
    }
}

fn stream(request: &Request, out: &mut String) {
    let flip = request.migration.as_ref().filter(|m| m.committed);
    let note = match (flip, request.identical) {
        (Some(m), true) => format!(
            "Blue was decoded by {}, orange by {}. The client saw one stream, equal byte for byte to that of a run without a migration.",
            escape(&m.from),
            escape(&m.to)
        ),
        (None, true) => "Equal byte for byte to that of a run without a migration.".to_owned(),
        (_, false) => "It differs from that of a run without a migration.".to_owned(),
    };
    let _ = write!(
        out,
        "<h2>The stream</h2><p class=\"note\">{note} Point at a token for its number and time.</p>\
         <div class=\"card\"><p class=\"stream\">"
    );
    for token in &request.tokens {
        let after = flip.is_some_and(|m| token.seq > m.seal);
        if let Some(m) = flip.filter(|m| token.seq == m.seal + 1) {
            let _ = write!(
                out,
                "<span class=\"mark\">{} to {} after token {}</span>",
                escape(&m.from),
                escape(&m.to),
                m.seal
            );
        }
        let class = match after {
            true => 'd',
            false => 's',
        };
        let _ = write!(
            out,
            "<span class=\"{class}\" title=\"token {}, id {}, {}\">{}</span>",
            token.seq,
            token.token,
            micros(token.at_us),
            escape(&token.text)
        );
    }
    out.push_str("</p></div>");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(name: &str, lane: Lane, from_us: f64, to_us: f64) -> Phase {
        Phase {
            name: name.into(),
            lane,
            from_us,
            to_us,
        }
    }

    fn sample() -> Report {
        let words = [
            "The ",
            "moon ",
            "<is> ",
            "up; ",
            "a\u{301} ",
            "tide ",
            "turns\n",
        ];
        let tokens = (0..160u64)
            .map(|i| Token {
                seq: i + 1,
                token: 300 + i as u32,
                text: words[i as usize % words.len()].into(),
                at_us: 2_000.0 * i as f64 + if i >= 80 { 600.0 } else { 0.0 },
            })
            .collect();
        let at = 160_400.0;
        Report {
            pass: true,
            cause: String::new(),
            command: "moonlive demo --report a.html".into(),
            model: "reference model, small".into(),
            transport: "tcp".into(),
            verify: "resident".into(),
            machine: "2 x AMD EPYC".into(),
            requests: vec![Request {
                id: "5f0c0a6d9b3e41d7a1".into(),
                prompt_tokens: Some(512),
                identical: true,
                tokens,
                migration: Some(Migration {
                    from: "w0".into(),
                    to: "w1".into(),
                    committed: true,
                    cause: String::new(),
                    seal: 80,
                    kv_tokens: 591,
                    fence_pause_us: Some(412.0),
                    phases: vec![
                        phase("prepare", Lane::Coordinator, 100_000.0, 103_100.0),
                        phase("pin", Lane::Source, 103_200.0, 104_000.0),
                        phase("reserve", Lane::Destination, 104_000.0, 106_500.0),
                        phase("stream", Lane::Source, 106_500.0, 159_000.0),
                        phase("pull and verify", Lane::Destination, 107_000.0, 159_500.0),
                        phase("go", Lane::Coordinator, 159_700.0, 159_800.0),
                        phase("fence", Lane::Source, at, at + 120.0),
                        phase("arm", Lane::Destination, at + 150.0, at + 230.0),
                        phase("commit", Lane::Gateway, at + 230.0, at + 410.0),
                        phase("decode", Lane::Destination, at + 412.0, at + 9_000.0),
                    ],
                    fence: vec![
                        phase("export control", Lane::Source, at, at + 40.0),
                        phase("hash tail", Lane::Source, at + 40.0, at + 70.0),
                        phase("push", Lane::Source, at + 70.0, at + 130.0),
                        phase(
                            "land and hash tail",
                            Lane::Destination,
                            at + 130.0,
                            at + 180.0,
                        ),
                        phase("import control", Lane::Destination, at + 180.0, at + 225.0),
                        phase("arm", Lane::Destination, at + 225.0, at + 232.0),
                        phase("compare-and-swap", Lane::Gateway, at + 232.0, at + 402.0),
                        phase("launch", Lane::Destination, at + 402.0, at + 412.0),
                    ],
                    pages: 38,
                    pages_verified: 38,
                    fence_leaves: 112,
                    stream_bytes: 1_228_000,
                    fence_bytes: 14_336,
                }),
            }],
        }
    }

    #[test]
    fn the_page_needs_nothing_but_itself() {
        let page = render(&sample()).unwrap();
        for loads in ["http://", "https://", "src=", "url(", "@import", "<link"] {
            assert!(!page.contains(loads), "it would load something: {loads}");
        }
        for part in [
            "PASS",
            "412 us",
            "38 / 38",
            "w0 to w1 after token 80",
            "identical",
            "<svg",
        ] {
            assert!(page.contains(part), "no {part:?}");
        }
        if let Some(file) = std::env::var_os("MOONLIVE_KEEP_REPORT") {
            write(&sample(), Path::new(&file)).unwrap();
        }
    }

    #[test]
    fn model_text_is_shown_and_never_run() {
        let mut report = sample();
        report.requests[0].tokens[3].text = "</script><script>alert(1)</script>".into();
        let page = render(&report).unwrap();
        assert_eq!(page.matches("<script").count(), 1);
        assert_eq!(page.matches("</script>").count(), 1);
        assert!(page.contains("&lt;/script&gt;"));
    }

    #[test]
    fn a_stream_that_differs_is_shown_as_different() {
        let mut report = sample();
        report.pass = false;
        report.requests[0].identical = false;
        if let Some(m) = &mut report.requests[0].migration {
            m.pages_verified = 36;
        }
        let page = render(&report).unwrap();
        assert!(page.contains("FAIL") && page.contains("36 / 38") && page.contains("different"));
        assert!(page.contains("It differs from that of a run"));
    }

    #[test]
    fn the_gap_at_the_flip_is_told_apart_from_the_usual_ones() {
        let (flip, usual) = gap(&sample().requests[0]).unwrap();
        assert_eq!((flip, usual), (2_600.0, 2_000.0));
    }
}
