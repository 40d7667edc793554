//! The target that `ROUNDHOUSE_FUZZ_TARGET` names, under libFuzzer. `tests/fuzz/run` builds and starts it.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
static CHOSEN: std::sync::LazyLock<fn(&[u8])> = std::sync::LazyLock::new(|| {
    let name = std::env::var("ROUNDHOUSE_FUZZ_TARGET").unwrap_or_default();
    roundhouse_fuzz::target(&name).unwrap_or_else(|| panic!("ROUNDHOUSE_FUZZ_TARGET: no target {name:?}"))
});

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| CHOSEN(data));

/// Without coverage: writes the seeds of every target into the directory that is named, for the fuzzer to begin with.
#[cfg(not(fuzzing))]
fn main() -> std::io::Result<()> {
    let directory = std::env::args_os().nth(1).ok_or_else(|| {
        std::io::Error::other("name a directory for the seeds; the fuzzer itself: tests/fuzz/run")
    })?;
    for (name, _) in roundhouse_fuzz::TARGETS {
        let directory = std::path::Path::new(&directory).join(name);
        std::fs::create_dir_all(&directory)?;
        for (number, seed) in roundhouse_fuzz::seeds(name)?.iter().enumerate() {
            std::fs::write(directory.join(format!("seed-{number:04}")), seed)?;
        }
    }
    Ok(())
}
