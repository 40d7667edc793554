//! A message, its turn, its answer.

use pretty_assertions::assert_eq;
use roundhouse_proto::control::v1::{Role, TurnStatus};
use roundhouse_proto::engine::v1::Origin;
use roundhouse_proto::engine::v1::event_body::Kind;

use crate::support::{World, assert_whole, kinds};

#[tokio::test]
async fn a_message_is_answered_and_everything_about_it_is_stored() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    assert_eq!(turn.status(), TurnStatus::Dispatching);
    let (turn, events) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed, "{turn:#?}");
    assert_whole(&events);
    assert!(kinds(&events).iter().any(|kind| matches!(kind, Kind::Text(text) if text.text == "echo: hello")));
    assert_eq!(turn.origin(), Origin::Started);
    assert_eq!((turn.engine.as_str(), turn.model.as_str()), ("fake", "m-1"));
    assert_eq!(turn.usage.unwrap().models[0].output_tokens, Some(5));
    assert!(!turn.history_given);
    let messages = world.messages(&conversation).await;
    let told: Vec<_> = messages.iter().map(|m| (m.role(), m.text.as_str(), m.position)).collect();
    assert_eq!(told, [(Role::User, "hello", Some(1)), (Role::Agent, "echo: hello", Some(2))]);
    world.runner.acknowledged(&turn.turn_id).await;
    assert_eq!(world.workspace().await.held_by_turn_id, "");
}

#[tokio::test]
async fn the_second_turn_resumes_the_session_of_the_first() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "one").await;
    world.finish(&first).await;
    let second = world.send_as(&conversation, "two", "", "").await;
    let (second, _) = world.finish(&second).await;
    assert_eq!(second.origin(), Origin::Resumed);
    let opens = world.runner.opens();
    assert_eq!(opens.len(), 2);
    assert_eq!(opens[0].session_id, opens[1].session_id);
    assert_eq!(opens[1].native_ref.as_ref().unwrap().id, format!("native-{}", opens[0].session_id));
    assert_eq!(opens[1].context, "", "it knows what came before");
    assert!(opens[1].epoch > opens[0].epoch);
}
