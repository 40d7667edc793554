//! A control plane that dies with many turns open: how soon each is in its hands again.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::runner::Scripted;
use super::{ControlPlane, LIMIT, create, send};
use crate::stats::Series;
use crate::{Bounds, memory, millis};

/// Deaths.
const ROUNDS: usize = 5;
/// Clients that send at once.
const CLIENTS: usize = 16;

pub(crate) async fn measure(bin_dir: &Path, open: usize, bounds: &mut Bounds) -> Result<()> {
    let mut server = ControlPlane::start(bin_dir).await?;
    let runner = Scripted::start(&server.url()).await?;
    server.wait_runner().await?;
    let begin = Instant::now();
    let mut clients = tokio::task::JoinSet::new();
    for n in 0..CLIENTS {
        let mut client = server.client();
        clients.spawn(async move {
            for at in (n..open).step_by(CLIENTS) {
                let conversation = create(&mut client, format!("/w/{at}")).await?;
                send(&mut client, &conversation, "events=5 hold".to_owned()).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(sent) = clients.join_next().await {
        sent??;
    }
    let all = |what| format!("{what}: not all of {open} turns are followed");
    tokio::time::timeout(LIMIT, runner.followed(open)).await.with_context(|| all("at first"))?;
    println!(
        "\n{open} turns opened at once in {:.1} s; control plane Pss {:.1} MB",
        begin.elapsed().as_secs_f64(),
        memory::pss(server.pid()?)?
    );
    let (mut ready, mut recovered) = (Series::default(), Series::default());
    for _ in 0..ROUNDS {
        server.kill().await?;
        runner.forget_followers();
        let begin = Instant::now();
        ready.push(server.start_again().await?);
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, runner.followed(open)).await.with_context(|| all("after a death"))?;
        recovered.push(begin.elapsed());
    }
    println!("\n| {open} open turns, {ROUNDS} deaths | median ms | min | max |\n|---|---|---|---|");
    ready.print("from start to ready");
    recovered.print("from start until every turn is followed again");
    bounds.at_most(
        &format!("milliseconds until {open} open turns are followed again"),
        millis(recovered.median()),
        1_000.0,
    );
    server.kill().await
}
