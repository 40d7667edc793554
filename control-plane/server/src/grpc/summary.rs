//! SummaryService.

use roundhouse_domain::id::ConversationId;
use roundhouse_domain::message::Position;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::summary_service_server::SummaryService;
use roundhouse_store::PutSummary;
use tonic::{Request, Response, Status};

use super::from_proto::{self, Check, MAX_ACTOR};
use super::{Api, to_proto};
use crate::clock;
use crate::error::Result;

#[tonic::async_trait]
impl SummaryService for Api {
    async fn get_summary(
        &self,
        request: Request<control::GetSummaryRequest>,
    ) -> std::result::Result<Response<control::GetSummaryResponse>, Status> {
        Ok(Response::new(self.summary(&request.into_inner()).await?))
    }

    async fn put_summary(
        &self,
        request: Request<control::PutSummaryRequest>,
    ) -> std::result::Result<Response<control::PutSummaryResponse>, Status> {
        Ok(Response::new(self.store_summary(request.into_inner()).await?))
    }
}

impl Api {
    async fn summary(&self, request: &control::GetSummaryRequest) -> Result<control::GetSummaryResponse> {
        let id = from_proto::conversation_id(&request.conversation_id)?;
        let version = Some(request.version).filter(|version| *version > 0);
        let summary = self.app.store.get_summary(&id, version).await?;
        Ok(control::GetSummaryResponse { summary: Some(to_proto::summary(&summary)) })
    }

    async fn store_summary(
        &self,
        request: control::PutSummaryRequest,
    ) -> Result<control::PutSummaryResponse> {
        let mut check = Check::default();
        let body = control::PutSummaryRequest { request_id: String::new(), ..request.clone() };
        let key = from_proto::request_key(&mut check, &request.request_id, "PutSummary", &body);
        let id = check.take("conversation_id", ConversationId::parse(&request.conversation_id));
        check.line("author", &request.author, MAX_ACTOR);
        check.ensure(!request.text.contains('\0'), "text", "NUL characters are not accepted");
        let (key, conversation_id) = check.finish(key.zip(id))?;
        let author = if request.author.is_empty() { "user".to_owned() } else { request.author };
        // Text and position are checked by the store, which knows the history.
        let command = PutSummary {
            request: Some(key),
            conversation_id,
            expected_version: request.expected_version,
            through: Position(request.through),
            text: request.text,
            author,
            time: clock::now(),
        };
        let summary = self.app.store.put_summary(command).await?;
        tracing::info!(
            conversation_id = %summary.conversation_id,
            version = summary.version,
            through = summary.through.0,
            "summary stored"
        );
        Ok(control::PutSummaryResponse { summary: Some(to_proto::summary(&summary)) })
    }
}
