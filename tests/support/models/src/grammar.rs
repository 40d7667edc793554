//! Scripts written into the user's text, so that a test can choose them from outside of the process.
//!
//! A marker is `[[verb]]`, `[[verb options]]`, `[[verb:payload]]` or `[[verb options:payload]]`. Everything outside of
//! markers is ignored. `verb` is lower-case letters and `_`, directly after the brackets (so the shell's `[[ -f x ]]` is
//! no marker). Options are words between blanks, `key=value` or `flag`, without `:` in them. The payload runs, unchanged
//! and over any number of lines, to the first `]]`; with the flag `b64` it is base64 (for what contains `]]` itself).
//! An unknown verb or option, a missing value, an unclosed marker: the server answers 400, with the marker and the
//! problem in the message. Nothing is guessed.
//!
//! | marker | what happens |
//! |---|---|
//! | `[[text:T]]` | says T. Neighbouring texts are one content block, gates and pauses between them or not |
//! | `[[thinking:T]]` | a thinking block; for Codex a reasoning item with one summary |
//! | `[[slow chunks=N delay=MS:T]]` | says T N times, MS milliseconds apart (10, 100, `word `) |
//! | `[[huge bytes=N chunk=M]]` | says N bytes in deltas of M (65,536) |
//! | `[[break]]` | the next text is a block (for Codex a message) of its own |
//! | `[[pause ms=N]]` | waits |
//! | `[[gate:NAME]]` | stops until the gate is released; what came before has been sent |
//! | `[[hold:NAME]]` | the same before the headers |
//! | `[[bash:COMMAND]]` | a Bash call; `timeout=MS`, `background` |
//! | `[[write path=FILE:CONTENT]]` | a Write call (an absolute path) |
//! | `[[read:FILE]]` | a Read call |
//! | `[[tool name=NAME:JSON]]` | any tool call with this input (absent: `{}`) |
//! | `[[and]]` | the tool call after it joins the one before it in one message (the CLI may run both at once) |
//! | `[[next]]` | what follows answers the next request |
//! | `[[usage in=N out=N read=N created=N]]` | token counts of this reply (100, 25, 20, 10) |
//! | `[[max_tokens:T]]` | says T and ends with `max_tokens`; for Codex `response.incomplete` |
//! | `[[refusal:T]]` | says T and ends with `refusal`; for Codex T is a refusal part (which that CLI drops) |
//! | `[[error CODE:MESSAGE]]` | HTTP status CODE (400..599); `kind=K`, `retry_after=S`, `should_retry=true\|false` |
//! | `[[limit reset=EPOCH]]` | a usage limit: 429 with `x-should-retry: false`, `retry-after: 3600` and the unified headers; for Codex with `usage_limit_reached`, `resets_at` and the `x-codex-primary-*` headers |
//! | `[[too_long]]`, `[[credit]]` | 400 as for a prompt too long, for an empty account; for Codex `response.failed` with `context_length_exceeded`, `insufficient_quota` |
//! | `[[hang]]` | no header ever comes |
//! | `[[stall]]` | the stream stops here and stays open |
//! | `[[cut]]` | the connection is cut here |
//! | `[[end]]` | the stream ends here in good order, without the message's end |
//! | `[[sse_error:KIND]]` | the stream says `error` (`overloaded_error`) and ends; for Codex `response.failed` with the code KIND |
//! | `[[garbage]]` | bytes here that are no event of the API |
//!
//! **Faults** (the last nine rows) happen each time; with `times=N` only the first N times, then the reply goes on as
//! if they were not there. Counted per turn text, or for all with `scope=NAME` together. The faults inside a stream
//! spare a request that asks for no stream (the CLI's fallback after a broken one), unless the flag `plain` is there.
//!
//! **Replies.** Each request of a turn gets the next reply. A tool call ends a reply at the next marker that is no
//! `[[and]]`: `[[bash:a]][[bash:b]][[text:c]]` is three replies. `max_tokens` and `refusal` end one at once. A script
//! whose last reply calls a tool gets one more that says `done`.
//!
//! # For Codex
//!
//! A request to the Responses API gets the same script in that API's words. Tools become what Codex 0.171.0 offers:
//!
//! | marker | call |
//! |---|---|
//! | `[[bash:C]]`, `[[tool name=Bash:{"command":C,...}]]` | `exec_command {"cmd":C}`; `timeout=MS` is `yield_time_ms`, `background` is `yield_time_ms` 250, other members go along (`sandbox_permissions`, `justification`) |
//! | `[[write path=F:T]]` | `exec_command` with `printf %s 'T' > 'F'` |
//! | `[[read:F]]` | `exec_command` with `cat 'F'` |
//! | `[[bash:apply_patch <<'X'...]]` | a patch: the CLI takes it out of the command |
//! | `[[tool name=mcp__S__T:J]]` | the function T in the namespace `mcp__S` with the arguments J |
//! | `[[tool name=N:"text"]]` | the custom tool N with this free text |
//! | `[[tool name=N:J]]` | the function N with the arguments J |
//!
//! `kind=K` of `[[error]]` is the code (and type) of the error: `insufficient_quota`, `usage_not_included`,
//! `server_is_overloaded`. Without it 401, 403, 404 and 429 have the code that belongs to them; `[[error 529]]` becomes a 503 with
//! `server_is_overloaded`. The words of the Messages API (`rate_limit_error`, …) are translated. Codes
//! for `[[sse_error:K]]`: `context_length_exceeded`, `insufficient_quota`, `rate_limit_exceeded`, `server_error`,
//! `server_is_overloaded`. Input tokens are `in`, `read` and `created` together, as that API counts.
//!
//! # For Claude Code
//!
//! The CLI refuses `sleep N` as a command of its own: let a script wait with `[[gate:...]]`, or in a tool with
//! `[[bash:python3 -c 'import time; time.sleep(9)']]`.

use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

use crate::{
    Error,
    script::{Fault, FaultRule, Part, Reply, Script, Stop, Usage},
};

/// The most bytes that one marker may make the model say.
const MAX_FILLER: usize = 64 << 20;

/// The script that the markers in `text` describe; `None` if there is no marker in it.
///
/// # Errors
/// [`Error::Grammar`] if a marker is malformed.
pub fn parse(text: &str) -> Result<Option<Script>, Error> {
    let mut builder = Builder::default();
    let mut rest = text;
    let mut any = false;
    while let Some(at) = rest.find("[[") {
        rest = &rest[at + 2..];
        if !rest.starts_with(|first: char| first.is_ascii_lowercase()) {
            continue;
        }
        let Some(end) = rest.find("]]") else {
            return Err(fail(rest, "no closing ]]"));
        };
        let marker = Marker::read(&rest[..end])?;
        builder.add(&marker).map_err(|problem| fail(&rest[..end], problem))?;
        rest = &rest[end + 2..];
        any = true;
    }
    Ok(any.then(|| builder.finish()))
}

fn fail(marker: &str, problem: impl Into<String>) -> Error {
    Error::Grammar { marker: marker.chars().take(80).collect(), problem: problem.into() }
}

/// The status's name in the API.
fn kind_of(status: u16) -> &'static str {
    match status {
        400 => "invalid_request_error",
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        529 => "overloaded_error",
        _ => "api_error",
    }
}

/// One marker, taken apart.
struct Marker<'a> {
    verb: &'a str,
    options: Vec<(&'a str, Option<&'a str>)>,
    payload: Option<String>,
}

impl<'a> Marker<'a> {
    fn read(inside: &'a str) -> Result<Self, Error> {
        let (head, payload) = match inside.split_once(':') {
            Some((head, payload)) => (head, Some(payload)),
            None => (inside, None),
        };
        let mut words = head.split_whitespace();
        let verb = words.next().unwrap_or_default();
        let options: Vec<_> = words
            .map(|word| match word.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (word, None),
            })
            .collect();
        let payload = match payload {
            Some(text) if options.iter().any(|(key, _)| *key == "b64") => {
                let bytes = BASE64_STANDARD
                    .decode(text.trim())
                    .map_err(|problem| fail(inside, format!("not base64: {problem}")))?;
                Some(String::from_utf8(bytes).map_err(|_| fail(inside, "base64 of what is no UTF-8"))?)
            }
            other => other.map(str::to_owned),
        };
        Ok(Self { verb, options, payload })
    }

    fn allow(&self, known: &[&str]) -> Result<(), String> {
        for (key, _) in &self.options {
            if *key != "b64" && !known.contains(key) {
                return Err(format!("{} has no option {key:?}", self.verb));
            }
        }
        Ok(())
    }

    fn flag(&self, name: &str) -> bool {
        self.options.iter().any(|(key, value)| *key == name && value.is_none())
    }

    fn value(&self, name: &str) -> Option<&'a str> {
        self.options.iter().find(|(key, _)| *key == name).and_then(|(_, value)| *value)
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, String> {
        if self.flag(name) {
            return Err(format!("{name} needs a number"));
        }
        self.value(name)
            .map(|text| text.parse().map_err(|_| format!("{name}={text} is no number in range")))
            .transpose()
    }

    fn needed(&self) -> Result<String, String> {
        self.payload.clone().ok_or_else(|| format!("{} needs a payload after ':'", self.verb))
    }

    fn or(&self, default: &str) -> String {
        self.payload.clone().unwrap_or_else(|| default.to_owned())
    }

    fn fault(&self, fault: Fault) -> Result<Part, String> {
        Ok(Part::Fault(FaultRule {
            fault,
            times: self.number("times")?,
            scope: self.value("scope").map(str::to_owned),
            plain: self.flag("plain"),
        }))
    }
}

#[derive(Default)]
struct Builder {
    replies: Vec<Reply>,
    current: Reply,
    joined: bool,
}

impl Builder {
    fn flush(&mut self) {
        self.replies.push(std::mem::take(&mut self.current));
    }

    fn finish(mut self) -> Script {
        if !self.current.parts.is_empty() || self.current.stop.is_some() || self.replies.is_empty() {
            self.flush();
        }
        if self.replies.last().is_some_and(Reply::calls_tool) {
            self.replies.push(Reply::default().text("done"));
        }
        Script::new(self.replies)
    }

    fn add(&mut self, marker: &Marker<'_>) -> Result<(), String> {
        if marker.verb == "and" {
            marker.allow(&[])?;
            if !self.current.calls_tool() {
                return Err("and joins two tool calls; there is none before it".to_owned());
            }
            self.joined = true;
            return Ok(());
        }
        let joined = std::mem::take(&mut self.joined);
        if self.current.calls_tool() && !joined {
            self.flush();
        }
        let tool = matches!(marker.verb, "bash" | "write" | "read" | "tool");
        if joined && !tool {
            return Err("and joins two tool calls; there is none after it".to_owned());
        }
        if let Some(part) = content(marker)? {
            self.current.parts.push(part);
            return Ok(());
        }
        if let Some(part) = tool_call(marker)? {
            self.current.parts.push(part);
            return Ok(());
        }
        if let Some(part) = fault(marker)? {
            self.current.parts.push(part);
            return Ok(());
        }
        self.shape(marker)
    }

    /// What shapes the reply itself.
    fn shape(&mut self, marker: &Marker<'_>) -> Result<(), String> {
        match marker.verb {
            "next" => {
                marker.allow(&[])?;
                self.flush();
            }
            "usage" => {
                marker.allow(&["in", "out", "read", "created"])?;
                let usual = Usage::default();
                self.current.usage = Usage {
                    input: marker.number("in")?.unwrap_or(usual.input),
                    output: marker.number("out")?.unwrap_or(usual.output),
                    cache_read: marker.number("read")?.unwrap_or(usual.cache_read),
                    cache_creation: marker.number("created")?.unwrap_or(usual.cache_creation),
                };
            }
            "max_tokens" | "refusal" => {
                marker.allow(&[])?;
                let max_tokens = marker.verb == "max_tokens";
                self.current.parts.push(Part::Text(marker.or(if max_tokens {
                    "cut off"
                } else {
                    "I will not."
                })));
                self.current.stop = Some(if max_tokens { Stop::MaxTokens } else { Stop::Refusal });
                self.flush();
            }
            unknown => return Err(format!("unknown verb {unknown:?}")),
        }
        Ok(())
    }
}

fn content(marker: &Marker<'_>) -> Result<Option<Part>, String> {
    let part = match marker.verb {
        "text" => {
            marker.allow(&[])?;
            Part::Text(marker.needed()?)
        }
        "thinking" => {
            marker.allow(&[])?;
            Part::Thinking(marker.needed()?)
        }
        "slow" => {
            marker.allow(&["chunks", "delay"])?;
            Part::Chunks {
                count: marker.number("chunks")?.unwrap_or(10),
                delay: Duration::from_millis(marker.number("delay")?.unwrap_or(100)),
                text: marker.or("word "),
            }
        }
        "huge" => {
            marker.allow(&["bytes", "chunk"])?;
            let bytes = marker.number("bytes")?.ok_or("huge needs bytes=N")?;
            let chunk = marker.number("chunk")?.unwrap_or(65_536);
            if bytes > MAX_FILLER || chunk == 0 {
                return Err(format!("at most {MAX_FILLER} bytes, in chunks of at least one"));
            }
            Part::Filler { bytes, chunk }
        }
        "break" => {
            marker.allow(&[])?;
            Part::Break
        }
        "pause" => {
            marker.allow(&["ms"])?;
            Part::Pause(Duration::from_millis(marker.number("ms")?.ok_or("pause needs ms=N")?))
        }
        "gate" => {
            marker.allow(&[])?;
            Part::Gate(gate_name(marker)?)
        }
        "hold" => {
            marker.allow(&[])?;
            Part::Hold(gate_name(marker)?)
        }
        _ => return Ok(None),
    };
    Ok(Some(part))
}

fn gate_name(marker: &Marker<'_>) -> Result<String, String> {
    let name = marker.needed()?;
    let fine =
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'));
    if fine { Ok(name) } else { Err("a gate's name is letters, digits, '_', '-' and '.'".to_owned()) }
}

fn tool_call(marker: &Marker<'_>) -> Result<Option<Part>, String> {
    let (name, input) = match marker.verb {
        "bash" => {
            marker.allow(&["timeout", "background"])?;
            let mut input = json!({"command": marker.needed()?, "description": "scripted"});
            if let Some(timeout) = marker.number::<u64>("timeout")? {
                input["timeout"] = json!(timeout);
            }
            if marker.flag("background") {
                input["run_in_background"] = json!(true);
            }
            ("Bash", input)
        }
        "write" => {
            marker.allow(&["path"])?;
            let path = marker.value("path").ok_or("write needs path=FILE")?;
            ("Write", json!({"file_path": path, "content": marker.or("")}))
        }
        "read" => {
            marker.allow(&[])?;
            ("Read", json!({"file_path": marker.needed()?}))
        }
        "tool" => {
            marker.allow(&["name"])?;
            let name = marker.value("name").ok_or("tool needs name=NAME")?;
            let input: Value =
                serde_json::from_str(&marker.or("{}")).map_err(|problem| format!("bad input: {problem}"))?;
            (name, input)
        }
        _ => return Ok(None),
    };
    Ok(Some(Part::Tool { name: name.to_owned(), input }))
}

fn fault(marker: &Marker<'_>) -> Result<Option<Part>, String> {
    let fault = match marker.verb {
        "error" => return http_error(marker).map(Some),
        "limit" => {
            marker.allow(&["reset", "times", "scope"])?;
            Fault::Limit {
                reset: marker.number("reset")?.unwrap_or(4_102_444_800),
                message: marker.payload.clone(),
            }
        }
        "too_long" => {
            marker.allow(&["times", "scope"])?;
            Fault::TooLong { message: marker.payload.clone() }
        }
        "credit" => {
            marker.allow(&["times", "scope"])?;
            Fault::Credit { message: marker.payload.clone() }
        }
        "hang" => {
            marker.allow(&["times", "scope"])?;
            Fault::Hang
        }
        "stall" | "cut" | "end" | "garbage" => {
            marker.allow(&["times", "scope", "plain"])?;
            match marker.verb {
                "stall" => Fault::Stall,
                "cut" => Fault::Cut,
                "end" => Fault::End,
                _ => Fault::Garbage,
            }
        }
        "sse_error" => {
            marker.allow(&["times", "scope", "plain"])?;
            Fault::SseError { kind: marker.or("overloaded_error") }
        }
        _ => return Ok(None),
    };
    marker.fault(fault).map(Some)
}

fn http_error(marker: &Marker<'_>) -> Result<Part, String> {
    let code = marker.options.first().filter(|(_, value)| value.is_none()).map_or("", |(key, _)| key);
    marker.allow(&[code, "kind", "retry_after", "should_retry", "times", "scope"])?;
    let code = code.parse().ok().filter(|code| (400..600).contains(code));
    let code: u16 = code.ok_or("error needs a status from 400 to 599 as its first word")?;
    let mut headers = Vec::new();
    if let Some(seconds) = marker.value("retry_after") {
        headers.push(("retry-after", seconds.to_owned()));
    }
    if let Some(retry) = marker.value("should_retry") {
        headers.push(("x-should-retry", retry.to_owned()));
    }
    let kind = marker.value("kind").unwrap_or_else(|| kind_of(code));
    marker.fault(status(code, kind, marker.or("scripted failure"), &headers))
}

fn status(status: u16, kind: &str, message: String, headers: &[(&str, String)]) -> Fault {
    let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    Fault::Status { status, kind: kind.to_owned(), message, headers }
}

#[cfg(test)]
mod tests;
