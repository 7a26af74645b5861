//! Schemas as generators write them (zod, pydantic, schemars, invopop), in the words that llguidance knows.
//!
//! What only annotates is dropped, what can be said otherwise is, and what cannot be enforced is named. A schema that
//! went through [`tidy`] goes through unchanged again.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

use super::pattern::{finite, without_look_around};
use super::{MAX_RULE_BYTES, MAX_RULE_DEPTH};

/// Keywords that say nothing about which values are valid.
const ANNOTATIONS: [&str; 15] = [
    "title",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "minContains",
    "maxContains",
    "$comment",
    "$vocabulary",
    "$dynamicAnchor",
    "$recursiveAnchor",
];
/// Keywords that no grammar enforces, and that a client can check afterwards.
const CHECKED_LATER: [&str; 3] = ["uniqueItems", "unevaluatedItems", "unevaluatedProperties"];
/// Keywords that no grammar enforces, and without which a schema means something else.
const UNSUPPORTED: [&str; 8] =
    ["not", "if", "then", "else", "contains", "dependentRequired", "dependentSchemas", "dependencies"];
/// Formats that are enforced; others annotate.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
/// Keywords whose value is a schema, a list of schemas, or has schemas by name.
const ONE: [&str; 2] = ["items", "additionalProperties"];
const LISTS: [&str; 5] = ["anyOf", "oneOf", "allOf", "prefixItems", "items"];
const MAPS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
/// Drafts that are told apart.
const DRAFTS: [&str; 5] = [
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-04/schema",
];
/// Bounds beyond this bound nothing: it is more than a number of an answer has digits for, or a double holds exactly.
const MAX_BOUND: f64 = 9_007_199_254_740_992.0;
/// Bounds below this are zero.
const MIN_BOUND: f64 = 1e-12;

/// A schema in llguidance's words.
#[derive(Clone, Debug, PartialEq)]
pub struct Tidy {
    /// The schema, without what is listed below.
    pub schema: Value,
    /// Keywords that are not enforced and that a client can check afterwards, each once.
    pub ignored: Vec<&'static str>,
    /// Keywords without which the schema means something else.
    pub unsupported: Vec<&'static str>,
}

impl Tidy {
    /// Returns why the schema cannot be used, if it cannot.
    pub fn refusal(&self) -> Option<String> {
        let list: Vec<String> = self.unsupported.iter().map(|name| format!("`{name}`")).collect();
        match list.len() {
            0 => None,
            1 => Some(format!("JSON schema keyword {} is unsupported", list[0])),
            _ => Some(format!("JSON schema keywords {} are unsupported", list.join(", "))),
        }
    }
}

/// Returns a schema in llguidance's words. Takes time linear in its size.
pub fn tidy(mut schema: Value) -> Tidy {
    let (ignored, unsupported, names) = (Vec::new(), Vec::new(), HashMap::new());
    let mut work = Work { ignored, unsupported, names, left: MAX_RULE_BYTES };
    work.name_definitions(&mut schema);
    work.tidy(&mut schema, 0);
    let Work { ignored, unsupported, .. } = work;
    Tidy { schema, ignored, unsupported }
}

struct Work {
    ignored: Vec<&'static str>,
    unsupported: Vec<&'static str>,
    /// New names of definitions by their pointers.
    names: HashMap<[String; 2], String>,
    /// Bytes that copies of schemas may still take: copies that hold copies would double each time.
    left: usize,
}

fn note(list: &mut Vec<&'static str>, name: &'static str) {
    if !list.contains(&name) {
        list.push(name);
    }
}

impl Work {
    /// Renames definitions whose names no plain pointer can hold.
    fn name_definitions(&mut self, root: &mut Value) {
        for place in ["$defs", "definitions"] {
            let Some(definitions) = root.get_mut(place).and_then(Value::as_object_mut) else { continue };
            if !definitions.keys().any(|name| name.contains('/')) {
                continue;
            }
            for (i, (name, inner)) in std::mem::take(definitions).into_iter().enumerate() {
                if !name.contains('/') {
                    definitions.insert(name, inner);
                    continue;
                }
                let plain = format!("definition {i}");
                self.names.insert([place.into(), name], plain.clone());
                definitions.insert(plain, inner);
            }
        }
    }

    fn tidy(&mut self, value: &mut Value, depth: usize) {
        // What is deeper is refused.
        if depth > MAX_RULE_DEPTH {
            return;
        }
        let Some(keys) = value.as_object_mut() else { return };
        keys.retain(|name, value| !value.is_null() || name == "const" || name == "default");
        let never = [json!({}), json!(true)];
        if keys.get("not").is_some_and(|inner| never.contains(inner)) {
            *value = false.into();
            return;
        }
        keys.retain(|name, _| !ANNOTATIONS.contains(&name.as_str()));
        if keys.get("$schema").and_then(Value::as_str).is_some_and(|at| !DRAFTS.contains(&at.trim_end_matches('#'))) {
            keys.remove("$schema");
        }
        if keys.get("required").is_some_and(|required| !required.is_array()) {
            keys.remove("required");
        }
        if keys.get("format").is_some_and(|format| !FORMATS.iter().any(|known| format == known)) {
            keys.remove("format");
        }
        if keys.get("not") == Some(&json!(false)) {
            keys.remove("not");
        }
        if !["then", "else"].iter().any(|name| keys.contains_key(*name)) {
            keys.remove("if");
        }
        if keys.remove("nullable") == Some(json!(true)) {
            allow_null(keys);
        }
        self.names_of_properties(keys);
        only_these(keys);
        for name in CHECKED_LATER {
            let asks = |value: &Value| (*value == json!(true)) == (name == "uniqueItems") && *value != json!({});
            if keys.remove(name).is_some_and(|value| asks(&value)) {
                note(&mut self.ignored, name);
            }
        }
        for name in UNSUPPORTED {
            if keys.remove(name).is_some() {
                note(&mut self.unsupported, name);
            }
        }
        bounds(keys);
        self.count(keys);
        self.pattern(keys);
        if let Some(Value::String(at)) = keys.get_mut("$ref") {
            *at = self.plain_pointer(at);
        }
        for name in ONE {
            if let Some(inner) = keys.get_mut(name) {
                self.tidy(inner, depth + 1);
            }
        }
        for name in LISTS {
            let list = keys.get_mut(name).and_then(Value::as_array_mut);
            list.into_iter().flatten().for_each(|inner| self.tidy(inner, depth + 1));
        }
        for name in MAPS {
            let map = keys.get_mut(name).and_then(Value::as_object_mut);
            map.into_iter().flat_map(|map| map.values_mut()).for_each(|inner| self.tidy(inner, depth + 1));
        }
    }

    /// Puts what names of properties must be like into the properties.
    fn names_of_properties(&mut self, keys: &mut Map<String, Value>) {
        let Some(names) = keys.remove("propertyNames") else { return };
        let Some(names) = names.as_object() else { return };
        let values = keys.get("additionalProperties").cloned().unwrap_or(true.into());
        let is_free = !keys.contains_key("properties") && !keys.contains_key("patternProperties");
        let listed = names.get("enum").cloned().or_else(|| Some(json!([names.get("const")?])));
        let listed = listed.as_ref().and_then(Value::as_array).filter(|_| is_free);
        let pattern = names.get("pattern").and_then(Value::as_str).filter(|_| is_free);
        let copies = listed.map_or(0, |listed| listed.len().saturating_mul(values.to_string().len()));
        let fits = self.left >= copies;
        self.left = if fits { self.left - copies } else { 0 };
        if let Some(listed) = listed.filter(|_| fits) {
            let named = |name: &Value| Some((name.as_str()?.to_owned(), values.clone()));
            let properties: Map<_, _> = listed.iter().filter_map(named).collect();
            keys.insert("properties".into(), properties.into());
        } else if let Some(pattern) = pattern {
            let properties = json!({ pattern: values });
            keys.insert("patternProperties".into(), properties);
        } else {
            // Every name is a string.
            if names.keys().any(|name| !["type", "description", "title"].contains(&name.as_str())) {
                note(&mut self.ignored, "propertyNames");
            }
            return;
        }
        keys.insert("additionalProperties".into(), false.into());
    }

    /// Drops bounds on the number of properties where llguidance has none.
    fn count(&mut self, keys: &mut Map<String, Value>) {
        let Some(properties) = keys.get("properties").and_then(Value::as_object) else { return };
        let required = keys.get("required").and_then(Value::as_array);
        let is_required = |name: &String| required.is_some_and(|list| list.iter().any(|required| required == name));
        let number = |name: &str| keys.get(name).and_then(Value::as_u64);
        let (least, most) = (number("minProperties").unwrap_or(0), number("maxProperties"));
        let n_required = properties.keys().filter(|name| is_required(name)).count() as u64;
        let is_shut = keys.get("additionalProperties").is_none_or(|more| *more == json!(false))
            && !keys.contains_key("patternProperties");
        let (left, room) = (least.saturating_sub(n_required), most.map(|most| most.saturating_sub(n_required)));
        let is_known = left <= 1 && room.unwrap_or(1) == 1 && is_shut;
        if properties.len() as u64 == n_required || is_known {
            return;
        }
        for name in ["minProperties", "maxProperties"] {
            if keys.remove(name).is_some() {
                note(&mut self.ignored, name);
            }
        }
    }

    /// Says without look-around what patterns say with it.
    fn pattern(&mut self, keys: &mut Map<String, Value>) {
        if let Some(pattern) = keys.get("pattern").and_then(Value::as_str) {
            match without_look_around(pattern) {
                Some(mut all) => {
                    let first = all.remove(0);
                    keys.insert("pattern".into(), first.into());
                    if !all.is_empty() {
                        let others = all.into_iter().map(|pattern| json!({"type": "string", "pattern": pattern}));
                        match keys.entry("allOf").or_insert_with(|| json!([])) {
                            Value::Array(list) => list.extend(others),
                            _ => note(&mut self.unsupported, "pattern (look-around)"),
                        }
                    }
                }
                None => {
                    keys.remove("pattern");
                    note(&mut self.unsupported, "pattern (look-around)");
                }
            }
        }
        let Some(Value::Object(patterns)) = keys.get_mut("patternProperties") else { return };
        for (pattern, inner) in std::mem::take(patterns) {
            match without_look_around(&pattern).as_deref() {
                Some([pattern]) => drop(patterns.insert(pattern.clone(), inner)),
                _ => note(&mut self.unsupported, "patternProperties (look-around)"),
            }
        }
        // A pattern that leaves no name next to the properties would begin a name that nothing can end.
        let properties = keys.get("properties").and_then(Value::as_object).into_iter().flat_map(|map| map.keys());
        let properties: HashSet<String> = properties.cloned().collect();
        let Some(Value::Object(patterns)) = keys.get_mut("patternProperties") else { return };
        let is_taken =
            |pattern: &str| finite(pattern).is_some_and(|names| names.iter().all(|name| properties.contains(name)));
        patterns.retain(|pattern, _| !is_taken(pattern));
    }

    /// Returns a pointer whose parts are plain names.
    fn plain_pointer(&self, at: &str) -> String {
        let Some(path) = at.strip_prefix("#/").filter(|path| path.contains(['~', '%'])) else { return at.into() };
        let mut parts: Vec<String> = path.split('/').map(unescaped).collect();
        if let [place, name, ..] = &mut parts[..]
            && let Some(plain) = self.names.get(&[place.clone(), name.clone()])
        {
            *name = plain.clone();
        }
        format!("#/{}", parts.join("/"))
    }
}

/// Returns a part of a pointer in a reference (RFC 6901, 6).
fn unescaped(part: &str) -> String {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let [byte, after @ ..] = rest {
        let digit = |at: usize| after.get(at).and_then(|&b| char::from(b).to_digit(16));
        match (byte, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((high * 16 + low) as u8);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).replace("~1", "/").replace("~0", "~")
}

/// OpenAPI's `nullable`.
fn allow_null(keys: &mut Map<String, Value>) {
    match keys.get_mut("type") {
        Some(Value::Array(types)) if !types.contains(&json!("null")) => types.push("null".into()),
        Some(name @ Value::String(_)) => *name = json!([name.take(), "null"]),
        _ => return,
    }
    if let Some(Value::Array(values)) = keys.get_mut("enum")
        && !values.contains(&Value::Null)
    {
        values.push(Value::Null);
    }
}

/// `unevaluatedProperties: false` of an object that nothing else describes is `additionalProperties: false`.
fn only_these(keys: &mut Map<String, Value>) {
    const OTHERS: [&str; 5] = ["allOf", "anyOf", "oneOf", "$ref", "additionalProperties"];
    let shuts = keys.get("unevaluatedProperties") == Some(&json!(false));
    if shuts && keys.contains_key("properties") && !OTHERS.iter().any(|name| keys.contains_key(*name)) {
        keys.remove("unevaluatedProperties");
        keys.insert("additionalProperties".into(), false.into());
    }
}

/// Drops bounds that bound nothing, such as those of types of programs.
fn bounds(keys: &mut Map<String, Value>) {
    for (name, exclusive, sign) in [("minimum", "exclusiveMinimum", -1.0), ("maximum", "exclusiveMaximum", 1.0)] {
        for bound in [name, exclusive] {
            let Some(x) = keys.get(bound).and_then(Value::as_f64) else { continue };
            if x * sign >= MAX_BOUND {
                keys.remove(bound);
            } else if x != 0.0 && x.abs() < MIN_BOUND {
                // Towards the inside.
                let inside = x * sign < 0.0;
                keys.remove(bound);
                keys.insert(if inside { exclusive } else { bound }.into(), 0.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_of_generators_are_said_in_known_words() {
        let same = |schema: Value| (schema.clone(), schema, &[] as &[&str], &[] as &[&str]);
        let cases: Vec<(Value, Value, &[&str], &[&str])> = vec![
            same(json!({"type": "object", "properties": {"a": {"type": "string", "format": "date"}}})),
            same(json!({"type": "integer", "minimum": -9_007_199_254_740_991i64, "maximum": 9_007_199_254_740_991i64})),
            same(json!({"const": null})),
            same(json!(true)),
            (
                json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}),
                json!({"type": "object", "additionalProperties": {"type": "integer"}}),
                &[],
                &[],
            ),
            (
                json!({"propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": {"type": "null"}}),
                json!({"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": false}),
                &[],
                &[],
            ),
            (
                json!({"propertyNames": {"pattern": "^a"}}),
                json!({"patternProperties": {"^a": true}, "additionalProperties": false}),
                &[],
                &[],
            ),
            (json!({"propertyNames": {"minLength": 2}}), json!({}), &["propertyNames"], &[]),
            (
                json!({"title": "T", "type": "string", "format": "password", "examples": [1], "readOnly": true, "$comment": "c"}),
                json!({"type": "string"}),
                &[],
                &[],
            ),
            (json!({"uniqueItems": true, "items": {"uniqueItems": true}}), json!({"items": {}}), &["uniqueItems"], &[]),
            (json!({"uniqueItems": false}), json!({}), &[], &[]),
            (json!({"properties": {"b": {"not": {}}}}), json!({"properties": {"b": false}}), &[], &[]),
            (json!({"not": {"type": "string"}}), json!({}), &[], &["not"]),
            (json!({"if": {}, "then": {}}), json!({}), &[], &["if", "then"]),
            (json!({"required": null, "maximum": null, "minimum": 0}), json!({"minimum": 0}), &[], &[]),
            (json!({"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}), json!({}), &[], &[]),
            (json!({"minimum": i64::MIN, "maximum": u64::MAX}), json!({}), &[], &[]),
            (json!({"exclusiveMinimum": 2.2e-308}), json!({"exclusiveMinimum": 0}), &[], &[]),
            (json!({"minimum": 5e-324}), json!({"exclusiveMinimum": 0}), &[], &[]),
            (json!({"minimum": -5e-324}), json!({"minimum": 0}), &[], &[]),
            (json!({"type": "string", "nullable": true}), json!({"type": ["string", "null"]}), &[], &[]),
            (
                json!({"properties": {"a": {}}, "unevaluatedProperties": false}),
                json!({"properties": {"a": {}}, "additionalProperties": false}),
                &[],
                &[],
            ),
            (
                json!({"properties": {"a": {}, "b": {}}, "minProperties": 2}),
                json!({"properties": {"a": {}, "b": {}}}),
                &["minProperties"],
                &[],
            ),
            (
                json!({"$defs": {"a/b": {"type": "null"}, "G<T>": {}}, "anyOf": [{"$ref": "#/$defs/a~1b"},
                    {"$ref": "#/$defs/G%3CT%3E"}]}),
                json!({"$defs": {"definition 0": {"type": "null"}, "G<T>": {}}, "anyOf": [
                    {"$ref": "#/$defs/definition 0"}, {"$ref": "#/$defs/G<T>"}]}),
                &[],
                &[],
            ),
            (
                json!({"properties": {"score": {}, "ab": {}}, "patternProperties": {"^score$": {}, "^a[b]$": {}, "^x": {}}}),
                json!({"properties": {"score": {}, "ab": {}}, "patternProperties": {"^x": {}}}),
                &[],
                &[],
            ),
            (
                json!({"type": "string", "pattern": "^(?=.*\\d)(?=.*[A-Z]).{8,}$"}),
                json!({"type": "string", "pattern": "^.{8,}$", "allOf": [
                    {"type": "string", "pattern": "^(?:.*\\d)"}, {"type": "string", "pattern": "^(?:.*[A-Z])"}]}),
                &[],
                &[],
            ),
            (json!({"pattern": "a(?<!b)"}), json!({}), &[], &["pattern (look-around)"]),
            (json!({"$schema": "https://example.com/s"}), json!({}), &[], &[]),
        ];
        for (schema, expected, ignored, unsupported) in cases {
            let out = tidy(schema.clone());
            assert_eq!(out.schema, expected, "{schema}");
            assert_eq!((&out.ignored[..], &out.unsupported[..]), (ignored, unsupported), "{schema}");
            assert_eq!(tidy(out.schema).schema, expected, "{schema}");
        }
    }

    #[test]
    fn what_is_unsupported_is_named() {
        assert_eq!(tidy(json!({"items": {}})).refusal(), None);
        let one = tidy(json!({"items": {"not": {"const": 1}}})).refusal().unwrap();
        assert_eq!(one, "JSON schema keyword `not` is unsupported");
        let two = tidy(json!({"not": {"const": 1}, "contains": {}})).refusal().unwrap();
        assert_eq!(two, "JSON schema keywords `not`, `contains` are unsupported");
    }

    #[test]
    fn deep_schemas_are_left_to_the_limit() {
        let deep = (0..500).fold(json!({}), |inner, _| json!({"items": inner}));
        assert_eq!(tidy(deep.clone()).schema, deep);
        // Names of properties, each of which copies what holds more of them.
        let names = json!({"enum": ["a", "b"]});
        let twice = (0..40).fold(json!({}), |inner, _| json!({"propertyNames": names, "additionalProperties": inner}));
        let out = tidy(twice);
        assert!(out.schema.to_string().len() < 4 * MAX_RULE_BYTES && out.ignored == ["propertyNames"]);
    }
}
