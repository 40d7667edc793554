//! What the model was told, by its own log: not what we believe to have sent.

use roundhouse_models::Conversation;

/// Longest piece of a text that is quoted.
const QUOTE_CHARS: usize = 110;

/// A turn that came before.
#[derive(Debug, Clone)]
pub(super) struct Earlier {
    /// Its number in the demo.
    pub(super) number: usize,
    /// What was said to the agent.
    pub(super) says: &'static str,
}

/// What a request held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Told {
    /// Earlier turns that the engine's own session brought along.
    pub(super) natively: Vec<usize>,
    /// Earlier turns that were given once, as context.
    pub(super) as_context: Vec<usize>,
    /// Earlier turns that are missing, or there more than once.
    pub(super) wrong: Vec<usize>,
    /// Whether the agent's prompt was there.
    pub(super) prompt: bool,
    /// The line of the context in which the newest of those turns stands.
    pub(super) quote: Option<String>,
}

impl Told {
    /// Reads the first request of a turn.
    pub(super) fn read(request: &Conversation, earlier: &[Earlier], prompt: &str) -> Self {
        let texts = request.texts();
        let mut told = Self {
            natively: Vec::new(),
            as_context: Vec::new(),
            wrong: Vec::new(),
            prompt: request.system().contains(prompt) || texts.iter().any(|(_, text)| text.contains(prompt)),
            quote: None,
        };
        for turn in earlier {
            let own = texts.iter().filter(|(role, text)| role == "user" && text.trim() == turn.says).count();
            let within: Vec<&str> = texts
                .iter()
                .filter(|(_, text)| text.trim() != turn.says && text.contains(turn.says))
                .map(|(_, text)| text.as_str())
                .collect();
            match (own, within.as_slice()) {
                (1, []) => told.natively.push(turn.number),
                (0, [context]) if context.matches(turn.says).count() == 1 => {
                    told.as_context.push(turn.number);
                    let line = context.lines().find(|line| line.contains(turn.says));
                    told.quote = line.map(quoted);
                }
                _ => told.wrong.push(turn.number),
            }
        }
        told
    }

    /// In a sentence.
    pub(super) fn sentence(&self) -> String {
        let turns = |numbers: &[usize]| {
            let words: Vec<_> = numbers.iter().map(usize::to_string).collect();
            let word = if words.len() == 1 { "turn" } else { "turns" };
            format!("{word} {}", words.join(", "))
        };
        let mut parts = Vec::new();
        if self.prompt {
            parts.push("its agent's prompt".to_owned());
        }
        if !self.natively.is_empty() {
            parts.push(format!("{} by its own session", turns(&self.natively)));
        }
        if !self.as_context.is_empty() {
            parts.push(format!("{} once, as context", turns(&self.as_context)));
        }
        if !self.wrong.is_empty() {
            parts.push(format!("{} not at all or more than once", turns(&self.wrong)));
        }
        parts.push("the question".to_owned());
        let quote =
            self.quote.as_ref().map(|quote| format!("; the context says: {quote}")).unwrap_or_default();
        format!("{}{quote}", parts.join(", "))
    }

    /// What is not as it should be: each earlier turn belongs into one of two places.
    pub(super) fn complaint(&self, natively: &[usize], as_context: &[usize]) -> Option<String> {
        if self.prompt && self.natively == natively && self.as_context == as_context {
            return None;
        }
        Some(format!(
            "the model should have been told turns {natively:?} by its session and {as_context:?} as context, \
             and its log says: {}",
            self.sentence()
        ))
    }
}

fn quoted(line: &str) -> String {
    let line = line.trim();
    let cut: String = line.chars().take(QUOTE_CHARS).collect();
    let more = if cut.len() < line.len() { "…" } else { "" };
    format!("\u{201c}{cut}{more}\u{201d}")
}

#[cfg(test)]
mod tests {
    use pretty_assertions::assert_eq;
    use serde_json::json;

    use super::*;

    fn earlier() -> [Earlier; 2] {
        [Earlier { number: 1, says: "Write it." }, Earlier { number: 2, says: "Read it." }]
    }

    #[test]
    fn a_native_turn_and_one_given_as_context_are_told_apart() {
        let request = Conversation::new(json!({
            "system": "You build.",
            "messages": [
                {"role": "user", "content": "Write it."},
                {"role": "assistant", "content": "Written."},
                {"role": "user", "content": [
                    {"type": "text", "text": "Meanwhile:\nuser: Read it.\nreviewer: Read."},
                    {"type": "text", "text": "Go on."},
                ]},
            ],
        }));
        let told = Told::read(&request, &earlier(), "You build.");
        assert_eq!((&told.natively, &told.as_context, &told.wrong), (&vec![1], &vec![2], &vec![]));
        assert_eq!(
            told.sentence(),
            "its agent's prompt, turn 1 by its own session, turn 2 once, as context, the question; the context says: \
             \u{201c}user: Read it.\u{201d}"
        );
        assert_eq!(told.complaint(&[1], &[2]), None);
        assert!(told.complaint(&[1, 2], &[]).is_some());
    }

    #[test]
    fn what_is_missing_or_doubled_is_wrong() {
        let request = Conversation::new(json!({
            "system": "other",
            "messages": [
                {"role": "user", "content": "Write it."},
                {"role": "user", "content": [
                    {"type": "text", "text": "user: Write it."},
                    {"type": "text", "text": "Go on."},
                ]},
            ],
        }));
        let told = Told::read(&request, &earlier(), "You build.");
        assert_eq!((told.wrong.clone(), told.prompt), (vec![1, 2], false));
        assert!(told.complaint(&[], &[]).is_some());
    }
}
