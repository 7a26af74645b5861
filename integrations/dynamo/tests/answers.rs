//! Answers of a started engine: when they end, what is told of them, and that they can be cancelled.

mod common;

use std::time::{Duration, Instant};

use common::{ask, engine, request};
use dynamo_backend_common::testing::{cancelling_context, mock_context};
use dynamo_backend_common::{
    BackendError, DynamoError, ErrorType, FinishReason, GenerateContext, LLMEngine, LLMEngineOutput, StopReason,
};
use futures::StreamExt;
use moebius_dynamo::engine::Moebius;
use serde_json::{Value, json};

/// A complete answer.
struct Whole {
    tokens: Vec<u32>,
    end: LLMEngineOutput,
    logprobs: Vec<f64>,
    /// Of each token, the likeliest ones in its place.
    top: Vec<Vec<(u32, f64)>>,
}

/// Returns the answer to a request, which must end as answers end.
async fn whole(engine: &Moebius, tokens: &[u32], more: Value) -> Result<Whole, DynamoError> {
    let pieces = ask(engine, request(tokens, more), mock_context()).await?;
    let mut all = Whole { tokens: Vec::new(), end: LLMEngineOutput::default(), logprobs: Vec::new(), top: Vec::new() };
    let n = pieces.len();
    for (i, piece) in pieces.into_iter().enumerate() {
        let piece = piece?;
        assert_eq!(piece.finish_reason.is_some(), i + 1 == n, "one end, and it is the last");
        all.tokens.extend(&piece.token_ids);
        all.logprobs.extend(piece.log_probs.iter().flatten());
        let top = piece.top_logprobs.iter().flatten();
        all.top.extend(top.map(|at| at.iter().map(|one| (one.token_id, one.logprob)).collect::<Vec<_>>()));
        all.end = piece;
    }
    let usage = all.end.completion_usage.as_ref().expect("usage");
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (tokens.len() as u32, all.tokens.len() as u32));
    // The frontend reads no further than the last token.
    assert!(!all.end.token_ids.is_empty(), "the end comes with the last token");
    Ok(all)
}

async fn started(flags: &str) -> Moebius {
    let engine = engine(flags);
    engine.start(7).await.unwrap();
    engine
}

fn kind(error: &DynamoError) -> ErrorType {
    error.error_type()
}

const PROMPT: [u32; 5] = [40, 50, 60, 70, 80];

#[tokio::test(flavor = "multi_thread")]
async fn answers_end_where_they_should() {
    let engine = started("--parallel 4").await;
    let long =
        whole(&engine, &PROMPT, json!({"stop_conditions": {"max_tokens": 24, "ignore_eos": true}})).await.unwrap();
    assert_eq!((long.tokens.len(), &long.end.finish_reason), (24, &Some(FinishReason::Length)));

    // A stop token ends it, is part of what is sent, and is named.
    let stop = *long.tokens.iter().find(|&&token| token != long.tokens[0]).unwrap();
    let at = long.tokens.iter().position(|&token| token == stop).unwrap();
    let asked = json!({"stop_conditions": {"max_tokens": 24, "ignore_eos": true, "stop_token_ids": [stop]}});
    let stopped = whole(&engine, &PROMPT, asked).await.unwrap();
    assert_eq!(stopped.tokens, long.tokens[..=at]);
    assert_eq!(stopped.end.finish_reason, Some(FinishReason::Stop));
    assert_eq!(stopped.end.stop_reason, Some(StopReason::Int(stop.into())));

    // Not before the least number of tokens.
    let asked = json!({"stop_conditions":
        {"max_tokens": 24, "min_tokens": 20, "ignore_eos": true, "stop_token_ids": [stop]}});
    let held = whole(&engine, &PROMPT, asked).await.unwrap();
    assert!(held.tokens.len() >= 20 && !held.tokens[..20].contains(&stop));

    // An end that the frontend lists is one, without a name.
    let asked = json!({"stop_conditions": {"max_tokens": 24, "stop_token_ids_hidden": [stop]}});
    let hidden = whole(&engine, &PROMPT, asked).await.unwrap();
    assert_eq!((hidden.tokens.last(), hidden.end.stop_reason), (Some(&stop), None));
    engine.cleanup().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_and_seeds_are_kept() {
    let engine = started("--parallel 4").await;
    let base = json!({"stop_conditions": {"max_tokens": 8, "ignore_eos": true}, "output_options": {"logprobs": 3}});
    let greedy = whole(&engine, &PROMPT, base).await.unwrap();
    assert_eq!((greedy.logprobs.len(), greedy.top.len()), (8, 8));
    for ((token, logprob), top) in greedy.tokens.iter().zip(&greedy.logprobs).zip(&greedy.top) {
        assert_eq!((top.len(), top[0]), (3, (*token, *logprob)));
        assert!(*logprob <= 0.0 && top.is_sorted_by(|a, b| a.1 >= b.1));
    }
    let with_seed = |seed: u64| {
        json!({"stop_conditions": {"max_tokens": 16, "ignore_eos": true},
            "sampling_options": {"temperature": 1.5, "seed": seed}})
    };
    let first = whole(&engine, &PROMPT, with_seed(1)).await.unwrap().tokens;
    assert_eq!(first, whole(&engine, &PROMPT, with_seed(1)).await.unwrap().tokens);
    assert_ne!(first, whole(&engine, &PROMPT, with_seed(2)).await.unwrap().tokens);
    engine.cleanup().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_prompt_is_found_in_the_cache() {
    let engine = started("--parallel 4").await;
    let prompt: Vec<u32> = (100..200).collect();
    let salted = |salt: &str| {
        let mut request = request(&prompt, json!({"stop_conditions": {"max_tokens": 2, "ignore_eos": true}}));
        request.routing = Some(serde_json::from_value(json!({"cache_salt": salt})).unwrap());
        request
    };
    let mut found = Vec::new();
    for salt in ["a", "a", "b", "", ""] {
        let end = ask(&engine, salted(salt), mock_context()).await.unwrap().pop().unwrap().unwrap();
        found.push(end.completion_usage.unwrap().prompt_tokens_details.unwrap().cached_tokens.unwrap());
    }
    assert_eq!(found, [0, 96, 0, 0, 96]);
    engine.cleanup().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn guided_answers_keep_to_their_rule() {
    let engine = started("--parallel 4").await;
    let folder = tempfile::tempdir().unwrap();
    let file = moebius_dynamo::texts::folder(None, Some(folder.path())).unwrap().join("tokenizer.json");
    let tokenizer = dynamo_llm::tokenizers::Tokenizer::from_file(&file.to_string_lossy()).unwrap();
    let guided = |rule: Value| {
        let sampling = json!({"guided_decoding": rule, "seed": 3});
        json!({"stop_conditions": {"max_tokens": 64}, "sampling_options": sampling})
    };
    let text = |tokens: &[u32]| tokenizer.decode(tokens, true).unwrap().as_str().to_string();
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["n"]});
    let answer = whole(&engine, &PROMPT, guided(json!({"json": schema}))).await.unwrap();
    let value: Value = serde_json::from_str(&text(&answer.tokens)).unwrap();
    assert!((10..100).contains(&value["n"].as_i64().unwrap()), "{value}");
    let answer = whole(&engine, &PROMPT, guided(json!({"regex": "[ab]{3}"}))).await.unwrap();
    let said = text(&answer.tokens);
    assert!(said.len() == 3 && said.chars().all(|c| "ab".contains(c)), "{said:?}");
    let answer = whole(&engine, &PROMPT, guided(json!({"choice": ["yes", "no"]}))).await.unwrap();
    assert!(["yes", "no"].contains(&&text(&answer.tokens)[..]));
    let answer = whole(&engine, &PROMPT, guided(json!({"grammar": "root ::= \"ping\" | \"pong\""}))).await.unwrap();
    assert!(["ping", "pong"].contains(&&text(&answer.tokens)[..]));
    let why = whole(&engine, &PROMPT, guided(json!({"regex": "("}))).await.err().unwrap();
    assert_eq!(kind(&why), ErrorType::Backend(BackendError::InvalidArgument), "{why}");
    engine.cleanup().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_told_by_its_kind() {
    let engine = engine("--parallel 1 --max-queue 1");
    let closed = ask(&engine, request(&PROMPT, json!({})), mock_context()).await.unwrap_err();
    assert_eq!(kind(&closed), ErrorType::Backend(BackendError::EngineShutdown));
    engine.start(7).await.unwrap();
    let invalid = ErrorType::Backend(BackendError::InvalidArgument);
    for (tokens, more, about) in [
        (vec![], json!({}), "the prompt is empty"),
        (vec![1; 5000], json!({}), "prompt is too long"),
        (vec![u32::MAX], json!({}), "the vocabulary has"),
        (vec![1], json!({"sampling_options": {"top_p": 7.0}}), "top_p"),
        (vec![1], json!({"output_options": {"logprobs": 1000}}), "logprobs is 1000"),
    ] {
        let why = ask(&engine, request(&tokens, more), mock_context()).await.unwrap_err();
        assert_eq!(kind(&why), invalid);
        assert!(why.to_string().contains(about), "{why}");
    }
    // One runs, one waits, and the third has no place.
    let long = || request(&PROMPT, json!({"stop_conditions": {"max_tokens": 1500, "ignore_eos": true}}));
    let mut running = Vec::new();
    for _ in 0..2 {
        running.push(engine.generate(long(), GenerateContext::new(mock_context(), None)).await.unwrap());
    }
    let why = ask(&engine, long(), mock_context()).await.unwrap_err();
    assert_eq!(kind(&why), ErrorType::WorkerOverloaded, "{why}");
    // Requests that are dropped make room.
    drop(running);
    let start = Instant::now();
    while ask(&engine, request(&PROMPT, json!({"stop_conditions": {"max_tokens": 1}})), mock_context()).await.is_err() {
        assert!(start.elapsed() < Duration::from_secs(5));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    engine.cleanup().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_answer_ends_at_once() {
    let engine = started("--parallel 2").await;
    let long = || request(&PROMPT, json!({"stop_conditions": {"max_tokens": 1900, "ignore_eos": true}}));
    let ctx = cancelling_context(Duration::from_millis(100));
    let pieces = ask(&engine, long(), ctx).await.unwrap();
    let n: usize = pieces.iter().map(|piece| piece.as_ref().unwrap().token_ids.len()).sum();
    let end = pieces.last().unwrap().as_ref().unwrap();
    assert_eq!(end.finish_reason, Some(FinishReason::Cancelled));
    assert!(n > 0 && n < 1900, "{n}");
    assert_eq!(end.completion_usage.as_ref().unwrap().completion_tokens as usize, n);
    engine.cleanup().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn running_answers_finish_when_the_worker_stops() {
    let engine = started("--parallel 2 --drain 60").await;
    let asked = request(&PROMPT, json!({"stop_conditions": {"max_tokens": 200, "ignore_eos": true}}));
    let mut stream = engine.generate(asked, GenerateContext::new(mock_context(), None)).await.unwrap();
    let first = stream.next().await.unwrap().unwrap();
    let rest = tokio::spawn(stream.collect::<Vec<_>>());
    engine.cleanup().await.unwrap();
    let rest = rest.await.unwrap();
    let n: usize = rest.iter().map(|piece| piece.as_ref().unwrap().token_ids.len()).sum();
    assert_eq!(first.token_ids.len() + n, 200);
    let late = ask(&engine, request(&PROMPT, json!({})), mock_context()).await.unwrap_err();
    assert_eq!(kind(&late), ErrorType::Backend(BackendError::EngineShutdown));

    // What takes longer than it may is cut off, with an error that another worker may take over.
    let engine = started("--parallel 2 --drain 0").await;
    let asked = request(&PROMPT, json!({"stop_conditions": {"max_tokens": 1900, "ignore_eos": true}}));
    let mut stream = engine.generate(asked, GenerateContext::new(mock_context(), None)).await.unwrap();
    stream.next().await.unwrap().unwrap();
    let rest = tokio::spawn(stream.collect::<Vec<_>>());
    engine.cleanup().await.unwrap();
    let why = rest.await.unwrap().pop().unwrap().unwrap_err();
    assert_eq!(kind(&why), ErrorType::Backend(BackendError::EngineShutdown), "{why}");
}
