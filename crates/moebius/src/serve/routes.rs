//! The table of routes, and what every request passes: its id, the key, limits on its body, the check of its fields,
//! the log.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, RawPathParams, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use axum::routing::MethodFilter;
use serde_json::Value;
use tower_http::catch_panic::CatchPanicLayer;

use super::app::{self, App};
use super::error::{ApiError, Style};
use super::fields::{self, Field, Object, Read};
use super::limits::{BODY_TIME, MAX_BODY_BYTES};
use super::{
    anthropic, chat, completions, embeddings, form, info, llama, ollama, page, responses, routing, sampling, text,
};

/// What a handler gets.
pub struct Input {
    /// The body, its fields checked; empty for GET.
    pub body: Object,
    /// Names this request in log and answer.
    pub request_id: String,
    /// The rest of the path where the route leaves one open.
    pub tail: Option<String>,
}

/// What a handler gives.
pub type Answer = Result<Response, ApiError>;
type Handler = fn(Arc<App>, Input) -> Pin<Box<dyn Future<Output = Answer> + Send>>;

/// GET or POST.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Post,
}

/// One route: where, for whom, what it takes.
pub struct Route {
    pub method: Method,
    pub path: &'static str,
    pub style: Style,
    /// Answers without a key, and while the server is stopping.
    pub open: bool,
    pub about: &'static str,
    pub fields: &'static [&'static [Field]],
    pub required: &'static [&'static str],
    handler: Handler,
}

macro_rules! handler {
    ($function:path) => {
        |app, input| Box::pin($function(app, input))
    };
}

const fn get(path: &'static str, open: bool, about: &'static str, handler: Handler) -> Route {
    let (method, style) = (Method::Get, Style::OpenAi);
    Route { method, path, style, open, about, fields: &[], required: &[], handler }
}

const fn get_ollama(path: &'static str, open: bool, about: &'static str, handler: Handler) -> Route {
    Route { style: Style::Ollama, ..get(path, open, about, handler) }
}

const fn post(
    path: &'static str,
    style: Style,
    about: &'static str,
    fields: &'static [&'static [Field]],
    required: &'static [&'static str],
    handler: Handler,
) -> Route {
    Route { method: Method::Post, path, style, open: false, about, fields, required, handler }
}

impl Route {
    /// Where it answers too: clients whose base address lacks the `/v1` find what llama-server answers there.
    fn alias(&self) -> Option<&'static str> {
        let path = self.path.strip_prefix("/v1")?;
        ["/chat/completions", "/completions", "/embeddings", "/models", "/responses"].into_iter().find(|p| *p == path)
    }
}

/// All routes.
pub const ROUTES: &[Route] = &[
    post(
        "/v1/chat/completions",
        Style::OpenAi,
        "An answer in a conversation (OpenAI)",
        &[chat::FIELDS, form::FIELDS, sampling::FIELDS],
        &["messages"],
        handler!(chat::handle),
    ),
    post(
        "/v1/completions",
        Style::OpenAi,
        "A text goes on (OpenAI)",
        &[completions::FIELDS, form::FIELDS, sampling::FIELDS],
        &["prompt"],
        handler!(completions::handle),
    ),
    post(
        "/v1/responses",
        Style::OpenAi,
        "An answer in a conversation (OpenAI's newer form); nothing is stored",
        &[responses::FIELDS, form::FIELDS, sampling::FIELDS],
        &["input"],
        handler!(responses::handle),
    ),
    post(
        "/v1/messages",
        Style::Anthropic,
        "An answer in a conversation (Anthropic)",
        &[anthropic::CONVERSATION, anthropic::FIELDS, form::FIELDS, sampling::FIELDS],
        &["messages", "max_tokens"],
        handler!(anthropic::handle),
    ),
    post(
        "/v1/messages/count_tokens",
        Style::Anthropic,
        "How many tokens a conversation has (Anthropic)",
        &[anthropic::CONVERSATION],
        &["messages"],
        handler!(anthropic::count_tokens),
    ),
    post(
        "/v1/embeddings",
        Style::OpenAi,
        "The hidden state behind a text (for models trained for it, its meaning)",
        &[embeddings::FIELDS],
        &["input"],
        handler!(embeddings::handle),
    ),
    get("/v1/models", false, "The model that is served", handler!(info::models)),
    get("/v1/models/{*id}", false, "One model", handler!(info::model)),
    post("/tokenize", Style::OpenAi, "Tokens of a text", &[text::TOKENIZE], &["content"], handler!(text::tokenize)),
    post("/detokenize", Style::OpenAi, "Text of tokens", &[text::DETOKENIZE], &["tokens"], handler!(text::detokenize)),
    post(
        "/apply-template",
        Style::OpenAi,
        "The prompt that a conversation becomes",
        &[text::TEMPLATE],
        &["messages"],
        handler!(text::apply_template),
    ),
    post(
        "/completion",
        Style::OpenAi,
        "A text goes on (llama-server)",
        &[llama::COMMON, llama::COMPLETION, form::FIELDS, sampling::FIELDS],
        &["prompt"],
        handler!(llama::completion),
    ),
    post(
        "/infill",
        Style::OpenAi,
        "What fills a gap in a text (llama-server)",
        &[llama::COMMON, llama::INFILL, form::FIELDS, sampling::FIELDS],
        &[],
        handler!(llama::infill),
    ),
    get("/props", false, "What the model and its settings are (llama-server)", handler!(llama::props)),
    post(
        "/api/chat",
        Style::Ollama,
        "An answer in a conversation (Ollama)",
        &[ollama::COMMON, ollama::CHAT],
        &[],
        handler!(ollama::chat),
    ),
    post(
        "/api/generate",
        Style::Ollama,
        "An answer to a prompt (Ollama)",
        &[ollama::COMMON, ollama::GENERATE],
        &[],
        handler!(ollama::generate),
    ),
    post(
        "/api/embed",
        Style::Ollama,
        "As /v1/embeddings (Ollama)",
        &[ollama::EMBED],
        &["input"],
        handler!(ollama::embed),
    ),
    post(
        "/api/embeddings",
        Style::Ollama,
        "The same for one text (Ollama's older form)",
        &[ollama::EMBED_ONE],
        &["prompt"],
        handler!(ollama::embed_one),
    ),
    post("/api/show", Style::Ollama, "One model (Ollama)", &[ollama::SHOW], &[], handler!(ollama::show)),
    get_ollama("/api/tags", false, "The model that is served (Ollama)", handler!(ollama::tags)),
    get_ollama("/api/ps", false, "The model that runs (Ollama)", handler!(ollama::running)),
    get_ollama("/api/version", true, "The version of Ollama's API", handler!(ollama::version)),
    get("/v1/routing", false, "Which experts were chosen, layer by layer", handler!(routing::handle)),
    get("/health", true, "Whether the engine lives", handler!(info::health)),
    get("/ready", true, "Whether requests are taken", handler!(info::ready)),
    get("/metrics", false, "Numbers for Prometheus", handler!(info::metrics)),
    get("/openapi.json", true, "This description", handler!(info::openapi)),
    get("/", true, "The page to chat and to look inside", handler!(page::index)),
    get("/page/{*file}", true, "The page's scripts and styles", handler!(page::part)),
];

/// The id of a request, for everything behind the first layer.
#[derive(Clone, Debug)]
struct RequestId(String);

/// The router over all routes.
pub fn router(app: Arc<App>) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        let filter = match route.method {
            Method::Get => MethodFilter::GET,
            Method::Post => MethodFilter::POST,
        };
        let handler = move |State(app): State<Arc<App>>, params: RawPathParams, request: Request| async move {
            let request_id = request_id(&request);
            let tail = params.iter().next().map(|(_, value)| value.to_string());
            answer(app, route, request, tail).await.unwrap_or_else(|error| error.response(route.style, &request_id))
        };
        let also = route.alias();
        router = router.route(route.path, axum::routing::on(filter, handler));
        if let Some(path) = also {
            router = router.route(path, axum::routing::on(filter, handler));
        }
    }
    let refuse = |status: StatusCode, what: &'static str| {
        move |request: Request| async move {
            let message = format!("{} {}: {what}", request.method(), request.uri().path());
            ApiError::new(status, message).response(style_of(request.uri().path()), &request_id(&request))
        }
    };
    router
        .fallback(refuse(StatusCode::NOT_FOUND, "no such route; /openapi.json lists them"))
        .method_not_allowed_fallback(refuse(StatusCode::METHOD_NOT_ALLOWED, "this route takes another method"))
        .layer(CatchPanicLayer::custom(|_: Box<dyn std::any::Any + Send>| {
            ApiError::internal("the server failed on this request").response(Style::OpenAi, "")
        }))
        .layer(axum::middleware::from_fn_with_state(app.clone(), around))
        .with_state(app)
}

/// Errors outside of a route take the shape of the API that the path looks like.
fn style_of(path: &str) -> Style {
    match path {
        path if path.starts_with("/v1/messages") => Style::Anthropic,
        path if path.starts_with("/api/") => Style::Ollama,
        _ => Style::OpenAi,
    }
}

fn request_id(request: &Request) -> String {
    request.extensions().get::<RequestId>().map(|id| id.0.clone()).unwrap_or_default()
}

/// Gives every request an id, and every answer a line in the log and a count.
async fn around(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let start = Instant::now();
    let id = request.headers().get("x-request-id").and_then(|id| id.to_str().ok()).filter(|id| is_plain(id));
    let id = id.map_or_else(|| app::id("req_"), String::from);
    request.extensions_mut().insert(RequestId(id.clone()));
    let method = request.method().clone();
    let path = request.uri().path().to_string();
    let matched = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_string());
    let mut response = next.run(request).await;
    let elapsed = start.elapsed();
    let status = response.status().as_u16();
    // The label is the route's own path: a client cannot make up new ones.
    let at = |route: &&Route| matched.is_some() && [Some(route.path), route.alias()].contains(&matched.as_deref());
    let route = ROUTES.iter().find(at).map_or("other", |route| route.path);
    app.metrics.answered(route, status, elapsed);
    let ms = elapsed.as_secs_f64() * 1e3;
    let shown: String = path.chars().take(200).collect();
    tracing::info!(request = %id, %method, path = %shown, status, ms, "answered");
    if let Ok(value) = HeaderValue::from_str(&id) {
        // Anthropic's clients look for the short name.
        response.headers_mut().insert(HeaderName::from_static("request-id"), value.clone());
        response.headers_mut().insert(HeaderName::from_static("x-request-id"), value);
    }
    response
}

fn is_plain(id: &str) -> bool {
    (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(&b))
}

/// From a raw request to what its handler says.
async fn answer(app: Arc<App>, route: &'static Route, request: Request, tail: Option<String>) -> Answer {
    if !route.open {
        app.keys.check(request.headers())?;
    }
    let request_id = request_id(&request);
    if route.method == Method::Get {
        return (route.handler)(app, Input { body: Object::new(), request_id, tail }).await;
    }
    if app.draining() {
        return Err(ApiError::stopping());
    }
    let length = content_length(request.headers())?;
    // The memory of all bodies together is bounded; a body of unknown length counts as the longest.
    let kibibytes = length.unwrap_or(MAX_BODY_BYTES).div_ceil(1 << 10).max(1) as u32;
    let room = app.bodies.clone().try_acquire_many_owned(kibibytes);
    let _room = room.map_err(|_| ApiError::busy("too many large requests at once; try again later", 1))?;
    check_type(request.headers())?;
    let body = read_body(request.into_body(), BODY_TIME).await?;
    fields::check(&body, route.fields)?;
    if let Some(name) = route.required.iter().find(|name| body.value(name).is_none()) {
        return Err(ApiError::field(*name, "is missing"));
    }
    (route.handler)(app, Input { body, request_id, tail }).await
}

fn too_large() -> ApiError {
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {MAX_BODY_BYTES} bytes"))
}

fn content_length(headers: &HeaderMap) -> Result<Option<usize>, ApiError> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if length.is_some_and(|n| n > MAX_BODY_BYTES) { Err(too_large()) } else { Ok(length) }
}

/// A page of another site can post plain text and forms without asking; it cannot post JSON. So only JSON is read.
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "send the body as JSON, with the header `Content-Type: application/json`",
    ))
}

async fn read_body(body: Body, time: Duration) -> Result<Object, ApiError> {
    let bytes = match tokio::time::timeout(time, axum::body::to_bytes(body, MAX_BODY_BYTES)).await {
        Err(_) => return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body took too long to arrive")),
        Ok(Err(error)) => {
            let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            let limit = source.contains("limit");
            return Err(if limit { too_large() } else { ApiError::bad(format!("the body did not arrive: {error}")) });
        }
        Ok(Ok(bytes)) => bytes,
    };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(body)) => Ok(body),
        Ok(_) => Err(ApiError::bad("the body must be a JSON object")),
        Err(error) => Err(ApiError::bad(format!("the body is not JSON: {error}"))),
    }
}
