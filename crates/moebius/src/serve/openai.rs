//! Parts that OpenAI's two older APIs share: the head of every answer and event, and the events of a stream, which
//! borrow what they write. Knows neither messages nor texts.

use std::sync::Arc;

use engine::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::Value;

use super::app::{self, App};
use super::error::{ApiError, Style};
use super::fields::{Object, Read};
use super::generate::Totals;
use super::sse::Frames;

/// Build that answered, as clients compare it between answers.
const FINGERPRINT: &str = concat!("moebius-", env!("CARGO_PKG_VERSION"));

/// The head of every answer and event of a request.
pub struct OpenAiHead {
    id: String,
    created: u64,
    model: String,
    request_id: String,
    pub tokenizer: Arc<Tokenizer>,
}

/// An event of a stream with one choice, or with none.
#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
    choices: [C; 1],
    /// Null in all events but the last, if the request asks for the usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<()>,
}

impl OpenAiHead {
    /// Returns the head of a new answer, whose id begins with `prefix`.
    pub fn new(app: &App, prefix: &str, request_id: String) -> OpenAiHead {
        OpenAiHead {
            id: app::id(prefix),
            created: app::unix_time(),
            model: app.model.id.clone(),
            request_id,
            tokenizer: app.tokenizer.clone(),
        }
    }

    /// Returns an answer with these choices.
    pub fn object(&self, kind: &'static str, choices: Vec<Value>) -> Object {
        let mut object = Object::new();
        object.insert("id".into(), self.id.as_str().into());
        object.insert("object".into(), kind.into());
        object.insert("created".into(), self.created.into());
        object.insert("model".into(), self.model.as_str().into());
        object.insert("system_fingerprint".into(), FINGERPRINT.into());
        object.insert("choices".into(), choices.into());
        object
    }

    /// Writes an event with one choice.
    pub fn chunk<C: Serialize>(&self, kind: &'static str, choice: C, wants_usage: bool, out: &mut Frames) {
        out.data(&Chunk {
            id: &self.id,
            object: kind,
            created: self.created,
            model: &self.model,
            system_fingerprint: FINGERPRINT,
            choices: [choice],
            usage: wants_usage.then_some(()),
        });
    }

    /// Ends a stream, with the usage if the request wants it.
    pub fn close(&self, kind: &'static str, totals: &Totals, wants_usage: bool, out: &mut Frames) {
        if wants_usage {
            let mut object = self.object(kind, Vec::new());
            totals.close(&mut object);
            out.data(&object);
        }
        out.done();
    }

    /// Ends a stream that failed.
    pub fn fail(&self, error: &ApiError, out: &mut Frames) {
        out.data(&error.json(Style::OpenAi, &self.request_id));
        out.done();
    }
}

/// Returns whether a stream is to end with the usage.
pub fn wants_usage(body: &Object) -> bool {
    body.object("stream_options").and_then(|options| options.flag("include_usage")).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::generate::Totals;
    use super::*;

    fn head() -> OpenAiHead {
        let tokenizer = Tokenizer::load(&crate::embedded::open(None).unwrap()).unwrap();
        OpenAiHead {
            id: "cmpl-1".into(),
            created: 7,
            model: "m".into(),
            request_id: "req_1".into(),
            tokenizer: Arc::new(tokenizer),
        }
    }

    fn events(frames: Frames) -> Vec<String> {
        frames.text().split("\n\n").filter(|event| !event.is_empty()).map(String::from).collect()
    }

    #[test]
    fn events_have_the_fields_of_answers_in_their_order() {
        let head = head();
        let choice = json!({"index": 0, "text": "a \"b\"", "logprobs": null, "finish_reason": null});
        for wants_usage in [false, true] {
            let mut out = Frames::default();
            head.chunk("text_completion", &choice, wants_usage, &mut out);
            head.close("text_completion", &Totals::default(), wants_usage, &mut out);
            let mut first = head.object("text_completion", vec![choice.clone()]);
            let mut expected = Vec::new();
            if wants_usage {
                first.insert("usage".into(), Value::Null);
            }
            expected.push(format!("data: {}", Value::from(first)));
            if wants_usage {
                let mut last = head.object("text_completion", Vec::new());
                Totals::default().close(&mut last);
                expected.push(format!("data: {}", Value::from(last)));
            }
            expected.push("data: [DONE]".into());
            assert_eq!(events(out), expected);
        }
    }
}
