//! Many clients at a time: those that leave, those that do not read, those for whom there is no room.

use serde_json::json;

use super::{Server, chat, joined};

const PATH: &str = "/v1/chat/completions";

fn endless(seed: u64) -> serde_json::Value {
    chat("Go on", json!({"stream": true, "ignore_eos": true, "max_tokens": 400, "seed": seed}))
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_pages() {
    let server = Server::start(2, 2);
    let mut reply = server.post(PATH, &endless(1)).await;
    // The opening, and a token: it runs.
    for _ in 0..2 {
        reply.piece().await.expect("a piece");
    }
    assert_eq!(server.stats().await.running, 1);
    drop(reply);
    // The cancel is queued before this question.
    let stats = server.stats().await;
    assert!(stats.running == 0 && stats.pages.used == 0, "{stats:?}");
    assert!(stats.steps < 400, "the answer is not computed to its end: {stats:?}");
    // So does one that leaves while it waits for the whole answer.
    let mut body = endless(2);
    body["stream"] = json!(false);
    let asked = server.post(PATH, &body);
    assert!(tokio::time::timeout(std::time::Duration::from_millis(30), asked).await.is_err());
    server.idle().await;
}

#[tokio::test]
async fn a_slow_reader_holds_up_nobody() {
    let server = Server::start(2, 2);
    let alone = server.post(PATH, &endless(5)).await.events().await;
    let slow = server.post(PATH, &endless(5)).await;
    let answer = server.ask(PATH, &chat("Hello", json!({}))).await;
    assert!(!answer["choices"][0]["message"]["content"].as_str().unwrap().is_empty());
    // It is computed to its end although no client reads it.
    server.idle().await;
    let events = slow.events().await;
    assert_eq!(joined(&events, 0), joined(&alone, 0));
    assert_eq!(events.len(), alone.len());
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_back() {
    let server = Server::start(1, 1);
    let running = server.post(PATH, &endless(1)).await;
    let waiting = server.post(PATH, &endless(2)).await;
    let refused = server.post(PATH, &endless(3)).await;
    assert_eq!(refused.status, 429);
    let seconds: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds));
    assert_eq!(refused.json().await.1["error"]["type"], "rate_limit_error");
    assert_eq!(server.post(PATH, &chat("x", json!({"n": 3}))).await.status, 429);
    drop((running, waiting));
    server.idle().await;
    server.ask(PATH, &chat("Hello", json!({}))).await;
}

#[tokio::test]
async fn answers_do_not_depend_on_their_neighbours() {
    let server = Server::start(4, 64);
    let bodies: Vec<_> = (0..12)
        .map(|i| {
            chat(&format!("Story {i} {}", "about a fox ".repeat(i * 3)), json!({"seed": i, "max_tokens": 8 + 5 * i}))
        })
        .collect();
    let mut alone = Vec::new();
    for body in &bodies {
        alone.push(server.ask(PATH, body).await["choices"][0]["message"]["content"].clone());
    }
    let together = futures_util::future::join_all(bodies.iter().map(|body| server.ask(PATH, body))).await;
    for (answer, alone) in together.iter().zip(alone) {
        assert_eq!(answer["choices"][0]["message"]["content"], alone);
    }
    server.idle().await;
}

#[tokio::test]
async fn a_stopping_server_takes_nothing_new() {
    let server = Server::start(1, 1);
    let running = server.post(PATH, &chat("Go on", json!({"stream": true}))).await;
    server.app.common.drain();
    assert_eq!(server.get("/ready").await.status, 503);
    assert_eq!(server.get("/health").await.status, 200);
    assert_eq!(server.post(PATH, &chat("x", json!({}))).await.status, 503);
    // What runs is finished.
    assert_eq!(running.events().await.last(), Some(&json!("[DONE]")));
    // Nor does one go round the routes.
    let cut = server.app.submit(vec![server.app.request(vec![1, 2, 3])]).await;
    assert!(cut.is_err());
}
