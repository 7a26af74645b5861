//! The environment that chat templates expect: jinja2 as transformers sets it up, with Python's methods. Knows nothing
//! of chats.
//!
//! After `transformers.utils.chat_template_utils`: trim_blocks, lstrip_blocks, loop controls, `tojson` as plain
//! `json.dumps`, `raise_exception`, `strftime_now`.
//!
//! Nothing comes from minijinja by default. What is registered goes through [`filter`], [`test()`] and [`function`],
//! which take what a call touches ([`Touch`]), pay for that before the call and for the result behind it, and turn lazy
//! lists into lists, so that none can be doubled without being paid for.

use minijinja::functions;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{FunctionArgs, FunctionResult, Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters, tests};

use super::{bounds, lists, python, text};

fn bad(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text.into())
}

/// Returns the whitespace rules of chat templates.
pub fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(false).build()
}

/// What a call reads of its arguments.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Touch {
    /// A kind, a length, an item. What it builds it pays for by itself.
    Little,
    /// The bytes of strings and the items of lists, not what those hold.
    Layer,
    /// As `Layer`; a first argument that is no string is printed before, as Python prints it.
    Text,
    /// Everything, once.
    All,
    /// Everything, as often as sorting compares.
    Sort,
}

/// Pays for what a call is about to read.
fn pay(args: &mut [Value], touch: Touch) -> Result<(), Error> {
    bounds::touch(bounds::ITEM_BYTES)?;
    match touch {
        Touch::Little => Ok(()),
        Touch::Layer => args.iter().try_for_each(bounds::touch_value),
        Touch::Text => {
            if let Some(first) = args.first_mut().filter(|v| v.kind() != ValueKind::String) {
                *first = Value::from(python::to_str(first)?);
            }
            args.iter().try_for_each(|v| bounds::walk(v).map(drop))
        }
        Touch::All => args.iter().try_for_each(|v| bounds::walk(v).map(drop)),
        Touch::Sort => {
            let Some((list, rest)) = args.split_first() else { return Ok(()) };
            let items = list.len().unwrap_or(0).max(2);
            let once = bounds::walk(list)?;
            // The name of an attribute is read for each item.
            let each = rest.iter().map(bounds::walk).sum::<Result<usize, _>>()?;
            let sorted = once.saturating_mul(2 + items.ilog2() as usize);
            bounds::touch(sorted.saturating_add(items.saturating_mul(each)))
        }
    }
}

/// Pays for what a call returned; a lazy list is walked and kept.
fn solid(value: Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::Iterable && !lists::is_walkable(&value) {
        return python::items(&value).map(lists::walkable);
    }
    bounds::charge_value(&value).map(|()| value)
}

fn filter<F, Rv, Args>(env: &mut Environment<'static>, names: &[&'static str], touch: Touch, f: F)
where
    F: functions::Function<Rv, Args>,
    Rv: FunctionResult,
    Args: for<'a> FunctionArgs<'a>,
{
    let f = Value::from_function(f);
    for name in names {
        let f = f.clone();
        env.add_filter(*name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let mut args = args.into_values();
            pay(&mut args, touch)?;
            f.call(state, &args).and_then(solid)
        });
    }
}

fn test<F, Rv, Args>(env: &mut Environment<'static>, names: &[&'static str], touch: Touch, f: F)
where
    F: functions::Function<Rv, Args>,
    Rv: FunctionResult,
    Args: for<'a> FunctionArgs<'a>,
{
    let f = Value::from_function(f);
    for name in names {
        let f = f.clone();
        env.add_test(*name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let mut args = args.into_values();
            pay(&mut args, touch)?;
            f.call(state, &args)
        });
    }
}

fn function<F, Rv, Args>(env: &mut Environment<'static>, name: &'static str, touch: Touch, f: F)
where
    F: functions::Function<Rv, Args>,
    Rv: FunctionResult,
    Args: for<'a> FunctionArgs<'a>,
{
    let f = Value::from_function(f);
    env.add_function(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let mut args = args.into_values();
        pay(&mut args, touch)?;
        f.call(state, &args).and_then(solid)
    });
}

/// Returns the environment; a render executes at most `fuel` instructions.
pub fn environment(fuel: u64) -> Result<Environment<'static>, Error> {
    let mut env = Environment::empty();
    env.set_syntax(syntax()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(fuel));
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
    globals(&mut env);
    texts(&mut env);
    numbers(&mut env);
    sequences(&mut env);
    kinds(&mut env);
    env.set_unknown_method_callback(method);
    Ok(env)
}

/// The functions that rewritten instructions call.
fn operators(env: &mut Environment<'static>) {
    env.add_function("charge!", |v: Value| bounds::charge_value(&v).map(|()| v));
    // The only argument of a call may be its keyword arguments, which are given back as they are.
    let only = |args: Rest<ValueOrKwargs>| args.into_values().pop().unwrap_or_default();
    env.add_function("touch!", move |args: Rest<ValueOrKwargs>| {
        let value = only(args);
        bounds::touch_value(&value).map(|()| value)
    });
    env.add_function("tick!", bounds::tick);
    env.add_function("refuse!", || -> Result<Value, Error> {
        Err(bad("a mapping or a call of this form has too many parts, or unpacks its arguments"))
    });
    env.add_function("settable!", |v: Value| {
        // A namespace inside a namespace could hold itself, and would never be freed; a loop remembers values, too.
        bounds::visit(&v, 0, &mut |part| match part.as_object().map(|o| o.type_name()) {
            Some(name) if name.ends_with("Namespace") => Err(bad("a namespace cannot be stored in a namespace")),
            Some(name) if name.ends_with("Loop") => Err(bad("a loop cannot be stored in a namespace")),
            _ => Ok(()),
        })
        .map(|()| v)
    });
    env.add_function("pair!", |a: Value, b: Value| {
        python::pay_comparison(&a, &b)?;
        // `in` compares with each item.
        bounds::walk(&b)?;
        Ok::<_, Error>(Value::from(vec![a, b]))
    });
    env.add_function("item!", |container: Value, key: Value| {
        bounds::walk(&key)?;
        if container.kind() == ValueKind::String {
            bounds::touch_value(&container)?;
        }
        let item = container.get_item(&key)?;
        bounds::touch_value(&item).map(|()| item)
    });
    env.add_function("map!", |parts: Rest<Value>| {
        bounds::charge_items(parts.len())?;
        let pairs = parts.chunks_exact(2).map(|pair| {
            bounds::walk(&pair[0])?;
            match pair[0].kind() {
                ValueKind::Map | ValueKind::Iterable => Err(bad("a key is a mapping or a list")),
                ValueKind::Seq if !pair[0].is_tuple() => Err(bad("a key is a list")),
                _ => Ok((pair[0].clone(), pair[1].clone())),
            }
        });
        Ok::<_, Error>(Value::from_pairs(pairs.collect::<Result<Vec<_>, Error>>()?))
    });
    env.add_function("keys!", move |args: Rest<ValueOrKwargs>| {
        let kwargs = only(args);
        for key in kwargs.try_iter()? {
            bounds::charge(bounds::ITEM_BYTES + key.as_str().map_or(0, str::len))?;
        }
        Ok::<_, Error>(kwargs)
    });
    env.add_function("splat!", |lists: Rest<Value>| {
        let mut all = Vec::new();
        for list in lists.iter() {
            all.extend(python::items(list)?);
        }
        all.iter().try_for_each(bounds::touch_value)?;
        Ok::<_, Error>(all)
    });
    env.add_function("changed!", |state: &mut State, object: Value, args: Rest<Value>| {
        args.iter().try_for_each(|v| bounds::walk(v).map(drop))?;
        object.call_method(state, "changed", &args)
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
            python::pay_comparison(&a, &b)?;
            Ok(op(&a, &b))
        };
        env.add_function(function, compare);
        for name in names {
            env.add_test(*name, compare);
        }
    }
}

/// The globals of transformers and of jinja2.
fn globals(env: &mut Environment<'static>) {
    use Touch::*;
    function(env, "raise_exception", Little, |message: Value| -> Result<Value, Error> {
        Err(bounds::raise(&python::to_str(&message)?))
    });
    function(env, "strftime_now", Little, |format: &str| -> Result<String, Error> {
        if format.len() > 1024 {
            return Err(bad("strftime_now: the format is longer than 1024 bytes"));
        }
        let text = match bounds::fixed_now() {
            Some(now) => jiff::fmt::strtime::format(format, now),
            None => jiff::fmt::strtime::format(format, &jiff::Zoned::now()),
        };
        text.map_err(|e| bad(format!("strftime_now: {e}")))
    });
    function(env, "range", Little, functions::range);
    function(env, "dict", Layer, functions::dict);
    function(env, "namespace", Layer, functions::namespace);
    function(env, "joiner", All, minijinja_contrib::globals::joiner);
    function(env, "cycler", Layer, minijinja_contrib::globals::cycler);
}

/// Filters on text.
fn texts(env: &mut Environment<'static>) {
    use Touch::*;
    filter(env, &["lower"], Text, filters::lower);
    filter(env, &["upper"], Text, filters::upper);
    filter(env, &["title"], Text, filters::title);
    filter(env, &["capitalize"], Text, filters::capitalize);
    filter(env, &["safe"], Text, filters::safe);
    filter(env, &["escape", "e"], Text, filters::escape);
    filter(env, &["lines"], Text, |s: &str| text::splitlines(s, false));
    filter(env, &["split"], Text, |s: &str, sep: Option<&str>, limit: Option<i64>| {
        text::split(s, sep, limit.unwrap_or(-1), false)
            .map(|parts| lists::walkable(parts.try_iter().into_iter().flatten().collect()))
    });
    filter(env, &["tojson"], Little, |value: Value, kw: Kwargs| python::Json::from_kwargs(&kw)?.dumps(&value));
    filter(env, &["string", "pprint"], Little, |value: Value| python::to_str(&value));
    filter(env, &["trim"], Text, |value: &str, chars: Option<Value>| {
        let chars = chars.map(|chars| python::to_str(&chars)).transpose()?;
        Ok::<_, Error>(text::strip(value, chars.as_deref(), true, true).to_owned())
    });
    filter(env, &["replace"], Text, |value: &str, old: Value, new: Value, count: Option<i64>| {
        text::replace(value, &python::to_str(&old)?, &python::to_str(&new)?, count.unwrap_or(-1))
    });
    filter(env, &["join"], Little, |value: Value, sep: Option<Value>, kw: Kwargs| {
        let sep = sep.or(kw.get("d")?).map_or(Ok(String::new()), |s| python::to_str(&s))?;
        let attribute: Option<Value> = kw.get("attribute")?;
        text::join(&sep, &value, lists::name(attribute.as_ref())?)
    });
    filter(
        env,
        &["indent"],
        Text,
        |value: &str, width: Option<Value>, first: Option<bool>, blank: Option<bool>, kw: Kwargs| {
            let width = width.or(kw.get("width")?);
            let first = first.or(kw.get("first")?).unwrap_or(false);
            let blank = blank.or(kw.get("blank")?).unwrap_or(false);
            text::indent(value, width, first, blank)
        },
    );
    filter(env, &["format"], Layer, |format: &str, args: Rest<Value>| python::printf(format, &args));
}

/// Filters on numbers, and on whatever.
fn numbers(env: &mut Environment<'static>) {
    use Touch::*;
    filter(env, &["int"], Layer, |value: Value, default: Option<i64>| {
        let text = value.as_str().map(|s| s.trim().replace('_', ""));
        let whole = |f: f64| f.is_finite().then_some(f.trunc() as i64);
        let n = match text {
            Some(s) => s.parse().ok().or_else(|| s.parse::<f64>().ok().and_then(whole)),
            None if value.kind() == ValueKind::Bool => Some(value.is_true().into()),
            None => value.as_i64().or_else(|| f64::try_from(value.clone()).ok().and_then(whole)),
        };
        n.or(default).unwrap_or(0)
    });
    filter(env, &["float"], Layer, |value: Value, default: Option<f64>| {
        let n = match value.as_str() {
            Some(s) => s.trim().parse().ok(),
            None => f64::try_from(value.clone()).ok(),
        };
        n.or(default).unwrap_or(0.0)
    });
    filter(env, &["round"], Layer, filters::round);
    filter(env, &["abs"], Little, filters::abs);
    filter(env, &["bool"], Little, filters::bool);
    filter(env, &["default", "d"], Little, filters::default);
}

/// Filters on lists and mappings.
fn sequences(env: &mut Environment<'static>) {
    use Touch::*;
    filter(env, &["length", "count"], Little, lists::length);
    filter(env, &["attr"], Little, |value: Value, key: Value| {
        bounds::walk(&key)?;
        if value.kind() == ValueKind::String {
            bounds::touch_value(&value)?;
        }
        filters::attr(&value, &key)
    });
    filter(env, &["first"], Little, lists::first);
    filter(env, &["last"], Little, lists::last);
    filter(env, &["list"], Little, |value: Value| python::items(&value));
    filter(env, &["items"], Layer, filters::items);
    filter(env, &["reverse"], Layer, lists::reverse);
    filter(env, &["chain"], Layer, lists::chain);
    filter(env, &["zip"], Layer, lists::zip);
    filter(env, &["batch"], Layer, lists::batch);
    filter(env, &["slice"], Layer, lists::slice);
    filter(env, &["sum"], Layer, lists::sum);
    filter(env, &["map"], Layer, lists::map);
    for (name, keep) in [("select", true), ("reject", false)] {
        filter(env, &[name], Layer, move |s: &mut State, v: Value, test: Option<Value>, args: Rest<ValueOrKwargs>| {
            lists::select(s, v, None, test, args.into_values(), keep)
        });
    }
    for (name, keep) in [("selectattr", true), ("rejectattr", false)] {
        let select = move |s: &mut State, v: Value, path: Value, test: Option<Value>, args: Rest<ValueOrKwargs>| {
            lists::select(s, v, Some(path), test, args.into_values(), keep)
        };
        filter(env, &[name], Layer, select);
    }
    filter(env, &["sort"], Sort, filters::sort);
    filter(env, &["dictsort"], Sort, filters::dictsort);
    filter(env, &["unique"], Sort, filters::unique);
    filter(env, &["min"], Sort, filters::min);
    filter(env, &["max"], Sort, filters::max);
    filter(env, &["groupby"], Sort, lists::groupby);
}

/// Tests; some are answered by Python's types in another way than by minijinja's.
fn kinds(env: &mut Environment<'static>) {
    use Touch::*;
    test(env, &["undefined"], Little, tests::is_undefined);
    test(env, &["defined"], Little, tests::is_defined);
    test(env, &["none"], Little, tests::is_none);
    test(env, &["safe", "escaped"], Little, tests::is_safe);
    test(env, &["boolean"], Little, tests::is_boolean);
    test(env, &["odd"], Little, tests::is_odd);
    test(env, &["even"], Little, tests::is_even);
    test(env, &["divisibleby"], Little, tests::is_divisibleby);
    test(env, &["int"], Little, tests::is_integer);
    test(env, &["float"], Little, tests::is_float);
    test(env, &["string"], Little, tests::is_string);
    test(env, &["mapping"], Little, tests::is_mapping);
    test(env, &["true"], Little, tests::is_true);
    test(env, &["false"], Little, tests::is_false);
    test(env, &["sameas"], Layer, tests::is_sameas);
    test(env, &["filter"], Layer, tests::is_filter);
    test(env, &["test"], Layer, tests::is_test);
    test(env, &["lower"], Text, tests::is_lower);
    test(env, &["upper"], Text, tests::is_upper);
    test(env, &["startingwith"], Text, tests::is_startingwith);
    test(env, &["endingwith"], Text, tests::is_endingwith);
    // An undefined value has a length of zero and can be iterated, so jinja2 counts it in.
    let sequence =
        |v: &Value| matches!(v.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map);
    test(env, &["sequence"], Little, move |v: Value| sequence(&v));
    test(env, &["iterable"], Little, move |v: Value| v.kind() == ValueKind::Iterable || sequence(&v));
    test(env, &["number"], Little, |v: Value| matches!(v.kind(), ValueKind::Number | ValueKind::Bool));
    test(env, &["integer"], Little, |v: Value| v.kind() == ValueKind::Number && v.is_integer());
}

/// Python's methods: ours where minijinja-contrib lacks them, differs, or could build more than it was given.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    bounds::touch(bounds::ITEM_BYTES)?;
    args.iter().try_for_each(|v| bounds::walk(v).map(drop))?;
    match value.kind() {
        ValueKind::String => bounds::touch_value(value)?,
        ValueKind::Map if name != "get" => bounds::touch_value(value)?,
        ValueKind::Seq if ["index", "count"].contains(&name) => {
            let [wanted] = args else { return Err(bad(format!("{name} takes one argument"))) };
            let (mut first, mut count) = (None, 0);
            for (i, item) in value.try_iter()?.enumerate() {
                if python::equal(&item, wanted)? {
                    first.get_or_insert(i);
                    count += 1;
                }
            }
            return match name {
                "count" => Ok(Value::from(count)),
                _ => first.map(Value::from).ok_or_else(|| bad("the value is not in the list")),
            };
        }
        _ => {}
    }
    if let Some(s) = value.as_str()
        && let Some(result) = text::string_method(s, name, args)?
    {
        return solid(result);
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args).and_then(solid)
}
