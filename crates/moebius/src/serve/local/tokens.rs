//! Tokens in, tokens out: the engine for a program whose texts are made elsewhere, such as a worker after a frontend
//! that tokenizes, renders templates and parses answers. Knows neither chat nor fields of requests.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use axum::http::StatusCode;
use engine::formats::Format;
pub use engine::grammar::{Constraint, Rule};
use engine::scheduler::Stats;
pub use engine::scheduler::{CacheChange, FinishReason, Parent, Request, Usage};
use engine::tokenizer::{Decode, FolderTexts, folder_texts};
use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::form::{self, AnswerForm, Constrained};
use super::super::worker::{Refusal, RequestRun, TokenLogprobs, Update};
use super::Local;
use crate::embedded;

/// Tokens that the mark of a thought at the end of a prompt has at most, line ends after it included.
const MARK_TOKENS: usize = 16;

/// Why a request is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// As many wait as may.
    #[error("failed to take the request: as many as allowed are waiting; try again in {seconds} s")]
    Busy {
        /// When a place may be free.
        seconds: u64,
    },
    /// The model is closed, or its engine has ended.
    #[error("failed to take the request: the model takes no more requests")]
    Closed,
    /// Something is wrong with it.
    #[error("{0}")]
    Invalid(String),
    /// Something is wrong here.
    #[error("{0}")]
    Failed(String),
}

/// What the engine has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Positions of a prompt and its answer.
    pub context: usize,
    /// Tokens of a page, the unit of the prefix cache.
    pub page: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Answers that are computed at a time.
    pub parallel: usize,
    /// Tokens of a step.
    pub step: usize,
}

/// What happened to an answer.
#[derive(Clone, Debug)]
pub enum Step {
    /// A token, one that ends the answer included.
    Token {
        /// Its id.
        token: u32,
        /// Its log-probability, where the request asks for it.
        logprob: Option<f32>,
        /// The likeliest tokens in its place with theirs, best first.
        top: Vec<(u32, f32)>,
    },
    /// It is complete.
    Done {
        /// Why.
        reason: FinishReason,
        /// Its tokens and times.
        usage: Usage,
    },
    /// It cannot go on by the rule that it is held to, which is the client's.
    Unheld(String),
    /// It failed.
    Failed(String),
    /// The model was closed.
    Closed,
}

/// An answer in the making. Dropping it cancels its request: the engine frees its pages before the next step.
pub struct Answer {
    run: RequestRun,
}

impl Answer {
    /// Returns the next thing that happens; `None` after the last one. Safe to drop half way.
    pub async fn next(&mut self) -> Option<Step> {
        loop {
            let (_, update) = self.run.next().await?;
            return Some(match update {
                Update::Token { token, logprobs, .. } => {
                    let (logprob, top) = match logprobs {
                        Some(TokenLogprobs { token, top }) => (Some(token), top),
                        None => (None, Vec::new()),
                    };
                    Step::Token { token, logprob, top }
                }
                Update::Prompt { .. } | Update::Embedding(_) => continue,
                Update::Done { reason, usage } => Step::Done { reason, usage },
                Update::Unheld(why) => Step::Unheld(why),
                Update::Failed(why) => Step::Failed(why),
                Update::Stopped => Step::Closed,
            });
        }
    }
}

impl Local {
    /// Returns a request with the model's own sampling and a fresh seed.
    pub fn request(&self, tokens: Vec<u32>) -> Request {
        self.app.request(tokens)
    }

    /// Hands a request to the engine.
    ///
    /// # Errors
    /// It is not taken.
    pub async fn submit(&self, request: Request) -> Result<Answer, Refused> {
        if self.check_open().is_err() || self.app.common.draining() {
            return Err(Refused::Closed);
        }
        let run = self.app.worker.submit(vec![request]).await.map_err(|refusal| match refusal {
            Refusal::Full { retry_after } => Refused::Busy { seconds: retry_after },
            Refusal::Stopped => Refused::Closed,
            Refusal::Invalid(error) => Refused::Invalid(error.to_string()),
        })?;
        Ok(Answer { run })
    }

    /// Returns what holds an answer to a rule. With `thinks`, the model may write a thought in front of it, of at most
    /// `most_thought` tokens, which the `prompt` may have opened. Compiles on another thread of the caller's runtime.
    ///
    /// # Errors
    /// The rule cannot be satisfied, or is too costly.
    pub async fn constraint(
        &self,
        rule: Option<Rule>,
        thinks: bool,
        most_thought: Option<usize>,
        prompt: &[u32],
    ) -> Result<Option<Constraint>, Refused> {
        let format = if thinks { self.app.format } else { Format::PLAIN };
        let end = &prompt[prompt.len().saturating_sub(MARK_TOKENS)..];
        let opened = thinks && format.opens_thought(&self.decode(end));
        let form = rule.map(|rule| AnswerForm { rule, param: "guided decoding", open: false });
        let held = Constrained { form, opened, most_thought, ..Constrained::default() };
        let made = form::constraint(&self.app, format, held).await;
        made.map(|(constraint, _)| constraint).map_err(|ApiError { status, message, quote, .. }| match status {
            StatusCode::SERVICE_UNAVAILABLE => Refused::Closed,
            status if status.is_server_error() => Refused::Failed(message),
            _ => Refused::Invalid(format!("{message}{quote}")),
        })
    }

    /// Returns what the engine has room for.
    pub fn room(&self) -> Room {
        let worker = &self.app.worker;
        let pages = worker.stats().pages.total;
        let (parallel, step) = (self.parallel, worker.step_tokens());
        Room { context: worker.context(), page: backend::PAGE, pages, parallel, step }
    }

    /// Returns what the engine was busy with after its last step.
    pub fn stats(&self) -> Stats {
        self.app.worker.stats()
    }

    /// Returns whether no request has a place, running or waiting.
    pub fn is_idle(&self) -> bool {
        self.app.worker.is_idle()
    }

    /// Returns whether the engine runs.
    pub fn is_alive(&self) -> bool {
        self.app.worker.alive()
    }

    /// Returns the server's metrics in Prometheus' words.
    pub fn metrics(&self) -> String {
        self.app.common.metrics.text(&[(self.app.model.id.as_str(), self.app.worker.stats())])
    }

    /// Tells `watcher` after each step what has changed in the prefix cache; it runs on the engine's thread and must
    /// not wait. A later watcher replaces it.
    pub fn watch_cache(&self, watcher: impl FnMut(&[CacheChange]) + Send + 'static) {
        self.app.worker.watch(Box::new(watcher));
    }

    /// Returns the tokens of a text that a template wrote.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        super::super::app::App::encode_prompt(&self.app.tokenizer, text)
    }

    /// Returns the text of tokens, names of special ones included.
    pub fn decode(&self, tokens: &[u32]) -> String {
        self.app.tokenizer.decode_as(tokens, Decode { skip_special: false, continues: true })
    }

    /// Returns the prompt of a conversation, a list of messages, as the model's template renders it.
    ///
    /// # Errors
    /// The model has no template, or it fails.
    pub fn render(&self, messages: &Value) -> Result<String> {
        let template = self.app.template.as_ref().context("failed to render: the model has no chat template")?;
        Ok(template.render(&engine::template::Chat::new(messages))?)
    }
}

/// What says what a model's texts are: `config.json`, `generation_config.json`, `tokenizer.json` and
/// `tokenizer_config.json`, the chat template in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Texts {
    /// They are in the model's own folder.
    Folder(PathBuf),
    /// Those of a GGUF file: names and contents.
    Files(Vec<(&'static str, String)>),
}

/// Returns what says what the texts of a model are, of the embedded one where no `path` is given.
///
/// # Errors
/// The model cannot be opened, or its tokenizer has no such form.
pub fn texts(path: Option<&Path>) -> Result<Texts> {
    let checkpoint = embedded::open(path)?;
    let own = checkpoint.path();
    let own = if own.is_dir() { Some(own) } else { own.parent().filter(|parent| parent.join("config.json").is_file()) };
    if let Some(own) = own.filter(|own| own.join("tokenizer.json").is_file()) {
        return Ok(Texts::Folder(own.to_path_buf()));
    }
    let meta = checkpoint.meta();
    let FolderTexts { tokenizer, config: mut settings, ends } =
        folder_texts(meta).with_context(|| format!("failed to write the tokenizer of {}", checkpoint.name()))?;
    let plan = model::build(&checkpoint)?;
    let id = |name: &str| meta.opt_u32(&format!("tokenizer.ggml.{name}_token_id")).ok().flatten();
    let mut config = Map::new();
    config.insert("model_type".into(), json!(plan.arch));
    config.insert("architectures".into(), json!([plan.arch]));
    config.insert("max_position_embeddings".into(), json!(plan.n_ctx_train));
    config.insert("vocab_size".into(), json!(plan.n_vocab));
    let mut generation = Map::new();
    for (name, value) in [("bos_token_id", id("bos")), ("pad_token_id", id("padding"))] {
        let Some(value) = value else { continue };
        config.insert(name.into(), json!(value));
        generation.insert(name.into(), json!(value));
    }
    if !ends.is_empty() {
        config.insert("eos_token_id".into(), json!(ends));
        generation.insert("eos_token_id".into(), json!(ends));
    }
    if let Some(template) = meta.opt_str("tokenizer.chat_template")? {
        settings.insert("chat_template".into(), json!(template));
    }
    Ok(Texts::Files(vec![
        ("config.json", Value::Object(config).to_string()),
        ("generation_config.json", Value::Object(generation).to_string()),
        ("tokenizer.json", tokenizer.to_string()),
        ("tokenizer_config.json", Value::Object(settings).to_string()),
    ]))
}
