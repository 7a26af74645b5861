//! Joins what safetensors files store apart: a weight of packed words and its planes of scales and biases become one
//! tensor.
//!
//! MLX stores a quantized `X.weight` as u32 words, the rows' values packed from the lowest bit on, alongside `X.scales`
//! and, in its affine mode, `X.biases`; `quantization` in the config says bits, group and mode, for all or for module
//! `X`. Models published in MXFP4 store `X_blocks`, 16 bytes per group of 32 values, beside `X_scales`: the same
//! planes. Knows which tensors can be read, but not what they are for.

use std::collections::HashMap;

use quant::{Affine, ScaleType, WeightType};

use super::safetensors::Entry;
use crate::error::printable;
use crate::repacked::{Float8, Form, Matrix};
use crate::value::Value;
use crate::{Error, Extent, Metadata, TensorInfo, Unreadable};

/// Keys of the config that say how weights are quantized.
pub(super) const PREFIX: &str = "quantization.";
/// Maximum number of axes of a readable tensor.
const MAX_AXES: usize = 5;

/// Maximum number of bits of a packed value, far above those in use.
const MAX_BITS: usize = 16;

/// Tensors from the entries of all files, in their order; `path` names the files in errors.
pub(super) fn join(
    meta: &Metadata,
    entries: Vec<Entry>,
    path: impl Fn(usize) -> String,
) -> Result<(Vec<TensorInfo>, Vec<Unreadable>), Error> {
    let by_name: HashMap<&str, usize> = entries.iter().enumerate().map(|(i, e)| (e.name.as_str(), i)).collect();
    let mut found = Vec::with_capacity(entries.len());
    let mut taken = vec![false; entries.len()];
    for entry in &entries {
        let Some(parts) = Parts::of(entry, |name| by_name.get(name.as_str()).copied()) else {
            found.push(plain(entry));
            continue;
        };
        taken[parts.scales] = true;
        parts.biases.into_iter().for_each(|i| taken[i] = true);
        let scheme = parts.scheme(meta)?;
        let joined = parts.join(entry, &entries, &scheme);
        found.push(joined.map_err(|what| Error::tensor(&path(entry.file), &entry.name, what))?);
    }
    let (mut tensors, mut unreadable) = (Vec::new(), Vec::new());
    for (found, taken) in found.into_iter().zip(taken) {
        match found {
            _ if taken => (),
            Found::Tensor(tensor) => tensors.push(tensor),
            Found::Unreadable(other) => unreadable.push(other),
        }
    }
    Ok((tensors, unreadable))
}

/// Rows and columns of a block of 8-bit floats where the config says nothing.
const FLOAT8_BLOCK: u32 = 128;

/// Returns the matrices of 8-bit floats whose scales are there: `X.weight` alongside `X.weight_scale_inv`.
pub(super) fn float8(meta: &Metadata, entries: &[Entry]) -> Result<Vec<Matrix>, Error> {
    const BLOCK: &str = "quantization_config.weight_block_size";
    let by_name: HashMap<&str, &Entry> = entries.iter().map(|e| (e.name.as_str(), e)).collect();
    let block = meta.opt_u32s(BLOCK)?.unwrap_or_else(|| vec![FLOAT8_BLOCK; 2]);
    let &[rows, columns] = block.as_slice() else { return Err(Error::key(meta.file(), BLOCK, "is no pair")) };
    let block = [rows as usize, columns as usize];
    if block.contains(&0) {
        return Err(Error::key(meta.file(), BLOCK, "has a 0"));
    }
    let extent = |entry: &Entry| Extent { file: entry.file, offset: entry.offset, len: entry.len };
    let matrix = |entry: &Entry| {
        let &[rows, columns] = entry.shape.as_slice() else { return None };
        let scales = by_name.get(format!("{}_scale_inv", entry.name).as_str())?;
        let Found::Tensor(plain) = plain(scales) else { return None };
        let fits = scales.shape == [rows.div_ceil(block[0]), columns.div_ceil(block[1])] && rows > 0 && columns > 0;
        (entry.dtype == "F8_E4M3" && fits).then(|| Matrix {
            name: entry.name.clone(),
            shape: [rows, columns],
            form: Form::Float8(Float8 { data: extent(entry), scales: extent(scales), scale_type: plain.dtype, block }),
            parts: vec![entry.name.clone(), scales.name.clone()],
        })
    };
    Ok(entries.iter().filter_map(matrix).collect())
}

/// Kinds of entries.
pub(super) enum Found {
    Tensor(TensorInfo),
    Unreadable(Unreadable),
}

/// Returns a tensor without separate planes.
pub(super) fn plain(entry: &Entry) -> Found {
    let dtype = match entry.dtype.as_str() {
        "F32" => Some(WeightType::F32),
        "F16" => Some(WeightType::F16),
        "BF16" => Some(WeightType::BF16),
        _ => None,
    };
    let shape = &entry.shape;
    let why = match dtype {
        None => format!("type {} is not supported", printable(entry.dtype.as_bytes())),
        Some(_) if !readable(shape) => {
            format!("shape {shape:?} is not supported: up to {MAX_AXES} axes, none of them 0")
        }
        Some(dtype) => {
            return Found::Tensor(TensorInfo {
                name: entry.name.clone(),
                // A number by itself has no axes there.
                shape: if shape.is_empty() { vec![1] } else { shape.clone() },
                dtype,
                file: entry.file,
                offset: entry.offset,
                len: entry.len,
                scales: None,
                biases: None,
            });
        }
    };
    let dtype = printable(entry.dtype.as_bytes());
    Found::Unreadable(Unreadable { name: entry.name.clone(), dtype, shape: shape.clone(), file: entry.file, why })
}

fn readable(shape: &[usize]) -> bool {
    shape.len() <= MAX_AXES && !shape.contains(&0)
}

/// How a weight is quantized.
struct Scheme {
    bits: usize,
    group: usize,
    mode: String,
}

/// Which entries make up one weight.
struct Parts<'a> {
    module: &'a str,
    packing: Packing,
    scales: usize,
    biases: Option<usize>,
}

/// The two ways in which weights are stored in parts.
#[derive(Clone, Copy)]
enum Packing {
    /// `X.weight` u32 `[.., words]`, `X.scales` `[.., groups]`, maybe `X.biases`.
    Words,
    /// `X_blocks` u8 `[.., groups, 16]`, `X_scales` u8 `[.., groups]`.
    Blocks,
}

impl<'a> Parts<'a> {
    /// `None` for a tensor without separate planes.
    fn of(entry: &'a Entry, find: impl Fn(String) -> Option<usize>) -> Option<Self> {
        match entry.dtype.as_str() {
            "U32" => {
                let module = entry.name.strip_suffix(".weight")?;
                let (scales, biases) = (find(format!("{module}.scales"))?, find(format!("{module}.biases")));
                Some(Self { module, packing: Packing::Words, scales, biases })
            }
            "U8" => {
                let module = entry.name.strip_suffix("_blocks")?;
                let scales = find(format!("{module}_scales"))?;
                Some(Self { module, packing: Packing::Blocks, scales, biases: None })
            }
            _ => None,
        }
    }

    /// Returns the config's scheme for the weight. An object for the module is complete: what it omits takes MLX's
    /// default, not the global value.
    fn scheme(&self, meta: &Metadata) -> Result<Scheme, Error> {
        if let Packing::Blocks = self.packing {
            return Ok(Scheme { bits: 4, group: 32, mode: "mxfp4".into() });
        }
        let key = format!("{PREFIX}{}", self.module);
        if let Some(Value::Bool(false)) = meta.get(&key) {
            let what = format!("is false, tensor {}.scales says otherwise", printable(self.module.as_bytes()));
            return Err(Error::key(meta.file(), &key, what));
        }
        let own = |key: &str| meta.get(&format!("{PREFIX}{key}")).is_some();
        let inner = self.module.split_once('.').map_or(self.module, |(_, rest)| rest);
        // The config may name the module as in the text model or as in the whole model.
        let names = [self.module.to_string(), inner.to_string(), format!("language_model.{}", self.module)];
        let fields = ["bits", "group_size", "mode"];
        let named = names.into_iter().find(|name| fields.iter().any(|field| own(&format!("{name}.{field}"))));
        let count = |key: String| Ok(meta.opt_u32(&key)?.map(|n| n as usize));
        let (bits, group, mode) = match &named {
            Some(name) => {
                let key = |field: &str| format!("{PREFIX}{name}.{field}");
                (count(key("bits"))?, count(key("group_size"))?, meta.opt_str(&key("mode"))?)
            }
            None => {
                let key = |field: &str| format!("{PREFIX}{field}");
                let (bits, group) = (meta.u32(&key("bits"))?, meta.u32(&key("group_size"))?);
                (Some(bits as usize), Some(group as usize), meta.opt_str(&key("mode"))?)
            }
        };
        let mode = mode.unwrap_or("affine").to_string();
        let group = group.unwrap_or(if mode == "affine" { 64 } else { 32 });
        Ok(Scheme { bits: bits.unwrap_or(4), group, mode })
    }

    /// Returns the weight whose packed values are `entry`. Parts that contradict each other or the scheme are an error;
    /// an unsupported scheme is not.
    fn join(&self, entry: &Entry, entries: &[Entry], scheme: &Scheme) -> Result<Found, String> {
        let scales = &entries[self.scales];
        let biases = self.biases.map(|i| &entries[i]);
        let shape = self.shape(entry, scales, scheme)?;
        if let Some(biases) = biases
            && (&biases.dtype, &biases.shape) != (&scales.dtype, &scales.shape)
        {
            let (of_biases, of_scales) = (described(biases), described(scales));
            return Err(format!("biases are {of_biases}, scales {of_scales}"));
        }
        let name = match self.packing {
            Packing::Words => entry.name.clone(),
            Packing::Blocks => self.module.to_string(),
        };
        let Some(dtype) = scheme.weight_type(scales, biases.is_some()).filter(|_| readable(&shape)) else {
            let Scheme { bits, group, mode } = scheme;
            let dtype = format!("{} of {bits} bits in groups of {group}", printable(mode.as_bytes()));
            let why =
                format!("{dtype}, {} scales, shape {shape:?}, is not supported", printable(scales.dtype.as_bytes()));
            return Ok(Found::Unreadable(Unreadable { name, dtype, shape, file: entry.file, why }));
        };
        let extent = |entry: &Entry| Extent { file: entry.file, offset: entry.offset, len: entry.len };
        let (file, offset, len) = (entry.file, entry.offset, entry.len);
        let (scales, biases) = (Some(extent(scales)), biases.map(extent));
        Ok(Found::Tensor(TensorInfo { name, shape, dtype, file, offset, len, scales, biases }))
    }

    /// Shape of the weight; the packed values, the bits and the scales must agree on its columns.
    fn shape(&self, entry: &Entry, scales: &Entry, scheme: &Scheme) -> Result<Vec<usize>, String> {
        let &Scheme { bits, group, .. } = scheme;
        let odd = || format!("is {}, scales are {}", described(entry), described(scales));
        let (outer, columns) = match (self.packing, entry.shape.as_slice()) {
            (Packing::Words, [outer @ .., words]) => {
                let total = words.checked_mul(32).filter(|total| (1..=MAX_BITS).contains(&bits) && total % bits == 0);
                let total = total.ok_or_else(|| format!("rows of {words} u32 are no whole number of {bits} bits"))?;
                (outer, total / bits)
            }
            (Packing::Blocks, [outer @ .., groups, 16]) => (outer, groups.checked_mul(32).ok_or_else(odd)?),
            _ => return Err(odd()),
        };
        match scales.shape.split_last() {
            Some((&groups, rest)) if rest == outer => match groups.checked_mul(group) {
                Some(scaled) if scaled == columns => Ok([outer, &[columns]].concat()),
                _ => Err(format!(
                    "{bits} bits make {columns} columns of {}, scales {:?} in groups of {group} make {}",
                    described(entry),
                    scales.shape,
                    groups.saturating_mul(group)
                )),
            },
            _ => Err(odd()),
        }
    }
}

impl Scheme {
    /// `None` when no weight type matches.
    fn weight_type(&self, scales: &Entry, biases: bool) -> Option<WeightType> {
        match (self.mode.as_str(), scales.dtype.as_str(), biases) {
            ("affine", "F16", true) => Affine::new(self.bits, self.group, ScaleType::F16).map(WeightType::Affine),
            ("affine", "BF16", true) => Affine::new(self.bits, self.group, ScaleType::BF16).map(WeightType::Affine),
            ("affine", "F32", true) => Affine::new(self.bits, self.group, ScaleType::F32).map(WeightType::Affine),
            ("mxfp4", "U8", false) if (self.bits, self.group) == (4, 32) => Some(WeightType::MXFP4_PLANAR),
            _ => None,
        }
    }
}

pub(super) fn described(entry: &Entry) -> String {
    format!("{} {:?}", printable(entry.dtype.as_bytes()), entry.shape)
}
