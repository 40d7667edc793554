//! `chat`: a conversation at a terminal, or through a pipe.
//!
//! ```text
//! standard input -> Input ---\                    /-> Sender -> control plane
//!                             > Chat (one loop) -<
//! control plane -> Follower -/                    \-> Screen -> terminal
//! ```
//!
//! It is a client like any other: it holds no turn, and what it leaves goes on. It follows the whole conversation, so
//! that it shows what others send, too.

mod input;
mod screen;
mod sender;
mod slash;

use std::collections::{BTreeSet, HashSet};
use std::io::IsTerminal as _;
use std::path::PathBuf;

use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_proto::engine::v1::event_body::Kind;

use crate::args::{ChatArgs, Page, SessionsArgs};
use crate::chat::input::{Input, Mode, Typed};
pub(crate) use crate::chat::screen::came_to_be;
use crate::chat::screen::{Screen, so_far};
use crate::chat::sender::{Became, Sender, Wish};
use crate::chat::slash::{HELP, Line, Question, understand};
use crate::client::{self, Client, call, incomplete};
use crate::commands::follow::{Waits, ended, exit_of};
use crate::commands::send::{Place, conversation, too_long};
use crate::commands::{agents, listing};
use crate::events::{Follower, Next, Wish as Stream};
use crate::exit::Exit;
use crate::interrupts::{Asked, Interrupts};
use crate::output::Output;
use crate::status::Failure;

/// Messages that somebody who comes in is shown.
const SHOWN: u64 = 6;
/// Title of a conversation that was begun by talking.
const TITLE: &str = "A chat";

pub(crate) async fn run(client: Client, args: ChatArgs, output: Output) -> Result<Exit, Failure> {
    let place = Place { agent: args.agent.unwrap_or_default(), workspace: args.workspace };
    let request_id = client::request_id(None);
    let (id, workspace) =
        conversation(&client, args.conversation.as_deref(), &place, &request_id, TITLE).await?;
    let known = get(&client, &id).await?;
    let interactive = std::io::stdin().is_terminal() && !output.is_json();
    let edit = interactive && std::io::stdout().is_terminal();
    let history = if args.no_history { None } else { history_file() };
    // A workspace that was named here goes with the first message, like the agent; then the conversation knows it.
    let place = Place { agent: place.agent, workspace: Some(workspace) };

    let (input, printer) = Input::start(edit, history)?;
    let mut chat = Chat {
        sender: Sender::start(client.clone(), id.clone()),
        screen: Screen::new(output, printer),
        client,
        input,
        output,
        interactive,
        agent: place.agent,
        workspace: place.workspace.unwrap_or_default(),
        workspace_id: known.workspace_id.clone(),
        id,
        open: BTreeSet::new(),
        ended: HashSet::new(),
        own: HashSet::new(),
        active: None,
        cancelling: None,
        asked: Vec::new(),
        answered: HashSet::new(),
        settled_elsewhere: false,
        last: None,
        outcome: Exit::Done,
        waits: None,
        eof: false,
        warned: false,
    };
    chat.come_in(&known).await?;
    chat.talk().await
}

/// Where typed lines are kept between two chats.
fn history_file() -> Option<PathBuf> {
    Some(roundhouse_config::default_state_dir().join("chat_history"))
}

async fn get(client: &Client, id: &str) -> Result<control::Conversation, Failure> {
    use control::get_conversation_request::Name;
    let request = control::GetConversationRequest { name: Some(Name::ConversationId(id.to_owned())) };
    let answer = client.conversations().get_conversation(call(request)).await?.into_inner();
    answer.conversation.ok_or_else(|| incomplete("the conversation"))
}

struct Chat {
    client: Client,
    output: Output,
    input: Input,
    screen: Screen,
    sender: Sender,
    /// Whether a person types, and sees what was typed.
    interactive: bool,
    id: String,
    /// Goes with the next message; empty for the conversation's.
    agent: String,
    workspace: String,
    workspace_id: String,
    /// Turns that have not ended.
    open: BTreeSet<String>,
    ended: HashSet<String>,
    /// Turns of messages that were typed here.
    own: HashSet<String>,
    /// The turn that is at work.
    active: Option<String>,
    /// The turn that a Ctrl-C was for.
    cancelling: Option<String>,
    /// Permission requests that wait for an answer, oldest first.
    asked: Vec<engine::PermissionRequestEvent>,
    /// Those that were answered from here.
    answered: HashSet<String>,
    /// Whether a question was settled without an answer from here, and nothing was typed since.
    settled_elsewhere: bool,
    /// The turn that ended last.
    last: Option<String>,
    /// How the last turn that was asked for here ended.
    outcome: Exit,
    waits: Option<Waits>,
    /// No more will be typed.
    eof: bool,
    /// Whether the last thing typed was a Ctrl-C for which there was nothing to cancel.
    warned: bool,
}

/// What happened next.
enum Happened {
    Typed(Typed),
    Became(Became),
    Stream(Next),
    Waits(String),
    Signal(Asked),
}

impl Chat {
    /// Says where one is, and shows the end of what was said.
    async fn come_in(&mut self, known: &control::Conversation) -> Result<(), Failure> {
        let request = control::ListMessagesRequest {
            conversation_id: self.id.clone(),
            after: known.last_seq.saturating_sub(SHOWN),
            limit: 50,
        };
        let listed = self.client.conversations().list_messages(call(request)).await?.into_inner();
        if self.interactive {
            let agent = if self.agent.is_empty() { &known.agent } else { &self.agent };
            let title = if known.title.is_empty() { "untitled" } else { &known.title };
            self.screen.note(&format!("{} ({title}), next agent: {agent}; /help", self.id));
            if !listed.messages.is_empty() {
                self.screen.note(&so_far(&listed.messages));
            }
        } else {
            self.screen.note(&format!("conversation {}", self.id));
        }
        self.screen.told(&listed.messages);
        self.last = listed.messages.last().map(|message| message.turn_id.clone());
        self.active = Some(known.active_turn_id.clone()).filter(|turn| !turn.is_empty());
        self.open.extend(self.active.clone());
        Ok(())
    }

    /// Up to where the conversation has come. Of a turn that is at work, what it has done so far is shown.
    async fn catch_up(&mut self) -> Result<String, Failure> {
        let Some(turn) = self.active.clone().or_else(|| self.last.clone()) else { return Ok(String::new()) };
        let stream = Stream {
            conversation_id: self.id.clone(),
            turn_id: Some(turn),
            follow: false,
            ..Stream::default()
        };
        let mut follower = Follower::new(self.client.clone(), stream);
        let shown = self.active.is_some();
        loop {
            match follower.next().await? {
                Next::Item(item) if shown => self.item(&item),
                Next::Item(_) | Next::Lost(_) | Next::Back => {}
                Next::End => return Ok(follower.cursor().to_owned()),
            }
        }
    }

    async fn talk(&mut self) -> Result<Exit, Failure> {
        let mut interrupts = Interrupts::new()?;
        let after = self.catch_up().await?;
        let stream = Stream {
            conversation_id: self.id.clone(),
            turn_id: None,
            after,
            partials: self.output.is_live(),
            follow: true,
        };
        let mut follower = Follower::new(self.client.clone(), stream).reached().patient();
        loop {
            if self.eof && !self.is_busy() {
                return Ok(if self.interactive { Exit::Done } else { self.outcome });
            }
            self.ask();
            let happened = tokio::select! {
                asked = interrupts.next() => Happened::Signal(asked),
                typed = self.input.next(), if self.input.is_open() => Happened::Typed(typed),
                became = self.sender.next() => Happened::Became(became),
                next = follower.next() => Happened::Stream(next?),
                for_what = told(&mut self.waits, &self.client) => Happened::Waits(for_what),
            };
            let leave = match happened {
                Happened::Typed(typed) => self.typed(typed).await?,
                Happened::Became(became) => self.became(became),
                Happened::Stream(next) => {
                    self.stream(next);
                    None
                }
                Happened::Waits(for_what) => {
                    self.screen.note(&format!("waits     {for_what}"));
                    None
                }
                Happened::Signal(Asked::Interrupt) => self.interrupted(),
                Happened::Signal(Asked::End) => Some(Exit::Cancelled),
            };
            if let Some(exit) = leave {
                self.leave();
                return Ok(exit);
            }
        }
    }

    fn is_busy(&self) -> bool {
        !self.open.is_empty() || self.sender.is_busy()
    }

    /// Asks for the next line, in the way that fits. A script's next line waits until there is use for it.
    fn ask(&mut self) {
        if self.eof {
            return;
        }
        let busy = self.is_busy();
        if self.interactive {
            self.input.ask(if busy { Mode::Plain } else { Mode::Edit });
        } else if !self.asked.is_empty() || !busy {
            self.input.ask(Mode::Plain);
        }
        self.screen.editing = self.input.is_editing();
    }

    async fn typed(&mut self, typed: Typed) -> Result<Option<Exit>, Failure> {
        self.screen.editing = false;
        let line = match typed {
            Typed::Stopped => return Ok(None),
            Typed::Interrupted => return Ok(self.interrupted()),
            Typed::End => {
                self.eof = true;
                if self.interactive && self.is_busy() {
                    self.screen.note("leaving when the turn has ended; Ctrl-C cancels it");
                } else if !self.asked.is_empty() {
                    self.screen.note("standard input has ended, and with it the answers from here");
                }
                return Ok(None);
            }
            Typed::Broken(why) => {
                return Err(Failure::new(Exit::Failed, format!("standard input: {why}")));
            }
            Typed::Line(line) => line,
        };
        self.warned = false;
        let settled_elsewhere = std::mem::take(&mut self.settled_elsewhere);
        let question = match (self.asked.is_empty(), settled_elsewhere) {
            (false, _) => Question::Waits,
            (true, true) => Question::Gone,
            (true, false) => Question::None,
        };
        match understand(&line, question) {
            Line::Nothing => {}
            Line::Say(text) => self.say(text),
            Line::Answer(decision, feedback) => {
                let permission = self.asked.first().map(|asked| asked.request_id.clone());
                let permission = permission.unwrap_or_default();
                self.answered.insert(permission.clone());
                self.order(Wish::Answer { permission, decision, feedback });
            }
            Line::NoAnswer => self.screen.note("y or n? (n may be followed by why; /cancel ends the turn)"),
            Line::TooLate => self.screen.note(
                "the question was answered already, so this was not sent; type it again to send it as a message",
            ),
            Line::Agent(None) => self.agents().await,
            Line::Agent(Some(name)) => self.choose(name).await,
            Line::Sessions => self.sessions().await,
            Line::Cancel => match self.active.clone() {
                Some(turn) => self.cancel(turn),
                None => self.screen.note("nothing is at work"),
            },
            Line::Retry => match self.last.clone() {
                Some(turn_id) => self.order(Wish::Retry { turn_id }),
                None => self.screen.note("there is no turn yet"),
            },
            Line::Quit => return Ok(Some(Exit::Done)),
            Line::Help => self.screen.note(HELP),
            Line::Unknown(line) => self.screen.note(&format!(
                "there is no {}; /help lists what there is, and //... sends a text with a slash",
                line.split_whitespace().next().unwrap_or_default()
            )),
        }
        Ok(None)
    }

    fn say(&mut self, text: String) {
        if let Some(failure) = too_long(&text) {
            return self.screen.note(&failure.told(self.output));
        }
        let workspace = std::mem::take(&mut self.workspace);
        self.order(Wish::Send { text, agent: self.agent.clone(), workspace });
    }

    fn order(&mut self, wish: Wish) {
        if !self.sender.order(wish) {
            self.screen.note("too much waits to be sent; wait a moment");
        }
    }

    fn cancel(&mut self, turn_id: String) {
        self.cancelling = Some(turn_id.clone());
        self.screen.note("cancelling; Ctrl-C once more leaves without waiting for it");
        self.order(Wish::Cancel { turn_id });
    }

    /// Ctrl-C: cancels what is at work, and leaves when that was asked for already or there is nothing.
    fn interrupted(&mut self) -> Option<Exit> {
        let active = self.active.clone().or_else(|| self.open.first().cloned());
        match active {
            Some(turn) if self.cancelling.as_ref() != Some(&turn) => {
                self.cancel(turn);
                None
            }
            Some(_) => Some(Exit::Cancelled),
            None if self.sender.is_busy() || self.warned || !self.interactive => Some(Exit::Cancelled),
            None => {
                self.warned = true;
                self.screen.note("nothing is at work; Ctrl-C once more, Ctrl-D or /quit leaves");
                None
            }
        }
    }

    fn leave(&mut self) {
        self.screen.editing = false;
        self.screen.close();
        for (id, text) in self.sender.unanswered() {
            self.screen.note(&format!(
                "whether this was stored is not known; a repeat is harmless: roundhouse send -c {} --request-id {id} {text:?}",
                self.id
            ));
        }
        if let Some(turn) = &self.active {
            let told = format!("the turn goes on without this command: roundhouse chat {}", self.id);
            let cancel = format!("  cancel it: roundhouse cancel {turn}");
            self.screen.note(&if self.cancelling.is_some() { told } else { format!("{told}\n{cancel}") });
        }
    }

    fn became(&mut self, became: Became) -> Option<Exit> {
        match became {
            Became::Turn(turn) => {
                self.own.insert(turn.turn_id.clone());
                if !self.ended.contains(&turn.turn_id) {
                    self.open.insert(turn.turn_id.clone());
                    self.turn(&turn);
                    if self.active.is_none() || self.waits.is_none() {
                        self.waits = Some(Waits::new(&turn));
                    }
                }
            }
            Became::Cancelling { already_ended: true } => self.screen.note("it had ended already"),
            Became::Answered { accepted: false } => self.screen.note("another answer was first"),
            Became::Cancelling { .. } | Became::Answered { .. } => {}
            Became::Trying(failure) => {
                self.screen.note(&format!("{}; trying again until it is answered", failure.message));
            }
            Became::Refused(wish, failure) => {
                self.screen.note(&failure.told(self.output));
                if let Wish::Send { workspace, .. } = wish {
                    // It did not reach the conversation, so the next message still has to bring it.
                    self.workspace = workspace;
                    self.outcome = failure.exit;
                }
            }
        }
        None
    }

    fn stream(&mut self, next: Next) {
        match next {
            Next::Item(item) => self.item(&item),
            Next::Lost(failure) => {
                self.screen.note(&format!("{}; what runs goes on, waiting for the server", failure.message));
            }
            Next::Back => self.screen.note("the server is back"),
            Next::End => {}
        }
    }

    fn item(&mut self, item: &control::StreamEventsResponse) {
        let own = match &item.item {
            Some(Item::Message(message)) => {
                self.own.contains(&message.turn_id)
                    || self.sender.unanswered().iter().any(|(_, text)| *text == message.text)
            }
            Some(
                Item::TurnEvent(_)
                | Item::Turn(_)
                | Item::Session(_)
                | Item::Summary(_)
                | Item::Partial(_)
                | Item::PartialReset(_),
            )
            | None => false,
        };
        match &item.item {
            Some(Item::Turn(turn)) => self.turn(turn),
            Some(Item::TurnEvent(event)) => {
                self.waits = None;
                if let Some(kind) = event.body.as_ref().and_then(|body| body.kind.as_ref()) {
                    self.asks(kind);
                }
            }
            Some(
                Item::Message(_)
                | Item::Session(_)
                | Item::Summary(_)
                | Item::Partial(_)
                | Item::PartialReset(_),
            )
            | None => {}
        }
        let end = self.screen.end_of(item);
        let before = self.asked.len();
        self.screen.item(item, own);
        if let Some(turn) = end {
            self.turn(&turn);
        }
        if before > 0 && is_question(item) && !self.output.is_json() {
            self.screen.note("          y or n?");
        }
    }

    fn asks(&mut self, kind: &Kind) {
        match kind {
            Kind::PermissionRequest(asked) => self.asked.push(asked.clone()),
            Kind::PermissionAnswer(answer) => {
                let elsewhere = !self.answered.remove(&answer.request_id);
                let before = self.asked.len();
                self.asked.retain(|asked| asked.request_id != answer.request_id);
                self.settled_elsewhere |= elsewhere && self.asked.len() < before;
            }
            Kind::Terminal(_) => {
                self.settled_elsewhere |=
                    self.asked.iter().any(|asked| !self.answered.contains(&asked.request_id));
                self.asked.clear();
            }
            Kind::Session(_)
            | Kind::Phase(_)
            | Kind::Text(_)
            | Kind::Reasoning(_)
            | Kind::ToolCall(_)
            | Kind::ToolResult(_)
            | Kind::FileChange(_)
            | Kind::Usage(_)
            | Kind::Quota(_)
            | Kind::Notice(_)
            | Kind::Evidence(_) => {}
        }
    }

    fn turn(&mut self, turn: &control::Turn) {
        let id = &turn.turn_id;
        if ended(turn.status) {
            self.ended.insert(id.clone());
            self.open.remove(id);
            self.last = Some(id.clone());
            if self.own.contains(id) || self.sender.is_busy() {
                self.outcome = exit_of(turn.status);
            }
            for gone in [&mut self.active, &mut self.cancelling] {
                if gone.as_ref() == Some(id) {
                    *gone = None;
                }
            }
            self.waits = None;
            if !turn.workspace_id.is_empty() {
                self.workspace_id.clone_from(&turn.workspace_id);
            }
            return;
        }
        if self.ended.contains(id) {
            return;
        }
        self.open.insert(id.clone());
        if turn.status != control::TurnStatus::Queued as i32 {
            self.active = Some(id.clone());
        }
    }

    async fn agents(&mut self) {
        match self.listed().await {
            Ok(list) => self.screen.note(&agents::table_of(&list)),
            Err(failure) => self.screen.note(&failure.human()),
        }
    }

    async fn choose(&mut self, name: String) {
        match self.listed().await {
            Ok(list) if list.iter().any(|agent| agent.name == name && agent.enabled) => {
                self.screen.note(&format!("{name} answers from the next message on"));
                self.agent = name;
            }
            Ok(list) => {
                let names: Vec<_> = list.iter().map(|agent| agent.name.as_str()).collect();
                self.screen.note(&format!("there is no agent {name} here; there are: {}", names.join(", ")));
            }
            Err(failure) => self.screen.note(&failure.human()),
        }
    }

    async fn listed(&self) -> Result<Vec<control::Agent>, Failure> {
        let workspace = if self.workspace.is_empty() { &self.workspace_id } else { &self.workspace };
        let request = control::ListAgentsRequest { workspace: workspace.clone() };
        Ok(self.client.agents().list_agents(call(request)).await?.into_inner().agents)
    }

    async fn sessions(&mut self) {
        let args = SessionsArgs { what: None, of: Some(self.id.clone()), page: Page::default() };
        match listing::session_table(&self.client, &args).await {
            Ok(table) => self.screen.note(&table),
            Err(failure) => self.screen.note(&failure.human()),
        }
    }
}

fn is_question(item: &control::StreamEventsResponse) -> bool {
    let Some(Item::TurnEvent(event)) = &item.item else { return false };
    matches!(event.body.as_ref().and_then(|body| body.kind.as_ref()), Some(Kind::PermissionRequest(_)))
}

/// What a turn waits for, once there is something to tell.
async fn told(waits: &mut Option<Waits>, client: &Client) -> String {
    match waits {
        Some(waits) => waits.told(client).await,
        None => std::future::pending().await,
    }
}
