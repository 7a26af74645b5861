//! Finds the rows of a plan's weights in a checkpoint of any kind. Knows no op and no kernel.

use checkpoint::{Checkpoint, TensorInfo};
use model::plan::{Read, Source, WeightDecl};
use quant::Planes;

use crate::CompileError;

/// The rows of each matrix of a weight, `[n_stack]` times `n` rows; a plain matrix or vector is a stack of one.
///
/// Fails when the checkpoint lacks what the plan was built from.
pub(crate) fn slabs<'a>(checkpoint: &'a Checkpoint, decl: &WeightDecl) -> Result<Vec<Planes<'a>>, CompileError> {
    let error = |why: String| CompileError::Tensor { name: decl.name.clone(), why };
    let Some((&k, outer)) = decl.shape.split_last() else { return Err(error("has no axes".into())) };
    let n_stack = if outer.len() > 1 { outer[0] } else { 1 };
    let n_rows = outer.iter().product::<usize>() / n_stack.max(1); // of one matrix
    let row_bytes = decl.dtype.plane_bytes(k).ok_or_else(|| error("rows are not whole blocks".into()))?;
    let rows = |tensor: &str, first: usize, n: usize| {
        let info = checkpoint.tensor(tensor).ok_or_else(|| error(format!("the checkpoint lacks {tensor}")))?;
        let planes = checkpoint.planes(info);
        // Types without blocks may be reshaped (`[n, 1, k]` for `[n, k]`).
        let same = info.dtype == decl.dtype && (info.shape.last() == Some(&k) || decl.dtype.block_len() == 1);
        match first.checked_add(n).and_then(|end| planes.get(row_bytes, first..end)) {
            Some(rows) if same => Ok((rows, rows.len() == planes.len(), info)),
            _ => Err(error(format!("the plan wants {} {:?}, {}", decl.dtype, decl.shape, describe(tensor, info)))),
        }
    };
    match &decl.source {
        Source::Tensor(tensor) => {
            let (rows, whole, info) = rows(tensor, 0, n_stack * n_rows)?;
            if !whole {
                let held = describe(tensor, info);
                return Err(error(format!("the plan wants {} {:?}, {held}", decl.dtype, decl.shape)));
            }
            Ok((0..n_stack).map(|i| rows.rows(row_bytes, i * n_rows..(i + 1) * n_rows)).collect())
        }
        Source::Slabs(slabs) if slabs.len() == n_stack => {
            slabs.iter().map(|slab| Ok(rows(&slab.tensor, slab.first_row, n_rows)?.0)).collect()
        }
        Source::Slabs(slabs) => Err(error(format!("is a stack of {n_stack} made of {} slabs", slabs.len()))),
    }
}

/// A vector as f32, whatever its type.
pub(crate) fn vector(checkpoint: &Checkpoint, decl: &WeightDecl) -> Result<Vec<f32>, CompileError> {
    let mut values = vec![0.0; decl.n_values()];
    let slabs = slabs(checkpoint, decl)?;
    let k = decl.shape.last().copied().unwrap_or(0).max(1);
    let row_bytes = decl.dtype.plane_bytes(k).unwrap_or_default();
    let n_rows = values.len() / k / slabs.len().max(1); // of one slab
    for (i, out) in values.chunks_exact_mut(k).enumerate() {
        quant::decode_row(decl.dtype, slabs[i / n_rows].row(row_bytes, i % n_rows), out);
    }
    decl.read.apply(&mut values);
    Ok(values)
}

/// The rows of each matrix; see [`slabs`]. Fails as well for a transformed read, which only vectors allow.
pub(crate) fn matrices<'a>(checkpoint: &'a Checkpoint, decl: &WeightDecl) -> Result<Vec<Planes<'a>>, CompileError> {
    match decl.read {
        Read::Plain => slabs(checkpoint, decl),
        read => {
            Err(CompileError::Tensor { name: decl.name.clone(), why: format!("is a matrix to be read as {read:?}") })
        }
    }
}

fn describe(tensor: &str, info: &TensorInfo) -> String {
    format!("{tensor} is {} {:?}", info.dtype, info.shape)
}
