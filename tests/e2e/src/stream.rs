//! A conversation's stream, read anew and compared.

use roundhouse_proto::control::v1::{
    Session, StreamEventsRequest, StreamEventsResponse, Turn, stream_events_response::Item,
};
use roundhouse_test_support::Control;

/// The whole stored stream of a conversation, read anew.
///
/// # Errors
/// If the call fails or breaks.
pub async fn replay(control: &Control, conversation: &str) -> anyhow::Result<Vec<StreamEventsResponse>> {
    let request = StreamEventsRequest {
        conversation_id: conversation.to_owned(),
        follow: Some(false),
        ..StreamEventsRequest::default()
    };
    let mut stream = control.conversations().stream_events(request).await?.into_inner();
    let mut all = Vec::new();
    while let Some(item) = stream.message().await? {
        all.push(item);
    }
    Ok(all)
}

/// What a replay repeats to the letter: events, summaries, messages but for their place; of a turn the change of state
/// that an item is about, of a session which it is. All else of these is as it is when the item is read.
#[must_use]
pub fn told(mut items: Vec<StreamEventsResponse>) -> Vec<StreamEventsResponse> {
    for item in &mut items {
        match &mut item.item {
            Some(Item::Turn(turn)) => {
                *turn = Turn { turn_id: turn.turn_id.clone(), status: turn.status, ..Turn::default() };
            }
            Some(Item::Session(session)) => {
                *session = Session { session_id: session.session_id.clone(), ..Session::default() };
            }
            // One that waited has its place by now.
            Some(Item::Message(message)) => message.position = None,
            _ => {}
        }
    }
    items
}
