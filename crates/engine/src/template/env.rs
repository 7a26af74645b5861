//! The environment that chat templates expect: jinja2 as transformers sets it up, with Python's methods. Knows nothing of chats.
//!
//! After `transformers.utils.chat_template_utils`: trim_blocks, lstrip_blocks, loop controls, `tojson` as plain `json.dumps`,
//! `raise_exception`, `strftime_now`. Filters that can build more than they were given are our own, under the budget of the render.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters};

use super::{bounds, python};

fn bad(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text.into())
}

/// The whitespace rules of chat templates.
pub fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(false).build()
}

/// The environment, with limits on.
pub fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(syntax()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(bounds::MAX_FUEL));
    env.set_formatter(|out, _, value| {
        let text;
        let text = match value.as_str() {
            Some(s) => s,
            None => {
                text = python::to_str(value)?;
                &text
            }
        };
        bounds::charge_output(text.len())?;
        out.write_str(text).map_err(Error::from)
    });
    operators(&mut env);
    functions(&mut env);
    texts(&mut env);
    lists(&mut env);
    tests(&mut env);
    env.set_unknown_method_callback(method);
    Ok(env)
}

/// The functions that rewritten instructions call.
fn operators(env: &mut Environment<'static>) {
    env.add_function("charge!", |v: Value| bounds::charge_value(&v).map(|()| v));
    env.add_function("tick!", || bounds::charge(0));
    env.add_function("settable!", |v: Value| {
        // A namespace inside a namespace could hold itself, and would never be freed.
        if v.as_object().is_some_and(|o| o.type_name().ends_with("Namespace")) {
            return Err(bad("a namespace cannot be stored in a namespace"));
        }
        bounds::walk(&v, 0).map(|()| v)
    });
    env.add_function("pair!", |a: Value, b: Value| {
        bounds::walk(&a, 0)?;
        bounds::walk(&b, 0)?;
        Ok::<_, Error>(Value::from(vec![a, b]))
    });
    env.add_function("add!", python::add);
    env.add_function("mul!", python::mul);
    env.add_function("rem!", python::rem);
    env.add_function("concat!", python::concat);
    env.add_function("slice!", |v: Value, a: Value, b: Value, c: Value| python::slice(&v, &a, &b, &c));
    env.add_function("in!", |a: Value, b: Value| python::contains(&a, &b));
    env.add_test("in", |a: Value, b: Value| python::contains(&a, &b));
    type Op = fn(&Value, &Value) -> bool;
    let ops: [(&str, &[&str], Op); 6] = [
        ("eq!", &["eq", "equalto", "=="], |a, b| a == b),
        ("ne!", &["ne", "!="], |a, b| a != b),
        ("lt!", &["lt", "lessthan", "<"], |a, b| a < b),
        ("le!", &["le", "<="], |a, b| a <= b),
        ("gt!", &["gt", "greaterthan", ">"], |a, b| a > b),
        ("ge!", &["ge", ">="], |a, b| a >= b),
    ];
    for (function, names, op) in ops {
        let compare = move |a: Value, b: Value| -> Result<bool, Error> {
            bounds::walk(&a, 0)?;
            bounds::walk(&b, 0)?;
            Ok(op(&a, &b))
        };
        env.add_function(function, compare);
        for name in names {
            env.add_test(*name, compare);
        }
    }
}

/// The globals of transformers and of jinja2.
fn functions(env: &mut Environment<'static>) {
    env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        Err(bounds::raise(&python::to_str(&message)?))
    });
    env.add_function("strftime_now", |format: &str| -> Result<String, Error> {
        if format.len() > 1024 {
            return Err(bad("strftime_now: the format is longer than 1024 bytes"));
        }
        let text = match bounds::fixed_now() {
            Some(now) => jiff::fmt::strtime::format(format, now),
            None => jiff::fmt::strtime::format(format, &jiff::Zoned::now()),
        };
        text.map_err(|e| bad(format!("strftime_now: {e}")))
    });
    env.add_function("joiner", minijinja_contrib::globals::joiner);
    env.add_function("cycler", minijinja_contrib::globals::cycler);
    env.remove_global("debug");
}

/// Filters on text.
fn texts(env: &mut Environment<'static>) {
    env.add_filter("tojson", |value: Value, kw: Kwargs| python::Json::from_kwargs(&kw)?.dumps(&value));
    for name in ["string", "pprint"] {
        env.add_filter(name, |value: Value| python::to_str(&value));
    }
    env.add_filter("trim", |value: Value, chars: Option<String>| {
        python::to_str(&value).map(|s| strip(&s, chars.as_deref(), true, true).to_owned())
    });
    env.add_filter("replace", |value: Value, old: Value, new: Value, count: Option<i64>| {
        replace(&python::to_str(&value)?, &python::to_str(&old)?, &python::to_str(&new)?, count.unwrap_or(-1))
    });
    env.add_filter("join", |value: Value, sep: Option<Value>, kw: Kwargs| {
        let sep = sep.or(kw.get("d")?).map_or(Ok(String::new()), |s| python::to_str(&s))?;
        let attribute: Option<String> = kw.get("attribute")?;
        join(&sep, &value, attribute.as_deref())
    });
    env.add_filter(
        "indent",
        |value: Value, width: Option<Value>, first: Option<bool>, blank: Option<bool>, kw: Kwargs| {
            let width = width.or(kw.get("width")?);
            let first = first.or(kw.get("first")?).unwrap_or(false);
            let blank = blank.or(kw.get("blank")?).unwrap_or(false);
            indent(&python::to_str(&value)?, width, first, blank)
        },
    );
    env.add_filter("format", |format: &str, args: Rest<Value>| python::printf(format, &args));
    env.add_filter("int", |value: Value, default: Option<i64>| {
        let text = value.as_str().map(|s| s.trim().replace('_', ""));
        let whole = |f: f64| f.is_finite().then_some(f.trunc() as i64);
        let n = match text {
            Some(s) => s.parse().ok().or_else(|| s.parse::<f64>().ok().and_then(whole)),
            None if value.kind() == ValueKind::Bool => Some(value.is_true().into()),
            None => value.as_i64().or_else(|| f64::try_from(value.clone()).ok().and_then(whole)),
        };
        n.or(default).unwrap_or(0)
    });
    env.add_filter("float", |value: Value, default: Option<f64>| {
        let n = match value.as_str() {
            Some(s) => s.trim().parse().ok(),
            None => f64::try_from(value.clone()).ok(),
        };
        n.or(default).unwrap_or(0.0)
    });
}

/// Filters on lists that compare their items: the items are walked first. Those that pad are given a largest count.
fn lists(env: &mut Environment<'static>) {
    env.add_filter("sort!", filters::sort);
    env.add_filter("dictsort!", filters::dictsort);
    env.add_filter("unique!", filters::unique);
    env.add_filter("groupby!", filters::groupby);
    env.add_filter("min!", filters::min);
    env.add_filter("max!", filters::max);
    for (name, inner) in [
        ("sort", "sort!"),
        ("dictsort", "dictsort!"),
        ("unique", "unique!"),
        ("groupby", "groupby!"),
        ("min", "min!"),
        ("max", "max!"),
    ] {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            if let Some(value) = args.first() {
                bounds::walk(value, 0)?;
            }
            state.apply_filter(inner, &args)
        });
    }
    env.add_filter("batch!", filters::batch);
    env.add_filter("slice!", filters::slice);
    for (name, inner) in [("batch", "batch!"), ("slice", "slice!")] {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            let count = args.get(1).and_then(Value::as_usize).unwrap_or(0);
            bounds::charge(count.saturating_mul(32))?;
            state.apply_filter(inner, &args)
        });
    }
}

/// Tests that Python's types answer differently from minijinja's.
fn tests(env: &mut Environment<'static>) {
    // An undefined value has a length of zero and can be iterated, so jinja2 counts it in.
    let sequence =
        |v: Value| matches!(v.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map);
    env.add_test("sequence", sequence);
    env.add_test("iterable", move |v: Value| v.kind() == ValueKind::Iterable || sequence(v));
    env.add_test("number", |v: Value| matches!(v.kind(), ValueKind::Number | ValueKind::Bool));
    env.add_test("integer", |v: Value| v.kind() == ValueKind::Number && v.is_integer());
}

/// Python's methods where minijinja-contrib lacks them, differs, or could build more than it was given.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(s) = value.as_str()
        && let Some(result) = string_method(s, name, args)?
    {
        bounds::charge_value(&result)?;
        return Ok(result);
    }
    if value.kind() == ValueKind::Seq && name == "index" {
        let [wanted] = args else { return Err(bad("index takes one argument")) };
        bounds::walk(value, 0)?;
        let at = value.try_iter()?.position(|v| v == *wanted);
        return at.map(Value::from).ok_or_else(|| bad("the value is not in the list"));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

fn string_method(s: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
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
        "splitlines" => splitlines(s, args.first().is_some_and(Value::is_true)),
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
        "swapcase" => Value::from(
            s.chars()
                .flat_map(|c| -> Vec<char> {
                    if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
                })
                .collect::<String>(),
        ),
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

/// What `str.strip` removes by itself.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn strip<'a>(s: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let drop = |c: char| chars.map_or_else(|| is_space(c), |set| set.contains(c));
    let s = if left { s.trim_start_matches(drop) } else { s };
    if right { s.trim_end_matches(drop) } else { s }
}

fn split(s: &str, sep: Option<&str>, limit: i64, from_right: bool) -> Result<Value, Error> {
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
    bounds::charge(parts.len().saturating_mul(32))?;
    Ok(Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>()))
}

fn splitlines(s: &str, keep: bool) -> Value {
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
        lines.push(Value::from(&rest[..if keep { at + end } else { at }]));
        rest = &rest[at + end..];
    }
    Value::from(lines)
}

fn replace(s: &str, old: &str, new: &str, count: i64) -> Result<String, Error> {
    let limit = usize::try_from(count).unwrap_or(usize::MAX);
    let hits = if old.is_empty() { s.chars().count() + 1 } else { s.matches(old).count() }.min(limit);
    bounds::charge_string(s.len().saturating_add(hits.saturating_mul(new.len())))?;
    Ok(s.replacen(old, new, limit))
}

fn join(sep: &str, list: &Value, attribute: Option<&str>) -> Result<String, Error> {
    let mut out = String::new();
    if list.is_undefined() {
        return Ok(out);
    }
    for (n, item) in list.try_iter()?.enumerate() {
        if n > 0 {
            out.push_str(sep);
        }
        let item = match attribute {
            Some(name) => name.split('.').try_fold(item, |v, key| v.get_attr(key))?,
            None => item,
        };
        match item.as_str() {
            Some(s) => out.push_str(s),
            None => out.push_str(&python::to_str(&item)?),
        }
        if out.len() > bounds::MAX_OUTPUT_BYTES {
            bounds::charge_string(out.len())?;
        }
    }
    bounds::charge_string(out.len())?;
    Ok(out)
}

fn indent(s: &str, width: Option<Value>, first: bool, blank: bool) -> Result<String, Error> {
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
fn format(s: &str, args: &[Value]) -> Result<String, Error> {
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
        bounds::walk(&arg, 0)?;
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
