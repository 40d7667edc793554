//! Turn after turn for minutes, with all that comes and goes: engines that are evicted and resumed, turns that are
//! cancelled, followers that leave. What both services hold at the end is what they held soon after the beginning.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use roundhouse_proto::control::v1::{
    CancelTurnRequest, ListConversationsRequest, StreamEventsRequest, stream_events_response::Item,
};
use roundhouse_proto::engine::v1::event_body::Kind;

use super::{follow, send};
use crate::stack::{Engine, Stack};
use crate::{Bounds, memory};

/// Conversations in which turns follow each other; twice as many as engines may stay warm, so that every turn ends one
/// engine and starts another.
const CONVERSATIONS: usize = 4;
/// A turn of a conversation begins so long after the one before at the earliest: what is looked for grows with turns, and
/// nothing of it with their speed.
const PACE: Duration = Duration::from_secs(1);
/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);

/// What a service holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    megabytes: f64,
    descriptors: usize,
}

impl Held {
    fn of(pid: u32) -> Result<Self> {
        Ok(Self { megabytes: memory::pss(pid)?, descriptors: memory::descriptors(pid)? })
    }
}

pub(crate) async fn measure(bin_dir: &Path, time: Duration, bounds: &mut Bounds) -> Result<()> {
    let settings = ["runner.max_warm_engines=2", "runner.cancel_interrupt_grace=1s"];
    let stack = Stack::start_with(bin_dir, &[Engine::fake(bin_dir)], &settings).await?;
    let (over, turns) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut clients = tokio::task::JoinSet::new();
    for n in 0..CONVERSATIONS {
        let conversation = stack.conversation_with_workspace(&format!("w{n}")).await?;
        let (client, over, turns) = (stack.client(), Arc::clone(&over), Arc::clone(&turns));
        clients.spawn(async move {
            let mut count = 0;
            while !over.load(Ordering::Relaxed) {
                count += 1;
                let next = tokio::time::Instant::now() + PACE;
                turn(client.clone(), &conversation, count).await.with_context(|| format!("turn {count}"))?;
                turns.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep_until(next).await;
            }
            anyhow::Ok(())
        });
    }
    let (control_plane, runner) = stack.pids()?;
    let begin = Instant::now();
    let (mut of_control_plane, mut of_runner) = (Vec::new(), Vec::new());
    while begin.elapsed() < time {
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            Some(ended) = clients.join_next() => {
                ended??;
                bail!("a client ended before its time");
            }
        }
        of_control_plane.push(Held::of(control_plane)?);
        of_runner.push(Held::of(runner)?);
    }
    over.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    let turns = turns.load(Ordering::Relaxed);
    println!(
        "\n| soak, {} s, {turns} turns | first third | second | last |\n|---|---|---|---|",
        time.as_secs()
    );
    report("control plane", &of_control_plane, bounds)?;
    report("runner", &of_runner, bounds)?;
    stack.stop().await
}

/// Compares the last third with the second; the first one fills pools and caches.
fn report(name: &str, looks: &[Held], bounds: &mut Bounds) -> Result<()> {
    let thirds: Vec<&[Held]> = looks.chunks(looks.len().div_ceil(3).max(1)).collect();
    let [first, second, last] = thirds[..] else { bail!("too short for three thirds") };
    let megabytes =
        [first, second, last].map(|t| t.iter().map(|held| held.megabytes).sum::<f64>() / t.len() as f64);
    let descriptors = [first, second, last].map(|t| t.iter().map(|held| held.descriptors).max().unwrap_or(0));
    let [one, two, three] = megabytes;
    println!("| {name}, Pss MB in the mean | {one:.1} | {two:.1} | {three:.1} |");
    bounds.at_most(
        &format!("MB of the {name} in the last third beyond the second"),
        three - two,
        1.5 + 0.05 * two,
    );
    let [one, two, three] = descriptors;
    println!("| {name}, descriptors at most | {one} | {two} | {three} |");
    let what = format!("descriptors of the {name} in the last third");
    bounds.at_most(&what, three as f64, two as f64 + 12.0);
    Ok(())
}

/// One turn of the soak: each fifth is cancelled in its middle, each seventh has a follower that leaves.
async fn turn(
    mut client: roundhouse_proto::control::v1::conversation_service_client::ConversationServiceClient<
        tonic::transport::Channel,
    >,
    conversation: &str,
    count: usize,
) -> Result<()> {
    let cancelled = count.is_multiple_of(5);
    let end = if cancelled { "[[stall]]" } else { "" };
    let text = format!("[[thinking:hm]][[bash:echo {count}]][[events count=20 bytes=200]][[text:said]]{end}");
    let turn = send(&mut client, conversation, text).await?;
    if count.is_multiple_of(7) {
        let request = StreamEventsRequest {
            conversation_id: conversation.to_owned(),
            include_partial: true,
            ..Default::default()
        };
        let mut stream = client.stream_events(request).await?.into_inner();
        stream.message().await?.context("a stream without an item")?;
        client.list_conversations(ListConversationsRequest::default()).await?;
    }
    if !cancelled {
        follow(&mut client, conversation, &turn).await?;
        return Ok(());
    }
    let request = StreamEventsRequest {
        conversation_id: conversation.to_owned(),
        turn_id: turn.clone(),
        ..Default::default()
    };
    let mut stream = client.stream_events(request).await?.into_inner();
    while let Some(item) = stream.message().await? {
        if let Some(Item::TurnEvent(event)) = item.item
            && let Some(Kind::Text(said)) = event.body.and_then(|body| body.kind)
            && said.text == "said"
        {
            let request =
                CancelTurnRequest { request_id: uuid::Uuid::new_v4().to_string(), turn_id: turn.clone() };
            client.cancel_turn(request).await?;
        }
    }
    Ok(())
}
