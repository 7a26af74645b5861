//! `/v1/chat/completions`: OpenAI's conversations.

use std::collections::HashMap;
use std::sync::Arc;

use engine::formats::Event;
use engine::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Value, json};

use super::app::App;
use super::body::Body;
use super::conversation::{self, Conversation};
use super::error::ApiError;
use super::fields::{Field, Kind, Object, Read, field, unsupported};
use super::form;
use super::generate::{Collected, Finish, Generation, Job, Logprob, Step, Totals, token_text};
use super::images::Images;
use super::limits::{MAX_CHOICES, MAX_MESSAGES, MAX_TOOLS, MAX_TOP_LOGPROBS};
use super::openai::{self, OpenAiHead};
use super::parts::{Call, MessagePart};
use super::prepare::{AnswerWish, Prepared, prepare};
use super::routes::{Answer, Input, ignoring};
use super::sampling;
use super::sse::{self, Frames, Wire};
use super::tools::{self, Dialects, Offer};
use super::write::{self, Lists};

/// Kinds of objects: answers, and events of a stream.
const ANSWER: &str = "chat.completion";
const CHUNK: &str = "chat.completion.chunk";

/// Fields of the route besides the sampling.
pub const FIELDS: &[Field] = &[
    field("messages", Kind::List(&Kind::Object, MAX_MESSAGES), "messages of the conversation"),
    field("model", Kind::Text, "model to use; any name if only one is served"),
    field("stream", Kind::Bool, "stream the answer as server-sent events"),
    field("stream_options", Kind::Object, "include_usage: end with an event that holds the usage"),
    field("n", Kind::Int(1, MAX_CHOICES as i128), "number of answers; answer i uses seed + i"),
    field("max_completion_tokens", sampling::MAX_TOKENS, "maximum number of tokens to generate; -1 for no limit"),
    field("max_tokens", sampling::MAX_TOKENS, "older name of max_completion_tokens"),
    field("n_predict", sampling::MAX_TOKENS, "llama.cpp's name of max_completion_tokens"),
    field("stop", sampling::STOP, "texts that end the answer"),
    field("logprobs", Kind::Bool, "return the log-probabilities of the tokens"),
    field("top_logprobs", Kind::Int(0, MAX_TOP_LOGPROBS as i128), "number of top alternatives to return per token"),
    field("tools", Kind::List(&Kind::Object, MAX_TOOLS), "functions that the model may call"),
    field(
        "tool_choice",
        Kind::Either(&[Kind::Word(&["none", "auto", "required"]), Kind::Object]),
        "controls which tool, if any, is called",
    ),
    field("parallel_tool_calls", Kind::Bool, "allow several tool calls in an answer"),
    field(
        "reasoning_effort",
        Kind::Text,
        "passed to the chat template; bounds the thought where that has no variable for it",
    ),
    field("chat_template_kwargs", Kind::Object, "further variables of the chat template, such as enable_thinking"),
    field("continue_final_message", Kind::Bool, "continue the last message instead of starting a new one"),
    field("routing", Kind::Bool, "return the experts selected for each token, in the order of /v1/routing"),
    unsupported("functions", "send `tools`, its newer form"),
    unsupported("function_call", "send `tool_choice`, its newer form"),
    unsupported("audio", "the server reads and writes text only"),
    field("modalities", Kind::List(&Kind::Word(&["text"]), 4), "kinds of answer: text"),
    field("user", Kind::Text, "ignored"),
];

/// Returns the handler.
pub async fn handle(app: Arc<App>, input: Input) -> Answer {
    let Input { body: Body { fields: mut body, room, .. }, request_id, .. } = input;
    let images = Images::take(&mut body, &app)?;
    let stream = body.flag("stream").unwrap_or(false);
    let (mut conversation, wanted) = conversation_of(&body)?;
    conversation.images = images;
    let Prepared { mut request, parsing, dialects, ignored } = prepare(&app, conversation, wanted, &body).await?;
    request.stop_strings = sampling::stops(&body, "stop")?;
    if let Some(n) = sampling::max_tokens(&body, &["max_completion_tokens", "max_tokens", "n_predict"]) {
        request.max_new_tokens = n;
    }
    request.routing = body.flag("routing").unwrap_or(false);
    let top = body.size("top_logprobs");
    request.logprobs = match (body.flag("logprobs").unwrap_or(false), top) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, Some(1..)) => return Err(ApiError::field("top_logprobs", "requires `logprobs` to be true")),
        (false, _) => None,
    };
    let n = body.size("n").unwrap_or(1);
    let usage = openai::wants_usage(&body);
    // What was asked is in the job now; the body need not outlast it.
    drop(body);
    let job = Job { requests: vec![request], n, parsing, room };
    let generation = Generation::start(&app, request_id.clone(), job).await?;
    let head = OpenAiHead::new(&app, "chatcmpl-", request_id);
    if stream {
        let stream = ChatStream { head, usage, n, dialects, inputs: HashMap::new() };
        return Ok(ignoring(sse::respond(generation, stream), ignored));
    }
    let (answers, totals, room) = generation.collect().await?;
    let mut lists = Lists::default();
    let answer = whole(&head, &dialects, answers, &totals, &mut lists);
    Ok(ignoring(lists.respond(&answer, room), ignored))
}

/// Returns the conversation of a body, and what is requested of the answer.
fn conversation_of(body: &Object) -> Result<(Conversation, AnswerWish), ApiError> {
    let mut conversation = Conversation {
        messages: conversation::messages(body.list("messages").map_or(&[][..], Vec::as_slice))?,
        kwargs: conversation::kwargs(body)?,
        ..Conversation::default()
    };
    conversation.offer(Offer::of_chat(body.list("tools").map_or(&[][..], Vec::as_slice))?);
    if let Some(effort) = body.value("reasoning_effort") {
        conversation.kwargs.entry("reasoning_effort").or_insert_with(|| effort.clone());
    }
    let is_begun = body.list("messages").and_then(|list| list.last()).is_some_and(|last| last["prefix"] == true);
    if is_begun || body.flag("continue_final_message").unwrap_or(false) {
        conversation.continue_last()?;
    }
    let choice = tools::openai_choice(body.value("tool_choice"))?;
    let parallel = body.flag("parallel_tool_calls");
    Ok((conversation, AnswerWish { choice, form: form::of(body)?, parallel, ..AnswerWish::default() }))
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

    /// Returns the place of a list of them.
    pub fn list(tokenizer: &Arc<Tokenizer>, logprobs: Vec<Logprob>, lists: &mut Lists) -> Value {
        let tokenizer = tokenizer.clone();
        lists.place(logprobs, move |logprob, out| write::json(&Reported::new(&tokenizer, &logprob), out))
    }
}

/// Returns a number that JSON can write: a forbidden token's probability is zero, which has no logarithm.
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

/// Returns the answer in one piece.
fn whole(head: &OpenAiHead, dialects: &Dialects, answers: Vec<Collected>, totals: &Totals, lists: &mut Lists) -> Value {
    let choices = answers.into_iter().enumerate().map(|(index, answer)| {
        let (mut thought, mut calls) = (String::new(), Vec::new());
        for part in answer.parts.list() {
            match part {
                MessagePart::Reasoning(text) => thought.push_str(text),
                MessagePart::Text(_) => {}
                MessagePart::Call(call) if dialects.is_custom(&call.name) => {
                    let custom = json!({"name": call.name, "input": tools::custom_input(call)});
                    calls.push(json!({"id": call.id, "type": "custom", "custom": custom}));
                }
                MessagePart::Call(call) => {
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
    let mut object = head.object(ANSWER, choices.collect());
    totals.close(&mut object);
    object.into()
}

/// The answer as it comes.
struct ChatStream {
    head: OpenAiHead,
    usage: bool,
    n: usize,
    dialects: Dialects,
    /// Running calls of custom tools, by answer and call: the client gets their text when it is whole.
    inputs: HashMap<(usize, usize), Call>,
}

/// The choice of an event.
#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChunkLogprobs>,
    finish_reason: Option<&'static str>,
    /// The experts of a token.
    #[serde(skip_serializing_if = "Option::is_none")]
    routing: Option<[&'a [u16]; 1]>,
}

/// What an event adds to an answer.
#[derive(Serialize)]
#[serde(untagged)]
enum Delta<'a> {
    Opened { role: &'static str, content: &'static str, refusal: () },
    Content { content: &'a str },
    Reasoning { reasoning_content: &'a str },
    Call { tool_calls: [CallDelta<'a>; 1] },
    Nothing {},
}

#[derive(Serialize)]
struct CallDelta<'a> {
    index: usize,
    #[serde(flatten)]
    opened: Option<CallOpened<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    function: Option<FunctionDelta<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    custom: Option<CustomDelta<'a>>,
}

#[derive(Serialize)]
struct CustomDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    input: &'a str,
}

#[derive(Serialize)]
struct CallOpened<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
}

#[derive(Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

#[derive(Serialize)]
struct ChunkLogprobs {
    content: Vec<Reported>,
    refusal: (),
}

impl<'a> Delta<'a> {
    /// Returns what an event of the parser adds, if anything.
    fn of(event: &'a Event) -> Option<Delta<'a>> {
        let call = |index, opened, name, arguments| {
            let function = Some(FunctionDelta { name, arguments });
            Delta::Call { tool_calls: [CallDelta { index, opened, function, custom: None }] }
        };
        Some(match event {
            Event::Content(content) => Delta::Content { content },
            Event::Reasoning(text) => Delta::Reasoning { reasoning_content: text },
            Event::ToolCallStart { index, id, name } => {
                call(*index, Some(CallOpened { id, kind: "function" }), Some(name), "")
            }
            Event::ToolCallArguments { index, json } => call(*index, None, None, json),
            Event::ToolCallEnd { .. } => return None,
        })
    }
}

impl ChatStream {
    fn chunk(&self, choice: ChunkChoice<'_>, out: &mut Frames) {
        self.head.chunk(CHUNK, choice, self.usage, out);
    }

    /// Takes what belongs to a call of a custom tool; returns whether it does.
    fn custom(&mut self, choice: usize, event: &Event, out: &mut Frames) -> bool {
        let delta = |index, opened, name, input| {
            let custom = Some(CustomDelta { name, input });
            let delta = Delta::Call { tool_calls: [CallDelta { index, opened, function: None, custom }] };
            ChunkChoice { delta, ..blank(choice) }
        };
        match event {
            Event::ToolCallStart { index, id, name } if self.dialects.is_custom(name) => {
                let opened = Some(CallOpened { id, kind: "custom" });
                self.chunk(delta(*index, opened, Some(name), ""), out);
                self.inputs.insert((choice, *index), Call::default());
                true
            }
            Event::ToolCallArguments { index, json } => match self.inputs.get_mut(&(choice, *index)) {
                Some(call) => {
                    call.arguments.push_str(json);
                    true
                }
                None => false,
            },
            Event::ToolCallEnd { index, complete } => match self.inputs.remove(&(choice, *index)) {
                Some(call) => {
                    let input = tools::custom_input(&Call { complete: *complete, ..call });
                    self.chunk(delta(*index, None, None, &input), out);
                    true
                }
                None => false,
            },
            _ => false,
        }
    }
}

/// Returns an event that adds nothing to answer `index` yet.
fn blank(index: usize) -> ChunkChoice<'static> {
    ChunkChoice { index, delta: Delta::Nothing {}, logprobs: None, finish_reason: None, routing: None }
}

impl Wire for ChatStream {
    fn open(&mut self, out: &mut Frames) {
        for index in 0..self.n {
            let delta = Delta::Opened { role: "assistant", content: "", refusal: () };
            self.chunk(ChunkChoice { delta, ..blank(index) }, out);
        }
    }

    fn step(&mut self, step: Step, out: &mut Frames) {
        let index = step.index;
        let mut logprobs = (!step.logprobs.is_empty()).then(|| {
            let reported = step.logprobs.iter().map(|logprob| Reported::new(&self.head.tokenizer, logprob));
            ChunkLogprobs { content: reported.collect(), refusal: () }
        });
        if let Some(ids) = &step.routing {
            // Without the usage: the experts belong to the event that follows.
            self.head.chunk(CHUNK, ChunkChoice { routing: Some([&**ids]), ..blank(index) }, false, out);
        }
        for event in &step.events {
            if self.custom(index, event, out) {
                continue;
            }
            let Some(delta) = Delta::of(event) else { continue };
            self.chunk(ChunkChoice { delta, logprobs: logprobs.take(), ..blank(index) }, out);
        }
        // A token whose text is held back still has its number.
        if logprobs.is_some() {
            self.chunk(ChunkChoice { logprobs, ..blank(index) }, out);
        }
        if let Some(finish) = &step.finish {
            self.chunk(ChunkChoice { finish_reason: Some(finish_reason(Some(finish))), ..blank(index) }, out);
        }
    }

    fn close(&mut self, totals: &Totals, out: &mut Frames) {
        self.head.close(CHUNK, totals, self.usage, out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Frames) {
        self.head.fail(error, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deltas_have_openais_form() {
        let events = [
            (Event::Content("a\"".into()), json!({"content": "a\""})),
            (Event::Reasoning("b".into()), json!({"reasoning_content": "b"})),
            (
                Event::ToolCallStart { index: 1, id: "call_1".into(), name: "f".into() },
                json!({"tool_calls": [{
                    "index": 1, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}
                }]}),
            ),
            (
                Event::ToolCallArguments { index: 1, json: "{}".into() },
                json!({"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}),
            ),
        ];
        for (event, expected) in &events {
            let choice = ChunkChoice { delta: Delta::of(event).unwrap(), ..blank(2) };
            let written = serde_json::to_string(&choice).unwrap();
            let whole = json!({"index": 2, "delta": expected, "logprobs": null, "finish_reason": null});
            assert_eq!(written, whole.to_string());
        }
        let opened = Delta::Opened { role: "assistant", content: "", refusal: () };
        assert_eq!(serde_json::to_string(&opened).unwrap(), r#"{"role":"assistant","content":"","refusal":null}"#);
        assert_eq!(serde_json::to_string(&Delta::Nothing {}).unwrap(), "{}");
        let routed = ChunkChoice { routing: Some([&[3, 1]]), ..blank(0) };
        assert!(serde_json::to_string(&routed).unwrap().ends_with(r#""finish_reason":null,"routing":[[3,1]]}"#));
    }
}
