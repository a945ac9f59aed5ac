//! Text into HTML, numbers into words.

/// Escapes text for element content and for quoted attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // Control characters other than white space are not allowed in HTML at all.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// JSON for a `<script>` element: the same value, with nothing that could end the element.
pub fn script_json(value: &impl serde::Serialize) -> Result<String, serde_json::Error> {
    Ok(serde_json::to_string(value)?
        .replace('<', "\\u003c")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029"))
}

/// Microseconds in the unit that reads best.
pub fn micros(us: f64) -> String {
    match us {
        x if x < 999.5 => format!("{x:.0} us"),
        x if x < 9_995.0 => format!("{:.2} ms", x / 1e3),
        x if x < 999_500.0 => format!("{:.1} ms", x / 1e3),
        x => format!("{:.2} s", x / 1e6),
    }
}

/// A number of bytes in binary units.
pub fn bytes(n: u64) -> String {
    match n as f64 {
        x if x >= 1073741824.0 => format!("{:.2} GiB", x / 1073741824.0),
        x if x >= 1048576.0 => format!("{:.1} MiB", x / 1048576.0),
        x if x >= 10240.0 => format!("{:.0} KiB", x / 1024.0),
        x if x >= 1024.0 => format!("{:.1} KiB", x / 1024.0),
        _ => format!("{n} B"),
    }
}

/// `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_a_model_says_becomes_markup() {
        assert_eq!(
            escape("<b a=\"x\" c='y'>&\u{1b}"),
            "&lt;b a=&quot;x&quot; c=&#39;y&#39;&gt;&amp;\u{fffd}"
        );
        let json = script_json(&"</script><!--").unwrap();
        assert!(!json.contains('<'));
        assert_eq!(
            serde_json::from_str::<String>(&json).unwrap(),
            "</script><!--"
        );
    }

    #[test]
    fn figures_read_like_words() {
        assert_eq!(
            (
                micros(311.6),
                micros(1204.0),
                micros(48_200.0),
                micros(2.5e6)
            ),
            (
                "312 us".into(),
                "1.20 ms".into(),
                "48.2 ms".into(),
                "2.50 s".into()
            )
        );
        assert_eq!(
            (
                bytes(900),
                bytes(917_504),
                bytes(3 << 20),
                thousands(1_234_567)
            ),
            (
                "900 B".into(),
                "896 KiB".into(),
                "3.0 MiB".into(),
                "1,234,567".into()
            )
        );
    }
}
