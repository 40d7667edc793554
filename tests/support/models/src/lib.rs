//! Scripted model servers on loopback: the model is a script, the engine CLI that asks it is real.
//!
//! [`ModelServer::start`] binds 127.0.0.1 and speaks, on one port, the Anthropic Messages API (`/v1/messages`) and the
//! OpenAI Responses API (`/v1/responses`), streaming and plain. What it answers is chosen, for each request, by the first
//! of these that has an opinion:
//!
//! 1. a rule that the test set ([`Models::rule`], [`Models::next`], or `POST /__rules`);
//! 2. markers such as `[[text:hello]]` in the text of the user message that the turn is about ([`grammar`]);
//! 3. the default reply ([`Options::default_reply`]).
//!
//! Every request is logged ([`Record`]) and can be read in the process ([`Models::requests`]) or over HTTP
//! (`GET /__requests`). A reply can stop at a named gate until the test releases it; that it got there can be awaited
//! ([`Models::wait_gate`], `GET /__gates/<name>`). So a test never sleeps: it waits for what it means.
//!
//! # Which text decides
//!
//! Only the last text block of the user message that started the turn. Not looked at: earlier messages (so seeded
//! history never fires its markers again), earlier blocks of the same message (a context block before the user's
//! own), `<system-reminder>` blocks, `system` and `developer` messages, tool results, what a steering message adds, and
//! what the CLI itself writes as the user ("[Request interrupted by user]", `<environment_context>`,
//! `<turn_aborted>`…). Codex sends a steering message as one like any other; that it came later is read from the ids of
//! turn and messages ([UUIDs in the order of time](Conversation::turn_text)).
//!
//! How far a script has got is counted from the conversation itself: the number of the model's answers after
//! that user message. A retried request therefore gets the same reply again, and a restart of the server forgets nothing.
//! After its last reply a script repeats that one.
//!
//! # HTTP control surface
//!
//! | request | answer |
//! |---|---|
//! | `GET /__requests?after=N&text=T` | `{"requests":[...],"total":M}`: records with a number above N (0) whose turn text contains T |
//! | `GET /__count?text=T` | `{"count":n}`: main requests whose turn text contains T |
//! | `GET /__gates/<name>?at_least=1&timeout_ms=30000` | waits until the gate was reached so often: 200 `{"name","reached","open"}`, or 408 with the same body |
//! | `POST /__gates/<name>/release` | opens the gate for good |
//! | `POST /__gates/<name>/close` | closes it again; `reached` is kept |
//! | `POST /__rules` | body `{"contains":"...","script":"[[text:x]]","times":1}`; `contains` and `times` may be absent |
//! | `POST /__reset` | forgets log, rules, counters and gates |

mod anthropic;
mod conversation;
mod error;
mod gates;
pub mod grammar;
mod log;
mod models;
mod responses;
mod script;
mod server;
mod walk;

pub use conversation::{Api, Conversation, RequestKind};
pub use error::Error;
pub use gates::GateState;
pub use log::{Ending, Record};
pub use models::{Matcher, Models, Options};
pub use script::{Fault, FaultRule, Part, Reply, Script, Stop, Usage};
pub use server::ModelServer;
