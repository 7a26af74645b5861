//! A custom sampler on a bare program, without the engine: a beam of four texts, each continued by its likeliest
//! tokens, of which the four likeliest texts are kept. `cargo run --release --example sampler -- "Once upon a time"`.
//!
//! It shows the contract of a step: chunks of several sequences in one batch, pages that sequences own, and rows of
//! logits for the tokens that are asked for.

use std::path::Path;
use std::sync::Arc;

use backend::{Backend, Batch, Limits, PAGE, Program, Tables};
use cpu::Cpu;
use engine::tokenizer::{Encode, Tokenizer};

const WIDTH: usize = 4;
const N_NEW: usize = 24;

/// A text and the logarithm of its probability.
#[derive(Clone)]
struct Beam {
    tokens: Vec<u32>,
    logprob: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let prompt = std::env::args().nth(1).unwrap_or_else(|| "Once upon a time".into());
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/fable-29m-a10m-q4_k_m.gguf");
    let checkpoint = Arc::new(checkpoint::open(&file)?);
    let tokenizer = Tokenizer::load(&checkpoint)?;
    let prompt = tokenizer.encode(&prompt, Encode { add_special: true, parse_special: false });
    let n_positions = prompt.len() + N_NEW;

    let cpu = Cpu::default();
    let plan = cpu.lower(model::build(&checkpoint)?)?;
    // A page holds PAGE positions, and no two beams share pages: what a beam attends to must not change.
    let n_pages = n_positions.div_ceil(PAGE);
    let limits = Limits {
        max_tokens: WIDTH * n_positions,
        max_outputs: WIDTH,
        n_pages: WIDTH * n_pages,
        max_positions: n_positions,
        ..Limits::default()
    };
    let mut program = cpu.compile(&plan, checkpoint.clone(), limits)?;
    let pages: Vec<Vec<u32>> =
        (0..WIDTH).map(|i| (i * n_pages..(i + 1) * n_pages).map(|p| p as u32).collect()).collect();

    let mut beams = vec![Beam { tokens: prompt.clone(), logprob: 0.0 }];
    for _ in 0..N_NEW {
        let mut next = Vec::new();
        for (beam, row) in beams.iter().zip(step(&mut *program, &beams, &pages)?) {
            for (token, logprob) in likeliest(&row, WIDTH) {
                let tokens = beam.tokens.iter().copied().chain([token]).collect();
                next.push(Beam { tokens, logprob: beam.logprob + logprob });
            }
        }
        next.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
        next.truncate(WIDTH);
        beams = next;
    }
    for beam in &beams {
        println!("{:8.2}  {}", beam.logprob, tokenizer.decode(&beam.tokens).replace('\n', " "));
    }
    Ok(())
}

/// Returns a row of logits for the last token of each text. Beams change places between steps, so each text is computed
/// from its beginning: simple, and the bits are those of a text that was computed token by token.
fn step(
    program: &mut dyn Program,
    beams: &[Beam],
    pages: &[Vec<u32>],
) -> Result<Vec<Vec<f32>>, Box<dyn std::error::Error>> {
    let mut batch = Batch::default();
    for (beam, pages) in beams.iter().zip(pages) {
        let used = &pages[..beam.tokens.len().div_ceil(PAGE)];
        batch.push(&beam.tokens, 0, Tables { pages: used, ..Tables::default() }, [beam.tokens.len() - 1]);
    }
    let n_vocab = program.n_vocab();
    let output = program.step(&batch)?;
    Ok(output.logits.chunks_exact(n_vocab).map(<[f32]>::to_vec).collect())
}

/// Returns the n likeliest tokens with the logarithms of their probabilities.
fn likeliest(logits: &[f32], n: usize) -> Vec<(u32, f64)> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
    let mut all: Vec<(u32, f64)> =
        (0..).zip(logits).map(|(token, &logit)| (token, f64::from(logit - most) - sum.ln())).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.truncate(n);
    all
}
