//! Whether a container lives for this runner, and dies with it: keepers and engines included.

use std::os::unix::process::parent_id;

/// Inits that a container may be given. Each starts one program, passes signals on to it, reaps, and ends when it ends.
const INITS: [&str; 5] = ["docker-init", "tini", "tini-static", "dumb-init", "catatonit"];

/// Whether this process is the main process of a container: its PID 1, or what the container's small init has started
/// (`docker run --init`, `init: true`). A host's init is neither.
pub(crate) fn is_main_process() -> bool {
    let init = std::fs::read_to_string("/proc/1/comm").unwrap_or_default();
    is_main(std::process::id(), parent_id(), &init)
}

fn is_main(own: u32, parent: u32, init: &str) -> bool {
    own == 1 || (parent == 1 && INITS.contains(&init.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_lives_for_its_pid_1_or_for_what_its_init_has_started() {
        assert!(is_main(1, 0, "engine-runner\n"));
        assert!(is_main(7, 1, "docker-init\n"));
        assert!(is_main(2, 1, "catatonit\n"));
        assert!(!is_main(900, 1, "systemd\n"), "a service of a host outlives nobody");
        assert!(!is_main(9, 7, "docker-init\n"), "a process beside the main one");
        assert!(!is_main(9, 1, ""), "what cannot be read is no container's init");
    }
}
