//! `/v1/completions`: OpenAI's older API, which continues a text.

use std::sync::Arc;

use axum::Json;
use axum::response::IntoResponse;
use engine::formats::{Event, Format};
use engine::tokenizer::{Encode, Tokenizer};
use serde_json::{Value, json};

use super::app::{self, App};
use super::chat::finite;
use super::error::{ApiError, Style};
use super::fields::{Field, Kind, Object, Read, field};
use super::fill::Marks;
use super::generate::{Finish, Generation, Job, Logprob, Parsing, Step, Totals, token_text};
use super::limits::{MAX_CHOICES, MAX_INPUTS, MAX_TOP_LOGPROBS};
use super::routes::{Answer, Input};
use super::sse::{self, Frames, Wire};
use super::{form, sampling};

/// Tokens in place of text.
pub const IDS: Kind = Kind::List(&Kind::Int(0, u32::MAX as i128), 1 << 20);
pub const PROMPT: Kind =
    Kind::Either(&[Kind::Text, IDS, Kind::List(&Kind::Text, MAX_INPUTS), Kind::List(&IDS, MAX_INPUTS)]);

/// What the route takes beside the sampling.
pub const FIELDS: &[Field] = &[
    field("prompt", PROMPT, "a text, tokens, or a list of either"),
    field("model", Kind::Text, "any name; the one model answers"),
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
    let Input { body, request_id, .. } = input;
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
        None => prompts(&app, body.value("prompt").unwrap_or(&Value::Null)).await?,
        Some(suffix) => gaps(&app, body.value("prompt").unwrap_or(&Value::Null), suffix).await?,
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
    let generation =
        Generation::start(&app, request_id.clone(), Job { requests, n, parsing: Parsing::plain() }).await?;
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
        let usage = body.object("stream_options").and_then(|o| o.flag("include_usage")).unwrap_or(false);
        return Ok(sse::respond(generation, Stream { offsets: vec![0; head.echoed.len() * n], head, usage }));
    }
    let (answers, totals) = generation.collect().await?;
    let choices = answers.into_iter().enumerate().map(|(index, answer)| {
        let prompt = &firsts[index / n];
        let text = format!("{}{}", head.echoed[index / n], answer.content());
        let logprobs = match logprobs {
            Some(_) if echo => {
                let all: Vec<Logprob> = answer.prompt.iter().chain(&answer.logprobs).cloned().collect();
                head.logprobs(Some(*prompt), &all, &mut 0)
            }
            Some(_) => head.logprobs(None, &answer.logprobs, &mut 0),
            None => Value::Null,
        };
        let finish = finish_reason(answer.finish.as_ref());
        let mut choice = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish});
        if prompt_logprobs.is_some() {
            choice["prompt_logprobs"] = head.prompt_logprobs(&answer.prompt);
        }
        choice
    });
    let mut object = head.object(choices.collect());
    totals.close(&mut object);
    Ok(Json(Value::Object(object)).into_response())
}

/// The tokens of all prompts.
pub async fn prompts(app: &App, prompt: &Value) -> Result<Vec<Vec<u32>>, ApiError> {
    let list = match prompt {
        Value::Array(items) if !items.first().is_none_or(Value::is_number) => items.clone(),
        one => vec![one.clone()],
    };
    let tokenizer = app.tokenizer.clone();
    app.heavy(move || list.iter().enumerate().map(|(i, prompt)| tokens_of(&tokenizer, i, prompt)).collect()).await
}

/// The tokens of texts that stand before a gap.
async fn gaps(app: &App, prompt: &Value, suffix: &str) -> Result<Vec<Vec<u32>>, ApiError> {
    let marks = Marks::of(&app.tokenizer)?;
    let list = if let Value::Array(items) = prompt { items.clone() } else { vec![prompt.clone()] };
    let texts: Option<Vec<String>> = list.iter().map(|text| text.as_str().map(String::from)).collect();
    let texts = texts.ok_or_else(|| ApiError::field("prompt", "must be text where there is a `suffix`"))?;
    let (tokenizer, suffix) = (app.tokenizer.clone(), suffix.to_string());
    app.heavy(move || Ok(texts.iter().map(|text| marks.prompt(&tokenizer, &[], text, &suffix)).collect())).await
}

/// Tokens of one text or list of ids.
fn tokens_of(tokenizer: &Tokenizer, i: usize, prompt: &Value) -> Result<Vec<u32>, ApiError> {
    let tokens: Vec<u32> = match prompt {
        Value::String(text) => tokenizer.encode(text, Encode { add_special: true, parse_special: true }),
        Value::Array(ids) => ids.iter().filter_map(|id| id.as_f64().map(|id| id as u32)).collect(),
        _ => Vec::new(),
    };
    // A model that begins texts with a token can start from an empty prompt.
    match tokenizer.bos() {
        _ if !tokens.is_empty() => Ok(tokens),
        Some(bos) => Ok(vec![bos]),
        None => Err(ApiError::bad(format!("prompt {i} is empty"))),
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

    /// vLLM's form: nothing for the first token, then each token and its alternatives by id.
    fn prompt_logprobs(&self, logprobs: &[Logprob]) -> Value {
        let mut list = vec![Value::Null];
        for Logprob { token, values } in logprobs {
            let mut ranked: Vec<(u32, f32, usize)> =
                values.top.iter().enumerate().map(|(i, &(id, value))| (id, value, i + 1)).collect();
            if values.top.iter().all(|(id, _)| id != token) {
                // Its rank is known to be behind those that are listed, no more.
                ranked.push((*token, values.token, ranked.len() + 1));
            }
            let entry = |(id, value, rank): (u32, f32, usize)| {
                let text = token_text(&self.tokenizer, id).0;
                (id.to_string(), json!({"logprob": finite(value), "rank": rank, "decoded_token": text}))
            };
            list.push(Value::Object(ranked.into_iter().map(entry).collect()));
        }
        list.into()
    }

    /// The older form: lists side by side, `first` in front without numbers. `offset` counts the characters up to here.
    fn logprobs(&self, first: Option<u32>, logprobs: &[Logprob], offset: &mut usize) -> Value {
        let (mut tokens, mut values, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        if let Some(first) = first {
            let text = token_text(&self.tokenizer, first).0;
            offsets.push(*offset);
            *offset += text.chars().count();
            tokens.push(text);
            values.push(Value::Null);
            tops.push(Value::Null);
        }
        for logprob in logprobs {
            let (text, _) = token_text(&self.tokenizer, logprob.token);
            offsets.push(*offset);
            *offset += text.chars().count();
            tokens.push(text);
            values.push(json!(finite(logprob.values.token)));
            let top = logprob.values.top.iter();
            let top = top.map(|&(token, value)| (token_text(&self.tokenizer, token).0, json!(finite(value))));
            tops.push(Value::Object(top.collect()));
        }
        json!({"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets})
    }
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
            some => self.head.logprobs(None, some, &mut self.offsets[step.index]),
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
