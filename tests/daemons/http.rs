//! A small HTTP client over a real socket: whole answers, and streams read piece by piece.

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;

/// Sends one request on a connection of its own; dropping the response drops the connection.
pub async fn send(
    at: SocketAddr,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: Vec<u8>,
) -> Response<Incoming> {
    let stream = tokio::net::TcpStream::connect(at).await.unwrap();
    let (mut sender, conn) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(conn);
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "test");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    sender
        .send_request(request.body(Full::new(Bytes::from(body))).unwrap())
        .await
        .unwrap()
}

/// Status and body.
pub async fn whole(response: Response<Incoming>) -> (u16, String) {
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

/// Reads until `n` events have arrived, or the end.
pub async fn events(body: &mut Incoming, n: usize) -> Vec<String> {
    let mut text = String::new();
    while text.matches("\n\n").count() < n {
        match body.frame().await {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    text.push_str(std::str::from_utf8(&data).unwrap());
                }
            }
            _ => break,
        }
    }
    text.split("\n\n")
        .filter(|e| !e.is_empty())
        .map(str::to_owned)
        .collect()
}
