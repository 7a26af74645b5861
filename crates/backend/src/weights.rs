//! Finds the rows of a plan's weights in a checkpoint, whatever file they come from. Knows no op and no kernel.

use checkpoint::{Checkpoint, TensorInfo};
use model::plan::{Read, Source, WeightDecl};

use crate::CompileError;

/// The bytes of each matrix of a weight, `[n_stack]` times `n` rows; a plain matrix or vector is a stack of one.
///
/// Fails when the checkpoint does not hold what the plan was built from.
pub(crate) fn slabs<'a>(checkpoint: &'a Checkpoint, decl: &WeightDecl) -> Result<Vec<&'a [u8]>, CompileError> {
    let error = |why: String| CompileError::Tensor { name: decl.name.clone(), why };
    let Some((&k, outer)) = decl.shape.split_last() else { return Err(error("has no axes".into())) };
    if decl.dtype.ggml_id().is_none() {
        return Err(error(format!("is {}, which is not on this backend", decl.dtype)));
    }
    let n_stack = if outer.len() > 1 { outer[0] } else { 1 };
    let n_rows = outer.iter().product::<usize>() / n_stack.max(1); // of one matrix
    let row_bytes = decl.dtype.row_bytes(k).ok_or_else(|| error("rows are not whole blocks".into()))?;
    let rows = |tensor: &str, first: usize, n: usize| {
        let info = checkpoint.tensor(tensor).ok_or_else(|| error(format!("the checkpoint lacks {tensor}")))?;
        let (first, len) = (first.checked_mul(row_bytes), n.checked_mul(row_bytes));
        let bytes = first.zip(len).and_then(|(first, len)| checkpoint.bytes(info).get(first..)?.get(..len));
        match bytes {
            // Plain numbers have no blocks: their rows may be cut anew (`[n, 1, k]` for `[n, k]`).
            Some(bytes)
                if info.dtype == decl.dtype && (info.shape.last() == Some(&k) || decl.dtype.block_len() == 1) =>
            {
                Ok((info, bytes))
            }
            _ => Err(error(format!("the plan wants {} {:?}, {}", decl.dtype, decl.shape, describe(tensor, info)))),
        }
    };
    match &decl.source {
        Source::Tensor(tensor) => {
            let (info, bytes) = rows(tensor, 0, n_stack * n_rows)?;
            if bytes.len() != info.len {
                let held = describe(tensor, info);
                return Err(error(format!("the plan wants {} {:?}, {held}", decl.dtype, decl.shape)));
            }
            Ok(bytes.chunks_exact(n_rows * row_bytes).collect())
        }
        Source::Slabs(slabs) if slabs.len() == n_stack => {
            slabs.iter().map(|slab| Ok(rows(&slab.tensor, slab.first_row, n_rows)?.1)).collect()
        }
        Source::Slabs(slabs) => Err(error(format!("is a stack of {n_stack} made of {} slabs", slabs.len()))),
    }
}

/// A vector as f32, whatever its type.
pub(crate) fn vector(checkpoint: &Checkpoint, decl: &WeightDecl) -> Result<Vec<f32>, CompileError> {
    let mut values = vec![0.0; decl.n_values()];
    let bytes = slabs(checkpoint, decl)?.concat();
    let k = decl.shape.last().copied().unwrap_or(0).max(1);
    let row_bytes = bytes.len() / (values.len() / k).max(1);
    for (row, out) in bytes.chunks_exact(row_bytes.max(1)).zip(values.chunks_exact_mut(k)) {
        quant::decode_row(decl.dtype, row, out);
    }
    decl.read.apply(&mut values);
    Ok(values)
}

/// The bytes of each matrix; see [`slabs`]. Fails as well when the numbers are to be changed, which vectors alone may be.
pub(crate) fn matrices<'a>(checkpoint: &'a Checkpoint, decl: &WeightDecl) -> Result<Vec<&'a [u8]>, CompileError> {
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
