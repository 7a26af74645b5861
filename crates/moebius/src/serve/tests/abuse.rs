//! Requests that no honest client sends. Nothing panics, nothing stays behind, the next honest request works.

use axum::body::Body;
use axum::http::{Request, StatusCode};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::keys::Keys;
use super::super::routes::{Method, ROUTES};
use super::{Server, chat};

const PATH: &str = "/v1/chat/completions";

#[tokio::test]
async fn what_is_wrong_is_named() {
    let server = Server::start(2, 2);
    let image =
        json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]);
    let deep = (0..100).fold(json!(1), |value, _| json!([value]));
    let cases: &[(&str, Value, u16, &str, &str)] = &[
        (PATH, json!({}), 400, "messages", "is missing"),
        (
            PATH,
            chat("Hello", json!({"dry_sequence_breakers": ["a", "b ".repeat(1000)]})),
            400,
            "dry_sequence_breakers",
            "entry 1 has more than 512 bytes",
        ),
        (PATH, json!({"messages": []}), 400, "messages", "is empty"),
        (PATH, json!({"messages": "hi"}), 400, "messages", "must be a list"),
        (PATH, json!({"messages": [{"role": "king", "content": ""}]}), 400, "messages[0].role", "must be one of"),
        (PATH, json!({"messages": [{"role": "user"}]}), 400, "messages[0].content", "is missing"),
        (PATH, json!({"messages": [{"role": "user", "content": 5}]}), 400, "messages[0].content", "must be a string"),
        (PATH, json!({"messages": image}), 400, "messages[0].content[0].type", "this model reads text only"),
        (PATH, chat("x", json!({"temperature": "hot"})), 400, "temperature", "must be a number"),
        (PATH, chat("x", json!({"temperature": -1})), 400, "temperature", "must be a number"),
        (PATH, chat("x", json!({"top_p": 1.5})), 400, "top_p", "from 0 to 1"),
        (PATH, chat("x", json!({"max_tokens": -5})), 400, "max_tokens", "whole number"),
        (PATH, chat("x", json!({"n": 1000000})), 400, "n", "whole number"),
        (PATH, chat("x", json!({"stop": ["a", "b".repeat(513)]})), 400, "stop", "entry 1 has 513 bytes"),
        (PATH, chat("x", json!({"stop": vec!["x"; 100]})), 400, "stop", "100 entries"),
        (PATH, chat("x", json!({"logit_bias": {"fox": 1}})), 400, "logit_bias.fox", "not a token id"),
        (PATH, chat("x", json!({"logit_bias": {"1": 1e9}})), 400, "logit_bias.1", "from -100 to 100"),
        (PATH, chat("x", json!({"logit_bias": {"99999999": 1}})), 400, "", "vocabulary"),
        (PATH, chat("x", json!({"top_logprobs": 3})), 400, "top_logprobs", "requires `logprobs`"),
        (PATH, chat("x", json!({"stop_token_ids": [4_000_000_000u64]})), 400, "", "vocabulary"),
        (PATH, chat(&"fox ".repeat(2000), json!({})), 400, "", "prompt is too long"),
        (
            PATH,
            chat("x", json!({"chat_template_kwargs": {"messages": []}})),
            400,
            "chat_template_kwargs.messages",
            "is set",
        ),
        (PATH, chat("x", json!({"chat_template_kwargs": {"tools": []}})), 400, "chat_template_kwargs.tools", "is set"),
        (
            PATH,
            chat("x", json!({"chat_template_kwargs": {"bos_token": ""}})),
            400,
            "chat_template_kwargs.bos_token",
            "is set",
        ),
        (PATH, chat("x", json!({"tools": [{"type": "function"}]})), 400, "tools[0].function", "must be an object"),
        ("/v1/completions", json!({"prompt": deep}), 400, "prompt", "must be"),
        ("/v1/completions", json!({"prompt": [1, {}]}), 400, "prompt", "has an object among tokens"),
        ("/v1/completions", json!({"prompt": [1, "x", 99999999]}), 400, "", "vocabulary"),
        (PATH, chat("x", json!({"logit_bias": [[1]]})), 400, "logit_bias[0][1]", "from -100 to 100"),
        (PATH, chat("x", json!({"logit_bias": [[5, 1], [-1, true]]})), 400, "logit_bias[1][0]", "whole number"),
        (PATH, chat("x", json!({"logit_bias": [[5, 1, 2]]})), 400, "logit_bias[0]", "at most 2"),
        (PATH, chat("x", json!({"logit_bias": [[99999999, 1]]})), 400, "", "vocabulary"),
        (PATH, chat("x", json!({"samplers": 5})), 400, "samplers", "must be a string or a list, each entry a string"),
        ("/v1/completions", json!({"prompt": ""}), 400, "", "empty"),
        ("/v1/completions", json!({"prompt": [99999999]}), 400, "", "vocabulary"),
        ("/v1/completions", json!({"prompt": "x", "best_of": 3}), 400, "best_of", "equal"),
        ("/detokenize", json!({"tokens": [-1]}), 400, "tokens[0]", "whole number"),
        ("/detokenize", json!({"tokens": [1, 4_000_000_000u64]}), 400, "tokens[1]", "the vocabulary has"),
        (
            "/apply-template",
            json!({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"eos_token": 1}}),
            400,
            "chat_template_kwargs.eos_token",
            "is set",
        ),
        ("/tokenize", json!({"content": ["x"]}), 400, "content", "must be a string"),
        ("/tokenize", json!({}), 400, "content", "is missing"),
    ];
    for (path, body, status, param, message) in cases {
        let (got, answer) = server.post(path, body).await.json().await;
        let error = &answer["error"];
        let body: String = body.to_string().chars().take(200).collect();
        assert_eq!(got, *status, "{body}: {answer}");
        assert!(error["message"].as_str().is_some_and(|m| m.contains(message)), "{body}: {answer}");
        assert_eq!(error["param"].as_str().unwrap_or_default(), *param, "{body}: {answer}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    server.idle().await;
    server.ask(PATH, &chat("Hello", json!({"unknown": {"field": [1]}, "temperature": null}))).await;
}

#[tokio::test]
async fn bodies_that_are_no_json_objects_are_refused() {
    let server = Server::start(1, 1);
    let json = "application/json";
    let long = "x".repeat(9 << 20);
    let cases: &[(&str, &str, u16)] = &[
        (json, "", 400),
        (json, "[1]", 400),
        (json, "{\"messages\": [{]}", 400),
        (json, "{\"temperature\": NaN}", 400),
        (json, "{\"temperature\": 1e999}", 400),
        (json, "{\"temperature\": Infinity}", 400),
        (json, "\u{feff}{}", 400),
        (json, &long, 413),
        ("application/JSON; charset=utf-8", "{}", 400),
    ];
    let post =
        |kind: &str, body: &str| Request::post(PATH).header("content-type", kind).body(Body::from(body.to_string()));
    for (kind, body, status) in cases {
        let reply = server.send(post(kind, body).unwrap()).await;
        assert_eq!(reply.status.as_u16(), *status, "{kind} {:.60}", body);
        assert!(reply.json().await.1["error"]["message"].is_string());
    }
    // Pages could send these to other sites without asking; programs do when their users name no type.
    let whole = chat("Hello", json!({"max_tokens": 2})).to_string();
    for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
        assert_eq!(server.send(post(kind, &whole).unwrap()).await.status, StatusCode::OK, "{kind}");
        for (name, value) in [("origin", "http://localhost"), ("origin", "null"), ("sec-fetch-site", "cross-site")] {
            let mut request = post(kind, &whole).unwrap();
            request.headers_mut().insert(name, value.parse().unwrap());
            let status = server.send(request).await.status.as_u16();
            assert!([403, 415].contains(&status), "{kind}, {name}: {status}");
        }
    }
    let nested = format!("{{\"messages\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let request = Request::post(PATH).header("content-type", json).body(Body::from(nested)).unwrap();
    assert_eq!(server.send(request).await.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn keys_guard_everything_but_the_signs_of_life() {
    let server = Server::with_keys(1, 1, Keys::parse("secret").unwrap());
    for route in ROUTES {
        let path = route.path.replace("{*id}", "fable").replace("{id}", "resp_1");
        for (key, opens) in [(None, route.open), (Some("Bearer wrong"), route.open), (Some("Bearer secret"), true)] {
            let request = match route.method {
                Method::Get => Request::get(&path),
                Method::Delete => Request::delete(&path),
                Method::Post => Request::post(&path).header("content-type", "application/json"),
            };
            let request = key.into_iter().fold(request, |request, key| request.header("authorization", key));
            let reply = server.send(request.body(Body::from("{}")).unwrap()).await;
            assert_eq!(reply.status != StatusCode::UNAUTHORIZED, opens, "{path} {key:?}");
            // What is open says nothing of the models.
            if path == "/ready" {
                let said = reply.text().await;
                assert_eq!(said.contains("fable"), key == Some("Bearer secret"), "{said}");
            }
        }
    }
}

/// Any JSON, with numbers from the edges.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec![0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-300, 1e300, f64::MAX]).prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        prop::sample::select(vec!["NaN", "user", "text", "auto", "<|im_end|>", "{{ x }}"]).prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec(("[a-z_]{1,8}", inner), 0..5)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// An honest body of the route with some of its fields replaced by anything.
fn any_body(route: usize) -> impl Strategy<Value = Value> {
    let names: Vec<&str> = ROUTES[route].fields.iter().copied().flatten().map(|field| field.name).collect();
    let edits = prop::collection::vec((prop::sample::select(names), any_json()), 0..4);
    (edits, any::<bool>(), "[a-z ]{1,30}").prop_map(move |(edits, stream, text)| {
        let mut body = json!({
            "messages": [{"role": "user", "content": text}],
            "prompt": text, "content": text, "input": text, "tokens": [1, 2, 3],
            "max_tokens": 3, "max_output_tokens": 3, "stream": stream,
        });
        for (name, value) in edits {
            body[name] = value;
        }
        // What an answer may cost is not what is tested.
        for name in ["max_tokens", "max_completion_tokens", "max_output_tokens"] {
            if body[name].as_u64().is_some_and(|n| n > 3) {
                body[name] = json!(3);
            }
        }
        if body["n"].as_u64().is_some_and(|n| n > 2) {
            body["n"] = json!(2);
        }
        body
    })
}

#[test]
fn whatever_is_sent_the_next_honest_request_works() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = Server::start(4, 600);
    let posts: Vec<usize> = (0..ROUTES.len()).filter(|&i| ROUTES[i].method == Method::Post).collect();
    let honest = chat("Hello", json!({"max_tokens": 2}));
    let expected = runtime.block_on(server.ask(PATH, &honest))["choices"].clone();
    let request = prop::sample::select(posts).prop_flat_map(|i| (Just(i), any_body(i), any::<bool>()));
    let config = ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(requests in prop::collection::vec(request, 1..4))| {
        runtime.block_on(async {
            for (i, body, leave) in requests {
                let mut reply = server.post(ROUTES[i].path, &body).await;
                let status = reply.status;
                prop_assert!(status.is_success() || status.is_client_error(), "{} {body}: {status}", ROUTES[i].path);
                if leave {
                    reply.piece().await;
                } else {
                    reply.text().await;
                }
            }
            prop_assert_eq!(&server.ask(PATH, &honest).await["choices"], &expected);
            server.idle().await;
            Ok(())
        })?;
    });
}
