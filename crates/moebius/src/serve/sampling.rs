//! Sampling fields, which all APIs share: OpenAI's names, llama.cpp's for the samplers OpenAI does not have, vLLM's
//! where clients use them.

use engine::sampler::{DEFAULT_CHAIN, PARAMS, Param, ParamKind, ParamValue, Stage};
use engine::scheduler::{MAX_STOP_BYTES, MAX_STOP_STRINGS, Request};
use engine::tokenizer::{Encode, Tokenizer};
use serde_json::Value;

use super::error::ApiError;
use super::fields::{Field, Kind, Object, Read, field};
use super::limits::MAX_BIASES;
use super::tools::shown;

const TEXTS: Kind = Kind::List(&Kind::Text, MAX_STOP_STRINGS);
const STAGES: [&str; 9] = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"];
/// llama.cpp's letters of them.
const LETTERS: &str = "edskypmxt";

/// Fields of the sampler: its numeric parameters under all their names, then what is no number.
pub const FIELDS: &[Field] = &JOINED;

const JOINED: [Field; N_NAMES + OTHERS.len()] = {
    let mut fields = [OTHERS[0]; N_NAMES + OTHERS.len()];
    let mut n = 0;
    let mut i = 0;
    while i < PARAMS.len() {
        let param = &PARAMS[i];
        fields[n] = field(param.name, kind_of(param), param.help);
        n += 1;
        let mut alias = 0;
        while alias < param.aliases.len() {
            fields[n] = field(param.aliases[alias], kind_of(param), param.help);
            n += 1;
            alias += 1;
        }
        i += 1;
    }
    let mut other = 0;
    while other < OTHERS.len() {
        fields[n] = OTHERS[other];
        n += 1;
        other += 1;
    }
    fields
};

/// Number of names of all parameters.
const N_NAMES: usize = {
    let mut n = 0;
    let mut i = 0;
    while i < PARAMS.len() {
        n += 1 + PARAMS[i].aliases.len();
        i += 1;
    }
    n
};

const fn kind_of(param: &Param) -> Kind {
    match param.kind {
        ParamKind::Number { low, high, .. } => Kind::Number(low as f64, high as f64),
        ParamKind::Count { low, high, .. } => Kind::Int(low as i128, high as i128),
    }
}

const OTHERS: &[Field] = &[
    field("dry_sequence_breakers", Kind::List(&Kind::Text, 64), "DRY: texts that end a repetition"),
    field(
        "samplers",
        Kind::Either(&[Kind::Text, Kind::List(&Kind::Text, 32)]),
        "samplers to apply, in this order: penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature",
    ),
    field(
        "logit_bias",
        Kind::Either(&[Kind::Object, Kind::List(&Kind::List(&BIAS, 2), MAX_BIASES)]),
        "token ids and the values to add to their logits; or a list of pairs, in which a text stands for its tokens",
    ),
    field(
        "seed",
        Kind::Int(i64::MIN as i128, u64::MAX as i128),
        "seed of the random numbers; the same seed gives the same text",
    ),
    field("ignore_eos", Kind::Bool, "continue past the model's end-of-text token"),
    field("stop_token_ids", Kind::List(&Kind::Int(0, u32::MAX as i128), 256), "ids of tokens that end the answer"),
    field("include_stop_str_in_output", Kind::Bool, "keep the stop string in the text"),
    field("skip_special_tokens", Kind::Bool, "omit control tokens from the text; default true"),
    field("cache_salt", Kind::Text, "shares cached prefixes only with requests that have the same salt"),
];

/// Half of a pair: a token's id, a text, a value, or `false` for a token that never comes.
const BIAS: Kind = Kind::Either(&[Kind::Number(f64::MIN, f64::MAX), Kind::Text, Kind::Bool]);

/// Maximum number of tokens: -1 is no limit, as llama.cpp's and LM Studio's clients send it.
pub const MAX_TOKENS: Kind = Kind::Int(-1, 1 << 31);

/// Returns the first of these fields that is there, of kind [`MAX_TOKENS`].
pub fn max_tokens(body: &Object, names: &[&str]) -> Option<usize> {
    let n = names.iter().find_map(|name| body.int(name))?;
    Some(usize::try_from(n).unwrap_or(usize::MAX))
}

/// `stop`, or `stop_sequences` where the API calls it so.
pub const STOP: Kind = Kind::Either(&[Kind::Text, TEXTS]);

/// Applies the fields of a body to a request whose sampling holds the model's defaults.
pub fn apply(body: &Object, request: &mut Request, tokenizer: &Tokenizer) -> Result<(), ApiError> {
    let params = &mut request.sampling;
    for param in PARAMS {
        // The name itself goes before other names of the same parameter.
        let named = param.names().find_map(|name| match param.kind {
            ParamKind::Number { .. } => body.number(name).map(ParamValue::Number),
            ParamKind::Count { .. } => body.int(name).map(|n| ParamValue::Count(n as i64)),
        });
        if let Some(value) = named {
            param.set(params, value);
        }
    }
    if let Some(breakers) = body.list("dry_sequence_breakers") {
        let texts = || breakers.iter().filter_map(Value::as_str);
        // They are cut into tokens here, on a thread of the network.
        if let Some(i) = texts().position(|text| text.len() > MAX_STOP_BYTES) {
            let why = format!("entry {i} has more than {MAX_STOP_BYTES} bytes");
            return Err(ApiError::field("dry_sequence_breakers", why));
        }
        params.dry_breakers =
            texts().map(|text| tokenizer.encode(text, Encode::default())).filter(|tokens| !tokens.is_empty()).collect();
    }
    if let Some(names) = samplers(body) {
        params.chain = names.iter().filter_map(|name| stage(name)).collect();
    }
    if let Some(seed) = body.int("seed") {
        params.seed = seed as u64;
    }
    if let Some(biases) = body.value("logit_bias") {
        params.logit_bias = logit_bias(biases, tokenizer)?;
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

/// Returns the stop strings of a field of kind [`STOP`].
pub fn stops(body: &Object, name: &str) -> Result<Vec<String>, ApiError> {
    let mut stops: Vec<String> = match body.value(name) {
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(items)) => items.iter().filter_map(Value::as_str).map(String::from).collect(),
        _ => Vec::new(),
    };
    if let Some(i) = stops.iter().position(|stop| stop.len() > MAX_STOP_BYTES) {
        let why = format!("entry {i} has {} bytes, at most {MAX_STOP_BYTES} are allowed", stops[i].len());
        return Err(ApiError::field(name, why));
    }
    // Clients send their empty settings.
    stops.retain(|stop| !stop.is_empty());
    Ok(stops)
}

fn stage(name: &str) -> Option<Stage> {
    let name = match name {
        "typical" | "typical_p" => "typ_p",
        "temp" => "temperature",
        name => name,
    };
    STAGES.iter().position(|&known| known == name).map(|i| DEFAULT_CHAIN[i])
}

/// Returns the names of the samplers that a body asks for.
fn samplers(body: &Object) -> Option<Vec<&str>> {
    match body.value("samplers")? {
        Value::String(letters) => {
            let name = |(i, c): (usize, char)| LETTERS.find(c).map_or(&letters[i..i + c.len_utf8()], |i| STAGES[i]);
            Some(letters.char_indices().map(name).collect())
        }
        names => Some(names.as_array()?.iter().filter_map(Value::as_str).collect()),
    }
}

/// Returns what of the sampling has no effect: samplers of other programs.
pub fn unknown(body: &Object) -> Vec<String> {
    let names = samplers(body).unwrap_or_default().into_iter().filter(|name| stage(name).is_none());
    names.map(|name| format!("samplers ({})", shown(name))).collect()
}

fn logit_bias(biases: &Value, tokenizer: &Tokenizer) -> Result<Vec<(u32, f32)>, ApiError> {
    let Value::Object(biases) = biases else {
        let pairs = biases.as_array().into_iter().flatten().enumerate();
        let pairs = pairs.map(|(i, pair)| bias_pair(&format!("logit_bias[{i}]"), pair, tokenizer));
        return Ok(pairs.collect::<Result<Vec<_>, _>>()?.concat());
    };
    if biases.len() > MAX_BIASES {
        return Err(ApiError::field(
            "logit_bias",
            format!("has {} entries, at most {MAX_BIASES} are allowed", biases.len()),
        ));
    }
    let pair = |(id, bias): (&String, &Value)| {
        let name = || format!("logit_bias.{}", id.chars().take(40).collect::<String>());
        let id = id.parse().map_err(|_| ApiError::field(name(), "is not a token id"))?;
        Kind::Number(-100.0, 100.0).check(&name(), bias)?;
        Ok((id, bias.as_f64().unwrap_or(0.0) as f32))
    };
    biases.iter().map(pair).collect()
}

/// Reads llama.cpp's pair of a token or a text, and the bias of its tokens.
fn bias_pair(at: &str, pair: &Value, tokenizer: &Tokenizer) -> Result<Vec<(u32, f32)>, ApiError> {
    let tokens = match &pair[0] {
        Value::String(text) if text.len() <= MAX_STOP_BYTES => tokenizer.encode(text, Encode::default()),
        id => {
            Kind::Int(0, u32::MAX as i128).check(&format!("{at}[0]"), id)?;
            vec![id.as_f64().unwrap_or(0.0) as u32]
        }
    };
    let bias = match &pair[1] {
        Value::Bool(false) => f32::NEG_INFINITY,
        bias => {
            Kind::Number(-100.0, 100.0).check(&format!("{at}[1]"), bias)?;
            bias.as_f64().unwrap_or(0.0) as f32
        }
    };
    Ok(tokens.into_iter().map(|token| (token, bias)).collect())
}

/// FNV-1a: the salt only has to tell tenants apart, and two runs of a server need not agree on more.
pub fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::fields;
    use super::*;

    #[test]
    fn every_parameter_is_a_field_under_each_of_its_names() {
        let tokenizer = Tokenizer::load(&crate::embedded::open(None).unwrap()).unwrap();
        for param in PARAMS {
            for name in param.names() {
                let (value, expected) = match param.kind {
                    ParamKind::Number { .. } => (json!(0.25), ParamValue::Number(0.25)),
                    ParamKind::Count { .. } => (json!(1), ParamValue::Count(1)),
                };
                let mut body = Object::new();
                body.insert(name.into(), value);
                fields::check(&body, &[FIELDS]).unwrap();
                let mut request = Request::new(vec![0]);
                apply(&body, &mut request, &tokenizer).unwrap();
                assert_eq!(param.get(&request.sampling), expected, "{name}");
                body.insert(name.into(), json!("many"));
                assert!(fields::check(&body, &[FIELDS]).is_err(), "{name}");
            }
        }
    }

    #[test]
    fn stages_have_the_names_of_their_places() {
        for (name, expected) in [("penalties", Stage::Penalties), ("typ_p", Stage::Typical), ("xtc", Stage::Xtc)] {
            assert_eq!(stage(name), Some(expected));
        }
        assert_eq!(stage("temperature"), Some(Stage::Temperature));
        let body = |value: Value| json!({"samplers": value}).as_object().cloned().unwrap();
        assert_eq!(samplers(&body(json!(LETTERS))).unwrap(), STAGES);
        assert_eq!(samplers(&body(json!("kfé"))).unwrap(), ["top_k", "f", "é"]);
        assert_eq!(unknown(&body(json!(["top_k", "mirostat", "temp"]))), ["samplers (mirostat)"]);
        assert!(unknown(&body(json!("kypmt"))).is_empty() && unknown(&Object::new()).is_empty());
    }
}
