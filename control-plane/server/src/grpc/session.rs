//! SessionService.

use roundhouse_domain::id::SessionId;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::session_service_server::SessionService;
use roundhouse_store::ListSessions;
use tonic::{Request, Response, Status};

use super::from_proto::Check;
use super::{Api, from_proto, page, to_proto};
use crate::error::{Error, Result};

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
}

impl Api {
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
