//! `config.json` as [`Metadata`]: objects flattened with dots, as GGUF's keys are written.
//!
//! `{"rope_parameters": {"rope_theta": 1e6}}` is the key `rope_parameters.rope_theta`; `null` is an absent key. Arrays
//! of one kind of scalar are arrays, integers among floats becoming floats; the elements of any other array get
//! separate keys, `key.0`, `key.1`. Keys of `text_config` are copied to the top level unless they exist there:
//! multimodal models keep the language model's numbers in it. `NaN` and `Infinity` are numbers, as Python writes them.
//! Knows no other key.

use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use crate::error::printable;
use crate::python_json::replace_numbers;
use crate::value::{Strings, Value, ValueKind};
use crate::{Error, Metadata};

/// Largest `config.json`, in bytes: that of a large model with a line for every quantized tensor has 1 MB.
const MAX_BYTES: usize = 16 << 20;
/// Maximum nesting of objects and arrays.
const MAX_DEPTH: usize = 8;
/// Maximum length of a flattened key, in bytes.
const MAX_KEY: usize = 512;
/// Maximum number of keys. Every element of an array counts while it is read.
const MAX_KEYS: usize = 100_000;
/// The object whose keys are copied to the top level.
const TEXT: &str = "text_config";

/// Reads the text of a config; `file` names it in errors.
pub(super) fn metadata(file: &str, text: &[u8]) -> Result<Metadata, Error> {
    if text.len() > MAX_BYTES {
        let what = format!("is {} bytes long, at most {MAX_BYTES} are allowed", text.len());
        return Err(Error::file(file, what));
    }
    let text = replace_numbers(text, |name| match name {
        "NaN" => b"\"\\u0000NaN\"",
        "Infinity" => b"\"\\u0000Infinity\"",
        _ => b"\"\\u0000-Infinity\"",
    });
    let mut entries = Vec::new();
    let mut json = serde_json::Deserializer::from_slice(&text);
    let read = Top(&mut entries).deserialize(&mut json).and_then(|()| json.end());
    read.map_err(|error| Error::file(file, super::json_error(&error)))?;
    lift_text(&mut entries);
    Metadata::new(file, entries)
}

/// Copies the keys under `text_config` to the top level. An object that exists there hides the whole object of that
/// name: two halves of `rope_parameters` must not mix.
fn lift_text(entries: &mut Vec<(String, Value)>) {
    let top: HashSet<String> = entries.iter().map(|(key, _)| first(key).to_string()).collect();
    let prefix = format!("{TEXT}.");
    let lifted = entries.iter().filter_map(|(key, value)| {
        let key = key.strip_prefix(&prefix)?;
        (!top.contains(first(key))).then(|| (key.to_string(), value.clone()))
    });
    let lifted: Vec<_> = lifted.collect();
    entries.extend(lifted);
}

fn first(key: &str) -> &str {
    key.split_once('.').map_or(key, |(first, _)| first)
}

type Entries = Vec<(String, Value)>;

/// The whole text: an object.
struct Top<'a>(&'a mut Entries);

impl<'de> DeserializeSeed<'de> for Top<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(Node { out: self.0, path: String::new(), depth: 0 })
    }
}

/// A value at a path, appended to `out` as one entry or several.
struct Node<'a> {
    out: &'a mut Entries,
    path: String,
    depth: usize,
}

impl Node<'_> {
    /// Returns the child at `key`.
    fn child<E: serde::de::Error>(&mut self, key: &str) -> Result<Node<'_>, E> {
        let dot = if self.path.is_empty() { "" } else { "." };
        let path = format!("{}{dot}{key}", self.path);
        let path_shown = || printable(path.as_bytes());
        if self.depth >= MAX_DEPTH {
            return Err(E::custom(format!("key {}: nests more than {MAX_DEPTH} deep", path_shown())));
        }
        if path.len() > MAX_KEY {
            let len = path.len();
            return Err(E::custom(format!("key {}: is {len} bytes long, at most {MAX_KEY} are allowed", path_shown())));
        }
        if self.out.len() >= MAX_KEYS {
            return Err(E::custom(format!("key {}: comes after {MAX_KEYS} others, the maximum", path_shown())));
        }
        Ok(Node { out: self.out, path, depth: self.depth + 1 })
    }

    fn push(self, value: Value) {
        self.out.push((self.path, value));
    }
}

impl<'de> DeserializeSeed<'de> for Node<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, v: bool) -> Result<(), E> {
        self.push(v.into());
        Ok(())
    }

    fn visit_i64<E>(self, v: i64) -> Result<(), E> {
        self.push(v.into());
        Ok(())
    }

    fn visit_u64<E>(self, v: u64) -> Result<(), E> {
        self.push(i64::try_from(v).map_or_else(|_| v.into(), Value::from));
        Ok(())
    }

    fn visit_f64<E>(self, v: f64) -> Result<(), E> {
        self.push(v.into());
        Ok(())
    }

    fn visit_str<E>(self, v: &str) -> Result<(), E> {
        // Numbers that JSON lacks came as texts that begin with NUL.
        self.push(match v {
            "\0NaN" => f64::NAN.into(),
            "\0Infinity" => f64::INFINITY.into(),
            "\0-Infinity" => f64::NEG_INFINITY.into(),
            v => v.into(),
        });
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(Key(key)) = map.next_key()? {
            map.next_value_seed(self.child(&key)?)?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        let start = self.out.len();
        let mut n = 0;
        // Every element gets a separate key until all have been read.
        while seq.next_element_seed(self.child(&n.to_string())?)?.is_some() {
            n += 1;
        }
        // A `null` element has left no entry, an object entries of longer paths.
        let own = |key: &str| key.get(self.path.len() + 1..).is_some_and(|rest| !rest.contains('.'));
        let whole = self.out.len() - start == n && self.out[start..].iter().all(|(key, _)| own(key));
        let elements: Vec<&Value> = self.out[start..].iter().map(|(_, value)| value).collect();
        if let Some(array) = whole.then(|| array(&elements)).flatten() {
            self.out.truncate(start);
            self.push(array);
        }
        Ok(())
    }
}

/// Returns the array of these elements; `None` when they are of several kinds.
fn array(elements: &[&Value]) -> Option<Value> {
    let all = |wanted: &[ValueKind]| elements.iter().all(|v| wanted.contains(&v.kind()));
    if elements.is_empty() {
        return Some(Vec::<&str>::new().into());
    }
    if all(&[ValueKind::Bool]) {
        return Some(elements.iter().map(|v| matches!(v, Value::Bool(true))).collect::<Vec<_>>().into());
    }
    if all(&[ValueKind::I64]) {
        let ints = elements.iter().map(|v| i64::try_from(v.to_int()?).ok());
        return Some(ints.collect::<Option<Vec<_>>>()?.into());
    }
    if all(&[ValueKind::I64, ValueKind::F64]) {
        let floats = elements.iter().map(|v| match v {
            Value::F64(v) => *v,
            v => v.to_int().unwrap_or_default() as f64,
        });
        return Some(floats.collect::<Vec<_>>().into());
    }
    if all(&[ValueKind::Str]) {
        let texts = elements.iter().map(|v| if let Value::Str(text) = v { &text[..] } else { &[] });
        return Some(texts.collect::<Strings>().into());
    }
    all(&[ValueKind::Array]).then(|| Value::Nested(elements.iter().map(|&v| v.clone()).collect()))
}

/// A key of an object, of a valid length.
struct Key(String);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        let key = std::borrow::Cow::<str>::deserialize(json)?;
        match key.is_empty() {
            true => Err(D::Error::custom("a key is empty")),
            false => Ok(Self(key.into_owned())),
        }
    }
}
