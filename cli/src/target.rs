//! Which control plane a command speaks to, and with which token.
//!
//! A flag is nearer than a variable, and both are nearer than the file. A token file belongs to the server beside which
//! it stands: it is never sent to one that was named by a flag or a variable.

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use roundhouse_config::Config;
use tonic::metadata::{Ascii, MetadataValue};

use crate::args::Global;
use crate::client::Client;
use crate::commands::configuration;
use crate::exit::Exit;
use crate::status::Failure;

/// No token is longer.
const MAX_TOKEN_BYTES: usize = 4096;

/// A text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("****")
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl Secret {
    /// As the metadata that goes with every call. `from` says where it came from, for the error.
    fn bearer(&self, from: &str) -> Result<MetadataValue<Ascii>, Failure> {
        let bad = |what: &str| Failure::new(Exit::Invalid, format!("the token of {from} {what}"));
        if self.0.is_empty() {
            return Err(bad("is empty"));
        }
        if self.0.len() > MAX_TOKEN_BYTES {
            return Err(bad("is longer than 4096 bytes"));
        }
        if !self.0.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(bad("holds other characters than visible ASCII"));
        }
        let mut value = MetadataValue::try_from(format!("Bearer {}", self.0))
            .map_err(|_| bad("cannot be sent as a header"))?;
        value.set_sensitive(true);
        Ok(value)
    }
}

/// Where to go.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    /// The control plane's URL.
    pub(crate) server: String,
    /// `Bearer ...`, if a token goes with the calls.
    pub(crate) bearer: Option<MetadataValue<Ascii>>,
}

impl Target {
    /// A connection to it.
    pub(crate) fn client(&self) -> Result<Client, Failure> {
        Client::with_bearer(&self.server, self.bearer.clone())
    }
}

/// What the environment says of it. Empty variables are none.
#[derive(Debug, Default)]
struct Variables {
    server: Option<String>,
    profile: Option<String>,
    token: Option<Secret>,
}

impl Variables {
    fn of_this_process() -> Self {
        let of = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self {
            server: of("ROUNDHOUSE_SERVER"),
            profile: of("ROUNDHOUSE_PROFILE"),
            token: of("ROUNDHOUSE_TOKEN").map(Secret::from),
        }
    }
}

/// The target of this command line.
///
/// # Errors
/// When the configuration is not valid, the profile is not known, or the token cannot be used.
pub(crate) fn target(global: &Global) -> Result<Target, Failure> {
    chosen(global, Variables::of_this_process())
}

fn chosen(global: &Global, variables: Variables) -> Result<Target, Failure> {
    // A server that is named needs no configuration, so that a broken one does not stand in its way.
    let named = match (&global.server, &global.profile) {
        (Some(server), _) => Some(server.clone()),
        (None, Some(_)) => None,
        (None, None) => variables.server,
    };
    let token = match &global.token {
        Some(token) => Some((token.clone(), "--token".to_owned())),
        None => variables.token.map(|token| (token, "ROUNDHOUSE_TOKEN".to_owned())),
    };
    let (server, file) = match named {
        Some(server) => (server, None),
        None => configured(&configuration(global)?, global.profile.as_ref().or(variables.profile.as_ref()))?,
    };
    let bearer = match (token, file) {
        (Some((token, from)), _) => Some(token.bearer(&from)?),
        (None, Some(file)) => Some(read(&file)?.bearer(&file.display().to_string())?),
        (None, None) => None,
    };
    Ok(Target { server, bearer })
}

fn configured(
    config: &Config,
    profile: Option<&String>,
) -> Result<(String, Option<std::path::PathBuf>), Failure> {
    let client = &config.client;
    let (server, file) = match profile {
        None => (client.server.clone(), &client.token_file),
        Some(name) => {
            let Some(profile) = client.profiles.get(name) else {
                let known: Vec<_> = client.profiles.keys().map(String::as_str).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                return Err(Failure::new(Exit::Usage, format!("there is no profile {name:?}")).next(
                    format!("known: {known}; one is made as [client.profiles.{name}] in roundhouse.toml"),
                ));
            };
            let server = if profile.server.is_empty() { &client.server } else { &profile.server };
            (server.clone(), &profile.token_file)
        }
    };
    Ok((server, (!file.as_os_str().is_empty()).then(|| file.clone())))
}

/// The first line of a token file that nobody else can read.
fn read(file: &Path) -> Result<Secret, Failure> {
    let failed = |what: String| Failure::new(Exit::Invalid, format!("{}: {what}", file.display()));
    let opened = std::fs::File::open(file).map_err(|error| failed(error.to_string()))?;
    let metadata = opened.metadata().map_err(|error| failed(error.to_string()))?;
    if metadata.mode() & 0o077 != 0 {
        return Err(failed("others can read it".to_owned()).next(format!("chmod 600 {}", file.display())));
    }
    let mut text = Vec::new();
    opened
        .take(MAX_TOKEN_BYTES as u64 + 2)
        .read_to_end(&mut text)
        .map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8(text).map_err(|_| failed("is not UTF-8".to_owned()))?;
    Ok(Secret(text.lines().next().unwrap_or_default().trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn global(dir: &Path, text: &str) -> Global {
        let file = dir.join("roundhouse.toml");
        std::fs::write(&file, text).unwrap();
        Global { config: Some(file), ..Global::default() }
    }

    fn token_file(dir: &Path, mode: u32) -> std::path::PathBuf {
        let file = dir.join("token");
        std::fs::write(&file, "secret-1\nrest\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    #[test]
    fn a_token_file_goes_with_its_own_server_alone() {
        let dir = tempfile::tempdir().unwrap();
        let file = token_file(dir.path(), 0o600);
        let text =
            format!("[client.profiles.work]\nserver = 'http://w:1'\ntoken_file = '{}'\n", file.display());
        let mut global = global(dir.path(), &text);
        global.profile = Some("work".to_owned());
        let found = chosen(&global, Variables::default()).unwrap();
        assert_eq!(found.server, "http://w:1");
        assert_eq!(found.bearer.as_ref().unwrap().to_str().unwrap(), "Bearer secret-1");
        assert!(!format!("{found:?}").contains("secret"), "{found:?}");
        global.server = Some("http://elsewhere:1".to_owned());
        let found = chosen(&global, Variables::default()).unwrap();
        assert_eq!((found.server.as_str(), found.bearer.is_none()), ("http://elsewhere:1", true));
    }

    #[test]
    fn a_flag_is_nearer_than_a_variable_and_that_nearer_than_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut global = global(
            dir.path(),
            "[client]\nserver = 'http://file:1'\n[client.profiles.work]\nserver = 'http://work:1'\n",
        );
        let variables = || Variables {
            server: Some("http://variable:1".to_owned()),
            profile: None,
            token: Some(Secret("v".to_owned())),
        };
        let of = |global: &Global, variables| chosen(global, variables).unwrap();
        assert_eq!(of(&global, Variables::default()).server, "http://file:1");
        assert_eq!(of(&global, variables()).server, "http://variable:1");
        let by_variable = Variables { profile: Some("work".to_owned()), ..Variables::default() };
        assert_eq!(of(&global, by_variable).server, "http://work:1");
        global.profile = Some("work".to_owned());
        assert_eq!(of(&global, variables()).server, "http://work:1");
        global.token = Some(Secret("f".to_owned()));
        let found = of(&global, variables());
        assert_eq!(found.bearer.unwrap().to_str().unwrap(), "Bearer f");
        global.profile = Some("wrok".to_owned());
        let failure = chosen(&global, Variables::default()).unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.next.as_ref().unwrap().starts_with("known: work;"), "{failure:?}");
    }

    #[test]
    fn a_token_that_others_can_read_or_that_is_none_is_refused_without_being_shown() {
        let dir = tempfile::tempdir().unwrap();
        let failure = read(&token_file(dir.path(), 0o644)).unwrap_err();
        assert!(failure.next.as_ref().unwrap().starts_with("chmod 600 "), "{failure:?}");
        for bad in ["", "two words", "é"] {
            let failure = Secret(bad.to_owned()).bearer("--token").unwrap_err();
            assert!(bad.is_empty() || !failure.human().contains(bad), "{failure:?}");
        }
    }
}
