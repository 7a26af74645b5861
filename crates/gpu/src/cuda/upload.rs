//! From the checkpoint to device memory: matrices as contiguous planes, vectors as f32.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use checkpoint::{Checkpoint, Extent, Extents};
use model::plan::{Plan, Read, Source, Weight, WeightDecl};
use quant::WeightType;

use super::args::Matrix;
use super::compile::{Failed, allocate};
use super::driver::{Context, DriverError, Memory, Pinned, Stream};
use super::split::plane_starts;
use backend::{CompileError, weights};

/// Bytes of a staging buffer; each copier has two, which take turns.
pub const STAGE: usize = 2 << 20;

/// Maximum number of threads that copy from the page cache to staging memory: eight of them fill the link.
const COPIERS: usize = 8;

/// Weights on the device. Their memory is given out at once, and filled by [`Weights::finish`].
pub struct Weights<'a> {
    context: Arc<Context>,
    /// Tensors that several weights name lie there once.
    known: Vec<((Source, WeightType, Vec<usize>), Matrix)>,
    memory: Vec<Memory>,
    vectors: HashMap<Weight, u64>,
    copies: Vec<(u64, Bytes<'a>)>,
}

/// What is copied.
enum Bytes<'a> {
    /// Bytes that lie in memory.
    Memory(Cow<'a, [u8]>),
    /// Bytes of a repacked file, computed when they are copied.
    Repacked(&'a Checkpoint, Extent),
}

impl Bytes<'_> {
    /// A plane that is not there.
    fn none() -> Self {
        Bytes::Memory(Cow::Borrowed(&[]))
    }

    fn len(&self) -> usize {
        match self {
            Bytes::Memory(bytes) => bytes.len(),
            Bytes::Repacked(_, extent) => extent.len,
        }
    }

    /// Writes a part of them.
    fn read(&self, part: Range<usize>, out: &mut [u8]) -> Result<(), CompileError> {
        match self {
            Bytes::Memory(bytes) => out.copy_from_slice(&bytes[part]),
            Bytes::Repacked(checkpoint, extent) => {
                checkpoint.files()[extent.file].read_at(extent.offset + part.start, out)?;
            }
        }
        Ok(())
    }
}

impl<'a> Weights<'a> {
    /// Nothing yet.
    pub fn new(context: &Arc<Context>) -> Weights<'a> {
        Weights {
            context: Arc::clone(context),
            known: Vec::new(),
            memory: Vec::new(),
            vectors: HashMap::new(),
            copies: Vec::new(),
        }
    }

    /// A matrix or a stack of them, in memory of its own.
    pub fn matrix(&mut self, plan: &Plan, checkpoint: &'a Checkpoint, w: Weight) -> Result<Matrix, CompileError> {
        self.matrix_at(plan, checkpoint, w, None)
    }

    /// The same, at an address that the caller has room at.
    pub fn matrix_at(
        &mut self,
        plan: &Plan,
        checkpoint: &'a Checkpoint,
        w: Weight,
        at: Option<u64>,
    ) -> Result<Matrix, CompileError> {
        let decl = plan.weight(w);
        let key = (decl.source.clone(), decl.dtype, decl.shape.clone());
        if let Some((_, matrix)) = self.known.iter().find(|(known, _)| *known == key) {
            return Ok(*matrix);
        }
        let slabs = slabs(checkpoint, decl)?;
        let plane = |i: usize| slabs.iter().map(|slab| slab[i].len()).sum::<usize>();
        let lens = [plane(0), plane(1), plane(2)];
        let [mut at_q, mut at_scales, mut at_biases] = [0; 3];
        let (starts, bytes) = plane_starts(lens);
        let base = match at {
            Some(at) => at,
            None => {
                let memory = allocate(&self.context, "weights", bytes)?;
                let base = memory.ptr();
                self.memory.push(memory);
                base
            }
        };
        for [q, scales, biases] in slabs {
            for (bytes, start, at) in
                [(q, starts[0], &mut at_q), (scales, starts[1], &mut at_scales), (biases, starts[2], &mut at_biases)]
            {
                let (to, len) = (base + (start + *at) as u64, bytes.len());
                self.copies.push((to, bytes));
                *at += len;
            }
        }
        let place = |i: usize| if lens[i] > 0 { base + starts[i] as u64 } else { 0 };
        let matrix = Matrix { q: place(0), scales: place(1), biases: place(2) };
        self.known.push((key, matrix));
        Ok(matrix)
    }

    /// A vector as f32.
    pub fn vector(&mut self, plan: &Plan, checkpoint: &Checkpoint, w: Weight) -> Result<u64, CompileError> {
        if let Some(&ptr) = self.vectors.get(&w) {
            return Ok(ptr);
        }
        let values = weights::vector(checkpoint, plan.weight(w))?;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let ptr = self.bytes("vectors", bytes)?;
        self.vectors.insert(w, ptr);
        Ok(ptr)
    }

    /// Plain bytes, in separate memory.
    pub fn bytes(&mut self, what: &'static str, bytes: Vec<u8>) -> Result<u64, CompileError> {
        let memory = allocate(&self.context, what, bytes.len())?;
        let ptr = memory.ptr();
        self.copies.push((ptr, Bytes::Memory(Cow::Owned(bytes))));
        self.memory.push(memory);
        Ok(ptr)
    }

    /// Copies everything; the weights alone remain.
    pub fn finish(self) -> Result<Vec<Memory>, CompileError> {
        let pieces = self.copies.iter().flat_map(|(to, bytes)| {
            let len = bytes.len();
            (0..len).step_by(STAGE).map(move |at| (to + at as u64, bytes, at..len.min(at + STAGE)))
        });
        let pieces = Mutex::new(pieces);
        let next = || pieces.lock().unwrap_or_else(|e| e.into_inner()).next();
        let copier = || copy(&self.context, next);
        let n_copiers = std::thread::available_parallelism().map_or(1, |n| n.get()).min(COPIERS);
        std::thread::scope(|scope| {
            // Where the system gives no more threads, this one copies it all.
            let others: Vec<_> =
                (1..n_copiers).map_while(|_| std::thread::Builder::new().spawn_scoped(scope, copier).ok()).collect();
            let own = copier();
            let joined = others.into_iter().map(|other| other.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
            joined.fold(own, Result::and)
        })?;
        Ok(self.memory)
    }
}

/// Copies pieces of at most [`STAGE`] bytes until there are none: one is on its way while the next is staged.
fn copy<'a>(
    context: &Arc<Context>,
    next: impl Fn() -> Option<(u64, &'a Bytes<'a>, Range<usize>)>,
) -> Result<(), CompileError> {
    const WHAT: &str = "copy weights";
    context.enter().failed(WHAT)?;
    let lane = || Ok::<_, DriverError>((Pinned::new(context, STAGE)?, Stream::new(context)?));
    let mut lanes = [lane().failed(WHAT)?, lane().failed(WHAT)?];
    let mut turn = 0;
    while let Some((to, bytes, part)) = next() {
        let (stage, stream) = &mut lanes[turn];
        turn = 1 - turn;
        stream.wait().failed(WHAT)?;
        let len = part.len();
        bytes.read(part, &mut stage.words_mut::<u8>()[..len])?;
        // SAFETY: `to` is memory of that length, given out before; the stage stays until its stream was waited for.
        unsafe { stream.upload(to, stage, len).failed(WHAT)? };
    }
    lanes.iter().try_for_each(|(_, stream)| stream.wait()).failed(WHAT)
}

/// The planes of each matrix of a weight.
fn slabs<'a>(checkpoint: &'a Checkpoint, decl: &WeightDecl) -> Result<Vec<[Bytes<'a>; 3]>, CompileError> {
    if let Read::Floats(_) = decl.read {
        let values = weights::vector(checkpoint, decl)?;
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        return Ok(vec![[Bytes::Memory(Cow::Owned(bytes)), Bytes::none(), Bytes::none()]]);
    }
    if decl.is_repacked {
        let planes = |Extents { q, scales, biases }: Extents| {
            let plane = |extent: Option<Extent>| match extent {
                Some(extent) => Bytes::Repacked(checkpoint, extent),
                None => Bytes::none(),
            };
            [plane(Some(q)), plane(scales), plane(biases)]
        };
        return Ok(weights::matrix_extents(checkpoint, decl)?.into_iter().map(planes).collect());
    }
    let planes = |slab: quant::Planes<'a>| [slab.q, slab.scales, slab.biases].map(|p| Bytes::Memory(Cow::Borrowed(p)));
    Ok(weights::matrices(checkpoint, decl)?.into_iter().map(planes).collect())
}
