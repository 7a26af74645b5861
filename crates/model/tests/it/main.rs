//! Tests over headers made here.
#![allow(clippy::unwrap_used)]

mod costs;
mod docs;
mod drafts;
#[path = "../../../../tests/fixtures.rs"]
mod fixtures;
mod gated_delta;
mod header;
mod latent;
mod lightning;
mod names;
mod plans;
mod refusals;
mod rules;
mod stretch;
mod windowed;

use checkpoint::Checkpoint;
use model::plan::{Plan, ValidPlan, passes};

/// The plan with all passes applied, as the CPU lowers it.
fn fused(checkpoint: &Checkpoint) -> Result<ValidPlan, model::Error> {
    model::build(checkpoint)?.rewrite(passes::fuse)
}

/// Bytes of f16 that a position takes in the layers that keep all positions, and in those that keep a window, without
/// what a backend pads; and bytes of a sequence's recurrent states.
fn sequence_bytes(plan: &Plan) -> (usize, usize, usize) {
    let caches = |windowed: bool| {
        let caches = plan.caches.iter().filter(|cache| cache.window.is_some() == windowed);
        caches.map(|cache| 2 * cache.numbers()).sum()
    };
    (caches(false), caches(true), plan.states.iter().map(|state| 4 * state.n).sum())
}

/// A published folder with a changed config.
fn changed(name: &str, change: impl FnOnce(&mut serde_json::Value)) -> Result<ValidPlan, model::Error> {
    let folder =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/tests/data/published").join(name);
    let read = |name: &str| std::fs::read(folder.join("hf").join(name)).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&read("config.json")).unwrap();
    change(&mut config);
    let files =
        vec![("config.json", config.to_string().into_bytes()), ("model.safetensors", read("model.safetensors"))];
    model::build(&checkpoint::from_files(name, files).unwrap())
}
