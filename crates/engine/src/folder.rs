//! Settings in a model folder beside the weights: special tokens, the chat template, and default sampling parameters.
//! Reads `tokenizer_config.json`, `generation_config.json`, `chat_template.jinja` and the tokens of `config.json`;
//! knows no vocabulary and renders nothing.

use checkpoint::{Checkpoint, Kind, SideFile, replace_numbers};
use serde_json::{Map, Value};

/// Maximum size of these files, in bytes; only a template is large.
const MAX_BYTES: usize = 16 << 20;
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Where older processors of images keep it.
const PROCESSOR_TEMPLATE: &str = "chat_template.json";

/// Why one of the files cannot be used. Each is a whole sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// A value in the file is invalid.
    #[error("failed to use {file}: {what}")]
    #[allow(missing_docs)]
    File { file: String, what: String },
}

/// The values of one file; empty when there is no such file.
struct Config {
    name: String,
    values: Map<String, Value>,
}

impl Config {
    fn open(checkpoint: &Checkpoint, name: &str) -> Result<Self, Error> {
        let Some(file) = checkpoint.side_file(name)? else {
            return Ok(Self { name: name.into(), values: Map::new() });
        };
        let text = bounded(&file)?;
        // Python's infinities and NaN say nothing that is used.
        let values = serde_json::from_slice(&replace_numbers(text.as_bytes(), |_| b"null"))
            .map_err(|error| Error::File { file: file.name().into(), what: error.to_string() })?;
        Ok(Self { name: file.name().into(), values })
    }

    fn error(&self, key: &str, wanted: &str) -> Error {
        Error::File { file: self.name.clone(), what: format!("{key} is not {wanted}") }
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// Returns a token by its text, directly or in an object with its tokenizer flags.
    fn token(&self, key: &str) -> Result<Option<String>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(value) => match &value["content"] {
                Value::String(text) => Ok(Some(text.clone())),
                _ => Err(self.error(key, "a token's text")),
            },
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.error(key, "true or false")),
        }
    }

    /// Returns an id or a list of them.
    fn ids(&self, key: &str) -> Result<Vec<u32>, Error> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let ids = match value {
            Value::Array(ids) => ids.as_slice(),
            id => std::slice::from_ref(id),
        };
        let ids = ids.iter().map(|id| u32::try_from(id.as_u64()?).ok());
        ids.collect::<Option<_>>().ok_or_else(|| self.error(key, "a token's id or a list of them"))
    }

    fn added(&self) -> Result<Vec<Added>, Error> {
        const KEY: &str = "added_tokens_decoder";
        let Some(value) = self.get(KEY) else { return Ok(Vec::new()) };
        let token = |(id, token): (&String, &Value)| {
            let special = token["special"].as_bool().unwrap_or(false);
            Some(Added { id: id.parse().ok()?, text: token["content"].as_str()?.into(), special })
        };
        let tokens = value.as_object().and_then(|tokens| tokens.iter().map(token).collect());
        tokens.ok_or_else(|| self.error(KEY, "an object from ids to tokens"))
    }

    fn number(&self, key: &str) -> Result<Option<f32>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().map(|v| v as f32).filter(|v| v.is_finite() && *v >= 0.0);
        number.map(Some).ok_or_else(|| self.error(key, "a number from 0 on"))
    }
}

/// Returns a file of settings as JSON: its name in messages and its values, none where there is no such file.
///
/// # Errors
/// When it cannot be read or is no object.
pub(crate) fn values(checkpoint: &Checkpoint, name: &str) -> Result<(String, Map<String, Value>), Error> {
    let Config { name, values } = Config::open(checkpoint, name)?;
    Ok((name, values))
}

fn bounded(file: &SideFile) -> Result<&str, Error> {
    let text = file.text();
    match text.len() > MAX_BYTES {
        true => Err(Error::File {
            file: file.name().into(),
            what: format!("it is {} bytes long, at most {MAX_BYTES} are allowed", text.len()),
        }),
        false => Ok(text),
    }
}

/// Special tokens, by their texts and ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Begin of text.
    pub bos: Option<String>,
    /// End of text.
    pub eos: Option<String>,
    /// Padding.
    pub pad: Option<String>,
    /// Replaces what no token covers.
    pub unknown: Option<String>,
    /// Whether a text begins with `bos`, if the file says.
    pub add_bos: Option<bool>,
    /// Whether a text ends with `eos`, if the file says.
    pub add_eos: Option<bool>,
    /// Ids that end an answer; they may lie past the vocabulary.
    pub ends: Vec<u32>,
    /// Added tokens of `tokenizer_config.json`; other tokenizer files than `tokenizer.json` do not list them.
    pub added: Vec<Added>,
}

/// A token outside the model's own vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Added {
    pub id: u32,
    pub text: String,
    pub special: bool,
}

/// Returns the special tokens of a folder.
///
/// # Errors
/// When a file cannot be read or a value has the wrong type.
pub fn tokens(checkpoint: &Checkpoint) -> Result<Tokens, Error> {
    let config = Config::open(checkpoint, TOKENIZER_CONFIG)?;
    let mut ends = Config::open(checkpoint, GENERATION_CONFIG)?.ids("eos_token_id")?;
    // `config.json` is parsed already; an id or a list, as in the other file.
    if let Ok(Some(id)) = checkpoint.meta().opt_u32("eos_token_id") {
        ends.push(id);
    } else if let Some(ids) = checkpoint.meta().opt_u32s("eos_token_id")? {
        ends.extend(ids);
    }
    Ok(Tokens {
        bos: config.token("bos_token")?,
        eos: config.token("eos_token")?,
        pad: config.token("pad_token")?,
        unknown: config.token("unk_token")?,
        add_bos: config.flag("add_bos_token")?,
        add_eos: config.flag("add_eos_token")?,
        ends,
        added: config.added()?,
    })
}

/// Returns the chat template of a model: a GGUF key, or in a folder `chat_template.jinja`, or `chat_template` in
/// `tokenizer_config.json` or `chat_template.json`, from a list the one named `default`. `None` where there is none, or
/// an empty one.
///
/// # Errors
/// As [`tokens`].
pub fn chat_template(checkpoint: &Checkpoint) -> Result<Option<String>, Error> {
    Ok(any_template(checkpoint)?.filter(|source| !source.trim().is_empty()))
}

fn any_template(checkpoint: &Checkpoint) -> Result<Option<String>, Error> {
    if let Some(source) = checkpoint.meta().opt_str("tokenizer.chat_template")? {
        return Ok(Some(source.into()));
    }
    if let Some(file) = checkpoint.side_file(CHAT_TEMPLATE)? {
        return Ok(Some(bounded(&file)?.into()));
    }
    let mut config = Config::open(checkpoint, TOKENIZER_CONFIG)?;
    if config.get("chat_template").is_none() {
        config = Config::open(checkpoint, PROCESSOR_TEMPLATE)?;
    }
    let wanted = || config.error("chat_template", "a text or a list of named texts");
    match config.get("chat_template") {
        None => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(Value::Array(list)) => {
            let named = |name: &str| list.iter().find(|one| one["name"] == name);
            let Some(one) = named("default").or(list.first()) else { return Ok(None) };
            Ok(Some(one["template"].as_str().ok_or_else(wanted)?.into()))
        }
        Some(_) => Err(wanted()),
    }
}

/// Default sampling parameters of a model; `None` for those not given.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)] // Names as in the file and in the sampler.
pub struct Sampling {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// Sampling parameters of `generation_config.json`, or of the keys that llama.cpp's converter makes of it in a GGUF file.
/// All but the temperature are `None` where the file turns sampling off.
///
/// # Errors
/// As [`tokens`].
pub fn sampling(checkpoint: &Checkpoint) -> Result<Sampling, Error> {
    if checkpoint.kind() == Kind::Gguf {
        let key = |name: &str| format!("general.sampling.{name}");
        let number = |name| Ok::<_, Error>(checkpoint.meta().opt_f32(&key(name))?.filter(|value| *value >= 0.0));
        return Ok(Sampling {
            temperature: number("temp")?,
            top_k: number("top_k")?.map(|k| k as u32),
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            repetition_penalty: number("penalty_repeat")?,
        });
    }
    let config = Config::open(checkpoint, GENERATION_CONFIG)?;
    if config.flag("do_sample")? == Some(false) {
        return Ok(Sampling { temperature: Some(0.0), ..Sampling::default() });
    }
    Ok(Sampling {
        temperature: config.number("temperature")?,
        top_k: config.number("top_k")?.map(|k| k as u32),
        top_p: config.number("top_p")?,
        min_p: config.number("min_p")?,
        repetition_penalty: config.number("repetition_penalty")?,
    })
}
