//! The exit codes: one table, in the help and here.

use std::process::ExitCode;

/// How a command ended, for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// What was asked for was done; of `send --wait`, the turn completed.
    Done,
    /// The turn failed or was lost, or something broke that is nobody's input.
    Failed,
    /// The command line could not be understood.
    Usage,
    /// A value, an agent file or the configuration is not valid.
    Invalid,
    /// It does not exist, exists already, or is in a state in which this cannot be done.
    Conflict,
    /// A policy or a missing login forbids it.
    Policy,
    /// A server or a runner could not be reached in time.
    Unreachable,
    /// The turn was cancelled, or this command was interrupted.
    Cancelled,
    /// Whoever read standard output has gone, so that not all was told.
    Unread,
}

impl Exit {
    /// The number that the shell sees.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Invalid => 3,
            Self::Conflict => 4,
            Self::Policy => 5,
            Self::Unreachable => 6,
            Self::Cancelled => 130,
            Self::Unread => 141,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// The table as the help shows it.
pub(crate) const TABLE: &str = "\
Exit codes:
    0  done; with send --wait: the turn completed
    1  the turn failed or was lost, or something broke
    2  the command line could not be understood
    3  a value, an agent file or the configuration is not valid
    4  not found, or in conflict with what is there
    5  a policy or a missing login forbids it
    6  the server or a runner could not be reached
  130  the turn was cancelled, or the command interrupted
  141  whoever read standard output has gone";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_the_help_is_the_table_of_the_code() {
        let all = [
            Exit::Done,
            Exit::Failed,
            Exit::Usage,
            Exit::Invalid,
            Exit::Conflict,
            Exit::Policy,
            Exit::Unreachable,
            Exit::Cancelled,
            Exit::Unread,
        ];
        let told: Vec<&str> =
            TABLE.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(told, all.map(|exit| exit.code().to_string()));
    }
}
