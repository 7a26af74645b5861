//! Weights in a GPU's memory: matrices as their files have them, plane by plane, and vectors as f32.

use checkpoint::Checkpoint;
use model::plan::{Plan, Weight};

use super::gpu::{Gpu, GpuError, Span};
use super::layout::Layout;
use crate::residency::{Policy, Residencies};
use crate::{CompileError, weights};

/// Where the planes of a matrix are; a plane that its type lacks is `None`. A vector has one plane.
pub type Planes = [Option<Span>; 3];

/// Where every weight of a plan lies.
pub struct Weights {
    layout: Layout,
    /// Piece of each plane, by weight.
    pieces: Vec<[Option<usize>; 3]>,
    is_matrix: Vec<bool>,
}

impl Weights {
    /// Lays out the weights of a plan. A tensor that two weights name lies there once.
    pub fn new(plan: &Plan, max_buffer: u64) -> Weights {
        let residencies = Residencies::new(plan, Policy::CopyAll);
        let mut layout = Layout::default();
        let mut pieces: Vec<[Option<usize>; 3]> = Vec::new();
        let is_matrix: Vec<bool> = (0..plan.weights.len()).map(|i| residencies.is_matrix(Weight(i as u32))).collect();
        for (i, decl) in plan.weights.iter().enumerate() {
            let same = |j: &usize| {
                let other = &plan.weights[*j];
                let alike = (&other.source, other.dtype, &other.shape, other.read);
                is_matrix[*j] == is_matrix[i] && alike == (&decl.source, decl.dtype, &decl.shape, decl.read)
            };
            if let Some(j) = (0..i).find(same) {
                pieces.push(pieces[j]);
                continue;
            }
            let lens = match is_matrix[i] {
                true => {
                    let k = decl.shape.last().copied().unwrap_or(0);
                    let n_rows: usize = decl.shape.iter().rev().skip(1).product();
                    let planes = decl.dtype.plane_bytes(k).and_then(|row| row.times(n_rows)).unwrap_or_default();
                    [planes.q, planes.scales, planes.biases]
                }
                false => [decl.n_values().saturating_mul(4), 0, 0],
            };
            pieces.push(lens.map(|len| (len > 0).then(|| layout.add(len, max_buffer))));
        }
        Weights { layout, pieces, is_matrix }
    }

    /// Bytes of each weight; 0 for one that lies where another does.
    pub fn bytes_of(&self) -> impl Iterator<Item = usize> + '_ {
        let mut next = 0;
        self.pieces.iter().map(move |planes| {
            let own = planes.iter().flatten().filter(|&&piece| piece >= next).copied().collect::<Vec<_>>();
            next += own.len();
            own.into_iter().map(|piece| self.layout.len(piece)).sum()
        })
    }

    /// Allocates the memory and copies the weights to it; returns where each is.
    ///
    /// # Errors
    /// A tensor that the checkpoint does not hold as the plan says, or that cannot be read; memory that cannot be had.
    pub fn upload(
        &self,
        gpu: &mut dyn Gpu,
        plan: &Plan,
        checkpoint: &Checkpoint,
        failed: impl Fn(GpuError) -> CompileError,
    ) -> Result<Vec<Planes>, CompileError> {
        let spans = self.layout.allocate(gpu, "weights").map_err(&failed)?;
        for (i, decl) in plan.weights.iter().enumerate() {
            let is_there = self.pieces[..i].contains(&self.pieces[i]);
            let [q, scales, biases] = self.pieces[i];
            if is_there || q.is_none() {
                continue;
            }
            let mut write = |piece: Option<usize>, parts: &mut dyn Iterator<Item = &[u8]>| {
                let Some(piece) = piece else { return Ok(()) };
                let mut at = 0;
                for part in parts.filter(|part| !part.is_empty()) {
                    gpu.write(spans[piece].part(at, part.len() as u64), part).map_err(&failed)?;
                    at += part.len() as u64;
                }
                Ok::<(), CompileError>(())
            };
            if self.is_matrix[i] {
                let slabs = weights::matrices(checkpoint, decl)?;
                write(q, &mut slabs.iter().map(|slab| slab.q))?;
                write(scales, &mut slabs.iter().map(|slab| slab.scales))?;
                write(biases, &mut slabs.iter().map(|slab| slab.biases))?;
            } else {
                let values = weights::vector(checkpoint, decl)?;
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                write(q, &mut [&bytes[..]].into_iter())?;
            }
        }
        Ok(self.pieces.iter().map(|planes| planes.map(|piece| piece.map(|piece| spans[piece]))).collect())
    }
}
