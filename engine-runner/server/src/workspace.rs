//! Workspaces: directories under one of the runner's roots, by their canonical path.

use std::{
    fs::{self, File},
    io::Read as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Component, Path, PathBuf},
};

use roundhouse_proto::engine::v1::{AgentFile, FileFact};
use sha2::{Digest as _, Sha256};

use crate::{error::Error, ids};

/// Agent files listed at most.
const AGENT_FILES: usize = 200;

/// The largest agent file, in bytes.
const AGENT_FILE_BYTES: u64 = 256 * 1024;

/// All agent files of one answer together, so that it fits into a gRPC message.
const AGENT_FILES_BYTES: usize = 3 * 1024 * 1024;

/// The largest file that is hashed for InspectWorkspace.
const FACT_BYTES: u64 = 64 * 1024 * 1024;

/// Do not follow a symlink, do not wait for a writer of a FIFO (Linux, all architectures that we build for).
const O_NOFOLLOW: i32 = 0o400_000;
const O_NONBLOCK: i32 = 0o4000;

/// What opening a symlink so, and a socket, answers.
const ELOOP: i32 = 40;
const ENXIO: i32 = 6;

/// A root, canonical.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// Canonical path.
    pub path: PathBuf,
    /// Whether what lies in it may configure engines.
    pub trusted: bool,
}

/// A resolved workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workspace {
    /// Its id.
    pub id: String,
    /// Canonical path.
    pub path: PathBuf,
    /// Whether what lies in it may configure engines.
    pub trusted: bool,
}

/// The runner's roots.
#[derive(Debug, Clone)]
pub struct Roots {
    runner_id: String,
    roots: Vec<Root>,
}

impl Roots {
    /// Resolves the configured roots. One that is missing is left out, with a warning: its workspaces are unknown.
    #[must_use]
    pub fn new(runner_id: &str, configured: &[roundhouse_config::Root]) -> Self {
        let mut roots: Vec<Root> = Vec::new();
        for root in configured {
            match root.path.canonicalize() {
                Ok(path) if path.is_dir() => roots.push(Root { path, trusted: root.trust }),
                Ok(path) => tracing::warn!(root = %path.display(), "the root is not a directory"),
                Err(error) => {
                    tracing::warn!(root = %root.path.display(), %error, "the root cannot be resolved")
                }
            }
        }
        Self { runner_id: runner_id.to_owned(), roots }
    }

    /// The roots.
    #[must_use]
    pub fn list(&self) -> &[Root] {
        &self.roots
    }

    /// Resolves a workspace: symlinks followed, and the result a directory under a root. The innermost root decides
    /// about trust.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a relative path, [`Error::WorkspaceNotFound`].
    pub fn resolve(&self, path: &str) -> Result<Workspace, Error> {
        let asked = PathBuf::from(path);
        if !asked.is_absolute() {
            return Err(Error::invalid("workspace", "must be an absolute path"));
        }
        let missing = |message: String| Error::WorkspaceNotFound { path: asked.clone(), message };
        let canonical = asked.canonicalize().map_err(|error| missing(error.to_string()))?;
        if canonical.to_str().is_none() {
            return Err(missing("the path is not UTF-8".to_owned()));
        }
        let root = self
            .roots
            .iter()
            .filter(|root| canonical.starts_with(&root.path))
            .max_by_key(|root| root.path.components().count())
            .ok_or_else(|| missing("lies under no root of this runner; add one with --root".to_owned()))?;
        if !canonical.is_dir() {
            return Err(missing("is not a directory".to_owned()));
        }
        Ok(Workspace {
            id: ids::workspace_id(&self.runner_id, &canonical),
            path: canonical,
            trusted: root.trusted,
        })
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// SHA-256, lower-case hex.
#[must_use]
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// SHA-256 of a file's first `length` bytes, and how many there were.
///
/// # Errors
/// The system's answer.
pub(crate) fn sha256_prefix(file: &mut File, length: u64) -> std::io::Result<(String, u64)> {
    let mut hasher = Sha256::new();
    let mut left = length;
    let mut buffer = vec![0; 64 * 1024];
    while left > 0 {
        let want = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let count = file.read(&mut buffer[..want])?;
        if count == 0 {
            break;
        }
        hasher.update(&buffer[..count]);
        left -= count as u64;
    }
    Ok((hex(&hasher.finalize()), length - left))
}

/// Opens a regular file without following a symlink at its end, and without waiting for anything.
///
/// # Errors
/// The system's answer, also for what is no regular file.
pub(crate) fn open_regular(path: &Path) -> std::io::Result<File> {
    let file = File::options().read(true).custom_flags(O_NOFOLLOW | O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file"))
    }
}

/// The agent files of a workspace: regular `.agents/*.md`, raw; only the one of that name where one is named.
/// Whether some were left out for want of room. Blocking.
///
/// A `.agents` directory that is a symlink is followed only if it stays in the workspace; a file that is one is
/// reported and not read.
///
/// # Errors
/// [`Error::Storage`] when the directory is there and cannot be read, [`Error::Invalid`] for a name that is none.
pub(crate) fn agent_files(workspace: &Path, only: Option<&str>) -> Result<(Vec<AgentFile>, bool), Error> {
    if let Some(name) = only
        && (name.contains('/') || !is_agent_file(name))
    {
        return Err(Error::invalid("file_name", "is the name of a file that ends in .md"));
    }
    let directory = workspace.join(".agents");
    let wrong = |what: &str| Err(Error::invalid("workspace", what));
    let directory = match directory.canonicalize() {
        // Before anything is opened: a pipe would wait for a writer.
        Ok(path) if path.starts_with(workspace) && !path.is_dir() => {
            return wrong("its .agents is not a directory");
        }
        Ok(path) if path.starts_with(workspace) => path,
        Ok(_) => return Err(Error::invalid("workspace", "its .agents directory leads out of it")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok((Vec::new(), false)),
        Err(error) if error.raw_os_error() == Some(ELOOP) => {
            return wrong("its .agents is a symlink that leads nowhere but to itself");
        }
        Err(source) => return Err(Error::Storage { action: "read the agent files", source }),
    };
    if let Some(name) = only {
        // What is not there is left out, and what cannot be looked at is told by the reading.
        let absent = directory
            .join(name)
            .symlink_metadata()
            .is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound);
        let files = if absent { Vec::new() } else { vec![agent_file(&directory, name.to_owned())] };
        return Ok((files, false));
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(&directory).map_err(Error::storage("read the agent files"))? {
        let entry = entry.map_err(Error::storage("read the agent files"))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if is_agent_file(&name) {
            names.push(name);
        }
    }
    names.sort();
    let mut truncated = names.len() > AGENT_FILES;
    names.truncate(AGENT_FILES);
    let mut files = Vec::with_capacity(names.len());
    let mut total = 0;
    for name in names {
        let file = agent_file(&directory, name);
        if total + file.content.len() > AGENT_FILES_BYTES {
            truncated = true;
            break;
        }
        total += file.content.len();
        files.push(file);
    }
    Ok((files, truncated))
}

fn is_agent_file(name: &str) -> bool {
    name.ends_with(".md") && !name.starts_with('.')
}

fn agent_file(directory: &Path, file_name: String) -> AgentFile {
    match read_agent_file(&directory.join(&file_name)) {
        Ok(content) => AgentFile { file_name, sha256: sha256(&content), content, ..AgentFile::default() },
        Err(Unread { error, permanent }) => AgentFile { file_name, error, permanent, ..AgentFile::default() },
    }
}

/// Why an agent file was not read.
struct Unread {
    error: String,
    /// It never can be as it is.
    permanent: bool,
}

fn read_agent_file(path: &Path) -> Result<Vec<u8>, Unread> {
    let never = |error: &str| Unread { error: error.to_owned(), permanent: true };
    let system = |error: std::io::Error| match (error.raw_os_error(), error.kind()) {
        (Some(ELOOP), _) => never("is a symlink, which is not followed"),
        // A socket, or a device that nothing serves.
        (Some(ENXIO), _) => never("is not a regular file"),
        // Said by open_regular, not by the system.
        (None, std::io::ErrorKind::InvalidInput) => never("is not a regular file"),
        _ => Unread { error: error.to_string(), permanent: false },
    };
    let file = open_regular(path).map_err(system)?;
    let mut content = Vec::new();
    file.take(AGENT_FILE_BYTES + 1).read_to_end(&mut content).map_err(system)?;
    if content.len() as u64 > AGENT_FILE_BYTES {
        return Err(never(&format!("is larger than {AGENT_FILE_BYTES} bytes")));
    }
    Ok(content)
}

/// Size and hash of files named relative to a workspace. Blocking.
///
/// # Errors
/// [`Error::Invalid`] for a path that leaves the workspace.
pub(crate) fn file_facts(workspace: &Path, paths: &[String]) -> Result<Vec<FileFact>, Error> {
    for path in paths {
        let inside = Path::new(path)
            .components()
            .all(|component| matches!(component, Component::Normal(_) | Component::CurDir));
        if path.is_empty() || !inside {
            return Err(Error::invalid("paths", format!("{path:?} is not a path within the workspace")));
        }
    }
    paths
        .iter()
        .map(|path| {
            let missing = FileFact { path: path.clone(), ..FileFact::default() };
            let Ok(canonical) = workspace.join(path).canonicalize() else { return Ok(missing) };
            if !canonical.starts_with(workspace) {
                return Err(Error::invalid("paths", format!("{path:?} leads out of the workspace")));
            }
            let Ok(mut file) = open_regular(&canonical) else { return Ok(missing) };
            let Ok(size) = file.metadata().map(|metadata| metadata.len()) else { return Ok(missing) };
            let sha256 = if size > FACT_BYTES {
                String::new()
            } else {
                sha256_prefix(&mut file, FACT_BYTES).map(|(hash, _)| hash).unwrap_or_default()
            };
            Ok(FileFact { path: path.clone(), exists: true, size, sha256 })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn roots(path: &Path, trust: bool) -> Roots {
        Roots::new("run_1", &[roundhouse_config::Root { path: path.to_owned(), trust }])
    }

    #[test]
    fn two_spellings_are_one_workspace_and_outside_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("a")).unwrap();
        symlink(root.path().join("a"), root.path().join("b")).unwrap();
        symlink(outside.path(), root.path().join("c")).unwrap();
        let roots = roots(root.path(), false);
        let resolve = |path: PathBuf| roots.resolve(path.to_str().unwrap());
        let a = resolve(root.path().join("a")).unwrap();
        assert_eq!(resolve(root.path().join("b")).unwrap(), a);
        assert_eq!(resolve(root.path().join("a/../a/.")).unwrap(), a);
        assert!(!a.trusted && a.id.starts_with("wsp_"));
        for path in [outside.path().to_owned(), root.path().join("c"), root.path().join("missing")] {
            assert!(matches!(resolve(path), Err(Error::WorkspaceNotFound { .. })));
        }
        assert!(matches!(roots.resolve("a"), Err(Error::Invalid { field: "workspace", .. })));
    }

    #[test]
    fn s60_what_stands_in_the_place_of_the_agents_directory_is_refused_at_once() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap();
        let agents = path.join(".agents");
        let refused = || {
            for only in [None, Some("builder.md")] {
                let answer = agent_files(&path, only);
                assert!(matches!(answer, Err(Error::Invalid { field: "workspace", .. })), "{answer:?}");
            }
        };
        fs::write(&agents, "").unwrap();
        refused();
        fs::remove_file(&agents).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&agents).status().unwrap().success());
        refused();
        fs::remove_file(&agents).unwrap();
        symlink(&agents, &agents).unwrap();
        refused();
    }

    #[test]
    fn s60_agent_files_are_regular_bounded_and_do_not_lead_out() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap();
        assert_eq!(agent_files(&path, None).unwrap(), (Vec::new(), false));
        let agents = path.join(".agents");
        fs::create_dir(&agents).unwrap();
        fs::write(agents.join("b.md"), "text").unwrap();
        fs::write(agents.join("notes.txt"), "no").unwrap();
        fs::write(agents.join("c.md"), vec![b'x'; 256 * 1024 + 1]).unwrap();
        symlink("/etc/passwd", agents.join("a.md")).unwrap();
        fs::create_dir(agents.join("d.md")).unwrap();
        let (files, truncated) = agent_files(&path, None).unwrap();
        let names: Vec<_> =
            files.iter().map(|file| (file.file_name.as_str(), file.error.is_empty())).collect();
        assert_eq!(names, [("a.md", false), ("b.md", true), ("c.md", false), ("d.md", false)]);
        assert_eq!(files[1].content, b"text");
        assert_eq!(files[1].sha256, sha256(b"text"));
        assert!(!truncated);
        fs::remove_dir_all(&agents).unwrap();
        symlink("/etc", &agents).unwrap();
        assert!(agent_files(&path, None).is_err());
    }

    #[test]
    fn s60_a_file_that_never_can_be_read_is_told_from_one_that_may_be() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap();
        let agents = path.join(".agents");
        fs::create_dir(&agents).unwrap();
        fs::write(agents.join("large.md"), vec![b'x'; 256 * 1024 + 1]).unwrap();
        symlink("large.md", agents.join("link.md")).unwrap();
        symlink("nothing", agents.join("dangling.md")).unwrap();
        fs::create_dir(agents.join("directory.md")).unwrap();
        let socket = std::os::unix::net::UnixListener::bind(agents.join("socket.md")).unwrap();
        let (files, _) = agent_files(&path, None).unwrap();
        assert_eq!(files.len(), 5);
        for file in files {
            assert!(file.permanent && !file.error.is_empty(), "{}: {}", file.file_name, file.error);
        }
        drop(socket);
        let vanished = read_agent_file(&agents.join("vanished.md")).err().unwrap();
        assert!(!vanished.permanent, "{}", vanished.error);
    }

    #[test]
    fn s60_a_named_file_is_found_beyond_the_end_of_the_list() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap();
        let agents = path.join(".agents");
        fs::create_dir(&agents).unwrap();
        for n in 0..=AGENT_FILES {
            fs::write(agents.join(format!("a{n:03}.md")), "text").unwrap();
        }
        let last = format!("a{AGENT_FILES:03}.md");
        let (files, truncated) = agent_files(&path, None).unwrap();
        assert!(truncated && files.iter().all(|file| file.file_name != last));
        let (files, truncated) = agent_files(&path, Some(&last)).unwrap();
        assert_eq!((files.len(), truncated), (1, false));
        assert_eq!((files[0].file_name.as_str(), files[0].content.as_slice()), (last.as_str(), &b"text"[..]));
        assert_eq!(agent_files(&path, Some("none.md")).unwrap(), (Vec::new(), false));
        for bad in ["../x.md", "notes.txt", ".x.md", ""] {
            assert!(agent_files(&path, Some(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn s60_facts_stay_within_the_workspace() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap();
        fs::write(path.join("a..b"), "abc").unwrap();
        symlink("/etc/passwd", path.join("out")).unwrap();
        let facts = file_facts(&path, &["a..b".into(), "missing".into()]).unwrap();
        assert_eq!((facts[0].exists, facts[0].size), (true, 3));
        assert_eq!(facts[0].sha256, sha256(b"abc"));
        assert!(!facts[1].exists);
        for bad in ["../x", "/etc/passwd", "", "out", "a/../../x"] {
            assert!(file_facts(&path, &[bad.into()]).is_err(), "{bad}");
        }
    }
}
