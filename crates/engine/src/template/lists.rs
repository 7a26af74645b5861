//! Filters on lists that minijinja has lazily, or without a look at what they build: here each item is paid for when it
//! is made.

use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Error, ErrorKind, State, Value, filters};

use super::{bounds, python};

fn bad(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, text.into())
}

/// A list that templates see as one that can only be walked, like Python's `dict.items()`, whose items are at hand.
#[derive(Debug)]
struct Walkable(Vec<Value>);

impl Object for Walkable {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }
}

/// A list that can only be walked.
pub fn walkable(items: Vec<Value>) -> Value {
    Value::from_object(Walkable(items))
}

/// Whether a value is a list of [`walkable`]'s.
pub fn is_walkable(value: &Value) -> bool {
    value.downcast_object_ref::<Walkable>().is_some()
}

/// `a.b.0` of a value: attributes and places in lists.
pub fn attribute(value: &Value, path: &str) -> Result<Value, Error> {
    bounds::touch(path.len())?;
    path.split('.').try_fold(value.clone(), |value, part| match part.parse::<usize>() {
        Ok(at) => value.get_item_by_index(at),
        Err(_) => value.get_attr(part),
    })
}

/// Returns a name among arguments. What is no string is none: it is not printed for that.
pub fn name(value: Option<&Value>) -> Result<Option<&str>, Error> {
    let value = value.filter(|v| !v.is_none() && !v.is_undefined());
    value.map(|v| v.as_str().ok_or_else(|| bad(format!("a name is a string, not {}", v.kind())))).transpose()
}

/// `value | length`. Strings count their characters, which reads them.
pub fn length(value: Value) -> Result<usize, Error> {
    if value.kind() == ValueKind::String {
        bounds::touch_value(&value)?;
    }
    filters::length(&value)
}

/// `value | first`.
pub fn first(value: Value) -> Result<Value, Error> {
    // A mapping lists its keys before it gives one.
    if value.kind() == ValueKind::Map {
        bounds::touch_value(&value)?;
    }
    filters::first(&value)
}

/// `value | last`.
pub fn last(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => match value.len() {
            Some(0) => Ok(Value::UNDEFINED),
            Some(n) => value.get_item_by_index(n - 1),
            None => Ok(python::items(&value)?.pop().unwrap_or_default()),
        },
        _ => filters::last(value),
    }
}

/// `value | reverse`.
pub fn reverse(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let mut items = python::items(&value)?;
            items.reverse();
            Ok(walkable(items))
        }
        _ => filters::reverse(&value),
    }
}

/// `value | chain(others)`: one list, or one mapping, in which later ones win.
pub fn chain(value: Value, others: Rest<Value>) -> Result<Value, Error> {
    let all: Vec<&Value> = std::iter::once(&value).chain(others.iter()).collect();
    if all.iter().all(|v| v.kind() == ValueKind::Map) {
        let mut pairs = Vec::new();
        for map in all {
            for key in python::items(map)? {
                bounds::walk(&key)?;
                let value = map.get_item(&key)?;
                pairs.push((key, value));
            }
        }
        return Ok(Value::from_pairs(pairs));
    }
    let is_list = all.iter().all(|v| v.kind() == ValueKind::Seq);
    let mut items = Vec::new();
    for list in all {
        items.extend(python::items(list)?);
    }
    Ok(if is_list { Value::from(items) } else { walkable(items) })
}

/// `value | zip(others)`: tuples, as many as the shortest list has items.
pub fn zip(value: Value, others: Rest<Value>) -> Result<Value, Error> {
    let lists = std::iter::once(&value).chain(others.iter());
    let mut lists = lists.map(|list| Ok(python::items(list)?.into_iter())).collect::<Result<Vec<_>, Error>>()?;
    let n = lists.iter().map(|list| list.len()).min().unwrap_or(0);
    bounds::charge_items(n.saturating_mul(lists.len() + 2))?;
    let tuple = |_| Value::from(Tuple::from(lists.iter_mut().filter_map(Iterator::next).collect::<Vec<_>>()));
    Ok(walkable((0..n).map(tuple).collect()))
}

/// `value | batch(count, fill)`: lists of that many items.
pub fn batch(value: Value, count: usize, fill: Option<Value>) -> Result<Vec<Value>, Error> {
    if count == 0 {
        return Err(bad("count cannot be 0"));
    }
    let items = python::items(&value)?;
    let filled = if fill.is_some() { items.len().div_ceil(count).saturating_mul(count) } else { items.len() };
    bounds::charge_items(filled.saturating_add(2 * items.len().div_ceil(count)))?;
    let list = |part: &[Value]| {
        let missing = fill.iter().flat_map(|fill| std::iter::repeat_n(fill, count - part.len()));
        Value::from(part.iter().chain(missing).cloned().collect::<Vec<_>>())
    };
    Ok(items.chunks(count).map(list).collect())
}

/// `value | slice(count, fill)`: that many lists.
pub fn slice(value: Value, count: usize, fill: Option<Value>) -> Result<Vec<Value>, Error> {
    if count == 0 {
        return Err(bad("count cannot be 0"));
    }
    let items = python::items(&value)?;
    bounds::charge_items(items.len().saturating_add(count.saturating_mul(3)))?;
    let (each, longer) = (items.len() / count, items.len() % count);
    let mut rest = items.as_slice();
    let list = |i: usize| {
        let (part, tail) = rest.split_at(each + usize::from(i < longer));
        rest = tail;
        let missing = fill.iter().filter(|_| i >= longer);
        Value::from(part.iter().chain(missing).cloned().collect::<Vec<_>>())
    };
    Ok((0..count).map(list).collect())
}

/// `value | sum(attribute, start)`.
pub fn sum(values: Value, path: Option<Value>, start: Option<Value>, kw: Kwargs) -> Result<Value, Error> {
    let path = path.map_or_else(|| kw.get::<Option<Value>>("attribute"), |path| Ok(Some(path)))?;
    let start = start.map_or_else(|| kw.get::<Option<Value>>("start"), |start| Ok(Some(start)))?;
    let path = name(path.as_ref())?;
    kw.assert_all_used()?;
    let mut sum = start.unwrap_or(Value::from(0));
    for item in python::items(&values)? {
        let item = match &path {
            Some(path) => attribute(&item, path).unwrap_or_default(),
            None => item,
        };
        if !item.is_undefined() {
            sum = python::add(sum, item)?;
        }
    }
    Ok(sum)
}

/// `value | map(filter, args)` and `value | map(attribute=.., default=..)`.
pub fn map(state: &mut State, value: Value, args: Rest<ValueOrKwargs>) -> Result<Vec<Value>, Error> {
    let args = args.into_values();
    let kw = match args.last().filter(|v| v.is_kwargs()) {
        Some(kw) => Kwargs::try_from(kw.clone())?,
        None => Kwargs::from_iter(std::iter::empty::<(&str, Value)>()),
    };
    let items = python::items(&value)?;
    let Some(path) = kw.get::<Option<Value>>("attribute")? else {
        let (name, rest) = args.split_first().ok_or_else(|| bad("filter name is required"))?;
        let name = name.as_str().ok_or_else(|| bad("filter name must be a string"))?;
        let mut call = Vec::with_capacity(args.len());
        return items
            .into_iter()
            .map(|item| {
                bounds::touch(rest.len().saturating_mul(bounds::ITEM_BYTES))?;
                call.clear();
                call.push(item);
                call.extend_from_slice(rest);
                state.apply_filter(name, &call)
            })
            .collect();
    };
    if args.len() > 1 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let default: Option<Value> = kw.get("default")?;
    kw.assert_all_used()?;
    items
        .into_iter()
        .map(|item| {
            let found = match path.as_str() {
                Some(path) => attribute(&item, path),
                None => bounds::walk(&path).and_then(|_| item.get_item(&path)),
            };
            match (found, &default) {
                (Ok(found), _) if !found.is_undefined() => Ok(found),
                (_, Some(default)) => Ok(default.clone()),
                (found, None) => found,
            }
        })
        .collect()
}

/// `select`, `reject`, `selectattr`, `rejectattr`: the items that a test keeps, or that are true.
pub fn select(
    state: &mut State,
    value: Value,
    path: Option<Value>,
    test: Option<Value>,
    args: Vec<Value>,
    keep: bool,
) -> Result<Vec<Value>, Error> {
    let (path, test) = (name(path.as_ref())?, name(test.as_ref())?);
    let mut kept = Vec::new();
    let mut call = Vec::with_capacity(args.len() + 1);
    for item in python::items(&value)? {
        let tested = match &path {
            Some(path) => attribute(&item, path)?,
            None => item.clone(),
        };
        let passed = match &test {
            Some(test) => {
                bounds::touch(args.len().saturating_mul(bounds::ITEM_BYTES))?;
                call.clear();
                call.push(tested);
                call.extend_from_slice(&args);
                state.perform_test(test, &call)?
            }
            None => tested.is_true(),
        };
        if passed == keep {
            kept.push(item);
        }
    }
    Ok(kept)
}

/// A group: `(grouper, list)`, and both by name.
#[derive(Debug)]
struct Group {
    grouper: Value,
    list: Value,
}

impl Object for Group {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match (key.as_usize(), key.as_str()) {
            (Some(0), _) | (_, Some("grouper")) => Some(self.grouper.clone()),
            (Some(1), _) | (_, Some("list")) => Some(self.list.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(2)
    }
}

/// `value | groupby(attribute)`.
pub fn groupby(value: Value, path: Option<&str>, kw: Kwargs) -> Result<Vec<Value>, Error> {
    let groups = filters::groupby(value, path, kw)?;
    let part = |group: &Value, i| group.get_item_by_index(i);
    let group = |group: Value| {
        let list = walkable(python::items(&part(&group, 1)?)?);
        bounds::charge_items(4)?;
        Ok(Value::from_object(Group { grouper: part(&group, 0)?, list }))
    };
    groups.try_iter()?.map(group).collect()
}
