//! `/tokenize`, `/detokenize`, `/apply-template`: the model's text side by itself.

use std::sync::Arc;

use axum::Json;
use axum::response::IntoResponse;
use engine::tokenizer::Encode;
use serde_json::json;

use super::app::App;
use super::body::{Body, Prompt};
use super::conversation::{self, Conversation, Fits};
use super::error::ApiError;
use super::fields::{Field, Kind, Read, field};
use super::generate::token_text;
use super::images::Images;
use super::limits::{MAX_MESSAGES, MAX_TEXT_BYTES, MAX_TOOLS};
use super::routes::{Answer, Input, ignoring};
use super::tools::Offer;
use super::write::{self, Lists};

/// What `/tokenize` takes.
pub const TOKENIZE: &[Field] = &[
    field("model", Kind::Text, "model to use; any name if only one is served"),
    field("content", Kind::Text, "text to tokenize"),
    field("prompt", Kind::Text, "vLLM's name of content"),
    field("add_special", Kind::Bool, "add the special tokens that the model expects at start and end; default false"),
    field("add_special_tokens", Kind::Bool, "vLLM's name of add_special"),
    field("parse_special", Kind::Bool, "parse names of special tokens as those tokens; default true"),
    field("with_pieces", Kind::Bool, "also return the text of each token"),
];

/// What `/detokenize` takes.
pub const DETOKENIZE: &[Field] = &[
    field("model", Kind::Text, "model to use; any name if only one is served"),
    field("tokens", Kind::Ids, "token ids"),
];

/// What `/apply-template` takes.
pub const TEMPLATE: &[Field] = &[
    field("model", Kind::Text, "model to use; any name if only one is served"),
    field("messages", Kind::List(&Kind::Object, MAX_MESSAGES), "messages of the conversation"),
    field("tools", Kind::List(&Kind::Object, MAX_TOOLS), "functions that the model may call"),
    field("chat_template_kwargs", Kind::Object, "further variables of the chat template"),
    field("add_generation_prompt", Kind::Bool, "end with the opening of an answer; default true"),
];

pub async fn tokenize(app: Arc<App>, input: Input) -> Answer {
    let Body { mut fields, mut room, .. } = input.body;
    let how = Encode {
        add_special: fields.flag("add_special").or_else(|| fields.flag("add_special_tokens")).unwrap_or(false),
        parse_special: fields.flag("parse_special").unwrap_or(true),
    };
    let with_pieces = fields.flag("with_pieces").unwrap_or(false);
    let text = fields.remove("content").or_else(|| fields.remove("prompt"));
    let text = text.ok_or_else(|| ApiError::field("content", "is missing"))?;
    let tokenizer = app.tokenizer.clone();
    let (ids, room) = app
        .common
        .heavy(text.as_str().map_or(0, str::len), move || {
            let text = text.as_str().unwrap_or_default();
            // As many tokens as bytes while they are counted, then what they are.
            room.hold(text.len() * (1 + size_of::<u32>()))?;
            let mut ids = tokenizer.encode(text, how);
            ids.shrink_to_fit();
            room.hold(ids.len() * size_of::<u32>())?;
            Ok((ids, room))
        })
        .await?;
    let (mut lists, count) = (Lists::default(), ids.len());
    let tokens = if with_pieces {
        let tokenizer = app.tokenizer.clone();
        lists.place(ids, move |id, out| {
            let piece = match token_text(&tokenizer, id) {
                (text, bytes) if text.as_bytes() == bytes => json!({"id": id, "piece": text}),
                (_, bytes) => json!({"id": id, "piece": bytes}),
            };
            write::json(&piece, out);
        })
    } else {
        lists.place(ids, |id, out| write::json(&id, out))
    };
    Ok(lists.respond(&json!({"tokens": tokens, "count": count}), room))
}

pub async fn detokenize(app: Arc<App>, mut input: Input) -> Answer {
    let ids = match input.body.take_prompts().pop() {
        Some(Prompt::Ids(ids)) => ids,
        _ => Vec::new(),
    };
    let mut n_bytes = 0;
    for (i, &id) in ids.iter().enumerate() {
        let Some(bytes) = app.tokenizer.token_bytes(id) else {
            let n_vocab = app.tokenizer.n_vocab();
            return Err(ApiError::field(
                format!("tokens[{i}]"),
                format!("is {id}, but the vocabulary has {n_vocab} tokens"),
            ));
        };
        n_bytes += bytes.len();
    }
    if n_bytes > MAX_TEXT_BYTES {
        let why = format!("may decode to {n_bytes} bytes, at most {MAX_TEXT_BYTES} are allowed");
        return Err(ApiError::field("tokens", why));
    }
    // The text, and the text as JSON under two names.
    input.body.room.hold(4 * n_bytes)?;
    let tokenizer = app.tokenizer.clone();
    let text = app.common.heavy(n_bytes, move || Ok(tokenizer.decode(&ids))).await?;
    Ok(Json(json!({"content": text, "prompt": text})).into_response())
}

/// vLLM's `/tokenizer_info`, from which lm-eval learns that it can leave tokens to the server.
pub async fn tokenizer_info(app: Arc<App>, _: Input) -> Answer {
    let text = |id: Option<u32>| id.map(|id| token_text(&app.tokenizer, id).0);
    Ok(Json(json!({
        "tokenizer_class": "moebius",
        "vocab_size": app.tokenizer.n_vocab(),
        "model_max_length": app.worker.context(),
        "bos_token": text(app.tokenizer.bos()),
        "eos_token": text(app.tokenizer.eos()),
    }))
    .into_response())
}

pub async fn apply_template(app: Arc<App>, input: Input) -> Answer {
    let mut body = input.body.fields;
    let images = Images::take(&mut body, &app)?;
    let mut conversation = Conversation {
        messages: conversation::messages(body.list("messages").map_or(&[][..], Vec::as_slice))?,
        kwargs: conversation::kwargs(&body)?,
        no_generation_prompt: !body.flag("add_generation_prompt").unwrap_or(true),
        images,
        ..Conversation::default()
    };
    conversation.offer(Offer::of_chat(body.list("tools").map_or(&[][..], Vec::as_slice))?);
    let ignored = std::mem::take(&mut conversation.ignored);
    let prompt = conversation.render(&app, Fits::Any).await?;
    let answer = Json(json!({"prompt": prompt.text, "n_tokens": prompt.tokens.len()})).into_response();
    Ok(ignoring(answer, ignored))
}
