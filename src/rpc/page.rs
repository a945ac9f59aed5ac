//! One page of text over HTTP: `GET /metrics`, in the form that Prometheus reads. A daemon's own
//! listener, so that a scraper needs no gRPC and reaches nothing but counters.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;

use super::serve::ServeError;
use crate::wire::Endpoint;

/// The type of the page.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A bound listener for the page.
pub struct Page {
    listener: TcpListener,
    at: SocketAddr,
}

impl Page {
    /// Binds. A loopback address unless `beyond_loopback`; port 0 lets the kernel choose.
    pub async fn bind(at: SocketAddr, beyond_loopback: bool) -> Result<Self, ServeError> {
        if !at.ip().is_loopback() && !beyond_loopback {
            return Err(ServeError::NotLoopback { addr: at });
        }
        let bind = |source| ServeError::Bind {
            endpoint: Endpoint::Tcp(at),
            source,
        };
        let listener = TcpListener::bind(at).await.map_err(bind)?;
        let at = listener.local_addr().map_err(bind)?;
        Ok(Self { listener, at })
    }

    /// Where it listens.
    pub fn at(&self) -> SocketAddr {
        self.at
    }

    /// Serves what `page` writes at `/metrics`, anew for each request, until its task is aborted.
    /// `page` may block: it is called away from the runtime's threads.
    pub async fn serve(self, page: Arc<dyn Fn() -> String + Send + Sync>) {
        let answer = move || {
            let page = Arc::clone(&page);
            async move {
                match tokio::task::spawn_blocking(move || page()).await {
                    Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
                    Err(_) => axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response(),
                }
            }
        };
        let router = Router::new().route("/metrics", get(answer));
        if let Err(error) = axum::serve(self.listener, router).await {
            tracing::error!(%error, "the metrics page ended");
        }
    }
}
