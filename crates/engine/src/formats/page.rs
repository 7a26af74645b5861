//! A grammar under construction, and the notation in which a format writes calls into it.
//!
//! A grammar is one Lark text: special tokens by their ids, other marks as text, and the schemas of arguments as
//! separate grammars.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{Format, Tool};
use crate::grammar::Rule;
use crate::tokenizer::Tokenizer;

/// Notation of calls, for a grammar. Texts may hold marks.
pub(super) struct Notation {
    /// Opens calls; triggers the grammar when calls are optional. Empty where no mark opens them.
    pub open: &'static str,
    /// Between `open` and the first call.
    pub head: &'static str,
    /// One call: a piece of Lark.
    pub call: fn(&mut Page<'_>, &Tool) -> String,
    /// Between calls; `None` where an answer has at most one.
    pub next: Option<&'static str>,
    /// After the last call.
    pub close: &'static str,
}

/// A grammar under construction.
#[derive(Clone)]
pub(super) struct Page<'a> {
    pub format: &'a Format,
    tokenizer: &'a Tokenizer,
    /// Rules below `start`.
    pub rules: String,
    n_rules: usize,
    /// Separate grammars, named `p0`, `p1`, ..
    pub parts: Vec<Rule>,
    /// It holds texts without quotes.
    pub has_text: bool,
}

impl<'a> Page<'a> {
    /// An empty one.
    pub fn new(format: &'a Format, tokenizer: &'a Tokenizer) -> Self {
        Page { format, tokenizer, rules: String::new(), n_rules: 0, parts: Vec::new(), has_text: false }
    }

    /// A text in Lark: its marks as special tokens, the rest literally.
    pub fn say(&self, text: &str) -> String {
        let marks = self.format.marks().filter(|mark| self.special(mark).is_some());
        let first = marks.filter_map(|mark| Some((text.find(mark)?, mark)));
        match first.min_by_key(|(at, mark)| (*at, std::cmp::Reverse(mark.len()))) {
            Some((at, mark)) => {
                let id = self.special(mark).unwrap_or_default();
                let (before, after) = (self.say(&text[..at]), self.say(&text[at + mark.len()..]));
                format!("{before} <[{id}]> {after}")
            }
            None if text.is_empty() => String::new(),
            None => Value::from(text).to_string(),
        }
    }

    fn special(&self, mark: &str) -> Option<u32> {
        self.tokenizer.token_to_id(mark).filter(|&id| self.tokenizer.is_special(id))
    }

    /// Adds a rule; returns its name.
    pub fn rule(&mut self, options: &str, body: &str) -> String {
        let name = self.next_rule();
        self.n_rules += 1;
        let _ = writeln!(self.rules, "{name}{options}: {body}");
        name
    }

    /// Name of the next rule.
    pub fn next_rule(&self) -> String {
        format!("r{}", self.n_rules)
    }

    /// Adds a separate grammar; returns its name.
    pub fn part(&mut self, rule: Rule) -> String {
        self.parts.push(rule);
        format!("@p{}", self.parts.len() - 1)
    }

    /// A call's arguments as JSON.
    pub fn arguments(&mut self, tool: &Tool) -> String {
        let mut schema = tool.parameters.clone();
        match &mut schema {
            Value::Object(keys) => {
                keys.entry("type").or_insert_with(|| "object".into());
            }
            other => *other = json!({"type": "object"}),
        }
        self.part(Rule::JsonSchema(schema))
    }

    /// Any text up to and including this end.
    pub fn text_until(&mut self, end: &str) -> String {
        self.has_text = true;
        let end = self.say(end);
        match end.strip_prefix('"').map(|rest| rest.find("\" <[").map_or(end.len(), |at| at + 2)) {
            Some(len) => {
                let name = self.rule(&format!("[suffix={}]", &end[..len]), "TEXT");
                format!("{name} {}", &end[len..])
            }
            None => format!("TEXT {end}"),
        }
    }

    /// An unquoted argument value and its end.
    pub fn bare(&mut self, schema: &Value, end: &str) -> String {
        let options = schema["enum"].as_array().cloned().or_else(|| schema.get("const").map(|c| vec![c.clone()]));
        if let Some(options) = options.filter(|o| !o.is_empty()) {
            let options = options.iter().map(|o| self.say(&o.as_str().map_or_else(|| o.to_string(), str::to_owned)));
            return format!("({}) {}", options.collect::<Vec<_>>().join(" | "), self.say(end));
        }
        match schema["type"].as_str() {
            None | Some("string") => self.text_until(end),
            Some(_) => format!("{} {}", self.part(Rule::JsonSchema(schema.clone())), self.say(end)),
        }
    }

    /// Arguments written one by one, in the schema's order. `one` writes a single argument, given its name in Lark and
    /// its schema.
    pub fn one_by_one(&mut self, tool: &Tool, one: impl Fn(&mut Self, &str, &Value) -> String) -> String {
        let Some(properties) = tool.parameters["properties"].as_object().filter(|p| !p.is_empty()) else {
            return match tool.takes_others() {
                true => format!("({})*", one(self, "NAME", &Value::Null)),
                false => String::new(),
            };
        };
        let mut lark = String::new();
        for (name, schema) in properties {
            let said = self.say(name);
            let argument = one(self, &said, schema);
            let _ = write!(lark, "({argument}){} ", if tool.requires(name) { "" } else { "?" });
        }
        lark
    }
}
