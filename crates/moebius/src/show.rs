//! An answer on its way to the screen: the thought apart from what is said.

use std::io::Write;

use anyhow::Result;
use engine::formats::{Event, Format, Hold, Parser};

use crate::ink::Ink;
use crate::out::{self, Out};

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Prints an answer as it comes. On a terminal the thought is dimmed above the answer; elsewhere stdout gets the answer
/// alone, and stderr the thought.
pub struct Show {
    parser: Parser,
    out: Out,
    terminal: bool,
    quiet: bool,
    said: Said,
    events: Vec<Event>,
    /// Wraps and styles the answer, where that is wanted.
    ink: Option<Ink>,
}

/// An answer taken apart.
#[derive(Debug, Default)]
pub struct Said {
    pub thought: String,
    pub content: String,
}

impl Show {
    /// `opened`: the prompt ends inside a thought. `quiet` keeps the thought from stderr.
    pub fn new(format: Format, opened: bool, quiet: bool) -> Show {
        let out = Out::lock();
        let parser = Parser::new(format, &[], opened, Hold::Head, 0);
        Show { parser, terminal: out.is_terminal(), out, quiet, said: Said::default(), events: Vec::new(), ink: None }
    }

    /// Returns the same, with words wrapped and Markdown's marks shown as what they mean where it is a terminal.
    pub fn inked(self) -> Show {
        let width = terminal_size::terminal_size().map_or(80, |(width, _)| usize::from(width.0));
        let ink = self.terminal.then(|| Ink::new(width));
        Show { ink, ..self }
    }

    /// Prints what is certain of the text up to this piece.
    pub fn push(&mut self, piece: &str) -> Result<()> {
        self.parser.push(piece, &mut self.events);
        self.print()
    }

    /// Prints the rest and ends the line.
    pub fn finish(mut self) -> Result<Said> {
        self.parser.finish(&mut self.events);
        self.print()?;
        self.leave_thought()?;
        if let Some(ink) = &mut self.ink {
            let mut text = String::new();
            ink.finish(&mut text);
            self.out.write_all(text.as_bytes())?;
        }
        if !self.said.content.ends_with('\n') {
            writeln!(self.out)?;
        }
        Ok(self.said)
    }

    fn print(&mut self) -> Result<()> {
        for event in std::mem::take(&mut self.events) {
            match event {
                Event::Reasoning(text) => {
                    if self.terminal {
                        write!(self.out, "{DIM}")?;
                        self.out.text(&text)?;
                        write!(self.out, "{PLAIN}")?;
                    } else if !self.quiet {
                        out::aside(&text);
                    }
                    self.said.thought.push_str(&text);
                }
                Event::Content(text) => {
                    self.leave_thought()?;
                    match &mut self.ink {
                        Some(ink) => {
                            let mut inked = String::new();
                            ink.push(&text, &mut inked);
                            self.out.write_all(inked.as_bytes())?;
                        }
                        None => self.out.text(&text)?,
                    }
                    self.said.content.push_str(&text);
                }
                // Without tools there are none.
                Event::ToolCallStart { .. } | Event::ToolCallArguments { .. } | Event::ToolCallEnd { .. } => {}
            }
        }
        Ok(self.out.flush()?)
    }

    /// Between the thought and the first of the answer.
    fn leave_thought(&mut self) -> Result<()> {
        if self.said.thought.is_empty() || !self.said.content.is_empty() {
            return Ok(());
        }
        if self.terminal {
            write!(self.out, "\n\n")?;
        } else if !self.quiet {
            out::aside("\n\n");
        }
        Ok(())
    }
}
