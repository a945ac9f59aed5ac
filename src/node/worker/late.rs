//! Two faults that need a past: messages of an earlier attempt that arrive during a later one, and a
//! put into staging whose epoch has died.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::mem::{BlockPool, Region};
use crate::migrate::io::{Peer, Step};
use crate::migrate::msg::{Body, Msg};
use crate::node::faults::{Fault, Faults};
use crate::transport::{
    Access, Completion, Local, Refusal, Scope, Span, Transfer, Transport, TransportError,
};

/// Messages kept for replay, the newest.
const KEEP: usize = 64;
const WAIT: Duration = Duration::from_secs(5);
const BYTES: u64 = 4096;

/// A message with its sender and payload.
pub type Kept = (Peer, Msg, Vec<u8>);

/// Messages of attempts so far, kept only where `stale-epoch` is planned.
#[derive(Default)]
pub struct Past(Mutex<VecDeque<Kept>>);

impl Past {
    /// Notes a message; returns those of earlier attempts that are to be heard again before it.
    pub fn hear(&self, faults: &Faults, from: &Peer, msg: &Msg, bytes: &[u8]) -> Vec<Kept> {
        if !faults.possible(Fault::StaleEpoch) || msg.epoch.0 == 0 {
            return Vec::new();
        }
        let mut kept = self.0.lock();
        let is_old = |k: &&Kept| k.1.request == msg.request && k.1.epoch < msg.epoch;
        let old: Vec<Kept> = kept.iter().filter(is_old).cloned().collect();
        let step = match msg.body {
            Body::Ready { .. } => Some(Step::Reserve),
            Body::Verified { .. } => Some(Step::Stream),
            Body::Go => Some(Step::CopyTail),
            _ => None,
        };
        kept.push_back((from.clone(), msg.clone(), bytes.to_vec()));
        if kept.len() > KEEP {
            kept.pop_front();
        }
        match step {
            Some(step) if !old.is_empty() && faults.due(Fault::StaleEpoch, step).is_some() => old,
            _ => Vec::new(),
        }
    }
}

/// Puts bytes into staging under a grant whose epoch is over. `Ok` says how it was refused; `Err`
/// that it was not, or could not be tried.
pub fn late_put(transport: &Arc<dyn Transport>) -> Result<String, String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let pool = |name: &str| {
        let region = Region::memfd(name, BYTES).map_err(|e| text(&e))?;
        BlockPool::contiguous(region, BYTES).map_err(|e| text(&e))
    };
    let (staging, outgoing) = (pool("late-staging")?, pool("late-source")?);
    let target = staging.alloc(1).map_err(|e| text(&e))?;
    let source = outgoing.alloc(1).map_err(|e| text(&e))?;
    outgoing
        .write(&source)
        .map_err(|e| text(&e))?
        .try_bytes_mut(0, BYTES as usize)
        .map_err(|e| text(&e))?
        .fill(0xff);
    let dead = transport
        .register(&staging, Access::RemoteWrite, Scope::Blocks(&target))
        .map_err(|e| text(&e))?;
    let mut link = transport
        .connect(&transport.endpoint(), Instant::now() + WAIT)
        .map_err(|e| text(&e))?;
    let (alive, _) = transport
        .renew(dead.key, Instant::now() + WAIT)
        .map_err(|e| text(&e))?;
    let transfer = Transfer {
        local: Local::PutFrom(outgoing.read(&source).map_err(|e| text(&e))?),
        remote: dead,
        spans: vec![Span {
            remote_off: 0,
            local_off: 0,
            len: BYTES,
        }],
        deadline: Instant::now() + WAIT,
    };
    link.submit(transfer).map_err(|e| text(&e))?;
    let mut done = [Completion::empty()];
    if link.wait(&mut done, Instant::now() + WAIT) == 0 {
        return Err("the put neither ended nor was refused".into());
    }
    let landed = staging
        .read(&target)
        .map_err(|e| text(&e))?
        .try_bytes(0, BYTES as usize)
        .map_err(|e| text(&e))?
        .iter()
        .any(|b| *b != 0);
    let _ = transport
        .revoke(alive.key, Instant::now() + WAIT)
        .map_err(|e| text(&e))?;
    let [done] = done;
    match done.outcome {
        Err(TransportError::Refused(why @ Refusal::StaleEpoch)) if !landed => Ok(why.to_string()),
        Err(other) if !landed => Err(format!("refused for another reason: {other}")),
        _ => Err("a put of a dead epoch landed".into()),
    }
}
