//! Encoders of whole texts: vectors and scores of tiny random models against transformers', and what they refuse.

use std::path::{Path, PathBuf};

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::super::common::Conversations;
use super::super::keys::Keys;
use super::{Server, chat};
use crate::load::open;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../conformance/tests/data/encoders");
/// Positions of the models.
const N_CTX: usize = 40;
/// Of a number of a vector of length 1: keys and values are rounded to half precision.
const TOLERANCE: f64 = 2e-3;

fn files(name: &str) -> [PathBuf; 2] {
    ["hf", "model-f16.gguf"].map(|file| Path::new(DATA).join(name).join(file))
}

fn server(path: &Path) -> Server {
    let model = open(Some(path)).expect("an encoder");
    Server::on(model, 4, 8, Keys::default(), N_CTX, Conversations::default())
}

fn golden(name: &str, list: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(Path::new(DATA).join(name).join("golden.json")).expect("golden.json");
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    golden[list].as_array().expect("a list").clone()
}

fn off(found: &Value, exact: &Value) -> f64 {
    let [found, exact] = [found, exact].map(|list| list.as_array().expect("a vector"));
    assert_eq!(found.len(), exact.len());
    let off = found.iter().zip(exact).map(|(a, b)| (a.as_f64().expect("number") - b.as_f64().expect("number")).abs());
    off.fold(0.0, f64::max)
}

#[tokio::test]
async fn vectors_are_those_of_transformers_alone_and_together() {
    for name in ["bert", "bert_mean", "xlmr", "gemma_embedding", "modern_bert", "nomic_bert"] {
        let texts = golden(name, "texts");
        for file in files(name) {
            let server = server(&file);
            let inputs: Vec<&Value> = texts.iter().map(|row| &row["text"]).collect();
            let answer = server.ask("/v1/embeddings", &json!({"input": inputs})).await;
            let n_tokens: usize = texts.iter().map(|row| row["ids"].as_array().expect("ids").len()).sum();
            assert_eq!(answer["usage"]["prompt_tokens"], n_tokens);
            let other = server.ask("/api/embed", &json!({"model": "x", "input": inputs})).await;
            for (i, row) in texts.iter().enumerate() {
                let vector = &answer["data"][i]["embedding"];
                assert!(off(vector, &row["vector"]) < TOLERANCE, "{name} {i}: {:.2e}", off(vector, &row["vector"]));
                let alone = server.ask("/v1/embeddings", &json!({"input": row["text"]})).await;
                assert_eq!(&alone["data"][0]["embedding"], vector, "{name} {i}");
                assert_eq!(&other["embeddings"][i], vector, "{name} {i}");
            }
            server.idle().await;
        }
    }
}

#[tokio::test]
async fn pairs_are_scored() {
    for (name, file) in ["bert_rerank", "xlmr_rerank"].into_iter().flat_map(|name| files(name).map(|file| (name, file)))
    {
        let pairs = golden(name, "pairs");
        let server = server(&file);
        for pair in &pairs {
            let documents = json!([pair["document"], "x", pair["document"]]);
            let body = json!({"query": pair["query"], "documents": documents, "return_documents": true});
            let answer = server.ask("/v1/rerank", &body).await;
            let results = answer["results"].as_array().expect("results");
            let of = |i: u64| results.iter().find(|result| result["index"] == i).expect("a result");
            let score = |i: u64| of(i)["relevance_score"].as_f64().expect("a score");
            let exact = 1.0 / (1.0 + (-pair["score"].as_f64().expect("a score")).exp());
            assert!((score(0) - exact).abs() < 1e-3, "{} {exact}", score(0));
            assert_eq!(score(0), score(2));
            assert_ne!(score(0), score(1));
            let scores = results.iter().map(|result| result["relevance_score"].as_f64());
            assert!(scores.is_sorted_by(|a, b| a >= b), "{answer}");
            assert_eq!(of(1)["document"]["text"], "x");
        }
        let (status, answer) = server.post("/v1/embeddings", &json!({"input": "x"})).await.json().await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(answer.to_string().contains("use /v1/rerank"), "{answer}");
        server.idle().await;
    }
}

/// As many as OpenAI takes; a key is charged for what is computed, whatever the route.
#[tokio::test]
async fn many_texts_are_taken_and_charged() {
    let texts = vec!["fox"; 300];
    let asked = [
        ("bert", "/v1/embeddings", json!({"input": texts})),
        ("bert", "/api/embed", json!({"input": texts})),
        ("bert_rerank", "/v1/rerank", json!({"query": "fox", "documents": texts})),
    ];
    for (name, route, body) in asked {
        let model = open(Some(&files(name)[0])).expect("an encoder");
        let keys = Keys::parse("few tokens-per-minute=10\n").expect("keys");
        let server = Server::on(model, 4, 8, keys, N_CTX, Conversations::default());
        let post = async || {
            let mut request = super::posting(route, &body);
            request.headers_mut().insert("authorization", "Bearer few".parse().expect("a header"));
            server.send(request).await.json().await
        };
        let (status, answer) = post().await;
        assert_eq!(status, StatusCode::OK, "{route}: {answer}");
        let list = ["data", "embeddings", "results"].into_iter().find_map(|name| answer[name].as_array());
        assert_eq!(list.map(Vec::len), Some(300), "{route}");
        assert_eq!(post().await.0, StatusCode::TOO_MANY_REQUESTS, "{route}");
        server.idle().await;
    }
}

#[tokio::test]
async fn text_is_not_written() {
    let server = server(&files("bert")[0]);
    let user = json!([{"role": "user", "content": "x"}]);
    for (route, body) in [
        ("/v1/chat/completions", chat("x", json!({}))),
        ("/v1/completions", json!({"prompt": "x"})),
        ("/completion", json!({"prompt": "x"})),
        ("/v1/messages", json!({"messages": user, "max_tokens": 4})),
        ("/v1/responses", json!({"input": "x"})),
        ("/api/chat", json!({"messages": user})),
        ("/api/generate", json!({"prompt": "x", "raw": true})),
    ] {
        let (status, answer) = server.post(route, &body).await.json().await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{route}: {answer}");
        let answer = answer.to_string();
        assert!(answer.contains("embedding model") && answer.contains("/v1/embeddings"), "{route}: {answer}");
    }
    let body = json!({"query": "x", "documents": ["y"]});
    let (status, answer) = server.post("/v1/rerank", &body).await.json().await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(answer.to_string().contains("is not a reranker"), "{answer}");
    server.idle().await;
}

#[tokio::test]
async fn no_texts_are_refused() {
    let server = server(&files("bert")[0]);
    for (input, why) in [(json!([]), "input` is empty"), (json!([[]]), "input` is empty"), (json!(["x", []]), "[1]`")] {
        for route in ["/v1/embeddings", "/api/embed"] {
            let (status, answer) = server.post(route, &json!({"input": input})).await.json().await;
            assert!(status == StatusCode::BAD_REQUEST && answer.to_string().contains(why), "{route} {input}: {answer}");
        }
    }
    server.idle().await;
}

#[tokio::test]
async fn texts_beyond_the_positions_are_refused_and_longest_ones_taken() {
    let server = server(&files("bert")[0]);
    let words = |n: usize| json!({"input": "fox ".repeat(n)});
    // Two special tokens stand around the words.
    let answer = server.ask("/v1/embeddings", &words(N_CTX - 2)).await;
    assert_eq!(answer["usage"]["prompt_tokens"], N_CTX);
    let (status, answer) = server.post("/v1/embeddings", &words(N_CTX - 1)).await.json().await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(answer["error"]["code"], "context_length_exceeded");
    assert!(answer.to_string().contains("41 tokens > 40 maximum"), "{answer}");
    // As many at once as the limits allow, each of the longest.
    let longest = vec!["fox ".repeat(N_CTX - 2); 16];
    let answer = server.ask("/v1/embeddings", &json!({"input": longest})).await;
    let rows: Vec<&Value> = answer["data"].as_array().expect("data").iter().map(|row| &row["embedding"]).collect();
    assert_eq!(rows.len(), 16);
    assert!(rows.iter().all(|row| *row == rows[0]));
    server.idle().await;
}
