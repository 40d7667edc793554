//! What /proc tells about processes.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::fs;
use std::path::PathBuf;

/// One process, as /proc tells it at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessInfo {
    /// Its id.
    pub pid: i32,
    /// Its parent's id.
    pub parent: i32,
    /// The kernel's state letter (`R`, `S`, `T`, `Z`, ...).
    pub state: char,
    /// When it started: CLOCK_BOOTTIME in nanoseconds, with the resolution of a clock tick (10 ms). With the id it names
    /// the process for good.
    pub started_ns: u64,
    /// The kernel's short name of the program.
    pub name: String,
}

impl ProcessInfo {
    /// It has ended and only waits to be reaped.
    #[must_use]
    pub fn is_zombie(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// One process; none when it is not there (any more).
pub(crate) fn process(pid: i32) -> Option<ProcessInfo> {
    parse_stat(&fs::read(format!("/proc/{pid}/stat")).ok()?, ticks_per_second())
}

fn ticks_per_second() -> u64 {
    nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)
        .ok()
        .flatten()
        .and_then(|ticks| u64::try_from(ticks).ok())
        .filter(|ticks| *ticks > 0)
        .unwrap_or(100)
}

/// Reads `/proc/<pid>/stat`. The name may hold anything, also spaces and parentheses: it ends at the last `)`.
fn parse_stat(stat: &[u8], ticks: u64) -> Option<ProcessInfo> {
    let open = memchr::memchr(b'(', stat)?;
    let close = memchr::memrchr(b')', stat)?;
    let pid = std::str::from_utf8(stat.get(..open)?).ok()?.trim().parse().ok()?;
    let name = String::from_utf8_lossy(stat.get(open + 1..close)?).into_owned();
    let rest = std::str::from_utf8(stat.get(close + 1..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    // The start time is field 22; the state is field 3, the parent field 4.
    let started: u64 = fields.nth(17)?.parse().ok()?;
    let started_ns =
        u64::try_from(u128::from(started) * 1_000_000_000 / u128::from(ticks)).unwrap_or(u64::MAX);
    Some(ProcessInfo { pid, parent, state, started_ns, name })
}

/// All processes that /proc shows.
pub(crate) fn all() -> Vec<ProcessInfo> {
    let ticks = ticks_per_second();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| {
            let name = entry.ok()?.file_name();
            let pid: i32 = name.to_str()?.parse().ok()?;
            parse_stat(&fs::read(format!("/proc/{pid}/stat")).ok()?, ticks)
        })
        .collect()
}

/// Whether the process of this id has this short name, was born by then, and has not begun to end: one that has may have
/// given up what it held already.
pub(crate) fn is_still(pid: i32, name: &CStr, born_by_ns: u64) -> bool {
    const PF_EXITING: u64 = 4;
    let Ok(stat) = fs::read(format!("/proc/{pid}/stat")) else { return false };
    let Some(process) = parse_stat(&stat, ticks_per_second()) else { return false };
    // The flags are field 9; the first one after the name is field 3.
    let flags = memchr::memrchr(b')', &stat)
        .and_then(|close| std::str::from_utf8(stat.get(close + 1..)?).ok())
        .and_then(|rest| rest.split_ascii_whitespace().nth(6)?.parse::<u64>().ok());
    process.name.as_bytes() == name.to_bytes()
        && process.started_ns <= born_by_ns
        && !process.is_zombie()
        && flags.is_some_and(|flags| flags & PF_EXITING == 0)
}

/// The id that a process has in its own PID namespace: its own view of itself. None when it is not there (any more).
#[must_use]
pub fn own_pid(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    ids.split_ascii_whitespace().last()?.parse().ok()
}

/// Whether the process carries `NAME=value` in the environment it was exec'd with. False where that cannot be read.
pub(crate) fn has_env(pid: i32, entry: &[u8]) -> bool {
    let path = PathBuf::from(format!("/proc/{pid}/environ"));
    fs::read(path).is_ok_and(|environ| environ.split(|byte| *byte == 0).any(|var| var == entry))
}

/// The processes below `root` (which is not among them) as they are now, zombies included.
///
/// What was orphaned is found as long as its new parent lies below `root` too, as it does below an init.
#[must_use]
pub fn descendants(root: i32) -> Vec<ProcessInfo> {
    let mut processes = all();
    for _ in 1..LOOKS {
        if !is_torn(&processes) {
            break;
        }
        processes = all();
    }
    below(&processes, &[root])
}

/// How often /proc is read until it shows one moment. Where parents are hidden it never does.
const LOOKS: u32 = 8;

/// /proc is no snapshot: a parent that ended while it was read is missing from it, while its child was still read as
/// its own. Such a child would be found below nobody, although it has been handed to a living parent by now.
fn is_torn(processes: &[ProcessInfo]) -> bool {
    let known: HashSet<i32> = processes.iter().map(|process| process.pid).collect();
    processes.iter().any(|process| process.parent != 0 && !known.contains(&process.parent))
}

/// Those of `processes` that lie below one of `roots`.
pub(crate) fn below(processes: &[ProcessInfo], roots: &[i32]) -> Vec<ProcessInfo> {
    let mut children: HashMap<i32, Vec<&ProcessInfo>> = HashMap::new();
    for process in processes {
        children.entry(process.parent).or_default().push(process);
    }
    let mut seen: HashSet<i32> = roots.iter().copied().collect();
    let mut open: Vec<i32> = roots.to_vec();
    let mut found = Vec::new();
    while let Some(parent) = open.pop() {
        for child in children.get(&parent).into_iter().flatten() {
            if seen.insert(child.pid) {
                open.push(child.pid);
                found.push((*child).clone());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_spaces_and_parentheses_is_read() {
        let stat = b"42 (a b) (c)) S 7 42 42 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 250 0 0";
        let info = parse_stat(stat, 100).unwrap();
        assert_eq!(
            info,
            ProcessInfo {
                pid: 42,
                parent: 7,
                state: 'S',
                started_ns: 2_500_000_000,
                name: "a b) (c)".to_owned()
            }
        );
    }

    #[test]
    fn a_process_knows_itself_by_its_own_id() {
        let me = i32::try_from(std::process::id()).unwrap();
        assert_eq!(own_pid(me), Some(me));
        assert_eq!(own_pid(-1), None);
    }

    #[test]
    fn a_child_whose_parent_is_missing_is_no_moment() {
        let process =
            |pid, parent| ProcessInfo { pid, parent, state: 'S', started_ns: 1, name: String::new() };
        assert!(!is_torn(&[process(1, 0), process(5, 1), process(7, 5)]));
        assert!(is_torn(&[process(1, 0), process(7, 5)]));
    }

    #[test]
    fn cut_stat_lines_are_no_process() {
        let stat = b"42 (x) S 7 42 42 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 250";
        for cut in 0..stat.len() - 3 {
            assert_eq!(parse_stat(&stat[..cut], 100), None, "cut at {cut}");
        }
    }

    #[test]
    fn this_process_is_found_below_its_parent() {
        let me = i32::try_from(std::process::id()).unwrap();
        let parent = process(me).unwrap().parent;
        assert!(descendants(parent).iter().any(|info| info.pid == me));
    }
}
