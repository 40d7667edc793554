//! ConversationService: each call checks its request, carries out one intent of the store, and tells what is stored.

use roundhouse_domain::agent_file::Trigger;
use roundhouse_domain::id::{ConversationId, MessageId, TurnId};
use roundhouse_domain::outcome::Outcome;
use roundhouse_domain::turn::Turn;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::conversation_service_server::ConversationService;
use roundhouse_proto::control::v1::get_conversation_request::Name;
use roundhouse_store::{
    AcceptMessage, AnswerOutcome, AnswerPermission, CancelOutcome, ConversationView, CreateConversation,
    ListConversations, ListPermissions, RequestCancel, RetryTurn, SetArchived,
};
use tonic::{Request, Response, Status};

use super::from_proto::Check;
use super::{Api, from_proto, page, stream, to_proto};
use crate::error::{Error, Result};
use crate::failpoint::kill_point;
use crate::{clock, dispatch, targets};

/// The door that calls of this API come through.
const SURFACE: Trigger = Trigger::Manual;
/// Conversations that are looked at for one page of those that want a person.
const MAX_SCAN: usize = 1_000;

type Answer<T> = std::result::Result<Response<T>, Status>;

#[tonic::async_trait]
impl ConversationService for Api {
    type StreamEventsStream = stream::Events;

    async fn create_conversation(
        &self,
        request: Request<control::CreateConversationRequest>,
    ) -> Answer<control::CreateConversationResponse> {
        Ok(Response::new(self.create(request.into_inner()).await?))
    }

    async fn get_conversation(
        &self,
        request: Request<control::GetConversationRequest>,
    ) -> Answer<control::GetConversationResponse> {
        let view = self.conversation_named(request.into_inner()).await?;
        let conversation = Some(to_proto::conversation(&view, clock::now()));
        Ok(Response::new(control::GetConversationResponse { conversation }))
    }

    async fn list_conversations(
        &self,
        request: Request<control::ListConversationsRequest>,
    ) -> Answer<control::ListConversationsResponse> {
        Ok(Response::new(self.conversations(request.into_inner()).await?))
    }

    async fn archive_conversation(
        &self,
        request: Request<control::ArchiveConversationRequest>,
    ) -> Answer<control::ArchiveConversationResponse> {
        Ok(Response::new(self.archive(request.into_inner()).await?))
    }

    async fn send_message(
        &self,
        request: Request<control::SendMessageRequest>,
    ) -> Answer<control::SendMessageResponse> {
        Ok(Response::new(self.send(request.into_inner()).await?))
    }

    async fn list_messages(
        &self,
        request: Request<control::ListMessagesRequest>,
    ) -> Answer<control::ListMessagesResponse> {
        Ok(Response::new(self.messages(request.into_inner()).await?))
    }

    async fn stream_events(
        &self,
        request: Request<control::StreamEventsRequest>,
    ) -> Answer<Self::StreamEventsStream> {
        Ok(Response::new(stream::begin(&self.app, request.into_inner()).await?))
    }

    async fn get_turn(&self, request: Request<control::GetTurnRequest>) -> Answer<control::GetTurnResponse> {
        Ok(Response::new(self.turn(&request.into_inner().turn_id).await?))
    }

    async fn list_turns(
        &self,
        request: Request<control::ListTurnsRequest>,
    ) -> Answer<control::ListTurnsResponse> {
        Ok(Response::new(self.turns(request.into_inner()).await?))
    }

    async fn cancel_turn(
        &self,
        request: Request<control::CancelTurnRequest>,
    ) -> Answer<control::CancelTurnResponse> {
        Ok(Response::new(self.cancel(request.into_inner()).await?))
    }

    async fn retry_turn(
        &self,
        request: Request<control::RetryTurnRequest>,
    ) -> Answer<control::RetryTurnResponse> {
        Ok(Response::new(self.retry(request.into_inner()).await?))
    }

    async fn answer_permission(
        &self,
        request: Request<control::AnswerPermissionRequest>,
    ) -> Answer<control::AnswerPermissionResponse> {
        Ok(Response::new(self.answer(request.into_inner()).await?))
    }

    async fn list_permissions(
        &self,
        request: Request<control::ListPermissionsRequest>,
    ) -> Answer<control::ListPermissionsResponse> {
        Ok(Response::new(self.permissions(request.into_inner()).await?))
    }
}

impl Api {
    async fn create(
        &self,
        request: control::CreateConversationRequest,
    ) -> Result<control::CreateConversationResponse> {
        let new = from_proto::create_conversation(request)?;
        let workspace = match &new.workspace {
            Some(text) => Some(targets::workspace(&self.app, text).await?.id),
            None => None,
        };
        let command = CreateConversation {
            request: Some(new.request),
            id: ConversationId::new(clock::uuid()),
            external_id: new.external_id,
            title: new.title,
            agent_name: new.agent,
            workspace_id: workspace,
            time: clock::now(),
        };
        let made = self.app.store.create_conversation(command).await?;
        let view = self.app.store.get_conversation(&made.conversation.id).await?;
        tracing::info!(conversation_id = %made.conversation.id, created = made.created, "conversation");
        Ok(control::CreateConversationResponse {
            conversation: Some(to_proto::conversation(&view, clock::now())),
            created: made.created,
        })
    }

    async fn conversation_named(&self, request: control::GetConversationRequest) -> Result<ConversationView> {
        match request.name {
            Some(Name::ConversationId(text)) => {
                let id = from_proto::conversation_id(&text)?;
                Ok(self.app.store.get_conversation(&id).await?)
            }
            Some(Name::ExternalId(name)) => {
                let mut check = Check::default();
                let name = from_proto::external_id(&mut check, &name);
                check.done()?;
                Ok(self.app.store.find_conversation(&name).await?)
            }
            None => Err(Error::field("name", "give a conversation_id or an external_id")),
        }
    }

    async fn conversations(
        &self,
        request: control::ListConversationsRequest,
    ) -> Result<control::ListConversationsResponse> {
        let mut check = Check::default();
        let limit = from_proto::page_size(&mut check, "page_size", request.page_size);
        check.done()?;
        let mut after = page::after(&request.page_token)?
            .map(ConversationId::parse)
            .transpose()
            .map_err(|error| Error::field("page_token", error.to_string()))?;
        let now = clock::now();
        let mut conversations = Vec::new();
        let mut scanned = 0;
        loop {
            let query = ListConversations {
                after: after.clone(),
                limit: limit - conversations.len(),
                archived: (!request.include_archived).then_some(false),
                project: None,
            };
            let found = self.app.store.list_conversations(query).await?;
            scanned += found.items.len();
            after = found.items.last().map(|view| view.conversation.id.clone()).or(after);
            let shown = found.items.iter().map(|view| to_proto::conversation(view, now));
            conversations.extend(shown.filter(|c| !request.attention_only || !c.attention.is_empty()));
            let full = conversations.len() >= limit || scanned >= MAX_SCAN;
            if !found.more || full || found.items.is_empty() {
                let next_page_token = match after {
                    Some(last) if found.more => page::token(last.as_str()),
                    Some(_) | None => String::new(),
                };
                return Ok(control::ListConversationsResponse { conversations, next_page_token });
            }
        }
    }

    async fn archive(
        &self,
        request: control::ArchiveConversationRequest,
    ) -> Result<control::ArchiveConversationResponse> {
        let mut check = Check::default();
        let body = control::ArchiveConversationRequest { request_id: String::new(), ..request.clone() };
        let key = from_proto::request_key(&mut check, &request.request_id, "ArchiveConversation", &body);
        let id = check.take("conversation_id", ConversationId::parse(&request.conversation_id));
        let (key, conversation_id) = check.finish(key.zip(id))?;
        let command = SetArchived {
            request: Some(key),
            conversation_id,
            archived: request.archived,
            time: clock::now(),
        };
        let conversation = self.app.store.set_archived(command).await?;
        let view = self.app.store.get_conversation(&conversation.id).await?;
        let conversation = Some(to_proto::conversation(&view, clock::now()));
        Ok(control::ArchiveConversationResponse { conversation })
    }

    async fn send(&self, request: control::SendMessageRequest) -> Result<control::SendMessageResponse> {
        let new = from_proto::send_message(request)?;
        let (mut target, mut idle) = ((new.agent.clone(), None), true);
        let missing = if new.agent.is_none() || new.workspace.is_none() {
            let view = self.app.store.get_conversation(&new.conversation_id).await?;
            let known = view.conversation;
            idle = view.active_turn.is_none();
            let agent = new.agent.is_none() && known.last_agent.is_none();
            let workspace = new.workspace.is_none() && known.last_workspace_id.is_none();
            target = (target.0.or(known.last_agent), known.last_workspace_id);
            agent.then_some("agent").or_else(|| workspace.then_some("workspace"))
        } else {
            None
        };
        // A repeat is answered from the store alone: the runner that resolved its path may be away by now. Where nothing
        // has to be resolved, accepting finds it.
        if (missing.is_some() || new.workspace.is_some())
            && let Some(before) = self.app.store.accepted_before(&new.request).await?
        {
            return Ok(sent(&before.message, &before.turn, true));
        }
        if let Some(what) = missing {
            return Err(Error::TargetMissing { what });
        }
        let workspace_id = match &new.workspace {
            Some(text) => Some(targets::workspace(&self.app, text).await?.id),
            None => None,
        };
        let turn_id = TurnId::new(clock::uuid());
        let ahead = match (target.0, workspace_id.clone().or(target.1)) {
            (Some(agent), Some(workspace)) if idle => {
                Some(dispatch::prefetch(&self.app, &turn_id, workspace, agent))
            }
            _ => None,
        };
        let command = AcceptMessage {
            request: new.request,
            conversation_id: new.conversation_id,
            message_id: MessageId::new(clock::uuid()),
            turn_id: turn_id.clone(),
            actor: new.actor,
            body: new.text,
            agent_name: new.agent,
            workspace_id,
            surface: SURFACE,
            time: clock::now(),
        };
        kill_point!("before-accept");
        let accepted = self.app.store.accept_message(command).await?;
        kill_point!("after-accept");
        tracing::info!(
            conversation_id = %accepted.turn.conversation_id,
            turn_id = %accepted.turn.id,
            state = %accepted.turn.state,
            repeated = accepted.repeated,
            "message accepted"
        );
        if accepted.turn.state.is_active() {
            if let Some(ahead) = ahead
                && accepted.turn.id == turn_id
            {
                ahead.begins();
            }
            dispatch::ensure(&self.app, &accepted.turn.id);
        }
        Ok(sent(&accepted.message, &accepted.turn, accepted.repeated))
    }

    async fn messages(&self, request: control::ListMessagesRequest) -> Result<control::ListMessagesResponse> {
        let mut check = Check::default();
        let id = check.take("conversation_id", ConversationId::parse(&request.conversation_id));
        let limit = from_proto::page_size(&mut check, "limit", request.limit);
        let id = check.finish(id)?;
        let found = self.app.store.list_messages(&id, request.after, limit).await?;
        Ok(control::ListMessagesResponse {
            messages: found.items.iter().map(to_proto::listed_message).collect(),
            has_more: found.more,
        })
    }

    async fn turn(&self, id: &str) -> Result<control::GetTurnResponse> {
        let id = from_proto::turn_id(id)?;
        let turn = self.app.store.get_turn(&id).await?;
        let message = self.app.store.get_message(&turn.message_id).await?;
        let answer = match &turn.agent_message_id {
            Some(id) => Some(self.app.store.get_message(id).await?),
            None => None,
        };
        let now = clock::now();
        let duration = turn.start_time.map(|start| turn.end_time.unwrap_or(now).since(start));
        let waiting = if turn.state.is_active() {
            let view = self.app.store.get_conversation(&turn.conversation_id).await?;
            to_proto::attention(&view, now).into_iter().find(|item| item.turn_id == turn.id.as_str())
        } else {
            None
        };
        Ok(control::GetTurnResponse {
            turn: Some(to_proto::turn(&turn)),
            message: Some(to_proto::message(&message)),
            answer: answer.as_ref().map(to_proto::message),
            duration: duration.map(to_proto::duration),
            waiting,
        })
    }

    async fn turns(&self, request: control::ListTurnsRequest) -> Result<control::ListTurnsResponse> {
        let mut check = Check::default();
        let id = check.take("conversation_id", ConversationId::parse(&request.conversation_id));
        let limit = from_proto::page_size(&mut check, "page_size", request.page_size);
        let id = check.finish(id)?;
        let after = page::after(&request.page_token)?
            .map(TurnId::parse)
            .transpose()
            .map_err(|error| Error::field("page_token", error.to_string()))?;
        let found = self.app.store.list_turns(&id, after.as_ref(), limit).await?;
        let next_page_token = match found.items.last() {
            Some(last) if found.more => page::token(last.id.as_str()),
            Some(_) | None => String::new(),
        };
        let turns = found.items.iter().map(to_proto::turn).collect();
        Ok(control::ListTurnsResponse { turns, next_page_token })
    }

    async fn cancel(&self, request: control::CancelTurnRequest) -> Result<control::CancelTurnResponse> {
        let mut check = Check::default();
        let body = control::CancelTurnRequest { request_id: String::new(), ..request.clone() };
        let key = from_proto::request_key(&mut check, &request.request_id, "CancelTurn", &body);
        let id = check.take("turn_id", TurnId::parse(&request.turn_id));
        let (key, turn_id) = check.finish(key.zip(id))?;
        let time = clock::now();
        let error = dispatch::cancelled_error();
        let command = RequestCancel {
            request: Some(key),
            turn_id: turn_id.clone(),
            terminal: dispatch::own_terminal(&Outcome::Cancelled(Some(error.clone())), time),
            error: Some(error),
            time,
        };
        let outcome = self.app.store.request_cancel(command).await?;
        tracing::info!(turn_id = %turn_id, ?outcome, "cancel");
        if outcome == CancelOutcome::Cancelling {
            dispatch::ensure(&self.app, &turn_id);
        }
        let turn = self.app.store.get_turn(&turn_id).await?;
        Ok(control::CancelTurnResponse {
            turn: Some(to_proto::turn(&turn)),
            already_ended: matches!(outcome, CancelOutcome::AlreadyEnded(_)),
        })
    }

    async fn retry(&self, request: control::RetryTurnRequest) -> Result<control::RetryTurnResponse> {
        let mut check = Check::default();
        let body = control::RetryTurnRequest { request_id: String::new(), ..request.clone() };
        let key = from_proto::request_key(&mut check, &request.request_id, "RetryTurn", &body);
        let id = check.take("turn_id", TurnId::parse(&request.turn_id));
        let (key, turn_id) = check.finish(key.zip(id))?;
        let command = RetryTurn {
            request: Some(key),
            turn_id,
            new_turn_id: TurnId::new(clock::uuid()),
            surface: SURFACE,
            time: clock::now(),
        };
        let turn = self.app.store.retry_turn(command).await?;
        if turn.state.is_active() {
            dispatch::ensure(&self.app, &turn.id);
        }
        Ok(control::RetryTurnResponse { turn: Some(to_proto::turn(&turn)) })
    }

    async fn answer(
        &self,
        request: control::AnswerPermissionRequest,
    ) -> Result<control::AnswerPermissionResponse> {
        let answer = from_proto::answer_permission(request)?;
        let command = AnswerPermission {
            request: Some(answer.request),
            permission_id: answer.permission_id,
            decision: answer.decision,
            feedback: answer.feedback,
            actor: "user".to_owned(),
            time: clock::now(),
        };
        let (permission, accepted) = match self.app.store.answer_permission(command).await? {
            AnswerOutcome::Recorded(permission) => (permission, true),
            AnswerOutcome::AnsweredBefore(permission) | AnswerOutcome::Settled(permission) => {
                (permission, false)
            }
        };
        Ok(control::AnswerPermissionResponse {
            permission: Some(to_proto::permission(&permission)),
            accepted,
        })
    }

    async fn permissions(
        &self,
        request: control::ListPermissionsRequest,
    ) -> Result<control::ListPermissionsResponse> {
        let mut check = Check::default();
        let limit = from_proto::page_size(&mut check, "page_size", request.page_size);
        check.done()?;
        let conversation_id = match request.conversation_id.as_str() {
            "" => None,
            text => Some(from_proto::conversation_id(text)?),
        };
        let query = ListPermissions {
            conversation_id,
            turn_id: None,
            open_only: !request.include_decided,
            after: page::after(&request.page_token)?,
            limit,
        };
        let found = self.app.store.list_permissions(query).await?;
        let next_page_token = match found.items.last() {
            Some(last) if found.more => page::token(&last.request.request_id),
            Some(_) | None => String::new(),
        };
        let permissions = found.items.iter().map(to_proto::permission).collect();
        Ok(control::ListPermissionsResponse { permissions, next_page_token })
    }
}

fn sent(
    message: &roundhouse_domain::message::Message,
    turn: &Turn,
    repeated: bool,
) -> control::SendMessageResponse {
    control::SendMessageResponse {
        message: Some(to_proto::message(message)),
        turn: Some(to_proto::turn(turn)),
        repeated_request: repeated,
    }
}
