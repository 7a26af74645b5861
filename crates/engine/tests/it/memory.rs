//! Memory beyond pages: how far cached prefixes reach, what sequences hold, and the law on models that have it.

use std::sync::Arc;

use backend::CacheType;
use backend::{Backend, Kinds, Limits, PAGE};
use cpu::Cpu;
use engine::sampler::SamplerParams;
use engine::scheduler::{Engine, Events, FinishReason, Options, Request, RequestId};
use model::plan::{Cache, Op, ValidPlan};

use crate::fixtures;
use crate::toy::*;

const STATE: Kinds = Kinds { window: None, state: true, whole: false };
const WINDOW: Kinds = Kinds { window: Some(40), state: false, whole: false };
const BOTH: Kinds = Kinds { window: Some(100), state: true, whole: false };

/// Room for everything, and long prompts.
fn wide() -> Limits {
    Limits { n_pages: 512, n_window_pages: 512, max_positions: 8192, max_outputs: 4, n_states: 20, ..roomy() }
}

fn calm(kinds: Kinds, limits: Limits) -> Engine {
    engine_of(kinds, limits, Options::default(), Trouble::default())
}

/// A request that only its length ends.
fn long(tokens: Vec<u32>, max_new: usize) -> Request {
    Request { ignore_eos: true, ..request(tokens, 3, max_new) }
}

/// Prompts one after the other: how many tokens each finds; the last one answers as if alone.
#[test]
fn a_prefix_is_gone_on_from_where_all_memory_is() {
    let p = |seed, n| prompt(seed, n);
    let joined = |parts: &[Vec<u32>]| parts.concat();
    let edited = |at: usize| joined(&[p(1, at), p(2, 1200 - at)]);
    let states: &[(&[Vec<u32>], &[usize])] = &[
        // The same prompt again: the last page boundary before its end.
        (&[p(1, 100), p(1, 100), p(1, 97)], &[0, 96, 96]),
        // Where the prompt ends a page, the boundary before, and its end for a longer one.
        (&[p(1, 160), p(1, 160), p(1, 170)], &[0, 128, 160]),
        // A prompt that would save little is not cut; what comes behind it starts from its end where that is a page's.
        (&[p(1, 64), p(1, 64), joined(&[p(1, 64), p(2, 9)])], &[0, 0, 64]),
        // Where prompts part there is a checkpoint from the second one on.
        (&[joined(&[p(1, 90), p(2, 90)]), joined(&[p(1, 90), p(3, 60)]), joined(&[p(1, 90), p(4, 70)])], &[0, 0, 64]),
        // An edited middle finds the regular ones.
        (&[p(1, 1200), edited(1100), edited(500), edited(600)], &[0, 1024, 0, 512]),
    ];
    for kinds in [STATE, BOTH] {
        for (prompts, found) in states {
            let mut engine = calm(kinds, wide());
            for (tokens, &found) in prompts.iter().zip(*found) {
                let (got, usage) = run(&mut engine, request(tokens.clone(), 1, 1));
                assert_eq!(usage.cached_tokens, found, "{kinds:?}, prompts of {:?}", prompts.iter().map(Vec::len));
                assert_eq!(got, run(&mut calm(kinds, wide()), request(tokens.clone(), 1, 1)).0);
            }
        }
    }
    // Window pages are found wherever there are as many as the window needs.
    let windows: &[(&[Vec<u32>], &[usize])] = &[
        (&[p(1, 100), p(1, 100), joined(&[p(1, 70), p(2, 40)])], &[0, 96, 64]),
        (&[p(1, 1200), edited(1100), edited(500), edited(600)], &[0, 1088, 480, 576]),
    ];
    for (prompts, found) in windows {
        let mut engine = calm(WINDOW, wide());
        for (tokens, &found) in prompts.iter().zip(*found) {
            let (got, usage) = run(&mut engine, request(tokens.clone(), 1, 1));
            assert_eq!(usage.cached_tokens, found);
            assert_eq!(got, run(&mut calm(WINDOW, wide()), request(tokens.clone(), 1, 1)).0);
        }
    }
}

/// A sequence holds its window and what a chunk writes, and no more, however long it gets.
#[test]
fn windows_are_given_back() {
    for (window, least) in [(1, 1), (33, 2), (34, 3), (100, 5)] {
        let kinds = Kinds { window: Some(window), state: false, whole: false };
        // A page more than the window, so that a chunk of a page is always possible.
        let limits = Limits { max_tokens: PAGE, n_window_pages: least + 1, ..wide() };
        let mut engine = calm(kinds, limits);
        let expected = run(&mut calm(kinds, wide()), long(prompt(1, 1500), 100)).0;
        let id = engine.submit(long(prompt(1, 1500), 100)).unwrap();
        let mut events = Events::new();
        while engine.step(&mut events).unwrap() {
            engine.audit().unwrap();
            assert!(engine.stats().window_pages.used <= least, "{:?}", engine.stats());
        }
        assert_eq!(answer(&events, id).0, expected);
        // 1,500 tokens in chunks of a page, then 99 tokens.
        assert!(engine.stats().steps <= 1500_u64.div_ceil(PAGE as u64) + 99 + 1, "{:?}", engine.stats());

        let few = Limits { n_window_pages: least - 1, ..limits };
        let program = Box::new(Toy::new(few, kinds, Trouble::default()));
        let error = Engine::new(program, Arc::new(Pieces), Options::default()).err().unwrap().to_string();
        assert_eq!(
            error,
            format!("failed to start the engine: window pages is {}, it must be at least {least}", least - 1)
        );
    }
}

/// Checkpoints that sequences resumed from outlive unused ones.
#[test]
fn shared_beginnings_are_kept_longest() {
    for kinds in [STATE, BOTH] {
        let system = prompt(1, 200);
        let chat = |seed, n| [system.clone(), prompt(seed, n)].concat();
        // One running sequence and four checkpoints.
        let limits = Limits { max_outputs: 1, n_states: 5, ..wide() };
        let mut engine = calm(kinds, limits);
        let mut found = Vec::new();
        for seed in 2..6 {
            found.push(run(&mut engine, request(chat(seed, 80), seed, 1)).1.cached_tokens);
            // Unrelated prompts, each with its own checkpoint.
            for other in 0..2 {
                run(&mut engine, request(prompt(seed * 100 + other, 150), 1, 1));
            }
        }
        assert_eq!(found, [0, 0, 192, 192], "{kinds:?}");
        assert!(engine.stats().states.cached <= 4);
    }
}

/// A chat of several turns whose last message is written again: what is computed again lies behind the end of the
/// answer before it.
#[test]
fn an_edited_last_message_computes_only_itself() {
    for kinds in KINDS {
        let mut engine = calm(kinds, wide());
        let mut tokens = prompt(1, 700);
        for turn in 0..5 {
            let message = prompt(10 + turn, 90);
            for (version, message) in [message, prompt(20 + turn, 70)].into_iter().enumerate() {
                let now = [tokens.clone(), message].concat();
                let (got, usage) = run(&mut engine, long(now.clone(), 150));
                assert_eq!(got, run(&mut calm(kinds, wide()), long(now.clone(), 150)).0, "turn {turn}, {kinds:?}");
                let computed = usage.prompt_tokens - usage.cached_tokens;
                let own = now.len() - tokens.len();
                // The first turn's first version meets an empty cache, the second one is the first to branch off it.
                if turn > 0 {
                    assert!(computed <= own + PAGE, "turn {turn}.{version}: {computed} of {own}, {kinds:?}");
                }
                if version == 1 {
                    tokens = [now, got.tokens].concat();
                }
            }
        }
        // Written anew, the last answer needs no more than the last page of its prompt.
        let again = tokens[..tokens.len() - 150].to_vec();
        let usage = run(&mut engine, long(again, 1)).1;
        assert!(usage.prompt_tokens - usage.cached_tokens <= PAGE, "{usage:?}, {kinds:?}");
    }
}

/// Sequences that lost their memory resume from their checkpoints.
#[test]
fn a_preempted_sequence_goes_on_from_a_checkpoint() {
    for kinds in KINDS {
        let mut engine = calm(kinds, Limits { n_pages: 11, max_outputs: 4, ..roomy() });
        let requests = [long(prompt(1, 40), 100), long(prompt(2, 180), 60)];
        let ids = requests.clone().map(|request| engine.submit(request).unwrap());
        let events = drain(&mut engine);
        for (id, request) in ids.into_iter().zip(requests) {
            assert_eq!(answer(&events, id).0, run(&mut calm(kinds, roomy()), request).0);
        }
        assert_eq!(engine.stats().preemptions, 1);
        // The last pages go first when others need some, and the last checkpoint with them.
        let (needed, again) = (40 + 99 + 180 + 59, if kinds.state { 4 * PAGE } else { 2 * PAGE });
        assert!(engine.stats().tokens <= needed + again as u64, "{} of {needed}, {kinds:?}", engine.stats().tokens);
    }
}

struct Model {
    checkpoint: Arc<checkpoint::Checkpoint>,
    plan: ValidPlan,
}

impl Model {
    /// None where a file that adds to those in the tree is absent. With `window`, all layers but the last keep only
    /// that.
    fn open(path: &str, window: Option<usize>) -> Option<Model> {
        let path = if path.starts_with("../") { fixtures::more(path)? } else { fixtures::root(path) };
        let checkpoint = Arc::new(checkpoint::open(&path).unwrap());
        let mut plan = model::build(&checkpoint).unwrap().into_plan();
        let last = Cache(plan.caches.len() as u32 - 1);
        for op in plan.ops.iter_mut().filter(|_| window.is_some()) {
            match op {
                Op::Attention { cache, window: seen, .. } if *cache != last => *seen = window,
                _ => {}
            }
        }
        for cache in plan.caches.iter_mut().rev().skip(1).filter(|_| window.is_some()) {
            cache.window = window;
        }
        Some(Model { checkpoint, plan: ValidPlan::new(plan).unwrap() })
    }

    fn engine(&self, limits: Limits, options: Options) -> Engine {
        let cpu = Cpu { threads: 2, cache: CacheType::F16, ..Cpu::default() };
        let program = cpu.compile(&self.plan, self.checkpoint.clone(), limits).unwrap();
        Engine::new(program, Arc::new(Pieces), options).unwrap()
    }

    /// Requests of three beginnings, some of them one behind another's answer, in unlike lengths and temperatures.
    fn requests(&self, n: u64) -> Vec<Request> {
        let n_vocab = self.plan.n_vocab as u64;
        let ids = |seed: u64, n: u64| (0..n).map(move |i| (mix(seed, i) % n_vocab) as u32);
        let request = |seed: u64| {
            let random = |salt: u64, n: u64| mix(seed + 1000, salt) % n;
            let tokens = ids(random(1, 3), random(2, 150)).chain(ids(seed, 1 + random(3, 40))).collect();
            Request {
                max_new_tokens: 20 + random(4, 80) as usize,
                sampling: SamplerParams {
                    // Some list the tokens that they penalise, behind each of the drafts too.
                    top_k: if seed.is_multiple_of(3) { 20 } else { 0 },
                    penalty_repeat: if seed.is_multiple_of(3) { 1.1 } else { 1.0 },
                    ..sampling(if seed.is_multiple_of(2) { 0.0 } else { 0.9 }, seed)
                },
                ignore_eos: true,
                logprobs: Some(2),
                ..Request::new(tokens)
            }
        };
        (0..n).map(request).collect()
    }
}

/// Random requests with shared beginnings, cancels and preemptions on models with recurrent state, windows and latents,
/// with drafts and without: every one gets the tokens and log-probabilities it gets alone in an engine.
#[test]
fn models_with_more_than_pages_obey_the_law() {
    let models = [
        ("crates/conformance/tests/data/qwen3next/model-q8_0.gguf", None),
        ("crates/conformance/tests/data/qwen35/model-bf16.gguf", None),
        ("crates/conformance/tests/data/qwen3moe/model-q4_0.gguf", Some(50)),
        ("crates/conformance/tests/data/gemma4/model-q4_1.gguf", None),
        ("crates/conformance/tests/data/deepseekv3/model-q5_1.gguf", None),
        ("crates/conformance/tests/data/published/deepseek_v32/hf", None),
        ("../shared/fixtures/models/qwen35moe/model-q4_k_m.gguf", None),
        ("../shared/fixtures/models/qwen3next/model-q4_k_m.gguf", None),
        ("../shared/fixtures/models/gemma4moe/model-q4_k_m.gguf", None),
        ("../shared/fixtures/models/gptoss/model-q4_k_m.gguf", None),
    ];
    for (name, window) in models {
        let Some(model) = Model::open(name, window) else { continue };
        let (kinds, mut n_preempted) = (Kinds::of(&model.plan), [0; 2]);
        assert!(kinds.state || kinds.window.is_some() || name.contains("deepseek"), "{name} has {kinds:?}");
        let alone = Limits {
            max_tokens: 300,
            max_outputs: 4,
            n_pages: 10,
            max_positions: 300,
            n_window_pages: kinds.window_blocks() + 10,
            n_states: 1,
            max_draft: 0,
        };
        let options = Options { prefix_cache: false, ..Options::default() };
        let requests = model.requests(10);
        let expected: Vec<Answer> =
            requests.iter().map(|r| run(&mut model.engine(alone, options), r.clone()).0).collect();

        let tight =
            Limits { max_tokens: 37, n_pages: 10, n_window_pages: kinds.window_blocks() + 8, n_states: 8, ..alone };
        let options = Options { chunk: 29, ..Options::default() };
        let text = |(request, answer): (&Request, &Answer)| [&request.tokens[..], &answer.tokens].concat();
        let known = Known::new(requests.iter().zip(&expected).map(text).collect::<Vec<_>>().into());
        for drafts in [None, Some(1), Some(3), Some(9)] {
            let tight = Limits {
                max_draft: if drafts.is_some() { 5 } else { 0 },
                max_outputs: if drafts.is_some() { 14 } else { 4 },
                ..tight
            };
            let options = Options { max_running: 4, ..options };
            let mut engine = model.engine(tight, options);
            if let Some(wrong) = drafts {
                let n_vocab = model.plan.n_vocab;
                let guesses = Guesses { known: known.clone(), seed: wrong, n_vocab, never: None, wrong };
                engine.set_drafter(Some(Box::new(guesses)));
            }
            let (mut events, mut ids, mut cancelled) = (Events::new(), Vec::<RequestId>::new(), Vec::new());
            for (i, request) in requests.iter().chain(&requests).enumerate() {
                ids.push(engine.submit(request.clone()).unwrap());
                for _ in 0..mix(7, i as u64) % 9 {
                    engine.step(&mut events).unwrap();
                    engine.audit().unwrap();
                }
                if i % 7 == 5 && engine.cancel(ids[i - 2]) {
                    cancelled.push(ids[i - 2]);
                }
            }
            while engine.step(&mut events).unwrap() {
                engine.audit().unwrap();
            }
            let mut n_cached = 0;
            for (i, &id) in ids.iter().enumerate() {
                let (got, usage) = answer(&events, id);
                let expected = &expected[i % expected.len()];
                n_cached += usage.cached_tokens;
                if cancelled.contains(&id) {
                    assert_eq!(got.end, Some(Ok(FinishReason::Cancelled)));
                    assert!(expected.tokens.starts_with(&got.tokens) && expected.logprobs.starts_with(&got.logprobs));
                } else {
                    assert_eq!(got, *expected, "{name} request {i}");
                }
            }
            let stats = engine.stats();
            assert!(n_cached > 200 && !cancelled.is_empty(), "{name}: {n_cached}, {stats:?}");
            n_preempted[usize::from(drafts.is_some())] += stats.preemptions;
            let (drafted, accepted) = (stats.drafted, stats.accepted);
            match drafts {
                None => assert_eq!((drafted, accepted), (0, 0)),
                Some(1) => assert!(drafted > 100 && accepted < drafted / 8, "{name}: {accepted} of {drafted}"),
                Some(_) => assert!(accepted > 100 && accepted < drafted, "{name}: {accepted} of {drafted}"),
            }
            println!("{name} {kinds:?}: {n_cached} tokens cached, {stats:?}");
        }
        assert!(n_preempted.iter().all(|&n| n > 0), "{name}: {n_preempted:?}");
    }
}

/// Prompts of an engine that has ended: the next one finds what that one would have found itself, and answers alike.
#[test]
fn a_store_outlives_its_engine() {
    let p = |seed, n| prompt(seed, n);
    let prompts = [p(1, 700), [p(1, 300), p(2, 90)].concat(), [p(1, 300), p(3, 90)].concat(), p(4, 40)];
    for kinds in KINDS {
        let shelf = Shelf::default();
        // An engine that has answered the prompts, with a store or without.
        let used = |store: Option<&Shelf>| {
            let mut engine = calm(kinds, wide());
            assert!(store.is_none_or(|shelf| engine.set_store([1; 32], Store::of(shelf))));
            let answers: Vec<Answer> = prompts.iter().map(|t| run(&mut engine, long(t.clone(), 100)).0).collect();
            (engine, answers)
        };
        let (mut first, answers) = used(Some(&shelf));
        save_all(&mut first);
        let start = |identity: u8| {
            let mut engine = calm(kinds, wide());
            let saved = shelf.lock().unwrap().clone();
            assert!(engine.set_store([identity; 32], Store::of(&Arc::new(saved.into()))));
            engine
        };
        for (i, tokens) in prompts.iter().enumerate() {
            let followed = [tokens.clone(), answers[i].tokens.clone(), p(5, 20)].concat();
            for tokens in [tokens.clone(), followed] {
                let ask = || long(tokens.clone(), 50);
                let (expected, in_memory) = run(&mut used(None).0, ask());
                let (got, usage) = run(&mut start(1), ask());
                assert_eq!(got, expected, "{kinds:?}, prompt {i}");
                assert_eq!(usage.cached_tokens, in_memory.cached_tokens, "{kinds:?}, prompt {i}");
                // Other models and other salts find nothing.
                let (got, usage) = run(&mut start(2), ask());
                assert_eq!((got, usage.cached_tokens), (expected.clone(), 0));
                assert_eq!(run(&mut start(1), Request { cache_salt: 9, ..ask() }).1.cached_tokens, 0);
            }
        }
    }
}

/// Stores that lose things and have no room, pools too small for what is stored, cancels and preemptions: every request
/// gets what it gets alone.
#[test]
fn a_store_changes_no_answer() {
    let mut n_cached = 0;
    for (seed, kinds) in (1..4).flat_map(|seed| KINDS.map(|kinds| (seed, kinds))) {
        let shelf = Shelf::default();
        let blocks = kinds.window_blocks();
        let limits = Limits { max_tokens: 50, n_pages: 14, n_window_pages: blocks + 8, n_states: 6, ..wide() };
        let options = Options { max_running: 3, chunk: 40, ..Options::default() };
        for round in 0..4 {
            let mut engine = engine_of(kinds, limits, options, Trouble::default());
            let store = Store { shelf: shelf.clone(), seed: mix(seed, round), used: Arc::default() };
            assert!(engine.set_store([0; 32], Box::new(store)));
            let (mut events, mut all) = (Events::new(), Vec::new());
            for i in 0..12 {
                let random = |salt: u64, n: u64| mix(mix(seed, i), salt) % n;
                let tokens =
                    [prompt(random(1, 3), 40 + random(2, 200) as usize), prompt(i, 1 + random(3, 30) as usize)];
                let request = long(tokens.concat(), 1 + random(4, 90) as usize);
                all.push((engine.submit(request.clone()).unwrap(), request));
                for _ in 0..random(5, 12) {
                    engine.step(&mut events).unwrap();
                    engine.audit().unwrap();
                }
                if random(6, 6) == 0 {
                    engine.cancel(all[all.len() / 2].0);
                }
            }
            while engine.step(&mut events).unwrap() {
                engine.audit().unwrap();
            }
            save_all(&mut engine);
            for (id, request) in all {
                let (got, usage) = answer(&events, id);
                if got.end != Some(Ok(FinishReason::Cancelled)) {
                    assert_eq!(got, run(&mut calm(kinds, wide()), request).0, "{kinds:?}, seed {seed}, round {round}");
                    n_cached += usage.cached_tokens;
                }
            }
        }
    }
    assert!(n_cached > 5_000, "{n_cached}");
}

/// The memory of real programs: plain attention, windows, latents, delta nets with and without drafts.
#[test]
fn programs_get_their_memory_back_to_the_bit() {
    let models = [
        ("crates/conformance/tests/data/qwen3moe/model-q4_0.gguf", None, 0),
        ("crates/conformance/tests/data/qwen3moe/model-q4_0.gguf", Some(50), 0),
        ("crates/conformance/tests/data/gemma4/model-q4_1.gguf", None, 0),
        ("crates/conformance/tests/data/deepseekv3/model-q5_1.gguf", None, 0),
        ("crates/conformance/tests/data/published/glm_moe_dsa_shared/hf", None, 0),
        ("crates/conformance/tests/data/qwen3next/model-q8_0.gguf", None, 0),
        ("crates/conformance/tests/data/qwen35/model-bf16.gguf", None, 4),
    ];
    for (name, window, max_draft) in models {
        let model = Model::open(name, window).unwrap();
        let limits = Limits { max_tokens: 128, max_outputs: 8, n_pages: 12, max_positions: 300, max_draft, ..wide() };
        let shelf = Shelf::default();
        let start = || {
            let mut engine = model.engine(limits, Options { max_running: 2, ..Options::default() });
            assert!(engine.set_store([0; 32], Store::of(&shelf)), "{name}");
            engine
        };
        let tokens: Vec<u32> = (0..170).map(|i| (mix(3, i) % model.plan.n_vocab as u64) as u32).collect();
        let ask = |tokens: &[u32]| Request { logprobs: Some(2), ..long(tokens.to_vec(), 60) };
        let mut engine = start();
        let first = run(&mut engine, ask(&tokens)).0;
        let text = [&tokens[..], &first.tokens].concat();
        if max_draft > 0 {
            // Its last checkpoint is a state with accepted drafts that it is still to be moved past.
            let known = Known::new(vec![text.clone()].into());
            let guesses = Guesses { known, seed: 3, n_vocab: model.plan.n_vocab, never: None, wrong: 0 };
            engine.set_drafter(Some(Box::new(guesses)));
            assert_eq!(run(&mut engine, ask(&tokens)).0, first);
        }
        save_all(&mut engine);
        let followed = [&text[..], &tokens[..9]].concat();
        for (tokens, least) in [(&tokens[..], 160), (&followed[..], 192)] {
            let expected =
                run(&mut model.engine(limits, Options { prefix_cache: false, ..Options::default() }), ask(tokens));
            let (got, usage) = run(&mut start(), ask(tokens));
            assert_eq!(got, expected.0, "{name} {window:?}");
            assert!(usage.cached_tokens >= least, "{name} {window:?}: {}", usage.cached_tokens);
        }
    }
}
