//! An answer as a list of parts, one after the other: thoughts, texts, calls. For the APIs that show it so, whole or as
//! it grows.

use engine::formats::Event;
use serde_json::Value;

use super::fields::Object;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessagePart {
    Reasoning(String),
    Text(String),
    Call(Call),
}

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    pub id: String,
    pub name: String,
    /// JSON, as far as it came.
    pub arguments: String,
    /// Its arguments are a whole object.
    pub complete: bool,
}

impl Call {
    /// Returns its arguments as an object; of a call that was cut off, the members that came whole.
    pub fn object(&self) -> Value {
        let text = if self.complete { self.arguments.clone() } else { closed(&self.arguments) };
        serde_json::from_str(&text).ok().filter(Value::is_object).unwrap_or_else(|| Value::Object(Object::new()))
    }
}

/// Returns a JSON text that is cut off, up to the last place where what is open can be closed, and closed there.
fn closed(text: &str) -> String {
    let (mut open, mut in_string, mut escaped, mut is_key) = (Vec::new(), false, false, false);
    // The last such place, and what closes it.
    let (mut end, mut closing) = (0, Vec::new());
    let mut last = 0;
    for (at, byte) in text.bytes().enumerate() {
        let mut keep = |end_at: usize, open: &[u8]| (end, closing) = (end_at, open.to_vec());
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' if in_string => {
                in_string = false;
                if !is_key {
                    keep(at + 1, &open);
                }
            }
            b'"' => (in_string, is_key) = (true, open.last() == Some(&b'}') && last != b':'),
            _ if in_string => {}
            b'{' | b'[' => {
                open.push(if byte == b'{' { b'}' } else { b']' });
                keep(at + 1, &open);
            }
            b'}' | b']' => {
                open.pop();
                keep(at + 1, &open);
            }
            b',' => keep(at, &open),
            _ => {}
        }
        if !byte.is_ascii_whitespace() {
            last = byte;
        }
    }
    let closing = closing.into_iter().rev().map(char::from);
    text[..end].chars().chain(closing).collect()
}

/// What happens to the part that a list ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    /// It is new and empty.
    Opened,
    /// It grew by this.
    Grew(&'a str),
    /// Nothing more comes to it.
    Closed,
}

/// Parts up to now.
#[derive(Clone, Debug, Default)]
pub struct MessageParts {
    list: Vec<MessagePart>,
    open: bool,
}

impl MessageParts {
    pub fn list(&self) -> &[MessagePart] {
        &self.list
    }

    /// Adds what an event brings; `f` sees every change with the part's index and the part after it.
    pub fn take(&mut self, event: Event, mut f: impl FnMut(usize, Change<'_>, &MessagePart)) {
        match event {
            Event::Reasoning(text) => {
                if !matches!(self.current(), Some(MessagePart::Reasoning(_))) {
                    self.open(MessagePart::Reasoning(String::new()), &mut f);
                }
                self.grow(&text, &mut f);
            }
            Event::Content(text) => {
                if !matches!(self.current(), Some(MessagePart::Text(_))) {
                    self.open(MessagePart::Text(String::new()), &mut f);
                }
                self.grow(&text, &mut f);
            }
            Event::ToolCallStart { id, name, .. } => {
                self.open(MessagePart::Call(Call { id, name, ..Call::default() }), &mut f);
            }
            Event::ToolCallArguments { json, .. } => self.grow(&json, &mut f),
            Event::ToolCallEnd { complete, .. } => {
                if let Some(MessagePart::Call(call)) = self.list.last_mut() {
                    call.complete = complete;
                }
                self.close(&mut f);
            }
        }
    }

    /// Nothing more comes to any part.
    pub fn close(&mut self, mut f: impl FnMut(usize, Change<'_>, &MessagePart)) {
        if std::mem::take(&mut self.open)
            && let Some(part) = self.list.last()
        {
            f(self.list.len() - 1, Change::Closed, part);
        }
    }

    fn current(&self) -> Option<&MessagePart> {
        self.list.last().filter(|_| self.open)
    }

    fn open(&mut self, part: MessagePart, f: &mut impl FnMut(usize, Change<'_>, &MessagePart)) {
        self.close(&mut *f);
        f(self.list.len(), Change::Opened, &part);
        self.list.push(part);
        self.open = true;
    }

    fn grow(&mut self, more: &str, f: &mut impl FnMut(usize, Change<'_>, &MessagePart)) {
        let i = self.list.len();
        let Some(part) = self.list.last_mut().filter(|_| self.open) else { return };
        match part {
            MessagePart::Reasoning(text) | MessagePart::Text(text) => text.push_str(more),
            MessagePart::Call(call) => call.arguments.push_str(more),
        }
        f(i - 1, Change::Grew(more), part);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_call_that_was_cut_off_keeps_its_whole_members() {
        for (arguments, expected) in [
            ("", json!({})),
            ("{", json!({})),
            ("{\"a\"", json!({})),
            ("{\"a\": 1", json!({})),
            ("{\"a\": 1, \"b", json!({"a": 1})),
            ("{\"a\": \"x\"", json!({"a": "x"})),
            ("{\"a\": \"x\\\"", json!({})),
            ("{\"a\": [1, {\"b\": \"},\"}, tr", json!({"a": [1, {"b": "},"}]})),
            ("{\"a\": {\"b\": [\"x\", \"y", json!({"a": {"b": ["x"]}})),
            ("{\"a\": 1}", json!({"a": 1})),
            ("}]", json!({})),
        ] {
            let call = Call { arguments: arguments.into(), ..Call::default() };
            assert_eq!(call.object(), expected, "{arguments}");
        }
    }

    #[test]
    fn events_become_parts_in_order() {
        let text = |t: &str| Event::Content(t.into());
        let events = [
            Event::Reasoning("hm".into()),
            Event::Reasoning("m".into()),
            text("a"),
            text("b"),
            Event::ToolCallStart { index: 0, id: "1".into(), name: "f".into() },
            Event::ToolCallArguments { index: 0, json: "{".into() },
            Event::ToolCallArguments { index: 0, json: "}".into() },
            Event::ToolCallEnd { index: 0, complete: true },
            text("c"),
        ];
        let mut parts = MessageParts::default();
        let mut log = String::new();
        let mut note = |i: usize, change: Change<'_>, _: &MessagePart| match change {
            Change::Opened => log += &format!("({i}"),
            Change::Grew(more) => log += &format!(" {more}"),
            Change::Closed => log += &format!(" {i})"),
        };
        events.into_iter().for_each(|event| parts.take(event, &mut note));
        parts.close(&mut note);
        parts.close(&mut note);
        assert_eq!(log, "(0 hm m 0)(1 a b 1)(2 { } 2)(3 c 3)");
        let call = Call { id: "1".into(), name: "f".into(), arguments: "{}".into(), complete: true };
        assert_eq!(
            parts.list(),
            [
                MessagePart::Reasoning("hmm".into()),
                MessagePart::Text("ab".into()),
                MessagePart::Call(call),
                MessagePart::Text("c".into())
            ]
        );
    }
}
