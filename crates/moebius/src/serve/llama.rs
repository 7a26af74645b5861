//! llama-server's own routes, which editors and scripts call: `/completion`, `/infill`, `/props`.

use std::sync::Arc;

use axum::Json;
use axum::response::IntoResponse;
use engine::formats::{Event, Format};
use serde_json::{Value, json};

use super::app::App;
use super::body::Body;
use super::chat::finite;
use super::error::{ApiError, Style};
use super::fields::{Field, Kind, Object, Read, field};
use super::fill::{File, Marks};
use super::form::{self, Constrained};
use super::generate::{Collected, Finish, Generation, Job, Logprob, Parsing, Step, Totals, token_text};
use super::images::MARKER;
use super::limits::{MAX_INPUTS, MAX_TOP_LOGPROBS};
use super::prompt::{self, Ready};
use super::routes::{Answer, Input, ignoring};
use super::sampling;
use super::sse::{self, Frames, Wire};
use super::write::short;

/// Fields of `/completion` and `/infill` besides the sampling.
pub const COMMON: &[Field] = &[
    field("model", Kind::Text, "model to use; any name if only one is served"),
    field("stream", Kind::Bool, "stream the text as server-sent events"),
    field(
        "n_predict",
        sampling::MAX_TOKENS,
        "maximum number of tokens to generate; 0 only caches the prompt; default -1 for no limit",
    ),
    field("stop", sampling::STOP, "texts that end the completion"),
    field("n_probs", Kind::Int(0, MAX_TOP_LOGPROBS as i128), "number of top alternatives to return per token"),
    field("cache_prompt", Kind::Bool, "ignored: prefixes are always cached"),
    field("id_slot", Kind::Int(-1, 1 << 31), "ignored: the server has no fixed slots"),
    field("response_fields", Kind::List(&Kind::Text, 64), "fields of the answer to return, as `timings/prompt_n`"),
];

/// Further fields of `/completion`.
pub const COMPLETION: &[Field] =
    &[field("prompt", Kind::Shown(MAX_INPUTS), "text or token ids, or a list of such, answered by a list")];

/// Further fields of `/infill`.
pub const INFILL: &[Field] = &[
    field("input_prefix", Kind::Text, "text before the gap"),
    field("input_suffix", Kind::Text, "text after the gap"),
    field("input_extra", Kind::List(&Kind::Object, 256), "other files, each with filename and text"),
    field("prompt", Kind::Text, "beginning of the text that fills the gap"),
];

pub async fn completion(app: Arc<App>, mut input: Input) -> Answer {
    let prompts = prompt::ready(&app, input.body.take_prompts()).await?;
    answer(app, input, prompts).await
}

pub async fn infill(app: Arc<App>, input: Input) -> Answer {
    let marks = Marks::of(&app.tokenizer)?;
    let body = &input.body.fields;
    let text = |name: &str| body.text(name).unwrap_or_default().to_string();
    let (prefix, suffix, begun) = (text("input_prefix"), text("input_suffix"), text("prompt"));
    let mut files = Vec::new();
    for (i, file) in body.list("input_extra").into_iter().flatten().filter_map(Value::as_object).enumerate() {
        let part = |name: &str| {
            let value = file.text(name).map(String::from);
            value.ok_or_else(|| ApiError::field(format!("input_extra[{i}].{name}"), "must be a string"))
        };
        // What llama-server calls a file without a name.
        let name = if file.value("filename").is_some() { part("filename")? } else { "tmp".into() };
        files.push((name, part("text")?));
    }
    let shared = app.clone();
    let bytes = files.iter().map(|(_, text)| text.len()).sum::<usize>() + prefix.len() + suffix.len() + begun.len();
    let work = move || {
        let texts = files.iter().flat_map(|(name, text)| [name, text]).chain([&prefix, &suffix, &begun]);
        texts.into_iter().try_for_each(|text| shared.check_length(text))?;
        let tokenizer = &shared.tokenizer;
        let files: Vec<File<'_>> = files.iter().map(|(name, text)| File { name, text }).collect();
        let mut tokens = marks.prompt(tokenizer, &files, &prefix, &suffix);
        tokens.extend(tokenizer.encode(&begun, engine::tokenizer::Encode::default()));
        Ok(tokens)
    };
    let tokens = app.common.heavy(bytes, work).await?;
    answer(app, input, vec![Ready::of_tokens(tokens)]).await
}

async fn answer(app: Arc<App>, input: Input, prompts: Vec<Ready>) -> Answer {
    let Input { body: Body { fields: body, room, .. }, request_id, .. } = input;
    let held = Constrained { form: form::of(&body)?, ..Constrained::default() };
    let (constraint, ignored) = form::constraint(&app, Format::PLAIN, held).await?;
    let texts: Vec<String> = prompts.iter().map(|prompt| prompt.text(&app)).collect();
    let limit = sampling::max_tokens(&body, &["n_predict"]).unwrap_or(usize::MAX);
    let request = |ready: Ready| {
        let mut request = ready.request(&app);
        sampling::apply(&body, &mut request, &app.tokenizer)?;
        request.stop_strings = sampling::stops(&body, "stop")?;
        // A prompt is computed for the token after it.
        request.max_new_tokens = limit.max(1);
        request.logprobs = body.size("n_probs").filter(|n| *n > 0);
        request.constraint = constraint.clone();
        Ok(request)
    };
    let requests = prompts.into_iter().map(request).collect::<Result<Vec<_>, ApiError>>()?;
    let job = Job { requests, n: 1, parsing: Parsing::plain(), room };
    let generation = Generation::start(&app, request_id.clone(), job).await?;
    let finishes = vec![None; texts.len()];
    let fields = body.list("response_fields").into_iter().flatten().filter_map(Value::as_str).map(String::from);
    let head = LlamaHead {
        app: app.clone(),
        prompts: texts,
        request_id,
        fields: fields.collect(),
        is_cached_only: limit == 0,
    };
    if body.flag("stream").unwrap_or(false) {
        return Ok(ignoring(sse::respond(generation, LlamaStream { head, finishes }), ignored));
    }
    let (answers, totals, _) = generation.collect().await?;
    let object = |(i, answer): (usize, Collected)| {
        let mut object = head.last(i, &answer.content(), answer.finish.as_ref(), &totals);
        if !answer.logprobs.is_empty() && !head.is_cached_only {
            object.insert("completion_probabilities".into(), head.probabilities(&answer.logprobs));
        }
        head.picked(object)
    };
    let mut objects: Vec<Value> = answers.into_iter().enumerate().map(object).collect();
    let whole = if objects.len() == 1 { objects.remove(0) } else { objects.into() };
    Ok(ignoring(Json(whole).into_response(), ignored))
}

struct LlamaHead {
    app: Arc<App>,
    prompts: Vec<String>,
    request_id: String,
    /// Paths of what the client wants of an answer; none for all.
    fields: Vec<String>,
    /// The answer is left out.
    is_cached_only: bool,
}

impl LlamaHead {
    /// Returns a whole answer, or what ends its stream. Counts and times are of all prompts together.
    fn last(&self, index: usize, content: &str, finish: Option<&Finish>, totals: &Totals) -> Object {
        let (stop_type, word) = match finish {
            Some(Finish::Length) => ("limit", ""),
            Some(Finish::StopString(word)) => ("word", word.as_str()),
            _ => ("eos", ""),
        };
        let (stop_type, word, content, generated) = match self.is_cached_only {
            true => ("limit", "", "", 0),
            false => (stop_type, word, content, totals.generated),
        };
        let totals = Totals { generated, ..*totals };
        let object = json!({
            "index": index,
            "content": content,
            "id_slot": 0,
            "stop": true,
            "model": self.app.model.id,
            "tokens_predicted": totals.generated,
            "tokens_evaluated": totals.prompt,
            "tokens_cached": totals.cached,
            "prompt": self.prompts[index],
            "truncated": false,
            "stop_type": stop_type,
            "stopping_word": word,
            "timings": totals.timings(),
        });
        if let Value::Object(object) = object { object } else { Object::new() }
    }

    /// Returns the fields that the client wants, under their paths.
    fn picked(&self, object: Object) -> Value {
        let whole = Value::Object(object);
        if self.fields.is_empty() {
            return whole;
        }
        let value =
            |path: &String| path.split('/').try_fold(&whole, |value, name| value.as_object()?.get(name)).cloned();
        self.fields.iter().filter_map(|path| Some((path.clone(), value(path)?))).collect()
    }

    fn probabilities(&self, logprobs: &[Logprob]) -> Value {
        let entry = |token: u32, value: f32| {
            let (text, bytes) = token_text(&self.app.tokenizer, token);
            json!({"id": token, "token": text, "bytes": bytes, "logprob": short(finite(value))})
        };
        let of = |logprob: &Logprob| {
            let mut value = entry(logprob.token, logprob.values.token);
            value["top_logprobs"] = logprob.values.top.iter().map(|&(token, value)| entry(token, value)).collect();
            value
        };
        logprobs.iter().map(of).collect()
    }
}

/// The text as it comes.
struct LlamaStream {
    head: LlamaHead,
    /// By prompt.
    finishes: Vec<Option<Finish>>,
}

impl Wire for LlamaStream {
    fn open(&mut self, _: &mut Frames) {}

    fn step(&mut self, step: Step, out: &mut Frames) {
        let content: String = step
            .events
            .iter()
            .filter_map(|e| if let Event::Content(t) = e { Some(t.as_str()) } else { None })
            .collect();
        if !self.head.is_cached_only && (!content.is_empty() || !step.logprobs.is_empty()) {
            let mut chunk = json!({"index": step.index, "content": content, "id_slot": 0, "stop": false});
            if !step.logprobs.is_empty() {
                chunk["completion_probabilities"] = self.head.probabilities(&step.logprobs);
            }
            out.data(&chunk);
        }
        let finish = &mut self.finishes[step.index];
        *finish = step.finish.or(finish.take());
    }

    fn close(&mut self, totals: &Totals, out: &mut Frames) {
        for (i, finish) in self.finishes.iter().enumerate() {
            out.data(&self.head.picked(self.head.last(i, "", finish.as_ref(), totals)));
        }
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        out.event("error", &error.json(Style::OpenAi, &self.head.request_id));
    }
}

pub async fn props(app: Arc<App>, _: Input) -> Answer {
    let text = |id: Option<u32>| id.map(|id| token_text(&app.tokenizer, id).0).unwrap_or_default();
    let answer = json!({
        "default_generation_settings": {"n_ctx": app.worker.context(), "params": {
            "temperature": short(app.sampling.temperature),
            "top_k": app.sampling.top_k,
            "top_p": short(app.sampling.top_p),
            "min_p": short(app.sampling.min_p),
            "repeat_penalty": short(app.sampling.penalty_repeat),
        }},
        "model_alias": app.model.id,
        "bos_token": text(app.tokenizer.bos()),
        "eos_token": text(app.tokenizer.eos()),
        "modalities": {"vision": app.eyes.is_some(), "audio": false},
        "media_marker": MARKER,
        "build_info": concat!("moebius-", env!("CARGO_PKG_VERSION")),
    });
    Ok(Json(answer).into_response())
}
