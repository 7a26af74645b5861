//! A server under systemd: a socket that it has opened, and word to it when the server is ready and when it stops.

use anyhow::Result;
use tokio::net::TcpListener;

/// Returns the listening socket that was handed over (`LISTEN_FDS`), if one was.
///
/// # Errors
/// What was handed over is no listening TCP socket.
#[cfg(unix)]
pub fn socket() -> Result<Option<TcpListener>> {
    use anyhow::Context;

    let handed: Option<std::net::TcpListener> =
        listenfd::ListenFd::from_env().take_tcp_listener(0).context("failed to take over the socket (LISTEN_FDS)")?;
    let Some(socket) = handed else { return Ok(None) };
    socket.set_nonblocking(true).context("failed to take over the socket")?;
    Ok(Some(TcpListener::from_std(socket).context("failed to take over the socket")?))
}

/// There is none on this system.
#[cfg(not(unix))]
pub fn socket() -> Result<Option<TcpListener>> {
    Ok(None)
}

/// Tells systemd (`sd_notify(3)`), where it wants to hear: a datagram to the socket that `NOTIFY_SOCKET` names.
#[cfg(target_os = "linux")]
pub fn tell(state: &str) {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    let Some(name) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else { return };
    let address = match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
        _ => SocketAddr::from_pathname(&name),
    };
    let told = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = told {
        tracing::warn!(%error, "failed to notify systemd");
    }
}

/// Nobody is there to hear.
#[cfg(not(target_os = "linux"))]
pub fn tell(_: &str) {}
