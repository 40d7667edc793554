//! The server: one listener on loopback, whose connections all end when it does.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{
    Json, Router,
    extract::{Path, Query, Request, State},
    http::{HeaderMap, Method, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::Bytes;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    task::{JoinHandle, JoinSet},
};

use crate::{
    Api, Conversation, Error, GateState, Matcher, Models, Options, RequestKind, Script,
    log::{Keys, MAX_TURN_TEXT, Record},
    walk,
};

/// The largest request body read.
const MAX_BODY: usize = 64 << 20;

/// The pause after a connection that could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// How long a long poll waits if it does not say, in milliseconds.
const LONG_POLL: u64 = 30_000;

/// A scripted model that listens. Dropping it closes the listener and every connection at once.
#[derive(Debug)]
pub struct ModelServer {
    models: Models,
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl ModelServer {
    /// Listens on 127.0.0.1. Must be called in a tokio runtime, which the server then lives in.
    ///
    /// # Errors
    /// [`Error::Listen`] if the port cannot be had.
    pub async fn start(options: Options) -> Result<Self, Error> {
        let wanted = SocketAddr::from((Ipv4Addr::LOCALHOST, options.port));
        Self::start_on(wanted, &options).await
    }

    /// Listens on this address instead (`options.port` is not looked at). Anything but loopback is for containers.
    ///
    /// # Errors
    /// [`Error::Listen`] if the address cannot be had.
    pub async fn start_on(wanted: SocketAddr, options: &Options) -> Result<Self, Error> {
        let failed = |source| Error::Listen { address: wanted.to_string(), source };
        let listener = TcpListener::bind(wanted).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let models = Models::new(options);
        let task = tokio::spawn(serve(listener, routes(models.clone())));
        Ok(Self { models, address, task })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL to give an engine as `ANTHROPIC_BASE_URL`, without a slash at its end. Codex's `base_url` is this with `/v1`.
    #[must_use]
    pub fn base_url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The handle on the model.
    #[must_use]
    pub const fn models(&self) -> &Models {
        &self.models
    }

    /// Stops: when this returns, the port refuses connections and every connection is closed. The log stays readable
    /// through handles. Cancel safe.
    pub async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Accepts until it is aborted; its connections are aborted with it.
async fn serve(listener: TcpListener, routes: Router) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((socket, _)) = accepted else {
                    // No descriptor is left; one may be soon.
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                    continue;
                };
                let _ = socket.set_nodelay(true);
                let service = TowerToHyperService::new(routes.clone());
                connections.spawn(async move {
                    let connection = hyper::server::conn::http1::Builder::new();
                    let _ = connection.serve_connection(TokioIo::new(socket), service).await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

fn routes(models: Models) -> Router {
    Router::new()
        .route("/__requests", get(requests))
        .route("/__count", get(count))
        .route("/__gates/{name}", get(gate))
        .route("/__gates/{name}/release", post(release))
        .route("/__gates/{name}/close", post(close))
        .route("/__rules", post(rules))
        .route("/__reset", post(reset))
        .fallback(api)
        .with_state(models)
}

/// Everything an engine asks for: logged, then answered.
async fn api(State(models): State<Models>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    let Ok(body) = axum::body::to_bytes(body, MAX_BODY).await else {
        return api_of(&path).refuse(413, "the request is larger than this server reads");
    };
    let conversation = match serde_json::from_slice::<Value>(&body) {
        Ok(json) => Conversation::new(json),
        Err(_) => Conversation::default(),
    };
    let turn = matches!(path.as_str(), "/v1/messages" | "/v1/responses") && head.method == Method::POST;
    let kind = match path.as_str() {
        _ if turn && conversation.api() == api_of(&path) => conversation.kind(),
        "/v1/messages/count_tokens" => RequestKind::CountTokens,
        _ => RequestKind::Other,
    };
    let full_path = head.uri.path_and_query().map_or_else(|| path.clone(), ToString::to_string);
    let record = record(&head.method, full_path, &head.headers, kind, &conversation, body);
    let record = models.record(record);
    let mark = models.end_mark(&record);
    if kind == RequestKind::Main {
        return walk::main(models, conversation, mark).await;
    }
    mark.sent();
    match (&head.method, path.as_str()) {
        (_, "/v1/messages/count_tokens") => {
            Json(json!({"input_tokens": (record.body().len() / 4).max(1)})).into_response()
        }
        _ if kind == RequestKind::Side => walk::side(&conversation, conversation.side_text()),
        _ if turn => api_of(&path).refuse(400, "the body is no request of this API"),
        (&Method::GET, "/v1/models") => Json(list_of_models(&head.headers)).into_response(),
        // The CLI warms up its connection with `HEAD /api/hello` unless it is told to send nothing nonessential.
        (&Method::HEAD, _) | (&Method::GET, "/") => StatusCode::OK.into_response(),
        _ => api_of(&path).refuse(404, "the scripted model has no such path"),
    }
}

/// The API that a path belongs to.
fn api_of(path: &str) -> Api {
    if path.starts_with("/v1/responses") { Api::Responses } else { Api::Messages }
}

fn record(
    method: &Method,
    path: String,
    headers: &HeaderMap,
    kind: RequestKind,
    conversation: &Conversation,
    body: Bytes,
) -> Record {
    let mut keys = Vec::new();
    let headers = headers
        .iter()
        .map(|(name, value)| {
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            if matches!(name.as_str(), "x-api-key" | "authorization") {
                keys.push(value.strip_prefix("Bearer ").unwrap_or(&value).to_owned());
                (name.to_string(), "hidden".to_owned())
            } else {
                (name.to_string(), value)
            }
        })
        .collect();
    Record {
        number: 0,
        at: SystemTime::now(),
        method: method.to_string(),
        path,
        headers,
        keys: Keys(keys),
        kind,
        api: conversation.api(),
        turn_text: cut(conversation.turn_text()),
        step: conversation.step(),
        body,
        body_dropped: false,
        ending: Arc::default(),
    }
}

/// The start of a text, at most [`MAX_TURN_TEXT`] bytes.
fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TURN_TEXT)].to_owned()
}

/// The models there are, in the shape of the API whose way of giving the key was used.
fn list_of_models(headers: &HeaderMap) -> Value {
    if headers.contains_key("authorization") && !headers.contains_key("anthropic-version") {
        let model = |name: &str| json!({"id": name, "object": "model", "created": 1_767_225_600, "owned_by": "roundhouse"});
        let data = ["gpt-5.5", "gpt-5.5-mini"].map(model);
        return json!({"object": "list", "data": data});
    }
    let names = ["claude-opus-5-5", "claude-sonnet-4-6", "claude-haiku-4-5"];
    let model = |name: &str| json!({"type": "model", "id": name, "display_name": name, "created_at": "2026-01-01T00:00:00Z"});
    let data = names.map(model);
    json!({"data": data, "has_more": false, "first_id": names[0], "last_id": names[2]})
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    #[serde(default)]
    after: u64,
    #[serde(default)]
    text: String,
}

async fn requests(State(models): State<Models>, Query(which): Query<Which>) -> Json<Value> {
    let found =
        models.select(|record| record.number() > which.after && record.turn_text().contains(&which.text));
    let found: Vec<Value> = found.iter().map(|record| record.to_json()).collect();
    Json(json!({"requests": found, "total": models.total()}))
}

async fn count(State(models): State<Models>, Query(which): Query<Which>) -> Json<Value> {
    Json(json!({"count": models.count_for(&which.text)}))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wait {
    at_least: Option<u64>,
    timeout_ms: Option<u64>,
}

fn gate_json(name: &str, state: GateState) -> Json<Value> {
    Json(json!({"name": name, "reached": state.reached, "open": state.open}))
}

async fn gate(State(models): State<Models>, Path(name): Path<String>, Query(wait): Query<Wait>) -> Response {
    let limit = Duration::from_millis(wait.timeout_ms.unwrap_or(LONG_POLL));
    match models.wait_gate_times(&name, wait.at_least.unwrap_or(1), limit).await {
        Ok(state) => gate_json(&name, state).into_response(),
        Err(_) => (StatusCode::REQUEST_TIMEOUT, gate_json(&name, models.gate(&name))).into_response(),
    }
}

async fn release(State(models): State<Models>, Path(name): Path<String>) -> Json<Value> {
    gate_json(&name, models.release_gate(&name))
}

async fn close(State(models): State<Models>, Path(name): Path<String>) -> Json<Value> {
    gate_json(&name, models.close_gate(&name))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NewRule {
    contains: Option<String>,
    script: String,
    times: Option<u32>,
}

async fn rules(State(models): State<Models>, Json(rule): Json<NewRule>) -> Response {
    let script = match Script::parse(&rule.script) {
        Ok(script) => script,
        Err(problem) => return (StatusCode::BAD_REQUEST, problem.to_string()).into_response(),
    };
    let matcher = rule.contains.map_or(Matcher::Any, Matcher::Contains);
    match rule.times {
        Some(times) => models.rule_times(matcher, script, times),
        None => models.rule(matcher, script),
    }
    StatusCode::NO_CONTENT.into_response()
}

async fn reset(State(models): State<Models>) -> StatusCode {
    models.reset();
    StatusCode::NO_CONTENT
}
