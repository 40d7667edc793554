//! Calls that change something, one after the other, each under one request id until it is answered.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use roundhouse_proto::control::v1 as control;
use roundhouse_proto::engine::v1::PermissionDecision;
use tokio::sync::mpsc;

use crate::client::{self, Client, call};
use crate::events::is_connection_loss;
use crate::status::Failure;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// What a person does not type faster than it is sent, and a script waits for.
const ORDERS: usize = 64;

/// What is asked for.
#[derive(Debug, Clone)]
pub(super) enum Wish {
    /// To send this.
    Send { text: String, agent: String, workspace: String },
    /// To cancel this turn.
    Cancel { turn_id: String },
    /// To try this turn again.
    Retry { turn_id: String },
    /// To answer this permission request.
    Answer { permission: String, decision: PermissionDecision, feedback: String },
}

/// What became of it.
#[derive(Debug)]
pub(super) enum Became {
    /// It is stored; the turn that came of it.
    Turn(Box<control::Turn>),
    /// The cancel is stored, or there was nothing left to cancel.
    Cancelling { already_ended: bool },
    /// The answer is stored, or another was first.
    Answered { accepted: bool },
    /// The server is away; it is being tried again.
    Trying(Failure),
    /// It was refused.
    Refused(Wish, Failure),
}

/// Sends in order.
pub(super) struct Sender {
    orders: mpsc::Sender<Wish>,
    became: mpsc::Receiver<Became>,
    open: Open,
}

/// What is not answered yet, with the request id of each.
type Open = Arc<Mutex<VecDeque<(String, Wish)>>>;

impl Sender {
    pub(super) fn start(client: Client, conversation_id: String) -> Self {
        let (orders, ordered) = mpsc::channel(ORDERS);
        let (tell, became) = mpsc::channel(ORDERS);
        let open = Open::default();
        tokio::spawn(run(client, conversation_id, ordered, tell, Arc::clone(&open)));
        Self { orders, became, open }
    }

    /// Takes an order. False: too many wait.
    pub(super) fn order(&self, wish: Wish) -> bool {
        let id = client::request_id(None);
        self.lock().push_back((id, wish.clone()));
        let taken = self.orders.try_send(wish).is_ok();
        if !taken {
            self.lock().pop_back();
        }
        taken
    }

    /// Whether something is not answered yet.
    pub(super) fn is_busy(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Texts on their way, with their request ids.
    pub(super) fn unanswered(&self) -> Vec<(String, String)> {
        let open = self.lock();
        let texts = open.iter().filter_map(|(id, wish)| match wish {
            Wish::Send { text, .. } => Some((id.clone(), text.clone())),
            Wish::Cancel { .. } | Wish::Retry { .. } | Wish::Answer { .. } => None,
        });
        texts.collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<(String, Wish)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for what became of the next order. Cancellation safe.
    pub(super) async fn next(&mut self) -> Became {
        match self.became.recv().await {
            Some(became) => became,
            // Its task ends with this value alone.
            None => std::future::pending().await,
        }
    }
}

async fn run(
    client: Client,
    conversation_id: String,
    mut orders: mpsc::Receiver<Wish>,
    tell: mpsc::Sender<Became>,
    open: Open,
) {
    while let Some(wish) = orders.recv().await {
        let id = open.lock().unwrap_or_else(PoisonError::into_inner).front().map(|(id, _)| id.clone());
        let id = id.unwrap_or_default();
        let mut pause = FIRST_PAUSE;
        let became = loop {
            match once(&client, &conversation_id, &id, &wish).await {
                Ok(became) => break became,
                Err(status) if is_connection_loss(&status) => {
                    let first = pause == FIRST_PAUSE;
                    if first && tell.send(Became::Trying(status.into())).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Err(status) => break Became::Refused(wish, status.into()),
            }
        };
        open.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        if tell.send(became).await.is_err() {
            return;
        }
    }
}

async fn once(
    client: &Client,
    conversation_id: &str,
    id: &str,
    wish: &Wish,
) -> Result<Became, tonic::Status> {
    let mut service = client.conversations();
    let request_id = id.to_owned();
    let turn = |turn: Option<control::Turn>| {
        let lacking = || tonic::Status::data_loss("the server's answer lacks the turn");
        turn.ok_or_else(lacking).map(|turn| Became::Turn(Box::new(turn)))
    };
    match wish.clone() {
        Wish::Send { text, agent, workspace } => {
            let conversation_id = conversation_id.to_owned();
            let actor = String::new();
            let request =
                control::SendMessageRequest { request_id, conversation_id, text, agent, workspace, actor };
            turn(service.send_message(call(request)).await?.into_inner().turn)
        }
        Wish::Retry { turn_id } => {
            let request = control::RetryTurnRequest { request_id, turn_id };
            turn(service.retry_turn(call(request)).await?.into_inner().turn)
        }
        Wish::Cancel { turn_id } => {
            let request = control::CancelTurnRequest { request_id, turn_id };
            let answer = service.cancel_turn(call(request)).await?.into_inner();
            Ok(Became::Cancelling { already_ended: answer.already_ended })
        }
        Wish::Answer { permission, decision, feedback } => {
            let request = control::AnswerPermissionRequest {
                request_id,
                permission_request_id: permission,
                decision: decision.into(),
                feedback,
            };
            let answer = service.answer_permission(call(request)).await?.into_inner();
            Ok(Became::Answered { accepted: answer.accepted })
        }
    }
}
