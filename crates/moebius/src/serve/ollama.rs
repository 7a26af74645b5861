//! Ollama's API (its docs/api.md): conversations and texts as lines of JSON, embeddings, the list of models. What
//! manages files (`pull`, `create`, `delete`) is not here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::http::HeaderValue;
use axum::response::IntoResponse;
use engine::formats::{Event, Format};
use engine::scheduler::Request;
use serde_json::{Map, Value, json};

use super::app::{App, ModelInfo};
use super::body::{Body, Prompt};
use super::conversation::{self, Conversation};
use super::embeddings::{self, Rows, VectorWish};
use super::error::{ApiError, Style};
use super::fields::{self, Field, Kind, Object, Read, field, unsupported};
use super::fill;
use super::fleet::Fleet;
use super::form;
use super::generate::{Collected, Finish, Generation, Job, Parsing, Step, Totals};
use super::images::{self, Images, MAX_IMAGES};
use super::limits::{MAX_MESSAGES, MAX_TEXTS, MAX_TOOLS};
use super::parts::{Call, Change, MessagePart, MessageParts};
use super::prepare::{AnswerWish, Prepared, prepare};
use super::prompt;
use super::room::Room;
use super::routes::{Answer, Input, ignoring};
use super::sampling;
use super::sse::{self, Frames, Wire};
use super::tools::Offer;
use super::write::Lists;

/// The version of Ollama whose API this is; some clients require a minimum.
const API_VERSION: &str = "0.12.6";

const NAME: Kind = Kind::Text;
/// A duration in words ("5m") or seconds.
const SPAN: Kind = Kind::Either(&[Kind::Text, Kind::Number(-1e12, 1e12)]);
const THINK: Kind = Kind::Either(&[Kind::Bool, Kind::Word(&["high", "medium", "low"])]);

const KEEP_ALIVE: Field = field(
    "keep_alive",
    SPAN,
    "how long the model stays after this request, if the server unloads models; 0 unloads it",
);

/// Fields that `/api/chat` and `/api/generate` share.
pub const COMMON: &[Field] = &[
    field("model", NAME, "model to use; any name if only one is served"),
    field("stream", Kind::Bool, "stream the answer as lines of JSON; default true"),
    field("format", Kind::Either(&[Kind::Text, Kind::Object]), "\"json\" or the JSON schema of the whole answer"),
    field("options", Kind::Object, "sampling parameters, num_predict and stop"),
    field("think", THINK, "whether the model thinks first, if its chat template has a switch"),
    KEEP_ALIVE,
    field("open_objects", Kind::Bool, "allow objects to have properties that the schema does not name; default false"),
];

/// Further fields of `/api/chat`.
pub const CHAT: &[Field] = &[
    field("messages", Kind::List(&Kind::Object, MAX_MESSAGES), "messages of the conversation"),
    field("tools", Kind::List(&Kind::Object, MAX_TOOLS), "functions that the model may call"),
    field("truncate", Kind::Bool, "leave out the oldest turns if the context is full"),
];

/// Further fields of `/api/generate`.
pub const GENERATE: &[Field] = &[
    field("prompt", Kind::Text, "message of the user, or, if `raw` is true, the text to complete"),
    field("system", Kind::Text, "system message"),
    field("raw", Kind::Bool, "pass the prompt to the model unchanged"),
    field("suffix", Kind::Text, "text after the answer, for models with fill-in-the-middle tokens"),
    unsupported("template", "the model's own chat template is used"),
    unsupported("context", "send the conversation to /api/chat"),
    field("images", Kind::List(&Kind::Text, MAX_IMAGES), "images in front of the prompt, as Base64"),
];

/// Fields of `/api/embed`.
pub const EMBED: &[Field] = &[
    field("model", NAME, "model to use; any name if only one is served"),
    field("input", Kind::Prompts(MAX_TEXTS), "text, or list of texts"),
    field("dimensions", Kind::Int(1, 1 << 20), "number of leading values to keep, rescaled to length 1"),
    field("truncate", Kind::Bool, "truncate a text that is longer than the context; default true"),
    field("options", Kind::Object, "ignored"),
    KEEP_ALIVE,
];

/// Fields of `/api/embeddings`, the older form.
pub const EMBED_ONE: &[Field] = &[
    field("model", NAME, "model to use; any name if only one is served"),
    field("prompt", Kind::Prompts(1), "text to embed"),
    field("options", Kind::Object, "ignored"),
    KEEP_ALIVE,
];

/// Fields of `/api/show`.
pub const SHOW: &[Field] = &[
    field("model", NAME, "name from /api/tags"),
    field("name", NAME, "older name of `model`"),
    field("verbose", Kind::Bool, "ignored"),
];

/// Fields of `options` besides the sampling.
const OPTIONS: &[Field] = &[
    field("num_predict", Kind::Int(-2, 1 << 31), "maximum number of tokens to generate; below 0 for no limit"),
    field("stop", sampling::STOP, "texts that end the answer"),
];

pub async fn chat(app: Arc<App>, input: Input) -> Answer {
    let Input { body: Body { fields: mut body, room, .. }, request_id, .. } = input;
    let images = Images::take(&mut body, &app)?;
    let list = body.list("messages").map_or(&[][..], Vec::as_slice);
    let goes = keep(&app, &body)?;
    if list.is_empty() {
        return Ok(loaded(&app, true, goes));
    }
    let messages: Result<Vec<Value>, ApiError> = list.iter().enumerate().map(|(i, m)| openai_message(i, m)).collect();
    let mut conversation = Conversation {
        messages: conversation::messages(&messages?)?,
        images,
        trims: body.flag("truncate"),
        ..Conversation::default()
    };
    if conversation.messages.last().is_some_and(|last| last["role"] == "assistant" && last.get("tool_calls").is_none())
    {
        conversation.continue_last()?;
    }
    conversation.offer(Offer::of_chat(body.list("tools").map_or(&[][..], Vec::as_slice))?);
    converse(app, body, room, request_id, conversation, true).await
}

pub async fn generate(app: Arc<App>, input: Input) -> Answer {
    let Input { body: Body { fields: mut body, room, .. }, request_id, .. } = input;
    let files = body.remove("images").filter(|list| list.as_array().is_some_and(|list| !list.is_empty()));
    let prompt = body.text("prompt").unwrap_or_default();
    let goes = keep(&app, &body)?;
    let has_suffix = body.text("suffix").is_some_and(|suffix| !suffix.is_empty());
    if prompt.is_empty() && files.is_none() && !has_suffix {
        return Ok(loaded(&app, false, goes));
    }
    if body.flag("raw").unwrap_or(false) || has_suffix || app.template.is_none() {
        return match files {
            Some(_) => Err(ApiError::field("images", "requires a chat template, which `raw` and `suffix` leave out")),
            None => continue_text(app, &body, room, request_id).await,
        };
    }
    let mut user = json!({"role": "user", "content": prompt});
    let mut images = Images::default();
    if let Some(files) = files {
        user["images"] = files;
        images = Images::of_message("images", &mut user, &app)?;
    }
    let mut conversation = Conversation { images, ..Conversation::default() };
    if let Some(system) = body.text("system").filter(|text| !text.is_empty()) {
        conversation.messages.push(json!({"role": "system", "content": system}));
    }
    conversation.messages.push(user);
    converse(app, body, room, request_id, conversation, false).await
}

/// Answers a conversation in the words of `/api/chat` or `/api/generate`.
async fn converse(
    app: Arc<App>,
    body: Object,
    room: Room,
    request_id: String,
    mut conversation: Conversation,
    is_chat: bool,
) -> Answer {
    match body.value("think") {
        // Templates have two names for the switch.
        Some(Value::Bool(on)) => {
            conversation.kwargs.extend(["enable_thinking", "thinking"].map(|name| (name.to_string(), json!(on))));
        }
        Some(effort) => drop(conversation.kwargs.insert("reasoning_effort".into(), effort.clone())),
        None => {}
    }
    let options = options(&body)?;
    let stream = body.flag("stream").unwrap_or(true);
    let wanted = AnswerWish { form: wanted_form(&body)?, ..AnswerWish::default() };
    let start = Instant::now();
    let Prepared { mut request, parsing, ignored, .. } = prepare(&app, conversation, wanted, &options).await?;
    limit(&options, &mut request)?;
    let generation = Generation::start(&app, request_id, Job { requests: vec![request], n: 1, parsing, room }).await?;
    let head = OllamaHead { model: app.model.id.clone(), is_chat, start };
    Ok(ignoring(finish(generation, head, stream).await?, ignored))
}

/// Continues a text as it stands, or fills the gap before a suffix.
async fn continue_text(app: Arc<App>, body: &Object, room: Room, request_id: String) -> Answer {
    let options = options(body)?;
    let prompts = vec![Prompt::Text(body.text("prompt").unwrap_or_default().into())];
    let tokens = match body.text("suffix").filter(|suffix| !suffix.is_empty()) {
        None => prompt::tokens(&app, prompts).await?.pop(),
        Some(suffix) => fill::gaps(&app, prompts, suffix).await?.pop().map(|prompt| prompt.tokens),
    };
    let mut request = app.request(tokens.unwrap_or_default());
    sampling::apply(&options, &mut request, &app.tokenizer)?;
    limit(&options, &mut request)?;
    let held = form::Constrained { form: wanted_form(body)?, ..form::Constrained::default() };
    let (constraint, ignored) = form::constraint(&app, Format::PLAIN, held).await?;
    request.constraint = constraint;
    let head = OllamaHead { model: app.model.id.clone(), is_chat: false, start: Instant::now() };
    let job = Job { requests: vec![request], n: 1, parsing: Parsing::plain(), room };
    let generation = Generation::start(&app, request_id, job).await?;
    Ok(ignoring(finish(generation, head, body.flag("stream").unwrap_or(true)).await?, ignored))
}

async fn finish(generation: Generation, head: OllamaHead, stream: bool) -> Answer {
    if stream {
        return Ok(sse::respond(generation, OllamaStream { head, calls: MessageParts::default(), finish: None }));
    }
    let (answers, totals, _) = generation.collect().await?;
    let answer = answers.into_iter().next().unwrap_or_default();
    Ok(Json(head.whole(&answer, &totals)).into_response())
}

fn wanted_form(body: &Object) -> Result<Option<form::AnswerForm>, ApiError> {
    let form = body.value("format").map(form::of_ollama).transpose()?.flatten();
    Ok(form.map(|form| form.opened_by(body)))
}

/// Returns the options of a body, checked.
fn options(body: &Object) -> Result<Object, ApiError> {
    let options = body.object("options").cloned().unwrap_or_default();
    fields::check(&options, &[sampling::FIELDS, OPTIONS]).map_err(|error| {
        let param = error.param.map(|param| format!("options.{param}"));
        ApiError { message: error.message.replacen('`', "`options.", 1), param, ..error }
    })?;
    Ok(options)
}

/// Where an answer ends.
fn limit(options: &Object, request: &mut Request) -> Result<(), ApiError> {
    request.stop_strings = sampling::stops(options, "stop")?;
    if let Some(n) = options.int("num_predict").filter(|n| *n >= 0) {
        request.max_new_tokens = n as usize;
    }
    Ok(())
}

/// Returns a message in OpenAI's form: calls have no ids here, and results name the tool.
fn openai_message(i: usize, message: &Value) -> Result<Value, ApiError> {
    let mut message = message.as_object().cloned().unwrap_or_default();
    if message.value("images").is_some_and(|images| *images != json!([])) {
        return Err(images::no_images(&format!("messages[{i}].images")));
    }
    for (name, theirs) in [("name", "tool_name"), ("reasoning_content", "thinking")] {
        if let Some(value) = message.remove(theirs).filter(|value| !value.is_null()) {
            message.entry(name).or_insert(value);
        }
    }
    Ok(message.into())
}

/// What an answer's lines begin with.
struct OllamaHead {
    model: String,
    /// `/api/chat`, else `/api/generate`.
    is_chat: bool,
    start: Instant,
}

impl OllamaHead {
    /// Returns a line with a piece of the answer.
    fn line(&self, text: &str, thought: &str, calls: &[&Call]) -> Object {
        let mut line = Object::new();
        line.insert("model".into(), self.model.as_str().into());
        line.insert("created_at".into(), now().into());
        let mut message = Object::new();
        if self.is_chat {
            message.insert("role".into(), "assistant".into());
        }
        message.insert(if self.is_chat { "content" } else { "response" }.into(), text.into());
        if !thought.is_empty() {
            message.insert("thinking".into(), thought.into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".into(), calls.iter().map(|call| call_json(call)).collect());
        }
        match self.is_chat {
            true => drop(line.insert("message".into(), message.into())),
            false => line.extend(message),
        }
        line.insert("done".into(), false.into());
        line
    }

    /// Adds what the last line says.
    fn end(&self, line: &mut Object, finish: Option<&Finish>, totals: &Totals) {
        let nanoseconds = |time: Duration| json!(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let reason = if finish == Some(&Finish::Length) { "length" } else { "stop" };
        line.insert("done".into(), true.into());
        line.insert("done_reason".into(), reason.into());
        line.insert("total_duration".into(), nanoseconds(self.start.elapsed()));
        line.insert("load_duration".into(), 0.into());
        line.insert("prompt_eval_count".into(), totals.prompt.into());
        line.insert("prompt_eval_duration".into(), nanoseconds(totals.prompt_time));
        line.insert("eval_count".into(), totals.generated.into());
        line.insert("eval_duration".into(), nanoseconds(totals.decode_time));
    }

    fn whole(&self, answer: &Collected, totals: &Totals) -> Value {
        let (mut thought, mut calls) = (String::new(), Vec::new());
        for part in answer.parts.list() {
            match part {
                MessagePart::Reasoning(text) => thought.push_str(text),
                MessagePart::Call(call) if call.complete => calls.push(call),
                MessagePart::Call(_) | MessagePart::Text(_) => {}
            }
        }
        let mut line = self.line(&answer.content(), &thought, &calls);
        self.end(&mut line, answer.finish.as_ref(), totals);
        line.into()
    }
}

fn call_json(call: &Call) -> Value {
    json!({"id": call.id, "function": {"name": call.name, "arguments": call.object()}})
}

/// Keeps the model as long as a request says; whether it goes at once.
fn keep(app: &App, body: &Object) -> Result<bool, ApiError> {
    let Some(span) = body.value("keep_alive") else { return Ok(false) };
    let time = match span {
        Value::String(text) => duration(text).ok_or_else(|| {
            ApiError::field("keep_alive", "must be seconds, or a duration like \"5m\", \"1h30m\" or \"-1s\"")
        })?,
        number => number.as_f64().unwrap_or(-1.0),
    };
    // Below 0: for good.
    let time = if time < 0.0 { Duration::MAX } else { Duration::try_from_secs_f64(time).unwrap_or(Duration::MAX) };
    Ok(app.common.keep(&app.model.id, time) && time.is_zero())
}

/// Returns the seconds of a duration as Go writes it, or of a number.
fn duration(text: &str) -> Option<f64> {
    let (sign, mut rest) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
    if let Ok(seconds) = rest.parse::<f64>() {
        return seconds.is_finite().then_some(sign * seconds);
    }
    let mut sum = 0.0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..end].parse().ok()?;
        let units = [("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9), ("h", 3600.0), ("m", 60.0), ("s", 1.0)];
        let (unit, factor) = units.into_iter().find(|(unit, _)| rest[end..].starts_with(unit))?;
        sum += number * factor;
        rest = &rest[end + unit.len()..];
    }
    (!text.is_empty()).then_some(sign * sum)
}

/// Returns the answer to a request that says nothing: Ollama's way to load a model, or to unload it.
fn loaded(app: &App, is_chat: bool, goes: bool) -> axum::response::Response {
    let head = OllamaHead { model: app.model.id.clone(), is_chat, start: Instant::now() };
    let mut line = head.line("", "", &[]);
    line.insert("done".into(), true.into());
    line.insert("done_reason".into(), if goes { "unload" } else { "load" }.into());
    Json(Value::Object(line)).into_response()
}

fn now() -> String {
    jiff::Timestamp::now().to_string()
}

/// The answer as it comes, a line a piece.
struct OllamaStream {
    head: OllamaHead,
    /// Calls under way: a line has a whole one.
    calls: MessageParts,
    finish: Option<Finish>,
}

impl Wire for OllamaStream {
    const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/x-ndjson");

    fn open(&mut self, _: &mut Frames) {}

    fn step(&mut self, step: Step, out: &mut Frames) {
        for event in step.events {
            match event {
                Event::Content(text) => out.line(&self.head.line(&text, "", &[]).into()),
                Event::Reasoning(text) => out.line(&self.head.line("", &text, &[]).into()),
                call => {
                    let head = &self.head;
                    self.calls.take(call, |_, change, part| {
                        if let (Change::Closed, MessagePart::Call(call)) = (change, part)
                            && call.complete
                        {
                            out.line(&head.line("", "", &[call]).into());
                        }
                    });
                }
            }
        }
        self.finish = step.finish.or(self.finish.take());
    }

    fn close(&mut self, totals: &Totals, out: &mut Frames) {
        let mut line = self.head.line("", "", &[]);
        self.head.end(&mut line, self.finish.as_ref(), totals);
        out.line(&line.into());
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        out.line(&error.json(Style::Ollama, ""));
    }

    // Clients read every line as JSON: there is no way to say nothing.
    fn idle(&mut self, _: &mut Frames) {}
}

pub async fn embed(app: Arc<App>, mut input: Input) -> Answer {
    let start = Instant::now();
    keep(&app, &input.body.fields)?;
    let prompts = input.body.take_prompts();
    let Body { fields: body, room, .. } = input.body;
    let prompts = cut(&app, prompts, body.flag("truncate").unwrap_or(true)).await?;
    let wanted = VectorWish { dimensions: body.size("dimensions"), normalize: true, ..VectorWish::default() };
    let Rows { rows, tokens, room, .. } = embeddings::rows(&app, prompts, wanted, room).await?;
    let mut lists = Lists::default();
    let rows: Vec<Value> = rows.into_iter().map(|row| embeddings::list(row, &mut lists)).collect();
    let answer = json!({
        "model": app.model.id,
        "embeddings": rows,
        "total_duration": start.elapsed().as_nanos() as u64,
        "load_duration": 0,
        "prompt_eval_count": tokens,
    });
    Ok(lists.respond(&answer, room))
}

pub async fn embed_one(app: Arc<App>, mut input: Input) -> Answer {
    keep(&app, &input.body.fields)?;
    let prompts = cut(&app, input.body.take_prompts(), true).await?;
    let Rows { mut rows, room, .. } = embeddings::rows(&app, prompts, VectorWish::default(), input.body.room).await?;
    let mut lists = Lists::default();
    let row = embeddings::list(rows.pop().unwrap_or_default(), &mut lists);
    Ok(lists.respond(&json!({"embedding": row}), room))
}

/// Returns the tokens of prompts, cut where they are longer than the context, which has room for one token more than a
/// prompt.
async fn cut(app: &Arc<App>, mut prompts: Vec<Prompt>, truncate: bool) -> Result<Vec<Vec<u32>>, ApiError> {
    let most = app.worker.context().saturating_sub(1);
    if truncate && let Some(bytes) = app.tokenizer.max_text_bytes(most) {
        for prompt in &mut prompts {
            if let Prompt::Text(text) = prompt {
                text.truncate(text.floor_char_boundary(bytes));
            }
        }
    }
    let mut tokens = embeddings::tokens(app, prompts).await?;
    if truncate {
        tokens.iter_mut().for_each(|tokens| tokens.truncate(most));
    }
    Ok(tokens)
}

fn details(model: &ModelInfo) -> Value {
    let family = &model.arch;
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": crate::machine::count(model.n_params).replace(' ', ""),
        "quantization_level": model.file_type.to_uppercase(),
    })
}

fn listed(model: &ModelInfo) -> Map<String, Value> {
    let modified = jiff::Timestamp::from_second(model.created as i64).unwrap_or_default().to_string();
    let entry = json!({
        "name": model.id,
        "model": model.id,
        "modified_at": modified,
        "size": model.size_bytes,
        // Files are not hashed at start; the name says as much here.
        "digest": format!("{:016x}", sampling::hash(&model.id)),
        "details": details(model),
    });
    entry.as_object().cloned().unwrap_or_default()
}

pub async fn tags(fleet: Arc<Fleet>, _: Input) -> Answer {
    Ok(Json(json!({"models": fleet.list(|model, _| listed(model).into())})).into_response())
}

pub async fn running(fleet: Arc<Fleet>, _: Input) -> Answer {
    let entry = |app: &Arc<App>| {
        let mut entry = listed(&app.model);
        entry.remove("modified_at");
        // Without a word it stays as long as the server does, or until others need its place.
        let stays = app.common.kept(&app.model.id).and_then(|stays| jiff::SignedDuration::try_from(stays).ok());
        let expires = stays.and_then(|stays| jiff::Timestamp::now().checked_add(stays).ok());
        let expires = expires.map_or_else(|| "2318-01-01T00:00:00Z".into(), |time| time.to_string());
        entry.insert("expires_at".into(), expires.into());
        entry.insert("size_vram".into(), 0.into());
        entry.insert("context_length".into(), app.worker.context().into());
        Value::from(entry)
    };
    let models: Vec<Value> = fleet.all_loaded().iter().map(entry).collect();
    Ok(Json(json!({"models": models})).into_response())
}

pub async fn version(_: Arc<Fleet>, _: Input) -> Answer {
    Ok(Json(json!({"version": API_VERSION, "moebius": crate::version::NUMBER})).into_response())
}

pub async fn show(fleet: Arc<Fleet>, input: Input) -> Answer {
    let fields = &input.body.fields;
    let name = fields.text("model").or(fields.text("name"));
    Ok(Json(fleet.tell(name, shown)?).into_response())
}

fn shown(model: &ModelInfo, _: &Value) -> Value {
    let mut capabilities = vec!["completion"];
    if model.has_template {
        capabilities.push("tools");
    }
    if model.has_thoughts {
        capabilities.push("thinking");
    }
    let family = &model.arch;
    json!({
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": details(model),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": model.n_params,
            (format!("{family}.context_length")): model.context,
        },
        "capabilities": capabilities,
        "modified_at": listed(model).remove("modified_at"),
    })
}
