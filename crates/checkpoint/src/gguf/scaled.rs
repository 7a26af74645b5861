//! Joins matrices of NVFP4 and the scales that files keep in tensors of their own: `X.weight` and `X.scale`, an f32 for
//! the matrix or for each matrix of a stack (<https://github.com/ggml-org/llama.cpp/pull/19769>). Knows no model.

use std::collections::{HashMap, HashSet};

use quant::WeightType;

use crate::repacked::{Form, Fp4, Matrix, Repacked};
use crate::{Error, File, TensorInfo};

/// Returns the files and tensors of a model; where there are such scales, their matrices are tensors of one more file.
///
/// # Errors
/// A scale does not fit its matrix.
pub(super) fn join(mut files: Vec<File>, mut tensors: Vec<TensorInfo>) -> Result<(Vec<File>, Vec<TensorInfo>), Error> {
    let by_name: HashMap<&str, &TensorInfo> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    let (mut matrices, mut shapes, mut taken) = (Vec::new(), Vec::new(), HashSet::new());
    for blocks in tensors.iter().filter(|t| t.dtype == WeightType::NVFP4) {
        let Some(module) = blocks.name.strip_suffix(".weight") else { continue };
        // What 4-bit activations would be scaled with; these are not.
        taken.insert(format!("{module}.input_scale"));
        let Some(scale) = by_name.get(format!("{module}.scale").as_str()) else { continue };
        let n_matrix = if blocks.shape.len() == 3 { blocks.shape[0] } else { 1 };
        let n_scale: usize = scale.shape.iter().product();
        if scale.dtype != WeightType::F32 || n_scale != n_matrix || blocks.shape.len() > 3 {
            let file = files[scale.file].path().to_string_lossy();
            let what = format!("is {} {:?}, its matrix {:?}", scale.dtype, scale.shape, blocks.shape);
            return Err(Error::tensor(&file, &scale.name, what));
        }
        let columns = blocks.shape.last().copied().unwrap_or(1);
        matrices.push(Matrix {
            name: blocks.name.clone(),
            shape: [blocks.shape.iter().product::<usize>() / columns, columns],
            form: Form::Fp4(Fp4 { blocks: blocks.extents().q, scales: scale.extents().q }),
            parts: Vec::new(),
        });
        shapes.push(blocks.shape.clone());
        taken.extend([blocks.name.clone(), scale.name.clone()]);
    }
    if taken.is_empty() {
        return Ok((files, tensors));
    }
    tensors.retain(|t| !taken.contains(&t.name));
    if !matrices.is_empty() {
        let (repacked, more) = Repacked::new(matrices, &files, files.len(), false)?;
        let path = files[0].path().to_path_buf();
        files.push(File::computed(path, repacked));
        tensors.extend(more.into_iter().zip(shapes).map(|(tensor, shape)| TensorInfo { shape, ..tensor }));
    }
    Ok((files, tensors))
}
