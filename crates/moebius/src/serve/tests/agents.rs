//! Agents as they are: requests in the shape of Codex and Claude Code run whole, with what they send that no server but
//! their own knows.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use super::answers::{message_stream, of_message, of_response, response_stream};
use super::{Reply, Server, chat};
use crate::serve::common::Conversations;

const CHAT: &str = "/v1/chat/completions";

fn ignored(reply: &Reply) -> String {
    reply.headers.get("x-ignored-fields").map_or("", |names| names.to_str().unwrap()).to_string()
}

/// A session of ten turns over the responses API: nine call a tool, whose results go back, and one answers.
#[tokio::test]
async fn a_codex_session_runs_to_its_end() {
    let server = Server::with_context(2, 4, 4096);
    let shell = json!({"type": "object", "properties": {"command": {"enum": ["ls", "cat a.txt"]}},
        "required": ["command"], "additionalProperties": false});
    let mut input = vec![
        json!({"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]}),
        json!({"type": "additional_tools", "role": "developer", "id": "at_1", "tools": []}),
        json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files"}]}),
    ];
    for turn in 0..10 {
        let is_last = turn == 9;
        let mut body = json!({
            "model": "gpt-5-codex", "instructions": "You are an agent.", "input": input, "store": false,
            "tools": [
                {"type": "function", "name": "shell", "strict": false, "parameters": shell},
                {"type": "custom", "name": "apply_patch", "description": "Edits files",
                    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
                {"type": "namespace", "name": "team", "description": "helpers", "tools": [
                    {"type": "function", "name": "ask", "parameters": {"type": "object", "properties": {}, "additionalProperties": false}}]},
                {"type": "web_search"}, {"type": "local_shell"},
                {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
            ],
            "tool_choice": if is_last { "none" } else { "required" }, "parallel_tool_calls": false,
            "reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199", "max_output_tokens": if is_last { 24 } else { 160 }, "seed": 100 + turn,
        });
        if turn == 3 {
            let allowed = json!([{"type": "custom", "name": "apply_patch"}]);
            body["tool_choice"] = json!({"type": "allowed_tools", "mode": "required", "tools": allowed});
        }
        if turn == 4 {
            body["tool_choice"] = json!({"type": "function", "name": "ask"});
        }
        let reply = server.post("/v1/responses", &body).await;
        let names = ignored(&reply);
        for name in ["tools[3] (web_search)", "tools[4] (local_shell)", "tools[5] (tool_search)"] {
            assert!(names.contains(name), "{names}");
        }
        let (status, whole) = reply.json().await;
        assert_eq!(status, 200, "{turn}: {whole}");
        let (parts, end) = of_response(&whole);
        body["stream"] = true.into();
        assert_eq!(response_stream(server.post("/v1/responses", &body).await).await, (parts.clone(), end.clone()));
        let kind = parts[0].0;
        if is_last {
            assert!(kind == "text" && !parts[0].1.is_empty(), "{whole}");
            break;
        }
        for item in whole["output"].as_array().unwrap() {
            input.push(item.clone());
            let (kind, output) = match item["type"].as_str().unwrap() {
                "function_call" => ("function_call_output", json!("a.txt")),
                "custom_tool_call" => ("custom_tool_call_output", json!([{"type": "input_text", "text": "done"}])),
                _ => continue,
            };
            input.push(json!({"type": kind, "call_id": item["call_id"], "output": output}));
        }
        match turn {
            3 => assert!(kind == "custom" && parts[0].1 == "apply_patch", "{whole}"),
            4 => assert_eq!((kind, &parts[0].1, &parts[0].2[1]), ("call", &"ask".to_string(), &json!("team"))),
            _ => assert!(["call", "custom"].contains(&kind), "{whole}"),
        }
        // What only OpenAI's server has done, and what other agents say.
        input.push(
            json!({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}),
        );
        input.push(
            json!({"type": "agent_message", "author": "helper", "content": [{"type": "input_text", "text": "ready"}]}),
        );
    }
    server.idle().await;
}

/// A session of ten turns over Anthropic's messages, with late reminders and tools of Anthropic's server.
#[tokio::test]
async fn a_claude_code_session_runs_to_its_end() {
    let server = Server::with_context(2, 4, 4096);
    let cached = json!({"type": "ephemeral", "ttl": "1h"});
    let mut messages = vec![json!({"role": "user", "content": [
        {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A fox."}},
        {"type": "text", "text": "Look around", "cache_control": cached}]})];
    for turn in 0..10 {
        let is_last = turn == 9;
        let mut body = json!({
            "model": "claude-opus-4", "max_tokens": if is_last { 24 } else { 400 }, "seed": 7 + turn, "metadata": {"user_id": "u"},
            "system": [{"type": "text", "text": "You are an agent.", "cache_control": cached}, {"type": "text", "text": "cwd: /"}],
            "thinking": {"type": "enabled", "budget_tokens": 16}, "context_management": {"edits": []},
            "messages": messages,
            "tools": [
                {"name": "Read", "description": "Reads", "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#",
                    "type": "object", "properties": {"path": {"enum": ["/a.txt", "/b.txt"]}}, "required": ["path"], "additionalProperties": false}},
                {"name": "Todo", "input_schema": {"type": "object", "properties": {"done": {"type": "boolean"}},
                    "propertyNames": {"type": "string"}, "required": ["done"], "additionalProperties": false}},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
                {"type": "bash_20250124", "name": "bash"},
            ],
            "tool_choice": {"type": if is_last { "none" } else { "any" }},
        });
        let reply = server.post("/v1/messages", &body).await;
        let names = ignored(&reply);
        assert!(names.contains("tools[2] (web_search_20250305)") && names.contains("bash_20250124"), "{names}");
        let (status, whole) = reply.json().await;
        assert_eq!(status, 200, "{turn}: {whole}");
        let (parts, end) = of_message(&whole);
        body["stream"] = true.into();
        assert_eq!(message_stream(server.post("/v1/messages", &body).await).await, (parts.clone(), end.clone()));
        if is_last {
            assert_eq!(parts[0].0, "text", "{whole}");
            break;
        }
        assert_eq!(end, "tool_use", "{whole}");
        messages.push(json!({"role": "assistant", "content": whole["content"]}));
        let uses = whole["content"].as_array().unwrap().iter().filter(|block| block["type"] == "tool_use");
        let results: Vec<Value> = uses
            .enumerate()
            .map(|(i, block)| {
                let text = json!([{"type": "text", "text": "A fox."}, {"type": "tool_reference", "tool_name": "Read"}]);
                json!({"type": "tool_result", "tool_use_id": block["id"], "content": text, "is_error": i == 1})
            })
            .collect();
        messages.push(json!({"role": "user", "content": results}));
        if turn % 3 == 1 {
            messages.push(json!({"role": "system", "content": "Reminder: stay in the folder."}));
        }
    }
    server.idle().await;
}

#[tokio::test]
async fn histories_are_taken_as_agents_keep_them() {
    let server = Server::start(2, 4);
    let call = |arguments: Value| {
        json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": null, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "a", "arguments": arguments}}]},
            {"role": "tool", "tool_call_id": "c1", "content": null}])
    };
    for arguments in [json!("{"), json!("null"), json!("[1]"), json!(7), json!("\"x\""), json!({"a": 1})] {
        server.ask(CHAT, &json!({"messages": call(arguments), "max_tokens": 2})).await;
    }
    let items = json!([
        {"role": "user", "content": "edit it"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+ a"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "tool_search_call", "call_id": "c2", "execution": "client", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "c2", "tools": []},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "call_id": "c3", "output": "a.txt"},
        {"type": "shell_call", "call_id": "c4", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c4", "output": [{"stdout": "a.txt", "stderr": ""}]},
        {"role": "user", "content": "go on"},
    ]);
    let reply = server.post("/v1/responses", &json!({"input": items, "max_output_tokens": 2})).await;
    assert_eq!(
        (reply.status.as_u16(), ignored(&reply)),
        (200, "input[3] (tool_search_call), input[4] (tool_search_output)".into())
    );
    let blocks = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "fox"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "url": "http://x"}]},
        {"type": "text", "text": "Foxes are red."}]}, {"role": "user", "content": "more"}]);
    server.ask("/v1/messages", &json!({"messages": blocks, "max_tokens": 2})).await;
    // Halves of characters, and a mark of order in front.
    for (path, body) in [
        (CHAT, r#"{"max_tokens": 2, "messages": [{"role": "user", "content": "cut \ud83d here \udc00 \\ud83d 🦊"}]}"#),
        ("/v1/messages", r#"{"max_tokens": 2, "messages": [{"role": "user", "content": "cut \ud83d"}]}"#),
        (CHAT, "\u{feff}{\"max_tokens\": 2, \"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}"),
    ] {
        let request = Request::post(path).header("content-type", "application/json").body(Body::from(body)).unwrap();
        let (status, answer) = server.send(request).await.json().await;
        assert_eq!(status, 200, "{body}: {answer}");
    }
}

#[tokio::test]
async fn what_cannot_be_done_is_said_in_the_words_that_agents_know() {
    let server = Server::start(1, 2);
    let long = "a fox ".repeat(600);
    let (status, answer) = server.post(CHAT, &chat(&long, json!({}))).await.json().await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (400, &json!("context_length_exceeded")));
    let body = json!({"messages": [{"role": "user", "content": long}], "max_tokens": 4});
    for body in [body, json!({"messages": [{"role": "user", "content": "x".repeat(1 << 20)}], "max_tokens": 4})] {
        let (status, answer) = server.post("/v1/messages", &body).await.json().await;
        let message = answer["error"]["message"].as_str().unwrap();
        let n_tokens = message.strip_prefix("prompt is too long: ").unwrap().trim_start_matches("at least ");
        let n_tokens: u64 = n_tokens.split_once(" tokens > 512 maximum").unwrap().0.parse().unwrap();
        assert!(status == 400 && n_tokens > 511, "{message}");
    }
    for (path, body, expected) in [
        (CHAT, chat("x", json!({"modalities": ["text", "audio"]})), "`modalities[1]` must be one of text"),
        (CHAT, chat("x", json!({"audio": {"voice": "a"}})), "`audio` is unsupported"),
        ("/v1/responses", json!({"input": "x", "background": true}), "`background` is unsupported"),
        (
            "/v1/responses",
            json!({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}),
            "`tool_choice` requires `tools`",
        ),
    ] {
        let (status, answer) = server.post(path, &body).await.json().await;
        assert_eq!(status, 400);
        assert!(answer["error"]["message"].as_str().unwrap().contains(expected), "{answer}");
    }
    let request = Request::post(CHAT).header("content-encoding", "gzip").body(Body::from("x")).unwrap();
    let (status, answer) = server.send(request).await.json().await;
    assert!(status == 415 && answer["error"]["message"].as_str().unwrap().contains("gzip"), "{answer}");
}

#[tokio::test]
async fn schemas_are_taken_and_what_is_not_enforced_is_named() {
    let server = Server::start(2, 4);
    let set = json!({"type": "object", "properties": {"t": {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": true,
        "maxItems": 2}}, "required": ["t"], "additionalProperties": false});
    let format = json!({"response_format": {"type": "json_schema", "json_schema": {"schema": set}}, "max_tokens": 100});
    let reply = server.post(CHAT, &chat("x", format)).await;
    assert_eq!((reply.status.as_u16(), ignored(&reply)), (200, "response_format uniqueItems".into()));
    let covered = json!({"type": "object", "properties": {"score": {"type": "boolean"}},
        "patternProperties": {"^score$": {"type": "boolean"}}, "additionalProperties": false});
    let format =
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": covered}}, "max_tokens": 200});
    for seed in 0..3 {
        let mut body = chat("x", format.clone());
        body["seed"] = seed.into();
        server.ask(CHAT, &body).await;
    }
    let not = json!({"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}});
    let format = json!({"response_format": {"type": "json_schema", "json_schema": {"schema": not}}});
    let (status, answer) = server.post(CHAT, &chat("x", format)).await.json().await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.ends_with("JSON schema keyword `not` is unsupported"), "{message}");
    // A tool by whose schema no call can be held leaves those of the others alone.
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let good = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false});
    let bad = json!({"type": "object", "properties": {"x": {"type": "king"}}});
    let tools = json!([tool("good", good), tool("bad", bad), tool("odd", not)]);
    for choice in [json!("auto"), json!("required"), json!({"type": "function", "function": {"name": "good"}})] {
        let more = json!({"tools": tools, "tool_choice": choice, "max_tokens": 60});
        let reply = server.post(CHAT, &chat("x", more)).await;
        let names = ignored(&reply);
        assert!(names.contains("tools.odd.parameters not"), "{names}");
        assert_eq!(choice.is_object(), !names.contains("tools.bad.parameters"), "{names}");
        let (status, answer) = reply.json().await;
        assert_eq!(status, 200, "{answer}");
        if choice.is_object() {
            let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
            let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
            assert!([1, 2].iter().any(|n| arguments["n"] == *n), "{answer}");
        }
    }
}

/// The embedded model does not think; a template that opens a thought makes it.
#[tokio::test]
async fn thoughts_end_at_their_budget() {
    let server = Server::thinking(512, Conversations::default());
    for (path, body) in [
        (CHAT, chat("A fox", json!({"thinking_budget": 5, "max_tokens": 40}))),
        (CHAT, chat("A fox", json!({"reasoning_budget": 5, "max_tokens": 40}))),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": "A fox"}], "max_tokens": 40, "seed": 7,
                "thinking": {"type": "enabled", "budget_tokens": 5}}),
        ),
        ("/v1/responses", json!({"input": "A fox", "thinking_budget": 5, "max_output_tokens": 40, "seed": 7})),
    ] {
        let answer = server.ask(path, &body).await.to_string();
        assert!(answer.contains("thinking\"") || answer.contains("reasoning"), "{answer}");
        let text = ["\"text\":\"", "\"content\":\""]
            .iter()
            .any(|open| answer.match_indices(open).any(|(at, _)| !answer[at + open.len()..].starts_with('"')));
        assert!(text, "{path}: {answer}");
    }
    // A template without thoughts has none to bound.
    let plain = Server::with_context(1, 1, 128);
    let reply = plain.post(CHAT, &chat("A fox", json!({"thinking_budget": 5, "max_tokens": 4}))).await;
    assert_eq!(ignored(&reply), "thinking_budget");
    // Without one, it thinks on to the limit.
    let choice = &server.ask(CHAT, &chat("A fox", json!({"max_tokens": 40, "ignore_eos": true}))).await["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(""), &json!("length")), "{choice}");
}

/// Effort bounds thoughts where the template has no variable for it, the server's flag where a request says nothing,
/// and what a request says comes first. Streamed answers are the whole ones, with the same usage.
#[tokio::test]
async fn budgets_come_from_requests_efforts_and_the_server() {
    let server = Server::thinking(512, Conversations { most_thought: Some(5), ..Conversations::default() });
    let thoughts = |usage: &Value| usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    // Tokens of a thought, its mark among them.
    for (more, n) in [
        (json!({}), 5..12),
        (json!({"thinking_budget": 9}), 9..16),
        (json!({"reasoning_effort": "none"}), 0..8),
        (json!({"reasoning_effort": "none", "thinking_budget": 9}), 9..16),
        (json!({"thinking_budget": -1}), 40..41),
        (json!({"reasoning_effort": "high"}), 40..41),
        (json!({"reasoning_effort": "minimal"}), 40..41),
    ] {
        let mut body = chat("A fox", more.clone());
        body["max_tokens"] = json!(40);
        body["ignore_eos"] = json!(true);
        let whole = server.ask(CHAT, &body).await;
        assert!(n.contains(&thoughts(&whole["usage"])), "{more}: {whole}");
        assert_eq!(whole["usage"]["completion_tokens"], 40);
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let events = server.post(CHAT, &body).await.events().await;
        let all = |name: &str| -> String {
            events.iter().filter_map(|event| event["choices"][0]["delta"][name].as_str()).collect()
        };
        let message = &whole["choices"][0]["message"];
        assert_eq!(message["content"], all("content"), "{more}");
        assert_eq!(message["reasoning_content"].as_str().unwrap_or_default(), all("reasoning_content"), "{more}");
        let usage = events.iter().find_map(|event| event.get("usage").filter(|usage| !usage.is_null())).unwrap();
        assert_eq!(thoughts(usage), thoughts(&whole["usage"]), "{more}");
    }
}

/// A call is no part of the thought before it, whether it is held back or streamed.
#[tokio::test]
async fn calls_do_not_count_as_reasoning() {
    let server = Server::thinking(512, Conversations::default());
    let parameters = json!({"type": "object", "properties": {"command": {"const": "list all the files"}},
        "required": ["command"]});
    let tools = json!([{"type": "function", "function": {"name": "shell", "parameters": parameters}}]);
    let mut body = chat("A fox", json!({"tools": tools, "tool_choice": "required", "thinking_budget": 3}));
    body["max_tokens"] = json!(120);
    let answer = server.ask(CHAT, &body).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
    let usage = &answer["usage"];
    let thoughts = usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    // The closing mark is several tokens here.
    assert!((3..11).contains(&thoughts) && usage["completion_tokens"].as_u64().unwrap() > thoughts + 10, "{answer}");
}

/// A template that knows other words for effort is rendered without the client's.
#[tokio::test]
async fn efforts_that_a_template_refuses_are_left_out() {
    let template = "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'high'] %}\
                    {{ raise_exception('effort: ' + reasoning_effort) }}{% endif %}{% for m in messages %}\
                    {% if m.content == 'bad' %}{{ raise_exception('bad') }}{% endif %}<{{ reasoning_effort }}>{{ m.content }}{% endfor %}";
    let server = Server::with_template(template, 256, Conversations::default());
    let ask = async |text: &str, effort: &str| {
        let body = json!({"messages": [{"role": "user", "content": text}],
            "chat_template_kwargs": {"reasoning_effort": effort}});
        server.post("/apply-template", &body).await.json().await
    };
    for (effort, expected) in [("low", "<low>x"), ("medium", "<>x")] {
        let (status, answer) = ask("x", effort).await;
        assert_eq!((status.as_u16(), &answer["prompt"]), (200, &json!(expected)));
    }
    let (status, answer) = ask("bad", "medium").await;
    assert_eq!(status, 400, "{answer}");
    let said = answer["error"]["message"].as_str().unwrap();
    assert!(said.contains("effort: medium"), "{said}");
}

/// A conversation that has grown beyond the context is refused, or loses its oldest turns, and the header says so.
#[tokio::test]
async fn full_contexts_are_refused_or_lose_turns() {
    let say = |role: &str, text: &str| json!({"role": role, "content": text});
    let long = "The fox went into the wood and met a bear. ".repeat(8);
    let mut messages = vec![say("system", "Be brief, said the owl.")];
    for _ in 0..6 {
        messages.extend([say("user", &long), say("assistant", "Yes.")]);
    }
    messages.push(say("user", "Who met the fox?"));
    let body = |messages: &[Value]| json!({"messages": messages, "max_tokens": 20, "seed": 7});
    let refusing = Server::with_conversations(256, Conversations::default());
    let (status, answer) = refusing.post(CHAT, &body(&messages)).await.json().await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (400, &json!("context_length_exceeded")), "{answer}");

    let server = Server::with_conversations(256, Conversations { trims: true, ..Conversations::default() });
    let reply = server.post(CHAT, &body(&messages)).await;
    let names = ignored(&reply);
    let n: usize = names.split_whitespace().find_map(|word| word.parse().ok()).unwrap_or_default();
    assert!(names.contains("context full") && n.is_multiple_of(2) && (2..=12).contains(&n), "{names}");
    let (status, found) = reply.json().await;
    assert_eq!(status, 200, "{found}");
    // It is the answer of a conversation without those turns, and one turn more would not fit.
    let kept = |n: usize| [&messages[..1], &messages[1 + n..]].concat();
    let (_, expected) = refusing.post(CHAT, &body(&kept(n))).await.json().await;
    assert_eq!(found["choices"], expected["choices"]);
    let prompt = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt(&found) + 20 <= 256);
    let more = refusing.post(CHAT, &body(&kept(n - 2))).await.json().await.1;
    assert!(more["error"].is_object() || prompt(&more) + 20 > 256, "{more}");
    // A request may ask for either, whatever the server does by itself.
    let item = |message: &Value| json!({"role": message["role"], "content": message["content"]});
    let items: Vec<Value> = messages.iter().map(item).collect();
    for (path, name, [yes, no]) in [
        ("/api/chat", "truncate", [json!(true), json!(false)]),
        ("/v1/responses", "truncation", [json!("auto"), json!("disabled")]),
    ] {
        for (server, value, expected) in [(&refusing, yes, 200), (&server, no, 400)] {
            let mut body = json!({"messages": messages, "input": items, "max_output_tokens": 20, "stream": false});
            body[name] = value;
            body.as_object_mut().unwrap().remove(if path == "/api/chat" { "input" } else { "messages" });
            let reply = server.post(path, &body).await;
            assert_eq!(ignored(&reply).contains("context full"), expected == 200, "{path}");
            assert_eq!(reply.status, expected, "{path}");
        }
    }
    // What fits is left as it is, and a last turn that does not fit is refused.
    assert_eq!(ignored(&server.post(CHAT, &body(&kept(12))).await), "");
    let one = [say("user", &long.repeat(8))];
    assert_eq!(server.post(CHAT, &body(&one)).await.json().await.0, 400);
}

/// Descriptions of tools are optional, and templates that add them to a text expect one.
#[tokio::test]
async fn tools_without_descriptions_are_rendered() {
    let template = "{% for tool in tools %}{{ '// ' + tool.function.description + tool.function.name + ' ' }}{% endfor %}\
                    {# <tool_call> #}";
    let server = Server::with_template(template, 256, Conversations::default());
    let tools = json!([{"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "description": "says "}},
        {"type": "function", "function": {"name": "h", "description": null}}]);
    let body = json!({"messages": [{"role": "user", "content": "x"}], "tools": tools});
    assert_eq!(server.ask("/apply-template", &body).await["prompt"], "// f // says g // h ");
}
