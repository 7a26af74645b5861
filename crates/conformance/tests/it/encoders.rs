//! Encoders of whole texts (BERT and others) against rows and scores of transformers, from folders and GGUF files, alone
//! and in company; what a step of them refuses, and what their files may not say.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use backend::reference::Reference;
use backend::{Ask, Backend, Batch, CacheType, Limits, PAGE, Program, StepError, Tables};
use checkpoint::Checkpoint;
use conformance::{Maker, Random, backends};
use model::plan::{Cache, CacheDecl, Op, Plan, Rows, ValidPlan};
use quant::WeightType::F32;
use serde_json::{Value, json};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/encoders");
const MAX_TOKENS: usize = 160;
const NAMES: [&str; 8] =
    ["bert", "bert_mean", "bert_rerank", "xlmr", "xlmr_rerank", "gemma_embedding", "modern_bert", "nomic_bert"];

/// A text: its tokens, where its second part begins, and some of the rows that are right.
struct Text {
    ids: Vec<u32>,
    second: usize,
    at: Vec<usize>,
    rows: Vec<f32>,
}

fn floats(value: &Value) -> Vec<f32> {
    match value.as_array() {
        Some(list) => list.iter().map(|x| x.as_f64().unwrap() as f32).collect(),
        None => vec![value.as_f64().unwrap() as f32],
    }
}

fn counts(list: &Value) -> impl Iterator<Item = usize> {
    list.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize)
}

/// The texts of a model, and its files.
fn model(name: &str) -> (Vec<Text>, [PathBuf; 2]) {
    let folder = Path::new(DATA).join(name);
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap();
    let text = |row: &Value| {
        let ids: Vec<u32> = counts(&row["ids"]).map(|id| id as u32).collect();
        let second = row["second"].as_u64().map_or(ids.len(), |at| at as usize);
        // Pairs are scored from their first token.
        let at = if row["at"].is_null() { vec![0] } else { counts(&row["at"]).collect() };
        Text { second, at, rows: floats(row.get("rows").unwrap_or(&row["score"])), ids }
    };
    let list = golden.get("texts").unwrap_or(&golden["pairs"]).as_array().unwrap();
    (list.iter().map(text).collect(), [folder.join("hf"), folder.join("model-f16.gguf")])
}

fn program(backend: &dyn Backend, file: &Path) -> Box<dyn Program> {
    let checkpoint = Arc::new(checkpoint::open(file).unwrap());
    let plan = backend.lower(model::build(&checkpoint).unwrap()).unwrap();
    let limits = Limits {
        max_tokens: MAX_TOKENS,
        max_outputs: MAX_TOKENS,
        n_pages: 12,
        max_positions: plan.n_ctx_train,
        ..Limits::default()
    };
    backend.compile(&plan, checkpoint, limits).unwrap()
}

/// A step of whole texts, which asks for `rows` of each.
fn batch(texts: &[&Text], rows: impl Fn(&Text) -> Vec<usize>) -> Batch {
    let mut batch = Batch::default();
    let mut page = 0;
    for text in texts {
        let n = text.ids.len().div_ceil(PAGE) as u32;
        let pages: Vec<u32> = (page..page + n).rev().collect();
        page += n;
        let first = batch.tokens.len() as u32;
        batch.push(&text.ids, 0, Tables { pages: &pages, ..Tables::default() }, rows(text));
        batch.given.spans.push(first..first + text.ids.len() as u32);
        let place = |at: usize| [at as u32, u32::from(at >= text.second), 0];
        batch.given.places.extend((0..text.ids.len()).map(place));
    }
    batch.asks.fill(Ask::Hidden);
    batch
}

fn asked(text: &Text) -> Vec<usize> {
    text.at.clone()
}

fn error(found: &[f32], exact: &[f32]) -> f32 {
    assert_eq!(found.len(), exact.len());
    // NaN is larger than all.
    let off = found.iter().zip(exact).map(|(a, b)| (a - b).abs());
    off.fold(0.0, |most, off| if off <= most { most } else { off })
}

#[test]
fn rows_are_those_of_transformers() {
    let cpu = |cache| Box::new(backends::cpu_with(cpu::Isa::best(), 2, cache)) as Box<dyn Backend>;
    let mut backends: Vec<(&str, Box<dyn Backend>, f32)> = vec![
        ("reference", Box::new(Reference), 1e-5),
        ("cpu f32", cpu(CacheType::F32), 1e-5),
        // Keys and values are rounded.
        ("cpu f16", cpu(CacheType::F16), 4e-3),
    ];
    // Activations too, to bf16, in steps of many rows: the largest of all rows' errors.
    let cuda = [("cuda f32", CacheType::F32), ("cuda f16", CacheType::F16)];
    backends.extend(
        cuda.into_iter()
            .filter_map(|(label, cache)| Some((label, Box::new(backends::gpu(cache)?) as Box<dyn Backend>, 8e-2))),
    );
    for name in NAMES {
        let (texts, files) = model(name);
        for (label, backend, tolerance) in &backends {
            for file in &files {
                let mut program = program(&**backend, file);
                let all: Vec<&Text> = texts.iter().collect();
                let together = program.step(&batch(&all, asked)).unwrap().hidden.to_vec();
                let exact: Vec<f32> = texts.iter().flat_map(|text| text.rows.clone()).collect();
                let off = error(&together, &exact);
                println!("{name} {label} {}: {off:.2e}", file.file_name().unwrap().display());
                assert!(off <= *tolerance, "{name} {label} {}: {off:.2e}", file.display());
                // A text by itself gives the same bits, or on a GPU nearly so.
                let mut at = 0;
                for text in &texts {
                    let alone = program.step(&batch(&[text], asked)).unwrap().hidden.to_vec();
                    let off = error(&alone, &together[at..at + alone.len()]);
                    assert!(off <= if label.starts_with("cuda") { 2.0 * tolerance } else { 0.0 }, "{name} {label}");
                    at += alone.len();
                }
            }
        }
    }
}

/// The same on a simulated GPU, where a text alone is off by rounding: few tokens take other kernels.
#[test]
fn metal_gives_the_rows_of_transformers() {
    for (cache, names, tolerance) in [(CacheType::F32, &NAMES[..], 1e-5), (CacheType::F16, &NAMES[5..7], 4e-3)] {
        let Some(metal) = backends::simulated(cache, metal_sim::Options::default()) else { return };
        for name in names {
            let (texts, files) = model(name);
            for file in &files[..if *name == "bert_rerank" { 2 } else { 1 }] {
                let mut program = program(&metal, file);
                let mut check = |texts: &[&Text]| {
                    let found = program.step(&batch(texts, asked)).unwrap().hidden.to_vec();
                    let exact: Vec<f32> = texts.iter().flat_map(|text| text.rows.clone()).collect();
                    let off = error(&found, &exact);
                    println!("{name} metal {cache:?} {}: {off:.2e}", file.file_name().unwrap().display());
                    assert!(off <= tolerance, "{name} {cache:?} {}: {off:.2e}", file.display());
                };
                check(&texts.iter().collect::<Vec<_>>());
                check(&[&texts[0]]);
            }
        }
    }
}

/// The first token's row changes with the last token: attention is not causal.
#[test]
fn tokens_see_later_ones() {
    let (texts, files) = model("bert");
    let mut program = program(&Reference, &files[0]);
    let text = &texts[0];
    let first =
        |program: &mut dyn Program, text: &Text| program.step(&batch(&[text], |_| vec![0])).unwrap().hidden.to_vec();
    let mut other = Text { ids: text.ids.clone(), second: text.second, at: vec![0], rows: Vec::new() };
    *other.ids.last_mut().unwrap() = 7;
    assert!(error(&first(&mut *program, text), &first(&mut *program, &other)) > 1e-2);
}

/// Tables of places of every type that embeddings may have.
#[test]
fn places_are_looked_up_in_tables_of_every_type() {
    let metal = backends::simulated(CacheType::F32, metal_sim::Options::default());
    for t in backends::types() {
        let d = 256;
        let mut m = Maker { plan: Plan::new("one op", 1, d, 64), tensors: Vec::new(), random: Random(5) };
        let tables = [m.weight(&[40, d], t), m.weight(&[3, d], t)];
        let [x, y] = [(); 2].map(|()| m.buf(Rows::Tokens, d));
        let rows = m.buf(Rows::Outputs, d);
        m.op(Op::EmbedPlace { table: tables[0], axis: 0, out: x });
        m.op(Op::EmbedPlace { table: tables[1], axis: 1, out: y });
        m.op(Op::Add { x, y });
        m.op(Op::Select { x, out: rows });
        (m.plan.whole, m.plan.logits) = (true, rows);
        let (plan, weights) = m.finish(false);
        let plan = ValidPlan::new(plan).unwrap();
        let limits = Limits { max_tokens: 8, max_outputs: 8, n_pages: 1, max_positions: 8, ..Limits::default() };
        let mut batch = Batch::default();
        batch.push(&[0; 8], 0, Tables { pages: &[0], ..Tables::default() }, 0..8);
        batch.asks.fill(Ask::Hidden);
        batch.given.spans.push(0..8);
        batch.given.places = (0..8).map(|i| [39 - 5 * i, i % 3, 0]).collect();
        let step = |backend: &dyn Backend| {
            let mut program = backend.compile(&plan, weights.clone(), limits).unwrap();
            program.step(&batch).unwrap().hidden.to_vec()
        };
        let exact = step(&Reference);
        assert!(exact.iter().any(|&x| x != 0.0) && exact.iter().all(|x| x.is_finite()), "{t}");
        assert_eq!(step(&backends::cpu_with(cpu::Isa::best(), 2, CacheType::F32)), exact, "{t}");
        if let Some(cuda) = backends::gpu(CacheType::F32) {
            assert!(error(&step(&cuda), &exact) < 1e-5, "{t}");
        }
        if let Some(metal) = &metal {
            let most = exact.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let off = error(&step(metal), &exact);
            assert!(off <= 1e-6 * most, "{t}: {off:.2e} of {most:.2e}");
        }
    }
}

#[test]
fn steps_of_anything_but_whole_texts_are_refused() {
    let (texts, files) = model("bert");
    type Change = fn(&mut Batch);
    let cases: [(&str, Change); 7] = [
        ("parts of some", |batch| batch.given.spans.clear()),
        ("parts of some", |batch| batch.given.spans[0].end -= 1),
        ("parts of some", |batch| batch.chunks[0].pos = 1),
        ("have 0 places", |batch| batch.given.places.clear()),
        ("has place [40, 0, 0]", |batch| batch.given.places[1][0] = 40),
        ("has place [1, 2, 0]", |batch| batch.given.places[1][1] = 2),
        ("asks for logits", |batch| batch.asks[0] = Ask::Logits),
    ];
    for file in &files {
        for backend in [&Reference as &dyn Backend, &backends::cpu_with(cpu::Isa::best(), 1, CacheType::F32)] {
            let mut program = program(backend, file);
            for (what, change) in cases {
                let mut batch = batch(&[&texts[0]], asked);
                change(&mut batch);
                match program.step(&batch) {
                    Err(StepError::Batch(why)) => assert!(why.contains(what), "{why}"),
                    other => panic!("{what}: {other:?}"),
                }
            }
        }
    }
}

type Files = BTreeMap<String, Vec<u8>>;

/// A model's folder with some of its files changed.
fn changed(name: &str, change: impl Fn(&mut Files)) -> Result<Checkpoint, checkpoint::Error> {
    const INSIDE: [&str; 2] = ["config.json", "model.safetensors"];
    let folder = Path::new(DATA).join(name).join("hf");
    let paths = INSIDE.iter().chain(&checkpoint::INNER_FILES).map(|path| path.to_string());
    let mut files: Files =
        paths.filter_map(|path| Some((path.clone(), std::fs::read(folder.join(path)).ok()?))).collect();
    change(&mut files);
    checkpoint::from_files(name, files.iter().map(|(path, bytes)| (path.as_str(), bytes.clone())).collect())
}

/// Changes keys of config.json; `null` takes one away.
fn set(files: &mut Files, keys: Value) {
    let mut config: Value = serde_json::from_slice(&files["config.json"]).unwrap();
    keys.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    files.insert("config.json".into(), config.to_string().into_bytes());
}

/// Windows of one position to several pages, in texts of several pages, for all positions of a page.
#[test]
fn windows_reach_both_ways_on_every_page() {
    let mut random = Random(3);
    let mut text = |n: usize| {
        let ids: Vec<u32> = (0..n).map(|_| 5 + (random.bits() % 300) as u32).collect();
        Text { second: n, at: (0..n).collect(), rows: Vec::new(), ids }
    };
    let texts = [text(150), text(70), text(1), text(33)];
    let short = [text(9), text(2)];
    let metal = backends::simulated(CacheType::F32, metal_sim::Options::default());
    let limits = Limits { max_tokens: 256, max_outputs: 256, n_pages: 12, max_positions: 160, ..Limits::default() };
    let step = |backend: &dyn Backend, window: usize, texts: &[&Text]| {
        let checkpoint = changed("gemma_embedding", |files| set(files, json!({"sliding_window": window}))).unwrap();
        let checkpoint = Arc::new(checkpoint);
        let plan = backend.lower(model::build(&checkpoint).unwrap()).unwrap();
        let mut program = backend.compile(&plan, checkpoint, limits).unwrap();
        program.step(&batch(texts, asked)).unwrap().hidden.to_vec()
    };
    let all: Vec<&Text> = texts.iter().collect();
    for window in [1, 2, 62, 64, 66, 140, 400] {
        let exact = step(&Reference, window, &all);
        for threads in [1, 3] {
            let cpu = backends::cpu_with(cpu::Isa::best(), threads, CacheType::F32);
            let found = step(&cpu, window, &all);
            let off = error(&found, &exact);
            assert!(off < 1e-4, "window {window}: {off:.2e}");
            assert_eq!(step(&cpu, window, &all[..1]), found[..texts[0].ids.len() * 12], "window {window}");
        }
        // In tiles, and token by token.
        let Some(metal) = &metal else { continue };
        let off = error(&step(metal, window, &all), &exact);
        assert!(off < 1e-4, "metal, window {window}: {off:.2e}");
        let few: Vec<&Text> = short.iter().collect();
        let off = error(&step(metal, window, &few), &step(&Reference, window, &few));
        assert!(off < 1e-4, "metal, window {window}, few tokens: {off:.2e}");
    }
}

/// Heads as wide as those of image encoders, in texts of several tiles and of few tokens: each token sees its text, or
/// its window to both sides. NaN of a token breaks those that see it alone.
#[test]
fn heads_of_image_encoders_see_spans() {
    let Some(metal) = backends::simulated(CacheType::F32, metal_sim::Options::default()) else { return };
    let (n_head, d, n_vocab, bad) = (3, 72, 50, 49);
    let row = n_head * d;
    let mut m = Maker { plan: Plan::new("one op", n_vocab, 3 * row, 160), tensors: Vec::new(), random: Random(9) };
    let table = m.weight_of(&[n_vocab, 3 * row], F32, |random, i| {
        (0..3 * row).map(|_| if i == bad { f32::NAN } else { random.float() }).collect()
    });
    let x = m.buf(Rows::Tokens, 3 * row);
    m.op(Op::Embed { table, scale: 1.0, out: x });
    let qkv = [(); 3].map(|()| m.buf(Rows::Tokens, row));
    m.op(Op::SplitHeads { x, n_head: 1, parts: qkv.map(|part| (row, part)).into() });
    let ([q, k, v], cache) = (qkv, Cache(0));
    m.plan.caches.push(CacheDecl { n_kv: n_head, d_k: d, d_v: d, v_in_k: false, window: None });
    m.op(Op::KvAppend { cache, k, v: Some(v) });
    let outs = [None, Some(20)].map(|window| {
        let out = m.buf(Rows::Tokens, row);
        let (scale, chunked, softcap, chosen, sinks) = (0.3, false, None, None, None);
        m.op(Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out });
        out
    });
    let (both, rows) = (m.buf(Rows::Tokens, 2 * row), m.buf(Rows::Outputs, 2 * row));
    m.op(Op::JoinHeads { parts: outs.map(|out| (row, out)).into(), n_head: 1, out: both });
    m.op(Op::Select { x: both, out: rows });
    (m.plan.whole, m.plan.logits) = (true, rows);
    let (plan, weights) = m.finish(false);
    let plan = ValidPlan::new(plan).unwrap();
    let limits = Limits { max_tokens: 256, max_outputs: 256, n_pages: 12, max_positions: 160, ..Limits::default() };
    let text = |n: usize, at: Option<usize>| {
        let id = |i: usize| if at == Some(i) { bad as u32 } else { (7 * i % bad) as u32 };
        Text { second: n, at: (0..n).collect(), rows: Vec::new(), ids: (0..n).map(id).collect() }
    };
    for texts in [vec![text(150, None), text(37, Some(30)), text(1, None)], vec![text(9, None), text(5, Some(2))]] {
        let texts: Vec<&Text> = texts.iter().collect();
        let step = |backend: &dyn Backend| {
            let mut program = backend.compile(&plan, weights.clone(), limits).unwrap();
            program.step(&batch(&texts, asked)).unwrap().hidden.to_vec()
        };
        let (found, exact) = (step(&metal), step(&Reference));
        assert!(exact.iter().any(|x| x.is_nan()) && exact.iter().any(|x| x.is_finite()));
        let off = found.iter().zip(&exact).map(|(a, b)| if a.is_nan() && b.is_nan() { 0.0 } else { (a - b).abs() });
        let off = off.fold(0.0f32, |most, off| if off <= most { most } else { off });
        println!("heads of {d}: {off:.2e}");
        assert!(off < 1e-5, "{off:.2e}");
    }
}

/// Configurations of the first code say what those of transformers say.
#[test]
fn older_configurations_make_the_same_plan() {
    let plan = |name: &str, keys: Value| {
        model::build(&changed(name, |files| set(files, keys.clone())).unwrap()).unwrap().to_string()
    };
    let kinds: Vec<&str> = (0..5).map(|i| if i % 3 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let newer = json!({
        "global_attn_every_n_layers": null, "global_rope_theta": null, "local_rope_theta": null, "layer_types": kinds,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0}},
    });
    assert_eq!(plan("modern_bert", newer), plan("modern_bert", json!({})));
    let gated = plan("modern_bert", json!({"hidden_activation": "silu"}));
    assert!(gated.contains("gated_act    act.0[T, 20] = silu(gate.0) ⊙ up.0"), "{gated}");
    let other = json!({"local_rope_theta": 31.0});
    let ropes = |keys: Value| {
        let plan = model::build(&changed("modern_bert", |files| set(files, keys.clone())).unwrap()).unwrap();
        plan.ropes.clone()
    };
    assert_ne!(ropes(other), ropes(json!({})));
    let first = json!({
        "hidden_size": null, "head_dim": null, "num_attention_heads": null, "intermediate_size": null, "num_hidden_layers": null,
        "max_position_embeddings": null, "layer_norm_eps": null, "hidden_act": null, "rope_parameters": null,
        "n_embd": 24, "n_head": 3, "n_inner": 20, "n_layer": 2, "n_positions": 8192, "max_trained_positions": 40,
        "layer_norm_epsilon": 1e-12, "activation_function": "swiglu", "rotary_emb_base": 50, "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": false, "rotary_emb_scale_base": null, "causal": false, "prenorm": false,
    });
    assert_eq!(plan("nomic_bert", first), plan("nomic_bert", json!({})));
}

#[test]
fn folders_that_lie_are_refused_by_the_name_of_what_is_wrong() {
    let keys = |keys: Value| move |files: &mut Files| set(files, keys.clone());
    let swapped = |files: &mut Files| {
        let [a, b] = ["2_Dense", "3_Dense"].map(|module| files[&format!("{module}/model.safetensors")].clone());
        files.insert("2_Dense/model.safetensors".into(), b);
        files.insert("3_Dense/model.safetensors".into(), a);
    };
    let without = |path: &'static str| move |files: &mut Files| drop(files.remove(path));
    let with_dense = |files: &mut Files| {
        let dense = std::fs::read(Path::new(DATA).join("gemma_embedding/hf/2_Dense/model.safetensors")).unwrap();
        files.insert("2_Dense/model.safetensors".into(), dense);
    };
    type Change<'c> = Box<dyn Fn(&mut Files) + 'c>;
    let cases: Vec<(&str, Change, &str)> = vec![
        ("gemma_embedding", Box::new(swapped), "2_Dense.linear.weight: has shape [12, 28], expected [12, 18]"),
        (
            "gemma_embedding",
            Box::new(without("2_Dense/model.safetensors")),
            "3_Dense.linear.weight: has shape [12, 28]",
        ),
        ("gemma_embedding", Box::new(keys(json!({"sliding_window": 0}))), "key sliding_window: is missing or 0"),
        ("gemma_embedding", Box::new(keys(json!({"head_dim": 10}))), "q_proj.weight: has shape [24, 18]"),
        ("gemma_embedding", Box::new(keys(json!({"layer_types": ["full_attention"]}))), "key layer_types: has 1"),
        (
            "gemma_embedding",
            Box::new(keys(json!({"num_hidden_layers": 8}))),
            "key layer_types: has 7 layers, the model has 8",
        ),
        ("modern_bert", Box::new(with_dense), "2_Dense.linear.weight: f16 [28, 18] is in the file, modern-bert has no"),
        ("modern_bert", Box::new(keys(json!({"local_attention": null}))), "key local_attention: missing"),
        ("modern_bert", Box::new(keys(json!({"global_attn_every_n_layers": 0}))), "every_n_layers: is 0"),
        ("modern_bert", Box::new(keys(json!({"hidden_activation": "relu"}))), "is relu, expected gelu or silu"),
        (
            "modern_bert",
            Box::new(keys(json!({"intermediate_size": 21}))),
            "mlp.Wi.weight: has shape [40, 24], expected [42",
        ),
        ("modern_bert", Box::new(keys(json!({"num_attention_heads": 5}))), "5 heads cannot share a width of 24"),
        ("nomic_bert", Box::new(keys(json!({"moe_every_n_layers": 2}))), "experts of encoders are not supported"),
        ("nomic_bert", Box::new(keys(json!({"prenorm": true}))), "key prenorm: is true, expected false"),
        ("nomic_bert", Box::new(keys(json!({"rotary_emb_fraction": 0.5}))), "rotary_emb_fraction: is 0.5, expected 1"),
        ("nomic_bert", Box::new(keys(json!({"hidden_act": "gelu"}))), "key hidden_act: is gelu, expected swiglu"),
        ("nomic_bert", Box::new(keys(json!({"head_dim": 7}))), "is 7, expected an even number"),
        (
            "nomic_bert",
            Box::new(keys(json!({"num_attention_heads": 5}))),
            "Wqkv.weight: has shape [72, 24], expected [120",
        ),
    ];
    for (name, change, what) in cases {
        let why = changed(name, change).map_err(|why| why.to_string());
        let why = why.and_then(|checkpoint| model::build(&checkpoint).map_err(|why| why.to_string()));
        let why = why.map(|_| ()).unwrap_err();
        assert!(why.contains(what), "{name}: {what}: {why}");
    }
}
