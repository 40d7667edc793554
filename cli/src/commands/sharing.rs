//! `summary`, `sessions unusable`, `runners drain` and `undrain`.

use std::io::Read as _;

use roundhouse_proto::control::v1 as control;
use serde_json::{Value, json};

use crate::args::{SessionsCommand, SummaryCommand};
use crate::client::{self, Client, call, incomplete};
use crate::exit::Exit;
use crate::json;
use crate::output::Output;
use crate::status::Failure;

/// Longest summary, in bytes; the server's own limit.
const MAX_SUMMARY_BYTES: u64 = 256 * 1024;

pub(crate) async fn summary(client: &Client, what: SummaryCommand, output: Output) -> Result<Exit, Failure> {
    match what {
        SummaryCommand::Get { conversation, version } => {
            let request = control::GetSummaryRequest {
                conversation_id: client.conversation_id(&conversation).await?,
                version: version.unwrap_or(0),
            };
            let answer = client.summaries().get_summary(call(request)).await?.into_inner();
            let summary = answer.summary.ok_or_else(|| incomplete("the summary"))?;
            if !output.is_json() {
                output.note(&heading(&summary));
            }
            output
                .result(|| json!({"summary": summary_json(&summary)}), || summary.text.trim_end().to_owned());
        }
        SummaryCommand::Put { conversation, text, through, expected_version, author, request_id } => {
            let request = control::PutSummaryRequest {
                request_id: client::request_id(request_id),
                conversation_id: client.conversation_id(&conversation).await?,
                expected_version,
                through,
                text: if text == "-" { read_text()? } else { text },
                author: author.unwrap_or_default(),
            };
            let answer = client.summaries().put_summary(call(request)).await?.into_inner();
            let summary = answer.summary.ok_or_else(|| incomplete("the summary"))?;
            output.result(|| json!({"summary": summary_json(&summary)}), || heading(&summary));
        }
    }
    Ok(Exit::Done)
}

fn heading(summary: &control::Summary) -> String {
    format!("version {} by {}, up to position {}", summary.version, summary.author, summary.through)
}

/// A summary as JSON.
pub(crate) fn summary_json(summary: &control::Summary) -> Value {
    json!({
        "conversation_id": summary.conversation_id,
        "version": summary.version,
        "through": summary.through,
        "text": summary.text,
        "truncated": summary.truncated,
        "author": summary.author,
        "create_time": json::time(summary.create_time.as_ref()),
    })
}

fn read_text() -> Result<String, Failure> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        // One more than allowed, so that the server refuses what is too long instead of storing a part.
        .take(MAX_SUMMARY_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| Failure::new(Exit::Failed, format!("standard input: {error}")))?;
    String::from_utf8(bytes).map_err(|_| Failure::new(Exit::Invalid, "standard input is not UTF-8"))
}

pub(crate) async fn session(client: &Client, what: SessionsCommand, output: Output) -> Result<Exit, Failure> {
    let SessionsCommand::Unusable { session, reason, request_id } = what;
    let request = control::MarkSessionUnusableRequest {
        request_id: client::request_id(request_id),
        session_id: session,
        reason,
    };
    let answer = client.sessions().mark_session_unusable(call(request)).await?.into_inner();
    let session = answer.session.ok_or_else(|| incomplete("the session"))?;
    output.result(
        || json!({"session": json::session(&session)}),
        || {
            format!(
                "{} is unusable: {}\nits files are kept; the next turn gets a new session",
                session.session_id, session.unusable_reason
            )
        },
    );
    Ok(Exit::Done)
}

/// Drains a runner, or ends its draining.
pub(crate) async fn drain(
    client: &Client,
    named: String,
    undrain: bool,
    request_id: Option<String>,
    output: Output,
) -> Result<Exit, Failure> {
    let runner_id = if named.starts_with("run_") { named } else { runner_named(client, &named).await? };
    let request =
        control::DrainRunnerRequest { request_id: client::request_id(request_id), runner_id, undrain };
    let answer = client.runners().drain_runner(call(request)).await?.into_inner();
    let runner = answer.runner.ok_or_else(|| incomplete("the runner"))?;
    output.result(
        || json!({"runner": json::runner(&runner)}),
        || {
            if undrain {
                format!("{} takes new turns", runner.runner_id)
            } else {
                let turns = match runner.running_turns {
                    1 => "1 turn".to_owned(),
                    turns => format!("{turns} turns"),
                };
                format!("{} takes nothing new; {turns} still run there", runner.runner_id)
            }
        },
    );
    Ok(Exit::Done)
}

/// The id of the only runner on a host of this name.
async fn runner_named(client: &Client, name: &str) -> Result<String, Failure> {
    let answer = client.runners().list_runners(call(control::ListRunnersRequest {})).await?.into_inner();
    let mut found = answer.runners.into_iter().filter(|runner| runner.hostname == name);
    match (found.next(), found.next()) {
        (Some(runner), None) => Ok(runner.runner_id),
        (Some(_), Some(_)) => {
            Err(Failure::new(Exit::Invalid, format!("several runners are on a host {name}"))
                .next("use the runner's id; `roundhouse runners` shows it"))
        }
        (None, _) => Err(Failure::new(Exit::Conflict, format!("there is no runner on a host {name}"))
            .next("`roundhouse runners` shows the runners")),
    }
}
