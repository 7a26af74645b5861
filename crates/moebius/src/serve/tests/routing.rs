//! Experts as clients see them: requested, token by token, and counted.

use serde_json::{Value, json};

use super::{Server, chat};

const PATH: &str = "/v1/chat/completions";

/// Returns the experts of the tokens of the first answer, from whole answers and events alike.
fn experts(value: &Value) -> Vec<Value> {
    value["choices"][0]["routing"].as_array().cloned().unwrap_or_default()
}

#[tokio::test]
async fn routing_is_reported_to_who_asks_and_counted_for_all() {
    let server = Server::start(2, 2);
    let text = "Tell me a story about a fox";
    let unseen = json!({"temperature": 0, "ignore_eos": true});
    assert_eq!(experts(&server.ask(PATH, &chat(text, unseen)).await), Vec::<Value>::new());
    let (_, before) = server.get("/v1/routing").await.json().await;
    assert_eq!((&before["tokens"], &before["complete"]), (&json!(24), &json!(true)));

    let whole = server.ask(PATH, &chat(text, json!({"temperature": 0, "routing": true, "ignore_eos": true}))).await;
    let whole = experts(&whole);
    let asked = json!({"temperature": 0, "routing": true, "ignore_eos": true, "stream": true});
    let events = server.post(PATH, &chat(text, asked)).await.events().await;
    let streamed: Vec<Value> = events.iter().flat_map(experts).collect();
    assert_eq!(whole, streamed);
    assert_eq!(whole.len(), 24);

    let (_, after) = server.get("/v1/routing").await.json().await;
    assert_eq!(after["tokens"], 72);
    let mut at = 0;
    for router in after["routers"].as_array().unwrap() {
        let n_used = router["n_used"].as_u64().unwrap() as usize;
        let mut counts = vec![0u64; router["n_expert"].as_u64().unwrap() as usize];
        for token in &whole {
            for id in &token.as_array().unwrap()[at..at + n_used] {
                counts[id.as_u64().unwrap() as usize] += 3;
            }
        }
        assert_eq!(router["counts"], json!(counts), "layer {}", router["layer"]);
        at += n_used;
    }
    assert!(at > 0 && whole.iter().all(|token| token.as_array().unwrap().len() == at));
    server.idle().await;
}
