//! Draft heads of real programs: random models and schedules, whose texts are those without drafts, to the bit.

use std::sync::Arc;

use backend::{Backend, CacheType, Limits, PAGE, reference::Reference};
use checkpoint::Checkpoint;
use checkpoint::gguf::Writer;
use cpu::Cpu;
use engine::sampler::SamplerParams;
use engine::scheduler::{Engine, Options, Request};
use proptest::collection::vec;
use proptest::prelude::*;
use quant::WeightType;

use crate::toy::{Answer, Pieces, answer, drain, mix, run, sampling};

/// A vocabulary so small that a head that knows nothing is right at times.
pub const N_VOCAB: usize = 6;

/// A random Qwen3.5: delta nets and attention in any order, dense or with experts, and a layer that drafts.
struct Random {
    seed: u64,
    writer: Writer<'static>,
}

impl Random {
    /// A number below `n`.
    fn below(&mut self, n: u64) -> usize {
        self.seed = mix(self.seed, 1);
        (self.seed % n) as usize
    }

    fn one_of<const N: usize>(&mut self, of: [usize; N]) -> usize {
        of[self.below(N as u64)]
    }

    /// Adds a tensor of numbers around `center`.
    fn tensor(&mut self, name: &str, shape: &[usize], center: f32, spread: f32) {
        let k = shape[shape.len() - 1];
        let types = [WeightType::F32, WeightType::BF16, WeightType::Q8_0, WeightType::Q4_0];
        let is_matrix =
            shape.len() > 1 && k.is_multiple_of(32) && !name.contains("gate_inp") && !name.contains("conv1d");
        let dtype = if is_matrix { types[self.below(4)] } else { WeightType::F32 };
        let row_bytes = dtype.plane_bytes(k).unwrap().total();
        let mut bytes = Vec::new();
        for _ in 0..shape.iter().product::<usize>() / k {
            let row: Vec<f32> = (0..k)
                .map(|_| {
                    self.seed = mix(self.seed, 2);
                    center + spread * ((self.seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
                })
                .collect();
            let mut out = vec![0; row_bytes];
            quant::encode_row(dtype, &row, out.as_mut_slice());
            bytes.extend(out);
        }
        self.writer.tensor(name, shape, dtype, bytes);
    }

    fn matrix(&mut self, name: &str, shape: &[usize]) {
        let spread = 1.7 / (shape[shape.len() - 1] as f32).sqrt();
        self.tensor(name, shape, 0.0, spread);
    }

    fn norm(&mut self, name: &str, n: usize) {
        self.tensor(name, &[n], 1.0, 0.3);
    }
}

pub fn random_model(seed: u64) -> Arc<Checkpoint> {
    let mut r = Random { seed, writer: Writer::new() };
    let (d, d_head, d_ff) = (r.one_of([32, 64]), 32, r.one_of([32, 96]));
    let (n_kv, n_k, conv) = (r.one_of([1, 2]), r.one_of([1, 2]), r.one_of([2, 4]));
    let (n_head, n_v) = (n_kv * r.one_of([1, 2, 3]), n_k * r.one_of([1, 2]));
    let (d_delta, n_layer, n_expert) = (32, 1 + r.below(3), r.one_of([0, 0, 4]));
    let arch = if n_expert > 0 { "qwen35moe" } else { "qwen35" };
    r.writer.meta("general.architecture", arch);
    for (key, n) in [
        ("block_count", n_layer + 1),
        ("nextn_predict_layers", 1),
        ("context_length", 4096),
        ("embedding_length", d),
        ("feed_forward_length", d_ff),
        ("attention.head_count", n_head),
        ("attention.head_count_kv", n_kv),
        ("attention.key_length", d_head),
        ("attention.value_length", d_head),
        ("rope.dimension_count", 16),
        ("ssm.conv_kernel", conv),
        ("ssm.state_size", d_delta),
        ("ssm.group_count", n_k),
        ("ssm.time_step_rank", n_v),
        ("ssm.inner_size", n_v * d_delta),
        ("expert_count", n_expert),
        ("expert_used_count", n_expert / 2),
        ("expert_feed_forward_length", d_ff),
        ("expert_shared_feed_forward_length", d_ff),
    ] {
        if n_expert > 0 || !key.starts_with("expert") {
            r.writer.meta(&format!("{arch}.{key}"), n as u32);
        }
    }
    r.writer.meta(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6f32);
    r.writer.meta(&format!("{arch}.rope.freq_base"), 1e4f32);
    r.tensor("token_embd.weight", &[N_VOCAB, d], 0.0, 1.0);
    r.norm("output_norm.weight", d);
    r.tensor("output.weight", &[N_VOCAB, d], 0.0, 0.4);
    for i in 0..=n_layer {
        let at = |name: &str| format!("blk.{i}.{name}.weight");
        r.norm(&at("attn_norm"), d);
        r.norm(&at("post_attention_norm"), d);
        if i == n_layer || r.below(2) == 0 {
            r.matrix(&at("attn_q"), &[2 * n_head * d_head, d]);
            r.matrix(&at("attn_k"), &[n_kv * d_head, d]);
            r.matrix(&at("attn_v"), &[n_kv * d_head, d]);
            r.matrix(&at("attn_output"), &[d, n_head * d_head]);
            r.norm(&at("attn_q_norm"), d_head);
            r.norm(&at("attn_k_norm"), d_head);
        } else {
            let (k_row, v_row) = (n_k * d_delta, n_v * d_delta);
            r.matrix(&at("attn_qkv"), &[2 * k_row + v_row, d]);
            r.matrix(&at("attn_gate"), &[v_row, d]);
            r.tensor(&at("ssm_conv1d"), &[2 * k_row + v_row, conv], 0.0, 0.8);
            r.tensor(&format!("blk.{i}.ssm_a"), &[n_v], -1.0, 0.8);
            r.tensor(&format!("blk.{i}.ssm_dt.bias"), &[n_v], -1.0, 1.0);
            r.norm(&at("ssm_norm"), d_delta);
            r.matrix(&at("ssm_out"), &[d, v_row]);
            r.matrix(&at("ssm_alpha"), &[n_v, d]);
            r.matrix(&at("ssm_beta"), &[n_v, d]);
        }
        let shared = if n_expert > 0 { "_shexp" } else { "" };
        if n_expert > 0 {
            r.matrix(&at("ffn_gate_inp"), &[n_expert, d]);
            r.tensor(&at("ffn_gate_inp_shexp"), &[d], 0.0, 0.3);
            r.matrix(&at("ffn_gate_exps"), &[n_expert, d_ff, d]);
            r.matrix(&at("ffn_up_exps"), &[n_expert, d_ff, d]);
            r.matrix(&at("ffn_down_exps"), &[n_expert, d, d_ff]);
        }
        r.matrix(&at(&format!("ffn_gate{shared}")), &[d_ff, d]);
        r.matrix(&at(&format!("ffn_up{shared}")), &[d_ff, d]);
        r.matrix(&at(&format!("ffn_down{shared}")), &[d, d_ff]);
        if i == n_layer {
            r.matrix(&at("nextn.eh_proj"), &[d, 2 * d]);
            ["enorm", "hnorm", "shared_head_norm"].iter().for_each(|name| r.norm(&at(&format!("nextn.{name}")), d));
        }
    }
    let mut file = Vec::new();
    r.writer.write(&mut file).unwrap();
    Arc::new(checkpoint::from_bytes("random", file).unwrap())
}

/// An engine over a model, whose head drafts up to `n` tokens where that is more than none.
pub fn engine(backend: &dyn Backend, model: &Arc<Checkpoint>, limits: Limits, options: Options, n: usize) -> Engine {
    let limits = Limits { max_draft: n, ..limits };
    let plan = if n > 0 { model::build_drafting(model) } else { model::build(model) };
    let plan = backend.lower(plan.unwrap()).unwrap();
    let program = backend.compile(&plan, model.clone(), limits).unwrap();
    let mut engine = Engine::new(program, Arc::new(Pieces), options).unwrap();
    assert_eq!(engine.set_head(n), n > 0);
    engine
}

pub fn request(shared: usize, own: usize, max_new: usize, seed: u64) -> Request {
    let ids = |seed: u64, n: usize| (0..n as u64).map(move |i| (mix(seed, i) % N_VOCAB as u64) as u32);
    Request {
        max_new_tokens: max_new,
        ignore_eos: !seed.is_multiple_of(3),
        logprobs: Some(2),
        stop_strings: if seed.is_multiple_of(4) { vec!["abaab".into()] } else { Vec::new() },
        sampling: SamplerParams {
            penalty_repeat: if seed.is_multiple_of(5) { 1.2 } else { 1.0 },
            ..sampling([0.0, 0.7, 1.2][seed as usize % 3], seed)
        },
        ..Request::new(ids(7, shared).chain(ids(seed, own.max(1))).collect())
    }
}

pub const ROOMY: Limits = Limits {
    max_tokens: 128,
    max_outputs: 32,
    n_pages: 24,
    max_positions: 160,
    n_window_pages: 0,
    n_states: 16,
    max_draft: 0,
};

/// What each request comes to by itself, without drafts.
pub fn alone(backend: &dyn Backend, model: &Arc<Checkpoint>, requests: &[Request]) -> Vec<Answer> {
    let options = Options { prefix_cache: false, ..Options::default() };
    requests.iter().map(|r| run(&mut engine(backend, model, ROOMY, options, 0), r.clone()).0).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn drafts_of_any_model_change_no_text(
        seed in any::<u64>(),
        (n, half, is_adaptive) in (1..6usize, any::<bool>(), any::<bool>()),
        (max_tokens, spare, n_pages, n_states) in (1..60usize, 0..12usize, 5..14usize, 1..8usize),
        (chunk, max_running, prefix_cache) in (1..50usize, 1..5usize, any::<bool>()),
        shapes in vec((0..70usize, 1..30usize, 1..60usize, any::<u64>()), 1..6),
    ) {
        let cache = if half { CacheType::F16 } else { CacheType::F32 };
        let cpu = Cpu { threads: 1 + (seed % 2) as usize, cache, ..Cpu::default() };
        let model = random_model(seed);
        let requests: Vec<Request> =
            shapes.iter().map(|&(shared, own, max_new, seed)| request(shared, own, max_new, seed)).collect();
        let expected = alone(&cpu, &model, &requests);
        let limits = Limits { max_tokens, max_outputs: 1 + spare, n_pages, n_states, ..ROOMY };
        let options = Options { chunk, max_running, prefix_cache, ..Options::default() };
        let mut engine = engine(&cpu, &model, limits, options, n);
        engine.set_adaptive(is_adaptive);
        let ids: Vec<_> = requests
            .iter()
            .map(|r| engine.submit(r.clone()))
            .collect();
        let events = drain(&mut engine);
        for ((id, request), expected) in ids.into_iter().zip(&requests).zip(&expected) {
            match id {
                // The context may be less than alone.
                Ok(id) => {
                    let found = answer(&events, id).0;
                    let is_cut = found.tokens.len() + request.tokens.len() >= engine.context();
                    prop_assert!(found == *expected || (is_cut && expected.tokens.starts_with(&found.tokens)));
                }
                Err(error) => prop_assert!(request.tokens.len() >= engine.context(), "{error}"),
            }
        }
    }
}

/// Over many models some drafts are right and some are not, on the CPU and by the reference, which drafts the same.
#[test]
fn drafts_are_accepted_and_dropped() {
    let (mut drafted, mut accepted) = (0, 0);
    for seed in 0..12 {
        let model = random_model(seed);
        let requests: Vec<Request> = (0..3).map(|i| request(40, 5, 50, 12 * seed + i)).collect();
        let cpu = Cpu { threads: 2, cache: CacheType::F32, ..Cpu::default() };
        let expected = alone(&cpu, &model, &requests);
        let mut drafting = engine(&cpu, &model, ROOMY, Options::default(), 3);
        let ids: Vec<_> = requests.iter().map(|r| drafting.submit(r.clone()).unwrap()).collect();
        let events = drain(&mut drafting);
        ids.iter().zip(&expected).for_each(|(&id, expected)| assert_eq!(answer(&events, id).0, *expected));
        (drafted, accepted) = (drafted + drafting.stats().drafted, accepted + drafting.stats().accepted);
        if seed < 2 {
            let mut plain = engine(&Reference, &model, ROOMY, Options::default(), 0);
            let mut with = engine(&Reference, &model, ROOMY, Options::default(), 3);
            let one = &requests[1];
            assert_eq!(run(&mut plain, one.clone()).0, run(&mut with, one.clone()).0);
            assert!(with.stats().drafted > 10);
        }
    }
    assert!(drafted > 500 && accepted > drafted / 20 && accepted < drafted, "{accepted} of {drafted}");
}

/// A sequence that ends at a page's end, one that begins with a page of another, one that lost its pages: the head goes
/// on with each.
#[test]
fn heads_work_beside_each_other_in_few_pages() {
    let model = random_model(99);
    let cpu = Cpu { threads: 1, cache: CacheType::F16, ..Cpu::default() };
    let requests: Vec<Request> = [(0, PAGE, 75), (PAGE, 3, 75), (PAGE, 9, 2 * PAGE - 9), (2 * PAGE, 1, 70)]
        .iter()
        .enumerate()
        .map(|(i, &(shared, own, max_new))| request(shared, own, max_new, i as u64 + 1))
        .collect();
    let expected = alone(&cpu, &model, &requests);
    let limits = Limits { n_pages: 5, n_states: 12, max_tokens: 37, ..ROOMY };
    let mut engine = engine(&cpu, &model, limits, Options { chunk: 21, ..Options::default() }, 4);
    let ids: Vec<_> = requests.iter().chain(&requests).map(|r| engine.submit(r.clone()).unwrap()).collect();
    let events = drain(&mut engine);
    for (i, &id) in ids.iter().enumerate() {
        assert_eq!(answer(&events, id).0, expected[i % requests.len()], "request {i}");
    }
    let stats = engine.stats();
    assert!(stats.preemptions > 0 && stats.drafted > 100, "{stats:?}");
}
