//! Sampling fields, which all APIs share: OpenAI's names, llama.cpp's for the samplers OpenAI does not have, vLLM's
//! where clients use them.

use engine::sampler::{DEFAULT_CHAIN, Mirostat, Stage};
use engine::scheduler::{MAX_STOP_BYTES, MAX_STOP_STRINGS, Request};
use engine::tokenizer::{Encode, Tokenizer};
use serde_json::Value;

use super::error::ApiError;
use super::fields::{Field, Kind, Object, Read, field};
use super::limits::MAX_BIASES;

const ANY: Kind = Kind::Number(-f32::MAX as f64, f32::MAX as f64);
const POSITIVE: Kind = Kind::Number(0.0, f32::MAX as f64);
const SHARE: Kind = Kind::Number(0.0, 1.0);
const COUNT: Kind = Kind::Int(0, 1 << 31);
/// -1 is another way to say "off" or "all".
const COUNT_OR_ALL: Kind = Kind::Int(-1, 1 << 31);
const TEXTS: Kind = Kind::List(&Kind::Text, MAX_STOP_STRINGS);
const STAGES: [&str; 9] = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"];

/// What the sampler understands.
pub const FIELDS: &[Field] = &[
    field("temperature", Kind::Number(0.0, 100.0), "0 always takes the likeliest token"),
    field("top_p", SHARE, "keep the likeliest tokens that reach this probability together"),
    field("top_k", COUNT_OR_ALL, "keep so many of the likeliest tokens; 0 and -1 keep all"),
    field("min_p", SHARE, "drop tokens below this share of the likeliest one's probability"),
    field("typical_p", SHARE, "locally typical sampling; 1 is off"),
    field("top_n_sigma", ANY, "keep logits within so many standard deviations of the best; off at 0 and below"),
    field("dynatemp_range", POSITIVE, "how far the temperature moves with the entropy"),
    field("dynatemp_exponent", POSITIVE, "power of the normalised entropy"),
    field("xtc_probability", SHARE, "chance that xtc acts on a token"),
    field("xtc_threshold", SHARE, "probability from which a token counts as a top choice"),
    field("min_keep", COUNT, "every truncating step keeps at least so many tokens"),
    field("repeat_penalty", POSITIVE, "divides the logits of repeated tokens; 1 is off"),
    field("repetition_penalty", POSITIVE, "another name of repeat_penalty"),
    field("repeat_last_n", COUNT_OR_ALL, "how many of the last tokens the penalties look at; -1 is all"),
    field("frequency_penalty", Kind::Number(-100.0, 100.0), "subtracted once per earlier occurrence"),
    field("presence_penalty", Kind::Number(-100.0, 100.0), "subtracted once when the token occurred"),
    field("dry_multiplier", POSITIVE, "strength of the penalty on repeated sequences; 0 is off"),
    field("dry_base", POSITIVE, "its growth with the length of the repetition"),
    field("dry_allowed_length", COUNT, "longest repetition that is free"),
    field("dry_penalty_last_n", COUNT_OR_ALL, "how many of the last tokens it looks at; -1 is all"),
    field("dry_sequence_breakers", Kind::List(&Kind::Text, 64), "texts across which it sees no repetition"),
    field("mirostat", Kind::Int(0, 2), "version; 0 is off"),
    field("mirostat_tau", POSITIVE, "its target surprise in bits"),
    field("mirostat_eta", SHARE, "its learning rate"),
    field("samplers", Kind::List(&Kind::Word(&STAGES), 32), "the steps of the chain, in order"),
    field("logit_bias", Kind::Object, "token ids and what is added to their logits"),
    field("seed", Kind::Int(i64::MIN as i128, u64::MAX as i128), "same seed, same text"),
    field("ignore_eos", Kind::Bool, "go on past the model's end of text"),
    field("stop_token_ids", Kind::List(&Kind::Int(0, u32::MAX as i128), 256), "tokens that end the answer"),
    field("include_stop_str_in_output", Kind::Bool, "the stop string is part of the text"),
    field("skip_special_tokens", Kind::Bool, "leave control tokens out of the text; true when absent"),
    field("cache_salt", Kind::Text, "cached prefixes are shared only with requests of the same salt"),
];

/// Maximum number of tokens: -1 is no limit, as llama.cpp's and LM Studio's clients send it.
pub const MAX_TOKENS: Kind = Kind::Int(-1, 1 << 31);

/// The first of these fields that is there, of kind [`MAX_TOKENS`].
pub fn max_tokens(body: &Object, names: &[&str]) -> Option<usize> {
    let n = names.iter().find_map(|name| body.int(name))?;
    Some(usize::try_from(n).unwrap_or(usize::MAX))
}

/// `stop`, or `stop_sequences` where the API calls it so.
pub const STOP: Kind = Kind::Either(&[Kind::Text, TEXTS]);

/// Applies the fields of a body to a request whose sampling holds the model's defaults.
pub fn apply(body: &Object, request: &mut Request, tokenizer: &Tokenizer) -> Result<(), ApiError> {
    let params = &mut request.sampling;
    macro_rules! set {
        ($($field:ident = $name:literal),* $(,)?) => {
            $(if let Some(value) = body.number($name) { params.$field = value; })*
        };
    }
    set!(
        temperature = "temperature",
        top_p = "top_p",
        min_p = "min_p",
        typical_p = "typical_p",
        top_n_sigma = "top_n_sigma",
        dynatemp_range = "dynatemp_range",
        dynatemp_exponent = "dynatemp_exponent",
        xtc_probability = "xtc_probability",
        xtc_threshold = "xtc_threshold",
        penalty_repeat = "repetition_penalty",
        penalty_repeat = "repeat_penalty",
        penalty_frequency = "frequency_penalty",
        penalty_presence = "presence_penalty",
        dry_multiplier = "dry_multiplier",
        dry_base = "dry_base",
        mirostat_tau = "mirostat_tau",
        mirostat_eta = "mirostat_eta",
    );
    // Zero would divide by zero; it can only mean "off".
    if params.penalty_repeat == 0.0 {
        params.penalty_repeat = 1.0;
    }
    // -1 keeps everything for `top_k`, and looks at everything for the windows.
    let all = |n: i128, whole: usize| if n < 0 { whole } else { n as usize };
    for (name, target, whole) in [
        ("top_k", &mut params.top_k, 0),
        ("min_keep", &mut params.min_keep, 0),
        ("repeat_last_n", &mut params.penalty_last_n, 1 << 20),
        ("dry_allowed_length", &mut params.dry_allowed_length, 0),
        ("dry_penalty_last_n", &mut params.dry_last_n, 1 << 20),
    ] {
        if let Some(n) = body.int(name) {
            *target = all(n, whole);
        }
    }
    params.mirostat = match body.int("mirostat") {
        Some(1) => Mirostat::V1,
        Some(2) => Mirostat::V2,
        _ => Mirostat::Off,
    };
    if let Some(breakers) = body.list("dry_sequence_breakers") {
        params.dry_breakers = breakers
            .iter()
            .filter_map(Value::as_str)
            .map(|text| tokenizer.encode(text, Encode::default()))
            .filter(|tokens| !tokens.is_empty())
            .collect();
    }
    if let Some(names) = body.list("samplers") {
        params.chain = names.iter().filter_map(Value::as_str).filter_map(stage).collect();
    }
    if let Some(seed) = body.int("seed") {
        params.seed = seed as u64;
    }
    if let Some(biases) = body.object("logit_bias") {
        params.logit_bias = logit_bias(biases)?;
    }
    request.ignore_eos = body.flag("ignore_eos").unwrap_or(false);
    request.include_stop_string = body.flag("include_stop_str_in_output").unwrap_or(false);
    request.decode.skip_special = body.flag("skip_special_tokens").unwrap_or(true);
    if let Some(ids) = body.list("stop_token_ids") {
        request.stop_tokens = ids.iter().filter_map(Value::as_u64).map(|id| id as u32).collect();
    }
    if let Some(salt) = body.text("cache_salt") {
        request.cache_salt = hash(salt);
    }
    Ok(())
}

/// The stop strings of a field of kind [`STOP`].
pub fn stops(body: &Object, name: &str) -> Result<Vec<String>, ApiError> {
    let stops: Vec<String> = match body.value(name) {
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(items)) => items.iter().filter_map(Value::as_str).map(String::from).collect(),
        _ => Vec::new(),
    };
    match stops.iter().position(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        Some(i) => Err(ApiError::field(
            name,
            format!("entry {i} has {} bytes, a stop string has 1 to {MAX_STOP_BYTES}", stops[i].len()),
        )),
        None => Ok(stops),
    }
}

fn stage(name: &str) -> Option<Stage> {
    STAGES.iter().position(|&known| known == name).map(|i| DEFAULT_CHAIN[i])
}

fn logit_bias(biases: &Object) -> Result<Vec<(u32, f32)>, ApiError> {
    if biases.len() > MAX_BIASES {
        return Err(ApiError::field(
            "logit_bias",
            format!("has {} entries, at most {MAX_BIASES} are allowed", biases.len()),
        ));
    }
    let pair = |(id, bias): (&String, &Value)| {
        let name = || format!("logit_bias.{}", id.chars().take(40).collect::<String>());
        let id = id.parse().map_err(|_| ApiError::field(name(), "is no token id"))?;
        Kind::Number(-100.0, 100.0).check(&name(), bias)?;
        Ok((id, bias.as_f64().unwrap_or(0.0) as f32))
    };
    biases.iter().map(pair).collect()
}

/// FNV-1a: the salt only has to tell tenants apart, and two runs of a server need not agree on more.
pub fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_have_the_names_of_their_places() {
        for (name, expected) in [("penalties", Stage::Penalties), ("typ_p", Stage::Typical), ("xtc", Stage::Xtc)] {
            assert_eq!(stage(name), Some(expected));
        }
        assert_eq!(stage("temperature"), Some(Stage::Temperature));
    }
}
