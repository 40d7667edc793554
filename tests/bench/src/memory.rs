//! Memory of processes, as the kernel accounts it.

use std::path::Path;

use anyhow::{Context as _, Result};

/// Proportional set size in MB (10^6 bytes): private memory and the process's share of what it shares.
pub(crate) fn pss(pid: u32) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))
        .with_context(|| format!("the memory of process {pid} cannot be read"))?;
    let kib: f64 = text
        .lines()
        .find_map(|line| line.strip_prefix("Pss:"))
        .and_then(|rest| rest.split_whitespace().next())
        .context("smaps_rollup has no Pss")?
        .parse()?;
    Ok(kib * 1024.0 / 1e6)
}

/// Open file descriptors.
pub(crate) fn descriptors(pid: u32) -> Result<usize> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd"));
    Ok(entries.with_context(|| format!("the descriptors of process {pid} cannot be read"))?.count())
}

/// Keepers and inits whose environment or command line names this state directory, or that descend from one.
pub(crate) fn keepers(state_dir: &Path) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(command) = std::fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        let parent = std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .ok()
            .and_then(|stat| stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok())
            .unwrap_or(0);
        let ours = command.contains(" __keeper");
        let init = command.contains(" __init");
        let directory = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
        if ours && (command.contains(&state_dir.display().to_string()) || directory.starts_with(state_dir)) {
            found.push(pid);
        } else if init {
            parents.push((pid, parent));
        }
    }
    let inits: Vec<_> =
        parents.into_iter().filter(|(_, parent)| found.contains(parent)).map(|(pid, _)| pid).collect();
    found.extend(inits);
    Ok(found)
}
