//! A scripted model as a process of its own, for Compose and for trying things out by hand.

use std::{
    io::Write as _,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::ExitCode,
};

use clap::Parser;
use roundhouse_models::{ModelServer, Options, Script};

/// A scripted server of the Anthropic Messages and OpenAI Responses APIs: the user's text says what the model does.
#[derive(Debug, Parser)]
#[command(version, name = "scripted-models")]
struct Args {
    /// The address to listen on. Anything but loopback is for containers.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// The port; 0 lets the system choose.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// What the model does where the text says nothing, as markers.
    #[arg(long, default_value = "[[text:ok]]")]
    default_script: String,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            let source = std::error::Error::source(problem.as_ref())
                .map_or(String::new(), |source| format!(": {source}"));
            let _ = writeln!(std::io::stderr(), "scripted-models: {problem}{source}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let options = Options { default_reply: Script::parse(&args.default_script)?, ..Options::default() };
    let server = ModelServer::start_on(SocketAddr::new(args.host, args.port), &options).await?;
    let ready = serde_json::json!({"ready": true, "url": server.base_url()});
    // Whoever started this reads the address here.
    writeln!(std::io::stdout(), "{ready}")?;
    std::io::stdout().flush()?;
    let mut terminated = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted?,
        _ = terminated.recv() => {}
    }
    server.stop().await;
    Ok(())
}
