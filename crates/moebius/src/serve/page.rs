//! `/`: the page to chat and to look inside. Its files are part of the program; it fetches nothing from elsewhere, and
//! the policy that goes with it holds the browser to that.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;

use super::app::App;
use super::error::ApiError;
use super::routes::{Answer, Input};

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Name, type and text of each file.
const FILES: &[(&str, &str, &str)] = &[
    ("index.html", HTML, include_str!("page/index.html")),
    ("icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
    ("style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("app.js", SCRIPT, include_str!("page/app.js")),
    ("api.js", SCRIPT, include_str!("page/api.js")),
    ("markdown.js", SCRIPT, include_str!("page/markdown.js")),
    ("routing.js", SCRIPT, include_str!("page/routing.js")),
    ("store.js", SCRIPT, include_str!("page/store.js")),
];

/// What the browser may do with the page: run its own scripts and talk to this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page.
pub async fn index(_: Arc<App>, _: Input) -> Answer {
    file("index.html")
}

/// Its other files.
pub async fn part(_: Arc<App>, input: Input) -> Answer {
    file(&input.tail.unwrap_or_default())
}

fn file(name: &str) -> Answer {
    let Some((_, kind, text)) = FILES.iter().find(|(file, _, _)| *file == name) else {
        return Err(ApiError::new(StatusCode::NOT_FOUND, "the page has no such file"));
    };
    let mut response = Response::new(Body::from(*text));
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, &"no-cache"),
        (header::CONTENT_SECURITY_POLICY, &POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, &"nosniff"),
        (header::REFERRER_POLICY, &"no-referrer"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}
