//! `/openapi.json`: the routes' table in the words of OpenAPI 3.1.

use engine::sampler::{PARAMS, Param, ParamKind};
use serde_json::{Map, Value, json};

use super::fields::Field;
use super::routes::{Method, ROUTES, Route};
use crate::sampling;

/// Returns the whole description.
pub fn document() -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        let method = match route.method {
            Method::Get => "get",
            Method::Post => "post",
            Method::Delete => "delete",
        };
        // OpenAPI has no name for a parameter that takes the rest of the path.
        let path = route.path.replace("{*", "{");
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[method] = operation(route);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Moebius",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Language models with the APIs of OpenAI, Anthropic and Ollama. Unknown fields are \
                            ignored and named in the header x-ignored-fields; misspelled ones are refused.",
        },
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    })
}

/// Adds what a form needs for a sampling parameter: label, group and step.
fn describe(param: &Param, schema: &mut Value) {
    schema["title"] = param.label.into();
    schema["x-group"] = param.group.title().into();
    schema["x-step"] = match param.kind {
        ParamKind::Number { step, .. } => sampling::number(step),
        ParamKind::Count { .. } => 1.into(),
    };
}

fn operation(route: &Route) -> Value {
    let mut operation = json!({
        "summary": route.about,
        "responses": {"200": {"description": "The answer, in the form of the API"}},
    });
    if !route.open {
        operation["security"] = json!([{"key": []}, {}]);
    }
    if route.path.contains('{') {
        operation["parameters"] = json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}]);
    }
    if route.method == Method::Post {
        let property = |field: &Field| {
            let mut schema = field.kind.schema();
            schema["description"] = field.about.into();
            if let Some(param) = PARAMS.iter().find(|param| param.name == field.name) {
                describe(param, &mut schema);
            }
            (field.name.to_string(), schema)
        };
        let properties: Map<String, Value> = route.fields.iter().copied().flatten().map(property).collect();
        let schema = json!({"type": "object", "properties": properties, "required": route.required});
        operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema}}});
        operation["responses"]["4XX"] = json!({"description": "Why the request is refused"});
        operation["responses"]["429"] = json!({"description": "The queue is full; see Retry-After"});
    }
    operation
}
