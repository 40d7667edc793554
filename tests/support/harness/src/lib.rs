//! What the end-to-end tests stand on.
//!
//! [`Stack`] starts a scripted model, a control plane and a runner as real processes on free ports, with all state in
//! one temporary directory, and takes every process it started down again when it is dropped. Tests speak to it as any
//! client does ([`Control`]), watch a conversation with a [`Follower`] that checks what a stream promises, look at
//! `/proc` through a [`census`], and wait for conditions ([`wait_for`]), never for time.
//!
//! Nothing here knows how the services work inside: what a test learns, it learns from outside.

#![expect(clippy::print_stderr, reason = "what the services say is shown with the test that fails")]

pub mod bins;
pub mod census;
mod client;
mod follow;
mod hosts;
mod log;
pub mod netns;
pub mod network;
mod service;
mod stack;
mod wait;
mod workspace;

pub use client::{Control, is_terminal, reason_of};
pub use follow::{Follower, Item};
pub use hosts::{HOST_NAME, Host, Hosts, with_hosts};
pub use log::TestLog;
pub use service::{Ready, Service, Spec, signal};
pub use stack::{API_KEY, Stack, StackOptions};
pub use wait::{BRIEF, LONG, NORMAL, wait_for, wait_until};
pub use workspace::{Agent, Workspace};
