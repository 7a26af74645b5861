//! The keys that open a server, and what each of them may use: answers at a time, requests and tokens a minute. Knows
//! heads of requests only.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::app;
use super::error::ApiError;
use super::worker::lock;

/// Longest key in bytes.
pub const MAX_KEY_BYTES: usize = 512;
/// Longest name of a key in characters.
const MAX_KEY_NAME: usize = 64;

/// The keys that open the server; none: it is open. They can be replaced while it runs.
#[derive(Debug, Default)]
pub struct Keys(Mutex<Arc<[Arc<Key>]>>);

/// The text of a key: padded, with its length, so that a comparison takes as long whatever is compared.
#[derive(Clone, Copy)]
struct Secret {
    bytes: [u8; MAX_KEY_BYTES],
    len: u64,
}

/// A key, what the log calls it, and what it may use.
pub struct Key {
    secret: Secret,
    pub name: String,
    limits: Limits,
    usage: Arc<Usage>,
}

/// What a key may use; as much as the server has where it says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Limits {
    /// Requests in flight.
    parallel: Option<u32>,
    requests_per_minute: Option<u32>,
    /// Of prompts and answers.
    tokens_per_minute: Option<u32>,
}

/// What a key uses. It stays when the file of keys is read again.
#[derive(Debug)]
struct Usage {
    /// Identifies the key, whatever its name and line are.
    owner: u64,
    running: AtomicU32,
    requests: Mutex<Bucket>,
    tokens: Mutex<Bucket>,
}

/// What is left of a minute's allowance, which fills again as time passes. Below zero it is owed.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    left: f64,
    seen: Instant,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Limits {
    /// Reads `NAME=N`; false where it is no limit.
    fn read(&mut self, word: &str) -> bool {
        let Some((name, value)) = word.split_once('=') else { return false };
        let limit = match name {
            "parallel" => &mut self.parallel,
            "requests-per-minute" => &mut self.requests_per_minute,
            "tokens-per-minute" => &mut self.tokens_per_minute,
            _ => return false,
        };
        *limit = value.parse().ok().filter(|&n| n > 0);
        limit.is_some()
    }
}

impl Bucket {
    /// Fills for the time that has passed, up to a minute's allowance, and returns what is left.
    fn fill(&mut self, per_minute: u32, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.seen).as_secs_f64();
        self.left = (self.left + passed / 60.0 * f64::from(per_minute)).min(f64::from(per_minute));
        self.seen = now;
        self.left
    }

    /// Returns the seconds until `wanted` are left, of what [`Bucket::fill`] has filled.
    fn wait(&self, wanted: f64, per_minute: u32) -> u64 {
        ((wanted - self.left) * 60.0 / f64::from(per_minute)).ceil().max(1.0) as u64
    }
}

impl Secret {
    /// `None` where the text is too long.
    fn new(text: &str) -> Option<Secret> {
        let mut bytes = [0; MAX_KEY_BYTES];
        bytes.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
        Some(Secret { bytes, len: text.len() as u64 })
    }

    fn is(&self, other: &Secret) -> subtle::Choice {
        self.bytes[..].ct_eq(&other.bytes[..]) & self.len.ct_eq(&other.len)
    }
}

impl Key {
    fn new(secret: Secret, name: &str, limits: Limits) -> Key {
        // The first request finds a full minute's allowance.
        let full = || Mutex::new(Bucket { left: f64::INFINITY, seen: Instant::now() });
        let usage = Usage { owner: app::random(), running: AtomicU32::new(0), requests: full(), tokens: full() };
        Key { secret, name: name.into(), limits, usage: Arc::new(usage) }
    }

    /// Identifies the key.
    pub fn owner(&self) -> u64 {
        self.usage.owner
    }

    /// Lets a request in, which counts as running while the pass is held.
    ///
    /// # Errors
    /// 429 when the key has used what it may use.
    pub fn admit(self: &Arc<Key>, now: Instant) -> Result<Pass, ApiError> {
        let refused = |what: String, wait| {
            Err(ApiError::busy(format!("the limit of this key is reached: {what}; try again later"), wait))
        };
        let Limits { parallel, requests_per_minute, tokens_per_minute } = self.limits;
        if let Some(limit) = tokens_per_minute {
            let mut tokens = lock(&self.usage.tokens);
            if tokens.fill(limit, now) <= 0.0 {
                return refused(format!("{limit} tokens a minute"), tokens.wait(0.0, limit));
            }
        }
        // Counted first: of requests that come at the same time no more get in.
        let pass = Pass(self.clone());
        let running = self.usage.running.fetch_add(1, Ordering::Relaxed);
        if let Some(limit) = parallel.filter(|&limit| running >= limit) {
            return refused(format!("{limit} requests at a time"), 1);
        }
        if let Some(limit) = requests_per_minute {
            let mut requests = lock(&self.usage.requests);
            if requests.fill(limit, now) < 1.0 {
                return refused(format!("{limit} requests a minute"), requests.wait(1.0, limit));
            }
            requests.left -= 1.0;
        }
        Ok(pass)
    }

    /// Counts tokens that were computed for the key.
    pub fn charge(&self, n_tokens: usize) {
        if let Some(limit) = self.limits.tokens_per_minute {
            let mut tokens = lock(&self.usage.tokens);
            tokens.fill(limit, Instant::now());
            tokens.left -= n_tokens as f64;
        }
    }
}

/// A request that was let in.
#[derive(Debug)]
pub struct Pass(Arc<Key>);

impl Drop for Pass {
    fn drop(&mut self) {
        self.0.usage.running.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Keys {
    /// Reads a key a line: `KEY [parallel=N] [requests-per-minute=N] [tokens-per-minute=N] [# NAME]`. Empty lines and
    /// those that begin with `#` are left out.
    ///
    /// # Errors
    /// There is no key, one is too long, or a limit is none. The text of a line is not repeated: it is a secret.
    pub fn parse(text: &str) -> Result<Keys, String> {
        // An editor's mark at the start is no part of the first key.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let lines = text.lines().map(str::trim).zip(1..);
        let lines = lines.filter(|(line, _)| !line.is_empty() && !line.starts_with('#'));
        let key = |(line, number): (&str, usize)| {
            let (line, name) = line.split_once(" #").unwrap_or((line, ""));
            let mut words = line.split_whitespace();
            let (key, mut limits) = (words.next().unwrap_or_default(), Limits::default());
            if !words.all(|word| limits.read(word)) {
                return Err(format!(
                    "line {number}: after the key may come parallel=N, requests-per-minute=N, tokens-per-minute=N \
                     (N from 1) and # with a name"
                ));
            }
            let own = format!("line {number}");
            let name = Some(super::log::cut(name.trim(), MAX_KEY_NAME)).filter(|name| !name.is_empty());
            let secret = Secret::new(key);
            let secret = secret.ok_or_else(|| format!("line {number}: a key has at most {MAX_KEY_BYTES} bytes"))?;
            Ok(Arc::new(Key::new(secret, name.unwrap_or(&own), limits)))
        };
        let keys: Arc<[Arc<Key>]> = lines.map(key).collect::<Result<_, _>>()?;
        if keys.is_empty() { Err("it holds no key".into()) } else { Ok(Keys(Mutex::new(keys))) }
    }

    /// Returns whether anyone may ask.
    pub fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    /// Takes other keys from now on; how many those are. What a key has used stays used.
    pub fn replace(&self, keys: Keys) -> usize {
        let mut mine = lock(&self.0);
        let known = |key: &Arc<Key>| {
            let Some(old) = mine.iter().find(|old| old.secret.is(&key.secret).into()) else { return key.clone() };
            Arc::new(Key { name: key.name.clone(), usage: old.usage.clone(), ..**key })
        };
        let keys: Arc<[Arc<Key>]> = keys.all().iter().map(known).collect();
        *mine = keys;
        mine.len()
    }

    fn all(&self) -> Arc<[Arc<Key>]> {
        lock(&self.0).clone()
    }

    /// Returns the key that the request brings, as a bearer token or as `x-api-key`; none where the server is open.
    ///
    /// # Errors
    /// It brings none of the keys.
    pub fn check(&self, headers: &HeaderMap) -> Result<Option<Arc<Key>>, ApiError> {
        let keys = self.all();
        if keys.is_empty() {
            return Ok(None);
        }
        let bearer = |value: &str| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim().to_string())
        };
        let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let given = header(header::AUTHORIZATION).and_then(bearer);
        let given = given.or_else(|| header(HeaderName::from_static("x-api-key")).map(String::from));
        let given = given.as_deref().and_then(Secret::new);
        let found = given.and_then(|given| {
            // All are compared, whichever it is.
            let pick =
                |found: u64, (key, i): (&Arc<Key>, u64)| u64::conditional_select(&found, &i, key.secret.is(&given));
            usize::try_from(keys.iter().zip(0..).fold(u64::MAX, pick)).ok()
        });
        match found.and_then(|i| keys.get(i)) {
            Some(key) => Ok(Some(key.clone())),
            None => Err(ApiError {
                code: Some("invalid_api_key"),
                ..ApiError::new(
                    StatusCode::UNAUTHORIZED,
                    "a key is needed: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`",
                )
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn keys_open_and_nothing_else_does() {
        let keys = Keys::parse("\u{feff}# ours\nalpha\n\n beta \n").unwrap();
        let cases = [
            (Some(("authorization", "Bearer alpha")), true),
            (Some(("authorization", "bearer beta")), true),
            (Some(("x-api-key", "beta")), true),
            (Some(("authorization", "Bearer alph")), false),
            (Some(("authorization", "Bearer alpha\u{0}")), false),
            (Some(("authorization", "Basic alpha")), false),
            (Some(("x-api-key", "")), false),
            (None, false),
        ];
        for (given, opens) in cases {
            let mut headers = HeaderMap::new();
            if let Some((name, value)) = given {
                let Ok(value) = value.parse() else { continue };
                headers.insert(HeaderName::from_static(name), value);
            }
            assert_eq!(keys.check(&headers).is_ok(), opens, "{given:?}");
        }
        let mut headers = HeaderMap::new();
        headers.insert("x-api-key", "first".parse().unwrap());
        assert!(Keys::parse("\u{feff}first\n").unwrap().check(&headers).is_ok());
        assert!(Keys::default().check(&HeaderMap::new()).is_ok());
        assert!(Keys::parse("# nothing\n").is_err());
        assert!(Keys::parse(&"x".repeat(MAX_KEY_BYTES + 1)).is_err());

        // Names are for the log; other keys may take their place.
        let keys = Keys::parse("# ours\nalpha # Alice's laptop\nbe#ta\n").unwrap();
        let name = |keys: &Keys, key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("x-api-key", key.parse().unwrap());
            keys.check(&headers).ok().flatten().map(|key| key.name.clone())
        };
        assert_eq!(name(&keys, "alpha").as_deref(), Some("Alice's laptop"));
        assert_eq!(name(&keys, "be#ta").as_deref(), Some("line 3"));
        assert_eq!(name(&keys, "be"), None);
        assert_eq!(keys.replace(Keys::parse("gamma").unwrap()), 1);
        assert_eq!((name(&keys, "alpha"), name(&keys, "gamma").as_deref()), (None, Some("line 1")));
    }
    #[test]
    fn a_key_uses_what_it_may_use() {
        let keys = Keys::parse(
            "a parallel=2
b requests-per-minute=3
c tokens-per-minute=60 # C
d
",
        )
        .unwrap();
        let key = |i: usize| keys.all()[i].clone();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let wait = |key: &Arc<Key>, now| key.admit(now).map(drop).map_err(|error| (error.status, error.retry_after));
        let refused = |seconds| Err((StatusCode::TOO_MANY_REQUESTS, Some(seconds)));

        let a = key(0);
        let running = [a.admit(start).unwrap(), a.admit(start).unwrap()];
        assert_eq!(wait(&a, start), refused(1));
        drop(running);
        assert_eq!(wait(&a, start), Ok(()));

        let b = key(1);
        for _ in 0..3 {
            assert_eq!(wait(&b, start), Ok(()));
        }
        assert_eq!(wait(&b, start), refused(20));
        assert_eq!(wait(&b, at(10)), refused(10));
        assert_eq!(wait(&b, at(20)), Ok(()));
        assert_eq!(wait(&b, at(20)), refused(20));
        // An hour saves no more than a minute's worth.
        for _ in 0..3 {
            assert_eq!(wait(&b, at(3600)), Ok(()));
        }
        assert_eq!(wait(&b, at(3600)), refused(20));

        let c = key(2);
        assert_eq!(wait(&c, start), Ok(()));
        c.charge(90);
        assert!(matches!(wait(&c, start), Err((StatusCode::TOO_MANY_REQUESTS, Some(29..=30)))));
        // What was used stays used when the file is read again, on whatever line the key is now.
        assert_eq!(keys.replace(Keys::parse("x\nc tokens-per-minute=60 # Carol\n").unwrap()), 2);
        let again = key(1);
        assert_eq!((again.name.as_str(), again.owner()), ("Carol", c.owner()));
        assert_ne!(key(0).owner(), a.owner());
        assert!(wait(&again, start).is_err());
        assert_eq!(wait(&again, at(40)), Ok(()));
    }

    #[test]
    fn limits_that_are_none_are_refused_without_the_secret() {
        for line in ["s3cret parallel", "s3cret parallel=0", "s3cret parallel=-1", "s3cret word", "s3cret tokens=5"] {
            let error = Keys::parse(&format!("# ours\n{line}\n")).unwrap_err();
            assert!(error.starts_with("line 2: ") && !error.contains("s3cret"), "{error}");
        }
    }
}
