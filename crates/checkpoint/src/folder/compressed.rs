//! Matrices as compressed-tensors publishes them: 4-bit codes of format `pack-quantized`, and 8-bit floats of format
//! `float-quantized`. Knows how they are stored, and no model.
//!
//! A module of codes is `weight_packed`, words of eight codes along the columns, from the lowest bits on, with
//! `weight_scale`, a scale a row and group of columns, and, unless it is symmetric, `weight_zero_point`, words along
//! the rows; codes and zeros are stored with 8 added, which is the zero where none is stored. `weight_g_idx` names the
//! group of each column (`actorder`). `weight_shape` says what the words say too. A module of floats is `weight` with
//! `weight_scale`: one, or one a row or a block. (compressed-tensors 0.20.0, `compressors/pack_quantized`,
//! `naive_quantized`.)

use std::collections::HashMap;

use super::quantized::{Found, described, plain};
use super::safetensors::Entry;
use crate::error::printable;
use crate::repacked::{Float8, Form, Matrix, Packed, Packing};
use crate::{Error, Extent, Metadata};

const METHOD: &str = "quantization_config.quant_method";
const FORMAT: &str = "quantization_config.format";
/// One object for each kind of module: `group_0.weights.num_bits`.
const GROUPS: &str = "quantization_config.config_groups.";
/// Codes in a word.
const CODES: usize = 8;

/// What the config says of the weights: the same of all kinds of modules.
struct Scheme {
    /// Whether they are codes; otherwise floats.
    is_packed: bool,
    /// Columns of a group of codes; `None` where a row is one.
    group: Option<usize>,
    /// Rows and columns of a block of floats.
    block: Option<[usize; 2]>,
}

impl Scheme {
    /// `None` where the folder is not of this method, or in a way that is not read.
    fn of(meta: &Metadata) -> Result<Option<Scheme>, Error> {
        if meta.opt_str(METHOD)? != Some("compressed-tensors") {
            return Ok(None);
        }
        let (is_packed, bits, kind) = match meta.opt_str(FORMAT)? {
            Some("pack-quantized") => (true, 4, "int"),
            Some("float-quantized") => (false, 8, "float"),
            _ => return Ok(None),
        };
        let mut found: Option<(Option<u32>, Option<Vec<u32>>)> = None;
        for (key, _) in meta.iter().filter(|(key, _)| key.starts_with(GROUPS)) {
            let Some(of) = key.strip_suffix("num_bits").filter(|of| of.ends_with(".weights.")) else { continue };
            let own = |name: &str| format!("{of}{name}");
            let size = meta.opt_u32(&own("group_size")).ok().flatten();
            let this = (size.filter(|&size| size > 0), meta.opt_u32s(&own("block_structure"))?);
            let is_read = meta.opt_u32(key)? == Some(bits) && meta.opt_str(&own("type"))?.unwrap_or("int") == kind;
            if !is_read || found.as_ref().is_some_and(|found| *found != this) {
                return Ok(None);
            }
            found = Some(this);
        }
        let Some((group, block)) = found else { return Ok(None) };
        let block = match block.as_deref() {
            None => None,
            Some(&[rows, columns]) if rows > 0 && columns > 0 => Some([rows as usize, columns as usize]),
            Some(_) => return Ok(None),
        };
        Ok(Some(Scheme { is_packed, group: group.map(|n| n as usize), block }))
    }
}

/// Returns the matrices among the entries of all files; `path` names the files in errors.
pub(super) fn compressed(
    meta: &Metadata,
    entries: &[Entry],
    path: impl Fn(usize) -> String,
) -> Result<Vec<Matrix>, Error> {
    let Some(scheme) = Scheme::of(meta)? else { return Ok(Vec::new()) };
    let by_name: HashMap<&str, &Entry> = entries.iter().map(|e| (e.name.as_str(), e)).collect();
    let suffix = if scheme.is_packed { ".weight_packed" } else { ".weight" };
    // What the config leaves out (`ignore`) is stored as plain floats.
    let is_ours = |entry: &&Entry| entry.name.ends_with(suffix) && (scheme.is_packed || entry.dtype == "F8_E4M3");
    let of = |data: &Entry| {
        let module = data.name.strip_suffix(suffix).unwrap_or_default();
        let part = |name: &str| by_name.get(format!("{module}.{name}").as_str()).copied();
        let parts = Parts {
            data,
            scales: part("weight_scale"),
            zeros: part("weight_zero_point"),
            groups: part("weight_g_idx"),
        };
        let joined = parts.join(module, &scheme);
        let (shape, form) = joined.map_err(|what| Error::tensor(&path(data.file), &data.name, what))?;
        // The scale of activations in 8 bits has no use where they are not rounded.
        let others = [part("weight_shape"), part("input_scale")];
        let all = [Some(data), parts.scales, parts.zeros, parts.groups].into_iter().chain(others);
        let parts = all.flatten().map(|entry| entry.name.clone()).collect();
        Ok(Matrix { name: format!("{module}.weight"), shape, form, parts })
    };
    entries.iter().filter(is_ours).map(of).collect()
}

/// The entries of a module.
struct Parts<'a> {
    data: &'a Entry,
    scales: Option<&'a Entry>,
    zeros: Option<&'a Entry>,
    groups: Option<&'a Entry>,
}

impl Parts<'_> {
    /// Rows and columns of a module, and its form, once all parts agree.
    fn join(&self, module: &str, scheme: &Scheme) -> Result<([usize; 2], Form), String> {
        let module = printable(module.as_bytes());
        let scales = self.scales.ok_or_else(|| format!("has no {module}.weight_scale alongside it"))?;
        let odd = || format!("is {}, its scales are {}", described(self.data), described(scales));
        let Found::Tensor(plain) = plain(scales) else { return Err(odd()) };
        let &[rows, width] = &self.data.shape[..] else { return Err(odd()) };
        if rows == 0 || width == 0 {
            return Err(odd());
        }
        let data = extent(self.data);
        if !scheme.is_packed {
            let block = match (&scales.shape[..], scheme.block) {
                (&[1] | &[1, 1], None) => [rows, width],
                (&[n, 1], None) if n == rows => [1, width],
                (&[n, m], Some([r, c])) if (n, m) == (rows.div_ceil(r), width.div_ceil(c)) => [r, c],
                _ => return Err(odd()),
            };
            let float8 = Float8 { data, scales: extent(scales), scale_type: plain.dtype, block };
            return Ok(([rows, width], Form::Float8(float8)));
        }
        let columns = width.checked_mul(CODES).ok_or_else(odd)?;
        let group = scheme.group.unwrap_or(columns);
        let n_groups = columns.div_ceil(group);
        if self.data.dtype != "I32" || scales.shape != [rows, n_groups] {
            return Err(format!("{}, in groups of {group} columns", odd()));
        }
        for (part, shape) in [(self.zeros, &[rows.div_ceil(CODES), n_groups][..]), (self.groups, &[columns])] {
            if let Some(part) = part.filter(|part| part.dtype != "I32" || part.shape != shape) {
                return Err(format!("{}, its {} {}", odd(), printable(part.name.as_bytes()), described(part)));
            }
        }
        let packed = Packed {
            packing: Packing::Lines,
            group,
            codes: data,
            zeros: self.zeros.map(extent),
            scales: extent(scales),
            scale_type: plain.dtype,
            groups: self.groups.map(extent),
            in_any_order: true,
        };
        Ok(([rows, columns], Form::Packed(packed)))
    }
}

fn extent(entry: &Entry) -> Extent {
    Extent { file: entry.file, offset: entry.offset, len: entry.len }
}
