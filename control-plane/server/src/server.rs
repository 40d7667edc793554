//! The server from start to stop.

use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use roundhouse_domain::id::ControlPlaneId;
use roundhouse_store::{SqliteStore, Store};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::server::TcpIncoming;
use tonic_health::server::HealthReporter;

use crate::app::App;
use crate::hub::Hub;
use crate::runners::Runners;
use crate::settings::Settings;
use crate::tasks::Tasks;
use crate::{clock, dispatch, grpc, retention};

/// Name of the database in the state directory.
pub const DATABASE: &str = "control-plane.db";

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address to listen on is none.
    #[error("cannot listen on {listen:?}: it is not an address and a port")]
    Address {
        /// What was configured.
        listen: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Anybody who reaches the address could run agents.
    #[error(
        "refusing to listen on {0}: it can be reached from other machines, and calls are neither encrypted nor \
         checked; listen on 127.0.0.1, or pass --insecure-listen if only people you trust with your machine can reach it"
    )]
    NotLoopback(SocketAddr),
    /// The port cannot be had.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The state directory cannot be made.
    #[error("cannot make the state directory {}", path.display())]
    StateDir {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The store cannot be opened.
    #[error("cannot open the store")]
    Store(#[from] roundhouse_store::Error),
    /// A mistake of ours.
    #[error("cannot start: {0}")]
    Internal(String),
}

/// A control plane that listens.
#[derive(Debug)]
pub struct Server {
    app: Arc<App>,
    address: SocketAddr,
    health: HealthReporter,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Server {
    /// Opens the store, listens, and only then picks up what is open: a start is quick however much there is to do.
    ///
    /// # Errors
    /// [`StartError`] says what is in the way and what to do about it.
    pub async fn start(settings: Settings) -> Result<Self, StartError> {
        let listener = listen(&settings).await?;
        let address = listener.local_addr().map_err(|error| StartError::Internal(error.to_string()))?;
        let path = make_state_dir(&settings)?.join(DATABASE);
        let store_settings = roundhouse_store::Settings { max_waiting: settings.max_waiting };
        let store = tokio::task::spawn_blocking(move || SqliteStore::open_with(path, store_settings))
            .await
            .map_err(|error| StartError::Internal(error.to_string()))??;
        if let Some(copy) = store.kept_copy() {
            tracing::info!(copy = %copy.display(), "the database was migrated; a copy of the old one was kept");
        }
        let store: Arc<dyn Store> = Arc::new(store);
        let id = store.control_plane_id(ControlPlaneId::new(clock::uuid())).await?;
        let settings = Arc::new(settings);
        let app = Arc::new(App {
            id,
            store,
            hub: Arc::new(Hub::default()),
            runners: Runners::new(Arc::clone(&settings)),
            dispatcher: dispatch::Dispatcher::default(),
            prefetches: dispatch::Prefetches::default(),
            settings,
            followers: Arc::new(()),
            tasks: Tasks::default(),
        });
        for runner in app.store.list_runners().await? {
            app.runners.restore(&runner);
        }
        // Subscribed before anything is picked up, so that nothing falls between the two.
        let hints = app.store.hints();
        let (router, health) =
            grpc::router(Arc::clone(&app)).await.map_err(|error| StartError::Internal(error.to_string()))?;
        let (stop, stopped) = oneshot::channel::<()>();
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let serving = tokio::spawn(router.serve_with_incoming_shutdown(incoming, async move {
            // A sender that was dropped stops the server, too.
            let _ = stopped.await;
        }));
        app.tasks.spawn("retention", retention::keep_up(Arc::clone(&app)));
        app.tasks.spawn("follow", dispatch::follow(Arc::clone(&app), hints));
        Ok(Self { app, address, health, stop: Some(stop), serving })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The id of this control plane.
    #[must_use]
    pub fn control_plane_id(&self) -> &str {
        self.app.id.as_str()
    }

    /// How many clients follow a conversation at present.
    #[must_use]
    pub fn followers(&self) -> usize {
        // The app holds one itself.
        Arc::strong_count(&self.app.followers) - 1
    }

    /// Stops: open streams are told to come back, open calls may finish within the configured time, turns go on in
    /// their runners. Everything that was answered is on disk.
    pub async fn shutdown(mut self) {
        grpc::going_away(&self.health).await;
        tracing::info!(turns = self.app.dispatcher.len(), "stopping; turns go on in their runners");
        self.app.tasks.stop().await;
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        let limit = self.app.settings.shutdown_timeout;
        if tokio::time::timeout(limit, &mut self.serving).await.is_err() {
            tracing::warn!("calls were still open at the end of the time for them; they are cut off");
            self.serving.abort();
        }
        self.app.store.close().await;
    }

    /// Stops at once wherever everything is, as a crash would: for tests of recovery.
    pub async fn crash(mut self) {
        self.serving.abort();
        let _ = (&mut self.serving).await;
        self.app.tasks.stop().await;
        self.app.store.close().await;
    }

    /// Waits until the server stops by itself, which is a failure.
    pub async fn failed(&mut self) -> String {
        match (&mut self.serving).await {
            Ok(Ok(())) => "it stopped listening".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        }
    }
}

async fn listen(settings: &Settings) -> Result<TcpListener, StartError> {
    let unusable = |source: std::io::Error| StartError::Address { listen: settings.listen.clone(), source };
    let mut addresses = tokio::net::lookup_host(&settings.listen).await.map_err(unusable)?;
    let address = addresses
        .next()
        .ok_or_else(|| unusable(std::io::Error::new(std::io::ErrorKind::NotFound, "no address")))?;
    if !address.ip().is_loopback() {
        if !settings.insecure_listen {
            return Err(StartError::NotLoopback(address));
        }
        tracing::warn!(
            %address,
            "LISTENING WITHOUT PROTECTION: whoever reaches this address can run agents on every runner"
        );
    }
    TcpListener::bind(address).await.map_err(|source| StartError::Listen { address, source })
}

fn make_state_dir(settings: &Settings) -> Result<PathBuf, StartError> {
    let path = settings.state_dir.clone();
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&path)
        .map_err(|source| StartError::StateDir { path: path.clone(), source })?;
    Ok(path)
}

/// Longest time between a signal to stop and the end, beside the time for open calls.
pub(crate) const STOP_LIMIT: Duration = Duration::from_secs(10);
