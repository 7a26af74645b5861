//! What a program with slabs would do, without running it: hit rates from recorded routes, and the speed of the disk.

use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::{BLOCK, Checkpoint};
use model::plan::Plan;

use super::layout::Layout;
use super::reader::{Readers, Slabs};
use super::source::Files;
use super::store::{Found, Store};
use super::streams::layer_files;
use crate::CompileError;

/// How long the disk is measured.
const TIME: Duration = Duration::from_millis(600);

/// What recorded tokens would find in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Predicted {
    /// Share of the wanted experts that are in memory.
    pub hit_rate: f64,
    /// Bytes a token that are read from files.
    pub bytes: f64,
}

/// Decodes recorded tokens, `[Σ n_used]` each with the experts of all layers, and counts those of the second half:
/// slabs are empty at first. Prefetches change when an expert is read, hardly whether, and are left out.
pub fn predict(layout: &Layout, tokens: &[Vec<u16>]) -> Predicted {
    let mut store = Store::new(layout);
    let (mut hits, mut wanted, mut bytes, mut counted) = (0u64, 0u64, 0u64, 0u64);
    let mut held = Vec::new();
    for (t, token) in tokens.iter().enumerate() {
        let counts = t >= tokens.len() / 2;
        counted += u64::from(counts);
        store.start_step(1);
        let mut rest = &token[..];
        for (i, layer) in layout.layers.iter().enumerate() {
            let (ids, after) = rest.split_at(layer.n_used.min(rest.len()));
            rest = after;
            store.start_layer(i);
            let ids = || ids.iter().map(|&id| usize::from(id)).filter(|&id| id < layer.n_expert);
            ids().for_each(|id| store.used(i, id, 1));
            if counts {
                let n_held = ids().filter(|&id| store.has(i, id)).count();
                (hits, wanted) = (hits + n_held as u64, wanted + ids().count() as u64);
                bytes += ((ids().count() - n_held) * layer.unit_bytes) as u64;
            }
            // Those that are there first, as the op does it; then one after the other where slabs are few.
            for is_there in [true, false] {
                for id in ids().filter(|&id| store.has(i, id) == is_there).collect::<Vec<_>>() {
                    let mut found = store.want(i, id);
                    if found == Found::Full {
                        held.drain(..).for_each(|slab| store.unpin(slab));
                        found = store.want(i, id);
                    }
                    match found {
                        Found::Read(slab) => {
                            store.arrived(slab);
                            held.push(slab);
                        }
                        Found::Held(slab) | Found::Coming(slab) => held.push(slab),
                        Found::Full => {}
                    }
                }
            }
            held.drain(..).for_each(|slab| store.unpin(slab));
        }
    }
    Predicted { hit_rate: hits as f64 / wanted.max(1) as f64, bytes: bytes as f64 / counted.max(1) as f64 }
}

/// The same for routes that choose every expert equally often.
pub fn predict_uniform(layout: &Layout) -> Predicted {
    let (mut hits, mut wanted, mut bytes) = (0.0, 0.0, 0.0);
    for layer in &layout.layers {
        let class = layout.classes[layer.class];
        let held = class.n_slabs as f64 / class.n_experts.max(1) as f64;
        let n = layer.n_used as f64;
        (hits, wanted) = (hits + n * held, wanted + n);
        bytes += n * (1.0 - held) * layer.unit_bytes as f64;
    }
    Predicted { hit_rate: hits / f64::max(wanted, 1.0), bytes }
}

/// Bytes a second at which the threads of a program read experts in no order.
///
/// # Errors
/// There is no memory or no threads, or the files cannot be read.
pub fn disk_bandwidth(checkpoint: &Arc<Checkpoint>, plan: &Plan, layout: &Layout) -> Result<f64, CompileError> {
    /// Units under way.
    const N: usize = 8;
    let Some(slab_bytes) = layout.classes.iter().map(|class| class.slab_bytes).max() else { return Ok(0.0) };
    let slabs = Arc::new(Slabs::new(std::iter::repeat_n(slab_bytes, N), BLOCK)?);
    let files = Arc::new(layer_files(plan, checkpoint, layout)?);
    let names = checkpoint.files().iter().map(|file| file.path().display().to_string()).collect();
    let readers = Readers::new(Arc::new(Files::new(Arc::clone(checkpoint))), names, files, slabs)?;
    let mut next = 0usize;
    let mut request = |slab: u32| {
        // A fixed scatter over layers and experts.
        next = next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let layer = (next >> 33) % layout.layers.len();
        let expert = (next >> 17) % layout.layers[layer].n_expert.max(1);
        readers.request(slab, (layer, expert), true);
    };
    (0..N as u32).for_each(&mut request);
    let (begin, mut failed) = (Instant::now(), None);
    while begin.elapsed() < TIME && failed.is_none() {
        readers.wait(TIME);
        readers.poll(|done| match done.error {
            None => request(done.slab),
            Some(cause) => failed = Some(cause),
        });
    }
    match failed {
        Some(cause) => Err(CompileError::Start { what: "reading experts".into(), why: cause.to_string() }),
        None => Ok(readers.bytes_read() as f64 / begin.elapsed().as_secs_f64()),
    }
}
