//! Answers that must have a form: they have it, and what cannot be met is refused before any token.

use serde_json::{Value, json};

use super::{Server, chat, joined};

const PATH: &str = "/v1/chat/completions";

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "bear"]}, "legs": {"type": "integer", "minimum": 2, "maximum": 4}},
        "required": ["animal", "legs"],
        "additionalProperties": false,
    })
}

/// Between the parts of a JSON text a model may put up to 48 blanks, and this one does: the limits leave room for all
/// of them.
fn in_form(text: &str) -> bool {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    ["fox", "bear"].iter().any(|animal| value["animal"] == *animal) && (2..=4).any(|legs| value["legs"] == legs)
}

#[tokio::test]
async fn answers_keep_to_their_form() {
    let server = Server::start(4, 8);
    let format = json!({"type": "json_schema", "json_schema": {"name": "animal", "strict": true, "schema": schema()}});
    for seed in 0..3 {
        let body =
            chat("An animal?", json!({"response_format": format, "max_tokens": 440, "seed": seed, "temperature": 1.5}));
        let answer = server.ask(PATH, &body).await;
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap().to_string();
        assert!(in_form(&text) && answer["choices"][0]["finish_reason"] == "stop", "{answer}");
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        assert_eq!(joined(&server.post(PATH, &streamed).await.events().await, 0), text);
    }
    let form = json!({"type": "json_schema", "name": "animal", "schema": schema()});
    let body = json!({"input": "An animal?", "text": {"format": form}, "max_output_tokens": 440, "seed": 1});
    let answer = server.ask("/v1/responses", &body).await;
    assert!(in_form(answer["output"][0]["content"][0]["text"].as_str().unwrap()), "{answer}");
    let body = json!({"messages": [{"role": "user", "content": "An animal?"}], "max_tokens": 440, "seed": 1,
        "output_config": {"format": {"type": "json_schema", "schema": schema()}}});
    let answer = server.ask("/v1/messages", &body).await;
    assert!(in_form(answer["content"][0]["text"].as_str().unwrap()), "{answer}");
    let regex = chat("A number?", json!({"regex": "[0-9]{3}-[a-f]{2}", "max_tokens": 30}));
    let text = server.ask(PATH, &regex).await["choices"][0]["message"]["content"].as_str().unwrap().to_string();
    assert!(text.len() == 6 && text.as_bytes()[3] == b'-', "{text}");
    let grammar = json!({"prompt": "Yes or no? ", "grammar": "start: \"yes\" | \"no\"", "max_tokens": 9, "n": 2});
    let answer = server.ask("/v1/completions", &grammar).await;
    for choice in answer["choices"].as_array().unwrap() {
        assert!(choice["text"] == "yes" || choice["text"] == "no", "{answer}");
    }
    server.idle().await;
}

#[tokio::test]
async fn forms_that_cannot_be_met_are_refused() {
    let server = Server::start(2, 4);
    let format = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
    let deep = (0..100).fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}));
    let cases = [
        (format(json!(false)), "response_format"),
        (format(json!({"enum": []})), "response_format"),
        (format(json!({"type": "king"})), "response_format"),
        (format(json!({"$ref": "http://localhost:1/schema.json"})), "response_format"),
        (format(json!({"$ref": "file:///etc/passwd"})), "response_format"),
        (format(deep), "response_format"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format: the schema"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": 5}), "response_format"),
        (json!({"regex": "(unclosed"}), "regex"),
        (json!({"regex": "x".repeat(300 << 10)}), "regex"),
        (json!({"grammar": "no start here"}), "grammar"),
        (json!({"grammar": "start: \"a\"", "regex": "b"}), "grammar"),
    ];
    for (more, param) in cases {
        let body = chat("x", more);
        let (status, answer) = server.post(PATH, &body).await.json().await;
        let body: String = body.to_string().chars().take(200).collect();
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(param)), "{body}: {answer}");
    }
    assert_eq!(server.idle().await.tokens, 0);
}

fn weather() -> Value {
    json!({"name": "get_weather", "description": "The weather of a city", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": false}})
}

fn in_schema(arguments: &Value) -> bool {
    ["Rome", "Oslo"].iter().any(|city| arguments["city"] == *city)
}

#[tokio::test]
async fn tools_that_must_be_called_are_called() {
    let server = Server::start(4, 8);
    let tools = json!([{"type": "function", "function": weather()},
        {"type": "function", "function": {"name": "nothing", "parameters": {"type": "object", "properties": {}, "additionalProperties": false}}}]);
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    for (choice, name) in [(json!("required"), None), (named, Some("get_weather"))] {
        let more = json!({"tools": tools, "tool_choice": choice, "parallel_tool_calls": false, "max_tokens": 300});
        let body = chat("What is the weather in Rome?", more);
        let answer = server.ask(PATH, &body).await;
        let choice = &answer["choices"][0];
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        assert!(name.is_none_or(|name| call["function"]["name"] == name), "{answer}");
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(call["function"]["name"] == "nothing" || in_schema(&arguments), "{answer}");
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let events = server.post(PATH, &streamed).await.events().await;
        let deltas = events.iter().filter_map(|e| e["choices"][0]["delta"]["tool_calls"][0]["function"].as_object());
        let (mut name, mut text) = (String::new(), String::new());
        for delta in deltas {
            name += delta.get("name").and_then(Value::as_str).unwrap_or_default();
            text += delta["arguments"].as_str().unwrap();
        }
        assert_eq!((&json!(name), &json!(text)), (&call["function"]["name"], &call["function"]["arguments"]));
        // The result goes back, and an answer comes.
        let mut next = body.clone();
        next["tool_choice"] = json!("none");
        next["messages"].as_array_mut().unwrap().extend([
            choice["message"].clone(),
            json!({"role": "tool", "tool_call_id": call["id"], "content": "sunny"}),
        ]);
        assert_eq!(server.ask(PATH, &next).await["choices"][0]["message"]["tool_calls"], Value::Null);
    }
    let mut tool = weather();
    tool["input_schema"] = tool["parameters"].take();
    let body = json!({"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 300, "seed": 1,
        "tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
    let answer = server.ask("/v1/messages", &body).await;
    let block = &answer["content"][0];
    assert_eq!((&answer["stop_reason"], &block["type"]), (&json!("tool_use"), &json!("tool_use")), "{answer}");
    assert!(in_schema(&block["input"]), "{answer}");
    let mut tool = weather();
    tool["type"] = json!("function");
    let body = json!({"input": "Weather?", "max_output_tokens": 300, "seed": 1, "tools": [tool],
        "tool_choice": {"type": "function", "name": "get_weather"}, "parallel_tool_calls": false});
    let answer = server.ask("/v1/responses", &body).await;
    let item = &answer["output"][0];
    assert_eq!((&item["type"], &item["name"]), (&json!("function_call"), &json!("get_weather")), "{answer}");
    assert!(in_schema(&serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap()), "{answer}");
    let none = chat("x", json!({"tool_choice": "required"}));
    assert_eq!(server.post(PATH, &none).await.status, 400);
    server.idle().await;
}

/// GBNF that a translation by recursion, by asking twice or by writing out cannot bear.
#[tokio::test]
async fn costly_gbnf_is_refused_by_every_route() {
    let server = Server::start(2, 4);
    let chain: String = (1..9_000).map(|i| format!("r{i}::=r{}\n", i - 1)).collect();
    let twice = (0..40).map(|i| format!("x{i} ::= x{} x{}\n", i + 1, i + 1)).collect::<String>();
    let costly = [
        format!("root::=r8999\nr0::=\"a\"\n{chain}"),
        format!("root ::= {}\"a\"{}", "(".repeat(64), ")".repeat(64)),
        format!("root ::= \"y\" root | {}\nx ::= {}", "x ".repeat(90_000), "\"a\" ".repeat(19_000)),
        format!("root ::= x0\n{twice}x40 ::= \"a\"\n"),
    ];
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let routes = [
        ("/v1/completions", json!({"prompt": "a"})),
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 4})),
        ("/v1/responses", json!({"input": "a"})),
        ("/completion", json!({"prompt": "a"})),
    ];
    for (route, body) in &routes {
        for field in ["grammar", "guided_grammar", "structured_outputs"] {
            for (i, gbnf) in costly.iter().enumerate() {
                let mut body = body.clone();
                body[field] = if field == "structured_outputs" { json!({"grammar": gbnf}) } else { json!(gbnf) };
                let (status, answer) = server.post(route, &body).await.json().await;
                let said = answer.to_string();
                assert_eq!(status, 400, "{route} {field} {i}: {said}");
                assert!(
                    said.contains(field) && said.contains("GBNF") && said.len() < 400,
                    "{route} {field} {i}: {said}"
                );
            }
        }
    }
    let body = json!({"prompt": "Yes or no? ", "grammar": "root ::= \"yes\" | \"no\"", "max_tokens": 9});
    let answer = server.ask("/v1/completions", &body).await;
    assert!(["yes", "no"].iter().any(|word| answer["choices"][0]["text"] == *word), "{answer}");
}
