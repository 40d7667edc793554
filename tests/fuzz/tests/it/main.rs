//! Every fuzz target over its seeds and over seeded changes of them; and what holds for every recording, wherever it is cut.
#![allow(clippy::unwrap_used, reason = "what a test does not expect fails it")]
#![allow(clippy::allow_attributes, reason = "an expectation would fail where only test functions unwrap")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use roundhouse_engines::{Adapter, claude_code::ClaudeCode, codex::Codex};
use roundhouse_fuzz::mutate::{Random, mutate};
use roundhouse_fuzz::{Run, TARGETS, play, recordings, seeds};

/// The seed of everything random here; another one is tried with `ROUNDHOUSE_TEST_SEED`.
fn seed() -> u64 {
    std::env::var("ROUNDHOUSE_TEST_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0x00c0_ffee)
}

/// How much more than in CI is tried: `ROUNDHOUSE_TEST_FUZZ=100` tries a hundred times as many changes.
fn times() -> usize {
    std::env::var("ROUNDHOUSE_TEST_FUZZ").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

fn engines() -> [(&'static str, &'static dyn Adapter); 2] {
    [("claude-code", &ClaudeCode), ("codex", &Codex)]
}

/// Runs a target on the seeds and on changes of them, and shows the input that breaks it.
fn holds(name: &str, changes: usize) {
    let run = roundhouse_fuzz::target(name).unwrap();
    let seeds = seeds(name).unwrap();
    assert!(seeds.len() > 1, "the seeds are gone");
    let try_one = |input: &[u8], what: &str| {
        if catch_unwind(AssertUnwindSafe(|| run(input))).is_err() {
            let file = std::env::temp_dir().join(format!("roundhouse-fuzz-{name}"));
            std::fs::write(&file, input).unwrap();
            panic!("{name} breaks on {what}, kept as {}", file.display());
        }
    };
    for (number, seed) in seeds.iter().enumerate() {
        try_one(seed, &format!("seed {number}"));
    }
    // Long inputs are not changed in CI: the short ones hold the same kinds of lines.
    let short: Vec<&Vec<u8>> = seeds.iter().filter(|seed| seed.len() < 24 * 1024).collect();
    let mut random = Random::new(seed());
    for number in 0..changes * times() {
        let (one, other) = (short[random.below(short.len())], short[random.below(short.len())]);
        let input = mutate(&mut random, one, other);
        try_one(&input, &format!("change {number} of seed {}", seed()));
    }
}

#[test]
fn lines_hold() {
    holds("lines", 20_000);
}

#[test]
fn the_protocol_of_the_keeper_holds() {
    holds("protocol", 10_000);
}

#[test]
fn the_dialect_of_claude_code_holds() {
    holds("claude-code", 400);
}

#[test]
fn the_dialect_of_codex_holds() {
    holds("codex", 400);
}

#[test]
fn spools_hold() {
    holds("spool", 500);
}

#[test]
fn journals_hold() {
    holds("journal", 1_000);
}

#[test]
fn every_target_is_run_here() {
    let text = include_str!("main.rs");
    for (name, _) in TARGETS {
        assert!(text.contains(&format!("holds(\"{name}\",")), "{name} is not run");
    }
}

/// The bytes of every recording, with what real pipes add to them: line ends of both kinds, no newline at the end, text
/// in colours and blank lines in between. However they come, the turns are the same.
#[test]
fn s30_any_split_of_any_recording_gives_the_same_turns() {
    let mut random = Random::new(seed());
    for (engine, adapter) in engines() {
        for (name, bytes) in recordings(engine).unwrap() {
            let whole = play(adapter, &Run::read(&[&bytes]));
            // Answers to permissions name the frame of the request: there no line may come in between.
            let lines_count = bytes.windows(12).any(|part| part == b"\x01ipermission");
            let mut noisy = Vec::with_capacity(bytes.len() * 2);
            for line in bytes.split_inclusive(|byte| *byte == b'\n') {
                let told = line.first() == Some(&1);
                match random.below(if lines_count { 1 } else { 5 }) {
                    0 if lines_count => {}
                    0 => noisy.extend_from_slice(b"\r\n"),
                    1 => noisy.extend_from_slice(b"\x1b[2K\x1b[31mWelcome \xff\xfe!\x1b[0m\n"),
                    2 if !told => noisy.extend_from_slice(b"\x1b[0m"),
                    _ => {}
                }
                match line.strip_suffix(b"\n") {
                    Some(bare) if !told && random.below(3) == 0 => {
                        noisy.extend_from_slice(bare);
                        noisy.extend_from_slice(b"\r\n");
                    }
                    _ => noisy.extend_from_slice(line),
                }
            }
            noisy.pop_if(|byte| *byte == b'\n');
            let mut pieces = Vec::new();
            let mut rest = noisy.as_slice();
            while !rest.is_empty() {
                let most = [3, 50, 5_000][random.below(3)];
                let (piece, tail) = rest.split_at((1 + random.below(most)).min(rest.len()));
                pieces.push(piece);
                rest = tail;
            }
            let run = Run::read(&pieces);
            assert_eq!(Run::read(&[&noisy]), run, "{engine} {name}: pieces change nothing");
            assert_eq!(shown(&play(adapter, &run)), shown(&whole), "{engine} {name}, seed {}", seed());
        }
    }
}

/// Outputs without what noise may change: the count of unknown lines, and the numbers of frames in ids of requests.
fn shown(played: &roundhouse_fuzz::Played) -> Vec<String> {
    let mut shown = Vec::new();
    for output in played.turns.iter().flatten() {
        let mut text = serde_json::to_string(output).unwrap();
        if let Some(place) = text.find("\"unknown_lines\"") {
            text.truncate(place);
        }
        let mut rest = text.as_str();
        let mut line = String::new();
        while let Some(place) = rest.find("spl_1.") {
            line.push_str(&rest[..place]);
            rest = rest[place + 6..].trim_start_matches(|letter: char| letter.is_ascii_digit());
        }
        line.push_str(rest);
        shown.push(line);
    }
    shown
}

/// One line of every recording, cut at every byte: `play` asserts one end per turn and all else that holds. (The cuts after
/// every line are made in the tests of `engine-runner/engines`.)
#[test]
fn s30_every_recording_cut_at_every_byte_of_a_line_ends_once() {
    for (engine, adapter) in engines() {
        let all = recordings(engine).unwrap();
        assert!(all.len() > 100, "{engine}: the recordings are gone");
        let mut cut_ones = 0;
        for (_, bytes) in all {
            // The first line of middling length that comes after something was said and given.
            let mut before = 0;
            let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').skip_while(|line| {
                let early = before < 800 || line.first() == Some(&1) || !(60..260).contains(&line.len());
                before += if early { line.len() } else { 0 };
                early
            });
            let Some(line) = lines.next() else { continue };
            let run = Run::read(&[&bytes[..before]]);
            for cut in 0..line.len() {
                let _ = play(adapter, &run.and_line(&line[..cut]));
            }
            cut_ones += 1;
        }
        assert!(cut_ones > 80, "{engine}: only {cut_ones} recordings have such a line");
    }
}
