//! Background tasks that end with the server, all of them, wherever they wait.

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The tasks of one server.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tasks {
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl Tasks {
    /// Runs a task until it ends or the server stops; then it is dropped where it waits, which is safe because all
    /// that counts is in the store.
    pub(crate) fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        let handle = self.tracker.spawn(async move {
            stop.run_until_cancelled_owned(task).await;
        });
        // A panic in a task is logged and takes nothing else down.
        self.tracker.spawn(async move {
            if let Err(error) = handle.await
                && error.is_panic()
            {
                tracing::error!(task = name, "a task panicked");
            }
        });
    }

    /// Stops all tasks and waits until they are gone.
    pub(crate) async fn stop(&self) {
        self.stop.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}
