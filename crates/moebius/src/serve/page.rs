//! `/`: the page to chat and to look inside. Its files are part of the program; it fetches nothing from elsewhere, and
//! the policy that goes with it holds the browser to that. Texts lie in the program in gzip, as most clients take them.

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
const TEXT: &str = "text/plain; charset=utf-8";
const FONT: &str = "font/woff2";

/// Name, type and bytes of a text in `page/`, which `build.rs` has put in gzip.
macro_rules! file {
    ($name:literal, $kind:expr) => {
        ($name, $kind, include_bytes!(concat!(env!("OUT_DIR"), "/page/", $name, ".gz")))
    };
}

/// A font of KaTeX.
macro_rules! font {
    ($name:literal) => {
        (
            concat!("vendor/katex-0.19.1/fonts/KaTeX_", $name, ".woff2"),
            FONT,
            include_bytes!(concat!("page/vendor/katex-0.19.1/fonts/KaTeX_", $name, ".woff2")),
        )
    };
}

/// Name, type and bytes of each file: in gzip, but for fonts, which are packed by themselves.
const FILES: &[(&str, &str, &[u8])] = &[
    file!("index.html", HTML),
    file!("icon.svg", "image/svg+xml"),
    file!("style.css", STYLE),
    file!("api.js", SCRIPT),
    file!("app.js", SCRIPT),
    file!("dom.js", SCRIPT),
    file!("experts.js", SCRIPT),
    file!("files.js", SCRIPT),
    file!("highlighter.js", SCRIPT),
    file!("markdown.js", SCRIPT),
    file!("messages.js", SCRIPT),
    file!("rich.js", SCRIPT),
    file!("routing.js", SCRIPT),
    file!("settings.js", SCRIPT),
    file!("side.js", SCRIPT),
    file!("state.js", SCRIPT),
    file!("store.js", SCRIPT),
    file!("tokens.js", SCRIPT),
    file!("tree.js", SCRIPT),
    // As `tools/fetch_page_vendor.sh` fetches them. Pages load them only when they are needed.
    file!("vendor/highlight-11.12.0/LICENSE", TEXT),
    file!("vendor/highlight-11.12.0/highlight.min.js", SCRIPT),
    file!("vendor/katex-0.19.1/LICENSE", TEXT),
    file!("vendor/katex-0.19.1/katex.min.css", STYLE),
    file!("vendor/katex-0.19.1/katex.min.js", SCRIPT),
    font!("AMS-Regular"),
    font!("Caligraphic-Bold"),
    font!("Caligraphic-Regular"),
    font!("Fraktur-Bold"),
    font!("Fraktur-Regular"),
    font!("Main-Bold"),
    font!("Main-BoldItalic"),
    font!("Main-Italic"),
    font!("Main-Regular"),
    font!("Math-BoldItalic"),
    font!("Math-Italic"),
    font!("SansSerif-Bold"),
    font!("SansSerif-Italic"),
    font!("SansSerif-Regular"),
    font!("Script-Regular"),
    font!("Size1-Regular"),
    font!("Size2-Regular"),
    font!("Size3-Regular"),
    font!("Size4-Regular"),
    font!("Typewriter-Regular"),
];

/// What the browser may do with the page: run its own scripts and talk to this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page.
pub async fn index(_: Arc<Fleet>, input: Input) -> Answer {
    file("index.html", input.takes_gzip)
}

/// Its other files.
pub async fn part(_: Arc<Fleet>, input: Input) -> Answer {
    file(&input.tail.unwrap_or_default(), input.takes_gzip)
}

fn file(name: &str, takes_gzip: bool) -> Answer {
    let Some((_, kind, bytes)) = FILES.iter().find(|(file, _, _)| *file == name) else {
        return Err(ApiError::new(StatusCode::NOT_FOUND, "the page has no such file"));
    };
    let is_packed = *kind != FONT;
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
        (header::CACHE_CONTROL, &cache),
        (header::CONTENT_SECURITY_POLICY, &POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, &"nosniff"),
        (header::REFERRER_POLICY, &"no-referrer"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

/// What `build.rs` packed.
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
        for (file, kind, bytes) in FILES {
            if *kind == FONT {
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
        for (name, kind, bytes) in FILES {
            let source = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/src/serve/page/").to_string() + name);
            let source = source.unwrap();
            let sent = |takes_gzip| {
                let response = file(name, takes_gzip).unwrap();
                let headers = response.headers();
                let coding = headers.get(header::CONTENT_ENCODING).map(|coding| coding.to_str().unwrap().to_string());
                (response.body().size_hint().exact().unwrap(), coding, headers.contains_key(header::VARY))
            };
            let plain = source.len() as u64;
            assert_eq!(sent(false), (plain, None, *kind != FONT), "{name}");
            if *kind == FONT {
                assert_eq!(sent(true), (plain, None, false), "{name}");
                continue;
            }
            assert_eq!(sent(true), (bytes.len() as u64, Some("gzip".to_string()), true), "{name}");
            assert_eq!(unpacked(bytes).unwrap(), source, "{name}");
        }
    }
}
