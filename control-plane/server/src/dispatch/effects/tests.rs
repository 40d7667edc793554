//! What each event of a runner is stored as, and what it does besides.

use pretty_assertions::assert_eq;

use super::*;

fn numbered(number: u64, kind: Kind) -> engine::NumberedEvent {
    engine::NumberedEvent { number, at: None, body: Some(engine::EventBody { kind: Some(kind) }) }
}

fn sorted(kind: Kind) -> Incoming {
    sort(numbered(3, kind), &Opened::default(), Timestamp(7))
}

fn plain(incoming: Incoming) -> NewEvent {
    match incoming {
        Incoming::Event(event) => event,
        other => panic!("not a plain event: {other:?}"),
    }
}

fn body(event: &NewEvent) -> Kind {
    engine::EventBody::decode(event.payload.as_slice()).unwrap().kind.unwrap()
}

#[test]
fn accepted_moves_the_turn_and_other_phases_do_not() {
    let phase = |phase: engine::phase_event::Phase| {
        Kind::Phase(engine::PhaseEvent {
            phase: phase.into(),
            message_id: "msg_1".into(),
            detail: String::new(),
        })
    };
    let event = plain(sorted(phase(engine::phase_event::Phase::Accepted)));
    assert_eq!(event.effect, Effect::Accepted { message_id: MessageId::parse("msg_1").unwrap() });
    assert_eq!(event.source, EventSource::Runner { number: 3 });
    let event = plain(sorted(phase(engine::phase_event::Phase::Delivered)));
    assert_eq!(event.effect, Effect::None);
}

#[test]
fn s13_the_native_ref_is_kept_when_the_session_is_known_to_be_resumable() {
    let session = |state: engine::session_event::State| {
        Kind::Session(engine::SessionEvent {
            state: state.into(),
            session_id: "ses_1".into(),
            native_ref: Some(engine::NativeRef { id: "n".into() }),
            ..engine::SessionEvent::default()
        })
    };
    let event = plain(sorted(session(engine::session_event::State::NativeRef)));
    assert!(matches!(event.effect, Effect::NativeRef { .. }));
    let event = plain(sorted(session(engine::session_event::State::Opened)));
    assert_eq!(event.effect, Effect::None);
}

#[test]
fn s61_the_opening_says_what_only_the_control_plane_knows() {
    let opened = Opened {
        session_id: "ses_2".into(),
        replaces: Some("ses_1".into()),
        origin: engine::Origin::Replaced,
        history_given: true,
        summary_given: false,
    };
    let told = |session_id: &str| {
        Kind::Session(engine::SessionEvent {
            state: engine::session_event::State::Opened.into(),
            session_id: session_id.into(),
            origin: engine::Origin::Started.into(),
            ..engine::SessionEvent::default()
        })
    };
    let event = plain(sort(numbered(1, told("ses_2")), &opened, Timestamp(0)));
    let Kind::Session(session) = body(&event) else { panic!("a session event") };
    assert_eq!(session.origin(), engine::Origin::Replaced);
    assert_eq!((session.replaces.as_str(), session.history_given), ("ses_1", true));
    let event = plain(sort(numbered(1, told("ses_1")), &opened, Timestamp(0)));
    let Kind::Session(session) = body(&event) else { panic!("a session event") };
    assert_eq!(session.origin(), engine::Origin::Started, "another session's opening is left alone");
}

#[test]
fn s32_a_large_answer_is_cut_in_the_event_and_whole_in_the_ending() {
    let result = "ä".repeat(300_000);
    let terminal = engine::TerminalEvent {
        outcome: engine::Outcome::Completed.into(),
        result: result.clone(),
        ..engine::TerminalEvent::default()
    };
    let Incoming::Terminal(ending) = sorted(Kind::Terminal(terminal)) else { panic!("terminal") };
    assert_eq!(ending.result, result);
    assert!(ending.event.payload.len() <= MAX_EVENT);
    let Kind::Terminal(shown) = body(&ending.event) else { panic!("terminal") };
    assert!(shown.truncated && shown.result.len() <= 64_000 && shown.result.len() > 63_000);
}

#[test]
fn an_event_that_is_too_large_leaves_no_hole_in_the_numbers() {
    let text = engine::TextEvent { text: "x".repeat(MAX_EVENT), ..engine::TextEvent::default() };
    let event = plain(sorted(Kind::Text(text)));
    assert_eq!((event.source.clone(), event.kind), (EventSource::Runner { number: 3 }, EventKind::Notice));
    let event = plain(sort(
        engine::NumberedEvent { number: 4, ..Default::default() },
        &Opened::default(),
        Timestamp(0),
    ));
    assert_eq!((event.source, event.kind), (EventSource::Runner { number: 4 }, EventKind::Notice));
}

#[test]
fn s7_an_engine_that_finished_during_a_cancel_keeps_its_text() {
    let terminal = engine::TerminalEvent {
        outcome: engine::Outcome::Completed.into(),
        result: "done".into(),
        ..engine::TerminalEvent::default()
    };
    let Incoming::Terminal(mut ending) = sorted(Kind::Terminal(terminal)) else { panic!("terminal") };
    assert!(cancel_ending(&mut ending).is_some());
    assert!(matches!(ending.outcome, Outcome::Cancelled(Some(_))));
    assert_eq!(ending.result, "done");
    let Kind::Terminal(shown) = body(&ending.event) else { panic!("terminal") };
    assert_eq!(shown.outcome(), engine::Outcome::Cancelled);
    assert!(cancel_ending(&mut ending).is_none());
}

#[test]
fn s32_a_permission_request_of_any_size_can_be_stored_and_answered() {
    let request = |input: usize, title: usize| engine::PermissionRequestEvent {
        request_id: "spl_1.7".into(),
        tool: "T".repeat(4_096),
        input_json: "\u{e4}".repeat(input / 2),
        title: "t".repeat(title),
        call_id: "c".repeat(4_096),
        ..engine::PermissionRequestEvent::default()
    };
    for (input, title) in [(64_000, 4_096), (60_000, 4_096), (200_000, 1), (10, MAX_EVENT)] {
        let event = plain(sorted(Kind::PermissionRequest(request(input, title))));
        assert!(event.payload.len() <= MAX_EVENT);
        let Effect::PermissionRequested(stored) = event.effect else { panic!("it has to be answered") };
        assert!(stored.body.len() <= MAX_EVENT, "{input} {title}");
        assert_eq!(stored.request_id, "spl_1.7");
        if title < MAX_EVENT {
            assert_eq!(event.kind, EventKind::PermissionRequest);
            let shown = engine::PermissionRequestEvent::decode(stored.body.as_slice()).unwrap();
            assert_eq!(shown.truncated, shown.input_json.len() < input, "{input} {title}");
        }
    }
}
