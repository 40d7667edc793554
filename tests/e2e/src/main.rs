//! `roundhouse-chaos --seed 7 --minutes 30`: random deaths under load for as long as one likes, see [`roundhouse_e2e::chaos`].
//! The other executables lie beside it (`cargo build --workspace --bins --all-features`); run it under `tests/loopback`.

use std::time::Duration;

use clap::Parser;
use roundhouse_e2e::chaos::{Options, Until, run};

/// Kills at random under load and checks what clients were told.
#[derive(Debug, Parser)]
struct Args {
    /// The dice fall the same under the same seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// For how long.
    #[arg(long, default_value_t = 5)]
    minutes: u64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let until = Until::Time(Duration::from_secs(args.minutes * 60));
    let report = run(Options { seed: args.seed, until }).await?;
    #[expect(clippy::print_stdout, reason = "the result of the program")]
    {
        println!("{report}");
    }
    Ok(())
}
