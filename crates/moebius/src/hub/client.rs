//! Requests to a hub: redirects by hand, so that the token stays with the hub; another try where the network or the
//! hub fails; downloads that go on where they ended.

use std::io::Read;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ureq::http::{Response, Uri, header};
use ureq::{Agent, Body};

use super::SILENCE;
use super::sink::Sink;
use crate::out::note;
use crate::{input, out};

/// Most redirects of a request.
const MAX_REDIRECTS: usize = 10;
/// A try that brings less than this counts as a failure.
const PROGRESS: u64 = 1 << 20;
/// Longest wait that a hub may ask for.
const MAX_WAIT: Duration = Duration::from_secs(300);

/// Longest file of certificates.
const MAX_CERTIFICATES_BYTES: u64 = 16 << 20;

/// How often a request is tried, and how long it waits.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Tries one after the other that bring nothing.
    pub tries: u32,
    /// Wait before the second one; it doubles.
    pub wait: Duration,
    /// How long a connection may say nothing.
    pub silence: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { tries: 6, wait: Duration::from_secs(1), silence: SILENCE }
    }
}

/// Scheme, host and port of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    scheme: String,
    authority: String,
    /// What stands before every path.
    path: String,
}

impl Origin {
    /// # Errors
    /// It is no address of a web server.
    pub fn parse(address: &str) -> Result<Origin> {
        let uri: Uri = address.trim_end_matches('/').parse()?;
        let origin = Origin::of(&uri)?;
        Ok(Origin { path: uri.path().trim_end_matches('/').into(), ..origin })
    }

    fn of(uri: &Uri) -> Result<Origin> {
        let scheme = uri.scheme_str().unwrap_or_default().to_lowercase();
        ensure!(["http", "https"].contains(&scheme.as_str()), "it begins with neither https:// nor http://");
        let authority = uri.authority().context("it names no host")?;
        ensure!(!authority.as_str().contains('@'), "it names a user");
        Ok(Origin { scheme, authority: authority.as_str().to_lowercase(), path: String::new() })
    }

    fn is_same(&self, other: &Origin) -> bool {
        (&self.scheme, &self.authority) == (&other.scheme, &other.authority)
    }

    /// Returns whether what is sent there can be read on the way.
    fn is_open(&self) -> bool {
        let host = self.authority.rsplit_once(':').map_or(self.authority.as_str(), |(host, _)| host);
        self.scheme == "http" && !["localhost", "127.0.0.1", "[::1]"].contains(&host)
    }
}

/// A client of one hub.
pub struct Client {
    agent: Agent,
    origin: Origin,
    token: Option<String>,
    patience: Patience,
}

/// Why a try failed.
enum Failure {
    /// Another try may do better, after this wait where the hub asks for one.
    Passing(anyhow::Error, Option<Duration>),
    /// None will.
    Final(anyhow::Error),
}

impl Client {
    /// # Errors
    /// The certificates that `SSL_CERT_FILE` names cannot be read.
    pub fn new(origin: Origin, token: Option<String>, patience: Patience) -> Result<Client> {
        ensure!(
            token.is_none() || !origin.is_open(),
            "failed to use the hub {}: the token would be sent in the open; use https",
            origin.authority
        );
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .https_only(origin.scheme == "https")
            .user_agent(format!("moebius/{}", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(patience.silence))
            .timeout_recv_response(Some(patience.silence))
            .timeout_per_read(Some(patience.silence));
        if let Some(path) = std::env::var_os("SSL_CERT_FILE").filter(|path| !path.is_empty()) {
            let shown = std::path::Path::new(&path).display().to_string();
            let pem = input::found(std::path::Path::new(&path), MAX_CERTIFICATES_BYTES);
            let pem = pem.with_context(|| format!("failed to read {shown}"))?;
            let certificates = ureq::tls::parse_pem(pem.as_bytes()).filter_map(|item| match item {
                Ok(ureq::tls::PemItem::Certificate(certificate)) => Some(Ok(certificate)),
                Ok(_) => None,
                Err(error) => Some(Err(error)),
            });
            let certificates =
                certificates.collect::<Result<Vec<_>, _>>().with_context(|| format!("failed to read {shown}"))?;
            let roots = ureq::tls::RootCerts::new_with_certs(&certificates);
            config = config.tls_config(ureq::tls::TlsConfig::builder().root_certs(roots).build());
        }
        Ok(Client { agent: config.build().new_agent(), origin, token, patience })
    }

    /// Returns the text at a path of the hub, of at most `max` bytes.
    ///
    /// # Errors
    /// See [`Client::download`].
    pub fn text(&self, path: &str, max: u64) -> Result<String> {
        self.persist(|| {
            let mut response = self.get(path, 0)?;
            self.check(&response)?;
            let body = response.body_mut().with_config().limit(max).read_to_string();
            body.map_err(failed)
        })
    }

    /// Fetches what a file lacks.
    ///
    /// # Errors
    /// The hub refuses, sends something else than it announced, or fails again and again.
    pub fn download(&self, path: &str, sink: &mut Sink) -> Result<()> {
        let mut best = sink.len();
        while sink.len() < sink.size() {
            self.persist(|| {
                let before = best;
                let result = self.part(path, sink);
                best = best.max(sink.len());
                match result {
                    // What came counts, whatever ended it.
                    Err(Failure::Passing(..)) if best >= before + PROGRESS => Ok(()),
                    other => other,
                }
            })?;
        }
        Ok(())
    }

    /// One try.
    fn part(&self, path: &str, sink: &mut Sink) -> Result<(), Failure> {
        let mut response = self.get(path, sink.len())?;
        match response.status().as_u16() {
            206 if sink.len() > 0 => {
                let range = text(&response, header::CONTENT_RANGE);
                let (start, size) = (sink.len(), sink.size());
                if !range.starts_with(&format!("bytes {start}-")) || !range.ends_with(&format!("/{size}")) {
                    sink.restart().map_err(Failure::Final)?;
                    return Err(Failure::Passing(
                        anyhow::anyhow!("the hub sent {range:?} for the rest from {start} on"),
                        None,
                    ));
                }
            }
            // What was there has changed, or is no part of it.
            416 => {
                sink.restart().map_err(Failure::Final)?;
                return Err(Failure::Passing(anyhow::anyhow!("the hub has no such part of it"), None));
            }
            _ => {
                self.check(&response)?;
                sink.restart().map_err(Failure::Final)?;
            }
        }
        if let Some(length) = response.body().content_length()
            && length != sink.size() - sink.len()
        {
            let (announced, left) = (sink.size(), sink.size() - sink.len());
            return Err(Failure::Final(anyhow::anyhow!(
                "the hub sends {length} bytes where {left} of the {announced} it announced are left"
            )));
        }
        let mut reader = response.body_mut().as_reader();
        let mut piece = vec![0; 1 << 16];
        loop {
            let n = reader.read(&mut piece).map_err(passing)?;
            if n == 0 {
                break;
            }
            sink.push(&piece[..n]).map_err(Failure::Final)?;
        }
        match sink.len() == sink.size() {
            true => Ok(()),
            false => Err(Failure::Passing(
                anyhow::anyhow!("the connection ended after {} of {} bytes", sink.len(), sink.size()),
                None,
            )),
        }
    }

    /// Sends a request and follows redirects; `from` is the first byte that is wanted.
    fn get(&self, path: &str, from: u64) -> Result<Response<Body>, Failure> {
        let last = |error: anyhow::Error| Failure::Final(error);
        let Origin { scheme, authority, path: before } = &self.origin;
        let mut address = format!("{scheme}://{authority}{before}{path}");
        for _ in 0..=MAX_REDIRECTS {
            let uri: Uri = address.parse().map_err(|_| last(anyhow::anyhow!("the address {address:?} is none")))?;
            let origin = Origin::of(&uri).map_err(|error| last(error.context(format!("go to {address:?}"))))?;
            let mut request = self.agent.get(uri.clone()).header(header::ACCEPT_ENCODING, "identity");
            if from > 0 {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            // The token is for the hub, not for whom it sends us to.
            if let Some(token) = self.token.as_ref().filter(|_| origin.is_same(&self.origin)) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            let response = request.call().map_err(|error| match failed(error) {
                Failure::Passing(error, wait) => {
                    let what = if origin.is_same(&self.origin) { " (HF_ENDPOINT names another hub)" } else { "" };
                    Failure::Passing(error.context(format!("cannot reach {}{what}", origin.authority)), wait)
                }
                lasting => lasting,
            })?;
            if ![301, 302, 303, 307, 308].contains(&response.status().as_u16()) {
                return Ok(response);
            }
            let location = text(&response, header::LOCATION);
            address = target(&uri, &location).map_err(last)?;
            if origin.scheme == "https" && !address.to_lowercase().starts_with("https://") {
                return Err(last(anyhow::anyhow!("the hub leads from https to {address:?}")));
            }
        }
        Err(last(anyhow::anyhow!("the hub leads on and on, {MAX_REDIRECTS} times and more")))
    }

    /// Turns a status that is no success into a sentence.
    fn check(&self, response: &Response<Body>) -> Result<(), Failure> {
        let status = response.status();
        let says = |what: &str| anyhow::anyhow!("the hub answers {}: {what}", status.as_u16());
        let with_token = if self.token.is_some() { "the token may not read it" } else { "HF_TOKEN is not set" };
        match status.as_u16() {
            200 => Ok(()),
            401 | 403 => Err(Failure::Final(says(&format!(
                "no such model, or one whose terms must be accepted on its page ({with_token})"
            )))),
            404 => Err(Failure::Final(says("there is no such model, file or revision"))),
            429 => Err(Failure::Passing(says("too many requests"), wait_of(response))),
            500..=599 => Err(Failure::Passing(says("it is in trouble"), wait_of(response))),
            _ => Err(Failure::Final(says(status.canonical_reason().unwrap_or("what that is")))),
        }
    }

    /// Tries until it works, fails for good, or has failed too often.
    fn persist<T>(&self, mut attempt: impl FnMut() -> Result<T, Failure>) -> Result<T> {
        let mut wait = self.patience.wait;
        for tries in 1.. {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing(error, _)) if tries >= self.patience.tries => {
                    return Err(error.context(format!("it failed {tries} times")));
                }
                Err(Failure::Passing(error, asked)) => {
                    if let Some(asked) = asked.filter(|&asked| asked > MAX_WAIT) {
                        bail!("{error}, and wants us to wait for {} seconds", asked.as_secs());
                    }
                    let pause = asked.unwrap_or(wait).max(wait);
                    if tries == 1 {
                        note!(
                            "moebius: {}; trying again, {} times at most",
                            out::chain(&error),
                            self.patience.tries - 1
                        );
                    }
                    std::thread::sleep(pause);
                    wait *= 2;
                }
            }
        }
        bail!("it was never tried")
    }
}

/// Whether another try may help: an untrusted certificate or an answer that is too long stays so.
fn failed(error: ureq::Error) -> Failure {
    use ureq::Error as E;
    match error {
        E::Rustls(_) | E::Tls(_) | E::BadUri(_) | E::Http(_) | E::BodyExceedsLimit(_) => Failure::Final(error.into()),
        E::Io(ref cause) if cause.kind() == std::io::ErrorKind::InvalidData => Failure::Final(error.into()),
        _ => passing(error),
    }
}

fn passing(error: impl Into<anyhow::Error>) -> Failure {
    Failure::Passing(error.into(), None)
}

fn text(response: &Response<Body>, name: header::HeaderName) -> String {
    response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().into()
}

/// Returns how long a hub asks us to wait, in seconds; dates are not read.
fn wait_of(response: &Response<Body>) -> Option<Duration> {
    text(response, header::RETRY_AFTER).trim().parse().ok().map(Duration::from_secs)
}

/// Returns where a redirect leads.
fn target(from: &Uri, location: &str) -> Result<String> {
    ensure!(!location.is_empty() && location.len() <= 8192, "the hub leads on and does not say where");
    if location.contains("://") {
        return Ok(location.into());
    }
    let (scheme, authority) = (from.scheme_str().unwrap_or("https"), from.authority().context("no host")?);
    Ok(match location.strip_prefix("//") {
        Some(rest) => format!("{scheme}://{rest}"),
        None if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
        None => {
            let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
            format!("{scheme}://{authority}{folder}/{location}")
        }
    })
}

/// Returns a part of a path with everything escaped that is more than a name.
pub fn escape(part: &str) -> String {
    let mut out = String::new();
    for byte in part.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(byte as char),
            _ => out += &format!("%{byte:02X}"),
        }
    }
    out
}

/// Returns a path of escaped parts.
pub fn escape_path(path: &str) -> String {
    path.split('/').map(escape).collect::<Vec<_>>().join("/")
}
