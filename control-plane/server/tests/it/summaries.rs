//! Summaries, and sessions that a person takes out of use.

use pretty_assertions::assert_eq;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::TurnStatus;
use roundhouse_proto::control::v1::session::State;
use roundhouse_proto::control::v1::session_service_client::SessionServiceClient;
use roundhouse_proto::control::v1::stream_events_response::Item;
use roundhouse_proto::control::v1::summary_service_client::SummaryServiceClient;
use roundhouse_proto::engine::v1::Origin;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::sessions::sessions;
use crate::support::runner::{Reply, agent};
use crate::support::{World, collect, reason};

async fn client(world: &World) -> SummaryServiceClient<Channel> {
    SummaryServiceClient::connect(format!("http://{}", world.address())).await.unwrap()
}

fn put(conversation: &str, expected_version: u64, through: u64, text: &str) -> control::PutSummaryRequest {
    control::PutSummaryRequest {
        request_id: String::new(),
        conversation_id: conversation.into(),
        expected_version,
        through,
        text: text.into(),
        author: String::new(),
    }
}

async fn store(world: &World, request: control::PutSummaryRequest) -> Result<control::Summary, Status> {
    Ok(client(world).await.put_summary(request).await?.into_inner().summary.unwrap())
}

#[tokio::test]
async fn s63_a_new_session_is_told_the_summary_and_every_message_after_it() {
    let mut world = World::new().await;
    world.runner.state().agents.insert("critic".into(), agent("critic", "second", "m-9", "Criticise."));
    let conversation = world.conversation().await;
    for text in ["question-1", "question-2"] {
        let turn = world.send(&conversation, text).await;
        world.finish(&turn).await;
    }
    let summary = store(&world, put(&conversation, 0, 2, "THE-SUMMARY")).await.unwrap();
    assert_eq!((summary.version, summary.through, summary.author.as_str()), (1, 2, "user"));
    let turn = world.send_as(&conversation, "question-3", "critic", "/w/a").await;
    let (turn, _) = world.finish(&turn).await;
    assert_eq!((turn.origin(), turn.summary_given, turn.history_given), (Origin::Started, true, true));
    let told = world.runner.opens()[2].context.clone();
    assert!(told.contains("Summary of the conversation up to message 2\nTHE-SUMMARY"), "{told}");
    assert!(!told.contains("question-1") && told.contains("echo: question-2"), "{told}");
    // A resumed session has no need of it.
    let turn = world.send(&conversation, "question-4").await;
    let (turn, _) = world.finish(&turn).await;
    assert_eq!((turn.origin(), turn.summary_given, turn.history_given), (Origin::Resumed, false, true));
    let told = world.runner.opens()[3].context.clone();
    assert!(!told.contains("THE-SUMMARY") && told.contains("echo: question-3"), "{told}");
    // Nothing was taken out of the conversation, and followers were told.
    assert_eq!(world.messages(&conversation).await.len(), 8);
    let request = control::StreamEventsRequest {
        conversation_id: conversation.clone(),
        follow: Some(false),
        ..Default::default()
    };
    let stream = world.client.stream_events(request).await.unwrap().into_inner();
    let items = collect(stream).await.unwrap();
    let summaries: Vec<_> = items
        .iter()
        .filter_map(|item| match &item.item {
            Some(Item::Summary(summary)) => {
                Some((summary.version, summary.text.as_str(), item.cursor.is_empty()))
            }
            _ => None,
        })
        .collect();
    assert_eq!(summaries, [(1, "THE-SUMMARY", false)]);
}

#[tokio::test]
async fn s63_two_writers_are_settled_by_the_version_and_repeats_are_harmless() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let get = |version| control::GetSummaryRequest { conversation_id: conversation.clone(), version };
    let mut client = client(&world).await;
    let status = client.get_summary(get(0)).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "SUMMARY_NOT_FOUND"));
    let turn = world.send(&conversation, "one").await;
    world.finish(&turn).await;
    let named =
        control::PutSummaryRequest { request_id: "req-1".into(), ..put(&conversation, 0, 2, "first") };
    let first = store(&world, named.clone()).await.unwrap();
    assert_eq!(store(&world, named.clone()).await.unwrap(), first);
    let status = store(&world, control::PutSummaryRequest { text: "x".into(), ..named }).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::AlreadyExists, "REQUEST_ID_REUSED"));
    let status = store(&world, put(&conversation, 0, 2, "late")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Aborted, "VERSION_MISMATCH"));
    assert_eq!(status.get_details_error_info().unwrap().metadata["current_version"], "1");
    let second = store(&world, put(&conversation, 1, 1, "second")).await.unwrap();
    assert_eq!(client.get_summary(get(0)).await.unwrap().into_inner().summary, Some(second));
    assert_eq!(client.get_summary(get(1)).await.unwrap().into_inner().summary, Some(first));
    for (through, text, field) in
        [(3, "x", "through"), (0, "x", "through"), (1, " ", "text"), (1, "\0", "text")]
    {
        let status = store(&world, put(&conversation, 2, through, text)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{field}");
        let violations = status.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, field);
    }
    let status = store(&world, put("cnv_nobody", 0, 1, "x")).await.unwrap_err();
    assert_eq!(reason(&status), "CONVERSATION_NOT_FOUND");
}

#[tokio::test]
async fn s16_a_person_takes_a_session_out_of_use_but_never_during_a_turn() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let first = world.send(&conversation, "question-1").await;
    let (first, _) = world.finish(&first).await;
    let mut client = SessionServiceClient::connect(format!("http://{}", world.address())).await.unwrap();
    let mark = control::MarkSessionUnusableRequest {
        request_id: "mark-1".into(),
        session_id: first.session_id.clone(),
        reason: "it dreams".into(),
    };
    world.runner.state().reply = Reply::Hold;
    let second = world.send(&conversation, "question-2").await;
    world.runner.sent(&second.turn_id).await;
    let status = client.mark_session_unusable(mark.clone()).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "TURN_IN_PROGRESS"));
    assert_eq!(sessions(&world, &conversation).await[0].state(), State::Active, "nothing changed");
    world.runner.complete(&second.turn_id, "done");
    world.finish(&second).await;
    let marked = client.mark_session_unusable(mark.clone()).await.unwrap().into_inner().session.unwrap();
    assert_eq!((marked.state(), marked.unusable_reason.as_str()), (State::Unusable, "it dreams"));
    // What is warm of it is ended.
    world.runner.wait("a close", |s| s.closed.contains(&first.session_id).then_some(())).await;
    world.runner.state().reply = Reply::Echo;
    let third = world.send(&conversation, "question-3").await;
    let (third, _) = world.finish(&third).await;
    assert_eq!((third.status(), third.origin()), (TurnStatus::Completed, Origin::Replaced));
    assert_ne!(third.session_id, first.session_id);
    let told = world.runner.opens().last().unwrap().context.clone();
    assert!(told.contains("question-1") && told.contains("question-2"), "{told}");
    // A repeat is answered as at first; another reason changes nothing.
    assert_eq!(
        client.mark_session_unusable(mark.clone()).await.unwrap().into_inner().session.unwrap(),
        marked
    );
    let again = control::MarkSessionUnusableRequest {
        request_id: String::new(),
        reason: "really".into(),
        ..mark.clone()
    };
    let again = client.mark_session_unusable(again).await.unwrap().into_inner().session.unwrap();
    assert_eq!(again.unusable_reason, "it dreams");
    let silent =
        control::MarkSessionUnusableRequest { reason: " ".into(), request_id: String::new(), ..mark };
    let status = client.mark_session_unusable(silent).await.unwrap_err();
    assert_eq!(reason(&status), "FIELD_INVALID");
    let all = sessions(&world, &conversation).await;
    assert_eq!(all.len(), 2, "it stays listed");
    assert_eq!((&all[1].replaces, all[1].origin()), (&first.session_id, Origin::Replaced));
}
