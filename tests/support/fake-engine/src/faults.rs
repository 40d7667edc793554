//! What a script does to the process, its pipes and its surroundings: nothing here needs a turn.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    str::FromStr as _,
    sync::{atomic::Ordering, mpsc},
    thread,
    time::Duration,
};

use nix::sys::signal::{SigSet, Signal, raise};
use serde_json::json;

use crate::{
    engine::{Engine, Stop},
    script::Marker,
    tools,
    turn::{bad, filler, system_failure},
};

/// How often a gate that is a file is looked for.
const LOOK: Duration = Duration::from_millis(5);

impl Engine {
    /// Obeys a marker that needs no turn.
    pub(crate) fn plain(&mut self, marker: &Marker) -> Result<(), Stop> {
        let number = |name: &str, usual: u64| marker.number(name, usual).map_err(bad);
        match marker.verb.as_str() {
            "raw" => {
                let bytes = marker.payload.clone().unwrap_or_default();
                for _ in 0..number("repeat", 1)? {
                    self.out.bytes(&bytes);
                }
                self.out.flush();
            }
            "line" => {
                self.out.bytes(marker.needed().map_err(bad)?.as_bytes());
                self.out.bytes(b"\n");
                self.out.flush();
            }
            "garbage" => {
                for n in 0..number("lines", 1)? {
                    self.out.bytes(format!("\x1b[31mgarbage {n} {{").as_bytes());
                    self.out.bytes(b"\xff\xfe\n");
                }
                self.out.flush();
            }
            "long" => self.long(number("bytes", 0)?, marker.flag("open")),
            "split" => {
                let bytes = usize::try_from(number("bytes", 0)?).unwrap_or(0);
                self.out.split(bytes, Duration::from_millis(number("delay", 0)?));
            }
            "stderr" => {
                let text = if marker.payload.is_some() {
                    marker.text("") + "\n"
                } else {
                    filler(number("bytes", 0)?)
                };
                let _ = std::io::stderr().write_all(text.as_bytes());
            }
            "pause" => {
                self.wait_until(Some(Duration::from_millis(number("ms", 0)?)), |_| false)?;
            }
            "gate" => {
                let path = marker.needed().map_err(bad)?;
                while !Path::new(&path).exists() {
                    self.wait_until(Some(LOOK), |_| false)?;
                }
            }
            "socket" => self.socket(&marker.needed().map_err(bad)?)?,
            "stall" => {
                self.wait_until(None, |_| false)?;
            }
            "hang" => {
                self.shared.deaf.store(true, Ordering::SeqCst);
                self.shared.log("hang", json!(null));
                loop {
                    thread::park();
                }
            }
            "deaf" => self.shared.deaf.store(true, Ordering::SeqCst),
            "fork" => {
                let pid = tools::child(marker.flag("detached"), marker.flag("hold"), number("ms", 600_000)?)
                    .map_err(|problem| system_failure("fork", &problem))?;
                if let Some(path) = marker.value("pidfile") {
                    std::fs::write(path, pid.to_string())
                        .map_err(|problem| system_failure(path, &problem))?;
                }
            }
            "ignore" => self.ignore(&marker.needed().map_err(bad)?)?,
            "exit" => {
                self.out.flush();
                self.shared.exit(i32::try_from(number("code", 0)?).unwrap_or(1));
            }
            "die" => self.die(&marker.needed().map_err(bad)?)?,
            "no_save" => self.session.saves = false,
            other => return Err(bad(format!("{other} needs a turn"))),
        }
        Ok(())
    }

    fn long(&mut self, bytes: u64, open: bool) {
        let mut left = bytes;
        let (before, after): (&[u8], &[u8]) =
            if open { (b"", b"") } else { (br#"{"type":"fake_long","filler":""#, b"\"}\n") };
        self.out.bytes(before);
        left = left.saturating_sub((before.len() + after.len()) as u64);
        let piece = [b'x'; 8192];
        while left > 0 {
            let part = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
            self.out.bytes(&piece[..part]);
            left -= part as u64;
        }
        self.out.bytes(after);
        self.out.flush();
    }

    fn socket(&mut self, path: &str) -> Result<(), Stop> {
        let mut socket = UnixStream::connect(path).map_err(|problem| system_failure(path, &problem))?;
        // A peer that has gone already has opened the gate.
        let _ = socket.write_all(format!("{}\n", std::process::id()).as_bytes());
        let (tell, told) = mpsc::sync_channel(1);
        thread::spawn(move || {
            let _ = socket.read(&mut [0; 1]);
            let _ = tell.send(());
        });
        while told.try_recv() == Err(mpsc::TryRecvError::Empty) {
            self.wait_until(Some(LOOK), |_| false)?;
        }
        Ok(())
    }

    fn die(&mut self, name: &str) -> Result<(), Stop> {
        let full = if name.starts_with("SIG") { name.to_owned() } else { format!("SIG{name}") };
        let signal = Signal::from_str(&full).map_err(|_| bad(format!("no signal {name:?}")))?;
        self.out.flush();
        self.shared.log("die", json!(full));
        let mut set = SigSet::empty();
        set.add(signal);
        let _ = set.thread_unblock();
        // The first SIGSEGV or SIGBUS only takes the standard library's own handler away.
        for _ in 0..2 {
            let _ = raise(signal);
        }
        // Reached only if the signal does not end a process.
        Err(bad(format!("{full} did not end the process")))
    }
}
