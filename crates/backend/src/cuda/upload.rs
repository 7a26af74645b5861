//! From the checkpoint to device memory: matrices as contiguous planes, vectors as f32.

use std::collections::HashMap;
use std::sync::Arc;

use checkpoint::Checkpoint;
use model::plan::{Plan, Source, Weight};
use quant::WeightType;

use super::args::Matrix;
use super::compile::{Failed, allocate};
use super::driver::{Context, Memory, Pinned, Stream};
use crate::{CompileError, weights};

/// Bytes of a staging buffer; two of them take turns.
const STAGE: usize = 32 << 20;

/// Threads that copy from the page cache to staging memory: one alone reads slower than the link writes.
const COPIERS: usize = 4;

/// Weights on the device.
pub struct Weights {
    context: Arc<Context>,
    stages: [Pinned; 2],
    streams: [Stream; 2],
    turn: usize,
    /// Tensors that several weights name lie there once.
    known: Vec<((Source, WeightType, Vec<usize>), Matrix)>,
    memory: Vec<Memory>,
    vectors: HashMap<Weight, u64>,
}

impl Weights {
    /// Nothing yet.
    pub fn new(context: &Arc<Context>) -> Result<Weights, CompileError> {
        let stage = || Pinned::new(context, STAGE).failed("staging memory");
        let stream = || Stream::new(context).failed("a stream");
        Ok(Weights {
            context: Arc::clone(context),
            stages: [stage()?, stage()?],
            streams: [stream()?, stream()?],
            turn: 0,
            known: Vec::new(),
            memory: Vec::new(),
            vectors: HashMap::new(),
        })
    }

    /// A matrix or a stack of them.
    pub fn matrix(&mut self, plan: &Plan, checkpoint: &Checkpoint, w: Weight) -> Result<Matrix, CompileError> {
        let decl = plan.weight(w);
        let key = (decl.source.clone(), decl.dtype, decl.shape.clone());
        if let Some((_, matrix)) = self.known.iter().find(|(known, _)| *known == key) {
            return Ok(*matrix);
        }
        let slabs = weights::matrices(checkpoint, decl)?;
        let plane = |get: fn(&quant::Planes) -> usize| slabs.iter().map(get).sum::<usize>();
        let lens = [plane(|p| p.q.len()), plane(|p| p.scales.len()), plane(|p| p.biases.len())];
        let [mut at_q, mut at_scales, mut at_biases] = [0; 3];
        let starts =
            [0, lens[0].next_multiple_of(256), (lens[0].next_multiple_of(256) + lens[1]).next_multiple_of(256)];
        // Kernels read whole words, past the end of a plane where it ends within one.
        let memory = allocate(&self.context, "weights", starts[2] + lens[2].next_multiple_of(256))?;
        let base = memory.ptr();
        for slab in &slabs {
            for (bytes, start, at) in [
                (slab.q, starts[0], &mut at_q),
                (slab.scales, starts[1], &mut at_scales),
                (slab.biases, starts[2], &mut at_biases),
            ] {
                self.send(base + (start + *at) as u64, bytes)?;
                *at += bytes.len();
            }
        }
        self.memory.push(memory);
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
        let ptr = self.bytes("vectors", &bytes)?;
        self.vectors.insert(w, ptr);
        Ok(ptr)
    }

    /// Plain bytes, in separate memory.
    pub fn bytes(&mut self, what: &'static str, bytes: &[u8]) -> Result<u64, CompileError> {
        let memory = allocate(&self.context, what, bytes.len())?;
        let ptr = memory.ptr();
        self.send(ptr, bytes)?;
        self.memory.push(memory);
        Ok(ptr)
    }

    /// Waits for all copies; the weights alone remain.
    pub fn finish(self) -> Result<Vec<Memory>, CompileError> {
        self.streams.iter().try_for_each(|stream| stream.wait().failed("copy weights"))?;
        Ok(self.memory)
    }

    fn send(&mut self, to: u64, bytes: &[u8]) -> Result<(), CompileError> {
        for (i, piece) in bytes.chunks(STAGE).enumerate() {
            let turn = self.turn;
            self.turn = 1 - turn;
            // The other buffer is on its way while this one is filled.
            self.streams[turn].wait().failed("copy weights")?;
            let stage = &mut self.stages[turn].words_mut::<u8>()[..piece.len()];
            let share = piece.len().div_ceil(COPIERS).max(1 << 20);
            std::thread::scope(|scope| {
                let mut parts = stage.chunks_mut(share).zip(piece.chunks(share));
                let own = parts.next();
                parts.for_each(|(to, from)| drop(scope.spawn(|| to.copy_from_slice(from))));
                own.into_iter().for_each(|(to, from)| to.copy_from_slice(from));
            });
            // SAFETY: `to` is memory of at least `bytes`; the stage stays as it is until its stream was waited for.
            unsafe { self.streams[turn].upload(to + (i * STAGE) as u64, &self.stages[turn], piece.len()) }
                .failed("copy weights")?;
        }
        Ok(())
    }
}
