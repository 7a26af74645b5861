//! Ollama's API: streams agree with whole answers and with OpenAI's API; errors and lists have its shape.

use serde_json::{Value, json};

use super::{Reply, Server, chat};

/// Returns the lines of a stream.
async fn lines(reply: Reply) -> Vec<Value> {
    assert_eq!(reply.headers["content-type"], "application/x-ndjson");
    reply.text().await.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn joined(lines: &[Value], at: &str) -> String {
    lines.iter().filter_map(|line| line.pointer(at)?.as_str()).collect()
}

const CHAT: &str = "/api/chat";

#[tokio::test]
async fn chats_and_prompts_are_answered() {
    let server = Server::start(2, 4);
    let options = json!({"temperature": 0, "num_predict": 12, "num_ctx": 4096});
    let messages = json!([{"role": "user", "content": "Tell me a story"}]);
    let body = json!({"model": "fable:latest", "messages": messages, "options": options});
    let streamed = lines(server.post(CHAT, &body).await).await;
    let mut whole = body.clone();
    whole["stream"] = json!(false);
    let whole = server.ask(CHAT, &whole).await;
    let openai =
        server.ask("/v1/chat/completions", &chat("Tell me a story", json!({"temperature": 0, "max_tokens": 12}))).await;
    let text = openai["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(joined(&streamed, "/message/content"), text);
    assert_eq!(whole["message"]["content"], text);
    let last = streamed.last().unwrap();
    for end in [last, &whole] {
        assert_eq!((&end["done"], &end["done_reason"]), (&json!(true), &json!("length")), "{end}");
        assert_eq!(end["eval_count"], 12);
        assert!(end["prompt_eval_count"].as_u64() > Some(0) && end["total_duration"].as_u64() > Some(0), "{end}");
        assert!(end["created_at"].as_str().unwrap().ends_with('Z'), "{end}");
    }
    assert!(streamed[..streamed.len() - 1].iter().all(|line| line["done"] == false));
    let body = json!({"model": "m", "prompt": "Tell me a story", "options": options});
    assert_eq!(joined(&lines(server.post("/api/generate", &body).await).await, "/response"), text);
    // As it is: the prompt goes on.
    let raw = json!({"model": "m", "prompt": "Once upon a", "raw": true, "stream": false, "options": options});
    let answer = server.ask("/api/generate", &raw).await;
    assert!(answer["response"].as_str().unwrap().starts_with(" time"), "{answer}");
    // Nothing to say: the model is loaded.
    for (path, body) in [("/api/generate", json!({"model": "m"})), (CHAT, json!({"model": "m", "messages": []}))] {
        let answer = server.ask(path, &body).await;
        assert_eq!((&answer["done"], &answer["done_reason"]), (&json!(true), &json!("load")), "{answer}");
    }
    server.idle().await;
}

#[tokio::test]
async fn forms_and_calls_have_their_words() {
    let server = Server::start(2, 4);
    let schema = json!({"type": "object", "properties": {"animal": {"enum": ["fox", "bear"]}}, "required": ["animal"]});
    let messages = json!([{"role": "user", "content": "An animal?"}]);
    let body = json!({"messages": messages, "format": schema, "stream": false,
        "options": {"num_predict": 400, "seed": 3, "temperature": 1.5}});
    let answer = server.ask(CHAT, &body).await;
    let value: Value = serde_json::from_str(answer["message"]["content"].as_str().unwrap()).unwrap();
    assert!(value["animal"].is_string() && value.as_object().unwrap().len() == 1, "{answer}");
    // What an earlier answer called, and what came back, is understood.
    let call = json!({"function": {"name": "weather", "arguments": {"city": "Rome"}}});
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}});
    let body = json!({"tools": [tool], "stream": false, "options": {"num_predict": 4}, "messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]});
    assert_eq!(server.ask(CHAT, &body).await["done"], true);
}

#[tokio::test]
async fn refusals_have_its_shape() {
    let server = Server::start(2, 4);
    let say = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let image = json!({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]});
    for (path, body, status, part) in [
        (CHAT, say(json!({"format": "yaml"})), 400, "`format`"),
        (CHAT, say(json!({"options": {"temperature": "hot"}})), 400, "`options.temperature`"),
        (CHAT, say(json!({"options": {"stop": "x".repeat(513)}})), 400, "`stop`"),
        (CHAT, image, 400, "this model reads text only"),
        (CHAT, json!({"messages": [{"role": "user", "content": "x", "images": "aGk="}]}), 400, "`messages[0].images`"),
        ("/api/generate", json!({"prompt": "x", "suffix": "y"}), 400, "(FIM)"),
        ("/api/generate", json!({"prompt": "x", "context": [1, 2]}), 400, "`context`"),
        ("/api/pull", json!({"model": "x"}), 404, "unknown route"),
    ] {
        let (code, answer) = server.post(path, &body).await.json().await;
        let message = answer["error"].as_str().unwrap_or_default();
        assert!(code == status && message.contains(part), "{path} {body}: {code} {answer}");
    }
}

#[tokio::test]
async fn models_and_embeddings_are_listed() {
    let server = Server::start(2, 4);
    let tags = server.get("/api/tags").await.json().await.1;
    assert_eq!(tags["models"][0]["name"], "fable", "{tags}");
    assert_eq!(tags["models"][0]["details"]["family"], "qwen3moe", "{tags}");
    assert_eq!(server.get("/api/ps").await.json().await.1["models"][0]["name"], "fable");
    assert!(server.get("/api/version").await.json().await.1["version"].is_string());
    // The one model stays, whatever is said.
    let kept = server.ask("/api/generate", &json!({"model": "fable", "keep_alive": 0})).await;
    assert_eq!(kept["done_reason"], "load", "{kept}");
    assert_eq!(server.post("/models/unload", &json!({})).await.status, 400);
    let shown = server.ask("/api/show", &json!({"model": "fable"})).await;
    assert_eq!(shown["model_info"]["general.architecture"], "qwen3moe", "{shown}");
    let rows = server.ask("/api/embed", &json!({"model": "m", "input": ["a fox", "a bear"]})).await;
    let openai = server.ask("/v1/embeddings", &json!({"input": ["a fox", "a bear"]})).await;
    for i in 0..2 {
        assert_eq!(rows["embeddings"][i], openai["data"][i]["embedding"]);
    }
    let long = "fox ".repeat(2000);
    server.ask("/api/embed", &json!({"input": long})).await;
    assert_eq!(server.post("/api/embed", &json!({"input": long, "truncate": false})).await.status, 400);
    let one = server.ask("/api/embeddings", &json!({"prompt": "a fox"})).await;
    assert_eq!(one["embedding"].as_array().map(Vec::len), rows["embeddings"][0].as_array().map(Vec::len));
    server.idle().await;
}
