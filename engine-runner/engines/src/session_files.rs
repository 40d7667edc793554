//! Where a session's native files lie, and how to prove that no row of them was lost.
//!
//! Engines drop damaged lines silently and answer with exit 0. So at each turn's end the runner keeps a
//! [`Fingerprint`] of the append-only main file, and compares before the next resume.

use serde::{Deserialize, Serialize};

/// Where to look for a session's files, relative to the engine home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionFiles {
    /// A directory whose direct children are searched, for example `projects`.
    pub search: String,
    /// The main file's name within each of those children, for example `<id>.jsonl`. Append-only.
    pub main: String,
    /// A directory beside the main file with the session's other files, for example `<id>`.
    pub side_directory: Option<String>,
    /// How many directories lie between `search` and the main file. One for most engines.
    pub depth: usize,
    /// `main` is only the end of the file's name; what comes before it is not known.
    pub main_is_ending: bool,
}

impl SessionFiles {
    /// Whether a file (its path relative to the home) is where and named as the main file.
    #[must_use]
    pub fn is_main(&self, path: &str) -> bool {
        let Some(rest) = path.strip_prefix(&self.search).and_then(|rest| rest.strip_prefix('/')) else {
            return false;
        };
        let Some((directories, name)) = rest.rsplit_once('/') else { return false };
        let named = if self.main_is_ending { name.ends_with(&self.main) } else { name == self.main };
        named && directories.split('/').count() == self.depth
    }

    /// The main file among the candidates found (paths relative to the home): the recorded one if it is among
    /// them, else the only one. Two candidates and no record decide nothing.
    #[must_use]
    pub fn choose<'a>(&self, recorded: Option<&str>, found: &'a [String]) -> Option<&'a str> {
        let known = recorded.and_then(|path| found.iter().find(|candidate| candidate.as_str() == path));
        match (known, found) {
            (Some(path), _) => Some(path),
            (None, [only]) => Some(only),
            (None, _) => None,
        }
    }
}

/// The state of an append-only file at a turn's end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// The file, relative to the engine home.
    pub file: String,
    /// How many bytes were hashed.
    pub length: u64,
    /// SHA-256 of those bytes, in lower-case hex.
    pub sha256: String,
}

/// What the runner finds when it looks at the file again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileFacts {
    /// A regular file.
    File {
        /// How long it is now.
        length: u64,
        /// SHA-256 of its first `Fingerprint::length` bytes; unset when it is shorter than that.
        prefix_sha256: Option<String>,
    },
    /// Nothing is there.
    Missing,
    /// Something else is there, or the file is not readable by us for good (permissions, a directory).
    Unreadable {
        /// What was found.
        detail: String,
    },
    /// Looking failed in a way that may pass (I/O error, out of descriptors). Proves nothing.
    Transient {
        /// What failed.
        detail: String,
    },
}

/// What the comparison says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Every row that was there is there. Growth is normal.
    Intact,
    /// Rows are missing: the session is unusable, with this reason.
    Lost {
        /// A short word: `context_lost`, `file_missing`, `file_unreadable`.
        code: &'static str,
        /// For people.
        detail: String,
    },
    /// Nothing is proved: try to resume, or try again.
    Unknown {
        /// Why.
        detail: String,
    },
}

impl Fingerprint {
    /// Compares what is there with what was.
    #[must_use]
    pub fn check(&self, facts: &FileFacts) -> Verdict {
        match facts {
            FileFacts::File { length, .. } if *length < self.length => Verdict::Lost {
                code: "context_lost",
                detail: format!("{} has {length} bytes and had {}", self.file, self.length),
            },
            FileFacts::File { prefix_sha256: Some(hash), .. } if *hash == self.sha256 => Verdict::Intact,
            FileFacts::File { prefix_sha256: Some(_), .. } => Verdict::Lost {
                code: "context_lost",
                detail: format!("the first {} bytes of {} have changed", self.length, self.file),
            },
            FileFacts::File { prefix_sha256: None, .. } => {
                Verdict::Unknown { detail: format!("{} was not hashed", self.file) }
            }
            FileFacts::Missing => {
                Verdict::Lost { code: "file_missing", detail: format!("{} is gone", self.file) }
            }
            FileFacts::Unreadable { detail } => {
                Verdict::Lost { code: "file_unreadable", detail: format!("{}: {detail}", self.file) }
            }
            FileFacts::Transient { detail } => {
                Verdict::Unknown { detail: format!("{}: {detail}", self.file) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint() -> Fingerprint {
        Fingerprint { file: "projects/-w/a.jsonl".into(), length: 10, sha256: "aa".into() }
    }

    #[test]
    fn s15_growth_is_normal_and_missing_rows_are_proved() {
        let at = |length, hash: Option<&str>| FileFacts::File { length, prefix_sha256: hash.map(Into::into) };
        assert_eq!(fingerprint().check(&at(10, Some("aa"))), Verdict::Intact);
        assert_eq!(fingerprint().check(&at(900, Some("aa"))), Verdict::Intact);
        for (facts, expected) in [
            (at(9, None), "context_lost"),
            (at(0, None), "context_lost"),
            (at(10, Some("bb")), "context_lost"),
            (FileFacts::Missing, "file_missing"),
            (FileFacts::Unreadable { detail: "a directory".into() }, "file_unreadable"),
        ] {
            match fingerprint().check(&facts) {
                Verdict::Lost { code, .. } => assert_eq!(code, expected, "{facts:?}"),
                other => panic!("{facts:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn s15_transient_trouble_is_not_corruption() {
        let facts = FileFacts::Transient { detail: "too many open files".into() };
        assert!(matches!(fingerprint().check(&facts), Verdict::Unknown { .. }));
    }

    #[test]
    fn s14_the_recorded_file_wins_and_two_strangers_decide_nothing() {
        let files = SessionFiles {
            search: "projects".into(),
            main: "a.jsonl".into(),
            side_directory: None,
            depth: 1,
            main_is_ending: false,
        };
        let found = ["projects/x/a.jsonl".to_owned(), "projects/y/a.jsonl".to_owned()];
        assert_eq!(files.choose(Some("projects/y/a.jsonl"), &found), Some("projects/y/a.jsonl"));
        assert_eq!(files.choose(Some("projects/z/a.jsonl"), &found), None);
        assert_eq!(files.choose(None, &found[..1]), Some("projects/x/a.jsonl"));
        assert_eq!(files.choose(None, &[]), None);
    }
}
