//! Stacks of experts that were published transposed (Qwen3-VL, Llama 4): gate and up side by side in `X.gate_up_proj`
//! `[n, k, 2 m]`, where others have `[n, 2 m, k]`, and `X.down_proj` `[n, m, k]`. The shapes of the two tell which.
//! Knows no model.

use std::collections::HashMap;

use super::quantized::{Found, plain};
use super::safetensors::Entry;
use crate::Extent;
use crate::repacked::{Form, Matrix, Transposed};

/// Returns the stacks that are transposed.
pub(super) fn transposed(entries: &[Entry]) -> Vec<Matrix> {
    let by_name: HashMap<&str, &Entry> = entries.iter().map(|e| (e.name.as_str(), e)).collect();
    let pair = |entry: &Entry| {
        let module = entry.name.strip_suffix(".gate_up_proj")?;
        let down = by_name.get(format!("{module}.down_proj").as_str())?;
        let (&[n, a, b], &[n_down, c, d]) = (entry.shape.as_slice(), down.shape.as_slice()) else { return None };
        // With biases, gate and up are no halves but every other column (gpt-oss).
        let is_interleaved = by_name.contains_key(format!("{}_bias", entry.name).as_str());
        let is_transposed = n == n_down && a == d && Some(b) == c.checked_mul(2);
        (is_transposed && !is_interleaved).then(|| Some([matrix(entry)?, matrix(down)?])).flatten()
    };
    entries.iter().filter_map(pair).flatten().collect()
}

fn matrix(entry: &Entry) -> Option<Matrix> {
    let &[n_stack, columns, rows] = entry.shape.as_slice() else { return None };
    let Found::Tensor(info) = plain(entry) else { return None };
    let data = Extent { file: entry.file, offset: entry.offset, len: entry.len };
    Some(Matrix {
        name: entry.name.clone(),
        shape: [n_stack.checked_mul(rows)?, columns],
        form: Form::Transposed(Transposed { data, dtype: info.dtype, n_stack }),
        parts: vec![entry.name.clone()],
    })
}
