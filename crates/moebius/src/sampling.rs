//! Sampling parameters that a model recommends, and their JSON.

use anyhow::Result;
use checkpoint::Checkpoint;
use engine::folder::{self, Sampling};
use engine::sampler::{PARAMS, ParamValue, SamplerParams};
use serde_json::{Map, Value};

use crate::embedded;

/// Returns what a model's files recommend.
fn recommended(checkpoint: &Checkpoint) -> Result<Sampling> {
    let said = folder::sampling(checkpoint)?;
    // The embedded model's card leaves top-k out, which no key says, whatever file holds the model.
    let is_fable = checkpoint.meta().opt_str("general.name").is_ok_and(|name| name == Some(embedded::NAME));
    Ok(Sampling { top_k: said.top_k.or(is_fable.then_some(0)), ..said })
}

/// Names of the parameters that a model recommends; the others are the engine's own.
///
/// # Errors
/// As [`of_model`].
pub fn recommended_names(checkpoint: &Checkpoint) -> Result<Vec<&'static str>> {
    let Sampling { temperature, top_k, top_p, min_p, repetition_penalty } = recommended(checkpoint)?;
    let names = [
        ("temperature", temperature.is_some()),
        ("top_k", top_k.is_some()),
        ("top_p", top_p.is_some()),
        ("min_p", min_p.is_some()),
        ("repeat_penalty", repetition_penalty.is_some()),
    ];
    Ok(names.into_iter().filter(|(_, is_said)| *is_said).map(|(name, _)| name).collect())
}

/// Returns a model's default parameters: those that it recommends, and the engine's.
///
/// # Errors
/// The model's file cannot be read.
pub fn of_model(checkpoint: &Checkpoint) -> Result<SamplerParams> {
    let mut params = SamplerParams::default();
    let said = recommended(checkpoint)?;
    params.temperature = said.temperature.unwrap_or(params.temperature);
    params.top_k = said.top_k.map_or(params.top_k, |k| k as usize);
    params.top_p = said.top_p.unwrap_or(params.top_p);
    params.min_p = said.min_p.unwrap_or(params.min_p);
    params.penalty_repeat = said.repetition_penalty.unwrap_or(params.penalty_repeat);
    Ok(params)
}

/// Returns a number in the fewest digits that tell it from its neighbors, as it was written.
pub fn number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// Returns a value as JSON.
pub fn value(value: ParamValue) -> Value {
    match value {
        ParamValue::Number(value) => number(value),
        ParamValue::Count(value) => value.into(),
    }
}

/// Returns all parameters, under the names that requests have for them.
pub fn json(sampling: &SamplerParams) -> Value {
    PARAMS.iter().map(|param| (param.name.to_string(), value(param.get(sampling)))).collect::<Map<_, _>>().into()
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};
    use engine::sampler::ParamKind;
    use expect_test::expect_file;

    use super::*;
    use crate::args::{Cli, Command};

    const PYTHON_HEAD: &str = r#""""The sampling parameters, generated from crates/engine/src/sampler/params.rs by a test of moebius."""

from typing import TypedDict


class Sampling(TypedDict, total=False):
    """Parameters of the sampler; those left out keep the model's defaults."""

"#;

    /// UPDATE_EXPECT=1 writes the file.
    #[test]
    fn the_python_package_has_every_parameter() {
        let mut text = String::from(PYTHON_HEAD);
        for param in PARAMS {
            let kind = if matches!(param.kind, ParamKind::Count { .. }) { "int" } else { "float" };
            text += &format!("    #: {}\n    {}: {kind}\n", param.help, param.name);
        }
        expect_file!["../../../python/moebius/_sampling.py"].assert_eq(&text);
    }

    #[test]
    fn every_parameter_has_a_flag_under_each_of_its_names() {
        for param in PARAMS {
            for name in param.names() {
                let (text, expected) = match param.kind {
                    ParamKind::Number { .. } => ("0.25", ParamValue::Number(0.25)),
                    ParamKind::Count { .. } => ("1", ParamValue::Count(1)),
                };
                let flag = format!("--{}", name.replace('_', "-"));
                let matches = Cli::command().try_get_matches_from(["moebius", "run", "hi", &flag, text]).unwrap();
                let Command::Run(run) = Cli::from_arg_matches(&matches).unwrap().command else { panic!("run") };
                let mut params = SamplerParams::default();
                run.sampling.apply(&mut params);
                assert_eq!(param.get(&params), expected, "{flag}");
                assert_eq!(json(&params)[param.name], value(expected), "{flag}");
                let wrong = Cli::command().try_get_matches_from(["moebius", "run", "hi", &flag, "many"]);
                assert!(wrong.unwrap_err().to_string().contains("it must be"), "{flag}");
            }
        }
    }
}
