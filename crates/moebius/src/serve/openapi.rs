//! `/openapi.json`: the routes' table in the words of OpenAPI 3.1.

use serde_json::{Map, Value, json};

use super::fields::Field;
use super::routes::{Method, ROUTES, Route};

/// The whole description.
pub fn document() -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        let method = match route.method {
            Method::Get => "get",
            Method::Post => "post",
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
            "description": "Language models behind the APIs of OpenAI, Anthropic and Ollama. Unknown fields are \
                            ignored and named in the header x-ignored-fields; misspelt ones are refused.",
        },
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    })
}

fn operation(route: &Route) -> Value {
    let mut operation = json!({
        "summary": route.about,
        "responses": {"200": {"description": "As the API has it"}},
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
            (field.name.to_string(), schema)
        };
        let properties: Map<String, Value> = route.fields.iter().copied().flatten().map(property).collect();
        let schema = json!({"type": "object", "properties": properties, "required": route.required});
        operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema}}});
        operation["responses"]["4XX"] = json!({"description": "What is wrong with the request"});
        operation["responses"]["429"] = json!({"description": "The queue is full; see Retry-After"});
    }
    operation
}
