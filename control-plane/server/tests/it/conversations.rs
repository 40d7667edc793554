//! Conversations, messages and their order, request ids, what is refused.

use pretty_assertions::assert_eq;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::agent_service_client::AgentServiceClient;
use roundhouse_proto::control::v1::get_conversation_request::Name;
use roundhouse_proto::control::v1::session_service_client::SessionServiceClient;
use roundhouse_proto::control::v1::{Role, TurnStatus};
use roundhouse_proto::engine::v1::FailureReason;
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::support::runner::{Reply, agent};
use crate::support::{LIMIT, World, failure, message, reason};

#[tokio::test]
async fn s12_five_queued_messages_are_answered_in_order_and_each_knows_what_came_before() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let mut turns = Vec::new();
    for (n, agent) in ["builder", "reviewer", "builder", "reviewer", "builder"].iter().enumerate() {
        turns.push(world.send_as(&conversation, &format!("q{n}"), agent, "/w/a").await);
    }
    assert_eq!(turns[0].status(), TurnStatus::Dispatching);
    assert!(turns[1..].iter().all(|turn| turn.status() == TurnStatus::Queued));
    let waiting = world.messages(&conversation).await;
    assert_eq!(waiting.iter().map(|m| m.position).collect::<Vec<_>>(), [Some(1), None, None, None, None]);
    for (n, turn) in turns.iter().enumerate() {
        world.runner.sent(&turn.turn_id).await;
        world.runner.complete(&turn.turn_id, &format!("a{n}"));
        let (turn, _) = world.finish(turn).await;
        assert_eq!(turn.status(), TurnStatus::Completed);
    }
    let mut messages = world.messages(&conversation).await;
    messages.sort_by_key(|m| m.position);
    let told: Vec<&str> = messages.iter().map(|m| m.text.as_str()).collect();
    assert_eq!(told, ["q0", "a0", "q1", "a1", "q2", "a2", "q3", "a3", "q4", "a4"]);
    // What each session was told and what it said itself is the whole history, once and in order.
    let opens = world.runner.opens();
    let contexts: Vec<&str> = opens.iter().map(|open| open.context.as_str()).collect();
    let heard = |context: &str| {
        let mut found: Vec<(usize, String)> = Vec::new();
        for n in 0..5 {
            for word in [format!("q{n}"), format!("a{n}")] {
                let line = format!("\n{word}\n");
                assert!(context.matches(&line).count() <= 1, "{word} twice in {context}");
                if let Some(at) = context.find(&line) {
                    found.push((at, word));
                }
            }
        }
        found.sort();
        found.into_iter().map(|(_, word)| word).collect::<Vec<_>>()
    };
    assert_eq!(heard(contexts[0]), Vec::<String>::new());
    assert_eq!(heard(contexts[1]), ["q0", "a0"]);
    assert_eq!(heard(contexts[2]), ["q1", "a1"]);
    assert_eq!(heard(contexts[3]), ["q2", "a2"]);
    assert_eq!(heard(contexts[4]), ["q3", "a3"]);
    assert_eq!(opens[0].session_id, opens[2].session_id, "the first agent's session goes on");
    assert_eq!(opens[1].session_id, opens[3].session_id, "the second agent's too");
}

#[tokio::test]
async fn s2_twenty_clients_with_one_request_id_make_one_turn() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let request = message(&conversation, "once", "builder", "/w/a");
    let calls = (0..20).map(|_| {
        let (mut client, request) = (world.client.clone(), request.clone());
        tokio::spawn(async move { client.send_message(request).await.unwrap().into_inner() })
    });
    let answers = futures::future::join_all(calls).await;
    let turns: Vec<String> =
        answers.iter().map(|a| a.as_ref().unwrap().turn.as_ref().unwrap().turn_id.clone()).collect();
    assert!(turns.iter().all(|turn| *turn == turns[0]), "{turns:?}");
    assert_eq!(answers.iter().filter(|a| !a.as_ref().unwrap().repeated_request).count(), 1);
    let turn = world.turn(&turns[0]).await.turn.unwrap();
    world.finish(&turn).await;
    assert_eq!(world.runner.sends().len(), 1);

    // The same after a restart, with the runner away: the store alone answers.
    world.crash().await;
    world.runner.deaf(true);
    world.restart().await;
    let again = world.client.send_message(request.clone()).await.unwrap().into_inner();
    assert!(again.repeated_request);
    assert_eq!(again.turn.unwrap().status(), TurnStatus::Completed);
    let other = control::SendMessageRequest { text: "twice".into(), ..request };
    let refused = world.client.send_message(other).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::AlreadyExists, "REQUEST_ID_REUSED"));
}

#[tokio::test]
async fn an_external_id_names_one_conversation() {
    let mut world = World::new().await;
    let external_id = control::ExternalId { project: "p".into(), provider: "jira".into(), id: "X-1".into() };
    let request = || control::CreateConversationRequest {
        external_id: Some(external_id.clone()),
        title: "t".into(),
        workspace: "/w/a/".into(),
        agent: "builder".into(),
        ..Default::default()
    };
    let first = world.client.create_conversation(request()).await.unwrap().into_inner();
    let second = world.client.create_conversation(request()).await.unwrap().into_inner();
    assert!(first.created && !second.created);
    let conversation = first.conversation.unwrap();
    assert_eq!(conversation.conversation_id, second.conversation.unwrap().conversation_id);
    let get = control::GetConversationRequest { name: Some(Name::ExternalId(external_id)) };
    let found = world.client.get_conversation(get).await.unwrap().into_inner().conversation.unwrap();
    assert_eq!(found, conversation);
    // Agent and workspace need not be named again.
    let turn = world.send_as(&conversation.conversation_id, "hello", "", "").await;
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed);
    assert_eq!(world.workspace().await.path, "/w/a");
}

#[tokio::test]
async fn wrong_fields_are_named_all_at_once() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let good = || message(&conversation, "x", "builder", "/w/a");
    let table: Vec<(control::SendMessageRequest, Vec<&str>)> = vec![
        (control::SendMessageRequest { text: String::new(), ..good() }, vec!["text"]),
        (control::SendMessageRequest { text: "a\0b".into(), ..good() }, vec!["text"]),
        (control::SendMessageRequest { text: "x".repeat(1024 * 1024 + 1), ..good() }, vec!["text"]),
        (control::SendMessageRequest { conversation_id: "trn_1".into(), ..good() }, vec!["conversation_id"]),
        (control::SendMessageRequest { agent: "../x".into(), ..good() }, vec!["agent"]),
        (control::SendMessageRequest { agent: "-x".into(), ..good() }, vec!["agent"]),
        (control::SendMessageRequest { request_id: "a b".into(), ..good() }, vec!["request_id"]),
        (control::SendMessageRequest { workspace: "relative".into(), ..good() }, vec!["workspace"]),
        (control::SendMessageRequest { actor: "x".repeat(201), ..good() }, vec!["actor"]),
        (
            control::SendMessageRequest { text: String::new(), conversation_id: String::new(), ..good() },
            vec!["conversation_id", "text"],
        ),
    ];
    for (request, fields) in table {
        let status = world.client.send_message(request).await.unwrap_err();
        assert_eq!(
            (status.code(), reason(&status).as_str()),
            (Code::InvalidArgument, "FIELD_INVALID"),
            "{fields:?}"
        );
        let named: Vec<String> = status
            .get_details_bad_request()
            .unwrap()
            .field_violations
            .into_iter()
            .map(|violation| violation.field)
            .collect();
        assert_eq!(named, fields);
    }
    assert!(world.messages(&conversation).await.is_empty(), "nothing of it was stored");
}

#[tokio::test]
async fn what_does_not_exist_is_named() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let nowhere = world.client.send_message(message("cnv_x", "x", "builder", "/w/a")).await.unwrap_err();
    assert_eq!((nowhere.code(), reason(&nowhere).as_str()), (Code::NotFound, "CONVERSATION_NOT_FOUND"));
    let outside =
        world.client.send_message(message(&conversation, "x", "builder", "/etc")).await.unwrap_err();
    assert_eq!((outside.code(), reason(&outside).as_str()), (Code::NotFound, "WORKSPACE_NOT_FOUND"));
    assert_eq!(outside.message(), "refused: WORKSPACE_NOT_FOUND", "the runner says why");
    let runner = message(&conversation, "x", "builder", "nobody:/w/a");
    let runner = world.client.send_message(runner).await.unwrap_err();
    assert_eq!((runner.code(), reason(&runner).as_str()), (Code::NotFound, "RUNNER_NOT_FOUND"));
    let bare = world.client.send_message(message(&conversation, "x", "", "/w/a")).await.unwrap_err();
    assert_eq!((bare.code(), reason(&bare).as_str()), (Code::FailedPrecondition, "TARGET_MISSING"));
    let request = control::GetTurnRequest { turn_id: "trn_x".into() };
    let turn = world.client.get_turn(request).await.unwrap_err();
    assert_eq!((turn.code(), reason(&turn).as_str()), (Code::NotFound, "TURN_NOT_FOUND"));
    let mut sessions = SessionServiceClient::connect(format!("http://{}", world.address())).await.unwrap();
    let request = control::GetSessionRequest { session_id: "ses_x".into() };
    let session = sessions.get_session(request).await.unwrap_err();
    assert_eq!((session.code(), reason(&session).as_str()), (Code::NotFound, "SESSION_NOT_FOUND"));
}

#[tokio::test]
async fn a_runner_that_is_away_is_told_when_a_path_needs_it() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    world.runner.deaf(true);
    let status = world.client.send_message(message(&conversation, "x", "builder", "/w/a")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unavailable, "RUNNER_UNAVAILABLE"));
    assert!(status.get_details_retry_info().is_some());
}

#[tokio::test]
async fn archiving_is_a_flag_and_sending_takes_it_back() {
    let mut world = World::new().await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    let turn = world.send(&conversation, "hello").await;
    let request = control::ArchiveConversationRequest {
        request_id: String::new(),
        conversation_id: conversation.clone(),
        archived: true,
    };
    let archived = world.client.archive_conversation(request).await.unwrap().into_inner();
    assert!(archived.conversation.unwrap().archived);
    let list = control::ListConversationsRequest::default();
    let listed = world.client.list_conversations(list.clone()).await.unwrap().into_inner().conversations;
    assert!(listed.is_empty());
    world.runner.sent(&turn.turn_id).await;
    world.runner.complete(&turn.turn_id, "done");
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed, "a running turn goes on");
    world.send(&conversation, "again").await;
    let listed = world.client.list_conversations(list).await.unwrap().into_inner().conversations;
    assert_eq!(listed.len(), 1);
}

#[tokio::test]
async fn pages_end_and_go_on_and_long_bodies_are_cut_in_lists_only() {
    let mut world = World::new().await;
    let conversation = world.conversation().await;
    let long = "ä".repeat(100_000);
    let turn = world.send(&conversation, &long).await;
    world.finish(&turn).await;
    let listed = world.messages(&conversation).await;
    assert!(listed[0].truncated && listed[0].text.len() <= 64_000);
    let whole = world.turn(&turn.turn_id).await;
    assert_eq!(whole.message.unwrap().text, long);
    assert_eq!(whole.answer.unwrap().text, format!("echo: {long}"));

    for n in 0..3 {
        let turn = world.send(&conversation, &format!("m{n}")).await;
        world.finish(&turn).await;
    }
    let mut turns = Vec::new();
    let mut page_token = String::new();
    loop {
        let request =
            control::ListTurnsRequest { conversation_id: conversation.clone(), page_size: 3, page_token };
        let page = world.client.list_turns(request).await.unwrap().into_inner();
        assert!(page.turns.len() <= 3);
        turns.extend(page.turns.into_iter().map(|turn| turn.turn_id));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(turns.len(), 4);
    assert_eq!(turns.first(), Some(&turn.turn_id), "oldest first");
    let request = control::ListTurnsRequest {
        conversation_id: conversation.clone(),
        page_size: 201,
        page_token: "x".into(),
    };
    let status = world.client.list_turns(request).await.unwrap_err();
    assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "page_size");
    let request = control::ListMessagesRequest { conversation_id: conversation, after: 2, limit: 2 };
    let page = world.client.list_messages(request).await.unwrap().into_inner();
    assert_eq!(page.messages.iter().map(|m| m.seq).collect::<Vec<_>>(), [3, 4]);
    assert!(page.has_more);
    assert_eq!(page.messages[0].role(), Role::User);
}

#[tokio::test]
async fn bad_agents_end_the_turn_with_what_to_do_and_the_next_one_is_promoted() {
    let mut world = World::new().await;
    {
        let mut state = world.runner.state();
        state.agents.insert("typo".into(), agent("typo", "fake", "m", "p").replace("model:", "modell:"));
        state
            .agents
            .insert("off".into(), agent("off", "fake", "m", "p").replace("---\np", "enabled: false\n---\np"));
        state
            .agents
            .insert("web".into(), agent("web", "fake", "m", "p").replace("---\np", "triggers: [ui]\n---\np"));
        state.agents.insert("alien".into(), agent("alien", "other", "m", "p"));
    }
    let conversation = world.conversation().await;
    for (name, word) in [
        ("gone", "no file"),
        ("typo", "modell"),
        ("off", "switched off"),
        ("web", "manual"),
        ("alien", "other"),
    ] {
        let turn = world.send_as(&conversation, "x", name, "/w/a").await;
        let (turn, events) = world.finish(&turn).await;
        assert_eq!(turn.status(), TurnStatus::Failed);
        assert_eq!(failure(&turn), (FailureReason::Configuration, false), "{name}");
        let told = turn.failure.unwrap();
        assert!(told.message.contains(word), "{name}: {}", told.message);
        assert!(!told.next_action.is_empty());
        assert_eq!(events.len(), 1);
    }
    assert!(world.runner.opens().is_empty(), "no engine was started");
    let turn = world.send(&conversation, "hello").await;
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(turn.status(), TurnStatus::Completed);
    assert_eq!(world.workspace().await.held_by_turn_id, "");
}

#[tokio::test]
async fn agents_are_listed_and_bad_files_named_beside_the_good_ones() {
    let mut world = World::new().await;
    {
        let mut state = world.runner.state();
        state.agents.insert("typo".into(), agent("typo", "fake", "m", "p").replace("model:", "modell:"));
        state.unreadable.insert("secret".into(), "permission denied".into());
    }
    let _ = world.conversation().await;
    let mut agents = AgentServiceClient::connect(format!("http://{}", world.address())).await.unwrap();
    let request = control::ListAgentsRequest { workspace: "/w/a".into() };
    let listed = agents.list_agents(request).await.unwrap().into_inner();
    let names: Vec<&str> = listed.agents.iter().map(|a| a.name.as_str()).collect();
    assert_eq!(names, ["builder", "reviewer"]);
    let bad: Vec<&str> = listed.problems.iter().map(|p| p.file_name.as_str()).collect();
    assert!(bad.contains(&"typo.md") && bad.contains(&"secret.md"), "{bad:?}");
    let texts = control::AgentTexts {
        files: vec![control::AgentText {
            file_name: "fast.md".into(),
            content: agent("fast", "fake", "m", "p")
                .replace("---\np", "options:\n  reasoning_effort: ultra\n---\np")
                .into_bytes(),
        }],
    };
    let source = Some(control::validate_agents_request::Source::Texts(texts));
    let checked =
        agents.validate_agents(control::ValidateAgentsRequest { source }).await.unwrap().into_inner();
    assert!(checked.agents.is_empty());
    assert!(checked.problems[0].message.contains("low, high"), "{:?}", checked.problems);
}

#[tokio::test]
async fn an_agent_file_that_never_can_be_read_is_refused_at_once() {
    let mut world = World::new().await;
    {
        let mut state = world.runner.state();
        state.unreadable.insert("link".into(), "is a symlink".into());
        state.unusable.push("link".into());
    }
    let conversation = world.conversation().await;
    let turn = world.send_as(&conversation, "x", "link", "/w/a").await;
    // A file that may be readable in a while is waited for, 60 s: longer than this waits.
    let (turn, _) = world.finish(&turn).await;
    assert_eq!(failure(&turn), (FailureReason::Configuration, false));
    assert!(turn.failure.unwrap().message.contains("is a symlink"));
    assert_eq!(world.workspace().await.held_by_turn_id, "");
}

#[tokio::test]
async fn a_turn_behind_one_whose_agent_cannot_be_read_yet_is_told_who_holds_the_workspace() {
    let mut world = World::new().await;
    world.runner.state().unreadable.insert("later".into(), "permission denied".into());
    let (first, second) = (world.conversation().await, world.conversation().await);
    let holder = world.send_as(&first, "x", "later", "/w/a").await;
    let behind = world.send(&second, "y").await;
    let told = async {
        loop {
            if let Some(waiting) = world.turn(&behind.turn_id).await.waiting {
                return waiting;
            }
        }
    };
    let waiting = tokio::time::timeout(LIMIT, told).await.expect("it is told");
    assert_eq!(waiting.reason(), control::attention::Reason::WaitingForWorkspace);
    assert_eq!(waiting.held_by_turn_id, holder.turn_id);
    {
        let mut state = world.runner.state();
        state.unreadable.clear();
        state.agents.insert("later".into(), agent("later", "fake", "m", "p"));
    }
    assert_eq!(world.finish(&holder).await.0.status(), TurnStatus::Completed);
    assert_eq!(world.finish(&behind).await.0.status(), TurnStatus::Completed);
}

#[tokio::test]
async fn an_agent_beyond_the_end_of_the_list_is_found_and_the_cut_is_told() {
    let mut world = World::new().await;
    world.runner.state().listed = 1;
    let conversation = world.conversation().await;
    let turn = world.send_as(&conversation, "x", "reviewer", "/w/a").await;
    assert_eq!(world.finish(&turn).await.0.status(), TurnStatus::Completed);
    let turn = world.send_as(&conversation, "x", "gone", "/w/a").await;
    let told = world.finish(&turn).await.0.failure.unwrap().message;
    assert!(told.contains("builder, and more"), "{told}");
    let mut agents = AgentServiceClient::connect(format!("http://{}", world.address())).await.unwrap();
    let request = control::ListAgentsRequest { workspace: "/w/a".into() };
    let listed = agents.list_agents(request).await.unwrap().into_inner();
    assert_eq!(listed.agents.len(), 1);
    assert_eq!(listed.problems.len(), 1, "{:?}", listed.problems);
    assert_eq!(listed.problems[0].file_name, ".agents");
}

#[tokio::test]
async fn a_full_queue_says_when_to_try_again() {
    let mut world = World::tuned(|settings| settings.max_waiting = 2).await;
    world.runner.state().reply = Reply::Hold;
    let conversation = world.conversation().await;
    for n in 0..3 {
        world.send(&conversation, &format!("m{n}")).await;
    }
    let status = world.client.send_message(message(&conversation, "x", "builder", "/w/a")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::ResourceExhausted, "QUEUE_FULL"));
    assert!(status.get_details_retry_info().is_some());
}
