//! What is told of a rule's cost by a look at it: nesting, choices, and how many expressions must hold of one text at
//! once.
//!
//! An intersection has as many states as the product of its parts, in the worst case, and `multipleOf` as many as its
//! value.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{Error, MAX_RULE_DEPTH, MAX_RULE_MEETS, MAX_RULE_MULTIPLE};

/// Schemas that are looked at: references may name one schema many times.
const MAX_LOOKED_AT: usize = 20_000;

/// Nesting of a schema, and what is widest in it. serde_json's reader bounds the depth of what comes out of a text; a
/// value made by hand may be deeper, and what is too deep is not looked through to its end.
pub fn json_extent(schema: &Value) -> (usize, (&'static str, usize)) {
    let mut level: Vec<&Value> = vec![schema];
    let (mut depth, mut widest) = (0, ("", 0));
    while !level.is_empty() && depth <= MAX_RULE_DEPTH {
        depth += 1;
        let mut next = Vec::new();
        for value in level {
            match value {
                Value::Array(items) => next.extend(items),
                Value::Object(keys) => {
                    next.extend(keys.values());
                    for what in ["properties", "anyOf", "oneOf", "allOf", "prefixItems"] {
                        let inner = keys.get(what);
                        let width = inner.map_or(0, |v| {
                            v.as_object().map_or(0, |o| o.len()).max(v.as_array().map_or(0, |a| a.len()))
                        });
                        if width > widest.1 {
                            widest = (what, width);
                        }
                    }
                }
                _ => {}
            }
        }
        level = next;
    }
    (depth, widest)
}

/// Nesting of brackets, in strings and classes too: a bound that errs on the safe side.
pub fn bracket_depth(text: &str) -> usize {
    let (mut depth, mut deepest, mut escaped) = (0usize, 0, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// Checks what must hold at once anywhere in a schema: at most [`MAX_RULE_MEETS`] expressions, and `multipleOf` whose
/// product, and whose sum over the schema, is at most [`MAX_RULE_MULTIPLE`].
///
/// # Errors
/// [`Error::TooWide`], [`Error::Rule`].
pub fn meets(schema: &Value) -> Result<(), Error> {
    let mut look = Look { root: schema, left: MAX_LOOKED_AT };
    let mut sum = 0.0;
    let mut all = vec![schema];
    while let Some(value) = all.pop() {
        match value {
            Value::Array(items) => all.extend(items),
            Value::Object(keys) => {
                sum += multiple(keys);
                all.extend(keys.values());
                // Where several schemas may come together.
                if ["allOf", "anyOf", "oneOf", "$ref"].iter().any(|key| keys.contains_key(*key)) {
                    look.together(vec![value], 0)?;
                }
            }
            _ => {}
        }
    }
    match sum > MAX_RULE_MULTIPLE {
        true => Err(too_large(sum)),
        false => Ok(()),
    }
}

fn too_large(multiple: f64) -> Error {
    Error::Rule(format!(
        "its multipleOf, without decimal points, come to {multiple:.0} together, at most {MAX_RULE_MULTIPLE} are allowed"
    ))
}

/// Returns the value of `multipleOf` without its decimal point, which is how many states it takes; 0 where there is
/// none.
fn multiple(keys: &Map<String, Value>) -> f64 {
    let Some(mut value) = keys.get("multipleOf").and_then(Value::as_f64) else { return 0.0 };
    for _ in 0..20 {
        if value.fract() == 0.0 {
            break;
        }
        value *= 10.0;
    }
    value.abs()
}

struct Look<'a> {
    root: &'a Value,
    left: usize,
}

impl<'a> Look<'a> {
    /// Checks schemas that must hold of the same value, and those of its parts.
    fn together(&mut self, schemas: Vec<&'a Value>, depth: usize) -> Result<(), Error> {
        if depth > MAX_RULE_DEPTH {
            return Ok(());
        }
        let mut members = Vec::new();
        for schema in schemas {
            self.flatten(schema, &mut members, 0)?;
        }
        let expressions = ["pattern", "format", "multipleOf"];
        let width = members.iter().map(|keys| expressions.iter().filter(|e| keys.contains_key(**e)).count()).sum();
        if width > MAX_RULE_MEETS {
            return Err(Error::TooWide { what: "the expressions that hold at once", width, most: MAX_RULE_MEETS });
        }
        let product: f64 = members.iter().map(|keys| multiple(keys).max(1.0)).product();
        if product > MAX_RULE_MULTIPLE {
            return Err(too_large(product));
        }
        if members.len() < 2 {
            return Ok(());
        }
        // Properties of one name meet, and so do those that any name may have.
        let mut parts: BTreeMap<&str, Vec<&'a Value>> = BTreeMap::new();
        for keys in &members {
            for (name, part) in keys.get("properties").and_then(Value::as_object).into_iter().flatten() {
                parts.entry(name).or_default().push(part);
            }
            let any = keys.get("patternProperties").and_then(Value::as_object).into_iter().flat_map(|map| map.values());
            parts.entry("").or_default().extend(any.chain(keys.get("additionalProperties")));
            for key in ["items", "contains", "propertyNames"] {
                parts.entry(key).or_default().extend(keys.get(key));
            }
        }
        parts.into_values().filter(|part| part.len() > 1).try_for_each(|part| self.together(part, depth + 1))
    }

    /// Appends a schema and those that hold, or may hold, of the same value.
    fn flatten(
        &mut self,
        schema: &'a Value,
        members: &mut Vec<&'a Map<String, Value>>,
        depth: usize,
    ) -> Result<(), Error> {
        let Some(keys) = schema.as_object() else { return Ok(()) };
        self.left = self.left.checked_sub(1).ok_or(Error::TooWide {
            what: "its schemas, each as often as it is referred to,",
            width: MAX_LOOKED_AT,
            most: MAX_LOOKED_AT - 1,
        })?;
        members.push(keys);
        if depth >= MAX_RULE_DEPTH {
            return Ok(());
        }
        // All of them: of alternatives only one holds, but each meets all others of the value.
        for choice in ["anyOf", "oneOf"] {
            let mut widest: Vec<&'a Map<String, Value>> = Vec::new();
            for inner in keys.get(choice).and_then(Value::as_array).into_iter().flatten() {
                let mut one = Vec::new();
                self.flatten(inner, &mut one, depth + 1)?;
                if one.len() > widest.len() {
                    widest = one;
                }
            }
            members.extend(widest);
        }
        for inner in keys.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            self.flatten(inner, members, depth + 1)?;
        }
        let target = keys.get("$ref").and_then(Value::as_str).and_then(|at| at.strip_prefix('#'));
        match target.and_then(|at| self.root.pointer(at)) {
            // A schema that refers to itself holds of its own parts.
            Some(target) if !members.iter().any(|keys| target.as_object().is_some_and(|t| std::ptr::eq(*keys, t))) => {
                self.flatten(target, members, depth + 1)
            }
            _ => Ok(()),
        }
    }
}
