//! The requests that clients wait for: each a log of accepted tokens, readers behind it at their
//! own pace. Threads append, tasks read; a slow client never holds up the acceptor.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::id::RequestId;

/// One accepted output token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// The token.
    pub token: u32,
    /// Text that became certain with it.
    pub text: String,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// A stop string, stop id or end of sequence.
    Stop,
    /// The token bound was reached.
    Length,
    /// The client went away, or somebody aborted it.
    Abort,
    /// It could not be served to its end.
    Failed,
}

impl End {
    /// OpenAI's `finish_reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Failed => "error",
        }
    }
}

#[derive(Debug, Default)]
struct Log {
    tokens: Vec<Accepted>,
    end: Option<End>,
    delivered: u64,
    prompt_tokens: u32,
    ended_at: Option<Instant>,
}

/// What a reader sees change: tokens accepted, and whether there will be more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Head {
    accepted: u64,
    ended: bool,
}

/// One request as its client sees it.
#[derive(Debug)]
pub struct Live {
    /// Its name.
    pub request: RequestId,
    log: Mutex<Log>,
    head: watch::Sender<Head>,
    /// Fingerprint of what was asked; not known of a request taken up from the journal.
    asked: OnceLock<[u8; 32]>,
}

impl Live {
    /// Remembers what was asked for.
    pub fn asked_as(&self, fingerprint: [u8; 32]) {
        let _ = self.asked.set(fingerprint);
    }

    /// Whether that was asked for, as far as is known.
    pub fn is_asked_as(&self, fingerprint: &[u8; 32]) -> bool {
        self.asked.get().is_none_or(|asked| asked == fingerprint)
    }

    fn new(request: RequestId) -> Self {
        Self {
            request,
            log: Mutex::default(),
            head: watch::Sender::new(Head::default()),
            asked: OnceLock::new(),
        }
    }

    /// Appends token number `seq`, which must be the next; `false` where it is not.
    pub fn append(&self, seq: u64, token: Accepted) -> bool {
        let mut log = self.log.lock();
        if seq != log.tokens.len() as u64 + 1 || log.end.is_some() {
            return false;
        }
        log.tokens.push(token);
        drop(log);
        self.head.send_modify(|h| h.accepted = h.accepted.max(seq));
        true
    }

    /// Ends the log. The first end stays.
    pub fn end(&self, end: End) -> bool {
        let mut log = self.log.lock();
        if log.end.is_some() {
            return false;
        }
        log.end = Some(end);
        log.ended_at = Some(Instant::now());
        drop(log);
        self.head.send_modify(|h| h.ended = true);
        true
    }

    /// Token number `seq`, if accepted.
    pub fn get(&self, seq: u64) -> Option<Accepted> {
        let index = usize::try_from(seq.checked_sub(1)?).ok()?;
        self.log.lock().tokens.get(index).cloned()
    }

    /// Output tokens accepted, journaled before they got here: the cursor J.
    pub fn accepted(&self) -> u64 {
        self.log.lock().tokens.len() as u64
    }

    /// How it ended, if it has.
    pub fn ended(&self) -> Option<End> {
        self.log.lock().end
    }

    /// Raises the cursor D: tokens up to `seq` were handed to the client's connection.
    pub fn delivered_through(&self, seq: u64) {
        let mut log = self.log.lock();
        let accepted = log.tokens.len() as u64;
        log.delivered = log.delivered.max(seq.min(accepted));
    }

    /// The cursor D.
    pub fn delivered(&self) -> u64 {
        self.log.lock().delivered
    }

    /// Tokens of the prompt, as the worker counted them.
    pub fn prompt_tokens(&self) -> u32 {
        self.log.lock().prompt_tokens
    }

    /// Sets the prompt's length.
    pub fn set_prompt_tokens(&self, n: u32) {
        self.log.lock().prompt_tokens = n;
    }

    /// A cursor before token `from`.
    pub fn reader(self: &Arc<Self>, from: u64) -> Reader {
        Reader {
            live: Arc::clone(self),
            next: from.max(1),
            head: self.head.subscribe(),
        }
    }
}

/// What a reader gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// A token and its number.
    Token(u64, Accepted),
    /// No more will come.
    End(End),
}

/// Reads one request's tokens in order.
#[derive(Debug)]
pub struct Reader {
    live: Arc<Live>,
    next: u64,
    head: watch::Receiver<Head>,
}

impl Reader {
    /// Waits for the next token or the end.
    pub async fn next(&mut self) -> Next {
        loop {
            // Marked as seen before the log is looked at: a change after that look wakes us.
            self.head.borrow_and_update();
            if let Some(token) = self.live.get(self.next) {
                let seq = self.next;
                self.next += 1;
                return Next::Token(seq, token);
            }
            if let Some(end) = self.live.ended() {
                // The log takes no token after its end, so a last look suffices.
                match self.live.get(self.next) {
                    Some(_) => continue,
                    None => return Next::End(end),
                }
            }
            if self.head.changed().await.is_err() {
                return Next::End(End::Failed);
            }
        }
    }
}

/// All requests the gateway knows.
#[derive(Debug, Default)]
pub struct Hub {
    live: Mutex<HashMap<RequestId, Arc<Live>>>,
}

impl Hub {
    /// Finds a request.
    pub fn get(&self, request: RequestId) -> Option<Arc<Live>> {
        self.live.lock().get(&request).cloned()
    }

    /// Adds a request; `Err` with the one that has the name already.
    pub fn add(&self, request: RequestId) -> Result<Arc<Live>, Arc<Live>> {
        let mut live = self.live.lock();
        if let Some(old) = live.get(&request) {
            return Err(Arc::clone(old));
        }
        let new = Arc::new(Live::new(request));
        live.insert(request, Arc::clone(&new));
        Ok(new)
    }

    /// Forgets a request.
    pub fn remove(&self, request: RequestId) {
        self.live.lock().remove(&request);
    }

    /// Every request known.
    pub fn all(&self) -> Vec<Arc<Live>> {
        self.live.lock().values().cloned().collect()
    }

    /// Requests that have not ended.
    pub fn active(&self) -> usize {
        self.live
            .lock()
            .values()
            .filter(|l| l.ended().is_none())
            .count()
    }

    /// Forgets requests that ended before `then`; returns their names.
    pub fn forget_ended_before(&self, then: Instant) -> Vec<RequestId> {
        let mut live = self.live.lock();
        let old: Vec<RequestId> = live
            .iter()
            .filter(|(_, l)| l.log.lock().ended_at.is_some_and(|t| t < then))
            .map(|(id, _)| *id)
            .collect();
        for id in &old {
            live.remove(id);
        }
        old
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(t: u32) -> Accepted {
        Accepted {
            token: t,
            text: format!("{t} "),
        }
    }

    #[test]
    fn a_log_takes_the_next_number_only_and_nothing_after_its_end() {
        let live = Live::new(RequestId([1; 16]));
        assert!(live.append(1, token(5)));
        assert!(!live.append(1, token(5)));
        assert!(!live.append(3, token(5)));
        assert!(live.end(End::Stop));
        assert!(!live.end(End::Failed));
        assert!(!live.append(2, token(6)));
        assert_eq!(live.ended(), Some(End::Stop));
    }

    #[test]
    fn delivered_never_passes_accepted_and_never_falls() {
        let live = Live::new(RequestId([1; 16]));
        live.append(1, token(5));
        live.delivered_through(7);
        assert_eq!(live.delivered(), 1);
        live.delivered_through(0);
        assert_eq!(live.delivered(), 1);
    }

    #[test]
    fn a_reader_sees_every_token_then_the_end_while_another_thread_appends() {
        let live = Arc::new(Live::new(RequestId([1; 16])));
        let writer = Arc::clone(&live);
        let thread = std::thread::spawn(move || {
            for seq in 1..=500 {
                assert!(writer.append(seq, token(seq as u32)));
            }
            writer.end(End::Length);
        });
        let rt = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        rt.block_on(async {
            let mut reader = live.reader(1);
            for seq in 1..=500 {
                assert_eq!(reader.next().await, Next::Token(seq, token(seq as u32)));
            }
            assert_eq!(reader.next().await, Next::End(End::Length));
        });
        thread.join().unwrap();
    }
}
