//! Weights in a GPU's memory: matrices as their files have them, plane by plane, and vectors as f32. A matrix whose
//! planes lie aligned in a mapped file is read there.

use std::sync::Arc;

use checkpoint::{Checkpoint, Extent};
use model::plan::{Plan, Weight};

use super::layout::Layout;
use super::{Buf, Gpu, GpuError, Mapped, Span};
use backend::residency::{Policy, Residencies};
use backend::{CompileError, weights};

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
    /// Lays out the weights of a plan, but for those that `views` has. A tensor that two weights name lies there once.
    pub fn new(plan: &Plan, views: &[Option<Planes>], max_buffer: u64) -> Weights {
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
            if views.get(i).is_some_and(Option::is_some) {
                pieces.push([None; 3]);
                continue;
            }
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

    /// Whether a weight is read as a matrix, or a stack of them.
    pub fn is_matrix(&self, i: usize) -> bool {
        self.is_matrix[i]
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
        views: &[Option<Planes>],
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
                let held;
                let slabs = if decl.is_repacked {
                    held = weights::read_matrices(checkpoint, decl)?;
                    held.iter().map(quant::PlanesBuf::get).collect()
                } else {
                    weights::matrices(checkpoint, decl)?
                };
                write(q, &mut slabs.iter().map(|slab| slab.q))?;
                write(scales, &mut slabs.iter().map(|slab| slab.scales))?;
                write(biases, &mut slabs.iter().map(|slab| slab.biases))?;
            } else {
                let values = weights::vector(checkpoint, decl)?;
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                write(q, &mut [&bytes[..]].into_iter())?;
            }
        }
        let place = |(i, planes): (usize, &[Option<usize>; 3])| {
            views.get(i).copied().flatten().unwrap_or(planes.map(|piece| piece.map(|piece| spans[piece])))
        };
        Ok(self.pieces.iter().enumerate().map(place).collect())
    }
}

/// Maximum length of a view of a file in bytes, unless one plane is longer.
const MAX_VIEW: usize = 2 << 30;
/// What a kernel's widest load wants.
const ALIGN: usize = 16;

/// Makes buffers of the pages of mapped files and returns the planes of each matrix that lies in them; `None` for
/// vectors, and for matrices that are to be copied: unaligned, in pieces, or in files that no buffer can be made of.
///
/// # Errors
/// A tensor that the checkpoint does not hold as the plan says.
pub fn map(
    gpu: &mut dyn Gpu,
    plan: &Plan,
    checkpoint: &Arc<Checkpoint>,
    max_buffer: u64,
    failed: impl Fn(GpuError) -> CompileError,
) -> Result<Vec<Option<Planes>>, CompileError> {
    let residencies = Residencies::new(plan, Policy::Mapped);
    let mut wanted: Vec<(usize, [Option<Extent>; 3])> = Vec::new();
    for (i, decl) in plan.weights.iter().enumerate() {
        if residencies.is_matrix(Weight(i as u32)) {
            wanted.extend(whole(&weights::matrix_extents(checkpoint, decl)?).map(|planes| (i, planes)));
        }
    }
    let mut planes: Vec<&Extent> = wanted.iter().flat_map(|(_, planes)| planes.iter().flatten()).collect();
    planes.sort_by_key(|plane| (plane.file, plane.offset));
    let mut views: Vec<(Mapped, Buf)> = Vec::new();
    for (file, from, len) in cut(&planes, usize::try_from(max_buffer).unwrap_or(usize::MAX)) {
        let mapped = Mapped { checkpoint: Arc::clone(checkpoint), file, from, len };
        views.extend(gpu.map(&mapped).map_err(&failed)?.map(|buf| (mapped, buf)));
    }
    let span = |plane: &Extent| {
        let is_in = |(view, _): &&(Mapped, Buf)| {
            view.file == plane.file && view.from <= plane.offset && plane.offset + plane.len <= view.from + view.len
        };
        let (view, buf) = views.iter().find(is_in)?;
        Some(Span { buf: *buf, at: (plane.offset - view.from) as u64, len: plane.len as u64 })
    };
    let mut found = vec![None; plan.weights.len()];
    for (i, planes) in wanted {
        let spans = planes.each_ref().map(|plane| plane.as_ref().and_then(span));
        let is_whole = planes.iter().zip(&spans).all(|(plane, span)| plane.is_some() == span.is_some());
        found[i] = is_whole.then_some(spans);
    }
    Ok(found)
}

/// The planes of a stack as one piece each, if they are and lie aligned.
fn whole(stack: &[checkpoint::Extents]) -> Option<[Option<Extent>; 3]> {
    let plane = |of: fn(&checkpoint::Extents) -> Option<&Extent>| {
        let Some(first) = of(stack.first()?) else { return Some(None) };
        let mut end = first.offset;
        for part in stack {
            let part = of(part)?;
            if part.file != first.file || part.offset != end {
                return None;
            }
            end += part.len;
        }
        let is_aligned = first.offset.is_multiple_of(ALIGN);
        is_aligned.then_some(Some(Extent { len: end - first.offset, ..first.clone() }))
    };
    Some([plane(|e| Some(&e.q))?, plane(|e| e.scales.as_ref())?, plane(|e| e.biases.as_ref())?])
}

/// Views of files in whole pages, so that each of the sorted planes lies in one of them: file, first byte, length.
fn cut(planes: &[&Extent], max_buffer: usize) -> Vec<(usize, usize, usize)> {
    let page = checkpoint::page_bytes();
    let mut views: Vec<(usize, usize, usize)> = Vec::new();
    for plane in planes {
        let end = (plane.offset + plane.len).next_multiple_of(page);
        let most = MAX_VIEW.min(max_buffer / page * page);
        match views.last_mut() {
            Some((file, from, len)) if *file == plane.file && end - *from <= most => *len = (*len).max(end - *from),
            _ => {
                let from = plane.offset / page * page;
                if end - from <= max_buffer {
                    views.push((plane.file, from, end - from));
                }
            }
        }
    }
    views
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_hold_whole_planes_and_are_no_longer_than_a_buffer() {
        let page = checkpoint::page_bytes();
        let plane = |file, offset, len| Extent { file, offset, len };
        let planes = [
            plane(0, 64, page),
            plane(0, 64 + page, 3 * page),
            plane(0, 10 * page, 2 * page),
            plane(1, page - 32, 64),
            // No buffer holds it.
            plane(1, 4 * page, 9 * page),
            plane(1, 20 * page, page),
        ];
        let views = cut(&planes.each_ref(), 6 * page);
        let pages: Vec<_> = views.iter().map(|&(file, from, len)| (file, from / page, len / page)).collect();
        assert_eq!(pages, [(0, 0, 5), (0, 10, 2), (1, 0, 2), (1, 20, 1)]);
        let is_in = |plane: &Extent| {
            views.iter().any(|&(file, from, len)| {
                file == plane.file && from <= plane.offset && plane.offset + plane.len <= from + len
            })
        };
        assert_eq!(planes.each_ref().map(is_in), [true, true, true, true, false, true]);
    }

    #[test]
    fn a_stack_in_pieces_or_unaligned_is_copied() {
        let stack = |parts: &[(usize, usize)]| -> Vec<checkpoint::Extents> {
            let part =
                |&(offset, len)| checkpoint::Extents { q: Extent { file: 0, offset, len }, scales: None, biases: None };
            parts.iter().map(part).collect()
        };
        let len = |parts: &[(usize, usize)]| whole(&stack(parts)).map(|planes| planes[0].as_ref().map(|q| q.len));
        assert_eq!(len(&[(32, 100), (132, 100)]), Some(Some(200)));
        assert_eq!(len(&[(32, 100), (136, 100)]), None);
        assert_eq!(len(&[(40, 100)]), None);
    }
}
