//! What a worker costs beyond its engine: tokens a second of some streams at once, from the engine as it is and through
//! what Dynamo calls, taking turns. `cargo run --release --example overhead [STREAMS [TOKENS [ROUNDS]]] [FLAGS]`,
//! where flags are those of the engine.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use dynamo_backend_common::testing::mock_context;
use dynamo_backend_common::{GenerateContext, LLMEngine, PreprocessedRequest};
use futures::StreamExt;
use futures::future::try_join_all;
use moebius::local::Local;
use moebius::local::tokens::Step;
use moebius_dynamo::args::{Args, Parsed};
use moebius_dynamo::engine::Moebius;
use serde_json::json;

#[global_allocator]
static ALLOCATOR: moebius::Allocator = moebius::Allocator;

/// Tokens of each prompt; no two have a page in common.
const PROMPT: usize = 64;

#[tokio::main]
async fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let is_number = |word: &&String| word.parse::<usize>().is_ok();
    let numbers: Vec<usize> = words.iter().skip(1).take_while(is_number).filter_map(|word| word.parse().ok()).collect();
    let number = |i: usize, default: usize| numbers.get(i).copied().unwrap_or(default);
    let (streams, tokens, rounds) = (number(0, 32), number(1, 128), number(2, 7));
    let flags =
        ["--parallel".to_string(), streams.to_string()].into_iter().chain(words.into_iter().skip(1 + numbers.len()));
    let line = std::iter::once("moebius-dynamo".to_string()).chain(flags).map(Into::into);
    let args = match Args::parse(line) {
        Ok(Parsed::Run(args)) => *args,
        Ok(Parsed::Say(text)) | Err(text) => bail!("{text}"),
    };
    let flags = args.engine_flags();
    let local = tokio::task::spawn_blocking(move || Local::open(flags)).await??;
    let worker = Arc::new(Moebius::new(args));
    worker.start(0).await?;
    println!("{} on {}: {streams} streams of {tokens} tokens", local.about().description, local.backend);
    let mut times = [Vec::new(), Vec::new()];
    // The first round warms up.
    for round in 0..=rounds {
        let start = Instant::now();
        try_join_all((0..streams).map(|i| tokio::spawn(alone(local.clone(), prompt(round, i), tokens)))).await?;
        let alone_took = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let ran = (0..streams).map(|i| tokio::spawn(through(worker.clone(), prompt(round, i), tokens)));
        try_join_all(ran).await?.into_iter().collect::<Result<()>>()?;
        let through_took = start.elapsed().as_secs_f64();
        if round > 0 {
            let rate = |took: f64| (streams * tokens) as f64 / took;
            println!("round {round}: alone {:.0} tok/s, worker {:.0} tok/s", rate(alone_took), rate(through_took));
            times[0].push(alone_took);
            times[1].push(through_took);
        }
    }
    let [alone, through] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    println!("median: the worker takes {:+.1} % of time beyond the engine", (through / alone - 1.0) * 100.0);
    worker.cleanup().await?;
    tokio::task::spawn_blocking(move || local.close()).await??;
    Ok(())
}

/// Tokens that differ from the first on.
fn prompt(round: usize, stream: usize) -> Vec<u32> {
    (0..PROMPT).map(|i| (100 + (round * 7919 + stream * 104_729 + i * 31) % 7000) as u32).collect()
}

/// An answer of the engine.
async fn alone(local: Arc<Local>, prompt: Vec<u32>, tokens: usize) -> Result<()> {
    let mut request = local.request(prompt);
    (request.max_new_tokens, request.ignore_eos, request.sampling.temperature) = (tokens, true, 0.0);
    let mut answer = local.submit(request).await?;
    let mut n = 0;
    while let Some(step) = answer.next().await {
        match step {
            Step::Token { .. } => n += 1,
            Step::Done { .. } => break,
            other => bail!("{other:?}"),
        }
    }
    if n == tokens { Ok(()) } else { bail!("{n} tokens in place of {tokens}") }
}

/// An answer through what Dynamo calls.
async fn through(worker: Arc<Moebius>, prompt: Vec<u32>, tokens: usize) -> Result<()> {
    let request = json!({
        "model": "m", "token_ids": prompt, "stop_conditions": {"max_tokens": tokens, "ignore_eos": true},
        "sampling_options": {"temperature": 0.0}, "output_options": {}, "eos_token_ids": [], "annotations": [],
    });
    let request: PreprocessedRequest = serde_json::from_value(request).context("failed to make a request")?;
    let mut stream = worker.generate(request, GenerateContext::new(mock_context(), None)).await?;
    let mut n = 0;
    while let Some(piece) = stream.next().await {
        n += piece?.token_ids.len();
    }
    if n == tokens { Ok(()) } else { bail!("{n} tokens in place of {tokens}") }
}
