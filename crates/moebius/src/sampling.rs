//! The sampling that a model recommends, and how it is shown.

use anyhow::Result;
use checkpoint::Checkpoint;
use engine::folder;
use engine::sampler::{Mirostat, SamplerParams};
use serde_json::{Value, json};

/// What a model samples with when nobody says otherwise: what its folder recommends, or the embedded model's card.
///
/// # Errors
/// The folder's file cannot be read.
pub fn of_model(checkpoint: &Checkpoint, embedded: bool) -> Result<SamplerParams> {
    let mut params = SamplerParams::default();
    if embedded {
        (params.temperature, params.top_p, params.min_p, params.top_k) = (0.7, 0.9, 0.05, 0);
    }
    let said = folder::sampling(checkpoint)?;
    params.temperature = said.temperature.unwrap_or(params.temperature);
    params.top_k = said.top_k.map_or(params.top_k, |k| k as usize);
    params.top_p = said.top_p.unwrap_or(params.top_p);
    params.min_p = said.min_p.unwrap_or(params.min_p);
    params.penalty_repeat = said.repetition_penalty.unwrap_or(params.penalty_repeat);
    Ok(params)
}

/// A number of 32 bits in as few digits as tell it from its neighbours, as it was written.
pub fn number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// All parameters, under the names that requests have for them.
pub fn json(sampling: &SamplerParams) -> Value {
    json!({
        "temperature": number(sampling.temperature),
        "top_p": number(sampling.top_p),
        "top_k": sampling.top_k,
        "min_p": number(sampling.min_p),
        "typical_p": number(sampling.typical_p),
        "top_n_sigma": number(sampling.top_n_sigma),
        "repeat_penalty": number(sampling.penalty_repeat),
        "repeat_last_n": sampling.penalty_last_n,
        "frequency_penalty": number(sampling.penalty_frequency),
        "presence_penalty": number(sampling.penalty_presence),
        "dry_multiplier": number(sampling.dry_multiplier),
        "dry_base": number(sampling.dry_base),
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_last_n,
        "xtc_probability": number(sampling.xtc_probability),
        "xtc_threshold": number(sampling.xtc_threshold),
        "dynatemp_range": number(sampling.dynatemp_range),
        "dynatemp_exponent": number(sampling.dynatemp_exponent),
        "mirostat": match sampling.mirostat {
            Mirostat::Off => 0,
            Mirostat::V1 => 1,
            Mirostat::V2 => 2,
        },
        "mirostat_tau": number(sampling.mirostat_tau),
        "mirostat_eta": number(sampling.mirostat_eta),
        "min_keep": sampling.min_keep,
    })
}
