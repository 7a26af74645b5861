//! `moebius chat`: a conversation at the terminal (or from a pipe, one message a line).

use std::io::IsTerminal;

use anyhow::{Context, Result, bail};
use engine::scheduler::{FinishReason, Request};
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use crate::answer::{Interrupt, generate, summary};
use crate::args::ChatArgs;
use crate::commands::line::Lines;
use crate::input;
use crate::load::{self, Session};
use crate::out::{self, note};
use crate::show::Show;

const HELP: &str = "\
/reset          forget the conversation (the system message stays)
/system TEXT    set the system message and forget the conversation; without
                TEXT remove it
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
    ("/regen", false),
    ("/save", true),
    ("/load", true),
    ("/help", false),
    ("/quit", false),
];

pub fn run(args: &ChatArgs) -> Result<()> {
    let model = load::open(args.model.path()?.as_deref())?.stretched(args.engine.step.rope_scaling)?;
    let model = model.with_template(args.template.chat_template_file.as_deref())?;
    let terminal = std::io::stdin().is_terminal();
    if model.embedded && !args.quiet {
        note!("{}", crate::embedded::notice());
    }
    let mut chat = Chat {
        session: load::start(model, &args.engine, args.draft)?,
        history: Vec::new(),
        system: args.system.clone(),
        n_again: 0,
        n_left_out: 0,
    };
    if chat.session.template.is_none() {
        bail!("the model has no chat template: name one with --chat-template-file, or use `moebius run --raw`");
    }
    chat.session.set_thoughts(&args.template);
    chat.session.placement.iter().filter(|_| !args.quiet).for_each(|placement| note!("{placement}"));
    chat.session.warning.iter().for_each(|warning| note!("warning: {warning}"));
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
    /// User and assistant messages in turn.
    history: Vec<Value>,
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
                self.history.push(json!({"role": "user", "content": text}));
                self.answer_or_take_back(args, interrupt)
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

    /// Returns the tokens of the conversation, its oldest turns left out where it has grown beyond the context.
    fn tokens(&mut self, n_predict: Option<usize>) -> Result<Vec<u32>> {
        let context = self.session.engine.context();
        let room = n_predict.unwrap_or(usize::MAX).min(context / 4);
        let before = self.n_left_out;
        loop {
            let messages = self.session.format.history(&self.messages_from(self.n_left_out));
            let tokens = self.session.encode_chat(messages)?;
            if tokens.len() + room <= context || self.n_left_out + 2 >= self.history.len() {
                if self.n_left_out > before {
                    note!("context full: dropped the {} oldest messages", self.n_left_out);
                }
                return Ok(tokens);
            }
            // A question and its answer.
            self.n_left_out += 2;
        }
    }

    fn answer(&mut self, args: &ChatArgs, interrupt: &Interrupt) -> Result<()> {
        let format = self.session.format;
        let tokens = self.tokens(args.n_predict)?;
        let opened = self.session.opens_thought(&tokens);
        let show = Show::new(format, opened, args.quiet);
        let mut show = if args.no_markdown { show } else { show.inked() };
        let mut request = Request::new(tokens);
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
            ("/usr/bin is a folder", Ok(Action::Say("/usr/bin is a folder"))),
            ("/quit", Ok(Action::Quit)),
        ];
        for (line, action) in cases {
            assert_eq!(Action::parse(line), action, "{line}");
        }
        assert!(Action::parse("/save").is_err());
        assert!(Action::parse("/frobnicate now").is_err());
    }
}
