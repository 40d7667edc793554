//! Keeper, init, spool, framing, kill ladder and isolation of engine processes.
//!
//! ```text
//! runner ── Link (socket) ──> keeper ── control pipe ──> init (PID 1) ──> engine ──> tools
//!   │                           │ <──── status pipe ─────┘                  │
//!   │                           │ <──── stdout, stderr ─────────────────────┤
//!   │                           │ ───── stdin ──────────────────────────────┘
//!   └── SpoolReader <── files ──┘
//! ```
//!
//! * A **keeper** owns one engine process and outlives the runner. It is this executable again, see [`reexec`].
//! * The **init** is PID 1 of the engine's namespace (where there is one) and dies with the keeper.
//! * The **spool** is the only way engine output takes: the keeper appends frames to files, the runner reads the files
//!   ([`SpoolReader`]), live and after a restart alike. The link carries requests and how far the files go.
//!
//! What can be relied on, and what cannot:
//!
//! * At [`IsolationLevel::PidNamespace`] nothing of the engine outlives its keeper, whoever is killed and how. At
//!   [`IsolationLevel::Subreaper`] the init sweeps when the keeper dies, and [`close_dead`] once more; a process that
//!   clears its environment, leaves its ancestry by the init's own death, and was not stopped before, can be missed.
//! * An engine process runs with the runner's user id: a hostile one can reach the keeper's socket and files. The owner
//!   in [`Request::Hello`] keeps runners apart, not attackers.
//! * The keeper remembers every operation id for as long as it lives (about 150 bytes each).
//! * Linux 5.3 or later (process descriptors). Without them a keeper is not started.
//!
//! Nothing here uses an async runtime. For one, take [`Link::into_parts`]: a stream that can be set non-blocking and a
//! [`Decoder`].

mod clock;
mod directory;
#[cfg(feature = "failpoints")]
pub mod failpoint;
mod frame;
mod init;
mod isolation;
mod keeper;
mod launch;
mod lines;
mod link;
mod mask;
mod plan;
mod procfs;
mod protocol;
pub mod record;
mod spool;
mod spool_reader;
mod sweep;
mod sys;
mod wire;

pub use clock::{boot_id, boottime_ns};
pub use directory::{
    DeadKeeper, KeeperDirError, KeeperFound, KeeperHandle, KeeperState, SpawnError, close_dead, is_alive,
    scan, spawn_keeper, state_of,
};
pub use frame::{Cause, ExitStatus, Frame, FrameBody, SPOOL_VERSION, SignalScope, SpawnStage, StorageFault};
pub use isolation::{IsolationLevel, IsolationReport, ProbeError, become_subreaper, probe};
pub use lines::{Line, LineSplitter};
pub use link::{Link, LinkError, REQUEST_TIMEOUT};
pub use mask::{Masker, StreamMasker};
pub use plan::{
    DELIVER_MAX_BYTES, EnvVar, IsolationWanted, KeeperLimits, KeeperPlan, PIPE_PAYLOAD_MAX_BYTES,
    PIPE_PAYLOADS_MAX, PLAN_MAX_BYTES, PipePayload, PlanError, SECRET_MIN_BYTES, Secret, is_valid_id,
    is_valid_op_id,
};
pub use procfs::{ProcessInfo, descendants, own_pid};
pub use protocol::{
    Decoder, EngineState, FromKeeper, MESSAGE_MAX_BYTES, Notice, OpState, PROTOCOL_VERSION, ProtocolError,
    RawMessage, Refusal, Request, Response, SpoolEnd, StatusReport,
};
pub use spool::{SegmentHeader, prune, settle as settle_spool};
pub use spool_reader::{SpoolError, SpoolReader};
pub use sweep::{SweepReport, reap_orphans, sweep};
pub use wire::WireError;

/// First argument of a keeper.
pub const KEEPER_ARG: &str = "__keeper";
/// First argument of an init.
pub const INIT_ARG: &str = "__init";
/// The variable that every process of an engine carries; its value is the spool's id.
pub const KEEPER_ENV: &str = "ROUNDHOUSE_KEEPER";

/// Runs this process as keeper or init when its first argument says so, and then never returns. Otherwise it does
/// nothing.
///
/// To be called first in `main`, before any thread or runtime is started.
pub fn reexec() {
    let mut args = std::env::args_os();
    let _program = args.next();
    let Some(role) = args.next() else { return };
    let status = if role == KEEPER_ARG {
        keeper::main(args)
    } else if role == INIT_ARG {
        init::main(args)
    } else {
        return;
    };
    std::process::exit(status)
}
