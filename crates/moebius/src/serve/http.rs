//! Connections: accepting, limits on heads and time, clients that leave, and an orderly end. Knows bytes and clocks, no
//! routes.
//!
//! A client that has closed its sending side may still read, or may be gone: the end of what it sends says no more. One
//! that waits for an answer is sent a sign of life that every client skips (an interim response, or a comment between
//! events); who is gone has a system that resets the connection then.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Shutdown};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, Request, Response, Version, header};
use futures_util::FutureExt;
use futures_util::task::AtomicWaker;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Sleep;
use tower::ServiceExt;

use super::limits::{HEAD_TIME, KEPT_DESCRIPTORS, LOOK_TIME, MAX_CONNECTIONS, MAX_HEAD_BYTES, MAX_HEADERS, WRITE_TIME};
use super::worker::lock;
use crate::machine;

/// What becomes of connections that are opened while the last requests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    /// They are served, one request each; routes say that the server stops, so that health checks see it and clients ask
    /// elsewhere.
    Told,
    /// The socket is closed at once: the system refuses them, or holds them for the process that gets the socket next.
    Unserved,
}

/// Until connections without a request are closed after `stop`: a head that is there by then gets an answer.
const LAST_HEADS: Duration = Duration::from_millis(100);

/// Serves connections until `stop` says true, then waits until those that are in the middle of a request have ended.
pub async fn serve(listener: TcpListener, router: Router, mut stop: watch::Receiver<bool>, late: Late) {
    let mut graceful = GracefulShutdown::new();
    // Once told to stop: the end of the requests that ran then.
    let mut last: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(std::future::pending());
    let mut is_stopping = false;
    let places = Arc::new(Semaphore::new(places()));
    let lines = Arc::new(Lines::default());
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_headers(MAX_HEADERS).max_buf_size(MAX_HEAD_BYTES);
    http.half_close(true);
    for id in 0u64.. {
        let accepted = async {
            let accepted = listener.accept().await;
            // The system holds those that wait meanwhile.
            if places.available_permits() == 0 {
                lines.make_room();
            }
            (accepted, places.clone().acquire_owned().await)
        };
        let (accepted, place) = tokio::select! {
            accepted = accepted => accepted,
            _ = stop.wait_for(|&stop| stop), if !is_stopping => {
                if late == Late::Unserved {
                    break;
                }
                is_stopping = true;
                http.keep_alive(false);
                let before = std::mem::take(&mut graceful);
                last = Box::pin(async {
                    tokio::time::sleep(LAST_HEADS).await;
                    before.shutdown().await;
                });
                continue;
            }
            () = &mut last => break,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, or a client that left before it was let in: others continue.
                tracing::warn!(%error, "failed to accept a connection");
                lines.make_room();
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Tokens are small and should not wait for each other.
        let _ = stream.set_nodelay(true);
        let line = Arc::new(Line::new(stream, address.ip()));
        lock(&lines.0).insert(id, line.clone());
        let service = {
            let (line, router) = (line.clone(), router.clone());
            hyper::service::service_fn(move |request| line.clone().answer(router.clone(), request))
        };
        let io = TokioIo::new(Patient { line: line.clone(), deadline: None });
        let connection = graceful.watch(http.serve_connection(io, service));
        let lines = lines.clone();
        tokio::spawn(async move {
            tokio::select! {
                ended = connection => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "a connection ended");
                    }
                }
                () = line.client_left() => tracing::debug!("a client left"),
                () = line.close.notified() => tracing::debug!("an idle connection made room for a new one"),
            }
            lock(&lines.0).remove(&id);
            drop(place);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

/// Maximum number of connections on this system, whose bound on open files is raised as far as it lets.
fn places() -> usize {
    match machine::raise_descriptors() {
        Some((limit, used)) => places_of(limit, used),
        None => MAX_CONNECTIONS,
    }
}

/// Maximum number of connections where `limit` files may be open and `used` are. What opens models, starts processes
/// and reads the system's files needs some, so connections never get all.
fn places_of(limit: usize, used: usize) -> usize {
    let free = limit.saturating_sub(used);
    free.saturating_sub(KEPT_DESCRIPTORS).max(free / 2).clamp(1, MAX_CONNECTIONS)
}

/// Open connections, in the order of their arrival.
#[derive(Default)]
struct Lines(Mutex<BTreeMap<u64, Arc<Line>>>);

impl Lines {
    /// Closes the oldest connection without a request, of the address that has most connections.
    fn make_room(&self) {
        let lines = lock(&self.0);
        let mut by_address: HashMap<IpAddr, (usize, Option<&Arc<Line>>)> = HashMap::new();
        for line in lines.values() {
            let (n, oldest) = by_address.entry(line.address).or_default();
            *n += 1;
            if oldest.is_none() && line.n_open.load(Ordering::Relaxed) == 0 {
                *oldest = Some(line);
            }
        }
        let idle = by_address.into_values().filter_map(|(n, oldest)| Some((n, oldest?)));
        if let Some((_, line)) = idle.max_by_key(|(n, _)| *n) {
            line.close.notify_one();
        }
    }
}

/// Where a request's connection comes from.
#[derive(Clone, Copy, Debug)]
pub struct Address(pub IpAddr);

/// A connection.
struct Line {
    stream: TcpStream,
    address: IpAddr,
    /// Requests whose answers are not complete.
    n_open: AtomicUsize,
    /// A request came.
    asked: Notify,
    /// The head of its answer is not written, and interim responses may come before it.
    may_interrupt: AtomicBool,
    /// A comment is due in the events that are sent.
    comment: AtomicBool,
    body: AtomicWaker,
    /// It is to make room for another.
    close: Notify,
}

impl Line {
    fn new(stream: TcpStream, address: IpAddr) -> Line {
        Line {
            stream,
            address,
            n_open: AtomicUsize::new(0),
            asked: Notify::new(),
            may_interrupt: AtomicBool::new(false),
            comment: AtomicBool::new(false),
            body: AtomicWaker::new(),
            close: Notify::new(),
        }
    }

    async fn answer(
        self: Arc<Line>,
        router: Router,
        request: Request<Incoming>,
    ) -> Result<Response<Answer>, Infallible> {
        self.n_open.fetch_add(1, Ordering::Relaxed);
        let open = Open(self);
        let line = &open.0;
        line.may_interrupt.store(request.version() == Version::HTTP_11, Ordering::Relaxed);
        line.asked.notify_one();
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Address(line.address));
        let response = router.oneshot(request).await?;
        line.may_interrupt.store(false, Ordering::Relaxed);
        let is_events = |kind: &HeaderValue| kind.as_bytes().starts_with(b"text/event-stream");
        let takes_comments = response.headers().get(header::CONTENT_TYPE).is_some_and(is_events);
        Ok(response.map(|inner| Answer { inner, takes_comments, open }))
    }

    /// Returns when a client that waits for an answer is gone.
    async fn client_left(&self) {
        loop {
            self.asked.notified().await;
            while self.n_open.load(Ordering::Relaxed) > 0 {
                tokio::time::sleep(LOOK_TIME).await;
                match self.stream.peek(&mut [0]).now_or_never() {
                    Some(Ok(0)) => {}
                    // It was reset.
                    Some(Err(_)) => return,
                    _ => continue,
                }
                if self.may_interrupt.load(Ordering::Relaxed) {
                    // Nothing else is on the line. What a full one refuses, the next look sends.
                    match self.stream.try_write(b"HTTP/1.1 100 Continue\r\n\r\n") {
                        Err(error) if error.kind() != io::ErrorKind::WouldBlock => return,
                        _ => {}
                    }
                } else {
                    self.comment.store(true, Ordering::Relaxed);
                    self.body.wake();
                }
                tokio::time::sleep(LOOK_TIME).await;
                if !matches!(self.stream.take_error(), Ok(None)) {
                    return;
                }
            }
        }
    }
}

/// Counts a request until its answer is written.
struct Open(Arc<Line>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.may_interrupt.store(false, Ordering::Relaxed);
        self.0.n_open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The body of an answer on its way.
struct Answer {
    inner: Body,
    /// It is a stream of events, between which comments may stand.
    takes_comments: bool,
    open: Open,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.takes_comments {
            self.open.0.body.register(cx.waker());
        }
        let frame = Pin::new(&mut self.inner).poll_frame(cx);
        // What is ready may end in the middle of an event; where nothing is, the last event is complete.
        if frame.is_pending() && self.takes_comments && self.open.0.comment.swap(false, Ordering::Relaxed) {
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b": still here\n\n")))));
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A connection whose client must read within [`WRITE_TIME`] once the line is full.
struct Patient {
    line: Arc<Line>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    /// Writes when the line has room; one that is full for too long fails.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        while let Poll::Ready(room) = self.line.stream.poll_write_ready(cx) {
            match room.and_then(|()| write(&self.line.stream)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => {
                    self.deadline = None;
                    return Poll::Ready(result);
                }
            }
        }
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_TIME)));
        ready!(deadline.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client stopped reading")))
    }
}

impl AsyncRead for Patient {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.line.stream.poll_read_ready(cx))?;
            match self.line.stream.try_read(buf.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll(cx, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll(cx, |stream| stream.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(socket2::SockRef::from(&self.line.stream).shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_to_others() {
        for (limit, used, places) in [
            (1 << 20, 20, MAX_CONNECTIONS),
            (2200, 20, MAX_CONNECTIONS),
            (1024, 24, 1000 - KEPT_DESCRIPTORS),
            (256, 16, 240 - KEPT_DESCRIPTORS),
            (64, 14, 25),
            (20, 14, 3),
            (10, 14, 1),
        ] {
            assert_eq!(places_of(limit, used), places, "{used} of {limit}");
        }
    }
}
