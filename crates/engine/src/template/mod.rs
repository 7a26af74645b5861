//! Chat templates: from a list of messages to the text of a prompt. Knows nothing of tokens.
//!
//! A template is a jinja program out of a model file, so it is untrusted: it runs with limits on its source, its
//! instructions, what it reads and builds, its nesting and its time ([`bounds`]), and a template that exceeds one ends
//! in an error. It is parsed once, on a thread with a wide stack, because values and syntax trees nest, and rendered
//! there.

mod bounds;
mod env;
mod fold;
mod lists;
mod python;
mod text;

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use minijinja::machinery::{CodeGenerator, Instructions, eval, make_string_output, parse};
use minijinja::value::Serde;
use minijinja::{AutoEscape, ErrorKind, Value};
use sys::{meter, rank};

pub use bounds::{
    Limits, MAX_BUILT_BYTES, MAX_DEPTH, MAX_FUEL, MAX_HELD_BYTES, MAX_OUTPUT_BYTES, MAX_SOURCE_BYTES, MAX_TIME,
    MAX_TOUCHED_BYTES,
};
pub use jiff::civil::DateTime;

/// Stack of a rendering thread, in bytes. Only what is used of it becomes real memory.
const STACK_BYTES: usize = 512 << 20;
/// How much of the processor's time a thread may take beyond [`Limits::time`] before it is given up; a last long
/// operation ends far earlier. Also, by the clock, how long a thread may stand still.
const GRACE: Duration = Duration::from_secs(5);
/// How long whoever asked waits beyond [`Limits::time`], by the clock.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// How often whoever waits looks at the thread.
const LOOK: Duration = Duration::from_millis(100);
/// Threads that may be given up before a template is rendered no more.
const MAX_LOST: usize = 2;
/// Threads that are kept for the next render.
const MAX_IDLE: usize = 4;

/// Why a template could not be read or rendered. Each is a whole sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The template is too long to be read.
    #[error("failed to read the chat template: it has {bytes} bytes, at most {MAX_SOURCE_BYTES} are allowed")]
    TooLong {
        /// Length of the source in bytes.
        bytes: usize,
    },
    /// The template is not valid jinja.
    #[error("failed to read the chat template: line {line}: {message}")]
    Syntax {
        /// Line in the template, from 1; 0 where it is not known.
        line: usize,
        /// What the parser says.
        message: String,
    },
    /// The template refused these messages with `raise_exception`.
    #[error("failed to render the chat template: line {line}: the template says: {message}")]
    Raised {
        /// Line in the template, from 1; 0 where it is not known.
        line: usize,
        /// The template's own words.
        message: String,
    },
    /// The template ran into one of its limits.
    #[error("failed to render the chat template: line {line}: {message}")]
    Limit {
        /// Line in the template, from 1; 0 where it is not known.
        line: usize,
        /// Which limit.
        message: String,
    },
    /// The template failed in another way, mostly because the messages do not have the form it expects.
    #[error("failed to render the chat template: line {line}: {message}")]
    Failed {
        /// Line in the template, from 1; 0 where it is not known.
        line: usize,
        /// What went wrong.
        message: String,
    },
    /// A name among the extra variables is not an identifier.
    #[error("failed to render the chat template: extra variable {name:?} is not a name")]
    Variable {
        /// The name.
        name: String,
    },
    /// The rendering thread could not be started or ended in a panic.
    #[error("failed to render the chat template: {message}")]
    Thread {
        /// What happened.
        message: String,
    },
}

/// One message with plain text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// "system", "user", "assistant", "tool" or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// Returns a message from a role and a text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into() }
    }

    /// Messages in the JSON form that [`Chat`] takes.
    pub fn to_json(messages: &[Message]) -> serde_json::Value {
        messages.iter().map(|m| serde_json::json!({"role": m.role, "content": m.content})).collect()
    }
}

/// What is rendered.
#[derive(Debug, Clone, Copy)]
pub struct Chat<'a> {
    /// A list of `{"role": .., "content": .., ..}`, as in the chat completions API.
    pub messages: &'a serde_json::Value,
    /// A list of tool definitions.
    pub tools: Option<&'a serde_json::Value>,
    /// Whether the prompt ends with the opening of an assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables, e.g. `enable_thinking`.
    pub kwargs: Option<&'a serde_json::Map<String, serde_json::Value>>,
    /// What `strftime_now` calls now; the system's local time when absent.
    pub now: Option<DateTime>,
}

impl<'a> Chat<'a> {
    /// These messages, no tools, ending in the opening of an assistant's turn.
    pub fn new(messages: &'a serde_json::Value) -> Chat<'a> {
        Chat { messages, tools: None, add_generation_prompt: true, kwargs: None, now: None }
    }
}

/// A chat template that is known to be valid jinja. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ChatTemplate(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    source: String,
    bos: String,
    eos: String,
    limits: Limits,
    threads: Mutex<Threads>,
}

/// Threads that hold the parsed template. A render has one for itself.
#[derive(Debug, Default)]
struct Threads {
    idle: Vec<Worker>,
    lost: usize,
}

/// A thread with the parsed template.
#[derive(Debug)]
struct Worker {
    jobs: Sender<Job>,
    /// What it is at: parsing, then a render.
    work: Arc<rank::Work>,
}

/// A render.
struct Job {
    variables: Value,
    now: Option<DateTime>,
    reply: SyncSender<Result<String, Error>>,
}

impl ChatTemplate {
    /// Reads a template. `bos` and `eos` are the texts of the tokens that begin and end a sequence (may be empty).
    ///
    /// # Errors
    /// [`Error::TooLong`], [`Error::Syntax`].
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate, Error> {
        Self::with_limits(source, bos, eos, Limits::default())
    }

    /// As [`ChatTemplate::new`], with other limits than the usual ones.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`].
    pub fn with_limits(source: &str, bos: &str, eos: &str, limits: Limits) -> Result<ChatTemplate, Error> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(Error::TooLong { bytes: source.len() });
        }
        // Jinja2 reads the ends of Windows' lines so, too.
        let source = plain_generation_tags(&source.replace("\r\n", "\n").replace('\r', "\n"));
        let (bos, eos) = (bos.to_owned(), eos.to_owned());
        let template = ChatTemplate(Arc::new(Shared { source, bos, eos, limits, threads: Mutex::default() }));
        let thread = template.thread()?;
        template.keep(thread);
        Ok(template)
    }

    /// Returns the prompt of a chat.
    ///
    /// # Errors
    /// [`Error::Raised`] when the template refuses the messages, [`Error::Limit`] when it does not end or builds too
    /// much, [`Error::Failed`] when the messages do not have the form that the template expects.
    pub fn render(&self, chat: &Chat<'_>) -> Result<String, Error> {
        let is_name = |s: &str| {
            !s.is_empty() && s.chars().all(|c| c == '_' || c.is_alphanumeric()) && !s.starts_with(char::is_numeric)
        };
        for name in chat.kwargs.iter().flat_map(|k| k.keys()) {
            if !is_name(name) {
                return Err(Error::Variable { name: name.clone() });
            }
        }
        let idle = {
            let mut threads = self.threads();
            if threads.lost >= MAX_LOST {
                return Err(lost());
            }
            threads.idle.pop()
        };
        let thread = idle.map_or_else(|| self.thread(), Ok)?;
        let (reply, result) = sync_channel(1);
        let job = Job { variables: self.variables(chat), now: chat.now, reply };
        thread.jobs.send(job).map_err(|_| ended())?;
        let result = self.wait(&result, &thread.work)?;
        self.keep(thread);
        result
    }

    fn variables(&self, chat: &Chat<'_>) -> Value {
        let mut root: BTreeMap<&str, Value> = BTreeMap::new();
        root.insert("bos_token", Value::from(self.0.bos.as_str()));
        root.insert("eos_token", Value::from(self.0.eos.as_str()));
        root.insert("messages", value(chat.messages));
        root.insert("tools", chat.tools.map_or(Value::from(()), value));
        root.insert("documents", Value::from(()));
        root.insert("add_generation_prompt", Value::from(chat.add_generation_prompt));
        for (name, extra) in chat.kwargs.into_iter().flatten() {
            root.insert(name, value(extra));
        }
        Value::from_pairs(root)
    }

    /// Returns a new thread that has parsed the template.
    fn thread(&self) -> Result<Worker, Error> {
        let (jobs, inbox) = channel();
        let (ready, parsed) = sync_channel(1);
        let (source, limits) = (self.0.source.clone(), self.0.limits);
        let worker = Worker { jobs, work: Arc::default() };
        let work = worker.work.clone();
        let thread = std::thread::Builder::new().name("template".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || serve(&source, limits, &work, &inbox, &ready));
        thread.map_err(|e| Error::Thread { message: format!("start a thread: {e}") })?;
        self.wait(&parsed, &worker.work)??;
        Ok(worker)
    }

    /// Returns what a thread answers. One that does not, though it had the processor, or that stands still, is left
    /// alone and counted: it may run for ever, but holds no more than a render may build, or twice what it may hold.
    /// One that others keep from the processor ends by its own bounds when it gets there; no request waits for that.
    fn wait<T>(&self, answer: &Receiver<T>, work: &rank::Work) -> Result<T, Error> {
        let begin = Instant::now();
        let (mut last, mut moved) = (None, begin);
        loop {
            match answer.recv_timeout(LOOK) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let took = work.took();
            if took.is_none() || took != last {
                (last, moved) = (took, Instant::now());
            }
            if took.is_some_and(|took| took > self.0.limits.time + GRACE) || moved.elapsed() > GRACE {
                self.threads().lost += 1;
                return Err(lost());
            }
            if begin.elapsed() > self.0.limits.time + MAX_WAIT {
                return Err(Error::Thread { message: "the machine is too busy: its thread did not get to end".into() });
            }
        }
    }

    fn keep(&self, thread: Worker) {
        let mut threads = self.threads();
        if threads.idle.len() < MAX_IDLE {
            threads.idle.push(thread);
        }
    }

    fn threads(&self) -> std::sync::MutexGuard<'_, Threads> {
        self.0.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn ended() -> Error {
    Error::Thread { message: "the template engine failed".into() }
}

fn lost() -> Error {
    Error::Thread { message: "its thread did not end in time and was given up".into() }
}

/// Parses a template, says so, and renders it until nobody can ask any more.
fn serve(
    source: &str,
    limits: Limits,
    work: &Arc<rank::Work>,
    jobs: &Receiver<Job>,
    ready: &SyncSender<Result<(), Error>>,
) {
    let (parsed, _, limit) =
        within(limits, work, None, || env::environment(limits.fuel).and_then(|env| Ok((env, compile(source)?))));
    let (env, (instructions, blocks)) = match parsed {
        Ok(parsed) => parsed,
        Err(e) => {
            let error = match report(&e, None, limit) {
                Error::Failed { line, message } | Error::Limit { line, message } => Error::Syntax { line, message },
                other => other,
            };
            return drop(ready.send(Err(error)));
        }
    };
    // Whoever asked may have given up; then the inbox is closed, too.
    let _ = ready.send(Ok(()));
    while let Ok(Job { variables, now, reply }) = jobs.recv() {
        let (done, raised, limit) = within(limits, work, now, || {
            let mut text = String::new();
            let mut out = make_string_output(&mut text);
            eval(&env, &instructions, variables, &blocks, &mut out, AutoEscape::None).map(|_| text)
        });
        let _ = reply.send(done.map_err(|e| report(&e, raised, limit)));
    }
}

/// Does something within limits: its result, the text given to `raise_exception`, and the limit that was hit.
fn within<T>(
    limits: Limits,
    work: &Arc<rank::Work>,
    now: Option<DateTime>,
    f: impl FnOnce() -> T,
) -> (T, Option<String>, Option<String>) {
    let (result, _) = work.run(|| {
        let _watch = meter::watch(limits.held_bytes);
        bounds::start(limits, work.clone(), now);
        f()
    });
    let (raised, limit) = bounds::finish();
    (result, raised, limit)
}

/// JSON as the template sees it; mappings keep their order.
fn value(json: &serde_json::Value) -> Value {
    Value::from(Serde(json))
}

type Compiled<'a> = (Instructions<'a>, BTreeMap<&'a str, Instructions<'a>>);

/// Parses, compiles and rewrites a template.
fn compile(source: &str) -> Result<Compiled<'_>, minijinja::Error> {
    let tree = parse(source, "chat template", env::syntax()?)?;
    fold::check(std::slice::from_ref(&tree), 0)?;
    let mut code = CodeGenerator::new("chat template", source);
    code.compile_stmt(&tree);
    let (main, blocks) = code.finish();
    let blocks = blocks.iter().map(|(name, code)| Ok((*name, bounds::rewrite(code)?)));
    Ok((bounds::rewrite(&main)?, blocks.collect::<Result<_, minijinja::Error>>()?))
}

/// Turns the engine's error into ours, with the innermost line that is known.
fn report(error: &minijinja::Error, raised: Option<String>, limit: Option<String>) -> Error {
    let mut line = error.line().unwrap_or(0);
    let mut innermost = error;
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(e) = inner.downcast_ref::<minijinja::Error>() {
            line = e.line().unwrap_or(line);
            innermost = e;
        }
        source = inner.source();
    }
    if let Some(message) = raised {
        return Error::Raised { line, message };
    }
    if let Some(message) = limit {
        return Error::Limit { line, message };
    }
    let message = innermost.detail().map_or_else(|| innermost.kind().to_string(), str::to_owned);
    match innermost.kind() {
        ErrorKind::OutOfFuel => Error::Limit { line, message: "the template runs for too many instructions".into() },
        _ if message.contains("recursion limit") => {
            Error::Limit { line, message: "the template calls itself too deeply".into() }
        }
        ErrorKind::InvalidOperation => Error::Failed { line, message },
        kind => Error::Failed {
            line,
            message: if innermost.detail().is_some() { format!("{kind}: {message}") } else { message },
        },
    }
}

/// Replaces the `{% generation %}` tag of transformers (it marks the assistant's tokens for training, and writes its
/// body as it stands) by a condition that always holds, keeping whitespace marks and lines. Comments, strings and raw
/// blocks stay as they are; the line end after `{% raw %}` stays too, as Jinja2 has it.
fn plain_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut raw = false;
    let opening = |s: &str| s.as_bytes().windows(2).position(|w| w[0] == b'{' && b"%{#".contains(&w[1]));
    while let Some(at) = opening(rest) {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let close = match &before[at..] {
            "{#" => tag.find("#}"),
            "{{" if raw => Some(0),
            "{{" => end_of_tag(tag, "}}"),
            _ => end_of_tag(tag, "%}"),
        };
        let (inside, after) = tag.split_at(close.unwrap_or(tag.len()));
        rest = after;
        if !before.ends_with("{%") {
            out.push_str(inside);
            continue;
        }
        let name = inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let opens = !raw && name == "raw";
        raw = opens || raw && name != "endraw";
        match name {
            "raw" if opens && !inside.ends_with(['-', '+']) => out.extend([inside, "+"]),
            "generation" if !raw => out.push_str(&inside.replace(name, "if true")),
            "endgeneration" if !raw => out.push_str(&inside.replace(name, "endif")),
            _ => out.push_str(inside),
        }
    }
    out.push_str(rest);
    out
}

/// Returns where a tag ends, strings in it skipped.
fn end_of_tag(tag: &str, end: &str) -> Option<usize> {
    let mut quote = None;
    let mut escaped = false;
    for (at, c) in tag.char_indices() {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(q) if c == q => quote = None,
            Some(_) => {}
            None if tag[at..].starts_with(end) => return Some(at),
            None if c == '\'' || c == '"' => quote = Some(c),
            None => {}
        }
    }
    None
}

#[cfg(test)]
mod tests;
