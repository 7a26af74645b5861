//! The table of routes, and what every request passes: its id, the key, limits on its body, the check of its fields,
//! the log.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{MatchedPath, RawPathParams, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use axum::routing::MethodFilter;
use futures_util::StreamExt;
use hyper::body::{Frame, SizeHint};
use tower_http::catch_panic::CatchPanicLayer;

use super::app::{self, App};
use super::common::Common;
use super::error::{ApiError, Style, Why};
use super::fields::{self, Field, Read};
use super::fleet::Fleet;
use super::guard::Door;
use super::limits::{DRAIN_TIME, FREE_BYTES, LARGE_BODY_BYTES, MAX_BODY_BYTES};
use super::stored::Owner;
use super::{
    anthropic, body, chat, completions, embeddings, form, http, info, llama, log, manage, ollama, page, prepare,
    rerank, responses, routing, sampling, text, tools,
};

/// What a handler gets.
pub struct Input {
    /// The body, its fields checked; empty for GET.
    pub body: body::Body,
    /// Names this request in log and answer.
    pub request_id: String,
    /// The rest of the path where the route leaves one open.
    pub tail: Option<String>,
    /// What follows the path of a GET; empty for others.
    pub query: String,
    /// This is a GET, and its client reads answers in gzip.
    pub takes_gzip: bool,
    /// The client has a key, or needs none.
    pub is_known: bool,
    /// Whose responses it may go on with.
    pub owner: Owner,
}

/// What a handler gives.
pub type Answer = Result<Response, ApiError>;
type Pending = Pin<Box<dyn Future<Output = Answer> + Send>>;

/// Who answers.
#[derive(Clone, Copy)]
enum Handler {
    /// The model that the request names, once it is loaded.
    Model(fn(Arc<App>, Input) -> Pending),
    /// The server.
    Server(fn(Arc<Fleet>, Input) -> Pending),
}

/// What of a request has no effect, besides unknown fields: tools of a provider's server, keywords of schemas.
#[derive(Clone, Debug)]
struct Ignored(Vec<String>);

/// Most names that the header `x-ignored-fields` has.
const MAX_IGNORED: usize = 32;

/// Returns a response that names what of its request has no effect.
pub fn ignoring(mut response: Response, ignored: Vec<String>) -> Response {
    if !ignored.is_empty() {
        response.extensions_mut().insert(Ignored(ignored));
    }
    response
}

/// How a route is asked. Only a POST has a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Post,
    Delete,
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
        Handler::Model(|app, input| Box::pin($function(app, input)))
    };
}

macro_rules! server {
    ($function:path) => {
        Handler::Server(|fleet, input| Box::pin($function(fleet, input)))
    };
}

const fn get(path: &'static str, open: bool, about: &'static str, handler: Handler) -> Route {
    let (method, style) = (Method::Get, Style::OpenAi);
    Route { method, path, style, open, about, fields: &[], required: &[], handler }
}

const fn delete(path: &'static str, about: &'static str, handler: Handler) -> Route {
    Route { method: Method::Delete, ..get(path, false, about, handler) }
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
    /// Returns where it answers too: clients whose base address lacks the `/v1` find what llama-server answers there.
    fn alias(&self) -> Option<&'static str> {
        let path = self.path.strip_prefix("/v1")?;
        const SHORT: [&str; 6] =
            ["/chat/completions", "/completions", "/embeddings", "/models", "/rerank", "/responses"];
        SHORT.into_iter().find(|short| *short == path)
    }
}

/// All routes.
pub const ROUTES: &[Route] = &[
    post(
        "/v1/chat/completions",
        Style::OpenAi,
        "Chat completion (OpenAI)",
        &[chat::FIELDS, prepare::FIELDS, form::FIELDS, sampling::FIELDS],
        &["messages"],
        handler!(chat::handle),
    ),
    post(
        "/v1/completions",
        Style::OpenAi,
        "Text completion (OpenAI)",
        &[completions::FIELDS, form::FIELDS, sampling::FIELDS],
        &["prompt"],
        handler!(completions::handle),
    ),
    post(
        "/v1/responses",
        Style::OpenAi,
        "Model response (OpenAI)",
        &[responses::FIELDS, prepare::FIELDS, form::FIELDS, sampling::FIELDS],
        &["input"],
        handler!(responses::handle),
    ),
    get("/v1/responses/{id}", false, "A stored response (OpenAI)", server!(responses::get)),
    get(
        "/v1/responses/{id}/input_items",
        false,
        "Items that a stored response answers (OpenAI)",
        server!(responses::input_items),
    ),
    delete("/v1/responses/{id}", "Delete a stored response (OpenAI)", server!(responses::delete)),
    post(
        "/v1/messages",
        Style::Anthropic,
        "Message (Anthropic)",
        &[anthropic::CONVERSATION, anthropic::FIELDS, prepare::FIELDS, form::FIELDS, sampling::FIELDS],
        &["messages", "max_tokens"],
        handler!(anthropic::handle),
    ),
    post(
        "/v1/messages/count_tokens",
        Style::Anthropic,
        "Token count of a conversation (Anthropic)",
        &[anthropic::CONVERSATION],
        &["messages"],
        handler!(anthropic::count_tokens),
    ),
    post(
        "/v1/embeddings",
        Style::OpenAi,
        "Embeddings of a text; useful from models trained for them",
        &[embeddings::FIELDS],
        &["input"],
        handler!(embeddings::handle),
    ),
    post(
        "/v1/rerank",
        Style::OpenAi,
        "Rerank documents by relevance to a query (Jina, Cohere, llama-server); requires a model trained for it",
        &[rerank::FIELDS],
        &["query"],
        handler!(rerank::handle),
    ),
    get("/v1/models", false, "List of served models", server!(info::models)),
    get("/v1/models/{*id}", false, "Description of a model", server!(info::model)),
    post("/tokenize", Style::OpenAi, "Token ids of a text", &[text::TOKENIZE], &[], handler!(text::tokenize)),
    get("/tokenizer_info", false, "Special tokens of the model (vLLM)", handler!(text::tokenizer_info)),
    post(
        "/detokenize",
        Style::OpenAi,
        "Text of token ids",
        &[text::DETOKENIZE],
        &["tokens"],
        handler!(text::detokenize),
    ),
    post(
        "/apply-template",
        Style::OpenAi,
        "Render a conversation with the chat template",
        &[text::TEMPLATE],
        &["messages"],
        handler!(text::apply_template),
    ),
    post(
        "/completion",
        Style::OpenAi,
        "Text completion (llama-server)",
        &[llama::COMMON, llama::COMPLETION, form::FIELDS, sampling::FIELDS],
        &["prompt"],
        handler!(llama::completion),
    ),
    post(
        "/infill",
        Style::OpenAi,
        "Fill-in-the-middle completion (llama-server)",
        &[llama::COMMON, llama::INFILL, form::FIELDS, sampling::FIELDS],
        &[],
        handler!(llama::infill),
    ),
    get("/props", false, "Properties of the model and its settings (llama-server)", handler!(llama::props)),
    post(
        "/api/chat",
        Style::Ollama,
        "Chat completion (Ollama)",
        &[ollama::COMMON, ollama::CHAT],
        &[],
        handler!(ollama::chat),
    ),
    post(
        "/api/generate",
        Style::Ollama,
        "Completion of a prompt (Ollama)",
        &[ollama::COMMON, ollama::GENERATE],
        &[],
        handler!(ollama::generate),
    ),
    post(
        "/api/embed",
        Style::Ollama,
        "Embeddings of texts (Ollama)",
        &[ollama::EMBED],
        &["input"],
        handler!(ollama::embed),
    ),
    post(
        "/api/embeddings",
        Style::Ollama,
        "Embedding of one text (Ollama, older form)",
        &[ollama::EMBED_ONE],
        &["prompt"],
        handler!(ollama::embed_one),
    ),
    post("/api/show", Style::Ollama, "Description of a model (Ollama)", &[ollama::SHOW], &[], server!(ollama::show)),
    get_ollama("/api/tags", false, "List of served models (Ollama)", server!(ollama::tags)),
    get_ollama("/api/ps", false, "List of loaded models (Ollama)", server!(ollama::running)),
    get_ollama("/api/version", true, "Version of Ollama's API", server!(ollama::version)),
    post("/models/load", Style::OpenAi, "Load a model (llama-server)", &[manage::FIELDS], &[], server!(manage::load)),
    post(
        "/models/unload",
        Style::OpenAi,
        "Unload a model when the requests that use it have ended (llama-server)",
        &[manage::FIELDS],
        &[],
        server!(manage::unload),
    ),
    get("/v1/routing", false, "Counts of selected experts by layer", handler!(routing::handle)),
    get("/health", true, "Liveness probe", server!(info::health)),
    get("/ready", true, "Readiness probe", server!(info::ready)),
    get("/metrics", false, "Prometheus metrics", server!(info::metrics)),
    get("/openapi.json", true, "OpenAPI description of all routes", server!(info::openapi)),
    get("/", true, "Web page to chat and to look into the model", server!(page::index)),
    get("/page/{*file}", true, "Scripts and styles of the web page", server!(page::part)),
];

/// What a path leaves open.
type Params = Result<RawPathParams, RawPathParamsRejection>;

/// The id of a request, for everything behind the first layer.
#[derive(Clone, Debug)]
struct RequestId(String);

/// Returns the router over all routes, for those whom `door` lets in.
pub fn router(fleet: Arc<Fleet>, door: Arc<Door>) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        let filter = match route.method {
            Method::Get => MethodFilter::GET,
            Method::Post => MethodFilter::POST,
            Method::Delete => MethodFilter::DELETE,
        };
        let door = door.clone();
        let handler = move |State(fleet): State<Arc<Fleet>>, params: Params, request: Request| async move {
            let request_id = request_id(&request);
            let answer = match params {
                Ok(params) => {
                    let tail = params.iter().next().map(|(_, value)| value.to_string());
                    answer(fleet, &door, route, request, tail).await
                }
                Err(_) => Err(ApiError::bad("the path is not valid UTF-8")),
            };
            answer.unwrap_or_else(|error| error.response(route.style, &request_id))
        };
        let also = route.alias();
        router = router.route(route.path, axum::routing::on(filter, handler.clone()));
        if let Some(path) = also {
            router = router.route(path, axum::routing::on(filter, handler));
        }
    }
    let refuse = |status: StatusCode, what: &'static str| {
        move |request: Request| async move {
            let (method, path) = (log::cut(request.method().as_str(), 32), log::cut(request.uri().path(), 200));
            ApiError::new(status, format!("{what} {method} {path}; GET /openapi.json lists all routes"))
                .response(style_of(request.uri().path()), &request_id(&request))
        }
    };
    router
        .fallback(refuse(StatusCode::NOT_FOUND, "unknown route"))
        .method_not_allowed_fallback(refuse(StatusCode::METHOD_NOT_ALLOWED, "unsupported method:"))
        .layer(CatchPanicLayer::custom(|_: Box<dyn std::any::Any + Send>| {
            ApiError::internal("the server failed to handle this request").response(Style::OpenAi, "")
        }))
        .layer(axum::middleware::from_fn_with_state((fleet.common.clone(), door), around))
        .with_state(fleet)
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

/// Gives every request an id, and every answer a line in the log and a count; turns away whom the guard does not know.
async fn around(State((common, door)): State<(Arc<Common>, Arc<Door>)>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let (mut head, body) = request.into_parts();
    let id = head.headers.get("x-request-id").and_then(|id| id.to_str().ok()).filter(|id| is_plain(id));
    let id = id.map_or_else(|| app::id("req_"), String::from);
    head.extensions.insert(RequestId(id.clone()));
    let method = head.method.clone();
    let path = head.uri.path().to_string();
    let matched = head.extensions.get::<MatchedPath>().map(|path| path.as_str().to_string());
    let body = Body::new(Unread::new(&head.headers, body));
    let client = head.extensions.get::<http::Address>().map(|address| address.0);
    let who = Arc::new(log::Who { client, key: door.keys.check(&head.headers).ok().flatten() });
    let mut response = match door.guard.check(&head) {
        Ok(()) => log::WHO.scope(who.clone(), next.run(Request::from_parts(head, body))).await,
        Err(error) => error.response(style_of(&path), &id),
    };
    if method != axum::http::Method::GET {
        response = counted(&common, response, style_of(&path), &id);
    }
    let elapsed = start.elapsed();
    let status = response.status().as_u16();
    // The label is the route's own path: a client cannot make up new ones.
    let at = |route: &&Route| matched.is_some() && [Some(route.path), route.alias()].contains(&matched.as_deref());
    let route = ROUTES.iter().find(at).map_or("other", |route| route.path);
    common.metrics.answered(route, status, elapsed);
    let (ms, method, path) = (log::ms(elapsed), log::cut(method.as_str(), 32), log::cut(&path, 200));
    let why = response.extensions().get::<Why>().map(|Why(why)| log::cut(why, 400));
    let (client, key) = (who.client.map(tracing::field::display), who.key_name());
    // What probes, scrapers and pages ask for again and again says little.
    match status < 400 && ["/health", "/ready", "/metrics", "/", "/page/{*file}"].contains(&route) {
        true => tracing::debug!(request = %id, %method, %path, status, client, key, ms, "answered"),
        false => tracing::info!(request = %id, %method, %path, status, why, client, key, ms, "answered"),
    }
    if let Some(names) = response.headers().get("x-ignored-fields").and_then(|names| names.to_str().ok()) {
        tracing::debug!(request = %id, names, "unknown fields");
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        // Anthropic's clients look for the short name.
        response.headers_mut().insert(HeaderName::from_static("request-id"), value.clone());
        response.headers_mut().insert(HeaderName::from_static("x-request-id"), value);
    }
    response
}

/// Counts an answer that is complete until it is read.
fn counted(common: &Common, response: Response, style: Style, request_id: &str) -> Response {
    let mut room = common.answers.room();
    let n_bytes = response.body().size_hint().exact().unwrap_or(0);
    match room.hold(usize::try_from(n_bytes).unwrap_or(usize::MAX)) {
        Err(full) => full.response(style, request_id),
        Ok(()) if n_bytes <= FREE_BYTES as u64 => response,
        Ok(()) => response.map(|inner| Body::new(Held { inner, _held: room })),
    }
}

/// The body of an answer, and what is held while it is read.
struct Held<T> {
    inner: Body,
    _held: T,
}

impl<T: Unpin> HttpBody for Held<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// The body of a request. What is left of it when it is dropped is read for a moment: a connection that is closed with
/// unread bytes is reset, and the client sees that and not the answer.
struct Unread {
    inner: Body,
    drain: bool,
}

impl Unread {
    fn new(headers: &HeaderMap, inner: Body) -> Unread {
        // Whoever waits to be told to send it has not sent it, and what is too long is not worth reading.
        let drain = !headers.contains_key(header::EXPECT) && inner.size_hint().lower() <= MAX_BODY_BYTES as u64;
        Unread { inner, drain }
    }
}

impl HttpBody for Unread {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.inner).poll_frame(cx);
        if matches!(frame, Poll::Ready(None | Some(Err(_)))) {
            self.drain = false;
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let rest = std::mem::take(&mut self.inner);
        let runtime = tokio::runtime::Handle::try_current();
        if let (true, false, Ok(runtime)) = (self.drain, rest.is_end_stream(), runtime) {
            runtime.spawn(tokio::time::timeout(DRAIN_TIME, async move {
                let (mut rest, mut n_bytes) = (rest.into_data_stream(), 0);
                while let Some(Ok(piece)) = rest.next().await {
                    n_bytes += piece.len();
                    if n_bytes > MAX_BODY_BYTES {
                        break;
                    }
                }
            }));
        }
    }
}

fn is_plain(id: &str) -> bool {
    (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(&b))
}

/// From a raw request to what its handler says.
async fn answer(
    fleet: Arc<Fleet>,
    door: &Door,
    route: &'static Route,
    request: Request,
    tail: Option<String>,
) -> Answer {
    let common = fleet.common.clone();
    let known = door.keys.check(request.headers());
    let is_known = known.is_ok();
    let key = if route.open { known.unwrap_or_default() } else { known? };
    let owner = key.as_ref().map_or(0, |key| key.owner());
    let request_id = request_id(&request);
    if route.method != Method::Post {
        let takes_gzip = route.method == Method::Get && takes_gzip(request.headers());
        let body = body::Body::empty(common.bodies.room());
        let query = request.uri().query().unwrap_or_default().to_string();
        let input = Input { body, request_id, tail, query, takes_gzip, is_known, owner };
        return match route.handler {
            Handler::Server(handle) => handle(fleet, input).await,
            Handler::Model(handle) => {
                let app = match asked(&input.query, "model") {
                    Some(name) => fleet.get(Some(&name)).await?,
                    None => fleet.current().await?,
                };
                handle(app, input).await
            }
        };
    }
    if common.draining() {
        return Err(ApiError::stopping());
    }
    let pass = key.map(|key| key.admit(Instant::now())).transpose()?;
    let length = content_length(request.headers())?;
    check_type(request.headers())?;
    check_encoding(request.headers())?;
    let mut room = common.bodies.room();
    let bytes = body::read(request.into_body(), length, &mut room).await?;
    let body = if bytes.len() > LARGE_BODY_BYTES {
        common.parse(move || body::parse(&bytes, route.fields, room)).await?
    } else {
        body::parse(&bytes, route.fields, room)?
    };
    fields::check(&body.fields, route.fields)?;
    fields::check_names(&body.unknown, route.fields)?;
    if let Some(name) = route.required.iter().find(|name| !body.has(name)) {
        return Err(ApiError::field(*name, "is missing"));
    }
    let mut names: Vec<String> = body.unknown.iter().map(|name| tools::shown(name)).collect();
    names.extend(sampling::unknown(&body.fields));
    let input = |body| Input { body, request_id, tail, query: String::new(), takes_gzip: false, is_known, owner };
    let mut response = match route.handler {
        Handler::Server(handle) => handle(fleet, input(body)).await?,
        Handler::Model(handle) => {
            let app = fleet.get(body.fields.text("model")).await?;
            handle(app, input(body)).await?
        }
    };
    names.extend(response.extensions_mut().remove::<Ignored>().into_iter().flat_map(|Ignored(names)| names));
    names.truncate(MAX_IGNORED);
    if let Some(names) = HeaderValue::from_str(&names.join(", ")).ok().filter(|names| !names.is_empty()) {
        // What had no effect is no secret: clients and their users can see it.
        response.headers_mut().insert(HeaderName::from_static("x-ignored-fields"), names);
    }
    Ok(match pass {
        Some(pass) => response.map(|inner| Body::new(Held { inner, _held: pass })),
        None => response,
    })
}

/// Returns what a query says of a name: `model=NAME`, in the encoding of forms.
pub fn asked(query: &str, name: &str) -> Option<String> {
    let value = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                (digit()? * 16 + digit()?) as u8
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

/// Returns whether `Accept-Encoding` has gzip with a weight above zero, by its name or as `*` (RFC 9110, 12.5.3).
fn takes_gzip(headers: &HeaderMap) -> bool {
    let lists = headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let codings = lists.flat_map(|list| list.split(',')).map(|coding| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, ""));
        let weight = weight.trim().strip_prefix("q=").map_or(Some(1.0), |q| q.parse::<f32>().ok());
        (name.trim(), weight.is_some_and(|q| q > 0.0))
    });
    let mut any = None;
    for (name, wanted) in codings {
        match name {
            _ if name.eq_ignore_ascii_case("gzip") || name.eq_ignore_ascii_case("x-gzip") => return wanted,
            "*" => any = Some(wanted),
            _ => {}
        }
    }
    any.unwrap_or(false)
}

fn content_length(headers: &HeaderMap) -> Result<Option<usize>, ApiError> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if length.is_some_and(|n| n > MAX_BODY_BYTES) { Err(body::too_large()) } else { Ok(length) }
}

/// A page of another site can post plain text and forms without asking; it cannot post JSON. So pages must send JSON by
/// its name. Other programs, which send no `Origin`, often leave the name out, as `curl -d` and LiteLLM do.
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    if !headers.contains_key(header::ORIGIN) && !headers.contains_key("sec-fetch-site") {
        return Ok(());
    }
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

/// Bodies are read as they are.
fn check_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    let encoding = headers.get(header::CONTENT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or("identity");
    if encoding.is_empty() || encoding.eq_ignore_ascii_case("identity") {
        return Ok(());
    }
    let why = format!("content-encoding {} is unsupported: send the body as it is", tools::shown(encoding));
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_sent_to_who_asks_for_it() {
        let takes = |lists: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for list in lists {
                headers.append(header::ACCEPT_ENCODING, HeaderValue::from_static(list));
            }
            takes_gzip(&headers)
        };
        for lists in [
            &["gzip, deflate, br, zstd"] as &[_],
            &["deflate, GZIP;q=0.5"],
            &["br", "x-gzip"],
            &["*"],
            &["br;q=1.0, *;q=0.1"],
        ] {
            assert!(takes(lists), "{lists:?}");
        }
        for lists in [&[] as &[_], &[""], &["identity"], &["gzip;q=0"], &["*, gzip; q=0"], &["*;q=0"], &["gzip;q=x"]] {
            assert!(!takes(lists), "{lists:?}");
        }
    }
}
