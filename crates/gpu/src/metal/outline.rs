//! What steps of a plan dispatch on a GPU that is not there: for `moebius plan`.

use std::sync::Arc;
use std::time::Duration;

use checkpoint::Checkpoint;
use model::plan::Plan;

use super::Metal;
use super::compile;
use crate::commands::node::{Counts, Schedule};
use crate::commands::{Buf, Caps, Gpu, GpuError, List, Mapped, Pipe, Span, Ticket, Times, Unit};
use backend::{CompileError, Limits};

/// A dispatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Layer of its op; none before the first and behind the last.
    pub layer: Option<u32>,
    /// Name of the op, or of the run of ops that it does.
    pub op: &'static str,
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Threadgroups.
    pub groups: u64,
    /// Threads of a threadgroup.
    pub threads: u32,
    /// Bytes of matrices that it reads for one token.
    pub bytes: u64,
    /// Whether it is the first one behind a barrier, or behind the end of a list, which orders as a barrier does.
    pub is_behind: bool,
}

impl Line {
    /// Whether another layer's dispatch is the same.
    pub fn is_alike(&self, other: &Line) -> bool {
        *self == Line { layer: self.layer, ..other.clone() }
    }
}

/// A plan on a GPU that is not there.
pub struct Outline {
    schedule: Schedule,
    kernels: Vec<&'static str>,
}

impl Outline {
    /// Lays out a plan as an Apple GPU would have it, with weights where their files are mapped.
    ///
    /// # Errors
    /// As [`backend::Backend::compile`], but for what needs a device.
    pub fn new(
        metal: &Metal,
        plan: &Plan,
        checkpoint: &Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Outline, CompileError> {
        let caps = Caps { name: "no GPU".into(), family: 7, max_buffer: u64::MAX };
        let gpu = Box::new(Blank { caps, n_bufs: 0 });
        let metal = Metal { maps_weights: true, ..metal.clone() };
        let (parts, kernels) = compile::lay(&metal, gpu, plan, checkpoint, limits)?;
        Ok(Outline { schedule: parts.model.schedule, kernels })
    }

    /// What a step of `n_chunks` sequences of `len` tokens each dispatches, in order, `depth` tokens into their
    /// contexts.
    pub fn step(&mut self, n_chunks: usize, len: usize, depth: usize) -> Vec<Line> {
        let (tokens, positions) = (n_chunks * len, depth + len);
        let counts =
            Counts { tokens, outputs: n_chunks, chunks: n_chunks, longest: len, positions, ..Counts::default() };
        let (nodes, levels) = self.schedule.of_step(counts);
        let mut lines: Vec<Line> = Vec::new();
        for level in levels {
            let mut is_behind = !lines.is_empty();
            for node in level.iter().map(|&i| &nodes[i]) {
                let Some((unit, grid, threads)) = node.dispatch(counts) else { continue };
                let groups = grid.iter().map(|&n| u64::from(n)).product();
                let (layer, op, kernel, bytes) = (node.layer, node.op, self.kernels[unit], node.bytes);
                lines.push(Line { layer, op, kernel, groups, threads, bytes, is_behind });
                is_behind = false;
            }
        }
        lines
    }
}

/// A GPU that takes all and does nothing.
struct Blank {
    caps: Caps,
    n_bufs: u32,
}

impl Blank {
    fn next(&mut self) -> Buf {
        self.n_bufs += 1;
        Buf(self.n_bufs - 1)
    }
}

impl Gpu for Blank {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&mut self, _bytes: u64, _what: &'static str) -> Result<Buf, GpuError> {
        Ok(self.next())
    }

    fn map(&mut self, mapped: &Mapped) -> Result<Option<Buf>, GpuError> {
        Ok(mapped.pages().map(|_| self.next()))
    }

    fn write(&mut self, _to: Span, _bytes: &[u8]) -> Result<(), GpuError> {
        Ok(())
    }

    fn read(&mut self, _from: Span, _out: &mut [u8]) -> Result<(), GpuError> {
        Err(nothing())
    }

    fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
        Ok((0..units.len() as u32).map(Pipe).collect())
    }

    fn threads(&self, _pipe: Pipe) -> u32 {
        1024
    }

    fn submit(&mut self, _list: &List) -> Result<Ticket, GpuError> {
        Err(nothing())
    }

    fn wait(&mut self, _ticket: Ticket, _limit: Duration) -> Result<Times, GpuError> {
        Err(nothing())
    }
}

fn nothing() -> GpuError {
    GpuError::Lost("there is no GPU".into())
}
