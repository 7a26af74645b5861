//! Answers as bytes. What grows with the tokens of an answer is kept as it came and becomes JSON when the client has
//! read what stands before it, so that a client that does not read holds numbers and not their text. Knows no API.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_util::stream;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::app;
use super::room::Room;

/// Text that is written at a time, and the longest answer that is written at once.
const PIECE_BYTES: usize = 16 << 10;

/// What writes a part of the text; false when it has written all.
type Source = Box<dyn FnMut(&mut Vec<u8>) -> bool + Send>;

/// A text, parts of which are not written yet.
#[derive(Default)]
pub struct Text(VecDeque<TextPart>);

enum TextPart {
    Ready(Vec<u8>),
    Later(Source),
}

impl Text {
    /// Adds text.
    pub fn push(&mut self, text: &[u8]) {
        self.end().extend_from_slice(text);
    }

    /// Returns the end of the text, to append to.
    pub fn end(&mut self) -> &mut Vec<u8> {
        if self.0.back().is_none_or(|part| matches!(part, TextPart::Later(_))) {
            self.0.push_back(TextPart::Ready(Vec::new()));
        }
        match self.0.back_mut() {
            Some(TextPart::Ready(ready)) => ready,
            Some(TextPart::Later(_)) | None => unreachable!("text that is ready was added above"),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next piece of the text; `None` after the last one.
    pub fn piece(&mut self) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        while out.len() < PIECE_BYTES {
            match self.0.pop_front() {
                None => break,
                Some(TextPart::Ready(text)) if out.is_empty() => out = text,
                Some(TextPart::Ready(text)) => out.extend_from_slice(&text),
                Some(TextPart::Later(mut source)) => {
                    let mut more = true;
                    while more && out.len() < PIECE_BYTES {
                        more = source(&mut out);
                    }
                    if more {
                        self.0.push_front(TextPart::Later(source));
                    }
                }
            }
        }
        (!out.is_empty()).then_some(out)
    }
}

/// Lists of a value that are written later. A mark stands for each until then, which no client can guess.
pub struct Lists {
    mark: String,
    sources: Vec<Source>,
}

impl Default for Lists {
    fn default() -> Lists {
        Lists { mark: app::id("list:"), sources: Vec::new() }
    }
}

impl Lists {
    /// Returns the place of a list: `write` writes an entry.
    pub fn place<T>(
        &mut self,
        items: impl IntoIterator<Item = T, IntoIter: Send + 'static>,
        mut write: impl FnMut(T, &mut Vec<u8>) + Send + 'static,
    ) -> Value {
        let mut items = items.into_iter();
        let mut between = b'[';
        self.sources.push(Box::new(move |out| match items.next() {
            Some(item) => {
                out.push(between);
                between = b',';
                write(item, out);
                true
            }
            None => {
                out.extend_from_slice(if between == b'[' { b"[]" } else { b"]" });
                false
            }
        }));
        format!("{}{:08x}", self.mark, self.sources.len() - 1).into()
    }

    /// Appends a value with its lists.
    pub fn write(self, value: &Value, out: &mut Text) {
        let text = value.to_string();
        let mut rest = text.as_str();
        let mut sources: Vec<_> = self.sources.into_iter().map(Some).collect();
        // The quotation mark before a mark, the mark, its number, the quotation mark behind it.
        while let Some(at) = rest.find(&self.mark) {
            let number = at + self.mark.len();
            let source = usize::from_str_radix(&rest[number..number + 8], 16).ok();
            out.push(&rest.as_bytes()[..at - 1]);
            out.0.extend(source.and_then(|i| sources.get_mut(i)?.take()).map(TextPart::Later));
            rest = &rest[number + 9..];
        }
        out.push(rest.as_bytes());
    }

    /// Returns the value as an answer; `room` is held until it is read.
    pub fn respond(self, value: &Value, room: impl Into<Option<Room>>) -> Response {
        let room = room.into();
        let mut text = Text::default();
        self.write(value, &mut text);
        let first = text.piece().unwrap_or_default();
        let body = match text.is_empty() {
            true => Body::from(first),
            false => {
                let rest = (Some(first), text, room);
                Body::from_stream(stream::unfold(rest, |(first, mut text, room)| async move {
                    let piece = first.or_else(|| text.piece())?;
                    Some((Ok::<_, Infallible>(piece), (None, text, room)))
                }))
            }
        };
        let mut response = Response::new(body);
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response
    }
}

/// Appends JSON. What this program writes has no form that JSON lacks.
pub fn json(value: &impl Serialize, out: &mut Vec<u8>) {
    let _ = serde_json::to_writer(out, value);
}

/// Returns a number in as few digits as tell it from its neighbors.
pub fn short(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// As [`short`], for fields.
pub fn serialize_short<S: Serializer>(x: &f32, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_f64(short(*x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn whole(mut text: Text) -> String {
        let mut out = Vec::new();
        while let Some(piece) = text.piece() {
            assert!(piece.len() < 2 * PIECE_BYTES);
            out.extend(piece);
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn lists_stand_in_their_places() {
        let mut lists = Lists::default();
        let number = |n: u32, out: &mut Vec<u8>| json(&n, out);
        let (a, b, c) = (lists.place(0..3, number), lists.place([], number), lists.place(0..100_000, number));
        let value = json!({"b": b, "text": "\"list:\\", "a": [a, 1], "c": c});
        let mut out = Text::default();
        out.push(b"data: ");
        lists.write(&value, &mut out);
        let all: Vec<u32> = (0..100_000).collect();
        let expected = json!({"b": [], "text": "\"list:\\", "a": [[0, 1, 2], 1], "c": all});
        assert_eq!(whole(out), format!("data: {expected}"));
    }

    #[test]
    fn numbers_are_short() {
        for (x, text) in [(0.7, "0.7"), (1.0, "1.0"), (-0.1, "-0.1"), (3.4e38, "3.4e+38"), (1e-7, "1e-7")] {
            assert_eq!(json!(short(x)).to_string(), text);
        }
    }
}
