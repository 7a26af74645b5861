//! Headers of safetensors files, and the index of a model that is cut into several.
//!
//! Layout (<https://github.com/huggingface/safetensors#format>): length of the header as u64, little endian; the
//! header, a JSON object from names to `{"dtype", "shape", "data_offsets"}`; the tensors' bytes, where offsets count
//! from. Tensors are unaligned: some writers pad the header to 8 bytes, MLX does not. A general JSON parser does not
//! fit: every error must name the tensor, a duplicate name must be an error, and an unsupported type must not be one.
//! Does not know which tensors belong together.

use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::error::{mistaken, printable};
use crate::{Error, File};

/// Longest header, in bytes: the format's own limit.
const MAX_HEADER: u64 = 100_000_000;
/// Maximum length of a tensor name, in bytes.
const MAX_NAME: usize = 256;
/// Maximum number of axes of a listed tensor.
const MAX_AXES: usize = 8;

/// The types of the format and their bits.
const DTYPES: [(&str, usize); 19] = [
    ("BOOL", 8),
    ("U8", 8),
    ("I8", 8),
    ("F8_E4M3", 8),
    ("F8_E5M2", 8),
    ("F8_E8M0", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("I64", 64),
    ("U64", 64),
    ("F64", 64),
];

/// A tensor from the header. Its extent is checked against the file, its length against type and shape.
#[derive(Debug)]
pub(super) struct Entry {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>, // 0 to 8 axes, any of which may be 0
    pub file: usize,
    pub offset: usize, // from the start of the file
    pub len: usize,
}

/// What one file holds.
pub(super) struct Header {
    /// `format` of `__metadata__`: what wrote the file.
    pub format: Option<String>,
    pub entries: Vec<Entry>,
}

/// Reads the header of a file; `file_idx` is what its tensors say of it.
pub(super) fn header(source: &File, file_idx: usize) -> Result<Header, Error> {
    let file = &*source.path().to_string_lossy();
    let bad = |what: String| Error::file(file, what);
    let mut len = [0; 8];
    let Some(rest) = source.size().checked_sub(len.len()) else {
        return Err(bad(format!("length of the header needs 8 bytes, the file holds {}", source.size())));
    };
    source.read_at(0, &mut len)?;
    let is = mistaken(&len);
    let len = u64::from_le_bytes(len);
    if len > MAX_HEADER {
        return Err(bad(format!("header is {len} bytes long, at most {MAX_HEADER} are allowed{is}")));
    }
    let len = len as usize; // MAX_HEADER fits
    let Some(held) = rest.checked_sub(len) else {
        return Err(bad(format!("header is {len} bytes long, {rest} are left in the file")));
    };
    let begin = 8 + len;
    let head = source.head(begin)?;
    let json = &head[8..begin];
    let raw: Object<RawHeader> =
        serde_json::from_slice(json).map_err(|error| bad(format!("header: {}", super::json_error(&error))))?;
    let RawHeader { format, entries } = raw.0;
    let mut names = HashSet::with_capacity(entries.len());
    for (name, _) in &entries {
        if !names.insert(name.as_str()) {
            return Err(Error::tensor(file, name, "is in the file twice"));
        }
    }
    let place = |(name, raw): (String, RawEntry)| {
        let (shape, offset, len) = place(&raw, held).map_err(|what| Error::tensor(file, &name, what))?;
        Ok(Entry { name, dtype: raw.dtype, shape, file: file_idx, offset: begin + offset, len })
    };
    let entries = entries.into_iter().map(place).collect::<Result<Vec<_>, Error>>()?;
    overlaps(file, &entries)?;
    Ok(Header { format, entries })
}

/// Shape, offset in the data and length of a tensor whose file holds `held` bytes of data.
fn place(raw: &RawEntry, held: usize) -> Result<(Vec<usize>, usize, usize), String> {
    let [begin, end] = raw.data_offsets;
    if begin > end {
        return Err(format!("begins at byte {begin} of the data and ends at {end}"));
    }
    if end > held as u64 {
        return Err(format!("file holds {held} bytes of data, {} {:?} ends at {end}", raw.shown_dtype(), raw.shape));
    }
    // No overflow from here on: both lie in a file whose size fits.
    let (begin, len) = (begin as usize, (end - begin) as usize);
    if raw.shape.len() > MAX_AXES {
        return Err(format!("has {} axes, at most {MAX_AXES} are allowed", raw.shape.len()));
    }
    let many = || format!("shape {:?} has too many elements for {}", raw.shape, raw.shown_dtype());
    let shape: Option<Vec<usize>> = raw.shape.iter().map(|&axis| usize::try_from(axis).ok()).collect();
    let shape = shape.ok_or_else(many)?;
    if let Some((_, bits)) = DTYPES.iter().find(|(name, _)| *name == raw.dtype) {
        let bits = shape.iter().try_fold(*bits, |n, &axis| n.checked_mul(axis)).ok_or_else(many)?;
        let needed = bits.div_ceil(8);
        if needed != len {
            return Err(format!("its offsets hold {len} bytes, {} {:?} needs {needed}", raw.shown_dtype(), raw.shape));
        }
    }
    Ok((shape, begin, len))
}

fn overlaps(file: &str, entries: &[Entry]) -> Result<(), Error> {
    let mut by_offset: Vec<&Entry> = entries.iter().filter(|entry| entry.len > 0).collect();
    by_offset.sort_unstable_by_key(|entry| entry.offset);
    for pair in by_offset.windows(2) {
        if pair[0].offset + pair[0].len > pair[1].offset {
            let what = format!("shares bytes with tensor {}", printable(pair[0].name.as_bytes()));
            return Err(Error::tensor(file, &pair[1].name, what));
        }
    }
    Ok(())
}

/// Reads an index: the file of every tensor, in the order of the text. `file` names the index in errors.
pub(super) fn index(file: &str, text: &[u8]) -> Result<Vec<(String, String)>, Error> {
    let bad = |what: String| Error::file(file, what);
    if text.len() as u64 > MAX_HEADER {
        return Err(bad(format!("is {} bytes long, at most {MAX_HEADER} are allowed", text.len())));
    }
    let raw: RawIndex = serde_json::from_slice(text).map_err(|error| bad(super::json_error(&error)))?;
    Ok(raw.weight_map.0.0)
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: Object<Names>,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl RawEntry {
    fn shown_dtype(&self) -> String {
        printable(self.dtype.as_bytes())
    }
}

/// Builds a result from the keys and values of a JSON object, in order.
trait Collect: Default {
    fn entry<'de, A: MapAccess<'de>>(&mut self, name: String, map: &mut A) -> Result<(), A::Error>;
}

/// A JSON object, read without a map of its keys.
struct Object<T>(T);

impl<'de, T: Collect> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Walk<T>(PhantomData<T>);
        impl<'de, T: Collect> Visitor<'de> for Walk<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<T>, A::Error> {
                let mut out = T::default();
                while let Some(name) = map.next_key::<String>()? {
                    let shown = printable(name.as_bytes());
                    if name.is_empty() || name.len() > MAX_NAME {
                        let len = name.len();
                        let what = format!("name \"{shown}\" is {len} bytes long, 1 to {MAX_NAME} are allowed");
                        return Err(A::Error::custom(what));
                    }
                    out.entry(name, &mut map).map_err(|error| A::Error::custom(format!("tensor {shown}: {error}")))?;
                }
                Ok(Object(out))
            }
        }
        json.deserialize_map(Walk(PhantomData))
    }
}

#[derive(Default)]
struct RawHeader {
    format: Option<String>,
    entries: Vec<(String, RawEntry)>,
}

impl Collect for RawHeader {
    fn entry<'de, A: MapAccess<'de>>(&mut self, name: String, map: &mut A) -> Result<(), A::Error> {
        match name == "__metadata__" {
            true => self.format = map.next_value::<Option<Object<Format>>>()?.and_then(|found| found.0.0),
            false => self.entries.push((name, map.next_value()?)),
        }
        Ok(())
    }
}

/// The value of `format`, when it is a text.
#[derive(Default)]
struct Format(Option<String>);

impl Collect for Format {
    fn entry<'de, A: MapAccess<'de>>(&mut self, name: String, map: &mut A) -> Result<(), A::Error> {
        match name == "format" {
            true => self.0 = Some(map.next_value()?),
            false => drop(map.next_value::<IgnoredAny>()?),
        }
        Ok(())
    }
}

/// Pairs of texts.
#[derive(Default)]
struct Names(Vec<(String, String)>);

impl Collect for Names {
    fn entry<'de, A: MapAccess<'de>>(&mut self, name: String, map: &mut A) -> Result<(), A::Error> {
        self.0.push((name, map.next_value()?));
        Ok(())
    }
}
