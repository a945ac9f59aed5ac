//! From the engine to the gateway: output tokens, kept until the gateway has journaled them.
//!
//! The engine's driver thread only appends here; one thread of our own sends. What was not
//! journaled is what a fence hands over and what is sent again after a link broke.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::engine::reference::{CloseReason, FinishReason, TokenEvent, TokenSink};
use crate::id::{OwnerEpoch, RequestId};
use crate::migrate::msg::Emission;

/// Most tokens in one message to the gateway.
const BATCH: usize = 256;
/// Wait before a failed send is tried again.
const RETRY: Duration = Duration::from_millis(20);

/// The wire form of why a stream ended.
pub mod finish {
    /// Stop string, stop id or end of sequence.
    pub const STOP: u8 = 0;
    /// A bound was reached.
    pub const LENGTH: u8 = 1;
    /// Aborted.
    pub const ABORT: u8 = 2;
}

/// How tokens leave this process.
pub trait Outlet: Send + Sync {
    /// Sends contiguous tokens; `false` where the link is down.
    fn emit(&self, request: RequestId, epoch: OwnerEpoch, tokens: &[Emission]) -> bool;
    /// Tells that the engine closed a request without a last token.
    fn closed(&self, request: RequestId, epoch: OwnerEpoch, reason: CloseReason);
}

struct Stream {
    epoch: OwnerEpoch,
    /// Not journaled yet, ascending.
    unacked: VecDeque<Emission>,
    /// Sent under this link: tokens up to here need not be sent again unless the link breaks.
    sent: u64,
    acked: u64,
    /// Raised whenever what was sent is taken back: a send that began before does not count.
    round: u64,
    /// Since when the oldest token under way is waited for.
    waiting_since: Instant,
    /// When the last step that made a token was done, on the engine's clock.
    last_step_ns: u64,
    queued: bool,
    seen: bool,
}

#[derive(Default)]
struct State {
    streams: HashMap<RequestId, Stream>,
    ready: VecDeque<RequestId>,
    closed: VecDeque<(RequestId, OwnerEpoch, CloseReason)>,
    stopping: bool,
}

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    wake: Condvar,
}

/// Tokens on their way out.
#[derive(Clone, Default)]
pub struct Emitter {
    inner: Arc<Inner>,
}

/// The sending thread.
pub struct Sending {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

impl TokenSink for Emitter {
    fn token(&self, event: TokenEvent) {
        let finish = event.finish.map(|reason| match reason {
            FinishReason::Stop => finish::STOP,
            FinishReason::Length => finish::LENGTH,
            FinishReason::Abort => finish::ABORT,
        });
        let emission = Emission {
            seq: event.seq,
            token: event.token,
            text: event.text.into_bytes(),
            finish,
        };
        self.push(
            event.request,
            event.owner_epoch,
            [emission],
            event.step_done_ns,
        );
    }

    fn closed(&self, request: RequestId, reason: CloseReason) {
        let mut state = self.inner.state.lock();
        let epoch = match reason {
            // What was made before the failure is still to be sent.
            CloseReason::Failed => state.streams.get(&request).map(|s| s.epoch),
            CloseReason::Aborted | CloseReason::Retired => {
                state.streams.remove(&request).map(|s| s.epoch)
            }
        };
        state
            .closed
            .push_back((request, epoch.unwrap_or_default(), reason));
        drop(state);
        self.inner.wake.notify_one();
    }
}

impl Emitter {
    /// Starts the sending thread.
    pub fn start(&self, outlet: Arc<dyn Outlet>) -> std::io::Result<Sending> {
        let inner = Arc::clone(&self.inner);
        let run = move || {
            while let Some(work) = inner.next() {
                inner.send(work, &*outlet);
            }
        };
        let thread = std::thread::Builder::new().name("emit".into()).spawn(run)?;
        Ok(Sending {
            inner: Arc::clone(&self.inner),
            thread: Some(thread),
        })
    }

    /// Appends tokens under `epoch`. A lower epoch than the stream's is dropped: its right ended.
    pub fn push(
        &self,
        request: RequestId,
        epoch: OwnerEpoch,
        tokens: impl IntoIterator<Item = Emission>,
        step_done_ns: u64,
    ) {
        self.push_unsent(request, epoch, tokens, step_done_ns);
        self.wake();
    }

    /// Has what is ready sent.
    pub fn wake(&self) {
        let ready = !self.inner.state.lock().ready.is_empty();
        if ready {
            self.inner.wake.notify_one();
        }
    }

    /// As [`push`](Self::push), but it waits for the next push or [`wake`](Self::wake): where the
    /// caller has something to do first that waking another thread would hold up.
    pub fn push_unsent(
        &self,
        request: RequestId,
        epoch: OwnerEpoch,
        tokens: impl IntoIterator<Item = Emission>,
        step_done_ns: u64,
    ) {
        let mut state = self.inner.state.lock();
        let State { streams, ready, .. } = &mut *state;
        let stream = streams.entry(request).or_insert_with(|| Stream {
            epoch,
            unacked: VecDeque::new(),
            sent: 0,
            acked: 0,
            round: 0,
            waiting_since: Instant::now(),
            last_step_ns: 0,
            queued: false,
            seen: false,
        });
        if epoch < stream.epoch {
            return;
        }
        if epoch > stream.epoch {
            // A new right: what an earlier one left is re-emitted by whoever holds the new one.
            stream.epoch = epoch;
            stream.unacked.clear();
            stream.sent = 0;
            stream.seen = false;
        }
        stream.last_step_ns = stream.last_step_ns.max(step_done_ns);
        let acked = stream.acked;
        stream
            .unacked
            .extend(tokens.into_iter().filter(|t| t.seq > acked));
        if !stream.queued && !stream.unacked.is_empty() {
            stream.queued = true;
            ready.push_back(request);
        }
    }

    /// The gateway has journaled through here.
    pub fn acked(&self, request: RequestId, through: u64) {
        let mut state = self.inner.state.lock();
        let Some(stream) = state.streams.get_mut(&request) else {
            return;
        };
        if through > stream.acked {
            stream.acked = through;
            stream.waiting_since = Instant::now();
        }
        while stream.unacked.front().is_some_and(|t| t.seq <= through) {
            let last = stream.unacked.pop_front();
            if last.is_some_and(|t| t.finish.is_some()) {
                state.streams.remove(&request);
                return;
            }
        }
    }

    /// Tokens numbered `from..=through` that are not known to be journaled.
    pub fn unacked(&self, request: RequestId, from: u64, through: u64) -> Vec<Emission> {
        let state = self.inner.state.lock();
        let Some(stream) = state.streams.get(&request) else {
            return Vec::new();
        };
        let wanted = |t: &&Emission| (from..=through).contains(&t.seq);
        stream.unacked.iter().filter(wanted).cloned().collect()
    }

    /// Whether the stream of this ownership was asked about before; the first call says `false`.
    pub fn seen(&self, request: RequestId, epoch: OwnerEpoch) -> bool {
        let mut state = self.inner.state.lock();
        match state.streams.get_mut(&request).filter(|s| s.epoch == epoch) {
            Some(stream) => std::mem::replace(&mut stream.seen, true),
            None => true,
        }
    }

    /// When the last step that made a token of this request was done.
    pub fn last_step_ns(&self, request: RequestId) -> u64 {
        self.inner
            .state
            .lock()
            .streams
            .get(&request)
            .map_or(0, |s| s.last_step_ns)
    }

    /// Whether tokens of a request may still have to be sent.
    pub fn holds(&self, request: RequestId) -> bool {
        let state = self.inner.state.lock();
        state
            .streams
            .get(&request)
            .is_some_and(|s| !s.unacked.is_empty())
    }

    /// The right to append ended here, or the request is gone: nothing of it is sent any more.
    pub fn forget(&self, request: RequestId) {
        self.inner.state.lock().streams.remove(&request);
    }

    /// The link to the gateway came up: everything not journaled is sent again.
    pub fn resend(&self) {
        self.resend_where(|_| true);
    }

    /// Sends again what was sent and not acknowledged for this long: it, or the answer to it, was
    /// lost on the way. Tokens that come twice are recognized by their numbers.
    pub fn resend_stalled(&self, after: Duration) {
        self.resend_where(|s| s.sent > s.acked && s.waiting_since.elapsed() >= after);
    }

    fn resend_where(&self, which: impl Fn(&Stream) -> bool) {
        let mut state = self.inner.state.lock();
        let State { streams, ready, .. } = &mut *state;
        for (request, stream) in streams.iter_mut().filter(|(_, s)| which(s)) {
            stream.sent = stream.acked;
            stream.round += 1;
            stream.waiting_since = Instant::now();
            if !stream.queued && !stream.unacked.is_empty() {
                stream.queued = true;
                ready.push_back(*request);
            }
        }
        drop(state);
        self.inner.wake.notify_one();
    }

    /// Tokens not known to be journaled, over all requests.
    pub fn pending(&self) -> usize {
        self.inner
            .state
            .lock()
            .streams
            .values()
            .map(|s| s.unacked.len())
            .sum()
    }

    /// Waits until all tokens are journaled, at most until `deadline`.
    pub fn drained(&self, deadline: Instant) -> bool {
        while self.pending() > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

enum Work {
    /// The last number is the stream's round.
    Tokens(RequestId, OwnerEpoch, Vec<Emission>, u64),
    Closed(RequestId, OwnerEpoch, CloseReason),
}

impl Inner {
    fn next(&self) -> Option<Work> {
        let mut state = self.state.lock();
        loop {
            if let Some(request) = state.ready.pop_front() {
                let Some(stream) = state.streams.get_mut(&request) else {
                    continue;
                };
                stream.queued = false;
                let unsent = stream.unacked.iter().filter(|t| t.seq > stream.sent);
                let tokens: Vec<Emission> = unsent.take(BATCH).cloned().collect();
                if tokens.is_empty() {
                    continue;
                }
                if stream.sent <= stream.acked {
                    stream.waiting_since = Instant::now();
                }
                let (epoch, round) = (stream.epoch, stream.round);
                return Some(Work::Tokens(request, epoch, tokens, round));
            }
            if let Some((request, epoch, reason)) = state.closed.pop_front() {
                return Some(Work::Closed(request, epoch, reason));
            }
            if state.stopping {
                return None;
            }
            self.wake.wait(&mut state);
        }
    }

    fn send(&self, work: Work, outlet: &dyn Outlet) {
        match work {
            Work::Closed(request, epoch, reason) => outlet.closed(request, epoch, reason),
            Work::Tokens(request, epoch, tokens, round) => {
                let sent = outlet.emit(request, epoch, &tokens);
                let mut state = self.state.lock();
                let stopping = state.stopping;
                let State { streams, ready, .. } = &mut *state;
                if let Some(stream) = streams.get_mut(&request).filter(|s| s.epoch == epoch) {
                    if sent && stream.round == round {
                        stream.sent = stream.sent.max(tokens.last().map_or(0, |t| t.seq));
                    }
                    let more = stream.unacked.back().is_some_and(|t| t.seq > stream.sent);
                    if more && !stream.queued && (sent || !stopping) {
                        stream.queued = true;
                        ready.push_back(request);
                    }
                }
                drop(state);
                if !sent && !stopping {
                    std::thread::sleep(RETRY);
                }
            }
        }
    }
}

impl Drop for Sending {
    /// Sends what is there and ends.
    fn drop(&mut self) {
        self.inner.state.lock().stopping = true;
        self.inner.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Sink {
        got: Mutex<Vec<(u64, u64)>>,
        up: std::sync::atomic::AtomicBool,
    }

    impl Outlet for Sink {
        fn emit(&self, _: RequestId, epoch: OwnerEpoch, tokens: &[Emission]) -> bool {
            if !self.up.load(std::sync::atomic::Ordering::SeqCst) {
                return false;
            }
            self.got
                .lock()
                .extend(tokens.iter().map(|t| (epoch.0, t.seq)));
            true
        }
        fn closed(&self, _: RequestId, _: OwnerEpoch, _: CloseReason) {}
    }

    const R: RequestId = RequestId([3; 16]);

    fn token(seq: u64) -> Emission {
        Emission {
            seq,
            token: seq as u32,
            text: Vec::new(),
            finish: None,
        }
    }

    fn wait_for(sink: &Sink, n: usize) -> Vec<(u64, u64)> {
        let end = Instant::now() + Duration::from_secs(5);
        while sink.got.lock().len() < n && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        sink.got.lock().clone()
    }

    #[test]
    fn what_nobody_acknowledges_is_sent_again_and_what_is_acknowledged_is_not() {
        let (emitter, sink) = (Emitter::default(), Arc::new(Sink::default()));
        sink.up.store(true, std::sync::atomic::Ordering::SeqCst);
        let sending = emitter.start(Arc::clone(&sink) as Arc<dyn Outlet>).unwrap();
        emitter.push(R, OwnerEpoch(1), [token(1), token(2), token(3)], 1);
        assert_eq!(wait_for(&sink, 3), [(1, 1), (1, 2), (1, 3)]);
        emitter.resend_stalled(Duration::from_secs(600));
        emitter.acked(R, 1);
        emitter.resend_stalled(Duration::ZERO);
        assert_eq!(wait_for(&sink, 5)[3..], [(1, 2), (1, 3)]);
        emitter.acked(R, 3);
        emitter.resend_stalled(Duration::ZERO);
        drop(sending);
        assert_eq!(sink.got.lock().len(), 5);
    }

    #[test]
    fn tokens_wait_for_the_link_and_go_out_in_order_once() {
        let (sink, emitter) = (Arc::new(Sink::default()), Emitter::default());
        let sending = emitter.start(Arc::clone(&sink) as Arc<dyn Outlet>).unwrap();
        for seq in 1..=600 {
            emitter.push(R, OwnerEpoch(1), [token(seq)], 0);
        }
        sink.up.store(true, std::sync::atomic::Ordering::SeqCst);
        assert_eq!(
            wait_for(&sink, 600),
            (1..=600).map(|s| (1, s)).collect::<Vec<_>>()
        );
        assert_eq!(emitter.pending(), 600);
        emitter.acked(R, 599);
        assert_eq!(emitter.unacked(R, 1, 999), vec![token(600)]);
        drop(sending);
    }

    #[test]
    fn a_broken_link_sends_again_only_what_was_not_journaled() {
        let (sink, emitter) = (Arc::new(Sink::default()), Emitter::default());
        sink.up.store(true, std::sync::atomic::Ordering::SeqCst);
        let _sending = emitter.start(Arc::clone(&sink) as Arc<dyn Outlet>).unwrap();
        emitter.push(R, OwnerEpoch(1), (1..=3).map(token), 0);
        wait_for(&sink, 3);
        emitter.acked(R, 1);
        emitter.resend();
        assert_eq!(wait_for(&sink, 5)[3..], [(1, 2), (1, 3)]);
    }

    #[test]
    fn an_earlier_right_adds_nothing_once_a_later_one_spoke() {
        let emitter = Emitter::default();
        emitter.push(R, OwnerEpoch(2), [token(5)], 0);
        emitter.push(R, OwnerEpoch(1), [token(6)], 0);
        assert_eq!(emitter.unacked(R, 1, 99), vec![token(5)]);
    }
}
