//! Walking a list of spans as one run of bytes.

use crate::transport::{Local, Span, Transfer, TransportError};

/// A place in the bytes that a list of spans names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Cursor {
    span: usize,
    within: u64,
}

impl Cursor {
    /// Calls `f` with pieces of spans, at most `bytes` in all, until it says stop; gives the place
    /// after the last one taken and the bytes walked.
    pub(super) fn walk(
        self,
        spans: &[Span],
        bytes: u64,
        mut f: impl FnMut(Span) -> bool,
    ) -> (Cursor, u64) {
        let (mut at, mut left) = (self, bytes);
        while let Some(s) = spans.get(at.span).filter(|_| left > 0) {
            let len = (s.len - at.within).min(left);
            let piece = Span {
                remote_off: s.remote_off + at.within,
                local_off: s.local_off + at.within,
                len,
            };
            if !f(piece) {
                break;
            }
            left -= len;
            at.within += len;
            if at.within == s.len {
                at = Cursor {
                    span: at.span + 1,
                    within: 0,
                };
            }
        }
        (at, bytes - left)
    }

    pub(super) fn advance(self, spans: &[Span], bytes: u64) -> Cursor {
        self.walk(spans, bytes, |_| true).0
    }
}

/// What every path checks of a transfer before it takes it; gives its total length.
pub(super) fn check(t: &Transfer) -> Result<u64, TransportError> {
    let bad = |what| Err(TransportError::BadTransfer { what });
    if t.spans.is_empty() {
        return bad("it has no spans");
    }
    let mut total = 0u64;
    for s in &t.spans {
        if s.len == 0 {
            return bad("a span is empty");
        }
        if s.remote_off
            .checked_add(s.len)
            .is_none_or(|end| end > t.remote.len)
        {
            return bad("a span leaves the remote region");
        }
        match &t.local {
            Local::GetInto(w) => w.try_bytes(s.local_off, s.len as usize).map(drop)?,
            Local::PutFrom(r) => r.try_bytes(s.local_off, s.len as usize).map(drop)?,
        }
        match total.checked_add(s.len) {
            Some(sum) => total = sum,
            None => return bad("its length overflows"),
        }
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn walking_in_any_steps_visits_each_byte_once_in_order(
            lens in proptest::collection::vec(1u64..50, 1..10),
            steps in proptest::collection::vec(1u64..40, 1..40),
        ) {
            let mut spans = Vec::new();
            for (i, &len) in lens.iter().enumerate() {
                spans.push(Span { remote_off: 1000 * i as u64, local_off: 7 + 100 * i as u64, len });
            }
            let bytes = |s: Span| (0..s.len).map(move |i| (s.remote_off + i, s.local_off + i));
            let expect: Vec<_> = spans.iter().flat_map(|&s| bytes(s)).collect();
            let (mut seen, mut at) = (Vec::new(), Cursor::default());
            for step in steps.into_iter().chain([u64::MAX]) {
                let before = seen.len();
                let (next, n) = at.walk(&spans, step, |s| { seen.extend(bytes(s)); true });
                prop_assert_eq!(n as usize, seen.len() - before);
                prop_assert_eq!(at.advance(&spans, step), next);
                at = next;
            }
            prop_assert_eq!(seen, expect);
        }
    }
}
