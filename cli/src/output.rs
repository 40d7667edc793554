//! Where things are printed: data on standard output, everything else on standard error.
//!
//! A reader that goes away (`roundhouse events | head`) ends the command quietly, and any other failure with a message;
//! neither ends it as if all had been told.

use std::borrow::Cow;
use std::io::{self, IsTerminal as _, Write as _};

use comfy_table::{ContentArrangement, Table, presets};
use serde_json::Value;

use crate::exit::Exit;
use crate::status::Failure;

/// How results are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// For people.
    Human,
    /// One JSON value a command, or one a line for streams.
    Json,
}

/// Both streams.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    format: Format,
}

impl Output {
    pub(crate) const fn new(format: Format) -> Self {
        Self { format }
    }

    pub(crate) const fn is_json(self) -> bool {
        matches!(self.format, Format::Json)
    }

    /// Whether a person looks at standard output.
    pub(crate) fn is_live(self) -> bool {
        !self.is_json() && io::stdout().is_terminal()
    }

    /// Prints a result: the value as JSON, or the text.
    pub(crate) fn result(self, json: impl FnOnce() -> Value, human: impl FnOnce() -> String) {
        match self.format {
            Format::Json => self.data(&pretty(&json())),
            Format::Human => self.data(&human()),
        }
    }

    /// One item of a stream.
    pub(crate) fn item(self, json: &Value) {
        self.data(&json.to_string());
    }

    /// A line of data.
    pub(crate) fn data(self, text: &str) {
        self.raw(text);
        if !text.is_empty() && !text.ends_with('\n') {
            self.raw("\n");
        }
    }

    /// Data without a line end. What agents say goes to a terminal without its control characters, which could move
    /// the cursor or worse; to a file or pipe it goes as it is.
    pub(crate) fn raw(self, text: &str) {
        let mut out = io::stdout().lock();
        let text = if self.is_live() { harmless(text) } else { Cow::Borrowed(text) };
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // There is nobody left to tell the rest to.
            std::process::exit(i32::from(self.unwritten(&error).code()));
        }
    }

    /// How a command ends whose data could not be written.
    pub(crate) fn unwritten(self, error: &io::Error) -> Exit {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Exit::Unread;
        }
        self.note(&Failure::new(Exit::Failed, format!("standard output: {error}")).told(self));
        Exit::Failed
    }

    /// A line for the person at the terminal. A closed standard error loses it.
    #[expect(clippy::unused_self, reason = "all that is printed goes through one value")]
    pub(crate) fn note(self, text: &str) {
        let text = if io::stderr().is_terminal() { harmless(text) } else { Cow::Borrowed(text) };
        let _ = writeln!(io::stderr().lock(), "{text}");
    }
}

/// Whether a character may do something to a terminal other than to be shown: control characters, those that turn the
/// direction of what follows (a command could be shown as another one), and those that some terminals take for line
/// ends.
fn harms(c: char) -> bool {
    let turns = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (c.is_control() && !matches!(c, '\n' | '\t')) || turns || matches!(c, '\u{2028}' | '\u{2029}')
}

/// Without what may do something to a terminal; line ends and tabs stay.
pub(crate) fn harmless(text: &str) -> Cow<'_, str> {
    if text.contains(harms) { Cow::Owned(text.replace(harms, "\u{fffd}")) } else { Cow::Borrowed(text) }
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_else(|_| value.to_string())
}

/// A table without lines, as wide as the terminal. `none` stands instead when there are no rows.
pub(crate) fn table(headings: &[&str], rows: Vec<Vec<String>>, none: &str) -> String {
    if rows.is_empty() {
        return none.to_owned();
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings.iter().map(|heading| heading.to_uppercase()).collect::<Vec<_>>());
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// The first line of a text, cut to so many characters.
pub(crate) fn first_line(text: &str, max: usize) -> String {
    let line = text.trim_start().lines().next().unwrap_or("");
    let more = line.chars().count() > max || text.trim().lines().count() > 1;
    let cut: String = line.chars().take(max).filter(|c| !c.is_control() && !harms(*c)).collect();
    if more { format!("{cut}…") } else { cut }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_no_lines_and_no_trailing_blanks() {
        let rows = vec![vec!["a".to_owned(), "b".to_owned()], vec!["long one".to_owned(), String::new()]];
        assert_eq!(table(&["id", "state"], rows, "none"), "ID        STATE\na         b\nlong one");
        assert_eq!(table(&["id"], Vec::new(), "none"), "none");
    }

    #[test]
    fn a_terminal_gets_no_control_characters() {
        assert_eq!(harmless("a\tb\né"), "a\tb\né");
        assert_eq!(harmless("a\u{1b}[2Jb\r"), "a\u{fffd}[2Jb\u{fffd}");
        assert_eq!(harmless("\u{9b}31m\u{7f}"), "\u{fffd}31m\u{fffd}");
        for turn in ('\u{202a}'..='\u{202e}').chain('\u{2066}'..='\u{2069}').chain('\u{2028}'..='\u{2029}') {
            assert_eq!(harmless(&format!("rm {turn}x")), "rm \u{fffd}x");
            assert_eq!(first_line(&format!("rm {turn}x"), 10), "rm x");
        }
        // What right-to-left text itself needs stays.
        assert_eq!(harmless("\u{200f}\u{05e9}"), "\u{200f}\u{05e9}");
    }

    #[test]
    fn a_first_line_is_cut_and_says_so() {
        assert_eq!(first_line("hello", 10), "hello");
        assert_eq!(first_line("\nhello\nworld", 10), "hello…");
        assert_eq!(first_line("ééééé", 3), "ééé…");
        assert_eq!(first_line("a\u{1b}[31mb", 10), "a[31mb");
    }
}
