//! OpenAI's two text routes: whole and streamed answers agree, and every field does what it says.

use axum::http::StatusCode;
use serde_json::json;

use super::{Server, chat, joined};

const STORY: &str = "Tell me a story about a fox who lost his hat";
const PATH: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_stream_is_the_whole_answer_in_pieces() {
    let server = Server::start(4, 8);
    for (path, body) in [
        (PATH, chat(STORY, json!({"n": 3, "temperature": 1.2}))),
        (PATH, chat(STORY, json!({"temperature": 0, "stop": ["hat", "."]}))),
        (
            "/v1/completions",
            json!({"prompt": ["Once upon", "The end"], "n": 2, "max_tokens": 12, "seed": 3, "echo": true}),
        ),
    ] {
        let whole = server.ask(path, &body).await;
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        streamed["stream_options"] = json!({"include_usage": true});
        let events = server.post(path, &streamed).await.events().await;
        let choices = whole["choices"].as_array().unwrap();
        for (index, choice) in choices.iter().enumerate() {
            let text = choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap();
            assert_eq!(joined(&events, index), text, "{path} {body}");
            assert!(!text.is_empty());
            let finish = events.iter().flat_map(|e| e["choices"].as_array().unwrap_or(&Vec::new()).clone());
            let finish: Vec<_> = finish.filter(|c| c["index"] == index && !c["finish_reason"].is_null()).collect();
            assert_eq!(finish.len(), 1);
            assert_eq!(finish[0]["finish_reason"], choice["finish_reason"]);
        }
        assert_eq!(events.last(), Some(&json!("[DONE]")));
        let usage = &events[events.len() - 2]["usage"];
        for name in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(usage[name], whole["usage"][name], "{name}");
        }
    }
    server.idle().await;
}

#[tokio::test]
async fn choices_are_the_answers_of_the_following_seeds() {
    let server = Server::start(4, 8);
    let text = |value: &serde_json::Value, i: usize| value["choices"][i]["message"]["content"].clone();
    let both = server.ask(PATH, &chat(STORY, json!({"n": 2, "seed": 41, "temperature": 1.5}))).await;
    assert_ne!(text(&both, 0), text(&both, 1));
    for i in 0..2 {
        let one = server.ask(PATH, &chat(STORY, json!({"seed": 41 + i, "temperature": 1.5}))).await;
        assert_eq!(text(&one, 0), text(&both, i));
    }
}

#[tokio::test]
async fn usage_counts_cached_tokens_and_limits_end_answers() {
    let server = Server::start(2, 2);
    let long = STORY.repeat(6);
    let first = server.ask(PATH, &chat(&long, json!({"max_completion_tokens": 3, "max_tokens": 9}))).await;
    assert_eq!(first["usage"]["completion_tokens"], 3);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(first["choices"][0]["finish_reason"], "length");
    let again = server.ask(PATH, &chat(&long, json!({"max_tokens": 3}))).await;
    let (prompt, cached) =
        (&again["usage"]["prompt_tokens"], again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
    assert!(cached >= 32 && cached < prompt.as_u64().unwrap(), "{again}");
    assert_eq!(again["timings"]["cache_n"], cached);
    assert_eq!(again["choices"][0]["message"], first["choices"][0]["message"]);
    // Another salt shares nothing.
    let salted = server.ask(PATH, &chat(&long, json!({"max_tokens": 3, "cache_salt": "other"}))).await;
    assert_eq!(salted["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

#[tokio::test]
async fn logprobs_are_of_the_tokens_of_the_text() {
    let server = Server::start(2, 2);
    let body = chat(STORY, json!({"temperature": 0, "logprobs": true, "top_logprobs": 2, "max_tokens": 12}));
    let answer = server.ask(PATH, &body).await;
    let choice = &answer["choices"][0];
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    let text: String = entries.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(text, choice["message"]["content"].as_str().unwrap());
    for entry in entries {
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        // At temperature 0 the first alternative is the token itself.
        assert_eq!(entry["top_logprobs"][0]["logprob"], entry["logprob"]);
    }
    let older = json!({"prompt": "Once upon", "temperature": 0, "logprobs": 1, "max_tokens": 8});
    let answer = server.ask("/v1/completions", &older).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    let tokens: String = logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens, answer["choices"][0]["text"].as_str().unwrap());
    assert_eq!(logprobs["text_offset"][0], 0);
}

#[tokio::test]
async fn a_bias_forbids_and_forces() {
    let server = Server::start(2, 2);
    let fox = server.ask("/tokenize", &json!({"content": " fox"})).await["tokens"][0].as_u64().unwrap();
    let forced = chat(STORY, json!({"logit_bias": {fox.to_string(): 100}, "max_tokens": 3, "temperature": 0}));
    let answer = server.ask(PATH, &forced).await;
    assert_eq!(answer["choices"][0]["message"]["content"], " fox fox fox");
}

#[tokio::test]
async fn text_goes_to_tokens_and_back() {
    let server = Server::start(1, 1);
    let text = "A fox, née Fuchs, <|im_end|> 🦊";
    let tokens = server.ask("/tokenize", &json!({"content": text, "parse_special": false})).await["tokens"].clone();
    let back = server.ask("/detokenize", &json!({"tokens": tokens})).await;
    assert_eq!((&back["content"], &back["prompt"]), (&text.into(), &text.into()));
    // vLLM's words, as lm-eval sends them.
    let same = json!({"prompt": text, "parse_special": false, "add_special_tokens": false});
    let same = server.ask("/tokenize", &same).await;
    assert_eq!((&same["tokens"], same["count"].as_u64()), (&tokens, tokens.as_array().map(|ids| ids.len() as u64)));
    let (status, info) = server.get("/tokenizer_info").await.json().await;
    assert_eq!((status, info["model_max_length"].as_u64()), (StatusCode::OK, Some(512)));
    let eos = server.ask("/tokenize", &json!({"prompt": info["eos_token"]})).await;
    assert_eq!(eos["count"], 1);
    let pieces = server.ask("/tokenize", &json!({"content": text, "with_pieces": true})).await;
    assert!(pieces["tokens"].as_array().unwrap().len() < tokens.as_array().unwrap().len());
    let prompt = server.ask("/apply-template", &chat("Hello", json!({}))).await["prompt"].as_str().unwrap().to_string();
    assert!(prompt.contains("Hello"), "{prompt}");
    let answer = server.ask(PATH, &chat("Hello", json!({"temperature": 0}))).await;
    let raw = server.ask("/v1/completions", &json!({"prompt": prompt, "temperature": 0, "max_tokens": 24})).await;
    assert_eq!(raw["choices"][0]["text"], answer["choices"][0]["message"]["content"]);
}

#[tokio::test]
async fn the_server_describes_itself() {
    let server = Server::start(1, 1);
    let openapi = server.get("/openapi.json").await.json().await.1;
    for route in super::super::routes::ROUTES {
        let path = route.path.replace("{*", "{");
        assert!(openapi["paths"][&path].is_object(), "{path}");
    }
    let schema = &openapi["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"];
    let temperature = &schema["properties"]["temperature"];
    assert_eq!((&temperature["type"], &temperature["title"]), (&json!("number"), &json!("Temperature")));
    for param in engine::sampler::PARAMS {
        let field = &schema["properties"][param.name];
        assert_eq!(field["x-group"], param.group.title(), "{}", param.name);
        assert!(field["x-step"].as_f64().is_some_and(|step| step > 0.0), "{}", param.name);
    }
    let models = server.get("/v1/models").await.json().await.1;
    let model = &models["data"][0];
    assert_eq!((&model["id"], &model["meta"]["embedded"]), (&json!("fable"), &json!(true)));
    let description = model["meta"]["description"].as_str().unwrap();
    assert!(description.contains("a toy for") && description.contains("qwen3moe"), "{description}");
    // Defaults carry no noise of 32-bit numbers, and every one of them is a field of a request.
    assert_eq!(model["meta"]["sampling"]["temperature"], 0.7, "{model}");
    for (name, value) in model["meta"]["sampling"].as_object().unwrap() {
        assert!(schema["properties"][name].is_object() && value.is_number(), "{name}: {value}");
    }
    for (path, status) in [
        ("/v1/models/fable", 200),
        ("/v1/models/gpt/9", 404),
        ("/health", 200),
        ("/ready", 200),
        ("/", 200),
        ("/metrics", 200),
        ("/v1/chat/completions", 405),
        ("/etc/passwd", 404),
    ] {
        assert_eq!(server.get(path).await.status, status, "{path}");
    }
}

#[tokio::test]
async fn embeddings_are_the_same_alone_and_together() {
    let server = Server::start(4, 16);
    let path = "/v1/embeddings";
    let texts = ["a fox", "A fox lost his hat in the wood", "a fox"];
    let together = server.ask(path, &json!({"input": texts})).await;
    for (i, text) in texts.iter().enumerate() {
        let one = server.ask(path, &json!({"input": text})).await;
        assert_eq!(one["data"][0]["embedding"], together["data"][i]["embedding"], "{text}");
        let row = one["data"][0]["embedding"].as_array().unwrap();
        let length: f64 = row.iter().map(|x| x.as_f64().unwrap().powi(2)).sum();
        assert!(row.len() == 256 && (length - 1.0).abs() < 1e-5, "{length}");
    }
    assert_ne!(together["data"][0]["embedding"], together["data"][1]["embedding"]);
    let short = server.ask(path, &json!({"input": [1, 2, 3], "dimensions": 8, "encoding_format": "base64"})).await;
    assert_eq!(short["data"][0]["embedding"].as_str().unwrap().len(), (8usize * 4).div_ceil(3) * 4);
    assert_eq!(short["usage"]["prompt_tokens"], 3);
    assert_eq!(server.post(path, &json!({"input": "x", "dimensions": 257})).await.status, 400);
    // A text without a token does not refuse the others; no text at all is refused.
    let gap = server.ask(path, &json!({"input": ["", "a fox"]})).await;
    assert_eq!(gap["data"][1]["embedding"], together["data"][0]["embedding"]);
    assert_eq!(server.ask("/api/embed", &json!({"input": ["a", ""]})).await["embeddings"].as_array().unwrap().len(), 2);
    assert_eq!(server.post(path, &json!({"input": []})).await.status, 400);
    server.idle().await;
}
