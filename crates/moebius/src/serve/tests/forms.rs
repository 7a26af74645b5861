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
            chat("An animal?", json!({"response_format": format, "max_tokens": 60, "seed": seed, "temperature": 1.5}));
        let answer = server.ask(PATH, &body).await;
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap().to_string();
        assert!(in_form(&text) && answer["choices"][0]["finish_reason"] == "stop", "{answer}");
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        assert_eq!(joined(&server.post(PATH, &streamed).await.events().await, 0), text);
    }
    let form = json!({"type": "json_schema", "name": "animal", "schema": schema()});
    let body = json!({"input": "An animal?", "text": {"format": form}, "max_output_tokens": 60, "seed": 1});
    let answer = server.ask("/v1/responses", &body).await;
    assert!(in_form(answer["output"][0]["content"][0]["text"].as_str().unwrap()), "{answer}");
    let body = json!({"messages": [{"role": "user", "content": "An animal?"}], "max_tokens": 60, "seed": 1,
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
