//! The machines' store: route records in a metadata store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::runner::RouteStore;
use crate::id::RequestId;
use crate::metastore::{Cas, CasOutcome, MetaStore, StoreError, Versioned as Raw};
use crate::migrate::io::StoreReply;
use crate::route::{self, Revision, RouteRecord, Versioned};

/// How long one access may take before it counts as not answered.
const ANSWER: Duration = Duration::from_secs(1);

/// Route records under `route/`.
#[derive(Clone)]
pub struct Routes {
    store: Arc<dyn MetaStore>,
}

impl Routes {
    /// In this store.
    pub fn new(store: Arc<dyn MetaStore>) -> Self {
        Self { store }
    }

    /// The store itself.
    pub fn meta(&self) -> &Arc<dyn MetaStore> {
        &self.store
    }

    /// Writes the first record of a request; `false` if there is one already.
    pub fn create(&self, record: &RouteRecord) -> Result<bool, StoreError> {
        let (key, bytes) = (route::key(record.request), record.encode());
        let cas = Cas::put(&key, None, &bytes);
        let mut outcome = self.store.cas(&cas, Instant::now() + ANSWER);
        if matches!(outcome, Err(StoreError::InDoubt { .. })) {
            // The same operation again: it tells how the first one ended.
            outcome = self.store.cas(&cas, Instant::now() + ANSWER);
        }
        Ok(matches!(outcome?, CasOutcome::Applied { .. }))
    }

    /// Every record there is; unreadable ones are left out and logged.
    pub fn all(&self) -> Result<Vec<Versioned>, StoreError> {
        let listing = self
            .store
            .list(route::KEY_PREFIX, Instant::now() + ANSWER)?;
        Ok(listing
            .entries
            .into_iter()
            .filter_map(|(key, raw)| decode(&key, &raw))
            .collect())
    }
}

fn decode(key: &str, raw: &Raw) -> Option<Versioned> {
    match RouteRecord::decode(&raw.value) {
        Ok(record) => Some(Versioned {
            revision: raw.revision,
            record,
        }),
        Err(error) => {
            tracing::error!(key, %error, "a route record cannot be read");
            None
        }
    }
}

impl RouteStore for Routes {
    fn read(&self, request: RequestId) -> StoreReply {
        let key = route::key(request);
        match self.store.get(&key, Instant::now() + ANSWER) {
            // A record that cannot be read is no evidence of anything.
            Ok(Some(raw)) => decode(&key, &raw).map_or(StoreReply::InDoubt, StoreReply::Value),
            Ok(None) => StoreReply::Absent,
            Err(error) => {
                tracing::debug!(%request, %error, "the store did not answer a read");
                StoreReply::InDoubt
            }
        }
    }

    fn cas(&self, request: RequestId, expect: Revision, next: &RouteRecord) -> StoreReply {
        let (key, bytes) = (route::key(request), next.encode());
        match self.store.cas(
            &Cas::put(&key, Some(expect), &bytes),
            Instant::now() + ANSWER,
        ) {
            Ok(CasOutcome::Applied { revision }) => StoreReply::Applied(revision),
            Ok(CasOutcome::Conflict { current: None }) => StoreReply::Conflict(None),
            Ok(CasOutcome::Conflict { current: Some(raw) }) => match decode(&key, &raw) {
                Some(v) => StoreReply::Conflict(Some(v)),
                None => StoreReply::InDoubt,
            },
            Err(error) => {
                tracing::debug!(%request, %error, "the store did not answer a compare-and-swap");
                StoreReply::InDoubt
            }
        }
    }
}
