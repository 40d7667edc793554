//! Small looks into a line of an engine's output. Nothing here fails: what is absent or of another type is
//! absent.

use serde_json::Value;

/// Parses a line. Colour codes before the brace are tolerated, and so are bytes that are not UTF-8: a result must
/// not be lost over one of them.
pub(crate) fn parse(line: &[u8]) -> Option<Value> {
    let trimmed = line.trim_ascii();
    let start = trimmed.iter().position(|byte| *byte == b'{')?;
    if start > 0 && !only_escapes(&trimmed[..start]) {
        return None;
    }
    let body = &trimmed[start..];
    let value: Value = match std::str::from_utf8(body) {
        Ok(text) => serde_json::from_str(text).ok()?,
        Err(_) => serde_json::from_str(&String::from_utf8_lossy(body)).ok()?,
    };
    value.is_object().then_some(value)
}

/// Whether these bytes are terminal escape sequences and spaces only.
fn only_escapes(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    while let Some((first, tail)) = rest.split_first() {
        match first {
            b' ' | b'\t' | b'\r' => rest = tail,
            0x1b => {
                let Some(end) = tail.iter().position(|byte| byte.is_ascii_alphabetic()) else {
                    return false;
                };
                rest = &tail[end + 1..];
            }
            _ => return false,
        }
    }
    true
}

/// A text field.
pub(crate) fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key)?.as_str()
}

/// A text field that is not empty.
pub(crate) fn word<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    text(value, key).filter(|word| !word.is_empty())
}

/// Whether a field is `true`.
pub(crate) fn flag(value: &Value, key: &str) -> bool {
    value.get(key).and_then(Value::as_bool) == Some(true)
}

/// An HTTP status.
pub(crate) fn status(value: &Value, key: &str) -> Option<u16> {
    value.get(key)?.as_u64().and_then(|status| u16::try_from(status).ok())
}

/// The elements of a list; none if it is none.
pub(crate) fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The ids of the user messages a line belongs to, as far as it says so.
pub(crate) fn user_uuids(value: &Value) -> Vec<&str> {
    let mut ids: Vec<&str> = list(value, "user_message_uuids").iter().filter_map(Value::as_str).collect();
    if let Some(id) = word(value, "user_message_uuid")
        && !ids.contains(&id)
    {
        ids.push(id);
    }
    ids
}

/// The text of a tool result, which is a string or a list of blocks.
pub(crate) fn content_text(content: Option<&Value>) -> String {
    match content {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(blocks)) => {
            let parts: Vec<String> = blocks
                .iter()
                .map(|block| match text(block, "text") {
                    Some(text) => text.to_owned(),
                    None => format!("[{}]", text_or(block, "type", "content")),
                })
                .collect();
            parts.join("\n")
        }
        Some(Value::Null) | None => String::new(),
        Some(other) => other.to_string(),
    }
}

/// A text field, or a default.
pub(crate) fn text_or<'a>(value: &'a Value, key: &str, default: &'a str) -> &'a str {
    word(value, key).unwrap_or(default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s31_noise_is_no_line_and_colour_before_a_line_is_forgiven() {
        assert!(parse(b"Welcome! {\"type\":\"x\"}").is_none());
        assert!(parse(b"").is_none());
        assert!(parse(b"[1]").is_none());
        assert!(parse(b"{\"type\":").is_none());
        assert_eq!(parse(b"\x1b[2K\x1b[0m {\"a\":1}\r").and_then(|v| v["a"].as_u64()), Some(1));
        assert_eq!(parse(b"{\"a\":\"\xff\"}").and_then(|v| text(&v, "a").map(str::len)), Some(3));
    }
}
