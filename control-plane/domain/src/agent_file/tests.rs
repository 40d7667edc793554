//! What is accepted, each refusal with its whole text, and properties over arbitrary bytes.

use pretty_assertions::assert_eq;
use proptest::prelude::*;

use super::*;

const FILE: &str = ".agents/reviewer.md";
const GOOD: &str =
    "---\nname: reviewer\ndescription: Reads a change\nengine: claude-code\nmodel: opus\n---\nYou review.\n";

fn engines() -> Vec<EngineFacts> {
    vec![
        EngineFacts::new("claude-code", &["low", "medium", "high", "xhigh", "max"]),
        EngineFacts::new("gemini", &[]),
    ]
}

fn read(text: &str) -> Result<AgentSnapshot, Vec<String>> {
    read_as(FILE, text.as_bytes())
}

fn read_as(file: &str, bytes: &[u8]) -> Result<AgentSnapshot, Vec<String>> {
    parse(AgentFileSource { file, bytes }, &engines())
        .map_err(|bad| bad.errors.iter().map(ToString::to_string).collect())
}

/// A file with these lines in its front matter, after the four required ones.
fn with(lines: &str) -> String {
    GOOD.replace("model: opus\n", &format!("model: opus\n{lines}\n"))
}

#[track_caller]
fn refused(text: &str, expected: &[&str]) {
    let got = read(text).expect_err("the file must be refused");
    let expected: Vec<String> = expected.iter().map(|e| format!("{FILE}:{e}")).collect();
    assert_eq!(got, expected);
}

#[test]
fn a_short_file_gets_the_defaults() {
    let agent = read(GOOD).expect("good");
    assert_eq!(agent.prompt(), "You review.");
    assert_eq!(
        agent,
        AgentSnapshot {
            file: FILE.to_owned(),
            name: "reviewer".to_owned(),
            description: "Reads a change".to_owned(),
            engine: "claude-code".to_owned(),
            model: "opus".to_owned(),
            reasoning_effort: None,
            permissions: Permissions::Ask,
            enabled: true,
            triggers: BTreeSet::from([Trigger::Manual, Trigger::Mcp, Trigger::Ui]),
            text: GOOD.to_owned(),
            sha256: "e747839a5040c15cfeea8a3a5a29ae7917e54810d6df368211ec3830be4bafe4".to_owned(),
        }
    );
}

#[test]
fn every_key_is_read() {
    let text = with(
        "options:\n  reasoning_effort: xhigh # as the engine calls it\n  permissions: accept-edits\n\
         enabled: false\ntriggers:\n  - ui\n  - manual",
    );
    let agent = read(&text).expect("good");
    assert_eq!(agent.reasoning_effort, Some(Effort::Xhigh));
    assert_eq!(agent.permissions, Permissions::AcceptEdits);
    assert!(!agent.enabled);
    assert_eq!(agent.triggers, BTreeSet::from([Trigger::Manual, Trigger::Ui]));
}

#[test]
fn quoted_folded_and_block_text_is_text() {
    let text = "---\n\"name\": 'reviewer'\ndescription: >\n  Reads\n  a change\nengine: \"claude-code\"\n\
                model: \"5\"\n---\n\n\n  indented first line\n\n---\nlast\n\n\n";
    let agent = read(text).expect("good");
    assert_eq!(agent.description, "Reads a change");
    assert_eq!(agent.model, "5");
    assert_eq!(agent.prompt(), "  indented first line\n\n---\nlast");
}

#[test]
fn line_ends_and_byte_order_marks_change_nothing() {
    let plain = read(GOOD).expect("good");
    for text in [
        GOOD.replace('\n', "\r\n"),
        GOOD.replace('\n', "\r"),
        format!("\u{feff}{GOOD}"),
        format!("\u{feff}{}\r\n\r\n", GOOD.replace('\n', "\r\n")),
        GOOD.trim_end().to_owned(),
        GOOD.replace("---\n", "--- \t\n"),
    ] {
        let agent = read(&text).expect("good");
        assert_eq!((agent.prompt(), &agent.name), (plain.prompt(), &plain.name), "{text:?}");
        if !text.contains('\t') {
            assert_eq!(agent, plain, "{text:?}");
        }
    }
}

#[test]
fn s09_the_snapshot_survives_storage_whole() {
    let agent = read(&with("options: {reasoning_effort: low, permissions: bypass}")).expect("good");
    let stored = serde_json::to_string(&agent).expect("serialises");
    let back: AgentSnapshot = serde_json::from_str(&stored).expect("deserialises");
    assert_eq!(back, agent);
    assert_eq!(back.prompt(), "You review.");
}

#[test]
fn the_prompt_has_a_hash_of_its_own() {
    let one = read(GOOD).expect("good");
    let other_model = read(&GOOD.replace("opus", "sonnet")).expect("good");
    let other_prompt = read(&GOOD.replace("review.", "edit.")).expect("good");
    assert_eq!(one.prompt_sha256(), other_model.prompt_sha256());
    assert_ne!(one.sha256, other_model.sha256);
    assert_ne!(one.prompt_sha256(), other_prompt.prompt_sha256());
}

#[test]
fn all_errors_of_a_file_are_told_at_once() {
    refused(
        "---\nname: Reviewer\ndescription: 5\nengine: claude\nmodle: opus\nenabled: \"yes\"\n\
         triggers: [manual, cron]\noptions:\n  permissions: yolo\nmodel: -x\nname: x\n---\n  \n",
        &[
            "2: name: \"Reviewer\" is not kebab-case: lower-case letters and digits, parted by single hyphens",
            "3: description: must be text, not the number 5",
            "4: engine: unknown engine \"claude\"; accepted: claude-code, gemini",
            "5: modle: unknown key \"modle\"; did you mean \"model\"?",
            "6: enabled: must be true or false without quotes, not the text \"yes\"",
            "7: triggers[1]: unknown value \"cron\"; accepted: manual, mcp, ui",
            "9: options.permissions: unknown value \"yolo\"; accepted: ask, accept-edits, bypass",
            "10: model: \"-x\" is no model name: no white space, no control characters, no leading hyphen",
            "11: name: given twice, first in line 2",
            "12: prompt: must not be empty: write the agent's prompt after the front matter",
        ],
    );
}

#[test]
fn what_is_missing_is_named() {
    refused(
        "---\n# nothing\n---\nprompt\n",
        &[
            "1: name: is required",
            "1: description: is required",
            "1: engine: is required",
            "1: model: is required",
        ],
    );
}

#[test]
fn names_are_kebab_case_and_the_files() {
    refused(
        &GOOD.replace("name: reviewer", "name: revewer"),
        &["2: name: is \"revewer\", but the file's name says \"reviewer\""],
    );
    for bad in ["a--b", "-a", "a-", "a_b", "ä", "A"] {
        refused(
            &GOOD.replace("name: reviewer", &format!("name: \"{bad}\"")),
            &[&format!(
                "2: name: {bad:?} is not kebab-case: lower-case letters and digits, parted by single hyphens"
            )],
        );
    }
    let long = "a".repeat(65);
    let text = GOOD.replace("reviewer", &long);
    assert_eq!(
        read_as(&format!(".agents/{long}.md"), text.as_bytes()),
        Err(vec![
            format!(
                ".agents/{long}.md:1: file: the file's name must be <name>.md, with a kebab-case name of 1 to 64 characters"
            ),
            format!(".agents/{long}.md:2: name: has 65 characters, more than the 64 allowed"),
        ])
    );
    let longest = "a".repeat(64);
    assert!(read_as(&format!("{longest}.md"), GOOD.replace("reviewer", &longest).as_bytes()).is_ok());
    assert_eq!(
        read_as("Reviewer.txt", GOOD.as_bytes()),
        Err(vec![
            "Reviewer.txt:1: file: the file's name must be <name>.md, with a kebab-case name of 1 to 64 characters"
                .to_owned()
        ])
    );
}

#[test]
fn lengths_are_counted_in_characters() {
    let described = |text: &str| GOOD.replace("Reads a change", text);
    assert!(read(&described(&"é".repeat(240))).is_ok());
    refused(&described(&"é".repeat(241)), &["3: description: has 241 characters, more than the 240 allowed"]);
    refused(&described("\"  \""), &["3: description: must not be empty"]);
    refused(&described("\"a\\tb\""), &["3: description: control characters are not accepted"]);
    let modelled = |text: &str| GOOD.replace("opus", text);
    assert!(read(&modelled(&"m".repeat(160))).is_ok());
    refused(&modelled(&"m".repeat(161)), &["5: model: has 161 characters, more than the 160 allowed"]);
    refused(&modelled("\"\""), &["5: model: must not be empty"]);
    assert!(read(&modelled("arn:aws:bedrock:eu:1:model/x[1m]")).is_ok());
    refused(
        &modelled("a b"),
        &["5: model: \"a b\" is no model name: no white space, no control characters, no leading hyphen"],
    );
    let prompted = |text: &str| GOOD.replace("You review.", text);
    assert!(read(&prompted(&"é".repeat(50_000))).is_ok());
    refused(&prompted(&"é".repeat(50_001)), &["7: prompt: has 100002 bytes, more than the 100000 allowed"]);
}

#[test]
fn types_are_strict() {
    for (value, found) in [
        ("5", "the number 5"),
        ("-1.5e3", "the number -1.5e3"),
        ("0x1F", "the number 0x1F"),
        ("0o17", "the number 0o17"),
        (".5", "the number .5"),
        (".inf", "the number .inf"),
        ("true", "the boolean true"),
        ("False", "the boolean False"),
        ("null", "nothing"),
        ("~", "nothing"),
        ("", "nothing"),
        ("[a]", "a list"),
        ("{a: b}", "a mapping"),
    ] {
        refused(
            &GOOD.replace("model: opus", &format!("model: {value}")),
            &[&format!("5: model: must be text, not {found}")],
        );
    }
    for text in ["1.2.3", "4o", "e5", ".", "-", "infinity", "nan", "yes", "0x", "+"] {
        let described = GOOD.replace("Reads a change", &format!("{text:?}").replace('"', "'"));
        assert!(read(&described).is_ok(), "{text}");
        if text != "-" {
            assert!(read(&GOOD.replace("Reads a change", text)).is_ok(), "{text}");
        }
    }
    for (value, found) in [
        ("\"true\"", "the text \"true\""),
        ("yes", "the text \"yes\""),
        ("True", "the boolean True"),
        ("1", "the number 1"),
        ("", "nothing"),
    ] {
        refused(
            &with(&format!("enabled: {value}")),
            &[&format!("6: enabled: must be true or false without quotes, not {found}")],
        );
    }
    refused(&with("options: ask"), &["6: options: must be a mapping, not the text \"ask\""]);
    refused(&with("options:"), &["6: options: must be a mapping, not nothing"]);
    refused(&with("triggers: manual"), &["6: triggers: must be a list, not the text \"manual\""]);
    refused("---\n- name: reviewer\n---\nprompt\n", &["2: front matter: must be a mapping, not a list"]);
    refused(
        "---\nreviewer\n---\nprompt\n",
        &["2: front matter: must be a mapping, not the text \"reviewer\""],
    );
}

#[test]
fn triggers_are_a_set() {
    refused(
        &with("triggers: []"),
        &[
            "6: triggers: must name at least one of: manual, mcp, ui; to switch an agent off, set enabled: false",
        ],
    );
    refused(&with("triggers: [ui,\n  mcp, ui]"), &["7: triggers[2]: \"ui\" is listed twice"]);
    refused(
        &with("triggers: [Manual, [ui]]"),
        &[
            "6: triggers[0]: unknown value \"Manual\"; did you mean \"manual\"?",
            "6: triggers[1]: must be text, not a list",
        ],
    );
}

#[test]
fn efforts_are_the_engines_own() {
    let effort = |level: &str| with(&format!("options:\n  reasoning_effort: {level}"));
    refused(
        &effort("ultra"),
        &["7: options.reasoning_effort: engine claude-code has no reasoning effort \"ultra\"; \
           it has: low, medium, high, xhigh, max"],
    );
    refused(
        &effort("hihg"),
        &["7: options.reasoning_effort: unknown value \"hihg\"; did you mean \"high\"?"],
    );
    refused(
        &effort("turbo"),
        &["7: options.reasoning_effort: unknown value \"turbo\"; \
           accepted: none, minimal, low, medium, high, xhigh, max, ultra"],
    );
    refused(&effort("2"), &["7: options.reasoning_effort: must be text, not the number 2"]);
    refused(
        &effort("low").replace("claude-code", "gemini"),
        &[
            "7: options.reasoning_effort: engine gemini has no setting for reasoning effort; leave the key out",
        ],
    );
    // Without an engine there is no list to hold the level against.
    refused(
        &effort("ultra").replace("claude-code", "claude-cod"),
        &["4: engine: unknown engine \"claude-cod\"; did you mean \"claude-code\"?"],
    );
}

#[test]
fn keys_are_known_and_single() {
    refused(
        &with("fallback: [other]"),
        &["6: fallback: unknown key \"fallback\"; \
           accepted: name, description, engine, model, options, enabled, triggers"],
    );
    refused(
        &with("options:\n  idle_timeout: 5\n  permision: ask"),
        &[
            "7: options.idle_timeout: unknown key \"idle_timeout\"; accepted: reasoning_effort, permissions",
            "8: options.permision: unknown key \"permision\"; did you mean \"permissions\"?",
        ],
    );
    refused(
        &with("reasoning-effort: low"),
        &[
            "6: reasoning-effort: unknown key \"reasoning-effort\"; did you mean \"options.reasoning_effort\"?",
        ],
    );
    refused(
        &with("options: {permissions: ask, permissions: bypass}"),
        &["6: options.permissions: given twice, first in line 6"],
    );
    refused(&with("enabled: true\nenabled: true"), &["7: enabled: given twice, first in line 6"]);
    refused(
        &with("<<: {enabled: false}"),
        &[
            "6: <<: unknown key \"<<\"; accepted: name, description, engine, model, options, enabled, triggers",
        ],
    );
    refused(&with("? [a]\n: b"), &["6: front matter: a key must be text"]);
}

#[test]
fn what_hides_a_value_is_refused() {
    refused(&with("enabled: &on true"), &["6: enabled: YAML anchors (&) are not accepted"]);
    refused(
        &with("options: &o {}\ntriggers: *o"),
        &["6: options: YAML anchors (&) are not accepted", "7: triggers: YAML aliases (*) are not accepted"],
    );
    refused(
        &with("options:\n  permissions: *p"),
        &["7: options.permissions: YAML aliases (*) are not accepted"],
    );
    refused(&with("enabled: !!bool true"), &["6: enabled: YAML tags (!) are not accepted"]);
    refused(&with("triggers: !mine [ui]"), &["6: triggers: YAML tags (!) are not accepted"]);
    refused(&GOOD.replace("model: opus", "model: &m opus"), &["5: model: YAML anchors (&) are not accepted"]);
    refused(
        &with("...\nmodel: x"),
        &["7: front matter: the front matter must be one YAML document without document markers"],
    );
    refused(
        &with("--- \"x\""),
        &["6: front matter: the front matter must be one YAML document without document markers"],
    );
    refused(
        &with("options: [[[[[[[[[a]]]]]]]]]"),
        &["6: options[0][0][0][0][0][0][0]: nested too deeply", "6: options: must be a mapping, not a list"],
    );
}

#[test]
fn broken_files_say_where() {
    refused("", &["1: front matter: the file must begin with a line that is ---"]);
    refused("\n---\n", &["1: front matter: the file must begin with a line that is ---"]);
    refused("---\nname: reviewer\n", &["1: front matter: a line that is --- must close the front matter"]);
    refused(
        &with("triggers: [ui"),
        &["7: triggers[1]: not valid YAML: while parsing a flow sequence, expected ',' or ']'"],
    );
    refused(&GOOD.replace("You", "\n\nYou\0"), &["9: file: NUL characters are not accepted"]);
    assert_eq!(
        read_as(FILE, &[GOOD.as_bytes(), b"one\r\ntwo \xff"].concat()),
        Err(vec![format!("{FILE}:9: file: the text is not valid UTF-8")])
    );
    assert_eq!(
        read_as(FILE, &[GOOD.as_bytes(), vec![b' '; MAX_FILE_BYTES].as_slice()].concat()),
        Err(vec![format!("{FILE}:1: file: the file has 262239 bytes, more than the 262144 allowed")])
    );
}

#[test]
fn a_message_repeats_little_of_the_file_and_never_its_control_characters() {
    let errors = read(&with(&format!("\"a\\n{}\": 1", "b".repeat(5000)))).expect_err("refused");
    let [error] = errors.as_slice() else { panic!("{errors:?}") };
    assert!(error.len() < 400 && !error.contains('\n'), "{error}");
    let many: String = (0..5000).map(|i| format!("key{i}: 1\n")).collect();
    let errors = read(&with(&many)).expect_err("refused");
    assert_eq!(errors.len(), 101);
    assert_eq!(
        errors.last().map(String::as_str),
        Some(".agents/reviewer.md:105: file: and 4900 more errors in this file")
    );
}

#[test]
fn a_bad_file_never_hides_a_good_one() {
    let other = GOOD.replace("reviewer", "author");
    let sources = [
        AgentFileSource { file: ".agents/reviewer.md", bytes: GOOD.as_bytes() },
        AgentFileSource { file: ".agents/broken.md", bytes: b"\xff" },
        AgentFileSource { file: ".agents/author.md", bytes: other.as_bytes() },
    ];
    let parsed = parse_all(sources, &engines());
    let good: Vec<_> = parsed.good.iter().map(|agent| agent.name.as_str()).collect();
    assert_eq!(good, ["author", "reviewer"]);
    let bad: Vec<_> = parsed.bad.iter().map(|bad| bad.file.as_str()).collect();
    assert_eq!(bad, [".agents/broken.md"]);
}

/// Pieces that make files which are nearly right, where a parser's mistakes are.
fn nearly() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "---",
        "...",
        "\n",
        "\r\n",
        "\r",
        " ",
        "  ",
        "\t",
        ": ",
        "- ",
        "? ",
        "[",
        "]",
        "{",
        "}",
        ",",
        "&a",
        "*a",
        "!",
        "!!str",
        "|",
        ">",
        "\"",
        "'",
        "#",
        "%YAML 1.2",
        "\u{feff}",
        "\u{85}",
        "\u{2028}",
        "\0",
        "é",
        "name",
        "reviewer",
        "description",
        "engine",
        "claude-code",
        "model",
        "opus",
        "options",
        "reasoning_effort",
        "high",
        "permissions",
        "ask",
        "enabled",
        "true",
        "triggers",
        "ui",
        "\\",
        "---\nname: reviewer\n",
        "\n---\n",
        "1",
    ]);
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

/// What every result must hold.
fn check(bytes: &[u8]) -> Result<(), TestCaseError> {
    match parse(AgentFileSource { file: FILE, bytes }, &engines()) {
        Ok(agent) => {
            let again = parse(AgentFileSource { file: FILE, bytes: agent.text.as_bytes() }, &engines());
            prop_assert_eq!(again, Ok(agent.clone()));
            prop_assert!(!agent.prompt().is_empty() && !agent.triggers.is_empty());
        }
        Err(bad) => {
            prop_assert!(!bad.errors.is_empty());
            let lines = String::from_utf8_lossy(bytes).split(['\n', '\r']).count();
            for error in &bad.errors {
                prop_assert!(error.line >= 1 && error.line <= lines + 1, "{error}");
                prop_assert!(!error.field.is_empty(), "{error:?}");
            }
            prop_assert!(bad.errors.is_sorted_by_key(|error| error.line));
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        check(&bytes)?;
    }

    #[test]
    fn no_nearly_right_file_makes_it_panic(text in nearly()) {
        check(text.as_bytes())?;
        check(with(&text).as_bytes())?;
    }

    #[test]
    fn normalising_twice_changes_nothing_more(text in nearly()) {
        let once = normalise(&text);
        prop_assert_eq!(normalise(&once), once.clone());
        prop_assert!(!once.contains('\r') && once.ends_with('\n'));
    }

    #[test]
    fn a_prompt_comes_back_as_written(prompt in "[a-zé#:&*-][ -~\n]{0,60}[a-z.]") {
        let agent = read(&GOOD.replace("You review.", &prompt)).expect("good");
        prop_assert_eq!(agent.prompt(), prompt.as_str());
    }
}
