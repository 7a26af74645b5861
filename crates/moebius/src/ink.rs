//! Text on its way to a terminal: words wrapped at its edge, and Markdown's commonest marks shown as what they mean
//! (headings and `**bold**`, `code`, fences, bullets). Takes text in pieces, cut anywhere. Knows no terminal: it writes
//! into a string, and escapes all that is not its own.

use std::fmt::Write;

use unicode_width::UnicodeWidthChar;

const BOLD: &str = "\x1b[1m";
const CODE: &str = "\x1b[36m";
const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";
const TAB: usize = 4;

/// Where in Markdown the text stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Style {
    heading: bool,
    bold: bool,
    code: bool,
}

impl Style {
    fn write(self, out: &mut String) {
        out.push_str(PLAIN);
        if self.bold || self.heading {
            out.push_str(BOLD);
        }
        if self.code {
            out.push_str(CODE);
        }
    }
}

/// A writer of styled, wrapped text.
#[derive(Debug)]
pub struct Ink {
    /// Columns of the terminal.
    width: usize,
    column: usize,
    /// Columns that continued lines of a list's entry begin with.
    indent: usize,
    /// The beginning of a line, as long as it may be a mark.
    head: Option<String>,
    /// A run of marks whose end has not come: `*` or a backtick.
    marks: Option<(char, usize)>,
    /// The word that is not complete yet, with its styles, and its width.
    word: String,
    word_width: usize,
    /// Part of it is written: it is longer than a line, and the terminal cuts it.
    is_cut: bool,
    /// Blanks before it.
    blanks: usize,
    style: Style,
    fence: bool,
}

impl Ink {
    /// For a terminal of so many columns.
    pub fn new(width: usize) -> Ink {
        Ink {
            width: width.max(20),
            column: 0,
            indent: 0,
            head: Some(String::new()),
            marks: None,
            word: String::new(),
            word_width: 0,
            is_cut: false,
            blanks: 0,
            style: Style::default(),
            fence: false,
        }
    }

    /// More of the text. What may still change its meaning or its line is held back.
    pub fn push(&mut self, text: &str, out: &mut String) {
        text.chars().for_each(|c| self.take(c, out));
    }

    /// The end of the text.
    pub fn finish(&mut self, out: &mut String) {
        self.end_head(out);
        self.end_marks(None, out);
        self.end_word(out);
        if self.fence || self.style != Style::default() {
            out.push_str(PLAIN);
        }
    }

    fn take(&mut self, c: char, out: &mut String) {
        if let Some(head) = &mut self.head {
            let is_fence = head.trim_start().starts_with("```");
            if c != '\n' && (is_fence || (head.len() < 12 && may_be_mark(head, c))) {
                head.push(c);
                return;
            }
            if c == '\n' && is_fence {
                let line = self.head.take().unwrap_or_default();
                // The language behind the opening fence is told; the closing one says nothing.
                let name = line.trim().trim_start_matches('`');
                self.fence = !self.fence;
                let _ = match self.fence {
                    true => writeln!(out, "{DIM}{}", escaped(name)),
                    false => writeln!(out, "{PLAIN}"),
                };
                self.head = Some(String::new());
                return;
            }
            self.end_head(out);
        }
        if self.fence {
            match c {
                '\n' => self.new_line(out),
                c => escape(c, out),
            }
            return;
        }
        match (c, self.marks) {
            ('*' | '`', Some((mark, n))) if mark == c => self.marks = Some((mark, n + 1)),
            ('*', _) if !self.style.code => {
                self.end_marks(Some(c), out);
                self.marks = Some((c, 1));
            }
            ('`', _) => {
                self.end_marks(Some(c), out);
                self.marks = Some((c, 1));
            }
            _ => {
                self.end_marks(Some(c), out);
                match c {
                    '\n' => {
                        self.end_word(out);
                        self.new_line(out);
                    }
                    ' ' | '\t' => {
                        self.end_word(out);
                        self.blanks += if c == ' ' { 1 } else { TAB };
                    }
                    c => self.add(c, out),
                }
            }
        }
    }

    /// The line's beginning is known: a mark that is shown as what it means, or text.
    fn end_head(&mut self, out: &mut String) {
        let Some(head) = self.head.take() else { return };
        let text = head.trim_start_matches(' ');
        let blanks = head.len() - text.len();
        if self.fence {
            head.chars().for_each(|c| escape(c, out));
            return;
        }
        let rest = match text {
            "# " | "## " | "### " | "#### " | "##### " | "###### " => {
                self.style.heading = true;
                self.style.write(&mut self.word);
                ""
            }
            "- " | "* " | "+ " => {
                self.indent = blanks + 2;
                out.extend(std::iter::repeat_n(' ', blanks));
                out.push_str("• ");
                self.column = blanks + 2;
                ""
            }
            text => {
                self.indent = blanks;
                out.extend(std::iter::repeat_n(' ', blanks));
                self.column = blanks;
                text
            }
        };
        rest.chars().for_each(|c| self.take(c, out));
    }

    /// A run of marks ends before `next`: it switches a style, or it is text.
    fn end_marks(&mut self, next: Option<char>, out: &mut String) {
        let Some((mark, n)) = self.marks.take() else { return };
        let opens = next.is_some_and(|c| !c.is_whitespace());
        match (mark, n) {
            ('*', 2 | 3) if self.style.bold || opens => {
                self.style.bold = !self.style.bold;
                self.style.write(&mut self.word);
            }
            ('`', 1 | 2) if self.style.code || next.is_some_and(|c| c != '\n') => {
                self.style.code = !self.style.code;
                self.style.write(&mut self.word);
            }
            _ => (0..n).for_each(|_| self.add(mark, out)),
        }
    }

    /// A character of a word. One that is longer than a line is cut by the terminal.
    fn add(&mut self, c: char, out: &mut String) {
        escape(c, &mut self.word);
        self.word_width += c.width().unwrap_or(0);
        if self.word_width > self.width {
            self.write_word(out);
            self.is_cut = true;
        }
    }

    fn end_word(&mut self, out: &mut String) {
        self.write_word(out);
        self.is_cut = false;
    }

    fn write_word(&mut self, out: &mut String) {
        if self.word_width == 0 {
            out.push_str(&std::mem::take(&mut self.word));
            return;
        }
        let fits = self.column + self.blanks + self.word_width < self.width;
        if !fits && !self.is_cut && self.column > self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', self.indent));
            self.column = self.indent;
        } else {
            out.extend(std::iter::repeat_n(' ', self.blanks));
            self.column += self.blanks;
        }
        self.blanks = 0;
        out.push_str(&std::mem::take(&mut self.word));
        self.column += self.word_width;
        self.word_width = 0;
    }

    /// A line of the text ends. Marks that were not closed end with it.
    fn new_line(&mut self, out: &mut String) {
        if !self.fence && self.style != Style::default() {
            self.style = Style::default();
            out.push_str(PLAIN);
        }
        out.push('\n');
        (self.column, self.indent, self.blanks) = (0, 0, 0);
        self.head = Some(String::new());
    }
}

/// Returns whether a line that begins with `head` and goes on with `c` may still be a heading, a bullet or a fence.
fn may_be_mark(head: &str, c: char) -> bool {
    let text = head.trim_start_matches(' ');
    match text {
        "" => " #-*+`".contains(c),
        "-" | "*" | "+" => c == ' ',
        text if text.bytes().all(|b| b == b'#') => (c == '#' && text.len() < 6) || c == ' ',
        text if text.bytes().all(|b| b == b'`') => c == '`',
        _ => false,
    }
}

/// Adds a character, one that controls the terminal by its number.
fn escape(c: char, out: &mut String) {
    match c.is_control() && c != '\t' {
        true => out.extend(c.escape_default()),
        false => out.push(c),
    }
}

fn escaped(text: &str) -> String {
    let mut out = String::new();
    text.chars().for_each(|c| escape(c, &mut out));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what a terminal of `width` gets of a text that comes in pieces of this many characters.
    fn inked(text: &str, width: usize, piece: usize) -> String {
        let (mut ink, mut out) = (Ink::new(width), String::new());
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(piece) {
            ink.push(&piece.iter().collect::<String>(), &mut out);
        }
        ink.finish(&mut out);
        out
    }

    #[test]
    fn marks_become_what_they_mean_wherever_the_text_is_cut() {
        for (text, expected) in [
            ("plain text", "plain text".to_string()),
            ("a **b** c", format!("a {PLAIN}{BOLD}b{PLAIN} c")),
            ("2 * 3 ** 4 * 5", "2 * 3 ** 4 * 5".into()),
            ("use `x*y` now", format!("use {PLAIN}{CODE}x*y{PLAIN} now")),
            ("# Title\ntext", format!("{PLAIN}{BOLD}Title{PLAIN}\ntext")),
            ("#hash", "#hash".into()),
            ("- one\n  - two\n* three", "• one\n  • two\n• three".into()),
            ("-5 and --x", "-5 and --x".into()),
            (
                "```rust\nlet  a = `b` ** c;\n# no title\n```\nend",
                format!("{DIM}rust\nlet  a = `b` ** c;\n# no title\n{PLAIN}\nend"),
            ),
            ("**open\nnext", format!("{PLAIN}{BOLD}open{PLAIN}\nnext")),
            ("a\u{1b}[31mb", "a\\u{1b}[31mb".into()),
            ("end with **", "end with **".into()),
            ("    indented", "    indented".into()),
        ] {
            for piece in [1, 2, 3, 100] {
                assert_eq!(inked(text, 80, piece), expected, "{text:?} in pieces of {piece}");
            }
        }
    }

    #[test]
    fn words_are_wrapped_and_lists_keep_their_indent() {
        let text = "The small fox went over the hill to look for his hat.";
        for line in inked(text, 24, 5).lines() {
            assert!(line.chars().count() < 24, "{line}");
        }
        assert_eq!(inked(text, 24, 5).replace('\n', " "), text);
        let list = inked("- The small fox went over the hill to look for it", 24, 1);
        assert!(list.lines().skip(1).all(|line| line.starts_with("  ") && !line.starts_with("   ")), "{list}");
        // Wide characters take two columns; a word longer than a line stays one.
        assert_eq!(inked("世界世界世界 世界世界世界", 20, 1), "世界世界世界\n世界世界世界");
        let long = "x".repeat(50);
        assert_eq!(inked(&long, 20, 7), long);
    }
}
