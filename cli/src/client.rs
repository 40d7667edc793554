//! The connection to the control plane, and what is common to all calls.

use std::path::Path;
use std::time::Duration;

use roundhouse_proto::MAX_MESSAGE_BYTES;
use roundhouse_proto::control::v1 as control;
use roundhouse_proto::control::v1::agent_service_client::AgentServiceClient;
use roundhouse_proto::control::v1::conversation_service_client::ConversationServiceClient;
use roundhouse_proto::control::v1::runner_service_client::RunnerServiceClient;
use roundhouse_proto::control::v1::session_service_client::SessionServiceClient;
use roundhouse_proto::control::v1::summary_service_client::SummaryServiceClient;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::interceptor::{InterceptedService, Interceptor};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::exit::Exit;
use crate::status::Failure;

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a call may take that is no stream. Longer than the server's own waits for a runner.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(90);
const KEEPALIVE: Duration = Duration::from_secs(10);

/// The connection as the calls see it.
pub(crate) type Wire = InterceptedService<Channel, Bearer>;

/// Puts the token, if there is one, into every call.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bearer(Option<MetadataValue<Ascii>>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(bearer) = &self.0 {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        Ok(request)
    }
}

/// The public API of one control plane.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    wire: Wire,
}

impl Client {
    /// Prepares a connection without a token; it is made by the first call.
    ///
    /// # Errors
    /// When the URL is none that can be used.
    pub(crate) fn new(server: &str) -> Result<Self, Failure> {
        Self::with_bearer(server, None)
    }

    /// The same with what goes as `authorization` with every call.
    ///
    /// # Errors
    /// As [`Client::new`].
    pub(crate) fn with_bearer(server: &str, bearer: Option<MetadataValue<Ascii>>) -> Result<Self, Failure> {
        let url = if server.contains("://") { server.to_owned() } else { format!("http://{server}") };
        if url.starts_with("https://") {
            return Err(Failure::new(Exit::Usage, format!("{url}: TLS is not supported yet"))
                .next("reach it through an SSH tunnel, and name it with http://"));
        }
        if !url.get(..7).is_some_and(|scheme| scheme.eq_ignore_ascii_case("http://")) {
            return Err(Failure::new(Exit::Usage, format!("--server {url:?}: a server is reached by http"))
                .next("write http://HOST:PORT, or HOST:PORT alone"));
        }
        let endpoint = Endpoint::from_shared(url.clone())
            .map_err(|error| Failure::new(Exit::Usage, format!("--server {url:?} is no URL: {error}")))?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .initial_stream_window_size(1024 * 1024)
            .initial_connection_window_size(16 * 1024 * 1024);
        let wire = InterceptedService::new(endpoint.connect_lazy(), Bearer(bearer));
        Ok(Self { wire })
    }

    pub(crate) fn conversations(&self) -> ConversationServiceClient<Wire> {
        ConversationServiceClient::new(self.wire.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    pub(crate) fn sessions(&self) -> SessionServiceClient<Wire> {
        SessionServiceClient::new(self.wire.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    pub(crate) fn runners(&self) -> RunnerServiceClient<Wire> {
        RunnerServiceClient::new(self.wire.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    pub(crate) fn agents(&self) -> AgentServiceClient<Wire> {
        AgentServiceClient::new(self.wire.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    pub(crate) fn summaries(&self) -> SummaryServiceClient<Wire> {
        SummaryServiceClient::new(self.wire.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// The bare connection.
    pub(crate) fn channel(&self) -> Wire {
        self.wire.clone()
    }

    /// Our id of a conversation that a person named in either way. An external id must exist.
    pub(crate) async fn conversation_id(&self, named: &str) -> Result<String, Failure> {
        match ConversationName::parse(named)? {
            ConversationName::Id(id) => Ok(id),
            ConversationName::External(external) => {
                let request = control::GetConversationRequest {
                    name: Some(control::get_conversation_request::Name::ExternalId(external)),
                };
                let answer = self.conversations().get_conversation(call(request)).await?.into_inner();
                let conversation = answer.conversation.ok_or_else(|| incomplete("a conversation"))?;
                Ok(conversation.conversation_id)
            }
        }
    }
}

/// A request with its deadline.
pub(crate) fn call<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CALL_TIMEOUT);
    request
}

/// An answer that lacks what it must have.
pub(crate) fn incomplete(what: &str) -> Failure {
    Failure::new(Exit::Failed, format!("the server's answer lacks {what}"))
        .next("the server may be of another release: compare `roundhouse --version`")
}

/// A conversation as a person names it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ConversationName {
    /// By our id.
    Id(String),
    /// By its name elsewhere.
    External(control::ExternalId),
}

impl ConversationName {
    /// Our ids hold no colon; a name elsewhere is PROJECT:PROVIDER:ID, in which the id may hold more colons.
    pub(crate) fn parse(named: &str) -> Result<Self, Failure> {
        if !named.contains(':') {
            return match named.strip_prefix("cnv_") {
                Some(_) => Ok(Self::Id(named.to_owned())),
                None => Err(Failure::new(Exit::Usage, format!("{named:?} names no conversation")).next(
                    "write its id (cnv_...), or PROJECT:PROVIDER:ID; `roundhouse conversations` lists them",
                )),
            };
        }
        let mut parts = named.splitn(3, ':').map(str::to_owned);
        match (parts.next(), parts.next(), parts.next()) {
            (Some(project), Some(provider), Some(id))
                if !project.is_empty() && !provider.is_empty() && !id.is_empty() =>
            {
                Ok(Self::External(control::ExternalId { project, provider, id }))
            }
            _ => Err(Failure::new(Exit::Usage, format!("{named:?} names no conversation"))
                .next("write its id (cnv_...), or PROJECT:PROVIDER:ID")),
        }
    }
}

/// A workspace as the server takes it: ids and `RUNNER:PATH` as they are, a path of this host made absolute.
pub(crate) fn workspace(named: &str, current: &Path) -> Result<String, Failure> {
    if named.starts_with("wsp_") || (named.contains(':') && !named.starts_with(['/', '.', '~'])) {
        return Ok(named.to_owned());
    }
    let path = current.join(named);
    // The path may lie on the runner's host only; what is here is resolved, the rest is the server's to judge.
    let path = if path.is_dir() {
        std::fs::canonicalize(&path)
            .map_err(|error| Failure::new(Exit::Invalid, format!("{}: {error}", path.display())))?
    } else {
        path
    };
    path.into_os_string()
        .into_string()
        .map_err(|path| Failure::new(Exit::Invalid, format!("{} is not UTF-8", path.display())))
}

/// An id of a turn.
pub(crate) fn turn_id(named: String) -> Result<String, Failure> {
    id("trn_", "turn", "`roundhouse turns CONVERSATION` lists them", named)
}

/// An id of a kind that people take from a list. The server would say so, too, but not where to find one.
pub(crate) fn id(prefix: &str, what: &str, list: &str, named: String) -> Result<String, Failure> {
    if named.starts_with(prefix) {
        return Ok(named);
    }
    Err(Failure::new(Exit::Usage, format!("{named:?} is no {what}"))
        .next(format!("ids of {what}s start with {prefix}; {list}")))
}

/// The directory that the command runs in.
pub(crate) fn current_directory() -> Result<std::path::PathBuf, Failure> {
    std::env::current_dir()
        .map_err(|error| Failure::new(Exit::Failed, format!("the current directory is not there: {error}")))
}

/// The request id given, or a fresh one.
pub(crate) fn request_id(given: Option<String>) -> String {
    given.unwrap_or_else(|| uuid::Uuid::now_v7().simple().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations_are_named_in_two_ways() {
        assert_eq!(ConversationName::parse("cnv_1").unwrap(), ConversationName::Id("cnv_1".to_owned()));
        let external = |project: &str, provider: &str, id: &str| {
            ConversationName::External(control::ExternalId {
                project: project.to_owned(),
                provider: provider.to_owned(),
                id: id.to_owned(),
            })
        };
        assert_eq!(
            ConversationName::parse("acme/site:github:a:1").unwrap(),
            external("acme/site", "github", "a:1")
        );
        for bad in ["a:b", "a::b", ":a:b", "a:b:"] {
            assert_eq!(ConversationName::parse(bad).unwrap_err().exit, Exit::Usage, "{bad}");
        }
    }

    #[test]
    fn workspaces_are_passed_on_or_made_absolute() {
        let dir = tempfile::tempdir().unwrap();
        let real = std::fs::canonicalize(dir.path()).unwrap();
        std::os::unix::fs::symlink(&real, dir.path().join("link")).unwrap();
        let of = |named: &str| workspace(named, dir.path()).unwrap();
        assert_eq!(of("wsp_1"), "wsp_1");
        assert_eq!(of("run_1:/srv/x"), "run_1:/srv/x");
        assert_eq!(of("."), real.to_str().unwrap());
        assert_eq!(of("link"), real.to_str().unwrap());
        assert_eq!(of("/elsewhere/on/the:runner"), "/elsewhere/on/the:runner");
        assert_eq!(of("./a:b"), dir.path().join("./a:b").to_str().unwrap());
    }

    #[tokio::test]
    async fn servers_are_urls() {
        assert!(Client::new("127.0.0.1:7450").is_ok());
        assert!(Client::new("http://127.0.0.1:7450").is_ok());
        assert_eq!(Client::new("https://x").unwrap_err().exit, Exit::Usage);
        assert_eq!(Client::new("ftp://x").unwrap_err().exit, Exit::Usage);
        assert_eq!(Client::new("http://a b").unwrap_err().exit, Exit::Usage);
    }
}
