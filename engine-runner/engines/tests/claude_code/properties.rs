//! What holds for every run, wherever it is cut: no panic, one end, and the same again on a replay.

use std::sync::LazyLock;

use proptest::prelude::*;
use roundhouse_engines::{Carry, Exit, Frame, Output, Partial, Standing, Translator, TranslatorOpen};

use crate::support::{
    Owned, Run, begun, feed, names, open, play, recording, result, state, terminals, transcript, translator,
};

/// The frames of the first turn: up to the next delivery after its end.
fn first_turn(run: &Run) -> Run {
    let mut reader = translator(&run.open);
    let mut frames = Vec::new();
    for (number, frame) in (1_u64..).zip(&run.frames) {
        if matches!(frame, Owned::Intent(op) if op.len() == 36) && reader.standing().ended {
            break;
        }
        reader.feed(Frame { number, body: frame.body() });
        frames.push(frame.clone());
    }
    Run { frames, open: run.open.clone() }
}

fn every_run() -> Vec<(String, Run)> {
    let frames = names("frames").into_iter().map(|name| (format!("frames/{name}"), recording(&name)));
    let lines = names("lines").into_iter().map(|name| (format!("lines/{name}"), transcript(&name)));
    frames.chain(lines).collect()
}

fn exit() -> Owned {
    Owned::Exit(Exit { code: None, signal: Some(9) })
}

/// What something that holds a dead engine's pipe could print.
fn late() -> Vec<Owned> {
    let mut late = begun();
    late.extend([result("late"), state("idle")]);
    late
}

/// Plays frames and an exit, and asserts exactly one end.
fn ends_once(name: &str, open: &TranslatorOpen, frames: &[Owned]) {
    let mut reader = translator(open);
    let mut outputs = feed(reader.as_mut(), frames);
    outputs.extend(feed(reader.as_mut(), &[exit(), exit()]));
    assert_eq!(feed(reader.as_mut(), &late()), vec![], "{name}: a dead process says nothing");
    assert_eq!(terminals(&outputs), 1, "{name} after {} frames", frames.len());
    assert!(reader.standing().ended);
    assert!(!reader.standing().quiescent, "a dead process takes no turn");
    assert!(reader.partials().is_empty(), "{name}: nothing stays unfinished");
    invariants(name, &outputs);
}

/// What no order of lines may break.
fn invariants(name: &str, outputs: &[Output]) {
    use roundhouse_engines::{Event, ItemKey};
    use std::collections::HashSet;

    let mut calls = HashSet::new();
    let mut results = HashSet::new();
    let mut texts: HashSet<ItemKey> = HashSet::new();
    let mut asked = HashSet::new();
    let mut ended = false;
    let mut accepted = HashSet::new();
    for output in outputs {
        match output {
            Output::TurnEnded(_) => ended = true,
            Output::SessionNotice { .. } | Output::Reply(_) => {}
            other => assert!(!ended, "{name}: {other:?} after the end"),
        }
        match output {
            Output::Accepted { delivery_id } => {
                assert!(accepted.insert(delivery_id.clone()), "{name}: accepted twice");
            }
            Output::Event { event: Event::ToolCall(call) } => {
                assert!(calls.insert(call.call_id.clone()), "{name}: {} called twice", call.call_id);
            }
            Output::Event { event: Event::ToolResult(result) } => {
                assert!(calls.contains(&result.call_id), "{name}: a result before its call");
                assert!(results.insert(result.call_id.clone()), "{name}: two results");
                assert!(!result.is_error || !result.output.text.is_empty());
            }
            Output::Event { event: Event::Text(text) | Event::Reasoning(text) } => {
                assert!(texts.insert(text.item.clone()), "{name}: {:?} told twice", text.item);
            }
            Output::Event { event: Event::PermissionRequest(request) } => {
                assert!(asked.insert(request.request_id.clone()));
            }
            Output::Event { event: Event::PermissionAnswer(answer) } => {
                assert!(asked.contains(&answer.request_id), "{name}: an answer nobody asked for");
            }
            Output::Partial(partial) => {
                assert!(!texts.contains(&partial.item), "{name}: partial text after the whole");
            }
            _ => {}
        }
    }
    assert_eq!(calls, results, "{name}: every call is closed");
}

#[test]
fn s30_every_run_cut_after_every_frame_ends_once() {
    for (name, run) in every_run() {
        let turn = first_turn(&run);
        for cut in 0..=turn.frames.len() {
            ends_once(&name, &turn.open, &turn.frames[..cut]);
        }
    }
}

#[test]
fn s30_a_line_cut_at_every_byte_is_counted_and_harmless() {
    let run = first_turn(&recording("interrupt_text"));
    let places: Vec<usize> = (0..run.frames.len())
        .filter(|place| matches!(&run.frames[*place], Owned::Out(line) if line.len() < 1_500))
        .collect();
    assert!(places.len() > 10);
    for place in places {
        let Owned::Out(line) = &run.frames[place] else { continue };
        for cut in 0..line.len() {
            let mut frames = run.frames[..place].to_vec();
            frames.push(Owned::Out(line[..cut].to_vec()));
            ends_once("cut line", &run.open, &frames);
        }
    }
}

/// What a frame made of a translator: its outputs, and all that the runner may take out of it afterwards.
type Seen = (Vec<Output>, Standing, Vec<Partial>, Carry, bool);

fn seen(reader: &mut dyn Translator, number: u64, frame: &Owned) -> Seen {
    let outputs = reader.feed(Frame { number, body: frame.body() });
    (outputs, reader.standing(), reader.partials(), reader.carry(), reader.proves_untaken())
}

/// A turn as it went: what TURN_OPEN stored, and every frame with what it made.
struct Live {
    stored: String,
    frames: Vec<(u64, Owned, Seen)>,
}

/// A run in one process that lives throughout: the carry of a turn is given to the next one as it is.
fn live(run: &Run) -> Vec<Live> {
    let mut open = run.open.clone();
    let mut reader = translator(&open);
    let begin =
        |open: &TranslatorOpen| Live { stored: serde_json::to_string(open).unwrap(), frames: Vec::new() };
    let mut turns = vec![begin(&open)];
    for (number, frame) in (1_u64..).zip(&run.frames) {
        let delivery = matches!(frame, Owned::Intent(op) if op.len() == 36);
        if delivery && reader.standing().ended {
            open = TranslatorOpen {
                opening: None,
                carry: reader.carry(),
                turn_id: Some(format!("trn_{}", turns.len() + 1)),
                ..run.open.clone()
            };
            reader = translator(&open);
            turns.push(begin(&open));
        }
        if let Some(turn) = turns.last_mut() {
            let state = seen(reader.as_mut(), number, frame);
            turn.frames.push((number, frame.clone(), state));
        }
    }
    turns
}

/// A recovered runner has only the journal: TURN_OPEN and the frames. Whatever the last of the frames was, a translator
/// made anew of them has to stand where the living one stood, and to go on with the same outputs.
#[test]
fn replay_equals_live_at_every_cut_of_every_turn() {
    let (mut turns, mut carried) = (0, 0);
    for (name, run) in every_run() {
        for (n, turn) in (1..).zip(live(&run)) {
            let open: TranslatorOpen = serde_json::from_str(&turn.stored).unwrap();
            turns += 1;
            carried += usize::from(open.carry != Carry::default());
            let mut rebuilt = translator(&open);
            for (number, frame, lived) in &turn.frames {
                assert_eq!(
                    seen(rebuilt.as_mut(), *number, frame),
                    *lived,
                    "{name}: turn {n}, frame {number}"
                );
            }
            // What the next turn is given went through the session's file, too.
            let carry = rebuilt.carry();
            let stored = serde_json::to_string(&carry).unwrap();
            assert_eq!(serde_json::from_str::<Carry>(&stored).unwrap(), carry, "{name}");
        }
    }
    assert!(turns > 100 && carried > 5, "{turns} turns, {carried} of them with something carried");
}

#[test]
fn outputs_survive_the_journal() {
    for (name, run) in every_run() {
        for (_, _, output) in play(&run) {
            let stored = serde_json::to_string(&output).unwrap();
            let read: Output = serde_json::from_str(&stored).unwrap();
            assert_eq!(read, output, "{name}");
        }
    }
}

#[test]
fn s31_noise_between_the_lines_changes_nothing_but_the_count() {
    for (name, run) in every_run() {
        let mut noisy = run.clone();
        noisy.frames = Vec::new();
        for frame in &run.frames {
            if matches!(frame, Owned::Out(_)) {
                for noise in [
                    &b""[..],
                    b"Welcome!",
                    b"\x1b[31mred\x1b[0m",
                    b"{\"type\":\"from_the_future\"}",
                    b"\xff{",
                    b"[]",
                ] {
                    noisy.frames.push(Owned::Out(noise.to_vec()));
                }
            }
            noisy.frames.push(frame.clone());
        }
        let kinds = |run: &Run| -> Vec<String> {
            play(run)
                .iter()
                .map(|(turn, _, output)| {
                    let text = serde_json::to_string(output).unwrap();
                    // Frame numbers stand in permission ids, and the count is what may differ.
                    let mut text = format!("{turn} {text}");
                    if let Some(place) = text.find("\"unknown_lines\"") {
                        text.truncate(place);
                    }
                    match text.contains("spl_1.") {
                        true => "permission".to_owned(),
                        false => text,
                    }
                })
                .collect()
        };
        if run.frames.iter().any(|frame| matches!(frame, Owned::Intent(op) if op.starts_with("permission.")))
        {
            continue;
        }
        assert_eq!(kinds(&noisy), kinds(&run), "{name}");
    }
}

/// Lines that mean something, to be shuffled.
static POOL: LazyLock<Vec<Owned>> = LazyLock::new(|| {
    let mut pool: Vec<Owned> =
        ["perm_interrupt", "err_cut_after_a_block", "sub_agent", "steer_tool", "err_429", "think"]
            .into_iter()
            .flat_map(|name| recording(name).frames)
            .filter(|frame| !matches!(frame, Owned::Out(line) if line.len() > 4_000))
            .collect();
    pool.extend(begun());
    pool.push(Owned::Oversized(20_000_000));
    pool
});

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_frames_ends_once(order in prop::collection::vec(0_usize..1_000, 0..120), opened in any::<bool>()) {
        let pool = &*POOL;
        let mut frames = if opened { begun() } else { Vec::new() };
        frames.extend(order.iter().map(|place| pool[place % pool.len()].clone()));
        let opening = Some(roundhouse_engines::OpenMode::Resume);
        ends_once("shuffled", &open(opening, crate::support::NATIVE), &frames);
    }

    #[test]
    fn any_bytes_are_no_panic(lines in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..40)) {
        let mut frames = begun();
        frames.extend(lines.into_iter().map(Owned::Out));
        ends_once("bytes", &open(Some(roundhouse_engines::OpenMode::Start), crate::support::NATIVE), &frames);
    }

    #[test]
    fn any_chunks_of_standard_error_give_the_same_failure(cuts in prop::collection::vec(1_usize..30, 1..60)) {
        let text = "noise\nAPI Error: Request rejected (429) · You have hit your usage limit\nmore é noise\nlast";
        let run = |chunks: Vec<Vec<u8>>| {
            let mut frames = begun();
            frames.extend(chunks.into_iter().map(Owned::Err));
            frames.push(Owned::Exit(Exit { code: Some(1), signal: None }));
            let mut reader = translator(&open(Some(roundhouse_engines::OpenMode::Start), crate::support::NATIVE));
            feed(reader.as_mut(), &frames)
        };
        let mut chunks = Vec::new();
        let mut rest = text.as_bytes();
        for cut in cuts {
            let (head, tail) = rest.split_at(cut.min(rest.len()));
            chunks.push(head.to_vec());
            rest = tail;
        }
        chunks.push(rest.to_vec());
        prop_assert_eq!(run(chunks), run(vec![text.as_bytes().to_vec()]));
    }
}
