//! What can be proven of the kernels without a GPU, where the run-time compiler can be loaded (its folder in
//! `LD_LIBRARY_PATH`): they compile for every architecture, spill no register, and take the arguments that Rust fills.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use model::plan::{CacheDecl, Op};
use quant::act::ActKind;
use quant::{Affine, ScaleType, WeightType};

use super::Cuda;
use super::args::SIZES;
use super::nodes::Modules;
use super::nvrtc::{self, Target};
use super::outline::{Card, Outline};
use super::sources::{self, Key, Source, Texts};
use backend::{Backend, CacheType, KvType, Limits};

/// Whether the compiler is there; says so when it is not.
fn has_compiler() -> bool {
    nvrtc::version().inspect_err(|why| println!("skipped: {why}")).is_ok()
}

#[test]
fn arguments_are_laid_out_alike() {
    if !has_compiler() {
        return;
    }
    let asserts: String =
        SIZES.iter().map(|(name, bytes)| format!("static_assert(sizeof({name}) == {bytes}, \"{name}\");\n")).collect();
    let source = format!("#include \"cuda/args.h\"\n{asserts}");
    let key = Key { file: "sizes.cu", source: source.leak(), defines: Vec::new() };
    nvrtc::compile(&key, &Texts::new(None), Target::cubin(90), None).map(drop).unwrap();
}

/// Sources that are compiled for a weight type.
const TYPED: [Source; 10] = [
    sources::EXPERTS_DOWN,
    sources::EMBED,
    sources::LINEAR,
    sources::GATED_LINEAR,
    sources::EXPERTS,
    sources::HEAD_LINEAR,
    sources::LATENT_OUT,
    sources::LINEAR_BATCH,
    sources::GATED_LINEAR_BATCH,
    sources::EXPERTS_BATCH,
];

/// Those that copy in bulk, on Hopper and later; for a router's number of experts where they choose.
fn bulk(w: WeightType) -> Vec<Key> {
    let mut keys = vec![Key::typed(sources::FEW_LINEAR, w), Key::typed(sources::FEW_PAIRS, w)];
    keys.extend(
        [sources::FEW_ROUTED, sources::FEW_EXPERTS, sources::FEW_DOWN].map(|source| Key::routed(source, w, 128)),
    );
    keys
}

/// Those that Hopper alone has products in.
const WIDE: [Source; 3] = [sources::LINEAR_WIDE, sources::GATED_LINEAR_WIDE, sources::EXPERTS_WIDE];

/// Modules as models need them: every source, dimensions of published models and odd ones.
fn modules() -> Vec<Key> {
    let mut keys = Modules::new().keys().to_vec();
    keys.push(Key::typed(sources::LOGITS, WeightType::F32));
    for is_f16 in [true, false] {
        keys.extend([sources::KV_APPEND, sources::QKV].map(|source| Key::cached(source, is_f16)));
        for (d_k, d_v, v_in_k, heads) in [
            (64, 64, false, 8),
            (128, 128, false, 8),
            (256, 256, false, 8),
            (512, 512, false, 8),
            (576, 512, true, 8),
            (33, 7, false, 5),
        ] {
            let cache = CacheDecl { n_kv: 1, d_k, d_v, v_in_k, window: None };
            keys.push(Key::attention(sources::ATTENTION, &cache, is_f16, heads));
        }
    }
    for (types, (d_k, d_v, v_in_k, heads)) in [
        (CacheType::F16, (576, 512, true, 8)),
        (CacheType::F16, (64, 32, true, 5)),
        (CacheType::F32, (576, 512, true, 8)),
        (CacheType::F32, (33, 7, false, 5)),
    ] {
        let cache = CacheDecl { n_kv: 1, d_k, d_v, v_in_k, window: None };
        keys.push(Key::attention(sources::ATTENTION_CHOSEN, &cache, types == CacheType::F16, heads));
    }
    for (d, types) in [(128, CacheType::F16), (128, CacheType::Q8_0), (128, CacheType::F32), (20, CacheType::F16)] {
        keys.push(Key::choose(d, types));
    }
    for (d, heads) in [(64, 8), (128, 4), (128, 8), (256, 1), (256, 8)] {
        let halves = CacheType { k: KvType::F16, v: KvType::Q8_0 };
        keys.extend([CacheType::F16, CacheType::Q8_0, halves].map(|types| Key::attend_long(d, heads, types, 8)));
        // Warps of a block change the lengths of loops alone.
        if (d, heads) == (128, 8) {
            keys.push(Key::attend_long(d, heads, CacheType::F16, 4));
        }
    }
    for (d, heads) in [(64, 1), (64, 2), (128, 1), (128, 2), (256, 1), (256, 2)] {
        keys.push(Key::attend(d, heads));
    }
    keys.push(Key::plain(sources::KV_WIDEN));
    keys.push(Key::pair(sources::LINEAR_PAIR, WeightType::Q4_K, WeightType::Q6_K));
    keys.push(Key::pair(sources::EXPERTS_DOWN, WeightType::Q5_0, WeightType::Q6_K));
    for (w, is_f16, product) in [
        (WeightType::Q8_0, true, Some(WeightType::Q4_K)),
        (WeightType::Q5_0, true, Some(WeightType::Q6_K)),
        (WeightType::BF16, false, None),
        (WeightType::Q4_K, true, None),
    ] {
        keys.push(Key::latent(w, is_f16, product));
    }
    keys.extend([128, 1024].map(|n| Key::routed(sources::ROUTER, WeightType::F32, n)));
    keys.extend([sources::CAUSAL_CONV, sources::DELTA_IN].map(|source| Key::sized(source, "WIDTH", 4)));
    keys.extend([2, 5].map(|width| Key::sized(sources::CAUSAL_CONV, "WIDTH", width)));
    keys.extend([7, 128, 256].map(|d_k| Key::sized(sources::DELTA_NET, "D_K", d_k)));
    keys.extend([64, 128].map(|d_k| Key::sized(sources::DELTA_CHUNKS, "D_K", d_k)));
    keys.extend([8, 128, 257, 1024].map(|n| Key::sized(sources::ROUTE, "N_EXPERT", n)));
    keys
}

/// Types on every architecture. Affine types differ in constants alone: a few stand for all.
fn types() -> Vec<WeightType> {
    let affine = |bits, group, scales| WeightType::Affine(Affine::new(bits, group, scales).unwrap());
    let planar = [
        WeightType::MXFP4_PLANAR,
        WeightType::F8_E4M3,
        WeightType::NVFP4_SCALED,
        affine(2, 128, ScaleType::F16),
        affine(3, 32, ScaleType::F32),
        affine(4, 64, ScaleType::BF16),
        affine(5, 64, ScaleType::F16),
        affine(6, 32, ScaleType::BF16),
        affine(8, 128, ScaleType::BF16),
    ];
    [&WeightType::GGUF[..], &planar[..]].concat()
}

/// Kernels may keep so many bytes of a thread on the stack: f64's sine reduces large angles there, attention keeps
/// which threads run its loop, and wide tiles and products of one to four rows give up some registers so that blocks
/// share a multiprocessor.
const STACK: &[(&str, usize)] = &[
    ("head_linear_vec8", 8),
    ("route", 32),
    ("router", 24),
    ("router_added", 16),
    ("experts_down", 24),
    ("latent_q8", 16),
    ("linear_pair_vec8", 64),
    ("attend", 16),
    ("attend_merge", 8),
    ("attend_long", 48),
    ("few_linear1", 16),
    ("few_gated1", 16),
    ("few_pair1", 32),
    ("few_linear2", 8),
    ("few_gated2", 8),
    ("few_linear4", 32),
    ("few_gated4", 16),
    ("few_pair4", 32),
    ("few_routed", 16),
    ("few_experts", 48),
    ("few_down", 16),
    ("few_down_shared", 16),
    ("rope_table", 40),
    ("attention", 16),
    ("linear_tile64", 32),
    ("head_linear_tile64", 32),
    ("experts_tile64", 32),
    ("attention_tile", 24),
    ("attention_wide", 8),
    ("linear_wide", 64),
    ("linear_queue", 32),
    ("gated_linear_wide", 64),
    ("experts_wide", 64),
    ("experts_gated_wide", 64),
    ("experts_middle", 64),
    ("experts_gated_middle", 64),
    ("experts_gated_bytes", 8),
    ("experts_narrow", 48),
    ("experts_gated_narrow", 48),
    ("logits", 32),
    ("linear_batch2", 224),
    ("gated_linear_batch2", 224),
    ("gated_linear_batch4", 32),
    ("experts_gated_batch1", 224),
    ("experts_batch1", 224),
    ("experts_gated_batch2", 224),
    ("experts_batch2", 224),
    ("experts_gated_batch4", 32),
    ("experts_batch4", 32),
];

/// Lines of the assembler's log that say a kernel spills or uses the stack.
fn complaints(key: &Key, log: &str) -> Vec<String> {
    let mut kernel = "";
    let mut found = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or_default();
        }
        if line.contains("are serialized") {
            found.push(format!("{} {:?}: {}", key.file, key.defines, line.trim()));
        }
        let Some((stack, rest)) = line.trim().split_once(" bytes stack frame, ") else { continue };
        let allowed = STACK.iter().find(|(name, _)| *name == kernel).map_or(0, |(_, bytes)| *bytes);
        let stack: usize = stack.rsplit(' ').next().unwrap_or_default().parse().unwrap();
        let spills = allowed == 0 && !rest.starts_with("0 bytes spill stores, 0 bytes spill loads");
        if stack > allowed || spills {
            found.push(format!("{} {:?} {kernel}: {}", key.file, key.defines, line.trim()));
        }
    }
    found
}

/// Compiles modules on every core; what does not compile or spills is listed. With `MOEBIUS_CUBINS`, a folder keeps
/// those without a complaint, and they are not compiled again.
fn compile_all(modules: &[(Key, u32)]) -> Vec<String> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let texts = Texts::new(None);
    let kept = std::env::var_os("MOEBIUS_CUBINS").map(PathBuf::from);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some((key, arch)) = modules.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let target = Target::cubin(*arch);
                    if nvrtc::find(key, &texts, target, None, kept.as_deref()).is_some() {
                        continue;
                    }
                    let found = match nvrtc::compile(key, &texts, target, None) {
                        Ok(compiled) => {
                            let found = complaints(key, &compiled.log);
                            if let (true, Some(folder), Ok(version)) = (found.is_empty(), &kept, nvrtc::version()) {
                                nvrtc::keep(key, &texts, target, version, folder, &compiled.image);
                            }
                            found
                        }
                        Err(why) => vec![why],
                    };
                    failed.lock().unwrap().extend(found.into_iter().map(|line| format!("sm_{arch}: {line}")));
                }
            });
        }
    });
    failed.into_inner().unwrap()
}

#[test]
fn kernels_compile_for_every_architecture_and_spill_nothing() {
    if !has_compiler() {
        return;
    }
    // All of it takes half an hour of a core; what changes most is compiled always.
    let is_whole = std::env::var_os("MOEBIUS_ALL_KERNELS").is_some();
    let mut all: Vec<(Key, u32)> = Vec::new();
    for arch in [80, 86, 89, 90, 100, 120] {
        if is_whole || matches!(arch, 80 | 90) {
            all.extend(modules().into_iter().map(|key| (key, arch)));
        }
        let types = match arch {
            _ if is_whole => types(),
            80 | 90 => vec![WeightType::Q4_K],
            _ => Vec::new(),
        };
        if super::wide::fits(arch) {
            all.extend([64, 128, 256].map(|d| {
                let cache = CacheDecl { n_kv: 1, d_k: d, d_v: d, v_in_k: false, window: None };
                (Key::attention(sources::ATTENTION_WIDE, &cache, true, 8), arch)
            }));
        }
        for source in TYPED.into_iter().chain(WIDE.into_iter().filter(|_| super::wide::fits(arch))) {
            all.extend(types.iter().map(|&w| (Key::typed(source, w), arch)));
        }
        if super::few_launch::fits(arch) {
            let eight = types.iter().filter(|w| matches!(w.act(), ActKind::Byte32 | ActKind::Block256));
            let eight = eight.filter(|w| WeightType::GGUF.contains(w));
            all.extend(eight.flat_map(|&w| bulk(w)).map(|key| (key, arch)));
        }
    }
    let failed = compile_all(&all);
    assert!(failed.is_empty(), "of {} modules:\n{}", all.len(), failed.join("\n"));
}

/// Kernels of each layer, for a token of one sequence some pages into its context.
fn kernels_of_layers(model: &str, arch: u32, pages: usize) -> Vec<Vec<&'static str>> {
    kernels_of_step(model, arch, (1, 1, pages))
}

/// The same for a number of sequences and of tokens of each.
fn kernels_of_step(model: &str, arch: u32, (n_chunks, len, pages): (usize, usize, usize)) -> Vec<Vec<&'static str>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/tests/data").join(model);
    let checkpoint = checkpoint::open(&path).unwrap();
    let cuda = Cuda::default();
    let plan = cuda.lower(model::build(&checkpoint).unwrap()).unwrap();
    let limits = Limits {
        max_tokens: 64,
        max_outputs: 64,
        n_pages: 64,
        max_positions: 2048,
        n_window_pages: 64,
        n_states: 0,
        max_draft: 0,
    };
    let outline = Outline::new(&cuda, &plan, &checkpoint, limits, Card::of(arch).unwrap()).unwrap();
    let lines = outline.step(n_chunks, len, pages).unwrap();
    let n_layers = plan.layers.iter().flatten().max().unwrap() + 1;
    let of = |layer| lines.iter().filter(move |line| line.layer == Some(layer)).flat_map(|line| &line.launches);
    (0..n_layers).map(|layer| of(layer).map(|launch| launch.kernel).collect()).collect()
}

/// Routers are computed in f32 whatever their files have, with a shared expert's gate next to them.
#[test]
fn routers_are_floats() {
    for model in ["qwen3moe/hf", "glm4moe/hf", "published/olmoe/hf"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/tests/data").join(model);
        let checkpoint = checkpoint::open(&path).unwrap();
        let plan = Cuda::default().lower(model::build(&checkpoint).unwrap()).unwrap();
        let is_router = |buf| plan.ops.iter().any(|op| matches!(op, Op::Route { logits, .. } if *logits == buf));
        let mut n_routers = 0;
        for op in &plan.ops {
            let Op::Linear { parts, .. } = op else { continue };
            let Some(of_router) = parts.iter().find(|part| is_router(part.out)) else { continue };
            let decl = plan.weight(of_router.w);
            assert_ne!(decl.stored(), WeightType::F32, "{model}");
            assert!(parts.iter().all(|part| plan.weight(part.w).dtype == WeightType::F32), "{model}");
            n_routers += 1;
        }
        assert!(n_routers > 0, "{model}");
    }
}

/// Latent attention is five launches, and routed experts with a shared one three.
#[test]
fn launches_of_latent_attention() {
    for arch in [80, 90, 120] {
        for pages in [1, 64] {
            // Both layers: a dense one, and the last one with experts, which selects rows behind attention.
            let layers = kernels_of_layers("deepseekv3/model-bf16.gguf", arch, pages);
            let dense: Vec<&str> = layers[0].iter().map(|name| name.trim_end_matches(char::is_numeric)).collect();
            let attention = ["linear_vec", "latent_q", "attention", "latent_out", "linear_vec"];
            assert_eq!(dense[..5], attention, "sm_{arch}, {pages} pages");
            assert_eq!(dense.len(), 7, "sm_{arch}, {pages} pages: {dense:?}");
            let merge = usize::from(pages > 1);
            let last = layers[1].iter().filter(|&&name| name != "select_rows" && name != "rms_norm");
            assert_eq!(last.count(), 8 + merge, "sm_{arch}, {pages} pages: {:?}", layers[1]);
            // Queries without a latent of their own; a layer with experts, whose shared ones are wider.
            let layers = kernels_of_layers("deepseekv2/model-q8_0.gguf", arch, pages);
            assert_eq!(layers[1].len(), 8, "sm_{arch}, {pages} pages: {:?}", layers[1]);
            let latent = layers[1].iter().filter(|name| name.starts_with("latent_")).count();
            assert_eq!(latent, 2, "{:?}", layers[1]);
        }
    }
}

/// Attention chooses where a context of the step may be longer than what it may see, 12 positions; a layer may see what
/// an earlier one chose.
#[test]
fn launches_of_sparse_attention() {
    for (model, n_choices) in [("published/deepseek_v32/hf", 2), ("published/glm_moe_dsa_shared/hf", 2)] {
        for arch in [80, 90] {
            for step in [(1, 1, 1), (8, 1, 16), (40, 1, 4), (2, 20, 8)] {
                let layers = kernels_of_step(model, arch, step);
                let all: Vec<&str> = layers.concat();
                let count = |name: &str| all.iter().filter(|&&kernel| kernel == name).count();
                let found = ["choose_scores", "choose_best", "attention_chosen"].map(count);
                assert_eq!(found, [n_choices, n_choices, layers.len()], "{model} {arch} {step:?}: {all:?}");
                let dense = ["attention", "attention_tile", "attention_merge"].map(count);
                assert_eq!(dense, [0; 3], "{model} {arch} {step:?}: {all:?}");
            }
        }
    }
}

/// Where experts stand beside a dense feed-forward, the norm of attention goes with the router.
#[test]
fn launches_of_norms_behind_ops() {
    for arch in [80, 90] {
        let layers = kernels_of_layers("gemma4/model-bf16.gguf", arch, 1);
        for layer in &layers[..2] {
            let count = |kernel: &str| layer.iter().filter(|name| **name == kernel).count();
            assert_eq!((count("router_added"), count("post_norm"), count("rms_norm")), (1, 1, 0), "{layer:?}");
        }
    }
}
