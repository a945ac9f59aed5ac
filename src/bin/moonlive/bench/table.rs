//! Rows for a human: aligned columns, only those that some row fills, never wider than a terminal.

use super::row::Row;

/// Widest line, in characters.
const WIDTH: usize = 100;

struct Column {
    head: &'static str,
    right: bool,
    cell: fn(&Row) -> String,
}

const COLUMNS: [Column; 9] = [
    Column {
        head: "case",
        right: false,
        cell: |r| r.case.clone(),
    },
    Column {
        head: "value",
        right: true,
        cell: |r| match r.p50_us {
            Some(v) if v == r.value => String::new(),
            _ => format!("{} {}", number(r.value), r.unit),
        },
    },
    Column {
        head: "p50",
        right: true,
        cell: |r| r.p50_us.map(micros).unwrap_or_default(),
    },
    Column {
        head: "p99",
        right: true,
        cell: |r| r.p99_us.map(micros).unwrap_or_default(),
    },
    Column {
        head: "ratio",
        right: true,
        cell: |r| r.ratio.map(|x| format!("{x:.2}")).unwrap_or_default(),
    },
    Column {
        head: "against",
        right: false,
        cell: |r| r.against.clone().unwrap_or_default(),
    },
    Column {
        head: "",
        right: true,
        cell: |r| match r.against_value {
            Some(v) if r.unit == "us" => micros(v),
            Some(v) => format!("{} {}", number(v), r.unit),
            None => String::new(),
        },
    },
    Column {
        head: "n",
        right: true,
        cell: |r| r.n.to_string(),
    },
    Column {
        head: "others' cpu",
        right: true,
        cell: |r| {
            r.other_cpu
                .map(|x| format!("{:.0} %", x * 100.0))
                .unwrap_or_default()
        },
    },
];

/// The table, with a line above it where the bench's name changes.
pub fn render(rows: &[Row]) -> String {
    let mut out = String::new();
    let mut from = 0;
    while from < rows.len() {
        let bench = rows[from].bench;
        let to = rows[from..]
            .iter()
            .position(|r| r.bench != bench)
            .map_or(rows.len(), |n| from + n);
        section(&rows[from..to], &mut out);
        from = to;
    }
    out
}

fn section(rows: &[Row], out: &mut String) {
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|r| COLUMNS.iter().map(|c| (c.cell)(r)).collect())
        .collect();
    let width: Vec<usize> = (0..COLUMNS.len())
        .map(|i| {
            let widest = cells.iter().map(|c| chars(&c[i])).max().unwrap_or(0);
            match widest {
                0 => 0,
                w => w.max(chars(COLUMNS[i].head)),
            }
        })
        .collect();
    let heads: Vec<String> = COLUMNS.iter().map(|c| c.head.to_owned()).collect();
    if !out.is_empty() {
        out.push('\n');
    }
    line(&heads, &width, out);
    for row in &cells {
        line(row, &width, out);
    }
}

fn line(cells: &[String], width: &[usize], out: &mut String) {
    let mut text = String::new();
    for (i, cell) in cells.iter().enumerate().filter(|(i, _)| width[*i] > 0) {
        if !text.is_empty() {
            text.push_str("  ");
        }
        let pad = " ".repeat(width[i] - chars(cell).min(width[i]));
        match COLUMNS[i].right {
            true => text.extend([pad.as_str(), cell]),
            false => text.extend([cell, pad.as_str()]),
        }
    }
    let kept: String = text.trim_end().chars().take(WIDTH).collect();
    out.push_str(&kept);
    out.push('\n');
}

fn chars(s: &str) -> usize {
    s.chars().count()
}

/// A duration given in microseconds, in the unit that reads best.
pub fn micros(us: f64) -> String {
    match us {
        x if x < 1.0 => format!("{:.0} ns", x * 1e3),
        x if x < 1e4 => format!("{} us", number(x)),
        x if x < 1e7 => format!("{} ms", number(x / 1e3)),
        x => format!("{} s", number(x / 1e6)),
    }
}

/// Three significant digits, no exponent.
pub fn number(x: f64) -> String {
    let places = match x.abs() {
        a if a >= 99.95 => 0,
        a if a >= 9.995 => 1,
        _ => 2,
    };
    format!("{x:.places$}")
}

/// A size in bytes: `64KiB`, `1MiB`, `896KiB`.
pub fn bytes(n: u64) -> String {
    for (unit, suffix) in [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if n >= unit && n.is_multiple_of(unit) {
            return format!("{}{suffix}", n / unit);
        }
    }
    format!("{n}B")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::stats::Summary;

    #[test]
    fn columns_line_up_and_empty_ones_vanish() {
        let rows = [
            Row::rate("transfer", "tcp/get/64KiB", 1.234, 5).against(
                "raw acked send loop",
                1.5,
                0.822,
            ),
            Row::rate("transfer", "shm/get/1MiB", 12.3, 5),
        ];
        let text = render(&rows);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(!text.contains("p99"), "{text}");
        assert_eq!(lines[1].find("1.23 GB/s"), Some(15), "{text}");
        assert_eq!(lines[2].find("12.3 GB/s"), Some(15), "{text}");
    }

    #[test]
    fn no_line_is_wider_than_a_terminal() {
        let row = Row::latency("fence", "x".repeat(300), &Summary::of(vec![1]));
        assert!(render(&[row]).lines().all(|l| l.chars().count() <= WIDTH));
    }

    #[test]
    fn sizes_and_durations_read_like_words() {
        assert_eq!(
            (bytes(4096), bytes(896 << 10), bytes(1 << 20), bytes(100)),
            ("4KiB".into(), "896KiB".into(), "1MiB".into(), "100B".into())
        );
        assert_eq!(
            (micros(0.25), micros(312.4), micros(12_340.0)),
            ("250 ns".into(), "312 us".into(), "12.3 ms".into())
        );
    }
}
