//! SessionService.

use std::sync::Arc;

use roundhouse_domain::id::SessionId;
use roundhouse_domain::session::Session;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::session_service_server::SessionService;
use roundhouse_proto::engine::v1 as engine;
use roundhouse_store::{ListSessions, MarkSessionUnusable};
use tonic::{Request, Response, Status};

use super::from_proto::Check;
use super::{Api, from_proto, page, to_proto};
use crate::clock;
use crate::error::{Error, Result};

/// Longest reason for marking a session, in bytes.
const MAX_REASON: usize = 1_000;

#[tonic::async_trait]
impl SessionService for Api {
    async fn list_sessions(
        &self,
        request: Request<control::ListSessionsRequest>,
    ) -> std::result::Result<Response<control::ListSessionsResponse>, Status> {
        Ok(Response::new(self.sessions(request.into_inner()).await?))
    }

    async fn get_session(
        &self,
        request: Request<control::GetSessionRequest>,
    ) -> std::result::Result<Response<control::GetSessionResponse>, Status> {
        let id = from_proto::session_id(&request.into_inner().session_id)?;
        let session = self.app.store.get_session(&id).await.map_err(Error::from)?;
        Ok(Response::new(control::GetSessionResponse { session: Some(to_proto::session(&session)) }))
    }

    async fn mark_session_unusable(
        &self,
        request: Request<control::MarkSessionUnusableRequest>,
    ) -> std::result::Result<Response<control::MarkSessionUnusableResponse>, Status> {
        Ok(Response::new(self.mark_unusable(request.into_inner()).await?))
    }
}

impl Api {
    async fn mark_unusable(
        &self,
        request: control::MarkSessionUnusableRequest,
    ) -> Result<control::MarkSessionUnusableResponse> {
        let mut check = Check::default();
        let body = control::MarkSessionUnusableRequest { request_id: String::new(), ..request.clone() };
        let key = from_proto::request_key(&mut check, &request.request_id, "MarkSessionUnusable", &body);
        let id = check.take("session_id", SessionId::parse(&request.session_id));
        check.ensure(!request.reason.trim().is_empty(), "reason", "say why it is not to be continued");
        check.line("reason", &request.reason, MAX_REASON);
        let (key, session_id) = check.finish(key.zip(id))?;
        let command = MarkSessionUnusable {
            request: Some(key),
            session_id,
            reason: request.reason,
            time: clock::now(),
        };
        let session = self.app.store.mark_session_unusable(command).await?;
        tracing::info!(session_id = %session.id, "a person marked a session unusable");
        self.close_on_runner(&session);
        Ok(control::MarkSessionUnusableResponse { session: Some(to_proto::session(&session)) })
    }

    /// Asks the runner to end what is warm of a session that nobody continues. Only a kindness: else it ends when its
    /// idle time is over.
    fn close_on_runner(&self, session: &Session) {
        let (app, session) = (Arc::clone(&self.app), session.clone());
        self.app.tasks.spawn("close-session", async move {
            let Ok(view) = app.store.get_workspace(&session.workspace_id).await else { return };
            let runner = app.runners.get(&view.workspace.runner_id);
            let Ok(link) = runner.link() else { return };
            let request = engine::CloseSessionRequest { session_id: session.id.to_string() };
            if let Err(error) = link.close_session(request).await {
                tracing::debug!(%error, session_id = %session.id, "the runner did not close the session");
            }
        });
    }

    async fn sessions(&self, request: control::ListSessionsRequest) -> Result<control::ListSessionsResponse> {
        let mut check = Check::default();
        let limit = from_proto::page_size(&mut check, "page_size", request.page_size);
        check.done()?;
        let conversation_id = match request.conversation_id.as_str() {
            "" => None,
            text => Some(from_proto::conversation_id(text)?),
        };
        if let Some(id) = &conversation_id {
            // An unknown conversation is told, not shown as one without sessions.
            self.app.store.get_conversation(id).await?;
        }
        let after = page::after(&request.page_token)?
            .map(SessionId::parse)
            .transpose()
            .map_err(|error| Error::field("page_token", error.to_string()))?;
        let query = ListSessions { conversation_id, workspace_id: None, after, limit };
        let found = self.app.store.list_sessions(query).await?;
        let next_page_token = match found.items.last() {
            Some(last) if found.more => page::token(last.id.as_str()),
            Some(_) | None => String::new(),
        };
        let sessions = found.items.iter().map(to_proto::session).collect();
        Ok(control::ListSessionsResponse { sessions, next_page_token })
    }
}
