//! `EngineRunnerService`, call by call.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::Stream;
use roundhouse_engines::ADAPTERS;
use roundhouse_process::{FrameBody, SpoolReader};
use roundhouse_proto::{
    PROTOCOL_VERSION,
    engine::v1::{
        self as proto, engine_runner_service_server::EngineRunnerService, stream_events_response::Item,
    },
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::{from_proto, status::from_error, to_proto};
use crate::{
    error::Error,
    hub::{Hub, Next, response},
    install,
    journal::EntryReader,
    launch,
    runner::{Cancelled, Runner},
    session_record::SessionRecord,
    turn::OpenResult,
    workspace::{agent_files, file_facts},
};

/// Stream items that wait for the transport. The hub's queue is the one that counts.
const ITEMS: usize = 16;

/// Journal entries read in one go, between looks at whether anybody still listens.
const REPLAY: usize = 256;

/// Bytes of frames in one answer of ReadSpool.
const SPOOL_CHUNK: usize = 256 * 1024;

/// Bytes of one frame that are shown.
const FRAME_BYTES: usize = 64 * 1024;

/// Sessions per page when the caller does not say.
const PAGE: u32 = 100;

/// Paths of one InspectWorkspace.
const PATHS: usize = 200;

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The service.
#[derive(Debug, Clone)]
pub struct Service {
    runner: Arc<Runner>,
}

impl Service {
    /// Serves a runner.
    #[must_use]
    pub fn new(runner: Arc<Runner>) -> Self {
        Self { runner }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(|error| Error::Internal(format!("task: {error}")))?
}

#[tonic::async_trait]
impl EngineRunnerService for Service {
    type StreamEventsStream = Boxed<proto::StreamEventsResponse>;
    type ReadSpoolStream = Boxed<proto::ReadSpoolResponse>;

    async fn describe_runner(
        &self,
        _request: Request<proto::DescribeRunnerRequest>,
    ) -> Result<Response<proto::DescribeRunnerResponse>, Status> {
        let context = Arc::clone(&self.runner.context);
        Ok(Response::new(blocking(move || Ok(describe(&context))).await?))
    }

    async fn list_agent_files(
        &self,
        request: Request<proto::ListAgentFilesRequest>,
    ) -> Result<Response<proto::ListAgentFilesResponse>, Status> {
        let request = request.into_inner();
        let workspace = self.runner.context.roots.resolve(&request.workspace)?;
        let path = workspace.path.clone();
        let only = (!request.file_name.is_empty()).then_some(request.file_name);
        let (files, truncated) = blocking(move || agent_files(&path, only.as_deref())).await?;
        Ok(Response::new(proto::ListAgentFilesResponse {
            workspace: workspace.path.to_string_lossy().into_owned(),
            files,
            truncated,
        }))
    }

    async fn inspect_workspace(
        &self,
        request: Request<proto::InspectWorkspaceRequest>,
    ) -> Result<Response<proto::InspectWorkspaceResponse>, Status> {
        let request = request.into_inner();
        if request.paths.len() > PATHS {
            return Err(Error::invalid("paths", format!("at most {PATHS} are allowed")).into());
        }
        let workspace = self.runner.context.roots.resolve(&request.workspace)?;
        let path = workspace.path.clone();
        let (worktree, files) =
            blocking(move || Ok((crate::git::look(&path), file_facts(&path, &request.paths)?))).await?;
        let is_git = worktree.is_some();
        let worktree = worktree.unwrap_or_default();
        Ok(Response::new(proto::InspectWorkspaceResponse {
            workspace: workspace.path.to_string_lossy().into_owned(),
            is_git,
            head: worktree.head,
            branch: worktree.branch,
            dirty: is_git.then_some(!worktree.dirty.is_empty()),
            files,
        }))
    }

    async fn start_or_resume(
        &self,
        request: Request<proto::StartOrResumeRequest>,
    ) -> Result<Response<proto::StartOrResumeResponse>, Status> {
        let open = from_proto::open(request.into_inner())?;
        let reply = self.runner.open(open).await.map_err(|error| from_error(&error))?;
        use proto::start_or_resume_response::Result as Shown;
        let (result, unusable_reason) = match reply.result {
            OpenResult::Started => (Shown::Started, String::new()),
            OpenResult::Resumed => (Shown::Resumed, String::new()),
            OpenResult::AlreadyOpen => (Shown::AlreadyOpen, String::new()),
            OpenResult::Unusable(reason) => (Shown::Unusable, reason),
        };
        Ok(Response::new(proto::StartOrResumeResponse {
            result: result.into(),
            native_ref: to_proto::native_ref(&reply.native_id),
            unusable_reason,
            prompt_applied: reply.prompt_applied,
            last_number: reply.last_number,
        }))
    }

    async fn send(
        &self,
        request: Request<proto::SendRequest>,
    ) -> Result<Response<proto::SendResponse>, Status> {
        let send = from_proto::send(request.into_inner())?;
        let delivery_id = self.runner.send(send).await?;
        Ok(Response::new(proto::SendResponse {
            result: proto::send_response::Result::Accepted.into(),
            delivery_id,
        }))
    }

    async fn cancel(
        &self,
        request: Request<proto::CancelRequest>,
    ) -> Result<Response<proto::CancelResponse>, Status> {
        let request = request.into_inner();
        let turn_id = from_proto::id("turn_id", request.turn_id)?;
        let epoch = from_proto::epoch(request.epoch)?;
        let grace = request.grace.map(|grace| from_proto::duration("grace", grace)).transpose()?;
        let result = match self.runner.cancel(&turn_id, epoch, grace).await? {
            Cancelled::Stopping => proto::cancel_response::Result::Stopping,
            Cancelled::AlreadyEnded => proto::cancel_response::Result::AlreadyEnded,
            Cancelled::Unknown => proto::cancel_response::Result::UnknownTurn,
        };
        Ok(Response::new(proto::CancelResponse { result: result.into() }))
    }

    async fn stream_events(
        &self,
        request: Request<proto::StreamEventsRequest>,
    ) -> Result<Response<Self::StreamEventsStream>, Status> {
        let request = request.into_inner();
        let turn_id = from_proto::id("turn_id", request.turn_id)?;
        let hub = self.runner.events(&turn_id, request.epoch, request.after).await?;
        let (items, stream) = mpsc::channel(ITEMS);
        let stop = self.runner.context.halt.clone();
        self.runner.context.tasks.spawn(async move {
            let told = items.clone();
            let mut following =
                std::pin::pin!(follow(Arc::clone(&hub), request.after, request.include_partial, items));
            let result = tokio::select! {
                result = &mut following => result,
                () = stop.cancelled() => {
                    // A turn that has ended, of the stop perhaps, is told to its end; the server waits a moment for it.
                    if hub.ended() { following.await } else { Err(Error::Draining) }
                }
            };
            if let Err(error) = result {
                let _ = told.send(Err(from_error(&error))).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn answer_permission(
        &self,
        request: Request<proto::AnswerPermissionRequest>,
    ) -> Result<Response<proto::AnswerPermissionResponse>, Status> {
        let answer = from_proto::answer(request.into_inner())?;
        let (decides, allowed) = self.runner.answer(answer).await?;
        use proto::answer_permission_response::Result as Shown;
        let result = if decides { Shown::Accepted } else { Shown::AlreadyAnswered };
        let decision =
            if allowed { proto::PermissionDecision::Allow } else { proto::PermissionDecision::Deny };
        Ok(Response::new(proto::AnswerPermissionResponse {
            result: result.into(),
            decision: decision.into(),
        }))
    }

    async fn inspect(
        &self,
        request: Request<proto::InspectRequest>,
    ) -> Result<Response<proto::InspectResponse>, Status> {
        use proto::inspect_request::Target;
        let response = match request.into_inner().target {
            Some(Target::TurnId(id)) => self.runner.inspect_turn(&from_proto::id("turn_id", id)?)?,
            Some(Target::SessionId(id)) => self.runner.inspect_session(&from_proto::id("session_id", id)?)?,
            None => return Err(Error::invalid("target", "must name a turn or a session").into()),
        };
        Ok(Response::new(response))
    }

    async fn acknowledge(
        &self,
        request: Request<proto::AcknowledgeRequest>,
    ) -> Result<Response<proto::AcknowledgeResponse>, Status> {
        let request = request.into_inner();
        let turn_id = from_proto::id("turn_id", request.turn_id)?;
        let (runner, epoch) = (Arc::clone(&self.runner), from_proto::epoch(request.epoch)?);
        // Files are written, and the next turn must not wait for them.
        blocking(move || runner.acknowledge(&turn_id, epoch)).await?;
        Ok(Response::new(proto::AcknowledgeResponse {}))
    }

    async fn close_session(
        &self,
        request: Request<proto::CloseSessionRequest>,
    ) -> Result<Response<proto::CloseSessionResponse>, Status> {
        let session_id = from_proto::id("session_id", request.into_inner().session_id)?;
        let was_open = self.runner.close_session(&session_id).await?;
        Ok(Response::new(proto::CloseSessionResponse { was_open }))
    }

    async fn list_sessions(
        &self,
        request: Request<proto::ListSessionsRequest>,
    ) -> Result<Response<proto::ListSessionsResponse>, Status> {
        let request = request.into_inner();
        if request.page_size > 1000 {
            return Err(Error::invalid("page_size", "must be at most 1000").into());
        }
        let size = if request.page_size == 0 { PAGE } else { request.page_size };
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let runner = Arc::clone(&self.runner);
        let response = blocking(move || list_sessions(&runner, &request.page_token, size)).await?;
        Ok(Response::new(response))
    }

    async fn read_spool(
        &self,
        request: Request<proto::ReadSpoolRequest>,
    ) -> Result<Response<Self::ReadSpoolStream>, Status> {
        let request = request.into_inner();
        let session_id = from_proto::id("session_id", request.session_id)?;
        let context = Arc::clone(&self.runner.context);
        let record = SessionRecord::load(&context.state, &session_id)?
            .ok_or_else(|| Error::SessionNotFound(session_id.clone()))?;
        let spool_id = if request.spool_id.is_empty() {
            record.spool_id.ok_or_else(|| Error::SessionNotFound(session_id.clone()))?
        } else {
            from_proto::id("spool_id", request.spool_id)?
        };
        let dir = context.state.spool(&session_id, &spool_id);
        if !dir.is_dir() {
            return Err(Error::invalid("spool_id", "is not a spool of this session").into());
        }
        let (items, stream) = mpsc::channel(2);
        tokio::task::spawn_blocking(move || read_spool(&dir, &items));
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn drain(
        &self,
        request: Request<proto::DrainRequest>,
    ) -> Result<Response<proto::DrainResponse>, Status> {
        let running = self.runner.drain(request.into_inner().undrain);
        Ok(Response::new(proto::DrainResponse { running_turns: u32::try_from(running).unwrap_or(u32::MAX) }))
    }
}

/// Replays the journal after a number, then follows. Ends after the terminal event, or when nobody listens any more.
pub(super) async fn follow(
    hub: Arc<Hub>,
    after: u64,
    partials: bool,
    items: mpsc::Sender<Result<proto::StreamEventsResponse, Status>>,
) -> Result<(), Error> {
    let mut sent = after;
    let mut reader = EntryReader::open(hub.journal())?;
    // The long way first, without a queue that could overflow meanwhile.
    loop {
        let upto = hub.last();
        point().await;
        if !replay(&mut reader, &mut sent, upto, &items).await? {
            return Ok(());
        }
        if hub.last() <= sent.saturating_add(REPLAY as u64) {
            break;
        }
    }
    point().await;
    let mut subscription = hub.subscribe(partials);
    point().await;
    if !replay(&mut reader, &mut sent, subscription.upto, &items).await? {
        return Ok(());
    }
    for partial in std::mem::take(&mut subscription.snapshot) {
        if items.send(Ok(response(Item::Partial(partial)))).await.is_err() {
            return Ok(());
        }
    }
    loop {
        let next = tokio::select! {
            next = subscription.next() => next,
            () = items.closed() => return Ok(()),
        };
        match next {
            Next::Item(item) => {
                if let Item::Event(event) = &*item {
                    if event.number <= sent {
                        continue;
                    }
                    sent = event.number;
                }
                if items.send(Ok(response(*item))).await.is_err() {
                    return Ok(());
                }
            }
            Next::Ended => return Ok(()),
            Next::Slow => return Err(Error::SlowReader { last_number: sent }),
        }
    }
}

/// Where the turn may go on while a reader is at work: nothing, but in the test of all interleavings.
async fn point() {
    #[cfg(test)]
    super::interleavings::point().await;
}

/// Sends the journal's entries after `sent` up to a number; false when nobody listens any more, or the end was sent: it
/// may stand there twice, for readers that hold more than the first.
async fn replay(
    reader: &mut EntryReader,
    sent: &mut u64,
    upto: u64,
    items: &mpsc::Sender<Result<proto::StreamEventsResponse, Status>>,
) -> Result<bool, Error> {
    while *sent < upto {
        point().await;
        let Some(entry) = reader.next_entry()? else { break };
        if entry.number <= *sent {
            continue;
        }
        *sent = entry.number;
        let end = matches!(&entry.body.kind, Some(proto::event_body::Kind::Terminal(_)));
        let event = proto::NumberedEvent {
            number: entry.number,
            at: Some(to_proto::timestamp(entry.at_millis)),
            body: Some(entry.body),
        };
        if items.send(Ok(response(Item::Event(event)))).await.is_err() || end {
            return Ok(false);
        }
    }
    Ok(true)
}

fn list_sessions(runner: &Runner, token: &str, size: usize) -> Result<proto::ListSessionsResponse, Error> {
    let context = &runner.context;
    let mut ids: Vec<String> = runner.session_ids()?.into_iter().filter(|id| id.as_str() > token).collect();
    let more = ids.len() > size;
    ids.truncate(size);
    let next_page_token = if more { ids.last().cloned().unwrap_or_default() } else { String::new() };
    let running = runner.running();
    let mut sessions = Vec::with_capacity(ids.len());
    for session_id in ids {
        let Some(record) = SessionRecord::load(&context.state, &session_id)? else { continue };
        let turn = running.iter().find(|handle| handle.facts().session_id == session_id);
        sessions.push(proto::RunnerSession {
            warm: turn.is_some_and(|turn| turn.facts().process.is_some())
                || context.pool.fact(&session_id).is_some(),
            turn_id: turn.map(|turn| turn.turn_id.clone()).unwrap_or_default(),
            conversation_id: record.conversation_id,
            workspace: record.workspace.to_string_lossy().into_owned(),
            engine: record.engine,
            native_ref: record.native.and_then(|native| to_proto::native_ref(&native.id)),
            spool_id: record.spool_id.unwrap_or_default(),
            session_id,
        });
    }
    Ok(proto::ListSessionsResponse { sessions, next_page_token })
}

fn describe(context: &crate::context::Context) -> proto::DescribeRunnerResponse {
    let settings = &context.settings;
    let engines = ADAPTERS
        .iter()
        .map(|adapter| {
            let executable =
                install::find(*adapter, &context.engine_settings(adapter.name()), &context.state.engines());
            let (login, login_detail) = launch::login(context, *adapter);
            let pinned = match adapter.install() {
                roundhouse_engines::InstallPlan::Npm { package, .. } => install::pinned_version(package),
                roundhouse_engines::InstallPlan::None { .. } => None,
            };
            proto::Engine {
                name: adapter.name().to_owned(),
                installed: executable.is_some(),
                version: executable
                    .as_deref()
                    .and_then(|path| context.versions.of(*adapter, path))
                    .unwrap_or_default(),
                pinned_version: pinned.unwrap_or_default(),
                executable: executable.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
                login: login.into(),
                login_detail,
                capabilities: Some(to_proto::capabilities(&adapter.capabilities())),
            }
        })
        .collect();
    let duration = |duration: Duration| Some(to_proto::duration(duration));
    proto::DescribeRunnerResponse {
        runner_id: context.state.runner_id().to_owned(),
        hostname: crate::registration::hostname(),
        protocol_version: PROTOCOL_VERSION,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        roots: crate::registration::roots(context),
        engines,
        isolation: to_proto::isolation(context.isolation.level).into(),
        isolation_detail: context.isolation.detail.clone(),
        limits: Some(proto::RunnerLimits {
            max_warm_engines: settings.max_warm_engines,
            warm_ttl: duration(settings.warm_ttl),
            idle_timeout: duration(settings.idle_timeout),
            permission_timeout: duration(settings.permission_timeout),
            engine_start_timeout: duration(settings.engine_start_timeout),
            max_message_bytes: from_proto::MESSAGE_BYTES as u64,
        }),
        draining: context.is_draining(),
        boot_id: context.boot_id.clone(),
        control_plane_id: context.state.control_plane_id().unwrap_or_default(),
        allow_bypass: settings.allow_bypass,
    }
}

fn read_spool(dir: &std::path::Path, items: &mpsc::Sender<Result<proto::ReadSpoolResponse, Status>>) {
    let mut reader = SpoolReader::new(dir);
    let mut frames = Vec::new();
    let mut size = 0;
    loop {
        match reader.next_frame() {
            Ok(Some(frame)) => {
                let shown = spool_frame(&frame);
                size += shown.data.len() + 32;
                frames.push(shown);
            }
            Ok(None) => break,
            // Damage is passed over: what is whole is shown.
            Err(error) => {
                tracing::warn!(error = crate::error::chain(&error), "a spool is damaged");
                if !matches!(
                    error,
                    roundhouse_process::SpoolError::Malformed { .. }
                        | roundhouse_process::SpoolError::Gap { .. }
                ) {
                    break;
                }
            }
        }
        if size >= SPOOL_CHUNK - FRAME_BYTES {
            let response = proto::ReadSpoolResponse { frames: std::mem::take(&mut frames) };
            size = 0;
            if items.blocking_send(Ok(response)).is_err() {
                return;
            }
        }
    }
    if !frames.is_empty() {
        let _ = items.blocking_send(Ok(proto::ReadSpoolResponse { frames }));
    }
}

fn spool_frame(frame: &roundhouse_process::Frame) -> proto::SpoolFrame {
    use proto::spool_frame::Kind;
    let text = |text: String| text.into_bytes();
    let (kind, data, full) = match &frame.body {
        FrameBody::StdoutLine { bytes, .. } => (Kind::Stdout, bytes.clone(), bytes.len() as u64),
        FrameBody::StdoutOverlong { head, limit, .. } => (Kind::Stdout, head.clone(), *limit),
        FrameBody::StdoutOverlongEnd { length, .. } => {
            (Kind::Mark, text("end of an over-long line".into()), *length)
        }
        FrameBody::Stderr { bytes, .. } => (Kind::Stderr, bytes.clone(), bytes.len() as u64),
        FrameBody::StdinIntent { op_id, shown, length, .. } => {
            let mut data = format!("{op_id} ").into_bytes();
            data.extend_from_slice(shown);
            (Kind::StdinIntent, data, *length)
        }
        FrameBody::StdinWritten { op_id, .. } => (Kind::StdinWritten, text(op_id.clone()), 0),
        FrameBody::Signal { signal, .. } => (Kind::Signal, text(signal.to_string()), 0),
        FrameBody::Spawn { program } => (Kind::Spawn, program.clone(), 0),
        FrameBody::Exit(status) => (Kind::Exit, text(format!("{status:?}")), 0),
        other => (Kind::Mark, text(format!("{other:?}")), 0),
    };
    let full_length = full.max(data.len() as u64);
    let mut data = data;
    data.truncate(FRAME_BYTES);
    proto::SpoolFrame {
        number: frame.number,
        kind: kind.into(),
        boot_time: Some(to_proto::duration(Duration::from_nanos(frame.boottime_ns))),
        data,
        full_length,
    }
}
