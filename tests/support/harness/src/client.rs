//! The public API as a client sees it, with the few calls that every test makes.

use std::time::Duration;

use anyhow::{Context as _, bail};
use roundhouse_proto::control::v1::{
    CancelTurnRequest, CancelTurnResponse, Conversation, CreateConversationRequest, GetTurnRequest,
    GetTurnResponse, ListMessagesRequest, ListPermissionsRequest, ListSessionsRequest, ListTurnsRequest,
    Message, Permission, RetryTurnRequest, SendMessageRequest, SendMessageResponse, Session, Turn,
    TurnStatus, agent_service_client::AgentServiceClient,
    conversation_service_client::ConversationServiceClient, runner_service_client::RunnerServiceClient,
    session_service_client::SessionServiceClient,
};
use tonic::transport::{Channel, Endpoint};
use tonic_types::StatusExt as _;

use crate::{Follower, wait_for};

/// Clients of every service of one control plane. Clones share a connection, which comes back by itself after a
/// restart of the control plane on its old port.
#[derive(Debug, Clone)]
pub struct Control {
    channel: Channel,
}

/// Whether a turn in this state has ended.
#[must_use]
pub fn is_terminal(status: TurnStatus) -> bool {
    matches!(status, TurnStatus::Completed | TurnStatus::Failed | TurnStatus::Cancelled | TurnStatus::Lost)
}

/// The reason in a status' details. Empty if it has none.
#[must_use]
pub fn reason_of(status: &tonic::Status) -> String {
    status.get_details_error_info().map(|info| info.reason).unwrap_or_default()
}

impl Control {
    /// Clients of the control plane at this URL. Connects when first used.
    ///
    /// # Errors
    /// If this is no URL.
    pub fn new(url: &str) -> anyhow::Result<Self> {
        let endpoint = Endpoint::from_shared(url.to_owned())
            .with_context(|| format!("{url} is no URL"))?
            .connect_timeout(Duration::from_secs(5));
        Ok(Self { channel: endpoint.connect_lazy() })
    }

    /// The connection.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Conversations.
    #[must_use]
    pub fn conversations(&self) -> ConversationServiceClient<Channel> {
        ConversationServiceClient::new(self.channel())
            .max_decoding_message_size(roundhouse_proto::MAX_MESSAGE_BYTES)
    }

    /// Sessions.
    #[must_use]
    pub fn sessions(&self) -> SessionServiceClient<Channel> {
        SessionServiceClient::new(self.channel())
    }

    /// Agents.
    #[must_use]
    pub fn agents(&self) -> AgentServiceClient<Channel> {
        AgentServiceClient::new(self.channel())
    }

    /// Runners.
    #[must_use]
    pub fn runners(&self) -> RunnerServiceClient<Channel> {
        RunnerServiceClient::new(self.channel())
    }

    /// Makes a conversation for this workspace and agent.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn create(&self, workspace: &str, agent: &str) -> anyhow::Result<Conversation> {
        let request = CreateConversationRequest {
            request_id: request_id(),
            workspace: workspace.to_owned(),
            agent: agent.to_owned(),
            ..CreateConversationRequest::default()
        };
        let response =
            self.conversations().create_conversation(request).await.context("CreateConversation")?;
        response.into_inner().conversation.context("CreateConversation answered without a conversation")
    }

    /// Sends a message under a request id of its own.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn send(&self, conversation_id: &str, text: &str) -> anyhow::Result<SendMessageResponse> {
        self.send_as(&request_id(), conversation_id, text).await.context("SendMessage")
    }

    /// Sends a message under this request id.
    ///
    /// # Errors
    /// The status that came.
    pub async fn send_as(
        &self,
        request_id: &str,
        conversation_id: &str,
        text: &str,
    ) -> Result<SendMessageResponse, tonic::Status> {
        let request = SendMessageRequest {
            request_id: request_id.to_owned(),
            conversation_id: conversation_id.to_owned(),
            text: text.to_owned(),
            ..SendMessageRequest::default()
        };
        Ok(self.conversations().send_message(request).await?.into_inner())
    }

    /// Sends a message and answers the id of its turn.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn begin(&self, conversation_id: &str, text: &str) -> anyhow::Result<String> {
        let sent = self.send(conversation_id, text).await?;
        Ok(sent.turn.context("SendMessage answered without a turn")?.turn_id)
    }

    /// Sends a message and waits for the end of its turn, whatever it is.
    ///
    /// # Errors
    /// If a call fails or the turn has not ended within `bound`.
    pub async fn run(
        &self,
        conversation_id: &str,
        text: &str,
        bound: Duration,
    ) -> anyhow::Result<GetTurnResponse> {
        let turn_id = self.begin(conversation_id, text).await?;
        self.wait_end(&turn_id, bound).await
    }

    /// As [`run`](Self::run), and the turn has to be answered with exactly this.
    ///
    /// # Errors
    /// As [`run`](Self::run), and if it ends otherwise or with another answer.
    pub async fn run_answered(
        &self,
        conversation_id: &str,
        text: &str,
        answer: &str,
        bound: Duration,
    ) -> anyhow::Result<GetTurnResponse> {
        let ended = self.run(conversation_id, text, bound).await?;
        check_answer(&ended, answer)?;
        Ok(ended)
    }

    /// A turn with its messages.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn turn(&self, turn_id: &str) -> anyhow::Result<GetTurnResponse> {
        let request = GetTurnRequest { turn_id: turn_id.to_owned() };
        Ok(self.conversations().get_turn(request).await.context("GetTurn")?.into_inner())
    }

    /// Waits until a turn has ended. A control plane that is away meanwhile is waited for.
    ///
    /// # Errors
    /// If it has not ended within `bound`, with the state it was seen in last.
    pub async fn wait_end(&self, turn_id: &str, bound: Duration) -> anyhow::Result<GetTurnResponse> {
        self.wait_turn(turn_id, "has ended", bound, |turn| is_terminal(turn.status())).await
    }

    /// Waits until a turn is in this state.
    ///
    /// # Errors
    /// If it is not within `bound`.
    pub async fn wait_status(
        &self,
        turn_id: &str,
        status: TurnStatus,
        bound: Duration,
    ) -> anyhow::Result<GetTurnResponse> {
        self.wait_turn(turn_id, &format!("is {}", status.as_str_name()), bound, |turn| {
            turn.status() == status
        })
        .await
    }

    async fn wait_turn(
        &self,
        turn_id: &str,
        what: &str,
        bound: Duration,
        holds: impl Fn(&Turn) -> bool,
    ) -> anyhow::Result<GetTurnResponse> {
        let last = std::sync::Mutex::new(None);
        let waited = wait_for(&format!("turn {turn_id} {what}"), bound, || async {
            let got = self.turn(turn_id).await?;
            let turn = got.turn.clone().unwrap_or_default();
            let found = holds(&turn);
            if let Ok(mut last) = last.lock() {
                *last = Some(turn);
            }
            Ok(found.then_some(got))
        })
        .await;
        let last = last.into_inner().ok().flatten();
        waited.with_context(|| format!("last seen as {last:?}"))
    }

    /// Cancels a turn.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn cancel(&self, turn_id: &str) -> anyhow::Result<CancelTurnResponse> {
        let request = CancelTurnRequest { request_id: request_id(), turn_id: turn_id.to_owned() };
        Ok(self.conversations().cancel_turn(request).await.context("CancelTurn")?.into_inner())
    }

    /// Retries a turn and answers the id of the new one.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn retry(&self, turn_id: &str) -> anyhow::Result<String> {
        let request = RetryTurnRequest { request_id: request_id(), turn_id: turn_id.to_owned() };
        let response = self.conversations().retry_turn(request).await.context("RetryTurn")?.into_inner();
        Ok(response.turn.context("RetryTurn answered without a turn")?.turn_id)
    }

    /// Every message of a conversation, by seq.
    ///
    /// # Errors
    /// If a call fails.
    pub async fn messages(&self, conversation_id: &str) -> anyhow::Result<Vec<Message>> {
        let mut all: Vec<Message> = Vec::new();
        loop {
            let after = all.last().map_or(0, |message| message.seq);
            let request =
                ListMessagesRequest { conversation_id: conversation_id.to_owned(), after, limit: 200 };
            let page =
                self.conversations().list_messages(request).await.context("ListMessages")?.into_inner();
            let empty = page.messages.is_empty();
            all.extend(page.messages);
            if !page.has_more || empty {
                return Ok(all);
            }
        }
    }

    /// The turns of a conversation, oldest first. Up to 200.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn turns(&self, conversation_id: &str) -> anyhow::Result<Vec<Turn>> {
        let request = ListTurnsRequest {
            conversation_id: conversation_id.to_owned(),
            page_size: 200,
            page_token: String::new(),
        };
        Ok(self.conversations().list_turns(request).await.context("ListTurns")?.into_inner().turns)
    }

    /// The sessions of a conversation, newest first. Up to 200.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn list_sessions(&self, conversation_id: &str) -> anyhow::Result<Vec<Session>> {
        let request = ListSessionsRequest {
            conversation_id: conversation_id.to_owned(),
            page_size: 200,
            page_token: String::new(),
        };
        Ok(self.sessions().list_sessions(request).await.context("ListSessions")?.into_inner().sessions)
    }

    /// Permission requests of a conversation.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn permissions(&self, conversation_id: &str, decided: bool) -> anyhow::Result<Vec<Permission>> {
        let request = ListPermissionsRequest {
            conversation_id: conversation_id.to_owned(),
            include_decided: decided,
            ..ListPermissionsRequest::default()
        };
        let response = self.conversations().list_permissions(request).await.context("ListPermissions")?;
        Ok(response.into_inner().permissions)
    }

    /// Follows a conversation from its beginning, over restarts, and checks what its stream promises.
    #[must_use]
    pub fn follow(&self, conversation_id: &str) -> Follower {
        Follower::start(self.clone(), conversation_id)
    }
}

/// A request id of its own.
pub(crate) fn request_id() -> String {
    uuid::Uuid::now_v7().to_string()
}

/// Whether a turn was answered with exactly this.
pub(crate) fn check_answer(ended: &GetTurnResponse, answer: &str) -> anyhow::Result<()> {
    let turn = ended.turn.clone().unwrap_or_default();
    let got = ended.answer.as_ref().map(|message| message.text.as_str());
    if turn.status() != TurnStatus::Completed || got != Some(answer) {
        bail!("expected the answer {answer:?}, got {got:?} with {turn:?}");
    }
    Ok(())
}
