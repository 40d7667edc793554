//! Answering a Messages request as its script says.

use std::{io, time::Duration};

use axum::{
    Json,
    body::Body,
    http::{HeaderName, HeaderValue, StatusCode},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::StreamExt;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::wire::{self, DocumentWriter, EventWriter};
use crate::{
    Conversation, Models,
    log::EndMark,
    script::{Fault, Part, Reply, Stop},
};

/// Events between the script and the socket: small, so that a reader who stops reading stops the script too.
const CHANNEL: usize = 16;

/// What the bytes before a scripted cut are given to leave the process in.
const BEFORE_CUT: Duration = Duration::from_millis(30);

/// Answers a main request.
pub(crate) async fn main(models: Models, conversation: Conversation, mark: EndMark) -> Response {
    let (index, reply) = match models.choose(&conversation) {
        Ok(chosen) => chosen,
        Err(problem) => {
            mark.sent();
            return failure(400, "invalid_request_error", &problem.to_string(), &[]);
        }
    };
    let script = Walk { models, turn_text: conversation.turn_text().to_owned(), index, reply };
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
pub(crate) fn side(conversation: &Conversation) -> Response {
    let text = if conversation.body()["output_config"]["format"]["type"] == "json_schema" {
        r#"{"title":"Scripted"}"#
    } else if conversation.wants_summary() {
        "<summary>scripted summary</summary>"
    } else {
        "scripted"
    };
    let reply = Reply::default();
    let model = conversation.model().to_owned();
    if conversation.streams() {
        let mut writer = EventWriter::new(model, reply.usage);
        let mut events = vec![writer.start()];
        events.extend(writer.text(text));
        events.extend(writer.finish(Stop::EndTurn));
        event_stream(Body::from(events.concat()))
    } else {
        let mut writer = DocumentWriter::new(model, reply.usage);
        writer.text(text);
        Json(writer.finish(Stop::EndTurn)).into_response()
    }
}

/// An HTTP error as the API words it.
pub(crate) fn failure(status: u16, kind: &str, message: &str, headers: &[(String, String)]) -> Response {
    let mut response = Json(wire::error(kind, message)).into_response();
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    for (name, value) in headers {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            response.headers_mut().insert(name, value);
        }
    }
    with_request_id(response)
}

fn with_request_id(mut response: Response) -> Response {
    if let Ok(value) = HeaderValue::try_from(wire::id("req")) {
        response.headers_mut().insert("request-id", value);
    }
    response
}

fn event_stream(body: Body) -> Response {
    let headers = [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")];
    with_request_id((headers, body).into_response())
}

/// A reply on its way.
struct Walk {
    models: Models,
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
        let in_stream = !matches!(rule.fault, Fault::Status { .. } | Fault::Hang);
        if plain && in_stream && !rule.plain {
            return None;
        }
        self.models.fault_is_due(rule, &self.turn_text, self.index, at).then_some(&rule.fault)
    }

    /// What happens before any header, in order; the response if that is all there is.
    async fn before_headers(&self) -> Option<Response> {
        for (at, part) in self.reply.parts.iter().enumerate() {
            match part {
                Part::Hold(gate) => self.models.pass_gate(gate).await,
                Part::Fault(rule) if matches!(rule.fault, Fault::Status { .. } | Fault::Hang) => {
                    match self.due(part, at, false) {
                        Some(Fault::Status { status, kind, message, headers }) => {
                            return Some(failure(*status, kind, message, headers));
                        }
                        Some(_) => std::future::pending().await,
                        None => {}
                    }
                }
                _ => {}
            }
        }
        None
    }

    async fn document(&self, model: String) -> Response {
        let mut writer = DocumentWriter::new(model, self.reply.usage);
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
                    Some(Fault::Stall) => std::future::pending().await,
                    Some(Fault::SseError { kind }) => return failure(529, kind, "scripted failure", &[]),
                    Some(Fault::Garbage) => return Body::from("<html>no JSON</html>").into_response(),
                    Some(Fault::Cut) => {
                        let cut = futures::stream::iter([Ok(Bytes::from("{\"id\":")), Err(cut_off())]);
                        return Body::from_stream(cut).into_response();
                    }
                    Some(Fault::Status { .. } | Fault::Hang) | None => {}
                },
            }
        }
        with_request_id(Json(writer.finish(self.stop())).into_response())
    }

    /// [`due`](Self::due), but not for what was settled before the headers (it would be counted twice).
    fn due_in_stream<'a>(&self, part: &'a Part, at: usize, plain: bool) -> Option<&'a Fault> {
        match part {
            Part::Fault(rule) if matches!(rule.fault, Fault::Status { .. } | Fault::Hang) => None,
            _ => self.due(part, at, plain),
        }
    }

    async fn stream(&self, model: String, out: &mpsc::Sender<Item>) -> Result<(), Early> {
        let mut writer = EventWriter::new(model, self.reply.usage);
        send(out, [writer.start()]).await?;
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
            Fault::Stall => std::future::pending().await,
            Fault::Cut => {
                tokio::time::sleep(BEFORE_CUT).await;
                out.send(Err(cut_off())).await.map_err(|_| Early::Gone)?;
                Err(Early::Scripted)
            }
            Fault::SseError { kind } => {
                send(out, [wire::event(&wire::error(kind, "scripted failure"))]).await?;
                Err(Early::Scripted)
            }
            Fault::Garbage => {
                send(
                    out,
                    [Bytes::from_static(b"event: content_block_delta\ndata: {\"type\": \x00 no json\n\n")],
                )
                .await
            }
            Fault::Status { .. } | Fault::Hang => Ok(()),
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
