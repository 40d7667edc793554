//! Who is alive: the processes of a test, found through `/proc`.
//!
//! A process belongs to a test when the test's own directory shows up in its command line, environment, executable,
//! working directory or open files, when it bears the mark of a keeper of this test, or when its parent belongs. Each
//! test has a directory of its own, so tests that run side by side never count each other's.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// What a process is, as far as one can tell from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The process that owns an engine.
    Keeper,
    /// PID 1 of an engine's namespace.
    Init,
    /// An engine's own process: bears a keeper's mark and is the first below its init or keeper.
    Engine,
    /// Anything else: services, tools that an engine started, and what those started.
    Other,
}

/// One living process. Zombies are not alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// Its parent's.
    pub parent: u32,
    /// What it is.
    pub role: Role,
    /// Its command line, arguments separated by spaces.
    pub command: String,
}

struct Seen {
    parent: u32,
    args: Vec<String>,
    belongs: bool,
    marked: bool,
}

/// The living processes of the test whose directory is `root`, by process id, without this process.
#[must_use]
pub fn take(root: &Path) -> Vec<Process> {
    let needle = root.to_string_lossy().into_owned();
    let keepers = keeper_ids(root);
    let own = std::process::id();
    let own_program = fs::read_link("/proc/self/exe").ok();
    let mut seen: BTreeMap<u32, Seen> = BTreeMap::new();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // A process that ends while it is looked at simply is not there.
        let Some((state, parent)) = stat(pid) else { continue };
        if pid == own || state == 'Z' || state == 'X' {
            continue;
        }
        // What another thread of this process has forked and not yet exec'd has all of this process's files open.
        if parent == own
            && own_program.is_some()
            && fs::read_link(format!("/proc/{pid}/exe")).ok() == own_program
        {
            continue;
        }
        let args = arguments(pid);
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let environment = String::from_utf8_lossy(&environment).into_owned();
        let marked = environment
            .split('\0')
            .filter_map(|variable| variable.strip_prefix("ROUNDHOUSE_KEEPER="))
            .any(|id| keepers.contains(id));
        let belongs = marked
            || environment.contains(&needle)
            || args.iter().any(|arg| arg.contains(&needle))
            || links(pid).iter().any(|link| link.contains(&needle));
        seen.insert(pid, Seen { parent, args, belongs, marked });
    }
    let mut members: BTreeSet<u32> =
        seen.iter().filter(|(_, one)| one.belongs).map(|(pid, _)| *pid).collect();
    // Children of members belong, however many generations down.
    loop {
        let more: Vec<u32> = seen
            .iter()
            .filter(|(pid, one)| !members.contains(pid) && members.contains(&one.parent))
            .map(|(pid, _)| *pid)
            .collect();
        if more.is_empty() {
            break;
        }
        members.extend(more);
    }
    members
        .iter()
        .filter_map(|pid| {
            let one = seen.get(pid)?;
            let role = role(&seen, one);
            Some(Process { pid: *pid, parent: one.parent, role, command: one.args.join(" ") })
        })
        .collect()
}

/// The living processes whose command line holds `mark`, whoever they belong to, without this process.
#[must_use]
pub fn with_argument(mark: &str) -> Vec<u32> {
    let own = std::process::id();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != own && stat(*pid).is_some_and(|(state, _)| state != 'Z' && state != 'X'))
        .filter(|pid| arguments(*pid).iter().any(|arg| arg.contains(mark)))
        .collect()
}

/// Whether this process lives.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    stat(pid).is_some_and(|(state, _)| state != 'Z' && state != 'X')
}

/// One line for each process, for messages of failed tests.
#[must_use]
pub fn describe(processes: &[Process]) -> String {
    let lines: Vec<String> = processes
        .iter()
        .map(|one| {
            let command: String = one.command.chars().take(160).collect();
            format!("{} (parent {}, {:?}): {command}", one.pid, one.parent, one.role)
        })
        .collect();
    if lines.is_empty() { "nobody".to_owned() } else { lines.join("\n") }
}

fn role(seen: &BTreeMap<u32, Seen>, one: &Seen) -> Role {
    match one.args.get(1).map(String::as_str) {
        Some("__keeper") => return Role::Keeper,
        Some("__init") => return Role::Init,
        _ => {}
    }
    let parent_args = seen.get(&one.parent).and_then(|parent| parent.args.get(1)).map(String::as_str);
    if one.marked && matches!(parent_args, Some("__keeper" | "__init")) { Role::Engine } else { Role::Other }
}

/// The spools under `root`: a keeper's mark is its spool's id.
fn keeper_ids(root: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![(root.to_owned(), 0_u8)];
    while let Some((directory, depth)) = open.pop() {
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        for entry in entries.flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let path = entry.path();
            if directory.file_name().is_some_and(|name| name == "spools") {
                found.insert(entry.file_name().to_string_lossy().into_owned());
            } else if depth < 6 {
                open.push((path, depth + 1));
            }
        }
    }
    found
}

fn stat(pid: u32) -> Option<(char, u32)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; what follows the last one is regular.
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    Some((state, parent))
}

fn arguments(pid: u32) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut args: Vec<String> =
        bytes.split(|byte| *byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
    if args.last().is_some_and(String::is_empty) {
        args.pop();
    }
    args
}

fn links(pid: u32) -> Vec<String> {
    let mut targets: Vec<String> = ["exe", "cwd"]
        .iter()
        .filter_map(|name| fs::read_link(format!("/proc/{pid}/{name}")).ok())
        .map(|target| target.to_string_lossy().into_owned())
        .collect();
    if let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) {
        targets.extend(
            entries
                .flatten()
                .filter_map(|entry| fs::read_link(entry.path()).ok())
                .map(|target| target.to_string_lossy().into_owned()),
        );
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[tokio::test]
    async fn a_child_is_found_by_its_directory_and_a_grandchild_by_its_parent() {
        let directory = tempfile::tempdir().unwrap();
        // The grandchild carries nothing of the directory but its parent: environment, arguments, cwd are clean.
        let mut child = Command::new("sh")
            .args(["-c", "cd /; exec 3<&0; env -i sh -c 'read line' <&3 & wait"])
            .env("MARK", directory.path())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let parent = child.id();
        crate::wait_until("child and grandchild are seen", crate::BRIEF, || {
            let found = take(directory.path());
            found.iter().any(|one| one.pid == parent) && found.iter().any(|one| one.parent == parent)
        })
        .await
        .unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_alive(parent));
    }
}
