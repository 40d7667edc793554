//! Checks on what goes into arguments and environments, the same for every engine.

use crate::plan::PlanError;

/// Variables whose values are secrets, besides those whose name says so.
const SECRET_WORDS: [&str; 5] = ["KEY", "TOKEN", "SECRET", "PASSWORD", "CUSTOM_HEADERS"];

/// Whether a variable of this name holds a secret.
pub(crate) fn is_secret(name: &str) -> bool {
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

/// A model's name that can be an argument.
pub(crate) fn model(name: &str) -> Result<&str, PlanError> {
    let fine = !name.is_empty() && name.len() <= 160 && !name.contains(|c: char| c.is_control() || c == ' ');
    if fine {
        return Ok(name);
    }
    Err(PlanError::Configuration {
        message: "the model's name is empty, too long, or has spaces or control characters".to_owned(),
        what_to_do: "Correct `model` in the agent file.".to_owned(),
    })
}

/// A path that can be an argument.
pub(crate) fn path_text(path: &std::path::Path) -> Result<String, PlanError> {
    match path.to_str() {
        Some(text) if path.is_absolute() && !text.contains('\0') => Ok(text.to_owned()),
        _ => Err(PlanError::Configuration {
            message: format!("{} is not an absolute path in UTF-8", path.display()),
            what_to_do: "Use a directory whose path is absolute and valid UTF-8.".to_owned(),
        }),
    }
}
