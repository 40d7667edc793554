//! Tells the compiler of the one condition that `tests/fuzz/run` sets.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(fuzzing)");
    println!("cargo::rerun-if-changed=build.rs");
}
