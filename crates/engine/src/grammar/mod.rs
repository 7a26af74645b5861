//! Structured output: an answer that keeps to a JSON schema, a regular expression or a grammar, token by token.
//!
//! [`Grammars`] compiles a [`Rule`] for one vocabulary before a request is accepted, so that what cannot be met is
//! refused before any token. A [`Constraint`] in a request says where in the answer the grammar holds. The engine then
//! forbids, before each token is chosen, every token that the grammar does not allow; when nothing can follow, the
//! answer ends. An answer is never free where the grammar was to hold: what goes wrong on the way ends the request with
//! an error.
//!
//! The grammars are llguidance's: an Earley parser over lexemes that are derivatives of regular expressions, walked
//! along a trie of the vocabulary. The set of allowed tokens is computed on threads of its own while the model computes
//! the logits; it depends on the grammar and the tokens alone, and so does the answer. What compiles or masks for long
//! gives way to the model's threads.

mod closed;
mod extent;
mod gbnf;
mod guard;
mod masks;
mod numbers;
mod pattern;
mod schema;
mod trial;
mod vocabulary;

#[cfg(test)]
pub(crate) mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{CancellationHandle, Matcher, ParserFactory};
use serde_json::Value;
use sys::rank;

use crate::tokenizer::Tokenizer;

pub use closed::closed;
use extent::{bracket_depth, json_extent};
pub use gbnf::from_gbnf;
pub(crate) use guard::Guard;
use masks::Masks;
use numbers::Numbers;
pub use schema::{Tidy, tidy};
pub use trial::{Trial, attempt};

/// Longest rule in bytes; of a schema its compact JSON.
pub const MAX_RULE_BYTES: usize = 256 << 10;
/// How deep a schema, or the brackets of a regular expression or grammar, may nest.
pub const MAX_RULE_DEPTH: usize = 64;
/// Most properties of an object, most schemas of an `anyOf` and the like, and most `|` of a grammar: each is a row of
/// the parser's table at once, which llguidance bounds at four times as many.
pub const MAX_RULE_WIDTH: usize = 500;
/// Most expressions (`pattern`, `format`, `multipleOf`) that may have to hold of one text at once, by `allOf` and the
/// like: their automata multiply.
pub const MAX_RULE_MEETS: usize = 8;
/// Largest product of the `multipleOf` of one value, and largest sum of all in a schema, decimal points left out: each
/// takes as many states.
pub const MAX_RULE_MULTIPLE: f64 = 100_000.0;
/// How long a rule may take to compile, in seconds of the processor's time; those in use take some hundredths.
pub const MAX_COMPILE_SECONDS: u64 = 10;
/// The same by the clock: on a machine that is full of other work, a rule waits for its turn.
pub const MAX_COMPILE_WAIT_SECONDS: u64 = 30;
/// Time of the processor from which the thread that compiles a rule gives way to those that compute tokens.
const LONG_COMPILE: Duration = Duration::from_millis(100);
/// How often a thread that compiles is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// Stack of the thread that compiles. Only what is used of it becomes real memory.
const STACK_BYTES: usize = 256 << 20;
/// What may stand between the parts of a JSON text: a blank, or a new line and its indentation.
const JSON_BLANKS: &str = r" |\n[ \t]{0,20}";

/// What a text must look like.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// A JSON object.
    JsonObject,
    /// JSON that satisfies this schema (draft 2020-12); properties come in the schema's order.
    JsonSchema(Value),
    /// All of it matches this regular expression (the `regex` crate's syntax, no look-around).
    Regex(String),
    /// A grammar in llguidance's variant of Lark's syntax, whose first rule is `start`.
    Lark(String),
    /// A grammar in GBNF, llama.cpp's form of BNF, whose first rule is `root`.
    Gbnf(String),
}

impl Rule {
    /// The rule of a grammar's text: in GBNF where it has the signs of that, else in Lark.
    pub fn grammar(text: String) -> Rule {
        match gbnf::is_gbnf(&text) {
            true => Rule::Gbnf(text),
            false => Rule::Lark(text),
        }
    }
}

/// What may stand before the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lead {
    /// Nothing.
    #[default]
    None,
    /// A few blanks, as models put them between a thought and the answer.
    Blanks,
}

/// Why a grammar cannot be used, or an answer could not go on. Each is a whole sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The rule is too long to be compiled.
    #[error("failed to compile the grammar: it has {bytes} bytes, at most {MAX_RULE_BYTES} are allowed")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The rule nests too deeply.
    #[error("failed to compile the grammar: it nests deeper than {MAX_RULE_DEPTH} levels")]
    TooDeep,
    /// The rule has too many choices at one place.
    #[error("failed to compile the grammar: {what} are {width}, at most {most} are allowed")]
    TooWide {
        /// The limit that was exceeded.
        what: &'static str,
        /// How many.
        width: usize,
        /// How many may be.
        most: usize,
    },
    /// Compiling it took more time or memory than it may, or nobody waits for it any more.
    #[error("failed to compile the grammar: {0}")]
    TooCostly(String),
    /// The rule is not valid, asks for what is not supported, is too large, or cannot be met.
    #[error("failed to compile the grammar: {0}")]
    Rule(String),
    /// The rule is valid, and no text satisfies it.
    #[error("failed to compile the grammar: no text satisfies it: {0}")]
    Unsatisfiable(String),
    /// The vocabulary cannot be used for grammars, or its threads cannot be started.
    #[error("failed to set up grammars: {0}")]
    Setup(String),
    /// The grammar became too complex on the way, or the thought ran on into what it does not allow.
    #[error("failed to hold an answer to its grammar: {0}")]
    Broken(String),
}

/// Compiles rules for one vocabulary. Made once a model: building its trie takes a while for a large vocabulary.
/// Cheap to clone.
#[derive(Clone)]
pub struct Grammars {
    factory: Arc<ParserFactory>,
    vocabulary: TokEnv,
    masks: Masks,
    trial: Option<Arc<dyn Trial>>,
    stop: Arc<AtomicBool>,
}

/// Runs before each mask on the thread that computes it: what makes masks late in tests.
pub type Delay = Arc<dyn Fn() + Send + Sync>;

impl Grammars {
    /// Grammars over a tokenizer's vocabulary; masks are computed on `n_threads` threads of their own (at least
    /// one), and slow ones on as many others, which give way to all.
    ///
    /// # Errors
    /// [`Error::Setup`].
    pub fn new(tokenizer: Arc<Tokenizer>, n_threads: usize) -> Result<Grammars, Error> {
        Grammars::with_delay(tokenizer, n_threads, Arc::new(|| ()))
    }

    /// As [`Grammars::new`], with `delay` before each mask.
    ///
    /// # Errors
    /// [`Error::Setup`].
    pub fn with_delay(tokenizer: Arc<Tokenizer>, n_threads: usize, delay: Delay) -> Result<Grammars, Error> {
        let vocabulary = vocabulary::environment(tokenizer);
        let factory = factory(&vocabulary)?;
        let masks = Masks::start(n_threads.max(1), delay)?;
        Ok(Grammars { factory: Arc::new(factory), vocabulary, masks, trial: None, stop: Arc::default() })
    }

    /// Returns the same, where every grammar is tried elsewhere before it is compiled here.
    pub fn with_trial(self, trial: Arc<dyn Trial>) -> Grammars {
        Grammars { trial: Some(trial), ..self }
    }

    /// Returns the same, whose work ends soon after `stop` is set: for a client that may leave.
    pub fn until(&self, stop: Arc<AtomicBool>) -> Grammars {
        Grammars { stop, ..self.clone() }
    }

    /// Returns a grammar that holds nowhere, for a [`Constraint`] that only bounds a thought.
    pub fn free(&self) -> Grammar {
        let compiled = Compiled { matcher: None, first_took: Duration::ZERO, vocabulary: self.vocabulary.clone() };
        Grammar { compiled: Arc::new(compiled), masks: self.masks.clone(), numbers: None }
    }

    /// Compiles a rule. Bounded, but not short for a large one: tens of milliseconds.
    ///
    /// # Errors
    /// [`Error::TooLong`], [`Error::TooDeep`], [`Error::Rule`] with what cannot be met, [`Error::Unsatisfiable`].
    pub fn compile(&self, rule: &Rule, lead: Lead) -> Result<Grammar, Error> {
        let grammar = self.compile_top(top(source(rule)?, lead))?;
        Ok(Grammar { numbers: is_json(rule).then_some(Numbers::JSON), ..grammar })
    }

    /// Compiles a grammar of our own writing, in Lark, whose parts `@p0`, `@p1` and so on are rules; `quoted` where it
    /// holds no free texts besides.
    pub(crate) fn compile_parts(&self, lark: String, parts: &[Rule], quoted: bool) -> Result<Grammar, Error> {
        let mut grammars = vec![GrammarWithLexer { name: Some("answer".into()), ..GrammarWithLexer::from_lark(lark) }];
        let mut bytes = 0;
        for (i, part) in parts.iter().enumerate() {
            let part = source(part)?;
            bytes += part.json_schema.as_ref().map_or(0, |schema| schema.to_string().len());
            bytes += part.lark_grammar.as_ref().map_or(0, String::len);
            grammars.push(GrammarWithLexer { name: Some(format!("p{i}")), ..part });
        }
        match bytes {
            bytes if bytes > MAX_RULE_BYTES => Err(Error::TooLong { bytes }),
            _ => {
                let grammar = self.compile_top(TopLevelGrammar { grammars, max_tokens: None })?;
                let how = if quoted && parts.iter().all(is_json) { Numbers::JSON } else { Numbers::MIXED };
                Ok(Grammar { numbers: parts.iter().any(is_json).then_some(how), ..grammar })
            }
        }
    }

    fn compile_top(&self, grammar: TopLevelGrammar) -> Result<Grammar, Error> {
        let stopped = || self.stop.load(Ordering::Relaxed);
        if let Some(trial) = &self.trial {
            let marks = vocabulary::marks(self.vocabulary.tok_trie());
            trial.attempt(&trial::message(&grammar, &marks)?, &stopped)?;
        }
        let (matcher, first_took) = on_wide_stack(&self.factory, grammar, &stopped)?;
        let compiled = Compiled { matcher: Some(Mutex::new(matcher)), first_took, vocabulary: self.vocabulary.clone() };
        Ok(Grammar { compiled: Arc::new(compiled), masks: self.masks.clone(), numbers: None })
    }
}

/// Returns what compiles grammars over a vocabulary, within llguidance's own limits.
fn factory(vocabulary: &TokEnv) -> Result<ParserFactory, Error> {
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    let mut factory = ParserFactory::new(vocabulary, InferenceCapabilities::default(), &slices)
        .map_err(|e| Error::Setup(first_line(&e)))?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.verbose_errors = false;
    // A state takes one to two kB: at most some hundred MB a request.
    limits.max_lexer_states = 100_000;
    // It walks the whole vocabulary, under no limit of its own.
    limits.precompute_large_lexemes = false;
    Ok(factory)
}

/// Compiles on a thread of its own, as schemas and syntax trees nest, and their destructors do; and computes the first
/// mask, which is given up when `stopped` says so, [`MAX_COMPILE_SECONDS`] are used or [`MAX_COMPILE_WAIT_SECONDS`]
/// have passed.
fn on_wide_stack(
    factory: &Arc<ParserFactory>,
    grammar: TopLevelGrammar,
    stopped: &dyn Fn() -> bool,
) -> Result<(Matcher, Duration), Error> {
    let start = Instant::now();
    let (reply, compiled) = sync_channel(1);
    let (begun, handle) = sync_channel(1);
    let (factory, work) = (factory.clone(), Arc::new(rank::Work::default()));
    let worker = work.clone();
    let compile = move || drop(reply.send(worker.run(|| matcher(&factory, grammar, &begun)).0));
    let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES).spawn(compile);
    thread.map_err(|e| Error::Setup(format!("start a thread: {e}")))?;
    loop {
        match compiled.recv_timeout(LOOK) {
            Ok(matcher) => return matcher,
            Err(RecvTimeoutError::Disconnected) => return Err(Error::Rule("the compiler failed".into())),
            Err(RecvTimeoutError::Timeout) if stopped() || is_over(work.took(), start.elapsed()) => {
                handle.try_iter().for_each(|handle: CancellationHandle| handle.cancel());
                return Err(too_costly(stopped()));
            }
            Err(RecvTimeoutError::Timeout) => let_by(&work),
        }
    }
}

/// Returns whether a rule has used up its time: of the processor, where a thread is at it, or by the clock.
fn is_over(used: Option<Duration>, waited: Duration) -> bool {
    let [most, most_wait] = [MAX_COMPILE_SECONDS, MAX_COMPILE_WAIT_SECONDS].map(Duration::from_secs);
    used.is_some_and(|used| used > most) || waited > most_wait
}

/// Lets others by where compiling takes long.
fn let_by(work: &rank::Work) {
    if work.took().is_some_and(|took| took > LONG_COMPILE) {
        work.give_way();
    }
}

fn too_costly(stopped: bool) -> Error {
    Error::TooCostly(match stopped {
        true => "the request was cancelled".into(),
        false => "it takes more time or memory than a grammar may".into(),
    })
}

/// Compiles a grammar and finds what cannot begin at all; `begun` gets what ends the second part. Returns the time of
/// the processor that the first mask took, too.
fn matcher(
    factory: &ParserFactory,
    grammar: TopLevelGrammar,
    begun: &SyncSender<CancellationHandle>,
) -> Result<(Matcher, Duration), Error> {
    let parser = factory.create_parser(grammar).map_err(|e| match first_line(&e) {
        why if why.starts_with("Unsatisfiable") => Error::Unsatisfiable(why),
        why => Error::Rule(why),
    })?;
    let matcher = Matcher::new(Ok(parser)).into_cancellable();
    // The first mask is computed on a copy: how a matcher got its caches must not matter.
    let mut copy = matcher.deep_clone();
    if let Some(handle) = copy.cancellation_handle() {
        begun.send(handle).map_err(|_| too_costly(true))?;
    }
    let (mask, took) = rank::Work::default().run(|| copy.compute_mask());
    mask.map_err(|e| match first_line(&e) {
        why if why.starts_with("NoExtension") => Error::Unsatisfiable("no token can begin one".into()),
        why => Error::Rule(why),
    })?;
    match matcher.get_error() {
        Some(why) => Err(Error::Rule(why)),
        None => Ok((matcher, took)),
    }
}

/// A compiled rule. Cheap to clone; serves any number of requests.
#[derive(Clone)]
pub struct Grammar {
    compiled: Arc<Compiled>,
    masks: Masks,
    /// How the lengths of its numbers are counted, where they are bounded.
    numbers: Option<Numbers>,
}

struct Compiled {
    /// `None` where nothing is held.
    matcher: Option<Mutex<Matcher>>,
    /// Time of the processor that its first mask takes.
    first_took: Duration,
    vocabulary: TokEnv,
}

impl Grammar {
    /// Returns a matcher at the start, with its own caches.
    fn matcher(&self) -> Result<Matcher, Error> {
        let matcher = self.compiled.matcher.as_ref().ok_or_else(|| Error::Setup("it holds nowhere".into()))?;
        Ok(matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone())
    }

    /// Returns whether it holds nowhere.
    fn is_free(&self) -> bool {
        self.compiled.matcher.is_none()
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Grammar")
    }
}

/// Where in an answer a grammar holds.
#[derive(Clone, Debug)]
pub struct Constraint {
    /// The grammar. It must be compiled for the vocabulary of the engine's model.
    pub grammar: Grammar,
    /// A thought that may stand before it, in which everything is allowed but the end of the answer.
    pub thought: Option<FreeThought>,
    /// Where the answer comes under the grammar. Empty: at once, or behind the thought. Else behind the first of these
    /// texts that the model writes; until then it writes what it likes and may end.
    pub triggers: Vec<String>,
}

impl Constraint {
    /// Holds the whole answer to the grammar.
    pub fn new(grammar: Grammar) -> Constraint {
        Constraint { grammar, thought: None, triggers: Vec::new() }
    }
}

/// A thought before a constrained answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeThought {
    /// Opens it. Where the model is to open it, and not the prompt, this must be one token of the vocabulary; else the
    /// answer comes without a thought.
    pub open: String,
    /// Closes it.
    pub close: String,
    /// The prompt ends inside the thought.
    pub opened: bool,
    /// Number of tokens after which it is closed.
    pub most_tokens: Option<usize>,
}

/// Returns whether a rule's texts are JSON.
fn is_json(rule: &Rule) -> bool {
    matches!(rule, Rule::JsonObject | Rule::JsonSchema(_))
}

/// Checks a rule's size and depth; returns it in llguidance's form. Takes time and memory linear in its size.
fn source(rule: &Rule) -> Result<GrammarWithLexer, Error> {
    let check = |bytes: usize, deep: bool, (what, width): (&'static str, usize)| match (bytes, deep, width) {
        (bytes, ..) if bytes > MAX_RULE_BYTES => Err(Error::TooLong { bytes }),
        (_, true, _) => Err(Error::TooDeep),
        (_, _, width) if width > MAX_RULE_WIDTH => Err(Error::TooWide { what, width, most: MAX_RULE_WIDTH }),
        _ => Ok(()),
    };
    match rule {
        Rule::JsonObject => Ok(GrammarWithLexer::from_json_schema(json_schema(&serde_json::json!({"type": "object"})))),
        Rule::JsonSchema(schema) => {
            let (depth, width) = json_extent(schema);
            check(if depth > MAX_RULE_DEPTH { 0 } else { schema.to_string().len() }, depth > MAX_RULE_DEPTH, width)?;
            if !(schema.is_object() || schema.is_boolean()) {
                let given: String = schema.to_string().chars().take(40).collect();
                return Err(Error::Rule(format!("a schema is an object, true or false, not {given}")));
            }
            let tidy = tidy(schema.clone());
            if let Some(why) = tidy.refusal() {
                return Err(Error::Rule(why));
            }
            extent::meets(&tidy.schema)?;
            Ok(GrammarWithLexer::from_json_schema(json_schema(&tidy.schema)))
        }
        Rule::Regex(text) => {
            check(text.len(), bracket_depth(text) > MAX_RULE_DEPTH, ("", 0))?;
            Ok(GrammarWithLexer::from_regex(text))
        }
        Rule::Lark(text) => {
            let width = text.bytes().filter(|&b| b == b'|').count();
            check(text.len(), bracket_depth(text) > MAX_RULE_DEPTH, ("its choices", width))?;
            Ok(GrammarWithLexer::from_lark(text.clone()))
        }
        Rule::Gbnf(text) => {
            source(&from_gbnf(text).map_err(|why| Error::Rule(format!("it cannot be read as GBNF: {why}")))?)
        }
    }
}

/// Returns a schema with the blanks that are allowed between its parts. The schema's own word about them is
/// llguidance's extension and could switch checks off.
pub(crate) fn json_schema(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => serde_json::json!({}),
        Value::Bool(false) => serde_json::json!({"enum": []}),
        other => other.clone(),
    };
    if let Value::Object(keys) = &mut schema {
        // Whether alternatives overlap is no matter of a grammar.
        let options = serde_json::json!({"whitespace_pattern": JSON_BLANKS, "coerce_one_of": true});
        keys.insert("x-guidance".into(), options);
    }
    schema
}

/// Returns the grammar, with a rule above it that lets the lead through.
fn top(mut body: GrammarWithLexer, lead: Lead) -> TopLevelGrammar {
    let mut grammars = Vec::new();
    if lead == Lead::Blanks {
        let mut above = GrammarWithLexer::from_lark("start: LEAD? @body\nLEAD: /[ \\t\\n\\r]{1,4}/".into());
        above.name = Some("answer".into());
        body.name = Some("body".into());
        grammars.push(above);
    }
    grammars.push(body);
    TopLevelGrammar { grammars, max_tokens: None }
}

/// Returns the words of an error without what llguidance appends for itself.
fn first_line(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    let text = text.split("\n<").next().unwrap_or_default().trim();
    text.chars().take(500).collect()
}
