//! A control plane and two runners, each on a host of its own as far as the network goes.
//!
//! ```text
//!                      hub: the test, 10.77.0.1, with a bridge
//!          +--------------------+--------------------+
//!   control plane           runner 1             runner 2
//!   10.77.0.2:7450          10.77.0.11:7460      10.77.0.12:7460
//!                           model on loopback    model on loopback
//! ```
//!
//! Each is in a network namespace, joined to the bridge by a cable ([`Host::cut`], [`Host::join`]). The model that a
//! runner's engines ask is on the runner's own loopback, so that an engine works on while its host is cut off. The hub
//! is a namespace, too: nothing of the machine, nor of a test beside this one, is touched.

use std::{
    future::Future,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use roundhouse_models::{ModelServer, Models, Options};
use roundhouse_proto::control::v1::{ListRunnersRequest, Runner, runner::State};
use tempfile::TempDir;
use tokio::sync::oneshot;

use crate::{
    Control, NORMAL, Service, Spec, StackOptions, TestLog, Workspace, bins,
    netns::{Namespace, run},
    network,
    stack::{Engines, KEEP, end_all, environment, write_config},
    wait_for,
};

/// Where the control plane is reached.
const CONTROL_PLANE: &str = "10.77.0.2:7450";
/// The variable by which a runner's host is named; set another for the next start to rename the host.
pub const HOST_NAME: &str = "TEST_HOST_NAME";

/// A control plane and two runners on hosts of their own.
#[derive(Debug)]
pub struct Hosts {
    /// The control plane.
    pub control_plane: Service,
    /// Clients of the control plane.
    pub control: Control,
    /// The hosts of the runners, `host-1` and `host-2`.
    pub runners: [Host; 2],
    /// The test's log.
    pub log: TestLog,
    control_plane_host: Namespace,
    root: Option<TempDir>,
    root_path: PathBuf,
}

/// A host with a runner.
#[derive(Debug)]
pub struct Host {
    /// The runner.
    pub runner: Service,
    /// A workspace under its root.
    pub workspace: Workspace,
    /// The model on this host.
    pub model: Models,
    name: &'static str,
    address: String,
    namespace: Namespace,
    // Dropped: the model stops.
    _stop_model: oneshot::Sender<()>,
}

/// Runs a test with a control plane and two runners, each with its own options, and takes them down again.
///
/// # Errors
/// If they do not start; else what the test answers.
pub fn with_hosts<F, Fut>(options: [StackOptions; 2], test: F) -> anyhow::Result<()>
where
    F: FnOnce(Hosts) -> Fut + Send + 'static,
    Fut: Future<Output = anyhow::Result<()>>,
{
    network::require_loopback_only()?;
    let hub = Namespace::create()?;
    hub.run(&["ip", "link", "add", "bridge", "type", "bridge"])?;
    hub.run(&["ip", "address", "add", "10.77.0.1/24", "dev", "bridge"])?;
    hub.run(&["ip", "link", "set", "bridge", "up"])?;
    hub.block_on(move || async move { test(Hosts::start(options).await?).await })
}

/// A host that is joined to the bridge. Called in the hub.
fn host(cable: &str, address: &str) -> anyhow::Result<Namespace> {
    let namespace = Namespace::create()?;
    let pid = namespace.pid().to_string();
    run(&["ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", &pid])?;
    run(&["ip", "link", "set", cable, "master", "bridge", "up"])?;
    namespace.run(&["ip", "address", "add", &format!("{address}/24"), "dev", "eth0"])?;
    namespace.run(&["ip", "link", "set", "eth0", "up"])?;
    Ok(namespace)
}

/// A scripted model on the loopback of a host, on threads there, until the sender is dropped.
async fn model(namespace: &Namespace) -> anyhow::Result<(Models, String, oneshot::Sender<()>)> {
    let (started, start) = oneshot::channel();
    let (stop, stopped) = oneshot::channel::<()>();
    // The namespace itself is not moved: whoever holds its file is in it.
    let path = namespace.path();
    std::thread::Builder::new().name("model".to_owned()).spawn(move || {
        let serve = || async move {
            let server = ModelServer::start(Options::default()).await.context("the model does not start")?;
            // Nobody waits any more if the test has ended meanwhile.
            let _ = started.send((server.models().clone(), server.base_url()));
            let _ = stopped.await;
            server.stop().await;
            Ok(())
        };
        Namespace::block_on_path(&path, serve)
    })?;
    let (models, url) = start.await.context("the model ended before it was ready")?;
    Ok((models, url, stop))
}

impl Hosts {
    async fn start(options: [StackOptions; 2]) -> anyhow::Result<Self> {
        let root =
            tempfile::Builder::new().prefix("roundhouse-e2e-").tempdir().context("no temporary directory")?;
        let root_path = root.path().canonicalize().context("the temporary directory is gone")?;
        let log = TestLog::create(&root_path.join("test.log"))?;

        let control_plane_host = host("cable-0", "10.77.0.2")?;
        let place = place(&root_path, "control-plane-host")?;
        let config = place.join("roundhouse.toml");
        // It knows no engine; what the file says of one is not looked at.
        write_config(&config, &place, &Engines::none(), "", &options[0])?;
        let mut args = control_plane_host.enter();
        args.push(bins::bin("control-plane")?.display().to_string());
        args.extend(["--config".to_owned(), config.display().to_string(), "--insecure-listen".to_owned()]);
        let spec = Spec {
            name: "control-plane".to_owned(),
            program: PathBuf::from(args.remove(0)),
            args,
            env: environment(&place),
        };
        let control_plane = Service::start_on(spec, CONTROL_PLANE, log.clone()).await?;
        let control = Control::new(&control_plane.url())?;
        let [one, two] = options;
        let runners = [
            Host::start("host-1", "10.77.0.11", &root_path, one, &log).await?,
            Host::start("host-2", "10.77.0.12", &root_path, two, &log).await?,
        ];
        let hosts =
            Self { control_plane, control, runners, log, control_plane_host, root: Some(root), root_path };
        for host in &hosts.runners {
            hosts.wait_state(host.name, State::Online).await?;
        }
        Ok(hosts)
    }

    /// The runners as the control plane lists them, by id.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn list(&self) -> anyhow::Result<Vec<Runner>> {
        let answer =
            self.control.runners().list_runners(ListRunnersRequest {}).await.context("ListRunners")?;
        Ok(answer.into_inner().runners)
    }

    /// Waits until the control plane finds the runner of this host in this state.
    ///
    /// # Errors
    /// If it does not.
    pub async fn wait_state(&self, hostname: &str, state: State) -> anyhow::Result<Runner> {
        wait_for(&format!("the runner on {hostname} is {}", state.as_str_name()), NORMAL, || async {
            let runners = self.list().await?;
            Ok(runners.into_iter().find(|one| one.hostname == hostname && one.state() == state))
        })
        .await
    }

    /// Whether the control plane's host or this one still takes a connection between them for alive.
    ///
    /// # Errors
    /// If it cannot be told.
    pub fn connected(&self, host: &Host) -> anyhow::Result<bool> {
        let established = ["ss", "-Htn", "state", "established", "dst"];
        let (there, _) = CONTROL_PLANE.split_once(':').context("an address without a port")?;
        let from_here = self.control_plane_host.run(&[&established[..], &[&host.address]].concat())?;
        let from_there = host.namespace.run(&[&established[..], &[there]].concat())?;
        Ok(!from_here.is_empty() || !from_there.is_empty())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        end_all(&self.root_path);
        if std::env::var_os(KEEP).is_some()
            && let Some(root) = self.root.take()
        {
            let kept = root.keep();
            eprintln!("kept {}; the log is {}", kept.display(), self.log.path().display());
        }
    }
}

/// The directory of a host: what is a machine's own elsewhere.
fn place(root: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let place = root.join(name);
    for directory in ["home", "tmp", "work"] {
        std::fs::create_dir_all(place.join(directory)).with_context(|| format!("cannot make {directory}"))?;
    }
    Ok(place)
}

impl Host {
    async fn start(
        name: &'static str,
        address: &str,
        root: &Path,
        options: StackOptions,
        log: &TestLog,
    ) -> anyhow::Result<Self> {
        let namespace = host(name, address)?;
        let (model, model_url, stop_model) = model(&namespace).await?;
        let place = place(root, name)?;
        let workspace = Workspace::create(&place.join("work/project"), &options.agents)?;
        let engines = Engines::of(&options)?;
        let config = place.join("roundhouse.toml");
        write_config(&config, &place, &engines, &model_url, &options)?;
        let mut args = namespace.enter();
        let named = format!("hostname \"${HOST_NAME}\" && exec \"$@\"");
        let in_order = ["unshare", "--uts", "--", "sh", "-c", &named, "host"].map(str::to_owned);
        args.extend(in_order);
        args.push(bins::bin("engine-runner")?.display().to_string());
        args.extend(["--config".to_owned(), config.display().to_string(), "--insecure-listen".to_owned()]);
        args.extend(["--control-plane".to_owned(), format!("http://{CONTROL_PLANE}")]);
        args.extend(["--advertise".to_owned(), format!("http://{address}:7460")]);
        let mut env = environment(&place);
        env.insert(HOST_NAME.to_owned(), name.to_owned());
        let spec = Spec { name: name.to_owned(), program: PathBuf::from(args.remove(0)), args, env };
        let runner = Service::start_on(spec, &format!("{address}:7460"), log.clone()).await?;
        let address = address.to_owned();
        Ok(Self { runner, workspace, model, name, address, namespace, _stop_model: stop_model })
    }

    /// The workspace as the API takes it while the host has its first name.
    #[must_use]
    pub fn workspace_name(&self) -> String {
        format!("{}:{}", self.name, self.workspace.path().display())
    }

    /// Pulls the cable.
    ///
    /// # Errors
    /// If it is not there.
    pub fn cut(&self) -> anyhow::Result<()> {
        run(&["ip", "link", "set", self.name, "down"]).map(drop)
    }

    /// Puts the cable back.
    ///
    /// # Errors
    /// If it is not there.
    pub fn join(&self) -> anyhow::Result<()> {
        run(&["ip", "link", "set", self.name, "up"]).map(drop)
    }
}
