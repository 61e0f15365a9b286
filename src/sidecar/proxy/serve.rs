//! Accepts connections for the proxy.

use std::future::Future;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tracing::{debug, warn};

/// Serves HTTP/1.1 and HTTP/2 (prior knowledge) until `shutdown`, then lets requests in flight
/// finish. There is no deadline for that: the caller sets one by dropping the future, which closes
/// what is left.
///
/// Unlike `axum::serve` it keeps the case of header names and adds no `date` of its own, so that
/// HTTP/1.1 responses arrive as the upstream wrote them.
pub async fn serve(listener: TcpListener, router: Router, shutdown: impl Future<Output = ()>) {
    let mut builder = auto::Builder::new(TokioExecutor::new()).preserve_header_case(true);
    builder.http1().auto_date_header(false);
    builder.http2().auto_date_header(false);
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, most likely: some will be free in a moment.
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // A token is a small packet; waiting to fill a large one would show as a stutter.
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "cannot set nodelay");
        }
        let service = TowerToHyperService::new(router.clone());
        let connection =
            builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
        let connection = graceful.watch(connection);
        connections.spawn(async move {
            if let Err(error) = connection.await {
                debug!(error = %error, "connection ended early");
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
}
