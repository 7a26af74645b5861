//! What the tests share: an engine over the built-in model, and requests as the frontend sends them.

use std::ffi::OsString;
use std::sync::Arc;

use dynamo_backend_common::{
    AsyncEngineContext, DynamoError, GenerateContext, LLMEngine, LLMEngineOutput, PreprocessedRequest,
};
use futures::StreamExt;
use moebius_dynamo::args::{Args, Parsed};
use moebius_dynamo::engine::Moebius;
use serde_json::{Value, json};

// As in the program.
#[global_allocator]
static ALLOCATOR: moebius::Allocator = moebius::Allocator;

/// Returns the command line of a worker over the built-in model.
#[allow(dead_code)] // Each test program uses a part.
pub fn args(flags: &str) -> Args {
    let line = format!("moebius-dynamo --backend cpu --ctx 2048 {flags}");
    match Args::parse(line.split_whitespace().map(OsString::from)) {
        Ok(Parsed::Run(args)) => *args,
        Ok(Parsed::Say(text)) => panic!("{text}"),
        Err(why) => panic!("{why}"),
    }
}

/// Returns an engine that is not started.
#[allow(dead_code)]
pub fn engine(flags: &str) -> Moebius {
    // The program of a test tries no grammars.
    moebius::try_grammars_with(vec![env!("CARGO_BIN_EXE_moebius-dynamo").into()]);
    Moebius::new(args(flags))
}

/// Returns a request for greedy tokens, with `more` over its fields.
#[allow(dead_code)]
pub fn request(tokens: &[u32], more: Value) -> PreprocessedRequest {
    let mut base = json!({
        "model": "m", "token_ids": tokens, "stop_conditions": {}, "sampling_options": {"temperature": 0.0},
        "output_options": {}, "eos_token_ids": [], "annotations": [],
    });
    for (name, fields) in more.as_object().unwrap() {
        for (field, value) in fields.as_object().unwrap() {
            base[name][field] = value.clone();
        }
    }
    serde_json::from_value(base).unwrap()
}

/// Returns all that an engine says to a request.
#[allow(dead_code)]
pub async fn ask(
    engine: &Moebius,
    request: PreprocessedRequest,
    ctx: Arc<dyn AsyncEngineContext>,
) -> Result<Vec<Result<LLMEngineOutput, DynamoError>>, DynamoError> {
    Ok(engine.generate(request, GenerateContext::new(ctx, None)).await?.collect().await)
}
