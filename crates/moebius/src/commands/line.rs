//! The line that a user of the chat types: completion of commands and file names, and a history that lasts.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use rustyline::completion::{Completer, FilenameCompleter, Pair};
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{CompletionType, Config, Context, Editor, Helper};

use crate::machine;
use crate::out::note;

/// Lines of the history.
const MAX_LINES: usize = 1000;

/// What the chat knows of lines.
pub struct Words {
    /// Commands, and whether a file name stands behind them.
    commands: &'static [(&'static str, bool)],
    files: FilenameCompleter,
}

/// An editor of lines, and the file of its history, where it has one.
pub struct Lines {
    editor: Editor<Words, FileHistory>,
    history: Option<PathBuf>,
}

impl Lines {
    /// With the lines of earlier starts where `remember` says so.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub fn new(commands: &'static [(&'static str, bool)], remember: bool) -> Result<Lines> {
        let config = Config::builder().completion_type(CompletionType::List).max_history_size(MAX_LINES);
        let config = config.context("failed to open the terminal")?.history_ignore_space(true).build();
        let mut editor = Editor::with_config(config).context("failed to open the terminal")?;
        editor.set_helper(Some(Words { commands, files: FilenameCompleter::new() }));
        let history = if remember { history_file() } else { None };
        // There is none at the first start; one that cannot be read is none either.
        history.iter().for_each(|path| drop(editor.load_history(path)));
        Ok(Lines { editor, history })
    }

    /// Returns a message: a line, joined with the next ones while it ends in a backslash. What is pasted may have
    /// several lines.
    pub fn read(&mut self, prompt: &str) -> rustyline::Result<String> {
        let mut message = self.editor.readline(prompt)?;
        while message.ends_with('\\') {
            message.pop();
            message.push('\n');
            message.push_str(&self.editor.readline(if prompt.is_empty() { "" } else { ". " })?);
        }
        Ok(message)
    }

    /// Remembers a line, in the file too: a program that is ended has lost nothing.
    pub fn remember(&mut self, line: &str) {
        // A convenience: a line that cannot be remembered is still answered.
        let added = self.editor.add_history_entry(line).unwrap_or(false);
        let Some(path) = self.history.as_ref().filter(|_| added) else { return };
        if let Err(error) = self.editor.append_history(path) {
            note!("failed to save the history in {}: {error}", path.display());
            self.history = None;
        }
    }
}

/// `$XDG_STATE_HOME/moebius/history`, or the same under `~/.local/state`, in a folder for this user alone.
fn history_file() -> Option<PathBuf> {
    let folder = machine::Folder::State.path()?;
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(&folder).ok()?;
    Some(folder.join("history"))
}

impl Completer for Words {
    type Candidate = Pair;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let before = &line[..pos];
        let Some((command, _)) = before.split_once(' ') else {
            let known = self.commands.iter().filter(|(name, _)| before.starts_with('/') && name.starts_with(before));
            let pair = |(name, takes_file): &(&str, bool)| Pair {
                display: (*name).into(),
                replacement: format!("{name}{}", if *takes_file { " " } else { "" }),
            };
            return Ok((0, known.map(pair).collect()));
        };
        match self.commands.iter().any(|(name, takes_file)| *name == command && *takes_file) {
            true => self.files.complete_path(line, pos),
            false => Ok((pos, Vec::new())),
        }
    }
}

impl Hinter for Words {
    type Hint = String;
}

impl Highlighter for Words {}
impl Validator for Words {}
impl Helper for Words {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_files_are_completed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("talk.json"), "").unwrap();
        let words = Words {
            commands: &[("/save", true), ("/system", false), ("/reset", false)],
            files: FilenameCompleter::new(),
        };
        let history = FileHistory::new();
        let complete = |line: &str| -> Vec<String> {
            let (_, pairs) = words.complete(line, line.len(), &Context::new(&history)).unwrap();
            pairs.into_iter().map(|pair| pair.replacement).collect()
        };
        assert_eq!(complete("/s"), ["/save ", "/system"]);
        assert_eq!(complete("/x"), [""; 0]);
        assert_eq!(complete("s"), [""; 0]);
        assert_eq!(complete("/reset t"), [""; 0]);
        let path = folder.path().join("ta");
        assert_eq!(complete(&format!("/save {}", path.display())).len(), 1);
    }

    /// What was typed is private, and there at the next start.
    #[cfg(unix)]
    #[test]
    fn the_history_lasts_and_is_private() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("history");
        for line in ["first", "second"] {
            let mut lines = Lines::new(&[], false).unwrap();
            lines.history = Some(path.clone());
            let _ = lines.editor.load_history(&path);
            lines.remember(line);
            lines.remember(" private");
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("first\nsecond\n") && !text.contains("private"), "{text}");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
}
