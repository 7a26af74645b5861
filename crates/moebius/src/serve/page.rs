//! `/`: the page to chat and to look inside. Its files are part of the program; it fetches nothing from elsewhere, and
//! the policy that goes with it holds the browser to that. Texts are stored in gzip, as most clients take them.

use std::io::Read as _;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;

use super::error::ApiError;
use super::fleet::Fleet;
use super::routes::{Answer, Input};

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const PICTURE: &str = "image/svg+xml";
const TEXT: &str = "text/plain; charset=utf-8";
const FONT: &str = "font/woff2";

/// Name and bytes of each file, as `build.rs` packs them from `web/`: in gzip, except for fonts.
const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/page/files.rs"));

/// Media type of a file by its name.
fn kind_of(name: &str) -> &'static str {
    match name.rsplit_once('.').map_or("", |(_, ending)| ending) {
        "html" => HTML,
        "js" => SCRIPT,
        "css" => STYLE,
        "svg" => PICTURE,
        "woff2" => FONT,
        _ => TEXT,
    }
}

/// What the browser may do with the page: run its own scripts and talk to this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Returns the page.
pub async fn index(_: Arc<Fleet>, input: Input) -> Answer {
    file("index.html", input.takes_gzip)
}

/// Returns its other files.
pub async fn part(_: Arc<Fleet>, input: Input) -> Answer {
    file(&input.tail.unwrap_or_default(), input.takes_gzip)
}

fn file(name: &str, takes_gzip: bool) -> Answer {
    let Some((name, bytes)) = FILES.iter().find(|(file, _)| *file == name) else {
        return Err(ApiError::new(StatusCode::NOT_FOUND, "the page has no such file"));
    };
    let kind = kind_of(name);
    let is_packed = kind != FONT;
    let body = if is_packed && !takes_gzip { Body::from(unpacked(bytes)?) } else { Body::from(*bytes) };
    let mut response = Response::new(body);
    if is_packed {
        response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept-encoding"));
        if takes_gzip {
            response.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
    }
    // The names of libraries carry their versions.
    let cache = if name.starts_with("vendor/") { "max-age=31536000, immutable" } else { "no-cache" };
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, cache),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

/// Returns what `build.rs` packed.
fn unpacked(bytes: &[u8]) -> Result<Vec<u8>, ApiError> {
    let mut text = Vec::new();
    let read = flate2::read::GzDecoder::new(bytes).read_to_end(&mut text);
    read.map(|_| text).map_err(|_| ApiError::internal("a file of the page is damaged"))
}

#[cfg(test)]
mod tests {
    use hyper::body::Body as _;

    use super::*;

    /// What follows each `before` in `text`, up to `end`.
    fn quoted<'a>(text: &'a str, before: &'a str, end: char) -> impl Iterator<Item = &'a str> {
        text.split(before).skip(1).filter_map(move |rest| rest.split(end).next())
    }

    #[test]
    fn every_file_that_the_page_names_is_served() {
        let served = |name: &str| FILES.iter().any(|(file, ..)| *file == name);
        let mut named = 0;
        for (file, bytes) in FILES {
            if kind_of(file) == FONT {
                assert!(bytes.starts_with(b"wOF2"), "{file}");
                continue;
            }
            let text = String::from_utf8(unpacked(bytes).unwrap()).unwrap();
            let text = text.as_str();
            let folder = file.rsplit_once('/').map_or(String::new(), |(folder, _)| format!("{folder}/"));
            let mut names: Vec<String> = quoted(text, "url(", ')').map(|name| format!("{folder}{name}")).collect();
            if !file.starts_with("vendor/") {
                names.extend(quoted(text, "from \"./", '"').chain(quoted(text, "import \"./", '"')).map(String::from));
                names.extend(quoted(text, "\"page/", '"').filter(|name| !name.ends_with('/')).map(String::from));
            }
            named += names.len();
            names.iter().for_each(|name| assert!(served(name), "{file} names {name}"));
        }
        assert!(named > 40, "{named} names");
    }

    #[test]
    fn texts_are_packed_for_who_reads_gzip() {
        for (name, bytes) in FILES {
            let kind = kind_of(name);
            let folder = if name.starts_with("vendor/") { "/web/" } else { "/web/src/" };
            let source = std::fs::read(format!("{}{folder}{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
            let sent = |takes_gzip| {
                let response = file(name, takes_gzip).unwrap();
                let headers = response.headers();
                let coding = headers.get(header::CONTENT_ENCODING).map(|coding| coding.to_str().unwrap().to_string());
                (response.body().size_hint().exact().unwrap(), coding, headers.contains_key(header::VARY))
            };
            let plain = source.len() as u64;
            assert_eq!(sent(false), (plain, None, kind != FONT), "{name}");
            if kind == FONT {
                assert_eq!(sent(true), (plain, None, false), "{name}");
                continue;
            }
            assert_eq!(sent(true), (bytes.len() as u64, Some("gzip".to_string()), true), "{name}");
            assert_eq!(unpacked(bytes).unwrap(), source, "{name}");
        }
    }
}
