//! The grammar's tool calls as calls of Codex's tools.

use serde_json::{Value, json};

/// A tool call as the API has it.
#[derive(Debug, PartialEq)]
pub(crate) enum Call {
    /// A call with JSON arguments.
    Function {
        name: String,
        /// The MCP server's, `mcp__<server>`.
        namespace: Option<String>,
        arguments: String,
    },
    /// A call with free text.
    Custom { name: String, input: String },
}

/// What the names used in scripts (Claude Code's) are here. `Bash`, `Write` and `Read` become commands;
/// `mcp__<server>__<tool>` a call in a namespace; any name with a text instead of an object a call with free text.
pub(crate) fn call(name: &str, input: &Value) -> Call {
    let path = input["file_path"].as_str();
    match (name, input, path) {
        ("Bash", _, _) if input["command"].is_string() => command(&bash(input)),
        ("Write", _, Some(path)) => {
            let content = input["content"].as_str().unwrap_or_default();
            command(&json!({"cmd": write(path, content)}))
        }
        ("Read", _, Some(path)) => command(&json!({"cmd": format!("cat {}", quoted(path))})),
        (_, Value::String(text), _) => Call::Custom { name: name.to_owned(), input: text.clone() },
        _ => {
            let (namespace, name) = namespaced(name);
            Call::Function { name, namespace, arguments: input.to_string() }
        }
    }
}

fn command(arguments: &Value) -> Call {
    Call::Function { name: "exec_command".to_owned(), namespace: None, arguments: arguments.to_string() }
}

fn bash(input: &Value) -> Value {
    let mut arguments = json!({"cmd": input["command"]});
    if input["run_in_background"] == true {
        // The shortest time after which the CLI answers that the process goes on.
        arguments["yield_time_ms"] = json!(250);
    } else if let Some(timeout) = input["timeout"].as_u64() {
        arguments["yield_time_ms"] = json!(timeout);
    }
    for (name, value) in input.as_object().into_iter().flatten() {
        if !matches!(name.as_str(), "command" | "description" | "timeout" | "run_in_background") {
            arguments[name] = value.clone();
        }
    }
    arguments
}

/// A shell word that means exactly this text.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

fn write(path: &str, content: &str) -> String {
    format!("printf %s {} > {}", quoted(content), quoted(path))
}

/// `mcp__<server>__<tool>` taken apart.
fn namespaced(name: &str) -> (Option<String>, String) {
    let split = name.strip_prefix("mcp__").and_then(|rest| rest.split_once("__"));
    match split {
        Some((server, tool)) => (Some(format!("mcp__{server}")), tool.to_owned()),
        None => (None, name.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(name: &str, input: &Value) -> Value {
        match call(name, input) {
            Call::Function { name, arguments, .. } if name == "exec_command" => {
                serde_json::from_str(&arguments).expect("JSON")
            }
            other => panic!("no command: {other:?}"),
        }
    }

    #[test]
    fn the_scripts_words_become_commands() {
        let bash = arguments("Bash", &json!({"command": "ls", "description": "scripted", "timeout": 500}));
        assert_eq!(bash, json!({"cmd": "ls", "yield_time_ms": 500}));
        let asks = json!({"command": "ls", "sandbox_permissions": "require_escalated"});
        assert_eq!(
            arguments("Bash", &asks),
            json!({"cmd": "ls", "sandbox_permissions": "require_escalated"})
        );
        let write = arguments("Write", &json!({"file_path": "/w/a'b", "content": "one\ntwo's"}));
        assert_eq!(write["cmd"], "printf %s 'one\ntwo'\\''s' > '/w/a'\\''b'");
        assert_eq!(arguments("Read", &json!({"file_path": "/f"}))["cmd"], "cat '/f'");
    }

    #[test]
    fn other_names_are_called_as_they_are() {
        let plan = call("update_plan", &json!({"plan": []}));
        assert_eq!(
            plan,
            Call::Function {
                name: "update_plan".to_owned(),
                namespace: None,
                arguments: r#"{"plan":[]}"#.to_owned()
            }
        );
        let Call::Function { name, namespace, .. } = call("mcp__m1__echo", &json!({})) else {
            panic!("a function")
        };
        assert_eq!((name.as_str(), namespace.as_deref()), ("echo", Some("mcp__m1")));
        let patch = call("apply_patch", &json!("*** Begin Patch"));
        assert_eq!(
            patch,
            Call::Custom { name: "apply_patch".to_owned(), input: "*** Begin Patch".to_owned() }
        );
    }
}
