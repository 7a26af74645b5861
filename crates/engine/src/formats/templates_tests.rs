//! Round trip through real templates: the parser reads an earlier answer as the template rendered it.

use serde_json::{Value, json};

use super::*;
use crate::template::{Chat, ChatTemplate};

const BOS: &str = "<s>";
const EOS: &str = "</s>";

/// A conversation as templates of our own write it; `CALLS` is what a family puts behind an answer's text.
const CHAT: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if m.content is string %}{{ m.content }}{% elif m.content %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}\
    {% if m.tool_calls %}CALLS{% endif %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Templates of our own: the format, whether an answer may have several calls, and the calls in the family's notation.
const OWN: &[(&str, bool, &str)] = &[
    ("hermes", true, "EACH<tool_call>\n{\"name\": \"{{ f.name }}\", \"arguments\": ARGUMENTS}\n</tool_call>\nNEXT"),
    (
        "hermes+think",
        true,
        "<think>\n\n</think>EACH<tool_call>{\"name\": \"{{ f.name }}\", \"arguments\": ARGUMENTS}</tool_call>NEXT",
    ),
    (
        "qwen-xml",
        true,
        "EACH<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n\
         {% if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}\n</parameter>\n{% endfor %}\
         </function>\n</tool_call>NEXT",
    ),
    (
        "glm",
        true,
        "EACH<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>\
         {% if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}</arg_value>\n{% endfor %}</tool_call>NEXT",
    ),
    // Ling 3.0: no line end after a value.
    (
        "glm+think",
        true,
        "\n<think>{{ m.reasoning_content }}</think>EACH<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}\
         <arg_key>{{ k }}</arg_key>\n<arg_value>{% if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}\
         </arg_value>{% endfor %}\n</tool_call>NEXT",
    ),
    ("llama", false, "{# <|python_tag|> #}EACH{\"name\": \"{{ f.name }}\", \"parameters\": ARGUMENTS}NEXT"),
    ("mistral-id", true, "EACH[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]ARGUMENTSNEXT"),
    ("mistral-args", true, "EACH[TOOL_CALLS]{{ f.name }}[ARGS]ARGUMENTSNEXT"),
    (
        "mistral",
        true,
        "[TOOL_CALLS][EACH{\"name\": \"{{ f.name }}\", \"arguments\": ARGUMENTS, \"id\": \"{{ c.id }}\"}\
         {% if not loop.last %}, {% endif %}NEXT]",
    ),
    (
        "deepseek-v3.1",
        true,
        "<｜tool▁calls▁begin｜>EACH<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>NEXT<｜tool▁calls▁end｜>",
    ),
    (
        "minimax+think",
        true,
        "<think>\n</think>\n<minimax:tool_call>\nEACH<invoke name=\"{{ f.name }}\">\n{% for k, v in f.arguments.items() %}\
         <parameter name=\"{{ k }}\">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\nNEXT\
         </minimax:tool_call>",
    ),
    (
        "dsml+think",
        true,
        "<think>\n</think>\n\n<｜DSML｜function_calls>EACH\n<｜DSML｜invoke name=\"{{ f.name }}\">\n{% for k, v in f.arguments.items() %}\
         {{ '' if loop.first else '\n' }}<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">\
         {{ v if v is string else v | tojson }}</｜DSML｜parameter>{% endfor %}\n</｜DSML｜invoke>NEXT\n\
         </｜DSML｜function_calls>",
    ),
    (
        "seed",
        true,
        "EACH\n<seed:tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\
         {{ v if v is string else v | string }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>NEXT",
    ),
    (
        "lfm",
        true,
        "<|tool_call_start|>[EACH{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={% if v is string %}'{{ v }}'\
         {% elif v is mapping %}{{ v | tojson }}{% else %}{{ v | string }}{% endif %}{{ '' if loop.last else ', ' }}\
         {% endfor %}){{ '' if loop.last else ', ' }}NEXT]<|tool_call_end|>",
    ),
    (
        "lfm",
        true,
        "<|tool_call_start|>[EACH{\"name\": \"{{ f.name }}\", \"arguments\": ARGUMENTS, \"id\": \"{{ c.id }}\"}\
         {{ '' if loop.last else ', ' }}NEXT]<|tool_call_end|>",
    ),
    (
        "olmo",
        true,
        "<function_calls>EACH\n{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}\
         {{ '' if loop.last else ', ' }}{% endfor %})NEXT\n</function_calls>",
    ),
    (
        "nemotron",
        true,
        "<TOOLCALL>[EACH{\"name\": \"{{ f.name }}\", \"arguments\": ARGUMENTS}{{ '' if loop.last else ', ' }}NEXT]</TOOLCALL>",
    ),
    (
        "hunyuan",
        true,
        "<tool_calls>[EACH{\"name\": \"{{ f.name }}\", \"arguments\": ARGUMENTS}{{ '' if loop.last else ', ' }}NEXT]\
         </tool_calls>",
    ),
    ("phi", true, "EACH<|tool_call|>{\"name\": \"{{ f.name }}\", \"arguments\": ARGUMENTS}<|/tool_call|>NEXT"),
    (
        "granite",
        true,
        "<|tool_call|>[EACH{\"name\": \"{{ f.name }}\", \"arguments\": ARGUMENTS}{{ '' if loop.last else ', ' }}NEXT]",
    ),
    (
        "command+think",
        true,
        "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_ACTION|>[\n    EACH\
         {\"tool_call_id\": \"{{ loop.index0 }}\", \"tool_name\": \"{{ f.name }}\", \"parameters\": ARGUMENTS}\
         {{ '' if loop.last else ',' }}\n    NEXT]<|END_ACTION|>",
    ),
    ("llama4", false, "<|python_start|>EACH{\"name\": \"{{ f.name }}\", \"parameters\": ARGUMENTS}NEXT<|python_end|>"),
    (
        "kimi",
        true,
        "<|tool_calls_section_begin|>EACH<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}\
         <|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>NEXT<|tool_calls_section_end|>",
    ),
];

/// Our own templates and the models' where they are beside the checkout: name, source, format, several calls.
fn templates() -> Vec<(String, String, &'static str, bool)> {
    let own = OWN.iter().map(|&(format, parallel, calls)| {
        let arguments =
            "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}";
        let calls = calls.replace("EACH", "{% for c in m.tool_calls %}{% set f = c.function %}");
        let calls = calls.replace("ARGUMENTS", arguments).replace("NEXT", "{% endfor %}");
        (format!("our {format}"), CHAT.replace("CALLS", &calls), format, parallel)
    });
    let folder = crate::fixtures::more("../shared/fixtures/templates");
    let theirs = TEMPLATES.iter().filter_map(|&(name, format, parallel)| {
        let source = std::fs::read_to_string(folder.as_ref()?.join(format!("{name}.jinja"))).unwrap();
        Some((name.to_string(), source, format, parallel))
    });
    own.chain(theirs).collect()
}

/// The format that each template of the fixtures has, and whether an answer may have several calls in its template.
const TEMPLATES: &[(&str, &str, bool)] = &[
    ("GLM-4.6", "glm+think", true),
    ("Mistral-Small-3.2-24B-Instruct-2506", "mistral-id", true),
    ("Qwen-Qwen3-0.6B", "hermes+think", true),
    ("Qwen3-Coder", "qwen-xml", true),
    ("Qwen3.5-4B", "qwen-xml+think", true),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-v3+think", true),
    ("deepseek-ai-DeepSeek-V3.1", "deepseek-v3.1+think", true),
    ("google-gemma-2-2b-it", "plain", false),
    ("google-gemma-4-31B-it", "gemma+think", true),
    ("meta-llama-Llama-3.1-8B-Instruct", "llama", false),
    ("moonshotai-Kimi-K2", "kimi", true),
    ("openai-gpt-oss-120b", "harmony", false),
];

fn definitions() -> Value {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string", "description": "where"}, "days": {"type": "integer", "description": "how long"},
        "where": {"type": "object", "description": "more"},
    }});
    let function = |name: &str| json!({"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}});
    json!([function("weather"), function("now")])
}

/// Arguments as clients send them, and what of an answer is a call.
const ARGUMENTS: [&str; 2] =
    [r#"{"city": "Zürich \"West\"\nline", "days": 2, "where": {"a": [1, true], "b": "x"}}"#, r#"{"days": 3}"#];

fn render(template: &ChatTemplate, format: Format, messages: &[Value], generate: bool) -> String {
    let messages = Value::Array(format.history(messages));
    let tools = definitions();
    let chat = Chat { tools: Some(&tools), add_generation_prompt: generate, ..Chat::new(&messages) };
    template.render(&chat).unwrap_or_else(|e| panic!("{format:?}: {e}: {messages}"))
}

/// Returns the call of this number, as a client sends it back.
fn call(i: usize) -> Value {
    let name = ["weather", "now"][i];
    json!({"id": format!("call_{i}"), "type": "function", "function": {"name": name, "arguments": ARGUMENTS[i]}})
}

#[test]
fn what_a_template_writes_is_read_back() {
    let user = json!({"role": "user", "content": [{"type": "text", "text": "What is it like?"}]});
    for (name, source, expected, parallel) in templates() {
        let template = ChatTemplate::new(&source, BOS, EOS).unwrap();
        let format = Format::detect(&source);
        assert_eq!(format.name(), expected, "{name}");
        if !format.has_calls() {
            continue;
        }
        let calls: Vec<Value> = (0..if parallel { 2 } else { 1 }).map(call).collect();
        let answer = json!({"role": "assistant", "content": null, "tool_calls": calls});
        let prompt = render(&template, format, std::slice::from_ref(&user), true);
        let whole = render(&template, format, &[user.clone(), answer], false);
        // The prompt may open or close a thought that the history omits: only the common prefix counts.
        let shared = prompt.bytes().zip(whole.bytes()).take_while(|(a, b)| a == b).count();
        let shared = (0..=shared).rev().find(|&at| whole.is_char_boundary(at)).unwrap();
        // The common prefix may end inside a mark.
        let shared = whole[..shared].trim_end_matches(['<', '|']).len();
        let mut text = &whole[shared..];
        for end in [
            "<｜end▁of▁sentence｜>",
            EOS,
            "<|im_end|>",
            "<|eot_id|>",
            "<|call|>",
            "<|tool_response>",
            "<｜Assistant｜>",
        ] {
            text = text.trim_end().strip_suffix(end).unwrap_or(text);
        }
        let tools: Vec<Tool> = definitions().as_array().unwrap().iter().filter_map(Tool::from_json).collect();
        let events = Parser::new(format, &tools, format.opens_thought(&whole[..shared]), Hold::Call, 3).parse(text);
        let mut got: Vec<(String, String)> = Vec::new();
        for event in events {
            match event {
                Event::ToolCallStart { name, .. } => got.push((name, String::new())),
                Event::ToolCallArguments { index, json } => got[index].1.push_str(&json),
                Event::ToolCallEnd { complete, .. } => assert!(complete),
                other => assert!(
                    matches!(&other, Event::Reasoning(t) | Event::Content(t) if t.trim().is_empty()),
                    "{name}: {other:?} in {text:?}"
                ),
            }
        }
        assert_eq!(got.len(), calls.len(), "{name}: {text:?}");
        for (i, (tool, arguments)) in got.iter().enumerate() {
            let parsed: Value = serde_json::from_str(arguments).unwrap();
            let sent: Value = serde_json::from_str(ARGUMENTS[i]).unwrap();
            assert_eq!((tool.as_str(), parsed), (["weather", "now"][i], sent), "{name}: {text:?}");
        }
    }
}

#[test]
fn histories_with_calls_and_results_render() {
    let user = |text: &str| json!({"role": "user", "content": text});
    let result =
        |i: usize| json!({"role": "tool", "tool_call_id": format!("call_{i}"), "content": format!("result {i}")});
    let answer = json!({"role": "assistant", "content": "I look.", "reasoning_content": "why", "tool_calls": [call(0), call(1)]});
    let messages = [
        json!({"role": "system", "content": "Be kind."}),
        user("Both?"),
        answer,
        result(0),
        result(1),
        json!({"role": "assistant", "content": "It is so."}),
        user("And now?"),
    ];
    for (name, source, ..) in templates() {
        let template = ChatTemplate::new(&source, BOS, EOS).unwrap();
        let format = Format::detect(&source);
        if !format.has_calls() {
            continue;
        }
        let text = render(&template, format, &messages, true);
        let mut from = 0;
        for expected in ["weather", "result 0", "result 1", "It is so.", "And now?"] {
            // The tools' definitions come first.
            let start = if from == 0 { text.find("Both?").unwrap() } else { from };
            let at = text[start..]
                .find(expected)
                .unwrap_or_else(|| panic!("{name}: no {expected:?} in {:?}", &text[start..]));
            from = start + at;
        }
    }
}

#[test]
fn histories_take_the_shape_of_their_family() {
    let calls = json!([call(0), call(1)]);
    let answer = json!({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "reasoning_content": "why", "tool_calls": calls});
    let result = |i: usize| json!({"role": "tool", "tool_call_id": format!("call_{i}"), "content": "r"});
    let of = |template: &str, messages: &[Value]| Format::detect(template).history(messages);
    let hermes = of("<tool_call>", std::slice::from_ref(&answer));
    assert_eq!(hermes[0]["content"], "a\nb");
    assert_eq!(hermes[0]["tool_calls"][1]["function"]["arguments"], json!({"days": 3}));
    let silent = of("<｜tool▁calls▁begin｜>", &[json!({"role": "assistant", "tool_calls": calls})]);
    assert_eq!(silent[0]["content"], Value::Null);
    let short = of("[TOOL_CALLS]", &[answer.clone(), result(1)]);
    let id = short[0]["tool_calls"][1]["id"].as_str().unwrap();
    assert!(id.len() == 9 && short[1]["tool_call_id"] == id && short[0]["tool_calls"][0]["id"] != id, "{short:?}");
    // Results follow the order of the calls.
    let split = of("<|channel|>analysis", &[answer, result(1), result(0), json!({"role": "user", "content": "x"})]);
    let roles: Vec<&str> = split.iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["assistant", "tool", "assistant", "tool", "user"]);
    assert_eq!((&split[0]["thinking"], &split[1]["tool_call_id"]), (&json!("why\na\nb"), &json!("call_0")));
    assert_eq!((split[2].get("thinking"), &split[3]["tool_call_id"]), (None, &json!("call_1")));
}
