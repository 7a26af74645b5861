//! `/v1/embeddings`: the hidden states of a text as one vector, pooled as the model says or the client. A model that
//! was not trained for it gives vectors too; how much they say about meaning is another matter, and the answer says so.

use std::sync::Arc;

use engine::scheduler::Pooling;
use engine::tokenizer::Encode;
use serde_json::{Value, json};

use super::app::App;
use super::body::{Body, Prompt};
use super::error::ApiError;
use super::fields::{Field, Kind, Read, field, unsupported};
use super::limits::MAX_TEXTS;
use super::log;
use super::prompt;
use super::room::Room;
use super::routes::{Answer, Input};
use super::worker::Update;
use super::write::{self, Lists};
use crate::load::Whole;

/// What the route takes.
pub const FIELDS: &[Field] = &[
    field("input", Kind::Prompts(MAX_TEXTS), "text, token ids, or a list of either"),
    field("model", Kind::Text, "model to use; any name if only one is served"),
    field("encoding_format", Kind::Word(&["float", "base64"]), "list of numbers, or base64 of little-endian f32"),
    field("dimensions", Kind::Int(1, 1 << 20), "number of leading values to keep, rescaled to length 1"),
    field(
        "pooling",
        Kind::Word(&["last", "mean", "cls"]),
        "hidden state of the last token, mean of all, or that of the first token; the default is the model's own, \
         or else last",
    ),
    field("normalize", Kind::Bool, "scale to length 1; default true"),
    field("cache_salt", Kind::Text, "shares cached prefixes only with requests that have the same salt"),
    field("user", Kind::Text, "ignored"),
    unsupported("messages", "only texts are embedded, no conversations and no images"),
];

/// Returns the handler.
pub async fn handle(app: Arc<App>, input: Input) -> Answer {
    let Input { mut body, .. } = input;
    check_scores(&app)?;
    let prompts = tokens(&app, body.take_prompts()).await?;
    let Body { fields: body, room, .. } = body;
    let wanted = VectorWish {
        salt: body.text("cache_salt").map_or(0, super::sampling::hash),
        dimensions: body.size("dimensions"),
        normalize: body.flag("normalize").unwrap_or(true),
        pooling: match body.text("pooling") {
            Some("mean") => Some(Pooling::Mean),
            Some("cls") => Some(Pooling::First),
            Some(_) => Some(Pooling::Last),
            None => None,
        },
    };
    let how = match wanted.pooling.unwrap_or(app.pooling) {
        Pooling::Last => "the hidden state of the last token",
        Pooling::First => "the hidden state of the first token",
        Pooling::Mean => "the mean of the tokens' hidden states",
    };
    let Rows { rows, tokens, cached, room } = rows(&app, prompts, wanted, room).await?;
    let base64 = body.text("encoding_format") == Some("base64");
    let mut lists = Lists::default();
    let mut entry = |(index, row): (usize, Vec<f32>)| {
        let embedding = match base64 {
            true => encode(&row).into(),
            false => list(row, &mut lists),
        };
        json!({"object": "embedding", "index": index, "embedding": embedding})
    };
    let data: Vec<Value> = rows.into_iter().enumerate().map(&mut entry).collect();
    let note = match app.whole {
        Some(_) => how.to_string(),
        None => format!("{how}; only models trained for embeddings give similar texts similar vectors"),
    };
    let answer = json!({
        "object": "list",
        "data": data,
        "model": app.model.id,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}},
        "note": note,
    });
    Ok(lists.respond(&answer, room))
}

/// Returns the tokens of texts to embed. An empty one, where no token is put around texts, is the end of a text, so that
/// it does not refuse the others.
pub async fn tokens(app: &Arc<App>, mut prompts: Vec<Prompt>) -> Result<Vec<Vec<u32>>, ApiError> {
    if let Some(i) = prompts.iter().position(|prompt| matches!(prompt, Prompt::Ids(ids) if ids.is_empty())) {
        let at = if prompts.len() > 1 { format!("input[{i}]") } else { "input".into() };
        return Err(ApiError::field(at, "is empty: it must have a text or token ids"));
    }
    let around = app.tokenizer.encode("", Encode { add_special: true, parse_special: false });
    let end = app.tokenizer.eos().filter(|_| around.is_empty() && app.tokenizer.bos().is_none());
    if let Some(end) = end {
        let is_empty = |prompt: &&mut Prompt| matches!(prompt, Prompt::Text(text) if text.is_empty());
        prompts.iter_mut().filter(is_empty).for_each(|prompt| *prompt = Prompt::Ids(vec![end]));
    }
    prompt::tokens(app, prompts).await
}

/// Refuses a model that scores pairs of texts.
fn check_scores(app: &App) -> Result<(), ApiError> {
    match app.whole {
        Some(Whole::Scores) => Err(ApiError::field("model", "ranks documents and makes no embeddings: use /v1/rerank")),
        _ => Ok(()),
    }
}

/// Returns a row as a list that is written later.
pub fn list(row: Vec<f32>, lists: &mut Lists) -> Value {
    lists.place(row, |x, out| write::json(&x, out))
}

/// What is wanted of embeddings.
#[derive(Clone, Copy, Debug, Default)]
pub struct VectorWish {
    /// Cached prefixes are shared only with requests of the same salt.
    pub salt: u64,
    /// How many of the first numbers are kept; the row is then scaled again.
    pub dimensions: Option<usize>,
    /// Scale to length 1.
    pub normalize: bool,
    /// How the tokens' states become one; the model's way when `None`.
    pub pooling: Option<Pooling>,
}

/// Embeddings, one a prompt.
pub struct Rows {
    pub rows: Vec<Vec<f32>>,
    /// Of all prompts.
    pub tokens: usize,
    /// Those of them that the prefix cache had.
    pub cached: usize,
    /// Held for the rows.
    pub room: Room,
}

/// Returns the embedding of each prompt; `room` is held for the prompts.
pub async fn rows(app: &App, prompts: Vec<Vec<u32>>, wanted: VectorWish, mut room: Room) -> Result<Rows, ApiError> {
    check_scores(app)?;
    let n = prompts.len();
    let mut numbers = app.common.answers.room();
    if n == 0 {
        return Ok(Rows { rows: Vec::new(), tokens: 0, cached: 0, room: numbers });
    }
    room.hold(prompts.iter().map(|tokens| tokens.len() * size_of::<u32>()).sum())?;
    let request = |tokens| {
        let mut request = app.request(tokens);
        request.embedding = Some(wanted.pooling.unwrap_or(app.pooling));
        request.cache_salt = wanted.salt;
        request
    };
    let mut run = app.submit(prompts.into_iter().map(request).collect()).await?;
    let mut rows: Vec<Vec<f32>> = vec![Vec::new(); n];
    let (mut tokens, mut cached) = (0, 0);
    while let Some((i, update)) = run.next().await {
        match update {
            Update::Embedding(row) => {
                // All rows are of one length.
                numbers.hold(n * size_of_val(&row[..]))?;
                rows[i] = row;
            }
            Update::Done { usage, .. } => {
                log::who().charge(usage.prompt_tokens);
                tokens += usage.prompt_tokens;
                cached += usage.cached_tokens;
            }
            Update::Failed(message) => return Err(ApiError::internal(message)),
            Update::Unheld(message) => return Err(ApiError::bad(message)),
            Update::Stopped => return Err(ApiError::stopping()),
            Update::Token { .. } | Update::Prompt { .. } => {}
        }
    }
    if rows.iter().any(Vec::is_empty) {
        return Err(ApiError::stopping());
    }
    for row in &mut rows {
        if let Some(kept) = wanted.dimensions {
            if kept > row.len() {
                return Err(ApiError::field("dimensions", format!("is {kept}, but the model has {}", row.len())));
            }
            row.truncate(kept);
        }
        if wanted.normalize || wanted.dimensions.is_some() {
            scale_to_one(row);
        }
    }
    Ok(Rows { rows, tokens, cached, room: numbers })
}

/// Scales to length 1; nothing to scale stays.
fn scale_to_one(row: &mut [f32]) {
    let length = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    if length > 0.0 {
        row.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}

/// Base64 (RFC 4648) of the numbers' bytes.
fn encode(row: &[f32]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = row.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let word = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..4 {
            let letter = LETTERS[(word >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= three.len() { char::from(letter) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_rfc_4648s() {
        // Python: base64.b64encode(struct.pack("<..f", ..))
        for (row, expected) in [
            (&[][..], ""),
            (&[1.0], "AACAPw=="),
            (&[1.0, -2.5], "AACAPwAAIMA="),
            (&[0.1, 0.2, 0.3], "zczMPc3MTD6amZk+"),
        ] {
            assert_eq!(encode(row), expected);
        }
    }

    #[test]
    fn length_becomes_one() {
        let mut row = [3.0, -4.0];
        scale_to_one(&mut row);
        assert_eq!(row, [0.6, -0.8]);
        let mut zero = [0.0; 3];
        scale_to_one(&mut zero);
        assert_eq!(zero, [0.0; 3]);
    }
}
