//! The metadata store's conformance suite over each implementation there is.

use moonlivekv::metastore::conformance::{Subject, run};
use moonlivekv::metastore::{
    EmbeddedOptions, EmbeddedStore, MetaStore, RemoteOptions, RemoteStore, ServerOptions,
    StoreServer,
};
use moonlivekv::wire::Endpoint;
use std::sync::Arc;

const HISTORY: usize = 300;

fn options() -> EmbeddedOptions {
    // Small segments, so that snapshots are taken under load.
    EmbeddedOptions {
        history: HISTORY,
        segment_bytes: 256 << 10,
        ..Default::default()
    }
}

fn check(store: Arc<dyn MetaStore>, rounds: u64) {
    run(&Subject {
        open: &|| Arc::clone(&store),
        history: HISTORY,
        rounds,
    });
}

fn check_remote(store: Arc<dyn MetaStore>, endpoint: &Endpoint, rounds: u64) {
    let server = StoreServer::start(store, endpoint, ServerOptions::default()).unwrap();
    let at = server.endpoint().clone();
    let open = || -> Arc<dyn MetaStore> {
        Arc::new(RemoteStore::new(at.clone(), RemoteOptions::default()))
    };
    run(&Subject {
        open: &open,
        history: HISTORY,
        rounds,
    });
}

#[test]
fn embedded_in_memory() {
    check(Arc::new(EmbeddedStore::in_memory(options())), 120);
}

#[test]
fn embedded_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(EmbeddedStore::open(dir.path(), options()).unwrap());
    check(Arc::clone(&store) as _, 60);
    assert!(
        store.stats().snapshots > 0,
        "the log was never rotated: {:?}",
        store.stats()
    );
    assert!(store.stats().flushes <= store.stats().changes);
}

#[test]
fn remote_over_a_unix_socket_to_a_store_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(dir.path().join("store"), options()).unwrap();
    let endpoint = Endpoint::unix(dir.path().join("s")).unwrap();
    check_remote(Arc::new(store), &endpoint, 60);
}

#[test]
fn remote_over_tcp() {
    for endpoint in [Endpoint::loopback(0), "tcp://[::1]:0".parse().unwrap()] {
        check_remote(Arc::new(EmbeddedStore::in_memory(options())), &endpoint, 60);
    }
}
