//! Texts as large and as strange as they may be: both engines' models get them byte for byte, and so does who asks for
//! them again.

use anyhow::{Context as _, ensure};
use roundhouse_proto::{
    control::v1::{Role, stream_events_response::Item},
    engine::v1::{Outcome, event_body::Kind},
};
use roundhouse_test_support::{Agent, Control, NORMAL, Stack, StackOptions, reason_of};
use tonic::{Code, codegen::http::uri::PathAndQuery};

use crate::{answer_of, expect_outcome};

/// The longest user message.
const MEBIBYTE: usize = 1 << 20;
/// Where lists and events cut a text.
const LISTED: usize = 64_000;

/// Code points of every plane, of its beginning and its end: control and private characters, those that join, hide or turn
/// around what stands beside them, and those that will never be characters. No NUL.
fn every_plane() -> String {
    let mut text = String::new();
    for plane in 0..=16_u32 {
        let spread = (0..64).map(|n| n * 0x400 + 0x21);
        let code_points = spread.chain([0xfffd, 0xfffe, 0xffff]).map(|low| plane * 0x1_0000 + low);
        text.extend(code_points.filter_map(char::from_u32));
        text.push('\n');
    }
    text.extend((1..0x20).chain(0x7f..0xa0).filter_map(char::from_u32));
    text.push_str("\u{ad}\u{200b}\u{200d}\u{200e}\u{202e}\u{2028}\u{2029}\u{2066}\u{feff}e\u{301}\u{fe0f}");
    text.extend((0xe_0000..0xe_0080).filter_map(char::from_u32));
    text.push_str("\r\n\r\n\t \\u0000 \\ \" </user> \u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}\n");
    text
}

/// A mebibyte of numbered lines around every plane of Unicode, so that a line that is lost, doubled or moved is seen.
fn large(head: &str) -> String {
    let mut text = format!("{head}\n{}", every_plane());
    let mut n = 0;
    while text.len() + 64 < MEBIBYTE {
        n += 1;
        text.push_str(&format!("line {n:06}: größer, 漢字 und \u{1f980}\n"));
    }
    let rest = MEBIBYTE - text.len();
    text.push_str(&"x".repeat(rest));
    text
}

/// Where two texts part, for a message that can be read.
fn parting(sent: &str, got: &str) -> String {
    let same = sent.bytes().zip(got.bytes()).take_while(|(a, b)| a == b).count();
    let around = |text: &str| {
        let bytes = text.as_bytes();
        String::from_utf8_lossy(&bytes[same.saturating_sub(20)..(same + 40).min(bytes.len())]).into_owned()
    };
    format!("they part at byte {same}: {:?} was sent, {:?} came", around(sent), around(got))
}

async fn arrives_and_comes_back(agent: Agent) -> anyhow::Result<()> {
    let stack = Stack::start_with(StackOptions::default().agents(&[agent])).await?;
    let conversation = stack.conversation().await?;
    let follower = stack.control.follow(&conversation);
    let head = "[[text:read it all]] what is to be read";
    let text = large(head);
    ensure!(text.len() == MEBIBYTE);
    let turn = stack.control.begin(&conversation, &text).await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    ensure!(answer_of(&got) == "read it all");

    // At the model.
    let requests = stack.model.requests_for("what is to be read");
    ensure!(requests.len() == 1, "{} requests", requests.len());
    let texts = requests[0].conversation().texts();
    let (_, arrived) =
        texts.into_iter().find(|(_, t)| t.starts_with(head)).context("the text at the model")?;
    ensure!(arrived == text, "on its way to the model: {}", parting(&text, &arrived));

    // From the control plane: whole with its turn, cut and said so in lists and streams.
    let whole = got.message.context("the message")?.text;
    ensure!(whole == text, "in GetTurn: {}", parting(&text, &whole));
    let listed = stack.control.messages(&conversation).await?;
    let followed = follower.items().into_iter().filter_map(|item| match item.item {
        Some(Item::Message(message)) => Some(message),
        _ => None,
    });
    for message in listed.into_iter().chain(followed).filter(|message| message.role() == Role::User) {
        ensure!(message.truncated && message.text.len() > LISTED - 4 && message.text.len() <= LISTED);
        ensure!(text.starts_with(&message.text), "in a list: {}", parting(&text, &message.text));
    }

    // And the other way: what the model says, in the event, in the answer and in the list.
    let said: String = every_plane().chars().filter(|c| !c.is_control()).collect();
    ensure!(said.len() < LISTED);
    let turn = stack.control.begin(&conversation, &format!("[[text:{said}]] say it back")).await?;
    let got = expect_outcome(&stack, &follower, &turn, Outcome::Completed).await?;
    ensure!(answer_of(&got) == said, "in the answer: {}", parting(&said, answer_of(&got)));
    let events = follower.kinds(&turn).into_iter().filter_map(|kind| match kind {
        Kind::Text(text) => Some(text.text),
        _ => None,
    });
    let events: String = events.collect();
    ensure!(events == said, "in the event: {}", parting(&said, &events));
    let last = stack.control.messages(&conversation).await?.pop().context("messages")?;
    ensure!(last.text == said && !last.truncated, "in the list: {}", parting(&said, &last.text));
    Ok(())
}

#[tokio::test]
async fn a_mebibyte_of_every_plane_reaches_claude_codes_model_byte_for_byte() -> anyhow::Result<()> {
    arrives_and_comes_back(Agent::new("builder")).await
}

#[tokio::test]
async fn a_mebibyte_of_every_plane_reaches_codex_model_byte_for_byte() -> anyhow::Result<()> {
    arrives_and_comes_back(Agent::codex("builder")).await
}

/// SendMessageRequest with bytes in the place of text, as a client in a language of loose strings may send it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
struct Loose {
    #[prost(string, tag = "1")]
    request_id: String,
    #[prost(string, tag = "2")]
    conversation_id: String,
    #[prost(bytes = "vec", tag = "3")]
    text: Vec<u8>,
}

async fn send_loose(control: &Control, conversation: &str, text: &[u8]) -> Result<(), tonic::Status> {
    let request = Loose {
        request_id: uuid::Uuid::new_v4().to_string(),
        conversation_id: conversation.to_owned(),
        text: text.to_vec(),
    };
    let mut client = tonic::client::Grpc::new(control.channel());
    client.ready().await.map_err(|error| tonic::Status::unknown(error.to_string()))?;
    let codec =
        tonic_prost::ProstCodec::<Loose, roundhouse_proto::control::v1::SendMessageResponse>::default();
    let path = PathAndQuery::from_static("/roundhouse.control.v1.ConversationService/SendMessage");
    client.unary(tonic::Request::new(request), path, codec).await.map(drop)
}

#[tokio::test]
async fn what_is_no_text_is_refused_and_leaves_nothing() -> anyhow::Result<()> {
    let stack = Stack::start_with(StackOptions::default().fake_engine()?).await?;
    let conversation = stack.conversation().await?;
    let status = send_loose(&stack.control, &conversation, b"a\0b").await.expect_err("NUL is refused");
    ensure!(status.code() == Code::InvalidArgument && reason_of(&status) == "FIELD_INVALID", "{status:?}");
    // A surrogate by itself, half a character, an overlong one, one beyond Unicode.
    for bytes in [&b"\xed\xa0\x80"[..], b"\xf0\x9f\xa6", b"\xc0\xaf", b"\xf4\x90\x80\x80"] {
        let status = send_loose(&stack.control, &conversation, bytes).await.expect_err("no UTF-8");
        ensure!(status.code() == Code::Internal || status.code() == Code::InvalidArgument, "{status:?}");
        ensure!(status.message().contains("UTF-8"), "it says what is wrong: {status:?}");
    }
    ensure!(stack.control.messages(&conversation).await?.is_empty(), "nothing was stored");
    // Bytes that are text are taken through the same door.
    send_loose(&stack.control, &conversation, "[[text:fine]] \u{10ffff}".as_bytes()).await?;
    let turn = stack.control.turns(&conversation).await?.pop().context("a turn")?;
    ensure!(answer_of(&stack.control.wait_end(&turn.turn_id, NORMAL).await?) == "fine");
    Ok(())
}
