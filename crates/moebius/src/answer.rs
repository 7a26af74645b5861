//! One answer: a request through the engine, its text handed on as it comes, Ctrl-C as a cancel.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use backend::StreamStats;
use engine::scheduler::{Engine, Error, EventKind, Events, FinishReason, Request, Stats, Usage};
use indicatif::{ProgressBar, ProgressStyle};

use crate::machine;

/// How long a prompt computes before its progress is shown.
const SHOW_AFTER: Duration = Duration::from_millis(500);

/// Set by Ctrl-C, cleared when an answer starts.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes Ctrl-C over: from now on it stops an answer and not the program. A second one, when nobody has reacted to
    /// the first, ends the program, so that it can always be left.
    pub fn install() -> Result<Interrupt> {
        let flag = Arc::new(AtomicBool::new(false));
        let handler = Arc::clone(&flag);
        ctrlc::set_handler(move || {
            if handler.swap(true, Ordering::Relaxed) {
                crate::out::remove_unfinished();
                std::process::exit(130);
            }
        })?;
        Ok(Interrupt(flag))
    }

    /// Returns whether Ctrl-C came since the last [`Interrupt::clear`].
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns what Ctrl-C sets.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }

    /// Forgets it.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Ctrl-C ended the answer that a command was for.
#[derive(Clone, Copy, Debug)]
pub struct Interrupted;

impl std::error::Error for Interrupted {}

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("failed to finish the answer: interrupted")
    }
}

/// How an answer ended.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its tokens, the one that ends it included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub reason: FinishReason,
    /// What it took.
    pub usage: Usage,
}

/// Runs one request to its end; `on_text` gets the text piece by piece.
pub fn generate(
    engine: &mut Engine,
    request: Request,
    interrupt: &Interrupt,
    mut on_text: impl FnMut(&str) -> Result<()>,
) -> Result<Answer> {
    interrupt.clear();
    let n_prompt = request.tokens.len();
    let id = engine.submit(request).map_err(|error| match error {
        Error::PromptTooLong { needed, .. } => anyhow!("{error} (--ctx {needed} or more leaves room for an answer)"),
        error => error.into(),
    })?;
    let (begin, before) = (Instant::now(), engine.stats().tokens);
    let (mut bar, mut is_answering): (Option<ProgressBar>, bool) = (None, false);
    let mut events = Events::new();
    let mut tokens = Vec::new();
    loop {
        if interrupt.is_set() {
            engine.cancel(id);
        }
        events.clear();
        let more = match engine.step(&mut events) {
            Ok(more) => more,
            Err(error) => {
                // The request is still alive after a failed step; the next answer should not meet it.
                engine.cancel(id);
                return Err(error.into());
            }
        };
        for event in events.iter().filter(|event| event.id == id) {
            match event.kind {
                EventKind::Token { token, text, .. } => {
                    tokens.push(token);
                    bar.take().iter().for_each(ProgressBar::finish_and_clear);
                    is_answering = true;
                    on_text(text)?
                }
                EventKind::Embedding(_) | EventKind::Prompt { .. } => {}
                EventKind::Done { reason, usage } => return Ok(Answer { tokens, reason, usage }),
                EventKind::Failed(error) => return Err(error.clone().into()),
            }
        }
        if !is_answering && begin.elapsed() > SHOW_AFTER {
            let bar = bar.get_or_insert_with(|| prompt_bar(n_prompt));
            bar.set_position((engine.stats().tokens - before).min(n_prompt as u64));
        }
        if !more && events.is_empty() {
            return Err(anyhow!("failed to finish the answer: the engine stopped without reporting its end"));
        }
    }
}

/// Progress of a prompt, on a terminal.
fn prompt_bar(n_prompt: usize) -> ProgressBar {
    let bar = machine::progress(Some(n_prompt as u64));
    if let Ok(style) = ProgressStyle::with_template("prompt {pos} of {len} tokens, {eta} left") {
        bar.set_style(style);
    }
    bar
}

/// Returns the line on stderr after an answer: `prompt: 12 tokens (8 cached) at 340 tok/s · answer: 57 tokens at 122
/// tok/s · first token 12 ms`.
pub fn summary(usage: &Usage, reason: FinishReason) -> String {
    let computed = usage.prompt_tokens - usage.cached_tokens;
    let cached = match usage.cached_tokens {
        0 => String::new(),
        n => format!(" ({n} cached)"),
    };
    let why = match reason {
        FinishReason::Stop | FinishReason::StopString(_) => "",
        FinishReason::Length => " · stopped at the token limit (-n)",
        FinishReason::ContextFull => " · context full (--ctx)",
        FinishReason::Cancelled => " · stopped",
    };
    // The first token comes out of the prompt's last step: the decode time covers the others.
    let decoded = usage.generated.saturating_sub(1);
    format!(
        "prompt: {} tokens{cached}{} · answer: {} tokens{} · first token {:.0} ms{why}",
        usage.prompt_tokens,
        rate(computed, usage.timings.prompt),
        usage.generated,
        rate(decoded, usage.timings.decode),
        (usage.timings.queued + usage.timings.prompt).as_secs_f64() * 1e3,
    )
}

/// Returns the line after it if experts are streamed: `experts: 71.3% in memory, 8.2% in flight · 512 MB read, 1.2 MB
/// per token · 3.4 s waited`.
pub fn streamed_summary(stats: &StreamStats, tokens: u64) -> String {
    let share = |n: u64| n as f64 / stats.wanted.max(1) as f64 * 100.0;
    format!(
        "experts: {:.1}% in memory, {:.1}% in flight · {} read, {} per token · {:.1} s waited",
        share(stats.hits),
        share(stats.coming),
        machine::bytes(stats.bytes),
        machine::bytes(stats.bytes / tokens.max(1)),
        stats.waited.as_secs_f64(),
    )
}

/// Returns the line after it if tokens were drafted: `drafts: 61.8% of 204 accepted`.
pub fn drafts_summary(stats: &Stats) -> Option<String> {
    let share = stats.accepted as f64 / stats.drafted.max(1) as f64 * 100.0;
    (stats.drafted > 0).then(|| format!("drafts: {share:.1}% of {} accepted", stats.drafted))
}

fn rate(tokens: usize, time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if tokens == 0 || seconds == 0.0 { String::new() } else { format!(" at {:.1} tok/s", tokens as f64 / seconds) }
}
