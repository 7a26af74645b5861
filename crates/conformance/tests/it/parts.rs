//! Plans in parts: several programs that add up over a loopback link give what one program gives.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::gpu::cuda::{self, CudaParts};
use backend::Backend;
use backend::CacheType;
use backend::reference::{Parted, Reference};
use conformance::backends::gpu;
use conformance::{PLAIN, Session, Shape, model, relative, tokens};
use cpu::{Cpu, Parted as Parts};
use model::plan::{Op, Plan, ValidPlan, partition};

use crate::cuda::relative_of_most;

/// Sums over parts are rounded once more than those of one program.
const TOLERANCE: f64 = 2e-5;

/// What parts compute of a step in two chunks and of one token after it.
fn rows(session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    let (first, rest) = tokens.split_at(tokens.len() / 2);
    let mut rows = session.step(&[(0, first)]).to_vec();
    rows.extend_from_slice(session.step(&[(0, rest), (1, first)]));
    rows.extend_from_slice(session.step(&[(0, &rest[..1]), (1, &rest[..1])]));
    rows
}

/// Every model in git, as files and folders have it.
fn models() -> Vec<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.is_dir()).collect()
    };
    let folders = entries(&data).into_iter().chain(entries(&data.join("published")));
    let folders = folders.filter(|folder| folder.join("golden.safetensors").exists());
    let mut models: Vec<PathBuf> = folders
        .flat_map(|folder| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>())
        .filter(|path| path.ends_with("hf") || path.extension().is_some_and(|end| end == "gguf"))
        .collect();
    models.sort();
    models
}

#[test]
fn every_architecture_in_two_to_eight_parts() {
    let (mut n_checked, mut n_whole) = (0, Vec::new());
    for path in models() {
        let weights = Arc::new(checkpoint::open(&path).unwrap());
        let plan: Plan = model::build(&weights).unwrap().into_plan();
        let ids: Vec<u32> = tokens(9, 7).iter().map(|id| id % plan.n_vocab as u32).collect();
        let model = (plan, weights);
        let exact = rows(&mut Session::new(&Reference, &model, 32), &ids);
        for n_parts in [2, 3, 8] {
            if partition::partition(&model.0, n_parts).is_err() {
                n_whole.push((path.clone(), n_parts));
                continue;
            }
            let found = rows(&mut Session::new(&Parted(n_parts), &model, 32), &ids);
            let error = relative(&found, &exact);
            assert!(error <= TOLERANCE, "{} in {n_parts} parts: {error:e}", path.display());
            n_checked += 1;
        }
    }
    println!("{n_checked} checked");
    assert!(n_checked >= 200, "{n_checked}");
    // Blocks of one tiny model are wider than half of its rows.
    assert!(n_whole.iter().filter(|(_, n_parts)| *n_parts == 2).count() <= 1, "{n_whole:?}");
}

/// Biases of experts, sinks, windows, one head of keys, and blocks of 32 and 256 numbers.
fn shapes() -> Vec<Shape> {
    use quant::WeightType::{F16, F32, Q4_K, Q5_0, Q6_K, Q8_0};
    let plain = Shape { fused: false, ..PLAIN };
    vec![
        plain,
        Shape { biases: true, sinks: true, window: Some(5), ..plain },
        Shape { types: [F16, Q8_0, Q5_0, Q8_0, Q5_0], d_ff: 64, ..plain },
        Shape { types: [Q8_0, F32, Q4_K, Q4_K, Q6_K], d_model: 256, d_ff: 256, ..plain },
        Shape { n_expert: 7, n_used: 3, n_kv: 1, ..plain },
    ]
}

#[test]
fn shapes_of_every_kind_in_parts() {
    let mut n_checked = 0;
    for (i, shape) in shapes().into_iter().enumerate() {
        let model = model(shape);
        let ids = tokens(11, 3);
        let exact = rows(&mut Session::new(&Reference, &model, 32), &ids);
        for n_parts in 2..=partition::MAX_PARTS {
            if partition::partition(&model.0, n_parts).is_err() {
                continue;
            }
            let found = rows(&mut Session::new(&Parted(n_parts), &model, 32), &ids);
            let error = relative(&found, &exact);
            assert!(error <= TOLERANCE, "shape {i} in {n_parts} parts: {error:e}");
            let again = rows(&mut Session::new(&Parted(n_parts), &model, 32), &ids);
            assert_eq!(found, again, "shape {i} in {n_parts} parts: the same run gives other bits");
            n_checked += 1;
        }
    }
    assert!(n_checked >= 20, "{n_checked}");
}

/// The CPU's bits are those of the reference's parts within what its caches and activations cost, and the same with any
/// number of threads, in any company and by any cut of a prompt.
#[test]
fn parts_on_cpus_keep_the_law() {
    let cpu = |threads| Cpu { threads, cache: CacheType::F32, ..Cpu::default() };
    for (i, path) in models().into_iter().step_by(3).enumerate() {
        let weights = Arc::new(checkpoint::open(&path).unwrap());
        let plan: Plan = model::build(&weights).unwrap().into_plan();
        let ids: Vec<u32> = tokens(12, 5).iter().map(|id| id % plan.n_vocab as u32).collect();
        let model = (plan, weights);
        let n_parts = 2 + i % 2;
        if partition::partition(&model.0, n_parts).is_err() {
            continue;
        }
        let exact = rows(&mut Session::new(&Reference, &model, 64), &ids);
        let parted = |threads| Parts { cpu: cpu(threads), n_parts };
        let found = rows(&mut Session::new(&parted(1), &model, 64), &ids);
        let error = relative_of_most(&found, &exact, model.0.n_vocab);
        assert!(error <= 3e-2, "{}: {error:e}", path.display());
        assert!(found == rows(&mut Session::new(&parted(2), &model, 64), &ids), "{}: threads", path.display());
        let whole = Session::new(&parted(2), &model, 64).step(&[(0, &ids)]).to_vec();
        let mut cut = Session::new(&parted(1), &model, 64);
        let mut pieces = cut.step(&[(0, &ids[..5])]).to_vec();
        pieces.extend_from_slice(cut.step(&[(0, &ids[5..])]));
        assert!(whole == pieces, "{}: pieces", path.display());
    }
}

/// Two GPUs, where there are two: prompts of few and of many rows, batches and single tokens, against the reference;
/// and the same bits again.
#[test]
fn two_gpus() {
    let n_usable = cuda::devices().map_or(0, |found| found.devices.iter().filter(|d| d.unusable.is_none()).count());
    let Some(cuda) = gpu(CacheType::F16).filter(|_| n_usable >= 2) else { return };
    let parts = CudaParts { cuda: cuda.clone(), devices: vec![0, 1] };
    for (i, shape) in shapes().into_iter().enumerate() {
        let model = model(shape);
        for n in [11, 150, 700] {
            let ids = tokens(n, 3);
            let exact = rows(&mut Session::new(&Reference, &model, 2 * n), &ids);
            let found = rows(&mut Session::new(&parts, &model, 2 * n), &ids);
            let error = relative_of_most(&found, &exact, model.0.n_vocab);
            println!("shape {i}, {n} tokens: {error:.2e}");
            assert!(error <= 2e-2, "shape {i}, {n} tokens: {error:e}");
            let again = rows(&mut Session::new(&parts, &model, 2 * n), &ids);
            assert_eq!(found, again, "shape {i}, {n} tokens: the same run gives other bits");
        }
    }
    for path in models() {
        let weights = Arc::new(checkpoint::open(&path).unwrap());
        let plan: Plan = model::build(&weights).unwrap().into_plan();
        let ids: Vec<u32> = tokens(40, 7).iter().map(|id| id % plan.n_vocab as u32).collect();
        let model = (plan, weights);
        let found = match Session::compile(&parts, &model, 96, 96) {
            Ok(mut session) => rows(&mut session, &ids),
            Err(why) => {
                println!("{}: {why}", path.display());
                continue;
            }
        };
        let exact = rows(&mut Session::new(&Reference, &model, 96), &ids);
        let of = |found: &[f32]| relative_of_most(found, &exact, model.0.n_vocab);
        let lowered = cuda.lower(ValidPlan::new(model.0.clone()).unwrap()).unwrap().into_plan();
        let alone = of(&rows(&mut Session::new(&cuda, &(lowered, Arc::clone(&model.1)), 96), &ids));
        let error = of(&found);
        println!("{}: {error:.2e}, one GPU {alone:.2e}", path.display());
        // Near ties of random routers fall to other experts in other sums.
        assert!(error <= 2.0 * alone + 1e-2, "{}: {error:e}, one GPU {alone:e}", path.display());
    }
}

/// Each part has its share, and all have what cannot be shared out.
#[test]
fn parts_share_heads_columns_and_experts() {
    let (plan, _) = model(Shape { fused: false, ..PLAIN });
    let parts = partition::partition(&plan, 2).unwrap();
    let heads = |plan: &Plan| {
        plan.ops.iter().map(|op| if let Op::Attention { n_head, .. } = op { *n_head } else { 0 }).sum::<usize>()
    };
    let experts = |plan: &Plan| {
        let of = |op: &Op| if let Op::Experts { gate, .. } = *op { plan.weight(gate).shape[0] } else { 0 };
        plan.ops.iter().map(of).sum::<usize>()
    };
    for part in &parts {
        assert_eq!(2 * heads(&part.plan), heads(&plan));
        assert_eq!(2 * experts(&part.plan), experts(&plan));
        assert_eq!(part.plan.caches[0].n_kv * 2, plan.caches[0].n_kv);
        assert!(!part.cuts.is_empty());
    }
    assert_eq!(partition::partition(&plan, 1).unwrap()[0].plan, plan);
    assert!(partition::partition(&plan, 9).is_err());
}
