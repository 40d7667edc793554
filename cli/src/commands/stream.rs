//! `events`: what happens in a conversation.

use crate::args::EventsArgs;
use crate::client::{self, Client};
use crate::events::{Follower, Next, Wish, render};
use crate::exit::Exit;
use crate::interrupts::Interrupts;
use crate::json;
use crate::output::Output;
use crate::status::Failure;

pub(crate) async fn run(client: Client, args: EventsArgs, output: Output) -> Result<Exit, Failure> {
    let wish = Wish {
        conversation_id: client.conversation_id(&args.conversation).await?,
        turn_id: args.turn.map(client::turn_id).transpose()?,
        after: args.after.unwrap_or_default(),
        partials: args.partials,
        follow: args.follow,
    };
    let mut interrupts = Interrupts::new()?;
    let mut follower = Follower::new(client, wish);
    loop {
        let next = tokio::select! {
            next = follower.next() => next?,
            _ = interrupts.next() => {
                go_on(&follower, output);
                return Ok(Exit::Cancelled);
            }
        };
        match next {
            Next::Item(item) => {
                if output.is_json() {
                    output.item(&json::stream_item(&item));
                } else if let Some(line) = render::item(&item) {
                    output.data(&line);
                }
            }
            Next::Lost(failure) => output.note(&format!("{}; taking the stream up again", failure.message)),
            Next::Back => output.note("the stream goes on"),
            Next::End => {
                if !args.follow {
                    go_on(&follower, output);
                }
                return Ok(Exit::Done);
            }
        }
    }
}

/// How to see what comes after what was shown.
fn go_on(follower: &Follower, output: Output) {
    if !output.is_json() && !follower.cursor().is_empty() {
        output.note(&format!("what comes next: --after {}", follower.cursor()));
    }
}
