//! Python's methods of strings, and the helpers that filters share with them. All text is read and built under the
//! budget of the render ([`super::bounds`]).

use std::collections::HashSet;

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::{bounds, lists, python};

fn bad(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text.into())
}

/// Returns a method of `str`; `None` where Python has none of that name, or it is not one of ours.
pub fn string_method(s: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let text = |i: usize| -> Result<Option<&str>, Error> {
        match args.get(i).filter(|v| !v.is_none() && v.kind() != ValueKind::Map) {
            None => Ok(None),
            Some(v) => v.as_str().map(Some).ok_or_else(|| bad(format!("{name}: argument is not a string"))),
        }
    };
    let need = |i: usize| text(i)?.ok_or_else(|| bad(format!("{name}: argument {} is missing", i + 1)));
    let number = |i: usize| args.get(i).and_then(Value::as_i64);
    let keyword = |key: &str| {
        let last = args.last().filter(|v| v.is_kwargs())?;
        last.get_attr(key).ok().filter(|v| !v.is_undefined())
    };
    let pad = |left: bool, right: bool| -> Result<Value, Error> {
        let width =
            usize::try_from(number(0).ok_or_else(|| bad(format!("{name}: the width is missing")))?).unwrap_or(0);
        let fill = text(1)?.and_then(|f| f.chars().next()).unwrap_or(' ');
        let room = width.saturating_sub(s.chars().count());
        bounds::charge_string(s.len().saturating_add(room.saturating_mul(fill.len_utf8())))?;
        let before = match (left, right) {
            // Python's center puts the odd space on the left when the width is odd.
            (true, true) => room / 2 + (room & width & 1),
            (true, false) => room,
            _ => 0,
        };
        let fill = |n: usize| fill.to_string().repeat(n);
        Ok(Value::from(fill(before) + s + &fill(room - before)))
    };
    Ok(Some(match name {
        "strip" => Value::from(strip(s, text(0)?, true, true)),
        "lstrip" => Value::from(strip(s, text(0)?, true, false)),
        "rstrip" => Value::from(strip(s, text(0)?, false, true)),
        "split" | "rsplit" => {
            let limit = number(1).or_else(|| keyword("maxsplit").and_then(|v| v.as_i64())).unwrap_or(-1);
            let sep = match keyword("sep") {
                Some(v) => v.as_str().map(str::to_owned),
                None => text(0)?.map(str::to_owned),
            };
            split(s, sep.as_deref(), limit, name == "rsplit")?
        }
        "splitlines" => splitlines(s, args.first().is_some_and(Value::is_true))?,
        "replace" => {
            let count = number(2).or_else(|| keyword("count").and_then(|v| v.as_i64())).unwrap_or(-1);
            Value::from(replace(s, need(0)?, need(1)?, count)?)
        }
        "join" => Value::from(join(s, args.first().ok_or_else(|| bad("join takes a list"))?, None)?),
        "format" => Value::from(format(s, args)?),
        "removeprefix" => Value::from(s.strip_prefix(need(0)?).unwrap_or(s)),
        "removesuffix" => Value::from(s.strip_suffix(need(0)?).unwrap_or(s)),
        "partition" | "rpartition" => {
            let sep = need(0)?;
            let found = if name == "partition" { s.split_once(sep) } else { s.rsplit_once(sep) };
            let parts = match found {
                Some((a, b)) => [a, sep, b],
                None if name == "partition" => [s, "", ""],
                None => ["", "", s],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "index" => {
            let at = s.find(need(0)?).ok_or_else(|| bad("index: substring not found"))?;
            Value::from(s[..at].chars().count())
        }
        "count" => match need(0)? {
            "" => Value::from(s.chars().count() + 1),
            part => Value::from(s.matches(part).count()),
        },
        "casefold" => Value::from(s.to_lowercase()),
        "swapcase" => {
            let mut out = String::with_capacity(s.len());
            for c in s.chars() {
                match c.is_uppercase() {
                    true => out.extend(c.to_lowercase()),
                    false => out.extend(c.to_uppercase()),
                }
            }
            Value::from(out)
        }
        "ljust" => pad(false, true)?,
        "rjust" => pad(true, false)?,
        "center" => pad(true, true)?,
        "zfill" => {
            let width = usize::try_from(number(0).unwrap_or(0)).unwrap_or(0);
            let room = width.saturating_sub(s.chars().count());
            bounds::charge_string(s.len().saturating_add(room))?;
            let (sign, digits) = s.split_at(usize::from(s.starts_with(['+', '-'])));
            Value::from([sign, &"0".repeat(room), digits].concat())
        }
        _ => return Ok(None),
    }))
}

/// Returns what `str.strip` removes by itself.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `s.strip(chars)`, on one side or on both.
pub fn strip<'a>(s: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    // A set, so that a long text of them costs no more than its length.
    let set: Option<HashSet<char>> = chars.map(|chars| chars.chars().collect());
    let drop = |c: char| set.as_ref().map_or_else(|| is_space(c), |set| set.contains(&c));
    let s = if left { s.trim_start_matches(drop) } else { s };
    if right { s.trim_end_matches(drop) } else { s }
}

/// `s.split(sep, limit)`, or `rsplit`; a limit below zero is none.
pub fn split(s: &str, sep: Option<&str>, limit: i64, from_right: bool) -> Result<Value, Error> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX - 1);
    let mut parts: Vec<&str> = match sep {
        Some("") => return Err(bad("split: empty separator")),
        Some(sep) if from_right => s.rsplitn(limit + 1, sep).collect(),
        Some(sep) => s.splitn(limit + 1, sep).collect(),
        None => {
            let mut rest = strip(s, None, !from_right, from_right);
            let mut parts = Vec::new();
            while !rest.is_empty() {
                let cut = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
                let Some(at) = cut.filter(|_| parts.len() < limit) else {
                    // With the limit reached, the untouched side of the last piece keeps its spaces.
                    parts.push(rest);
                    break;
                };
                if from_right {
                    parts.push(rest[at..].trim_start_matches(is_space));
                    rest = rest[..at].trim_end_matches(is_space);
                } else {
                    parts.push(&rest[..at]);
                    rest = rest[at..].trim_start_matches(is_space);
                }
            }
            parts
        }
    };
    if from_right {
        parts.reverse();
    }
    bounds::charge(s.len().saturating_add(parts.len().saturating_mul(2 * bounds::ITEM_BYTES)))?;
    Ok(Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>()))
}

/// `s.splitlines(keep)`.
pub fn splitlines(s: &str, keep: bool) -> Result<Value, Error> {
    let ends = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = s;
    while !rest.is_empty() {
        let at = rest.find(ends).unwrap_or(rest.len());
        let end = match &rest[at..] {
            tail if tail.starts_with("\r\n") => 2,
            tail => tail.chars().next().map_or(0, char::len_utf8),
        };
        bounds::charge(at + 2 * bounds::ITEM_BYTES)?;
        lines.push(Value::from(&rest[..if keep { at + end } else { at }]));
        rest = &rest[at + end..];
    }
    Ok(Value::from(lines))
}

/// `s.replace(old, new, count)`; a count below zero is none.
pub fn replace(s: &str, old: &str, new: &str, count: i64) -> Result<String, Error> {
    let limit = usize::try_from(count).unwrap_or(usize::MAX);
    let hits = if old.is_empty() { s.chars().count() + 1 } else { s.matches(old).count() }.min(limit);
    bounds::charge_string(s.len().saturating_add(hits.saturating_mul(new.len())))?;
    Ok(s.replacen(old, new, limit))
}

/// Returns the texts of a list, or of an attribute of its items, with a text between them.
pub fn join(sep: &str, list: &Value, attribute: Option<&str>) -> Result<String, Error> {
    let mut out = String::new();
    if list.is_undefined() {
        return Ok(out);
    }
    bounds::touch_value(list)?;
    for (n, item) in list.try_iter()?.enumerate() {
        bounds::touch(bounds::ITEM_BYTES)?;
        if n > 0 {
            out.push_str(sep);
        }
        let item = match attribute {
            Some(name) => lists::attribute(&item, name)?,
            None => item,
        };
        match item.as_str() {
            Some(s) => out.push_str(s),
            None => out.push_str(&python::to_str(&item)?),
        }
        if out.len() > bounds::max_string() {
            bounds::charge_string(out.len())?;
        }
    }
    bounds::charge_string(out.len())?;
    Ok(out)
}

/// Returns the lines of a text, each after spaces or a text.
pub fn indent(s: &str, width: Option<Value>, first: bool, blank: bool) -> Result<String, Error> {
    let by = match width {
        None => "    ".to_owned(),
        Some(v) => match v.as_str() {
            Some(s) => s.to_owned(),
            None => {
                let n = v.as_i64().map_or(0, |n| usize::try_from(n).unwrap_or(0));
                bounds::charge_string(n)?;
                " ".repeat(n)
            }
        },
    };
    bounds::charge_string(s.len().saturating_add((s.matches('\n').count() + 1).saturating_mul(by.len())))?;
    let mut out = String::new();
    for (n, line) in s.split('\n').enumerate() {
        if n > 0 {
            out.push('\n');
        }
        if (n > 0 || first) && (blank || !line.is_empty()) {
            out.push_str(&by);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `str.format`, with the widths written in the format added up first. Containers are printed as Python prints them.
pub fn format(s: &str, args: &[Value]) -> Result<String, Error> {
    if s.contains(":{") || s.contains("{{:") {
        return Err(bad("format: a width taken from an argument is not supported"));
    }
    let runs = s.split(|c: char| !c.is_ascii_digit()).filter(|r| !r.is_empty());
    let widths = runs.fold(0usize, |sum, r| sum.saturating_add(r.parse().unwrap_or(usize::MAX)));
    let mut texts = 0usize;
    let mut plain = Vec::with_capacity(args.len());
    for arg in args {
        let arg = match arg.kind() {
            ValueKind::Map if arg.is_kwargs() => arg.clone(),
            ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::Bool | ValueKind::None => {
                Value::from(python::to_str(arg)?)
            }
            _ => arg.clone(),
        };
        bounds::walk(&arg)?;
        let longest = match arg.is_kwargs() {
            true => {
                arg.try_iter()?.filter_map(|k| arg.get_item(&k).ok()).filter_map(|v| v.as_str().map(str::len)).sum()
            }
            false => arg.as_str().map_or(64, str::len),
        };
        texts = texts.saturating_add(longest);
        plain.push(arg);
    }
    let fields = s.matches('{').count();
    bounds::charge_string(s.len().saturating_add(widths).saturating_add(fields.saturating_mul(texts)))?;
    minijinja::formatting::format(minijinja::formatting::FormatStyle::StrFormat, s, &plain)
}
