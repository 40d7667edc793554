//! `chat`: on a terminal of its own, and through a pipe.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Instant;

use pretty_assertions::assert_eq;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::TurnStatus;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;
use tonic::Status;

use crate::fake::{Fake, Serving, Step, event, terminal, text, turn};
use crate::run::{BOUND, program as program_of, run_with_input};

fn turn_item(cursor: &str, status: TurnStatus) -> Step {
    Step::Say(Box::new(control::StreamEventsResponse {
        cursor: cursor.to_owned(),
        at: None,
        item: Some(Item::Turn(turn(status))),
    }))
}

fn partial(offset: u64, text: &str) -> Step {
    let partial = engine::Partial {
        item_id: "i3".to_owned(),
        offset,
        text: text.to_owned(),
        ..engine::Partial::default()
    };
    Step::Say(Box::new(control::StreamEventsResponse {
        cursor: String::new(),
        at: None,
        item: Some(Item::Partial(control::TurnPartial {
            turn_id: "trn_1".to_owned(),
            partial: Some(partial),
        })),
    }))
}

fn opened(origin: engine::Origin, history_given: bool) -> Step {
    event(
        1,
        Kind::Session(engine::SessionEvent {
            state: engine::session_event::State::Opened.into(),
            session_id: "ses_1".to_owned(),
            origin: origin.into(),
            history_given,
            ..engine::SessionEvent::default()
        }),
    )
}

fn question(seq: u64, request_id: &str) -> Step {
    event(
        seq,
        Kind::PermissionRequest(engine::PermissionRequestEvent {
            request_id: request_id.to_owned(),
            tool: "Bash".to_owned(),
            input_json: "{\"command\":\"make it so\"}".to_owned(),
            ..engine::PermissionRequestEvent::default()
        }),
    )
}

fn serve(state: impl FnOnce(&mut crate::fake::State)) -> Serving {
    let fake = Fake::default();
    state(&mut fake.state());
    fake.serve()
}

/// A new terminal: the side of the person, and that of the command.
fn open_terminal() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let name = ptsname(&master, Vec::new())?;
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
    let slave = rustix::fs::open(name, flags, rustix::fs::Mode::empty())?;
    Ok((master, slave))
}

/// A command at a terminal of its own.
struct Terminal {
    child: tokio::process::Child,
    keys: std::fs::File,
    shown: mpsc::Receiver<Vec<u8>>,
    all: String,
    /// How much of `all` was looked at.
    seen: usize,
}

impl Terminal {
    fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[])
    }

    fn start_with(args: &[&str], variables: &[(&str, &std::path::Path)]) -> Self {
        let (master, slave) = open_terminal().expect("a terminal");
        let end = || Stdio::from(slave.try_clone().expect("can be copied"));
        // The terminal has to be the command's own, so that Ctrl-C is a signal to it.
        let program = env!("CARGO_BIN_EXE_roundhouse");
        let mut command = program_of("setsid", &[&["--ctty", program], args].concat());
        command.env("TERM", "xterm").envs(variables.iter().copied()).stdin(end()).stdout(end()).stderr(end());
        let child = command.spawn().expect("starts");
        let keys = std::fs::File::from(master);
        let mut screen = keys.try_clone().expect("can be copied");
        let (tell, shown) = mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0u8; 4096];
            // An error is its end: nobody holds the other side any more.
            while let Ok(count) = screen.read(&mut buffer) {
                if count == 0 || tell.send(buffer[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, keys, shown, all: String::new(), seen: 0 }
    }

    /// Waits until this is shown, after what was waited for before.
    fn expect(&mut self, text: &str) {
        let since = Instant::now();
        loop {
            if let Some(at) = self.all[self.seen..].find(text) {
                self.seen += at + text.len();
                return;
            }
            let left = BOUND.saturating_sub(since.elapsed());
            match self.shown.recv_timeout(left) {
                Ok(bytes) => self.all.push_str(&String::from_utf8_lossy(&bytes)),
                Err(_) => panic!("{text:?} is not shown after {:?}", self.all.split_at(self.seen)),
            }
        }
    }

    fn keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("the terminal takes keys");
    }

    async fn ended(mut self) -> (Option<i32>, String) {
        let status = tokio::time::timeout(BOUND, self.child.wait()).await.expect("ends in time");
        while let Ok(bytes) = self.shown.recv_timeout(std::time::Duration::from_millis(100)) {
            self.all.push_str(&String::from_utf8_lossy(&bytes));
        }
        (status.expect("can be waited for").code(), self.all)
    }
}

#[tokio::test]
async fn a_terminal_shows_text_as_it_comes_and_how_the_session_came_to_be() {
    let server = serve(|state| {
        state.conversation.agent = "reviewer".to_owned();
        state.streams.push_back(vec![
            opened(engine::Origin::Resumed, true),
            partial(0, "It is "),
            partial(6, "fine"),
            event(
                3,
                Kind::Text(engine::TextEvent {
                    item_id: "i3".to_owned(),
                    text: "It is fine.".to_owned(),
                    ..engine::TextEvent::default()
                }),
            ),
            terminal(4, engine::Outcome::Completed),
            Step::Hang,
        ]);
    });
    let mut terminal = Terminal::start(&["--server", &server.url(), "chat", "--no-history", "cnv_1"]);
    terminal.expect("next agent: reviewer");
    terminal.expect("RESUMED, given what it missed");
    terminal.expect("It is fine.");
    terminal.expect("completed");
    terminal.expect("> ");
    terminal.keys("/quit\r");
    let (code, all) = terminal.ended().await;
    assert_eq!(code, Some(0), "{all}");
    assert_eq!(all.matches("It is fine.").count(), 1, "each byte once: {all}");
}

#[tokio::test]
async fn y_allows_at_a_terminal_and_ctrl_c_cancels_and_then_leaves() {
    let server = serve(|state| {
        state.conversation.active_turn_id = "trn_1".to_owned();
        state.streams.push_back(vec![turn_item("c1", TurnStatus::Running), question(2, "spl_1.1")]);
        state.streams.push_back(vec![Step::Hang]);
    });
    let mut terminal = Terminal::start(&["--server", &server.url(), "chat", "--no-history", "cnv_1"]);
    terminal.expect("make it so");
    terminal.expect("y or n?");
    terminal.keys("maybe\n");
    terminal.expect("y or n? (n may be followed by why");
    terminal.keys("y\n");
    let since = Instant::now();
    while server.fake.state().answer_requests.is_empty() {
        assert!(since.elapsed() < BOUND, "it is not answered");
        tokio::task::yield_now().await;
    }
    let decision = server.fake.state().answer_requests[0].decision;
    assert_eq!(decision, i32::from(engine::PermissionDecision::Allow));
    terminal.keys("\u{3}");
    terminal.expect("cancelling");
    let since = Instant::now();
    while server.fake.state().cancel_requests.is_empty() {
        assert!(since.elapsed() < BOUND, "it is not cancelled");
        tokio::task::yield_now().await;
    }
    terminal.keys("\u{3}");
    terminal.expect("the turn goes on without this command");
    let (code, all) = terminal.ended().await;
    assert_eq!(code, Some(130), "{all}");
    let cancelled: Vec<_> =
        server.fake.state().cancel_requests.iter().map(|request| request.turn_id.clone()).collect();
    assert_eq!(cancelled, ["trn_1"], "the second one leaves");
}

fn settled(seq: u64, request_id: &str) -> Step {
    event(
        seq,
        Kind::PermissionAnswer(engine::PermissionAnswerEvent {
            request_id: request_id.to_owned(),
            decision: engine::PermissionDecision::Allow.into(),
            ..engine::PermissionAnswerEvent::default()
        }),
    )
}

/// Another terminal asks while nothing is at work here: what it said is shown, and what its agent asks; and an answer
/// that comes after another one is no message.
#[tokio::test]
async fn an_idle_chat_shows_what_others_ask_and_sends_no_late_answer_as_a_message() {
    let message = control::Message {
        message_id: "msg_7".to_owned(),
        conversation_id: "cnv_1".to_owned(),
        position: Some(1),
        seq: 1,
        role: control::Role::User.into(),
        actor: "ann".to_owned(),
        text: "make it".to_owned(),
        turn_id: "trn_1".to_owned(),
        ..control::Message::default()
    };
    let said = |cursor: &str| {
        Step::Say(Box::new(control::StreamEventsResponse {
            cursor: cursor.to_owned(),
            at: None,
            item: Some(Item::Message(message.clone())),
        }))
    };
    let server = serve(|state| {
        state.streams.push_back(vec![
            said("c0"),
            turn_item("c1", TurnStatus::Running),
            said("c2"),
            question(2, "spl_1.1"),
            settled(3, "spl_1.1"),
            terminal(4, engine::Outcome::Completed),
            Step::Hang,
        ]);
    });
    let mut terminal = Terminal::start(&["--server", &server.url(), "chat", "--no-history", "cnv_1"]);
    terminal.expect("ann: make it");
    terminal.expect("make it so");
    terminal.expect("y or n?");
    terminal.expect("completed");
    terminal.expect("> ");
    terminal.keys("y\r");
    terminal.expect("answered already, so this was not sent");
    terminal.expect("> ");
    assert_eq!(server.fake.state().send_requests.len(), 0);
    // Said again it is meant.
    terminal.keys("y\r");
    let since = Instant::now();
    while server.fake.state().send_requests.is_empty() {
        assert!(since.elapsed() < BOUND, "it is not sent");
        tokio::task::yield_now().await;
    }
    terminal.keys("/quit\r");
    terminal.keys("\u{3}\u{3}");
    let (_, all) = terminal.ended().await;
    assert_eq!(all.matches("ann: make it").count(), 1, "once: {all}");
    let texts: Vec<_> = server.fake.state().send_requests.iter().map(|sent| sent.text.clone()).collect();
    assert_eq!(texts, ["y"]);
    assert!(server.fake.state().answer_requests.is_empty());
}

#[tokio::test]
async fn a_history_of_typed_lines_is_kept_for_the_next_chat_and_nobody_else() {
    use std::os::unix::fs::PermissionsExt as _;
    let home = tempfile::tempdir().expect("a directory");
    let server = serve(|state| state.streams.push_back(vec![Step::Hang]));
    let url = server.url();
    let start = || {
        let pty_args = ["--server", &url, "chat", "cnv_1"];
        Terminal::start_with(&pty_args, &[("XDG_STATE_HOME", home.path())])
    };
    let mut terminal = start();
    terminal.expect("> ");
    terminal.keys("/help\r");
    terminal.expect("who answers from the next message on");
    terminal.expect("> ");
    terminal.keys("/quit\r");
    assert_eq!(terminal.ended().await.0, Some(0));
    let file = home.path().join("roundhouse/chat_history");
    let mode = std::fs::metadata(&file).expect("is there").permissions().mode();
    assert_eq!(mode & 0o077, 0, "{mode:o}");
    let mut terminal = start();
    terminal.expect("> ");
    // Twice up: past /quit, to what was typed before it.
    terminal.keys("\u{1b}[A\u{1b}[A");
    terminal.expect("/help");
    terminal.keys("\r");
    terminal.expect("who answers from the next message on");
    terminal.keys("\u{3}");
    terminal.expect("Ctrl-C once more");
    terminal.keys("\u{3}");
    let (code, all) = terminal.ended().await;
    assert_eq!(code, Some(130), "{all}");
}

#[tokio::test]
async fn through_a_pipe_each_line_is_a_turn_and_the_answers_are_the_data() {
    let server = serve(|state| {
        state.sent.push_back(turn(TurnStatus::Dispatching));
        state.streams.push_back(vec![
            turn_item("c0", TurnStatus::Running),
            opened(engine::Origin::Started, false),
            text(2, "It is fine."),
            terminal(3, engine::Outcome::Failed),
            Step::Hang,
        ]);
    });
    let ended =
        run_with_input(&["--server", &server.url(), "chat", "cnv_1"], b"is it?\n/help\n//slash\n").await;
    assert_eq!(ended.stdout, "It is fine.\n", "{ended:?}");
    assert!(ended.stderr.contains("STARTED") && ended.stderr.contains("── failed"), "{}", ended.stderr);
    assert!(ended.stderr.contains("/sessions"), "help is a note: {}", ended.stderr);
    let texts: Vec<_> =
        server.fake.state().send_requests.iter().map(|request| request.text.clone()).collect();
    assert_eq!(texts, ["is it?", "/slash"]);
    assert_eq!(ended.code, 1, "as the last turn ended: {ended:?}");
}

#[tokio::test]
async fn a_message_whose_answer_was_lost_is_sent_again_under_the_same_id() {
    let server = serve(|state| {
        state.lose_send.push_back(Status::unavailable("going down"));
        state.lose_send.push_back(Status::unavailable("still down"));
        state.streams.push_back(vec![
            turn_item("c0", TurnStatus::Running),
            terminal(1, engine::Outcome::Completed),
            Step::Hang,
        ]);
    });
    let ended = run_with_input(&["--server", &server.url(), "chat", "cnv_1"], b"once\n").await;
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(ended.stderr.contains("going down; trying again until it is answered"), "{}", ended.stderr);
    let ids: std::collections::BTreeSet<_> =
        server.fake.state().send_requests.iter().map(|request| request.request_id.clone()).collect();
    assert_eq!((ids.len(), server.fake.state().send_requests.len()), (1, 3));
}

#[tokio::test]
async fn a_refused_message_says_why_and_the_chat_goes_on() {
    let server = serve(|state| {
        state.refuse_send = Some(Status::resource_exhausted("the queue is full"));
        state.streams.push_back(vec![Step::Hang]);
    });
    let ended = run_with_input(&["--server", &server.url(), "chat", "cnv_1"], b"one\ntwo\n").await;
    assert_eq!(ended.stderr.matches("the queue is full").count(), 2, "{}", ended.stderr);
    assert_eq!(ended.code, 4, "{ended:?}");
}
