//! Every recorded run, as a snapshot of all that was told.

use crate::support::{Run, names, play, recording, render, transcript};

fn check(kind: &str, run: impl Fn(&str) -> Run) {
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_snapshot_path(format!("../snapshots/codex/{kind}"));
    settings.set_omit_expression(true);
    settings.bind(|| {
        for name in names(kind) {
            insta::assert_snapshot!(name.clone(), render(&play(&run(&name))));
        }
    });
}

#[test]
fn runs_with_the_planned_lines() {
    check("frames", recording);
}

#[test]
fn runs_with_other_lines() {
    check("lines", transcript);
}
