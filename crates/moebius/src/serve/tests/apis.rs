//! Anthropic's messages and OpenAI's responses: streams agree with whole answers, conversations become what templates
//! read, errors take each API's shape.

use serde_json::{Value, json};

use super::super::{anthropic, responses};
use super::{Server, chat};

const STORY: &str = "Tell me a story about a fox who lost his hat";

/// Events with their names, in order.
async fn named(server: &Server, path: &str, body: &Value) -> Vec<(String, Value)> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let text = server.post(path, &body).await.text().await;
    let events = text.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':'));
    let parse = |event: &str| {
        let (name, data) = event.strip_prefix("event: ")?.split_once("\ndata: ")?;
        Some((name.to_string(), serde_json::from_str(data).ok()?))
    };
    events.map(|event| parse(event).unwrap_or_else(|| panic!("{event}"))).collect()
}

fn of<'a>(events: &'a [(String, Value)], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|(n, _)| n == name).map(|(_, data)| data).collect()
}

#[tokio::test]
async fn anthropic_streams_are_whole_messages_in_pieces() {
    let server = Server::start(2, 4);
    let messages = json!([{"role": "user", "content": [{"type": "text", "text": STORY}]}]);
    for (more, reason) in [(json!({}), "max_tokens"), (json!({"stop_sequences": ["fox"]}), "stop_sequence")] {
        let mut body = json!({"model": "m", "messages": messages, "max_tokens": 24, "seed": 7, "system": "Be kind"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let whole = server.ask("/v1/messages", &body).await;
        assert_eq!(whole["stop_reason"], reason, "{whole}");
        assert_eq!(whole["stop_sequence"], if reason == "stop_sequence" { json!("fox") } else { Value::Null });
        let events = named(&server, "/v1/messages", &body).await;
        let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names[..2], ["message_start", "content_block_start"]);
        assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
        assert!(events.iter().all(|(name, data)| data["type"] == *name));
        let deltas = of(&events, "content_block_delta");
        let text: String = deltas.iter().map(|e| e["delta"]["text"].as_str().unwrap()).collect();
        assert_eq!(text, whole["content"][0]["text"].as_str().unwrap());
        let end = of(&events, "message_delta")[0];
        assert_eq!(end["delta"]["stop_reason"], whole["stop_reason"]);
        assert_eq!(end["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
        // Cached tokens are counted beside the others.
        let count = server.ask("/v1/messages/count_tokens", &body).await["input_tokens"].as_u64().unwrap();
        let usage = &end["usage"];
        let (input, cached) = (&usage["input_tokens"], &usage["cache_read_input_tokens"]);
        assert_eq!(input.as_u64().unwrap() + cached.as_u64().unwrap(), count);
        assert_eq!(of(&events, "message_start")[0]["message"]["usage"]["input_tokens"], count);
    }
    // A prefilled answer is continued.
    let mut begun = json!({"messages": messages, "max_tokens": 8, "temperature": 0});
    begun["messages"].as_array_mut().unwrap().push(json!({"role": "assistant", "content": "Once upon a"}));
    let text = server.ask("/v1/messages", &begun).await["content"][0]["text"].as_str().unwrap().to_string();
    assert!(text.starts_with(" time"), "{text}");
    server.idle().await;
}

#[tokio::test]
async fn responses_stream_as_numbered_events() {
    let server = Server::start(2, 4);
    let body = json!({"input": STORY, "max_output_tokens": 20, "seed": 7, "instructions": "Be kind",
        "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}});
    let whole = server.ask("/v1/responses", &body).await;
    assert_eq!(
        (&whole["status"], &whole["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    assert_eq!(whole["metadata"]["a"], "b");
    let part = &whole["output"][0]["content"][0];
    assert_eq!(part["logprobs"].as_array().unwrap().len(), 20);
    let events = named(&server, "/v1/responses", &body).await;
    for (i, (name, data)) in events.iter().enumerate() {
        assert_eq!((&data["type"], &data["sequence_number"]), (&json!(name), &json!(i)));
    }
    let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).filter(|n| !n.ends_with("text.delta")).collect();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(names, expected);
    let text: String = of(&events, "response.output_text.delta").iter().map(|e| e["delta"].as_str().unwrap()).collect();
    assert_eq!(text, part["text"].as_str().unwrap());
    let last = &of(&events, "response.incomplete")[0]["response"];
    assert_eq!(last["output"][0]["content"][0]["text"], part["text"]);
    assert_eq!(last["usage"]["output_tokens"], 20);
    assert_eq!(last["output"][0]["id"], of(&events, "response.output_item.done")[0]["item"]["id"]);
    // The same conversation through the older route gives the same text.
    let mut older = chat(STORY, json!({"max_tokens": 20}));
    older["messages"].as_array_mut().unwrap().insert(0, json!({"role": "system", "content": "Be kind"}));
    let older = server.ask("/v1/chat/completions", &older).await;
    assert_eq!(older["choices"][0]["message"]["content"], part["text"]);
}

#[test]
fn conversations_become_what_templates_read() {
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}});
    let anthropic_cases = [
        (
            json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}], "is_error": true},
                    {"type": "text", "text": "and?"}]}]),
            json!([{"role": "user", "content": "hi"},
                {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [call("1")]},
                {"role": "tool", "tool_call_id": "1", "content": "Error: r"}, {"role": "user", "content": "and?"}]),
        ),
        (
            json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
            json!([{"role": "user", "content": "a\nb"}]),
        ),
    ];
    for (messages, expected) in anthropic_cases {
        let body = json!({"messages": messages});
        let (conversation, _) = anthropic::conversation_of(body.as_object().unwrap()).unwrap();
        assert_eq!(Value::from(conversation.messages), expected);
    }
    let items = json!([
        {"role": "developer", "content": "s"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\"x\": 1}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{\"x\": 1}"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
    ]);
    let body = json!({"input": items});
    let (conversation, _) = responses::conversation_of(body.as_object().unwrap()).unwrap();
    let expected = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [call("1"), call("2")]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]);
    assert_eq!(Value::from(conversation.messages), expected);
}

#[tokio::test]
async fn each_api_says_errors_in_its_own_shape() {
    let server = Server::start(1, 1);
    let image = json!({"type": "image", "source": {"type": "url", "url": "http://localhost:1/x.png"}});
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let thinking = |how: Value| json!({"messages": user(json!("x")), "max_tokens": 1, "thinking": how});
    let cases = [
        ("/v1/messages", json!({"messages": user(json!("x"))}), "`max_tokens` is missing"),
        ("/v1/messages", json!({"messages": [], "max_tokens": 1}), "`messages` is empty"),
        ("/v1/messages", json!({"messages": user(json!([image])), "max_tokens": 1}), "this model reads text only"),
        (
            "/v1/messages",
            json!({"messages": [{"role": "tool", "content": "x"}], "max_tokens": 1}),
            "must be one of user",
        ),
        ("/v1/messages", json!({"messages": user(json!("x")), "max_tokens": 0}), "`max_tokens` must be"),
        ("/v1/messages", thinking(json!({"type": "on"})), "`thinking.type` must be one of"),
        (
            "/v1/messages",
            thinking(json!({"type": "enabled", "budget_tokens": "9"})),
            "`thinking.budget_tokens` must be",
        ),
        ("/v1/messages", thinking(json!({"type": "enabled", "budget_tokens": -1})), "`thinking.budget_tokens` must be"),
        (
            "/v1/messages",
            json!({"messages": user(json!("x")), "max_tokens": 1, "tool_choice": {"type": "tool", "name": "f"}}),
            "not among the tools",
        ),
        ("/v1/messages/count_tokens", json!({}), "`messages` is missing"),
        ("/v1/responses", json!({"input": "x", "previous_response_id": "resp_1"}), "stores no responses"),
        ("/v1/responses", json!({"input": "x", "background": true}), "`background` is unsupported"),
        ("/v1/responses", json!({"input": []}), "`input` is empty"),
        ("/v1/responses", json!({"input": [{"type": "item_reference", "id": "x"}]}), "stores no responses"),
        ("/v1/messages/nothing", json!({}), "unknown route"),
    ];
    for (path, body, expected) in cases {
        let reply = server.post(path, &body).await;
        let request_id = reply.headers["request-id"].to_str().unwrap().to_string();
        let (status, answer) = reply.json().await;
        assert!(status.is_client_error());
        assert!(answer["error"]["message"].as_str().unwrap().contains(expected), "{path} {body}: {answer}");
        if path.starts_with("/v1/messages") {
            assert_eq!((&answer["type"], &answer["request_id"]), (&json!("error"), &json!(request_id)));
        } else {
            assert_eq!(answer["error"]["type"], "invalid_request_error");
        }
    }
}
