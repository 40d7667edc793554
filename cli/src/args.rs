//! The command line as a tree, with its help.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::exit;
use crate::target::Secret;

mod db;
mod sharing;

pub(crate) use db::{DbArgs, DbCommand};
pub(crate) use sharing::{SessionsCommand, SummaryCommand};

const LONG_ABOUT: &str = "\
Roundhouse keeps coding agents: conversations that outlive their engines.

A message sent here is worked on by the engine that its agent names (Claude Code, for one), where the \
workspace lies, and can be followed, cancelled and continued from anywhere.

  roundhouse demo                  see it work, without a key
  roundhouse up                    start both services here
  roundhouse send --wait --agent reviewer \"What does this repository do?\"";

const AFTER_LONG: &str = "\
Data goes to standard output, everything else to standard error. With --json a command prints one JSON value, \
a stream one value a line, and an error is one JSON value {\"error\":{exit_code, code, reason, message, \
violations, next, retry_after_ms, metadata}} on standard error. In JSON, what is absent is null, times are RFC 3339 \
in UTC, and names of states are those of the protocol without their prefix.";

/// Keeps coding agents: conversations that outlive their engines.
#[derive(Debug, Parser)]
#[command(
    name = "roundhouse",
    version,
    long_about = LONG_ABOUT,
    after_help = exit::TABLE,
    after_long_help = format!("{AFTER_LONG}\n\n{}", exit::TABLE),
    arg_required_else_help = true,
    propagate_version = false,
    disable_help_subcommand = false
)]
pub(crate) struct Cli {
    /// What applies everywhere.
    #[command(flatten)]
    pub(crate) global: Global,
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What applies everywhere.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Global {
    /// The control plane [env: ROUNDHOUSE_SERVER] [default: client.server of the configuration, http://127.0.0.1:7450]
    #[arg(long, global = true, value_name = "URL", help_heading = "Global options")]
    pub(crate) server: Option<String>,
    /// The control plane and token file of [client.profiles.NAME] in the configuration [env: ROUNDHOUSE_PROFILE]
    #[arg(long, global = true, value_name = "NAME", help_heading = "Global options")]
    pub(crate) profile: Option<String>,
    /// A token to send with every call [env: ROUNDHOUSE_TOKEN] [default: the first line of the token file that is
    /// configured beside the server]
    ///
    /// It is sent as `authorization: Bearer TOKEN`. No control plane checks it yet, and there is no TLS: it keeps
    /// nobody out, and whoever reads the network reads it. Arguments of a process can be seen by other users of a host;
    /// the variable and a token file cannot. It is never printed.
    #[arg(
        long,
        global = true,
        value_name = "TOKEN",
        help_heading = "Global options",
        value_parser = clap::builder::ValueParser::from(|text: &str| Ok::<_, std::convert::Infallible>(Secret::from(text.to_owned())))
    )]
    pub(crate) token: Option<Secret>,
    /// Print JSON for programs instead of text for people
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
    /// The configuration file [default: roundhouse.toml in the configuration directory, if it is there]
    #[arg(
        long,
        global = true,
        env = "ROUNDHOUSE_CONFIG",
        value_name = "FILE",
        help_heading = "Global options"
    )]
    pub(crate) config: Option<PathBuf>,
    /// A setting over file and environment, such as runner.idle_timeout=5m (may be repeated)
    #[arg(long = "set", global = true, value_name = "SECTION.KEY=VALUE", help_heading = "Global options")]
    pub(crate) settings: Vec<String>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start control plane and engine runner here, until Ctrl-C
    ///
    /// Both listen on loopback. Workspaces may lie in the current directory, or in the roots that are named or
    /// configured. Ctrl-C, or the end of this process by any means, stops both and leaves no process; a turn that
    /// runs then is cancelled. That takes some seconds when an engine does not end by itself: the first Ctrl-C waits
    /// for it, a second one kills services and engines at once, and a turn that ran then ends FAILED at the next start.
    /// A ready line on standard output tells the addresses.
    #[command(
        after_long_help = "JSON: {\"ready\": true, \"control_plane\": \"127.0.0.1:7450\", \"runner\": \
        \"127.0.0.1:7460\", \"runner_id\": ..., \"roots\": [...], \"engines\": [{name, installed, version, login, \
        login_detail}]}"
    )]
    Up(UpArgs),
    /// See it work: one conversation across Claude Code, Codex and two runners, with a scripted model, no key needed
    ///
    /// Makes two git workspaces with two agents in a temporary directory, installs the pinned CLIs with npm unless they
    /// are there, starts a scripted model, the control plane and two runners, and holds a conversation: Claude Code writes
    /// a file, Codex reviews it, Claude Code goes on while its runner is killed, is cancelled in the middle of a tool, and
    /// goes on in the second runner's workspace. Of each turn it says what the model was told, by the model's own log. Ends
    /// with a table, and leaves no process.
    #[command(
        after_long_help = "JSON: one value a line while it runs, {\"turns\": [{turn, turn_id, agent, engine, origin, \
        outcome, expected, told: {natively, as_context, sentence}, duration_ms, input_tokens, output_tokens}]} at the end"
    )]
    Demo(DemoArgs),
    /// Send a message, and with --wait follow its turn to the end
    ///
    /// Without --conversation a new conversation is made. When a turn of the conversation is at work the message
    /// waits. A repeat under the same --request-id is answered like the first time and starts nothing.
    #[command(after_long_help = "JSON: {\"conversation_id\", \"message\": {...}, \"turn\": {...}, \
        \"repeated_request\"}; with --wait also {\"answer\": {...} or null}, when the turn has ended")]
    Send(SendArgs),
    /// Talk: text as it comes, y or n to what an agent asks, Ctrl-C to cancel
    ///
    /// Lines that are typed are messages; those that begin with a slash are commands (`/help`). While an agent works, a
    /// line waits for its turn. Ctrl-C cancels what is at work, a second one leaves, and so does /quit; what is left goes
    /// on. What others send is shown, too. When the connection is lost it is taken up again without gap or repeat, and
    /// what was typed is sent under one request id until it is answered. Without a terminal it takes a line, waits for
    /// the end of its turn, and takes the next: answers on standard output, the rest on standard error, and the exit code
    /// is that of the last turn.
    #[command(after_long_help = "JSON: one value a line, as events does")]
    Chat(ChatArgs),
    /// Write a conversation down, in the order of its shared history
    #[command(
        after_long_help = "JSON (also with --json): {\"format\": \"roundhouse.conversation\", \"version\": 1, \
        \"conversation\": {...}, \"messages\": [{message_id, seq, position, role, actor, text, truncated, incomplete, \
        turn_id, create_time}]}. Messages are in the order of position; those that wait have none and come last, by \
        seq. incomplete marks what an interrupted turn had said. Fields may be added under the same version, none \
        changes its meaning or goes. With -o standard output holds {\"written\": FILE} with --json, and nothing else"
    )]
    Export(ExportArgs),
    /// Show what happens in a conversation: everything kept, and with --follow what comes
    ///
    /// When the connection is lost it is taken up again after the last event, without gap or repeat.
    #[command(
        after_long_help = "JSON: one value a line: {\"cursor\", \"at\", \"kind\": turn_event | message | turn \
        | session | summary | partial | partial_reset, ...}. A turn_event has turn_id, seq, event (the kind) and body"
    )]
    Events(EventsArgs),
    /// Cancel a turn; what it has written so far is kept, nothing in the workspace is undone
    #[command(after_long_help = "JSON: {\"turn\": {...}, \"already_ended\": bool}")]
    Cancel(CancelArgs),
    /// Try a conversation's last turn again, after it failed, was lost or was cancelled
    #[command(after_long_help = "JSON: {\"turn\": {...}}; with --wait also {\"answer\": {...} or null}")]
    Retry(RetryArgs),
    /// Conversations: list, show, create, archive
    #[command(after_long_help = "Without a subcommand it lists. JSON: as list")]
    Conversations {
        /// What to do with them [default: list]
        #[command(subcommand)]
        what: Option<ConversationsCommand>,
    },
    /// The messages of a conversation, by order of arrival
    #[command(after_long_help = "JSON: {\"messages\": [{...}], \"has_more\": bool}")]
    Messages(MessagesArgs),
    /// The turns of a conversation, or one turn with its messages
    #[command(
        after_long_help = "JSON: {\"turns\": [{...}]}; of one turn {\"turn\", \"message\", \"answer\", \
        \"duration_ms\", \"worked_ms\", \"waited_ms\", \"waiting\"}. duration_ms counts from the turn's promotion; waited_ms \
        and worked_ms, of a turn that has ended, are the time from its message to the work and that of the work"
    )]
    Turns(TurnsArgs),
    /// The native sessions of the engines
    #[command(after_long_help = "JSON: {\"sessions\": [{...}]}; of one session {\"session\": {...}}")]
    Sessions(SessionsArgs),
    /// The summary of a conversation, which new sessions are told in the place of what it covers: get, put
    #[command(subcommand)]
    Summary(SummaryCommand),
    /// The engine runners, with their roots and engines
    #[command(after_long_help = "Without a subcommand it lists. JSON: as list")]
    Runners {
        /// What to do with them [default: list]
        #[command(subcommand)]
        what: Option<RunnersCommand>,
    },
    /// The workspaces that turns have used, and who holds them
    #[command(after_long_help = "Without a subcommand it lists. JSON: as list")]
    Workspaces {
        /// What to do with them [default: list]
        #[command(subcommand)]
        what: Option<WorkspacesCommand>,
    },
    /// Agent files: list those of a workspace, validate some
    #[command(after_long_help = "Without a subcommand it lists. JSON: as list")]
    Agents {
        /// What to do with them [default: list]
        #[command(subcommand)]
        what: Option<AgentsCommand>,
    },
    /// Permission requests: list, allow, deny
    #[command(after_long_help = "Without a subcommand it lists. JSON: as list")]
    Permissions {
        /// What to do with them [default: list]
        #[command(subcommand)]
        what: Option<PermissionsCommand>,
    },
    /// Check that everything is in place, and say what is not and which command mends it
    ///
    /// Looks at this host (programs, engines with versions and logins, isolation, state directories, ports, keys that git
    /// tracks), then at the control plane and its runners. No login or key is shown. Exit code 1 when something is broken;
    /// a warning is not.
    #[command(
        after_long_help = "JSON: {\"checks\": [{\"name\", \"result\": ok | warning | failed, \"detail\", \
        \"next\"}], \"broken\": bool}. Exit code 1 when a check failed"
    )]
    Doctor,
    /// Ask one service, control plane or runner, whether it serves; for health checks
    #[command(
        after_long_help = "JSON: {\"url\", \"serving\": bool}. Exit code 0 when it serves, 1 when it says that it does \
        not, 6 when nothing answers within 5 s"
    )]
    Health {
        /// Where it listens
        #[arg(value_name = "URL", default_value = "http://127.0.0.1:7450")]
        url: String,
    },
    /// Engine CLIs: list them, install the pinned ones
    #[command(after_long_help = "Without a subcommand it lists. JSON: as list")]
    Engines {
        /// What to do with them [default: list]
        #[command(subcommand)]
        what: Option<EnginesCommand>,
    },
    /// The configuration: check it, show it
    #[command(subcommand)]
    Config(ConfigCommand),
    /// The control plane's database on this host: check it, copy it, put a copy in its place
    Db(DbArgs),
    /// Print a completion script for a shell
    ///
    /// For bash: `source <(roundhouse completions bash)`
    Completions {
        /// The shell
        shell: Shell,
    },
}

/// Of `up`.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// A directory that workspaces may lie in (may be repeated) [default: runner.roots, else the current directory]
    #[arg(long = "root", value_name = "DIR")]
    pub(crate) roots: Vec<PathBuf>,
    /// A root whose content may configure engines; without it a workspace is taken for hostile (may be repeated)
    #[arg(long = "trust-root", value_name = "DIR")]
    pub(crate) trusted_roots: Vec<PathBuf>,
    /// Address of the control plane; port 0 takes a free one [default: control_plane.listen]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
    /// Address of the runner; port 0 takes a free one [default: runner.listen]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) runner_listen: Option<String>,
    /// Listen on other addresses than loopback, too: whoever reaches them can run agents here
    #[arg(long)]
    pub(crate) insecure_listen: bool,
    /// Keep all state in this directory [default: the configured state directories]
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Of `demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Use your own login and the real model instead of the scripted one
    #[arg(long)]
    pub(crate) live: bool,
    /// The model of the agent on Claude Code with --live
    #[arg(long, requires = "live", default_value = "haiku", value_name = "MODEL")]
    pub(crate) model: String,
    /// Keep workspace, state and logs, and say where they are
    #[arg(long)]
    pub(crate) keep: bool,
}

/// Of `send`.
#[derive(Debug, Args)]
pub(crate) struct SendArgs {
    /// The text; - reads it from standard input. It is never taken for a command
    pub(crate) text: String,
    /// Follow the turn to its end: the answer on standard output, the rest on standard error
    #[arg(long, short)]
    pub(crate) wait: bool,
    /// The conversation: its id, or PROJECT:PROVIDER:ID (made if it is not there) [default: a new one]
    #[arg(long, short, value_name = "CONVERSATION")]
    pub(crate) conversation: Option<String>,
    /// The agent that is to answer [default: the conversation's]
    #[arg(long, short)]
    pub(crate) agent: Option<String>,
    /// Where: an id, RUNNER:PATH, or a path when one runner alone can be meant [default: the conversation's, else the current
    /// directory]
    #[arg(long, short = 'C')]
    pub(crate) workspace: Option<String>,
    /// Makes a repeat harmless; letters, digits, _ and - [default: a fresh one]
    #[arg(long, value_name = "ID")]
    pub(crate) request_id: Option<String>,
    /// The sender's name [default: user]
    #[arg(long, value_name = "NAME")]
    pub(crate) actor: Option<String>,
}

/// Of `chat`.
#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// The conversation: its id, or PROJECT:PROVIDER:ID (made if it is not there) [default: a new one]
    pub(crate) conversation: Option<String>,
    /// The agent that is to answer [default: the conversation's]
    #[arg(long, short)]
    pub(crate) agent: Option<String>,
    /// Where: an id, RUNNER:PATH, or a path when one runner alone can be meant [default: the conversation's, else the current
    /// directory]
    #[arg(long, short = 'C')]
    pub(crate) workspace: Option<String>,
    /// Neither read nor keep the history of typed lines [default: chat_history in the state directory, for you alone]
    #[arg(long)]
    pub(crate) no_history: bool,
}

/// Of `export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// The conversation: its id, or PROJECT:PROVIDER:ID
    pub(crate) conversation: String,
    /// How to write it
    #[arg(value_enum, default_value_t = ExportFormat::Md)]
    pub(crate) format: ExportFormat,
    /// The file to write; one that is there is not touched unless --force is said [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Write over a file that is there
    #[arg(long, requires = "output")]
    pub(crate) force: bool,
}

/// How a conversation is written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportFormat {
    /// Markdown, for people
    Md,
    /// JSON, for programs
    Json,
}

/// Of `events`.
#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// The conversation: its id, or PROJECT:PROVIDER:ID
    pub(crate) conversation: String,
    /// Go on with what comes, until Ctrl-C (or the turn's end, with --turn)
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Begin after this cursor [default: with the oldest event kept]
    #[arg(long, value_name = "CURSOR")]
    pub(crate) after: Option<String>,
    /// Show unfinished text, too
    #[arg(long)]
    pub(crate) partials: bool,
    /// Only this turn
    #[arg(long, value_name = "TURN")]
    pub(crate) turn: Option<String>,
}

/// Of `cancel`.
#[derive(Debug, Args)]
pub(crate) struct CancelArgs {
    /// The turn
    pub(crate) turn: String,
    /// Wait until it has ended
    #[arg(long, short)]
    pub(crate) wait: bool,
    /// Makes a repeat harmless [default: a fresh one]
    #[arg(long, value_name = "ID")]
    pub(crate) request_id: Option<String>,
}

/// Of `retry`.
#[derive(Debug, Args)]
pub(crate) struct RetryArgs {
    /// The turn to try again
    pub(crate) turn: String,
    /// Follow the new turn to its end
    #[arg(long, short)]
    pub(crate) wait: bool,
    /// Makes a repeat harmless [default: a fresh one]
    #[arg(long, value_name = "ID")]
    pub(crate) request_id: Option<String>,
}

/// Of `conversations`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConversationsCommand {
    /// List conversations, the newest first
    #[command(after_long_help = "JSON: {\"conversations\": [{...}], \"next_page_token\"}")]
    List {
        /// List archived ones, too
        #[arg(long)]
        archived: bool,
        /// Only those that want a person: a permission, a failed or lost turn, a workspace that is held
        #[arg(long)]
        attention: bool,
        #[command(flatten)]
        page: Page,
    },
    /// Show one conversation, with what wants a person
    #[command(after_long_help = "JSON: {\"conversation\": {...}}")]
    Show {
        /// Its id, or PROJECT:PROVIDER:ID
        conversation: String,
    },
    /// Make a conversation, or get the one with this external id
    #[command(after_long_help = "JSON: {\"conversation\": {...}, \"created\": bool}")]
    Create {
        /// Its name elsewhere, as PROJECT:PROVIDER:ID
        #[arg(long, value_name = "PROJECT:PROVIDER:ID")]
        external_id: Option<String>,
        /// A title for people
        #[arg(long, default_value = "")]
        title: String,
        /// Where its first message goes [default: named by that message]
        #[arg(long, short = 'C')]
        workspace: Option<String>,
        /// The agent of its first message [default: named by that message]
        #[arg(long, short)]
        agent: Option<String>,
        /// Makes a repeat harmless [default: a fresh one]
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
    /// Set the archived flag; what runs and waits goes on, and sending takes the flag away
    #[command(after_long_help = "JSON: {\"conversation\": {...}}")]
    Archive {
        /// Its id, or PROJECT:PROVIDER:ID
        conversation: String,
        /// Take the flag away instead
        #[arg(long)]
        undo: bool,
    },
}

/// Paging.
#[derive(Debug, Clone, Args)]
pub(crate) struct Page {
    /// How many at most, 1 to 200
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=200))]
    pub(crate) limit: u32,
    /// Go on where the last page ended
    #[arg(long, value_name = "TOKEN")]
    pub(crate) page_token: Option<String>,
}

impl Default for Page {
    fn default() -> Self {
        Self { limit: 50, page_token: None }
    }
}

/// Of `messages`.
#[derive(Debug, Args)]
pub(crate) struct MessagesArgs {
    /// The conversation: its id, or PROJECT:PROVIDER:ID
    pub(crate) conversation: String,
    /// Begin after this seq
    #[arg(long, default_value_t = 0, value_name = "SEQ")]
    pub(crate) after: u64,
    /// How many at most, 1 to 200
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=200))]
    pub(crate) limit: u32,
}

/// Of `turns`.
#[derive(Debug, Args)]
pub(crate) struct TurnsArgs {
    /// A conversation (its id, or PROJECT:PROVIDER:ID), or a turn
    #[arg(value_name = "CONVERSATION|TURN")]
    pub(crate) of: String,
    #[command(flatten)]
    pub(crate) page: Page,
}

/// Of `sessions`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct SessionsArgs {
    /// What to do with one [default: list them]
    #[command(subcommand)]
    pub(crate) what: Option<SessionsCommand>,
    /// A conversation (its id, or PROJECT:PROVIDER:ID), or a session [default: all]
    #[arg(value_name = "CONVERSATION|SESSION")]
    pub(crate) of: Option<String>,
    #[command(flatten)]
    pub(crate) page: Page,
}

/// Of `runners`.
#[derive(Debug, Subcommand)]
pub(crate) enum RunnersCommand {
    /// List the runners that have registered
    #[command(after_long_help = "JSON: {\"runners\": [{...}]}")]
    List,
    /// Let a runner finish what runs and take nothing new; what waits for it fails after a minute, and can be retried
    #[command(after_long_help = "JSON: {\"runner\": {...}}")]
    Drain {
        /// Its id, or the name of its host when one runner alone bears it
        runner: String,
        /// Makes a repeat harmless [default: a fresh one]
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
    /// Let a drained runner take new turns again (as a restart of it does)
    #[command(after_long_help = "JSON: {\"runner\": {...}}")]
    Undrain {
        /// Its id, or the name of its host when one runner alone bears it
        runner: String,
        /// Makes a repeat harmless [default: a fresh one]
        #[arg(long, value_name = "ID")]
        request_id: Option<String>,
    },
    /// Unbind the runner of a state directory on this host from its control plane, when that one is gone for good
    ///
    /// The runner must not run. It belongs to the control plane with which it registers next.
    #[command(after_long_help = "JSON: {\"was_bound_to\": the control plane's id or null}")]
    Reset {
        /// The runner's state directory; of `up --state-dir DIR` it is DIR/runner [default: runner.state_dir]
        #[arg(long, value_name = "DIR")]
        state_dir: Option<PathBuf>,
    },
}

/// Of `workspaces`.
#[derive(Debug, Subcommand)]
pub(crate) enum WorkspacesCommand {
    /// List workspaces, with who holds them
    #[command(after_long_help = "JSON: {\"workspaces\": [{...}]}")]
    List {
        /// Only of this runner
        #[arg(long)]
        runner: Option<String>,
    },
    /// Free a workspace that a lost turn holds, when nothing works there any more
    #[command(after_long_help = "JSON: {\"workspace\": {...}}")]
    Free {
        /// The workspace's id
        workspace: String,
        /// The lost turn that holds it
        #[arg(long)]
        turn: String,
        /// Why, for the record
        #[arg(long)]
        reason: String,
    },
}

/// Of `agents`.
#[derive(Debug, Subcommand)]
pub(crate) enum AgentsCommand {
    /// List the agents of a workspace; a bad file is named beside the good ones
    #[command(
        after_long_help = "JSON: {\"workspace_id\", \"agents\": [{...}], \"problems\": [{file_name, line, \
        field, message}]}"
    )]
    List {
        /// An id, RUNNER:PATH, or a path when one runner alone can be meant [default: the current directory]
        #[arg(long, short = 'C')]
        workspace: Option<String>,
    },
    /// Check agent files, and name everything that is wrong; exit code 3 when something is
    #[command(
        after_long_help = "JSON: {\"agents\": [{...}], \"problems\": [{file_name, line, field, message}]}"
    )]
    Validate {
        /// Files to check [default: those of the workspace]
        files: Vec<PathBuf>,
        /// An id, RUNNER:PATH, or a path when one runner alone can be meant [default: the current directory]
        #[arg(long, short = 'C', conflicts_with = "files")]
        workspace: Option<String>,
    },
}

/// Of `permissions`.
#[derive(Debug, Subcommand)]
pub(crate) enum PermissionsCommand {
    /// List permission requests that wait for an answer
    #[command(after_long_help = "JSON: {\"permissions\": [{...}], \"next_page_token\"}")]
    List {
        /// Only of this conversation: its id, or PROJECT:PROVIDER:ID
        #[arg(long, short)]
        conversation: Option<String>,
        /// List decided ones, too
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        page: Page,
    },
    /// Allow what is asked; the first answer wins
    #[command(
        after_long_help = "JSON: {\"permission\": {...}, \"accepted\": bool}. Exit code 4 when another answer \
        was first"
    )]
    Allow {
        /// The request's id
        request: String,
    },
    /// Deny what is asked; the first answer wins
    #[command(
        after_long_help = "JSON: {\"permission\": {...}, \"accepted\": bool}. Exit code 4 when another answer \
        was first"
    )]
    Deny {
        /// The request's id
        request: String,
        /// Told to the engine with the denial
        #[arg(long, default_value = "")]
        feedback: String,
    },
}

/// Of `engines`.
#[derive(Debug, Subcommand)]
pub(crate) enum EnginesCommand {
    /// List the engines of every runner: version, login, what they can do
    #[command(after_long_help = "JSON: {\"runners\": [{\"runner_id\", \"engines\": [{...}]}]}")]
    List,
    /// Install pinned engine CLIs with npm into the runner's own directory on this host
    #[command(after_long_help = "JSON: {\"installed\": [{\"engine\", \"executable\"}]}")]
    Install {
        /// The engines [default: all that are pinned]
        engines: Vec<String>,
    },
}

/// Of `config`.
#[derive(Debug, Clone, Copy, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check file, environment and settings, and name everything that is wrong
    #[command(
        after_long_help = "JSON: {\"valid\": bool, \"problems\": [{\"layer\", \"key\", \"message\"}]}. Exit \
        code 3 when something is wrong"
    )]
    Check,
    /// Show what is in force, defaults included; secrets are masked
    #[command(after_long_help = "JSON: the same keys as the TOML file")]
    Show,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_tree_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_and_argument_says_what_it_is() {
        fn check(command: &clap::Command, path: &str) {
            assert!(command.get_about().is_some(), "{path} has no help");
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{path} {} has no help", argument.get_id());
            }
            let leaf = command.get_subcommands().next().is_none();
            let says_json =
                command.get_after_long_help().is_some_and(|help| help.to_string().contains("JSON"));
            assert!(!leaf || says_json || path.ends_with("completions"), "{path} does not document its JSON");
            for sub in command.get_subcommands() {
                check(sub, &format!("{path} {}", sub.get_name()));
            }
        }
        check(&Cli::command(), "roundhouse");
    }
}
