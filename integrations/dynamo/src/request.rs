//! A request of the frontend in the engine's words. What has no meaning here is refused by its name, never dropped.

use dynamo_backend_common::{
    BackendError, DynamoError, GuidedDecodingOptions, OutputOptions, PreprocessedRequest, SamplingOptions,
    StopConditions,
};
use engine::sampler::{Param, ParamKind, ParamValue, SamplerParams};
use moebius::local::tokens::{Request, Rule};
use serde_json::Value;

use crate::error;

/// Returns an error about a request.
fn invalid(why: impl std::fmt::Display) -> DynamoError {
    error(BackendError::InvalidArgument, why)
}

/// Applies what a request says to the engine's `request`, which holds its tokens and the model's own sampling.
///
/// # Errors
/// It asks for what is not supported.
pub fn apply(from: &PreprocessedRequest, request: &mut Request) -> Result<(), DynamoError> {
    let images = from.multi_modal_data.as_ref().is_some_and(|data| !data.is_empty());
    let lora = from.routing.as_ref().and_then(|routing| routing.lora_name.as_ref());
    for (is_there, what) in [
        (from.prompt_embeds.is_some(), "prompt_embeds"),
        (images, "images"),
        (from.encoder_result.is_some(), "encoder_result"),
        (from.prefill_result.is_some(), "prefill_result"),
        (lora.is_some(), "adapters (LoRA)"),
    ] {
        if is_there {
            return Err(invalid(format!("failed to take the request: {what} are not supported by this worker")));
        }
    }
    stops(&from.stop_conditions, request);
    sampling(&from.sampling_options, &mut request.sampling)?;
    outputs(&from.output_options, request)?;
    request.priority = from.routing.as_ref().and_then(|routing| routing.priority).unwrap_or(0);
    Ok(())
}

/// Stop strings are the frontend's: it sees text, and cancels.
fn stops(from: &StopConditions, request: &mut Request) {
    let StopConditions { max_tokens, stop_token_ids, stop_token_ids_visible, stop_token_ids_hidden, .. } = from;
    request.max_new_tokens = max_tokens.map_or(usize::MAX, |n| n as usize);
    request.min_new_tokens = from.min_tokens.unwrap_or(0) as usize;
    request.ignore_eos = from.ignore_eos.unwrap_or(false);
    let mut lists = vec![stop_token_ids, stop_token_ids_visible];
    // The frontend lists the ends of the vocabulary as hidden ones.
    if !request.ignore_eos {
        lists.push(stop_token_ids_hidden);
    }
    request.stop_tokens = lists.into_iter().flatten().flatten().copied().collect();
    request.stop_tokens.sort_unstable();
    request.stop_tokens.dedup();
}

fn sampling(from: &SamplingOptions, to: &mut SamplerParams) -> Result<(), DynamoError> {
    for (n, what) in [(from.n, "n"), (from.best_of, "best_of")] {
        if n.is_some_and(|n| n > 1) {
            return Err(invalid(format!("failed to take the request: {what} is above 1: send it that often instead")));
        }
    }
    if from.use_beam_search == Some(true) {
        return Err(invalid("failed to take the request: beam search is not supported"));
    }
    let numbers = [
        ("temperature", from.temperature),
        ("top_p", from.top_p),
        ("min_p", from.min_p),
        ("presence_penalty", from.presence_penalty),
        ("frequency_penalty", from.frequency_penalty),
        ("repeat_penalty", from.repetition_penalty),
    ];
    for (name, value) in numbers.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        let Some(param) = Param::find(name) else { continue };
        if let ParamKind::Number { low, high, .. } = param.kind
            && !(low..=high).contains(&value)
        {
            let range = format!("{name} is {value}, it must be from {low} to {high}");
            return Err(invalid(format!("failed to take the request: {range}")));
        }
        param.set(to, ParamValue::Number(value));
    }
    if let Some(top_k) = from.top_k {
        to.top_k = usize::try_from(top_k).unwrap_or(0);
    }
    if let Some(seed) = from.seed {
        to.seed = seed as u64;
    }
    Ok(())
}

fn outputs(from: &OutputOptions, request: &mut Request) -> Result<(), DynamoError> {
    request.logprobs = from.logprobs.map(|n| n as usize);
    match from.prompt_logprobs {
        Some(_) => Err(invalid("failed to take the request: prompt_logprobs is not supported by this worker")),
        None => Ok(()),
    }
}

/// Returns the rule that guided decoding holds the answer to, if there is one.
///
/// # Errors
/// It is of a kind that is not supported, or there are several.
pub fn rule(from: &SamplingOptions) -> Result<Option<Rule>, DynamoError> {
    let Some(guided) = &from.guided_decoding else { return Ok(None) };
    let GuidedDecodingOptions { json, regex, choice, grammar, structural_tag, whitespace_pattern, .. } = guided;
    for (is_there, what) in
        [(structural_tag.is_some(), "structural_tag"), (whitespace_pattern.is_some(), "whitespace_pattern")]
    {
        if is_there {
            let why =
                format!("failed to take the request: {what} is not supported: use json, regex, choice or grammar");
            return Err(invalid(why));
        }
    }
    let mut rules = Vec::new();
    if let Some(schema) = json {
        rules.push(of_schema(schema)?);
    }
    rules.extend(regex.iter().map(|regex| Rule::Regex(regex.clone())));
    if let Some(choices) = choice {
        let texts: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
        if texts.is_empty() {
            return Err(invalid("failed to take the request: choice is empty"));
        }
        rules.push(Rule::Regex(texts.join("|")));
    }
    rules.extend(grammar.iter().map(|text| Rule::grammar(text.clone())));
    match rules.len() {
        0 | 1 => Ok(rules.pop()),
        n => Err(invalid(format!("failed to take the request: {n} kinds of guided decoding, at most 1 is possible"))),
    }
}

/// A schema, or its JSON in a string. The frontend writes "any object" as a schema without properties.
fn of_schema(schema: &Value) -> Result<Rule, DynamoError> {
    let schema = match schema {
        Value::String(text) => serde_json::from_str(text)
            .map_err(|why| invalid(format!("failed to take the request: the schema is not JSON: {why}")))?,
        schema => schema.clone(),
    };
    let is_any =
        schema.as_object().is_some_and(|schema| schema.len() == 1 && schema.get("type") == Some(&"object".into()));
    Ok(if is_any { Rule::JsonObject } else { Rule::JsonSchema(schema) })
}

/// A regular expression that matches this text alone.
fn literal(text: &str) -> String {
    text.chars().flat_map(|c| c.is_ascii_punctuation().then_some('\\').into_iter().chain([c])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn request(options: Value) -> PreprocessedRequest {
        let mut base = json!({
            "model": "m", "token_ids": [1, 2], "stop_conditions": {}, "sampling_options": {}, "output_options": {},
            "eos_token_ids": [], "annotations": [],
        });
        options.as_object().unwrap().iter().for_each(|(name, value)| base[name] = value.clone());
        serde_json::from_value(base).unwrap()
    }

    fn applied(options: Value) -> Result<Request, DynamoError> {
        let mut to = Request::new(vec![1, 2]);
        apply(&request(options), &mut to).map(|()| to)
    }

    #[test]
    fn fields_reach_the_engine() {
        let to = applied(json!({
            "stop_conditions":
                {"max_tokens": 7, "min_tokens": 3, "stop_token_ids": [9], "stop_token_ids_hidden": [5, 9]},
            "sampling_options": {"temperature": 0.5, "top_p": 0.75, "top_k": -1, "min_p": 0.25, "seed": -1,
                "presence_penalty": 1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
            "output_options": {"logprobs": 4},
            "routing": {"priority": 3},
        }))
        .unwrap();
        assert_eq!((to.max_new_tokens, to.min_new_tokens, &to.stop_tokens[..]), (7, 3, &[5, 9][..]));
        let p = &to.sampling;
        assert_eq!((p.temperature, p.top_p, p.top_k, p.min_p, p.seed), (0.5, 0.75, 0, 0.25, u64::MAX));
        assert_eq!((p.penalty_presence, p.penalty_frequency, p.penalty_repeat), (1.0, 2.0, 1.5));
        assert_eq!((to.logprobs, to.priority), (Some(4), 3));
        // Where ends of the vocabulary are ignored, so are those that the frontend lists.
        let to = applied(json!({"stop_conditions": {"ignore_eos": true, "stop_token_ids": [4],
            "stop_token_ids_hidden": [5]}}));
        let to = to.unwrap();
        assert_eq!((to.ignore_eos, &to.stop_tokens[..], to.max_new_tokens), (true, &[4][..], usize::MAX));
    }

    #[test]
    fn what_is_not_there_is_refused_by_its_name() {
        for (options, name) in [
            (json!({"sampling_options": {"n": 2}}), "n is above 1"),
            (json!({"sampling_options": {"use_beam_search": true}}), "beam search"),
            (json!({"output_options": {"prompt_logprobs": 1}}), "prompt_logprobs"),
            (json!({"prompt_embeds": "AA=="}), "prompt_embeds"),
            (json!({"routing": {"lora_name": "a"}}), "LoRA"),
            (json!({"multi_modal_data": {"image_url": [{"Url": "data:image/png;base64,AA=="}]}}), "images"),
        ] {
            let why = applied(options).unwrap_err().to_string();
            assert!(why.contains(name), "{why}");
        }
    }

    #[test]
    fn guided_decoding_becomes_a_rule() {
        let schema = json!({"type": "object", "properties": {"a": {}}});
        for (guided, expected) in [
            (json!({}), Ok(None)),
            (json!({"json": schema}), Ok(Some(Rule::JsonSchema(schema.clone())))),
            (json!({"json": schema.to_string()}), Ok(Some(Rule::JsonSchema(schema.clone())))),
            (json!({"json": {"type": "object"}}), Ok(Some(Rule::JsonObject))),
            (json!({"regex": "a+"}), Ok(Some(Rule::Regex("a+".into())))),
            (json!({"choice": ["a.b", "c"]}), Ok(Some(Rule::Regex(r"a\.b|c".into())))),
            (json!({"grammar": "root ::= \"a\""}), Ok(Some(Rule::Gbnf("root ::= \"a\"".into())))),
            (json!({"structural_tag": {}}), Err("structural_tag")),
            (json!({"regex": "a", "choice": ["b"]}), Err("2 kinds")),
            (json!({"choice": []}), Err("choice is empty")),
            (json!({"json": "{"}), Err("not JSON")),
        ] {
            let options = request(json!({"sampling_options": {"guided_decoding": guided}})).sampling_options;
            match (rule(&options), expected) {
                (Ok(got), Ok(expected)) => assert_eq!(got, expected),
                (Err(why), Err(expected)) => assert!(why.to_string().contains(expected), "{why}"),
                (got, expected) => panic!("{got:?} in place of {expected:?}"),
            }
        }
    }
}
