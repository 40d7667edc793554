//! The turns of the demo: what is said to whom, what the scripted model answers, and what should come of it.

use std::path::Path;

use roundhouse_proto::control::v1::TurnStatus;
use roundhouse_proto::engine::v1::Origin;

use crate::demo::stage::{BUILDER, Place, REVIEWER};

/// The file that the first turn writes.
pub(super) const NOTES: &str = "NOTES.md";
/// The file by which the long command says that it runs.
pub(super) const RUNNING: &str = "check.running";

/// What the demo does while a turn runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meanwhile {
    Nothing,
    /// Cancels the turn once its tool runs.
    Cancel,
    /// Kills the runner in the middle of the answer, and starts it again.
    KillRunner,
}

/// One turn.
pub(super) struct Act {
    /// For the table.
    pub(super) what: &'static str,
    /// The agent that is asked.
    pub(super) agent: &'static str,
    /// Where.
    pub(super) place: Place,
    /// What is said to it; its first words are what the scripted model listens for.
    pub(super) says: &'static str,
    pub(super) meanwhile: Meanwhile,
    /// How it should end.
    pub(super) outcome: TurnStatus,
    /// How its session should come to be.
    pub(super) origin: Origin,
    /// Earlier turns that the session itself should bring along.
    pub(super) natively: &'static [usize],
    /// Earlier turns that should be given once, as context.
    pub(super) as_context: &'static [usize],
}

pub(super) const ACTS: [Act; 5] = [
    Act {
        what: "a tool writes a file",
        agent: BUILDER,
        place: Place::First,
        says: "Write a file NOTES.md with one sentence on what a roundhouse is, then say that it is done.",
        meanwhile: Meanwhile::Nothing,
        outcome: TurnStatus::Completed,
        origin: Origin::Started,
        natively: &[],
        as_context: &[],
    },
    Act {
        what: "another engine goes on",
        agent: REVIEWER,
        place: Place::First,
        says: "What did the builder just do? Look at the file, and say in one sentence whether it is right.",
        meanwhile: Meanwhile::Nothing,
        outcome: TurnStatus::Completed,
        origin: Origin::Started,
        natively: &[],
        as_context: &[1],
    },
    Act {
        what: "back, and kill -9 of the runner",
        agent: BUILDER,
        place: Place::First,
        says: "Tell me in about sixty words how the turntable of a roundhouse works. Use no tool.",
        meanwhile: Meanwhile::KillRunner,
        outcome: TurnStatus::Completed,
        origin: Origin::Resumed,
        natively: &[1],
        as_context: &[2],
    },
    Act {
        what: "cancelled in a tool",
        agent: BUILDER,
        place: Place::First,
        says: "Run exactly this command with Bash and wait for it: \
               echo yes > check.running && node -e 'setTimeout(() => {}, 120000)'",
        meanwhile: Meanwhile::Cancel,
        outcome: TurnStatus::Cancelled,
        origin: Origin::Resumed,
        natively: &[1, 3],
        // The second was given with the third, and is part of the session since.
        as_context: &[2],
    },
    Act {
        what: "on the second runner",
        agent: BUILDER,
        place: Place::Second,
        says: "What have we done so far? Answer in one sentence, without a tool.",
        meanwhile: Meanwhile::Nothing,
        outcome: TurnStatus::Completed,
        origin: Origin::Started,
        natively: &[],
        as_context: &[1, 2, 3, 4],
    },
];

/// What the scripted model says: words to listen for, and a script.
pub(super) fn scripts(workspace: &Path) -> Vec<(&'static str, String)> {
    let notes = workspace.join(NOTES);
    let slowly: String = "The turntable is a bridge on a pivot. It carries one engine at a time, turns until its \
        rails meet those of a stall, and is locked there. The engine rolls off, and the bridge is free for the next. \
        A small motor, or two patient people at a long lever, is all it takes, because the weight is in balance."
        .split_inclusive(' ')
        .map(|word| format!("[[text:{word}]][[pause ms=80]]"))
        .collect();
    vec![
        (
            "Write a file NOTES.md",
            format!(
                "[[text:I will write it down.]][[write path={}:A roundhouse is where engines are kept, turned round \
                 and put back on the track.\n]][[text:NOTES.md is written.]]",
                notes.display()
            ),
        ),
        (
            "What did the builder just do?",
            "[[text:I look at it.]][[bash:cat NOTES.md]][[text:The builder wrote NOTES.md, and it is right: that is \
             what a roundhouse is.]]"
                .to_owned(),
        ),
        ("Tell me in about sixty words", slowly),
        (
            "Run exactly this command",
            "[[text:I start the command.]][[bash:echo yes > check.running && node -e 'setTimeout(() => {}, 120000)']]\
             [[text:The command has ended.]]"
                .to_owned(),
        ),
        (
            "What have we done so far?",
            "[[text:We wrote NOTES.md, had it reviewed, talked about the turntable while the runner was killed and \
             came back, and stopped a long command half way.]]"
                .to_owned(),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use roundhouse_models::Script;

    use super::*;

    #[test]
    fn every_act_has_a_script_that_can_be_read_and_none_answers_another() {
        let scripts = scripts(Path::new("/w"));
        for act in &ACTS {
            let heard: Vec<_> = scripts.iter().filter(|(words, _)| act.says.contains(words)).collect();
            assert_eq!(heard.len(), 1, "{}", act.says);
        }
        for (_, script) in &scripts {
            assert!(!Script::parse(script).unwrap().replies().is_empty());
        }
    }

    #[test]
    fn every_act_says_of_each_earlier_one_how_it_is_told() {
        for (number, act) in (1..).zip(&ACTS) {
            let mut told: Vec<usize> = [act.natively, act.as_context].concat();
            told.sort_unstable();
            assert_eq!(told, (1..number).collect::<Vec<_>>(), "turn {number}");
        }
    }
}
