//! Images in messages, on a tiny random model that sees.

use std::path::Path;

use axum::http::StatusCode;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::super::common::Conversations;
use super::super::keys::Keys;
use super::{Server, chat};
use crate::args::SightArgs;
use crate::load::open;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../conformance/tests/data/images/qwen3_vl_moe");
/// Tokens of every image of the tests, without those around it.
const N_IMAGE: u64 = 12;

fn server() -> Server {
    let model = open(Some(&Path::new(FOLDER).join("hf"))).and_then(|m| m.seeing(&SightArgs::default()));
    Server::on(model.expect("a model that sees"), 2, 8, Keys::default(), 512, Conversations::default())
}

fn image(name: &str) -> String {
    STANDARD.encode(std::fs::read(format!("{FOLDER}/images/{name}.png")).expect("image"))
}

/// A question about an image, in OpenAI's form.
fn about(url: &str, more: Value) -> Value {
    let parts = json!([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]);
    let mut body = chat("", json!({"temperature": 0, "max_tokens": 6, "logprobs": true}));
    body["messages"][0]["content"] = parts;
    for (name, value) in more.as_object().expect("fields") {
        body[name] = value.clone();
    }
    body
}

fn uri(name: &str) -> String {
    format!("data:image/png;base64,{}", image(name))
}

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn images_are_seen_counted_and_cached() {
    let server = server();
    let first = server.ask(CHAT, &about(&uri("odd"), json!({}))).await;
    let text = server.ask(CHAT, &chat("What?", json!({"temperature": 0, "max_tokens": 6, "logprobs": true}))).await;
    let count = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().expect("a count");
    // The image, and the tokens in front of it and after it.
    assert_eq!(count(&first), count(&text) + N_IMAGE + 2, "{first} {text}");
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    let again = server.ask(CHAT, &about(&uri("odd"), json!({}))).await;
    let other = server.ask(CHAT, &about(&uri("rgba"), json!({}))).await;
    let said = |answer: &Value| answer["choices"][0]["logprobs"].clone();
    assert_eq!(said(&first), said(&again));
    assert_ne!(said(&first), said(&other));
    assert_ne!(said(&first), said(&text));
    // A long prompt is found again with its image, and not with another one.
    let long = |name: &str| {
        let mut body = about(&uri(name), json!({}));
        body["messages"][0]["content"][1]["text"] = "What is this? ".repeat(8).into();
        body
    };
    assert_eq!(cached(&server.ask(CHAT, &long("odd")).await), 0);
    assert!(cached(&server.ask(CHAT, &long("odd")).await) >= 32);
    assert_eq!(cached(&server.ask(CHAT, &long("dot")).await), 0);
    server.idle().await;
}

#[tokio::test]
async fn every_api_takes_images() {
    let server = server();
    let data = image("odd");
    let chat = server.ask(CHAT, &about(&uri("odd"), json!({}))).await;
    let text = chat["choices"][0]["message"]["content"].as_str().expect("text").to_string();
    let n_prompt = chat["usage"]["prompt_tokens"].clone();
    let source = json!({"type": "base64", "media_type": "image/png", "data": data});
    let content = json!([{"type": "image", "source": source}, {"type": "text", "text": "What?"}]);
    let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0});
    let answer = server.ask("/v1/messages", &body).await;
    assert_eq!(answer["content"][0]["text"].as_str().unwrap_or_default(), text);
    // What is cached is counted apart.
    let usage = |name: &str| answer["usage"][name].as_u64().unwrap_or(0);
    assert_eq!(json!(usage("input_tokens") + usage("cache_read_input_tokens")), n_prompt);
    let counted = server.ask("/v1/messages/count_tokens", &body).await;
    assert_eq!(counted["input_tokens"], n_prompt);
    let content = json!([{"type": "input_image", "image_url": uri("odd")}, {"type": "input_text", "text": "What?"}]);
    let input = json!([{"role": "user", "content": content}]);
    let answer = server.ask("/v1/responses", &json!({"input": input, "max_output_tokens": 6, "temperature": 0})).await;
    assert_eq!(answer["output"][0]["content"][0]["text"].as_str().unwrap_or_default(), text);
    let message = json!({"role": "user", "content": "What?", "images": [data]});
    let options = json!({"num_predict": 6, "temperature": 0});
    let body = json!({"messages": [message], "stream": false, "options": options});
    let answer = server.ask("/api/chat", &body).await;
    assert_eq!(answer["message"]["content"].as_str().unwrap_or_default(), text);
    assert_eq!(answer["prompt_eval_count"], n_prompt);
    let body = json!({"prompt": "What?", "images": [data], "stream": false, "options": options});
    let answer = server.ask("/api/generate", &body).await;
    assert_eq!(answer["response"].as_str().unwrap_or_default(), text);
    assert_eq!(answer["prompt_eval_count"], n_prompt);
    assert_eq!(server.get("/props").await.json().await.1["modalities"]["vision"], true);
    server.idle().await;
}

/// `/completion` of llama-server: images of a list in place of markers.
#[tokio::test]
async fn markers_become_images() {
    const COMPLETION: &str = "/completion";
    let server = server();
    let props = server.get("/props").await.json().await.1;
    let marker = props["media_marker"].as_str().expect("marker");
    let ask = |prompt: Value| json!({"prompt": prompt, "n_predict": 6, "temperature": 0, "n_probs": 1});
    let shown = |text: &str, files: &[&str]| {
        let data: Vec<String> = files.iter().map(|name| image(name)).collect();
        json!({"prompt_string": text.replace("IMAGE", marker), "multimodal_data": data})
    };
    let one = server.ask(COMPLETION, &ask(shown("See IMAGE: what?", &["odd"]))).await;
    let text = server.ask(COMPLETION, &ask(json!("See : what?"))).await;
    let count = |answer: &Value| answer["tokens_evaluated"].as_u64().expect("a count");
    assert_eq!(count(&one), count(&text) + N_IMAGE + 2, "{one} {text}");
    assert_eq!(one["prompt"], format!("See {marker}: what?"));
    let said = |answer: &Value| answer["completion_probabilities"].clone();
    let other = server.ask(COMPLETION, &ask(shown("See IMAGE: what?", &["rgba"]))).await;
    assert_ne!(said(&one), said(&text));
    assert_ne!(said(&one), said(&other));
    // In their order, and next to prompts of other forms.
    let many = json!(["See : what?", shown("See IMAGE: what?", &["rgba"]), shown("See IMAGE IMAGE", &["odd", "rgba"])]);
    let many = server.ask(COMPLETION, &ask(many)).await;
    assert_eq!(said(&many[0]), said(&text));
    assert_eq!(said(&many[1]), said(&other));
    let turned = server.ask(COMPLETION, &ask(shown("See IMAGE IMAGE", &["rgba", "odd"]))).await;
    assert_ne!(said(&many[2]), said(&turned));
    // Without images it is a text.
    let plain = server.ask(COMPLETION, &ask(shown("See : what?", &[]))).await;
    assert_eq!(said(&plain), said(&text));
    let url = json!({"prompt_string": marker, "multimodal_data": ["http://127.0.0.1/x.png"]});
    let cases = [
        (shown("IMAGE IMAGE", &["odd"]), "has 1 entries for 2 markers"),
        (shown("none", &["odd"]), "has 1 entries for 0 markers"),
        (json!({"multimodal_data": []}), "`prompt[0].prompt_string` must be a string"),
        (json!({"prompt_string": marker, "multimodal_data": "aGk="}), "`prompt[0].multimodal_data` must be a list"),
        (json!({"prompt_string": marker, "multimodal_data": [7]}), "`prompt[0].multimodal_data[0]` must be a string"),
        (json!({"prompt_string": marker, "multimodal_data": ["?!"]}), "not valid Base64"),
        (json!({"prompt_string": marker, "multimodal_data": [STANDARD.encode("<svg/>")]}), "cannot be used"),
        (url, "is an address"),
        (json!([1, shown("IMAGE", &["dot"])]), "has an object among tokens"),
        (json!([shown(&"IMAGE ".repeat(40), &["dot"; 40]), shown(&"IMAGE ".repeat(40), &["dot"; 40])]), "80 images"),
    ];
    for (prompt, why) in cases {
        let (status, answer) = server.post(COMPLETION, &ask(prompt)).await.json().await;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == StatusCode::BAD_REQUEST && message.contains(why), "{why}: {answer}");
    }
    server.idle().await;
}

/// `/v1/completions` takes the same prompts.
#[tokio::test]
async fn completions_see_images_in_place_of_markers() {
    let server = server();
    let prompt = json!({"prompt_string": "See <__media__>: what?", "multimodal_data": [image("odd")]});
    let ask = |prompt: &Value, more: Value| {
        let mut body = json!({"prompt": prompt, "max_tokens": 6, "n_predict": 6, "temperature": 0});
        more.as_object().expect("fields").iter().for_each(|(name, value)| body[name] = value.clone());
        body
    };
    let llama = server.ask("/completion", &ask(&prompt, json!({}))).await;
    let said = llama["content"].as_str().expect("text");
    let many = ask(&json!([prompt, "See : what?"]), json!({"n": 2, "logprobs": 1}));
    let many = server.ask("/v1/completions", &many).await;
    assert_eq!([&many["choices"][0]["text"], &many["choices"][1]["text"]], [said; 2], "{many}");
    assert_ne!(many["choices"][0]["logprobs"], many["choices"][2]["logprobs"]);
    let echo = server.ask("/v1/completions", &ask(&prompt, json!({"echo": true}))).await;
    assert_eq!(echo["choices"][0]["text"], format!("See <__media__>: what?{said}"));
    assert_eq!(echo["usage"]["prompt_tokens"], llama["tokens_evaluated"]);
    let mut two = prompt.clone();
    two["prompt_string"] = "<__media__><__media__>".into();
    for (body, why) in [
        (ask(&prompt, json!({"echo": true, "logprobs": 0})), "no log-probabilities"),
        (ask(&prompt, json!({"suffix": "end"})), "FIM"),
        (ask(&two, json!({})), "has 1 entries for 2 markers"),
        (ask(&json!([[1], {"prompt_string": 5}]), json!({})), "`prompt[1].prompt_string` must be a string"),
    ] {
        let (status, answer) = server.post("/v1/completions", &body).await.json().await;
        assert!(status == StatusCode::BAD_REQUEST && answer.to_string().contains(why), "{why}: {answer}");
    }
    server.idle().await;
}

#[tokio::test]
async fn what_is_no_image_is_refused() {
    let server = server();
    let png = image("dot");
    let cases = [
        ("http://127.0.0.1/x.png".to_string(), "is an address"),
        ("HTTPS://example.com/x.png".into(), "is an address"),
        ("file:///etc/passwd".into(), "is an address"),
        ("data:image/png,abc".into(), "must be a data URI"),
        ("data:image/png;base64,?!".into(), "not valid Base64"),
        (format!("data:image/png;base64,{}", &png[..40]), "cannot be used"),
        (format!("data:image/png;base64,{}", STANDARD.encode("<svg/>")), "cannot be used"),
    ];
    for (url, why) in cases {
        let (status, answer) = server.post(CHAT, &about(&url, json!({}))).await.json().await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{url}: {answer}");
        assert!(answer["error"]["message"].as_str().unwrap_or_default().contains(why), "{url}: {answer}");
    }
    let many: Vec<Value> = vec![json!({"type": "image_url", "image_url": {"url": uri("dot")}}); 65];
    let mut body = about("", json!({}));
    body["messages"][0]["content"] = many.into();
    let (status, answer) = server.post(CHAT, &body).await.json().await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
    // What the context has no room for is not seen.
    body["messages"][0]["content"].as_array_mut().expect("parts").truncate(64);
    body["messages"][0]["content"][63]["image_url"]["url"] = "data:image/png;base64,aGk=".into();
    let (status, answer) = server.post(CHAT, &body).await.json().await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("context_length_exceeded")));
    let cases = [
        ("/api/generate", json!({"prompt": "x", "images": ["?!"]}), "`images[0]`"),
        ("/api/generate", json!({"prompt": "x", "images": [png], "raw": true}), "chat template"),
        (CHAT, json!({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}), "are not read"),
        ("/api/chat", json!({"messages": [{"role": "user", "content": "x", "images": "aGk="}]}), "must be a list"),
        ("/v1/embeddings", json!({"input": [{"type": "image_url"}]}), "must be a string"),
        ("/v1/embeddings", json!({"input": "x", "messages": [{"role": "user", "content": "x"}]}), "no images"),
    ];
    for (path, body, why) in cases {
        let (status, answer) = server.post(path, &body).await.json().await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {body}: {answer}");
        assert!(answer.to_string().contains(why), "{path} {body}: {answer}");
    }
    // Base64 may have lines.
    let lines =
        |data: &str| data.as_bytes().chunks(76).map(|line| [line, b"\r\n"].concat()).collect::<Vec<_>>().concat();
    let lines = String::from_utf8(lines(&image("odd"))).expect("text");
    let [one, other] =
        [format!("data:image/png;base64,{lines}"), uri("odd")].map(|url| about(&url, json!({"seed": 1})));
    let [one, other] = [server.ask(CHAT, &one).await, server.ask(CHAT, &other).await];
    assert_eq!(one["choices"][0]["logprobs"], other["choices"][0]["logprobs"]);
    // What a client is shown of the prompt, `/completion` takes.
    let shown = server.ask("/apply-template", &json!({"messages": about(&uri("odd"), json!({}))["messages"]})).await;
    assert!(shown["prompt"].as_str().unwrap_or_default().contains("<__media__>"), "{shown}");
    // A mark that a client guesses stays text.
    let guess = chat("[image 0000000000000000 0]", json!({"max_tokens": 1}));
    server.ask(CHAT, &guess).await;
    server.idle().await;
}

#[tokio::test]
async fn models_of_text_refuse_images() {
    let server = Server::start(1, 2);
    let (status, answer) = server.post(CHAT, &about(&uri("odd"), json!({}))).await.json().await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap_or_default().contains("text only"), "{answer}");
}

/// Encoders take seconds an image: neither do texts wait for them, nor are images seen whose client has left.
#[tokio::test]
async fn texts_do_not_wait_for_images() {
    let server = server();
    let (enter, entered) = std::sync::mpsc::channel();
    let common = server.app.common.clone();
    let seeing = tokio::spawn(async move {
        let work = move |left: std::sync::Arc<std::sync::atomic::AtomicBool>| {
            let _ = enter.send(left.clone());
            while !left.load(std::sync::atomic::Ordering::Relaxed) {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            Ok(())
        };
        common.see(1, 1 << 20, work).await
    });
    let entered = tokio::task::spawn_blocking(move || entered.recv());
    let left = entered.await.expect("a thread").expect("begun");
    server.ask(CHAT, &chat("What?", json!({"max_tokens": 1}))).await;
    assert!(!left.load(std::sync::atomic::Ordering::Relaxed));
    // The next image waits until its place is free.
    let image = about(&uri("odd"), json!({}));
    let next = server.ask(CHAT, &image);
    seeing.abort();
    next.await;
    assert!(left.load(std::sync::atomic::Ordering::Relaxed));
    server.idle().await;
}

/// A folder may hold other models' encoders, and what is none.
#[test]
fn encoders_of_others_do_no_harm() {
    let folder = tempfile::tempdir().expect("folder");
    let [model, encoder] = ["model.gguf", "mmproj-x.gguf"].map(|name| folder.path().join(name));
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/tests/data/types/qwen3-float.gguf");
    std::fs::copy(text, &model).expect("a model");
    std::fs::write(&encoder, "no encoder").expect("a file");
    let seeing =
        |mmproj| open(Some(&model)).and_then(|model| model.seeing(&SightArgs { mmproj, ..SightArgs::default() }));
    let blind = seeing(None).expect("a model of text");
    assert!(blind.sight.is_none() && blind.unseen.is_some_and(|why| why.contains("mmproj-x.gguf")));
    assert!(seeing(Some(encoder)).is_err());
}
