//! Writes GGUF files. Knows nothing of reading them back; the tests compare the two.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::Write;

use quant::WeightType;

use super::{ALIGNMENT_KEY, ALIGNMENTS, DEFAULT_ALIGNMENT, MAGIC, MAX_AXES, MAX_DEPTH, MAX_KEY, MAX_NAME};
use crate::error::printable;
use crate::value::{Value, ValueKind};
use crate::{Error, Strings};

/// Collects metadata and tensors, then writes a GGUF file in one pass.
///
/// ```
/// use checkpoint::gguf::Writer;
/// use quant::WeightType;
///
/// let mut writer = Writer::new();
/// writer.meta("general.architecture", "llama");
/// writer.meta("llama.block_count", 2u32);
/// writer.tensor("output_norm.weight", &[2], WeightType::F32, vec![0; 8]);
/// let mut file = Vec::new();
/// writer.write(&mut file)?;
/// # Ok::<(), checkpoint::Error>(())
/// ```
pub struct Writer<'a> {
    version: u32,
    alignment: usize,
    entries: Vec<(String, Value)>,
    tensors: Vec<Tensor<'a>>,
}

struct Tensor<'a> {
    name: String,
    shape: Vec<usize>, // slowest axis first
    dtype: WeightType,
    bytes: Cow<'a, [u8]>,
}

impl Default for Writer<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a> Writer<'a> {
    /// An empty file of version 3 with offsets aligned to 32 bytes.
    pub fn new() -> Self {
        Self { version: 3, alignment: DEFAULT_ALIGNMENT, entries: Vec::new(), tensors: Vec::new() }
    }

    /// Sets the version: 2 or 3, the only difference.
    pub fn version(&mut self, version: u32) -> &mut Self {
        self.version = version;
        self
    }

    /// Sets the alignment of tensors in bytes, and the key `general.alignment` with it.
    pub fn alignment(&mut self, alignment: u32) -> &mut Self {
        self.alignment = alignment as usize;
        self.meta(ALIGNMENT_KEY, alignment)
    }

    /// Adds a key.
    pub fn meta(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        self.entries.push((key.into(), value.into()));
        self
    }

    /// Adds a tensor: shape slowest axis first, rows encoded as `dtype`.
    pub fn tensor(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: WeightType,
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> &mut Self {
        self.tensors.push(Tensor { name: name.into(), shape: shape.into(), dtype, bytes: bytes.into() });
        self
    }

    /// Writes the file.
    ///
    /// # Errors
    /// When a name, shape, length or the alignment is invalid; then nothing is written. When `out` fails.
    pub fn write(&self, out: &mut impl Write) -> Result<(), Error> {
        self.check().map_err(|what| Error::Unwritable { what })?;
        let header = self.header();
        self.emit(&header, out).map_err(|source| Error::Write { source })
    }

    fn header(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            text(&mut out, key.as_bytes());
            out.extend((value.kind() as u32).to_le_bytes());
            payload(&mut out, value);
        }
        let mut offset = 0usize;
        for tensor in &self.tensors {
            text(&mut out, tensor.name.as_bytes());
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            for &axis in tensor.shape.iter().rev() {
                out.extend((axis as u64).to_le_bytes());
            }
            let id = tensor.dtype.ggml_id().expect("`check` refuses the types that GGUF has no number for");
            out.extend(id.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.bytes.len()).next_multiple_of(self.alignment);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out
    }

    fn emit(&self, header: &[u8], out: &mut impl Write) -> std::io::Result<()> {
        out.write_all(header)?;
        for tensor in &self.tensors {
            out.write_all(&tensor.bytes)?;
            let padding = tensor.bytes.len().next_multiple_of(self.alignment) - tensor.bytes.len();
            out.write_all(&vec![0; padding])?;
        }
        out.flush()
    }

    fn check(&self) -> Result<(), String> {
        if !matches!(self.version, 2 | 3) {
            return Err(format!("version {}: versions 2 and 3 are written", self.version));
        }
        if !self.alignment.is_power_of_two() || !ALIGNMENTS.contains(&self.alignment) {
            let (least, most) = (ALIGNMENTS.start(), ALIGNMENTS.end());
            return Err(format!("alignment {}: a power of two from {least} to {most} wanted", self.alignment));
        }
        let mut keys = HashSet::new();
        for (key, value) in &self.entries {
            let at = |what: &str| format!("key {}: {what}", printable(key.as_bytes()));
            if key.is_empty() || key.len() > MAX_KEY {
                return Err(at(&format!("is {} bytes long, 1 to {MAX_KEY} are allowed", key.len())));
            }
            if !keys.insert(key) {
                return Err(at("is added twice"));
            }
            if key == ALIGNMENT_KEY && *value != Value::U32(self.alignment as u32) {
                return Err(at("is set by alignment() alone"));
            }
            nesting(value, 0).map_err(|what| at(&what))?;
        }
        let mut names = HashSet::new();
        for tensor in &self.tensors {
            let at = |what: String| format!("tensor {}: {what}", printable(tensor.name.as_bytes()));
            if !names.insert(&tensor.name) {
                return Err(at("is added twice".into()));
            }
            tensor.check().map_err(at)?;
        }
        Ok(())
    }
}

impl Tensor<'_> {
    fn check(&self) -> Result<(), String> {
        let (name, shape, dtype) = (&self.name, &self.shape, self.dtype);
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(format!("name is {} bytes long, 1 to {MAX_NAME} are allowed", name.len()));
        }
        if shape.is_empty() || shape.len() > MAX_AXES || shape.contains(&0) {
            return Err(format!("shape {shape:?}: 1 to {MAX_AXES} axes wanted, none of length 0"));
        }
        if dtype.ggml_id().is_none() {
            return Err(format!("GGUF has no type {dtype}"));
        }
        let (row, outer) = (shape[shape.len() - 1], &shape[..shape.len() - 1]);
        let len = dtype.row_bytes(row).and_then(|bytes| outer.iter().try_fold(bytes, |n, &axis| n.checked_mul(axis)));
        match len == Some(self.bytes.len()) {
            true => Ok(()),
            false => {
                let needs = len.map_or("cannot be encoded".into(), |len| format!("needs {len}"));
                Err(format!("given {} bytes, {} {shape:?} {needs}", self.bytes.len(), dtype.name()))
            }
        }
    }
}

/// Checks that an array of arrays holds only arrays, nested no deeper than allowed.
fn nesting(value: &Value, depth: usize) -> Result<(), String> {
    match value {
        Value::Numbers(_) | Value::Strings(_) | Value::Nested(_) if depth >= MAX_DEPTH => {
            Err(format!("arrays nest more than {MAX_DEPTH} deep"))
        }
        Value::Nested(items) => items.iter().try_for_each(|item| nesting(item, depth + 1)),
        Value::Numbers(_) | Value::Strings(_) => Ok(()),
        _ if depth == 0 => Ok(()),
        scalar => Err(format!("{} is in an array of arrays", scalar.describe())),
    }
}

fn text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

fn array_head(out: &mut Vec<u8>, element: ValueKind, len: usize) {
    out.extend((element as u32).to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

/// A value without its kind.
fn payload(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.extend(v.to_le_bytes()),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::Str(v) => text(out, v),
        Value::Numbers(array) => {
            array_head(out, array.element(), array.len());
            out.extend(array.encoded());
        }
        Value::Strings(array) => {
            array_head(out, ValueKind::Str, Strings::len(array));
            out.extend(array.encoded());
        }
        Value::Nested(items) => {
            array_head(out, ValueKind::Array, items.len());
            items.iter().for_each(|item| payload(out, item));
        }
    }
}
