//! The engine on the Metal backend, which a simulated GPU runs: the embedded model's text is the reference's; prefix
//! hits, checkpoints, preemption and cancels change no answer. Skips where there is no clang.

use std::sync::Arc;

use backend::CacheType;
use backend::reference::Reference;
use backend::{Backend, Kinds, Limits};
use checkpoint::Checkpoint;
use engine::scheduler::{Engine, Events, FinishReason, Options, Request, RequestId, Vocabulary};
use engine::tokenizer::{Encode, Tokenizer};
use gpu::commands::{Gpu, GpuError};
use gpu::metal::{Metal, Tuning};
use metal_sim::{Call, Fault, Sim, clang::Clang};

use crate::fixtures;
use crate::toy::{Answer, Pieces, answer, drain, mix, run, sampling};

/// The backend on a simulated GPU.
fn metal(options: metal_sim::Options) -> Option<Metal> {
    if let Err(why) = Clang::find() {
        fixtures::skip(why);
        return None;
    }
    let open = move || match Sim::new(options.clone()) {
        Ok(sim) => Ok(Box::new(sim) as Box<dyn Gpu>),
        Err(why) => Err(GpuError::Lost(format!("{why:#}"))),
    };
    Some(Metal { open: Arc::new(open), cache: CacheType::F16, maps_weights: true, tuning: Tuning::default() })
}

fn engine(
    backend: &dyn Backend,
    checkpoint: &Arc<Checkpoint>,
    vocabulary: Arc<dyn Vocabulary>,
    limits: Limits,
    options: Options,
) -> Engine {
    let plan = backend.lower(model::build(checkpoint).unwrap()).unwrap();
    Engine::new(backend.compile(&plan, checkpoint.clone(), limits).unwrap(), vocabulary, options).unwrap()
}

/// What a user's first command does, without a GPU and without a Mac.
#[test]
fn the_embedded_model_says_what_the_reference_says() {
    let Some(metal) = metal(metal_sim::Options::default()) else { return };
    let path = fixtures::root("models/fable-29m-a10m-q4_k_m.gguf");
    let checkpoint = Arc::new(checkpoint::open(&path).unwrap());
    let tokenizer = Arc::new(Tokenizer::from_metadata(checkpoint.meta()).unwrap());
    let limits = Limits { max_tokens: 32, max_outputs: 1, n_pages: 3, max_positions: 96, ..Limits::default() };
    let tokens = tokenizer.encode("Once upon a time there was a fox who", Encode::default());
    let request = Request { max_new_tokens: 40, sampling: sampling(0.0, 1), ignore_eos: true, ..Request::new(tokens) };
    let backends: [&dyn Backend; 2] = [&Reference, &metal];
    let [exact, found] = backends.map(|backend| {
        let vocabulary: Arc<dyn Vocabulary> = tokenizer.clone();
        let mut engine = engine(backend, &checkpoint, vocabulary, limits, Options::default());
        run(&mut engine, request.clone()).0
    });
    assert_eq!((found.tokens, &found.text), (exact.tokens, &exact.text));
    println!("{}", exact.text);
    assert_eq!(found.end, Some(Ok(FinishReason::Length)));
}

/// Requests of two beginnings, in unlike lengths and temperatures. Each needs two more pages before it ends, of which
/// one is kept for it.
fn requests(n: u64, n_vocab: u64) -> impl Iterator<Item = Request> {
    let ids = move |seed: u64, n: u64| (0..n).map(move |i| (mix(seed, i) % n_vocab) as u32);
    let request = move |seed: u64| Request {
        max_new_tokens: 54 + 2 * seed as usize,
        sampling: sampling(if seed.is_multiple_of(2) { 0.0 } else { 0.9 }, seed),
        ignore_eos: true,
        logprobs: Some(2),
        ..Request::new(ids(seed % 2, 68).chain(ids(9 + seed, 1 + seed)).collect())
    };
    (0..n).map(request)
}

/// Every request gets the bits that it gets alone, in engines without room for all. Products take the plain form, which
/// adds up a row's sums in one order however many rows there are, and steps have fewer tokens than a tile.
#[test]
fn company_changes_nothing() {
    let Some(metal) = metal(metal_sim::Options::default()) else { return };
    let metal = Metal { tuning: Tuning { is_plain: true, ..metal.tuning }, ..metal };
    let mut n_preempted = 0;
    for file in ["qwen3next/model-q8_0.gguf", "gemma4/model-q4_1.gguf", "deepseekv3/model-q5_1.gguf"] {
        let path = fixtures::root("crates/conformance/tests/data").join(file);
        let checkpoint = Arc::new(checkpoint::open(&path).unwrap());
        let plan = model::build(&checkpoint).unwrap();
        let kinds = Kinds::of(&plan);
        let alone = Limits {
            max_tokens: 9,
            max_outputs: 4,
            n_pages: 6,
            max_positions: 160,
            n_window_pages: kinds.window_blocks() + 6,
            n_states: 1,
            max_draft: 0,
        };
        let requests: Vec<Request> = requests(4, plan.n_vocab as u64).collect();
        let program = |limits, options| engine(&metal, &checkpoint, Arc::new(Pieces), limits, options);
        let mut calm = program(alone, Options { prefix_cache: false, ..Options::default() });
        let expected: Vec<Answer> = requests.iter().map(|r| run(&mut calm, r.clone()).0).collect();

        let tight = Limits { n_pages: 7, n_window_pages: kinds.window_blocks() + 7, n_states: 6, ..alone };
        let mut engine = program(tight, Options { max_running: 3, ..Options::default() });
        let (mut events, mut ids) = (Events::new(), Vec::<RequestId>::new());
        for (i, request) in requests.iter().chain(&requests).enumerate() {
            ids.push(engine.submit(request.clone()).unwrap());
            for _ in 0..mix(7, i as u64) % 3 {
                engine.step(&mut events).unwrap();
                engine.audit().unwrap();
            }
        }
        let is_cancelled = engine.cancel(ids[6]);
        while engine.step(&mut events).unwrap() {
            engine.audit().unwrap();
        }
        let mut n_cached = 0;
        for (i, &id) in ids.iter().enumerate() {
            let ((got, usage), expected) = (answer(&events, id), &expected[i % expected.len()]);
            n_cached += usage.cached_tokens;
            match i == 6 && is_cancelled {
                true => assert!(expected.tokens.starts_with(&got.tokens), "{file}"),
                false => assert_eq!(got, *expected, "{file} request {i}"),
            }
        }
        let stats = engine.stats();
        println!("{file} {kinds:?}: {n_cached} tokens cached, {stats:?}");
        assert!(is_cancelled && n_cached >= 64, "{file}: {n_cached} cached, {stats:?}");
        n_preempted += stats.preemptions;
    }
    assert!(n_preempted > 0);
}

/// A GPU that is lost while requests run ends each with its words, as one that is lost while they wait for it does, and
/// the engine says so.
#[test]
fn a_lost_gpu_ends_requests_with_its_words() {
    for call in [Call::Submit, Call::Wait] {
        let fault = Some(Fault { call, after: 4 });
        let Some(metal) = metal(metal_sim::Options { fault, ..metal_sim::Options::default() }) else { return };
        let path = fixtures::root("crates/conformance/tests/data/qwen3moe/model-q4_0.gguf");
        let checkpoint = Arc::new(checkpoint::open(&path).unwrap());
        let limits = Limits { max_tokens: 9, max_outputs: 4, n_pages: 9, max_positions: 96, ..Limits::default() };
        let mut engine = engine(&metal, &checkpoint, Arc::new(Pieces), limits, Options::default());
        assert!(!engine.is_lost());
        let requests = requests(2, 64).map(|request| Request { tokens: request.tokens[..12].to_vec(), ..request });
        let ids: Vec<RequestId> = requests.map(|request| engine.submit(request).unwrap()).collect();
        let events = drain(&mut engine);
        for id in ids {
            let end = answer(&events, id).0.end;
            let told = matches!(&end, Some(Err(why)) if why.contains("as it was told to be"));
            assert!(told, "{call:?}: {end:?}");
        }
        assert!(engine.is_lost(), "{call:?}");
    }
}
