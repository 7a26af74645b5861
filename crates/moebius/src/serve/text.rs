//! `/tokenize`, `/detokenize`, `/apply-template`: the model's text side by itself.

use std::sync::Arc;

use axum::Json;
use axum::response::IntoResponse;
use engine::tokenizer::Encode;
use serde_json::{Value, json};

use super::app::App;
use super::conversation::{self, Conversation};
use super::fields::{Field, Kind, Read, field};
use super::generate::token_text;
use super::limits::{MAX_MESSAGES, MAX_TOOLS};
use super::routes::{Answer, Input};
use super::tools;

/// What `/tokenize` takes.
pub const TOKENIZE: &[Field] = &[
    field("content", Kind::Text, "the text"),
    field("add_special", Kind::Bool, "add the tokens the model wants at start and end; false when absent"),
    field("parse_special", Kind::Bool, "read names of special tokens as those tokens; true when absent"),
    field("with_pieces", Kind::Bool, "give each token's text as well"),
];

/// What `/detokenize` takes.
pub const DETOKENIZE: &[Field] = &[field("tokens", Kind::List(&Kind::Int(0, u32::MAX as i128), 1 << 20), "ids")];

/// What `/apply-template` takes.
pub const TEMPLATE: &[Field] = &[
    field("messages", Kind::List(&Kind::Object, MAX_MESSAGES), "the conversation"),
    field("tools", Kind::List(&Kind::Object, MAX_TOOLS), "functions that the model may call"),
    field("chat_template_kwargs", Kind::Object, "further variables of the template"),
    field("add_generation_prompt", Kind::Bool, "end with the opening of an answer; true when absent"),
];

pub async fn tokenize(app: Arc<App>, input: Input) -> Answer {
    let body = input.body;
    let text = body.text("content").unwrap_or_default().to_string();
    let how = Encode {
        add_special: body.flag("add_special").unwrap_or(false),
        parse_special: body.flag("parse_special").unwrap_or(true),
    };
    let tokenizer = app.tokenizer.clone();
    let ids = app.heavy(move || Ok(tokenizer.encode(&text, how))).await?;
    let tokens: Vec<Value> = if body.flag("with_pieces").unwrap_or(false) {
        let piece = |&id: &u32| match token_text(&app.tokenizer, id) {
            (text, bytes) if text.as_bytes() == bytes => json!({"id": id, "piece": text}),
            (_, bytes) => json!({"id": id, "piece": bytes}),
        };
        ids.iter().map(piece).collect()
    } else {
        ids.into_iter().map(Value::from).collect()
    };
    Ok(Json(json!({"tokens": tokens})).into_response())
}

pub async fn detokenize(app: Arc<App>, input: Input) -> Answer {
    let ids = input.body.list("tokens").into_iter().flatten();
    let ids: Vec<u32> = ids.filter_map(|id| id.as_f64().map(|id| id as u32)).collect();
    Ok(Json(json!({"content": app.tokenizer.decode(&ids)})).into_response())
}

pub async fn apply_template(app: Arc<App>, input: Input) -> Answer {
    let body = input.body;
    let conversation = Conversation {
        messages: conversation::messages(body.list("messages").map_or(&[][..], Vec::as_slice))?,
        tools: tools::definitions(body.list("tools").map_or(&[][..], Vec::as_slice))?,
        kwargs: body.object("chat_template_kwargs").cloned().unwrap_or_default(),
        no_generation_prompt: !body.flag("add_generation_prompt").unwrap_or(true),
        prefill: None,
    };
    let prompt = conversation.render(&app).await?;
    Ok(Json(json!({"prompt": prompt.text, "n_tokens": prompt.tokens.len()})).into_response())
}
