//! `moebius health`: one request to a running server, for containers that have no other program to send it.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs};
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
    let own = SocketAddr::new(host, args.port);
    let address = args.url.clone().unwrap_or_else(|| own.to_string());
    // The server knows this machine by this name, whatever it listens on.
    let name = args.url.clone().unwrap_or_else(|| format!("localhost:{}", args.port));
    let path = if args.ready { "/ready" } else { "/health" };
    let found: Vec<SocketAddr> = match &args.url {
        Some(url) => url.to_socket_addrs().with_context(|| format!("failed to find the server {url}"))?.collect(),
        None => vec![own],
    };
    let answer = ask(&found, &name, path).with_context(|| format!("no server answers at http://{address}{path}"))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split_whitespace().nth(1).unwrap_or("none");
    if status != "200" {
        bail!("the server at {address} is unhealthy: {path} answers {status}: {}", body.trim());
    }
    say!("{}", body.trim())
}

/// Asks the first of several addresses that takes the connection.
fn ask(addresses: &[SocketAddr], name: &str, path: &str) -> std::io::Result<String> {
    let mut stream = Err(std::io::ErrorKind::NotFound.into());
    for address in addresses {
        stream = TcpStream::connect_timeout(address, PATIENCE);
        if stream.is_ok() {
            break;
        }
    }
    let mut stream = stream?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n")?;
    let mut bytes = Vec::new();
    stream.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
