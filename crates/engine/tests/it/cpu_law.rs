//! The CPU law at the engine's level, on the embedded model: a request gives the same tokens alone and beside others,
//! whatever the threads, the instruction set, the chunks its prompt is cut into, prefix hits and preemptions.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use backend::CacheType;
use backend::{Backend, Limits, PAGE};
use cpu::{Cpu, Isa};
use engine::sampler::SamplerParams;
use engine::scheduler::{Engine, EventKind, Events, Options, Pooling, Request, RequestId};
use engine::tokenizer::{Encode, Tokenizer};

/// How the requests are computed.
#[derive(Clone, Copy, Debug)]
struct Way {
    isa: Isa,
    threads: usize,
    max_tokens: usize,
    n_pages: usize,
    prefix_cache: bool,
    together: bool,
}

/// Fewer than this do not hold all requests at once.
const FEW_PAGES: usize = 16;

/// Length of each answer; the long ones pass the ends of two pages, which is more than admission keeps free for them.
const NEW_TOKENS: [usize; 11] = [70, 70, 70, 8, 8, 8, 8, 12, 0, 0, 0];
/// The first of the requests for embeddings, and how each is pooled.
const EMBEDDED: usize = 8;
const POOLED: [Pooling; 3] = [Pooling::Last, Pooling::Mean, Pooling::First];

struct Bed {
    checkpoint: Arc<checkpoint::Checkpoint>,
    tokenizer: Arc<Tokenizer>,
}

impl Bed {
    fn new() -> Bed {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fable-29m-a10m-q4_k_m.gguf");
        let checkpoint = Arc::new(checkpoint::open(&path).expect("the embedded model opens"));
        let tokenizer = Arc::new(Tokenizer::from_metadata(checkpoint.meta()).expect("its tokenizer"));
        Bed { checkpoint, tokenizer }
    }

    /// Eleven requests of unlike length and sampling; some begin alike for more than a page.
    fn requests(&self) -> Vec<Request> {
        let shared = "Once upon a time there was a small fox who lived at the edge of a large wood. ".repeat(3);
        let prompts = [
            "Tell me a story".to_string(),
            "Hi".to_string(),
            "The little bird said".to_string(),
            format!("{shared}One day he lost his hat"),
            format!("{shared}One day he found a boat"),
            shared.clone(),
            "What is the sun? ".repeat(12),
            format!("{shared}{shared}And then"),
            format!("{shared}One day he lost his way"),
            format!("{shared}One day he lost his way"),
            format!("{shared}One day he lost his way"),
        ];
        let request = |(i, prompt): (usize, &String)| {
            let ids = self.tokenizer.encode(prompt, Encode { add_special: true, parse_special: false });
            let mut request = Request::new(ids);
            request.max_new_tokens = NEW_TOKENS[i];
            request.ignore_eos = true;
            request.routing = i % 2 == 0;
            request.embedding = i.checked_sub(EMBEDDED).map(|i| POOLED[i]);
            request.sampling = match i % 3 {
                0 => SamplerParams::greedy(),
                _ => SamplerParams { seed: i as u64, temperature: 0.9, ..SamplerParams::default() },
            };
            request
        };
        prompts.iter().enumerate().map(request).collect()
    }

    fn engine(&self, way: Way) -> Engine {
        let plan = model::build(&self.checkpoint).expect("a plan");
        let limits = Limits {
            max_tokens: way.max_tokens,
            max_outputs: way.max_tokens.min(8),
            n_pages: way.n_pages,
            max_positions: way.n_pages.min(32) * PAGE,
            ..Limits::default()
        };
        let cpu = Cpu { isa: way.isa, threads: way.threads, cache: CacheType::F16, ..Cpu::default() };
        let program = cpu.compile(&plan, Arc::clone(&self.checkpoint), limits).expect("a program");
        let options = Options { prefix_cache: way.prefix_cache, ..Options::default() };
        let tokenizer: Arc<Tokenizer> = Arc::clone(&self.tokenizer);
        Engine::new(program, tokenizer, options).expect("an engine")
    }

    /// The tokens of every request, and the experts that were chosen for them where it asks.
    fn tokens(&self, way: Way) -> Vec<Answer> {
        let mut engine = self.engine(way);
        let mut out = BTreeMap::new();
        let mut ids = Vec::new();
        for request in self.requests() {
            ids.push(engine.submit(request).expect("submit"));
            if !way.together {
                drain(&mut engine, &mut out);
            }
        }
        drain(&mut engine, &mut out);
        let preempted = engine.stats().preemptions > 0;
        assert_eq!(preempted, way.n_pages < FEW_PAGES, "{way:?}");
        ids.iter().map(|id| out.remove(id).unwrap_or_default()).collect()
    }
}

/// What comes back: tokens, experts of those tokens, and the bits of an embedding.
type Answer = (Vec<u32>, Vec<u16>, Vec<u32>);

fn drain(engine: &mut Engine, out: &mut BTreeMap<RequestId, Answer>) {
    let mut events = Events::new();
    loop {
        events.clear();
        let more = engine.step(&mut events).expect("step");
        for event in events.iter() {
            match event.kind {
                EventKind::Token { token, routing, .. } => {
                    let (tokens, experts, _) = out.entry(event.id).or_default();
                    tokens.push(token);
                    experts.extend(routing.unwrap_or_default());
                }
                EventKind::Failed(error) => panic!("{error}"),
                EventKind::Embedding(row) => {
                    out.entry(event.id).or_default().2 = row.iter().map(|x| x.to_bits()).collect()
                }
                EventKind::Done { .. } | EventKind::Prompt { .. } => {}
            }
        }
        if !more {
            return;
        }
    }
}

/// A causal model's state of a token is that of the text up to there.
#[test]
fn pooled_states_are_those_of_the_beginnings() {
    let bed = Bed::new();
    let way = Way { isa: Isa::best(), threads: 1, max_tokens: 4, n_pages: 64, prefix_cache: true, together: false };
    let mut engine = bed.engine(way);
    let ids = bed.tokenizer.encode("The little bird said nothing at all", Encode::default());
    let mut embed = |tokens: &[u32], pooling| {
        let mut request = Request::new(tokens.to_vec());
        request.embedding = Some(pooling);
        let id = engine.submit(request).expect("submit");
        let mut out = BTreeMap::new();
        drain(&mut engine, &mut out);
        out.remove(&id).unwrap_or_default().2
    };
    let states: Vec<Vec<u32>> = (1..=ids.len()).map(|n| embed(&ids[..n], Pooling::Last)).collect();
    assert!(ids.len() > 5 && states[0] != states[1]);
    assert_eq!(embed(&ids, Pooling::First), states[0]);
    let value = |state: &Vec<u32>, j: usize| f64::from(f32::from_bits(state[j]));
    let mean = |j| ((states.iter().map(|state| value(state, j)).sum::<f64>() / ids.len() as f64) as f32).to_bits();
    assert_eq!(embed(&ids, Pooling::Mean), (0..states[0].len()).map(mean).collect::<Vec<_>>());
}

#[test]
fn the_same_tokens_whatever_computes_them() {
    let bed = Bed::new();
    let base =
        Way { isa: Isa::best(), threads: 1, max_tokens: 512, n_pages: 256, prefix_cache: false, together: false };
    let expected = bed.tokens(base);
    let width: usize = bed.engine(base).routers().iter().map(|router| router.n_used).sum();
    assert!(width > 0, "the embedded model has experts");
    for (i, (tokens, experts, embedding)) in expected.iter().enumerate() {
        assert_eq!(tokens.len(), NEW_TOKENS[i], "request {i} ends at its limit");
        assert_eq!(experts.len(), if i % 2 == 0 { tokens.len() * width } else { 0 }, "request {i}");
        assert_eq!(embedding.len(), if i >= EMBEDDED { 256 } else { 0 }, "request {i}");
    }
    let mut ways = vec![
        Way { threads: 2, ..base },
        Way { together: true, ..base },
        Way { together: true, threads: 2, prefix_cache: true, ..base },
        Way { prefix_cache: true, ..base },
        Way { max_tokens: 16, together: true, threads: 2, ..base },
        Way { max_tokens: 7, prefix_cache: true, ..base },
        // Too few pages for all: sequences give theirs up and are computed again.
        Way { n_pages: 6, together: true, threads: 2, prefix_cache: true, ..base },
    ];
    for isa in Isa::ALL {
        match isa.check() {
            Ok(_) => ways.push(Way { isa, together: true, max_tokens: 64, ..base }),
            Err(error) => println!("skipped {}: {error}", isa.name()),
        }
    }
    for way in ways {
        assert_eq!(bed.tokens(way), expected, "{way:?}");
    }
}
