//! An answer as a list of parts, one after the other: thoughts, texts, calls. For the APIs that show it so, whole or as
//! it grows.

use engine::formats::Event;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Reasoning(String),
    Text(String),
    Call(Call),
}

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    pub id: String,
    pub name: String,
    /// JSON.
    pub arguments: String,
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
pub struct Parts {
    list: Vec<Part>,
    open: bool,
}

impl Parts {
    pub fn list(&self) -> &[Part] {
        &self.list
    }

    /// Adds what an event brings; `f` sees every change with the part's index and the part after it.
    pub fn take(&mut self, event: Event, mut f: impl FnMut(usize, Change<'_>, &Part)) {
        match event {
            Event::Reasoning(text) => {
                if !matches!(self.current(), Some(Part::Reasoning(_))) {
                    self.open(Part::Reasoning(String::new()), &mut f);
                }
                self.grow(&text, &mut f);
            }
            Event::Content(text) => {
                if !matches!(self.current(), Some(Part::Text(_))) {
                    self.open(Part::Text(String::new()), &mut f);
                }
                self.grow(&text, &mut f);
            }
            Event::ToolCallStart { id, name, .. } => {
                self.open(Part::Call(Call { id, name, arguments: String::new() }), &mut f);
            }
            Event::ToolCallArguments { json, .. } => self.grow(&json, &mut f),
            Event::ToolCallEnd { .. } => self.close(&mut f),
        }
    }

    /// Nothing more comes to any part.
    pub fn close(&mut self, mut f: impl FnMut(usize, Change<'_>, &Part)) {
        if std::mem::take(&mut self.open)
            && let Some(part) = self.list.last()
        {
            f(self.list.len() - 1, Change::Closed, part);
        }
    }

    fn current(&self) -> Option<&Part> {
        self.list.last().filter(|_| self.open)
    }

    fn open(&mut self, part: Part, f: &mut impl FnMut(usize, Change<'_>, &Part)) {
        self.close(&mut *f);
        f(self.list.len(), Change::Opened, &part);
        self.list.push(part);
        self.open = true;
    }

    fn grow(&mut self, more: &str, f: &mut impl FnMut(usize, Change<'_>, &Part)) {
        let i = self.list.len();
        let Some(part) = self.list.last_mut().filter(|_| self.open) else { return };
        match part {
            Part::Reasoning(text) | Part::Text(text) => text.push_str(more),
            Part::Call(call) => call.arguments.push_str(more),
        }
        f(i - 1, Change::Grew(more), part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut parts = Parts::default();
        let mut log = String::new();
        let mut note = |i: usize, change: Change<'_>, _: &Part| match change {
            Change::Opened => log += &format!("({i}"),
            Change::Grew(more) => log += &format!(" {more}"),
            Change::Closed => log += &format!(" {i})"),
        };
        events.into_iter().for_each(|event| parts.take(event, &mut note));
        parts.close(&mut note);
        parts.close(&mut note);
        assert_eq!(log, "(0 hm m 0)(1 a b 1)(2 { } 2)(3 c 3)");
        let call = Call { id: "1".into(), name: "f".into(), arguments: "{}".into() };
        assert_eq!(
            parts.list(),
            [Part::Reasoning("hmm".into()), Part::Text("ab".into()), Part::Call(call), Part::Text("c".into())]
        );
    }
}
