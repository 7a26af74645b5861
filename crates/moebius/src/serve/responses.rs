//! `/v1/responses`: OpenAI's newer conversations. The server keeps answers where it is told to ([`super::stored`]).

use std::sync::Arc;

use axum::Json;
use axum::response::IntoResponse;
use engine::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::app::{self, App};
use super::body::Body;
use super::chat::Reported;
use super::conversation::{self, Conversation};
use super::error::ApiError;
use super::fields::{Field, Kind, Object, Read, field, unsupported};
use super::fleet::Fleet;
use super::form;
use super::generate::{Finish, Generation, Job, Logprob, Step, Totals};
use super::images::Images;
use super::limits::{MAX_MESSAGES, MAX_TOOLS, MAX_TOP_LOGPROBS};
use super::parts::{Change, MessagePart, MessageParts};
use super::prepare::{AnswerWish, Prepared, prepare};
use super::routes::{self, Answer, Input, ignoring};
use super::sampling;
use super::sse::{self, Frames, Wire};
use super::stored::{self, Draft};
use super::tools::{self, Dialect, Dialects, Offer};
use super::write::{Lists, short};

/// What the route takes beside the sampling.
pub const FIELDS: &[Field] = &[
    field("input", Kind::Either(&[Kind::Text, Kind::List(&Kind::Object, MAX_MESSAGES)]), "text, or list of items"),
    field("instructions", Kind::Text, "system prompt"),
    field("model", Kind::Text, "model to use; any name if only one is served"),
    field("stream", Kind::Bool, "stream the answer as server-sent events"),
    field("max_output_tokens", sampling::MAX_TOKENS, "maximum number of tokens to generate; -1 for no limit"),
    field("stop", sampling::STOP, "texts that end the answer"),
    field("tools", Kind::List(&Kind::Object, MAX_TOOLS), "functions that the model may call"),
    field(
        "tool_choice",
        Kind::Either(&[Kind::Word(&["none", "auto", "required"]), Kind::Object]),
        "controls which tool, if any, is called",
    ),
    field("parallel_tool_calls", Kind::Bool, "allow several tool calls in an answer"),
    field("text", Kind::Object, "format: constraint on the answer"),
    field(
        "reasoning",
        Kind::Object,
        "effort: passed to the chat template; bounds the thought where that has no variable for it",
    ),
    field("include", Kind::List(&Kind::Text, 32), "message.output_text.logprobs: return log-probabilities"),
    field("top_logprobs", Kind::Int(0, MAX_TOP_LOGPROBS as i128), "number of top alternatives to return per token"),
    field("chat_template_kwargs", Kind::Object, "further variables of the chat template"),
    field("previous_response_id", Kind::Text, "go on with a stored response; requires --store-responses"),
    unsupported("conversation", "the server keeps no conversations; send all items in `input`"),
    unsupported("background", "the server answers while the client waits"),
    field("store", Kind::Bool, "store the response, if the server does so at all (--store-responses)"),
    field("truncation", Kind::Word(&["auto", "disabled"]), "auto: leave out the oldest turns if the context is full"),
    field("metadata", Kind::Object, "returned with the answer"),
    field("user", Kind::Text, "ignored"),
];

const STORES_NOTHING: &str = "the server stores no responses (--store-responses); send all items in `input`";

/// Handles a request.
pub async fn handle(app: Arc<App>, input: Input) -> Answer {
    let Input { body: Body { fields: mut body, mut room, .. }, request_id, owner, .. } = input;
    let mut draft = None;
    match app.common.responses.clone() {
        Some(stored) => {
            let resume = move || {
                let draft = stored.resume(&mut body, owner, |bytes| room.hold_more(bytes))?;
                Ok((body, room, draft))
            };
            (body, room, draft) = app.common.parse(resume).await?;
        }
        None if body.value("previous_response_id").is_some() => {
            let why = format!("is unsupported: {STORES_NOTHING}");
            return Err(ApiError::field("previous_response_id", why));
        }
        None => {}
    }
    let stream = body.flag("stream").unwrap_or(false);
    let stops = sampling::stops(&body, "stop")?;
    let images = Images::take(&mut body, &app)?;
    let (mut conversation, wanted) = conversation_of(&body)?;
    conversation.images = images;
    let Prepared { mut request, parsing, dialects, ignored } = prepare(&app, conversation, wanted, &body).await?;
    request.stop_strings = stops;
    if let Some(n) = sampling::max_tokens(&body, &["max_output_tokens"]) {
        request.max_new_tokens = n;
    }
    let included = |what: &str| body.list("include").is_some_and(|list| list.iter().any(|item| item == what));
    if included("message.output_text.logprobs") || body.size("top_logprobs").is_some_and(|n| n > 0) {
        request.logprobs = Some(body.size("top_logprobs").unwrap_or(0));
    }
    let mut head = ResponseHead::new(&app, &body, dialects, request_id.clone(), draft);
    drop(body);
    let job = Job { requests: vec![request], n: 1, parsing, room };
    let generation = Generation::start(&app, request_id, job).await?;
    if stream {
        let (parts, events) = (MessageParts::default(), ItemEvents::new(head.dialects.clone()));
        let stream = ResponseStream { head, parts, events, logprobs: Vec::new(), finish: None };
        return Ok(ignoring(sse::respond(generation, stream), ignored));
    }
    let (answers, totals, room) = generation.collect().await?;
    let answer = answers.into_iter().next().unwrap_or_default();
    let mut output = Output { parts: answer.parts, ids: Vec::new(), logprobs: answer.logprobs };
    output.name_all(&head.dialects);
    let mut lists = Lists::default();
    let response = head.complete(&mut output, answer.finish.as_ref(), &totals, &mut lists);
    Ok(ignoring(lists.respond(&response, room), ignored))
}

/// Handles a request for a stored response.
pub async fn get(fleet: Arc<Fleet>, input: Input) -> Answer {
    let id = input.tail.unwrap_or_default();
    let stored = fleet.common.responses.as_ref().and_then(|stored| stored.get(&id, input.owner));
    stored.map(|response| Json(response).into_response()).ok_or_else(stored::no_such_response)
}

/// Handles a request for the items that a stored response answers.
pub async fn input_items(fleet: Arc<Fleet>, input: Input) -> Answer {
    let id = input.tail.unwrap_or_default();
    let asked = |name: &str| routes::asked(&input.query, name);
    let limit = asked("limit").map_or(json!(20), |n| n.parse::<i64>().map_or(json!(n), Value::from));
    Kind::Int(1, 100).check("limit", &limit)?;
    let order = asked("order").unwrap_or_else(|| "desc".into());
    Kind::Word(&["asc", "desc"]).check("order", &order.as_str().into())?;
    let (after, most) = (asked("after"), limit.as_u64().unwrap_or(20) as usize);
    let stored = fleet.common.responses.as_ref();
    let list = stored.and_then(|stored| stored.inputs(&id, input.owner, after.as_deref(), most, order == "asc"));
    list.map(|list| Json(list).into_response()).ok_or_else(stored::no_such_response)
}

/// Handles a request to delete one.
pub async fn delete(fleet: Arc<Fleet>, input: Input) -> Answer {
    let id = input.tail.unwrap_or_default();
    match fleet.common.responses.as_ref().is_some_and(|stored| stored.delete(&id, input.owner)) {
        true => Ok(Json(json!({"id": id, "object": "response", "deleted": true})).into_response()),
        false => Err(stored::no_such_response()),
    }
}

/// Returns the conversation of a body, and what is requested of the answer.
pub fn conversation_of(body: &Object) -> Result<(Conversation, AnswerWish), ApiError> {
    let trims = body.text("truncation").map(|word| word == "auto");
    let mut out = Conversation { kwargs: conversation::kwargs(body)?, trims, ..Conversation::default() };
    let mut offer = Offer::default();
    if let Some(text) = body.text("instructions") {
        out.messages.push(json!({"role": "system", "content": text}));
    }
    match body.value("input") {
        Some(Value::String(text)) => out.messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => {
            let mut reader = ItemReader { messages: out.messages, offer: Offer::default(), ignored: Vec::new() };
            items.iter().enumerate().try_for_each(|(i, item)| reader.add(i, item))?;
            out.messages = reader.messages;
            out.ignored = reader.ignored;
            offer = reader.offer;
        }
        _ => return Err(ApiError::field("input", "is empty")),
    }
    if let Some(effort) = body.object("reasoning").and_then(|reasoning| reasoning.value("effort")) {
        Kind::Text.check("reasoning.effort", effort)?;
        out.kwargs.entry("reasoning_effort").or_insert_with(|| effort.clone());
    }
    offer.add_responses("tools", body.list("tools").map_or(&[][..], Vec::as_slice))?;
    out.offer(offer);
    let choice = tools::openai_choice(body.value("tool_choice"))?;
    let format = body.object("text").and_then(|text| text.object("format"));
    let form = match format {
        Some(format) => {
            form::of_format(format, format.value("schema"), "text.format")?.map(|form| form.opened_by(body))
        }
        None => form::of(body)?,
    };
    let parallel = body.flag("parallel_tool_calls");
    Ok((out, AnswerWish { choice, form, parallel, ..AnswerWish::default() }))
}

/// Reads the items of an input.
struct ItemReader {
    messages: Vec<Value>,
    /// Tools that items add.
    offer: Offer,
    ignored: Vec<String>,
}

impl ItemReader {
    /// Adds an item to the messages. Calls join the answer that they are part of; what has no text is left out.
    fn add(&mut self, i: usize, item: &Value) -> Result<(), ApiError> {
        let at = format!("input[{i}]");
        let text =
            |name: &str| item[name].as_str().ok_or_else(|| ApiError::field(format!("{at}.{name}"), "must be a string"));
        let id = || item["call_id"].as_str().or(item["id"].as_str()).unwrap_or_default();
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
                match unfinished(&mut self.messages).filter(|_| role == "assistant") {
                    Some(last) => last["content"] = said.into(),
                    None => self.messages.push(json!({"role": role, "content": said})),
                }
            }
            "function_call" => {
                let arguments = conversation::arguments(text("arguments")?);
                let function = json!({"name": text("name")?, "arguments": arguments});
                self.add_call(json!({"id": text("call_id")?, "type": "function", "function": function}));
            }
            "custom_tool_call" => {
                let call = item.as_object().cloned().unwrap_or_default();
                self.add_call(conversation::custom_call(&call, Some(text("name")?), item["input"].as_str()));
            }
            // Calls of tools that clients of OpenAI run, and their results.
            kind @ ("local_shell_call" | "shell_call" | "apply_patch_call") => {
                let what = [&item["action"], &item["operation"]].into_iter().find(|what| what.is_object());
                let name = kind.trim_end_matches("_call");
                let function = json!({"name": name, "arguments": what.cloned().unwrap_or_else(|| json!({}))});
                self.add_call(json!({"id": id(), "type": "function", "function": function}));
            }
            "function_call_output"
            | "custom_tool_call_output"
            | "local_shell_call_output"
            | "shell_call_output"
            | "apply_patch_call_output" => {
                let said = output_text(&format!("{at}.output"), &item["output"])?;
                self.messages.push(json!({"role": "tool", "tool_call_id": id(), "content": said}));
            }
            "reasoning" => {
                let parts = item["content"].as_array().into_iter().flatten();
                let thought: Vec<&str> = parts.filter_map(|part| part["text"].as_str()).collect();
                if !thought.is_empty() {
                    let thought = thought.join("\n");
                    self.messages.push(json!({"role": "assistant", "content": "", "reasoning_content": thought}));
                }
            }
            "additional_tools" => {
                let list = item["tools"].as_array().map_or(&[][..], Vec::as_slice);
                self.offer.add_responses(&format!("{at}.tools"), list)?;
            }
            "item_reference" => {
                return Err(ApiError::field(format!("{at}.type"), format!("is \"item_reference\": {STORES_NOTHING}")));
            }
            other => match item.get("content").filter(|content| content.is_array() || content.is_string()) {
                // What another agent says, and its kin.
                Some(content) => {
                    let said = conversation::text_of(&format!("{at}.content"), content)?;
                    let said = item["author"].as_str().map_or(said.clone(), |author| format!("{author}: {said}"));
                    self.messages.push(json!({"role": "user", "content": said}));
                }
                None => self.ignored.push(format!("{at} ({})", tools::shown(other))),
            },
        }
        Ok(())
    }

    fn add_call(&mut self, call: Value) {
        if self.messages.last().is_none_or(|last| last["role"] != "assistant") {
            self.messages.push(json!({"role": "assistant", "content": ""}));
        }
        let Some(last) = self.messages.last_mut() else { return };
        match last["tool_calls"].as_array_mut() {
            Some(calls) => calls.push(call),
            None => last["tool_calls"] = json!([call]),
        }
    }
}

/// Returns the text of a call's result: a text, parts, or what a shell wrote.
fn output_text(at: &str, output: &Value) -> Result<String, ApiError> {
    let is_shell = |part: &Value| part.get("stdout").is_some() || part.get("stderr").is_some();
    match output {
        Value::Null => Ok(String::new()),
        Value::Array(parts) if parts.iter().any(is_shell) => {
            let texts = parts.iter().flat_map(|part| ["stdout", "stderr"].map(|name| part[name].as_str()));
            Ok(texts.flatten().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n"))
        }
        Value::Object(_) => Ok(output.to_string()),
        output => conversation::text_of(at, output),
    }
}

/// Returns the thought that an answer begins with, while nothing else of it has come.
fn unfinished(messages: &mut [Value]) -> Option<&mut Value> {
    messages.last_mut().filter(|last| {
        last["role"] == "assistant"
            && last.get("reasoning_content").is_some()
            && last["content"] == ""
            && last.get("tool_calls").is_none()
    })
}

/// What stays the same in all that is said about a response.
struct ResponseHead {
    id: String,
    request_id: String,
    /// The response as it is before the first token.
    fields: Object,
    tokenizer: Arc<Tokenizer>,
    dialects: Dialects,
    /// What is stored with the response when that is complete.
    draft: Option<Draft>,
}

impl ResponseHead {
    fn new(app: &App, body: &Object, dialects: Dialects, request_id: String, draft: Option<Draft>) -> ResponseHead {
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
            "previous_response_id": echo("previous_response_id", Value::Null),
            "reasoning": echo("reasoning", json!({"effort": null, "summary": null})),
            "store": draft.is_some(),
            "temperature": echo("temperature", short(app.sampling.temperature).into()),
            "text": echo("text", json!({"format": {"type": "text"}})),
            "tool_choice": echo("tool_choice", "auto".into()),
            "tools": echo("tools", json!([])),
            "top_logprobs": echo("top_logprobs", 0.into()),
            "top_p": echo("top_p", short(app.sampling.top_p).into()),
            "truncation": echo("truncation", "disabled".into()),
            "usage": null,
        });
        let fields = fields.as_object().cloned().unwrap_or_default();
        ResponseHead { id, request_id, fields, tokenizer: app.tokenizer.clone(), dialects, draft }
    }

    /// Returns the response while it comes.
    fn response(&self) -> Value {
        self.fields.clone().into()
    }

    /// Returns the complete response, which is stored where it is to be. The log-probabilities move into it.
    fn complete(&mut self, output: &mut Output, finish: Option<&Finish>, totals: &Totals, lists: &mut Lists) -> Value {
        let mut fields = self.fields.clone();
        let cut = finish == Some(&Finish::Length);
        fields["status"] = if cut { "incomplete" } else { "completed" }.into();
        if cut {
            fields["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let last = output.parts.list().len().saturating_sub(1);
        let items = (0..=last).filter(|_| !output.parts.list().is_empty()).collect::<Vec<_>>();
        let items = items.into_iter().map(|i| output.item(i, cut && i == last, self, lists));
        fields["output"] = items.collect();
        fields["usage"] = json!({
            "input_tokens": totals.prompt,
            "input_tokens_details": {"cached_tokens": totals.cached},
            "output_tokens": totals.generated,
            "output_tokens_details": {"reasoning_tokens": totals.reasoning},
            "total_tokens": totals.prompt + totals.generated,
        });
        fields.insert("timings".into(), totals.timings());
        if let Some(draft) = self.draft.take() {
            // Log-probabilities are for who asked for them.
            let item = |(i, part): (usize, &MessagePart)| {
                let status = status(part, cut && i == last);
                item(&output.ids[i], part, status, json!([]), &self.dialects)
            };
            let items: Vec<Value> = output.parts.list().iter().enumerate().map(item).collect();
            draft.keep(&self.id, &fields, &items);
        }
        fields.into()
    }
}

/// The items of a response.
struct Output {
    parts: MessageParts,
    /// Ids of the items.
    ids: Vec<String>,
    /// Of the text.
    logprobs: Vec<Logprob>,
}

impl Output {
    fn name_all(&mut self, dialects: &Dialects) {
        self.ids = self.parts.list().iter().map(|part| app::id(prefix(part, dialects))).collect();
    }

    fn item(&mut self, i: usize, is_cut: bool, head: &ResponseHead, lists: &mut Lists) -> Value {
        let list = self.parts.list();
        let status = status(&list[i], is_cut);
        // The numbers belong to the text as a whole; they are reported with its first part.
        let logprobs = match &list[i] {
            MessagePart::Text(_) => Reported::list(&head.tokenizer, std::mem::take(&mut self.logprobs), lists),
            _ => json!([]),
        };
        item(&self.ids[i], &list[i], status, logprobs, &head.dialects)
    }
}

fn prefix(part: &MessagePart, dialects: &Dialects) -> &'static str {
    match part {
        MessagePart::Reasoning(_) => "rs_",
        MessagePart::Text(_) => "msg_",
        MessagePart::Call(call) if dialects.is_custom(&call.name) => "ctc_",
        MessagePart::Call(_) => "fc_",
    }
}

/// Status of an item to which nothing more comes.
fn status(part: &MessagePart, is_cut: bool) -> &'static str {
    let is_whole = match part {
        MessagePart::Call(call) => call.complete,
        MessagePart::Reasoning(_) | MessagePart::Text(_) => !is_cut,
    };
    if is_whole { "completed" } else { "incomplete" }
}

fn item(id: &str, part: &MessagePart, status: &str, logprobs: Value, dialects: &Dialects) -> Value {
    match part {
        MessagePart::Reasoning(text) => json!({
            "id": id, "type": "reasoning", "status": status, "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }),
        MessagePart::Text(text) => json!({
            "id": id, "type": "message", "status": status, "role": "assistant",
            "content": [text_part(text, logprobs)],
        }),
        MessagePart::Call(call) => match dialects.of(&call.name) {
            None => json!({
                "id": id, "type": "function_call", "status": status,
                "call_id": call.id, "name": call.name, "arguments": call.arguments,
            }),
            Some(Dialect::Namespaced { name, namespace }) => json!({
                "id": id, "type": "function_call", "status": status,
                "call_id": call.id, "name": name, "namespace": namespace, "arguments": call.arguments,
            }),
            Some(Dialect::Custom) => json!({
                "id": id, "type": "custom_tool_call", "status": status,
                "call_id": call.id, "name": call.name, "input": tools::custom_input(call),
            }),
        },
    }
}

fn text_part(text: &str, logprobs: Value) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

/// The response as it comes.
struct ResponseStream {
    head: ResponseHead,
    parts: MessageParts,
    events: ItemEvents,
    /// Of the text up to now.
    logprobs: Vec<Logprob>,
    finish: Option<Finish>,
}

/// Writer of numbered events about a response and its items.
struct ItemEvents {
    /// Number of the next event.
    number: u64,
    /// Ids of the items up to now.
    ids: Vec<String>,
    /// Log-probabilities for the next piece of text, a list.
    logprobs: Value,
    dialects: Dialects,
    /// A limit has ended the answer.
    is_cut: bool,
}

impl ItemEvents {
    fn new(dialects: Dialects) -> ItemEvents {
        ItemEvents { number: 0, ids: Vec::new(), logprobs: json!([]), dialects, is_cut: false }
    }

    fn write(&mut self, name: &str, fields: Value, out: &mut Frames) {
        self.write_with(name, fields, Lists::default(), out);
    }

    /// Writes an event, some lists of which are written later.
    fn write_with(&mut self, name: &str, fields: Value, lists: Lists, out: &mut Frames) {
        let mut event = Object::new();
        event.insert("type".into(), name.into());
        event.insert("sequence_number".into(), self.number.into());
        if let Value::Object(fields) = fields {
            event.extend(fields);
        }
        self.number += 1;
        out.event_with(name, &event.into(), lists);
    }

    /// Writes an event with the place of an item.
    fn write_at(&mut self, index: usize, name: &str, more: Value, out: &mut Frames) {
        let mut fields = json!({"item_id": self.ids[index], "output_index": index, "content_index": 0});
        if let (Value::Object(fields), Value::Object(more)) = (&mut fields, more) {
            fields.extend(more);
        }
        self.write(name, fields, out);
    }

    /// Writes a change of an item.
    fn change(&mut self, index: usize, change: Change<'_>, part: &MessagePart, out: &mut Frames) {
        match change {
            Change::Opened => self.opened(index, part, out),
            Change::Grew(more) => self.grew(index, more, part, out),
            Change::Closed => self.closed(index, part, out),
        }
    }

    fn opened(&mut self, index: usize, part: &MessagePart, out: &mut Frames) {
        self.ids.push(app::id(prefix(part, &self.dialects)));
        let mut item = item(&self.ids[index], part, "in_progress", json!([]), &self.dialects);
        if !matches!(part, MessagePart::Call(_)) {
            item["content"] = json!([]);
        }
        self.write("response.output_item.added", json!({"output_index": index, "item": item}), out);
        if matches!(part, MessagePart::Text(_)) {
            let part = json!({"part": text_part("", json!([]))});
            self.write_at(index, "response.content_part.added", part, out);
        }
    }

    fn grew(&mut self, index: usize, more: &str, part: &MessagePart, out: &mut Frames) {
        let (name, fields) = match part {
            MessagePart::Reasoning(_) => ("response.reasoning_text.delta", json!({"delta": more})),
            MessagePart::Text(_) => {
                let logprobs = std::mem::replace(&mut self.logprobs, json!([]));
                ("response.output_text.delta", json!({"delta": more, "logprobs": logprobs}))
            }
            // Its text is known when the arguments are whole.
            MessagePart::Call(call) if self.dialects.is_custom(&call.name) => return,
            MessagePart::Call(_) => ("response.function_call_arguments.delta", json!({"delta": more})),
        };
        self.write_at(index, name, fields, out);
    }

    fn closed(&mut self, index: usize, part: &MessagePart, out: &mut Frames) {
        match part {
            MessagePart::Reasoning(text) => {
                self.write_at(index, "response.reasoning_text.done", json!({"text": text}), out);
            }
            MessagePart::Text(text) => {
                self.write_at(index, "response.output_text.done", json!({"text": text, "logprobs": []}), out);
                let part = json!({"part": text_part(text, json!([]))});
                self.write_at(index, "response.content_part.done", part, out);
            }
            // A call that was cut off is never told as done.
            MessagePart::Call(call) if !call.complete => {}
            MessagePart::Call(call) if self.dialects.is_custom(&call.name) => {
                let input = tools::custom_input(call);
                self.write_at(index, "response.custom_tool_call_input.delta", json!({"delta": input}), out);
                self.write_at(index, "response.custom_tool_call_input.done", json!({"input": input}), out);
            }
            MessagePart::Call(call) => {
                let name = match self.dialects.of(&call.name) {
                    Some(Dialect::Namespaced { name, .. }) => name,
                    Some(Dialect::Custom) | None => &call.name,
                };
                let done = json!({"name": name, "arguments": call.arguments});
                self.write_at(index, "response.function_call_arguments.done", done, out);
            }
        }
        let status = status(part, self.is_cut);
        let item = item(&self.ids[index], part, status, json!([]), &self.dialects);
        self.write("response.output_item.done", json!({"output_index": index, "item": item}), out);
    }
}

impl Wire for ResponseStream {
    fn open(&mut self, out: &mut Frames) {
        let response = self.head.response();
        self.events.write("response.created", json!({"response": response}), out);
        self.events.write("response.in_progress", json!({"response": response}), out);
    }

    fn step(&mut self, step: Step, out: &mut Frames) {
        let reported = step.logprobs.iter().map(|logprob| Reported::new(&self.head.tokenizer, logprob));
        // A piece of text carries the numbers of its step alone.
        self.events.logprobs = json!(reported.collect::<Vec<_>>());
        self.logprobs.extend(step.logprobs);
        let ResponseStream { parts, events, .. } = self;
        for event in step.events {
            parts.take(event, |index, change, part| events.change(index, change, part, out));
        }
        self.finish = step.finish.or(self.finish.take());
    }

    fn close(&mut self, totals: &Totals, out: &mut Frames) {
        let ResponseStream { head, parts, events, .. } = self;
        events.logprobs = json!([]);
        events.is_cut = self.finish == Some(Finish::Length);
        parts.close(|index, change, part| events.change(index, change, part, out));
        let (parts, ids, logprobs) =
            (std::mem::take(parts), std::mem::take(&mut events.ids), std::mem::take(&mut self.logprobs));
        let mut lists = Lists::default();
        let mut output = Output { parts, ids, logprobs };
        let response = head.complete(&mut output, self.finish.as_ref(), totals, &mut lists);
        let name = if self.finish == Some(Finish::Length) { "response.incomplete" } else { "response.completed" };
        self.events.write_with(name, json!({"response": response}), lists, out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        let mut response = self.head.response();
        response["status"] = "failed".into();
        response["error"] = json!({"code": "server_error", "message": error.message});
        tracing::debug!(request = %self.head.request_id, response = %self.head.id, "a response failed");
        self.events.write("response.failed", json!({"response": response}), out);
    }
}
