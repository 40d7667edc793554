//! Agent files: `.agents/<name>.md` with YAML front matter and a prompt.
