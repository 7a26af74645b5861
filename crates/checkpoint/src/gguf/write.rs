//! Writes GGUF files. Knows nothing of reading them back; the tests compare the two.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::Write;

use quant::WeightType;

use super::{ALIGNMENT_KEY, ALIGNMENTS, DEFAULT_ALIGNMENT, MAGIC, MAX_AXES, MAX_DEPTH, MAX_KEY, MAX_NAME};
use crate::error::printable;
use crate::value::{Value, ValueKind};
use crate::{Error, Strings};

/// Collects metadata and tensors, then writes a GGUF file in one pass: at once, or the header first and then the bytes
/// of tensors as they come ([`Writer::start`]).
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
    /// `None` for one whose bytes follow the header.
    bytes: Option<Cow<'a, [u8]>>,
}

impl Default for Writer<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a> Writer<'a> {
    /// Returns an empty file of version 3 with offsets aligned to 32 bytes.
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
        self.tensors.push(Tensor { name: name.into(), shape: shape.into(), dtype, bytes: Some(bytes.into()) });
        self
    }

    /// Adds a tensor without its bytes, which [`Stream::write`] takes later.
    pub fn announce(&mut self, name: &str, shape: &[usize], dtype: WeightType) -> &mut Self {
        self.tensors.push(Tensor { name: name.into(), shape: shape.into(), dtype, bytes: None });
        self
    }

    /// Writes the file.
    ///
    /// # Errors
    /// When a name, shape, length or the alignment is invalid, or a tensor has no bytes; then nothing is written. When
    /// `out` fails.
    pub fn write(&self, out: &mut impl Write) -> Result<(), Error> {
        if let Some(tensor) = self.tensors.iter().find(|tensor| tensor.bytes.is_none()) {
            return Err(Error::Unwritable {
                what: format!("tensor {}: has no bytes", printable(tensor.name.as_bytes())),
            });
        }
        let mut stream = self.start(out)?;
        self.tensors.iter().flat_map(|tensor| &tensor.bytes).try_for_each(|bytes| stream.write(bytes))?;
        stream.finish().map(drop)
    }

    /// Writes the header, behind which the stream takes the bytes of all tensors in the order in which they were added.
    ///
    /// # Errors
    /// As [`Writer::write`].
    pub fn start<W: Write>(&self, mut out: W) -> Result<Stream<W>, Error> {
        let lens = self.check().map_err(|what| Error::Unwritable { what })?;
        out.write_all(&self.header(&lens)).map_err(|source| Error::Write { source })?;
        Ok(Stream { out, lens, tensor: 0, written: 0, alignment: self.alignment })
    }

    /// Returns the header of tensors that are this many bytes long.
    fn header(&self, lens: &[usize]) -> Vec<u8> {
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
        for (tensor, len) in self.tensors.iter().zip(lens) {
            text(&mut out, tensor.name.as_bytes());
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            for &axis in tensor.shape.iter().rev() {
                out.extend((axis as u64).to_le_bytes());
            }
            let id = tensor.dtype.ggml_id().expect("`check` refuses the types that GGUF has no number for");
            out.extend(id.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + len).next_multiple_of(self.alignment);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out
    }

    /// Checks everything that can be wrong; the length of each tensor in bytes.
    fn check(&self) -> Result<Vec<usize>, String> {
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
        let lens = self.tensors.iter().map(|tensor| {
            let at = |what: String| format!("tensor {}: {what}", printable(tensor.name.as_bytes()));
            match names.insert(&tensor.name) {
                true => tensor.check().map_err(at),
                false => Err(at("is added twice".into())),
            }
        });
        let lens: Vec<usize> = lens.collect::<Result<_, _>>()?;
        let end =
            lens.iter().try_fold(0usize, |at, len| at.checked_add(*len)?.checked_next_multiple_of(self.alignment));
        end.ok_or("the tensors together are too long")?;
        Ok(lens)
    }
}

/// A GGUF file whose header is written: takes the bytes of its tensors, in order and in pieces of any length.
#[must_use = "the file is whole when `finish` has been called"]
pub struct Stream<W> {
    out: W,
    lens: Vec<usize>,
    /// The tensor that is being written, and how much of it is.
    tensor: usize,
    written: usize,
    alignment: usize,
}

impl<W: Write> Stream<W> {
    /// Writes bytes of the tensor whose turn it is.
    ///
    /// # Errors
    /// When they end past that tensor: a piece belongs to one. When the sink fails.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let left = self.lens.get(self.tensor).map_or(0, |len| len - self.written);
        if bytes.len() > left {
            let what = format!("tensor {}: {} bytes for the last {left}", self.tensor, bytes.len());
            return Err(Error::Unwritable { what });
        }
        self.out.write_all(bytes).map_err(|source| Error::Write { source })?;
        self.written += bytes.len();
        if bytes.len() == left && left > 0 {
            let padding = self.written.next_multiple_of(self.alignment) - self.written;
            (self.tensor, self.written) = (self.tensor + 1, 0);
            self.out.write_all(&vec![0; padding]).map_err(|source| Error::Write { source })?;
        }
        Ok(())
    }

    /// Ends the file and returns the sink.
    ///
    /// # Errors
    /// When bytes of a tensor are missing. When the sink fails.
    pub fn finish(mut self) -> Result<W, Error> {
        if self.tensor < self.lens.len() {
            let (n, tensor) = (self.lens.len(), self.tensor);
            return Err(Error::Unwritable { what: format!("ends in tensor {tensor} of {n}, which is not whole") });
        }
        self.out.flush().map_err(|source| Error::Write { source })?;
        Ok(self.out)
    }
}

impl Tensor<'_> {
    /// Checks it; its length in bytes.
    fn check(&self) -> Result<usize, String> {
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
        let given = self.bytes.as_ref().map(|bytes| bytes.len());
        match len {
            Some(len) if given.is_none_or(|given| given == len) => Ok(len),
            _ => {
                let needs = len.map_or("cannot be encoded".into(), |len| format!("needs {len}"));
                let given = given.map_or(String::new(), |given| format!("given {given} bytes, "));
                Err(format!("{given}{} {shape:?} {needs}", dtype.name()))
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
