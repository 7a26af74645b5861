//! Hostile model files, from bytes to an answer: each ends in a model or an error, never in a panic, a loop, or an
//! allocation out of proportion to the file; and a model with broken numbers ends its requests with an error.
//! `PROPTEST_CASES` sets the number of cases.

#![allow(clippy::unwrap_used)] // a test may panic in its helpers too

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;

use backend::CacheType;
use backend::{Backend, Batch, CompileError, Limits, Program, Tables};
use checkpoint::gguf::Writer;
use checkpoint::{Checkpoint, Strings, Value};
use cpu::{Cpu, Isa};
use engine::sampler::SamplerParams;
use engine::scheduler::{Engine, EventKind, Events, Options, Request};
use engine::template::{Chat, ChatTemplate, Message};
use engine::tokenizer::{Encode, Tokenizer};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;
use quant::WeightType;

/// Refuses allocations that no small file needs: an infallible allocation of that size ends the test.
struct Stingy;

const MOST_BYTES: usize = 1 << 26;

// SAFETY: hands everything to the system's allocator, or says that there is no memory.
unsafe impl GlobalAlloc for Stingy {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        if layout.size() > MOST_BYTES { std::ptr::null_mut() } else { unsafe { System.alloc(layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        if layout.size() > MOST_BYTES { std::ptr::null_mut() } else { unsafe { System.alloc_zeroed(layout) } }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Stingy = Stingy;

/// How far a file came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Came {
    NoFile,
    NoPlan,
    NoProgram,
    Ran,
    Answered,
}

const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];
const LIMITS: Limits = Limits {
    max_tokens: 5,
    max_outputs: 2,
    n_pages: 2,
    max_positions: 40,
    n_window_pages: 2,
    n_states: 2,
    max_draft: 0,
};

/// The whole road.
fn survive(bytes: Vec<u8>) -> Came {
    let Ok(checkpoint) = checkpoint::from_bytes("hostile", bytes) else { return Came::NoFile };
    let checkpoint = Arc::new(checkpoint);
    let tokenizer = tokenize(&checkpoint);
    render(&checkpoint);
    let Ok(plan) = model::build(&checkpoint) else { return Came::NoPlan };
    assert!(!plan.to_string().is_empty());
    let _ = (plan.bytes_per_token(), plan.active_params(), plan.n_params());
    assert!(Cpu::default().footprint(&plan, LIMITS).total() > 0);

    let compile =
        |isa, threads, cache| Cpu { isa, threads, cache, ..Cpu::default() }.compile(&plan, checkpoint.clone(), LIMITS);
    let Ok(mut scalar) = compile(Isa::Scalar, 1, CacheType::F16) else { return Came::NoProgram };
    let mut best = match compile(Isa::best(), 2, CacheType::F16) {
        Ok(best) => best,
        // Two threads need more.
        Err(CompileError::Memory { .. }) => return Came::NoProgram,
        Err(error) => panic!("compiles for scalar only: {error}"),
    };
    if PROMPT.iter().any(|&id| id as usize >= plan.n_vocab) {
        return Came::NoProgram;
    }
    let sound = steps(&mut *scalar, &mut *best);
    let Some(tokenizer) = tokenizer else { return Came::Ran };
    for (program, sampling) in [(scalar, SamplerParams::greedy()), (best, SamplerParams::default())] {
        answer(program, tokenizer.clone(), sampling, sound);
    }
    Came::Answered
}

/// Texts there and back.
fn tokenize(checkpoint: &Checkpoint) -> Option<Arc<Tokenizer>> {
    let tokenizer = Tokenizer::from_metadata(checkpoint.meta()).ok()?;
    for text in ["", "the  quick brown 🦊 \u{0}\n\n 12345 don't", "<s></s><|im_end|> <unk>[INST]\u{fffd}é"] {
        for special in [false, true] {
            let ids = tokenizer.encode(text, Encode { add_special: special, parse_special: special });
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
            tokenizer.decode(&ids);
        }
    }
    tokenizer.decode(&[0, 1, 2, u32::MAX, tokenizer.n_vocab() as u32]);
    Some(Arc::new(tokenizer))
}

fn render(checkpoint: &Checkpoint) {
    let Ok(Some(source)) = checkpoint.meta().opt_str("tokenizer.chat_template") else { return };
    let messages = Message::to_json(&[Message::new("user", "Hi")]);
    let _ = ChatTemplate::new(source, "<s>", "</s>").and_then(|template| template.render(&Chat::new(&messages)));
}

/// A prompt and a token on two instruction sets, which must agree. Whether the prompt's last logits can be sampled.
fn steps(scalar: &mut dyn Program, best: &mut dyn Program) -> bool {
    let mut sound = false;
    let mut batch = Batch::default();
    for (tokens, pos) in [(&PROMPT[..], 0), (&PROMPT[..1], PROMPT.len())] {
        batch.clear();
        batch.push(
            tokens,
            pos,
            Tables { pages: &[1, 0], window_pages: &[0, 1], first_window_block: 0, state: 1 },
            [tokens.len() - 1],
        );
        let (a, b) = (scalar.step(&batch).unwrap(), best.step(&batch).unwrap());
        assert_eq!(a.faults, b.faults);
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        assert!(a.logits.iter().zip(b.logits).all(same), "scalar and {} differ", Isa::best());
        if pos == 0 {
            let bad = |l: &f32| l.is_nan() || *l == f32::INFINITY;
            let some = a.logits.iter().any(|&l| l > f32::NEG_INFINITY);
            sound = a.faults.is_empty() && some && !a.logits.iter().any(bad);
        }
    }
    sound
}

/// A request ends, and with an error where the first logits were no numbers.
fn answer(program: Box<dyn Program>, tokenizer: Arc<Tokenizer>, sampling: SamplerParams, sound: bool) {
    let mut engine = Engine::new(program, tokenizer, Options::default()).unwrap();
    let mut request = Request::new(PROMPT.to_vec());
    (request.max_new_tokens, request.sampling, request.logprobs) = (3, sampling, Some(2));
    engine.submit(request).unwrap();
    let mut events = Events::new();
    let mut n_steps = 0;
    while engine.step(&mut events).unwrap() {
        n_steps += 1;
        assert!(n_steps < 10, "the request does not end");
    }
    let failed = events.iter().any(|e| matches!(e.kind, EventKind::Failed(_)));
    let tokens = events.iter().filter(|e| matches!(e.kind, EventKind::Token { .. })).count();
    assert!(failed || events.iter().any(|e| matches!(e.kind, EventKind::Done { .. })));
    assert_eq!(sound, tokens > 0, "failed: {failed}");
    engine.audit().unwrap();
}

/// A file taken apart.
#[derive(Clone, Debug, Default)]
struct Parts {
    entries: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
}

#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    shape: Vec<usize>,
    dtype: WeightType,
    bytes: Vec<u8>,
}

impl Parts {
    fn of(path: &str) -> Parts {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path);
        let file = checkpoint::open(&path).unwrap();
        let tensor = |t: &checkpoint::TensorInfo| Tensor {
            name: t.name.clone(),
            shape: t.shape.clone(),
            dtype: t.dtype,
            bytes: file.bytes(t).to_vec(),
        };
        Parts {
            entries: file.meta().iter().map(|(key, value)| (key.into(), value.clone())).collect(),
            tensors: file.tensors().iter().map(tensor).collect(),
        }
    }

    /// The file, or nothing where not even the writer takes it.
    fn bytes(&self) -> Option<Vec<u8>> {
        let mut writer = Writer::new();
        for (key, value) in &self.entries {
            writer.meta(key, value.clone());
        }
        for t in &self.tensors {
            writer.tensor(&t.name, &t.shape, t.dtype, &t.bytes[..]);
        }
        let mut out = Vec::new();
        writer.write(&mut out).ok().map(|()| out)
    }

    fn change(&mut self, change: &Change) {
        let Change { on, at, how, word } = *change;
        let n = if on == On::Tensor { self.tensors.len() } else { self.entries.len() };
        if n == 0 {
            return;
        }
        match on {
            On::Key if how % 8 == 0 => drop(self.entries.remove(at % n)),
            On::Key => self.entries[at % n].1 = changed(&self.entries[at % n].1, how, word),
            On::Tensor if how % 16 == 0 => drop(self.tensors.remove(at % n)),
            On::Tensor => self.tensors[at % n].change(how, word),
        }
    }
}

impl Tensor {
    fn change(&mut self, how: u8, word: u64) {
        match how % 16 {
            1 => self.name.push('x'),
            2 => self.shape.reverse(),
            3 => self.shape.push(1),
            4 => self.shape.insert(0, 1),
            5 => drop(self.shape.pop()),
            6 => self.shape.iter_mut().take(1).for_each(|n| *n += 1),
            7 => self.shape.iter_mut().take(1).for_each(|n| *n /= 2),
            8 => self.dtype = WeightType::GGUF[word as usize % WeightType::GGUF.len()],
            _ => return fill(&mut self.bytes, self.dtype, how, word),
        }
        if let Some(row) = self.shape.last().and_then(|&row| self.dtype.row_bytes(row)) {
            let rows: usize = self.shape[..self.shape.len() - 1].iter().product();
            self.bytes.resize(rows * row, 0x3c);
        }
    }
}

/// Overwrites weights: all of them, or a few.
fn fill(bytes: &mut [u8], dtype: WeightType, how: u8, word: u64) {
    let mut random = word;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 56) as u8
    };
    let n = bytes.len().max(1);
    match how % 7 {
        0 => bytes.iter_mut().for_each(|b| *b = next()),
        1 => bytes.fill(0xff),
        2 => bytes.fill(0),
        3 => bytes.fill(if word.is_multiple_of(2) { 0x7c } else { 0x7f }),
        4 => bytes.iter_mut().step_by(4).for_each(|b| *b = next() & 3),
        5 => bytes[word as usize % n..].iter_mut().take(4).for_each(|b| *b = next()),
        // One whole number that is none.
        _ => {
            let value = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-45][word as usize % 5];
            let at = (word as usize / 5 % n) & !3;
            if dtype == WeightType::F32 {
                bytes[at..].iter_mut().zip(value.to_le_bytes()).for_each(|(b, v)| *b = v);
            } else {
                bytes[at & !1..].iter_mut().zip([0, 0x7c]).for_each(|(b, v)| *b = v);
            }
        }
    }
}

/// A value of the same key that is not what was meant.
fn changed(value: &Value, how: u8, word: u64) -> Value {
    const FLOATS: [f32; 12] =
        [0.0, -0.0, -1.0, 1.0, 1e-45, 1e-30, 0.5, 1e30, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    let float = FLOATS[word as usize % FLOATS.len()];
    let near = |v: u64| match how % 5 {
        0 => v.wrapping_add(1),
        1 => v.wrapping_sub(1),
        2 => v.wrapping_mul(2),
        3 => v / 2,
        _ => word,
    };
    match value {
        Value::U32(v) if how & 64 == 0 => Value::U32(near(u64::from(*v)) as u32),
        Value::U32(_) => match how % 4 {
            0 => Value::F32(float),
            1 => Value::I32(word as i32),
            2 => Value::U64(word),
            _ => Value::from("12"),
        },
        Value::F32(_) => Value::F32(float),
        Value::Bool(v) => Value::Bool(!v),
        Value::Str(text) => {
            let mut text = text.to_vec();
            match how % 3 {
                0 => text.truncate(word as usize % (text.len() + 1)),
                1 => text.extend(b"{% for x in range(9999999) %}{{ x }}{% endfor %}"),
                _ => text.iter_mut().skip(word as usize % 31).step_by(13).for_each(|b| *b ^= how),
            }
            Value::from(&text[..])
        }
        Value::Strings(strings) => strings_changed(strings, how, word),
        Value::Numbers(numbers) => {
            let mut ints: Vec<i64> = numbers.iter().map(|v| v.to_int().unwrap_or(1) as i64).collect();
            let floats = numbers.iter().any(|v| v.to_f32().is_some());
            let n = ints.len().max(1);
            match how % 3 {
                0 => ints.truncate(word as usize % (n + 1)),
                1 => ints.iter_mut().skip(word as usize % n).take(1).for_each(|v| *v = word as i64 % 9),
                _ => ints.iter_mut().for_each(|v| *v = word as i64 % 7),
            }
            match floats {
                true => Value::from(vec![float; ints.len()]),
                false => Value::from(ints.iter().map(|&v| v as i32).collect::<Vec<_>>()),
            }
        }
        other => other.clone(),
    }
}

/// Tokens or merges that lie.
fn strings_changed(strings: &Strings, how: u8, word: u64) -> Value {
    let mut all: Vec<Vec<u8>> = strings.iter().map(<[u8]>::to_vec).collect();
    let n = all.len();
    let at = word as usize % n.max(1);
    match how % 8 {
        0 => all.truncate(at),
        1 => all.reverse(),
        2 if n > 0 => all[at].clear(),
        3 if n > 0 => all[at] = all[0].clone(),
        4 if n > 0 => all[at] = vec![b'a'; 1 << 16],
        5 if n > 0 => all[at] = b"\xff\xfe <0xG1> ".to_vec(),
        6 if n > 0 => all[at] = b" ".to_vec(),
        _ => all.push(b"a b c".to_vec()),
    }
    Value::Strings(all.iter().collect())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    Key,
    Tensor,
}

/// One change of a file: of what, of which, in what way, with what.
#[derive(Clone, Debug)]
struct Change {
    on: On,
    at: usize,
    how: u8,
    word: u64,
}

fn change() -> impl Strategy<Value = Change> {
    let word = prop_oneof![0u64..70, any::<u64>(), (0u32..64).prop_map(|s| 1 << s), (0u32..64).prop_map(|s| !0 >> s)];
    (select(vec![On::Key, On::Tensor, On::Tensor]), any::<usize>(), any::<u8>(), word)
        .prop_map(|(on, at, how, word)| Change { on, at, how, word })
}

/// Runs `n` cases (or as many as `PROPTEST_CASES` says) and counts how far they came.
fn run<S: Strategy>(n: u32, strategy: S, file: impl Fn(S::Value) -> Option<Vec<u8>>) -> Vec<(Came, usize)> {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { n };
    let config = ProptestConfig { cases, failure_persistence: None, ..default };
    let all = [Came::NoFile, Came::NoPlan, Came::NoProgram, Came::Ran, Came::Answered];
    let counts = RefCell::new(all.map(|came| (came, 0)).to_vec());
    let result = TestRunner::new(config).run(&strategy, |case| {
        let came = file(case).map_or(Came::NoFile, survive);
        counts.borrow_mut()[came as usize].1 += 1;
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    let counts = counts.into_inner();
    println!("{counts:?}");
    counts
}

/// Share of the cases that came this far or farther.
fn share(counts: &[(Came, usize)], came: Came) -> f64 {
    let sum = |from| counts.iter().filter(|c| c.0 >= from).map(|c| c.1).sum::<usize>() as f64;
    sum(came) / sum(Came::NoFile)
}

const FILES: [&str; 7] = [
    "../conformance/tests/data/types/qwen3moe-blocks256.gguf",
    "../conformance/tests/data/types/qwen3moe-blocks32.gguf",
    "../conformance/tests/data/types/qwen3-float.gguf",
    "../conformance/tests/data/types/llama-blocks32.gguf",
    "../conformance/tests/data/llama/model-q5_1.gguf",
    "../conformance/tests/data/mixtral/model-q4_1.gguf",
    "../conformance/tests/data/qwen3/model-q8_0.gguf",
];

/// The files, some with the vocabulary of a SentencePiece model and a template.
fn files() -> Vec<Parts> {
    let spm = Parts::of("tests/data/spm.gguf");
    let mut all: Vec<Parts> = FILES.iter().map(|path| Parts::of(path)).collect();
    for parts in &mut all {
        if !parts.entries.iter().any(|(key, _)| key == "tokenizer.ggml.tokens") {
            let tokenizer = spm.entries.iter().filter(|(key, _)| key.starts_with("tokenizer."));
            parts.entries.extend(tokenizer.cloned());
        }
        let template = "{%- for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}";
        parts.entries.push(("tokenizer.chat_template".into(), template.into()));
    }
    all
}

#[test]
fn good_files_answer() {
    for (path, parts) in FILES.iter().zip(files()) {
        assert_eq!(survive(parts.bytes().unwrap()), Came::Answered, "{path}");
    }
}

#[test]
fn files_with_changed_keys_and_tensors() {
    let files = files();
    let counts = run(200, (0..FILES.len(), vec(change(), 1..4)), |(i, changes)| {
        let mut parts = files[i].clone();
        changes.iter().for_each(|change| parts.change(change));
        parts.bytes()
    });
    assert!(share(&counts, Came::Ran) > 0.2, "{counts:?}");
    assert!(share(&counts, Came::Ran) < 0.9, "{counts:?}");
}

#[test]
fn files_with_changed_bytes() {
    let files: Vec<Vec<u8>> = files().iter().map(|parts| parts.bytes().unwrap()).collect();
    // Headers are short and weights are long: most changes go where most is decided.
    let place = prop_oneof![0usize..2000, any::<usize>()];
    let counts = run(200, (0..FILES.len(), vec((place, any::<u8>(), any::<bool>()), 1..5)), |(i, changes)| {
        let mut bytes = files[i].clone();
        for (at, byte, bit) in changes {
            let at = at % bytes.len();
            bytes[at] = if bit { bytes[at] ^ 1 << (byte % 8) } else { byte };
        }
        Some(bytes)
    });
    assert!(share(&counts, Came::Ran) > 0.1, "{counts:?}");
}

/// Dimensions that fit each other.
#[derive(Clone, Debug)]
struct Dims {
    arch: &'static str,
    n_layer: usize,
    n_vocab: usize,
    d_model: usize,
    group: usize,
    n_kv: usize,
    d_k: usize,
    d_v: usize,
    d_ff: usize,
    experts: Option<(usize, usize)>,
    eps: f32,
    freq_base: f32,
    types: Vec<WeightType>,
    how: Vec<u8>,
    word: u64,
}

fn dims() -> impl Strategy<Value = Dims> {
    let width = || select(vec![1usize, 2, 3, 16, 31, 32, 33, 64, 96, 256]);
    let sizes = (1usize..3, 6usize..80, width(), 1usize..9, 1usize..4, select(vec![2usize, 4, 16, 34, 64, 128]));
    let others = (width(), width(), 1usize..20, 1usize..33, select(vec![0.0f32, 1e-6, 1.0, 1e-38]));
    let rest = (
        select(vec![1.5f32, 1e4, 1e30]),
        vec(select(WeightType::GGUF.to_vec()), 12),
        vec(any::<u8>(), 12),
        any::<u64>(),
    );
    (select(vec!["llama", "qwen3", "qwen3moe"]), sizes, others, rest).prop_map(|(arch, s, o, r)| Dims {
        arch,
        n_layer: s.0,
        n_vocab: s.1,
        d_model: s.2,
        group: s.3,
        n_kv: s.4,
        d_k: s.5,
        d_v: o.0,
        d_ff: o.1,
        experts: (arch == "qwen3moe" || arch == "llama" && o.2 % 2 == 0).then_some((o.2, o.3.min(o.2))),
        eps: o.4,
        freq_base: r.0,
        types: r.1,
        how: r.2,
        word: r.3,
    })
}

impl Dims {
    /// A model of these dimensions, its weights filled in any way.
    fn parts(&self, tokenizer: &[(String, Value)]) -> Parts {
        let mut parts = Parts { entries: tokenizer.to_vec(), tensors: Vec::new() };
        let Dims { arch, n_vocab, d_model, n_kv, d_k, d_v, d_ff, .. } = *self;
        let n_head = self.group * n_kv;
        parts.entries.push(("general.architecture".into(), arch.into()));
        let mut count = |key: &str, n: usize| parts.entries.push((format!("{arch}.{key}"), Value::U32(n as u32)));
        count("block_count", self.n_layer);
        count("context_length", 64);
        count("embedding_length", d_model);
        count("feed_forward_length", d_ff);
        count("attention.head_count", n_head);
        count("attention.head_count_kv", n_kv);
        count("attention.key_length", d_k);
        count("attention.value_length", d_v);
        if let Some((n, used)) = self.experts {
            count("expert_count", n);
            count("expert_used_count", used);
        }
        parts.entries.push((format!("{arch}.attention.layer_norm_rms_epsilon"), Value::F32(self.eps)));
        parts.entries.push((format!("{arch}.rope.freq_base"), Value::F32(self.freq_base)));

        let mut n = 0;
        let mut tensor = |name: &str, shape: &[usize], vector: bool| {
            n += 1;
            let (row, wanted) = (shape[shape.len() - 1], self.types[n % self.types.len()]);
            let fits = |t: WeightType| !vector && t.row_bytes(row).is_some();
            let dtype = if fits(wanted) { wanted } else { WeightType::F32 };
            let rows: usize = shape[..shape.len() - 1].iter().product();
            let mut bytes = vec![0; rows * dtype.row_bytes(row).unwrap()];
            // Most are weights as they are: what is broken everywhere is found out at once.
            let how = self.how[n % self.how.len()];
            if how >= 32 {
                let value = |i: usize| ((i * 37 + n * 11) % 19) as f32 / 19.0 - 0.45;
                let values: Vec<f32> = (0..rows * row).map(value).collect();
                let row_bytes = bytes.len() / rows;
                values.chunks(row).zip(bytes.chunks_mut(row_bytes)).for_each(|(v, b)| quant::encode_row(dtype, v, b));
            } else {
                fill(&mut bytes, dtype, how, self.word ^ n as u64);
            }
            parts.tensors.push(Tensor { name: name.into(), shape: shape.into(), dtype, bytes });
        };
        tensor("token_embd.weight", &[n_vocab, d_model], false);
        tensor("output_norm.weight", &[d_model], true);
        for l in 0..self.n_layer {
            let mut block = |name: &str, shape: &[usize]| {
                tensor(&format!("blk.{l}.{name}.weight"), shape, shape.len() == 1);
            };
            block("attn_norm", &[d_model]);
            block("attn_q", &[n_head * d_k, d_model]);
            block("attn_k", &[n_kv * d_k, d_model]);
            block("attn_v", &[n_kv * d_v, d_model]);
            block("attn_output", &[d_model, n_head * d_v]);
            if arch != "llama" {
                block("attn_q_norm", &[d_k]);
                block("attn_k_norm", &[d_k]);
            }
            block("ffn_norm", &[d_model]);
            let stack: Vec<usize> = self.experts.map(|(n, _)| n).into_iter().collect();
            let end = if stack.is_empty() { "" } else { "_exps" };
            if let Some(&n) = stack.first() {
                block("ffn_gate_inp", &[n, d_model]);
            }
            block(&format!("ffn_gate{end}"), &[&stack[..], &[d_ff, d_model]].concat());
            block(&format!("ffn_up{end}"), &[&stack[..], &[d_ff, d_model]].concat());
            block(&format!("ffn_down{end}"), &[&stack[..], &[d_model, d_ff]].concat());
        }
        parts
    }
}

#[test]
fn models_of_any_dimensions_and_weights() {
    let mut tokenizer = Parts::of(FILES[0]).entries;
    tokenizer.retain(|(key, _)| key.starts_with("tokenizer."));
    let counts = run(200, dims(), |dims| dims.parts(&tokenizer).bytes());
    assert!(share(&counts, Came::Answered) > 0.9, "{counts:?}");
}

/// Keys that name sizes which the tensors do not have, and a size that the tensors have at little cost.
#[test]
fn sizes_that_cannot_be() {
    let parts = &files()[0];
    for key in ["block_count", "embedding_length", "feed_forward_length", "attention.head_count", "expert_count"] {
        for n in [0u64, 1 << 20, 1 << 31, 1 << 40, 1 << 63, u64::MAX] {
            let mut parts = parts.clone();
            parts.entries.iter_mut().filter(|e| e.0.ends_with(key)).for_each(|e| e.1 = Value::U64(n));
            assert!(survive(parts.bytes().unwrap()) <= Came::NoPlan, "{key} {n}");
        }
    }
    // Many wide heads cost a file little: a block of weights per row. Attention's scratch must not grow with them.
    let tall = Dims {
        arch: "llama",
        n_layer: 1,
        n_vocab: 16,
        d_model: 1,
        group: 1024,
        n_kv: 1,
        d_k: 1024,
        d_v: 1024,
        d_ff: 1,
        experts: None,
        eps: 1e-6,
        freq_base: 1e4,
        types: vec![WeightType::BF16],
        how: vec![255],
        word: 0,
    };
    assert_eq!(survive(tall.parts(&[]).bytes().unwrap()), Came::Ran);
}
