//! A worker that is told to end moves its requests away first, within a bound: what has not moved by
//! then goes on from the journal elsewhere.

use std::time::{Duration, Instant};

use super::daemon::Running;
use crate::migrate::io::Peer;
use crate::rpc::v1::coordinator_client::CoordinatorClient;
use crate::rpc::{self, v1};

/// How long reaching one coordinator may take.
const DIAL: Duration = Duration::from_secs(2);
/// Pause before another coordinator is looked for: a new leader may be on its way.
const AGAIN: Duration = Duration::from_millis(250);
/// How often is looked whether anything still runs here.
const LOOK: Duration = Duration::from_millis(20);

/// How a worker was emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Nothing runs here.
    Empty,
    /// The deadline passed, or nobody could take what is left: so many requests.
    Some(usize),
}

impl Running {
    /// Admits nothing any more, asks the leading coordinator to move every request away, and waits
    /// until nothing runs here, at most until `deadline`. Where nobody can take them, requests may
    /// still end by themselves until then; without the gateway nothing is waited for.
    pub async fn leave(&self, deadline: Instant) -> Left {
        self.drain().await;
        while self.running() > 0 && Instant::now() < deadline {
            if !self.linked(&Peer::Gateway) {
                break;
            }
            if let Err(why) = self.ask_to_move(deadline).await {
                tracing::info!(why, "requests are not being moved");
            }
            let look_again = (Instant::now() + AGAIN).min(deadline);
            while self.running() > 0 && Instant::now() < look_again {
                tokio::time::sleep(LOOK).await;
            }
        }
        match self.running() {
            0 => Left::Empty,
            n => Left::Some(n),
        }
    }

    /// One drain by whichever coordinator leads; an error says why there was none.
    async fn ask_to_move(&self, deadline: Instant) -> Result<(), String> {
        let registry = self.registry().clone();
        let cards = tokio::task::spawn_blocking(move || registry.coordinators())
            .await
            .map_err(|e| e.to_string())?
            .map_err(|e| e.to_string())?;
        let mut why = "no coordinator is known".to_owned();
        for card in cards {
            let left = deadline.saturating_duration_since(Instant::now());
            match tokio::time::timeout(left, self.drained_by(&card.rpc, left)).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => why = error,
                Err(_) => return Err("the deadline passed".into()),
            }
        }
        Err(why)
    }

    async fn drained_by(&self, at: &str, left: Duration) -> Result<(), String> {
        let endpoint = at.parse().map_err(|e| format!("{e}"))?;
        let channel = rpc::connect(&endpoint, DIAL.min(left))
            .await
            .map_err(|e| e.to_string())?;
        let ask = v1::DrainRequest {
            worker: self.card().id.clone(),
            deadline_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1),
            transport: String::new(),
        };
        let said = |s: tonic::Status| s.message().to_owned();
        let mut events = CoordinatorClient::new(channel)
            .drain(ask)
            .await
            .map_err(said)?
            .into_inner();
        while let Some(event) = events.message().await.map_err(said)? {
            tracing::info!(detail = event.detail, left = event.remaining, "leaving");
            if event.done {
                return Ok(());
            }
        }
        Err("the coordinator ended before the drain did".into())
    }
}
