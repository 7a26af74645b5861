//! Streams, most of them server-sent events: a generation written piece by piece in an API's own words ([`Wire`]).

use std::convert::Infallible;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_util::stream;
use serde::Serialize;
use serde_json::Value;

use super::error::ApiError;
use super::generate::{Generation, Step, Totals};
use super::limits::KEEP_ALIVE;
use super::write::{self, Lists, Text};

/// How an API writes a stream.
pub trait Wire: Send + 'static {
    /// What the stream is.
    const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");

    /// Before the first token.
    fn open(&mut self, out: &mut Frames);
    /// Something happened to an answer.
    fn step(&mut self, step: Step, out: &mut Frames);
    /// All answers are complete.
    fn close(&mut self, totals: &Totals, out: &mut Frames);
    /// It failed.
    fn fail(&mut self, error: &ApiError, out: &mut Frames);
    /// Nothing happened for a while.
    fn idle(&mut self, out: &mut Frames) {
        out.comment("still here");
    }
}

/// Events as they go over the line.
#[derive(Default)]
pub struct Frames(Text);

impl Frames {
    /// An event without a name.
    pub fn data(&mut self, value: &impl Serialize) {
        let out = self.0.end();
        out.extend_from_slice(b"data: ");
        write::json(value, out);
        out.extend_from_slice(b"\n\n");
    }

    /// An event with a name.
    pub fn event(&mut self, name: &str, value: &impl Serialize) {
        let out = self.0.end();
        out.extend_from_slice(format!("event: {name}\ndata: ").as_bytes());
        write::json(value, out);
        out.extend_from_slice(b"\n\n");
    }

    /// An event with a name, and lists that are written later.
    pub fn event_with(&mut self, name: &str, value: &Value, lists: Lists) {
        self.0.push(format!("event: {name}\ndata: ").as_bytes());
        lists.write(value, &mut self.0);
        self.0.push(b"\n\n");
    }

    /// A line of JSON: no event, but Ollama's form of a stream.
    pub fn line(&mut self, value: &Value) {
        self.0.push(format!("{value}\n").as_bytes());
    }

    /// OpenAI's end.
    pub fn done(&mut self) {
        self.0.push(b"data: [DONE]\n\n");
    }

    /// Returns all that was written.
    #[cfg(test)]
    pub fn text(mut self) -> String {
        let pieces: Vec<u8> = std::iter::from_fn(|| self.0.piece()).flatten().collect();
        String::from_utf8(pieces).unwrap_or_default()
    }

    fn comment(&mut self, text: &str) {
        self.0.push(format!(": {text}\n\n").as_bytes());
    }
}

enum Phase {
    Opening,
    Running,
    Ended,
}

/// Returns the answer that streams a generation. When the client goes away its body is dropped, and the generation with
/// it.
pub fn respond<W: Wire>(generation: Generation, wire: W) -> Response {
    let state = (generation, wire, Phase::Opening, Frames::default());
    let body = stream::unfold(state, |(mut generation, mut wire, mut phase, mut out)| async move {
        loop {
            if let Some(piece) = out.0.piece() {
                return Some((Ok::<_, Infallible>(piece), (generation, wire, phase, out)));
            }
            match phase {
                Phase::Opening => {
                    wire.open(&mut out);
                    phase = Phase::Running;
                }
                Phase::Running => match tokio::time::timeout(KEEP_ALIVE, generation.next()).await {
                    Err(_) => wire.idle(&mut out),
                    Ok(Some(Ok(step))) => wire.step(step, &mut out),
                    Ok(Some(Err(error))) => {
                        wire.fail(&error, &mut out);
                        phase = Phase::Ended;
                    }
                    Ok(None) => {
                        wire.close(&generation.totals, &mut out);
                        phase = Phase::Ended;
                    }
                },
                Phase::Ended => return None,
            }
        }
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, W::CONTENT_TYPE);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks nginx not to collect the stream.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
