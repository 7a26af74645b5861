//! Reads and validates the header of one GGUF file. Touches no byte behind the header, and knows neither splits nor
//! what keys and tensors mean.

use quant::WeightType;

use super::cursor::{Cursor, Parsed};
use super::{ALIGNMENT_KEY, ALIGNMENTS, DEFAULT_ALIGNMENT, MAGIC, MAX_AXES, MAX_DEPTH, MAX_HEADER, MAX_KEY, MAX_NAME};
use crate::bytes::{Bytes, Slice};
use crate::error::{mistaken, printable};
use crate::value::{Numbers, Strings, Text, Value, ValueKind};
use crate::{Error, File, Metadata, TensorInfo, Unreadable};

/// What one file holds.
pub(super) struct Part {
    pub meta: Metadata,
    pub tensors: Vec<TensorInfo>,
    pub unreadable: Vec<Unreadable>,
}

/// Minimum bytes of a key with its value: length of the key, one letter, kind, one byte.
const MIN_ENTRY: usize = 8 + 1 + 4 + 1;
/// Minimum bytes of a tensor's entry: length of the name, one letter, count of axes, one axis, type, offset.
const MIN_TENSOR: usize = 8 + 1 + 4 + 8 + 4 + 8;

/// Bytes that are read of a file at first, and how much more each time that its header is longer.
const FIRST_READ: usize = 1 << 20;
const GROWTH: usize = 4;

/// Reads the header of a file. `name` names it in errors, `file_idx` is what its tensors say of it.
///
/// Nothing says how long a header is, so more and more of the file is read until it is whole; what is kept is as long
/// as the header.
pub(super) fn header(name: &str, file: &File, file_idx: usize) -> Result<Part, Error> {
    let mut len = FIRST_READ;
    loop {
        let bytes = file.head(len)?;
        let mut cur = Cursor::new(&bytes, file.size());
        let part = parse(name, &mut cur, &bytes, file_idx);
        let (header_bytes, is_short) = (cur.pos(), cur.is_short());
        match is_short {
            false if part.is_err() || bytes.len() == file.size() || bytes.len() == header_bytes => return part,
            false => len = header_bytes,
            true if len == MAX_HEADER => {
                return Err(Error::file(name, format!("header is longer than {MAX_HEADER} bytes, which are allowed")));
            }
            true => len = len.saturating_mul(GROWTH).min(MAX_HEADER),
        }
    }
}

/// Reads the header that the bytes under `cur` begin with.
fn parse(file: &str, cur: &mut Cursor, bytes: &Bytes, file_idx: usize) -> Result<Part, Error> {
    let bad = |what: String| Error::file(file, what);
    preamble(cur).map_err(bad)?;
    let n_tensor = cur.count("count of tensors", MIN_TENSOR).map_err(bad)?;
    let n_key = cur.count("count of keys", MIN_ENTRY).map_err(bad)?;

    let mut entries = Vec::new();
    for i in 0..n_key {
        let key = key(cur).map_err(|what| bad(format!("key {i} of {n_key}: {what}")))?;
        let value = value(cur, bytes).map_err(|what| Error::key(file, &key, what))?;
        entries.push((key, value));
    }
    let meta = Metadata::new(file, entries)?;
    let alignment = alignment(file, &meta)?;

    let (mut tensors, mut unreadable) = (Vec::new(), Vec::new());
    for i in 0..n_tensor {
        let name = name(cur).map_err(|what| bad(format!("tensor {i} of {n_tensor}: {what}")))?;
        let at = |what| Error::tensor(file, &name, what);
        let (axes, type_id) = layout(cur).map_err(at)?;
        let offset = cur.u64("offset").map_err(at)?;
        let Some(dtype) = WeightType::from_ggml_id(type_id) else {
            // Its length is unknown, so its bytes cannot be read.
            unreadable.push(foreign(name, &axes, type_id, file_idx));
            continue;
        };
        let (shape, len) = size(&axes, dtype).map_err(at)?;
        let offset = usize::try_from(offset).ok().filter(|offset| offset % alignment == 0);
        let offset = offset.ok_or_else(|| at(format!("offset is not a multiple of the alignment {alignment}")))?;
        let (scales, biases) = (None, None);
        tensors.push(TensorInfo { name, shape, dtype, file: file_idx, offset, len, scales, biases });
    }
    place(file, cur.file_bytes(), cur.pos(), alignment, &mut tensors)?;
    Ok(Part { meta, tensors, unreadable })
}

fn preamble(cur: &mut Cursor) -> Parsed<()> {
    let magic = cur.take(4, "magic")?;
    if magic != MAGIC {
        // Its bytes are not shown: a link may lead to any file, and clients of a server read the error.
        return Err(format!("does not begin with \"GGUF\" as a GGUF file does{}", mistaken(magic)));
    }
    match cur.u32("version")? {
        2 | 3 => Ok(()),
        version if matches!(version.swap_bytes(), 1..=0xffff) => {
            Err(format!("big-endian GGUF version {}: only little endian is read", version.swap_bytes()))
        }
        version => Err(format!("GGUF version {version}: versions 2 and 3 are read")),
    }
}

fn key(cur: &mut Cursor) -> Parsed<String> {
    let key = cur.text("key")?;
    if key.is_empty() || key.len() > MAX_KEY {
        return Err(format!("key is {} bytes long, 1 to {MAX_KEY} are allowed", key.len()));
    }
    utf8(key, "key")
}

fn name(cur: &mut Cursor) -> Parsed<String> {
    let name = cur.text("name")?;
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(format!("name \"{}\" is {} bytes long, 1 to {MAX_NAME} are allowed", printable(name), name.len()));
    }
    utf8(name, "name")
}

fn utf8(bytes: &[u8], what: &str) -> Parsed<String> {
    let text = std::str::from_utf8(bytes).map_err(|_| format!("{what} \"{}\" is not UTF-8", printable(bytes)))?;
    Ok(text.into())
}

fn kind(cur: &mut Cursor, what: &str) -> Parsed<ValueKind> {
    let id = cur.u32(what)?;
    ValueKind::from_id(id).ok_or_else(|| format!("{what} is {id}, known are 0 to {}", ValueKind::ALL.len() - 1))
}

fn value(cur: &mut Cursor, bytes: &Bytes) -> Parsed<Value> {
    match kind(cur, "value kind")? {
        ValueKind::Array => array(cur, bytes, 1),
        ValueKind::Str => {
            let len = cur.text("text")?.len();
            Ok(Value::Str(Text(Slice::new(bytes, cur.pos() - len..cur.pos()))))
        }
        scalar => {
            let encoded = cur.take(scalar.min_bytes(), scalar.name())?;
            if scalar == ValueKind::Bool {
                check_bools(encoded)?;
            }
            Value::decode(scalar, encoded).ok_or_else(|| format!("{} is not a scalar", scalar.name()))
        }
    }
}

fn array(cur: &mut Cursor, bytes: &Bytes, depth: usize) -> Parsed<Value> {
    if depth > MAX_DEPTH {
        return Err(format!("arrays nest more than {MAX_DEPTH} deep"));
    }
    let element = kind(cur, "element kind")?;
    let len = cur.count("array length", element.min_bytes())?;
    match element {
        ValueKind::Array => (0..len).map(|_| array(cur, bytes, depth + 1)).collect::<Parsed<_>>().map(Value::Nested),
        ValueKind::Str => strings(cur, bytes, len).map(Value::Strings),
        number => {
            // No overflow: `count` has multiplied the same numbers.
            let encoded = cur.take(len * number.min_bytes(), "array")?;
            if number == ValueKind::Bool {
                check_bools(encoded)?;
            }
            let data = Slice::new(bytes, cur.pos() - encoded.len()..cur.pos());
            Ok(Value::Numbers(Numbers::new(number, data)))
        }
    }
}

fn strings(cur: &mut Cursor, bytes: &Bytes, len: usize) -> Parsed<Strings> {
    let begin = cur.pos();
    let mut starts = Vec::with_capacity(len.min(cur.at_hand(8)) + 1);
    for _ in 0..len {
        let text = cur.text("text")?;
        starts.push(cur.pos() - text.len() - begin);
    }
    starts.push(cur.pos() - begin + 8);
    Ok(Strings::new(Slice::new(bytes, begin..cur.pos()), starts))
}

fn check_bools(encoded: &[u8]) -> Parsed<()> {
    match encoded.iter().find(|&&b| b > 1) {
        Some(b) => Err(format!("bool is {b}, expected 0 or 1")),
        None => Ok(()),
    }
}

fn alignment(file: &str, meta: &Metadata) -> Result<usize, Error> {
    let Some(value) = meta.get(ALIGNMENT_KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    let alignment = if let Value::U32(v) = value { usize::try_from(*v).ok() } else { None };
    alignment.filter(|v| v.is_power_of_two() && ALIGNMENTS.contains(v)).ok_or_else(|| {
        let (least, most) = (ALIGNMENTS.start(), ALIGNMENTS.end());
        Error::key(
            file,
            ALIGNMENT_KEY,
            format!("found {}, expected a u32 power of two from {least} to {most}", value.describe()),
        )
    })
}

/// Reads axes (slowest first) and type number of a tensor.
fn layout(cur: &mut Cursor) -> Parsed<(Vec<u64>, u32)> {
    let n_axis = cur.u32("count of axes")? as usize;
    if !(1..=MAX_AXES).contains(&n_axis) {
        return Err(format!("has {n_axis} axes, 1 to {MAX_AXES} are allowed"));
    }
    let mut axes = vec![0; n_axis];
    for axis in axes.iter_mut().rev() {
        *axis = cur.u64("axis")?;
    }
    let type_id = cur.u32("tensor type")?;
    match axes.contains(&0) {
        true => Err(format!("shape {axes:?} has an axis of length 0")),
        false => Ok((axes, type_id)),
    }
}

/// Shape and length in bytes of a tensor.
fn size(axes: &[u64], dtype: WeightType) -> Parsed<(Vec<usize>, usize)> {
    let many = || format!("shape {axes:?} has too many elements for {}", dtype.name());
    let shape = axes.iter().map(|&axis| usize::try_from(axis).ok()).collect::<Option<Vec<_>>>().ok_or_else(many)?;
    let (row, outer) = shape.split_last().ok_or_else(many)?;
    if row % dtype.block_len() != 0 {
        let (block_len, name) = (dtype.block_len(), dtype.name());
        return Err(format!("row of {row} values does not divide into {name} blocks of {block_len}"));
    }
    let n_row = outer.iter().try_fold(1usize, |n, &axis| n.checked_mul(axis)).ok_or_else(many)?;
    n_row.checked_mul(*row).ok_or_else(many)?;
    let len = dtype.row_bytes(*row).and_then(|row_bytes| n_row.checked_mul(row_bytes)).ok_or_else(many)?;
    Ok((shape, len))
}

/// Returns a tensor of an unsupported type.
fn foreign(name: String, axes: &[u64], type_id: u32, file: usize) -> Unreadable {
    let (dtype, why) = match FOREIGN_TYPES.iter().find(|(foreign, _)| *foreign == type_id) {
        Some((_, dtype)) => (dtype.to_string(), format!("type {dtype} ({type_id}) is not supported")),
        None => (format!("type {type_id}"), format!("type {type_id} is unknown")),
    };
    let shape = axes.iter().map(|&axis| usize::try_from(axis).unwrap_or(usize::MAX)).collect();
    Unreadable { name, dtype, shape, file, why }
}

/// Unsupported types that GGUF files may hold, for the message.
const FOREIGN_TYPES: [(u32, &str); 18] = [
    (4, "Q4_2 (removed from GGUF)"),
    (5, "Q4_3 (removed from GGUF)"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (31, "Q4_0_4_4 (removed from GGUF)"),
    (32, "Q4_0_4_8 (removed from GGUF)"),
    (33, "Q4_0_8_8 (removed from GGUF)"),
    (36, "IQ4_NL_4_4 (removed from GGUF)"),
    (37, "IQ4_NL_4_8 (removed from GGUF)"),
    (38, "IQ4_NL_8_8 (removed from GGUF)"),
    (40, "NVFP4"),
    (41, "Q1_0"),
    (42, "Q2_0"),
];

/// Turns offsets in the data section into offsets in the file, and checks that each tensor lies inside the file and
/// overlaps no other.
fn place(
    file: &str,
    file_bytes: usize,
    header_bytes: usize,
    alignment: usize,
    tensors: &mut [TensorInfo],
) -> Result<(), Error> {
    // No overflow: the header lies in memory, and the alignment is at most 1 MiB.
    let data = header_bytes.next_multiple_of(alignment);
    for tensor in tensors.iter_mut() {
        let held = tensor.offset.checked_add(data).and_then(|begin| Some((begin, file_bytes.checked_sub(begin)?)));
        match held {
            Some((begin, held)) if held >= tensor.len => tensor.offset = begin,
            _ => {
                let (held, dtype) = (held.map_or(0, |(_, held)| held), tensor.dtype.name());
                let (shape, len) = (&tensor.shape, tensor.len);
                let what = format!("file holds {held} bytes, {dtype} {shape:?} needs {len}");
                return Err(Error::tensor(file, &tensor.name, what));
            }
        }
    }
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_unstable_by_key(|tensor| tensor.offset);
    for pair in by_offset.windows(2) {
        if pair[0].offset + pair[0].len > pair[1].offset {
            let (first, second) = (&pair[0].name, &pair[1].name);
            return Err(Error::tensor(
                file,
                second,
                format!("shares bytes with tensor {}", printable(first.as_bytes())),
            ));
        }
    }
    Ok(())
}
