//! `/v1/responses`: OpenAI's newer conversations, without a memory: the server keeps no answers.

use std::sync::Arc;

use engine::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::app::{self, App};
use super::body::Body;
use super::chat::Reported;
use super::conversation::{self, Conversation};
use super::error::ApiError;
use super::fields::{Field, Kind, Object, Read, field};
use super::generate::{Finish, Generation, Job, Logprob, Step, Totals};
use super::limits::{MAX_MESSAGES, MAX_TOOLS, MAX_TOP_LOGPROBS};
use super::parts::{Change, Part, Parts};
use super::prepare::{Wanted, prepare};
use super::routes::{Answer, Input};
use super::sampling;
use super::sse::{self, Frames, Wire};
use super::write::{Lists, short};
use super::{form, tools};

/// What the route takes beside the sampling.
pub const FIELDS: &[Field] = &[
    field("input", Kind::Either(&[Kind::Text, Kind::List(&Kind::Object, MAX_MESSAGES)]), "a text, or items"),
    field("instructions", Kind::Text, "the system prompt"),
    field("model", Kind::Text, "which model answers; the only one has any name"),
    field("stream", Kind::Bool, "send the answer as it comes"),
    field("max_output_tokens", sampling::MAX_TOKENS, "most tokens of the answer; -1 is no limit"),
    field("stop", sampling::STOP, "texts that end the answer"),
    field("tools", Kind::List(&Kind::Object, MAX_TOOLS), "functions that the model may call"),
    field("tool_choice", Kind::Either(&[Kind::Word(&["none", "auto", "required"]), Kind::Object]), "whether it does"),
    field("parallel_tool_calls", Kind::Bool, "whether it may call several"),
    field("text", Kind::Object, "format: the form of the answer"),
    field("reasoning", Kind::Object, "effort: handed to the template"),
    field("include", Kind::List(&Kind::Text, 32), "message.output_text.logprobs: report log-probabilities"),
    field("top_logprobs", Kind::Int(0, MAX_TOP_LOGPROBS as i128), "and so many alternatives"),
    field("chat_template_kwargs", Kind::Object, "further variables of the template"),
    field("previous_response_id", Kind::Text, "not offered"),
    field("store", Kind::Bool, "nothing is stored"),
    field("metadata", Kind::Object, "given back"),
    field("user", Kind::Text, "not used"),
];

/// The handler.
pub async fn handle(app: Arc<App>, input: Input) -> Answer {
    let Input { body: Body { fields: body, room, .. }, request_id, .. } = input;
    for name in ["previous_response_id", "conversation"] {
        if body.value(name).is_some() {
            return Err(ApiError::field(
                name,
                "cannot be used: the server keeps no answers; send all items in `input`",
            ));
        }
    }
    if body.flag("background").unwrap_or(false) {
        return Err(ApiError::field("background", "cannot be used: the server keeps no answers"));
    }
    let stream = body.flag("stream").unwrap_or(false);
    let stops = sampling::stops(&body, "stop")?;
    let (conversation, wanted) = conversation_of(&body)?;
    let (mut request, parsing) = prepare(&app, conversation, wanted, &body, stream).await?;
    request.stop_strings = stops;
    if let Some(n) = sampling::max_tokens(&body, &["max_output_tokens"]) {
        request.max_new_tokens = n;
    }
    let included = |what: &str| body.list("include").is_some_and(|list| list.iter().any(|item| item == what));
    if included("message.output_text.logprobs") || body.size("top_logprobs").is_some_and(|n| n > 0) {
        request.logprobs = Some(body.size("top_logprobs").unwrap_or(0));
    }
    let head = Head::new(&app, &body, request_id.clone());
    drop(body);
    let job = Job { requests: vec![request], n: 1, parsing, room };
    let generation = Generation::start(&app, request_id, job).await?;
    if stream {
        return Ok(sse::respond(generation, Stream { output: Output::default(), head, finish: None, number: 0 }));
    }
    let (answers, totals, room) = generation.collect().await?;
    let answer = answers.into_iter().next().unwrap_or_default();
    let mut output = Output { parts: answer.parts, ids: Vec::new(), logprobs: answer.logprobs };
    output.name_all();
    let mut lists = Lists::default();
    let response = head.complete(&mut output, answer.finish.as_ref(), &totals, &mut lists);
    Ok(lists.respond(&response, room))
}

/// The conversation of a body, and what is wanted of the answer.
pub fn conversation_of(body: &Object) -> Result<(Conversation, Wanted), ApiError> {
    let mut out = Conversation { kwargs: conversation::kwargs(body)?, ..Conversation::default() };
    if let Some(text) = body.text("instructions") {
        out.messages.push(json!({"role": "system", "content": text}));
    }
    match body.value("input") {
        Some(Value::String(text)) => out.messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => {
            items.iter().enumerate().try_for_each(|(i, item)| add_item(i, item, &mut out.messages))?;
        }
        _ => return Err(ApiError::field("input", "is empty")),
    }
    if let Some(effort) = body.object("reasoning").and_then(|reasoning| reasoning.value("effort")) {
        Kind::Text.check("reasoning.effort", effort)?;
        out.kwargs.entry("reasoning_effort").or_insert_with(|| effort.clone());
    }
    let list = body.list("tools").map_or(&[][..], Vec::as_slice);
    for (i, tool) in list.iter().enumerate() {
        let mut function = tool.as_object().cloned().unwrap_or_default();
        let kind = function.remove("type").unwrap_or(Value::Null);
        let tool = json!({"type": kind, "function": function});
        tools::check(&format!("tools[{i}]"), &tool, "")?;
        out.tools.push(tool);
    }
    let choice = tools::openai_choice(body.value("tool_choice"))?;
    let format = body.object("text").and_then(|text| text.object("format"));
    let form = match format {
        Some(format) => form::of_format(format, format.value("schema"), "text.format")?.map(|form| form.closed(body)),
        None => form::of(body)?,
    };
    Ok((out, Wanted { choice, form, single: body.flag("parallel_tool_calls") == Some(false) }))
}

/// Adds an item of the input to the messages. Calls join the answer that they are part of.
fn add_item(i: usize, item: &Value, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let at = format!("input[{i}]");
    let text =
        |name: &str| item[name].as_str().ok_or_else(|| ApiError::field(format!("{at}.{name}"), "must be a string"));
    match item["type"].as_str().unwrap_or("message") {
        "message" => {
            let role = match item["role"].as_str() {
                Some("developer") => "system",
                Some(role @ ("user" | "assistant" | "system")) => role,
                _ => {
                    return Err(ApiError::field(
                        format!("{at}.role"),
                        "must be one of user, assistant, system, developer",
                    ));
                }
            };
            let said = conversation::text_of(&format!("{at}.content"), &item["content"])?;
            match unfinished(out).filter(|_| role == "assistant") {
                Some(last) => last["content"] = said.into(),
                None => out.push(json!({"role": role, "content": said})),
            }
        }
        "function_call" => {
            let arguments = conversation::arguments(text("arguments")?);
            let function = json!({"name": text("name")?, "arguments": arguments});
            let call = json!({"id": text("call_id")?, "type": "function", "function": function});
            if out.last().is_none_or(|last| last["role"] != "assistant") {
                out.push(json!({"role": "assistant", "content": ""}));
            }
            let Some(last) = out.last_mut() else { return Ok(()) };
            match last["tool_calls"].as_array_mut() {
                Some(calls) => calls.push(call),
                None => last["tool_calls"] = json!([call]),
            }
        }
        "function_call_output" => {
            let said = conversation::text_of(&format!("{at}.output"), &item["output"])?;
            out.push(json!({"role": "tool", "tool_call_id": text("call_id")?, "content": said}));
        }
        "reasoning" => {
            let parts = item["content"].as_array().into_iter().flatten();
            let thought: Vec<&str> = parts.filter_map(|part| part["text"].as_str()).collect();
            if !thought.is_empty() {
                out.push(json!({"role": "assistant", "content": "", "reasoning_content": thought.join("\n")}));
            }
        }
        other => {
            let other: String = other.chars().take(40).collect();
            return Err(ApiError::field(
                format!("{at}.type"),
                format!("is {other:?}, which this server does not take"),
            ));
        }
    }
    Ok(())
}

/// The thought that an answer begins with, while nothing else of it has come.
fn unfinished(messages: &mut [Value]) -> Option<&mut Value> {
    messages.last_mut().filter(|last| {
        last["role"] == "assistant"
            && last.get("reasoning_content").is_some()
            && last["content"] == ""
            && last.get("tool_calls").is_none()
    })
}

/// What stays the same in all that is said about a response.
struct Head {
    id: String,
    request_id: String,
    /// The response as it is before the first token.
    fields: Object,
    tokenizer: Arc<Tokenizer>,
}

impl Head {
    fn new(app: &App, body: &Object, request_id: String) -> Head {
        let id = app::id("resp_");
        let echo = |name: &str, default: Value| body.value(name).cloned().unwrap_or(default);
        let fields = json!({
            "id": id,
            "object": "response",
            "created_at": app::unix_time(),
            "status": "in_progress",
            "error": null,
            "incomplete_details": null,
            "instructions": echo("instructions", Value::Null),
            "max_output_tokens": echo("max_output_tokens", Value::Null),
            "metadata": echo("metadata", json!({})),
            "model": app.model.id,
            "output": [],
            "parallel_tool_calls": echo("parallel_tool_calls", true.into()),
            "previous_response_id": null,
            "reasoning": echo("reasoning", json!({"effort": null, "summary": null})),
            "store": false,
            "temperature": echo("temperature", short(app.sampling.temperature).into()),
            "text": echo("text", json!({"format": {"type": "text"}})),
            "tool_choice": echo("tool_choice", "auto".into()),
            "tools": echo("tools", json!([])),
            "top_logprobs": echo("top_logprobs", 0.into()),
            "top_p": echo("top_p", short(app.sampling.top_p).into()),
            "truncation": "disabled",
            "usage": null,
        });
        let fields = fields.as_object().cloned().unwrap_or_default();
        Head { id, request_id, fields, tokenizer: app.tokenizer.clone() }
    }

    /// The response while it comes.
    fn response(&self) -> Value {
        self.fields.clone().into()
    }

    /// The complete response. The log-probabilities move into it.
    fn complete(&self, output: &mut Output, finish: Option<&Finish>, totals: &Totals, lists: &mut Lists) -> Value {
        let mut fields = self.fields.clone();
        let cut = finish == Some(&Finish::Length);
        fields["status"] = if cut { "incomplete" } else { "completed" }.into();
        if cut {
            fields["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let last = output.parts.list().len().saturating_sub(1);
        let status = |i: usize| if cut && i == last { "incomplete" } else { "completed" };
        let items = (0..output.parts.list().len()).map(|i| output.item(i, status(i), &self.tokenizer, lists));
        fields["output"] = items.collect();
        fields["usage"] = json!({
            "input_tokens": totals.prompt,
            "input_tokens_details": {"cached_tokens": totals.cached},
            "output_tokens": totals.generated,
            "output_tokens_details": {"reasoning_tokens": totals.reasoning},
            "total_tokens": totals.prompt + totals.generated,
        });
        fields.insert("timings".into(), totals.timings());
        fields.into()
    }
}

/// The items of a response up to now.
#[derive(Default)]
struct Output {
    parts: Parts,
    /// Ids of the items.
    ids: Vec<String>,
    /// Of the text.
    logprobs: Vec<Logprob>,
}

impl Output {
    fn name_all(&mut self) {
        self.ids = self.parts.list().iter().map(|part| app::id(prefix(part))).collect();
    }

    fn item(&mut self, i: usize, status: &str, tokenizer: &Arc<Tokenizer>, lists: &mut Lists) -> Value {
        let list = self.parts.list();
        // The numbers belong to the text as a whole; they are reported with its first part.
        let logprobs = match &list[i] {
            Part::Text(_) => Reported::list(tokenizer, std::mem::take(&mut self.logprobs), lists),
            _ => json!([]),
        };
        item(&self.ids[i], &list[i], status, logprobs)
    }
}

fn prefix(part: &Part) -> &'static str {
    match part {
        Part::Reasoning(_) => "rs_",
        Part::Text(_) => "msg_",
        Part::Call(_) => "fc_",
    }
}

fn item(id: &str, part: &Part, status: &str, logprobs: Value) -> Value {
    match part {
        Part::Reasoning(text) => json!({
            "id": id, "type": "reasoning", "status": status, "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }),
        Part::Text(text) => json!({
            "id": id, "type": "message", "status": status, "role": "assistant",
            "content": [text_part(text, logprobs)],
        }),
        Part::Call(call) => json!({
            "id": id, "type": "function_call", "status": status,
            "call_id": call.id, "name": call.name, "arguments": call.arguments,
        }),
    }
}

fn text_part(text: &str, logprobs: Value) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

/// The response as it comes.
struct Stream {
    head: Head,
    output: Output,
    finish: Option<Finish>,
    number: u64,
}

impl Stream {
    fn event(&mut self, name: &str, fields: Value, out: &mut Frames) {
        write(&mut self.number, name, fields, out);
    }
}

/// Writes a numbered event.
fn write(number: &mut u64, name: &str, fields: Value, out: &mut Frames) {
    write_with(number, name, fields, Lists::default(), out);
}

/// Writes a numbered event, some lists of which are written later.
fn write_with(number: &mut u64, name: &str, fields: Value, lists: Lists, out: &mut Frames) {
    let mut event = Object::new();
    event.insert("type".into(), name.into());
    event.insert("sequence_number".into(), (*number).into());
    if let Value::Object(fields) = fields {
        event.extend(fields);
    }
    *number += 1;
    out.event_with(name, &event.into(), lists);
}

/// Writes what happened to an item.
fn change(
    number: &mut u64,
    ids: &mut Vec<String>,
    index: usize,
    change: Change<'_>,
    part: &Part,
    logprobs: &mut Value,
    out: &mut Frames,
) {
    if change == Change::Opened {
        ids.push(app::id(prefix(part)));
    }
    let id = ids[index].clone();
    let place = json!({"item_id": id, "output_index": index, "content_index": 0});
    let with = |more: Value| {
        let mut fields = place.as_object().cloned().unwrap_or_default();
        fields.extend(more.as_object().cloned().unwrap_or_default());
        Value::Object(fields)
    };
    match (change, part) {
        (Change::Opened, part) => {
            let mut item = item(&id, part, "in_progress", json!([]));
            if !matches!(part, Part::Call(_)) {
                item["content"] = json!([]);
            }
            write(number, "response.output_item.added", json!({"output_index": index, "item": item}), out);
            if matches!(part, Part::Text(_)) {
                let part = with(json!({"part": text_part("", json!([]))}));
                write(number, "response.content_part.added", part, out);
            }
        }
        (Change::Grew(more), Part::Reasoning(_)) => {
            write(number, "response.reasoning_text.delta", with(json!({"delta": more})), out);
        }
        (Change::Grew(more), Part::Text(_)) => {
            let delta = with(json!({"delta": more, "logprobs": logprobs.take()}));
            *logprobs = json!([]);
            write(number, "response.output_text.delta", delta, out);
        }
        (Change::Grew(more), Part::Call(_)) => {
            write(number, "response.function_call_arguments.delta", with(json!({"delta": more})), out);
        }
        (Change::Closed, part) => {
            match part {
                Part::Reasoning(text) => {
                    write(number, "response.reasoning_text.done", with(json!({"text": text})), out);
                }
                Part::Text(text) => {
                    write(number, "response.output_text.done", with(json!({"text": text, "logprobs": []})), out);
                    let part = with(json!({"part": text_part(text, json!([]))}));
                    write(number, "response.content_part.done", part, out);
                }
                Part::Call(call) => {
                    let done = with(json!({"name": call.name, "arguments": call.arguments}));
                    write(number, "response.function_call_arguments.done", done, out);
                }
            }
            let item = item(&id, part, "completed", json!([]));
            write(number, "response.output_item.done", json!({"output_index": index, "item": item}), out);
        }
    }
}

impl Wire for Stream {
    fn open(&mut self, out: &mut Frames) {
        let response = self.head.response();
        self.event("response.created", json!({"response": response}), out);
        self.event("response.in_progress", json!({"response": response}), out);
    }

    fn step(&mut self, step: Step, out: &mut Frames) {
        let tokenizer = self.head.tokenizer.clone();
        let mut logprobs = json!(step.logprobs.iter().map(|l| Reported::new(&tokenizer, l)).collect::<Vec<_>>());
        self.output.logprobs.extend(step.logprobs);
        let Stream { output: Output { parts, ids, .. }, number, .. } = self;
        for event in step.events {
            parts.take(event, |i, c, part| change(number, ids, i, c, part, &mut logprobs, out));
        }
        self.finish = step.finish.or(self.finish.take());
    }

    fn close(&mut self, totals: &Totals, out: &mut Frames) {
        let Stream { output: Output { parts, ids, .. }, number, .. } = self;
        parts.close(|i, c, part| change(number, ids, i, c, part, &mut json!([]), out));
        let mut lists = Lists::default();
        let response = self.head.complete(&mut self.output, self.finish.as_ref(), totals, &mut lists);
        let name = if self.finish == Some(Finish::Length) { "response.incomplete" } else { "response.completed" };
        write_with(&mut self.number, name, json!({"response": response}), lists, out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        let mut response = self.head.response();
        response["status"] = "failed".into();
        response["error"] = json!({"code": "server_error", "message": error.message});
        tracing::debug!(request = %self.head.request_id, response = %self.head.id, "a response failed");
        self.event("response.failed", json!({"response": response}), out);
    }
}
