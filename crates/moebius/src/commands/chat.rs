//! `moebius chat`: a conversation at the terminal (or from a pipe, one message a line).

use std::collections::HashMap;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use engine::images::Pictures;
use engine::scheduler::{FinishReason, Request};
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use crate::answer::{Interrupt, generate, summary};
use crate::args::ChatArgs;
use crate::commands::line::Lines;
use crate::input;
use crate::load::{self, Session, Shown};
use crate::out::{self, note};
use crate::show::Show;

const HELP: &str = "\
/reset          forget the conversation (the system message stays)
/system TEXT    set the system message and forget the conversation; without
                TEXT remove it
/image FILE     show an image with the next message; a message that begins
                with the name of an image file shows it too
/regen          answer the last message again
/save FILE      write the conversation as JSON messages
/load FILE      go on with a conversation that was saved
/help           this list
/quit           leave (so does Ctrl-D)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one, and a
paste may have several. Tab completes commands and file names. A line that
begins with a blank is not kept in the history.";

/// Commands, and whether a file name stands behind them.
const COMMANDS: &[(&str, bool)] = &[
    ("/reset", false),
    ("/system", false),
    ("/image", true),
    ("/regen", false),
    ("/save", true),
    ("/load", true),
    ("/help", false),
    ("/quit", false),
];

pub fn run(args: &ChatArgs) -> Result<()> {
    let model = load::open(args.model.path()?.as_deref())?.stretched(args.engine.step.rope_scaling)?;
    let model = model.with_template(args.template.chat_template_file.as_deref())?.seeing(&args.sight)?;
    let terminal = std::io::stdin().is_terminal();
    if model.embedded && !args.quiet {
        note!("{}", crate::embedded::notice());
    }
    let mut chat = Chat {
        session: load::start(model, &args.engine, args.draft.clone())?,
        history: Vec::new(),
        shown: HashMap::new(),
        waiting: Vec::new(),
        system: args.system.clone(),
        n_again: 0,
        n_left_out: 0,
    };
    load::Whole::refuse(chat.session.whole)?;
    if chat.session.template.is_none() {
        bail!("the model has no chat template: name one with --chat-template-file, or use `moebius run --raw`");
    }
    chat.session.set_thoughts(&args.template);
    chat.session.placement.iter().filter(|_| !args.quiet).for_each(|placement| note!("{placement}"));
    chat.session.warnings.iter().for_each(|warning| note!("warning: {warning}"));
    let interrupt = Interrupt::install()?;
    chat.session.engine.set_interrupt(interrupt.flag());
    let mut lines = Lines::new(COMMANDS, terminal && !args.no_history)?;
    if terminal && !args.quiet {
        note!("/help lists the commands");
    }
    loop {
        let line = match lines.read(if terminal { "> " } else { "" }) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => continue,
            Err(ReadlineError::Eof) => return Ok(()),
            Err(error) => return Err(error).context("failed to read a line"),
        };
        let typed = line;
        let line = typed.trim();
        if line.is_empty() {
            continue;
        }
        lines.remember(&typed);
        match Action::parse(line) {
            Ok(Action::Quit) => return Ok(()),
            Ok(action) => {
                if let Err(error) = chat.act(action, args, &interrupt) {
                    note!("{}", out::chain(&error));
                }
            }
            Err(problem) => note!("{problem}"),
        }
    }
}

/// The command of a line.
#[derive(Debug, PartialEq, Eq)]
enum Action<'a> {
    Say(&'a str),
    Reset,
    ShowSystem,
    System(&'a str),
    Load(&'a str),
    Image(&'a str),
    Regenerate,
    Save(&'a str),
    Help,
    Quit,
}

impl<'a> Action<'a> {
    fn parse(line: &'a str) -> Result<Action<'a>, String> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        Ok(match word {
            "/reset" => Action::Reset,
            "/system" if rest.trim().is_empty() => Action::ShowSystem,
            "/system" if rest.trim() == "off" => Action::System(""),
            "/system" => Action::System(rest.trim()),
            "/image" if rest.trim().is_empty() => return Err("/image needs a file name".into()),
            "/image" => Action::Image(rest.trim()),
            "/regen" => Action::Regenerate,
            "/save" if rest.trim().is_empty() => return Err("/save needs a file name".into()),
            "/save" => Action::Save(rest.trim()),
            "/help" => Action::Help,
            "/load" if rest.trim().is_empty() => return Err("/load needs a file name".into()),
            "/load" => Action::Load(rest.trim()),
            "/quit" | "/exit" | "/bye" => Action::Quit,
            _ if word.starts_with('/') && !word[1..].contains('/') => {
                return Err(format!("{word} is not a command; /help lists them"));
            }
            _ => Action::Say(line),
        })
    }
}

struct Chat {
    session: Session,
    /// Messages of the user and the assistant, with the names of their images.
    history: Vec<Value>,
    /// Images of the conversation by the names of their files.
    shown: HashMap<String, Shown>,
    /// Names of those that go with the next message.
    waiting: Vec<Value>,
    system: Option<String>,
    /// Repetitions of an answer: a fixed seed should not repeat the text.
    n_again: u64,
    /// Oldest messages that no longer fit the context.
    n_left_out: usize,
}

impl Chat {
    fn act(&mut self, action: Action<'_>, args: &ChatArgs, interrupt: &Interrupt) -> Result<()> {
        match action {
            Action::Say(text) => {
                let (files, text) = if self.session.eyes.is_some() { dropped(text) } else { (Vec::new(), text) };
                files.iter().try_for_each(|file| self.show(file))?;
                if text.is_empty() {
                    return Ok(());
                }
                let mut message = json!({"role": "user", "content": text});
                if !self.waiting.is_empty() {
                    message["images"] = std::mem::take(&mut self.waiting).into();
                }
                self.history.push(message);
                self.answer_or_take_back(args, interrupt)
            }
            Action::Image(name) => {
                self.session.eyes()?;
                let typed = word(name).filter(|_| !Path::new(name).is_file());
                self.show(&typed.map_or(name.to_string(), |(name, _)| name))
            }
            Action::Regenerate => {
                if self.history.last().is_some_and(|message| message["role"] == "assistant") {
                    self.history.pop();
                }
                if self.history.is_empty() {
                    bail!("failed to answer again: there is no answer yet");
                }
                self.n_again += 1;
                self.answer(args, interrupt)
            }
            Action::Reset => {
                self.history.clear();
                self.shown.clear();
                self.waiting.clear();
                self.n_left_out = 0;
                note!("the conversation is empty");
                Ok(())
            }
            Action::System(text) => {
                self.system = (!text.is_empty()).then(|| text.to_string());
                self.history.clear();
                note!("{}", if self.system.is_some() { "system message set" } else { "system message removed" });
                Ok(())
            }
            Action::Save(path) => {
                let text = serde_json::to_string_pretty(&self.messages())?;
                out::file(path.as_ref(), |out| writeln!(out, "{text}"))?;
                note!("wrote {path}");
                Ok(())
            }
            Action::ShowSystem => {
                note!("{}", self.system.as_deref().unwrap_or("no system message; /system TEXT sets one"));
                Ok(())
            }
            Action::Load(path) => {
                let messages: Vec<Value> = serde_json::from_str(&input::text(path.as_ref())?)
                    .with_context(|| format!("failed to read {path}: expected a JSON list of messages"))?;
                let is_message = |message: &Value| message["role"].is_string() && message["content"].is_string();
                if let Some(i) = messages.iter().position(|message| !is_message(message)) {
                    bail!("failed to read {path}: message {i} has no role or no content");
                }
                for name in messages.iter().flat_map(images) {
                    self.session.eyes()?;
                    self.shown.insert(name.into(), Shown::open(name.as_ref())?);
                }
                let (system, history): (Vec<_>, Vec<_>) = messages.into_iter().partition(|m| m["role"] == "system");
                self.system = system.first().and_then(|message| message["content"].as_str()).map(String::from);
                self.history = history;
                self.n_left_out = 0;
                note!("read {path}: {} messages", self.history.len());
                Ok(())
            }
            Action::Help => {
                note!("{HELP}");
                Ok(())
            }
            Action::Quit => Ok(()),
        }
    }

    /// Keeps an image for the next message.
    fn show(&mut self, name: &str) -> Result<()> {
        self.shown.insert(name.into(), Shown::open(name.as_ref())?);
        self.waiting.push(name.into());
        note!("{name} goes with the next message");
        Ok(())
    }

    /// A message that could not be answered does not stay in the conversation.
    fn answer_or_take_back(&mut self, args: &ChatArgs, interrupt: &Interrupt) -> Result<()> {
        let result = self.answer(args, interrupt);
        if result.is_err() {
            self.history.pop();
        }
        result
    }

    fn messages(&self) -> Vec<Value> {
        self.messages_from(0)
    }

    /// Returns the system message, and the conversation without its first messages.
    fn messages_from(&self, first: usize) -> Vec<Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain(self.history[first..].iter().cloned()).collect()
    }

    /// Returns the tokens of messages and their images.
    fn encode(&self, mut messages: Vec<Value>) -> Result<(Vec<u32>, Option<Arc<Pictures>>)> {
        let mut shown = Vec::new();
        for message in &mut messages {
            let own: Vec<&Shown> = images(message).filter_map(|name| self.shown.get(name)).collect();
            let marks: String = own.iter().map(|image| image.mark.as_str()).collect();
            message["content"] = format!("{marks}{}", message["content"].as_str().unwrap_or_default()).into();
            shown.extend(own);
        }
        if shown.is_empty() {
            return Ok((self.session.encode_chat(messages)?, None));
        }
        let text = self.session.render(messages)?;
        let (tokens, pictures) = self.session.eyes()?.encode(&self.session.tokenizer, &text, &shown)?;
        Ok((tokens, Some(Arc::new(pictures))))
    }

    /// Returns the tokens of the conversation, its oldest turns left out where it has grown beyond the context, and its
    /// images.
    fn tokens(&mut self, n_predict: Option<usize>) -> Result<(Vec<u32>, Option<Arc<Pictures>>)> {
        let context = self.session.engine.context();
        let room = n_predict.unwrap_or(usize::MAX).min(context / 4);
        let before = self.n_left_out;
        loop {
            let messages = self.session.format.history(&self.messages_from(self.n_left_out));
            let (tokens, pictures) = self.encode(messages)?;
            if tokens.len() + room <= context || self.n_left_out + 2 >= self.history.len() {
                if self.n_left_out > before {
                    note!("context full: dropped the {} oldest messages", self.n_left_out);
                }
                return Ok((tokens, pictures));
            }
            // A question and its answer.
            self.n_left_out += 2;
        }
    }

    fn answer(&mut self, args: &ChatArgs, interrupt: &Interrupt) -> Result<()> {
        let format = self.session.format;
        let (tokens, pictures) = self.tokens(args.n_predict)?;
        let opened = self.session.opens_thought(&tokens);
        let show = Show::new(format, opened, args.quiet);
        let mut show = if args.no_markdown { show } else { show.inked() };
        let mut request = Request::new(tokens);
        request.pictures = pictures;
        request.constraint = self.session.constraint(format, None, opened)?;
        request.shown = format.shown(&self.session.tokenizer);
        request.max_new_tokens = args.n_predict.unwrap_or(usize::MAX);
        request.sampling = self.session.sampling(&args.sampling)?;
        request.sampling.seed = request.sampling.seed.wrapping_add(self.n_again);
        let answer = generate(&mut self.session.engine, request, interrupt, |piece| show.push(piece))?;
        let said = show.finish()?;
        interrupt.clear();
        if !args.quiet {
            note!("{}", summary(&answer.usage, answer.reason));
        }
        if answer.reason == FinishReason::ContextFull {
            note!("context full: the next message drops the oldest ones; --ctx sets a larger context");
        }
        let mut message = json!({"role": "assistant", "content": said.content});
        if !said.thought.is_empty() {
            message["reasoning_content"] = said.thought.into();
        }
        self.history.push(message);
        Ok(())
    }
}

/// Names of a message's images.
fn images(message: &Value) -> impl Iterator<Item = &str> {
    message["images"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// Image files that a line begins with, as terminals write the names of files that are dropped on them, and what
/// follows them.
fn dropped(line: &str) -> (Vec<String>, &str) {
    const ENDS: [&str; 5] = ["png", "jpg", "jpeg", "webp", "gif"];
    let (mut files, mut rest) = (Vec::new(), line.trim());
    while let Some((name, after)) = word(rest) {
        let end = Path::new(&name).extension().unwrap_or_default().to_string_lossy().to_lowercase();
        if !ENDS.contains(&end.as_str()) || !Path::new(&name).is_file() {
            break;
        }
        files.push(name);
        rest = after.trim_start();
    }
    (files, rest)
}

/// The first word of a line as a shell reads it, and what follows it.
fn word(line: &str) -> Option<(String, &str)> {
    let (mut name, mut quote, mut is_escaped) = (String::new(), None, false);
    for (i, c) in line.char_indices() {
        match c {
            _ if is_escaped => {
                name.push(c);
                is_escaped = false;
            }
            // Names have it on Windows.
            '\\' if quote.is_none() && !cfg!(windows) => is_escaped = true,
            _ if quote == Some(c) => quote = None,
            '"' | '\'' if quote.is_none() => quote = Some(c),
            _ if c.is_whitespace() && quote.is_none() => return Some((name, &line[i..])),
            _ => name.push(c),
        }
    }
    (!name.is_empty() && quote.is_none()).then_some((name, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_actions() {
        let cases = [
            ("hello", Ok(Action::Say("hello"))),
            ("/reset", Ok(Action::Reset)),
            ("/system  Be brief. ", Ok(Action::System("Be brief."))),
            ("/system", Ok(Action::ShowSystem)),
            ("/system off", Ok(Action::System(""))),
            ("/load a b.json", Ok(Action::Load("a b.json"))),
            ("/bye", Ok(Action::Quit)),
            ("/save a b.json", Ok(Action::Save("a b.json"))),
            ("/image a b.png", Ok(Action::Image("a b.png"))),
            ("/usr/bin is a folder", Ok(Action::Say("/usr/bin is a folder"))),
            ("/quit", Ok(Action::Quit)),
        ];
        for (line, action) in cases {
            assert_eq!(Action::parse(line), action, "{line}");
        }
        assert!(Action::parse("/save").is_err());
        assert!(Action::parse("/frobnicate now").is_err());
        assert!(Action::parse("/image ").is_err());
    }

    #[test]
    fn files_that_are_dropped_are_found() {
        let folder = std::env::temp_dir().join(format!("moebius-dropped-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = |name: &str| folder.join(name).to_str().unwrap().to_string();
        let [plain, spaced] = ["a.png", "b c.JPG"].map(path);
        [&plain, &spaced, &path("d.txt")].into_iter().for_each(|path| std::fs::write(path, "").unwrap());
        let cases = [
            (format!("{plain} What?"), vec![&plain], "What?"),
            (format!("'{spaced}'  {plain}"), vec![&spaced, &plain], ""),
            (format!("\"{spaced}\" and {plain}"), vec![&spaced], "and {}"),
            (format!("What is {plain}"), vec![], "What is {}"),
            (format!("{} What?", path("d.txt")), vec![], "<>"),
            (path("none.png"), vec![], "<>"),
            ("it's".into(), vec![], "it's"),
        ];
        for (line, files, rest) in cases {
            let found = dropped(&line);
            let rest = if rest == "<>" { line.clone() } else { rest.replace("{}", &plain) };
            assert_eq!((found.0.iter().collect::<Vec<_>>(), found.1), (files, rest.as_str()), "{line}");
        }
        if !cfg!(windows) {
            let escaped = format!("{} x", spaced.replace(' ', "\\ "));
            assert_eq!(dropped(&escaped), (vec![spaced], "x"));
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
