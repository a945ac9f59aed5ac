//! From tokens to text: split characters wait for their rest, possible stop strings are held back.
//!
//! Invariant: the text of a token sequence is a function of the sequence and of [`StopParams`]
//! alone, and so are all offsets here; replaying the tokens rebuilds every field.

use super::spec::StopParams;

/// The front-end state of one request: ControlStateV1 fields 16 and 17.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Front {
    /// First bytes of a character that is not complete; at most 3.
    pub pending: Vec<u8>,
    /// Text that may yet become a stop string.
    pub held: String,
    /// Output tokens whose text is complete: the first one with bytes in `pending`, or all.
    pub prefix_offset: u32,
    /// Output tokens read.
    pub read_offset: u32,
    /// The last token was a marker.
    pub last_special: bool,
    /// Bytes of text handed out.
    pub sent_bytes: u64,
    /// Tokens handed out, which is also the number of the last event.
    pub sent_tokens: u64,
}

/// What a token brought.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Pushed {
    /// Text to hand out now.
    pub text: String,
    /// A stop string was completed.
    pub stopped: bool,
}

impl Front {
    /// Reads one output token. `last` says that the output ends with it for another reason than a
    /// stop string: nothing is held back then. `check` is false while it is too early to stop.
    pub(crate) fn push(
        &mut self,
        bytes: &[u8],
        special: bool,
        stop: &StopParams,
        check: bool,
        last: bool,
    ) -> Pushed {
        let index = self.read_offset;
        self.read_offset += 1;
        self.sent_tokens += 1;
        self.last_special = special;
        let silent = special && stop.skip_special;
        let mut text = std::mem::take(&mut self.held);
        let old = text.len();
        if !silent {
            self.decode(bytes, index, &mut text);
        } else if self.pending.is_empty() {
            self.prefix_offset = self.read_offset;
        }
        if last && !self.pending.is_empty() {
            self.pending.clear();
            self.prefix_offset = self.read_offset;
            text.push(char::REPLACEMENT_CHARACTER);
        }
        let mut stopped = false;
        if check && let Some((at, len)) = first_stop(&text, old, &stop.stop_strings) {
            text.truncate(if stop.include_stop { at + len } else { at });
            self.pending.clear();
            self.prefix_offset = self.read_offset;
            stopped = true;
        } else if check && !last {
            let keep = text.len() - held_back(&text, &stop.stop_strings);
            self.held = text.split_off(keep);
        }
        self.sent_bytes += text.len() as u64;
        Pushed { text, stopped }
    }

    fn decode(&mut self, bytes: &[u8], index: u32, text: &mut String) {
        let mut rest = std::mem::take(&mut self.pending);
        rest.extend_from_slice(bytes);
        let mut rest = &rest[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(all) => {
                    text.push_str(all);
                    self.prefix_offset = self.read_offset;
                    return;
                }
                Err(e) => {
                    let (good, bad) = rest.split_at(e.valid_up_to());
                    text.push_str(std::str::from_utf8(good).unwrap_or_default());
                    match e.error_len() {
                        Some(n) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &bad[n..];
                        }
                        None => {
                            self.pending = bad.to_vec();
                            if bad.len() <= bytes.len() {
                                self.prefix_offset = index;
                            }
                            return;
                        }
                    }
                }
            }
        }
    }
}

/// The stop string that begins first in `text` and ends after `old` bytes; the longer one of two
/// that begin together.
fn first_stop(text: &str, old: usize, stops: &[String]) -> Option<(usize, usize)> {
    let mut best: Option<(usize, usize)> = None;
    for stop in stops.iter().filter(|s| !s.is_empty()) {
        // Held text is a proper prefix of a stop string, so no match ends inside it.
        let mut from = old.saturating_sub(stop.len() - 1);
        while !text.is_char_boundary(from) {
            from -= 1;
        }
        if let Some(at) = text[from..].find(stop.as_str()).map(|i| i + from) {
            let better = best.is_none_or(|(b, len)| at < b || (at == b && stop.len() > len));
            if better {
                best = Some((at, stop.len()));
            }
        }
    }
    best
}

/// Length of the longest end of `text` that a stop string begins with.
fn held_back(text: &str, stops: &[String]) -> usize {
    let mut longest = 0;
    for stop in stops {
        for len in (longest + 1..stop.len().min(text.len() + 1)).rev() {
            if text.as_bytes().ends_with(&stop.as_bytes()[..len]) && stop.is_char_boundary(len) {
                longest = len;
                break;
            }
        }
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(pieces: &[&[u8]], stop: &StopParams) -> (Vec<String>, Front, bool) {
        let mut front = Front::default();
        let mut out = Vec::new();
        for (i, p) in pieces.iter().enumerate() {
            let pushed = front.push(p, false, stop, true, i + 1 == pieces.len());
            out.push(pushed.text);
            if pushed.stopped {
                return (out, front, true);
            }
        }
        (out, front, false)
    }

    #[test]
    fn a_split_character_waits_for_its_rest() {
        let stop = StopParams::default();
        let smile = "🙂".as_bytes();
        let (out, front, _) = run(&[b"a", &smile[..1], &smile[1..3], &smile[3..], b"!"], &stop);
        assert_eq!(out, ["a", "", "", "🙂", "!"]);
        assert_eq!((front.sent_bytes, front.prefix_offset), (6, 5));
        let mut front = Front::default();
        front.push(b"a", false, &stop, true, false);
        front.push(&smile[..1], false, &stop, true, false);
        front.push(&smile[1..3], false, &stop, true, false);
        assert_eq!(front.pending, &smile[..3]);
        assert_eq!((front.prefix_offset, front.read_offset), (1, 3));
    }

    #[test]
    fn bytes_that_are_no_text_become_replacement_characters() {
        let stop = StopParams::default();
        let (out, front, _) = run(&[b"\xf0\x9f", b"x", b"\xff", b"\xe2\x82"], &stop);
        assert_eq!(out, ["", "\u{fffd}x", "\u{fffd}", "\u{fffd}"]);
        assert!(front.pending.is_empty());
    }

    #[test]
    fn a_possible_stop_string_is_held_until_it_is_one_or_not() {
        let stop = StopParams {
            stop_strings: vec!["END".into(), "NDX".into()],
            ..Default::default()
        };
        let (out, _, stopped) = run(&[b"a E", b"N", b"x", b"EN", b"D!"], &stop);
        assert_eq!(out, ["a ", "", "ENx", "", ""]);
        assert!(stopped);
        let (out, _, stopped) = run(&[b"E", b"N"], &stop);
        assert_eq!((out.concat(), stopped), ("EN".into(), false));
        let include = StopParams {
            include_stop: true,
            ..stop
        };
        let (out, front, stopped) = run(&[b"EE", b"ND!"], &include);
        assert_eq!((out.concat().as_str(), stopped), ("EEND", true));
        assert_eq!(front.sent_bytes, 4);
    }

    #[test]
    fn a_stop_string_inside_a_split_character_is_found() {
        let stop = StopParams {
            stop_strings: vec!["é!".into()],
            ..Default::default()
        };
        let (out, front, stopped) = run(&[b"a\xc3", b"\xa9", b"!b"], &stop);
        assert_eq!(out, ["a", "", ""]);
        assert!(stopped && front.held.is_empty());
    }

    #[test]
    fn markers_make_no_text_unless_asked() {
        let mut front = Front::default();
        let stop = StopParams::default();
        let p = front.push(b"<|im_end|>", true, &stop, true, false);
        assert_eq!((p.text.as_str(), front.last_special), ("", true));
        let stop = StopParams {
            skip_special: false,
            ..stop
        };
        let p = front.push(b"<|im_end|>", true, &stop, true, false);
        assert_eq!(p.text, "<|im_end|>");
    }
}
