//! Names that other servers have for the same thing: each is honored or refused by name, never passed over.

use axum::http::HeaderValue;
use serde_json::{Value, json};

use super::super::common::Conversations;
use super::super::keys::Keys;
use super::{Server, chat};
use crate::load::open;

const PATH: &str = "/v1/chat/completions";

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn constraints_hold_under_every_name() {
    let server = Server::start(4, 8);
    let schema = json!({"type": "object", "properties": {"animal": {"enum": ["fox", "bear"]}}, "required": ["animal"]});
    let is_choice = |text: &str| ["yes", "no"].contains(&text);
    // Closed: the schema names one property, and the model cannot add others.
    let is_animal = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap_or_default();
        value["animal"].is_string() && value.as_object().unwrap().len() == 1
    };
    let choices = [
        json!({"guided_choice": ["yes", "no"]}),
        json!({"guided_regex": "(yes|no)"}),
        json!({"guided_grammar": "start: \"yes\" | \"no\""}),
        json!({"grammar": "root ::= \"yes\" | \"no\""}),
        json!({"structured_outputs": {"choice": ["yes", "no"]}}),
        json!({"structured_outputs": {"regex": "yes|no"}}),
    ];
    for mut more in choices {
        more["temperature"] = json!(1.5);
        let answer = server.ask(PATH, &chat("Is the sky blue?", more.clone())).await;
        assert!(is_choice(text(&answer)), "{more}: {answer}");
    }
    let schemas = [
        json!({"guided_json": schema}),
        json!({"json_schema": schema}),
        json!({"format": schema}),
        json!({"structured_outputs": {"json": schema.to_string()}}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"response_format": {"type": "json_schema", "schema": schema}}),
    ];
    for mut more in schemas {
        more["max_tokens"] = json!(400);
        more["temperature"] = json!(1.5);
        let answer = server.ask(PATH, &chat("An animal?", more.clone())).await;
        assert!(is_animal(text(&answer)), "{more}: {answer}");
    }
    for (more, param) in [
        (json!({"grammar": "root ::= \"yes\" | maybe"}), "grammar"),
        (json!({"structured_outputs": {"structural_tag": "{}"}}), "structured_outputs.structural_tag"),
        (json!({"guided_whitespace_pattern": " "}), "guided_whitespace_pattern"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
        (json!({"function_call": "auto"}), "function_call"),
    ] {
        let (status, answer) = server.post(PATH, &chat("x", more.clone())).await.json().await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(param)), "{more}: {answer}");
    }
    server.idle().await;
}

#[tokio::test]
async fn no_limit_is_written_as_minus_one() {
    let server = Server::start(2, 4);
    let cases = [
        ("max_tokens", -1, "stop"),
        ("max_completion_tokens", -1, "stop"),
        ("n_predict", 3, "length"),
        ("max_tokens", 0, "length"),
    ];
    for (name, n, finish) in cases {
        let mut body = chat("What is the capital of France?", json!({"temperature": 0}));
        body.as_object_mut().unwrap().remove("max_tokens");
        body[name] = json!(n);
        let answer = server.ask(PATH, &body).await;
        assert_eq!(answer["choices"][0]["finish_reason"], finish, "{name} {n}: {answer}");
    }
    server.idle().await;
}

#[tokio::test]
async fn the_version_may_be_left_out_of_the_path() {
    let server = Server::start(2, 4);
    let body = chat("Hi", json!({"max_tokens": 4}));
    assert_eq!(text(&server.ask("/chat/completions", &body).await), text(&server.ask(PATH, &body).await));
    server.ask("/completions", &json!({"prompt": "a", "max_tokens": 1})).await;
    server.ask("/embeddings", &json!({"input": "a"})).await;
    assert_eq!(server.get("/models").await.json().await.1["data"][0]["id"], "fable");
}

#[tokio::test]
async fn llama_servers_own_routes_answer() {
    let server = Server::start(2, 4);
    let body = json!({"prompt": "Once upon a time", "n_predict": 8, "temperature": 0, "n_probs": 2});
    let answer = server.ask("/completion", &body).await;
    let openai = json!({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0});
    assert_eq!(answer["content"], server.ask("/v1/completions", &openai).await["choices"][0]["text"]);
    assert_eq!((&answer["stop"], &answer["stop_type"]), (&json!(true), &json!("limit")), "{answer}");
    assert_eq!(answer["completion_probabilities"].as_array().map(Vec::len), Some(8));
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = server.post("/completion", &streamed).await.events().await;
    let joined: String = events.iter().filter_map(|event| event["content"].as_str()).collect();
    assert_eq!(answer["content"], joined);
    assert_eq!(events.last().map(|event| event["stop"].clone()), Some(json!(true)));
    let props = server.get("/props").await.json().await.1;
    assert_eq!(props["default_generation_settings"]["n_ctx"], 512, "{props}");
    // The embedded model has no marks for gaps, and says so.
    for (path, body) in [
        ("/infill", json!({"input_prefix": "a", "input_suffix": "b"})),
        ("/v1/completions", json!({"prompt": "a", "suffix": "b"})),
    ] {
        let (status, answer) = server.post(path, &body).await.json().await;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains("no fill-in-the-middle"), "{path}: {answer}");
    }
}

/// Programs that llama-server serves send every setting that they have.
#[tokio::test]
async fn settings_of_llama_servers_clients_are_taken() {
    let server = Server::start(2, 4);
    let base = json!({"prompt": "Once", "n_predict": 4, "temperature": 0});
    let plain = server.ask("/completion", &base).await["content"].clone();
    let with = |more: &Value| {
        let mut body = base.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let all =
        json!({"grammar": "", "json_schema": "", "logit_bias": [], "samplers": "kypmt", "stop": [""], "id_slot": -1});
    for (name, value) in all.as_object().unwrap() {
        assert_eq!(server.ask("/completion", &with(&json!({name: value}))).await["content"], plain, "{name}");
    }
    let reply = server.post("/completion", &with(&all)).await;
    assert!(!reply.headers.contains_key("x-ignored-fields"));
    assert_eq!(reply.json().await.1["content"], plain);
    // Samplers that there are not here are named.
    for samplers in [json!(["top_k", "mirostat", "temperature"]), json!("kft")] {
        let reply = server.post("/completion", &with(&json!({"samplers": samplers}))).await;
        let ignored = reply.headers["x-ignored-fields"].to_str().unwrap();
        assert!(reply.status == 200 && ["samplers (mirostat)", "samplers (f)"].contains(&ignored), "{ignored}");
    }
    // Biases of tokens and of texts, and what must not come.
    let ids = server.ask("/tokenize", &json!({"content": plain})).await["tokens"].clone();
    for bias in [json!([[ids[0], false]]), json!([[ids[0], -100]]), json!([[plain, -100.0], [5, 0.5]])] {
        assert_ne!(server.ask("/completion", &with(&json!({"logit_bias": bias}))).await["content"], plain, "{bias}");
    }
    // Texts and tokens in one prompt.
    let text = "Once upon a time there was";
    let ids =
        server.ask("/tokenize", &json!({"content": " upon a time", "add_special": false})).await["tokens"].clone();
    let mut mixed = vec![json!("Once")];
    mixed.extend(ids.as_array().unwrap().iter().cloned());
    mixed.push(json!(" there was"));
    let whole = server.ask("/completion", &with(&json!({"prompt": text}))).await;
    let parts = server.ask("/completion", &with(&json!({"prompt": mixed}))).await;
    assert_eq!((&whole["content"], &whole["prompt"]), (&parts["content"], &parts["prompt"]));
    // Several prompts have a list of answers, each that of its prompt alone.
    let several = with(&json!({"prompt": ["Once", ids, text]}));
    let answers = server.ask("/completion", &several).await;
    let mut streamed = several.clone();
    streamed["stream"] = json!(true);
    let events = server.post("/completion", &streamed).await.events().await;
    for (i, prompt) in several["prompt"].as_array().unwrap().iter().enumerate() {
        let alone = server.ask("/completion", &with(&json!({"prompt": prompt}))).await;
        assert_eq!((&answers[i]["content"], &answers[i]["index"]), (&alone["content"], &json!(i)));
        assert_eq!((&answers[i]["prompt"], &answers[i]["stop_type"]), (&alone["prompt"], &json!("limit")));
        let mine = events.iter().filter(|event| event["index"] == i);
        let joined: String = mine.clone().filter_map(|event| event["content"].as_str()).collect();
        assert_eq!((&json!(joined), mine.filter(|event| event["stop"] == true).count()), (&alone["content"], 1));
    }
    server.idle().await;
}

/// The beginning of an answer is gone on with where the client says so in any API's words.
#[tokio::test]
async fn answers_that_are_begun_go_on() {
    let server = Server::start(2, 4);
    let list = |last: Value| json!([{"role": "user", "content": "Tell me about a fox"}, last]);
    let begun = list(json!({"role": "assistant", "content": "A fox is a"}));
    let ask = |messages: &Value, more: Value| {
        let mut body = json!({"messages": messages, "max_tokens": 6, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let on = server.ask(PATH, &ask(&begun, json!({"continue_final_message": true}))).await;
    let marked = list(json!({"role": "assistant", "content": "A fox is a", "prefix": true}));
    assert_eq!(text(&server.ask(PATH, &ask(&marked, json!({}))).await), text(&on));
    assert_ne!(text(&server.ask(PATH, &ask(&begun, json!({}))).await), text(&on));
    let message = server.ask("/v1/messages", &ask(&begun, json!({}))).await;
    assert_eq!(message["content"][0]["text"], text(&on));
    let body = json!({"messages": begun, "stream": false, "options": {"num_predict": 6, "temperature": 0}});
    assert_eq!(server.ask("/api/chat", &body).await["message"]["content"], text(&on));
    server.idle().await;
}

/// What lm-eval asks for: the log-probabilities of a prompt of tokens, and whether each was the likeliest.
#[tokio::test]
async fn prompts_have_log_probabilities() {
    let server = Server::start(4, 8);
    let path = "/v1/completions";
    let said =
        json!({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": true});
    let told = server.ask(path, &said).await;
    let text = format!("Once upon a time{}", told["choices"][0]["text"].as_str().unwrap());
    let ids = server.ask("/tokenize", &json!({"content": text, "add_special": true})).await["tokens"].clone();
    let n = ids.as_array().unwrap().len();
    let body =
        json!({"prompt": [ids, ids], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true, "seed": 1234});
    let answer = server.ask(path, &body).await;
    for choice in answer["choices"].as_array().unwrap() {
        let logprobs = &choice["logprobs"];
        let values = logprobs["token_logprobs"].as_array().unwrap();
        assert_eq!((values.len(), &values[0]), (n + 1, &Value::Null), "{choice}");
        assert_eq!(logprobs["tokens"].as_array().unwrap().len(), n + 1);
        assert_eq!(logprobs["text_offset"].as_array().unwrap().len(), n + 1);
        // The answer's tokens score what they scored when they were chosen, and each is the likeliest.
        let own = told["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!(values[n - 12..n], own[..], "{choice}");
        for i in n - 12..n {
            let best = logprobs["top_logprobs"][i].as_object().unwrap().values().filter_map(Value::as_f64);
            assert_eq!(best.fold(f64::MIN, f64::max), values[i].as_f64().unwrap());
        }
    }
    // vLLM's name of it, and no answer at all.
    let body = json!({"prompt": "Once upon a time", "max_tokens": 0, "prompt_logprobs": 2});
    let answer = server.ask(path, &body).await;
    let list = answer["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert!(list[0].is_null() && list[1..].iter().all(|entry| entry.as_object().unwrap().len() >= 2), "{answer}");
    assert_eq!(answer["choices"][0]["text"], "");
    let streamed = json!({"prompt": "a", "echo": true, "logprobs": 1, "stream": true});
    assert_eq!(server.post(path, &streamed).await.status, 400);
    server.idle().await;
}

/// What a server does not know has no effect, and the client can see that; a slip of the pen is refused.
#[tokio::test]
async fn unknown_fields_are_named() {
    let server = Server::start(2, 4);
    let known = json!({"max_tokens": 2, "user": "me"});
    for (path, body) in [(PATH, chat("Hi", known)), ("/v1/completions", json!({"prompt": "a", "max_tokens": 2}))] {
        assert!(!server.post(path, &body).await.headers.contains_key("x-ignored-fields"), "{path}");
        let mut more = body.clone();
        (more["foo"], more["store"]) = (json!({"a": [1]}), json!(true));
        let reply = server.post(path, &more).await;
        let ignored = reply.headers.get("x-ignored-fields").map(HeaderValue::as_bytes);
        assert_eq!((reply.status.as_u16(), ignored), (200, Some(&b"foo, store"[..])), "{path}");
        let mut slip = body.clone();
        slip["temprature"] = json!(0);
        let (status, answer) = server.post(path, &slip).await.json().await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == 400 && message.contains("`temprature` is unknown; did you mean `temperature`?"), "{answer}");
    }
    server.idle().await;
}

/// Numbers are told in as few digits as they were written with.
#[tokio::test]
async fn numbers_are_short() {
    let server = Server::start(2, 4);
    let body = json!({"input": "Hi", "max_output_tokens": 2, "temperature": 0.7, "top_p": 0.9});
    let answer = server.ask("/v1/responses", &body).await;
    assert_eq!((&answer["temperature"], &answer["top_p"]), (&json!(0.7), &json!(0.9)), "{answer}");
    for path in ["/props", "/v1/models"] {
        let text = server.get(path).await.text().await;
        let digits = text.split(|c: char| !c.is_ascii_digit() && c != '.').filter(|word| word.contains('.'));
        assert!(digits.clone().all(|word| word.len() < 10), "{path}: {text}");
    }
}

/// A gap is filled between the marks that a file's keys name; an echo is the client's text without them.
#[tokio::test]
async fn gaps_are_filled() {
    let mut model = open(None).expect("embedded model");
    let meta = std::sync::Arc::get_mut(&mut model.checkpoint).expect("one owner").meta_mut();
    for (i, name) in ["pre", "suf", "mid", "rep", "sep"].into_iter().enumerate() {
        meta.set(&format!("tokenizer.ggml.fim_{name}_token_id"), checkpoint::Value::U32(8000 + i as u32));
    }
    let server = Server::on(model, 2, 4, Keys::default(), 256, Conversations::default());
    let tokens = async |text: &str| {
        server.ask("/tokenize", &json!({"content": text})).await["tokens"].as_array().expect("tokens").len()
    };
    let parts = tokens("Once upon a time").await + tokens("The end.").await;
    let gap = |more: Value| {
        let mut body = json!({"input_prefix": "Once upon a time", "input_suffix": "The end.", "n_predict": 4});
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        body
    };
    let count = |answer: &Value| answer["tokens_evaluated"].as_u64().expect("a count") as usize;
    assert_eq!(count(&server.ask("/infill", &gap(json!({}))).await), parts + 3);
    let files = json!([{"filename": "a.txt", "text": "hello"}, {"text": "no name"}]);
    let with_files = server.ask("/infill", &gap(json!({"input_extra": files}))).await;
    let n_files = tokens("project\n").await
        + tokens("a.txt\nhello\n").await
        + tokens("tmp\nno name\n").await
        + tokens("current\n").await;
    assert_eq!(count(&with_files), parts + n_files + 3 + 4, "{with_files}");
    let body = json!({"prompt": "Once upon a time", "suffix": "The end.", "echo": true, "max_tokens": 4});
    let answer = server.ask("/v1/completions", &body).await;
    assert_eq!(answer["usage"]["prompt_tokens"], parts + 3);
    let text = answer["choices"][0]["text"].as_str().expect("text");
    assert!(text.starts_with("Once upon a time") && !text.contains("The end."), "{text}");
    let body =
        json!({"prompt": "Once upon a time", "suffix": "The end.", "stream": false, "options": {"num_predict": 4}});
    let answer = server.ask("/api/generate", &body).await;
    assert_eq!((&answer["prompt_eval_count"], &answer["eval_count"]), (&json!(parts + 3), &json!(4)), "{answer}");
}

/// Editors have prompts computed before they need them, and read a part of the answers.
#[tokio::test]
async fn prompts_are_computed_ahead_and_answers_in_part() {
    let server = Server::start(2, 4);
    let prompt = "Once upon a time there was a fox who lived in the forest with an old bear. ".repeat(5);
    let ask = |more: Value| {
        let mut body = json!({"prompt": prompt, "n_predict": 4, "temperature": 0, "n_probs": 1});
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        body
    };
    for stream in [false, true] {
        let body = ask(json!({"n_predict": 0, "stream": stream, "prompt": format!("{stream}. {prompt}")}));
        let answer = if stream {
            let events = server.post("/completion", &body).await.events().await;
            assert_eq!(events.len(), 1, "{events:?}");
            events[0].clone()
        } else {
            server.ask("/completion", &body).await
        };
        assert_eq!((&answer["content"], &answer["tokens_predicted"]), (&json!(""), &json!(0)), "{answer}");
        assert_eq!((&answer["stop_type"], &answer["tokens_cached"]), (&json!("limit"), &json!(0)), "{answer}");
        assert!(answer["tokens_evaluated"].as_u64() > Some(64) && answer.get("completion_probabilities").is_none());
        let after = server.ask("/completion", &ask(json!({"prompt": body["prompt"]}))).await;
        assert!(after["tokens_cached"].as_u64() >= Some(32), "{after}");
    }
    let fields = json!(["content", "timings/predicted_n", "timings/none", "none"]);
    let answer = server.ask("/completion", &ask(json!({"response_fields": fields}))).await;
    let names: Vec<&String> = answer.as_object().expect("an object").keys().collect();
    assert_eq!(names, ["content", "timings/predicted_n"]);
    assert_eq!(answer["timings/predicted_n"], 4);
    server.idle().await;
}
