//! Serving HTTP with bounds: how long a request may take to arrive, how many connections there are,
//! and how a stop is told to those that are open.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// How long the head of a request may take to arrive; an idle connection is closed after it.
pub const HEAD: Duration = Duration::from_secs(20);
/// Most connections at once; one more waits to be accepted.
const CONNECTIONS: usize = 4096;
/// Pause where no connection can be accepted: too many descriptors are open.
const AGAIN: Duration = Duration::from_millis(50);

/// Serves `router` until `stop`; connections open then may end their answer, which is waited for.
/// `head` bounds how long the head of a request takes to arrive. Dropped, it cuts them off.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    head: Duration,
    stop: impl Future<Output = ()>,
) {
    let (stopping, stopped) = watch::channel(false);
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let mut open = JoinSet::new();
    tokio::pin!(stop);
    loop {
        let accept = async {
            let place = Arc::clone(&room).acquire_owned().await;
            (place, listener.accept().await)
        };
        tokio::select! {
            () = &mut stop => break,
            Some(_) = open.join_next(), if !open.is_empty() => {}
            (Ok(place), accepted) = accept => match accepted {
                Ok((stream, _)) => {
                    let one = connection(stream, router.clone(), head, stopped.clone());
                    open.spawn(async move {
                        one.await;
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::debug!(%error, "no connection can be accepted");
                    tokio::time::sleep(AGAIN).await;
                }
            },
        }
    }
    drop(listener);
    stopping.send_replace(true);
    while open.join_next().await.is_some() {}
}

async fn connection(
    stream: TcpStream,
    router: Router,
    head: Duration,
    mut stopped: watch::Receiver<bool>,
) {
    // A token is small and must not wait for the next one.
    let _ = stream.set_nodelay(true);
    let service = TowerToHyperService::new(router);
    let serving = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(serving);
    let stop = async {
        // An end of the sender is a stop, too.
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = stop => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}
