//! Grammars in GBNF, llama.cpp's form of BNF (its grammars/README.md), as rules for llguidance.
//!
//! What does not refer to itself is a regular expression, and becomes one: whole where the root is such, else in large
//! pieces that stand side by side, as lexemes of a grammar in Lark. What may be empty at the end of a piece, as blanks
//! often are, is a lexeme of its own: of two that end at the same place the parser tries both. Yet a lexeme is as long
//! as it can be, so a grammar may allow a little less than llama.cpp's parser, which knows no lexemes; never more.
//!
//! Grammars come from strangers. Work and memory are linear in the text's length: each group is judged once, after
//! those that it uses, and what is written out has one budget. Recursion is bounded by [`MAX_RULE_DEPTH`], never by the
//! number of rules.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::{MAX_RULE_BYTES, MAX_RULE_DEPTH, Rule};

/// Longest part of a rule's name that an error repeats, in characters.
const MAX_SHOWN: usize = 40;

/// Whether a grammar is in GBNF: Lark has no `::=`.
pub fn is_gbnf(text: &str) -> bool {
    text.lines().any(|line| {
        let name = line.split_once("::=").map(|(name, _)| name.trim());
        name.is_some_and(|name| !name.is_empty() && name.chars().all(is_name))
    })
}

/// The rule that a grammar in GBNF states: a regular expression or a grammar in Lark.
///
/// # Errors
/// What is wrong with it, by line.
pub fn from_gbnf(text: &str) -> Result<Rule, String> {
    if text.len() > MAX_RULE_BYTES {
        return Err(format!("it has {} bytes, at most {MAX_RULE_BYTES} are allowed", text.len()));
    }
    let grammar = Parser::new(text).grammar()?;
    let root = grammar.rules.iter().position(|rule| rule.name == "root").ok_or("it has no rule named root")?;
    let mut writer = Writer::new(&grammar);
    if let Some(flat) = writer.flat[grammar.rules[root].body] {
        let mut regex = String::new();
        writer.regex(&flat, grammar.rules[root].body, &mut regex)?;
        return Ok(Rule::Regex(regex));
    }
    let mut lark = String::from("start: root\n");
    let (mut is_named, mut todo) = (vec![false; grammar.rules.len()], vec![root]);
    is_named[root] = true;
    while let Some(at) = todo.pop() {
        let name = rule_name(grammar.rules[at].name);
        writer.spend(name.len() + ": \n".len())?;
        let body = writer.rule(grammar.rules[at].body)?;
        let _ = writeln!(lark, "{name}: {body}");
        todo.extend(writer.used.drain(..).filter(|&at| !std::mem::replace(&mut is_named[at], true)));
    }
    lark.push_str(&writer.terminals);
    Ok(Rule::Lark(lark))
}

/// A grammar as it was read.
struct Grammar<'a> {
    rules: Vec<Named<'a>>,
    /// Bodies of rules, and groups.
    choices: Vec<Choice>,
}

/// A rule.
struct Named<'a> {
    name: &'a str,
    /// Index of its alternatives.
    body: usize,
}

impl Grammar<'_> {
    /// The alternatives that an item stands for, where it is no text.
    fn inner(&self, item: &Item) -> Option<usize> {
        match item.thing {
            Thing::Text(_) => None,
            Thing::Rule(at) => Some(self.rules[at].body),
            Thing::Group(at) => Some(at),
        }
    }
}

/// Alternatives.
type Choice = Vec<Vec<Item>>;

/// A thing and how often it comes.
#[derive(Clone, Debug, PartialEq)]
struct Item {
    thing: Thing,
    least: u32,
    most: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
enum Thing {
    /// A regular expression for one character or a text.
    Text(String),
    /// Index of a rule.
    Rule(usize),
    /// Index of alternatives.
    Group(usize),
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// Reads a grammar.
struct Parser<'a> {
    rest: &'a str,
    line: usize,
    /// Indices of the rules that were defined or used.
    names: BTreeMap<&'a str, usize>,
    rules: Vec<Seen<'a>>,
    choices: Vec<Choice>,
}

/// A rule that was defined or used.
struct Seen<'a> {
    name: &'a str,
    /// Index of its alternatives, once it is defined.
    body: Option<usize>,
    /// The rule in which it was met first.
    user: &'a str,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Parser<'a> {
        Parser { rest: text, line: 1, names: BTreeMap::new(), rules: Vec::new(), choices: Vec::new() }
    }

    fn grammar(mut self) -> Result<Grammar<'a>, String> {
        self.blanks(true);
        while !self.rest.is_empty() {
            let name = self.name()?;
            self.blanks(false);
            if !self.take("::=") {
                return Err(self.wrong("expected ::= after a rule's name"));
            }
            let at = self.rule(name, name);
            let body = self.choice(0, name)?;
            if self.rules[at].body.replace(body).is_some() {
                return Err(self.wrong(&format!("rule {} is there twice", shown(name))));
            }
            self.blanks(true);
        }
        let defined = |Seen { name, body, user }: Seen<'a>| match body {
            Some(body) => Ok(Named { name, body }),
            None => Err(format!("rule {} uses {}, which is not there", shown(user), shown(name))),
        };
        let rules = self.rules.into_iter().map(defined).collect::<Result<_, String>>()?;
        Ok(Grammar { rules, choices: self.choices })
    }

    /// The index of a rule that `user` defines or uses.
    fn rule(&mut self, name: &'a str, user: &'a str) -> usize {
        let next = self.rules.len();
        let at = *self.names.entry(name).or_insert(next);
        if at == next {
            self.rules.push(Seen { name, body: None, user });
        }
        at
    }

    fn wrong(&self, what: &str) -> String {
        format!("line {}: {what}", self.line)
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.rest = &self.rest[c.len_utf8()..];
        self.line += usize::from(c == '\n');
        Some(c)
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.rest.strip_prefix(text);
        self.rest = found.unwrap_or(self.rest);
        found.is_some()
    }

    /// Passes blanks and comments, and ends of lines where they mean nothing.
    fn blanks(&mut self, lines: bool) {
        loop {
            match self.peek() {
                Some('#') => {
                    let end = self.rest.find('\n').unwrap_or(self.rest.len());
                    self.rest = &self.rest[end..];
                }
                Some('\n' | '\r') if lines => drop(self.next()),
                Some(' ' | '\t') => drop(self.next()),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Result<&'a str, String> {
        let end = self.rest.find(|c| !is_name(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        if name.is_empty() {
            return Err(self.wrong("expected the name of a rule"));
        }
        self.rest = rest;
        Ok(name)
    }

    /// The index of alternatives of the rule `user`, which go up to the end of the line, or of the group where `depth`
    /// is not 0.
    fn choice(&mut self, depth: usize, user: &'a str) -> Result<usize, String> {
        if depth > MAX_RULE_DEPTH {
            return Err(self.wrong(&format!("nests deeper than {MAX_RULE_DEPTH} levels")));
        }
        let mut all = Vec::new();
        loop {
            self.blanks(true);
            all.push(self.sequence(depth, user)?);
            // An alternative may stand on a line of its own.
            let here = (self.rest, self.line);
            self.blanks(true);
            if !self.take("|") {
                (self.rest, self.line) = here;
                self.choices.push(all);
                return Ok(self.choices.len() - 1);
            }
        }
    }

    fn sequence(&mut self, depth: usize, user: &'a str) -> Result<Vec<Item>, String> {
        let mut items = Vec::new();
        loop {
            let thing = match self.peek() {
                Some('"') => Thing::Text(self.literal()?),
                Some('[') => Thing::Text(self.class()?),
                Some('.') => {
                    self.next();
                    Thing::Text("(?s:.)".into())
                }
                Some('(') => {
                    self.next();
                    let group = self.choice(depth + 1, user)?;
                    self.blanks(true);
                    if !self.take(")") {
                        return Err(self.wrong("expected )"));
                    }
                    Thing::Group(group)
                }
                Some('<' | '!') => return Err(self.wrong("tokens cannot be named here")),
                Some(c) if is_name(c) => {
                    // The next rule begins where a name stands before `::=`.
                    let here = (self.rest, self.line);
                    let name = self.name()?;
                    self.blanks(false);
                    if self.rest.starts_with("::=") {
                        (self.rest, self.line) = here;
                        return Ok(items);
                    }
                    Thing::Rule(self.rule(name, user))
                }
                _ => return Ok(items),
            };
            let (least, most) = self.times()?;
            items.push(Item { thing, least, most });
            self.blanks(depth > 0);
        }
    }

    /// How often the thing before comes.
    fn times(&mut self) -> Result<(u32, Option<u32>), String> {
        match self.peek() {
            Some('*') => drop(self.next()),
            Some('+') => {
                self.next();
                return Ok((1, None));
            }
            Some('?') => {
                self.next();
                return Ok((0, Some(1)));
            }
            Some('{') => {
                self.next();
                let end = self.rest.find('}').ok_or_else(|| self.wrong("expected }"))?;
                let (inner, rest) = self.rest.split_at(end);
                self.rest = &rest[1..];
                let number = |text: &str| text.trim().parse::<u32>().ok().filter(|n| *n <= 10_000);
                let bad = || self.wrong("expected {n}, {n,} or {n,m}, with numbers up to 10,000");
                return match inner.split_once(',') {
                    None => number(inner).map(|n| (n, Some(n))).ok_or_else(bad),
                    Some((least, most)) => {
                        let least = if least.trim().is_empty() { 0 } else { number(least).ok_or_else(bad)? };
                        let most = if most.trim().is_empty() { None } else { Some(number(most).ok_or_else(bad)?) };
                        if most.is_some_and(|most| most < least) { Err(bad()) } else { Ok((least, most)) }
                    }
                };
            }
            _ => return Ok((1, Some(1))),
        }
        Ok((0, None))
    }

    fn literal(&mut self) -> Result<String, String> {
        self.next();
        let mut out = String::new();
        loop {
            match self.peek() {
                None | Some('\n') => return Err(self.wrong("a text does not end")),
                Some('"') => {
                    self.next();
                    return Ok(out);
                }
                Some(_) => escaped(self.character()?, &mut out),
            }
        }
    }

    fn class(&mut self) -> Result<String, String> {
        self.next();
        let mut out = String::from(if self.take("^") { "[^" } else { "[" });
        let mut is_empty = true;
        loop {
            match self.peek() {
                None | Some('\n') => return Err(self.wrong("a class does not end")),
                Some(']') => {
                    self.next();
                    if is_empty {
                        return Err(self.wrong("a class is empty"));
                    }
                    out.push(']');
                    return Ok(out);
                }
                Some(_) => {
                    let first = self.character()?;
                    escaped(first, &mut out);
                    if self.rest.starts_with('-') && !self.rest.starts_with("-]") {
                        self.next();
                        let last = self.character()?;
                        if last < first {
                            return Err(self.wrong(&format!("the range {first:?}-{last:?} is empty")));
                        }
                        out.push('-');
                        escaped(last, &mut out);
                    }
                    is_empty = false;
                }
            }
        }
    }

    /// A character of a text or a class.
    fn character(&mut self) -> Result<char, String> {
        let end = "a text does not end";
        let c = self.next().ok_or_else(|| self.wrong(end))?;
        if c != '\\' {
            return Ok(c);
        }
        let kind = self.next().ok_or_else(|| self.wrong(end))?;
        let digits = match kind {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            '\\' | '"' | '[' | ']' | '-' | '^' => return Ok(kind),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other => return Err(self.wrong(&format!("\\{other} has no meaning"))),
        };
        let code = self.rest.get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok()).and_then(char::from_u32);
        let c =
            code.ok_or_else(|| self.wrong(&format!("\\{kind} needs {digits} hexadecimal digits of a character")))?;
        self.rest = &self.rest[digits..];
        Ok(c)
    }
}

/// Writes a character as a regular expression has it, in a class or not, between slashes or not.
fn escaped(c: char, out: &mut String) {
    if c.is_ascii_alphanumeric() || c == ' ' || (!c.is_ascii() && c.is_alphanumeric()) {
        out.push(c);
    } else {
        let _ = write!(out, "\\x{{{:x}}}", u32::from(c));
    }
}

/// Rules have names of letters: `-` is none in Lark, and what begins with a capital is a terminal.
fn rule_name(name: &str) -> String {
    if name == "root" {
        return name.into();
    }
    let mut out = String::from("r_");
    for b in name.bytes() {
        match b {
            b'a'..=b'z' | b'0'..=b'9' => out.push(char::from(b)),
            other => drop(write!(out, "_{other:x}_")),
        }
    }
    out
}

/// The beginning of a name, for an error.
fn shown(name: &str) -> &str {
    // Names are ASCII.
    &name[..name.len().min(MAX_SHOWN)]
}

/// What is known of alternatives that are one regular expression.
#[derive(Clone, Copy, Debug)]
struct Flat {
    /// They may be empty.
    is_nullable: bool,
    /// No alternative begins or ends with what may be empty.
    is_tight: bool,
    /// Bytes of the expression.
    n_bytes: usize,
    /// How deep its groups nest.
    depth: usize,
}

impl Flat {
    /// A text, or a regular expression for one character.
    fn text(text: &str) -> Flat {
        Flat { is_nullable: text.is_empty(), is_tight: true, n_bytes: text.len(), depth: 0 }
    }

    /// Alternatives, given what is known of their items.
    fn of(choice: &Choice, known: impl Fn(&Item) -> Option<Flat>) -> Option<Flat> {
        let mut all = Flat { is_nullable: false, is_tight: true, n_bytes: choice.len().saturating_sub(1), depth: 0 };
        for sequence in choice {
            let mut is_nullable = true;
            for (i, item) in sequence.iter().enumerate() {
                let item = known(item)?.times(item);
                is_nullable &= item.is_nullable;
                all.is_tight &= item.is_tight || (i > 0 && i + 1 < sequence.len());
                all.n_bytes = all.n_bytes.saturating_add(item.n_bytes);
                all.depth = all.depth.max(item.depth);
            }
            all.is_nullable |= is_nullable;
        }
        Some(all)
    }

    /// The same as an item, in a separate group and as often as it comes there.
    fn times(self, item: &Item) -> Flat {
        let is_nullable = self.is_nullable || item.least == 0;
        let n_bytes = self.n_bytes.saturating_add("(?:)".len() + times(item).len());
        Flat { is_nullable, is_tight: self.is_tight && !is_nullable, n_bytes, depth: self.depth + 1 }
    }

    /// What is known of all alternatives of a grammar; nothing of those that come to themselves. Each is looked at
    /// once, after all that it uses.
    fn all(grammar: &Grammar<'_>) -> Vec<Option<Flat>> {
        let n = grammar.choices.len();
        let (mut users, mut n_unknown) = (vec![Vec::new(); n], vec![0usize; n]);
        for (at, choice) in grammar.choices.iter().enumerate() {
            for inner in choice.iter().flatten().filter_map(|item| grammar.inner(item)) {
                users[inner].push(at);
                n_unknown[at] += 1;
            }
        }
        let mut flat = vec![None; n];
        let mut ready: Vec<usize> = (0..n).filter(|&at| n_unknown[at] == 0).collect();
        while let Some(at) = ready.pop() {
            flat[at] = Flat::of(&grammar.choices[at], |item| Flat::inside(grammar, &flat, item));
            for user in std::mem::take(&mut users[at]) {
                n_unknown[user] -= 1;
                if n_unknown[user] == 0 {
                    ready.push(user);
                }
            }
        }
        flat
    }

    /// What is known of an item's text or alternatives.
    fn inside(grammar: &Grammar<'_>, flat: &[Option<Flat>], item: &Item) -> Option<Flat> {
        match &item.thing {
            Thing::Text(text) => Some(Flat::text(text)),
            Thing::Rule(_) | Thing::Group(_) => grammar.inner(item).and_then(|at| flat[at]),
        }
    }
}

/// Writes rules in Lark, and regular expressions.
struct Writer<'a> {
    grammar: &'a Grammar<'a>,
    /// What is known of each of the grammar's alternatives.
    flat: Vec<Option<Flat>>,
    /// Bytes that may still be written.
    n_left: usize,
    /// Lines of terminals.
    terminals: String,
    n_terminals: usize,
    /// Rules that were named.
    used: Vec<usize>,
}

impl<'a> Writer<'a> {
    fn new(grammar: &'a Grammar<'a>) -> Writer<'a> {
        let (flat, used) = (Flat::all(grammar), Vec::new());
        Writer { grammar, flat, n_left: MAX_RULE_BYTES, terminals: String::new(), n_terminals: 0, used }
    }

    /// Takes bytes out of the budget before they are written.
    fn spend(&mut self, n_bytes: usize) -> Result<(), String> {
        let left = self.n_left.checked_sub(n_bytes);
        self.n_left = left.ok_or_else(|| format!("its rules, written out, have more than {MAX_RULE_BYTES} bytes"))?;
        Ok(())
    }

    /// Appends alternatives as one regular expression.
    fn regex(&mut self, flat: &Flat, at: usize, out: &mut String) -> Result<(), String> {
        self.check(flat)?;
        self.append(at, out);
        Ok(())
    }

    /// Appends one item as a regular expression.
    fn piece(&mut self, flat: &Flat, item: &Item, out: &mut String) -> Result<(), String> {
        self.check(flat)?;
        self.append_item(item, out);
        Ok(())
    }

    /// Pays for a regular expression.
    fn check(&mut self, flat: &Flat) -> Result<(), String> {
        if flat.depth > MAX_RULE_DEPTH {
            return Err(format!("its rules, written out, nest deeper than {MAX_RULE_DEPTH} levels"));
        }
        self.spend(flat.n_bytes)
    }

    /// Appends what was paid for: its depth bounds the recursion.
    fn append(&self, at: usize, out: &mut String) {
        for (i, sequence) in self.grammar.choices[at].iter().enumerate() {
            if i > 0 {
                out.push('|');
            }
            sequence.iter().for_each(|item| self.append_item(item, out));
        }
    }

    fn append_item(&self, item: &Item, out: &mut String) {
        out.push_str("(?:");
        match (&item.thing, self.grammar.inner(item)) {
            (Thing::Text(text), _) => out.push_str(text),
            (_, Some(inner)) => self.append(inner, out),
            (_, None) => {}
        }
        out.push(')');
        out.push_str(&times(item));
    }

    /// What is known of an item that makes a good lexeme.
    fn lexeme(&self, item: &Item) -> Option<Flat> {
        let inner = Flat::inside(self.grammar, &self.flat, item)?;
        let flat = inner.times(item);
        (inner.is_tight || flat.is_nullable).then_some(flat)
    }

    /// Alternatives as Lark: pieces that are regular expressions become terminals, side by side ones together. They
    /// come to themselves, so the nesting of groups in the text bounds the recursion.
    fn rule(&mut self, at: usize) -> Result<String, String> {
        let grammar = self.grammar;
        let mut all = Vec::new();
        for sequence in &grammar.choices[at] {
            // What stands in the terminal that grows; what may be empty at its end waits.
            let (mut out, mut regex, mut tail) = (Vec::new(), String::new(), Vec::new());
            for item in sequence {
                if let Some(flat) = self.lexeme(item) {
                    if !flat.is_nullable {
                        regex.extend(tail.drain(..));
                        self.piece(&flat, item, &mut regex)?;
                        continue;
                    }
                    let mut piece = String::new();
                    self.piece(&flat, item, &mut piece)?;
                    match regex.is_empty() {
                        true => self.terminal(&mut piece, true, &mut out)?,
                        false => tail.push(piece),
                    }
                    continue;
                }
                self.terminal(&mut regex, false, &mut out)?;
                tail.drain(..).try_for_each(|mut piece| self.terminal(&mut piece, true, &mut out))?;
                let (inner, n_bytes) = match item.thing {
                    Thing::Rule(at) => {
                        self.used.push(at);
                        let name = rule_name(grammar.rules[at].name);
                        let n_bytes = name.len();
                        (name, n_bytes)
                    }
                    // What is in it is paid for.
                    Thing::Group(at) => (format!("({})", self.rule(at)?), "()".len()),
                    Thing::Text(_) => continue,
                };
                let times = times(item);
                self.spend(n_bytes + times.len())?;
                out.push(inner + &times);
            }
            self.terminal(&mut regex, false, &mut out)?;
            tail.drain(..).try_for_each(|mut piece| self.terminal(&mut piece, true, &mut out))?;
            self.spend(3)?;
            all.push(if out.is_empty() { "\"\"".into() } else { out.join(" ") });
        }
        Ok(all.join(" | "))
    }

    /// Names a regular expression, and takes it. A lexeme is not empty: one that may be is left out instead.
    fn terminal(&mut self, regex: &mut String, may_be_empty: bool, out: &mut Vec<String>) -> Result<(), String> {
        let regex = std::mem::take(regex);
        if regex.is_empty() {
            return Ok(());
        }
        let name = format!("T{}", self.n_terminals);
        self.n_terminals += 1;
        let some = if may_be_empty { " & /(?s:.+)/" } else { "" };
        // Its expression is paid for.
        self.spend(2 * name.len() + some.len() + "?: //\n".len())?;
        let _ = writeln!(self.terminals, "{name}: /{regex}/{some}");
        out.push(if may_be_empty { format!("{name}?") } else { name });
        Ok(())
    }
}

fn times(item: &Item) -> String {
    match (item.least, item.most) {
        (1, Some(1)) => String::new(),
        (0, Some(1)) => "?".into(),
        (0, None) => "*".into(),
        (1, None) => "+".into(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Lead;
    use super::super::tests::FABLE;
    use super::*;
    use crate::tokenizer::Encode;
    use std::time::Duration;
    use sys::rank;

    /// Whether a text is one that a rule allows.
    fn allows(rule: &Rule, text: &str) -> bool {
        let (tokenizer, grammars) = &*FABLE;
        let mut matcher =
            grammars.compile(rule, Lead::None).unwrap_or_else(|e| panic!("{e}: {rule:?}")).matcher().unwrap();
        let tokens = tokenizer.encode(text, Encode { add_special: false, parse_special: false });
        matcher.try_consume_tokens(&tokens).is_ok_and(|n| n == tokens.len()) && matcher.is_accepting().unwrap_or(false)
    }

    /// llama.cpp's grammar for JSON, in its form.
    const JSON: &str = r##"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# blanks
ws ::= | " " | "\n" [ \t]{0,20}
"##;

    #[test]
    fn what_refers_to_nothing_is_a_regular_expression() {
        for (gbnf, regex) in [
            ("root ::= \"yes\" | \"no\"", "(?:yes)|(?:no)"),
            ("root ::= a b?\na ::= [a-c]+\nb ::= \".\"", "(?:(?:[a-c])+)(?:(?:\\x{2e}))?"),
            ("root ::= [^a-z\\n]{2,3} # two or three", "(?:[^a-z\\x{a}]){2,3}"),
            ("root ::=\n  \"a\"\n  | \"b\"\n", "(?:a)|(?:b)"),
            ("root ::= .", "(?:(?s:.))"),
        ] {
            assert_eq!(from_gbnf(gbnf), Ok(Rule::Regex(regex.into())), "{gbnf}");
        }
        assert!(matches!(from_gbnf(JSON), Ok(Rule::Lark(_))));
        assert!(is_gbnf(JSON) && is_gbnf("root ::= \"a\"") && !is_gbnf("start: \"a\"") && !is_gbnf("A: \"x ::= y\""));
    }

    #[test]
    fn grammars_allow_what_llama_cpp_allows() {
        let arithmetic = "root ::= (expr \"=\" ws term \"\\n\")+\nexpr ::= term ([-+*/] term)*\n\
            term ::= ident | num | \"(\" ws expr \")\" ws\nident ::= [a-z] [a-z0-9_]* ws\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*";
        let nested = "root ::= \"a\" root \"b\" | \"c\"";
        let cases: [(&str, &[&str], &[&str]); 4] = [
            (
                JSON,
                &["{}", "{ \"a\":1}", "{\"a\":[1, 2.5e3,{\"b\":null}], \"\\u00e9\":\"x\\n\"}", "{\"a\":\"\\\"\"} "],
                &["[]", "{\"a\":}", "{\"a\":01}", "{\"a\",1}", "{\"a\":\"\\x\"}"],
            ),
            (arithmetic, &["x=1\n", "(a +b)*3 = c\n", "1+2=3\nx=y\n"], &["x=1", "=1\n", "(a=b\n"]),
            (nested, &["c", "acb", "aacbb"], &["acbb", "ab", ""]),
            ("root ::= [あ-ん]+ \"。\"", &["あい。"], &["abc", "。"]),
        ];
        for (gbnf, good, bad) in cases {
            let rule = from_gbnf(gbnf).unwrap();
            for text in good {
                assert!(allows(&rule, text), "{text:?} of {rule:?}");
            }
            for text in bad {
                assert!(!allows(&rule, text), "{text:?} of {rule:?}");
            }
        }
    }

    #[test]
    fn faults_are_named_by_line() {
        for (gbnf, part) in [
            ("start ::= \"a\"", "no rule named root"),
            ("root ::= a", "uses a, which is not there"),
            ("root ::= \"a\nb ::= \"c\"", "line 1: a text does not end"),
            ("root ::= (\"a\"", "expected )"),
            ("root ::= \"a\"\nroot ::= \"b\"", "line 2: rule root is there twice"),
            ("root ::= [z-a]", "is empty"),
            ("root ::= []", "is empty"),
            ("root ::= \"a\"{3,2}", "expected {n}"),
            ("root ::= \"a\"{99999}", "up to 10,000"),
            ("root ::= <think>", "tokens cannot be named"),
            ("root ::= \"\\q\"", "\\q has no meaning"),
            ("root ::= \"\\xzz\"", "hexadecimal"),
            ("root ::= \"\\u", "hexadecimal"),
            ("root \"a\"", "expected ::="),
        ] {
            assert!(from_gbnf(gbnf).is_err_and(|why| why.contains(part)), "{gbnf}: {:?}", from_gbnf(gbnf));
        }
    }

    /// Translates on a small stack, and measures the time of the processor.
    fn bounded(text: String) -> Result<Rule, String> {
        let (send, receive) = std::sync::mpsc::channel();
        let work = move || drop(send.send(rank::Work::default().run(|| from_gbnf(&text))));
        std::thread::Builder::new().stack_size(512 << 10).spawn(work).unwrap();
        let (rule, took) = receive.recv_timeout(Duration::from_secs(100)).expect("it ends");
        assert!(took < Duration::from_secs(2), "{took:?}");
        rule
    }

    /// Rules of which each is the one before it; `root` is the last, in the order of the names or against it.
    fn chain(n: usize, body: &str, reversed: bool) -> String {
        let name = |i: usize| format!("r{:05}", if reversed { n - i } else { i });
        let rules = (1..n).map(|i| format!("{}::={}\n", name(i), body.replace('x', &name(i - 1))));
        format!("root::={}\n{}::=\"a\"\n{}", name(n - 1), name(0), rules.collect::<String>())
    }

    #[test]
    fn costly_grammars_are_refused_before_they_cost() {
        let (deep, large) = ("nest deeper", "written out");
        let nested =
            |n: usize, inner: &str, end: &str| format!("{}{inner}{}", "(".repeat(n), format!("){end}").repeat(n));
        let doubling = |n: usize| (0..n).map(|i| format!("x{i} ::= x{} x{}\n", i + 1, i + 1)).collect::<String>();
        let long = "n".repeat(100_000);
        let cases = [
            // Levels by the number of rules.
            (chain(5_000, "x", false), Some(deep)),
            (chain(14_000, "x", false), Some(deep)),
            (chain(14_000, "x", true), Some(deep)),
            (chain(9_000, "(x)", true), Some(deep)),
            (chain(9_000, "x", false).replacen("root::=", "root::=\"r\" root|", 1), Some(deep)),
            (chain(9_000, "x|root", true), None),
            (chain(9_000, "\"a\" x?", true).replacen("root::=", "root::=\"r\" root|", 1), Some(deep)),
            (chain(3_000, "x \"a\"?", true).replacen("root::=", "root::=\"r\" root|", 1), None),
            // Levels by brackets: each asked twice.
            (format!("root ::= {}", nested(500, "\"a\"", "")), Some("nests deeper")),
            (format!("root ::= {}", nested(64, "\"a\"", "")), Some(deep)),
            (format!("root ::= {}", nested(63, "\"a\"", "")), None),
            (format!("root ::= {}", nested(60, "\"a\"", "?")), None),
            (format!("root ::= \"b\" root | {}", nested(60, "\"a\"", "?")), None),
            (format!("root ::= \"b\" | {}", nested(60, "root", "*")), None),
            (format!("root ::= {}", format!("{} ", nested(60, "\"a\" \"b\"?", "")).repeat(1_100)), Some(large)),
            // What multiplies.
            (format!("root ::= \"y\" root | {}\nx ::= {}", "x ".repeat(90_000), "\"a\" ".repeat(19_000)), Some(large)),
            (format!("root ::= {}\nx ::= {}", "x ".repeat(90_000), "\"a\" ".repeat(19_000)), Some(large)),
            (format!("root ::= x0 x0\n{}x40 ::= \"a\"", doubling(40)), Some(large)),
            (format!("root ::= x0 root | x0\n{}x40 ::= \"a\"", doubling(40)), Some(large)),
            (format!("root ::= x0 x0\n{}x5000 ::= \"a\"", doubling(5_000)), Some(large)),
            (format!("root ::= x0 x0 root?\n{}x40 ::= ", doubling(40)), Some(large)),
            (format!("root ::= x0 x0\n{}x40 ::= root |", doubling(40)), None),
            (format!("root ::= {long} {long} root\n{long} ::= root"), Some("bytes")),
            // What is nothing, often.
            (format!("root ::= {}", "|".repeat(250_000)), None),
            (format!("root ::= root {}", "|".repeat(250_000)), Some(large)),
            (format!("root ::= {}", "()".repeat(120_000)), Some(large)),
            (format!("root ::= root | {}", "\"\"".repeat(120_000)), Some(large)),
            (format!("root ::= {}\nx ::= ", "x ".repeat(120_000)), Some(large)),
            (format!("root ::= root {}\nx ::= ", "x ".repeat(120_000)), Some(large)),
            (format!("root ::= \"a\"{}", "\n#".repeat(120_000)), None),
            (format!("root ::= \"a{}", "\n".repeat(250_000)), Some("does not end")),
            (format!("root ::= \"a\"{}", "{".repeat(250_000)), Some("expected")),
        ];
        for (gbnf, part) in cases {
            let head: String = gbnf.chars().take(60).collect();
            match (bounded(gbnf), part) {
                (Ok(_), None) => {}
                (Err(why), Some(part)) if why.contains(part) => assert!(why.len() < 200, "{why}"),
                (other, _) => panic!("{head}: {:.200} instead of {part:?}", format!("{other:?}")),
            }
        }
    }

    #[test]
    fn names_in_errors_are_short() {
        let long = "n".repeat(100_000);
        for gbnf in [format!("root ::= {long}"), format!("{long} ::= \"a\"\n{long} ::= \"b\"")] {
            assert!(from_gbnf(&gbnf).is_err_and(|why| why.contains("nnnn") && why.len() < 200));
        }
    }
}
