//! Grammars for answers: tool calls in a format's notation, and the form of the content.
//!
//! A grammar is one Lark text: special tokens by their ids, other marks as text, and the schemas of arguments as
//! separate grammars.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{Calls, Format, Tool, harmony};
use crate::grammar::{Constraint, Error, FreeThought, Grammar, Grammars, Lead, Rule};
use crate::tokenizer::Tokenizer;

/// Whether an answer calls tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice<'a> {
    /// The model decides; a call that it begins follows the format and the tool's schema.
    #[default]
    Auto,
    /// The answer consists of calls.
    Required,
    /// The answer calls this tool.
    Named(&'a str),
}

/// Requirements on an answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ask<'a> {
    /// Form of its content.
    pub content: Option<&'a Rule>,
    /// Tools it may call.
    pub tools: &'a [Tool],
    /// Whether it calls.
    pub choice: Choice<'a>,
    /// Allows at most one call.
    pub single: bool,
    /// The prompt ends inside a thought ([`Format::opens_thought`]).
    pub opened: bool,
}

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

impl Format {
    /// The constraint of an answer; `None` where everything is allowed.
    ///
    /// When calls are optional, a schema that cannot be compiled constrains only the form of a call. Formats that write
    /// arguments without JSON's quotes enforce `enum` and `const` on strings; Gemma's also enforces types, properties
    /// and items elsewhere, but no further keywords.
    ///
    /// # Errors
    /// As [`Grammars::compile`]; [`Error::Rule`] when a required call has no notation in the format, or no such tool.
    pub fn constraint(
        &self,
        ask: &Ask<'_>,
        tokenizer: &Tokenizer,
        with: &Grammars,
    ) -> Result<Option<Constraint>, Error> {
        let named = |tool: &&Tool| !matches!(ask.choice, Choice::Named(name) if name != tool.name);
        let tools: Vec<&Tool> = ask.tools.iter().filter(named).collect();
        let required = ask.choice != Choice::Auto;
        let calls = self.calls.filter(|_| !tools.is_empty());
        let marks =
            self.thought.map(|t| FreeThought { open: t.open.into(), close: t.close.into(), opened: ask.opened });
        let held = |grammar| Constraint { grammar, thought: marks.clone(), triggers: Vec::new() };
        let lead = if marks.is_some() { Lead::Blanks } else { Lead::None };
        let page =
            Page { format: self, tokenizer, rules: String::new(), n_rules: 0, parts: Vec::new(), has_text: false };
        match (calls, ask.content) {
            (None, _) if required && self.calls.is_none() => Err(Error::Rule("the model's format has no calls".into())),
            (None, _) if required => Err(Error::Rule("there is no such tool to call".into())),
            (None, None) => Ok(None),
            (None, Some(rule)) if !self.reads_all() => with.compile(rule, lead).map(|grammar| Some(held(grammar))),
            (Some(calls), None) if !required => Ok(page
                .when_called(calls, &tools, ask.single, with)
                .map(|grammar| Constraint { triggers: vec![calls.notation.open.into()], ..held(grammar) })),
            _ => {
                let content = ask.content.filter(|_| !required);
                page.answer(calls, &tools, ask.single, content, lead, with).map(|grammar| Some(held(grammar)))
            }
        }
    }

    /// Whether the parser reads answers as a whole, as messages with headers.
    fn reads_all(&self) -> bool {
        self.calls.is_some_and(Calls::reads_all)
    }
}

/// A grammar under construction.
#[derive(Clone)]
pub(super) struct Page<'a> {
    format: &'a Format,
    tokenizer: &'a Tokenizer,
    /// Rules below `start`.
    rules: String,
    n_rules: usize,
    /// Separate grammars, named `p0`, `p1`, ..
    parts: Vec<Rule>,
    /// It holds texts without quotes.
    has_text: bool,
}

impl Page<'_> {
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
            return match &tool.parameters {
                Value::Object(keys) if keys.get("additionalProperties") != Some(&Value::Bool(true)) => String::new(),
                _ => format!("({})*", one(self, "NAME", &Value::Null)),
            };
        };
        let required = |name: &str| tool.parameters["required"].as_array().is_some_and(|r| r.iter().any(|r| r == name));
        let mut lark = String::new();
        for (name, schema) in properties {
            let said = self.say(name);
            let argument = one(self, &said, schema);
            let _ = write!(lark, "({argument}){} ", if required(name) { "" } else { "?" });
        }
        lark
    }

    /// Adds a rule for the calls behind the opening mark; returns its name.
    fn calls(&mut self, calls: &Calls, tools: &[&Tool], single: bool) -> String {
        let Notation { head, call, next, close, .. } = calls.notation;
        let each: Vec<String> = tools.iter().map(|tool| call(self, tool)).collect();
        let one = self.rule("", &each.join(" | "));
        let more = next.filter(|_| !single).map(|next| format!("({} {one})*", self.say(next)));
        let body = format!("{} {one} {} {}", self.say(head), more.unwrap_or_default(), self.say(close));
        self.rule("", &body)
    }

    /// The grammar after a trigger. `None` where the format has no trigger, or not even the form of its calls compiles.
    fn when_called(self, calls: &Calls, tools: &[&Tool], single: bool, with: &Grammars) -> Option<Grammar> {
        if calls.notation.open.is_empty() {
            return None;
        }
        let compile = |tools: &[&Tool]| {
            let mut page = self.clone();
            let calls = page.calls(calls, tools, single);
            page.compile(&calls, with)
        };
        compile(tools).ok().or_else(|| {
            let loose = tools.iter().map(|tool| Tool { name: tool.name.clone(), parameters: Value::Null });
            let loose: Vec<Tool> = loose.collect();
            compile(&loose.iter().collect::<Vec<_>>()).ok()
        })
    }

    /// The grammar of a whole answer: calls, or content.
    fn answer(
        mut self,
        calls: Option<&Calls>,
        tools: &[&Tool],
        single: bool,
        content: Option<&Rule>,
        lead: Lead,
        with: &Grammars,
    ) -> Result<Grammar, Error> {
        let messages = self.format.reads_all();
        let mut options = Vec::new();
        if let Some(calls) = calls {
            let behind = self.calls(calls, tools, single);
            options.push(format!("{} {behind}", self.say(calls.notation.open)));
        }
        if let Some(content) = content {
            let header = if messages { self.say(harmony::FINAL) } else { String::new() };
            let content = self.part(content.clone());
            options.push(format!("{header} {content}"));
        }
        let before = match (messages, lead) {
            (true, _) => format!("({})?", harmony::write_thought(&mut self)),
            (false, Lead::Blanks) => "LEAD?".into(),
            (false, Lead::None) => String::new(),
        };
        let start = format!("{before} ({})", options.join(" | "));
        self.compile(&start, with)
    }

    fn compile(self, start: &str, with: &Grammars) -> Result<Grammar, Error> {
        const TOKENS: &str = "TEXT: /(?s:.*)/\nNAME: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/\nLEAD: /[ \\t\\n\\r]{1,4}/\n";
        with.compile_parts(format!("start: {start}\n{}{TOKENS}", self.rules), &self.parts, !self.has_text)
    }
}
