//! Scripts: markers in a text, and the file with its sections. The verbs are in the crate's documentation.

use base64::{Engine as _, prelude::BASE64_STANDARD};

/// One marker, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marker {
    /// Its verb, one of [`VERBS`].
    pub verb: String,
    options: Vec<(String, Option<String>)>,
    /// What follows the colon; absent without one.
    pub payload: Option<Vec<u8>>,
}

/// Every verb with the options it takes.
pub const VERBS: [(&str, &[&str]); 31] = [
    ("text", &[]),
    ("thinking", &[]),
    ("slow", &["chunks", "delay"]),
    ("huge", &["bytes"]),
    ("events", &["count", "bytes", "delta", "clock"]),
    ("recall", &[]),
    ("usage", &["in", "out", "read", "created"]),
    ("bash", &["ask", "yield"]),
    ("append", &["path", "ask"]),
    ("tool", &["name", "ask"]),
    ("error", &["code", "info", "reset"]),
    ("retry", &["status"]),
    ("raw", &["repeat"]),
    ("line", &[]),
    ("garbage", &["lines"]),
    ("long", &["bytes", "open"]),
    ("split", &["bytes", "delay"]),
    ("stderr", &["bytes"]),
    ("pause", &["ms"]),
    ("gate", &[]),
    ("socket", &[]),
    ("stall", &[]),
    ("hang", &[]),
    ("deaf", &[]),
    ("fork", &["detached", "hold", "ms", "pidfile"]),
    ("ignore", &[]),
    ("exit", &["code"]),
    ("die", &[]),
    ("no_result", &[]),
    ("no_save", &[]),
    ("busy", &[]),
];

impl Marker {
    /// Whether a flag is there.
    #[must_use]
    pub fn flag(&self, name: &str) -> bool {
        self.options.iter().any(|(key, value)| key == name && value.is_none())
    }

    /// The value of an option.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&str> {
        self.options.iter().find(|(key, _)| key == name).and_then(|(_, value)| value.as_deref())
    }

    /// A number, or `usual` if the option is absent.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn number(&self, name: &str, usual: u64) -> Result<u64, String> {
        let Some(text) = self.value(name) else { return Ok(usual) };
        text.parse().map_err(|_| format!("{}: {name}={text} is no number", self.verb))
    }

    /// The payload as text, or `usual` if there is none.
    #[must_use]
    pub fn text(&self, usual: &str) -> String {
        self.payload
            .as_deref()
            .map_or_else(|| usual.to_owned(), |bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    /// The payload as text.
    ///
    /// # Errors
    /// If there is none.
    pub fn needed(&self) -> Result<String, String> {
        if self.payload.is_none() {
            return Err(format!("{} needs a payload after ':'", self.verb));
        }
        Ok(self.text(""))
    }

    fn read(inside: &str) -> Result<Self, String> {
        let (head, payload) = match inside.split_once(':') {
            Some((head, payload)) => (head, Some(payload)),
            None => (inside, None),
        };
        let mut words = head.split_whitespace();
        let verb = words.next().unwrap_or_default().to_owned();
        let Some((_, known)) = VERBS.iter().find(|(name, _)| *name == verb) else {
            return Err(format!("unknown verb {verb:?}"));
        };
        let mut options: Vec<(String, Option<String>)> = words
            .map(|word| match word.split_once('=') {
                Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
                None => (word.to_owned(), None),
            })
            .collect();
        if verb == "error"
            && let Some((code, None)) = options.first().cloned()
        {
            options[0] = ("code".to_owned(), Some(code));
        }
        if let Some((odd, _)) = options.iter().find(|(key, _)| key != "b64" && !known.contains(&key.as_str()))
        {
            return Err(format!("{verb} has no option {odd:?}"));
        }
        let payload = match payload {
            Some(text) if options.iter().any(|(key, _)| key == "b64") => Some(
                BASE64_STANDARD
                    .decode(text.trim())
                    .map_err(|problem| format!("{verb}: not base64: {problem}"))?,
            ),
            other => other.map(|text| text.as_bytes().to_vec()),
        };
        Ok(Self { verb, options, payload })
    }
}

/// The markers in a text, in order.
///
/// # Errors
/// What is wrong with the first malformed one.
pub fn parse(text: &str) -> Result<Vec<Marker>, String> {
    let mut markers = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("[[") {
        rest = &rest[at + 2..];
        if !rest.starts_with(|first: char| first.is_ascii_lowercase()) {
            continue;
        }
        let end = rest.find("]]").ok_or("a marker without its closing ]]")?;
        markers.push(Marker::read(&rest[..end])?);
        rest = &rest[end + 2..];
    }
    Ok(markers)
}

/// The script file, read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScriptFile {
    /// Before anything is read.
    pub start: Vec<Marker>,
    /// Before `initialize` is answered.
    pub initialize: Vec<Marker>,
    /// Between a turn's acceptance and its start (Codex alone has anything between them).
    pub accepted: Vec<Marker>,
    /// In each turn whose text has no marker.
    pub turn: Vec<Marker>,
    /// After stdin was closed.
    pub exit: Vec<Marker>,
}

impl ScriptFile {
    /// Reads the file's text.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut file = Self::default();
        let mut sections: Vec<(&str, String)> = Vec::new();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('@') {
                sections.push((name.trim(), String::new()));
            } else if let Some((_, body)) = sections.last_mut() {
                body.push_str(line);
                body.push('\n');
            }
        }
        for (name, body) in sections {
            let place = match name {
                "start" => &mut file.start,
                "initialize" => &mut file.initialize,
                "accepted" => &mut file.accepted,
                "turn" => &mut file.turn,
                "exit" => &mut file.exit,
                odd => return Err(format!("unknown section @{odd}")),
            };
            place.extend(parse(&body)?);
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_read_in_order_with_options_and_payload() {
        let markers =
            parse("do [[slow chunks=2 delay=5:a:b]] then [[fork detached]] if [[ x ]]").expect("valid");
        assert_eq!(markers.len(), 2);
        assert_eq!((markers[0].number("chunks", 9), markers[0].text("")), (Ok(2), "a:b".to_owned()));
        assert!(markers[1].flag("detached") && markers[1].payload.is_none());
    }

    #[test]
    fn an_error_takes_its_status_as_a_bare_word() {
        assert_eq!(parse("[[error 529:busy]]").expect("valid")[0].number("code", 0), Ok(529));
    }

    #[test]
    fn base64_carries_any_bytes() {
        let marker = &parse("[[raw b64:/wBd]]").expect("valid")[0];
        assert_eq!(marker.payload.as_deref(), Some(&[0xff, 0x00, 0x5d][..]));
    }

    #[test]
    fn what_is_malformed_is_named() {
        for (text, part) in [
            ("[[text:x", "closing"),
            ("[[txet:x]]", "unknown verb"),
            ("[[text loud:x]]", "no option"),
            ("[[raw b64:*]]", "not base64"),
        ] {
            let problem = parse(text).expect_err(text);
            assert!(problem.contains(part), "{text}: {problem}");
        }
    }

    #[test]
    fn a_file_has_sections() {
        let file = ScriptFile::parse("for people\n@start\n[[stderr:hi]]\n@turn\n[[text:a]]\n[[text:b]]\n")
            .expect("valid");
        assert_eq!((file.start.len(), file.initialize.len(), file.turn.len()), (1, 0, 2));
        assert!(ScriptFile::parse("@nosuch\n").is_err());
        assert_eq!(ScriptFile::parse("@exit\n[[exit code=3]]").expect("valid").exit.len(), 1);
    }
}
