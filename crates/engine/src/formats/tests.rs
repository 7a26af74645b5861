use proptest::prelude::*;

use super::*;

/// Returns a tool that every format's cases call.
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

/// `R"..."` for a thought, `C"..."` for content, `name(arguments)` for a call, with `!` after an incomplete one.
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

/// Returns a text cut into pieces: after every byte whose bit is set, at character boundaries.
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

/// Text in a template that selects the format, whether the prompt opened a thought, the answer, and its parts: with
/// calls held back to their name, and with whole calls held back where that differs.
struct Case(&'static str, bool, &'static str, &'static str, Option<&'static str>);

// Texts of templates that select a format.
const HERMES: &str = "<tool_call> <think></think>";
const XML: &str = "<tool_call> <function= <think></think>";
const GLM: &str = "<tool_call> <arg_key> <think></think>";
const DEEPSEEK: &str = "<｜tool▁calls▁begin｜> </think>";
const KIMI: &str = "<|tool_calls_section_begin|>";
const MISTRAL: &str = "[TOOL_CALLS] [THINK]";
const LLAMA: &str = "<|python_tag|>";
const GEMMA: &str = "<|tool_call>call: <|channel>thought";
const HARMONY: &str = "<|channel|>analysis";
const MINIMAX: &str = "<minimax:tool_call> <think></think>";
const DSML: &str = "｜DSML｜ </think>";
const SEED: &str = "<seed:tool_call> <seed:think>";
const LFM: &str = "<|tool_call_start|>";
const OLMO: &str = "<function_calls>";
const NEMOTRON: &str = "<TOOLCALL>";
const GRANITE: &str = "<|tool_call|>";
const PHI: &str = "<|tool_call|> <|/tool_call|>";
const COMMAND: &str = "<|START_ACTION|> <|START_THINKING|>";
const LLAMA4: &str = "<|python_start|>";

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
    Case(HERMES, false, "a <tool_call> b", r#"C"a  b""#, None),
    Case(HERMES, false, "<tool_call>[1]</tool_call>", r#"C"[1]""#, None),
    Case(
        HERMES,
        false,
        "x\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": tru, }}</tool_call>",
        r#"C"x" 0:f({"a": tru)! C", }}""#,
        Some(r#"C"x\n{\"name\": \"f\", \"arguments\": {\"a\": tru, }}""#),
    ),
    Case(HERMES, false, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1", r#"0:f({"a": 1)!"#, None),
    Case(HERMES, false, "I look.\n<tool_call>\n{\"name\": \"weat", r#"C"I look.""#, None),
    Case(
        HERMES,
        false,
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n<tool_call>\n{\"na",
        "0:f({})",
        None,
    ),
    Case(HERMES, false, "<tool_call>{\"name\": \"f\", \"arguments\": {}}\n</tool", "0:f({})", None),
    Case(
        XML,
        true,
        "so</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\n \"York\"\n</parameter>\n<parameter=days>\n3\n\
         </parameter>\n<parameter=wide>\nTrue\n</parameter>\n<parameter=where>\n{\"a\": [1]}\n</parameter>\n</function>\n\
         </tool_call>",
        r#"R"so" 0:weather({"city": "New\n \"York\"", "days": 3, "wide": true, "where": {"a": [1]}})"#,
        None,
    ),
    Case(
        XML,
        false,
        "<function=f>\n</function>\n<function=f><parameter=x>1</parameter><parameter=y>one</parameter></function>",
        r#"0:f({}) 1:f({"x": 1, "y": "one"})"#,
        None,
    ),
    Case(XML, false, "use <function=a\n> or <function", r#"C"use a\n> or <function""#, None),
    Case(XML, false, "<tool_call>\n<function=f>\n<parameter=city>\nRome", "0:f({)!", None),
    Case(
        GLM,
        false,
        "\n<think>hm</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome\n</arg_value>\n\
         <arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>share</arg_key><arg_value>2</arg_value></tool_call>\n\
         <tool_call>f</tool_call>",
        r#"R"hm" C"I look." 0:weather({"city": "Rome\n", "days": 2, "share": 2}) 1:f({})"#,
        None,
    ),
    Case(GLM, false, "<tool_call>a b\nc</tool_call>", r#"C"a b\nc""#, None),
    Case(
        DEEPSEEK,
        true,
        "hm\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \
         \"Rome\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>\
         <｜tool▁calls▁end｜>",
        r#"R"hm" C"I look." 0:weather({"city": "Rome"}) 1:f({})"#,
        None,
    ),
    Case(
        DEEPSEEK,
        false,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Rome\"}<｜tool▁call▁end｜>\
         <｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        r#"0:weather({"city": "Rome"}) 1:f({})"#,
        None,
    ),
    Case(
        DEEPSEEK,
        false,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f",
        "0:f({})",
        None,
    ),
    Case(
        KIMI,
        false,
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"city\": \
         \"Rome\"}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|>\
         <|tool_calls_section_end|>",
        r#"C"I look." 0:weather({"city": "Rome"}) 1:f({})"#,
        None,
    ),
    Case(
        MISTRAL,
        false,
        "[THINK]hm[/THINK]I look.[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{\"city\": \"Rome\"}[TOOL_CALLS]f[ARGS]{}",
        r#"R"hm" C"I look." 0:weather({"city": "Rome"}) 1:f({})"#,
        None,
    ),
    Case(
        MISTRAL,
        false,
        "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": [1]}, \"id\": \"x\"}, {\"name\": \"f\", \"arguments\": {}}]",
        r#"0:f({"a": [1]}) 1:f({})"#,
        None,
    ),
    Case(MISTRAL, false, "[TOOL_CALLS] {none}", r#"C" {none}""#, None),
    Case(
        LLAMA,
        false,
        "\n{\"name\": \"weather\", \"parameters\": {\"city\": \"Rome\"}}; {\"name\": \"f\", \"parameters\": {}}",
        r#"0:weather({"city": "Rome"}) 1:f({})"#,
        None,
    ),
    Case(LLAMA, false, "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}", "0:f({})", None),
    Case(LLAMA, false, "{\"answer\": 42", r#"C"{\"answer\": 42""#, None),
    Case(LLAMA, false, "{\"answer\": 42}", r#"C"{\"answer\": 42}""#, None),
    Case(LLAMA, false, "A brace: {\"name\": \"f\"}", r#"C"A brace: {\"name\": \"f\"}""#, None),
    Case(
        GEMMA,
        false,
        "<|channel>thought\nhm\n<channel|><|tool_call>call:weather{city:<|\"|>Ro\"me<|\"|>,days:3,wide:true,where:{a:[1,<|\"|>x<|\"|>],\
         b:{}}}<tool_call|><|tool_call>call:f{}<tool_call|>",
        r#"R"hm" 0:weather({"city":"Ro\"me","days":3,"wide":true,"where":{"a":[1,"x"],"b":{}}}) 1:f({})"#,
        None,
    ),
    Case(GEMMA, false, "<|tool_call>call:f{a<tool_call|>", "", None),
    Case(
        HARMONY,
        false,
        "<|channel|>analysis<|message|>hm <b><|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant\
         <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Rome\"}<|call|>",
        r#"R"hm <b>" C"I look." 0:weather({"city": "Rome"})"#,
        None,
    ),
    Case(HARMONY, false, " to=functions.f<|channel|>commentary json<|message|>{}", "0:f({})", None),
    Case(HARMONY, false, "<|channel|>final<|message|>It is so.\n", r#"C"It is so.\n""#, None),
    Case(HARMONY, false, "<|channel|>commentary to=functions.f", "", None),
    Case(HARMONY, false, "<|channel|>final<|message|>x<|end|><|sta", r#"C"x""#, None),
    Case(HARMONY, false, "plain <|chan", r#"C"plain <|chan""#, None),
    Case(
        HARMONY,
        false,
        "<|channel|>commentary to=functions.f<|message|>no<|end|><|start|>assistant<|channel|>final<|message|>x",
        r#"0:f()! C"nox""#,
        Some(r#"C"nox""#),
    ),
    Case(
        MINIMAX,
        true,
        "hm</think>\n\nI look.\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">New\n\"York\"</parameter>\n\
         <parameter name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"f\">\n</invoke>\n</minimax:tool_call>\nDone.",
        r#"R"hm" C"I look." 0:weather({"city": "New\n\"York\"", "days": 3}) 1:f({}) C"Done.""#,
        None,
    ),
    Case(MINIMAX, false, "<minimax:tool_call>\n<invoke name=\"f\">\n</invoke>", "0:f({})", None),
    Case(MINIMAX, false, "<minimax:tool_call>no</minimax:tool_call>", r#"C"no""#, None),
    Case(MINIMAX, false, "<minimax:tool_call><invoke name=\"f\"><parameter name=\"a\">1", "0:f({)!", None),
    Case(
        DSML,
        true,
        "hm</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" \
         string=\"true\">7</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n\
         </｜DSML｜invoke>\n</｜DSML｜function_calls>",
        r#"R"hm" 0:weather({"city": "7", "days": 3})"#,
        None,
    ),
    Case(
        DSML,
        false,
        "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"a\">1",
        r#"0:f({)! C"<｜DSML｜parameter name=\"a\">1""#,
        Some(r#"C"<｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"a\">1""#),
    ),
    Case(
        SEED,
        false,
        "<seed:think>hm</seed:think>\n<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n\
         <parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        r#"R"hm" 0:weather({"city": "Rome", "days": 3})"#,
        None,
    ),
    Case(
        LFM,
        false,
        "I look.<|tool_call_start|>[weather(city='It\\'s \"x\"\ny', days=2, wide=True, where={'a': [1, None], \"b\": {}}), \
         f()]<|tool_call_end|>Done.",
        r#"C"I look." 0:weather({"city": "It's \"x\"\ny", "days": 2, "wide": true, "where": {"a": [1, null], "b": {}}}) 1:f({}) C"Done.""#,
        None,
    ),
    Case(
        LFM,
        false,
        "<|tool_call_start|>[{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"f\", \"arguments\": {}}]<|tool_call_end|>",
        r#"0:f({"a": 1}) 1:f({})"#,
        None,
    ),
    Case(
        LFM,
        false,
        "<|tool_call_start|>[f(a=\"\\ud83d\\ude00\\x41\\u00fc\\q\", b=(1, -2.5e3,), c=[],)]<|tool_call_end|>",
        r#"0:f({"a": "😀Aü\\q", "b": [1, -2.5e3], "c": []})"#,
        None,
    ),
    Case(LFM, false, "<|tool_call_start|>[f(a=1, b=", r#"0:f({"a": 1)!"#, None),
    Case(LFM, false, "<|tool_call_start|>[f(a=1), g(", r#"0:f({"a": 1}) 1:g({)!"#, None),
    Case(LFM, false, "<|tool_call_start|>[1, 2]<|tool_call_end|>", r#"C"[1, 2]""#, None),
    Case(LFM, false, "<|tool_call_start|>[f(a=x)]<|tool_call_end|>", r#"0:f({)! C"a=x)]""#, Some(r#"C"[f(a=x)]""#)),
    Case(
        OLMO,
        false,
        "<function_calls>\nweather(city=\"Rome\", days=2)\nf()\n</function_calls>",
        r#"0:weather({"city": "Rome", "days": 2}) 1:f({})"#,
        None,
    ),
    Case(
        NEMOTRON,
        false,
        "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"f\", \"arguments\": {}}]</TOOLCALL> Done.",
        r#"0:f({"a": 1}) 1:f({}) C"Done.""#,
        None,
    ),
    Case(NEMOTRON, false, "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {}}, ", "0:f({})", None),
    Case(GRANITE, false, "<|tool_call|>[{\"name\": \"f\", \"arguments\": {}}]", "0:f({})", None),
    Case(
        PHI,
        false,
        "<|tool_call|>{\"name\": \"f\", \"arguments\": {}}<|/tool_call|><|tool_call|>[{\"name\": \"f\", \"arguments\": {\"a\": 1}}]\
         <|/tool_call|>",
        r#"0:f({}) 1:f({"a": 1})"#,
        None,
    ),
    Case(
        COMMAND,
        false,
        "<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \
         \"parameters\": {\"a\": 1}}\n]<|END_ACTION|>",
        r#"R"hm" 0:f({"a":1})"#,
        None,
    ),
    Case(LLAMA4, false, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", r#"0:f({"a": 1})"#, None),
    Case(LLAMA4, false, "<|python_start|>[f(a=1), f()]<|python_end|>", r#"0:f({"a": 1}) 1:f({})"#, None),
    Case(LLAMA4, false, "{\"answer\": 42}", r#"C"{\"answer\": 42}""#, None),
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

#[test]
fn a_thought_ends_where_what_follows_it_begins() {
    // Pieces, and whether each ends inside a thought.
    let cases: [(&str, bool, &[(&str, bool)]); 4] = [
        (HERMES, false, &[("<think>", true), ("a", true), ("</think>", false), ("\n\n", false), ("b", false)]),
        (HERMES, true, &[("a</thi", true), ("nk><tool_call>", false), ("{\"name\": \"f\", ", false)]),
        (
            HARMONY,
            false,
            &[
                ("<|channel|>analysis", false),
                ("<|message|>a", true),
                ("<|end|>", true),
                ("<|start|>assistant<|channel|>commentary to=functions.f<|message|>", false),
                ("{\"a\": ", false),
            ],
        ),
        (HARMONY, false, &[("<|channel|>final<|message|>a", false)]),
    ];
    for (template, opened, pieces) in cases {
        for hold in [Hold::Head, Hold::Call] {
            let mut parser = Parser::new(Format::detect(template), &tools(), opened, hold, 1);
            assert_eq!(parser.in_thought(), opened);
            for (text, expected) in pieces {
                parser.push(text, &mut Vec::new());
                assert_eq!(parser.in_thought(), *expected, "{template} {text}");
            }
        }
    }
}

/// A limit may fall inside a mark.
#[test]
fn half_a_mark_at_a_cut_is_no_content() {
    for (template, opened, text, expected) in [
        (HERMES, false, "I look.\n<tool_c", r#"C"I look.""#),
        (HERMES, true, "hm\n</thi", r#"R"hm""#),
        (HERMES, false, "a < b <", r#"C"a < b""#),
        (HERMES, false, "a < b ", r#"C"a < b ""#),
        (KIMI, false, "x<|tool_calls_sec", r#"C"x""#),
    ] {
        let mut parser = Parser::new(Format::detect(template), &tools(), opened, Hold::Head, 7);
        let mut events = Vec::new();
        parser.push(text, &mut events);
        parser.cut(&mut events);
        assert_eq!(show(events), expected, "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

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
            // Often this case's own text, and often a prefix or suffix of it.
            let source = if start % 3 > 0 { CASES[case].2 } else { CASES[from].2 };
            let start = if len % 2 == 0 { 0 } else { start % source.len() };
            text.extend(source.chars().skip(start).take(if len % 3 > 0 { usize::MAX } else { len * 4 }));
        }
        let at_once = merged(in_pieces(format, opened, hold, &text, 0));
        prop_assert_eq!(&merged(in_pieces(format, opened, hold, &text, cuts)), &at_once);
        prop_assert_eq!(&merged(in_pieces(format, opened, hold, &text, u64::MAX)), &at_once);
        let complete = |i: usize| at_once.contains(&Event::ToolCallEnd { index: i, complete: true });
        for event in &at_once {
            if let Event::ToolCallArguments { json, index } = event && complete(*index) {
                prop_assert!(serde_json::from_str::<serde_json::Value>(json).is_ok(), "{index} {json}");
            }
        }
        // With whole calls held back, only the text's end leaves one incomplete.
        let broken = at_once.iter().filter(|event| matches!(event, Event::ToolCallEnd { complete: false, .. }));
        prop_assert!(hold == Hold::Head || broken.count() <= 1);
    }

    #[test]
    fn a_text_without_marks_is_content(text in "[a-z{}\"\\[\\] \n>é/|]*", cuts: u64) {
        prop_assume!(!text.trim_start().starts_with("{"));
        for case in CASES {
            let format = Format::detect(case.0);
            let events = merged(in_pieces(format, false, Hold::Head, &text, cuts));
            let expected: Vec<_> = (!text.is_empty()).then(|| Event::Content(text.clone())).into_iter().collect();
            prop_assert_eq!(events, expected, "{}", format.name());
        }
    }
}
