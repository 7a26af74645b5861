//! Encoders of whole texts (BERT, XLM-RoBERTa) against rows and scores of transformers, from folders and GGUF files,
//! alone and in company; and what a step of them refuses.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use backend::reference::Reference;
use backend::{Ask, Backend, Batch, CacheType, Limits, PAGE, Program, StepError, Tables};
use conformance::{Maker, Random, backends};
use model::plan::{Op, Plan, Rows, ValidPlan};
use serde_json::Value;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/encoders");
const MAX_TOKENS: usize = 160;

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
    let backends: [(&str, Box<dyn Backend>, f32); 3] = [
        ("reference", Box::new(Reference), 1e-5),
        ("cpu f32", cpu(CacheType::F32), 1e-5),
        // Keys and values are rounded.
        ("cpu f16", cpu(CacheType::F16), 4e-3),
    ];
    for name in ["bert", "bert_mean", "bert_rerank", "xlmr", "xlmr_rerank"] {
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
                // A text by itself gives the same bits.
                let mut at = 0;
                for text in &texts {
                    let alone = program.step(&batch(&[text], asked)).unwrap().hidden.to_vec();
                    assert_eq!(alone, together[at..at + alone.len()], "{name} {label}");
                    at += alone.len();
                }
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

#[test]
fn gpus_refuse_them() {
    let (_, files) = model("bert");
    let plan = model::build(&checkpoint::open(&files[0]).unwrap()).unwrap();
    let cuda = gpu::cuda::Cuda {
        device: 0,
        cache: CacheType::F16,
        cubins: None,
        kernels: None,
        ahead: None,
        progress: None,
        host: None,
    };
    let why = cuda.lower(plan).unwrap_err().to_string();
    assert_eq!(why, "compile plan: backend cuda cannot run models that encode whole texts");
}
