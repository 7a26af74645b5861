use serde_json::{Value, json};

use super::*;
use crate::grammar::tests::{FABLE, answer, satisfies};
use crate::grammar::{Constraint, Error, Rule};

/// Texts of templates, one per notation of calls.
const TEMPLATES: &[&str] = &[
    "<tool_call>",
    "<tool_call> <think></think>",
    "<tool_call> <function= <think></think>",
    "<tool_call> <arg_key> <think></think>",
    "<｜tool▁calls▁begin｜> ```json </think>",
    "<｜tool▁calls▁begin｜> </think>",
    "<|tool_calls_section_begin|>",
    "[TOOL_CALLS] [ARGS] [CALL_ID]",
    "[TOOL_CALLS] [ARGS] [THINK]",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|tool_call>call: <|channel>thought",
    "<|channel|>analysis",
    "<minimax:tool_call> <think></think>",
    "｜DSML｜ <think></think>",
    "<seed:tool_call> <seed:think>",
    "<|tool_call_start|> <think></think>",
    "<function_calls>",
    "<TOOLCALL> <think></think>",
    "<tool_calls> </tool_calls>",
    "<|tool_call|> <|/tool_call|>",
    "<|tool_call|>",
    "<|START_ACTION|> <|START_THINKING|>",
    "<|python_start|>",
];

fn tools() -> Vec<Tool> {
    let parameters = json!({
        "type": "object", "additionalProperties": false, "required": ["city", "days"],
        "properties": {
            "city": {"type": "string", "enum": ["Rome", "Köln \"am Rhein\""]}, "days": {"type": "integer"}, "wide": {"type": "boolean"},
            "kinds": {"type": "array", "items": {"type": "integer"}},
        },
    });
    vec![Tool { name: "weather".into(), parameters }, Tool { name: "now".into(), parameters: Value::Null }]
}

/// Returns the calls of an answer: names and arguments; then the content alongside them.
fn calls(events: Vec<Event>) -> (Vec<(String, String)>, String) {
    let (mut calls, mut content) = (Vec::new(), String::new());
    for event in events {
        match event {
            Event::ToolCallStart { name, .. } => calls.push((name, String::new())),
            Event::ToolCallArguments { index, json } => calls[index].1.push_str(&json),
            Event::Content(text) => content.push_str(&text),
            _ => {}
        }
    }
    (calls, content)
}

/// Checks calls against their tools.
fn check(calls: &[(String, String)], what: &str) {
    let tools = tools();
    for (name, arguments) in calls {
        let tool = tools.iter().find(|tool| tool.name == *name).unwrap_or_else(|| panic!("{what}: no tool {name}"));
        let value: Value = serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{what}: {e}: {arguments}"));
        assert!(
            value.is_object() && (tool.parameters.is_null() || satisfies(&value, &tool.parameters)),
            "{what}: {value}"
        );
    }
}

fn constraint(format: Format, ask: &Ask<'_>) -> Result<Option<Constraint>, Error> {
    format.constraint(ask, &FABLE.0, &FABLE.1)
}

#[test]
fn required_calls_are_written() {
    let tools = tools();
    let mut n_ended = 0;
    for template in TEMPLATES {
        let format = Format::detect(template);
        for seed in 0..6 {
            let (most_calls, choice) = match seed % 3 {
                0 => (Some(2), Choice::Required),
                1 => (Some(1), Choice::Required),
                _ => (None, Choice::Named("weather")),
            };
            let ask = Ask { tools: &tools, choice, most_calls, ..Ask::default() };
            let constraint = constraint(format, &ask).unwrap().unwrap();
            let (text, ended) = answer(constraint, &[], seed, 300).unwrap();
            let what = format!("{format:?} {choice:?} {most_calls:?}: {text}");
            let (calls, content) = calls(Parser::new(format, &tools, false, Hold::Call, 1).parse(&text));
            if !ended {
                continue;
            }
            n_ended += 1;
            check(&calls, &what);
            assert!(!calls.is_empty() && content.is_empty(), "{what}");
            assert!(most_calls.is_none_or(|most| calls.len() <= most), "{what}");
            assert!(seed % 3 < 2 || calls.iter().all(|(name, _)| name == "weather"), "{what}");
        }
    }
    assert!(n_ended > TEMPLATES.len() * 3, "only {n_ended} answers came to their end");
}

#[test]
fn a_call_that_the_model_begins_keeps_to_its_form() {
    let tools = tools();
    let mut n_ended = 0;
    for template in TEMPLATES {
        let format = Format::detect(template);
        let Some(constraint) = constraint(format, &Ask { tools: &tools, ..Ask::default() }).unwrap() else {
            assert!(format.name().starts_with("llama"), "{format:?}");
            continue;
        };
        let thought = constraint.thought.clone().map(|t| format!("{}hm{}", t.open, t.close)).unwrap_or_default();
        // Where every message has a header, this one has one too.
        let before = if format.name() == "harmony" {
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        } else {
            "I look. "
        };
        let forced = FABLE.0.encode(&format!("{thought}{before}{}", constraint.triggers[0]), Default::default());
        for seed in 0..4 {
            let (text, ended) = answer(constraint.clone(), &forced, seed, 300).unwrap();
            let (calls, content) = calls(Parser::new(format, &tools, false, Hold::Call, 1).parse(&text));
            if ended {
                n_ended += 1;
                check(&calls, &text);
                assert!(!calls.is_empty() && before.starts_with(&content), "{format:?} {text}");
            }
        }
    }
    assert!(n_ended > TEMPLATES.len() * 3 / 2, "only {n_ended} answers came to their end");
}

#[test]
fn content_and_calls_stand_side_by_side() {
    let tools = tools();
    let rule = Rule::JsonSchema(
        json!({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3}),
    );
    for template in TEMPLATES {
        let format = Format::detect(template);
        for (tools, opened) in [(&tools[..], false), (&[], format.thought().is_some())] {
            let ask = Ask { content: Some(&rule), tools, opened, ..Ask::default() };
            let constraint = constraint(format, &ask).unwrap().unwrap();
            let forced =
                if opened { FABLE.0.encode(format.thought().unwrap().close, Default::default()) } else { Vec::new() };
            for seed in 0..4 {
                let (text, ended) = answer(constraint.clone(), &forced, seed, 300).unwrap();
                let (calls, content) = calls(Parser::new(format, tools, opened, Hold::Call, 1).parse(&text));
                if ended {
                    check(&calls, &text);
                    let is_list = serde_json::from_str::<Vec<i64>>(&content).is_ok();
                    assert!(calls.is_empty() == is_list && (is_list || content.is_empty()), "{format:?} {text}");
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_called_is_refused() {
    let tools = tools();
    let strange =
        [Tool { name: "f".into(), parameters: json!({"type": "object", "properties": {"a": {"not": {"const": 1}}}}) }];
    let hermes = Format::detect(TEMPLATES[0]);
    let cases: [(Format, Ask<'_>, &str); 4] = [
        (Format::PLAIN, Ask { tools: &tools, choice: Choice::Required, ..Ask::default() }, "has no calls"),
        (hermes, Ask { tools: &tools, choice: Choice::Named("g"), ..Ask::default() }, "no such tool"),
        (hermes, Ask { choice: Choice::Required, ..Ask::default() }, "no such tool"),
        (hermes, Ask { tools: &strange, choice: Choice::Required, ..Ask::default() }, "not"),
    ];
    for (format, ask, expected) in cases {
        let error = constraint(format, &ask).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // A tool by whose schema nothing can be held takes any object, and the others keep theirs.
    for choice in [Choice::Auto, Choice::Required, Choice::Named("f")] {
        let tools = [&tools[..], &strange[..]].concat();
        let ask = Ask { tools: &tools, choice, ..Ask::default() };
        let (held, loose) = hermes.loose_constraint(&ask, &FABLE.0, &FABLE.1).unwrap();
        assert_eq!((held.is_some(), loose), (true, vec!["f".to_owned()]));
    }
    let bad = Rule::JsonSchema(json!({"type": "king"}));
    let ask = Ask { content: Some(&bad), tools: &tools, ..Ask::default() };
    assert!(hermes.loose_constraint(&ask, &FABLE.0, &FABLE.1).is_err());
    assert!(constraint(hermes, &Ask::default()).unwrap().is_none());
}
