//! Answering a request as its script says, in whichever API it came.

use std::{io, time::Duration};

use axum::{
    Json,
    body::Body,
    http::{HeaderName, HeaderValue, StatusCode},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::StreamExt;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::{
    Api, Conversation, Models, anthropic,
    log::EndMark,
    responses,
    script::{Fault, Part, Reply, Stop},
};

/// Events between the script and the socket: small, so that a reader who stops reading stops the script too.
const CHANNEL: usize = 16;

/// What the bytes before a scripted cut are given to leave the process in.
const BEFORE_CUT: Duration = Duration::from_millis(30);

/// A message in the making: it turns what the model says into events of one API.
pub(crate) trait EventWriter: Send {
    /// What comes before everything.
    fn start(&mut self) -> Vec<Bytes>;
    /// More text; opens a text block if none is open.
    fn text(&mut self, text: &str) -> Vec<Bytes>;
    /// Ends the open text block, if there is one.
    fn end_text(&mut self) -> Vec<Bytes>;
    /// A block of thoughts.
    fn thinking(&mut self, text: &str) -> Vec<Bytes>;
    /// A tool call.
    fn tool(&mut self, name: &str, input: &Value) -> Vec<Bytes>;
    /// The end.
    fn finish(&mut self, stop: Stop) -> Vec<Bytes>;
}

/// A message in the making for a client that wants one document.
pub(crate) trait DocumentWriter: Send {
    /// More text.
    fn text(&mut self, text: &str);
    /// Ends the open text block, if there is one.
    fn end_text(&mut self);
    /// A block of thoughts.
    fn thinking(&mut self, text: &str);
    /// A tool call.
    fn tool(&mut self, name: &str, input: &Value);
    /// The document.
    fn finish(self: Box<Self>, stop: Stop) -> Value;
}

/// What an API says when something goes wrong.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An HTTP error.
    Http { status: u16, body: Value, headers: Vec<(String, String)> },
    /// A stream whose first and last events these are; its status is 200.
    Stream(Vec<Bytes>),
}

impl Failure {
    /// The response.
    pub(crate) fn into_response(self) -> Response {
        match self {
            Self::Stream(events) => event_stream(Body::from(events.concat())),
            Self::Http { status, body, headers } => {
                let mut response = Json(body).into_response();
                *response.status_mut() =
                    StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                for (name, value) in &headers {
                    if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value))
                    {
                        response.headers_mut().insert(name, value);
                    }
                }
                with_request_id(response)
            }
        }
    }
}

impl Api {
    fn event_writer(self, model: String, reply: &Reply) -> Box<dyn EventWriter> {
        match self {
            Self::Messages => Box::new(anthropic::wire::Events::new(model, reply.usage)),
            Self::Responses => Box::new(responses::wire::Writer::new(model, reply)),
        }
    }

    fn document_writer(self, model: String, reply: &Reply) -> Box<dyn DocumentWriter> {
        match self {
            Self::Messages => Box::new(anthropic::wire::Document::new(model, reply.usage)),
            Self::Responses => Box::new(responses::wire::Writer::new(model, reply)),
        }
    }

    /// A fault from before the headers, as this API tells it; `None` for what it never tells.
    fn failure(self, fault: &Fault, streams: bool) -> Option<Failure> {
        match self {
            Self::Messages => anthropic::fault::failure(fault),
            Self::Responses => responses::fault::failure(fault, streams),
        }
    }

    /// A refusal by this server itself.
    pub(crate) fn refuse(self, status: u16, message: &str) -> Response {
        let failure = match self {
            Self::Messages => anthropic::fault::refuse(status, message),
            Self::Responses => responses::fault::refuse(status, message),
        };
        failure.into_response()
    }

    /// The event that breaks a stream off.
    fn broken(self, kind: &str) -> Vec<Bytes> {
        match self {
            Self::Messages => anthropic::fault::broken(kind),
            Self::Responses => responses::fault::broken(kind),
        }
    }

    /// Bytes that are no event of this API.
    const fn garbage(self) -> &'static [u8] {
        match self {
            Self::Messages => b"event: content_block_delta\ndata: {\"type\": \x00 no json\n\n",
            Self::Responses => b"event: response.output_text.delta\ndata: {\"type\": \x00 no json\n\n",
        }
    }
}

/// Answers a main request.
pub(crate) async fn main(models: Models, conversation: Conversation, mark: EndMark) -> Response {
    let api = conversation.api();
    let (index, reply) = match models.choose(&conversation) {
        Ok(chosen) => chosen,
        Err(problem) => {
            mark.sent();
            return api.refuse(400, &problem.to_string());
        }
    };
    let turn_text = conversation.turn_text().to_owned();
    let script = Walk { models, api, streams: conversation.streams(), turn_text, index, reply };
    if let Some(response) = script.before_headers().await {
        mark.sent();
        return response;
    }
    let model = conversation.model().to_owned();
    if conversation.streams() {
        streamed(script, model, mark)
    } else {
        let response = script.document(model).await;
        mark.sent();
        response
    }
}

/// Answers what the CLI asks for itself: a short text that never comes from a script.
pub(crate) fn side(conversation: &Conversation, text: &str) -> Response {
    let reply = Reply::default();
    let model = conversation.model().to_owned();
    if conversation.streams() {
        let mut writer = conversation.api().event_writer(model, &reply);
        let mut events = writer.start();
        events.extend(writer.text(text));
        events.extend(writer.finish(Stop::EndTurn));
        event_stream(Body::from(events.concat()))
    } else {
        let mut writer = conversation.api().document_writer(model, &reply);
        writer.text(text);
        Json(writer.finish(Stop::EndTurn)).into_response()
    }
}

fn with_request_id(mut response: Response) -> Response {
    if let Ok(value) = HeaderValue::try_from(id("req")) {
        // One API has its request's id here, the other there.
        response.headers_mut().insert("request-id", value.clone());
        response.headers_mut().insert("x-request-id", value);
    }
    response
}

/// An id such as the APIs make.
pub(crate) fn id(prefix: &str) -> String {
    let random = uuid::Uuid::new_v4().simple().to_string();
    format!("{prefix}_{}", &random[..24])
}

fn event_stream(body: Body) -> Response {
    let headers = [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")];
    with_request_id((headers, body).into_response())
}

/// A reply on its way.
struct Walk {
    models: Models,
    api: Api,
    streams: bool,
    turn_text: String,
    index: usize,
    reply: Reply,
}

/// Why a stream ends before its message does.
enum Early {
    /// The client is gone.
    Gone,
    /// The script says so; everything that shall be sent has been.
    Scripted,
}

type Item = Result<Bytes, io::Error>;

impl Walk {
    fn stop(&self) -> Stop {
        let usual = if self.reply.calls_tool() { Stop::ToolUse } else { Stop::EndTurn };
        self.reply.stop.unwrap_or(usual)
    }

    /// The fault at this place, if it is due.
    fn due<'a>(&self, part: &'a Part, at: usize, plain: bool) -> Option<&'a Fault> {
        let Part::Fault(rule) = part else { return None };
        if plain && rule.fault.in_stream() && !rule.plain {
            return None;
        }
        self.models.fault_is_due(rule, &self.turn_text, self.index, at).then_some(&rule.fault)
    }

    /// What happens before any header, in order; the response if that is all there is.
    async fn before_headers(&self) -> Option<Response> {
        for (at, part) in self.reply.parts.iter().enumerate() {
            match part {
                Part::Hold(gate) => self.models.pass_gate(gate).await,
                Part::Fault(rule) if !rule.fault.in_stream() => {
                    let Some(fault) = self.due(part, at, false) else { continue };
                    match self.api.failure(fault, self.streams) {
                        Some(failure) => return Some(failure.into_response()),
                        None => std::future::pending().await,
                    }
                }
                _ => {}
            }
        }
        None
    }

    async fn document(&self, model: String) -> Response {
        let mut writer = self.api.document_writer(model, &self.reply);
        for (at, part) in self.reply.parts.iter().enumerate() {
            match part {
                Part::Text(text) => writer.text(text),
                Part::Chunks { count, delay, text } => {
                    for n in 0..*count {
                        if n > 0 {
                            tokio::time::sleep(*delay).await;
                        }
                        writer.text(text);
                    }
                }
                Part::Filler { bytes, chunk } => filler(*bytes, *chunk).for_each(|piece| writer.text(&piece)),
                Part::Thinking(text) => writer.thinking(text),
                Part::Break => writer.end_text(),
                Part::Pause(time) => tokio::time::sleep(*time).await,
                Part::Gate(gate) => self.models.pass_gate(gate).await,
                Part::Tool { name, input } => writer.tool(name, input),
                Part::Hold(_) => {}
                Part::Fault(_) => match self.due_in_stream(part, at, true) {
                    Some(Fault::SseError { kind }) => {
                        let fault = Fault::Status {
                            status: 529,
                            kind: kind.clone(),
                            message: "scripted failure".to_owned(),
                            headers: Vec::new(),
                        };
                        if let Some(failure) = self.api.failure(&fault, false) {
                            return failure.into_response();
                        }
                    }
                    Some(Fault::Garbage) => return Body::from("<html>no JSON</html>").into_response(),
                    Some(Fault::Cut) => {
                        let cut = futures::stream::iter([Ok(Bytes::from("{\"id\":")), Err(cut_off())]);
                        return Body::from_stream(cut).into_response();
                    }
                    Some(_) => std::future::pending().await,
                    None => {}
                },
            }
        }
        with_request_id(Json(writer.finish(self.stop())).into_response())
    }

    /// [`due`](Self::due), but not for what was settled before the headers (it would be counted twice).
    fn due_in_stream<'a>(&self, part: &'a Part, at: usize, plain: bool) -> Option<&'a Fault> {
        match part {
            Part::Fault(rule) if !rule.fault.in_stream() => None,
            _ => self.due(part, at, plain),
        }
    }

    async fn stream(&self, model: String, out: &mpsc::Sender<Item>) -> Result<(), Early> {
        let mut writer = self.api.event_writer(model, &self.reply);
        send(out, writer.start()).await?;
        for (at, part) in self.reply.parts.iter().enumerate() {
            match part {
                Part::Text(text) => send(out, writer.text(text)).await?,
                Part::Chunks { count, delay, text } => {
                    for n in 0..*count {
                        if n > 0 {
                            tokio::time::sleep(*delay).await;
                        }
                        send(out, writer.text(text)).await?;
                    }
                }
                Part::Filler { bytes, chunk } => {
                    for piece in filler(*bytes, *chunk) {
                        send(out, writer.text(&piece)).await?;
                    }
                }
                Part::Thinking(text) => send(out, writer.thinking(text)).await?,
                Part::Break => send(out, writer.end_text()).await?,
                Part::Pause(time) => tokio::time::sleep(*time).await,
                Part::Gate(gate) => self.models.pass_gate(gate).await,
                Part::Tool { name, input } => send(out, writer.tool(name, input)).await?,
                Part::Hold(_) => {}
                Part::Fault(_) => {
                    if let Some(fault) = self.due_in_stream(part, at, false) {
                        self.break_stream(fault, out).await?;
                    }
                }
            }
        }
        send(out, writer.finish(self.stop())).await
    }

    async fn break_stream(&self, fault: &Fault, out: &mpsc::Sender<Item>) -> Result<(), Early> {
        match fault {
            Fault::Cut => {
                tokio::time::sleep(BEFORE_CUT).await;
                out.send(Err(cut_off())).await.map_err(|_| Early::Gone)?;
                Err(Early::Scripted)
            }
            Fault::End => Err(Early::Scripted),
            Fault::SseError { kind } => {
                send(out, self.api.broken(kind)).await?;
                Err(Early::Scripted)
            }
            Fault::Garbage => send(out, [Bytes::from_static(self.api.garbage())]).await,
            // What was settled before the headers does not come here.
            _ => std::future::pending().await,
        }
    }
}

fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "cut as the script says")
}

async fn send(out: &mpsc::Sender<Item>, events: impl IntoIterator<Item = Bytes>) -> Result<(), Early> {
    for event in events {
        out.send(Ok(event)).await.map_err(|_| Early::Gone)?;
    }
    Ok(())
}

fn streamed(script: Walk, model: String, mark: EndMark) -> Response {
    let (out, events) = mpsc::channel(CHANNEL);
    tokio::spawn(async move {
        let ended = tokio::select! {
            ended = script.stream(model, &out) => ended,
            () = out.closed() => Err(Early::Gone),
        };
        match ended {
            Ok(()) | Err(Early::Scripted) => mark.sent(),
            Err(Early::Gone) => {}
        }
    });
    event_stream(Body::from_stream(ReceiverStream::new(events).fuse()))
}

/// `bytes` bytes of lines of text, in pieces of at most `chunk`.
fn filler(bytes: usize, chunk: usize) -> impl Iterator<Item = String> {
    const LINE: &[u8; 64] = b"The quick brown fox jumps over the lazy dog and runs on, on, on\n";
    (0..bytes).step_by(chunk).map(move |from| {
        (from..bytes.min(from + chunk)).map(|at| char::from(LINE[at % LINE.len()])).collect()
    })
}
