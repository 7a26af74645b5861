use proptest::prelude::*;

use super::*;

/// A tool that every format's cases call.
fn tools() -> Vec<Tool> {
    let parameters = serde_json::json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "wide": {"type": "boolean"},
        "where": {"type": "object"}, "share": {"type": "number"},
    }});
    ["weather", "f"].map(|name| Tool { name: name.into(), parameters: parameters.clone() }).into()
}

/// Joins the pieces of each part; ids are left out, they depend on the seed.
fn merged(events: Vec<Event>) -> Vec<Event> {
    let mut out: Vec<Event> = Vec::new();
    for mut event in events {
        match (out.last_mut(), &mut event) {
            (Some(Event::Reasoning(a)), Event::Reasoning(b)) | (Some(Event::Content(a)), Event::Content(b)) => {
                a.push_str(b)
            }
            (Some(Event::ToolCallArguments { json: a, .. }), Event::ToolCallArguments { json: b, .. }) => a.push_str(b),
            _ => out.push(event),
        }
    }
    out
}

/// `R"..."` for a thought, `C"..."` for content, `name(arguments)` for a call, with `!` behind one that is not complete.
fn show(events: Vec<Event>) -> String {
    let parts = merged(events).into_iter().map(|event| match event {
        Event::Reasoning(text) => format!("R{text:?} "),
        Event::Content(text) => format!("C{text:?} "),
        Event::ToolCallStart { index, name, .. } => format!("{index}:{name}("),
        Event::ToolCallArguments { json, .. } => json,
        Event::ToolCallEnd { complete, .. } => if complete { ") " } else { ")! " }.to_owned(),
    });
    parts.collect::<String>().trim_end().to_owned()
}

/// A text in pieces: cut behind every byte whose bit is set, where a character ends.
fn in_pieces(format: Format, opened: bool, hold: Hold, text: &str, cuts: u64) -> Vec<Event> {
    let mut parser = Parser::new(format, &tools(), opened, hold, 7);
    let (mut events, mut start) = (Vec::new(), 0);
    for (n, (at, c)) in text.char_indices().enumerate() {
        let end = at + c.len_utf8();
        if cuts.rotate_right((n % 61) as u32) & 1 == 1 {
            parser.push(&text[start..end], &mut events);
            start = end;
        }
    }
    parser.push(&text[start..], &mut events);
    parser.finish(&mut events);
    events
}

/// A template's words, whether the prompt opened a thought, the text, and what is in it: with calls held back to their name,
/// and with whole calls held back where that differs.
struct Case(&'static str, bool, &'static str, &'static str, Option<&'static str>);

const HERMES: &str = "<tool_call> <think></think>";

const CASES: &[Case] = &[
    Case(HERMES, false, "plain <b>text</b>\n", r#"C"plain <b>text</b>\n""#, None),
    Case(HERMES, false, "<think>\nwhy\n</think>\n\nBecause.\n", r#"R"why" C"Because.\n""#, None),
    Case(HERMES, false, " \n<think></think>Because.", r#"C"Because.""#, None),
    Case(HERMES, true, "why\n\n</think>\n\nBecause.", r#"R"why" C"Because.""#, None),
    Case(HERMES, true, "<think>\nwhy</think>Because.", r#"R"why" C"Because.""#, None),
    Case(HERMES, true, "why < x </thin", r#"R"why < x </thin""#, None),
    Case(HERMES, false, "About <think> and </think>", r#"C"About <think> and </think>""#, None),
    Case(
        HERMES,
        true,
        "hm</think>\nI look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\"}}\n</tool_call>",
        r#"R"hm" C"I look." 0:weather({"city": "Köln"})"#,
        None,
    ),
    Case(
        HERMES,
        false,
        "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>\n{\"name\": \"weather\", \"arguments\": \
         {\"a\": [1, {\"b\": \"}\\\"\"}]}}\n</tool_call>\nDone.",
        r#"0:f({}) 1:weather({"a": [1, {"b": "}\""}]}) C"Done.""#,
        None,
    ),
    Case(
        HERMES,
        false,
        "<tool_call>{\"arguments\": \"{\\\"a\\\": 1}\", \"name\": \"f\"}</tool_call>",
        r#"0:f({"a":1})"#,
        None,
    ),
    Case(HERMES, false, "<tool_call>{\"name\": \"f\"}", "0:f({})", None),
    Case(HERMES, false, "a <tool_call> b", r#"C"a <tool_call> b""#, None),
    Case(HERMES, false, "<tool_call>[1]</tool_call>", r#"C"<tool_call>[1]</tool_call>""#, None),
    Case(
        HERMES,
        false,
        "x\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": tru, }}</tool_call>",
        r#"C"x" 0:f({"a": tru)! C", }}</tool_call>""#,
        Some(r#"C"x\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": tru, }}</tool_call>""#),
    ),
    Case(
        HERMES,
        false,
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1",
        r#"0:f({"a": 1)!"#,
        Some(r#"C"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1""#),
    ),
];

#[test]
fn texts_come_apart_at_their_marks() {
    for Case(template, opened, text, head, call) in CASES {
        let format = Format::detect(template);
        for (hold, expected) in [(Hold::Head, head), (Hold::Call, call.as_ref().unwrap_or(head))] {
            for cuts in [0, u64::MAX, 0x5555_5555_5555_5555, 0x0842_1084_2108_4211] {
                let got = show(in_pieces(format, *opened, hold, text, cuts));
                assert_eq!(got, *expected, "{} {hold:?} {cuts:x} {text}", format.name());
            }
        }
    }
}

proptest! {
    /// Fragments of all marks and of JSON, in any order and cut anywhere.
    #[test]
    fn parts_depend_on_the_text_alone(
        case in 0..CASES.len(),
        picks in prop::collection::vec((0..CASES.len(), 0..200usize, 0..60usize), 1..8),
        opened: bool,
        whole: bool,
        cuts: u64,
    ) {
        let format = Format::detect(CASES[case].0);
        let hold = if whole { Hold::Call } else { Hold::Head };
        let mut text = String::new();
        for (from, start, len) in picks {
            let source = if start % 3 == 0 { CASES[case].2 } else { CASES[from].2 };
            text.extend(source.chars().skip(start % source.len()).take(len));
        }
        let at_once = merged(in_pieces(format, opened, hold, &text, 0));
        prop_assert_eq!(&merged(in_pieces(format, opened, hold, &text, cuts)), &at_once);
        prop_assert_eq!(&merged(in_pieces(format, opened, hold, &text, u64::MAX)), &at_once);
        for event in at_once {
            if let Event::ToolCallArguments { json, index } = &event && hold == Hold::Call {
                prop_assert!(serde_json::from_str::<serde_json::Value>(json).is_ok(), "{index} {json}");
            }
        }
    }

    #[test]
    fn a_text_without_marks_is_content(text in "[a-z{}\"\\[\\] \n<>é/|]*", cuts: u64) {
        prop_assume!(!text.contains("<t"));
        for case in CASES {
            let format = Format::detect(case.0);
            let events = merged(in_pieces(format, false, Hold::Head, &text, cuts));
            let expected: Vec<_> = (!text.is_empty()).then(|| Event::Content(text.clone())).into_iter().collect();
            prop_assert_eq!(events, expected, "{}", format.name());
        }
    }
}
