//! What a keeper is told to run: the launch plan, its limits and its secrets.
//!
//! The plan goes to the keeper over an inherited pipe, never by argv or environment. `Debug` shows no environment value
//! and no secret.

use crate::isolation::IsolationLevel;
use crate::wire::{Put, Take, WireError};
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::Duration;

/// Secret values shorter than this are not masked: too much else would match. The number of such values is reported
/// in [`crate::StatusReport::unmasked_secrets`].
pub const SECRET_MIN_BYTES: usize = 6;

/// The largest payload that a pipe descriptor carries, in bytes (what a Linux pipe holds without a reader).
pub const PIPE_PAYLOAD_MAX_BYTES: usize = 64 * 1024;

/// The largest number of pipe payloads in one plan.
pub const PIPE_PAYLOADS_MAX: usize = 32;

/// The largest number of bytes in one [`crate::Request::Deliver`].
pub const DELIVER_MAX_BYTES: usize = 16 * 1024 * 1024;

/// The largest encoded plan, in bytes.
pub const PLAN_MAX_BYTES: usize = 8 * 1024 * 1024;

const PLAN_VERSION: u16 = 2;

/// Bytes that are never shown by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Takes the bytes.
    #[must_use]
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// The bytes themselves.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({} bytes)", self.0.len())
    }
}

/// One environment variable of the engine. `Debug` shows the name only.
#[derive(Clone, PartialEq, Eq)]
pub struct EnvVar {
    /// The name, without `=` and without a zero byte.
    pub name: OsString,
    /// The value, without a zero byte.
    pub value: OsString,
}

impl EnvVar {
    /// A variable from its two parts.
    pub fn new(name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        Self { name: name.into(), value: value.into() }
    }
}

impl fmt::Debug for EnvVar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=...", self.name.to_string_lossy())
    }
}

/// Bytes that the engine reads from a descriptor: it finds the descriptor's number in the variable `env_name` and a
/// *pipe* behind it, so that nobody can read the bytes a second time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipePayload {
    /// The variable that tells the number, such as `CLAUDE_CODE_API_KEY_FILE_DESCRIPTOR`.
    pub env_name: OsString,
    /// At most [`PIPE_PAYLOAD_MAX_BYTES`].
    pub bytes: Secret,
}

/// How far the isolation may and must go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IsolationWanted {
    /// Nothing above this is tried.
    pub at_most: IsolationLevel,
    /// Less than this fails the spawn.
    pub at_least: IsolationLevel,
}

impl Default for IsolationWanted {
    fn default() -> Self {
        Self { at_most: IsolationLevel::PidNamespace, at_least: IsolationLevel::None }
    }
}

/// Limits of one keeper. [`Default`] gives the numbers of the design.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeeperLimits {
    /// Longest line of standard output kept whole, in bytes without its newline (16 MiB).
    pub line_max: u64,
    /// What is kept of a longer one, in bytes (64 KiB). At most `line_max`.
    pub line_head: u64,
    /// Standard error of a turn written as it comes, in bytes (1 MiB).
    pub stderr_head: u64,
    /// The last bytes of a turn's standard error beyond that, written at its end (1 MiB).
    pub stderr_tail: u64,
    /// A segment that has this many bytes is closed and the next begun (16 MiB).
    pub segment_max: u64,
    /// Bytes in all segments that are not pruned; beyond it the spool fails, see [`crate::StorageFault`] (512 MiB).
    pub spool_max: u64,
    /// Bytes accepted for standard input and not yet written; beyond it `deliver` is refused as busy (32 MiB).
    pub stdin_pending_max: u64,
    /// Without a runner and outside a turn the engine is ended after this (15 min).
    pub idle_ttl: Duration,
    /// Without a runner and within a turn, when the engine has printed nothing for this long: then it is idle as far as
    /// anybody can know who does not understand it (15 min).
    pub quiet_ttl: Duration,
    /// Without a runner and within a turn (24 h).
    pub turn_ttl: Duration,
    /// After the engine's exit its pipes are read to their end, but no longer than this (2 s).
    pub drain_timeout: Duration,
    /// How long everything may take to be gone after SIGKILL before survivors are reported (5 s).
    pub kill_timeout: Duration,
}

impl Default for KeeperLimits {
    fn default() -> Self {
        Self {
            line_max: 16 * 1024 * 1024,
            line_head: 64 * 1024,
            stderr_head: 1024 * 1024,
            stderr_tail: 1024 * 1024,
            segment_max: 16 * 1024 * 1024,
            spool_max: 512 * 1024 * 1024,
            stdin_pending_max: 32 * 1024 * 1024,
            idle_ttl: Duration::from_secs(15 * 60),
            quiet_ttl: Duration::from_secs(15 * 60),
            turn_ttl: Duration::from_secs(24 * 60 * 60),
            drain_timeout: Duration::from_secs(2),
            kill_timeout: Duration::from_secs(5),
        }
    }
}

/// All that a keeper needs to start one engine process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeeperPlan {
    /// The spool's id: letters, digits, `_`, `-`, no leading dash, at most 64. It is also the value of
    /// `ROUNDHOUSE_KEEPER` in every process of the engine.
    pub spool_id: String,
    /// Whose keeper this is (the runner's id, same alphabet). A link with another owner is refused.
    pub owner: String,
    /// The engine's executable; an absolute path.
    pub program: OsString,
    /// Its arguments, without the name of the program.
    pub args: Vec<OsString>,
    /// Its whole environment: nothing is inherited.
    pub env: Vec<EnvVar>,
    /// Its working directory; an absolute path.
    pub cwd: PathBuf,
    /// Values that never reach the spool.
    pub secrets: Vec<Secret>,
    /// Bytes given by pipe descriptors.
    pub pipe_payloads: Vec<PipePayload>,
    /// Isolation wanted.
    pub isolation: IsolationWanted,
    /// Added to the engine's `oom_score_adj`, 0 to 1000 (500).
    pub oom_score_adj: i32,
    /// Limits.
    pub limits: KeeperLimits,
}

/// Why a plan is refused, before anything is allocated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// An id with other characters than letters, digits, `_`, `-`, with a leading dash, empty or over 64 bytes.
    #[error("invalid {0} id")]
    Id(&'static str),
    /// A relative path where an absolute one is needed.
    #[error("{0} is not an absolute path")]
    NotAbsolute(&'static str),
    /// A zero byte, an empty name, or `=` in a name.
    #[error("{0} holds a byte that cannot be passed to a program")]
    Bytes(&'static str),
    /// A pipe payload over [`PIPE_PAYLOAD_MAX_BYTES`].
    #[error("pipe payload of {0} bytes is too long")]
    PayloadTooLong(usize),
    /// A limit that cannot be.
    #[error("limit {0} is out of range")]
    Limit(&'static str),
    /// The encoded plan is over [`PLAN_MAX_BYTES`].
    #[error("plan of {0} bytes is too long")]
    TooLong(usize),
}

/// Whether `id` is safe in argv and paths: letters, digits, `_`, `-`, no leading dash, 1 to 64 bytes.
#[must_use]
pub fn is_valid_id(id: &str) -> bool {
    (1..=64).contains(&id.len())
        && !id.starts_with('-')
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
}

/// Whether `id` may name an operation: 1 to 128 printable ASCII characters without a space. It never reaches argv or a
/// path, so it may also hold dots and colons.
#[must_use]
pub fn is_valid_op_id(id: &str) -> bool {
    (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
}

impl KeeperPlan {
    /// A plan with nothing but a program: no arguments, empty environment, working directory `/`, default limits.
    pub fn new(spool_id: impl Into<String>, owner: impl Into<String>, program: impl Into<OsString>) -> Self {
        Self {
            spool_id: spool_id.into(),
            owner: owner.into(),
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            cwd: PathBuf::from("/"),
            secrets: Vec::new(),
            pipe_payloads: Vec::new(),
            isolation: IsolationWanted::default(),
            oom_score_adj: 500,
            limits: KeeperLimits::default(),
        }
    }

    /// Checks what can be checked without touching the system.
    ///
    /// # Errors
    /// [`PlanError`] names the first thing that is wrong.
    pub fn validate(&self) -> Result<(), PlanError> {
        let no_zero = |bytes: &[u8]| !bytes.contains(&0);
        if !is_valid_id(&self.spool_id) {
            return Err(PlanError::Id("spool"));
        }
        if !is_valid_id(&self.owner) {
            return Err(PlanError::Id("owner"));
        }
        if !self.program.as_bytes().starts_with(b"/") {
            return Err(PlanError::NotAbsolute("program"));
        }
        if !self.cwd.is_absolute() {
            return Err(PlanError::NotAbsolute("working directory"));
        }
        if !no_zero(self.program.as_bytes()) || !no_zero(self.cwd.as_os_str().as_bytes()) {
            return Err(PlanError::Bytes("path"));
        }
        if !self.args.iter().all(|arg| no_zero(arg.as_bytes())) {
            return Err(PlanError::Bytes("argument"));
        }
        let name_ok = |name: &OsString| {
            !name.is_empty() && no_zero(name.as_bytes()) && !name.as_bytes().contains(&b'=')
        };
        if !self.env.iter().all(|var| name_ok(&var.name) && no_zero(var.value.as_bytes())) {
            return Err(PlanError::Bytes("environment variable"));
        }
        if self.pipe_payloads.len() > PIPE_PAYLOADS_MAX {
            return Err(PlanError::Limit("pipe payloads"));
        }
        for payload in &self.pipe_payloads {
            if !name_ok(&payload.env_name) {
                return Err(PlanError::Bytes("environment variable"));
            }
            if payload.bytes.expose().len() > PIPE_PAYLOAD_MAX_BYTES {
                return Err(PlanError::PayloadTooLong(payload.bytes.expose().len()));
            }
        }
        if !(0..=1000).contains(&self.oom_score_adj) {
            return Err(PlanError::Limit("oom_score_adj"));
        }
        let limits = &self.limits;
        if limits.line_max == 0 || limits.line_max > 64 * 1024 * 1024 {
            return Err(PlanError::Limit("line_max"));
        }
        if limits.line_head > limits.line_max {
            return Err(PlanError::Limit("line_head"));
        }
        if limits.stderr_tail > 64 * 1024 * 1024 {
            return Err(PlanError::Limit("stderr_tail"));
        }
        if limits.segment_max < 64 * 1024 {
            return Err(PlanError::Limit("segment_max"));
        }
        Ok(())
    }

    /// The plan as bytes for the inherited pipe.
    ///
    /// # Errors
    /// [`PlanError`] when the plan is not valid or too long.
    pub fn encode(&self) -> Result<Vec<u8>, PlanError> {
        self.validate()?;
        let mut put = Put::default();
        put.u16(PLAN_VERSION).str(&self.spool_id).str(&self.owner).os(&self.program);
        put.u32(count(self.args.len()));
        for arg in &self.args {
            put.os(arg);
        }
        put.u32(count(self.env.len()));
        for var in &self.env {
            put.os(&var.name).os(&var.value);
        }
        put.os(self.cwd.as_os_str());
        put.u32(count(self.secrets.len()));
        for secret in &self.secrets {
            put.bytes(secret.expose());
        }
        put.u32(count(self.pipe_payloads.len()));
        for payload in &self.pipe_payloads {
            put.os(&payload.env_name).bytes(payload.bytes.expose());
        }
        put.u8(self.isolation.at_most.code()).u8(self.isolation.at_least.code()).i32(self.oom_score_adj);
        let limits = &self.limits;
        put.u64(limits.line_max).u64(limits.line_head).u64(limits.stderr_head).u64(limits.stderr_tail);
        put.u64(limits.segment_max).u64(limits.spool_max).u64(limits.stdin_pending_max);
        put.duration(limits.idle_ttl).duration(limits.quiet_ttl).duration(limits.turn_ttl);
        put.duration(limits.drain_timeout).duration(limits.kill_timeout);
        if put.0.len() > PLAN_MAX_BYTES {
            return Err(PlanError::TooLong(put.0.len()));
        }
        Ok(put.0)
    }

    /// Reads what [`KeeperPlan::encode`] wrote.
    ///
    /// # Errors
    /// [`WireError`] when the bytes are not a plan of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut take = Take::new(bytes);
        if take.u16("plan version")? != PLAN_VERSION {
            return Err(WireError::Invalid("plan version"));
        }
        let spool_id = take.string("spool id")?;
        let owner = take.string("owner")?;
        let program = take.os("program")?;
        let args = list(&mut take, |take| take.os("argument"))?;
        let env = list(&mut take, |take| Ok(EnvVar { name: take.os("name")?, value: take.os("value")? }))?;
        let cwd = PathBuf::from(take.os("working directory")?);
        let secrets = list(&mut take, |take| Ok(Secret::new(take.bytes("secret")?)))?;
        let pipe_payloads = list(&mut take, |take| {
            Ok(PipePayload { env_name: take.os("name")?, bytes: Secret::new(take.bytes("payload")?) })
        })?;
        let level = |code| IsolationLevel::from_code(code).ok_or(WireError::Invalid("isolation"));
        let isolation = IsolationWanted {
            at_most: level(take.u8("isolation")?)?,
            at_least: level(take.u8("isolation")?)?,
        };
        let oom_score_adj = take.i32("oom_score_adj")?;
        let limits = KeeperLimits {
            line_max: take.u64("limit")?,
            line_head: take.u64("limit")?,
            stderr_head: take.u64("limit")?,
            stderr_tail: take.u64("limit")?,
            segment_max: take.u64("limit")?,
            spool_max: take.u64("limit")?,
            stdin_pending_max: take.u64("limit")?,
            idle_ttl: take.duration("limit")?,
            quiet_ttl: take.duration("limit")?,
            turn_ttl: take.duration("limit")?,
            drain_timeout: take.duration("limit")?,
            kill_timeout: take.duration("limit")?,
        };
        take.end()?;
        let plan = Self {
            spool_id,
            owner,
            program,
            args,
            env,
            cwd,
            secrets,
            pipe_payloads,
            isolation,
            oom_score_adj,
            limits,
        };
        plan.validate().map_err(|_| WireError::Invalid("plan"))?;
        Ok(plan)
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// Reads a counted list. The count is not trusted with an allocation: a lie ends in [`WireError::Short`].
pub(crate) fn list<'a, T>(
    take: &mut Take<'a>,
    mut item: impl FnMut(&mut Take<'a>) -> Result<T, WireError>,
) -> Result<Vec<T>, WireError> {
    let length = take.u32("list length")?;
    let mut items = Vec::new();
    for _ in 0..length {
        items.push(item(take)?);
    }
    Ok(items)
}
