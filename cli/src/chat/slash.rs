//! What a typed line means.

use roundhouse_proto::engine::v1::PermissionDecision;

/// What `/help` says.
pub(super) const HELP: &str = "\
  /agent [NAME]   who answers from the next message on; without a name: who there is
  /sessions       the engines' sessions of this conversation
  /cancel         cancel what is at work (Ctrl-C does, too)
  /retry          try the last turn again, when it failed, was lost or was cancelled
  /quit           leave; what is at work goes on
  /help           this
  //text          send a text that begins with a slash
While an agent works a line that is typed waits for its turn. A permission is answered by y, n, or n and why.";

/// A line, understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Line {
    Nothing,
    Say(String),
    Answer(PermissionDecision, String),
    /// Neither yes nor no, and one of them is wanted.
    NoAnswer,
    /// An answer to a question that somebody else has answered meanwhile.
    TooLate,
    Agent(Option<String>),
    Sessions,
    Cancel,
    Retry,
    Quit,
    Help,
    Unknown(String),
}

/// What a line may be the answer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    None,
    /// A permission request waits.
    Waits,
    /// One that was shown was settled without a word from here, and nothing was typed since.
    Gone,
}

/// Understands a line.
pub(super) fn understand(line: &str, question: Question) -> Line {
    let asked = question == Question::Waits;
    let trimmed = line.trim();
    if trimmed.is_empty() {
        return Line::Nothing;
    }
    if let Some(text) = trimmed.strip_prefix("//") {
        return if asked { Line::NoAnswer } else { Line::Say(format!("/{text}")) };
    }
    if trimmed.starts_with('/') {
        return command(trimmed);
    }
    match question {
        Question::Waits => answer(trimmed),
        // Typed for the question, most likely, and no message that an agent can use.
        Question::Gone if matches!(answer(trimmed), Line::Answer(..)) => Line::TooLate,
        Question::Gone | Question::None => Line::Say(line.to_owned()),
    }
}

fn command(line: &str) -> Line {
    let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim();
    match (name, rest) {
        ("/agent", "") => Line::Agent(None),
        ("/agent", name) => Line::Agent(Some(name.to_owned())),
        ("/sessions", "") => Line::Sessions,
        ("/cancel", "") => Line::Cancel,
        ("/retry", "") => Line::Retry,
        ("/quit" | "/exit", "") => Line::Quit,
        ("/help", _) => Line::Help,
        _ => Line::Unknown(line.to_owned()),
    }
}

fn answer(line: &str) -> Line {
    let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    match word.to_lowercase().as_str() {
        "y" | "yes" if rest.is_empty() => Line::Answer(PermissionDecision::Allow, String::new()),
        "n" | "no" => Line::Answer(PermissionDecision::Deny, rest.trim().to_owned()),
        _ => Line::NoAnswer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_is_ours_and_two_are_the_agents() {
        assert_eq!(understand("  ", Question::None), Line::Nothing);
        assert_eq!(
            understand(" keep  my blanks ", Question::None),
            Line::Say(" keep  my blanks ".to_owned())
        );
        assert_eq!(understand("//clear it", Question::None), Line::Say("/clear it".to_owned()));
        assert_eq!(understand("/agent", Question::None), Line::Agent(None));
        assert_eq!(understand("/agent  builder ", Question::Waits), Line::Agent(Some("builder".to_owned())));
        assert_eq!(understand("/quit", Question::Waits), Line::Quit);
        assert_eq!(understand("/clear", Question::None), Line::Unknown("/clear".to_owned()));
        assert_eq!(understand("/quit now", Question::None), Line::Unknown("/quit now".to_owned()));
    }

    #[test]
    fn only_a_clear_yes_allows() {
        let allow = Line::Answer(PermissionDecision::Allow, String::new());
        let deny = |why: &str| Line::Answer(PermissionDecision::Deny, why.to_owned());
        assert_eq!(understand("y", Question::Waits), allow);
        assert_eq!(understand(" YES ", Question::Waits), allow);
        assert_eq!(understand("n", Question::Waits), deny(""));
        assert_eq!(understand("no not there", Question::Waits), deny("not there"));
        assert_eq!(understand("yes but", Question::Waits), Line::NoAnswer);
        assert_eq!(understand("hello", Question::Waits), Line::NoAnswer);
        assert_eq!(understand("//y", Question::Waits), Line::NoAnswer);
        // Without a question these are words like any other.
        assert_eq!(understand("y", Question::None), Line::Say("y".to_owned()));
    }

    #[test]
    fn an_answer_that_comes_too_late_is_no_message() {
        for late in ["y", " Yes ", "n", "no not there"] {
            assert_eq!(understand(late, Question::Gone), Line::TooLate, "{late}");
        }
        assert_eq!(understand("yes but", Question::Gone), Line::Say("yes but".to_owned()));
        assert_eq!(understand("//y", Question::Gone), Line::Say("/y".to_owned()));
        assert_eq!(understand("/quit", Question::Gone), Line::Quit);
    }
}
