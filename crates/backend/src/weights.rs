//! Finds the rows of a plan's weights in a checkpoint of any kind. Knows no op and no kernel.

use std::sync::Arc;

use checkpoint::{Checkpoint, Extents, TensorInfo};
use model::plan::partition::Cut;
use model::plan::{Read, Source, WeightDecl};
use quant::{Planes, PlanesBuf};

use crate::CompileError;

/// Where the rows of each matrix of a weight lie in the files, `[n_stack]` times `n` rows; a plain matrix or vector
/// is a stack of one.
///
/// # Errors
/// The checkpoint does not hold what the plan was built from.
pub fn extents(checkpoint: &Checkpoint, decl: &WeightDecl) -> Result<Vec<Extents>, CompileError> {
    let error = |why: String| CompileError::Tensor { name: decl.name.clone(), why };
    let Some((&k, outer)) = decl.shape.split_last() else { return Err(error("has no axes".into())) };
    let n_stack = if outer.len() > 1 { outer[0] } else { 1 };
    let n_rows = outer.iter().product::<usize>() / n_stack.max(1); // of one matrix
    let dtype = decl.stored();
    let row_bytes = dtype.plane_bytes(k).ok_or_else(|| error("rows are not whole blocks".into()))?;
    let rows = |tensor: &str, first: usize, n: usize| {
        let info = checkpoint.tensor(tensor).ok_or_else(|| error(format!("the checkpoint lacks {tensor}")))?;
        let all = info.extents();
        // Plain numbers have no blocks: their rows may be cut anew (`[n, 1, k]` for `[n, k]`).
        let same = info.dtype == dtype && (info.shape.last() == Some(&k) || dtype.block_len() == 1);
        match first.checked_add(n).and_then(|end| all.rows(row_bytes, first..end)) {
            Some(rows) if same => Ok((rows.len() == all.len(), rows, info)),
            _ => Err(error(format!("the plan wants {dtype} {:?}, {}", decl.shape, describe(tensor, info)))),
        }
    };
    match &decl.source {
        Source::Tensor(tensor) => {
            let (is_whole, rows, info) = rows(tensor, 0, n_stack * n_rows)?;
            if !is_whole {
                let held = describe(tensor, info);
                return Err(error(format!("the plan wants {dtype} {:?}, {held}", decl.shape)));
            }
            // The rows are all there, so each matrix of them is.
            Ok((0..n_stack).filter_map(|i| rows.rows(row_bytes, i * n_rows..(i + 1) * n_rows)).collect())
        }
        Source::Slabs(slabs) if slabs.len() == n_stack => {
            slabs.iter().map(|slab| Ok(rows(&slab.tensor, slab.first_row, n_rows)?.1)).collect()
        }
        Source::Slabs(slabs) => Err(error(format!("is a stack of {n_stack} made of {} slabs", slabs.len()))),
    }
}

/// The checkpoint with these columns of its tensors as separate tensors; the same one where there are none.
///
/// # Errors
/// A tensor is not there, its columns are not whole blocks, or its file cannot be opened again.
pub fn with_cuts(checkpoint: &Arc<Checkpoint>, cuts: &[Cut]) -> Result<Arc<Checkpoint>, CompileError> {
    if cuts.is_empty() {
        return Ok(Arc::clone(checkpoint));
    }
    let columns = cuts.iter().map(|cut| (cut.tensor.as_str(), cut.columns.clone(), cut.name()));
    Ok(Arc::new(checkpoint.with_columns(columns)?))
}

/// The rows of each matrix of a weight as [`extents`] has them, where they lie in memory.
///
/// # Errors
/// As [`extents`], and when the files are not mapped.
pub fn slabs<'a>(checkpoint: &'a Checkpoint, decl: &WeightDecl) -> Result<Vec<Planes<'a>>, CompileError> {
    let planes = |extents: &Extents| {
        let error = || CompileError::Tensor { name: decl.name.clone(), why: "its file is not mapped".into() };
        checkpoint.planes_at(extents).ok_or_else(error)
    };
    extents(checkpoint, decl)?.iter().map(planes).collect()
}

/// A vector, or a matrix to be read as floats, as f32, whatever its type; read from the file, mapped or not.
///
/// # Errors
/// As [`extents`], and when the file cannot be read.
pub fn vector(checkpoint: &Checkpoint, decl: &WeightDecl) -> Result<Vec<f32>, CompileError> {
    let mut bytes = Vec::new();
    let mut lens = Vec::new();
    for slab in extents(checkpoint, decl)? {
        let (len, begin) = (slab.len(), bytes.len());
        bytes.resize(begin + len.total(), 0);
        checkpoint.read(&slab, &mut bytes[begin..])?;
        lens.push(len);
    }
    let mut rest = &bytes[..];
    let mut take = |len: usize| {
        let (taken, left) = rest.split_at(len);
        rest = left;
        taken
    };
    let slabs = lens.iter().map(|len| Planes { q: take(len.q), scales: take(len.scales), biases: take(len.biases) });
    Ok(decode(decl, &slabs.collect::<Vec<_>>()))
}

/// The same of rows that [`slabs`] has found.
pub fn decode(decl: &WeightDecl, slabs: &[Planes]) -> Vec<f32> {
    let mut values = vec![0.0; decl.n_values()];
    let k = decl.shape.last().copied().unwrap_or(0).max(1);
    let row_bytes = decl.stored().plane_bytes(k).unwrap_or_default();
    let n_rows = values.len() / k / slabs.len().max(1); // of one slab
    for (i, out) in values.chunks_exact_mut(k).enumerate() {
        quant::decode_row(decl.stored(), slabs[i / n_rows].row(row_bytes, i % n_rows), out);
    }
    decl.read.apply(&mut values);
    values
}

/// Where the rows of each matrix lie; see [`extents`].
///
/// # Errors
/// As [`extents`], and when the numbers are to be changed, which vectors alone may be.
pub fn matrix_extents(checkpoint: &Checkpoint, decl: &WeightDecl) -> Result<Vec<Extents>, CompileError> {
    plain(decl)?;
    extents(checkpoint, decl)
}

/// The rows of each matrix; see [`slabs`].
///
/// # Errors
/// As [`slabs`], and when the numbers are to be changed, which vectors alone may be.
pub fn matrices<'a>(checkpoint: &'a Checkpoint, decl: &WeightDecl) -> Result<Vec<Planes<'a>>, CompileError> {
    plain(decl)?;
    slabs(checkpoint, decl)
}

/// The rows of each matrix, read into memory of the caller's, mapped or not.
///
/// # Errors
/// As [`matrix_extents`], and when the files cannot be read.
pub fn read_matrices(checkpoint: &Checkpoint, decl: &WeightDecl) -> Result<Vec<PlanesBuf>, CompileError> {
    let read = |extents: &Extents| {
        let mut planes = PlanesBuf::new(extents.len());
        for (extent, out) in extents.iter().zip([&mut planes.q, &mut planes.scales, &mut planes.biases]) {
            checkpoint.files()[extent.file].read_at(extent.offset, out)?;
        }
        Ok(planes)
    };
    matrix_extents(checkpoint, decl)?.iter().map(read).collect()
}

fn plain(decl: &WeightDecl) -> Result<(), CompileError> {
    match decl.read {
        Read::Plain => Ok(()),
        read => {
            Err(CompileError::Tensor { name: decl.name.clone(), why: format!("is a matrix to be read as {read:?}") })
        }
    }
}

fn describe(tensor: &str, info: &TensorInfo) -> String {
    format!("{tensor} is {} {:?}", info.dtype, info.shape)
}
