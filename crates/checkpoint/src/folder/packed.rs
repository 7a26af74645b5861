//! Matrices of 4-bit codes as GPTQ and AWQ publish them: modules whose weight is four tensors (`qweight`, `qzeros`,
//! `scales`, `g_idx`). Knows how they are stored, and no model.
//!
//! A weight is `(code - zero) * scale`; the zero and the scale are those of its column's group and of its row. Eight
//! codes are an i32, from the lowest bits on. GPTQ packs codes along the columns, and stores zeros less 1 in the first
//! version of its format; AWQ packs along the rows, in the order 0 2 4 6 1 3 5 7. (AutoGPTQ, `qlinear_cuda_old.py`;
//! GPTQModel, `convert_gptq_v1_to_v2_format`; AutoAWQ, `packing_utils.py`.)

use std::collections::HashMap;

use super::quantized::{Found, described, plain};
use super::safetensors::Entry;
use crate::error::printable;
use crate::repacked::{Form, Matrix, Packed, Packing};
use crate::{Error, Extent, Metadata, Unreadable};

const METHOD: &str = "quantization_config.quant_method";
const FORMAT: &str = "quantization_config.checkpoint_format";
const VERSION: &str = "quantization_config.version";
const COMPRESSED: &str = "quantization_config.format";
const BITS: &str = "quantization_config.bits";
const GROUP: &str = "quantization_config.group_size";
const ORDER: &str = "quantization_config.desc_act";
/// Codes in a word.
const CODES: usize = 8;

/// Returns how the config says that matrices are packed; `None` where they are not, or in a way that is not read.
fn packing(meta: &Metadata) -> Result<Option<Packing>, Error> {
    let word = |key: &str| Ok::<_, Error>(meta.opt_str(key)?.map(str::to_ascii_lowercase));
    let Some(method) = word(METHOD)? else { return Ok(None) };
    if meta.opt_u32(BITS)? != Some(4) {
        return Ok(None);
    }
    Ok(match (method.as_str(), word(FORMAT)?.as_deref(), word(VERSION)?.as_deref()) {
        ("gptq", None | Some("gptq"), _) => Some(Packing::Columns { less_one: true }),
        ("gptq", Some("gptq_v2"), _) => Some(Packing::Columns { less_one: false }),
        ("awq", _, None | Some("gemm")) => Some(Packing::Rows),
        _ => None,
    })
}

/// Returns the packed matrices among the entries of all files; `path` names the files in errors.
pub(super) fn packed(meta: &Metadata, entries: &[Entry], path: impl Fn(usize) -> String) -> Result<Vec<Matrix>, Error> {
    let Some(packing) = packing(meta)? else { return Ok(Vec::new()) };
    // -1 is one group for all columns.
    let group = meta.get(GROUP).and_then(|value| value.to_int()).and_then(|n| usize::try_from(n).ok());
    let in_any_order = meta.opt_bool(ORDER)?.unwrap_or(true);
    let by_name: HashMap<&str, &Entry> = entries.iter().map(|e| (e.name.as_str(), e)).collect();
    let modules = entries.iter().filter_map(|entry| Some((entry, entry.name.strip_suffix(".qweight")?)));
    let of = |(codes, module): (&Entry, &str)| {
        let part = |name: &str| by_name.get(format!("{module}.{name}").as_str()).copied();
        let parts = Parts { codes, zeros: part("qzeros"), scales: part("scales"), groups: part("g_idx") };
        let joined = parts.join(module, packing, group, in_any_order);
        joined.map_err(|what| Error::tensor(&path(codes.file), &codes.name, what))
    };
    modules.map(of).collect()
}

/// Gives matrices that are packed in a way that is not read the name that they would have, so that whoever wants one is
/// told why it cannot be had.
pub(super) fn refuse(meta: &Metadata, unreadable: &mut [Unreadable]) {
    let said = |key: &str| {
        let value = meta.get(key).map(|value| printable(value.to_string().as_bytes()));
        value.map(|value| format!(" {} {value}", key.rsplit('.').next().unwrap_or(key))).unwrap_or_default()
    };
    for other in unreadable {
        let module = other.name.strip_suffix(".qweight").or_else(|| other.name.strip_suffix(".weight_packed"));
        let Some(module) = module else { continue };
        other.name = format!("{module}.weight");
        other.why = format!(
            "is packed as{}; what is read is GPTQ (gptq, gptq_v2), AWQ (gemm) and compressed-tensors (pack-quantized) \
             of 4 bits",
            [METHOD, BITS, FORMAT, VERSION, COMPRESSED].map(said).concat()
        );
    }
}

/// The entries of a module.
struct Parts<'a> {
    codes: &'a Entry,
    zeros: Option<&'a Entry>,
    scales: Option<&'a Entry>,
    groups: Option<&'a Entry>,
}

impl Parts<'_> {
    /// Returns the matrix of a module, once all parts agree on its rows, columns and groups.
    fn join(&self, module: &str, packing: Packing, group: Option<usize>, in_any_order: bool) -> Result<Matrix, String> {
        let missing = |part: &str| format!("has no {}.{part} alongside it", printable(module.as_bytes()));
        let zeros = self.zeros.ok_or_else(|| missing("qzeros"))?;
        let scales = self.scales.ok_or_else(|| missing("scales"))?;
        let odd = || format!("is {}, its scales are {}", described(self.codes), described(scales));
        let (&[a, b], &[n_groups, n_rows]) = (&self.codes.shape[..], &scales.shape[..]) else { return Err(odd()) };
        let (packed_rows, packed_columns) = match packing {
            Packing::Columns { .. } => (Some(b), a.checked_mul(CODES)),
            Packing::Rows | Packing::Lines => (b.checked_mul(CODES), Some(a)),
        };
        let columns = packed_columns.filter(|&n| n > 0).ok_or_else(odd)?;
        let group = group.unwrap_or(columns);
        if packed_rows != Some(n_rows) || n_rows == 0 || group == 0 || n_groups != columns.div_ceil(group) {
            return Err(format!("{}, in groups of {group} columns", odd()));
        }
        if self.codes.dtype != "I32" || zeros.dtype != "I32" || zeros.shape != [n_groups, n_rows.div_ceil(CODES)] {
            return Err(format!("{}, its zeros {}", odd(), described(zeros)));
        }
        let Found::Tensor(plain) = plain(scales) else { return Err(odd()) };
        let groups = match (packing, self.groups) {
            (Packing::Columns { .. }, Some(groups))
                if (groups.dtype.as_str(), &groups.shape[..]) == ("I32", &[columns]) =>
            {
                Some(groups)
            }
            (Packing::Columns { .. }, Some(groups)) => {
                return Err(format!("{}, its g_idx {}", odd(), described(groups)));
            }
            _ => None,
        };
        let extent = |entry: &Entry| Extent { file: entry.file, offset: entry.offset, len: entry.len };
        let parts = [Some(self.codes), Some(zeros), Some(scales), self.groups];
        let packed = Packed {
            packing,
            group,
            codes: extent(self.codes),
            zeros: Some(extent(zeros)),
            scales: extent(scales),
            scale_type: plain.dtype,
            groups: groups.map(extent),
            in_any_order,
        };
        Ok(Matrix {
            name: format!("{module}.weight"),
            shape: [n_rows, columns],
            form: Form::Packed(packed),
            parts: parts.into_iter().flatten().map(|entry| entry.name.clone()).collect(),
        })
    }
}
