//! `/v1/completions`: OpenAI's older API, which continues a text.

use std::sync::Arc;

use engine::formats::{Event, Format};
use engine::tokenizer::{Encode, Tokenizer};
use serde_json::{Value, json};

use super::app::{self, App};
use super::body::{Body, Prompt};
use super::chat::finite;
use super::error::{ApiError, Style};
use super::fields::{Field, Kind, Object, Read, field};
use super::fill::Marks;
use super::generate::{Collected, Finish, Generation, Job, Logprob, Parsing, Step, Totals, token_text};
use super::limits::{MAX_CHOICES, MAX_INPUTS, MAX_TOP_LOGPROBS};
use super::routes::{Answer, Input};
use super::sse::{self, Frames, Wire};
use super::worker::TokenLogprobs;
use super::write::{self, Lists, short};
use super::{form, sampling};

/// What the route takes beside the sampling.
pub const FIELDS: &[Field] = &[
    field("prompt", Kind::Prompts(MAX_INPUTS), "a text, tokens, or a list of either"),
    field("model", Kind::Text, "which model answers; the only one has any name"),
    field("stream", Kind::Bool, "send the text as it comes"),
    field("stream_options", Kind::Object, "include_usage: a last event with the usage"),
    field("n", Kind::Int(1, MAX_CHOICES as i128), "how many texts for each prompt; text i has seed + i"),
    field("best_of", Kind::Int(1, MAX_CHOICES as i128), "as n; choosing among more is not offered"),
    field("max_tokens", sampling::MAX_TOKENS, "most tokens of a text; 16 when absent, -1 is no limit"),
    field("n_predict", sampling::MAX_TOKENS, "llama.cpp's name of it"),
    field("stop", sampling::STOP, "texts that end it"),
    field("logprobs", Kind::Int(0, MAX_TOP_LOGPROBS as i128), "report so many alternatives for each token"),
    field("echo", Kind::Bool, "the prompt comes before the text, and has log-probabilities as it has"),
    field("prompt_logprobs", Kind::Int(0, MAX_TOP_LOGPROBS as i128), "vLLM's way to ask for the prompt's alone"),
    field("suffix", Kind::Text, "what stands behind the text, for models that fill gaps"),
    field("user", Kind::Text, "not used"),
];

/// The handler.
pub async fn handle(app: Arc<App>, input: Input) -> Answer {
    let Input { mut body, request_id, .. } = input;
    let prompts = body.take_prompts();
    let Body { fields: body, room, .. } = body;
    let n = body.size("n").unwrap_or(1);
    if body.size("best_of").is_some_and(|best_of| best_of != n) {
        return Err(ApiError::field("best_of", "must be equal to `n`: choosing among more is not offered"));
    }
    let echo = body.flag("echo").unwrap_or(false);
    let logprobs = body.size("logprobs");
    let prompt_logprobs = body.size("prompt_logprobs");
    let scores = if echo { logprobs } else { None }.max(prompt_logprobs);
    let stream = body.flag("stream").unwrap_or(false);
    if stream && scores.is_some() {
        return Err(ApiError::field("stream", "cannot be had together with the prompt's log-probabilities"));
    }
    let stops = sampling::stops(&body, "stop")?;
    let prompts = match body.text("suffix").filter(|suffix| !suffix.is_empty()) {
        None => tokens(&app, prompts).await?,
        Some(suffix) => gaps(&app, prompts, suffix).await?,
    };
    if prompts.len() * n > MAX_INPUTS {
        return Err(ApiError::field(
            "n",
            format!("times the prompts is {}, the limit is {MAX_INPUTS}", prompts.len() * n),
        ));
    }
    let held = form::Held { form: form::of(&body)?, ..form::Held::default() };
    let constraint = form::constraint(&app, Format::PLAIN, held).await?;
    let firsts: Vec<u32> = prompts.iter().map(|prompt| prompt.first().copied().unwrap_or_default()).collect();
    let echoed: Vec<String> =
        prompts.iter().map(|p| if echo { app.tokenizer.decode(p) } else { String::new() }).collect();
    let mut requests = Vec::with_capacity(prompts.len());
    for tokens in prompts {
        let mut request = app.request(tokens);
        sampling::apply(&body, &mut request, &app.tokenizer)?;
        request.stop_strings = stops.clone();
        request.max_new_tokens = sampling::max_tokens(&body, &["max_tokens", "n_predict"]).unwrap_or(16);
        request.constraint = constraint.clone();
        request.logprobs = logprobs;
        request.prompt_logprobs = scores;
        requests.push(request);
    }
    let usage = body.object("stream_options").and_then(|o| o.flag("include_usage")).unwrap_or(false);
    drop(body);
    let job = Job { requests, n, parsing: Parsing::plain(), room };
    let generation = Generation::start(&app, request_id.clone(), job).await?;
    let head = Head {
        id: app::id("cmpl-"),
        created: app::unix_time(),
        model: app.model.id.clone(),
        tokenizer: app.tokenizer.clone(),
        request_id,
        echoed,
        n,
    };
    if stream {
        return Ok(sse::respond(generation, Stream { offsets: vec![0; head.echoed.len() * n], head, usage }));
    }
    let (answers, totals, room) = generation.collect().await?;
    let mut lists = Lists::default();
    let choices = answers.into_iter().enumerate().map(|(index, answer)| {
        let text = format!("{}{}", head.echoed[index / n], answer.content());
        let Collected { logprobs: own, prompt, finish, .. } = answer;
        let scored = prompt_logprobs.map(|_| head.prompt_logprobs(prompt.clone(), &mut lists));
        let logprobs = match logprobs {
            Some(_) if echo => {
                let all = prompt.into_iter().chain(own).map(Token::from);
                let first = Token { token: firsts[index / n], values: None };
                head.lists(std::iter::once(first).chain(all).collect(), &mut lists)
            }
            Some(_) => head.lists(own.into_iter().map(Token::from).collect(), &mut lists),
            None => Value::Null,
        };
        let finish = finish_reason(finish.as_ref());
        let mut choice = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish});
        if let Some(scored) = scored {
            choice["prompt_logprobs"] = scored;
        }
        choice
    });
    let mut object = head.object(choices.collect());
    totals.close(&mut object);
    let answer = object.into();
    Ok(lists.respond(&answer, room))
}

/// The tokens of all prompts.
pub async fn tokens(app: &Arc<App>, prompts: Vec<Prompt>) -> Result<Vec<Vec<u32>>, ApiError> {
    let shared = app.clone();
    let bytes = |prompt: &Prompt| if let Prompt::Text(text) = prompt { text.len() } else { 0 };
    let n_bytes = prompts.iter().map(bytes).sum();
    app.common
        .heavy(n_bytes, move || {
            prompts.into_iter().enumerate().map(|(i, prompt)| tokens_of(&shared, i, prompt)).collect()
        })
        .await
}

/// The tokens of texts that stand before a gap.
async fn gaps(app: &Arc<App>, prompts: Vec<Prompt>, suffix: &str) -> Result<Vec<Vec<u32>>, ApiError> {
    let marks = Marks::of(&app.tokenizer)?;
    let text = |prompt| match prompt {
        Prompt::Text(text) => Ok(text),
        Prompt::Ids(_) => Err(ApiError::field("prompt", "must be text where there is a `suffix`")),
    };
    let texts = prompts.into_iter().map(text).collect::<Result<Vec<_>, _>>()?;
    let (shared, suffix) = (app.clone(), suffix.to_string());
    let fill = move |text: &String| {
        shared.check_length(text)?;
        shared.check_length(&suffix)?;
        Ok(marks.prompt(&shared.tokenizer, &[], text, &suffix))
    };
    let bytes = texts.iter().map(String::len).sum();
    app.common.heavy(bytes, move || texts.iter().map(fill).collect()).await
}

/// Tokens of one prompt.
fn tokens_of(app: &App, i: usize, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
    let tokens = match prompt {
        Prompt::Text(text) => {
            app.check_length(&text)?;
            app.tokenizer.encode(&text, Encode { add_special: true, parse_special: true })
        }
        Prompt::Ids(ids) => ids,
    };
    // A model that begins texts with a token can start from an empty prompt.
    match app.tokenizer.bos() {
        _ if !tokens.is_empty() => Ok(tokens),
        Some(bos) => Ok(vec![bos]),
        None => Err(ApiError::bad(format!("prompt {i} is empty"))),
    }
}

/// A token of the lists; the first of a prompt has no numbers.
struct Token {
    token: u32,
    values: Option<TokenLogprobs>,
}

impl From<Logprob> for Token {
    fn from(logprob: Logprob) -> Token {
        Token { token: logprob.token, values: Some(logprob.values) }
    }
}

struct Head {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    request_id: String,
    echoed: Vec<String>,
    n: usize,
}

impl Head {
    fn object(&self, choices: Vec<Value>) -> Object {
        let mut object = Object::new();
        object.insert("id".into(), self.id.as_str().into());
        object.insert("object".into(), "text_completion".into());
        object.insert("created".into(), self.created.into());
        object.insert("model".into(), self.model.as_str().into());
        object.insert("system_fingerprint".into(), concat!("moebius-", env!("CARGO_PKG_VERSION")).into());
        object.insert("choices".into(), choices.into());
        object
    }

    /// vLLM's form: nothing for the first token, then each token and its alternatives by id; written later.
    fn prompt_logprobs(&self, logprobs: Vec<Logprob>, lists: &mut Lists) -> Value {
        let tokenizer = self.tokenizer.clone();
        let all = std::iter::once(None).chain(logprobs.into_iter().map(Some));
        lists.place(all, move |logprob, out| {
            let Some(Logprob { token, values }) = logprob else { return write::json(&Value::Null, out) };
            let ranks = values.top.iter().enumerate();
            let mut ranked: Vec<(u32, f32, usize)> = ranks.map(|(i, &(id, value))| (id, value, i + 1)).collect();
            if values.top.iter().all(|(id, _)| *id != token) {
                // Its rank is known to be behind those that are listed, no more.
                ranked.push((token, values.token, ranked.len() + 1));
            }
            let entry = |(id, value, rank): (u32, f32, usize)| {
                let text = token_text(&tokenizer, id).0;
                (id.to_string(), json!({"logprob": short(finite(value)), "rank": rank, "decoded_token": text}))
            };
            write::json(&ranked.into_iter().map(entry).collect::<Object>(), out);
        })
    }

    /// The older form: lists side by side. `offset` counts the characters up to here.
    fn logprobs(&self, logprobs: &[Logprob], offset: &mut usize) -> Value {
        let (mut tokens, mut values, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for logprob in logprobs {
            let (text, _) = token_text(&self.tokenizer, logprob.token);
            offsets.push(*offset);
            *offset += text.chars().count();
            tokens.push(text);
            values.push(short(finite(logprob.values.token)));
            tops.push(top(&self.tokenizer, &logprob.values));
        }
        json!({"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets})
    }

    /// The same of a whole answer, written later.
    fn lists(&self, tokens: Vec<Token>, lists: &mut Lists) -> Value {
        let all: Arc<[Token]> = tokens.into();
        let mut place = |mut write: Box<dyn FnMut(&Tokenizer, &Token) -> Value + Send>| {
            let (all, tokenizer) = (all.clone(), self.tokenizer.clone());
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
}

/// The alternatives of a token by their texts.
fn top(tokenizer: &Tokenizer, values: &TokenLogprobs) -> Value {
    let top = values.top.iter();
    top.map(|&(token, value)| (token_text(tokenizer, token).0, Value::from(short(finite(value))))).collect()
}

fn finish_reason(finish: Option<&Finish>) -> &'static str {
    if finish == Some(&Finish::Length) { "length" } else { "stop" }
}

/// The texts as they come.
struct Stream {
    head: Head,
    usage: bool,
    /// Characters of each text with log-probabilities up to here.
    offsets: Vec<usize>,
}

impl Stream {
    fn chunk(&self, index: usize, text: &str, logprobs: Value, finish: Value, out: &mut Frames) {
        let choice = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish});
        let mut object = self.head.object(vec![choice]);
        if self.usage {
            object.insert("usage".into(), Value::Null);
        }
        out.data(&object.into());
    }
}

impl Wire for Stream {
    fn open(&mut self, out: &mut Frames) {
        for index in 0..self.offsets.len() {
            let text = &self.head.echoed[index / self.head.n];
            if !text.is_empty() {
                self.chunk(index, text, Value::Null, Value::Null, out);
            }
        }
    }

    fn step(&mut self, step: Step, out: &mut Frames) {
        let text: String = step
            .events
            .iter()
            .filter_map(|e| if let Event::Content(t) = e { Some(t.as_str()) } else { None })
            .collect();
        let logprobs = match step.logprobs.as_slice() {
            [] => Value::Null,
            some => self.head.logprobs(some, &mut self.offsets[step.index]),
        };
        if !text.is_empty() || !logprobs.is_null() {
            self.chunk(step.index, &text, logprobs, Value::Null, out);
        }
        if let Some(finish) = &step.finish {
            self.chunk(step.index, "", Value::Null, finish_reason(Some(finish)).into(), out);
        }
    }

    fn close(&mut self, totals: &Totals, out: &mut Frames) {
        if self.usage {
            let mut object = self.head.object(Vec::new());
            totals.close(&mut object);
            out.data(&object.into());
        }
        out.done();
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.json(Style::OpenAi, &self.head.request_id));
        out.done();
    }
}
