//! From bytes to the two parts of an agent file: front matter and prompt.

/// The parts of a file. Both are slices of the normalised text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parts<'a> {
    /// What stands between the two `---` lines; it begins in line 2.
    pub(super) front_matter: &'a str,
    /// The text after them, without the blank lines around it.
    pub(super) prompt: &'a str,
    /// The line in which the closing `---` stands.
    pub(super) closing_line: usize,
}

/// Why a text has no two parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SplitError {
    /// The first line is not `---`.
    NoFrontMatter,
    /// No other line is `---`.
    NotClosed,
}

/// See [`super::normalise`].
pub(super) fn normalise(text: &str) -> String {
    // More than one mark can come from tools that add one to a file that has one; taking only the first
    // would make this not idempotent.
    let mut out = normalise_line_ends(text.trim_start_matches('\u{feff}'));
    out.truncate(out.trim_end_matches('\n').len());
    out.push('\n');
    out
}

/// Makes every line end a single line feed.
pub(super) fn normalise_line_ends(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 1);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '\r' {
            // A lone carriage return is a line end for YAML; taking it for one here, too, keeps the line
            // numbers of the two the same.
            chars.next_if_eq(&'\n');
            out.push('\n');
        } else {
            out.push(c);
        }
    }
    out
}

/// Splits a normalised text.
pub(super) fn split(text: &str) -> Result<Parts<'_>, SplitError> {
    let mut lines = text.split_inclusive('\n');
    let first = lines.next().unwrap_or("");
    if !is_fence(first) {
        return Err(SplitError::NoFrontMatter);
    }
    let start = first.len();
    let mut end = start;
    for (index, line) in lines.enumerate() {
        if is_fence(line) {
            let prompt = trim_blank_lines(text.get(end + line.len()..).unwrap_or(""));
            let front_matter = text.get(start..end).unwrap_or("");
            return Ok(Parts { front_matter, prompt, closing_line: index + 2 });
        }
        end += line.len();
    }
    Err(SplitError::NotClosed)
}

fn is_fence(line: &str) -> bool {
    line.trim_end_matches(['\n', ' ', '\t']) == "---"
}

/// Takes blank lines off both ends; the first line keeps its indentation.
fn trim_blank_lines(text: &str) -> &str {
    let mut rest = text;
    while let Some((line, after)) = rest.split_once('\n') {
        if !line.trim().is_empty() {
            break;
        }
        rest = after;
    }
    rest.trim_end()
}
