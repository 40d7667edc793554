//! Durable events from an engine to a client: how many a second, and how late each is.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::control::v1::{SendMessageRequest, StreamEventsRequest};
use roundhouse_proto::engine::v1::event_body::Kind;
use roundhouse_proto::engine::v1::{Outcome, TextEvent};

use crate::stack::{Engine, Stack};
use crate::stats::Series;

/// The longest that all turns together may take.
const LIMIT: Duration = Duration::from_secs(300);

/// What one follower saw.
struct Seen {
    events: usize,
    lateness: Series,
}

/// So many turns at once, each in a conversation and a workspace of its own, each with so many events.
pub(crate) async fn measure(bin_dir: &Path, turns: usize, events: usize) -> Result<()> {
    let stack = Stack::start(bin_dir, &[Engine::fake(bin_dir)]).await?;
    let mut conversations = Vec::new();
    for turn in 0..turns {
        let conversation = stack.conversation_with_workspace(&format!("w{turn}")).await?;
        // The engine is started before anything is measured.
        stack.turn(&conversation, "hello").await?;
        conversations.push(conversation);
    }
    let begin = Instant::now();
    let mut followers = tokio::task::JoinSet::new();
    for conversation in conversations {
        let mut client = stack.client();
        followers.spawn(async move {
            let sent = client
                .send_message(SendMessageRequest {
                    conversation_id: conversation.clone(),
                    text: format!("[[events clock count={events} bytes=64]]"),
                    ..SendMessageRequest::default()
                })
                .await?
                .into_inner();
            let turn_id = sent.turn.context("no turn in the answer")?.turn_id;
            let request = StreamEventsRequest {
                conversation_id: conversation,
                turn_id,
                ..StreamEventsRequest::default()
            };
            let mut stream = client.stream_events(request).await?.into_inner();
            let mut seen = Seen { events: 0, lateness: Series::default() };
            while let Some(item) = stream.message().await? {
                let Some(Item::TurnEvent(event)) = item.item else { continue };
                seen.events += 1;
                match event.body.and_then(|body| body.kind) {
                    Some(Kind::Text(text)) => seen.lateness.push(lateness(&text)?),
                    Some(Kind::Terminal(terminal)) if terminal.outcome() != Outcome::Completed => {
                        bail!("the turn ended otherwise: {terminal:?}")
                    }
                    _ => {}
                }
            }
            Ok(seen)
        });
    }
    let mut all = Seen { events: 0, lateness: Series::default() };
    tokio::time::timeout(LIMIT, async {
        while let Some(seen) = followers.join_next().await {
            let seen = seen??;
            all.events += seen.events;
            all.lateness.extend(&seen.lateness);
        }
        anyhow::Ok(())
    })
    .await
    .context("the turns did not end in time")??;
    let elapsed = begin.elapsed();
    if all.lateness.len() != turns * events {
        bail!("{} texts arrived where {} were said", all.lateness.len(), turns * events);
    }
    println!(
        "events, {turns} turns at once, {events} texts each: {:.0} events/s; late p50 {:.1} ms, p99 {:.1} ms",
        all.events as f64 / elapsed.as_secs_f64(),
        crate::millis(all.lateness.median()),
        crate::millis(all.lateness.quantile(0.99)),
    );
    stack.stop().await
}

/// How long ago the engine said it, by the time that the text begins with.
fn lateness(text: &TextEvent) -> Result<Duration> {
    let said: u64 = text
        .text
        .split_whitespace()
        .next()
        .and_then(|first| first.parse().ok())
        .with_context(|| format!("a text without its time: {}", text.text))?;
    let said = UNIX_EPOCH + Duration::from_micros(said);
    Ok(SystemTime::now().duration_since(said).unwrap_or_default())
}
