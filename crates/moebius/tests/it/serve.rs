//! The server as a process: real connections, signals, keys from a file. What its routes say is tested in process.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const JSON: &str = "Content-Type: application/json\r\n";
const HELLO: &str = "{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 2}";

/// A running server on a port of its own.
pub struct Server {
    child: Child,
    out: BufReader<ChildStdout>,
    address: String,
}

impl Server {
    fn start(more: &[&str]) -> Server {
        Server::start_as(Command::new(env!("CARGO_BIN_EXE_moebius")), more, Stdio::null())
    }

    /// A server that writes its log to `log`, started by a command that may be a shell around it.
    pub fn start_as(mut command: Command, more: &[&str], log: Stdio) -> Server {
        let unless =
            |flag: &str, default: [&'static str; 2]| if more.contains(&flag) { vec![] } else { default.to_vec() };
        let mut child = command
            .env("MOEBIUS_CONFIG", "")
            .env("MOEBIUS_BACKEND", "cpu")
            .args(["serve", "--port", "0", "--parallel", "2", "-t", "1"])
            .args(unless("--max-queue", ["--max-queue", "4"]))
            .args(unless("--ctx", ["--ctx", "512"]))
            .args(more)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("start moebius");
        let mut out = BufReader::new(child.stdout.take().expect("stdout"));
        let mut line = String::new();
        out.read_line(&mut line).expect("a line");
        let address = line.trim().rsplit_once("http://").expect("an address").1.to_string();
        Server { child, out, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("timeout");
        stream
    }

    /// Sends bytes over a connection of its own and reads until it is closed.
    fn raw(&self, bytes: &str) -> String {
        let mut stream = self.connect();
        // A server that refuses early closes its end: what it says is what the test looks at.
        let _ = stream.write_all(bytes.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn get(&self, path: &str, headers: &str) -> String {
        self.raw(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"))
    }

    /// Posts JSON and reads the whole answer.
    pub fn post(&self, path: &str, body: &str) -> String {
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{JSON}");
        self.raw(&format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()))
    }

    /// Whether an ordinary request is answered.
    fn is_well(&self) -> bool {
        self.post("/v1/chat/completions", HELLO).starts_with("HTTP/1.1 200")
    }

    /// Resident memory in megabytes.
    #[cfg(target_os = "linux")]
    fn memory_mb(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("status");
        let row = status.lines().find(|row| row.starts_with("VmRSS:")).expect("VmRSS");
        row.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).expect("a number") / 1000
    }

    /// Opens a streamed answer and reads until its first text has come.
    fn stream(&self, max_tokens: usize) -> BufReader<TcpStream> {
        let body = format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"Go on\"}}], \"stream\": true, \"ignore_eos\": true, \
             \"max_tokens\": {max_tokens}}}"
        );
        let mut stream = self.connect();
        write!(
            stream,
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .expect("send");
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        while !line.contains("\"content\":\"") || line.contains("\"role\"") {
            line.clear();
            assert!(stream.read_line(&mut line).expect("a line") > 0, "the stream ended early");
        }
        stream
    }

    fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics", "");
        let row = text.lines().find(|row| row.starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"));
        row.rsplit_once(' ').and_then(|(_, n)| n.trim().parse().ok()).expect("a number")
    }

    /// Tells it to stop.
    #[cfg(unix)]
    pub fn terminate(&self) {
        let told = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().expect("kill");
        assert!(told.success());
    }

    /// Waits for the process to end by itself.
    pub fn exit(&mut self) -> std::process::ExitStatus {
        let start = Instant::now();
        loop {
            match self.child.try_wait().expect("wait") {
                Some(status) => return status,
                None if start.elapsed() > Duration::from_secs(120) => panic!("the server does not end"),
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn it_says_where_it_is_and_answers_there() {
    let mut server = Server::start(&["--alias", "tale"]);
    let mut lines = String::new();
    while !lines.contains("curl") {
        server.out.read_line(&mut lines).expect("a line");
    }
    assert!(lines.contains("parameters") && lines.contains(&server.address), "{lines}");
    assert!(server.get("/v1/models", "").contains("\"id\":\"tale\""));
    // Two requests over one connection.
    let twice = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    assert_eq!(server.raw(twice).matches("HTTP/1.1 200 OK").count(), 2);
}

#[test]
fn heads_and_bodies_have_limits() {
    let server = Server::start(&[]);
    let head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    let many: String = (0..200).map(|i| format!("x-{i}: y\r\n")).collect();
    let cases = [
        ("garbage\r\n\r\n".to_string(), "400"),
        (format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n"), "431"),
        (format!("{head}Content-Length: 99999999999\r\nConnection: close\r\n\r\n"), "413"),
        (format!("{head}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}"), "400"),
    ];
    for (bytes, status) in cases {
        let answer = server.raw(&bytes);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{:.80}: {answer:.200}", bytes);
    }
    assert!(server.get("/health", "").starts_with("HTTP/1.1 200"));
}

#[test]
fn a_closed_connection_ends_its_answer() {
    let server = Server::start(&[]);
    let stream = server.stream(480);
    drop(stream);
    let start = Instant::now();
    while server.metric("moebius_cancelled_total") < 1.0 || server.metric("moebius_kv_pages{state=\"used\"") > 0.0 {
        assert!(start.elapsed() < Duration::from_secs(60), "it still runs");
    }
    // What was computed for it counts.
    assert!(server.metric("moebius_generated_tokens_total") >= 1.0);
    assert!(server.metric("moebius_prompt_tokens_total") >= 1.0);
}

#[test]
fn keys_and_origins_come_from_the_command_line() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("keys");
    std::fs::write(&file, "# ours\nsecret\n").expect("write");
    let server = Server::start(&["--api-key-file", file.to_str().expect("path"), "--cors", "http://page.example"]);
    for (headers, status) in [
        ("", "401"),
        ("Authorization: Bearer secret\r\n", "200"),
        ("x-api-key: secret\r\n", "200"),
        ("x-api-key: no\r\n", "401"),
    ] {
        let answer = server.get("/v1/models", headers);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{headers}: {answer}");
    }
    let allow = "access-control-allow-origin: http://page.example";
    let health = |origin: &str| server.get("/health", &format!("Origin: {origin}\r\n")).to_lowercase();
    assert!(health("http://page.example").contains(allow));
    assert!(!health("http://other.example").contains("access-control-allow-origin: http://other"));
    // Another file counts without a restart, unless it holds no key.
    let ask = |key: &str| server.get("/v1/models", &format!("x-api-key: {key}\r\n"));
    let opens = |key: &str| ask(key).starts_with("HTTP/1.1 200");
    for (text, key) in [("secret\nsecond # Alice", "second"), ("third\n", "third"), ("# none\n", "third")] {
        std::fs::write(&file, text).expect("write");
        let start = Instant::now();
        while !opens(key) {
            assert!(start.elapsed() < Duration::from_secs(30), "{key}: {}", ask(key));
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    assert!(!opens("secret") && !opens("second"));
    std::thread::sleep(Duration::from_millis(1500));
    assert!(opens("third") && !opens(""), "a file without keys opens nothing");
    let missing = Command::new(env!("CARGO_BIN_EXE_moebius")).args(["serve", "--api-key-file", "/nowhere"]).output();
    let missing = missing.expect("run moebius");
    assert!(!missing.status.success() && String::from_utf8_lossy(&missing.stderr).contains("read keys from /nowhere"));
}

#[cfg(unix)]
#[test]
fn running_answers_finish_when_it_is_told_to_stop() {
    // Under nohup a server outlives its terminal, and this test cannot hang up.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    let hang_up = ignored.filter(|ignored| ignored & 1 == 0).map(|_| "-HUP");
    for signal in ["-TERM"].into_iter().chain(hang_up) {
        let mut server = Server::start(&[]);
        let mut stream = server.stream(60);
        let told = Command::new("kill").args([signal, &server.child.id().to_string()]).status().expect("kill");
        assert!(told.success());
        let mut rest = String::new();
        stream.read_to_string(&mut rest).expect("the rest of the stream");
        assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("[DONE]"), "{signal}: {rest}");
        assert!(server.exit().success());
    }
}

/// Rules that take a while to compile wait for each other, and no chat without a rule waits for them.
#[test]
fn forms_do_not_hold_up_chats() {
    let server = Server::start(&["--max-queue", "16"]);
    let post = |more: &str| {
        let body = format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"Hi\"}}], \"max_tokens\": 1{more}}}");
        let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n";
        server.raw(&format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()))
    };
    // Makes what is made once.
    assert!(post(", \"regex\": \"[a-z]\"").starts_with("HTTP/1.1 200"));
    let done = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for i in 0..8 {
            let (post, done) = (&post, &done);
            scope.spawn(move || {
                let schema = format!("{{\"type\": \"integer\", \"multipleOf\": {}}}", 24_989 - i);
                let format = format!("{{\"type\": \"json_schema\", \"json_schema\": {{\"schema\": {schema}}}}}");
                let answer = post(&format!(", \"response_format\": {format}"));
                done.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                assert!(answer.starts_with("HTTP/1.1 200") || answer.starts_with("HTTP/1.1 400"), "{answer}");
            });
        }
        std::thread::sleep(Duration::from_millis(100));
        assert!(post("").starts_with("HTTP/1.1 200"));
        let before = done.load(std::sync::atomic::Ordering::SeqCst);
        assert!(before <= 4, "{before} of 8 rules were compiled before the chat without one was answered");
    });
}

/// What a client sends and how it reads must not decide whether others are answered.
#[test]
fn slow_bodies_hold_no_room() {
    let server = Server::start(&[]);
    let head = format!("POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 8388608\r\n\r\n");
    let slow: Vec<TcpStream> = (0..40)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(format!("{head}{{\"x\": \"").as_bytes()).expect("send");
            stream
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    assert!(server.is_well());
    let megabyte = format!("{{\"content\": \"a\", \"x\": \"{}\"}}", "y".repeat(1 << 20));
    assert!(server.post("/tokenize", &megabyte).starts_with("HTTP/1.1 200"));
    // They are cut when they are slower than anyone needs to be.
    let start = Instant::now();
    for mut stream in slow {
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    }
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
}

#[test]
fn heads_must_be_clear_and_ours() {
    let server = Server::start(&["--allowed-host", "model.example"]);
    let get = |fields: &str| server.raw(&format!("GET /health HTTP/1.1\r\nConnection: close\r\n{fields}\r\n"));
    let method = "M".repeat(50_000);
    for (answer, status) in [
        (get("Host: localhost\r\n"), "200"),
        (get("Host: model.example\r\n"), "200"),
        (get("Host: evil.example\r\n"), "403"),
        (get("Host: localhost\r\nOrigin: http://evil.example\r\n"), "403"),
        (get(""), "400"),
        (get("Host: localhost\r\nHost: localhost\r\n"), "400"),
        (get("Host: localhost\r\nTransfer-Encoding: gzip, chunked\r\n"), "501"),
        (server.raw(&format!("{method} / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")), "501"),
        (server.raw("GET /health HTTP/1.0\r\n\r\n"), "200"),
    ] {
        assert!(answer.contains(&format!(" {status} ")) && answer.len() < 2000, "{status}: {answer:.300}");
    }
}

#[test]
fn a_refusal_reaches_a_client_that_is_still_sending() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("keys");
    std::fs::write(&file, "\u{feff}secret\n").expect("write");
    let server = Server::start(&["--api-key-file", file.to_str().expect("path")]);
    assert!(server.get("/v1/models", "x-api-key: secret\r\n").starts_with("HTTP/1.1 200"));
    let body = "x".repeat(8 << 20);
    for _ in 0..4 {
        let mut stream = server.connect();
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{JSON}");
        write!(stream, "{head}Content-Length: {}\r\n\r\n", body.len()).expect("send");
        stream.write_all(body.as_bytes()).expect("the server reads what it refused");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer, not a reset");
        assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
    }
}

#[test]
fn a_client_that_has_said_all_gets_its_answer() {
    let server = Server::start(&[]);
    for more in ["", ", \"stream\": true"] {
        let body = HELLO.replace("}]", &format!("}}]{more}")).replace("\"max_tokens\": 2", "\"max_tokens\": 300");
        let body = body.replace("}]", "}], \"ignore_eos\": true");
        let mut stream = server.connect();
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}");
        write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).expect("send");
        stream.shutdown(std::net::Shutdown::Write).expect("shut down");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        assert!(answer.contains("HTTP/1.1 200 OK") && answer.contains("\"length\""), "{answer}");
    }
    // One that is gone is noticed, also where nothing is sent before the answer is whole.
    let before = server.metric("moebius_cancelled_total");
    for more in ["", ", \"stream\": true"] {
        let body = HELLO.replace("\"max_tokens\": 2", "\"max_tokens\": 500, \"ignore_eos\": true, \"n\": 6");
        let body = body.replace("}]", &format!("}}]{more}"));
        let mut stream = server.connect();
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}");
        write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).expect("send");
        std::thread::sleep(Duration::from_millis(50));
    }
    let start = Instant::now();
    while server.metric("moebius_cancelled_total") < before + 4.0
        || server.metric("moebius_kv_pages{state=\"used\"") > 0.0
    {
        assert!(start.elapsed() < Duration::from_secs(60), "they still run");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_or_stuck_log_holds_up_nobody() {
    let full = || std::fs::File::options().write(true).open("/dev/full").expect("/dev/full");
    // A pipe that nobody reads.
    let (reader, writer) = std::io::pipe().expect("pipe");
    for log in [Stdio::from(full()), Stdio::from(writer)] {
        let mut server = Server::start_as(Command::new(env!("CARGO_BIN_EXE_moebius")), &["--log-level", "debug"], log);
        // More lines than a pipe holds.
        let path = format!("/{}", "x".repeat(150));
        for _ in 0..600 {
            let answer = server.get(&path, "");
            assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
        }
        assert!(server.is_well());
        let told = Command::new("kill").args(["-TERM", &server.child.id().to_string()]).status().expect("kill");
        assert!(told.success());
        assert_eq!(server.exit().code(), Some(0));
    }
    drop(reader);
}

#[cfg(unix)]
#[test]
fn the_log_says_why_and_cannot_be_dressed_up() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("log");
    let log = std::fs::File::create(&path).expect("create");
    let mut server = Server::start_as(Command::new(env!("CARGO_BIN_EXE_moebius")), &[], Stdio::from(log));
    server.raw("GET /a\u{202e}b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    server.raw(&format!("{} /m HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", "M".repeat(5000)));
    server.post("/v1/completions", "{\"prompt\": \"my secret\", \"temperature\": \"secret\"}");
    let told = Command::new("kill").args(["-TERM", &server.child.id().to_string()]).status().expect("kill");
    assert!(told.success() && server.exit().success());
    let text = std::fs::read_to_string(&path).expect("the log");
    assert!(text.contains("path=/a\\u{202e}b") && !text.contains('\u{202e}'), "{text}");
    assert!(text.lines().all(|line| line.len() < 1000), "{text}");
    let why = text.lines().find(|line| line.contains("/v1/completions")).expect("a line");
    assert!(why.contains("`temperature` must be a number") && !text.contains("secret"), "{why}");
}

/// Lines say who asked; what is asked again and again is told at debug alone, and answers that are never read count.
#[cfg(unix)]
#[test]
fn the_log_says_who_asked() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (path, keys) = (folder.path().join("log"), folder.path().join("keys"));
    std::fs::write(&keys, "secret # Alice\n").expect("write");
    let log = std::fs::File::create(&path).expect("create");
    let args = ["--api-key-file", keys.to_str().expect("path"), "--log-format", "json"];
    let mut server = Server::start_as(Command::new(env!("CARGO_BIN_EXE_moebius")), &args, Stdio::from(log));
    let key = "Authorization: Bearer secret\r\n";
    for path in ["/health", "/ready", "/metrics", "/", "/page/app.js"] {
        assert!(server.get(path, key).starts_with("HTTP/1.1 200"), "{path}");
    }
    assert!(server.get("/metrics", "").starts_with("HTTP/1.1 401"));
    let body = r#"{"prompt": "Once", "max_tokens": 400, "ignore_eos": true, "stream": true}"#;
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    let mut stream = server.connect();
    write!(stream, "{head}{key}Content-Length: {}\r\n\r\n{body}", body.len()).expect("send");
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while !line.contains("\"text\":") {
        line.clear();
        assert!(stream.read_line(&mut line).expect("a line") > 0, "the stream ended early");
    }
    drop(stream);
    let start = Instant::now();
    let finished = loop {
        let text = std::fs::read_to_string(&path).expect("the log");
        if let Some(line) = text.lines().find(|line| line.contains("\"finished\"")) {
            break serde_json::from_str::<serde_json::Value>(line).expect("JSON");
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{text}");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!((&finished["cancelled"], &finished["key"]), (&1.into(), &"Alice".into()), "{finished}");
    assert_eq!((&finished["client"], &finished["model"]), (&"127.0.0.1".into(), &"fable-29m-a10m".into()));
    assert!(finished["generated"].as_u64() > Some(0) && finished["prompt"].as_u64() > Some(0), "{finished}");
    server.terminate();
    assert!(server.exit().success());
    let text = std::fs::read_to_string(&path).expect("the log");
    let answered: Vec<&str> = text.lines().filter(|line| line.contains("\"answered\"")).collect();
    assert_eq!(answered.len(), 2, "{text}");
    assert!(answered[0].contains("/metrics") && answered[0].contains("401") && !answered[0].contains("\"key\""));
    assert!(answered[1].contains("\"key\":\"Alice\"") && answered[1].contains("\"client\":\"127.0.0.1\""));
    assert!(!text.contains("secret"), "{text}");
}

/// A server for all networks says what to type into a browser, and who reads that what its context is of.
#[test]
fn the_banner_says_where_to_go() {
    let mut server = Server::start(&["--host", "0.0.0.0", "--ctx", "256"]);
    let mut lines = String::new();
    while !lines.contains("curl") {
        assert!(server.out.read_line(&mut lines).expect("a line") > 0);
    }
    let port = server.address.rsplit_once(':').expect("a port").1;
    assert!(lines.contains(&format!("http://127.0.0.1:{port}/ in a browser")), "{lines}");
    assert!(lines.contains("context 256 of 1024 trained; -c sets it"), "{lines}");
    assert!(!lines.contains("0.0.0.0"), "{lines}");
}

/// Where connections run out, the oldest idle one makes room.
#[cfg(target_os = "linux")]
#[test]
fn idle_connections_make_room() {
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -n 64; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_moebius")]);
    let server = Server::start_as(shell, &[], Stdio::null());
    let idle: Vec<TcpStream> = (0..100).map(|_| server.connect()).collect();
    let start = Instant::now();
    assert!(server.is_well());
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    drop(idle);
}

/// Connections without a request leave open files to what loads models and tries grammars.
#[cfg(target_os = "linux")]
#[test]
fn idle_connections_leave_files_to_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf");
    for name in ["a.gguf", "b.gguf"] {
        std::os::unix::fs::symlink(model, folder.path().join(name)).expect("a link");
    }
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -n 128; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_moebius")]);
    let server = Server::start_as(shell, &["--models", folder.path().to_str().expect("a path")], Stdio::null());
    let idle: Vec<TcpStream> = (0..300).map(|_| server.connect()).collect();
    for name in ["a", "b"] {
        for rule in ["\"regex\": \"[a-z]+\"", "\"grammar\": \"root ::= [a-z]+\"", "\"seed\": 1"] {
            let body = format!("{{\"model\": \"{name}\", \"prompt\": \"a\", \"max_tokens\": 3, {rule}}}");
            let answer = server.post("/v1/completions", &body);
            assert!(answer.starts_with("HTTP/1.1 200"), "{name} {rule}: {answer}");
        }
    }
    drop(idle);
}

/// After requests that take what they can, the process is nearly as small as before.
#[cfg(target_os = "linux")]
#[test]
fn memory_is_bounded_and_given_back() {
    let server = Server::start(&["--ctx", "1024"]);
    for _ in 0..4 {
        assert!(server.is_well());
    }
    let idle = server.memory_mb();
    let objects = "{\"\":0},".repeat(1_180_000);
    let skipped = format!("{{\"x\": [{objects}0], {}", &HELLO[1..]);
    let built = format!("{{\"tools\": [{objects}0], {}", &HELLO[1..]);
    let text = format!("{{\"content\": \"{}\"}}", "a fox ".repeat(1_300_000));
    let numbers = HELLO
        .replace("\"max_tokens\": 2", "\"max_tokens\": 900, \"ignore_eos\": true, \"n\": 2")
        .replace("}]", "}], \"logprobs\": true, \"top_logprobs\": 20");
    let peak = std::sync::atomic::AtomicU64::new(0);
    let families: [(&str, &str, usize); 4] = [
        ("/v1/chat/completions", &skipped, 12),
        ("/v1/chat/completions", &built, 12),
        ("/tokenize", &text, 6),
        ("/v1/chat/completions", &numbers, 2),
    ];
    for (path, body, n) in families {
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let posts: Vec<_> = (0..n).map(|_| scope.spawn(|| server.post(path, body))).collect();
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    peak.fetch_max(server.memory_mb(), std::sync::atomic::Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            for post in posts {
                let answer = post.join().expect("an answer");
                let status = answer.split(' ').nth(1).unwrap_or_default().to_string();
                assert!(["200", "400", "429"].contains(&&*status), "{answer:.200}");
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        let start = Instant::now();
        while server.memory_mb() > idle + 100 {
            let now = server.memory_mb();
            assert!(start.elapsed() < Duration::from_secs(20), "{path}: {now} MB stay of {idle} before");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    let peak = peak.into_inner();
    assert!(peak < idle + 700, "{peak} MB at most, {idle} before");
    assert!(server.is_well());
}

/// What the numbers of an answer would take is counted before they are computed.
#[test]
fn numbers_without_end_are_refused() {
    let server = Server::start(&["--ctx", "8192", "--max-queue", "64"]);
    let body = HELLO.replace("\"max_tokens\": 2", "\"n\": 32, \"logprobs\": true, \"top_logprobs\": 20");
    let answer = server.post("/v1/chat/completions", &body);
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("32 answers each"), "{answer}");
    assert!(
        server.post("/v1/chat/completions", &body.replace("32", "1, \"max_tokens\": 4")).starts_with("HTTP/1.1 200")
    );
}

#[test]
fn health_is_asked_of_the_server_that_runs() {
    let server = Server::start(&[]);
    let (_, port) = server.address.rsplit_once(':').expect("a port");
    let ask = |more: &[&str], port: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
        command.env("MOEBIUS_CONFIG", "").env("MOEBIUS_HOST", "0.0.0.0").args(["health", "--port", port]).args(more);
        command.output().expect("run")
    };
    for url in [format!("http://localhost:{port}/"), format!("127.0.0.1:{port}")] {
        let output = ask(&[&url], "1");
        assert!(output.status.success() && output.stdout.starts_with(b"{\"status\":\"ok\""), "{output:?}");
    }
    for (url, said) in [("https://localhost", "TLS is not spoken"), ("8080", "is no address of a server")] {
        let output = ask(&[url], port);
        assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains(said), "{output:?}");
    }
    for more in [&[][..], &["--ready"]] {
        let output = ask(more, port);
        assert!(output.status.success() && output.stdout.starts_with(b"{\"status\":\"ok\""), "{output:?}");
    }
    let port = port.to_string();
    drop(server);
    let output = ask(&[], &port);
    assert!(!output.status.success() && !output.stderr.is_empty(), "{output:?}");
}

/// systemd hears when the server is ready and when it stops, and may open the socket itself.
#[cfg(target_os = "linux")]
#[test]
fn systemd_is_told() {
    use std::os::unix::net::UnixDatagram;
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("bind");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
    let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
    command.env("NOTIFY_SOCKET", &path);
    let mut server = Server::start_as(command, &[], Stdio::null());
    let hear = || {
        let mut bytes = [0; 64];
        let n = socket.recv(&mut bytes).expect("a word");
        String::from_utf8_lossy(&bytes[..n]).into_owned()
    };
    assert_eq!(hear(), "READY=1");
    let told = Command::new("kill").args(["-TERM", &server.child.id().to_string()]).status().expect("kill");
    assert!(told.success());
    assert_eq!(hear(), "STOPPING=1");
    assert!(server.exit().success());
}

/// As systemd starts a service for a socket: descriptor 3 listens already.
#[cfg(target_os = "linux")]
#[test]
fn a_socket_can_be_handed_over() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address").to_string();
    let mut shell = Command::new("bash");
    // The listener is the shell's standard input, and descriptor 3 of what it becomes.
    shell.arg("-c").arg("exec 3<&0 0</dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$0\" \"$@\"");
    shell.arg(env!("CARGO_BIN_EXE_moebius")).stdin(Stdio::from(std::os::fd::OwnedFd::from(listener)));
    let server = Server::start_as(shell, &[], Stdio::null());
    assert_eq!(server.address, address);
    assert!(server.is_well());
}

/// What lm-eval's multiple choice rests on: a server's log-probabilities of a prompt are those of `moebius logits`.
#[test]
fn log_probabilities_of_prompts_are_those_of_the_logits() {
    let server = Server::start(&[]);
    let ids = [1u32, 40, 200, 7, 900, 33, 512, 64, 5, 77];
    let list = ids.map(|id| id.to_string()).join(",");
    let body =
        format!("{{\"prompt\": [{list}], \"max_tokens\": 1, \"echo\": true, \"logprobs\": 1, \"temperature\": 0}}");
    let answer = server.post("/v1/completions", &body);
    let (_, json) = answer.split_once("\r\n\r\n").expect("a body");
    let start = json.find('{').expect("an object");
    let end = json.rfind('}').expect("its end");
    let answer: serde_json::Value = serde_json::from_str(&json[start..=end]).expect("JSON");
    let told = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("numbers").clone();

    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("logits.safetensors");
    let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
    command.env("MOEBIUS_CONFIG", "").args(["logits", "--tokens", &list, "-o"]).arg(&file);
    assert!(command.status().expect("run").success());
    let bytes = std::fs::read(&file).expect("logits");
    let arrays = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let logits = arrays.tensor("logits").expect("the array");
    let n_vocab = logits.shape()[1];
    let row = |i: usize| -> Vec<f64> {
        let row = &logits.data()[i * n_vocab * 4..(i + 1) * n_vocab * 4];
        row.chunks_exact(4).map(|x| f64::from(f32::from_le_bytes([x[0], x[1], x[2], x[3]]))).collect()
    };
    for i in 1..ids.len() {
        let row = row(i - 1);
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        let expected = row[ids[i] as usize] - sum.ln();
        let got = told[i].as_f64().expect("a number");
        assert!((got - expected).abs() < 1e-4, "token {i}: {got} {expected}");
    }
}

/// Names of files reach a terminal, a log and a shell as what they are.
#[cfg(unix)]
#[test]
fn names_act_neither_on_a_terminal_nor_in_a_shell() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf");
    for name in ["a'$(touch PWNED)'`b`", "esc\u{1b}[31m\u{7}\nmoebius_fake 1", "\u{202e}x"] {
        std::os::unix::fs::symlink(model, folder.path().join(format!("{name}.gguf"))).expect("a link");
    }
    let path = folder.path().to_str().expect("a path");
    let hostile = format!("{path}/esc\u{1b}[31m\u{7}\nmoebius_fake 1.gguf");
    for args in [&["--models", path][..], &["-m", &hostile]] {
        let mut server = Server::start(args);
        assert!(server.address.starts_with("127.0.0.1:"), "{}", server.address);
        server.terminate();
        assert!(server.exit().success());
        let mut said = String::new();
        server.out.read_to_string(&mut said).expect("text");
        assert!(!said.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{said}");
        assert!(said.lines().all(|line| !line.starts_with("moebius_fake")), "{said}");
        let line = said.lines().find(|line| line.trim_start().starts_with("curl")).expect("an example");
        assert_eq!(line.matches('\'').count(), 2, "{line}");
    }
}

/// A second model of a name, a circle of links and a link to what is no model stop no server, and clients read nothing of
/// where the link leads.
#[cfg(unix)]
#[test]
fn folders_may_hold_what_is_no_model() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let (models, secret) = (at("models"), at("secret"));
    std::fs::create_dir_all(models.join("sub")).expect("folders");
    std::fs::write(&secret, "hunter2 is the word").expect("write");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf");
    for (to, name) in [(model, "a.gguf"), (model, "sub/a.gguf"), (".", "x"), (secret.to_str().expect("path"), "s.gguf")]
    {
        symlink(to, models.join(name)).expect("a link");
    }
    let server = Server::start(&["--models", models.to_str().expect("path")]);
    let list = server.get("/v1/models", "");
    assert_eq!(list.matches("\"object\":\"model\"").count(), 2, "{list}");
    for (name, status) in [("a", "200"), ("s", "500")] {
        let answer =
            server.post("/v1/chat/completions", &HELLO.replacen('{', &format!("{{\"model\": \"{name}\", "), 1));
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{name}: {answer}");
        assert!(!answer.contains("hunt") && !server.get("/v1/models", "").contains("hunt"), "{answer}");
    }
}

/// When the time to finish is over, every answer ends with a word about it.
#[cfg(unix)]
#[test]
fn answers_that_are_cut_off_say_so() {
    let mut server = Server::start(&["--ctx", "4096", "--max-queue", "32", "--drain-seconds", "1"]);
    let more = "\"max_tokens\": 3900, \"ignore_eos\": true";
    let body = |more: &str| HELLO.replace("\"max_tokens\": 2", more);
    let streamed = body(&format!("{more}, \"stream\": true"));
    std::thread::scope(|scope| {
        let posts: Vec<_> = (0..24)
            .map(|i| {
                let (server, body) = (&server, if i % 2 == 0 { streamed.clone() } else { body(more) });
                scope.spawn(move || server.post("/v1/chat/completions", &body))
            })
            .collect();
        std::thread::sleep(Duration::from_secs(3));
        server.terminate();
        for (i, post) in posts.into_iter().enumerate() {
            let answer = post.join().expect("an answer");
            let is_whole = answer.contains("\"finish_reason\":\"length\"");
            let is_told = answer.contains("the server is shutting down");
            assert!(is_whole || is_told, "{i}: {answer:?}");
            assert!(!is_told || i % 2 == 0 || answer.starts_with("HTTP/1.1 503"), "{i}: {answer:?}");
        }
    });
    assert!(server.exit().success());
}

/// Who comes while the last answer is finished is told so: health checks see it, and clients ask elsewhere.
#[cfg(unix)]
#[test]
fn late_clients_are_told_that_the_server_stops() {
    let mut server = Server::start(&["--ctx", "4096"]);
    assert!(server.get("/ready", "").starts_with("HTTP/1.1 200"));
    let mut last = server.stream(2500);
    server.terminate();
    let start = Instant::now();
    let ready = loop {
        let ready = server.get("/ready", "");
        if ready.starts_with("HTTP/1.1 503") {
            break ready;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{ready}");
    };
    // Nothing here asks for an end of the connection.
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}");
    let asked = server.raw(&format!("{head}Content-Length: {}\r\n\r\n{HELLO}", HELLO.len()));
    for refused in [ready, asked] {
        assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("shutting down"), "{refused}");
        let heads = refused.to_ascii_lowercase();
        assert!(heads.contains("connection: close") && heads.contains("retry-after: "), "{refused}");
    }
    assert!(server.get("/health", "").starts_with("HTTP/1.1 200"));
    let mut rest = String::new();
    last.read_to_string(&mut rest).expect("the last answer");
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert!(server.exit().success());
    assert!(TcpStream::connect(&server.address).is_err(), "nothing listens any more");
}

/// Files of keys and settings that never end, or never begin, hold nothing up.
#[cfg(unix)]
#[test]
fn devices_and_pipes_are_no_settings() {
    let home = tempfile::tempdir().expect("a folder");
    let settings = home.path().join(".config/moebius");
    std::fs::create_dir_all(&settings).expect("a folder");
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
        command.env("HOME", home.path()).env_remove("XDG_CONFIG_HOME").env_remove("MOEBIUS_CONFIG");
        let output = command.args(args).stdin(Stdio::null()).output().expect("start");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for args in [&["serve", "--port", "0", "--api-key-file", "/dev/zero"][..], &["models", "--config", "/dev/zero"]] {
        let (code, said) = run(args);
        assert!(code.is_some_and(|code| code != 0) && said.contains("1048576 bytes"), "{args:?}: {code:?} {said}");
    }
    let pipe = settings.join("config.toml");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("start").success());
    let start = Instant::now();
    let (code, said) = run(&["models"]);
    assert!(code.is_some() && start.elapsed() < Duration::from_secs(60), "{code:?} {said}");
}
