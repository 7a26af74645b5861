//! Metadata values: numbers, texts and arrays, kept as the file encodes them.
//!
//! Arrays are not copied from the mapping; a vocabulary of 150,000 tokens costs one offset per token. This file knows
//! the encoding of values, but no keys, no headers and not what a value is for.

use std::fmt;

use crate::bytes::Slice;
use crate::error::printable;

/// The kinds of metadata values, with GGUF's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum ValueKind {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    Str = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Str,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// Returns the kind with that number in a GGUF file.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.get(id as usize).copied()
    }

    /// Returns the name used in messages: `u32`, `str`, `array`.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::Str => "str",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }

    /// Bytes of one value: exact for numbers and bool, the minimum for texts (length) and arrays (kind, count).
    pub(crate) fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::Str | Self::U64 | Self::I64 | Self::F64 => 8,
            Self::Array => 12,
        }
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(Text),
    U64(u64),
    I64(i64),
    F64(f64),
    /// An array of numbers or bools.
    Numbers(Numbers),
    /// An array of texts.
    Strings(Strings),
    /// An array of arrays.
    Nested(Vec<Value>),
}

impl Value {
    /// Kind of the value; every array is [`ValueKind::Array`].
    pub fn kind(&self) -> ValueKind {
        match self {
            Self::U8(_) => ValueKind::U8,
            Self::I8(_) => ValueKind::I8,
            Self::U16(_) => ValueKind::U16,
            Self::I16(_) => ValueKind::I16,
            Self::U32(_) => ValueKind::U32,
            Self::I32(_) => ValueKind::I32,
            Self::F32(_) => ValueKind::F32,
            Self::Bool(_) => ValueKind::Bool,
            Self::Str(_) => ValueKind::Str,
            Self::U64(_) => ValueKind::U64,
            Self::I64(_) => ValueKind::I64,
            Self::F64(_) => ValueKind::F64,
            Self::Numbers(_) | Self::Strings(_) | Self::Nested(_) => ValueKind::Array,
        }
    }

    /// Returns the value as an integer of any width; `None` for anything but an integer.
    pub fn to_int(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(v) => v.into(),
            Self::I8(v) => v.into(),
            Self::U16(v) => v.into(),
            Self::I16(v) => v.into(),
            Self::U32(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U64(v) => v.into(),
            Self::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// Returns the value as an f32; `None` for anything but f32 and f64.
    pub fn to_f32(&self) -> Option<f32> {
        match *self {
            Self::F32(v) => Some(v),
            Self::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    /// Returns the value as a number, rounded to f32; `None` for bools, texts and arrays. JSON writers mix `1` and
    /// `1.0`, so an integer is a valid float.
    pub fn to_number(&self) -> Option<f32> {
        self.to_f32().or_else(|| self.to_int().map(|v| v as f32))
    }

    /// Returns the value in a few words, for messages: `u32 7`, `str "gpt2"`, `array of 8192 str`.
    pub fn describe(&self) -> String {
        match self {
            Self::Str(text) => format!("str \"{}\"", printable(text)),
            Self::Numbers(array) => format!("array of {} {}", array.len(), array.element().name()),
            Self::Strings(array) => format!("array of {} str", array.len()),
            Self::Nested(array) => format!("array of {} array", array.len()),
            scalar => format!("{} {scalar}", scalar.kind().name()),
        }
    }

    /// Returns a number or bool from its encoding; `bytes` holds exactly one, and bools were checked to be 0 or 1.
    pub(crate) fn decode(kind: ValueKind, bytes: &[u8]) -> Option<Self> {
        Some(match kind {
            ValueKind::U8 => Self::U8(*bytes.first()?),
            ValueKind::I8 => Self::I8(i8::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::U16 => Self::U16(u16::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::I16 => Self::I16(i16::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::U32 => Self::U32(u32::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::I32 => Self::I32(i32::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::F32 => Self::F32(f32::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::Bool => Self::Bool(*bytes.first()? != 0),
            ValueKind::U64 => Self::U64(u64::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::I64 => Self::I64(i64::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::F64 => Self::F64(f64::from_le_bytes(bytes.try_into().ok()?)),
            ValueKind::Str | ValueKind::Array => return None,
        })
    }
}

impl fmt::Display for Value {
    /// Scalars in full, texts quoted and cut to a line, arrays by their first elements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        fn list<T: fmt::Display>(
            f: &mut fmt::Formatter<'_>,
            len: usize,
            items: impl Iterator<Item = T>,
        ) -> fmt::Result {
            f.write_str("[")?;
            for (i, item) in items.take(SHOWN).enumerate() {
                write!(f, "{}{item}", if i == 0 { "" } else { ", " })?;
            }
            if len > SHOWN {
                write!(f, ", … {len} in all")?;
            }
            f.write_str("]")
        }
        match self {
            Self::U8(v) => v.fmt(f),
            Self::I8(v) => v.fmt(f),
            Self::U16(v) => v.fmt(f),
            Self::I16(v) => v.fmt(f),
            Self::U32(v) => v.fmt(f),
            Self::I32(v) => v.fmt(f),
            Self::F32(v) => v.fmt(f),
            Self::Bool(v) => v.fmt(f),
            Self::U64(v) => v.fmt(f),
            Self::I64(v) => v.fmt(f),
            Self::F64(v) => v.fmt(f),
            Self::Str(text) => write!(f, "\"{}\"", printable(text)),
            Self::Numbers(array) => list(f, array.len(), array.iter()),
            Self::Strings(array) => list(f, array.len(), array.iter().map(|s| format!("\"{}\"", printable(s)))),
            Self::Nested(array) => list(f, array.len(), array.iter()),
        }
    }
}

/// A text: bytes that should be UTF-8.
#[derive(Clone)]
pub struct Text(pub(crate) Slice);

impl Text {
    /// Returns the text, if it is UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(&self.0).ok()
    }
}

impl std::ops::Deref for Text {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", printable(self))
    }
}

impl PartialEq for Text {
    fn eq(&self, other: &Self) -> bool {
        self.0[..] == other.0[..]
    }
}

/// An array of numbers or bools, decoded on access.
#[derive(Clone)]
pub struct Numbers {
    element: ValueKind,
    data: Slice, // len · element.min_bytes(), little endian
}

impl Numbers {
    /// `element` is neither `Str` nor `Array`, `data` holds whole elements, and bools are 0 or 1.
    pub(crate) fn new(element: ValueKind, data: Slice) -> Self {
        Self { element, data }
    }

    /// Kind of the elements.
    pub fn element(&self) -> ValueKind {
        self.element
    }

    /// Count of elements.
    pub fn len(&self) -> usize {
        self.data.len() / self.element.min_bytes()
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// The elements, each as a scalar value.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Value> + '_ {
        let element = self.element;
        self.data.chunks_exact(element.min_bytes()).map(move |bytes| {
            // `new` was given a kind of fixed size and the chunks have that size.
            Value::decode(element, bytes).expect("a number decodes from a chunk of its size")
        })
    }

    /// Returns the encoded elements.
    pub(crate) fn encoded(&self) -> &[u8] {
        &self.data
    }
}

impl fmt::Debug for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.len(), self.element.name())
    }
}

impl PartialEq for Numbers {
    fn eq(&self, other: &Self) -> bool {
        self.element == other.element && self.data[..] == other.data[..]
    }
}

/// An array of texts. The texts are bytes: tokens are not always UTF-8.
#[derive(Clone)]
pub struct Strings {
    data: Slice, // each text: length as u64, then its bytes
    // [len + 1]; text i is data[starts[i]..starts[i + 1] - 8], the 8 being the length that precedes the next text.
    starts: Vec<usize>,
}

impl Strings {
    /// `starts[i]` is where text `i` begins in `data`, after its length; a last start is `data.len() + 8`.
    pub(crate) fn new(data: Slice, starts: Vec<usize>) -> Self {
        debug_assert!(starts.last() == Some(&(data.len() + 8)));
        Self { data, starts }
    }

    /// Count of texts.
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns whether there are no texts.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Text `i`.
    ///
    /// # Panics
    /// When `i` is not below [`Strings::len`].
    pub fn get(&self, i: usize) -> &[u8] {
        &self.data[self.starts[i]..self.starts[i + 1] - 8]
    }

    /// The texts in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> + '_ {
        (0..self.len()).map(|i| self.get(i))
    }

    /// Returns the encoded texts.
    pub(crate) fn encoded(&self) -> &[u8] {
        &self.data
    }
}

impl<T: AsRef<[u8]>> FromIterator<T> for Strings {
    fn from_iter<I: IntoIterator<Item = T>>(texts: I) -> Self {
        let (mut data, mut starts) = (Vec::new(), Vec::new());
        for text in texts {
            let text = text.as_ref();
            data.extend((text.len() as u64).to_le_bytes());
            starts.push(data.len());
            data.extend(text);
        }
        starts.push(data.len() + 8);
        Self::new(Slice::owned(data), starts)
    }
}

impl fmt::Debug for Strings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} str", self.len())
    }
}

impl PartialEq for Strings {
    fn eq(&self, other: &Self) -> bool {
        self.data[..] == other.data[..]
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Str(Text(Slice::owned(text.as_bytes().to_vec())))
    }
}

impl From<&[u8]> for Value {
    /// Returns a text that need not be UTF-8.
    fn from(text: &[u8]) -> Self {
        Self::Str(Text(Slice::owned(text.to_vec())))
    }
}

impl From<bool> for Value {
    fn from(v: bool) -> Self {
        Self::Bool(v)
    }
}

impl From<Vec<bool>> for Value {
    fn from(v: Vec<bool>) -> Self {
        Self::Numbers(Numbers::new(ValueKind::Bool, Slice::owned(v.into_iter().map(u8::from).collect())))
    }
}

impl From<Strings> for Value {
    fn from(v: Strings) -> Self {
        Self::Strings(v)
    }
}

impl From<Vec<&str>> for Value {
    fn from(v: Vec<&str>) -> Self {
        Self::Strings(v.into_iter().collect())
    }
}

macro_rules! from_numbers {
    ($($number:ty => $kind:ident),+ $(,)?) => {$(
        impl From<$number> for Value {
            fn from(v: $number) -> Self {
                Self::$kind(v)
            }
        }

        impl From<Vec<$number>> for Value {
            fn from(v: Vec<$number>) -> Self {
                let data = v.iter().flat_map(|v| v.to_le_bytes()).collect();
                Self::Numbers(Numbers::new(ValueKind::$kind, Slice::owned(data)))
            }
        }
    )+};
}

from_numbers! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32,
    f32 => F32, u64 => U64, i64 => I64, f64 => F64,
}
