//! The `control-plane` program.

fn main() -> std::process::ExitCode {
    roundhouse_control_plane::main(std::env::args_os())
}
