//! Schemas whose objects take no properties but those they name.
//!
//! JSON Schema leaves objects open: a weak model then invents properties until its answer is cut. llama.cpp's grammars,
//! OpenAI's strict mode and xgrammar close them, and that is what people who write `properties` mean.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

/// What makes several schemas hold of one object: closed each by itself, they could not be met together.
const COMBINES: [&str; 8] = ["allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"];
/// What a schema may say about properties that it does not name.
const SAYS: [&str; 4] = ["additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"];
/// Keywords whose value is a schema.
const ONE: [&str; 6] =
    ["items", "additionalItems", "additionalProperties", "contains", "unevaluatedItems", "unevaluatedProperties"];
/// Keywords whose value is a list of schemas, of which one holds.
const CHOICES: [&str; 2] = ["anyOf", "oneOf"];
/// Keywords whose value has schemas by name.
const MAPS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
/// Deeper ones are left as they are: a schema that deep is refused.
const MAX_DEPTH: usize = 100;

/// Returns the schema, its objects closed: `additionalProperties` is false wherever `properties` stands and nothing is
/// said of others. Left open are objects that requires a property that they do not name, and those on which several
/// schemas meet (`allOf`, a `$ref` alongside other keywords), as these name each other's properties.
pub fn closed(mut schema: Value) -> Value {
    let mut shared = HashSet::new();
    meeting_places(&schema, &mut shared, 0);
    let open: HashSet<*const Value> =
        shared.iter().filter_map(|at| schema.pointer(at)).map(std::ptr::from_ref).collect();
    close(&mut schema, &open, 0);
    schema
}

/// Collects the targets of references that hold together with other schemas.
fn meeting_places(value: &Value, found: &mut HashSet<String>, depth: usize) {
    if depth > MAX_DEPTH {
        return;
    }
    match value {
        Value::Array(items) => items.iter().for_each(|item| meeting_places(item, found, depth + 1)),
        Value::Object(keys) => {
            let mut lists = vec!["allOf"];
            if !choice_stands_alone(keys) {
                lists.extend(CHOICES);
            }
            let members = lists.into_iter().filter_map(|name| keys.get(name)?.as_array()).flatten();
            found.extend(members.filter_map(target));
            // Annotations beside a reference say nothing about the value.
            let notes = ["$ref", "description", "title", "default", "examples", "deprecated", "$comment", "$defs"];
            if keys.keys().any(|key| !notes.contains(&key.as_str())) {
                found.extend(target(value));
            }
            keys.values().for_each(|inner| meeting_places(inner, found, depth + 1));
        }
        _ => {}
    }
}

/// Returns where a schema's reference points to, inside the same document.
fn target(schema: &Value) -> Option<String> {
    schema.get("$ref")?.as_str()?.strip_prefix('#').map(String::from)
}

/// Returns whether the alternatives of a schema hold of an object that nothing else alongside them describes.
fn choice_stands_alone(keys: &Map<String, Value>) -> bool {
    let all = ["properties", "required", "allOf", "$ref", "if", "dependentSchemas", "anyOf", "oneOf"];
    all.iter().filter(|key| keys.contains_key(**key)).count() <= 1
}

/// Closes a schema and those in it, but for those that stay `open`. These are told by where they are, which holds as
/// nothing is put into an object before all in it is closed.
fn close(schema: &mut Value, open: &HashSet<*const Value>, depth: usize) {
    if depth > MAX_DEPTH || open.contains(&std::ptr::from_ref(schema)) {
        return;
    }
    let Some(keys) = schema.as_object_mut() else { return };
    for name in ONE {
        if let Some(inner) = keys.get_mut(name) {
            close(inner, open, depth + 1);
        }
    }
    let choices: &[&str] = if choice_stands_alone(keys) { &CHOICES } else { &[] };
    for name in choices.iter().chain(&["prefixItems"]) {
        let list = keys.get_mut(*name).and_then(Value::as_array_mut);
        list.into_iter().flatten().for_each(|inner| close(inner, open, depth + 1));
    }
    for name in MAPS {
        let map = keys.get_mut(name).and_then(Value::as_object_mut);
        map.into_iter().flat_map(|map| map.values_mut()).for_each(|inner| close(inner, open, depth + 1));
    }
    // Parts of the members of an `allOf` meet too, so nothing in it is closed.
    if names_all(keys) {
        keys.insert("additionalProperties".into(), json!(false));
    }
}

/// Returns whether an object names all the properties that it is meant to have.
fn names_all(keys: &Map<String, Value>) -> bool {
    let Some(properties) = keys.get("properties").and_then(Value::as_object) else { return false };
    let mut required = keys.get("required").and_then(Value::as_array).into_iter().flatten();
    !SAYS.iter().chain(&COMBINES).any(|key| keys.contains_key(*key))
        && required.all(|name| name.as_str().is_none_or(|name| properties.contains_key(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_close_where_they_name_all() {
        let named = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
        let shut = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
            "additionalProperties": false});
        let same = |schema: Value| (schema.clone(), schema);
        let cases = [
            (named.clone(), shut.clone()),
            (json!({"type": "array", "items": named}), json!({"type": "array", "items": shut})),
            (json!({"anyOf": [named, {"type": "null"}]}), json!({"anyOf": [shut, {"type": "null"}]})),
            (
                json!({"properties": {"b": named, "required": {"enum": [named]}}}),
                json!({"properties": {"b": shut, "required": {"enum": [named]}}, "additionalProperties": false}),
            ),
            // As pydantic writes it.
            (
                json!({"$defs": {"A": named}, "properties": {"x": {"$ref": "#/$defs/A", "description": "an a"}}}),
                json!({"$defs": {"A": shut}, "properties": {"x": {"$ref": "#/$defs/A", "description": "an a"}},
                    "additionalProperties": false}),
            ),
            // The schema's own word counts.
            same(json!({"properties": {"a": {}}, "additionalProperties": true})),
            same(json!({"properties": {"a": {}}, "patternProperties": {"^x": {}}})),
            same(json!({"type": "object"})),
            same(json!({"properties": {"a": {}}, "required": ["a", "b"]})),
            // What holds together stays open.
            same(json!({"allOf": [named, {"properties": {"b": {}}}]})),
            same(json!({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]})),
            same(json!({"$defs": {"A": named}, "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}]})),
            same(json!({"properties": {"a": {}}, "oneOf": [named, {"properties": {"b": {}}}]})),
            same(json!({"$defs": {"A": named}, "required": ["b"], "anyOf": [{"$ref": "#/$defs/A"}, {}]})),
            same(json!({"$defs": {"A": named}, "$ref": "#/$defs/A", "properties": {"b": {}}})),
            same(json!(true)),
        ];
        for (schema, expected) in cases {
            assert_eq!(closed(schema.clone()), expected, "{schema}");
        }
        let deep = (0..500).fold(json!({}), |inner, _| json!({"items": inner}));
        drop(closed(deep));
    }

    /// References to every level of a schema that nests, and is large at its bottom.
    #[test]
    fn time_is_linear_in_the_schema() {
        let bottom = json!({"properties": {"a": {"enum": vec![0; 100_000]}}});
        let at = |n: usize| json!({"$ref": format!("#/items{}", "/items".repeat(n))});
        let mut schema = (0..90).fold(bottom, |inner, _| json!({"items": inner}));
        schema["allOf"] = (0..89).map(at).collect();
        let (same, took) = sys::rank::Work::default().run(|| closed(schema.clone()));
        assert_eq!(same, schema);
        assert!(took.as_millis() < 200, "{took:?}");
    }
}
