//! Who may ask, by what the head of a request says: one host that is ours, an origin that is ours, a head that every
//! proxy in front reads as we do. Knows heads only.
//!
//! Without keys a server trusts whoever reaches its address. A page of another site must not be one of them: neither
//! by calling it (a foreign `Origin`), nor by giving its own name our address (DNS rebinding, where `Host` is foreign).

use std::net::IpAddr;

use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, Version, header};

use super::error::ApiError;
use super::keys::Keys;
use super::limits::{MAX_HEAD_BYTES, MAX_METHOD_BYTES};

/// One way into a server, and who may take it.
#[derive(Default)]
pub struct Door {
    pub guard: Guard,
    /// The keys of which a request must have one; none is needed where there are none.
    pub keys: Keys,
}

/// The rule for heads.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    /// Names that are served; any when `None`. Addresses of this machine always are.
    hosts: Option<Vec<String>>,
    /// Origins that may call beside our own; any when `None`.
    origins: Option<Vec<String>>,
}

impl Guard {
    /// For a server that listens on `address`: with keys any host and origin may ask. `allowed` are further hosts, and
    /// where some are named no others are served; `origins` are what `--cors` allows.
    pub fn new(address: IpAddr, allowed: &[String], origins: &[String], has_keys: bool) -> Guard {
        let hosts = || [&[address.to_string(), "localhost".into()], allowed].concat();
        let any_host = allowed.is_empty() && (has_keys || !address.is_loopback());
        let any_origin = has_keys || origins.iter().any(|origin| origin == "*");
        Guard { hosts: (!any_host).then(hosts), origins: (!any_origin).then(|| origins.to_vec()) }
    }

    /// Refuses heads that are not to be served.
    ///
    /// # Errors
    /// 400, 403, 431 or 501, by what is wrong.
    pub fn check(&self, head: &Parts) -> Result<(), ApiError> {
        if head.method.as_str().len() > MAX_METHOD_BYTES {
            return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, "unknown method"));
        }
        let fields = head.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
        if fields.sum::<usize>() > MAX_HEAD_BYTES {
            let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
            return Err(ApiError::new(status, format!("the request's head has more than {MAX_HEAD_BYTES} bytes")));
        }
        // What is coded otherwise would be read as something else than the sender means.
        let mut codings = head.headers.get_all(header::TRANSFER_ENCODING).iter();
        if codings.next().is_some_and(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
            || codings.next().is_some()
        {
            return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, "the only supported transfer coding is chunked"));
        }
        let host = one(&head.headers, header::HOST)?;
        // Whoever names a host in the target means that one (RFC 9112, 3.2.2).
        let named = head.uri.authority().map(Authority::as_str).or(host);
        let Some(named) = named else {
            return match head.version {
                Version::HTTP_09 | Version::HTTP_10 => Ok(()),
                _ => Err(ApiError::bad("the header `Host` is missing")),
            };
        };
        let authority = named.parse::<Authority>();
        let Some(name) = authority.as_ref().ok().map(Authority::host).filter(|name| !name.is_empty()) else {
            return Err(ApiError::bad("the header `Host` does not name a host"));
        };
        if !self.serves(name) {
            let name = super::log::cut(name, 100);
            let why = format!("host {name} is not allowed; start the server with --allowed-host {name}");
            return Err(ApiError::new(StatusCode::FORBIDDEN, why));
        }
        let Some(origin) = one(&head.headers, header::ORIGIN)? else { return Ok(()) };
        // The page's files are public, and browsers fetch its modules with an origin: after a proxy that passes it on
        // without the host the page loads, and can tell why its requests are refused.
        let path = head.uri.path();
        if matches!(head.method, Method::GET | Method::HEAD) && (path == "/" || path.starts_with("/page/")) {
            return Ok(());
        }
        let ours = origin.split_once("://").is_some_and(|(_, rest)| rest.eq_ignore_ascii_case(named));
        match &self.origins {
            Some(allowed) if !ours && !allowed.iter().any(|allowed| allowed == origin) => {
                let origin = super::log::cut(origin, 100);
                let why = format!("origin {origin} is not allowed; start the server with --cors {origin}");
                Err(ApiError::new(StatusCode::FORBIDDEN, why))
            }
            _ => Ok(()),
        }
    }

    fn serves(&self, name: &str) -> bool {
        let bare = name.trim_start_matches('[').trim_end_matches(']');
        let Some(hosts) = &self.hosts else { return true };
        bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
            || hosts.iter().any(|host| host.eq_ignore_ascii_case(bare))
    }
}

/// Returns the text of a field that may be there once.
fn one(headers: &HeaderMap, name: HeaderName) -> Result<Option<&str>, ApiError> {
    let mut values = headers.get_all(&name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(ApiError::bad(format!("the header `{name}` appears twice")));
    }
    value.to_str().map(Some).map_err(|_| ApiError::bad(format!("the header `{name}` is not text")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    #[test]
    fn only_our_own_pages_and_names_get_in() {
        let local = || Guard::new("127.0.0.1".parse().unwrap(), &[], &[], false);
        let named = || Guard::new("0.0.0.0".parse().unwrap(), &["model.example".into()], &[], false);
        let cors = || Guard::new("::1".parse().unwrap(), &[], &["http://a.example".into()], false);
        let open = || Guard::new("0.0.0.0".parse().unwrap(), &[], &["*".into()], false);
        let keys = || Guard::new("127.0.0.1".parse().unwrap(), &[], &[], true);
        let cases: &[(Guard, &str, &[(&str, &str)], u16)] = &[
            (local(), "/", &[("host", "localhost")], 200),
            (local(), "/", &[("host", "LOCALHOST:8080")], 200),
            (local(), "/", &[("host", "127.0.0.1:8080")], 200),
            (local(), "/", &[("host", "[::1]:8080")], 200),
            (local(), "/", &[("host", "evil.example")], 403),
            (local(), "/", &[("host", "localhost.evil.example")], 403),
            (local(), "/", &[("host", "192.168.1.2")], 403),
            (local(), "/", &[("host", "")], 400),
            (local(), "/", &[("host", "a b")], 400),
            (local(), "/", &[], 400),
            (local(), "/", &[("host", "localhost"), ("host", "localhost")], 400),
            (local(), "http://evil.example/", &[("host", "localhost")], 403),
            (local(), "/x", &[("host", "localhost:1"), ("origin", "http://localhost:1")], 200),
            (local(), "/x", &[("host", "localhost:1"), ("origin", "http://localhost:2")], 403),
            (local(), "/x", &[("host", "localhost"), ("origin", "http://evil.example")], 403),
            (local(), "/x", &[("host", "localhost"), ("origin", "null")], 403),
            (local(), "/", &[("host", "localhost"), ("origin", "https://chat.example")], 200),
            (local(), "/page/app.js", &[("host", "localhost"), ("origin", "https://chat.example")], 200),
            (local(), "/page", &[("host", "localhost"), ("origin", "https://chat.example")], 403),
            (local(), "/page/app.js", &[("host", "evil.example"), ("origin", "http://evil.example")], 403),
            (cors(), "/x", &[("host", "localhost"), ("origin", "http://a.example")], 200),
            (cors(), "/x", &[("host", "localhost"), ("origin", "http://b.example")], 403),
            (cors(), "/x", &[("host", "a.example"), ("origin", "http://a.example")], 403),
            (named(), "/", &[("host", "model.example"), ("origin", "https://model.example")], 200),
            (named(), "/", &[("host", "evil.example")], 403),
            (open(), "/", &[("host", "evil.example"), ("origin", "http://b.example")], 200),
            (keys(), "/", &[("host", "evil.example"), ("origin", "http://b.example")], 200),
            (local(), "/", &[("host", "localhost"), ("transfer-encoding", "Chunked")], 200),
            (local(), "/", &[("host", "localhost"), ("transfer-encoding", "gzip, chunked")], 501),
            (
                local(),
                "/",
                &[("host", "localhost"), ("transfer-encoding", "gzip"), ("transfer-encoding", "chunked")],
                501,
            ),
        ];
        for (guard, target, headers, status) in cases {
            let request = headers.iter().fold(Request::get(*target), |request, (k, v)| request.header(*k, *v));
            let head = request.body(()).unwrap().into_parts().0;
            let got = guard.check(&head).map_or_else(|error| error.status.as_u16(), |()| 200);
            assert_eq!(got, *status, "{guard:?} {target} {headers:?}");
        }
        let foreign = Request::post("/").header("host", "localhost").header("origin", "http://evil.example");
        assert_eq!(local().check(&foreign.body(()).unwrap().into_parts().0).unwrap_err().status, 403);
        let old = Request::get("/").version(Version::HTTP_10).body(()).unwrap().into_parts().0;
        assert!(local().check(&old).is_ok());
        let long = Request::get("/").header("host", "localhost").header("x", "y".repeat(MAX_HEAD_BYTES));
        assert_eq!(local().check(&long.body(()).unwrap().into_parts().0).unwrap_err().status, 431);
        let method = "M".repeat(MAX_METHOD_BYTES + 1);
        let long = Request::builder().method(&*method).body(()).unwrap().into_parts().0;
        assert_eq!(local().check(&long).unwrap_err().status, 501);
    }
}
