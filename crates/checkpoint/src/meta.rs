//! Metadata: keys and values of a model file, with getters whose errors name the file, the key, what was found and what
//! was expected. Knows no key by name.

use std::collections::HashMap;

use crate::error::{Error, printable};
use crate::value::{Numbers, Strings, Value};

/// The metadata of a model, in file order; keys are unique.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: String,
    entries: Vec<(String, Value)>,
    by_key: HashMap<String, usize>,
}

impl Metadata {
    /// Metadata that no file holds yet; `file` names its source in errors.
    ///
    /// # Errors
    /// A key stands there twice.
    pub fn new(file: &str, entries: Vec<(String, Value)>) -> Result<Self, Error> {
        let mut by_key = HashMap::with_capacity(entries.len());
        for (i, (key, _)) in entries.iter().enumerate() {
            if by_key.insert(key.clone(), i).is_some() {
                return Err(Error::key(file, key, "is in the file twice"));
            }
        }
        Ok(Self { file: file.into(), entries, by_key })
    }

    /// Sets a key, in place of what the file says.
    pub fn set(&mut self, key: &str, value: Value) {
        match self.by_key.get(key) {
            Some(&i) => self.entries[i].1 = value,
            None => {
                self.by_key.insert(key.into(), self.entries.len());
                self.entries.push((key.into(), value));
            }
        }
    }

    /// Returns the file that the keys come from, as errors name it.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> + '_ {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&i| &self.entries[i].1)
    }

    /// Reads an optional key: absent is `None`, a value that `read` refuses is an error.
    fn opt<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(Error::WrongType {
                file: self.file.clone(),
                key: printable(key.as_bytes()),
                wanted,
                found: value.describe(),
            }),
        }
    }

    /// Turns the absence of a key into an error.
    fn need<T>(&self, key: &str, wanted: &'static str, value: Option<T>) -> Result<T, Error> {
        value.ok_or_else(|| Error::Missing { file: self.file.clone(), key: printable(key.as_bytes()), wanted })
    }
}

/// Makes both forms of each getter from one line: name of the required form, name of the optional form, the type, its
/// name in messages, and the conversion of a value.
macro_rules! getters {
    ($($(#[$doc:meta])+ $need:ident $opt:ident $type:ty, $wanted:literal, $read:expr;)+) => {
        impl Metadata {$(
            $(#[$doc])+
            ///
            /// # Errors
            /// When the key is absent or holds anything else.
            pub fn $need(&self, key: &str) -> Result<$type, Error> {
                self.need(key, $wanted, self.$opt(key)?)
            }

            $(#[$doc])+
            /// `None` when the key is absent.
            ///
            /// # Errors
            /// When the key holds anything else.
            pub fn $opt(&self, key: &str) -> Result<Option<$type>, Error> {
                self.opt(key, $wanted, $read)
            }
        )+}
    };
}

getters! {
    /// An integer of any width that fits u32.
    u32 opt_u32 u32, "u32", int;
    /// An integer of any width that fits i32.
    i32 opt_i32 i32, "i32", int;
    /// An integer of any width that fits u64.
    u64 opt_u64 u64, "u64", int;
    /// A finite number: an f32, or an f64 or an integer rounded to one.
    f32 opt_f32 f32, "finite f32", |value| value.to_number().filter(|v| v.is_finite());
    /// A bool.
    bool opt_bool bool, "bool", |value| if let Value::Bool(v) = value { Some(*v) } else { None };
    /// A text that is UTF-8.
    str opt_str &str, "UTF-8 str", |value| if let Value::Str(text) = value { text.as_str() } else { None };
    /// An array of texts, which need not be UTF-8.
    strings opt_strings &Strings, "array of str", |value| if let Value::Strings(v) = value { Some(v) } else { None };
    /// An array of f32, or of f64 or integers rounded to f32. The numbers may be infinite or NaN.
    f32s opt_f32s Vec<f32>, "array of f32", |value| elements(value, Value::to_number);
    /// An array of integers of any width that all fit i32.
    i32s opt_i32s Vec<i32>, "array of i32", |value| elements(value, int);
    /// An array of integers of any width that all fit u32.
    u32s opt_u32s Vec<u32>, "array of u32", |value| elements(value, int);
    /// An array of bools.
    bools opt_bools Vec<bool>, "array of bool",
        |value| elements(value, |v| if let Value::Bool(v) = v { Some(*v) } else { None });
}

fn int<T: TryFrom<i128>>(value: &Value) -> Option<T> {
    T::try_from(value.to_int()?).ok()
}

fn elements<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    match value {
        Value::Numbers(array) => array.iter().map(|v| read(&v)).collect(),
        // An array without elements may have been written with any element kind.
        other => is_empty_array(other).then(Vec::new),
    }
}

fn is_empty_array(value: &Value) -> bool {
    match value {
        Value::Numbers(array) => Numbers::is_empty(array),
        Value::Strings(array) => array.is_empty(),
        Value::Nested(array) => array.is_empty(),
        _ => false,
    }
}
