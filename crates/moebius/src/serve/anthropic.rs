//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's conversations.

use std::sync::Arc;

use axum::Json;
use axum::response::IntoResponse;
use serde::Serialize;
use serde_json::{Value, json};

use super::app::{self, App};
use super::body::Body;
use super::conversation::{self, Conversation, Fits};
use super::error::{ApiError, Style};
use super::fields::{Field, Kind, Object, Read, field};
use super::form;
use super::generate::{Finish, Generation, Job, Step, Totals};
use super::images::Images;
use super::limits::{MAX_MESSAGES, MAX_PARTS, MAX_TOOLS};
use super::parts::{Change, MessagePart, MessageParts};
use super::prepare::{AnswerWish, Prepared, prepare};
use super::routes::{Answer, Input, ignoring};
use super::sampling;
use super::sse::{self, Frames, Wire};
use super::tools::{self, Offer};

const TEXT_OR_BLOCKS: Kind = Kind::Either(&[Kind::Text, Kind::List(&Kind::Object, MAX_PARTS)]);

/// What both routes take.
pub const CONVERSATION: &[Field] = &[
    field("messages", Kind::List(&Kind::Object, MAX_MESSAGES), "messages of the conversation, from user and assistant"),
    field("model", Kind::Text, "model to use; any name if only one is served"),
    field("system", TEXT_OR_BLOCKS, "system prompt"),
    field("tools", Kind::List(&Kind::Object, MAX_TOOLS), "tools that the model may call"),
    field("tool_choice", Kind::Object, "controls which tool, if any, is called: auto, any, tool, none"),
    field(
        "thinking",
        Kind::Object,
        "enabled or disabled, for models whose chat template has a switch; budget_tokens: tokens of a thought at most",
    ),
];

/// What `/v1/messages` takes beside the conversation and the sampling.
pub const FIELDS: &[Field] = &[
    field("max_tokens", Kind::Int(1, 1 << 31), "maximum number of tokens to generate"),
    field("stream", Kind::Bool, "stream the answer as server-sent events"),
    field("stop_sequences", sampling::STOP, "texts that end the answer"),
    field("output_config", Kind::Object, "format: json_schema with the schema of the answer"),
    field("output_format", Kind::Object, "older place of output_config.format"),
    field("metadata", Kind::Object, "ignored"),
];

/// `/v1/messages`.
pub async fn handle(app: Arc<App>, input: Input) -> Answer {
    let Input { body: Body { fields: mut body, room, .. }, request_id, .. } = input;
    let images = Images::take(&mut body, &app)?;
    let (mut conversation, wanted) = conversation_of(&body)?;
    conversation.images = images;
    let stops = sampling::stops(&body, "stop_sequences")?;
    let stream = body.flag("stream").unwrap_or(false);
    let Prepared { mut request, parsing, ignored, .. } = prepare(&app, conversation, wanted, &body).await?;
    request.stop_strings = stops;
    request.max_new_tokens = body.size("max_tokens").unwrap_or(usize::MAX);
    let head = MessageHead {
        id: app::id("msg_"),
        model: app.model.id.clone(),
        n_prompt: request.tokens.len(),
        request_id: request_id.clone(),
    };
    drop(body);
    let job = Job { requests: vec![request], n: 1, parsing, room };
    let generation = Generation::start(&app, request_id, job).await?;
    if stream {
        let stream = MessageStream { head, parts: MessageParts::default(), finish: None };
        return Ok(ignoring(sse::respond(generation, stream), ignored));
    }
    let (answers, totals, _) = generation.collect().await?;
    let answer = answers.into_iter().next().unwrap_or_default();
    let content = answer.parts.list().iter().map(block).collect();
    let mut message = head.message(content, usage(&totals));
    let (reason, sequence) = stop_reason(answer.finish.as_ref());
    message["stop_reason"] = reason;
    message["stop_sequence"] = sequence;
    message["timings"] = totals.timings();
    Ok(ignoring(Json(message).into_response(), ignored))
}

/// `/v1/messages/count_tokens`.
pub async fn count_tokens(app: Arc<App>, input: Input) -> Answer {
    let mut body = input.body.fields;
    let images = Images::take(&mut body, &app)?;
    let (mut conversation, _) = conversation_of(&body)?;
    conversation.images = images;
    let prompt = conversation.render(&app, Fits::Any).await?;
    Ok(Json(json!({"input_tokens": prompt.tokens.len()})).into_response())
}

/// Returns the conversation of a body, in the form of the templates.
pub fn conversation_of(body: &Object) -> Result<(Conversation, AnswerWish), ApiError> {
    let mut out = Conversation::default();
    if let Some(system) = body.value("system") {
        out.messages.push(json!({"role": "system", "content": conversation::text_of("system", system)?}));
    }
    let list = body.list("messages").map_or(&[][..], Vec::as_slice);
    if list.is_empty() {
        return Err(ApiError::field("messages", "is empty"));
    }
    for (i, message) in list.iter().enumerate() {
        let at = format!("messages[{i}]");
        let content = message.get("content").filter(|content| !content.is_null());
        let content = content.ok_or_else(|| ApiError::field(format!("{at}.content"), "is missing"))?;
        match message["role"].as_str() {
            Some("user") => user(&at, content, &mut out.messages)?,
            Some("assistant") => out.messages.push(assistant(&at, content)?),
            Some("system") => {
                let text = conversation::text_of(&format!("{at}.content"), content)?;
                out.messages.push(json!({"role": "system", "content": text}));
            }
            _ => return Err(ApiError::field(format!("{at}.role"), "must be one of user, assistant")),
        }
    }
    // A prefilled answer: the model continues it.
    let last = out.messages.last();
    if last.is_some_and(|m| m["role"] == "assistant" && m.get("tool_calls").is_none()) {
        out.continue_last()?;
    }
    let list = body.list("tools").map_or(&[][..], Vec::as_slice);
    out.offer(Offer::of_anthropic(list)?);
    let thinking = body.object("thinking");
    if let Some(thinking) = thinking {
        let on = match thinking.text("type") {
            Some("disabled") => false,
            Some("enabled" | "adaptive") => true,
            _ => return Err(ApiError::field("thinking.type", "must be one of enabled, disabled, adaptive")),
        };
        out.kwargs.insert("enable_thinking".into(), on.into());
        let budget = thinking.value("budget_tokens");
        budget.map_or(Ok(()), |budget| Kind::Int(0, 1 << 31).check("thinking.budget_tokens", budget))?;
    }
    let enabled = thinking.filter(|thinking| thinking.text("type") == Some("enabled"));
    let most_thought = enabled.and_then(|thinking| thinking.size("budget_tokens"));
    let mut wanted = AnswerWish { form: form::of_anthropic(body)?, most_thought, ..AnswerWish::default() };
    if let Some(choice) = body.object("tool_choice") {
        wanted.choice = tools::anthropic_choice(choice)?;
        wanted.parallel = choice.flag("disable_parallel_tool_use").map(|disabled| !disabled);
    }
    Ok((out, wanted))
}

/// Blocks of a message, each with its place.
fn blocks<'a>(at: &str, content: &'a Value) -> Result<Vec<(String, &'a str, &'a Object)>, ApiError> {
    Kind::List(&Kind::Object, MAX_PARTS).check(&format!("{at}.content"), content)?;
    let list = content.as_array().into_iter().flatten().filter_map(Value::as_object).enumerate();
    list.map(|(i, block)| {
        let at = format!("{at}.content[{i}]");
        let kind = block.text("type").ok_or_else(|| ApiError::field(format!("{at}.type"), "must be a string"))?;
        Ok((at, kind, block))
    })
    .collect()
}

fn text<'a>(at: &str, block: &'a Object, name: &str) -> Result<&'a str, ApiError> {
    block.text(name).ok_or_else(|| ApiError::field(format!("{at}.{name}"), "must be a string"))
}

/// A user's message: results of tools become separate messages, in front of what the user says.
fn user(at: &str, content: &Value, out: &mut Vec<Value>) -> Result<(), ApiError> {
    if let Value::String(text) = content {
        out.push(json!({"role": "user", "content": text}));
        return Ok(());
    }
    let mut said = Vec::new();
    for (at, kind, block) in blocks(at, content)? {
        match kind {
            "tool_result" => {
                let id = text(&at, block, "tool_use_id")?;
                let result = match block.value("content") {
                    None => String::new(),
                    Some(content) => conversation::text_of(&format!("{at}.content"), content)?,
                };
                let result = if block.flag("is_error").unwrap_or(false) { format!("Error: {result}") } else { result };
                out.push(json!({"role": "tool", "tool_call_id": id, "content": result}));
            }
            _ => said.extend(conversation::part_text(&at, block)?),
        }
    }
    if !said.is_empty() {
        out.push(json!({"role": "user", "content": said.join("\n")}));
    }
    Ok(())
}

/// Returns an earlier answer.
fn assistant(at: &str, content: &Value) -> Result<Value, ApiError> {
    if let Value::String(text) = content {
        return Ok(json!({"role": "assistant", "content": text}));
    }
    let (mut said, mut thought, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (at, kind, block) in blocks(at, content)? {
        match kind {
            "thinking" => thought.push(text(&at, block, "thinking")?),
            "redacted_thinking" => {}
            "tool_use" => {
                let (id, name) = (text(&at, block, "id")?, text(&at, block, "name")?);
                let input = match block.value("input") {
                    Some(Value::String(text)) => conversation::arguments(text),
                    Some(input) if input.is_object() => input.clone(),
                    Some(other) => conversation::arguments(&other.to_string()),
                    None => json!({}),
                };
                calls.push(json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}}));
            }
            _ => said.extend(conversation::part_text(&at, block)?),
        }
    }
    let mut message = json!({"role": "assistant", "content": said.join("\n")});
    if !thought.is_empty() {
        message["reasoning_content"] = thought.join("\n").into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    Ok(message)
}

/// What the answer's events share.
struct MessageHead {
    id: String,
    model: String,
    n_prompt: usize,
    request_id: String,
}

impl MessageHead {
    fn message(&self, content: Vec<Value>, usage: Value) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage,
        })
    }
}

/// Anthropic counts cached tokens beside the others, not among them.
fn usage(totals: &Totals) -> Value {
    json!({
        "input_tokens": totals.prompt - totals.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.cached,
        "output_tokens": totals.generated,
    })
}

fn stop_reason(finish: Option<&Finish>) -> (Value, Value) {
    match finish {
        Some(Finish::StopString(text)) => (json!("stop_sequence"), json!(text)),
        Some(Finish::Length) => (json!("max_tokens"), Value::Null),
        Some(Finish::ToolCalls) => (json!("tool_use"), Value::Null),
        Some(Finish::Stop) | None => (json!("end_turn"), Value::Null),
    }
}

/// Returns a part as a block.
fn block(part: &MessagePart) -> Value {
    match part {
        MessagePart::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        MessagePart::Text(text) => json!({"type": "text", "text": text}),
        MessagePart::Call(call) => {
            json!({"type": "tool_use", "id": call.id, "name": call.name, "input": call.object()})
        }
    }
}

/// The answer as it comes.
struct MessageStream {
    head: MessageHead,
    parts: MessageParts,
    finish: Option<Finish>,
}

/// An event that adds to a part.
#[derive(Serialize)]
struct BlockDelta<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    index: usize,
    delta: PartDelta<'a>,
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum PartDelta<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'static str },
}

/// Writes a part's change.
fn change(out: &mut Frames, index: usize, change: Change<'_>, part: &MessagePart) {
    let delta = |out: &mut Frames, delta: PartDelta<'_>| {
        let kind = "content_block_delta";
        out.event(kind, &BlockDelta { kind, index, delta });
    };
    match (change, part) {
        (Change::Opened, part) => {
            let block = json!({"type": "content_block_start", "index": index, "content_block": block(part)});
            out.event("content_block_start", &block);
        }
        (Change::Grew(more), MessagePart::Reasoning(_)) => {
            delta(out, PartDelta::Thinking { thinking: more });
        }
        (Change::Grew(more), MessagePart::Text(_)) => delta(out, PartDelta::Text { text: more }),
        (Change::Grew(more), MessagePart::Call(_)) => {
            delta(out, PartDelta::InputJson { partial_json: more });
        }
        (Change::Closed, part) => {
            if matches!(part, MessagePart::Reasoning(_)) {
                delta(out, PartDelta::Signature { signature: "" });
            }
            out.event("content_block_stop", &json!({"type": "content_block_stop", "index": index}));
        }
    }
}

impl Wire for MessageStream {
    fn open(&mut self, out: &mut Frames) {
        // What the cache had is known when the prompt is computed; the last event says it.
        let usage = json!({
            "input_tokens": self.head.n_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        });
        let message = self.head.message(Vec::new(), usage);
        out.event("message_start", &json!({"type": "message_start", "message": message}));
    }

    fn step(&mut self, step: Step, out: &mut Frames) {
        for event in step.events {
            self.parts.take(event, |i, c, part| change(out, i, c, part));
        }
        self.finish = step.finish.or(self.finish.take());
    }

    fn close(&mut self, totals: &Totals, out: &mut Frames) {
        self.parts.close(|i, c, part| change(out, i, c, part));
        let (reason, sequence) = stop_reason(self.finish.as_ref());
        out.event(
            "message_delta",
            &json!({
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": usage(totals),
                "timings": totals.timings(),
            }),
        );
        out.event("message_stop", &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        out.event("error", &error.json(Style::Anthropic, &self.head.request_id));
    }

    fn idle(&mut self, out: &mut Frames) {
        out.event("ping", &json!({"type": "ping"}));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deltas_have_anthropics_form() {
        for (delta, expected) in [
            (PartDelta::Text { text: "a" }, json!({"type": "text_delta", "text": "a"})),
            (PartDelta::Thinking { thinking: "b" }, json!({"type": "thinking_delta", "thinking": "b"})),
            (PartDelta::InputJson { partial_json: "{" }, json!({"type": "input_json_delta", "partial_json": "{"})),
            (PartDelta::Signature { signature: "" }, json!({"type": "signature_delta", "signature": ""})),
        ] {
            let mut out = Frames::default();
            out.event("content_block_delta", &BlockDelta { kind: "content_block_delta", index: 2, delta });
            let data = json!({"type": "content_block_delta", "index": 2, "delta": expected});
            assert_eq!(out.text(), format!("event: content_block_delta\ndata: {data}\n\n"));
        }
    }
}
