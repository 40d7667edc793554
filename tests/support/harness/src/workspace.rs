//! A workspace as people have it: a git worktree with agent files.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};

/// An agent file to be written.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Its name, which is the file's.
    pub name: String,
    /// Engine.
    pub engine: String,
    /// Model.
    pub model: String,
    /// Value of `options.permissions`, if any.
    pub permissions: Option<String>,
    /// Value of `options.reasoning_effort`, if any.
    pub effort: Option<String>,
    /// Its prompt.
    pub prompt: String,
}

impl Agent {
    /// An agent on Claude Code that may do everything without asking.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            engine: "claude-code".to_owned(),
            model: "sonnet".to_owned(),
            permissions: Some("bypass".to_owned()),
            effort: None,
            prompt: format!("You are {name}. Do what you are asked."),
        }
    }

    /// An agent on Codex that may do everything without asking.
    #[must_use]
    pub fn codex(name: &str) -> Self {
        Self { engine: "codex".to_owned(), model: "gpt-scripted".to_owned(), ..Self::new(name) }
    }

    /// With these permissions: `ask`, `accept-edits` or `bypass`.
    #[must_use]
    pub fn permissions(mut self, permissions: &str) -> Self {
        self.permissions = Some(permissions.to_owned());
        self
    }

    /// With this prompt.
    #[must_use]
    pub fn prompt(mut self, prompt: &str) -> Self {
        prompt.clone_into(&mut self.prompt);
        self
    }

    /// The file's text.
    #[must_use]
    pub fn to_text(&self) -> String {
        let Self { name, engine, model, permissions, effort, prompt } = self;
        let mut text = format!(
            "---\nname: {name}\ndescription: The agent {name} of a test.\nengine: {engine}\nmodel: {model}\n"
        );
        if permissions.is_some() || effort.is_some() {
            text.push_str("options:\n");
        }
        if let Some(effort) = effort {
            let _ = writeln!(text, "  reasoning_effort: {effort}");
        }
        if let Some(permissions) = permissions {
            let _ = writeln!(text, "  permissions: {permissions}");
        }
        let _ = write!(text, "---\n{prompt}\n");
        text
    }
}

/// A git worktree with one commit.
#[derive(Debug, Clone)]
pub struct Workspace {
    path: PathBuf,
}

impl Workspace {
    /// Makes one with these agents in `.agents/`.
    ///
    /// # Errors
    /// If it cannot be written or git fails.
    pub fn create(path: &Path, agents: &[Agent]) -> anyhow::Result<Self> {
        fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
        let path = path.canonicalize().context("the workspace just made is gone")?;
        let workspace = Self { path };
        for agent in agents {
            workspace.write_agent(agent)?;
        }
        workspace.write("README.md", "A workspace of a test.\n")?;
        workspace.git(&["init", "--quiet", "--initial-branch=main"])?;
        workspace.git(&["add", "--all"])?;
        workspace.git(&["commit", "--quiet", "--message=first"])?;
        Ok(workspace)
    }

    /// Where it lies: canonical.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file, with its directories.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.path.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        }
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Writes an agent's file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_agent(&self, agent: &Agent) -> anyhow::Result<()> {
        self.write(&format!(".agents/{}.md", agent.name), &agent.to_text())
    }

    /// What a file says. None if there is none.
    #[must_use]
    pub fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path.join(name)).ok()
    }

    /// How many lines a file has; 0 if there is none.
    #[must_use]
    pub fn lines(&self, name: &str) -> usize {
        self.read(name).map_or(0, |text| text.lines().count())
    }

    /// Runs git here, with nothing of the person's own configuration.
    ///
    /// # Errors
    /// If git fails, with what it said.
    pub fn git(&self, args: &[&str]) -> anyhow::Result<String> {
        let output = Command::new("git")
            .args([
                "-c",
                "user.name=Test",
                "-c",
                "user.email=test@example.invalid",
                "-c",
                "commit.gpgsign=false",
            ])
            .args(args)
            .current_dir(&self.path)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", "/nonexistent")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .output()
            .context("cannot run git")?;
        if !output.status.success() {
            bail!("git {args:?} failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_is_a_clean_worktree_with_its_agents() {
        let directory = tempfile::tempdir().unwrap();
        let agents = [Agent::new("builder"), Agent::new("critic").permissions("ask")];
        let workspace = Workspace::create(&directory.path().join("w"), &agents).unwrap();
        assert_eq!(workspace.git(&["status", "--porcelain"]).unwrap(), "");
        assert!(workspace.read(".agents/critic.md").unwrap().contains("\n  permissions: ask\n"));
        assert_eq!(workspace.lines(".agents/absent.md"), 0);
    }
}
