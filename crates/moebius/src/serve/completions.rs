//! `/v1/completions`: OpenAI's older API, which continues a text.

use std::sync::Arc;

use engine::formats::{Event, Format};
use engine::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Value, json};

use super::app::App;
use super::body::Body;
use super::chat::finite;
use super::error::ApiError;
use super::fields::{Field, Kind, Object, Read, field};
use super::generate::{Collected, Finish, Generation, Job, Logprob, Parsing, Step, Totals, token_text};
use super::limits::{MAX_CHOICES, MAX_INPUTS, MAX_TOP_LOGPROBS};
use super::openai::{self, OpenAiHead};
use super::prompt;
use super::routes::{Answer, Input, ignoring};
use super::sse::{self, Frames, Wire};
use super::worker::TokenLogprobs;
use super::write::{self, Lists, short};
use super::{fill, form, sampling};

/// Kind of answers and events.
const KIND: &str = "text_completion";

/// Fields of the route besides the sampling.
pub const FIELDS: &[Field] = &[
    field("prompt", Kind::Shown(MAX_INPUTS), "text, token ids, or a list of either"),
    field("model", Kind::Text, "model to use; any name if only one is served"),
    field("stream", Kind::Bool, "stream the text as server-sent events"),
    field("stream_options", Kind::Object, "include_usage: end with an event that holds the usage"),
    field("n", Kind::Int(1, MAX_CHOICES as i128), "number of completions per prompt; completion i uses seed + i"),
    field(
        "best_of",
        Kind::Int(1, MAX_CHOICES as i128),
        "must be equal to n: selecting the best of several is unsupported",
    ),
    field("max_tokens", sampling::MAX_TOKENS, "maximum number of tokens to generate; default 16, -1 for no limit"),
    field("n_predict", sampling::MAX_TOKENS, "llama.cpp's name of max_tokens"),
    field("stop", sampling::STOP, "texts that end the completion"),
    field("logprobs", Kind::Int(0, MAX_TOP_LOGPROBS as i128), "number of top alternatives to return per token"),
    field("echo", Kind::Bool, "return the prompt before the completion, with log-probabilities if requested"),
    field(
        "prompt_logprobs",
        Kind::Int(0, MAX_TOP_LOGPROBS as i128),
        "return the log-probabilities of the prompt, with this number of alternatives (vLLM)",
    ),
    field("suffix", Kind::Text, "text after the completion, for models with fill-in-the-middle tokens"),
    field("user", Kind::Text, "ignored"),
];

/// Returns the handler.
pub async fn handle(app: Arc<App>, input: Input) -> Answer {
    let Input { mut body, request_id, .. } = input;
    let prompts = body.take_prompts();
    let Body { fields: body, room, .. } = body;
    let n = body.size("n").unwrap_or(1);
    if body.size("best_of").is_some_and(|best_of| best_of != n) {
        return Err(ApiError::field("best_of", "must be equal to `n`: selecting the best of several is unsupported"));
    }
    let echo = body.flag("echo").unwrap_or(false);
    let logprobs = body.size("logprobs");
    let prompt_logprobs = body.size("prompt_logprobs");
    let scores = if echo { logprobs } else { None }.max(prompt_logprobs);
    let stream = body.flag("stream").unwrap_or(false);
    if stream && scores.is_some() {
        return Err(ApiError::field("stream", "is unsupported together with log-probabilities of the prompt"));
    }
    let stops = sampling::stops(&body, "stop")?;
    if prompts.len() * n > MAX_INPUTS {
        return Err(ApiError::field(
            "n",
            format!("times the prompts is {}, the limit is {MAX_INPUTS}", prompts.len() * n),
        ));
    }
    let prompts = match body.text("suffix").filter(|suffix| !suffix.is_empty()) {
        None => prompt::ready(&app, prompts).await?,
        Some(suffix) => fill::gaps(&app, prompts, suffix).await?,
    };
    let held = form::Constrained { form: form::of(&body)?, ..form::Constrained::default() };
    let (constraint, ignored) = form::constraint(&app, Format::PLAIN, held).await?;
    let firsts: Vec<u32> = prompts.iter().map(|prompt| prompt.tokens.first().copied().unwrap_or_default()).collect();
    let echoed: Vec<String> =
        prompts.iter().map(|prompt| if echo { prompt.text(&app) } else { String::new() }).collect();
    let mut requests = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let mut request = prompt.request(&app);
        sampling::apply(&body, &mut request, &app.tokenizer)?;
        request.stop_strings = stops.clone();
        request.max_new_tokens = sampling::max_tokens(&body, &["max_tokens", "n_predict"]).unwrap_or(16);
        request.constraint = constraint.clone();
        request.logprobs = logprobs;
        request.prompt_logprobs = scores;
        requests.push(request);
    }
    let usage = openai::wants_usage(&body);
    drop(body);
    let job = Job { requests, n, parsing: Parsing::plain(), room };
    let generation = Generation::start(&app, request_id.clone(), job).await?;
    let head = OpenAiHead::new(&app, "cmpl-", request_id);
    if stream {
        let offsets = vec![0; echoed.len() * n];
        return Ok(ignoring(sse::respond(generation, TextStream { head, echoed, n, usage, offsets }), ignored));
    }
    let (answers, totals, room) = generation.collect().await?;
    let mut lists = Lists::default();
    let choices = answers.into_iter().enumerate().map(|(index, answer)| {
        let text = format!("{}{}", echoed[index / n], answer.content());
        let Collected { logprobs: own, prompt, finish, .. } = answer;
        let scored = prompt_logprobs.map(|_| prompt_logprobs_of(&head.tokenizer, prompt.clone(), &mut lists));
        let logprobs = match logprobs {
            Some(_) if echo => {
                let all = prompt.into_iter().chain(own).map(Token::from);
                let first = Token { token: firsts[index / n], values: None };
                columns_later(&head.tokenizer, std::iter::once(first).chain(all).collect(), &mut lists)
            }
            Some(_) => columns_later(&head.tokenizer, own.into_iter().map(Token::from).collect(), &mut lists),
            None => Value::Null,
        };
        let finish = finish_reason(finish.as_ref());
        let mut choice = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish});
        if let Some(scored) = scored {
            choice["prompt_logprobs"] = scored;
        }
        choice
    });
    let mut object = head.object(KIND, choices.collect());
    totals.close(&mut object);
    let answer = object.into();
    Ok(ignoring(lists.respond(&answer, room), ignored))
}

/// Log-probabilities in the older form: columns of equal length.
#[derive(Serialize)]
struct Columns {
    tokens: Vec<String>,
    token_logprobs: Vec<f64>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
}

/// A token of the columns; the first of a prompt has no numbers.
struct Token {
    token: u32,
    values: Option<TokenLogprobs>,
}

impl From<Logprob> for Token {
    fn from(logprob: Logprob) -> Token {
        Token { token: logprob.token, values: Some(logprob.values) }
    }
}

/// vLLM's form: nothing for the first token, then each token and its alternatives by id; written later.
fn prompt_logprobs_of(tokenizer: &Arc<Tokenizer>, logprobs: Vec<Logprob>, lists: &mut Lists) -> Value {
    let tokenizer = tokenizer.clone();
    let all = std::iter::once(None).chain(logprobs.into_iter().map(Some));
    lists.place(all, move |logprob, out| {
        let Some(Logprob { token, values }) = logprob else { return write::json(&Value::Null, out) };
        let ranks = values.top.iter().enumerate();
        let mut ranked: Vec<(u32, f32, usize)> = ranks.map(|(i, &(id, value))| (id, value, i + 1)).collect();
        if values.top.iter().all(|(id, _)| *id != token) {
            // Its rank is after those that are listed; no more is known.
            ranked.push((token, values.token, ranked.len() + 1));
        }
        let entry = |(id, value, rank): (u32, f32, usize)| {
            let text = token_text(&tokenizer, id).0;
            (id.to_string(), json!({"logprob": short(finite(value)), "rank": rank, "decoded_token": text}))
        };
        write::json(&ranked.into_iter().map(entry).collect::<Object>(), out);
    })
}

/// Returns the older form: lists side by side. `offset` counts the characters up to here.
fn columns(tokenizer: &Tokenizer, logprobs: &[Logprob], offset: &mut usize) -> Columns {
    let (mut tokens, mut values, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for logprob in logprobs {
        let (text, _) = token_text(tokenizer, logprob.token);
        offsets.push(*offset);
        *offset += text.chars().count();
        tokens.push(text);
        values.push(short(finite(logprob.values.token)));
        tops.push(top(tokenizer, &logprob.values));
    }
    Columns { tokens, token_logprobs: values, top_logprobs: tops, text_offset: offsets }
}

/// Returns the same of a whole answer, written later.
fn columns_later(tokenizer: &Arc<Tokenizer>, tokens: Vec<Token>, lists: &mut Lists) -> Value {
    let all: Arc<[Token]> = tokens.into();
    let mut place = |mut write: Box<dyn FnMut(&Tokenizer, &Token) -> Value + Send>| {
        let (all, tokenizer) = (all.clone(), tokenizer.clone());
        lists.place(0..all.len(), move |i, out| write::json(&write(&tokenizer, &all[i]), out))
    };
    let mut offset = 0;
    let tokens = place(Box::new(|tokenizer, token| token_text(tokenizer, token.token).0.into()));
    let values = place(Box::new(|_, token| match &token.values {
        Some(values) => short(finite(values.token)).into(),
        None => Value::Null,
    }));
    let tops = place(Box::new(|tokenizer, token| match &token.values {
        Some(values) => top(tokenizer, values),
        None => Value::Null,
    }));
    let offsets = place(Box::new(move |tokenizer, token| {
        let start = offset;
        offset += token_text(tokenizer, token.token).0.chars().count();
        start.into()
    }));
    json!({"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets})
}

/// Returns the alternatives of a token by their texts.
fn top(tokenizer: &Tokenizer, values: &TokenLogprobs) -> Value {
    let top = values.top.iter();
    top.map(|&(token, value)| (token_text(tokenizer, token).0, Value::from(short(finite(value))))).collect()
}

fn finish_reason(finish: Option<&Finish>) -> &'static str {
    if finish == Some(&Finish::Length) { "length" } else { "stop" }
}

/// The texts as they come.
struct TextStream {
    head: OpenAiHead,
    /// The prompts, if they come before the texts, and the number of texts for each.
    echoed: Vec<String>,
    n: usize,
    usage: bool,
    /// Characters of each text with log-probabilities up to here.
    offsets: Vec<usize>,
}

/// The choice of an event.
#[derive(Serialize)]
struct TextChoice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<Columns>,
    finish_reason: Option<&'static str>,
}

impl TextStream {
    fn chunk(&self, choice: TextChoice<'_>, out: &mut Frames) {
        self.head.chunk(KIND, choice, self.usage, out);
    }
}

impl Wire for TextStream {
    fn open(&mut self, out: &mut Frames) {
        for index in 0..self.offsets.len() {
            let text = self.echoed[index / self.n].as_str();
            if !text.is_empty() {
                self.chunk(TextChoice { index, text, logprobs: None, finish_reason: None }, out);
            }
        }
    }

    fn step(&mut self, step: Step, out: &mut Frames) {
        let index = step.index;
        let text: String = step
            .events
            .iter()
            .filter_map(|e| if let Event::Content(t) = e { Some(t.as_str()) } else { None })
            .collect();
        let logprobs = match step.logprobs.as_slice() {
            [] => None,
            some => Some(columns(&self.head.tokenizer, some, &mut self.offsets[index])),
        };
        if !text.is_empty() || logprobs.is_some() {
            self.chunk(TextChoice { index, text: &text, logprobs, finish_reason: None }, out);
        }
        if let Some(finish) = &step.finish {
            let finish_reason = Some(finish_reason(Some(finish)));
            self.chunk(TextChoice { index, text: "", logprobs: None, finish_reason }, out);
        }
    }

    fn close(&mut self, totals: &Totals, out: &mut Frames) {
        self.head.close(KIND, totals, self.usage, out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        self.head.fail(error, out);
    }
}
