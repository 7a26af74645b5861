//! Answers that a limit cuts off, and calls that break: whole and streamed answers have the same parts and the same end
//! in every API, and nothing that was cut off is told as finished.

use serde_json::{Map, Value, json};

use super::{Reply, Server, chat};

/// A part of an answer in any API: its kind, its text or name, and its arguments.
pub type Part = (&'static str, String, Value);

fn parsed(arguments: &str) -> Value {
    serde_json::from_str(arguments).unwrap_or_else(|_| json!({"cut": arguments}))
}

/// Parts and end of a choice of chat completions.
fn of_choice(message: &Value, finish: &Value) -> (Vec<Part>, Value) {
    let mut parts = Vec::new();
    if let Some(text) = message["content"].as_str().filter(|text| !text.is_empty()) {
        parts.push(("text", text.to_string(), Value::Null));
    }
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let function = &call["function"];
        let text = |name: &str| function[name].as_str().unwrap_or_default().to_string();
        parts.push(("call", text("name"), parsed(&text("arguments"))));
    }
    (parts, finish.clone())
}

async fn chat_stream(reply: Reply) -> (Vec<Part>, Value) {
    let (mut content, mut calls, mut finish) = (String::new(), Vec::<Value>::new(), Value::Null);
    for event in reply.events().await {
        let choice = &event["choices"][0];
        content += choice["delta"]["content"].as_str().unwrap_or_default();
        for delta in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            if delta["id"].is_string() {
                calls.push(json!({"function": {"name": delta["function"]["name"], "arguments": ""}}));
            }
            let call = &mut calls[delta["index"].as_u64().unwrap() as usize]["function"]["arguments"];
            *call = (call.as_str().unwrap().to_owned() + delta["function"]["arguments"].as_str().unwrap()).into();
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    of_choice(&json!({"content": content, "tool_calls": calls}), &finish)
}

/// Parts and status of a response, the status of each item among them.
pub fn of_response(response: &Value) -> (Vec<Part>, Value) {
    let parts = response["output"].as_array().unwrap().iter().map(of_item).collect();
    (parts, json!([response["status"], response["incomplete_details"]["reason"]]))
}

/// Returns an item of a response; what it has of ids is left out.
fn of_item(item: &Value) -> Part {
    let status = item["status"].as_str().unwrap();
    match item["type"].as_str().unwrap() {
        "message" => ("text", item["content"][0]["text"].as_str().unwrap().into(), json!(status)),
        "reasoning" => ("thought", item["content"][0]["text"].as_str().unwrap().into(), json!(status)),
        "custom_tool_call" => ("custom", item["name"].as_str().unwrap().into(), json!([status, item["input"]])),
        _ => {
            let arguments = parsed(item["arguments"].as_str().unwrap());
            ("call", item["name"].as_str().unwrap().into(), json!([status, item["namespace"], arguments]))
        }
    }
}

/// Returns what the items of a stream come to, which is what its last event says.
pub async fn response_stream(reply: Reply) -> (Vec<Part>, Value) {
    let events = reply.events().await;
    let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
    let items: Vec<Part> = done.map(|event| of_item(&event["item"])).collect();
    for event in events.iter().filter(|event| event["type"] == "response.function_call_arguments.done") {
        let arguments = event["arguments"].as_str().unwrap();
        assert!(serde_json::from_str::<Map<String, Value>>(arguments).is_ok(), "{event}");
    }
    let last = events.last().unwrap();
    let (parts, status) = of_response(&last["response"]);
    assert_eq!(items, parts);
    assert_eq!(last["type"], format!("response.{}", last["response"]["status"].as_str().unwrap()));
    (parts, status)
}

pub fn of_message(message: &Value) -> (Vec<Part>, Value) {
    let parts = message["content"].as_array().unwrap().iter().map(|block| match block["type"].as_str().unwrap() {
        "text" => ("text", block["text"].as_str().unwrap().to_string(), Value::Null),
        "thinking" => ("thought", block["thinking"].as_str().unwrap().to_string(), Value::Null),
        _ => ("call", block["name"].as_str().unwrap().to_string(), block["input"].clone()),
    });
    (parts.collect(), message["stop_reason"].clone())
}

/// Puts a stream's blocks together as clients do: of arguments that were cut off, the members that came whole.
pub async fn message_stream(reply: Reply) -> (Vec<Part>, Value) {
    let (mut blocks, mut reason) = (Vec::<(Value, String)>::new(), Value::Null);
    for event in reply.events().await {
        match event["type"].as_str().unwrap() {
            "content_block_start" => blocks.push((event["content_block"].clone(), String::new())),
            "content_block_delta" => {
                let delta = &event["delta"];
                let more = ["text", "thinking", "partial_json"].into_iter().find_map(|name| delta[name].as_str());
                blocks[event["index"].as_u64().unwrap() as usize].1 += more.unwrap_or_default();
            }
            "message_delta" => reason = event["delta"]["stop_reason"].clone(),
            _ => {}
        }
    }
    let whole = blocks.into_iter().map(|(mut block, text)| {
        match block["type"].as_str().unwrap() {
            "tool_use" => {
                let call = super::super::parts::Call { arguments: text, ..Default::default() };
                block["input"] = call.object();
            }
            kind => {
                let name = if kind == "thinking" { "thinking" } else { "text" };
                block[name] = text.into();
            }
        }
        block
    });
    of_message(&json!({"content": whole.collect::<Vec<_>>(), "stop_reason": reason}))
}

fn of_lines(lines: &[Value]) -> (Vec<Part>, Value) {
    let (mut text, mut parts) = (String::new(), Vec::new());
    for line in lines {
        text += line["message"]["content"].as_str().unwrap();
        for call in line["message"]["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            parts.push(("call", function["name"].as_str().unwrap().to_string(), function["arguments"].clone()));
        }
    }
    if !text.is_empty() {
        parts.insert(0, ("text", text, Value::Null));
    }
    (parts, lines.last().unwrap()["done_reason"].clone())
}

/// Returns an answer of each API, whole and streamed, for the same request: its parts and why it ended.
async fn everywhere(server: &Server, more: &Value, most: usize) -> Vec<(&'static str, [(Vec<Part>, Value); 2])> {
    let user = json!([{"role": "user", "content": "Tell me about a fox"}]);
    let with = |mut body: Value, stream: bool| {
        body["stream"] = stream.into();
        body["temperature"] = 0.into();
        body
    };
    let mut out = Vec::new();
    let mut body = more.clone();
    (body["messages"], body["max_tokens"]) = (user.clone(), most.into());
    let path = "/v1/chat/completions";
    let whole = &server.ask(path, &with(body.clone(), false)).await["choices"][0];
    let streamed = chat_stream(server.post(path, &with(body.clone(), true)).await).await;
    out.push((path, [of_choice(&whole["message"], &whole["finish_reason"]), streamed]));

    let path = "/v1/responses";
    let flat = |tool: &Value| {
        let mut function = tool["function"].clone();
        function["type"] = "function".into();
        function
    };
    let mut body = more.clone();
    (body["input"], body["max_output_tokens"]) = ("Tell me about a fox".into(), most.into());
    let tools = more["tools"].as_array().unwrap();
    body["tools"] = tools.iter().map(flat).collect();
    let whole = of_response(&server.ask(path, &with(body.clone(), false)).await);
    out.push((path, [whole, response_stream(server.post(path, &with(body, true)).await).await]));

    let path = "/v1/messages";
    let mut body = more.clone();
    (body["messages"], body["max_tokens"]) = (user.clone(), most.into());
    let schema =
        |tool: &Value| json!({"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]});
    body["tools"] = tools.iter().map(schema).collect();
    if body.as_object_mut().unwrap().remove("tool_choice").is_some() {
        body["tool_choice"] = json!({"type": "any"});
    }
    let whole = of_message(&server.ask(path, &with(body.clone(), false)).await);
    out.push((path, [whole, message_stream(server.post(path, &with(body, true)).await).await]));

    if more.get("grammar").is_none() {
        let path = "/api/chat";
        let options = json!({"temperature": 0, "num_predict": most});
        let body = json!({"messages": user, "tools": more["tools"], "options": options, "stream": false});
        let whole = of_lines(&[server.ask(path, &body).await]);
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let text = server.post(path, &streamed).await.text().await;
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        out.push((path, [whole, of_lines(&lines)]));
    }
    out
}

/// Returns whether an end says that a limit came.
fn is_limit(end: &Value) -> bool {
    ["length", "max_tokens"].iter().any(|word| end == word) || *end == json!(["incomplete", "max_output_tokens"])
}

fn tool(name: &str, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

#[tokio::test]
async fn cut_calls_are_never_told_as_finished() {
    let server = Server::start(2, 4);
    let tool = tool(
        "a",
        json!({"type": "object", "properties": {"q": {"type": "integer", "minimum": 0, "maximum": 9},
        "s": {"type": "string", "minLength": 60}}, "required": ["q", "s"], "additionalProperties": false}),
    );
    let more = json!({"tools": [tool], "tool_choice": "required"});
    let mut n_partial = 0;
    for most in [1, 8, 14, 20, 26, 32, 38] {
        for (path, [whole, streamed]) in everywhere(&server, &more, most).await {
            assert_eq!(whole, streamed, "{path} {most}");
            let (parts, end) = whole;
            if path == "/api/chat" {
                continue;
            }
            assert!(is_limit(&end), "{path} {most}: {end}");
            assert!(parts.iter().all(|(kind, ..)| *kind == "call"), "{path} {most}: {parts:?}");
            n_partial += parts.len();
            for (_, _, arguments) in &parts {
                assert!(path != "/v1/responses" || arguments[0] == "incomplete", "{arguments}");
            }
        }
    }
    assert!(n_partial > 6, "{n_partial}");
    server.idle().await;
}

#[tokio::test]
async fn broken_calls_are_text_without_marks() {
    let server = Server::start(2, 4);
    let get = tool("get", json!({"type": "object", "properties": {"q": {"type": "string"}}}));
    let call =
        |arguments: &str| format!(r#"<tool_call>\n{{\"name\": \"get\", \"arguments\": {arguments}}}\n</tool_call>"#);
    let whole_call = call(r#"{\"q\": \"a\"}"#);
    for (text, kinds, finish) in [
        (call(r#"{\"q\": \"a\nb\"}"#), &["text"][..], "stop"),
        (call(r#"{\"q\": tru}"#), &["text"], "stop"),
        (format!("{whole_call}\\n{}", call(r#"{\"q\": }"#)), &["text", "call"], "tool_calls"),
        (format!("So: {whole_call}\\n{whole_call}"), &["text", "call", "call"], "tool_calls"),
    ] {
        let more = json!({"tools": [get], "grammar": format!("root ::= \"{text}\"")});
        for (path, [whole, streamed]) in everywhere(&server, &more, 200).await {
            assert_eq!(whole, streamed, "{path} {text}");
            let (mut parts, end) = whole;
            assert!(parts.iter().all(|(_, text, _)| !text.contains("tool_call>")), "{path}: {parts:?}");
            if path == "/v1/chat/completions" {
                parts.sort_by_key(|(kind, ..)| *kind != "text");
                assert_eq!(parts.iter().map(|(kind, ..)| *kind).collect::<Vec<_>>(), kinds, "{text}");
                assert_eq!(end, finish, "{text}");
            }
        }
    }
    // A second call that is cut off, after a whole one.
    let long = call(r#"{\"q\": \"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\"}"#);
    let more = json!({"tools": [get], "grammar": format!("root ::= \"{whole_call}\\n{long}\"")});
    for (path, [whole, streamed]) in everywhere(&server, &more, 45).await {
        assert_eq!(whole, streamed, "{path}");
        assert!(is_limit(&whole.1) && whole.0[0].0 == "call", "{path}: {whole:?}");
    }
    server.idle().await;
}

#[tokio::test]
async fn calls_that_must_come_end() {
    let server = Server::start(2, 4);
    let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let more = json!({"tools": [tool("next", none)], "tool_choice": "required", "temperature": 1.5});
    for seed in 0..4 {
        let mut body = chat("Go on", more.clone());
        (body["max_tokens"], body["seed"]) = (400.into(), seed.into());
        let choice = &server.ask("/v1/chat/completions", &body).await["choices"][0];
        let n_calls = choice["message"]["tool_calls"].as_array().map_or(0, Vec::len);
        assert!((1..=4).contains(&n_calls) && choice["finish_reason"] == "tool_calls", "{choice}");
    }
    // Of a tool by its name there is one call.
    let mut body = chat("Go on", more);
    body["max_tokens"] = 400.into();
    body["tool_choice"] = json!({"type": "function", "function": {"name": "next"}});
    let choice = &server.ask("/v1/chat/completions", &body).await["choices"][0];
    assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn half_a_character_is_dropped_at_a_cut() {
    let server = Server::start(2, 4);
    for most in 1..8 {
        let more = json!({"grammar": "root ::= \"🦊🦊🦊🦊\"", "max_tokens": most});
        let choice = &server.ask("/v1/chat/completions", &chat("A fox", more)).await["choices"][0];
        let text = choice["message"]["content"].as_str().unwrap();
        assert!("🦊🦊🦊🦊".starts_with(text), "{most}: {choice}");
    }
}
