//! `/v1/chat/completions`: OpenAI's conversations.

use std::sync::Arc;

use engine::formats::Event;
use engine::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Value, json};

use super::app::{self, App};
use super::body::Body;
use super::conversation::{self, Conversation};
use super::error::{ApiError, Style};
use super::fields::{Field, Kind, Object, Read, field};
use super::generate::{Collected, Finish, Generation, Job, Logprob, Step, Totals, token_text};
use super::limits::{MAX_CHOICES, MAX_MESSAGES, MAX_TOOLS, MAX_TOP_LOGPROBS};
use super::parts::Part;
use super::prepare::{Wanted, prepare};
use super::routes::{Answer, Input};
use super::sampling;
use super::sse::{self, Frames, Wire};
use super::write::{self, Lists};
use super::{form, tools};

/// What the route takes beside the sampling.
pub const FIELDS: &[Field] = &[
    field("messages", Kind::List(&Kind::Object, MAX_MESSAGES), "the conversation"),
    field("model", Kind::Text, "which model answers; the only one has any name"),
    field("stream", Kind::Bool, "send the answer as it comes"),
    field("stream_options", Kind::Object, "include_usage: a last event with the usage"),
    field("n", Kind::Int(1, MAX_CHOICES as i128), "how many answers; answer i has seed + i"),
    field("max_completion_tokens", sampling::MAX_TOKENS, "most tokens of an answer; -1 is no limit"),
    field("max_tokens", sampling::MAX_TOKENS, "the older name of max_completion_tokens"),
    field("n_predict", sampling::MAX_TOKENS, "llama.cpp's name of it"),
    field("stop", sampling::STOP, "texts that end the answer"),
    field("logprobs", Kind::Bool, "report the tokens' log-probabilities"),
    field("top_logprobs", Kind::Int(0, MAX_TOP_LOGPROBS as i128), "and so many alternatives"),
    field("tools", Kind::List(&Kind::Object, MAX_TOOLS), "functions that the model may call"),
    field("tool_choice", Kind::Either(&[Kind::Word(&["none", "auto", "required"]), Kind::Object]), "whether it does"),
    field("parallel_tool_calls", Kind::Bool, "whether it may call several"),
    field("reasoning_effort", Kind::Text, "handed to the template"),
    field("chat_template_kwargs", Kind::Object, "further variables of the template, such as enable_thinking"),
    field("continue_final_message", Kind::Bool, "the last message is the beginning of the answer"),
    field("routing", Kind::Bool, "report which experts worked on each token, in the order of /v1/routing"),
    field("functions", Kind::List(&Kind::Object, MAX_TOOLS), "not offered: the older form of `tools`"),
    field("function_call", Kind::Either(&[Kind::Text, Kind::Object]), "not offered: the older form of `tool_choice`"),
    field("user", Kind::Text, "not used"),
];

/// The handler.
pub async fn handle(app: Arc<App>, input: Input) -> Answer {
    let Input { body: Body { fields: body, room, .. }, request_id, .. } = input;
    for (older, newer) in [("functions", "tools"), ("function_call", "tool_choice")] {
        if body.value(older).is_some() {
            return Err(ApiError::field(older, format!("is not offered: send `{newer}`, its newer form")));
        }
    }
    let stream = body.flag("stream").unwrap_or(false);
    let (conversation, wanted) = conversation_of(&body)?;
    let (mut request, parsing) = prepare(&app, conversation, wanted, &body, stream).await?;
    request.stop_strings = sampling::stops(&body, "stop")?;
    if let Some(n) = sampling::max_tokens(&body, &["max_completion_tokens", "max_tokens", "n_predict"]) {
        request.max_new_tokens = n;
    }
    request.routing = body.flag("routing").unwrap_or(false);
    let top = body.size("top_logprobs");
    request.logprobs = match (body.flag("logprobs").unwrap_or(false), top) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, Some(1..)) => return Err(ApiError::field("top_logprobs", "needs `logprobs` to be true")),
        (false, _) => None,
    };
    let n = body.size("n").unwrap_or(1);
    let usage = body.object("stream_options").and_then(|o| o.flag("include_usage")).unwrap_or(false);
    // What was asked is in the job now; the body need not outlast it.
    drop(body);
    let job = Job { requests: vec![request], n, parsing, room };
    let generation = Generation::start(&app, request_id.clone(), job).await?;
    let head = Head {
        id: app::id("chatcmpl-"),
        created: app::unix_time(),
        model: app.model.id.clone(),
        tokenizer: app.tokenizer.clone(),
        request_id,
    };
    if stream {
        return Ok(sse::respond(generation, Stream { head, usage, n }));
    }
    let (answers, totals, room) = generation.collect().await?;
    let mut lists = Lists::default();
    let answer = whole(&head, answers, &totals, &mut lists);
    Ok(lists.respond(&answer, room))
}

/// The conversation of a body, and what is wanted of the answer.
fn conversation_of(body: &Object) -> Result<(Conversation, Wanted), ApiError> {
    let mut conversation = Conversation {
        messages: conversation::messages(body.list("messages").map_or(&[][..], Vec::as_slice))?,
        tools: tools::definitions(body.list("tools").map_or(&[][..], Vec::as_slice))?,
        kwargs: conversation::kwargs(body)?,
        ..Conversation::default()
    };
    if let Some(effort) = body.value("reasoning_effort") {
        conversation.kwargs.entry("reasoning_effort").or_insert_with(|| effort.clone());
    }
    if body.flag("continue_final_message").unwrap_or(false) {
        conversation.continue_last()?;
    }
    let choice = tools::openai_choice(body.value("tool_choice"))?;
    let single = body.flag("parallel_tool_calls") == Some(false);
    Ok((conversation, Wanted { choice, form: form::of(body)?, single }))
}

/// What all events and answers of a request begin with.
struct Head {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    request_id: String,
}

impl Head {
    fn object(&self, kind: &str, choices: Vec<Value>) -> Object {
        let mut object = Object::new();
        object.insert("id".into(), self.id.as_str().into());
        object.insert("object".into(), kind.into());
        object.insert("created".into(), self.created.into());
        object.insert("model".into(), self.model.as_str().into());
        object.insert("system_fingerprint".into(), concat!("moebius-", env!("CARGO_PKG_VERSION")).into());
        object.insert("choices".into(), choices.into());
        object
    }

    fn logprobs(&self, logprobs: &[Logprob]) -> Value {
        let content: Vec<Reported> = logprobs.iter().map(|l| Reported::new(&self.tokenizer, l)).collect();
        json!({"content": content, "refusal": null})
    }
}

/// A token as the chat API reports it.
#[derive(Serialize)]
pub struct Reported {
    #[serde(flatten)]
    token: Alternative,
    top_logprobs: Vec<Alternative>,
}

#[derive(Serialize)]
struct Alternative {
    token: String,
    #[serde(serialize_with = "write::serialize_short")]
    logprob: f32,
    bytes: Vec<u8>,
}

impl Reported {
    pub fn new(tokenizer: &Tokenizer, logprob: &Logprob) -> Reported {
        let alternative = |token: u32, value: f32| {
            let (text, bytes) = token_text(tokenizer, token);
            Alternative { token: text, logprob: finite(value), bytes }
        };
        let top = logprob.values.top.iter().map(|&(token, value)| alternative(token, value));
        Reported { token: alternative(logprob.token, logprob.values.token), top_logprobs: top.collect() }
    }

    /// The place of a list of them.
    pub fn list(tokenizer: &Arc<Tokenizer>, logprobs: Vec<Logprob>, lists: &mut Lists) -> Value {
        let tokenizer = tokenizer.clone();
        lists.place(logprobs, move |logprob, out| write::json(&Reported::new(&tokenizer, &logprob), out))
    }
}

/// A forbidden token has a probability of zero, whose logarithm JSON cannot write.
pub fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

fn finish_reason(finish: Option<&Finish>) -> &'static str {
    match finish {
        Some(Finish::Length) => "length",
        Some(Finish::ToolCalls) => "tool_calls",
        Some(Finish::Stop | Finish::StopString(_)) | None => "stop",
    }
}

/// The answer in one piece.
fn whole(head: &Head, answers: Vec<Collected>, totals: &Totals, lists: &mut Lists) -> Value {
    let choices = answers.into_iter().enumerate().map(|(index, answer)| {
        let (mut thought, mut calls) = (String::new(), Vec::new());
        for part in answer.parts.list() {
            match part {
                Part::Reasoning(text) => thought.push_str(text),
                Part::Text(_) => {}
                Part::Call(call) => {
                    let function = json!({"name": call.name, "arguments": call.arguments});
                    calls.push(json!({"id": call.id, "type": "function", "function": function}));
                }
            }
        }
        let content = answer.content();
        let mut message = Object::new();
        message.insert("role".into(), "assistant".into());
        let silent = content.is_empty() && !calls.is_empty();
        message.insert("content".into(), if silent { Value::Null } else { content.into() });
        message.insert("refusal".into(), Value::Null);
        if !thought.is_empty() {
            message.insert("reasoning_content".into(), thought.into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".into(), calls.into());
        }
        let logprobs = match answer.logprobs {
            none if none.is_empty() => Value::Null,
            some => json!({"content": Reported::list(&head.tokenizer, some, lists), "refusal": null}),
        };
        let mut choice = json!({
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(answer.finish.as_ref()),
        });
        if !answer.routing.is_empty() {
            choice["routing"] = lists.place(answer.routing, |ids, out| write::json(&ids, out));
        }
        choice
    });
    let mut object = head.object("chat.completion", choices.collect());
    totals.close(&mut object);
    object.into()
}

/// The answer as it comes.
struct Stream {
    head: Head,
    usage: bool,
    n: usize,
}

impl Stream {
    fn chunk(&self, index: usize, delta: Value, logprobs: Value, finish: Value, out: &mut Frames) {
        let choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
        let mut object = self.head.object("chat.completion.chunk", vec![choice]);
        if self.usage {
            object.insert("usage".into(), Value::Null);
        }
        out.data(&object.into());
    }
}

impl Wire for Stream {
    fn open(&mut self, out: &mut Frames) {
        for index in 0..self.n {
            let delta = json!({"role": "assistant", "content": "", "refusal": null});
            self.chunk(index, delta, Value::Null, Value::Null, out);
        }
    }

    fn step(&mut self, step: Step, out: &mut Frames) {
        let mut logprobs = if step.logprobs.is_empty() { Value::Null } else { self.head.logprobs(&step.logprobs) };
        let mut wrote = false;
        if let Some(ids) = &step.routing {
            let mut object = self.head.object("chat.completion.chunk", Vec::new());
            object["choices"] =
                json!([{"index": step.index, "delta": {}, "logprobs": null, "finish_reason": null, "routing": [ids]}]);
            out.data(&object.into());
        }
        for event in step.events {
            let delta = match event {
                Event::Content(text) => json!({"content": text}),
                Event::Reasoning(text) => json!({"reasoning_content": text}),
                Event::ToolCallStart { index, id, name } => {
                    let function = json!({"name": name, "arguments": ""});
                    json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]})
                }
                Event::ToolCallArguments { index, json } => {
                    json!({"tool_calls": [{"index": index, "function": {"arguments": json}}]})
                }
                Event::ToolCallEnd { .. } => continue,
            };
            self.chunk(step.index, delta, logprobs.take(), Value::Null, out);
            wrote = true;
        }
        // A token whose text is held back still has its number.
        if !wrote && !logprobs.is_null() {
            self.chunk(step.index, json!({}), logprobs, Value::Null, out);
        }
        if let Some(finish) = &step.finish {
            self.chunk(step.index, json!({}), Value::Null, finish_reason(Some(finish)).into(), out);
        }
    }

    fn close(&mut self, totals: &Totals, out: &mut Frames) {
        if self.usage {
            let mut object = self.head.object("chat.completion.chunk", Vec::new());
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
