//! Python's way with values where it shows in a prompt: `str()`, `repr()`, `json.dumps`, slices, arithmetic on mixed
//! types. Every text is written under the budget of the render ([`super::bounds`]).

use std::fmt::Write;

use minijinja::value::{Kwargs, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::bounds;

/// Longest indent of `tojson`, in bytes: it is written once a level and item.
const MAX_INDENT: usize = 64;

fn bad(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text.into())
}

/// `str(value)`; undefined is empty, as in jinja2.
pub fn to_str(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.as_str() {
        Some(s) => out.push_str(s),
        None if value.is_undefined() => {}
        None => write_repr(value, &mut out, 0)?,
    }
    bounds::charge_string(out.len())?;
    Ok(out)
}

/// `repr(value)` without a budget for the outermost text; containers pay per node.
fn write_repr(value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
    if depth > bounds::MAX_DEPTH {
        return Err(bounds::over(format!("the template nests values deeper than {}", bounds::MAX_DEPTH)));
    }
    if out.len() > bounds::max_string() {
        bounds::charge_string(out.len())?;
    }
    bounds::charge(8)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => write_number(value, out),
        ValueKind::String => write_repr_str(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            let mut n = 0;
            for item in value.try_iter()? {
                if n > 0 {
                    out.push_str(", ");
                }
                write_repr(&item, out, depth + 1)?;
                n += 1;
            }
            out.push_str(match (tuple, n) {
                (true, 1) => ",)",
                (true, _) => ")",
                _ => "]",
            });
        }
        ValueKind::Map => {
            out.push('{');
            for (n, key) in value.try_iter()?.enumerate() {
                if n > 0 {
                    out.push_str(", ");
                }
                write_repr(&key, out, depth + 1)?;
                out.push_str(": ");
                write_repr(&value.get_item(&key)?, out, depth + 1)?;
            }
            out.push('}');
        }
        _ => write!(out, "{value}").map_err(|_| bad("a value could not be printed"))?,
    }
    Ok(())
}

/// The number behind a value: bool counts as int, as in Python.
#[derive(Clone, Copy)]
enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    fn of(value: &Value) -> Option<Number> {
        match value.kind() {
            ValueKind::Bool => Some(Number::Int(value.is_true().into())),
            ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok().map(Number::Int),
            ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
            _ => None,
        }
    }

    fn float(self) -> f64 {
        match self {
            Number::Int(i) => i as f64,
            Number::Float(f) => f,
        }
    }
}

fn int_value(i: i128) -> Value {
    i64::try_from(i).map_or_else(|_| Value::from(i), Value::from)
}

fn write_number(value: &Value, out: &mut String) {
    match Number::of(value) {
        Some(Number::Float(f)) => out.push_str(&float_repr(f)),
        Some(Number::Int(i)) => out.push_str(&i.to_string()),
        None => out.push_str(&value.to_string()),
    }
}

/// `repr(float)`: the shortest digits that read back the same, in scientific form below 1e-4 and from 1e16 on.
pub fn float_repr(f: f64) -> String {
    if f.is_nan() {
        return "nan".into();
    }
    if f.is_infinite() {
        return if f > 0.0 { "inf" } else { "-inf" }.into();
    }
    let sci = format!("{f:e}");
    let (digits, exp) = sci.split_once('e').unwrap_or((&sci, "0"));
    let exp: i32 = exp.parse().unwrap_or(0);
    if f != 0.0 && !(-4..16).contains(&exp) {
        format!("{digits}e{}{:02}", if exp < 0 { '-' } else { '+' }, exp.abs())
    } else {
        format!("{f:?}")
    }
}

fn write_repr_str(s: &str, out: &mut String) {
    let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in s.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if (c as u32) < 0x20 || (0x7f..=0xa0).contains(&(c as u32)) || c == '\u{ad}' => {
                out.push_str(&format!("\\x{:02x}", c as u32));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// How `json.dumps` writes.
pub struct Json {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort: bool,
}

impl Json {
    /// From the keyword arguments of transformers' `tojson`: ensure_ascii, indent, separators, sort_keys.
    pub fn from_kwargs(kw: &Kwargs) -> Result<Json, Error> {
        let indent = match kw.get::<Option<Value>>("indent")? {
            None => None,
            Some(v) if v.is_none() || v.is_undefined() => None,
            Some(v) => Some(match v.as_str() {
                Some(s) if s.len() > MAX_INDENT => return Err(bad("tojson: the indent is longer than 64 bytes")),
                Some(s) => s.to_owned(),
                None => " ".repeat(
                    v.as_i64().ok_or_else(|| bad("tojson: indent is not a number"))?.clamp(0, MAX_INDENT as i64)
                        as usize,
                ),
            }),
        };
        let (mut item, mut key) = (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned());
        if let Some(v) = kw.get::<Option<Value>>("separators")?.filter(|v| !v.is_none()) {
            bounds::touch_value(&v)?;
            let pair: Vec<Value> = v.try_iter()?.take(3).collect();
            match pair.as_slice() {
                [i, k] => (item, key) = (to_str(i)?, to_str(k)?),
                _ => return Err(bad("tojson: separators is not a pair")),
            }
        }
        let flag = |name| Ok::<bool, Error>(kw.get::<Option<Value>>(name)?.is_some_and(|v| v.is_true()));
        Ok(Json { ascii: flag("ensure_ascii")?, indent, item, key, sort: flag("sort_keys")? })
    }

    /// `json.dumps(value)`.
    pub fn dumps(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(value, &mut out, 0)?;
        bounds::charge_string(out.len())?;
        Ok(out)
    }

    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn write(&self, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        if depth > bounds::MAX_DEPTH {
            return Err(bounds::over(format!("the template nests values deeper than {}", bounds::MAX_DEPTH)));
        }
        if out.len() > bounds::max_string() {
            bounds::charge_string(out.len())?;
        }
        bounds::charge(8)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => match Number::of(value) {
                Some(Number::Float(f)) if f.is_nan() => out.push_str("NaN"),
                Some(Number::Float(f)) if f.is_infinite() => {
                    out.push_str(if f > 0.0 { "Infinity" } else { "-Infinity" });
                }
                _ => write_number(value, out),
            },
            ValueKind::String => self.write_str(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                out.push('[');
                let mut n = 0;
                for item in value.try_iter()? {
                    if n > 0 {
                        out.push_str(&self.item);
                    }
                    self.line(out, depth + 1);
                    self.write(&item, out, depth + 1)?;
                    n += 1;
                }
                if n > 0 {
                    self.line(out, depth);
                }
                out.push(']');
            }
            ValueKind::Map => {
                let mut keys = items(value)?;
                if self.sort {
                    let paid = bounds::walk(value)?;
                    bounds::touch(paid.saturating_mul(keys.len().max(2).ilog2() as usize))?;
                    keys.sort();
                }
                out.push('{');
                for (n, key) in keys.iter().enumerate() {
                    if n > 0 {
                        out.push_str(&self.item);
                    }
                    self.line(out, depth + 1);
                    match key.kind() {
                        ValueKind::String => self.write_str(key.as_str().unwrap_or_default(), out),
                        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                            out.push('"');
                            self.write(key, out, depth + 1)?;
                            out.push('"');
                        }
                        kind => return Err(bad(format!("tojson: a key is {kind}, not a string"))),
                    }
                    out.push_str(&self.key);
                    self.write(&value.get_item(key)?, out, depth + 1)?;
                }
                if !keys.is_empty() {
                    self.line(out, depth);
                }
                out.push('}');
            }
            kind => return Err(bad(format!("tojson: a value of type {kind} has no JSON form"))),
        }
        Ok(())
    }

    fn write_str(&self, s: &str, out: &mut String) {
        out.push('"');
        for c in s.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ascii && !c.is_ascii()) || (self.ascii && c == '\u{7f}') => {
                    if c == '\u{7f}' {
                        out.push(c);
                        continue;
                    }
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn is_list(v: &Value) -> bool {
    matches!(v.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn unsupported(op: &str, a: &Value, b: &Value) -> Error {
    bad(format!("{op} does not take {} and {}", a.kind(), b.kind()))
}

/// Returns the items of a list, the keys of a mapping or the characters of a string, each paid for.
pub fn items(value: &Value) -> Result<Vec<Value>, Error> {
    let mut items = Vec::new();
    bounds::touch_value(value)?;
    for item in value.try_iter()? {
        bounds::charge_items(1)?;
        items.push(item);
    }
    Ok(items)
}

/// `a + b`.
pub fn add(a: Value, b: Value) -> Result<Value, Error> {
    if let (Some(x), Some(y)) = (a.as_str(), b.as_str()) {
        bounds::charge_string(x.len() + y.len())?;
        return Ok(Value::from([x, y].concat()));
    }
    if is_list(&a) && is_list(&b) {
        let mut both = items(&a)?;
        both.extend(items(&b)?);
        return Ok(match a.is_tuple() && b.is_tuple() {
            true => Value::from(Tuple::from(both)),
            false => Value::from(both),
        });
    }
    match (Number::of(&a), Number::of(&b)) {
        (Some(Number::Int(x)), Some(Number::Int(y))) => {
            x.checked_add(y).map(int_value).ok_or_else(|| bad("+ overflows"))
        }
        (Some(x), Some(y)) => Ok(Value::from(x.float() + y.float())),
        _ => Err(unsupported("+", &a, &b)),
    }
}

/// `a * b`, also of a string or a list with a count.
pub fn mul(a: Value, b: Value) -> Result<Value, Error> {
    let (thing, count) = if Number::of(&a).is_some() { (&b, &a) } else { (&a, &b) };
    match (Number::of(thing), Number::of(count)) {
        (Some(Number::Int(x)), Some(Number::Int(y))) => {
            x.checked_mul(y).map(int_value).ok_or_else(|| bad("* overflows"))
        }
        (Some(x), Some(y)) => Ok(Value::from(x.float() * y.float())),
        (None, Some(Number::Int(n))) => {
            let n = usize::try_from(n.max(0)).unwrap_or(usize::MAX);
            if let Some(s) = thing.as_str() {
                bounds::charge_string(s.len().saturating_mul(n))?;
                Ok(Value::from(s.repeat(n)))
            } else if is_list(thing) {
                let items = items(thing)?;
                bounds::charge_items(items.len().saturating_mul(n))?;
                let n = if items.is_empty() { 0 } else { n };
                let all: Vec<Value> = std::iter::repeat_n(&items, n).flat_map(|items| items.iter().cloned()).collect();
                Ok(if thing.is_tuple() { Value::from(Tuple::from(all)) } else { Value::from(all) })
            } else {
                Err(unsupported("*", &a, &b))
            }
        }
        _ => Err(unsupported("*", &a, &b)),
    }
}

/// `a % b` of numbers, with the sign of the divisor; of a string, printf-style formatting with `%s`, `%d` and `%%`.
pub fn rem(a: Value, b: Value) -> Result<Value, Error> {
    if let Some(format) = a.as_str() {
        let args = if b.is_tuple() { items(&b)? } else { vec![b] };
        return printf(format, &args).map(Value::from);
    }
    match (Number::of(&a), Number::of(&b)) {
        (Some(_), Some(y)) if y.float() == 0.0 => Err(bad("division by zero")),
        (Some(Number::Int(x)), Some(Number::Int(y))) => {
            let r = x.checked_rem(y).unwrap_or(0);
            Ok(int_value(if r != 0 && (r < 0) != (y < 0) { r + y } else { r }))
        }
        (Some(x), Some(y)) => {
            let (x, y) = (x.float(), y.float());
            let r = x % y;
            Ok(Value::from(if r != 0.0 && (r < 0.0) != (y < 0.0) { r + y } else { r }))
        }
        _ => Err(unsupported("%", &a, &b)),
    }
}

/// `format % args` for the conversions a prompt needs: `%s`, `%r`, `%d`, `%%`. Widths are not taken.
pub fn printf(format: &str, args: &[Value]) -> Result<String, Error> {
    let mut out = String::new();
    let mut args = args.iter();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let conversion = chars.next().ok_or_else(|| bad("incomplete format"))?;
        if conversion == '%' {
            out.push('%');
            continue;
        }
        let arg = args.next().ok_or_else(|| bad("not enough arguments for format string"))?;
        match conversion {
            's' => out.push_str(&to_str(arg)?),
            'r' => write_repr(arg, &mut out, 0)?,
            'd' | 'i' => match Number::of(arg) {
                Some(Number::Int(i)) => out.push_str(&i.to_string()),
                Some(Number::Float(f)) => out.push_str(&format!("{:.0}", f.trunc())),
                None => return Err(bad("%d format: a number is required")),
            },
            c => return Err(bad(format!("unsupported format character '{c}'"))),
        }
        bounds::charge_string(out.len())?;
    }
    bounds::charge_string(out.len())?;
    Ok(out)
}

/// `a ~ b`.
pub fn concat(a: Value, b: Value) -> Result<Value, Error> {
    let (x, y) = (to_str(&a)?, to_str(&b)?);
    bounds::charge_string(x.len() + y.len())?;
    Ok(Value::from(x + &y))
}

/// Pays for a comparison of two values, whatever it is.
///
/// # Errors
/// A value nests too deeply, or the budget is used up.
pub fn pay_comparison(a: &Value, b: &Value) -> Result<(), Error> {
    match (a.as_str(), b.as_str()) {
        (Some(x), Some(y)) => bounds::touch(bounds::ITEM_BYTES + x.len().min(y.len())),
        (None, None) => {
            bounds::walk(a)?;
            bounds::walk(b).map(drop)
        }
        // A text and what is none differ by their kind.
        _ => bounds::touch(bounds::ITEM_BYTES),
    }
}

/// `a == b`, paid for.
pub fn equal(a: &Value, b: &Value) -> Result<bool, Error> {
    pay_comparison(a, b)?;
    Ok(a == b)
}

/// `item in container`.
pub fn contains(item: &Value, container: &Value) -> Result<bool, Error> {
    bounds::walk(item)?;
    if container.is_undefined() {
        return Ok(false);
    }
    if let Some(text) = container.as_str() {
        let part = item.as_str().ok_or_else(|| bad(format!("in: a string holds strings, not {}", item.kind())))?;
        bounds::touch(text.len())?;
        return Ok(text.contains(part));
    }
    match container.kind() {
        ValueKind::Map => Ok(container.as_object().is_some_and(|o| o.get_value(item).is_some())),
        ValueKind::Seq | ValueKind::Iterable => {
            for x in container.try_iter()? {
                if equal(&x, item)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        kind => Err(bad(format!("in: {kind} is not a container"))),
    }
}

/// `value[start:stop:step]` of a string, list or tuple.
pub fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let bound = |v: &Value| match Number::of(v) {
        Some(Number::Int(i)) => Ok(Some(i)),
        None if v.is_none() || v.is_undefined() => Ok(None),
        _ => Err(bad(format!("slice: {} is not an index", v.kind()))),
    };
    let step = bound(step)?.unwrap_or(1);
    if step == 0 {
        return Err(bad("slice: the step is zero"));
    }
    let (start, stop) = (bound(start)?, bound(stop)?);
    let pick = |len: usize| {
        // Python's slice.indices.
        let n = len as i128;
        let (low, high) = if step < 0 { (-1, n - 1) } else { (0, n) };
        let clamp = |i: i128| if i < 0 { i.saturating_add(n).max(low) } else { i.min(high) };
        let from = start.map_or(if step < 0 { high } else { low }, clamp);
        let to = stop.map_or(if step < 0 { low } else { high }, clamp);
        let mut at = from;
        std::iter::from_fn(move || {
            let more = if step < 0 { at > to } else { at < to };
            let now = at;
            at = at.saturating_add(step);
            more.then_some(now as usize)
        })
    };
    if let Some(s) = value.as_str() {
        bounds::charge_string(s.len())?;
        let chars: Vec<char> = s.chars().collect();
        return Ok(Value::from(pick(chars.len()).map(|i| chars[i]).collect::<String>()));
    }
    if !is_list(value) {
        return Err(bad(format!("slice: {} cannot be sliced", value.kind())));
    }
    let items = items(value)?;
    let picked: Vec<Value> = pick(items.len()).map(|i| items[i].clone()).collect();
    Ok(if value.is_tuple() { Value::from(Tuple::from(picked)) } else { Value::from(picked) })
}
