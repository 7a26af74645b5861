//! The Metal backend on a simulated GPU: whole models against the reference, in every order of threads, with failures
//! on demand, and with mistakes planted in kernels and lists, each of which must be found. Skips where there is no
//! clang.
mod caches;
mod drafts;
mod failures;
mod golden;
mod planted;
mod recorder;
mod self_test;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use backend::CacheType;
use backend::reference::Reference;
use backend::{Backend, CompileError, Limits, Tables};
use conformance::backends::{self, scheduled, schedules, simulated, wide};
use conformance::{BAD, N_VOCAB, PLAIN, Session, Shape, fixtures, hand_on, model, relative, tokens};
use gpu::commands::{Buf, Caps, Cmd, Gpu, GpuError, List, Mapped, Pipe, Span, Ticket, Times, Unit};
use gpu::metal::outline::{Line, Outline};
use gpu::metal::{Metal, Off, Tuning};
use metal_sim::{Call, Fault, Moment, Options, Schedule, Sim, Stats};
use model::plan::{DeltaHeads, DeltaRule, Gate, Plan, RopePairing, Sharing, ValidPlan};
use quant::WeightType::{self, *};

/// A prompt over two pages, then chunks and single tokens of several sequences beside it.
fn run(backend: &dyn Backend, model: &(Plan, Arc<checkpoint::Checkpoint>)) -> Vec<f32> {
    let mut session = Session::new(backend, model, 64);
    let (a, b, c) = (tokens(37, 1), tokens(9, 2), tokens(3, 3));
    let mut all = session.step(&[(0, &a)]).to_vec();
    all.extend_from_slice(session.step(&[(1, &b[..7]), (0, &a[..1])]));
    all.extend_from_slice(session.step(&[(2, &c), (1, &b[7..])]));
    all.extend_from_slice(session.step(&[(0, &c[..1]), (1, &c[1..2]), (2, &a[..1])]));
    all
}

/// Shapes of one layer that holds most ops.
const SHAPES: [Shape; 5] = [
    PLAIN,
    Shape {
        n_head: 6,
        n_kv: 2,
        d_k: 40,
        d_v: 24,
        window: Some(20),
        sinks: true,
        types: [F32, BF16, F16, F32, BF16],
        ..PLAIN
    },
    Shape {
        n_kv: 1,
        pairing: RopePairing::Interleaved,
        softcap: Some(4.0),
        act: Gate::GeluTanh,
        n_expert: 19,
        n_used: 5,
        d_ff: 33,
        fused: false,
        ..PLAIN
    },
    Shape {
        window: Some(40),
        forgets: true,
        biases: true,
        act: Gate::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
        d_ff: 64,
        types: [Q8_0, Q4_0, Q8_0, Q5_1, Q4_0],
        ..PLAIN
    },
    Shape { delta: Some((4, DELTA)), ..PLAIN },
];

/// Heads of a delta rule that no tile divides.
const DELTA: DeltaHeads =
    DeltaHeads { n_k_head: 2, n_v_head: 4, d_k: 20, d_v: 13, sharing: Sharing::Grouped, rule: DeltaRule::Delta };

/// Short floats, which lie in files that are repacked.
const SHORT: [Shape; 2] = [
    Shape { d_model: 128, d_ff: 128, types: [F8_E4M3; 5], ..PLAIN },
    Shape { types: [NVFP4_SCALED, NVFP4, NVFP4_SCALED, NVFP4, NVFP4_SCALED], d_ff: 64, biases: true, ..PLAIN },
];

#[test]
fn random_models_agree_with_the_reference() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    for (i, shape) in SHAPES.into_iter().chain(SHORT).enumerate() {
        let model = model(shape);
        let exact = run(&Reference, &model);
        // The forms of products for large matrices, and for one shape those that all others fall back to.
        for tuning in [FINE, Tuning { is_plain: true, ..FINE }].into_iter().take(1 + usize::from(i == 0)) {
            let error = relative(&run(&Metal { tuning, ..metal.clone() }, &model), &exact);
            assert!(error <= 2e-5, "off by {error:e}: {tuning:?} {shape:?}");
        }
    }
}

/// A quantised file of every architecture, and all types of 32- and 256-blocks between the last three.
const FILES: &[&str] = &[
    "deepseekv2/model-q8_0.gguf",
    "deepseekv3/model-q5_1.gguf",
    "gemma3/model-q5_0.gguf",
    "gemma4/model-q4_1.gguf",
    "glm4moe/model-q4_0.gguf",
    "gptoss/model-mxfp4.gguf",
    "llama/model-q5_1.gguf",
    "mixtral/model-q4_1.gguf",
    "qwen2/model-q4_0.gguf",
    "qwen3/model-q8_0.gguf",
    "qwen35/model-q8_0.gguf",
    "qwen3moe/model-q4_0.gguf",
    "qwen3next/model-q8_0.gguf",
    "published/lfm2_moe/hf",
    "published/nemotron_h_latent/hf",
    "published/granitemoehybrid/hf",
    "published/falcon_h1/hf",
    "published/kimi_linear/hf",
    "published/bailing_hybrid/hf",
    "published/jamba/hf",
    "published/minimax/hf",
    "published/phimoe/hf",
    "types/llama-blocks32.gguf",
    "types/qwen3moe-blocks32.gguf",
    "types/qwen3moe-blocks256.gguf",
];

/// Models of the tree.
fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The smallest model that has every form of dispatch.
const SMALL: Shape =
    Shape { d_model: 32, n_head: 2, n_kv: 1, d_k: 16, d_v: 16, n_expert: 5, n_used: 2, d_ff: 16, ..PLAIN };

/// A prompt and a step of two sequences.
fn short(metal: &Metal, model: &(Plan, Arc<checkpoint::Checkpoint>)) -> Vec<f32> {
    let mut session = Session::new(metal, model, 64);
    let a = tokens(35, 1);
    let mut all = session.step(&[(0, &a[..34])]).to_vec();
    all.extend_from_slice(session.step(&[(1, &a[..2]), (0, &a[34..])]));
    all
}

#[test]
fn no_order_of_threads_or_dispatches_changes_a_bit() {
    let Some(metal) = simulated(CacheType::F16, Options::default()) else { return };
    let metal = Metal { tuning: FINE, ..metal };
    let model = model(SMALL);
    let wanted = bits(&short(&metal, &model));
    for (i, schedule) in Schedule::ALL.into_iter().enumerate() {
        let moment = [Moment::Submit, Moment::Wait][i % 2];
        let options = Options { schedule, moment, seed: 7 + i as u32, threads: 128, ..Options::default() };
        let metal = Metal { tuning: FINE, ..simulated(CacheType::F16, options).unwrap() };
        assert_eq!(bits(&short(&metal, &model)), wanted, "{schedule:?} {moment:?}");
    }
}

#[test]
fn sums_in_other_orders_and_coarse_functions_stay_near() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let model = model(SMALL);
    let wanted = short(&metal, &model);
    // The last has no threads for tiles.
    for (sum_order, ulp, threads) in [(1, 0, 256), (2, 0, 256), (0, 4, 256), (0, 0, 64)] {
        let options = Options { sum_order, ulp, threads, ..Options::default() };
        let metal = simulated(CacheType::F32, options).unwrap();
        let error = relative(&short(&metal, &model), &wanted);
        // Other numbers, and not far off.
        assert!(0.0 < error && error < 1e-5, "order {sum_order}, {ulp} units in the last place: {error:e}");
    }
}

/// Small matrices take the forms of large ones, short contexts those of long ones.
const FINE: Tuning = Tuning { is_plain: false, many: 8, off: Off::NONE, part: 32 };

/// A delta rule before attention.
const SMALL_DELTA: Shape = Shape { delta: Some((3, DeltaHeads { d_k: 12, d_v: 11, ..DELTA })), ..SMALL };

/// The plan of a file of the tree, and the file.
fn of_file(metal: &Metal, file: &str) -> (Plan, Arc<checkpoint::Checkpoint>) {
    let path = data().join(file);
    let open = || checkpoint::open(&path).unwrap_or_else(|e| panic!("{file}: {e}"));
    (metal.lower(model::build(&open()).unwrap()).unwrap().into_plan(), Arc::new(open()))
}
