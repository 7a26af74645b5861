//! The router in process, on the embedded model: what clients send and what comes back, without a network.

mod abuse;
mod agents;
mod answers;
mod apis;
mod chat;
mod encoders;
mod fleet;
mod forms;
mod hostile;
mod images;
mod load;
mod names;
mod ollama;
mod routing;
mod stored;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, BodyDataStream};
use axum::http::{HeaderMap, HeaderValue, Request, StatusCode, header};
use engine::scheduler::Stats;
use futures_util::StreamExt;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::app::App;
use super::common::{Common, Conversations};
use super::error::Why;
use super::fleet::Fleet;
use super::guard::{Door, Guard};
use super::keys::Keys;
use super::{Places, Started, routes};
use crate::args::StepArgs;
use crate::device::{Chosen, Device};
use crate::load::{EngineSetup, Model, open, start_with};

/// A server and its engine; both end with it.
pub struct Server {
    pub router: Router,
    app: Arc<App>,
    fleet: Arc<Fleet>,
}

impl Server {
    pub fn start(parallel: usize, queue: usize) -> Server {
        Server::with_keys(parallel, queue, Keys::default())
    }

    pub fn with_keys(parallel: usize, queue: usize, keys: Keys) -> Server {
        Server::on(open(None).expect("embedded model"), parallel, queue, keys, 512, Conversations::default())
    }

    /// Of sequences this long.
    pub fn with_context(parallel: usize, queue: usize, context: usize) -> Server {
        Server::on(
            open(None).expect("embedded model"),
            parallel,
            queue,
            Keys::default(),
            context,
            Conversations::default(),
        )
    }

    /// The model with a template that opens a thought.
    pub fn thinking(context: usize, conversations: Conversations) -> Server {
        let template = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}\
                        {%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}{# </think> #}";
        Server::with_template(template, context, conversations)
    }

    /// The model with another template.
    pub fn with_template(template: &str, context: usize, conversations: Conversations) -> Server {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("template.jinja");
        std::fs::write(&path, template).expect("template");
        let model = open(None).and_then(|model| model.with_template(Some(&path))).expect("embedded model");
        Server::on(model, 2, 4, Keys::default(), context, conversations)
    }

    /// Of sequences this long, with other conversations.
    pub fn with_conversations(context: usize, conversations: Conversations) -> Server {
        Server::on(open(None).expect("embedded model"), 2, 4, Keys::default(), context, conversations)
    }

    fn on(
        model: Model,
        parallel: usize,
        queue: usize,
        keys: Keys,
        context: usize,
        conversations: Conversations,
    ) -> Server {
        let step = StepArgs { batch: Some(256), ..StepArgs::default() };
        let setup = EngineSetup {
            threads: Some(1),
            ctx: Some(context),
            sequences: parallel,
            cache_tokens: Some((4 * context).min(16384)),
            ..EngineSetup::on(Device::named(Chosen::Cpu), step)
        };
        let session = start_with(model, &setup).expect("engine");
        let sampling = session.default_sampling();
        let guard = Guard::new(std::net::Ipv4Addr::LOCALHOST.into(), &[], &[], !keys.is_empty());
        let door = Arc::new(Door { guard, keys });
        let common = Arc::new(Common::new(None, conversations));
        let places = Places { parallel, queue };
        let Started { app, thread, .. } =
            super::start(session, "fable".into(), sampling, common.clone(), places).expect("server");
        let fleet = Arc::new(Fleet::of_one(common, app.clone(), thread));
        Server { router: routes::router(fleet.clone(), door), app, fleet }
    }

    /// Sends a request as it is.
    pub async fn send(&self, request: Request<Body>) -> Reply {
        send(&self.router, request).await
    }

    /// Posts JSON.
    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        self.send(posting(path, body)).await
    }

    /// Posts JSON and expects success.
    pub async fn ask(&self, path: &str, body: &Value) -> Value {
        let (status, value) = self.post(path, body).await.json().await;
        assert_eq!(status, StatusCode::OK, "{path} {body}: {value}");
        value
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send(Request::get(path).body(Body::empty()).expect("request")).await
    }

    /// Returns the engine's books, when nothing runs any more; cancelled requests get a few steps to leave.
    pub async fn idle(&self) -> Stats {
        for _ in 0..3000 {
            let stats = self.app.worker.audit().await.expect("the books add up");
            if stats.running == 0 && stats.waiting == 0 && stats.pages.used == 0 {
                return stats;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("still busy: {:?}", self.app.worker.stats());
    }

    /// Returns the engine's books now.
    pub async fn stats(&self) -> Stats {
        self.app.worker.audit().await.expect("the books add up")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let ended = self.fleet.stop();
        if !std::thread::panicking() {
            assert!(ended.is_ok(), "the engine's thread panicked");
        }
    }
}

/// Sends a request as it is.
async fn send(router: &Router, mut request: Request<Body>) -> Reply {
    request.headers_mut().entry(header::HOST).or_insert(HeaderValue::from_static("localhost"));
    let response = router.clone().oneshot(request).await.expect("infallible");
    let (head, body) = response.into_parts();
    let why = head.extensions.get::<Why>().map(|Why(why)| why.clone());
    Reply { status: head.status, headers: head.headers, why, body: body.into_data_stream() }
}

/// Returns a request that posts JSON.
fn posting(path: &str, body: &Value) -> Request<Body> {
    let request = Request::post(path).header("content-type", "application/json");
    request.body(Body::from(body.to_string())).expect("request")
}

/// An answer whose body may still be coming.
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// What the log says of a refusal.
    pub why: Option<String>,
    body: BodyDataStream,
}

impl Reply {
    /// Returns the rest of the body.
    pub async fn text(mut self) -> String {
        let mut bytes = Vec::new();
        while let Some(piece) = self.body.next().await {
            bytes.extend_from_slice(&piece.expect("body"));
        }
        String::from_utf8(bytes).expect("text")
    }

    pub async fn json(self) -> (StatusCode, Value) {
        let status = self.status;
        let text = self.text().await;
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    /// Waits for one more piece of the body.
    pub async fn piece(&mut self) -> Option<String> {
        let piece = self.body.next().await?.expect("body");
        Some(String::from_utf8(piece.to_vec()).expect("text"))
    }

    /// Returns the data of all events, `[DONE]` as a string.
    pub async fn events(self) -> Vec<Value> {
        let text = self.text().await;
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(|data| serde_json::from_str(data).unwrap_or_else(|_| json!(data))).collect()
    }
}

/// Returns a conversation of one message, with more fields.
pub fn chat(text: &str, more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 24, "seed": 7});
    for (name, value) in more.as_object().expect("fields") {
        body[name] = value.clone();
    }
    body
}

/// Returns the text of the deltas of a stream's choice.
pub fn joined(events: &[Value], index: usize) -> String {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().cloned().unwrap_or_default());
    let mine = choices.filter(|choice| choice["index"] == index);
    mine.filter_map(|c| c["delta"]["content"].as_str().or(c["text"].as_str()).map(String::from)).collect()
}
