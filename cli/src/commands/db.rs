//! `db`: what is done to the control plane's database on the host where it lies. No server is asked.

use std::path::{Path, PathBuf};

use roundhouse_control_plane::DATABASE;
use roundhouse_control_plane::upkeep::{self, CheckReport, Error};
use serde_json::{Value, json};

use crate::args::{DbArgs, DbCommand, Global};
use crate::commands::configuration;
use crate::exit::Exit;
use crate::output::Output;
use crate::status::Failure;

pub(crate) async fn run(global: &Global, args: DbArgs, output: Output) -> Result<Exit, Failure> {
    let path = database(global, args.state_dir)?;
    // All of it blocks, and a large database takes its time.
    tokio::task::spawn_blocking(move || act(&path, &args.what, output))
        .await
        .map_err(|error| Failure::new(Exit::Failed, format!("it broke off: {error}")))?
}

fn database(global: &Global, state_dir: Option<PathBuf>) -> Result<PathBuf, Failure> {
    let directory = match state_dir {
        // As `up` lays it out.
        Some(directory) => directory.join("control-plane"),
        None => configuration(global)?.control_plane.state_dir,
    };
    Ok(directory.join(DATABASE))
}

fn act(path: &Path, what: &DbCommand, output: Output) -> Result<Exit, Failure> {
    let needed = match what {
        DbCommand::Check | DbCommand::Backup { .. } => path,
        // What is restored need not replace anything.
        DbCommand::Restore { file } => file,
    };
    if !needed.exists() {
        return Err(Failure::new(Exit::Conflict, format!("there is no database {}", needed.display())).next(
            "--state-dir names the directory that `up` was given, else control_plane.state_dir holds",
        ));
    }
    match what {
        DbCommand::Check => {
            let report = upkeep::check(path).map_err(|error| failure(&error))?;
            output.result(|| json_of(path, &report), || human(path, &report));
            Ok(if report.problems.is_empty() { Exit::Done } else { Exit::Failed })
        }
        DbCommand::Backup { file } => {
            let report = upkeep::backup(path, file).map_err(|error| failure(&error))?;
            output.result(
                || json!({"backup": file, "check": json_of(file, &report)}),
                || format!("{} is a copy of {}\n{}", file.display(), path.display(), human(file, &report)),
            );
            Ok(if report.problems.is_empty() { Exit::Done } else { Exit::Failed })
        }
        DbCommand::Restore { file } => {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let suffix = format!(".replaced-{}", now.as_millis());
            let restored = upkeep::restore(path, file, &suffix).map_err(|error| failure(&error))?;
            output.result(
                || json!({"restored": path, "kept": restored.kept, "check": json_of(path, &restored.report)}),
                || {
                    let kept = match &restored.kept {
                        Some(kept) => format!("what was there is kept as {}", kept.display()),
                        None => "there was none before".to_owned(),
                    };
                    format!(
                        "{} is what {} holds; {kept}\nTurns that ran since the copy was made are not in it; runners tell \
                         of theirs when they come back.",
                        path.display(),
                        file.display()
                    )
                },
            );
            Ok(Exit::Done)
        }
    }
}

fn json_of(path: &Path, report: &CheckReport) -> Value {
    json!({
        "database": path,
        "whole": report.problems.is_empty(),
        "schema": report.schema,
        "known_schema": report.known_schema,
        "conversations": report.conversations,
        "turns": report.turns,
        "changes": report.changes,
        "problems": report.problems,
    })
}

fn human(path: &Path, report: &CheckReport) -> String {
    if !report.problems.is_empty() {
        return format!("{} is not whole:\n  {}", path.display(), report.problems.join("\n  "));
    }
    let older = match report.schema < report.known_schema {
        true => format!(" (the next start brings it to {})", report.known_schema),
        false => String::new(),
    };
    format!(
        "{} is whole: schema {}{older}, {} conversations, {} turns, {} events",
        path.display(),
        report.schema,
        report.conversations,
        report.turns,
        report.changes
    )
}

fn failure(error: &Error) -> Failure {
    let told = error.to_string();
    match error {
        Error::InUse { .. } => Failure::new(Exit::Conflict, told).next("stop the control plane first"),
        Error::Invalid { field: "target", .. } => {
            Failure::new(Exit::Conflict, told).next("choose another name; nothing is overwritten")
        }
        Error::Invalid { .. } | Error::NewerSchema { .. } => Failure::new(Exit::Invalid, told)
            .next("nothing was changed; `roundhouse db check` says what a database holds"),
        _ => Failure::new(Exit::Failed, told)
            .next("nothing was changed; look at the disk and at who may read it"),
    }
}
