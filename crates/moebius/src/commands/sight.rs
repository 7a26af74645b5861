//! `moebius bench --image`: what an image takes until the text model can read it.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use engine::images::{self, Image};
use serde::Serialize;

use super::gap::{median, ms};
use crate::args::{BenchArgs, BenchFormat};
use crate::load::{self, EngineSetup};
use crate::out::{self, say};
use crate::{machine, version};

/// What was measured with one model; times are medians in milliseconds.
#[derive(Debug, Serialize)]
pub struct SightRow {
    arch: String,
    backend: &'static str,
    threads: usize,
    width: usize,
    height: usize,
    /// Tokens that the image takes.
    n_tokens: usize,
    /// From the file to pixels.
    decode_ms: f64,
    /// From pixels to patches.
    resize_ms: f64,
    /// From pixels to features, the patches included.
    encode_ms: f64,
    build_commit: &'static str,
    cpu_info: String,
}

/// Measures the encoder of one model with the image in a file.
pub fn measure(path: Option<&Path>, setup: &EngineSetup, args: &BenchArgs, image: &Path) -> Result<SightRow> {
    let model = load::open(path)?.seeing(&args.sight)?;
    let arch = model.plan.arch.clone();
    let why = model.unseen.as_deref().unwrap_or("it sees none");
    let sight = model.sight.with_context(|| format!("failed to show images to {arch}: {why}"))?;
    let mut encoder = sight.encoder(setup, setup.device.kind)?;
    let file = load::image_file(image)?;
    let decoded = Image::decode(&file).with_context(|| format!("failed to show {}", image.display()))?;
    // Kernels are compiled and weights are read.
    let features = encoder.encode(&decoded)?;
    let decode_ms = time(args.repetitions, || Image::decode(&file).map(drop))?;
    let resize_ms = time(args.repetitions, || encoder.processor().rows(&decoded).map(drop))?;
    let encode_ms = time(args.repetitions, || encoder.encode(&decoded).map(drop))?;
    Ok(SightRow {
        arch,
        backend: encoder.backend(),
        threads: machine::threads(setup.threads)?,
        width: decoded.width,
        height: decoded.height,
        n_tokens: features.len(),
        decode_ms,
        resize_ms,
        encode_ms,
        build_commit: version::COMMIT,
        cpu_info: machine::processor(),
    })
}

/// Returns the median of the times that `work` takes, in milliseconds.
fn time(repetitions: usize, mut work: impl FnMut() -> Result<(), images::Error>) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..repetitions {
        let start = Instant::now();
        work()?;
        times.push(ms(start.elapsed()));
    }
    Ok(median(&mut times))
}

/// Prints a row: of a table, whose head comes with the first, or an object a line.
pub fn print(format: BenchFormat, is_first: bool, row: &SightRow) -> Result<()> {
    if format != BenchFormat::Md {
        return out::json_line(row);
    }
    if is_first {
        say!("| model | encoder | thr | image | tokens | decode | resize | encode |")?;
        say!("|---|---|--:|--:|--:|--:|--:|--:|")?;
    }
    let SightRow { arch, backend, threads, width, height, n_tokens, decode_ms, resize_ms, encode_ms, .. } = row;
    say!(
        "| {arch} | {backend} | {threads} | {width}x{height} | {n_tokens} | {decode_ms:.1} ms | {resize_ms:.1} ms | \
         {encode_ms:.1} ms |"
    )
}
