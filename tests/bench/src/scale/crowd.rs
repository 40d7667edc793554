//! Many turns at once, each with an engine of its own, and a runner that dies under all of them.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use roundhouse_proto::control::v1::{StreamEventsRequest, stream_events_response::Item};
use roundhouse_proto::engine::v1::event_body::Kind;

use super::{LIMIT, follow, send};
use crate::stack::{Engine, Stack};
use crate::{Bounds, memory, millis};

/// The longest that one turn may take to say its first word, on two cores and with all engines starting beside it.
const FIRST_WORD: Duration = Duration::from_secs(120);

pub(crate) async fn measure(bin_dir: &Path, turns: usize, bounds: &mut Bounds) -> Result<()> {
    let settings = [format!("runner.max_warm_engines={}", turns + 8)];
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let mut stack = Stack::start_with(bin_dir, &[Engine::fake(bin_dir)], &settings).await?;
    let gate = stack.directory().join("gate");
    let mut conversations = Vec::new();
    for turn in 0..turns {
        conversations.push(stack.conversation_with_workspace(&format!("w{turn}")).await?);
    }

    let begin = Instant::now();
    let mut sent = Vec::new();
    for conversation in &conversations {
        let text = format!("[[text:first]][[gate:{}]][[text:second]]", gate.display());
        sent.push((conversation.clone(), send(&mut stack.client(), conversation, text).await?));
    }
    let accepted = begin.elapsed();
    let mut waiting = tokio::task::JoinSet::new();
    for (conversation, turn) in sent.clone() {
        let client = stack.client();
        waiting.spawn(async move { said(client, &conversation, &turn, "first").await });
    }
    tokio::time::timeout(FIRST_WORD, async {
        while let Some(said) = waiting.join_next().await {
            said??;
        }
        anyhow::Ok(())
    })
    .await
    .context("not every engine has spoken in time")??;
    let spoken = begin.elapsed();
    let (control_plane, runner) = stack.pids()?;
    let keepers = memory::keepers(&stack.state_dir())?;
    let mut kept = 0.0;
    for pid in &keepers {
        kept += memory::pss(*pid)?;
    }
    let (control_plane_mb, runner_mb) = (memory::pss(control_plane)?, memory::pss(runner)?);
    println!("\n| {turns} turns at once, each with an engine | figure |\n|---|---|");
    println!("| all messages accepted | {:.0} ms |", millis(accepted));
    println!("| every engine started and heard | {:.1} s |", spoken.as_secs_f64());
    println!("| control plane, Pss | {control_plane_mb:.1} MB |");
    println!("| runner, Pss | {runner_mb:.1} MB, {} descriptors |", memory::descriptors(runner)?);
    println!("| {} keepers and inits, Pss in all | {kept:.1} MB |", keepers.len());
    bounds.at_most("MB of the control plane with all turns at once", control_plane_mb, 80.0);
    bounds.at_most("MB of the runner with all turns at once", runner_mb, 120.0);
    bounds.at_most("MB of a keeper with its init", kept / turns as f64, 6.0);

    let begin = Instant::now();
    let ready = stack.restart_runner().await?;
    std::fs::write(&gate, "")?;
    let mut ending = tokio::task::JoinSet::new();
    for (conversation, turn) in sent {
        let mut client = stack.client();
        ending.spawn(async move {
            let events = follow(&mut client, &conversation, &turn).await?;
            anyhow::Ok((client, conversation, turn, events))
        });
    }
    let all = tokio::time::timeout(LIMIT, async {
        let mut all = Vec::new();
        while let Some(ended) = ending.join_next().await {
            all.push(ended??);
        }
        anyhow::Ok(all)
    });
    let all = all.await.context("not every turn has ended after the runner's death")??;
    let ended = begin.elapsed();
    for (client, conversation, turn, _) in all {
        said(client, &conversation, &turn, "second").await?;
    }
    println!("| runner ready again after kill -9 | {:.0} ms |", millis(ready));
    println!("| every turn taken up again and ended | {:.1} s |", ended.as_secs_f64());
    bounds.at_most("milliseconds until the runner is ready again", millis(ready), 2_000.0);
    stack.stop().await
}

/// Waits until the turn has said this, once.
async fn said(
    mut client: roundhouse_proto::control::v1::conversation_service_client::ConversationServiceClient<
        tonic::transport::Channel,
    >,
    conversation: &str,
    turn: &str,
    text: &str,
) -> Result<()> {
    let request = StreamEventsRequest {
        conversation_id: conversation.to_owned(),
        turn_id: turn.to_owned(),
        ..Default::default()
    };
    let mut stream = client.stream_events(request).await?.into_inner();
    while let Some(item) = stream.message().await? {
        if let Some(Item::TurnEvent(event)) = item.item
            && let Some(Kind::Text(said)) = event.body.and_then(|body| body.kind)
            && said.text == text
        {
            return Ok(());
        }
    }
    bail!("turn {turn} ended without having said {text:?}")
}
