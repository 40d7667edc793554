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

use nix::sys::signal::Signal;
use serde_json::json;

use crate::{
    core::{Core, Dialect, Stop, bad, filler, system_failure},
    script::Marker,
    tools,
};

/// How often a gate that is a file is looked for.
const LOOK: Duration = Duration::from_millis(5);

/// Obeys a marker that needs no turn.
pub(crate) fn plain<D: Dialect>(engine: &mut D, marker: &Marker) -> Result<(), Stop> {
    let number = |name: &str, usual: u64| marker.number(name, usual).map_err(bad);
    match marker.verb.as_str() {
        "raw" => {
            let bytes = marker.payload.clone().unwrap_or_default();
            for _ in 0..number("repeat", 1)? {
                engine.core_mut().out.bytes(&bytes);
            }
            engine.core_mut().out.flush();
        }
        "line" => {
            engine.core_mut().out.bytes(marker.needed().map_err(bad)?.as_bytes());
            engine.core_mut().out.bytes(b"\n");
            engine.core_mut().out.flush();
        }
        "garbage" => {
            for n in 0..number("lines", 1)? {
                engine.core_mut().out.bytes(format!("\x1b[31mgarbage {n} {{").as_bytes());
                engine.core_mut().out.bytes(b"\xff\xfe\n");
            }
            engine.core_mut().out.flush();
        }
        "long" => long(engine.core_mut(), number("bytes", 0)?, marker.flag("open")),
        "split" => {
            let bytes = usize::try_from(number("bytes", 0)?).unwrap_or(0);
            engine.core_mut().out.split(bytes, Duration::from_millis(number("delay", 0)?));
        }
        "stderr" => {
            if marker.payload.is_some() {
                let _ = std::io::stderr().write_all((marker.text("") + "\n").as_bytes());
            } else {
                // In whole lines, so that what is written is the same as in one piece, and memory stays flat.
                let piece = filler(64 * 1024);
                let mut left = usize::try_from(number("bytes", 0)?).unwrap_or(0);
                while left > 0 {
                    let part = left.min(piece.len());
                    let _ = std::io::stderr().write_all(&piece.as_bytes()[..part]);
                    left -= part;
                }
            }
        }
        "pause" => {
            engine.wait_until(Some(Duration::from_millis(number("ms", 0)?)), |_| false)?;
        }
        "gate" => {
            let path = marker.needed().map_err(bad)?;
            while !Path::new(&path).exists() {
                engine.wait_until(Some(LOOK), |_| false)?;
            }
        }
        "socket" => socket(engine, &marker.needed().map_err(bad)?)?,
        "stall" => {
            engine.wait_until(None, |_| false)?;
        }
        "hang" => {
            engine.core().shared.deaf.store(true, Ordering::SeqCst);
            engine.core().shared.log("hang", json!(null));
            loop {
                thread::park();
            }
        }
        "deaf" => engine.core().shared.deaf.store(true, Ordering::SeqCst),
        "fork" => {
            let pid = tools::child(marker.flag("detached"), marker.flag("hold"), number("ms", 600_000)?)
                .map_err(|problem| system_failure("fork", &problem))?;
            if let Some(path) = marker.value("pidfile") {
                std::fs::write(path, pid.to_string()).map_err(|problem| system_failure(path, &problem))?;
            }
        }
        "ignore" => engine.ignore(&marker.needed().map_err(bad)?)?,
        "exit" => {
            engine.core_mut().out.flush();
            engine.core().shared.exit(i32::try_from(number("code", 0)?).unwrap_or(1));
        }
        "die" => die(engine.core_mut(), &marker.needed().map_err(bad)?)?,
        "no_save" => engine.stop_saving(),
        other => return Err(bad(format!("{other} needs a turn"))),
    }
    Ok(())
}

fn long(core: &mut Core, bytes: u64, open: bool) {
    let mut left = bytes;
    let (before, after): (&[u8], &[u8]) =
        if open { (b"", b"") } else { (br#"{"type":"fake_long","filler":""#, b"\"}\n") };
    core.out.bytes(before);
    left = left.saturating_sub((before.len() + after.len()) as u64);
    let piece = [b'x'; 8192];
    while left > 0 {
        let part = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
        core.out.bytes(&piece[..part]);
        left -= part as u64;
    }
    core.out.bytes(after);
    core.out.flush();
}

fn socket<D: Dialect>(engine: &mut D, path: &str) -> Result<(), Stop> {
    let mut socket = UnixStream::connect(path).map_err(|problem| system_failure(path, &problem))?;
    // A peer that has gone already has opened the gate.
    let _ = socket.write_all(format!("{}\n", std::process::id()).as_bytes());
    let (tell, told) = mpsc::sync_channel(1);
    thread::spawn(move || {
        let _ = socket.read(&mut [0; 1]);
        let _ = tell.send(());
    });
    while told.try_recv() == Err(mpsc::TryRecvError::Empty) {
        engine.wait_until(Some(LOOK), |_| false)?;
    }
    Ok(())
}

fn die(core: &mut Core, name: &str) -> Result<(), Stop> {
    let full = if name.starts_with("SIG") { name.to_owned() } else { format!("SIG{name}") };
    let signal = Signal::from_str(&full).map_err(|_| bad(format!("no signal {name:?}")))?;
    core.out.flush();
    core.shared.die(signal);
    // Reached only if the signal does not end a process.
    Err(bad(format!("{full} did not end the process")))
}
