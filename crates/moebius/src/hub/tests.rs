//! A hub on a local port that fails in every way.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::client::Patience;
use super::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const REPO: &str = "org/model-GGUF";

/// A request as the server saw it.
#[derive(Clone, Debug)]
struct Seen {
    port: u16,
    path: String,
    headers: HashMap<String, String>,
}

/// What a server does with its `n`th request.
type Answer = dyn Fn(usize, &Seen, &mut TcpStream) + Send + Sync;

/// A server on a port of its own; its thread ends with the test's process.
struct Server {
    port: u16,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    fn start(answer: impl Fn(usize, &Seen, &mut TcpStream) + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("port");
        let port = listener.local_addr().expect("address").port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (log, answer, n) = (Arc::clone(&seen), Arc::new(answer) as Arc<Answer>, Arc::new(AtomicUsize::new(0)));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, answer, n) = (Arc::clone(&log), Arc::clone(&answer), Arc::clone(&n));
                std::thread::spawn(move || {
                    let mut lines = BufReader::new(stream.try_clone().expect("stream")).lines();
                    let Some(Ok(first)) = lines.next() else { return };
                    let path = first.split(' ').nth(1).unwrap_or_default().to_string();
                    let headers = lines.map_while(Result::ok).take_while(|line| !line.is_empty());
                    let pair = |line: String| line.split_once(": ").map(|(k, v)| (k.to_lowercase(), v.to_string()));
                    let request = Seen { port, path, headers: headers.filter_map(pair).collect() };
                    log.lock().expect("log").push(request.clone());
                    let mut stream = stream;
                    answer(n.fetch_add(1, Ordering::SeqCst), &request, &mut stream);
                });
            }
        });
        Server { port, seen }
    }

    fn hub(&self, cache: &Path, token: Option<&str>) -> Hub {
        let origin = Origin::parse(&format!("http://127.0.0.1:{}", self.port)).expect("origin");
        let patience = Patience { tries: 4, wait: Duration::from_millis(5), silence: Duration::from_millis(400) };
        let client = Client::new(origin, token.map(str::to_string), patience).expect("client");
        Hub { client, cache: Cache::new(cache.into()), offline: false }
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().expect("log").clone()
    }
}

fn send(out: &mut TcpStream, status: &str, headers: &[(&str, String)], body: &[u8]) {
    let mut head = format!("HTTP/1.1 {status}\r\nConnection: close\r\n");
    headers.iter().for_each(|(key, value)| head += &format!("{key}: {value}\r\n"));
    let _ = out.write_all(format!("{head}\r\n").as_bytes());
    let _ = out.write_all(body);
}

/// Sends a file as a good hub does, whole or from where the request wants it.
fn serve(request: &Seen, body: &[u8], out: &mut TcpStream) {
    let from: Option<usize> =
        request.headers.get("range").and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    match from {
        Some(from) if from < body.len() => {
            let range = format!("bytes {from}-{}/{}", body.len() - 1, body.len());
            let length = (body.len() - from).to_string();
            send(out, "206 Partial Content", &[("Content-Range", range), ("Content-Length", length)], &body[from..]);
        }
        Some(_) => send(out, "416 Range Not Satisfiable", &[], b""),
        None => send(out, "200 OK", &[("Content-Length", body.len().to_string())], body),
    }
}

/// Sends a beginning of a file that it announces in whole.
fn cut(request: &Seen, body: &[u8], n: usize, out: &mut TcpStream) {
    let from = request.headers.get("range").and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    let from: usize = from.unwrap_or(0);
    let length = ("Content-Length", (body.len() - from).to_string());
    let end = body.len().min(from + n);
    match from {
        0 => send(out, "200 OK", &[length], &body[..end]),
        _ => {
            let range = ("Content-Range", format!("bytes {from}-{}/{}", body.len() - 1, body.len()));
            send(out, "206 Partial Content", &[range, length], &body[from..end]);
        }
    }
}

fn hex(algorithm: &'static ring::digest::Algorithm, parts: &[&[u8]]) -> String {
    let mut context = ring::digest::Context::new(algorithm);
    parts.iter().for_each(|part| context.update(part));
    context.finish().as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

fn sha256(body: &[u8]) -> String {
    hex(&ring::digest::SHA256, &[body])
}

/// Returns what a hub says of some files: large ones by SHA-256, small ones by Git's hash.
fn describe(files: &[(&str, &[u8])]) -> String {
    let sibling = |(name, body): &(&str, &[u8])| match body.len() > 1000 {
        true => serde_json::json!({
            "rfilename": name, "size": body.len(), "blobId": "0".repeat(40),
            "lfs": {"sha256": sha256(body), "size": body.len(), "pointerSize": 134},
        }),
        false => {
            let head = format!("blob {}\0", body.len());
            let git = hex(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, &[head.as_bytes(), body]);
            serde_json::json!({"rfilename": name, "size": body.len(), "blobId": git})
        }
    };
    serde_json::json!({"sha": COMMIT, "siblings": files.iter().map(sibling).collect::<Vec<_>>()}).to_string()
}

fn body(n: usize) -> Vec<u8> {
    (0..n).map(|i| ((i * i) >> 3) as u8).collect()
}

/// Returns a hub with one large file, whose downloads `answer` answers; what it says of the repository is true.
fn one_file(answer: impl Fn(usize, &Seen, &mut TcpStream, &[u8]) + Send + Sync + 'static) -> (Server, Vec<u8>) {
    let file = body(3_000_000);
    let (listing, sent) = (describe(&[("m-Q4_K_M.gguf", &file)]), file.clone());
    let n = AtomicUsize::new(0);
    let server = Server::start(move |_, request, out| match request.path.starts_with("/api/") {
        true => send(out, "200 OK", &[("Content-Length", listing.len().to_string())], listing.as_bytes()),
        false => answer(n.fetch_add(1, Ordering::SeqCst), request, out, &sent),
    });
    (server, file)
}

fn wanted(name: &str) -> Wanted {
    Wanted::parse(name, "main").expect("name")
}

/// Returns the names below a folder that are no folders, without locks.
fn below(folder: &Path) -> Vec<String> {
    let mut out = Vec::new();
    let mut left = vec![folder.to_path_buf()];
    while let Some(folder) = left.pop() {
        for path in std::fs::read_dir(folder).expect("folder").map(|entry| entry.expect("entry").path()) {
            match path.is_dir() && !path.is_symlink() {
                true => left.push(path),
                false if path.extension().is_some_and(|e| e == "lock") => {}
                false => out.push(path.file_name().expect("name").to_string_lossy().into_owned()),
            }
        }
    }
    out.sort();
    out
}

#[test]
fn a_file_comes_in_whole_whatever_happens_on_the_way() {
    type Trouble = fn(usize, &Seen, &mut TcpStream, &[u8]);
    let troubles: [(&str, Trouble); 8] = [
        ("none", |_, request, out, body| serve(request, body, out)),
        (
            "cut twice",
            |n, request, out, body| if n < 2 { cut(request, body, 700_000, out) } else { serve(request, body, out) },
        ),
        (
            "cut at once",
            |n, request, out, body| if n < 3 { cut(request, body, 0, out) } else { serve(request, body, out) },
        ),
        ("silent", |n, request, out, body| {
            if n == 0 {
                cut(request, body, 500_000, out);
                std::thread::sleep(Duration::from_secs(2));
            } else {
                serve(request, body, out);
            }
        }),
        ("429", |n, request, out, body| {
            if n == 0 {
                send(out, "429 Too Many Requests", &[("Retry-After", "0".into())], b"")
            } else {
                serve(request, body, out)
            }
        }),
        (
            "5xx",
            |n, request, out, body| {
                if n < 3 { send(out, "503 Service Unavailable", &[], b"") } else { serve(request, body, out) }
            },
        ),
        ("no ranges", |n, request, out, body| {
            if n == 0 {
                cut(request, body, 2_000_000, out)
            } else {
                send(out, "200 OK", &[("Content-Length", body.len().to_string())], body)
            }
        }),
        ("another range", |n, request, out, body| match n {
            0 => cut(request, body, 100_000, out),
            1 => {
                let range = ("Content-Range", format!("bytes 0-9/{}", body.len()));
                send(out, "206 Partial Content", &[range, ("Content-Length", "10".into())], &body[..10]);
            }
            _ => serve(request, body, out),
        }),
    ];
    for (what, trouble) in troubles {
        let cache = tempfile::tempdir().expect("temporary folder");
        let (server, file) = one_file(trouble);
        let path = server.hub(cache.path(), None).pull(&wanted(&format!("{REPO}:q4_k_m")));
        let path = path.unwrap_or_else(|error| panic!("{what}: {}", crate::out::chain(&error)));
        assert_eq!(std::fs::read(&path).expect("read"), file, "{what}");
        assert!(path.ends_with(format!("models--org--model-GGUF/snapshots/{COMMIT}/m-Q4_K_M.gguf")), "{what}");
        let main = cache.path().join("models--org--model-GGUF/refs/main");
        assert_eq!(std::fs::read_to_string(main).expect("ref"), COMMIT, "{what}");
        assert_eq!(below(cache.path()), [sha256(&file).as_str(), "m-Q4_K_M.gguf", "main"], "{what}");
        // It is there now: nothing is fetched again.
        let n = server.seen().len();
        server.hub(cache.path(), None).pull(&wanted(REPO)).expect("again");
        assert_eq!(server.seen().len(), n + 1, "{what}");
    }
}

#[test]
fn an_interrupted_download_goes_on_where_it_ended() {
    let cache = tempfile::tempdir().expect("temporary folder");
    let (server, file) = one_file(|n, request, out, body| match n {
        0..4 => cut(request, body, 400_000, out),
        _ => serve(request, body, out),
    });
    let hub = server.hub(cache.path(), None);
    let error = hub.pull(&wanted(REPO)).expect_err("four cuts in a row");
    assert!(crate::out::chain(&error).contains("failed 4 times"), "{error:#}");
    assert_eq!(std::fs::read(hub.pull(&wanted(REPO)).expect("the rest")).expect("read"), file);
    let last = server.seen().pop().expect("a request");
    assert_eq!(last.headers.get("range").map(String::as_str), Some("bytes=1600000-"));
}

#[test]
fn a_hub_that_is_not_there_is_named() {
    let (server, _) = one_file(|_, request, out, body| serve(request, body, out));
    let cache = tempfile::tempdir().expect("temporary folder");
    let hub = server.hub(cache.path(), None);
    // A port that was just given back.
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port();
    let origin = Origin::parse(&format!("http://127.0.0.1:{port}")).expect("origin");
    let patience = Patience { tries: 2, wait: Duration::from_millis(1), silence: Duration::from_secs(1) };
    let client = Client::new(origin, None, patience).expect("client");
    let error = Hub { client, ..hub }.pull(&wanted(REPO)).expect_err("nothing is there");
    let said = crate::out::chain(&error);
    assert!(said.contains(&format!("cannot reach 127.0.0.1:{port} (HF_ENDPOINT names another hub)")), "{said}");
}

#[test]
fn a_hub_that_lies_gets_nothing_into_the_cache() {
    type Lie = fn(usize, &Seen, &mut TcpStream, &[u8]);
    let lies: [(&str, Lie, &str); 7] = [
        (
            "wrong bytes",
            |_, request, out, body| {
                let mut other = body.to_vec();
                other[1_000_000] ^= 1;
                serve(request, &other, out);
            },
            "its hash is",
        ),
        ("too long", |_, request, out, body| serve(request, &[body, b"more"].concat(), out), "announced"),
        ("too short", |_, request, out, body| serve(request, &body[..2_000_000], out), "announced"),
        (
            "endless",
            |_, _, out, body| {
                // Without a length, as long as the other side listens.
                let _ = out.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
                while out.write_all(body).is_ok() {}
            },
            "longer than",
        ),
        (
            "a circle",
            |_, request, out, _| send(out, "302 Found", &[("Location", request.path.clone())], b""),
            "on and on",
        ),
        ("nowhere", |_, _, out, _| send(out, "302 Found", &[], b""), "does not say where"),
        (
            "forever busy",
            |_, _, out, _| send(out, "429 Too Many Requests", &[("Retry-After", "100000".into())], b""),
            "100000 seconds",
        ),
    ];
    for (what, lie, part) in lies {
        let cache = tempfile::tempdir().expect("temporary folder");
        let (server, file) = one_file(lie);
        let error = server.hub(cache.path(), None).pull(&wanted(REPO)).expect_err(what);
        let said = crate::out::chain(&error);
        assert!(said.contains(part) && said.starts_with("failed to fetch m-Q4_K_M.gguf"), "{what}: {said}");
        let left: Vec<String> = below(cache.path()).into_iter().filter(|name| !name.ends_with(".incomplete")).collect();
        assert!(left.is_empty(), "{what}: {left:?}");
        let part = cache.path().join("models--org--model-GGUF/blobs").join(format!("{}.incomplete", sha256(&file)));
        let len = std::fs::metadata(part).map_or(0, |meta| meta.len());
        assert!(len <= file.len() as u64, "{what}: {len} bytes");
    }
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let file = body(5000);
    let (sent, listing) = (file.clone(), describe(&[("m.gguf", &file)]));
    let other = Server::start(move |_, request, out| serve(request, &sent, out));
    let port = other.port;
    let hub = Server::start(move |_, request, out| match request.path.as_str() {
        path if path.starts_with("/api/") => {
            send(out, "200 OK", &[("Content-Length", listing.len().to_string())], listing.as_bytes())
        }
        path if path.starts_with("/here") => {
            send(out, "302 Found", &[("Location", format!("http://127.0.0.1:{port}/blob"))], b"")
        }
        _ => send(out, "307 Temporary Redirect", &[("Location", "/here".into())], b""),
    });
    let cache = tempfile::tempdir().expect("temporary folder");
    let path = hub.hub(cache.path(), Some("hf_secret")).pull(&wanted(REPO)).expect("pull");
    assert_eq!(std::fs::read(path).expect("read"), file);
    let token = |seen: &Seen| seen.headers.get("authorization").cloned();
    assert!(hub.seen().iter().all(|seen| token(seen).as_deref() == Some("Bearer hf_secret") && seen.port == hub.port));
    assert_eq!(hub.seen().len(), 3);
    assert_eq!(other.seen().iter().map(token).collect::<Vec<_>>(), [None]);
    // Nobody on the way may read it.
    let open = Origin::parse("http://hub.example").expect("origin");
    assert!(Client::new(open, Some("hf_secret".into()), Patience::default()).is_err());
}

#[test]
fn names_cannot_leave_the_cache() {
    for path in
        ["../x", "/etc/passwd", "a/../../x", "a//b", "", ".", "a\\b", "C:x", "a/\u{0}b", "a\nb", "1/2/3/4/5/6/7/8/9"]
            .into_iter()
            .chain(["-rf", "a/-b", "a\u{202e}b", "a\u{2028}b", "a\u{e0041}", "a\u{1b}b"])
    {
        assert!(!cache::is_plain(path), "{path:?}");
    }
    assert!(cache::is_plain("Q4_K_M/model-00001-of-00002.gguf"));
    for name in [
        "model",
        "org/../x",
        "a/b/c",
        "../b",
        "org/mo del",
        "org/x:../y",
        "org/.x",
        "org/a--b/c",
        "https://example.com/a/b",
        "https://example.com/a/resolve/main/x.gguf",
        "https://huggingface.co/a/b/resolve/main/../../x.gguf",
        "https://huggingface.co/a/b/resolve/../x.gguf",
        "org/model:a/b",
    ] {
        assert!(Wanted::parse(name, "main").is_err(), "{name}");
    }
    assert!(Wanted::parse("org/model", "../../main").is_err());
    let good = "a".repeat(64);
    let sibling =
        |name: &str, hash: &str| serde_json::json!({"rfilename": name, "size": 1, "lfs": {"sha256": hash, "size": 1}});
    let raw = serde_json::json!({"sha": COMMIT, "siblings": [
        sibling("../../evil.gguf", &good), sibling("evil.gguf", "../../../x"), sibling("good.gguf", &good),
    ]});
    let listing = listing(&raw.to_string()).expect("listing");
    assert_eq!(listing.files.iter().map(|file| file.path.as_str()).collect::<Vec<_>>(), ["good.gguf"]);
    for raw in
        ["", "{}", "[]", r#"{"sha": "../..", "siblings": []}"#, &format!(r#"{{"sha": "{COMMIT}", "siblings": []}}"#)]
    {
        assert!(super::listing(raw).is_err(), "{raw}");
    }
}

/// Others who can write to the cache get nothing outside of it written, and nothing waited for.
#[cfg(unix)]
#[test]
fn links_and_pipes_in_the_cache_lead_nowhere() {
    let (server, file) = one_file(|_, request, out, body| serve(request, body, out));
    let (name, hash) = ("models--org--model-GGUF", sha256(&file));
    let (lock, part) = (format!(".locks/{name}/{hash}.lock"), format!("{name}/blobs/{hash}.incomplete"));
    let (main, commit) = (format!("{name}/refs/main"), format!("{name}/snapshots/{COMMIT}"));
    let files = [&lock, &part, &main, &format!("{name}/blobs/{hash}")].map(|place| (place.clone(), false));
    let folders = [&commit, &format!("{name}/blobs"), &format!("{name}/refs"), &format!(".locks/{name}")];
    for (place, is_folder) in files.into_iter().chain(folders.map(|place| (place.clone(), true))) {
        for is_pipe in [false, true] {
            let (cache, outside) = (tempfile::tempdir().expect("folder"), tempfile::tempdir().expect("folder"));
            let precious = outside.path().join("precious");
            std::fs::write(&precious, &file[..1000]).expect("a file");
            let place = cache.path().join(&place);
            std::fs::create_dir_all(place.parent().expect("a folder")).expect("a folder");
            let target = if is_folder { outside.path() } else { &precious };
            match is_pipe {
                true => assert!(std::process::Command::new("mkfifo").arg(&place).status().expect("start").success()),
                false => std::os::unix::fs::symlink(target, &place).expect("a link"),
            }
            let fetched = server.hub(cache.path(), None).pull(&wanted(&format!("{REPO}:Q4_K_M")));
            if let Ok(path) = fetched {
                assert_eq!(std::fs::read(path).expect("a file"), file, "{}", place.display());
            }
            assert_eq!(std::fs::read(&precious).expect("a file"), &file[..1000], "{}", place.display());
            assert_eq!(below(outside.path()), ["precious"], "{}", place.display());
        }
    }
}

#[test]
fn what_a_name_means() {
    let file = |path: &str, size: u64| File { path: path.into(), size, hash: Hash::Sha256("a".repeat(64)) };
    let all =
        |paths: &[&str]| Listing { commit: COMMIT.into(), files: paths.iter().map(|path| file(path, 1)).collect() };
    let gguf = all(&[
        "README.md",
        "m-Q4_K_M.gguf",
        "m-Q8_0.gguf",
        "mmproj-F16.gguf",
        "BF16/m-BF16-00002-of-00002.gguf",
        "BF16/m-BF16-00001-of-00002.gguf",
        "UD/m-UD-Q2_K_XL.gguf",
        "lost-F32-00001-of-00002.gguf",
    ]);
    let mlx = all(&[
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "original/x.safetensors",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "2_Dense/pytorch_model.bin",
        "README.md",
        "chat_template.jinja",
    ]);
    let chosen = |listing: &Listing, name: &str| -> Result<Vec<String>, String> {
        let files = choose::files(listing, &wanted(name)).map_err(|error| error.to_string())?;
        Ok(files.iter().map(|file| file.path.clone()).collect())
    };
    for (name, paths) in [
        ("a/b", &["m-Q4_K_M.gguf"][..]),
        ("a/b:q8_0", &["m-Q8_0.gguf"]),
        ("hf:a/b:Q4_K_M", &["m-Q4_K_M.gguf"]),
        ("https://huggingface.co/a/b:bf16", &["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
        ("a/b:UD-Q2_K_XL", &["UD/m-UD-Q2_K_XL.gguf"]),
        ("https://huggingface.co/a/b/resolve/main/m-Q8_0.gguf?download=true", &["m-Q8_0.gguf"]),
        ("https://hf.co/a/b/blob/main/UD/m-UD-Q2_K_XL.gguf", &["UD/m-UD-Q2_K_XL.gguf"]),
        (
            "hf.co/a/b/blob/main/BF16/m-BF16-00001-of-00002.gguf",
            &["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"],
        ),
        ("https://huggingface.co/a/b/tree/main", &["m-Q4_K_M.gguf"]),
    ] {
        assert_eq!(chosen(&gguf, name).expect(name), paths, "{name}");
    }
    assert!(chosen(&gguf, "a/b:Q5_K_M").expect_err("none").contains("there are BF16"));
    assert_eq!(wanted("https://huggingface.co/a/b/resolve/v2/m-Q8_0.gguf").revision, "v2");
    assert!(chosen(&gguf, "https://hf.co/a/b/blob/main/x.gguf").expect_err("none").contains("it has no file x.gguf"));
    assert!(chosen(&gguf, "a/b:Q").expect_err("several").contains("several files"));
    assert!(chosen(&gguf, "a/b:F32").expect_err("a part").contains("in 2 parts"));
    // However many types there are, the line can be read.
    let names: Vec<String> = (0..5000).map(|i| format!("m{i}-X{i}_Y.gguf")).collect();
    let many = all(&names.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(chosen(&many, "a/b:Q4_0").expect_err("none").len() < 2000);
    assert_eq!(
        chosen(&mlx, "a/b").expect("folder"),
        [
            "chat_template.jinja",
            "config.json",
            "model.safetensors.index.json",
            "tokenizer.json",
            "1_Pooling/config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "2_Dense/model.safetensors"
        ]
    );
    assert!(chosen(&all(&["README.md", "config.json"]), "a/b").expect_err("nothing").contains("neither"));
}

#[test]
fn a_folder_of_safetensors_opens_where_it_was_put() {
    let weights = body(2000);
    let files: Vec<(&str, Vec<u8>)> = vec![
        ("config.json", b"{}".to_vec()),
        ("1_Pooling/config.json", b"{ }".to_vec()),
        ("model.safetensors", weights),
    ];
    let described: Vec<(&str, &[u8])> = files.iter().map(|(name, body)| (*name, body.as_slice())).collect();
    let listing = describe(&described);
    let bodies: HashMap<String, Vec<u8>> = files.iter().map(|(name, body)| (name.to_string(), body.clone())).collect();
    let server = Server::start(move |_, request, out| {
        match request.path.split_once(COMMIT).and_then(|(_, n)| bodies.get(&n[1..])) {
            Some(body) => serve(request, body, out),
            None => send(out, "200 OK", &[("Content-Length", listing.len().to_string())], listing.as_bytes()),
        }
    });
    let cache = tempfile::tempdir().expect("temporary folder");
    let path = server.hub(cache.path(), None).pull(&wanted("org/model")).expect("pull");
    for (name, body) in &files {
        assert_eq!(std::fs::read(path.join(name)).expect("read"), *body, "{name}");
    }
    assert!(path.ends_with(COMMIT));
    // Without the network only what is there can be had.
    let mut hub = server.hub(cache.path(), None);
    hub.offline = true;
    let said = hub.pull(&wanted("org/other")).expect_err("offline").to_string();
    assert!(said.contains("HF_HUB_OFFLINE"), "{said}");
}

#[test]
fn a_disk_that_is_too_small_is_told_before() {
    let raw = serde_json::json!({"sha": COMMIT, "siblings": [
        {"rfilename": "m.gguf", "size": 1u64 << 60, "lfs": {"sha256": "a".repeat(64), "size": 1u64 << 60}},
    ]});
    let listing = raw.to_string();
    let server = Server::start(move |_, _, out| {
        send(out, "200 OK", &[("Content-Length", listing.len().to_string())], listing.as_bytes())
    });
    let cache = tempfile::tempdir().expect("temporary folder");
    let said = server.hub(cache.path(), None).pull(&wanted(REPO)).expect_err("too large").to_string();
    assert!(said.contains("free") || cfg!(not(unix)), "{said}");
    assert_eq!(server.seen().len(), 1);
}
