//! How the rows of a tensor in a new file come from the rows of the old one: taken from several tensors, put into
//! another order, transposed, or shifted by 1. Knows no architecture.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use checkpoint::Checkpoint;
use model::plan::Read;
use quant::{Planes, WeightType};

/// Transposed matrices that are kept: pieces of one are wanted by several threads, one after the other.
const MATRICES_KEPT: usize = 4;

/// Rows that come one after the other, `step` rows apart in the folder.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Tensor of the checkpoint, by its place in the list.
    pub from: usize,
    /// First row in the folder's tensor, in units of [`Recipe::unit`] values.
    pub row: usize,
    pub step: usize,
    pub n: usize,
    /// First row in the new tensor; [`Recipe::lay_out`] sets it.
    pub at: usize,
}

impl Segment {
    /// `n` rows from `row` on, `step` rows apart.
    pub fn new(from: usize, row: usize, step: usize, n: usize) -> Segment {
        Segment { from, row, step, n, at: 0 }
    }
}

/// The order of rows, or of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Same,
    /// Heads whose pairs of a rotary embedding lie half a head apart get them side by side.
    Pairs {
        d_head: usize,
    },
    /// The way back from those.
    Unpaired {
        d_head: usize,
    },
    /// From `first` on: groups of `per` heads, `width` long, become rounds of one head of each of `n` groups.
    Tiled {
        first: usize,
        n: usize,
        per: usize,
        width: usize,
    },
}

impl Order {
    /// Returns the place in the folder of what is at `i` in the new file.
    pub fn source(self, i: usize) -> usize {
        match self {
            Self::Same => i,
            Self::Pairs { d_head } => {
                let (head, at) = (i / d_head, i % d_head);
                head * d_head + at % 2 * (d_head / 2) + at / 2
            }
            Self::Unpaired { d_head } => {
                let (head, at) = (i / d_head, i % d_head);
                head * d_head + at % (d_head / 2) * 2 + at / (d_head / 2)
            }
            Self::Tiled { first, n, per, width } => match i.checked_sub(first) {
                None => i,
                Some(i) => {
                    let (head, at) = (i / width, i % width);
                    first + (head % n * per + head / n) * width + at
                }
            },
        }
    }
}

/// A matrix that is written with its rows as columns: of each of the folder's matrices every `step`th column from
/// `first` on becomes a row.
#[derive(Clone, Copy, Debug)]
pub struct Transposed {
    /// Rows of a matrix in the folder: columns of the new one.
    pub rows: usize,
    pub first: usize,
    pub step: usize,
    /// Rows of a new matrix.
    pub n: usize,
}

/// A tensor of the new file.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// What [`Recipe::read`] gives: F32, F16 or BF16 as the folder has it, F32 where numbers are computed, MXFP4.
    pub dtype: WeightType,
    /// The folder's type.
    pub origin: WeightType,
    /// Values of a row in the folder.
    pub unit: usize,
    pub segments: Vec<Segment>,
    pub rows: Order,
    pub columns: Order,
    pub transposed: Option<Transposed>,
    pub read: Read,
    /// Factors on rows of the folder's tensor: each up to a row, which it excludes. None where there are none.
    pub scales: Vec<(usize, f32)>,
    /// Values that no tensor of the folder has.
    pub constant: Option<Vec<f32>>,
}

/// Transposed matrices, by recipe and matrix.
#[derive(Default)]
pub struct Cache(Mutex<Vec<((usize, usize), Arc<Vec<u8>>)>>);

impl Recipe {
    /// Reads the encoded values `range` of recipe `id`, which are whole blocks, into `out`.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn read(
        &self,
        checkpoint: &Checkpoint,
        cache: &Cache,
        id: usize,
        range: std::ops::Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        out.clear();
        let bytes = |n: usize| n / self.dtype.block_len() * self.dtype.block_bytes();
        if let Some(values) = &self.constant {
            out.extend(values[range].iter().flat_map(|v| v.to_le_bytes()));
            return Ok(());
        }
        if let Some(t) = self.transposed {
            let len = t.rows * t.n;
            let mut at = range.start;
            while at < range.end {
                let matrix = self.transposed(checkpoint, cache, (id, at / len), t)?;
                let end = range.end.min((at / len + 1) * len);
                out.extend_from_slice(&matrix[bytes(at % len)..bytes(end - at / len * len)]);
                at = end;
            }
            return Ok(());
        }
        let (first, last) = (range.start / self.unit, range.end.div_ceil(self.unit));
        let mut rows = Vec::new();
        self.rows_at(checkpoint, first..last, &mut rows)?;
        let start = range.start - first * self.unit;
        out.extend_from_slice(&rows[bytes(start)..bytes(start + range.len())]);
        Ok(())
    }

    /// Rows `range` of the new tensor, encoded.
    fn rows_at(&self, checkpoint: &Checkpoint, range: std::ops::Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        let mut row = range.start;
        while row < range.end {
            let (from, first) = self.locate(row)?;
            // Rows that follow one another in the folder are read together.
            let mut n = 1;
            while row + n < range.end && self.locate(row + n)? == (from, first + n) {
                n += 1;
            }
            self.run(checkpoint, from, first, n, out)?;
            row += n;
        }
        Ok(())
    }

    /// Says where each segment begins in the new tensor.
    pub fn lay_out(mut self) -> Self {
        let mut at = 0;
        for segment in &mut self.segments {
            segment.at = at;
            at += segment.n;
        }
        self
    }

    /// Returns where a row of the new tensor lies.
    fn locate(&self, row: usize) -> Result<(usize, usize)> {
        let row = self.rows.source(row);
        let behind = self.segments.partition_point(|segment| segment.at <= row);
        let segment = behind.checked_sub(1).and_then(|i| self.segments.get(i)).filter(|s| row < s.at + s.n);
        let segment = segment.context("a row past the end")?;
        Ok((segment.from, segment.row + (row - segment.at) * segment.step))
    }

    /// Appends `n` rows of a tensor of the folder, encoded as in the new file.
    fn run(&self, checkpoint: &Checkpoint, from: usize, first: usize, n: usize, out: &mut Vec<u8>) -> Result<()> {
        let start = out.len();
        let info = &checkpoint.tensors()[from];
        let each = info.dtype.plane_bytes(self.unit).context("blocks do not divide its rows")?;
        let extents = info.extents().rows(each, first..first + n).context("a row past the end")?;
        let mut bytes = vec![0; extents.len().total()];
        checkpoint.read(&extents, &mut bytes)?;
        if info.dtype == self.dtype && self.read == Read::Plain && self.scales.is_empty() {
            out.append(&mut bytes);
        } else {
            let (q, rest) = bytes.split_at(extents.len().q);
            let (scales, biases) = rest.split_at(extents.len().scales);
            if info.dtype == WeightType::MXFP4_PLANAR && self.dtype == WeightType::MXFP4 {
                mxfp4(q, scales, out);
            } else {
                let mut values = vec![0.0; n * self.unit];
                quant::decode_row(info.dtype, Planes { q, scales, biases }, &mut values);
                for (row, values) in (first..).zip(values.chunks_exact_mut(self.unit)) {
                    let scale = self.scales.iter().find(|(end, _)| row < *end).map_or(1.0, |(_, scale)| *scale);
                    values.iter_mut().for_each(|v| *v *= scale);
                }
                self.push(&mut values, out)?;
            }
        }
        if self.columns != Order::Same {
            let each = self.dtype.block_bytes();
            ensure!(self.dtype.block_len() == 1, "columns of blocks cannot be put into another order");
            for row in out[start..].chunks_exact_mut(self.unit * each) {
                let old = row.to_vec();
                for (i, value) in row.chunks_exact_mut(each).enumerate() {
                    let at = self.columns.source(i) * each;
                    value.copy_from_slice(&old[at..at + each]);
                }
            }
        }
        Ok(())
    }

    /// Appends computed values.
    fn push(&self, values: &mut [f32], out: &mut Vec<u8>) -> Result<()> {
        self.read.apply(values);
        let start = out.len();
        out.resize(start + self.dtype.row_bytes(values.len()).context("blocks do not divide its rows")?, 0);
        quant::encode_row(self.dtype, values, &mut out[start..]);
        Ok(())
    }

    /// Returns a matrix with its rows as columns, encoded.
    fn transposed(
        &self,
        checkpoint: &Checkpoint,
        cache: &Cache,
        key: (usize, usize),
        t: Transposed,
    ) -> Result<Arc<Vec<u8>>> {
        let kept = |cache: &Cache| {
            let kept = cache.0.lock().unwrap_or_else(PoisonError::into_inner);
            kept.iter().find(|(of, _)| *of == key).map(|(_, matrix)| Arc::clone(matrix))
        };
        if let Some(matrix) = kept(cache) {
            return Ok(matrix);
        }
        let mut rows = Vec::new();
        self.rows_at(checkpoint, key.1 * t.rows..(key.1 + 1) * t.rows, &mut rows)?;
        let each = self.dtype.block_bytes();
        ensure!(self.dtype.block_len() == 1, "a matrix of blocks cannot be transposed");
        let mut matrix = Vec::with_capacity(t.n * t.rows * each);
        for i in 0..t.n {
            let column = t.first + i * t.step;
            for row in 0..t.rows {
                let at = (row * self.unit + column) * each;
                matrix.extend_from_slice(&rows[at..at + each]);
            }
        }
        let matrix = Arc::new(matrix);
        let mut kept = cache.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= MATRICES_KEPT {
            kept.remove(0);
        }
        kept.push((key, Arc::clone(&matrix)));
        Ok(matrix)
    }
}

/// GGUF's blocks of MXFP4 from planes: in planes a byte holds neighbors, in a block values half a block apart.
fn mxfp4(q: &[u8], scales: &[u8], out: &mut Vec<u8>) {
    for (codes, &scale) in q.chunks_exact(16).zip(scales) {
        out.push(scale);
        let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
        out.extend((0..16).map(|i| code(i) | code(i + 16) << 4));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_those_of_the_files() {
        let order = |order: Order, n: usize| (0..n).map(|i| order.source(i)).collect::<Vec<_>>();
        assert_eq!(order(Order::Pairs { d_head: 6 }, 12), [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
        let there_and_back = |i: usize| Order::Unpaired { d_head: 6 }.source(Order::Pairs { d_head: 6 }.source(i));
        assert!((0..24).all(|i| there_and_back(i) == i));
        // Two groups of three heads, two wide, behind one row that stays.
        let tiled = Order::Tiled { first: 1, n: 2, per: 3, width: 2 };
        assert_eq!(order(tiled, 13), [0, 1, 2, 7, 8, 3, 4, 9, 10, 5, 6, 11, 12]);
    }

    #[test]
    fn blocks_of_mxfp4_hold_the_values_of_the_planes() {
        let q: Vec<u8> = (0..32u32).map(|i| (i * 37 + 11) as u8).collect();
        let scales = [120u8, 131];
        let mut blocks = Vec::new();
        mxfp4(&q, &scales, &mut blocks);
        let (mut planar, mut block) = (vec![0.0; 64], vec![0.0; 64]);
        quant::decode_row(WeightType::MXFP4_PLANAR, Planes { q: &q, scales: &scales, biases: &[] }, &mut planar);
        quant::decode_row(WeightType::MXFP4, &blocks[..], &mut block);
        assert_eq!(planar, block);
    }
}
