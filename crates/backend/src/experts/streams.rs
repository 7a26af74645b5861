//! Experts of a program in host memory: wanted by an op, read by threads, handed to kernels.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use checkpoint::{BLOCK, Checkpoint, Extent};
use model::plan::Plan;
use quant::Planes;

use super::StreamStats;
use super::layout::Layout;
use super::reader::{LayerFiles, Readers, Slabs};
use super::source::{Files, Source};
use super::store::{Found, Store};
use crate::{Cause, CompileError, weights};

/// How often a wait looks whether it was interrupted.
const LOOK: Duration = Duration::from_millis(50);
/// No slab.
const NONE: u32 = u32::MAX;

/// Why an op could not have its experts.
#[derive(Debug)]
pub enum Waiting {
    /// An expert could not be read.
    Lost {
        /// Its number.
        expert: usize,
        /// What kept it.
        cause: Cause,
    },
    /// The caller interrupted the step.
    Interrupted,
}

/// Where the units of every layer lie.
///
/// # Errors
/// The checkpoint does not hold what the plan wants.
pub fn layer_files(plan: &Plan, checkpoint: &Checkpoint, layout: &Layout) -> Result<Vec<LayerFiles>, CompileError> {
    let files = layout.layers.iter().map(|layer| {
        let of = |i: usize| weights::matrix_extents(checkpoint, plan.weight(layer.weights[i]));
        Ok(LayerFiles { extents: [of(0)?, of(1)?, of(2)?], rooms: layer.rooms })
    });
    files.collect()
}

/// The slabs of a program, and what fills them.
pub struct Streams {
    store: Store,
    // Before the slabs: the threads end first.
    readers: Readers,
    slabs: Arc<Slabs>,
    files: Arc<Vec<LayerFiles>>,
    source: Arc<dyn Source>,
    n_files: usize,
    names: Vec<String>,
    /// Slab of each expert that the op under way has pinned, or NONE, `[most experts of a layer]`.
    held: Vec<u32>,
    layer: usize,
    stats: StreamStats,
    /// Bytes read when the files were last checked.
    checked: u64,
    interrupt: Option<Arc<AtomicBool>>,
}

impl Streams {
    /// Slabs for a plan; `None` where nothing is streamed.
    ///
    /// # Errors
    /// The checkpoint does not hold what the plan wants, there is no memory, or no threads.
    pub fn new(
        plan: &Plan,
        checkpoint: &Arc<Checkpoint>,
        layout: Layout,
        source: Option<Arc<dyn Source>>,
    ) -> Result<Option<Streams>, CompileError> {
        if layout.layers.is_empty() {
            return Ok(None);
        }
        let sizes = layout.classes.iter().flat_map(|class| std::iter::repeat_n(class.slab_bytes, class.n_slabs));
        let slabs = Arc::new(Slabs::new(sizes, BLOCK)?);
        let files = Arc::new(layer_files(plan, checkpoint, &layout)?);
        let source = source.unwrap_or_else(|| Arc::new(Files::new(Arc::clone(checkpoint))));
        let names: Vec<String> = checkpoint.files().iter().map(|file| file.path().display().to_string()).collect();
        let readers = Readers::new(source.clone(), names.clone(), files.clone(), slabs.clone())?;
        let most = layout.layers.iter().map(|layer| layer.n_expert).max().unwrap_or(0);
        let stats = StreamStats { n_slabs: layout.n_slabs(), n_experts: layout.n_experts(), ..StreamStats::default() };
        Ok(Some(Streams {
            store: Store::new(&layout),
            readers,
            slabs,
            files,
            source,
            n_files: names.len(),
            names,
            held: vec![NONE; most],
            layer: 0,
            stats,
            checked: 0,
            interrupt: None,
        }))
    }

    /// Bytes that [`Streams::new`] allocates.
    pub fn bytes(layout: &Layout) -> usize {
        if layout.layers.is_empty() {
            return 0;
        }
        let extents = layout.n_experts() * 3 * size_of::<checkpoint::Extents>();
        let most = layout.layers.iter().map(|layer| layer.n_expert).max().unwrap_or(0);
        let tables = extents + most * size_of::<u32>() + layout.layers.len() * size_of::<LayerFiles>();
        layout.slab_bytes().saturating_add(BLOCK + Store::bytes(layout) + Readers::bytes(layout.n_slabs()) + tables)
    }

    /// What it has done so far.
    pub fn stats(&self) -> StreamStats {
        StreamStats { bytes: self.readers.bytes_read(), ..self.stats }
    }

    /// A flag that ends the waits of a step.
    pub fn set_interrupt(&mut self, flag: Arc<AtomicBool>) {
        self.interrupt = Some(flag);
    }

    /// A step of `n_tokens` begins.
    pub fn start_step(&mut self, n_tokens: usize) {
        self.store.start_step(n_tokens);
    }

    /// The op of `layer` begins, which uses the experts `active`, each for so many tokens. Those that are there are
    /// pinned; the others are requested, as far as there are slabs.
    pub fn start(&mut self, layer: usize, active: &[u32], n_tokens: impl Fn(usize) -> usize) {
        self.layer = layer;
        self.store.start_layer(layer);
        self.collect();
        for &expert in active {
            self.store.used(layer, expert as usize, n_tokens(expert as usize));
            self.held[expert as usize] = NONE;
        }
        self.stats.wanted += active.len() as u64;
        // Those that are there first, lest others take their slabs.
        for &expert in active.iter() {
            let expert = expert as usize;
            if self.store.has(layer, expert) {
                match self.store.want(layer, expert) {
                    Found::Held(slab) => (self.held[expert], self.stats.hits) = (slab, self.stats.hits + 1),
                    Found::Coming(slab) => (self.held[expert], self.stats.coming) = (slab, self.stats.coming + 1),
                    Found::Read(_) | Found::Full => unreachable!("the expert has a slab"),
                }
            }
        }
        let (store, readers) = (&mut self.store, &self.readers);
        let mut dropped = |slab| store.failed(slab);
        let held = &self.held;
        let is_wanted = |slab| active.iter().any(|&expert| held[expert as usize] == slab);
        readers.sort_out(is_wanted, &mut dropped);
        self.request(active);
    }

    /// Requests what of `pending` has no slab yet.
    fn request(&mut self, pending: &[u32]) {
        for &expert in pending {
            let expert = expert as usize;
            if self.held[expert] != NONE {
                continue;
            }
            match self.store.want(self.layer, expert) {
                Found::Held(slab) | Found::Coming(slab) => self.held[expert] = slab,
                Found::Read(slab) => {
                    self.held[expert] = slab;
                    self.readers.request(slab, (self.layer, expert), true);
                }
                Found::Full => return,
            }
        }
    }

    /// Requests an expert of another layer ahead of time, where a slab can be had for it.
    pub fn prefetch(&mut self, layer: usize, expert: usize) {
        if let Some(slab) = self.store.prefetch(layer, expert) {
            self.stats.prefetched += 1;
            self.readers.request(slab, (layer, expert), false);
        }
    }

    /// Moves those of `pending` that are there to the front, and returns how many there are. Waits for the first.
    ///
    /// # Errors
    /// One of `pending` cannot be read, or the step was interrupted. Nothing is pinned then.
    pub fn ready(&mut self, pending: &mut [u32]) -> Result<usize, Waiting> {
        let mut since: Option<Instant> = None;
        loop {
            if self.interrupt.as_ref().is_some_and(|flag| flag.load(Relaxed)) {
                self.release(pending);
                return Err(Waiting::Interrupted);
            }
            if let Some(lost) = self.arrivals(pending) {
                self.release(pending);
                return Err(lost);
            }
            self.request(pending);
            let mut n_ready = 0;
            for i in 0..pending.len() {
                let slab = self.held[pending[i] as usize];
                if slab != NONE && self.store.is_held(slab) {
                    pending.swap(n_ready, i);
                    n_ready += 1;
                }
            }
            if n_ready > 0 || pending.is_empty() {
                self.stats.waited += since.map_or(Duration::ZERO, |since| since.elapsed());
                return Ok(n_ready);
            }
            let since = since.get_or_insert_with(Instant::now);
            if since.elapsed() > self.source.patience() {
                self.stats.waited += since.elapsed();
                let lost = self.stalled(pending);
                self.release(pending);
                return Err(lost);
            }
            self.readers.wait(LOOK);
        }
    }

    /// The op is done with these experts.
    pub fn release(&mut self, experts: &[u32]) {
        for &expert in experts {
            let slab = std::mem::replace(&mut self.held[expert as usize], NONE);
            if slab != NONE {
                self.store.unpin(slab);
            }
        }
    }

    /// The planes of gate, up or down (0, 1, 2) of an expert that is there.
    ///
    /// # Safety
    /// The op under way has the expert from [`Streams::ready`] and does not read the planes behind
    /// [`Streams::release`].
    pub unsafe fn planes(&self, matrix: usize, expert: usize) -> Planes<'_> {
        let files = &self.files[self.layer];
        let (extents, rooms, slab) = (&files.extents[matrix][expert], &files.rooms[matrix], self.held[expert]);
        let plane = |extent: Option<&Extent>, i: usize| match extent {
            // SAFETY: the plane lies inside its room of the slab, which is pinned and read completely.
            Some(e) => unsafe {
                std::slice::from_raw_parts(self.slabs.ptr(slab, rooms[i].begin(e.offset)).cast_const(), e.len)
            },
            None => &[],
        };
        Planes {
            q: plane(Some(&extents.q), 0),
            scales: plane(extents.scales.as_ref(), 1),
            biases: plane(extents.biases.as_ref(), 2),
        }
    }

    /// A step ends: whether the files that it read are those that were opened.
    ///
    /// # Errors
    /// One was written to.
    pub fn finish_step(&mut self) -> Result<(), Cause> {
        let bytes = self.readers.bytes_read();
        if std::mem::replace(&mut self.checked, bytes) == bytes {
            return Ok(());
        }
        for file in 0..self.n_files {
            if let Err(why) = self.source.check(file) {
                // The next step asks again.
                self.checked = 0;
                return Err(Cause::Io { file: self.names[file].clone(), offset: 0, why });
            }
        }
        Ok(())
    }

    /// Enters what was read meanwhile.
    fn collect(&mut self) {
        self.arrivals(&[]);
    }

    /// Enters what was read meanwhile; the first of `pending` that was not.
    fn arrivals(&mut self, pending: &[u32]) -> Option<Waiting> {
        let (store, held) = (&mut self.store, &self.held);
        let mut lost = None;
        self.readers.poll(|done| match done.error {
            None => store.arrived(done.slab),
            Some(cause) => {
                let of = pending.iter().find(|&&expert| held[expert as usize] == done.slab);
                store.failed(done.slab);
                if let Some(&expert) = of {
                    lost.get_or_insert(Waiting::Lost { expert: expert as usize, cause });
                }
            }
        });
        lost
    }

    /// The error of a disk that reads nothing.
    fn stalled(&self, pending: &[u32]) -> Waiting {
        let expert = pending.first().map_or(0, |&expert| expert as usize);
        let extent = &self.files[self.layer].extents[0][expert].q;
        let why = format!("nothing was read for {:.1} s", self.source.patience().as_secs_f64());
        let cause = Cause::Io { file: self.names[extent.file].clone(), offset: extent.offset as u64, why };
        Waiting::Lost { expert, cause }
    }
}
