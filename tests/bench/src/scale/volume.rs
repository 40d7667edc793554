//! Many conversations and events: the cost of each must not grow with those that are there.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use roundhouse_proto::control::v1::conversation_service_client::ConversationServiceClient;
use roundhouse_proto::control::v1::{
    GetConversationRequest, ListConversationsRequest, ListMessagesRequest, ListPermissionsRequest,
    ListTurnsRequest, ListWorkspacesRequest, StreamEventsRequest, get_conversation_request,
};
use tonic::transport::Channel;

use super::runner::Scripted;
use super::{ControlPlane, LIMIT, Sizes, create, follow, send};
use crate::stats::Series;
use crate::{Bounds, memory, millis};

/// Parts of the whole, of which the first and the last are compared.
const SLICES: usize = 10;
/// Clients that work at once.
const CLIENTS: usize = 16;
/// Calls of each kind that are timed.
const CALLS: usize = 30;

pub(crate) async fn measure(bin_dir: &Path, sizes: Sizes, bounds: &mut Bounds) -> Result<()> {
    let mut server = ControlPlane::start(bin_dir).await?;
    let runner = Scripted::start(&server.url()).await?;
    server.wait_runner().await?;
    // The opening and the end of a turn are events, too.
    let texts = (sizes.events / sizes.conversations).saturating_sub(4);
    println!("\n{} conversations, {} events:", sizes.conversations, sizes.events);
    println!("\n| after events | events/s | database MB | control plane Pss MB |\n|---|---|---|---|");
    let mut conversations = Vec::new();
    let mut events = 0;
    let mut rates = Vec::new();
    for slice in 0..SLICES {
        let begin = Instant::now();
        let made = tokio::time::timeout(LIMIT, pour(&server, slice, sizes, texts)).await??;
        let count: usize = made.iter().map(|(_, events)| events).sum();
        let rate = count as f64 / begin.elapsed().as_secs_f64();
        events += count;
        conversations.extend(made.into_iter().map(|(conversation, _)| conversation));
        rates.push(rate);
        let pss = memory::pss(server.pid()?)?;
        println!("| {events} | {rate:.0} | {:.0} | {pss:.1} |", server.database()?);
    }
    // The middle one of three each: a slice is a second or less, and a busy machine has worse ones.
    let middle = |rates: &[f64]| {
        let mut sorted = rates.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    let (first, last) = (middle(&rates[..3]), middle(&rates[SLICES - 3..]));
    bounds.at_most("the first tenths of the events against the last, by rate", first / last, 1.6);
    let pss = memory::pss(server.pid()?)?;
    bounds.at_most("MB of the control plane after all events", pss, 80.0);

    println!("\n| call | median ms | max |\n|---|---|---|");
    pages(&server, &conversations, sizes, bounds).await?;
    replay(&server, sizes, bounds).await?;

    server.kill().await?;
    let ready = server.start_again().await?;
    println!("| ready again after kill -9 | {:.0} | |", millis(ready));
    bounds.at_most("milliseconds until it is ready again", millis(ready), 1_000.0);
    server.wait_runner().await?;
    drop(runner);
    server.kill().await
}

/// One slice: conversations are made, and a turn with its events runs in each.
async fn pour(
    server: &ControlPlane,
    slice: usize,
    sizes: Sizes,
    texts: usize,
) -> Result<Vec<(String, usize)>> {
    let each = sizes.conversations / SLICES;
    let mut clients = tokio::task::JoinSet::new();
    for n in 0..CLIENTS {
        let mut client = server.client();
        clients.spawn(async move {
            let mut made = Vec::new();
            for at in (n..each).step_by(CLIENTS) {
                let workspace = format!("/w/{}", slice * each + at);
                let conversation = create(&mut client, workspace).await?;
                let turn = send(&mut client, &conversation, format!("events={texts}")).await?;
                let events = follow(&mut client, &conversation, &turn).await?;
                if events != texts + 4 {
                    bail!("{events} events where {} were told", texts + 4);
                }
                made.push((conversation, events));
            }
            anyhow::Ok(made)
        });
    }
    let mut all = Vec::new();
    while let Some(made) = clients.join_next().await {
        all.extend(made??);
    }
    Ok(all)
}

/// Times a call, so many times, each with its number.
async fn timed<F>(name: &str, times: usize, call: impl Fn(usize) -> F) -> Result<Duration>
where
    F: Future<Output = Result<()>>,
{
    let mut series = Series::default();
    for n in 0..times {
        let begin = Instant::now();
        call(n).await?;
        series.push(begin.elapsed());
    }
    println!("| {name} | {:.1} | {:.1} |", millis(series.median()), millis(series.max()));
    Ok(series.median())
}

/// A page of conversations after this token; the next one's token.
async fn page(client: &mut ConversationServiceClient<Channel>, token: String) -> Result<(usize, String)> {
    let request = ListConversationsRequest { page_size: 200, page_token: token, ..Default::default() };
    let answer = client.list_conversations(request).await?.into_inner();
    Ok((answer.conversations.len(), answer.next_page_token))
}

async fn pages(
    server: &ControlPlane,
    conversations: &[String],
    sizes: Sizes,
    bounds: &mut Bounds,
) -> Result<()> {
    let client = server.client();
    // All pages, one after the other: a late one costs what an early one does.
    let (mut token, mut seen, mut tokens) = (String::new(), 0, Vec::new());
    loop {
        tokens.push(token.clone());
        let (count, next) = page(&mut client.clone(), token).await?;
        seen += count;
        if next.is_empty() {
            break;
        }
        token = next;
    }
    if seen != sizes.conversations {
        bail!("{seen} conversations are listed where {} are", sizes.conversations);
    }
    let late = tokens[tokens.len().saturating_sub(2)].clone();
    let first = timed("first page of 200 conversations", CALLS, |_| {
        let mut client = client.clone();
        async move { page(&mut client, String::new()).await.map(drop) }
    })
    .await?;
    let last = timed("last full page of 200 conversations", CALLS, |_| {
        let (mut client, late) = (client.clone(), late.clone());
        async move { page(&mut client, late).await.map(drop) }
    })
    .await?;
    bounds.at_most("milliseconds of a page of conversations", millis(first.max(last)), 100.0);
    let some = |n: usize| conversations[n * 7919 % conversations.len()].clone();
    let get = timed("GetConversation", CALLS, |n| {
        let (mut client, conversation_id) = (client.clone(), some(n));
        async move {
            let name = get_conversation_request::Name::ConversationId(conversation_id);
            let request = GetConversationRequest { name: Some(name) };
            client.get_conversation(request).await?;
            Ok(())
        }
    })
    .await?;
    let lists = timed("ListMessages and ListTurns of one", CALLS, |n| {
        let (mut client, conversation_id) = (client.clone(), some(n));
        async move {
            let request =
                ListMessagesRequest { conversation_id: conversation_id.clone(), ..Default::default() };
            client.list_messages(request).await?;
            let request = ListTurnsRequest { conversation_id, ..Default::default() };
            client.list_turns(request).await?;
            Ok(())
        }
    })
    .await?;
    let permissions = timed("ListPermissions, all open ones", CALLS, |_| {
        let mut client = client.clone();
        async move {
            client.list_permissions(ListPermissionsRequest::default()).await?;
            Ok(())
        }
    })
    .await?;
    bounds.at_most("milliseconds of a look at one conversation", millis(get.max(lists)), 20.0);
    bounds.at_most("milliseconds of the list of open permissions", millis(permissions), 20.0);
    timed("ListWorkspaces, all", 5, |_| {
        let mut runners = server.runners();
        async move {
            runners.list_workspaces(ListWorkspacesRequest::default()).await?;
            Ok(())
        }
    })
    .await?;
    let replays = timed("replay of one conversation", CALLS, |n| {
        let (mut client, conversation) = (client.clone(), some(n));
        async move { from(&mut client, &conversation, String::new()).await.map(drop) }
    })
    .await?;
    bounds.at_most("milliseconds of the replay of a short conversation", millis(replays), 100.0);
    Ok(())
}

/// What is stored of a conversation after a cursor: the number of items, the cursor in their middle, and the last one.
async fn from(
    client: &mut ConversationServiceClient<Channel>,
    conversation: &str,
    after_cursor: String,
) -> Result<Vec<String>> {
    let request = StreamEventsRequest {
        conversation_id: conversation.to_owned(),
        after_cursor,
        follow: Some(false),
        ..Default::default()
    };
    let mut stream = client.stream_events(request).await?.into_inner();
    let mut cursors = Vec::new();
    while let Some(item) = stream.message().await? {
        cursors.push(item.cursor);
    }
    Ok(cursors)
}

/// Two long conversations, one ten times as long as the other: replay costs the same for each event, and to go on from a
/// late cursor costs nothing for what lies before it.
async fn replay(server: &ControlPlane, sizes: Sizes, bounds: &mut Bounds) -> Result<()> {
    let mut client = server.client();
    let mut each = Vec::new();
    for events in [sizes.events / 100, sizes.events / 10] {
        let conversation = create(&mut client, format!("/w/long-{events}")).await?;
        let turn = send(&mut client, &conversation, format!("events={events}")).await?;
        tokio::time::timeout(LIMIT, follow(&mut client, &conversation, &turn)).await??;
        let mut series = Series::default();
        let mut cursors = Vec::new();
        for _ in 0..5 {
            let begin = Instant::now();
            cursors = from(&mut client, &conversation, String::new()).await?;
            series.push(begin.elapsed());
        }
        if cursors.len() < events {
            bail!("{} items where {events} events are", cursors.len());
        }
        let median = series.median();
        let rate = cursors.len() as f64 / median.as_secs_f64();
        println!("| replay of {events} events, {rate:.0} a second | {:.0} | |", millis(median));
        // The quickest one: what another program took of the machine meanwhile is no cost of the replay.
        each.push(series.min().as_secs_f64() / cursors.len() as f64);
        let late = cursors[cursors.len() - 100].clone();
        let late = timed(&format!("the last 99 of {events}"), CALLS, |_| {
            let (mut client, conversation, late) = (client.clone(), conversation.clone(), late.clone());
            async move { from(&mut client, &conversation, late).await.map(drop) }
        })
        .await?;
        bounds.at_most("milliseconds to go on from a late cursor", millis(late), 50.0);
    }
    bounds.at_most("an event in a replay ten times as long", each[1] / each[0], 2.0);
    Ok(())
}
