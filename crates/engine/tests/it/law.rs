//! The law on real programs: a request's tokens are the same alone and in any company.

use std::sync::Arc;

use backend::CacheType;
use backend::{Backend, Limits, reference::Reference};
use checkpoint::Checkpoint;
use cpu::Cpu;
use engine::scheduler::{Engine, Options, Request};
use engine::tokenizer::Tokenizer;

use crate::fixtures;
use crate::toy::{answer, drain, mix, run, sampling};

struct Model {
    checkpoint: Arc<Checkpoint>,
    tokenizer: Arc<Tokenizer>,
}

impl Model {
    fn open(path: &str) -> Model {
        let checkpoint = Arc::new(checkpoint::open(&fixtures::root(path)).unwrap());
        let tokenizer = Arc::new(Tokenizer::from_metadata(checkpoint.meta()).unwrap());
        Model { checkpoint, tokenizer }
    }

    fn engine(&self, backend: &dyn Backend, limits: Limits, options: Options) -> Engine {
        let plan = model::build(&self.checkpoint).unwrap();
        let program = backend.compile(&plan, self.checkpoint.clone(), limits).unwrap();
        Engine::new(program, self.tokenizer.clone(), options).unwrap()
    }

    /// `shared` tokens that others have too, then `own` ones.
    fn request(&self, shared: usize, own: usize, temperature: f32, max_new_tokens: usize) -> Request {
        let n_vocab = self.tokenizer.n_vocab() as u64;
        let ids = |seed: u64, n: usize| (0..n as u64).map(move |i| (mix(seed, i) % n_vocab) as u32);
        let tokens = ids(0, shared).chain(ids(own as u64, own)).collect();
        Request {
            max_new_tokens,
            sampling: sampling(temperature, own as u64),
            ignore_eos: true,
            logprobs: Some(2),
            ..Request::new(tokens)
        }
    }
}

#[test]
fn company_changes_nothing() {
    let cpu = |threads, cache| Cpu { threads, cache, ..Cpu::default() };
    let embedded = "models/fable-29m-a10m-q4_k_m.gguf";
    let programs: [(&dyn Backend, &str); 5] = [
        (&cpu(1, CacheType::F16), embedded),
        (&cpu(2, CacheType::F32), embedded),
        (&cpu(2, CacheType::Q8_0), embedded),
        (&cpu(2, CacheType::Q4_0), embedded),
        (&Reference, "crates/conformance/tests/data/types/qwen3moe-blocks256.gguf"),
    ];
    for (backend, path) in programs {
        let model = Model::open(path);
        let shapes = [(0, 1, 0.0, 70), (0, 20, 0.7, 60), (70, 9, 0.8, 12), (70, 5, 0.0, 6)];
        let requests = shapes.map(|(shared, own, temperature, n)| model.request(shared, own, temperature, n));
        let roomy = Limits { max_tokens: 128, max_outputs: 8, n_pages: 16, max_positions: 160, ..Limits::default() };
        let options = Options { prefix_cache: false, ..Options::default() };
        let alone = requests.clone().map(|r| run(&mut model.engine(backend, roomy, options), r).0);
        // Everything twice, in chunks that fit no page, with pages for less than half of it.
        let tight = Limits { max_tokens: 23, n_pages: 5, ..roomy };
        let mut engine = model.engine(backend, tight, Options { chunk: 13, ..Options::default() });
        let ids: Vec<_> = requests.iter().chain(&requests).map(|r| engine.submit(r.clone()).unwrap()).collect();
        let events = drain(&mut engine);
        let mut n_cached = 0;
        for (i, &id) in ids.iter().enumerate() {
            let (got, usage) = answer(&events, id);
            assert_eq!(got, alone[i % alone.len()], "{} {path} request {i}", backend.name());
            n_cached += usage.cached_tokens;
        }
        assert!(n_cached > 0 && engine.stats().preemptions > 0, "{n_cached} cached, {:?}", engine.stats());
    }
}
