//! Inputs for `moebius serve`: bodies, whose first part is a method and a path, and raw bytes of a connection. A find
//! is a server that ends, answers 500, grows too large, or answers an honest request in another way than before.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::child::Verdict;
use crate::mutate;

/// What the server may have resident, in MiB.
const MAX_MIB: u64 = 1536;
/// How long the first byte of an answer, and any later one, is waited for before the client leaves.
const PATIENCE: Duration = Duration::from_secs(8);
/// How long an honest answer may take, behind what the inputs before it have left running.
const HONEST_PATIENCE: Duration = Duration::from_secs(240);
/// Inputs between two honest requests.
const BETWEEN_CHECKS: usize = 50;

/// The program under test, beside this one.
pub fn program() -> Result<PathBuf, String> {
    let here = std::env::current_exe().map_err(|e| format!("find this program: {e}"))?;
    let program = here.with_file_name(format!("moebius{}", std::env::consts::EXE_SUFFIX));
    if program.is_file() { Ok(program) } else { Err(format!("find {}: build it first", program.display())) }
}

/// A running server.
pub struct Server {
    process: std::process::Child,
    address: String,
    honest: String,
    n_inputs: usize,
}

impl Server {
    pub fn start() -> Result<Server, String> {
        let mut command = Command::new(program()?);
        command.args(["serve", "--port", "0", "--parallel", "4", "--ctx", "256", "--max-queue", "64"]);
        // A GPU would first have its kernels compiled.
        command.args(["--backend", "cpu"]);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().map_err(|e| format!("start moebius: {e}"))?;
        let mut line = String::new();
        if let Some(stdout) = process.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(|e| format!("read the address: {e}"))?;
        }
        let address = line.trim().rsplit_once("http://").map(|(_, address)| address.to_string());
        let address = address.ok_or_else(|| format!("read the address of the server in {line:?}"))?;
        let mut server = Server { process, address, honest: String::new(), n_inputs: 0 };
        server.honest = server.honest_answer();
        match server.honest.contains("\"text\"") {
            true => Ok(server),
            false => Err(format!("start the server: it answers {:?}", server.honest)),
        }
    }

    /// Sends an input and reads what comes back.
    pub fn run(&mut self, input: &[u8]) -> Result<Verdict, String> {
        self.n_inputs += 1;
        let parts = mutate::parts(input);
        let answer = match parts.as_slice() {
            [line, body] if line.starts_with(b"POST /") => self.send(&post(line, body), PATIENCE),
            _ => self.send(input, Duration::from_millis(150)),
        };
        if let Some(status) = self.process.try_wait().map_err(|e| format!("wait for the server: {e}"))? {
            return Ok(Verdict::Died(status.to_string()));
        }
        if answer.starts_with("HTTP/1.1 500") {
            return Ok(Verdict::Panic(answer));
        }
        let mib = self.resident_mib();
        if mib > MAX_MIB {
            return Ok(Verdict::Large(mib as usize));
        }
        if self.n_inputs.is_multiple_of(BETWEEN_CHECKS) {
            let begin = Instant::now();
            let honest = self.honest_answer();
            if honest != self.honest {
                return Ok(match begin.elapsed() >= HONEST_PATIENCE {
                    true => Verdict::Slow(begin.elapsed()),
                    false => Verdict::Panic(format!("an honest request is answered {honest:?}")),
                });
            }
        }
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        let status = head.lines().next().unwrap_or_default().replace("HTTP/1.1 200", "ok");
        let said = body.split_once("\"message\":").map_or("", |(_, said)| said);
        // Of a message, the words: what is quoted in it is the input's.
        let said = said.trim_start_matches(['"', ' ']).replace('\\', "");
        Ok(Verdict::Fine(format!("{status} {said}")))
    }

    fn honest_answer(&self) -> String {
        let body = br#"{"prompt": "The fox", "max_tokens": 8, "temperature": 0, "seed": 1}"#;
        let begin = Instant::now();
        // The queue may still be full of what clients left behind.
        loop {
            let answer = self.send(&post(b"POST /v1/completions", body), HONEST_PATIENCE);
            let text = answer.split_once("\"text\":").map(|(_, text)| text.split("\",\"").next().unwrap_or_default());
            match text {
                Some(text) => return format!("\"text\":{text}"),
                None if begin.elapsed() >= HONEST_PATIENCE || !answer.starts_with("HTTP/1.1 429") => return answer,
                None => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Sends bytes over a connection of its own; what comes back until it is closed or nothing comes for a while.
    fn send(&self, bytes: &[u8], patience: Duration) -> String {
        let mut answer = Vec::new();
        if let Ok(mut stream) = TcpStream::connect(&self.address) {
            let _ = stream.set_read_timeout(Some(patience));
            let _ = stream.set_write_timeout(Some(patience));
            // A server that refuses early closes its end: what it says is what counts.
            let _ = stream.write_all(bytes);
            let _ = stream.take(1 << 20).read_to_end(&mut answer);
        }
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn resident_mib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) >> 10
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A request with a JSON body; `line` is a method and a path.
fn post(line: &[u8], body: &[u8]) -> Vec<u8> {
    let head = format!(
        " HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    [line, head.as_bytes(), body].concat()
}
