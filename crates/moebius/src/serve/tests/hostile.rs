//! Requests that would take memory or places from others. What a request may hold is counted while it is held, and
//! given back.

use axum::body::Body;
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};

use super::super::limits::{FREE_BYTES, MAX_ANSWERS_BYTES, MAX_BODIES_BYTES};
use super::{Server, chat};

const PATH: &str = "/v1/chat/completions";

/// Returns a chat with a further field that holds a million objects.
fn bomb(field: &str, n: usize) -> String {
    let objects = "{\"\":0},".repeat(n);
    format!("{{\"{field}\": [{objects}0], {}", &chat("Hello", json!({"max_tokens": 2})).to_string()[1..])
}

async fn post(server: &Server, path: &str, body: String) -> super::Reply {
    let request = Request::post(path).header("content-type", "application/json");
    server.send(request.body(Body::from(body)).unwrap()).await
}

#[tokio::test]
async fn values_are_skipped_or_counted() {
    let server = Server::start(1, 1);
    // Eight megabytes that no route knows are skipped.
    let (status, answer) = post(&server, PATH, bomb("x", 1_180_000)).await.json().await;
    assert_eq!(status, 200, "{answer}");
    for field in ["chat_template_kwargs", "tools", "metadata"] {
        let path = if field == "metadata" { "/v1/responses" } else { PATH };
        let (status, answer) = post(&server, path, bomb(field, 1_100_000)).await.json().await;
        assert_eq!(status, 400, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("100000 values"), "{answer}");
    }
    assert_eq!(server.app.common.bodies.free(), MAX_BODIES_BYTES);
}

#[tokio::test]
async fn a_body_is_gone_before_its_answer_comes() {
    let server = Server::start(1, 1);
    let tool = json!({"type": "function", "function": {"name": "f", "description": "x".repeat(3 << 20)}});
    let more = json!({"stream": true, "ignore_eos": true, "max_tokens": 400, "tools": [tool], "tool_choice": "none"});
    let mut reply = server.post(PATH, &chat("Go on", more)).await;
    reply.piece().await.expect("a piece");
    assert_eq!(server.app.common.bodies.free(), MAX_BODIES_BYTES);
    drop(reply);
    server.idle().await;
}

#[tokio::test]
async fn lists_are_written_as_they_are_read() {
    let server = Server::start(1, 1);
    let text = "a fox and a bear ".repeat(100_000);
    let body = json!({"content": text});
    let whole = server.ask("/tokenize", &body).await;
    let n = whole["tokens"].as_array().unwrap().len();
    let mut reply = server.post("/tokenize", &body).await;
    let first = reply.piece().await.expect("a piece");
    assert!(first.len() < 64 << 10, "{} bytes at once", first.len());
    // The ids are held, and counted, until they are read.
    let held = MAX_BODIES_BYTES - server.app.common.bodies.free();
    assert!((4 * n - FREE_BYTES..=4 * n).contains(&held), "{held} bytes for {n} tokens");
    let rest = reply.text().await;
    assert_eq!(serde_json::from_str::<Value>(&(first + &rest)).unwrap(), whole);
    assert_eq!(server.app.common.bodies.free(), MAX_BODIES_BYTES);
    // With their texts, they are the text again.
    let pieces = server.ask("/tokenize", &json!({"content": "A fox and a bear", "with_pieces": true})).await;
    let pieces = pieces["tokens"].as_array().unwrap().iter().map(|t| t["piece"].as_str().unwrap());
    assert_eq!(pieces.collect::<String>(), "A fox and a bear");
}

#[tokio::test]
async fn many_clients_that_do_not_read_are_refused_in_time() {
    let server = Server::start(1, 1);
    let body = json!({"content": "a fox ".repeat(1 << 20)}).to_string();
    let mut unread = Vec::new();
    let mut refused = 0;
    for _ in 0..36 {
        let mut reply = post(&server, "/tokenize", body.clone()).await;
        match reply.status {
            StatusCode::OK => {
                reply.piece().await.expect("a piece");
                unread.push(reply);
            }
            status => {
                assert_eq!(status, 429);
                refused += 1;
            }
        }
    }
    assert!(refused > 0 && unread.len() > 4, "{refused} of 36 were refused");
    // Small ones have room.
    server.ask(PATH, &chat("Hello", json!({"max_tokens": 2}))).await;
    server.ask("/tokenize", &json!({"content": "a fox ".repeat(1000)})).await;
    drop(unread);
    assert_eq!(post(&server, "/tokenize", body).await.status, 200);
}

/// An answer that is complete holds room until its client has read it or is gone, and there is none for more than the
/// bound.
#[tokio::test]
async fn answers_that_wait_to_be_read_are_counted() {
    let server = Server::start(1, 1);
    // One token is 14 bytes: a short question has a long answer.
    let ids = server.ask("/tokenize", &json!({"content": " understanding".repeat(1 << 16)})).await["tokens"].take();
    let (body, free) = (json!({"tokens": ids}), || server.app.common.answers.free());
    let mut unread = Vec::new();
    let (n_bytes, last) = loop {
        let before = free();
        let reply = server.post("/detokenize", &body).await;
        if reply.status != StatusCode::OK || unread.len() > MAX_ANSWERS_BYTES >> 20 {
            break (MAX_ANSWERS_BYTES - before, reply.status);
        }
        assert!(before - free() > (14 << 16) - FREE_BYTES, "{} bytes held", before - free());
        unread.push(reply);
    };
    assert_eq!(last, StatusCode::TOO_MANY_REQUESTS, "{} answers hold {n_bytes} bytes", unread.len());
    let whole = unread.pop().unwrap().text().await;
    assert!(whole.contains("understanding understanding"));
    assert_eq!(server.post("/detokenize", &body).await.status, StatusCode::OK);
    drop(unread);
    assert_eq!(free(), MAX_ANSWERS_BYTES);
}

#[tokio::test]
async fn short_texts_do_not_wait_for_long_ones() {
    let server = Server::start(1, 4);
    let body = json!({"content": "a fox ".repeat(1 << 20)}).to_string();
    let done = std::cell::Cell::new(0);
    let long = async |_| {
        let reply = post(&server, "/tokenize", body.clone()).await;
        assert_eq!(reply.status, 200);
        done.set(done.get() + 1);
    };
    let short = async {
        // The long ones have been read by now.
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        server.ask("/tokenize", &json!({"content": "a fox"})).await;
        assert!(done.get() <= 1, "it waited for {} of 4", done.get());
    };
    tokio::join!(futures_util::future::join_all((0..4).map(long)), short);
}

/// The numbers of a whole answer are those of its stream, and short.
#[tokio::test]
async fn numbers_are_those_of_the_stream() {
    let server = Server::start(2, 8);
    let more = json!({"logprobs": true, "top_logprobs": 3, "n": 2, "temperature": 1.0, "routing": true});
    let mut body = chat("A fox", more);
    let whole = server.ask(PATH, &body).await;
    body["stream"] = json!(true);
    let events = server.post(PATH, &body).await.events().await;
    for i in 0..2 {
        let of_stream = |name: &str| -> Vec<Value> {
            let choices = events.iter().flat_map(|event| event["choices"].as_array().cloned().unwrap_or_default());
            let mine = choices.filter(|choice| choice["index"] == i);
            let lists = mine.map(|choice| {
                if name == "routing" { choice["routing"].clone() } else { choice["logprobs"]["content"].clone() }
            });
            lists.flat_map(|list| list.as_array().cloned().unwrap_or_default()).collect()
        };
        let choice = &whole["choices"][i];
        let numbers = choice["logprobs"]["content"].as_array().unwrap();
        assert!(numbers.len() > 10 && numbers[0]["top_logprobs"].as_array().unwrap().len() == 3, "{choice}");
        assert_eq!(*numbers, of_stream("logprobs"));
        assert_eq!(*choice["routing"].as_array().unwrap(), of_stream("routing"));
        assert!(numbers[0]["logprob"].to_string().len() <= 13, "{}", numbers[0]["logprob"]);
    }
    let body = json!({"prompt": ["A fox", "A bear"], "logprobs": 2, "max_tokens": 6, "seed": 3});
    let whole = server.ask("/v1/completions", &body).await;
    for choice in whole["choices"].as_array().unwrap() {
        let lists = ["tokens", "token_logprobs", "top_logprobs", "text_offset"].map(|name| &choice["logprobs"][name]);
        assert!(lists.iter().all(|list| list.as_array().unwrap().len() == 6), "{choice}");
        assert_eq!(lists[0].as_array().unwrap().iter().filter_map(Value::as_str).collect::<String>(), choice["text"]);
        assert_eq!(lists[3][1], lists[0][0].as_str().unwrap().chars().count());
    }
    let body = json!({"input": "A fox", "max_output_tokens": 6, "top_logprobs": 2, "seed": 3, "temperature": 0.7});
    let whole = server.ask("/v1/responses", &body).await;
    assert_eq!(whole["output"][0]["content"][0]["logprobs"].as_array().unwrap().len(), 6, "{whole}");
    assert_eq!(whole["top_p"].to_string(), "0.9");
    let row = server.ask("/v1/embeddings", &json!({"input": "A fox"})).await["data"][0]["embedding"].clone();
    assert!(row.as_array().unwrap().iter().all(|x| x.to_string().len() <= 15), "{row}");
}

#[tokio::test]
async fn prompts_beyond_the_queue_wait_for_each_other() {
    let server = Server::start(2, 1);
    let prompts: Vec<String> = (0..40).map(|i| format!("Story {i}: a fox")).collect();
    let body = |prompt: Value| json!({"prompt": prompt, "max_tokens": 3, "seed": 1});
    let many = body(json!(prompts));
    let all = server.post("/v1/completions", &many);
    // Others are let in beside them.
    let other = async {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        server.ask(PATH, &chat("Hello", json!({"max_tokens": 2}))).await
    };
    let (all, _) = tokio::join!(all, other);
    let (status, all) = all.json().await;
    assert_eq!(status, 200, "{all}");
    assert_eq!(all["choices"].as_array().unwrap().len(), 40);
    for i in [0, 1, 17, 39] {
        let alone = server.ask("/v1/completions", &body(json!(prompts[i]))).await;
        assert_eq!(all["choices"][i]["text"], alone["choices"][0]["text"]);
    }
    let rows = server.ask("/v1/embeddings", &json!({"input": prompts})).await;
    assert_eq!(rows["data"].as_array().unwrap().len(), 40);
    // One that is wrong is named before any is computed.
    let mut wrong: Vec<Vec<u32>> = vec![vec![1, 2]; 39];
    wrong.push(vec![99_999_999]);
    let steps = server.stats().await.steps;
    assert_eq!(server.post("/v1/completions", &body(json!(wrong))).await.status, 400);
    assert_eq!(server.stats().await.steps, steps);
    // A client that leaves takes all of its prompts along.
    let left = json!({"prompt": prompts, "max_tokens": 300, "ignore_eos": true, "stream": true});
    let mut reply = server.post("/v1/completions", &left).await;
    reply.piece().await.expect("a piece");
    drop(reply);
    server.idle().await;
}

#[tokio::test]
async fn paths_are_refused_in_json() {
    let server = Server::start(1, 1);
    for (path, status) in [("/page/%c0%ae", 400), ("/page/x", 404), ("/v1/models/%ff", 400), ("/%c0%ae", 404)] {
        let (got, answer) = server.get(path).await.json().await;
        assert_eq!(got, status, "{path}");
        assert!(answer["error"]["message"].is_string(), "{path}");
    }
}

/// What the log says of a refusal holds no word of the client.
#[tokio::test]
async fn why_a_request_is_refused_is_said_without_its_text() {
    let server = Server::start(1, 1);
    let secret = "a secret story";
    let cases = [
        (json!({"messages": secret}), "`messages` must be"),
        (chat("x", json!({"temperature": secret})), "`temperature` must be"),
        (chat("x", json!({"stop": {"a": secret}})), "`stop` must be"),
        (chat("x", json!({"regex": format!("{secret}(")})), "`regex` cannot be satisfied"),
        (chat(&secret.repeat(1000), json!({})), "prompt is too long"),
    ];
    for (body, why) in cases {
        let reply = server.post(PATH, &body).await;
        assert_eq!(reply.status, 400);
        let said = reply.why.clone().expect("a reason");
        assert!(said.contains(why) && !said.contains("secret"), "{said}");
    }
}
