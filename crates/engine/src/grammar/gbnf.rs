//! Grammars in GBNF, llama.cpp's form of BNF (its grammars/README.md), as rules for llguidance.
//!
//! What does not refer to itself is a regular expression, and becomes one: whole where the root is such, else in large
//! pieces that stand side by side, as lexemes of a grammar in Lark. What may be empty at the end of a piece, as blanks
//! often are, is a lexeme of its own: of two that end at the same place the parser tries both. Yet a lexeme is as long
//! as it can be, so a grammar may allow a little less than llama.cpp's parser, which knows no lexemes; never more.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::{MAX_RULE_BYTES, MAX_RULE_DEPTH, Rule};

/// Whether a grammar is in GBNF: Lark has no `::=`.
pub fn is_gbnf(text: &str) -> bool {
    text.lines().any(|line| {
        let name = line.split_once("::=").map(|(name, _)| name.trim());
        name.is_some_and(|name| !name.is_empty() && name.chars().all(is_name))
    })
}

/// The rule that a grammar in GBNF states.
///
/// # Errors
/// What is wrong with it, by line.
pub fn from_gbnf(text: &str) -> Result<Rule, String> {
    if text.len() > MAX_RULE_BYTES {
        return Err(format!("it has {} bytes, at most {MAX_RULE_BYTES} are allowed", text.len()));
    }
    let rules = Parser { rest: text, line: 1, rules: BTreeMap::new() }.grammar()?;
    for (name, body) in &rules {
        check_names(name, body, &rules)?;
    }
    let root = rules.get("root").ok_or("it has no rule named root")?;
    let mut writer =
        Writer { flat: Flat::of(&rules), rules: &rules, terminals: String::new(), n_terminals: 0, used: Vec::new() };
    if let Some(regex) = writer.regex(root)? {
        return Ok(Rule::Regex(regex));
    }
    let mut lark = String::from("start: root\n");
    let (mut named, mut todo) = (BTreeSet::from(["root"]), vec!["root"]);
    while let Some(name) = todo.pop() {
        let Some(body) = rules.get(name) else { continue };
        let body = writer.rule(body)?;
        let _ = writeln!(lark, "{}: {body}", rule_name(name));
        todo.extend(writer.used.drain(..).filter(|name| named.insert(*name)));
    }
    lark.push_str(&writer.terminals);
    Ok(Rule::Lark(lark))
}

/// Alternatives.
type Choice<'a> = Vec<Vec<Item<'a>>>;

/// A thing and how often it comes.
#[derive(Clone, Debug, PartialEq)]
struct Item<'a> {
    thing: Thing<'a>,
    least: u32,
    most: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
enum Thing<'a> {
    /// A regular expression for one character or a text.
    Text(String),
    Rule(&'a str),
    Group(Choice<'a>),
}

type Rules<'a> = BTreeMap<&'a str, Choice<'a>>;

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// Reads a grammar.
struct Parser<'a> {
    rest: &'a str,
    line: usize,
    rules: Rules<'a>,
}

impl<'a> Parser<'a> {
    fn grammar(mut self) -> Result<Rules<'a>, String> {
        self.blanks(true);
        while !self.rest.is_empty() {
            let name = self.name()?;
            self.blanks(false);
            if !self.take("::=") {
                return Err(self.wrong("expected ::= behind a rule's name"));
            }
            let body = self.choice(0)?;
            if self.rules.insert(name, body).is_some() {
                return Err(self.wrong(&format!("rule {name} is there twice")));
            }
            self.blanks(true);
        }
        Ok(self.rules)
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

    /// Alternatives, up to the end of the line, or of the group where `depth` is not 0.
    fn choice(&mut self, depth: usize) -> Result<Choice<'a>, String> {
        if depth > MAX_RULE_DEPTH {
            return Err(self.wrong(&format!("nests deeper than {MAX_RULE_DEPTH} levels")));
        }
        let mut all = Vec::new();
        loop {
            self.blanks(true);
            all.push(self.sequence(depth)?);
            // An alternative may stand on a line of its own.
            let here = (self.rest, self.line);
            self.blanks(true);
            if !self.take("|") {
                (self.rest, self.line) = here;
                return Ok(all);
            }
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<Vec<Item<'a>>, String> {
        let mut items: Vec<Item<'a>> = Vec::new();
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
                    let group = self.choice(depth + 1)?;
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
                    Thing::Rule(name)
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

fn check_names(at: &str, body: &Choice<'_>, rules: &Rules<'_>) -> Result<(), String> {
    for item in body.iter().flatten() {
        match &item.thing {
            Thing::Rule(name) if !rules.contains_key(name) => {
                return Err(format!("rule {at} uses {name}, which is not there"));
            }
            Thing::Group(group) => check_names(at, group, rules)?,
            Thing::Rule(_) | Thing::Text(_) => {}
        }
    }
    Ok(())
}

/// What is known of the rules that do not come to themselves: all that they use is known before them.
#[derive(Default)]
struct Flat<'a> {
    all: BTreeSet<&'a str>,
    /// Those that may be empty.
    nullable: BTreeSet<&'a str>,
    /// Those of which no alternative begins or ends with what may be empty.
    tight: BTreeSet<&'a str>,
}

impl<'a> Flat<'a> {
    fn of(rules: &Rules<'a>) -> Flat<'a> {
        let mut flat = Flat::default();
        loop {
            let n = flat.all.len();
            for (name, body) in rules {
                if !flat.all.contains(name) && is_flat(body, &flat.all) {
                    flat.all.insert(name);
                    if flat.any_is_nullable(body) {
                        flat.nullable.insert(name);
                    }
                    if flat.is_tight(body) {
                        flat.tight.insert(name);
                    }
                }
            }
            if flat.all.len() == n {
                return flat;
            }
        }
    }

    fn any_is_nullable(&self, choice: &Choice<'a>) -> bool {
        choice.iter().any(|sequence| sequence.iter().all(|item| self.is_nullable(item)))
    }

    /// Whether an item may be empty.
    fn is_nullable(&self, item: &Item<'a>) -> bool {
        item.least == 0
            || match &item.thing {
                Thing::Text(text) => text.is_empty(),
                Thing::Rule(name) => self.nullable.contains(name),
                Thing::Group(group) => self.any_is_nullable(group),
            }
    }

    /// Whether no alternative begins or ends with what may be empty.
    fn is_tight(&self, choice: &Choice<'a>) -> bool {
        let tight = |item: &Item<'a>| {
            !self.is_nullable(item)
                && match &item.thing {
                    Thing::Text(_) => true,
                    Thing::Rule(name) => self.tight.contains(name),
                    Thing::Group(group) => self.is_tight(group),
                }
        };
        choice.iter().all(|sequence| sequence.first().is_none_or(tight) && sequence.last().is_none_or(tight))
    }
}

fn is_flat(body: &Choice<'_>, flat: &BTreeSet<&str>) -> bool {
    body.iter().flatten().all(|item| match &item.thing {
        Thing::Text(_) => true,
        Thing::Rule(name) => flat.contains(name),
        Thing::Group(group) => is_flat(group, flat),
    })
}

/// Writes rules in Lark, and regular expressions.
struct Writer<'a> {
    rules: &'a Rules<'a>,
    flat: Flat<'a>,
    /// Lines of terminals.
    terminals: String,
    n_terminals: usize,
    /// Rules that were named.
    used: Vec<&'a str>,
}

impl<'a> Writer<'a> {
    /// Alternatives as one regular expression, where they are one.
    fn regex(&self, choice: &Choice<'a>) -> Result<Option<String>, String> {
        let mut out = String::new();
        for (i, sequence) in choice.iter().enumerate() {
            if i > 0 {
                out.push('|');
            }
            for item in sequence {
                match self.piece(item)? {
                    Some(piece) => out.push_str(&piece),
                    None => return Ok(None),
                }
                if out.len() > MAX_RULE_BYTES {
                    return Err(format!("its rules, written out, have more than {MAX_RULE_BYTES} bytes"));
                }
            }
        }
        Ok(Some(out))
    }

    /// One item as a regular expression, where it is one.
    fn piece(&self, item: &Item<'a>) -> Result<Option<String>, String> {
        let inner = match &item.thing {
            Thing::Text(text) => Some(text.clone()),
            Thing::Rule(name) if !self.flat.all.contains(name) => None,
            Thing::Rule(name) => self.rules.get(name).map_or(Ok(None), |body| self.regex(body))?,
            Thing::Group(group) => self.regex(group)?,
        };
        Ok(inner.map(|inner| format!("(?:{inner}){}", times(item))))
    }

    /// As [`Writer::piece`], where that makes a good lexeme.
    fn lexeme(&self, item: &Item<'a>) -> Result<Option<String>, String> {
        let is_tight = match &item.thing {
            Thing::Text(_) => return self.piece(item),
            Thing::Rule(name) if !self.flat.all.contains(name) => return Ok(None),
            Thing::Rule(name) => self.flat.tight.contains(name),
            Thing::Group(group) => self.flat.is_tight(group),
        };
        match is_tight || self.flat.is_nullable(item) {
            true => self.piece(item),
            false => Ok(None),
        }
    }

    /// Alternatives as Lark: pieces that are regular expressions become terminals, side by side ones together.
    fn rule(&mut self, choice: &Choice<'a>) -> Result<String, String> {
        let mut all = Vec::new();
        for sequence in choice {
            // What stands in the terminal that grows; what may be empty at its end waits.
            let (mut out, mut regex, mut tail) = (Vec::new(), String::new(), Vec::new());
            for item in sequence {
                match self.lexeme(item)? {
                    Some(piece) if self.flat.is_nullable(item) => {
                        match regex.is_empty() {
                            true => self.terminal(&mut piece.clone(), true, &mut out),
                            false => tail.push(piece),
                        }
                        continue;
                    }
                    Some(piece) => {
                        regex.extend(tail.drain(..));
                        regex.push_str(&piece);
                        continue;
                    }
                    None => {}
                }
                self.terminal(&mut regex, false, &mut out);
                tail.drain(..).for_each(|mut piece| self.terminal(&mut piece, true, &mut out));
                let inner = match &item.thing {
                    Thing::Rule(name) => {
                        self.used.push(name);
                        rule_name(name)
                    }
                    Thing::Group(group) => format!("({})", self.rule(group)?),
                    Thing::Text(_) => continue,
                };
                out.push(format!("{inner}{}", times(item)));
            }
            self.terminal(&mut regex, false, &mut out);
            tail.drain(..).for_each(|mut piece| self.terminal(&mut piece, true, &mut out));
            all.push(if out.is_empty() { "\"\"".into() } else { out.join(" ") });
        }
        Ok(all.join(" | "))
    }

    /// Names a regular expression, and takes it. A lexeme is not empty: one that may be is left out instead.
    fn terminal(&mut self, regex: &mut String, may_be_empty: bool, out: &mut Vec<String>) {
        let regex = std::mem::take(regex);
        if regex.is_empty() {
            return;
        }
        let name = format!("T{}", self.n_terminals);
        self.n_terminals += 1;
        let some = if may_be_empty { " & /(?s:.+)/" } else { "" };
        let _ = writeln!(self.terminals, "{name}: /{regex}/{some}");
        out.push(if may_be_empty { format!("{name}?") } else { name });
    }
}

fn times(item: &Item<'_>) -> String {
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

    /// Whether a text is one that a rule allows.
    fn allows(rule: &Rule, text: &str) -> bool {
        let (tokenizer, grammars) = &*FABLE;
        let mut matcher = grammars.compile(rule, Lead::None).unwrap_or_else(|e| panic!("{e}: {rule:?}")).matcher();
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
        let deep = format!("root ::= {}\"a\"{}", "(".repeat(500), ")".repeat(500));
        assert!(from_gbnf(&deep).is_err_and(|why| why.contains("deeper")));
        // Each rule doubles the one before: written out it would not end.
        let mut doubling = String::from("root ::= x0 x0\n");
        (0..40).for_each(|i| doubling += &format!("x{i} ::= x{} x{}\n", i + 1, i + 1));
        doubling += "x40 ::= \"a\"";
        let recursive = doubling.replace("root ::= x0 x0", "root ::= x0 root | x0");
        assert!(from_gbnf(&recursive).is_err_and(|why| why.contains("written out")));
        assert!(from_gbnf(&doubling).is_err_and(|why| why.contains("written out")));
    }
}
