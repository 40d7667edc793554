//! What holds for every run, however it is cut, chunked, shuffled or replayed.

use std::{collections::HashSet, sync::LazyLock};

use proptest::prelude::*;
use roundhouse_engines::{
    Carry, Event, Exit, Frame, ItemKey, OpenMode, Output, Partial, Standing, Translator, TranslatorOpen,
};
use serde_json::json;

use crate::support::{
    Owned, Run, THREAD, TURN, Told, begun, completed, exit, feed, names, open, play, recording, replies,
    said, terminals, transcript, translator,
};

/// The frames up to the second delivery that opens a turn of its own.
fn first_turn(run: &Run) -> Run {
    let mut reader = translator(&run.open);
    let mut frames = Vec::new();
    for (number, frame) in (1_u64..).zip(&run.frames) {
        let delivery = matches!(frame, Owned::Intent(op) if op.len() == 36);
        if delivery && reader.standing().ended {
            break;
        }
        reader.feed(Frame { number, body: frame.body() });
        frames.push(frame.clone());
    }
    Run { frames, ..run.clone() }
}

fn every_run() -> Vec<(String, Run)> {
    let frames = names("frames").into_iter().map(|name| (format!("frames/{name}"), recording(&name)));
    let lines = names("lines").into_iter().map(|name| (format!("lines/{name}"), transcript(&name)));
    frames.chain(lines).collect()
}

fn killed() -> Owned {
    exit(None, Some(9))
}

/// What something that holds a dead engine's pipe could print.
fn late() -> Vec<Owned> {
    let mut late = begun();
    late.extend([said("m", "late"), completed("completed", json!(null))]);
    late
}

/// Plays frames and an exit, and asserts exactly one end.
fn ends_once(name: &str, open: &TranslatorOpen, frames: &[Owned]) {
    let mut reader = translator(open);
    let mut outputs = feed(reader.as_mut(), frames);
    outputs.extend(feed(reader.as_mut(), &[killed(), killed()]));
    assert_eq!(feed(reader.as_mut(), &late()), vec![], "{name}: a dead process says nothing");
    assert_eq!(terminals(&outputs), 1, "{name} after {} frames", frames.len());
    assert!(reader.standing().ended);
    assert!(!reader.standing().quiescent, "a dead process takes no turn");
    assert!(reader.partials().is_empty(), "{name}: nothing stays unfinished");
    assert!(reader.carry().setup.is_none(), "the setup is of one process");
    invariants(name, &outputs);
}

/// What no order of lines may break.
fn invariants(name: &str, outputs: &[Output]) {
    let mut calls = HashSet::new();
    let mut results = HashSet::new();
    let mut texts: HashSet<ItemKey> = HashSet::new();
    let mut asked = HashSet::new();
    let mut answers = HashSet::new();
    let mut accepted = HashSet::new();
    let mut delivered = HashSet::new();
    let mut ended = false;
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
            Output::DeliveryEnded { delivery_id, .. } => {
                assert!(delivered.insert(delivery_id.clone()), "{name}: a delivery ended twice");
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
                assert!(answers.insert(answer.request_id.clone()), "{name}: answered twice");
            }
            Output::Partial(partial) => {
                assert!(!texts.contains(&partial.item), "{name}: partial text after the whole");
            }
            _ => {}
        }
    }
    assert_eq!(calls, results, "{name}: every call is closed");
    for line in replies(outputs) {
        let fine = line.op.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte));
        assert!(fine && line.op.len() <= 100, "{name}: {}", line.op);
    }
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
    let run = first_turn(&recording("interrupt_tool"));
    let places: Vec<usize> = (0..run.frames.len())
        .filter(|place| matches!(&run.frames[*place], Owned::Out(line) if line.len() < 1_500))
        .collect();
    assert!(places.len() > 10);
    for place in places {
        let Owned::Out(line) = &run.frames[place] else { continue };
        for cut in (0..line.len()).step_by(3) {
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
            let asked: Vec<String> = replies(&state.0).map(|line| line.op.clone()).collect();
            turn.frames.push((number, frame.clone(), state));
            // As in [`play`](crate::support::play): what the adapter asks at a turn's end is answered here.
            for op in asked.iter().filter(|op| op.starts_with("clean.") || op.starts_with("skills.")) {
                if run.answered {
                    let answer = Owned::line(&json!({"id": op, "result": {}}));
                    let state = seen(reader.as_mut(), number, &answer);
                    turn.frames.push((number, answer, state));
                }
            }
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
    let shown = |told: &[Told]| -> Vec<String> {
        told.iter()
            .map(|(turn, _, output)| {
                // The count of lines that were not understood is what may differ.
                let mut text = format!("{turn} {}", serde_json::to_string(output).unwrap());
                if let Some(place) = text.find("\"unknown_lines\"") {
                    text.truncate(place);
                }
                text
            })
            .collect()
    };
    let mut checked = 0;
    for (name, run) in every_run() {
        // The numbers of frames stand in permission ids.
        if play(&run).iter().any(|(_, _, output)| {
            matches!(output, Output::Event { event: Event::PermissionRequest(_) | Event::PermissionAnswer(_) })
                || matches!(output, Output::Reply(line) if line.op.starts_with("refuse.") || line.op.starts_with("permission."))
        }) {
            continue;
        }
        checked += 1;
        let mut noisy = run.clone();
        noisy.frames = Vec::new();
        for frame in &run.frames {
            if matches!(frame, Owned::Out(_)) {
                for noise in [
                    &b""[..],
                    b"Welcome!",
                    b"\x1b[31mred\x1b[0m",
                    b"{\"method\":\"from/the/future\",\"params\":{}}",
                    b"{\"id\":\"nobody\",\"result\":{}}",
                    b"{\"id\":7}",
                    b"\xff{",
                    b"[]",
                ] {
                    noisy.frames.push(Owned::Out(noise.to_vec()));
                }
            }
            noisy.frames.push(frame.clone());
        }
        assert_eq!(shown(&play(&noisy)), shown(&play(&run)), "{name}");
    }
    assert!(checked > 100);
}

/// Lines that mean something, to be shuffled.
static POOL: LazyLock<Vec<Owned>> = LazyLock::new(|| {
    let mut pool: Vec<Owned> =
        ["interrupt_at_permission", "err_cut", "patch", "steer_tool", "long_command", "think", "perm_deny"]
            .into_iter()
            .flat_map(|name| recording(name).frames)
            .filter(|frame| !matches!(frame, Owned::Out(line) if line.len() > 4_000))
            .map(|frame| match frame {
                // All of them tell of the turn made by hand.
                Owned::Out(line) => {
                    let mut value: serde_json::Value = serde_json::from_slice(&line).unwrap();
                    if value["params"]["turnId"].is_string() {
                        value["params"]["turnId"] = json!(TURN);
                    }
                    if value["params"]["threadId"].is_string() {
                        value["params"]["threadId"] = json!(THREAD);
                    }
                    Owned::line(&value)
                }
                other => other,
            })
            .collect();
    pool.extend(begun());
    pool.extend([
        completed("interrupted", json!(null)),
        completed("failed", json!({"message": "m", "codexErrorInfo": "other"})),
        Owned::line(&json!({"id": "clean.trn_1", "result": {}})),
        Owned::line(&json!({"id": "skills.trn_1", "result": {}})),
        Owned::Intent("hold.trn_1".into()),
        Owned::Intent("interrupt.trn_1".into()),
        Owned::Signal(15),
    ]);
    // The turn made by hand gets its share of items.
    pool.extend([said("m1", "text"), said("m1", "text again"), said("", "nameless")]);
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
        ends_once("shuffled", &open(Some(OpenMode::Start), ""), &frames);
    }

    #[test]
    fn any_bytes_are_no_panic(lines in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..40)) {
        let mut frames = begun();
        frames.extend(lines.into_iter().map(Owned::Out));
        ends_once("bytes", &open(Some(OpenMode::Start), ""), &frames);
    }

    #[test]
    fn any_chunks_of_standard_error_give_the_same_failure(cuts in prop::collection::vec(1_usize..30, 1..60)) {
        let text = "noise\nexceeded retry limit, last status: 429 Too Many Requests\nmore é noise\nlast";
        let run = |chunks: Vec<Vec<u8>>| {
            let mut frames = begun();
            frames.extend(chunks.into_iter().map(Owned::Err));
            frames.push(Owned::Exit(Exit { code: Some(1), signal: None }));
            let mut reader = translator(&open(Some(OpenMode::Start), ""));
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
