//! Connections that are read to their end before they are closed.
//!
//! What a peer sent and nobody read makes the kernel reset a connection that is closed, and the peer then loses what was
//! sent to it last: the end of a stream that it was still reading, for one.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::transport::server::{Connected, TcpConnectInfo};

/// Time that a peer has to close its side once ours is closed.
const LINGER: Duration = Duration::from_secs(1);

/// A connection that takes leave of its peer when it is dropped. Counted by its tracker until it is closed.
#[derive(Debug)]
pub(crate) struct Lingering {
    /// There until the drop.
    stream: Option<TcpStream>,
    counted: TaskTrackerToken,
}

impl Lingering {
    pub(crate) fn new(stream: TcpStream, tracker: &TaskTracker) -> Self {
        Self { stream: Some(stream), counted: tracker.token() }
    }

    fn stream(self: Pin<&mut Self>) -> io::Result<Pin<&mut TcpStream>> {
        self.get_mut().stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        let counted = self.counted.clone();
        if let (Some(mut stream), Ok(runtime)) = (self.stream.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move {
                let _counted = counted;
                let leave = async {
                    stream.shutdown().await?;
                    let mut rest = [0; 4_096];
                    while stream.read(&mut rest).await? > 0 {}
                    io::Result::Ok(())
                };
                // A peer that is gone, or does not leave in time, has nothing more to lose by us.
                let _ = tokio::time::timeout(LINGER, leave).await;
            });
        }
    }
}

impl Connected for Lingering {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        match &self.stream {
            Some(stream) => stream.connect_info(),
            None => TcpConnectInfo { local_addr: None, remote_addr: None },
        }
    }
}

impl AsyncRead for Lingering {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_read(cx, buf)
    }
}

impl AsyncWrite for Lingering {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(cx)
    }
}
