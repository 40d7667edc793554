//! No test may reach anything but this machine: an engine that is told a wrong address must fail, not call out.

use anyhow::{Context as _, bail};

/// Allows tests in a network that has more than loopback. For a look by hand only; `tests/run` never sets it.
pub const ANY_NETWORK: &str = "ROUNDHOUSE_TEST_ANY_NETWORK";

/// Refuses to go on where there is any network interface besides loopback.
///
/// # Errors
/// Says how to run the tests properly.
pub fn require_loopback_only() -> anyhow::Result<()> {
    if std::env::var_os(ANY_NETWORK).is_some() {
        return Ok(());
    }
    let table =
        std::fs::read_to_string("/proc/self/net/dev").context("cannot read the network interfaces")?;
    let others = other_interfaces(&table);
    if !others.is_empty() {
        bail!(
            "these tests run only where nothing but loopback can be reached, and here is {}: use tests/run, \
             or prefix the command with tests/loopback",
            others.join(", ")
        );
    }
    Ok(())
}

/// The interfaces in `/proc/net/dev` besides loopback. Tunnel templates that every network namespace is born with
/// (tunl0, sit0 and such) are there but down and without an address; they are not counted.
fn other_interfaces(table: &str) -> Vec<String> {
    const BORN_WITH: [&str; 8] =
        ["tunl0", "sit0", "gre0", "gretap0", "erspan0", "ip6tnl0", "ip6gre0", "ip_vti0"];
    table
        .lines()
        .skip(2)
        .filter_map(|line| line.split_once(':'))
        .map(|(name, _)| name.trim().to_owned())
        .filter(|name| name != "lo" && name != "ip6_vti0" && !BORN_WITH.contains(&name.as_str()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_besides_loopback_is_seen() {
        let table = "Inter-|   Receive\n face |bytes\n    lo: 1 2\n  eth0: 3 4\n  sit0: 0 0\n";
        assert_eq!(other_interfaces(table), ["eth0"]);
        assert!(other_interfaces("a\nb\n    lo: 1 2\n").is_empty());
    }
}
