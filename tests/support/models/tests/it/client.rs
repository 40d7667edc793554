//! A plain HTTP client: a socket, and bytes.

use std::time::Duration;

use roundhouse_models::{ModelServer, Options};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// What any single wait may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) async fn server() -> ModelServer {
    ModelServer::start(Options::default()).await.expect("a free port")
}

/// An answer that may still be coming.
pub(crate) struct Answer {
    socket: TcpStream,
    got: Vec<u8>,
    /// Whether the connection has ended.
    ended: bool,
}

impl Answer {
    /// What has come so far.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.got).into_owned()
    }

    pub(crate) fn status(&self) -> u16 {
        self.text().get(9..12).and_then(|code| code.parse().ok()).expect("a status line")
    }

    async fn more(&mut self) {
        let mut piece = vec![0; 65_536];
        match timeout(LIMIT, self.socket.read(&mut piece)).await.expect("bytes or the end in time") {
            Ok(0) | Err(_) => self.ended = true,
            Ok(n) => self.got.extend_from_slice(&piece[..n]),
        }
    }

    /// Reads until `part` has come.
    pub(crate) async fn until(mut self, part: &str) -> Self {
        while !self.text().contains(part) {
            assert!(!self.ended, "the answer ended without {part:?}: {}", self.text());
            self.more().await;
        }
        self
    }

    /// Reads to the end of the connection.
    pub(crate) async fn whole(mut self) -> Self {
        while !self.ended {
            self.more().await;
        }
        self
    }

    /// Whether a chunked answer came to its proper end.
    pub(crate) fn is_complete(&self) -> bool {
        self.got.ends_with(b"0\r\n\r\n")
    }

    pub(crate) fn json(&self) -> Value {
        let text = self.text();
        let body = text.split_once("\r\n\r\n").expect("a body").1;
        serde_json::from_str(body).unwrap_or_else(|_| panic!("no JSON: {text}"))
    }

    /// The data of the events that came.
    pub(crate) fn events(&self) -> Vec<Value> {
        self.text()
            .lines()
            .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
            .collect()
    }

    /// The kinds of the events that came.
    pub(crate) fn kinds(&self) -> Vec<String> {
        self.events().iter().filter_map(|event| event["type"].as_str().map(str::to_owned)).collect()
    }

    /// The text that was said.
    pub(crate) fn said(&self) -> String {
        self.events().iter().filter_map(|event| event["delta"]["text"].as_str().map(str::to_owned)).collect()
    }
}

pub(crate) async fn send(server: &ModelServer, method: &str, path: &str, body: &str) -> Answer {
    let mut socket = TcpStream::connect(server.address()).await.expect("connected");
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nx-api-key: dummy\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(request.as_bytes()).await.expect("sent");
    Answer { socket, got: Vec::new(), ended: false }
}

pub(crate) fn body(messages: &Value, stream: bool) -> Value {
    json!({"model": "m", "max_tokens": 100, "stream": stream, "messages": messages, "metadata": {"user_id": "s"}})
}

/// Asks with one user text, for a stream.
pub(crate) async fn ask(server: &ModelServer, text: &str) -> Answer {
    let body = body(&json!([{"role": "user", "content": text}]), true);
    send(server, "POST", "/v1/messages?beta=true", &body.to_string()).await
}

/// Asks with one user text, for a document.
pub(crate) async fn ask_plain(server: &ModelServer, text: &str) -> Answer {
    let body = body(&json!([{"role": "user", "content": text}]), false);
    send(server, "POST", "/v1/messages", &body.to_string()).await
}

pub(crate) async fn get(server: &ModelServer, path: &str) -> Answer {
    send(server, "GET", path, "").await.whole().await
}

pub(crate) async fn post(server: &ModelServer, path: &str, body: &str) -> Answer {
    send(server, "POST", path, body).await.whole().await
}
