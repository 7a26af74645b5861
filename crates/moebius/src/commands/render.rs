//! `moebius render`: messages through a chat template.

use std::path::Path;

use anyhow::{Context, Result, bail};
use engine::template::{Chat, ChatTemplate};
use serde_json::{Value, json};

use crate::args::RenderArgs;
use crate::{embedded, input, load, out};

pub fn run(args: &RenderArgs) -> Result<()> {
    let input = read(&args.messages)?;
    let (messages, options) = match &input {
        Value::Array(_) => (&input, &Value::Null),
        Value::Object(object) => match object.get("messages") {
            Some(messages) => (messages, &input),
            None => bail!("failed to read {}: the object has no messages", args.messages.display()),
        },
        _ => bail!("failed to read {}: expected an array of messages or an object", args.messages.display()),
    };
    let template = template(args, options)?;
    let generation = options["add_generation_prompt"].as_bool().unwrap_or(true) && !args.no_generation_prompt;
    let kwargs = options["kwargs"].as_object().cloned().unwrap_or_default();
    let tools = Some(&options["tools"]).filter(|tools| !tools.is_null());
    let now = options["now"]
        .as_str()
        .map(str::parse)
        .transpose()
        .context("failed to read now (expected 2026-01-15T12:00:00)")?;
    let chat = Chat { messages, tools, add_generation_prompt: generation, kwargs: Some(&kwargs), now };
    match (template.render(&chat), args.json) {
        (Ok(text), false) => out::text(&text),
        (Ok(text), true) => out::json_line(&json!({ "text": text })),
        (Err(error), true) => out::json_line(&json!({ "error": error.to_string() })),
        (Err(error), false) => Err(error.into()),
    }
}

/// Returns the template named, or the model's; special tokens from the input, or else the model's.
fn template(args: &RenderArgs, options: &Value) -> Result<ChatTemplate> {
    let Some(path) = &args.template else {
        let checkpoint = embedded::open(args.model.path()?.as_deref())?;
        let tokenizer = engine::tokenizer::Tokenizer::load(&checkpoint)?;
        return load::template(&checkpoint, &tokenizer)?.with_context(|| {
            format!("failed to find a chat template: {} has none; name one with --template", checkpoint.name())
        });
    };
    let source = input::text(path)?;
    let token = |name: &str| options[name].as_str().unwrap_or_default().to_string();
    Ok(ChatTemplate::new(&source, &token("bos_token"), &token("eos_token"))?)
}

fn read(path: &Path) -> Result<Value> {
    let text = if path == Path::new("-") { input::stdin()? } else { input::text(path)? };
    serde_json::from_str(&text).with_context(|| format!("failed to read {} as JSON", path.display()))
}
