//! git in a hostile worktree: facts only, and nothing that the worktree's own configuration names is run.
//!
//! A repository's configuration can name programs: hooks, fsmonitor, pagers, external diffs, filters, helpers of
//! remotes. Hooks, fsmonitor and pager are switched off by options that beat it; filters have names of the repository's
//! choosing, so they are read first (reading a configuration runs nothing) and emptied one by one; a missing object is
//! never fetched, and no transport is allowed. Every run is bounded in time and output.

use std::{
    ffi::OsString,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{OnceLock, mpsc},
    time::{Duration, Instant, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

/// Time for all git runs of one look together.
const TIME: Duration = Duration::from_secs(5);

/// Output read from one run, in bytes.
const OUTPUT: u64 = 2 * 1024 * 1024;

/// Filters emptied at most; a repository with more is not looked at.
const FILTERS: usize = 64;

/// Dirty files remembered at most.
const FILES: usize = 2000;

/// Commits listed at most.
pub(crate) const COMMITS: usize = 50;

/// Changed files listed at most.
pub(crate) const CHANGED_FILES: usize = 200;

/// A worktree at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Worktree {
    /// The commit of HEAD. Empty: none yet.
    pub head: String,
    /// The branch. Empty: detached.
    pub branch: String,
    /// Files that differ from HEAD, each with what tells two states of it apart.
    pub dirty: Vec<(String, String)>,
    /// There are more than are remembered.
    pub truncated: bool,
}

/// What changed between two moments.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Changes {
    /// Commits made, newest first.
    pub commits: Vec<String>,
    /// Files that differ, by path.
    pub files: Vec<String>,
    /// Something was cut.
    pub truncated: bool,
}

/// Whether a directory or one above it has a `.git` that can be a repository's: a file that names one, or a directory
/// with a HEAD. An empty directory of that name is none: sandboxes leave such behind. A few looks at the file system, and
/// no process.
#[must_use]
pub(crate) fn may_be_in_worktree(directory: &Path) -> bool {
    directory.ancestors().any(|ancestor| {
        let git = ancestor.join(".git");
        // A link is followed, as git does.
        std::fs::metadata(&git).is_ok_and(|metadata| {
            metadata.is_file() || (metadata.is_dir() && git.join("HEAD").symlink_metadata().is_ok())
        })
    })
}

/// Looks at a worktree. None: not a git worktree, no git here, or no answer in time. Blocking.
#[must_use]
pub(crate) fn look(directory: &Path) -> Option<Worktree> {
    let git = Git::open(directory)?;
    let output = git.run(&[
        "status",
        "--porcelain=v2",
        "--branch",
        "-z",
        "--untracked-files=all",
        "--ignore-submodules=all",
        "--no-renames",
    ])?;
    Some(parse(&output, directory))
}

fn parse(output: &[u8], directory: &Path) -> Worktree {
    let mut worktree = Worktree::default();
    for line in output.split(|byte| *byte == 0) {
        let line = String::from_utf8_lossy(line);
        if let Some(head) = line.strip_prefix("# branch.oid ") {
            if head != "(initial)" {
                worktree.head = head.to_owned();
            }
        } else if let Some(branch) = line.strip_prefix("# branch.head ") {
            if branch != "(detached)" {
                worktree.branch = branch.to_owned();
            }
        } else if let Some(path) = line.strip_prefix("? ") {
            worktree.add(directory, path, "?");
        } else if line.starts_with("1 ") || line.starts_with("u ") {
            // `1 XY sub mH mI mW hH hI path`, `u XY sub m1 m2 m3 mW h1 h2 h3 path`.
            let fields = if line.starts_with('1') { 9 } else { 11 };
            let parts: Vec<&str> = line.splitn(fields, ' ').collect();
            if let (Some(path), Some(status)) = (parts.get(fields - 1), parts.get(1)) {
                worktree.add(directory, path, status);
            }
        }
    }
    worktree
}

impl Worktree {
    fn add(&mut self, directory: &Path, path: &str, status: &str) {
        if self.dirty.len() >= FILES {
            self.truncated = true;
            return;
        }
        // Size and times tell that a file which was dirty before was changed again, without reading it.
        let stamp = std::fs::symlink_metadata(directory.join(path))
            .map(|metadata| {
                let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
                format!("{status} {} {:?}", metadata.len(), modified.unwrap_or_default())
            })
            .unwrap_or_else(|_| format!("{status} gone"));
        self.dirty.push((path.to_owned(), stamp));
    }

    /// Compares an earlier look with this one. Blocking.
    #[must_use]
    pub(crate) fn changes_since(&self, before: &Self, directory: &Path) -> Changes {
        let mut changes = Changes { truncated: self.truncated || before.truncated, ..Changes::default() };
        let mut files = std::collections::BTreeSet::new();
        if self.head != before.head
            && !self.head.is_empty()
            && let Some(git) = Git::open(directory)
        {
            let range = if before.head.is_empty() {
                self.head.clone()
            } else {
                format!("{}..{}", before.head, self.head)
            };
            let count = format!("--max-count={}", COMMITS + 1);
            if let Some(output) = git.run(&["rev-list", &count, &range, "--"]) {
                changes.commits = String::from_utf8_lossy(&output).lines().map(str::to_owned).collect();
            }
            let diff = if before.head.is_empty() {
                git.run(&["ls-tree", "-r", "-z", "--name-only", "--full-tree", &self.head])
            } else {
                git.run(&[
                    "diff-tree",
                    "-r",
                    "-z",
                    "--name-only",
                    "--no-renames",
                    "--no-ext-diff",
                    "--no-textconv",
                    &before.head,
                    &self.head,
                ])
            };
            for path in diff.unwrap_or_default().split(|byte| *byte == 0).filter(|path| !path.is_empty()) {
                files.insert(String::from_utf8_lossy(path).into_owned());
            }
        }
        let old: std::collections::BTreeMap<_, _> = before.dirty.iter().map(|(p, s)| (p, s)).collect();
        let new: std::collections::BTreeMap<_, _> = self.dirty.iter().map(|(p, s)| (p, s)).collect();
        for (path, stamp) in &new {
            if old.get(path) != Some(stamp) {
                files.insert((*path).clone());
            }
        }
        for path in old.keys().filter(|path| !new.contains_key(*path)) {
            files.insert((*path).clone());
        }
        changes.truncated |= changes.commits.len() > COMMITS || files.len() > CHANGED_FILES;
        changes.commits.truncate(COMMITS);
        changes.files = files.into_iter().take(CHANGED_FILES).collect();
        changes
    }
}

/// Where git is: looked for once, for a program that is given by its path is started without a copy of this process.
/// Where none is found it is looked for again each time.
fn program() -> PathBuf {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    if let Some(found) = FOUND.get().filter(|found| found.is_file()) {
        return found.clone();
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
    // Only absolute places: a workspace is not one to take programs from.
    let found =
        std::env::split_paths(&path).filter(|place| place.is_absolute()).map(|place| place.join("git"));
    match found.into_iter().find(|program| program.is_file()) {
        Some(program) => FOUND.get_or_init(|| program).clone(),
        None => PathBuf::from("git"),
    }
}

/// A hardened git in one worktree.
#[derive(Debug)]
struct Git {
    directory: PathBuf,
    filters: Vec<String>,
    deadline: Instant,
}

impl Git {
    fn open(directory: &Path) -> Option<Self> {
        // Workspaces without git are told by a look at the file system, without a process.
        if !may_be_in_worktree(directory) {
            return None;
        }
        let mut git =
            Self { directory: directory.to_owned(), filters: Vec::new(), deadline: Instant::now() + TIME };
        let names =
            git.run_with(&["config", "--includes", "--name-only", "-z", "--get-regexp", "^filter\\."])?;
        for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let name = String::from_utf8(name.to_vec()).ok()?;
            let driver = name.strip_prefix("filter.")?.rsplit_once('.')?.0.to_owned();
            if !git.filters.contains(&driver) {
                git.filters.push(driver);
            }
        }
        (git.filters.len() <= FILTERS).then_some(git)
    }

    fn run(&self, args: &[&str]) -> Option<Vec<u8>> {
        self.run_with(args)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program());
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin")))
            .env("LC_ALL", "C")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_OPTIONAL_LOCKS", "0")
            .env("GIT_TERMINAL_PROMPT", "0")
            .env("GIT_NO_LAZY_FETCH", "1")
            .env("GIT_ALLOW_PROTOCOL", "none")
            .env("GIT_PAGER", "cat")
            .env("GIT_ASKPASS", "true")
            .env("GIT_NO_REPLACE_OBJECTS", "1")
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        // What stands in the environment beats the repository's own files. An empty filter is none.
        let mut settings = vec![
            ("core.fsmonitor".to_owned(), "false".to_owned()),
            ("core.hooksPath".to_owned(), "/dev/null".to_owned()),
            ("core.pager".to_owned(), "cat".to_owned()),
            ("core.sshCommand".to_owned(), "false".to_owned()),
            ("core.quotePath".to_owned(), "false".to_owned()),
            ("core.untrackedCache".to_owned(), "false".to_owned()),
            ("diff.external".to_owned(), String::new()),
            ("submodule.recurse".to_owned(), "false".to_owned()),
            ("safe.directory".to_owned(), "*".to_owned()),
        ];
        for driver in &self.filters {
            for part in ["clean", "smudge", "process"] {
                settings.push((format!("filter.{driver}.{part}"), String::new()));
            }
            settings.push((format!("filter.{driver}.required"), "false".to_owned()));
        }
        command.env("GIT_CONFIG_COUNT", settings.len().to_string());
        for (index, (key, value)) in settings.iter().enumerate() {
            command.env(format!("GIT_CONFIG_KEY_{index}"), key);
            command.env(format!("GIT_CONFIG_VALUE_{index}"), value);
        }
        command.arg("--no-pager").args(args);
        command
    }

    /// Output of a run that ended well (or with exit 1, which `config` answers when nothing matches).
    fn run_with(&self, args: &[&str]) -> Option<Vec<u8>> {
        let mut child = self.command(args).spawn().ok()?;
        let output = self.collect(&mut child);
        if output.is_none() {
            let _ = child.kill();
        }
        let status = child.wait().ok()?;
        let output = output?;
        match status.code() {
            Some(0) => Some(output),
            Some(1) if args.first() == Some(&"config") => Some(output),
            _ => None,
        }
    }

    /// All of the output, unless it is too long or too late.
    fn collect(&self, child: &mut Child) -> Option<Vec<u8>> {
        let stdout = child.stdout.take()?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let reader = std::thread::Builder::new()
            .name("git-output".to_owned())
            .spawn(move || {
                let mut output = Vec::new();
                let read = stdout.take(OUTPUT + 1).read_to_end(&mut output);
                // The receiver is gone only when time was up.
                let _ = sender.send(read.map(|_| output));
            })
            .ok()?;
        let output =
            receiver.recv_timeout(self.deadline.saturating_duration_since(Instant::now())).ok()?.ok();
        let _ = reader.join();
        output.filter(|output| output.len() as u64 <= OUTPUT)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    fn git(directory: &Path, args: &[&str]) {
        let status = Command::new("git")
            .args(["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"])
            .args(args)
            .current_dir(directory)
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success(), "{args:?}");
    }

    #[test]
    fn a_directory_without_git_is_none() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(look(directory.path()), None);
        // What a sandbox leaves of a `.git` that it kept from being made.
        fs::create_dir(directory.path().join(".git")).unwrap();
        assert!(!may_be_in_worktree(directory.path()));
        fs::remove_dir(directory.path().join(".git")).unwrap();
        git(directory.path(), &["init", "-q"]);
        let below = directory.path().join("below");
        fs::create_dir(&below).unwrap();
        assert!(may_be_in_worktree(&below));
    }

    #[test]
    fn a_worktree_beside_its_repository_is_looked_at() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("main");
        fs::create_dir(&path).unwrap();
        git(&path, &["init", "-q"]);
        git(&path, &["commit", "-q", "--allow-empty", "-m", "one"]);
        git(&path, &["worktree", "add", "-q", "../beside"]);
        assert_eq!(look(&directory.path().join("beside")).unwrap().branch, "beside");
    }

    #[test]
    fn changes_between_two_looks_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        git(path, &["init", "-q"]);
        let empty = look(path).unwrap();
        assert_eq!((empty.head.as_str(), empty.branch.as_str()), ("", "main"));
        fs::write(path.join("a"), "1").unwrap();
        fs::write(path.join("left dirty"), "1").unwrap();
        git(path, &["add", "a"]);
        git(path, &["commit", "-q", "-m", "one"]);
        let before = look(path).unwrap();
        assert_eq!(before.dirty.len(), 1);
        let changes = before.changes_since(&empty, path);
        assert_eq!(
            (changes.commits.len(), changes.files),
            (1, vec!["a".to_owned(), "left dirty".to_owned()])
        );
        fs::write(path.join("a"), "22").unwrap();
        git(path, &["commit", "-q", "-am", "two"]);
        fs::write(path.join("left dirty"), "longer").unwrap();
        fs::write(path.join("ü"), "new").unwrap();
        let after = look(path).unwrap();
        let changes = after.changes_since(&before, path);
        assert_eq!(changes.commits, std::slice::from_ref(&after.head));
        assert_eq!(changes.files, ["a", "left dirty", "ü"]);
        assert!(!changes.truncated);
    }

    #[test]
    fn a_hostile_repository_makes_nothing_run() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        git(path, &["init", "-q"]);
        fs::write(path.join("file"), "1").unwrap();
        git(path, &["add", "."]);
        git(path, &["commit", "-q", "-m", "one"]);
        let ran = path.join(".git/ran");
        let evil = path.join(".git/evil");
        fs::write(&evil, format!("#!/bin/sh\necho \"$@\" >> {}\ncat\n", ran.display())).unwrap();
        fs::set_permissions(&evil, fs::Permissions::from_mode(0o755)).unwrap();
        let command = evil.display();
        let config = format!(
            "[core]\n fsmonitor = {command}\n pager = {command}\n hooksPath = {}\n[diff]\n external = {command}\n\
             [filter \"a.b\"]\n clean = {command}\n smudge = {command}\n process = {command}\n required = true\n\
             [diff \"x\"]\n textconv = {command}\n command = {command}\n[include]\n path = more\n",
            path.join(".git").display()
        );
        let original = fs::read_to_string(path.join(".git/config")).unwrap();
        fs::write(path.join(".git/config"), original + &config).unwrap();
        fs::write(path.join(".git/more"), format!("[filter \"c\"]\n clean = {command}\n")).unwrap();
        fs::write(path.join(".gitattributes"), "file filter=a.b diff=x\nother filter=c\n").unwrap();
        for hook in ["post-index-change", "pre-commit", "reference-transaction"] {
            fs::copy(&evil, path.join(".git").join(hook)).unwrap();
        }
        fs::write(path.join("file"), "2").unwrap();
        fs::write(path.join("other"), "2").unwrap();
        let before = look(path).unwrap();
        assert_eq!(before.dirty.len(), 3);
        let _ = look(path).unwrap().changes_since(&before, path);
        assert!(!ran.exists(), "{}", fs::read_to_string(&ran).unwrap_or_default());
        // The control: without our settings it does run.
        let mut plain = Command::new("git");
        plain.arg("status").current_dir(path).env("GIT_CONFIG_GLOBAL", "/dev/null");
        plain.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        assert!(ran.exists());
    }
}
