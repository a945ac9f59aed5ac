//! Reads Rust sources as far as the house's rules need: words, paths, what is test code.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, PartialEq)]
pub enum Token {
    Word(String),
    Sign(char),
}

/// Identifiers and punctuation of a source text; comments, strings, characters, lifetimes dropped.
fn lex(text: &str) -> Vec<Token> {
    let c: Vec<char> = text.chars().collect();
    let at = |i: usize| c.get(i).copied().unwrap_or('\0');
    let mut out = Vec::new();
    let mut i = 0;
    while i < c.len() {
        match c[i] {
            '/' if at(i + 1) == '/' => {
                while i < c.len() && c[i] != '\n' {
                    i += 1;
                }
            }
            '/' if at(i + 1) == '*' => {
                let mut depth = 0;
                loop {
                    match (at(i), at(i + 1)) {
                        ('/', '*') => (depth, i) = (depth + 1, i + 2),
                        ('*', '/') => (depth, i) = (depth - 1, i + 2),
                        _ => i += 1,
                    }
                    if depth == 0 || i >= c.len() {
                        break;
                    }
                }
            }
            '"' => i = after_string(&c, i),
            // A raw string: r, any number of #, a quote. Anything else after r is a word.
            'r' | 'b' if raw_string(&c, i).is_some() => i = raw_string(&c, i).unwrap(),
            'b' if at(i + 1) == '"' => i = after_string(&c, i + 1),
            '\'' => {
                if at(i + 1) == '\\' {
                    i += 3;
                    while i < c.len() && c[i] != '\'' {
                        i += 1;
                    }
                    i += 1;
                } else if at(i + 2) == '\'' {
                    i += 3;
                } else {
                    // A lifetime: its word is of no interest.
                    i += 1;
                    while at(i).is_alphanumeric() || at(i) == '_' {
                        i += 1;
                    }
                }
            }
            x if x.is_alphabetic() || x == '_' => {
                let from = i;
                while at(i).is_alphanumeric() || at(i) == '_' {
                    i += 1;
                }
                out.push(Token::Word(c[from..i].iter().collect()));
            }
            x => {
                if !x.is_whitespace() {
                    out.push(Token::Sign(x));
                }
                i += 1;
            }
        }
    }
    out
}

fn after_string(c: &[char], mut i: usize) -> usize {
    i += 1;
    while i < c.len() && c[i] != '"' {
        i += if c[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

/// The end of the raw string that starts at `i`, if one does.
fn raw_string(c: &[char], i: usize) -> Option<usize> {
    if i > 0 && (c[i - 1].is_alphanumeric() || c[i - 1] == '_') {
        return None;
    }
    let mut from = i;
    if c[from] == 'b' {
        from += 1;
    }
    if c.get(from) != Some(&'r') {
        return None;
    }
    let hashes = c[from + 1..].iter().take_while(|x| **x == '#').count();
    if c.get(from + 1 + hashes) != Some(&'"') {
        return None;
    }
    let mut end = from + 2 + hashes;
    while end < c.len() {
        let closed = c[end] == '"' && c[end + 1..].iter().take(hashes).all(|x| *x == '#');
        end += 1;
        if closed {
            return Some(end + hashes);
        }
    }
    Some(end)
}

pub fn is_word(token: Option<&Token>, word: &str) -> bool {
    matches!(token, Some(Token::Word(w)) if w == word)
}

fn is_sign(token: Option<&Token>, sign: char) -> bool {
    token == Some(&Token::Sign(sign))
}

fn is_path_sep(tokens: &[Token], i: usize) -> bool {
    is_sign(tokens.get(i), ':') && is_sign(tokens.get(i + 1), ':')
}

/// The index after the group that opens at `open`.
fn after_group(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0i32;
    for (i, token) in tokens.iter().enumerate().skip(open) {
        match token {
            Token::Sign('{' | '(' | '[') => depth += 1,
            Token::Sign('}' | ')' | ']') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return i + 1;
        }
    }
    tokens.len()
}

/// Drops every item under `#[cfg(test)]`; returns also the file modules declared under it.
fn without_tests(tokens: &[Token]) -> (Vec<Token>, Vec<String>) {
    let marker = lex("#[cfg(test)]");
    let (mut out, mut modules) = (Vec::new(), Vec::new());
    let mut i = 0;
    while i < tokens.len() {
        if !tokens[i..].starts_with(&marker) {
            out.push(tokens[i].clone());
            i += 1;
            continue;
        }
        i += marker.len();
        // Other attributes, then the item up to its body or semicolon.
        while is_sign(tokens.get(i), '#') {
            i = after_group(tokens, i + 1);
        }
        let from = i;
        while i < tokens.len() && !is_sign(tokens.get(i), '{') && !is_sign(tokens.get(i), ';') {
            i = match tokens[i] {
                Token::Sign('(' | '[') => after_group(tokens, i),
                _ => i + 1,
            };
        }
        let name = tokens[from..i]
            .windows(2)
            .find(|w| is_word(w.first(), "mod"));
        match (name, is_sign(tokens.get(i), ';')) {
            (Some([_, Token::Word(name)]), true) => {
                modules.push(name.clone());
                i += 1;
            }
            // `use a::{b};` ends at its semicolon, everything else at its body's end.
            _ if is_word(tokens.get(from), "use") => {
                while i < tokens.len() && !is_sign(tokens.get(i), ';') {
                    i += 1;
                }
                i += 1;
            }
            (_, true) => i += 1,
            (_, false) => i = after_group(tokens, i),
        }
    }
    (out, modules)
}

/// Full paths that begin at a word: `a::{b, c::d}` gives `a::b` and `a::c::d`.
fn paths(tokens: &[Token], i: usize) -> Vec<Vec<String>> {
    let Some(Token::Word(head)) = tokens.get(i) else {
        return Vec::new();
    };
    if !is_path_sep(tokens, i + 1) {
        return vec![vec![head.clone()]];
    }
    let rest = i + 3;
    let tails: Vec<Vec<String>> = if is_sign(tokens.get(rest), '{') {
        let end = after_group(tokens, rest);
        let mut tails = Vec::new();
        let mut k = rest + 1;
        while k < end {
            tails.extend(paths(tokens, k));
            // To the next entry of this group.
            while k < end && !is_sign(tokens.get(k), ',') {
                k = match tokens[k] {
                    Token::Sign('{') => after_group(tokens, k),
                    _ => k + 1,
                };
            }
            k += 1;
        }
        tails
    } else {
        paths(tokens, rest)
    };
    if tails.is_empty() {
        return vec![vec![head.clone()]];
    }
    tails
        .into_iter()
        .map(|tail| std::iter::once(head.clone()).chain(tail).collect())
        .collect()
}

/// Every path in a file, with `crate`, `moonlivekv`, `self` and `super` resolved against the file's
/// own module. Paths of ours start with `crate`.
fn resolved_paths(tokens: &[Token], module: &[String]) -> Vec<Vec<String>> {
    let mut out = Vec::new();
    // Inline modules around the place we are at, with the depth of braces each closes at.
    let mut inline: Vec<(String, i32)> = Vec::new();
    let mut depth = 0;
    for i in 0..tokens.len() {
        match &tokens[i] {
            Token::Sign('{') => {
                depth += 1;
                if let (Some(Token::Word(name)), true) = (
                    i.checked_sub(1).and_then(|p| tokens.get(p)),
                    i >= 2 && is_word(tokens.get(i - 2), "mod"),
                ) {
                    inline.push((name.clone(), depth));
                }
            }
            Token::Sign('}') => {
                inline.retain(|(_, at)| *at < depth);
                depth -= 1;
            }
            Token::Word(_) if i >= 2 && is_path_sep(tokens, i - 2) => {}
            Token::Word(_) => {
                for path in paths(tokens, i) {
                    let here = module.iter().chain(inline.iter().map(|(name, _)| name));
                    out.extend(resolve(path, here.cloned().collect()));
                }
            }
            Token::Sign(_) => {}
        }
    }
    out
}

fn resolve(path: Vec<String>, here: Vec<String>) -> Option<Vec<String>> {
    let mut rest = path.as_slice();
    let mut base = match rest[0].as_str() {
        "crate" | "moonlivekv" => Vec::new(),
        "self" | "super" => here,
        _ => return (path.len() > 1).then_some(path),
    };
    if matches!(rest[0].as_str(), "crate" | "moonlivekv" | "self") {
        rest = &rest[1..];
    }
    while rest.first().is_some_and(|s| s == "super") {
        base.pop();
        rest = &rest[1..];
    }
    let crate_ = std::iter::once("crate".to_owned());
    Some(crate_.chain(base).chain(rest.iter().cloned()).collect())
}

pub struct File {
    /// `src/page/view.rs`.
    pub name: String,
    /// `page`; `id` and `lib` for the files at the top; `bin` for programs.
    pub room: String,
    pub lines: usize,
    /// All code, tests included.
    pub tokens: Vec<Token>,
    /// Paths of the code that is not test code; empty for a test file.
    pub paths: Vec<Vec<String>>,
}

pub fn source_files(root: &Path) -> Vec<File> {
    let mut names = Vec::new();
    let mut pending = vec![root.join("src")];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                pending.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                names.push(path.strip_prefix(root).unwrap().to_path_buf());
            }
        }
    }
    names.sort();
    let texts: Vec<(PathBuf, String)> = names
        .into_iter()
        .map(|n| (n.clone(), fs::read_to_string(root.join(n)).unwrap()))
        .collect();
    let mut test_files = BTreeSet::new();
    for (name, text) in &texts {
        let dir = match name.file_stem().unwrap().to_str().unwrap() {
            "mod" | "lib" | "main" => name.parent().unwrap().to_path_buf(),
            stem => name.parent().unwrap().join(stem),
        };
        for module in without_tests(&lex(text)).1 {
            test_files.insert(dir.join(format!("{module}.rs")));
            test_files.insert(dir.join(&module));
        }
    }
    texts
        .into_iter()
        .map(|(name, text)| {
            let is_test = name.ancestors().any(|a| test_files.contains(a));
            read_file(&name, &text, is_test)
        })
        .collect()
}

pub fn read_file(name: &Path, text: &str, is_test: bool) -> File {
    let mut module: Vec<String> = name
        .with_extension("")
        .iter()
        .skip(1)
        .map(|p| p.to_str().unwrap().to_owned())
        .collect();
    if matches!(
        module.last().map(String::as_str),
        Some("mod" | "lib" | "main")
    ) {
        module.pop();
    }
    let room = module.first().cloned().unwrap_or_else(|| "lib".to_owned());
    if room == "bin" {
        // A program's own `crate::` is its own; only `moonlivekv::` reaches the library.
        module.clear();
    }
    let tokens = lex(text);
    let paths = if is_test {
        Vec::new()
    } else {
        resolved_paths(&without_tests(&tokens).0, &module)
    };
    File {
        name: name.to_str().unwrap().to_owned(),
        room,
        lines: text.lines().count(),
        tokens,
        paths,
    }
}

/// Rooms that a file uses, other than its own and `id`.
pub fn rooms_used(file: &File) -> BTreeSet<String> {
    file.paths
        .iter()
        .filter(|p| p[0] == "crate" && p.len() > 1)
        .map(|p| p[1].clone())
        .filter(|r| *r != file.room && r != "id")
        .collect()
}

pub fn starts_with(path: &[String], prefix: &str) -> bool {
    let prefix: Vec<&str> = prefix.split("::").collect();
    path.len() >= prefix.len() && path.iter().zip(&prefix).all(|(a, b)| a == b)
}

// ---- the reader itself ---------------------------------------------------------------------------

fn used(name: &str, text: &str) -> Vec<String> {
    let file = read_file(Path::new(name), text, false);
    rooms_used(&file).into_iter().collect()
}

#[test]
fn the_reader_sees_every_way_to_reach_another_room() {
    for (name, text) in [
        ("src/page/view.rs", "use crate::mem::Region;"),
        ("src/page/view.rs", "use crate::{id::X, mem::{self, Y}};"),
        ("src/page/view.rs", "use { crate::mem::Z };"),
        (
            "src/page/view.rs",
            "pub(crate) use super::super::mem::Region;",
        ),
        ("src/page/mod.rs", "use super::mem::Region;"),
        ("src/page/mod.rs", "use super::{mem};"),
        ("src/page/mod.rs", "mod inner { use super::super::mem; }"),
        ("src/page/a/b.rs", "use super::super::super::mem as m;"),
        ("src/page/view.rs", "fn f() { crate::mem::g::<u8>() }"),
        ("src/page/view.rs", "m!(x, crate::mem::g());"),
        (
            "src/page/view.rs",
            "macro_rules! m { () => { $crate::mem::g() } }",
        ),
        ("src/page/view.rs", "use moonlivekv::mem::Region;"),
        (
            "src/page/view.rs",
            "/* a /* b */ c */ use crate::mem::R; // x",
        ),
        (
            "src/page/view.rs",
            "const A: &str = r#\"\"\"#; use crate::mem::R;",
        ),
        (
            "src/page/view.rs",
            "const A: char = '\"'; use crate::mem::R;",
        ),
        (
            "src/page/view.rs",
            "#[cfg(test)] mod tests; use crate::mem::R;",
        ),
        (
            "src/page/view.rs",
            "#[cfg(test)] use crate::a::{b}; use crate::mem::R;",
        ),
    ] {
        assert_eq!(used(name, text), ["mem"], "{name}: {text}");
    }
}

#[test]
fn the_reader_is_not_fooled_by_text_or_own_paths() {
    for text in [
        "//! See [`crate::mem`].\n/// `use crate::mem::R;`\nfn f() {}",
        "const A: &str = \"crate::mem::R \\\" crate::wire\";",
        "const A: &str = r#\"crate::mem::R\"#;",
        "const A: &[u8] = b\"crate::mem::R\";",
        "use super::layout::R; use self::view::mem; use crate::page::mem;",
        "fn f<'mem>(x: &'mem u8) { other::mem::g() }",
        "#[cfg(test)] mod tests { use crate::mem::R; fn f() { crate::wire::g() } }",
        "#[cfg(test)] #[path = \"x\"] mod tests { use crate::mem::R; }",
        "mod a { mod b { use super::super::mem; } }",
    ] {
        assert_eq!(used("src/page/view.rs", text), [""; 0], "{text}");
    }
}

#[test]
fn the_reader_sees_impure_paths() {
    for text in [
        "use std::time::{Duration, Instant};",
        "fn f() { std::fs::read(\"x\"); }",
        "use std::{thread, fmt};",
    ] {
        let file = read_file(Path::new("src/page/view.rs"), text, false);
        let seen = |bad: &&str| file.paths.iter().any(|p| starts_with(p, bad));
        let known = ["std::time::Instant", "std::fs", "std::thread"];
        assert!(known.iter().any(seen), "{text}");
    }
    let file = read_file(
        Path::new("src/page/view.rs"),
        "use std::time::Duration;",
        false,
    );
    let instant = |p: &Vec<String>| starts_with(p, "std::time::Instant");
    assert!(!file.paths.iter().any(instant));
}
