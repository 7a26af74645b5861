//! `moebius health`: one request to a running server, for containers that have no other program to send it.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::args::HealthArgs;
use crate::out::say;

const PATIENCE: Duration = Duration::from_secs(5);
/// What of an answer is read.
const MAX_BYTES: u64 = 64 << 10;

pub fn run(args: &HealthArgs) -> Result<()> {
    // A server on all addresses answers on this machine's.
    let host = if args.host.is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { args.host };
    let address = SocketAddr::new(host, args.port);
    let path = if args.ready { "/ready" } else { "/health" };
    let answer = ask(address, path).with_context(|| format!("no server answers at http://{address}{path}"))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split_whitespace().nth(1).unwrap_or("none");
    if status != "200" {
        bail!("the server at {address} is unhealthy: {path} answers {status}: {}", body.trim());
    }
    say!("{}", body.trim())
}

fn ask(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // The server knows this machine by this name, whatever it listens on.
    let port = address.port();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n")?;
    let mut bytes = Vec::new();
    stream.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
