//! A warm turn of Codex: through both services, over app-server's own protocol, and with one `exec` per turn.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use roundhouse_models::{ModelServer, Options};

use crate::stack::{Engine, Stack};
use crate::stats::Series;
use crate::{Bounds, bare_codex, millis};

/// How many times longer than app-server's own warm turn one through the services may take.
const AGAINST_WARM: f64 = 1.3;
/// How many times longer a turn in a process of its own has to take.
const AGAINST_EXEC: f64 = 2.0;

/// One turn of each kind per round.
pub(crate) async fn measure(bin_dir: &Path, codex: &Path, rounds: usize, bounds: &mut Bounds) -> Result<()> {
    let server = ModelServer::start(Options::default()).await?;
    let url = server.base_url();
    let stack = Stack::start(bin_dir, &[Engine::codex(codex, &url)]).await?;
    let conversation = stack.conversation().await?;
    let home = tempfile::tempdir()?;
    let mut warm = bare_codex::Warm::start(codex, &url, home.path()).await?;

    // The first turns start processes and make databases; they are not what is compared.
    let started = stack.turn(&conversation, "[[text:first]]").await?;
    warm.turn("[[text:first]]").await?;
    // A home of its own: it is not to wait for the app-server's files.
    let other = tempfile::tempdir()?;
    bare_codex::exec(codex, &url, other.path(), "[[text:first]]").await?;
    println!("\nCodex: first turn through the stack, engine start included: {:.0} ms", millis(started));

    let mut through = Series::default();
    let mut direct = Series::default();
    let mut single = Series::default();
    for round in 0..rounds {
        let text = format!("round {round} [[text:answer {round}]]");
        through.push(stack.turn(&conversation, &text).await?);
        direct.push(warm.turn(&text).await?);
        single.push(bare_codex::exec(codex, &url, other.path(), &text).await?);
    }
    warm.stop().await?;
    println!("\n| Codex turn ({rounds} rounds) | median ms | min | max |\n|---|---|---|---|");
    for (name, series) in [
        ("both services, warm", &through),
        ("app-server's own protocol", &direct),
        ("one `codex exec` per turn", &single),
    ] {
        series.print(name);
    }
    println!(
        "\nagainst the warm protocol: {:.2} times (bound {AGAINST_WARM})\n\
         against one exec per turn: {:.1} times faster (bound {AGAINST_EXEC})",
        through.ratio(&direct),
        single.ratio(&through)
    );
    bounds.at_most("a warm Codex turn against app-server's", through.ratio(&direct), AGAINST_WARM);
    bounds.at_least("one codex exec per turn against a warm turn", single.ratio(&through), AGAINST_EXEC);
    stack.stop().await
}

/// The pinned CLI, where the tests install it: the native executable, not the script that starts it.
pub(crate) fn pinned() -> Result<PathBuf> {
    let arch = std::env::consts::ARCH;
    let package = if arch == "aarch64" { "codex-linux-arm64" } else { "codex-linux-x64" };
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../engines/node_modules/@openai")
        .join(package)
        .join(format!("vendor/{arch}-unknown-linux-musl/bin/codex"));
    path.canonicalize()
        .with_context(|| format!("no Codex at {}; run `npm ci` in tests/engines", path.display()))
}
