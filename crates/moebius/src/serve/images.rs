//! Images in messages. They are taken out of a body before its messages are read, with a mark in place of each, so that
//! templates see text alone. Where a mark is in the rendered prompt, the tokens of the image are put. Images come in
//! the body: nothing makes the server open a file or an address.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use base64::engine::{DecodePaddingMode, general_purpose};
use engine::images::{Error, Pictures};
use serde_json::{Value, json};

use super::app::{self, App};
use super::error::ApiError;
use super::fields::{Object, Read};

/// Maximum number of images in a request.
pub const MAX_IMAGES: usize = 64;
/// What stands for an image in a text of clients: llama.cpp's `mtmd_default_marker`.
pub const MARKER: &str = "<__media__>";
/// How deep lists of parts are within each other: results of tools have parts too.
const MAX_DEPTH: usize = 4;

/// Base64 as clients write it, with padding or without.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Refuses images and their kin.
pub fn no_such_part(at: &str, kind: &str) -> ApiError {
    let kind: String = kind.chars().take(40).collect();
    let why = match &*kind {
        "image" | "image_url" | "input_image" => "this model reads text only",
        _ => "audio, video and files are not read",
    };
    ApiError::field(format!("{at}.type"), format!("is {kind:?}: {why}, and the server opens no files or addresses"))
}

/// Refuses a list of images where the model sees none.
pub fn no_images(at: &str) -> ApiError {
    ApiError::field(at, "has images: this model reads text only")
}

/// The images of a request, in the order of their marks.
#[derive(Clone, Default)]
pub struct Images {
    /// Part of every mark, which no client knows.
    secret: u64,
    files: Vec<File>,
}

/// A file of an image.
#[derive(Clone)]
struct File {
    /// Its field, for messages.
    at: String,
    bytes: Vec<u8>,
    /// Whether other parts are in front of it and after it, which joins them to it by a line break.
    is_joined: [bool; 2],
}

impl std::fmt::Debug for Images {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} images", self.files.len())
    }
}

impl Images {
    /// Takes images out of the messages of a body. Where the model sees none, they stay, and are refused as parts
    /// without a text.
    ///
    /// # Errors
    /// An image is an address, is no Base64, or is one too many.
    pub fn take(body: &mut Object, app: &App) -> Result<Images, ApiError> {
        let mut images = Images { secret: app::random(), files: Vec::new() };
        if app.eyes.is_some() {
            for name in ["messages", "input"] {
                if let Some(Value::Array(messages)) = body.get_mut(name) {
                    for (i, message) in messages.iter_mut().enumerate() {
                        images.message(&format!("{name}[{i}]"), message, 0)?;
                    }
                }
            }
        }
        Ok(images)
    }

    /// Takes images out of a message's list `images`, which is the field `at` of the request.
    ///
    /// # Errors
    /// As [`Images::take`], and where the model sees none.
    pub fn of_message(at: &str, message: &mut Value, app: &App) -> Result<Images, ApiError> {
        let mut images = Images { secret: app::random(), files: Vec::new() };
        match app.eyes {
            Some(_) => images.list(at, message)?,
            None => return Err(no_images(at)),
        }
        Ok(images)
    }

    /// Takes the images of a list, which is the field `at` of the request, in place of the markers of a text; the text
    /// has marks there.
    ///
    /// # Errors
    /// As [`Images::of_message`], and where there are more or fewer markers than images.
    pub fn of_prompt(
        at: &str,
        list: &[Value],
        text: &str,
        marker: &str,
        app: &App,
    ) -> Result<(Images, String), ApiError> {
        let mut images = Images { secret: app::random(), files: Vec::new() };
        let n = text.matches(marker).count();
        if app.eyes.is_none() {
            return Err(no_images(at));
        }
        if n != list.len() {
            let what = format!("has {} entries for {n} markers {marker} in the text", list.len());
            return Err(ApiError::field(at, what));
        }
        let mut parts = text.split(marker);
        let mut marked = parts.next().unwrap_or_default().to_string();
        for (i, (data, part)) in list.iter().zip(parts).enumerate() {
            let at = format!("{at}[{i}]");
            let data = data.as_str().ok_or_else(|| ApiError::field(&at, "must be a string"))?;
            marked.push_str(&images.add(at, data, [false; 2])?);
            marked.push_str(part);
        }
        Ok((images, marked))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// A message, or a part that has parts.
    fn message(&mut self, at: &str, message: &mut Value, depth: usize) -> Result<(), ApiError> {
        if depth == 0 {
            self.list(&format!("{at}.images"), message)?;
        }
        let Some(message) = message.as_object_mut() else { return Ok(()) };
        for name in ["content", "output"] {
            let Some(Value::Array(parts)) = message.get_mut(name) else { continue };
            let n = parts.len();
            for (i, part) in parts.iter_mut().enumerate() {
                let at = format!("{at}.{name}[{i}]");
                match part.as_object().map(|part| data_of(&at, part)).transpose()?.flatten() {
                    Some((at, data)) => {
                        let mark = self.add(at, &data, [i > 0, i + 1 < n])?;
                        *part = json!({"type": "text", "text": mark});
                    }
                    None if depth < MAX_DEPTH => self.message(&at, part, depth + 1)?,
                    None => {}
                }
            }
        }
        Ok(())
    }

    /// Ollama's messages have them in a list by themselves, the field `at` of the request.
    fn list(&mut self, at: &str, message: &mut Value) -> Result<(), ApiError> {
        let Some(message) = message.as_object_mut() else { return Ok(()) };
        let Some(list) = message.value("images") else { return Ok(()) };
        let list = list.as_array().ok_or_else(|| ApiError::field(at, "must be a list"))?;
        let mut text = String::new();
        for (i, image) in list.iter().enumerate() {
            let at = format!("{at}[{i}]");
            let data = image.as_str().ok_or_else(|| ApiError::field(&at, "must be a string"))?;
            text.push_str(&self.add(at, data, [false; 2])?);
        }
        message.remove("images");
        if !text.is_empty() {
            text.push_str(message.text("content").unwrap_or_default());
            message.insert("content".into(), text.into());
        }
        Ok(())
    }

    /// Adds an image and returns its mark.
    fn add(&mut self, at: String, data: &str, is_joined: [bool; 2]) -> Result<String, ApiError> {
        let lower = data.get(..8).unwrap_or(data).to_ascii_lowercase();
        if lower.starts_with("http:") || lower.starts_with("https:") || lower.starts_with("file:") {
            return Err(ApiError::field(at, "is an address: the server opens none; send the image as a data URI"));
        }
        let encoded = match data.strip_prefix("data:").map(|uri| uri.split_once(";base64,")) {
            Some(Some((_, encoded))) => encoded,
            Some(None) => return Err(ApiError::field(at, "must be a data URI with Base64: data:image/png;base64,..")),
            None => data,
        };
        if self.files.len() == MAX_IMAGES {
            return Err(ApiError::field(at, format!("is one image too many: at most {MAX_IMAGES} are allowed")));
        }
        // Many programs break the lines of what they encode.
        let encoded: String = encoded.split_ascii_whitespace().collect();
        let bytes = BASE64.decode(&encoded).or_else(|_| general_purpose::URL_SAFE.decode(&encoded));
        let bytes = bytes.map_err(|_| ApiError::field(&at, "is not valid Base64"))?;
        self.files.push(File { at, bytes, is_joined });
        Ok(self.mark(self.files.len() - 1))
    }

    /// Returns a rendered prompt as clients see it, which `/completion` takes.
    pub fn shown(&self, text: String) -> String {
        (0..self.files.len()).fold(text, |text, i| text.replacen(&self.mark(i), MARKER, 1))
    }

    /// What stands for an image in a text.
    fn mark(&self, i: usize) -> String {
        format!("[image {:016x} {i}]", self.secret)
    }

    /// Tokens of a rendered prompt, those of images in place of their marks. `left` says that the client has left.
    ///
    /// # Errors
    /// A file is no image that the model can see, the template has left one out, or an image comes after `most` tokens.
    pub fn encode(
        &self,
        app: &App,
        text: &str,
        most: usize,
        left: &AtomicBool,
    ) -> Result<(Vec<u32>, Option<Arc<Pictures>>), ApiError> {
        let Some(eyes) = app.eyes.as_ref().filter(|_| !self.is_empty()) else {
            return Ok((App::encode_prompt(&app.tokenizer, text), None));
        };
        let mut prompt = eyes.prompt(&app.tokenizer);
        let mut rest = text;
        for (i, file) in self.files.iter().enumerate() {
            let mark = self.mark(i);
            let Some((before, after)) = rest.split_once(&mark) else {
                return Err(ApiError::field(&file.at, "does not appear in the prompt that the chat template makes"));
            };
            let [front, back] = file.is_joined;
            let before = if front { before.strip_suffix('\n').unwrap_or(before) } else { before };
            rest = if back { after.strip_prefix('\n').unwrap_or(after) } else { after };
            if left.load(Ordering::Relaxed) {
                return Err(ApiError::stopping());
            }
            prompt.push_text(before);
            if prompt.n_tokens() > most {
                return Err(app::too_long(prompt.n_tokens(), "at least ", most));
            }
            prompt.push_image(&file.bytes).map_err(|error| refused(&file.at, &error))?;
        }
        prompt.push_text(rest);
        let (tokens, pictures) = prompt.finish();
        Ok((tokens, Some(Arc::new(pictures))))
    }
}

/// The client's error, or the server's.
fn refused(at: &str, error: &Error) -> ApiError {
    match error {
        Error::Decode(_) | Error::Shape { .. } | Error::Prompt(_) => {
            ApiError::field(at, "is an image that cannot be used").quoting(format!(": {error}"))
        }
        _ => ApiError::internal(error.to_string()),
    }
}

/// Field and data of a part that is an image, in the forms of all APIs.
fn data_of(at: &str, part: &Object) -> Result<Option<(String, String)>, ApiError> {
    let text = |value: &Value| value.as_str().map(str::to_string);
    let missing = |at: String| ApiError::field(at, "is missing");
    Ok(match part.text("type") {
        Some("image_url" | "input_image") => {
            let at = format!("{at}.image_url");
            let url = part.value("image_url").and_then(|url| text(url).or_else(|| text(url.get("url")?)));
            Some((at.clone(), url.ok_or_else(|| missing(at))?))
        }
        Some("image") => {
            let at = format!("{at}.source");
            let source = part.object("source").ok_or_else(|| missing(at.clone()))?;
            let name = if source.text("type") == Some("url") { "url" } else { "data" };
            let data = source.text(name).map(str::to_string);
            Some((format!("{at}.{name}"), data.ok_or_else(|| missing(format!("{at}.{name}")))?))
        }
        _ => None,
    })
}
