//! The contracts: everything in them is commented, and they follow the usual rules of style.

use std::collections::{BTreeMap, BTreeSet};

use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorProto};

use crate::{assert_none, tracked_files};

/// Field numbers in descriptor.proto, of which the paths of source locations are made.
const MESSAGES: i32 = 4;
const ENUMS: i32 = 5;
const SERVICES: i32 = 6;
const METHODS: i32 = 2;
const FIELDS: i32 = 2;
const NESTED_MESSAGES: i32 = 3;
const NESTED_ENUMS: i32 = 4;
const ONEOFS: i32 = 8;
const VALUES: i32 = 2;

fn files() -> Vec<FileDescriptorProto> {
    let root = roundhouse_test_support::bins::repository().join("proto");
    let names: Vec<_> = tracked_files()
        .into_iter()
        .filter(|name| name.extension().is_some_and(|extension| extension == "proto"))
        .map(|name| root.parent().expect("a parent").join(name))
        .collect();
    let mut compiler = protox::Compiler::new([&root]).expect("proto/ is there");
    compiler.include_source_info(true).include_imports(false);
    compiler.open_files(names).expect("the protos compile");
    let files = compiler.file_descriptor_set().file;
    assert!(files.len() >= 7, "where are the protos? {}", files.len());
    files
}

/// Complaints about one file, with what is needed to find comments.
struct Review<'a> {
    file: &'a str,
    package: &'a str,
    commented: BTreeSet<Vec<i32>>,
    complaints: Vec<String>,
}

impl Review<'_> {
    fn needs_comment(&mut self, path: &[i32], what: &str) {
        if !self.commented.contains(path) {
            self.complaints.push(format!("{}: {what} has no comment", self.file));
        }
    }

    fn complain(&mut self, what: &str) {
        self.complaints.push(format!("{}: {what}", self.file));
    }

    fn message(&mut self, message: &DescriptorProto, path: &[i32], outer: &str) {
        if message.options.as_ref().is_some_and(|options| options.map_entry()) {
            return;
        }
        let name = format!("{outer}{}", message.name());
        self.needs_comment(path, &name);
        if !is_pascal(message.name()) {
            self.complain(&format!("{name} is not in PascalCase"));
        }
        for (at, field) in message.field.iter().enumerate() {
            self.needs_comment(&join(path, FIELDS, at), &format!("{name}.{}", field.name()));
            if !is_lower_snake(field.name()) {
                self.complain(&format!("{name}.{} is not in lower_snake_case", field.name()));
            }
        }
        for (at, oneof) in message.oneof_decl.iter().enumerate() {
            // What proto3 makes of `optional` is a oneof, too.
            if !oneof.name().starts_with('_') {
                self.needs_comment(&join(path, ONEOFS, at), &format!("oneof {name}.{}", oneof.name()));
            }
        }
        for (at, nested) in message.nested_type.iter().enumerate() {
            self.message(nested, &join(path, NESTED_MESSAGES, at), &format!("{name}."));
        }
        for (at, nested) in message.enum_type.iter().enumerate() {
            self.enumeration(nested, &join(path, NESTED_ENUMS, at), &format!("{name}."));
        }
    }

    fn enumeration(&mut self, enumeration: &EnumDescriptorProto, path: &[i32], outer: &str) {
        let name = format!("{outer}{}", enumeration.name());
        self.needs_comment(path, &name);
        if !is_pascal(enumeration.name()) {
            self.complain(&format!("{name} is not in PascalCase"));
        }
        let prefix = format!("{}_", upper_snake(enumeration.name()));
        for (at, value) in enumeration.value.iter().enumerate() {
            self.needs_comment(&join(path, VALUES, at), &format!("{name}.{}", value.name()));
            if !value.name().starts_with(&prefix) {
                self.complain(&format!("{name}.{} does not begin with {prefix}", value.name()));
            }
            if value.number() == 0 && value.name() != format!("{prefix}UNSPECIFIED") {
                self.complain(&format!("the zero of {name} is {}, not {prefix}UNSPECIFIED", value.name()));
            }
        }
        if enumeration.value.first().is_none_or(|first| first.number() != 0) {
            self.complain(&format!("{name} does not begin with its zero"));
        }
    }

    fn file(&mut self, file: &FileDescriptorProto) {
        let directory = self.file.rsplit_once('/').map_or("", |(directory, _)| directory);
        if directory.replace('/', ".") != self.package {
            self.complain(&format!("package {} does not lie in its directory", self.package));
        }
        let base = self.file.rsplit('/').next().unwrap_or_default().trim_end_matches(".proto");
        if !is_lower_snake(base) {
            self.complain("the file's name is not in lower_snake_case");
        }
        for (at, message) in file.message_type.iter().enumerate() {
            self.message(message, &[MESSAGES, index(at)], "");
        }
        for (at, enumeration) in file.enum_type.iter().enumerate() {
            self.enumeration(enumeration, &[ENUMS, index(at)], "");
        }
        for (at, service) in file.service.iter().enumerate() {
            let path = [SERVICES, index(at)];
            self.needs_comment(&path, service.name());
            if !service.name().ends_with("Service") {
                self.complain(&format!("{} does not end with Service", service.name()));
            }
            for (at, method) in service.method.iter().enumerate() {
                let name = format!("{}.{}", service.name(), method.name());
                self.needs_comment(&join(&path, METHODS, at), &name);
                for (kind, got) in [("Request", method.input_type()), ("Response", method.output_type())] {
                    let wanted = format!(".{}.{}{kind}", self.package, method.name());
                    if got != wanted {
                        self.complain(&format!("{name} has {got} where {wanted} belongs"));
                    }
                }
            }
        }
    }
}

fn review(file: &FileDescriptorProto) -> Vec<String> {
    let info = file.source_code_info.clone().unwrap_or_default();
    let commented = info
        .location
        .iter()
        .filter(|location| {
            location.leading_comments().trim().len() > 1 || location.trailing_comments().trim().len() > 1
        })
        .map(|location| location.path.clone())
        .collect();
    let mut review = Review { file: file.name(), package: file.package(), commented, complaints: Vec::new() };
    review.file(file);
    review.complaints
}

#[test]
fn every_part_of_the_contracts_is_commented_and_named_by_the_rules() {
    let complaints: Vec<String> = files().iter().flat_map(review).collect();
    assert_none("the contracts", &complaints);
}

#[test]
fn what_breaks_the_rules_is_found() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(directory.path().join("a/v1")).unwrap();
    let text = "syntax = \"proto3\";\npackage a.v1;\n\
        // A service.\nservice Bad {\n  rpc Get(Thing) returns (GetResponse);\n}\n\
        // A thing.\nmessage Thing {\n  string camelCase = 1;\n  oneof either {\n    // One.\n    string one = 2;\n  }\n}\n\
        message GetResponse {}\n\
        // Kinds.\nenum Kind {\n  // None.\n  NONE = 0;\n  // One.\n  KIND_ONE = 1;\n}\n";
    std::fs::write(directory.path().join("a/v1/bad.proto"), text).unwrap();
    let mut compiler = protox::Compiler::new([directory.path()]).unwrap();
    compiler.include_source_info(true);
    compiler.open_file("a/v1/bad.proto").unwrap();
    let complaints: Vec<String> = compiler.file_descriptor_set().file.iter().flat_map(review).collect();
    let wanted = [
        "GetResponse has no comment",
        "Thing.camelCase has no comment",
        "Thing.camelCase is not in lower_snake_case",
        "oneof Thing.either has no comment",
        "Kind.NONE does not begin with KIND_",
        "the zero of Kind is NONE, not KIND_UNSPECIFIED",
        "Bad does not end with Service",
        "Bad.Get has no comment",
        "Bad.Get has .a.v1.Thing where .a.v1.GetRequest belongs",
    ];
    for wanted in wanted {
        assert!(complaints.contains(&format!("a/v1/bad.proto: {wanted}")), "{wanted}: {complaints:#?}");
    }
    assert_eq!(complaints.len(), wanted.len(), "{complaints:#?}");
}

#[test]
fn no_message_serves_two_calls() {
    let mut used: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in files() {
        for service in &file.service {
            for method in &service.method {
                for message in [method.input_type(), method.output_type()] {
                    let call = format!("{}.{}", service.name(), method.name());
                    used.entry(message.to_owned()).or_default().push(call);
                }
            }
        }
    }
    assert!(!used.is_empty());
    let complaints: Vec<String> = used
        .into_iter()
        .filter(|(_, calls)| calls.len() > 1)
        .map(|(message, calls)| format!("{message}: {calls:?}"))
        .collect();
    assert_none("messages shared by calls", &complaints);
}

fn index(at: usize) -> i32 {
    i32::try_from(at).expect("not that many")
}

fn join(path: &[i32], field: i32, at: usize) -> Vec<i32> {
    let mut path = path.to_vec();
    path.extend([field, index(at)]);
    path
}

fn is_pascal(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_uppercase())
        && name.chars().all(|letter| letter.is_ascii_alphanumeric())
}

fn is_lower_snake(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.chars().all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_')
        && !name.contains("__")
        && !name.ends_with('_')
}

fn upper_snake(name: &str) -> String {
    let mut snake = String::new();
    for (at, letter) in name.chars().enumerate() {
        if at > 0 && letter.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_uppercase());
    }
    snake
}

#[test]
fn names_are_told_apart() {
    assert_eq!(upper_snake("TurnStatus"), "TURN_STATUS");
    assert!(is_lower_snake("turn_id") && !is_lower_snake("turnId") && !is_lower_snake("turn__id"));
    assert!(is_pascal("GetTurnRequest") && !is_pascal("get_turn"));
}
