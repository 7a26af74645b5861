//! The server as a process: real connections, signals, keys from a file. What its routes say is tested in process.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// A running server on a port of its own.
struct Server {
    child: Child,
    out: BufReader<ChildStdout>,
    address: String,
}

impl Server {
    fn start(more: &[&str]) -> Server {
        let mut child = Command::new(env!("CARGO_BIN_EXE_moebius"))
            .args(["serve", "--port", "0", "--parallel", "2", "--ctx", "512", "-t", "1"])
            .args(if more.contains(&"--max-queue") { &[][..] } else { &["--max-queue", "4"] })
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
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
        self.raw(&format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n"))
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
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
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

    /// Waits for the process to end by itself.
    fn exit(&mut self) -> std::process::ExitStatus {
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
    let twice = "GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    assert_eq!(server.raw(twice).matches("HTTP/1.1 200 OK").count(), 2);
}

#[test]
fn heads_and_bodies_have_limits() {
    let server = Server::start(&[]);
    let head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n";
    let many: String = (0..200).map(|i| format!("x-{i}: y\r\n")).collect();
    let cases = [
        ("garbage\r\n\r\n".to_string(), "400"),
        (format!("GET /health HTTP/1.1\r\nHost: x\r\n{many}\r\n"), "431"),
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
    while server.metric("moebius_cancelled_total") < 1.0 || server.metric("moebius_kv_pages{state=\"used\"}") > 0.0 {
        assert!(start.elapsed() < Duration::from_secs(60), "it still runs");
    }
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
    let missing = Command::new(env!("CARGO_BIN_EXE_moebius")).args(["serve", "--api-key-file", "/nowhere"]).output();
    let missing = missing.expect("run moebius");
    assert!(!missing.status.success() && String::from_utf8_lossy(&missing.stderr).contains("read keys from /nowhere"));
}

#[cfg(unix)]
#[test]
fn running_answers_finish_when_it_is_told_to_stop() {
    let mut server = Server::start(&[]);
    let mut stream = server.stream(60);
    let told = Command::new("kill").args(["-TERM", &server.child.id().to_string()]).status().expect("kill");
    assert!(told.success());
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("the rest of the stream");
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("[DONE]"), "{rest}");
    assert!(server.exit().success());
}

/// Rules that take a while to compile wait for each other, and no chat without a rule waits for them.
#[test]
fn forms_do_not_hold_up_chats() {
    let server = Server::start(&["--max-queue", "16"]);
    let post = |more: &str| {
        let body = format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"Hi\"}}], \"max_tokens\": 1{more}}}");
        let head =
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n";
        server.raw(&format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()))
    };
    // Makes what is made once.
    assert!(post(", \"regex\": \"[a-z]\"").starts_with("HTTP/1.1 200"));
    let done = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for i in 0..8 {
            let (post, done) = (&post, &done);
            scope.spawn(move || {
                let schema = format!("{{\"type\": \"integer\", \"multipleOf\": {}}}", 99_991 - i);
                let format = format!("{{\"type\": \"json_schema\", \"json_schema\": {{\"schema\": {schema}}}}}");
                let answer = post(&format!(", \"response_format\": {format}"));
                done.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                assert!(answer.starts_with("HTTP/1.1 200") || answer.starts_with("HTTP/1.1 400"), "{answer}");
            });
        }
        std::thread::sleep(Duration::from_millis(300));
        assert!(post("").starts_with("HTTP/1.1 200"));
        let before = done.load(std::sync::atomic::Ordering::SeqCst);
        assert!(before <= 4, "{before} of 8 rules were compiled before the chat without one was answered");
    });
}
