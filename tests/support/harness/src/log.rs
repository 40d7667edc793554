//! One log for each test: what every process of it said, in the order it came, each line with its origin.

use std::{
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use anyhow::Context as _;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};

/// Lines of one test. Clones write to the same file.
///
/// Every line also goes to standard error, which the test runner shows with a test that fails.
#[derive(Debug, Clone)]
pub struct TestLog {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    file: Mutex<File>,
    begun: Instant,
}

impl TestLog {
    /// Starts a log in this file.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot make the log {}", path.display()))?;
        let inner = Inner { path: path.to_owned(), file: Mutex::new(file), begun: Instant::now() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Where it lies.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Adds a line.
    pub fn line(&self, origin: &str, text: &str) {
        let at = self.inner.begun.elapsed().as_secs_f64();
        let line = format!("{at:8.3} {origin:>13} | {text}");
        eprintln!("{line}");
        let mut file = self.inner.file.lock().unwrap_or_else(PoisonError::into_inner);
        // A log that cannot be written must not fail the test: standard error has the line.
        let _ = writeln!(file, "{line}");
    }

    /// Adds every line of a stream until it ends.
    pub fn forward(&self, origin: &str, stream: impl AsyncRead + Unpin + Send + 'static) {
        let log = self.clone();
        let origin = origin.to_owned();
        tokio::spawn(async move {
            let mut lines = BufReader::new(stream);
            let mut line = Vec::new();
            loop {
                line.clear();
                match lines.read_until(b'\n', &mut line).await {
                    Ok(0) | Err(_) => return,
                    Ok(_) => log.line(&origin, String::from_utf8_lossy(&line).trim_end()),
                }
            }
        });
    }
}
