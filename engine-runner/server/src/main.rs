//! The `engine-runner` program.

fn main() -> std::process::ExitCode {
    // Keepers and inits are this executable again; nothing may be started before they are told apart.
    roundhouse_process::reexec();
    roundhouse_engine_runner::main(std::env::args_os())
}
