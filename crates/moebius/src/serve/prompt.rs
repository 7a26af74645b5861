//! The field `prompt` of routes that continue texts: texts, tokens, and llama-server's objects with images.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use engine::images::Pictures;
use engine::scheduler::Request;
use engine::tokenizer::Encode;
use serde_json::Value;

use super::app::App;
use super::body::Prompt;
use super::error::ApiError;
use super::images::{Images, MARKER, MAX_IMAGES};

/// A prompt, ready for the engine.
pub struct Ready {
    pub tokens: Vec<u32>,
    pictures: Option<Arc<Pictures>>,
    /// Its text, where its tokens read otherwise.
    text: Option<String>,
}

impl Ready {
    pub fn of_tokens(tokens: Vec<u32>) -> Ready {
        Ready { tokens, pictures: None, text: None }
    }

    /// Of tokens that stand for a text with more around it.
    pub fn shown(tokens: Vec<u32>, text: String) -> Ready {
        Ready { tokens, pictures: None, text: Some(text) }
    }

    /// Returns its text as the client wrote it, or as its tokens read.
    pub fn text(&self, app: &App) -> String {
        self.text.clone().unwrap_or_else(|| app.tokenizer.decode(&self.tokens))
    }

    /// Returns a request for what follows it.
    pub fn request(self, app: &App) -> Request {
        Request { pictures: self.pictures, ..app.request(self.tokens) }
    }

    /// Of prompt `i`.
    fn new(app: &App, i: usize, prompt: Prompt, left: &AtomicBool) -> Result<Ready, ApiError> {
        let Prompt::Shown(object) = prompt else {
            return Ok(Ready::of_tokens(tokens_of(app, i, prompt)?));
        };
        let at = |name: &str| format!("prompt[{i}].{name}");
        let text = object.get("prompt_string").and_then(Value::as_str);
        let text = text.ok_or_else(|| ApiError::field(at("prompt_string"), "must be a string"))?;
        if object.get("multimodal_data").is_some_and(|data| !data.is_null() && !data.is_array()) {
            return Err(ApiError::field(at("multimodal_data"), "must be a list"));
        }
        let list = images_of(&object);
        if list.is_empty() {
            return Ok(Ready::of_tokens(tokens_of(app, i, Prompt::Text(text.into()))?));
        }
        app.check_length(text)?;
        let (images, marked) = Images::of_prompt(&at("multimodal_data"), list, text, MARKER, app)?;
        let (tokens, pictures) = images.encode(app, &marked, app.worker.context(), left)?;
        Ok(Ready { tokens, pictures, text: Some(text.into()) })
    }
}

/// The images of a prompt that is an object.
fn images_of(prompt: &Value) -> &[Value] {
    prompt.get("multimodal_data").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Returns all prompts, their images encoded.
pub async fn ready(app: &Arc<App>, prompts: Vec<Prompt>) -> Result<Vec<Ready>, ApiError> {
    let images = |prompt: &Prompt| if let Prompt::Shown(object) = prompt { images_of(object).len() } else { 0 };
    let n = prompts.iter().map(images).sum();
    if n > MAX_IMAGES {
        return Err(ApiError::field("prompt", format!("has {n} images, at most {MAX_IMAGES} are allowed")));
    }
    let (shared, n_bytes) = (app.clone(), prompts.iter().map(Prompt::n_bytes).sum());
    let work = move |left: Arc<AtomicBool>| {
        prompts.into_iter().enumerate().map(|(i, prompt)| Ready::new(&shared, i, prompt, &left)).collect()
    };
    app.common.see(n, n_bytes, work).await
}

/// Returns the tokens of all prompts.
pub async fn tokens(app: &Arc<App>, prompts: Vec<Prompt>) -> Result<Vec<Vec<u32>>, ApiError> {
    let shared = app.clone();
    let n_bytes = prompts.iter().map(Prompt::n_bytes).sum();
    app.common
        .heavy(n_bytes, move || {
            prompts.into_iter().enumerate().map(|(i, prompt)| tokens_of(&shared, i, prompt)).collect()
        })
        .await
}

/// Tokens of one prompt.
fn tokens_of(app: &App, i: usize, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
    let tokens = match prompt {
        Prompt::Text(text) => {
            app.check_length(&text)?;
            app.tokenizer.encode(&text, Encode { add_special: true, parse_special: true })
        }
        Prompt::Ids(ids) => ids,
        Prompt::Mixed(parts) => {
            let mut tokens = Vec::new();
            for (i, part) in parts.into_iter().enumerate() {
                match part {
                    // What begins texts begins the prompt alone.
                    Prompt::Text(text) => {
                        app.check_length(&text)?;
                        let how = Encode { add_special: i == 0, parse_special: true };
                        app.tokenizer.encode_into(&text, how, &mut tokens);
                    }
                    Prompt::Ids(ids) => tokens.extend(ids),
                    Prompt::Mixed(_) | Prompt::Shown(_) => return Err(among_tokens()),
                }
            }
            tokens
        }
        Prompt::Shown(_) => return Err(among_tokens()),
    };
    // A model that begins texts with a token can start from an empty prompt.
    match app.tokenizer.bos() {
        _ if !tokens.is_empty() => Ok(tokens),
        Some(bos) => Ok(vec![bos]),
        None => Err(ApiError::bad(format!("prompt {i} is empty"))),
    }
}

fn among_tokens() -> ApiError {
    ApiError::field("prompt", "has an object among tokens")
}
