//! Drains a runner's event stream into a bounded buffer, whatever the reader does.
//!
//! A stream that is not read uses up its connection's window and with it every other stream there. So when the buffer
//! is full the stream is given up instead, and resumed by number once the buffer was worked off.

use roundhouse_proto::engine::v1 as engine;
use tokio::sync::mpsc;
use tonic::Streaming;

use crate::runners::CallError;
use crate::runners::link::classify;
use crate::tasks::Tasks;

/// Items between stream and reader: what arrives while the reader waits for a few commits. At most 72 KB each.
const BUFFER: usize = 512;

/// What came.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the small variant comes once per stream")]
pub(super) enum Item {
    /// An item of the stream.
    Message(engine::stream_events_response::Item),
    /// The stream has ended, for this reason if it broke.
    End(Option<CallError>),
}

/// Starts to drain `stream`. The last item is always [`Item::End`], unless the server stops.
pub(super) fn start(
    tasks: &Tasks,
    mut stream: Streaming<engine::StreamEventsResponse>,
) -> mpsc::Receiver<Item> {
    let (sender, receiver) = mpsc::channel(BUFFER);
    tasks.spawn("pump", async move {
        let end = loop {
            let message = tokio::select! {
                message = stream.message() => message,
                () = sender.closed() => return,
            };
            match message {
                Ok(Some(message)) => {
                    let Some(item) = message.item else { continue };
                    match sender.try_send(Item::Message(item)) {
                        Ok(()) => {}
                        Err(mpsc::error::TrySendError::Closed(_)) => return,
                        Err(mpsc::error::TrySendError::Full(_)) => {
                            break Some(CallError::Unreachable("the buffer was full".to_owned()));
                        }
                    }
                }
                Ok(None) => break None,
                Err(status) => break Some(classify(&status)),
            }
        };
        drop(stream);
        // The reader has gone if this fails.
        let _ = sender.send(Item::End(end)).await;
    });
    receiver
}
