//! The arguments of Claude Code, as far as they change what the fake engine does.

/// Options that take a value, as `--name=value` or `--name value`.
const WITH_VALUE: [&str; 26] = [
    "--output-format",
    "--input-format",
    "--session-id",
    "--resume",
    "--model",
    "--effort",
    "--permission-mode",
    "--permission-prompt-tool",
    "--permission-prompts",
    "--append-system-prompt",
    "--append-system-prompt-file",
    "--system-prompt",
    "--system-prompt-file",
    "--system-prompt-snapshot",
    "--mcp-config",
    "--setting-sources",
    "--settings",
    "--max-turns",
    "--max-budget-usd",
    "--allowedTools",
    "--disallowedTools",
    "--tools",
    "--add-dir",
    "--agents",
    "--json-schema",
    "--fallback-model",
];

/// Options without a value.
const FLAGS: [&str; 13] = [
    "-p",
    "--print",
    "--verbose",
    "--include-partial-messages",
    "--include-hook-events",
    "--replay-user-messages",
    "--strict-mcp-config",
    "--fork-session",
    "--dangerously-skip-permissions",
    "--disable-slash-commands",
    "--no-session-persistence",
    "--bare",
    "--safe-mode",
];

/// What the command line says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    values: Vec<(String, String)>,
    flags: Vec<String>,
    /// The prompt of a one-shot run.
    pub prompt: Option<String>,
    /// Whether only the version is wanted.
    pub version: bool,
}

impl Args {
    /// Reads a command line without the program's name.
    ///
    /// # Errors
    /// The sentence that Claude Code prints for it.
    pub fn parse(words: &[String]) -> Result<Self, String> {
        let mut args = Self::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            if word == "--" {
                args.prompt = words.next().cloned();
                break;
            }
            if matches!(word.as_str(), "--version" | "-v") {
                args.version = true;
            } else if FLAGS.contains(&word.as_str()) {
                args.flags.push(word.clone());
            } else if let Some((name, value)) =
                word.split_once('=').filter(|(name, _)| WITH_VALUE.contains(name))
            {
                args.values.push((name.to_owned(), value.to_owned()));
            } else if WITH_VALUE.contains(&word.as_str()) {
                let value = words.next().ok_or_else(|| format!("error: option '{word}' argument missing"))?;
                args.values.push((word.clone(), value.clone()));
            } else if word.starts_with('-') {
                return Err(format!("error: unknown option '{word}'"));
            } else {
                args.prompt = Some(word.clone());
            }
        }
        Ok(args)
    }

    /// The value of an option; the last one counts.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&str> {
        self.values.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Whether a flag is there.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.flags.iter().any(|known| known == name)
    }

    /// Whether messages come as lines on stdin.
    #[must_use]
    pub fn warm(&self) -> bool {
        self.value("--input-format") == Some("stream-json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, String> {
        Args::parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn both_forms_of_a_value_are_read_and_the_last_one_counts() {
        let args = parse("-p --model=a --model b --input-format=stream-json --verbose").expect("valid");
        assert_eq!(args.value("--model"), Some("b"));
        assert!(args.warm() && args.has("--verbose") && !args.has("--bare"));
    }

    #[test]
    fn what_follows_the_dashes_is_the_prompt() {
        let args = parse("-p --verbose -- --model").expect("valid");
        assert_eq!((args.prompt.as_deref(), args.value("--model")), (Some("--model"), None));
    }

    #[test]
    fn an_unknown_option_is_refused_in_the_engines_words() {
        assert_eq!(parse("-p --nosuch"), Err("error: unknown option '--nosuch'".to_owned()));
    }
}
