//! Conversations that go on by the id of their last answer, and what keys may use.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use super::super::common::Conversations;
use super::super::keys::Keys;
use super::{Reply, Server, posting};
use crate::load::open;

const PATH: &str = "/v1/responses";

/// A server that stores responses, for the keys `a` and `b`.
fn storing(bytes: usize) -> Server {
    let conversations = Conversations { stored_bytes: bytes, ..Conversations::default() };
    let keys = Keys::parse("a\nb\n").unwrap();
    Server::on(open(None).expect("embedded model"), 2, 4, keys, 512, conversations)
}

async fn asked(server: &Server, key: &str, body: &Value) -> Reply {
    let mut request = posting(PATH, body);
    request.headers_mut().insert("x-api-key", key.parse().unwrap());
    server.send(request).await
}

async fn answer(server: &Server, key: &str, body: Value) -> Value {
    let (status, answer) = asked(server, key, &body).await.json().await;
    assert_eq!(status, 200, "{body}: {answer}");
    answer
}

async fn by_id(server: &Server, method: &str, key: &str, id: &str) -> (u16, Value) {
    let request = Request::builder().method(method).uri(format!("{PATH}/{id}")).header("x-api-key", key);
    let (status, answer) = server.send(request.body(Body::empty()).unwrap()).await.json().await;
    (status.as_u16(), answer)
}

/// What follows a stored response is what follows the same items sent whole, streamed or not.
#[tokio::test]
async fn a_stored_response_goes_on_as_if_all_were_sent() {
    let server = storing(1 << 20);
    let ask = |input: Value, more: Value| {
        let mut body = json!({"input": input, "max_output_tokens": 12, "seed": 7, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        body
    };
    let say = |role: &str, text: &Value| json!({"type": "message", "role": role, "content": text});
    let text = |response: &Value| response["output"][0]["content"][0]["text"].clone();
    let first = answer(&server, "a", ask(json!("A fox"), json!({"instructions": "Be brief."}))).await;
    assert_eq!(first["store"], true);
    let id = first["id"].as_str().unwrap();
    let on = json!({"previous_response_id": id});
    let second = answer(&server, "a", ask(json!("And a bear"), on.clone())).await;
    // Instructions are those of each request.
    let items = json!([say("user", &json!("A fox")), first["output"][0], say("user", &json!("And a bear"))]);
    let whole = answer(&server, "a", ask(items.clone(), json!({"store": false}))).await;
    assert_eq!(text(&second), text(&whole));
    assert_eq!(second["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
    assert_eq!((&second["previous_response_id"], &whole["store"]), (&json!(id), &json!(false)));

    // The third turn goes on with a streamed one, and a message may be referred to by its id.
    let mut streamed = ask(json!("And a bear"), on);
    streamed["stream"] = json!(true);
    let events = asked(&server, "a", &streamed).await.events().await;
    let last =
        events.iter().find(|event| event["type"] == "response.completed" || event["type"] == "response.incomplete");
    let third = last.unwrap()["response"].clone();
    assert_eq!(text(&third), text(&second));
    let on = json!({"previous_response_id": third["id"]});
    let fourth = answer(&server, "a", ask(json!("Then?"), on)).await;
    let mut items = items;
    let reference = json!({"type": "item_reference", "id": third["output"][0]["id"]});
    items.as_array_mut().unwrap().extend([reference, say("user", &json!("Then?"))]);
    let whole = answer(&server, "a", ask(items, json!({}))).await;
    assert_eq!((text(&fourth), &fourth["usage"]["input_tokens"]), (text(&whole), &whole["usage"]["input_tokens"]));

    // What a response answers is listed, each item by an id that can be referred to.
    let third_id = third["id"].as_str().unwrap();
    let (status, list) = by_id(&server, "GET", "a", &format!("{third_id}/input_items?order=asc")).await;
    assert_eq!((status, list["object"].as_str(), list["has_more"].as_bool()), (200, Some("list"), Some(false)));
    let said = |item: &Value| item["content"][0]["text"].clone();
    let data = list["data"].as_array().unwrap();
    assert_eq!(data.iter().map(said).collect::<Vec<_>>(), [json!("A fox"), text(&first), json!("And a bear")]);
    assert_eq!((&data[0]["content"][0]["type"], &data[1]["id"]), (&json!("input_text"), &first["output"][0]["id"]));
    assert_eq!((&list["first_id"], &list["last_id"]), (&data[0]["id"], &data[2]["id"]));
    let (_, newest) = by_id(&server, "GET", "a", &format!("{third_id}/input_items?limit=2")).await;
    assert_eq!((&newest["data"], &newest["has_more"]), (&json!([data[2], data[1]]), &json!(true)));
    let after = data[1]["id"].as_str().unwrap();
    let (_, rest) = by_id(&server, "GET", "a", &format!("{third_id}/input_items?limit=2&after={after}")).await;
    assert_eq!((&rest["data"], &rest["has_more"]), (&json!([data[0]]), &json!(false)));
    let reference = json!([{"type": "item_reference", "id": data[0]["id"]}]);
    assert_eq!(
        text(&answer(&server, "a", ask(reference, json!({}))).await),
        text(&answer(&server, "a", ask(json!("A fox"), json!({}))).await)
    );
    for (key, tail, status) in [("b", "", 404), ("a", "?limit=0", 400), ("a", "?limit=x", 400), ("a", "?order=up", 400)]
    {
        let (found, refused) = by_id(&server, "GET", key, &format!("{third_id}/input_items{tail}")).await;
        assert_eq!(found, status, "{refused}");
    }

    // A response can be read and deleted by whom it belongs to.
    assert_eq!(by_id(&server, "GET", "b", id).await.0, 404);
    let (status, again) = by_id(&server, "GET", "a", id).await;
    assert_eq!((status, &again["output"], &again["usage"]), (200, &first["output"], &first["usage"]));
    assert_eq!(by_id(&server, "DELETE", "b", id).await.0, 404);
    let (status, gone) = by_id(&server, "DELETE", "a", id).await;
    assert_eq!((status, &gone["deleted"]), (200, &json!(true)));
    for (key, id) in [("a", id), ("b", third["id"].as_str().unwrap()), ("a", "resp_none")] {
        let body = ask(json!("x"), json!({"previous_response_id": id}));
        let (status, refused) = asked(&server, key, &body).await.json().await;
        assert_eq!((status.as_u16(), &refused["error"]["code"]), (400, &json!("previous_response_not_found")));
    }
    let body = ask(json!([{"type": "item_reference", "id": "msg_none"}]), json!({}));
    let (status, refused) = asked(&server, "a", &body).await.json().await;
    assert_eq!((status.as_u16(), &refused["error"]["param"]), (400, &json!("input[0].id")));
}

/// A key with limits is told to come back later, and the others are answered.
#[tokio::test]
async fn keys_have_their_limits() {
    let server = Server::with_keys(4, 4, Keys::parse("one parallel=1\nfew tokens-per-minute=10\nall\n").unwrap());
    let body = |n: usize| json!({"input": "A fox", "max_output_tokens": n, "stream": true, "seed": 7});
    let mut running = asked(&server, "one", &body(300)).await;
    assert!(running.piece().await.is_some());
    let refused = asked(&server, "one", &body(1)).await;
    assert_eq!((refused.status.as_u16(), refused.headers["retry-after"].to_str().unwrap()), (429, "1"));
    assert!(refused.text().await.contains("1 requests at a time"));
    assert_eq!(asked(&server, "all", &body(1)).await.status, 200);
    // A client that leaves gives its place back.
    drop(running);
    assert_eq!(asked(&server, "one", &body(1)).await.status, 200);

    let first = asked(&server, "few", &body(40)).await;
    assert_eq!(first.status, 200);
    first.text().await;
    let (status, refused) = asked(&server, "few", &body(1)).await.json().await;
    assert_eq!(status, 429, "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("10 tokens a minute"), "{refused}");
}
