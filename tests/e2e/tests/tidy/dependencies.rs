//! Dependencies point one way, as cargo itself sees them.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{CargoOpt, DependencyKind, Metadata, MetadataCommand, PackageId};

use crate::assert_none;

/// Which of our crates each of our crates may use. What is not here may use none.
const MAY_USE: &[(&str, &[&str])] = &[
    ("proto", &[]),
    ("config", &[]),
    ("domain", &[]),
    ("store", &["domain"]),
    ("control-plane", &["proto", "config", "domain", "store"]),
    ("engines", &[]),
    ("process", &[]),
    ("engine-runner", &["proto", "config", "engines", "process"]),
    ("cli", &["proto", "config", "domain", "control-plane", "engine-runner", "models"]),
    ("models", &[]),
    ("fake-engine", &[]),
    ("test-support", &["proto", "models"]),
    ("e2e", &["proto", "models", "test-support"]),
    ("bench", &["proto", "models", "test-support"]),
    ("fuzz", &["engines", "process", "engine-runner"]),
];

/// What a crate may use for its own tests beside that.
const TESTS_MAY_USE: [&str; 3] = ["models", "fake-engine", "test-support"];

/// What a crate must not use, not even through others.
const NEVER: &[(&str, &[&str])] = &[
    ("domain", &["tonic", "prost", "rusqlite", "tokio"]),
    ("engines", &["tonic", "prost", "rusqlite", "tokio", "roundhouse-process"]),
    ("process", &["tonic", "prost", "rusqlite", "tokio"]),
    ("store", &["tonic", "prost"]),
    ("domain", &["roundhouse-engines", "roundhouse-process", "roundhouse-engine-runner"]),
    ("store", &["roundhouse-engines", "roundhouse-process", "roundhouse-engine-runner"]),
    (
        "control-plane",
        &["roundhouse-engines", "roundhouse-process", "roundhouse-engine-runner", "roundhouse-models"],
    ),
    (
        "engine-runner",
        &[
            "roundhouse-domain",
            "roundhouse-store",
            "roundhouse-control-plane",
            "roundhouse-models",
            "rusqlite",
        ],
    ),
];

fn metadata() -> Metadata {
    MetadataCommand::new()
        .manifest_path(roundhouse_test_support::bins::repository().join("Cargo.toml"))
        .features(CargoOpt::AllFeatures)
        .other_options(["--offline".to_owned()])
        .exec()
        .expect("cargo metadata works offline: run `cargo fetch` once")
}

fn short(name: &str) -> Option<&str> {
    name.strip_prefix("roundhouse-")
}

#[test]
fn our_crates_use_each_other_only_as_the_design_allows() {
    let metadata = metadata();
    let mut complaints = Vec::new();
    let mut known = BTreeSet::new();
    for package in metadata.workspace_packages() {
        let Some(name) = short(&package.name) else {
            complaints.push(format!("{} is not named roundhouse-*", package.name));
            continue;
        };
        known.insert(name.to_owned());
        let Some((_, allowed)) = MAY_USE.iter().find(|(known, _)| *known == name) else {
            complaints.push(format!("{name} is not in the list of crates and what they may use"));
            continue;
        };
        for dependency in &package.dependencies {
            let Some(used) = short(&dependency.name) else { continue };
            let for_tests = dependency.kind == DependencyKind::Development;
            // An integration test may use its own crate.
            let fine =
                allowed.contains(&used) || for_tests && (TESTS_MAY_USE.contains(&used) || used == name);
            if !fine {
                complaints.push(format!("{name} must not depend on {used} ({})", dependency.kind));
            }
        }
    }
    for (name, _) in MAY_USE {
        if !known.contains(*name) {
            complaints.push(format!("{name} is in the list, but there is no such crate"));
        }
    }
    assert_none("dependencies between our crates", &complaints);
}

#[test]
fn nobody_reaches_what_is_none_of_their_business_through_others() {
    let metadata = metadata();
    let mut complaints = Vec::new();
    for (name, forbidden) in NEVER {
        let reached = reached_from(&metadata, &format!("roundhouse-{name}"));
        for (found, path) in &reached {
            if forbidden.contains(&found.as_str()) {
                complaints.push(format!("{name} reaches {found}: {}", path.join(" -> ")));
            }
        }
        assert!(reached.contains_key(&format!("roundhouse-{name}")), "{name} was not looked at");
    }
    assert_none("dependencies through others", &complaints);
}

/// Who may call the system directly: the crate that is there for it, the tool that has to misbehave, and, in safe code
/// alone, the command line for what it does to itself and the tests that need a terminal or a network of their own.
const MAY_CALL_THE_SYSTEM: &[(&str, &[&str])] = &[
    ("roundhouse-process", &["nix", "libc"]),
    ("roundhouse-fake-engine", &["nix", "libc"]),
    ("roundhouse-cli", &["rustix"]),
    ("roundhouse-e2e", &["rustix"]),
    ("roundhouse-test-support", &["rustix"]),
];

#[test]
fn only_the_process_crate_speaks_to_the_system_directly() {
    let mut complaints = Vec::new();
    for package in metadata().workspace_packages() {
        for dependency in &package.dependencies {
            let system = matches!(dependency.name.as_str(), "nix" | "libc" | "rustix" | "syscalls");
            let may = MAY_CALL_THE_SYSTEM
                .iter()
                .any(|(who, what)| *who == package.name.as_str() && what.contains(&dependency.name.as_str()));
            if system && !may {
                complaints.push(format!("{} depends on {}", package.name, dependency.name));
            }
        }
    }
    assert_none("system crates outside engine-runner/process", &complaints);
}

/// Everything a crate uses to run, by name, with one way to it. Tests and build scripts do not count.
fn reached_from(metadata: &Metadata, name: &str) -> BTreeMap<String, Vec<String>> {
    let resolve = metadata.resolve.as_ref().expect("cargo resolved the dependencies");
    let names: BTreeMap<&PackageId, &str> =
        metadata.packages.iter().map(|package| (&package.id, package.name.as_str())).collect();
    let start =
        metadata.packages.iter().find(|package| package.name.as_str() == name).expect("a crate of ours");
    let mut reached = BTreeMap::from([(name.to_owned(), vec![name.to_owned()])]);
    let mut open = vec![&start.id];
    while let Some(id) = open.pop() {
        let node = resolve.nodes.iter().find(|node| node.id == *id).expect("every package has a node");
        let way = reached[names[id]].clone();
        for dependency in &node.deps {
            let runs = dependency.dep_kinds.iter().any(|info| info.kind == DependencyKind::Normal);
            let found = names[&dependency.pkg];
            if runs && !reached.contains_key(found) {
                let mut way = way.clone();
                way.push(found.to_owned());
                reached.insert(found.to_owned(), way);
                open.push(&dependency.pkg);
            }
        }
    }
    reached
}
