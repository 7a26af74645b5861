//! Golden chats, hostile templates, and the corners where Python and minijinja part.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};

use super::*;

/// Renders every case of a template and describes those that differ.
fn differences(name: &str, source: &str, set: &Value, cases: &Value) -> Vec<String> {
    let text = |key: &str| set[key].as_str().unwrap().to_owned();
    let template = match ChatTemplate::new(source, &text("bos_token"), &text("eos_token")) {
        Ok(t) => t,
        Err(e) => return vec![format!("{name}: {e}\n  {source:?}")],
    };
    let mut wrong = Vec::new();
    for case in cases.as_array().unwrap() {
        let chat = Chat {
            messages: &case["messages"],
            tools: Some(&case["tools"]).filter(|t| !t.is_null()),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            kwargs: case["kwargs"].as_object(),
            now: Some(text("now").parse().unwrap()),
        };
        let got = match template.render(&chat) {
            Ok(text) => Ok(text),
            Err(Error::Raised { message, .. }) => Err(message),
            Err(other) => Err(format!("!! {other}")),
        };
        let want = match case["expected"].as_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(case["expected_error"].as_str().unwrap().to_owned()),
        };
        if got != want {
            let source = if source.len() < 300 { source } else { "" };
            wrong.push(format!("{name}: {} {source:?}\n  got  {got:?}\n  want {want:?}", case["name"]));
        }
    }
    wrong
}

fn json_file(file: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

#[test]
fn own_templates_render_as_jinja2_renders_them() {
    let set = json_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/templates/own.json"));
    let templates = set["templates"].as_array().unwrap();
    let wrong: Vec<String> = templates
        .iter()
        .flat_map(|t| differences(t["name"].as_str().unwrap(), t["source"].as_str().unwrap(), &set, &t["cases"]))
        .collect();
    assert!(templates.len() > 100);
    assert!(wrong.is_empty(), "{} cases differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn models_templates_render_as_jinja2_renders_them() {
    // The templates of the models; the constructs that they use are in `own.json`.
    let Some(folder) = crate::fixtures::more("../shared/fixtures/templates") else { return };
    let files = std::fs::read_dir(&folder).unwrap();
    let (mut n, mut wrong) = (0, Vec::new());
    for file in files.map(|f| f.unwrap().path()).filter(|f| f.to_string_lossy().ends_with(".cases.json")) {
        let set = json_file(&file);
        let source = std::fs::read_to_string(file.with_file_name(set["template"].as_str().unwrap())).unwrap();
        n += set["cases"].as_array().unwrap().len();
        wrong.extend(differences(&file.display().to_string(), &source, &set, &set["cases"]));
    }
    assert!(n > 0);
    assert!(wrong.is_empty(), "{} of {n} cases differ:\n{}", wrong.len(), wrong.join("\n"));
}

fn render(source: &str) -> Result<String, Error> {
    let messages = Message::to_json(&[Message::new("user", "hi")]);
    ChatTemplate::new(source, "", "")?.render(&Chat::new(&messages))
}

#[test]
fn hostile_templates_end_in_an_error_soon() {
    let double = "{% set a = a ~ a %}".repeat(60);
    let nest = "{% set a = [a, a] %}".repeat(60);
    let many = format!("{{{{ [{}] | length }}}}", "'x' * 99999999, ".repeat(500));
    let chain = format!("{{{{ {} }}}}", ["'x' * 99999999"; 500].join(" ~ "));
    let table: &[(&str, String)] = &[
        ("nested ranges", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".into()),
        ("text in nested ranges", "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxx{% endfor %}{% endfor %}".into()),
        ("range too long", "{% for a in range(10**12) %}{% endfor %}".into()),
        ("repeated string", "{{ 'x' * 10**9 }}".into()),
        ("repeated string below the engine's own limit", "{{ 'x' * 99999999 }}".into()),
        ("repeated list", "{{ ([0] * 10**9) | length }}".into()),
        ("repeated list below the engine's own limit", "{{ ([0] * 99999999) | list | length }}".into()),
        ("doubling in a line", format!("{{% set a = 'xx' %}}{double}")),
        ("doubling in a loop", "{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}".into()),
        ("doubling by +", "{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}".into()),
        ("doubling a list", "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}".into()),
        ("doubling by replace", "{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = n.s | replace('x', 'xx') %}{% endfor %}".into()),
        ("doubling by the replace method", "{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = n.s.replace('', n.s) %}{% endfor %}".into()),
        ("doubling by join", "{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}".into()),
        ("doubling by format", "{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = '{0}{0}'.format(n.s) %}{% endfor %}".into()),
        ("doubling by capture", "{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}{% endfor %}".into()),
        ("doubling by macro", "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = d(n.s) %}{% endfor %}".into()),
        ("wide format", "{{ '{:>999999999}'.format('x') }}".into()),
        ("wide indent", "{{ 'x' | indent(999999999, true) }}".into()),
        ("wide center", "{{ 'x'.center(10**12) }}".into()),
        ("wide batch", "{{ [1] | batch(10**12, 0) | list }}".into()),
        ("printing a tangle", format!("{{% set a = [1] %}}{nest}{{{{ a }}}}")),
        ("json of a tangle", format!("{{% set a = [1] %}}{nest}{{{{ a | tojson }}}}")),
        ("comparing tangles", format!("{{% set a = [1] %}}{nest}{{% set b = a %}}{{% set a = [1] %}}{nest}{{{{ a == b }}}}")),
        ("chained comparison of tangles", format!("{{% set a = [1] %}}{nest}{{% set b = a %}}{{% set a = [1] %}}{nest}{{{{ a == b == a }}}}")),
        ("sorting tangles", format!("{{% set a = [1] %}}{nest}{{% set b = a %}}{{% set a = [1] %}}{nest}{{{{ [a, b] | sort }}}}")),
        ("a value inside itself", "{% set n = namespace() %}{% set n.n = n %}{{ n }}".into()),
        ("deep nesting", "{% set n = namespace(a=[]) %}{% for i in range(99999) %}{% set n.a = [n.a] %}{% endfor %}{{ n.a }}".into()),
        ("deep nesting of mappings", "{% set n = namespace(a={}) %}{% for i in range(99999) %}{% set n.a = {'a': n.a} %}{% endfor %}".into()),
        ("endless macro", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into()),
        ("two endless macros", "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{{ f() }}{% endmacro %}{{ g() }}".into()),
        ("exploding macro", "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}".into()),
        ("endless recursive loop", "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}".into()),
        ("many constants", many),
        ("long constant chain", chain),
        ("long chain", format!("{{{{ a{} }}}}", "~a".repeat(400_000))),
        ("long chain of constants", format!("{{{{ 'x'{} }}}}", "~'x'".repeat(100_000))),
        ("retained copies", "{% set n = namespace(l=[]) %}{% set s = 'x' * 9999999 %}{% for i in range(99999) %}{% set n.l = n.l + [s | upper] %}{% endfor %}".into()),
        ("long searches", "{% set s = 'x' * 9999999 %}{% for i in range(99999) %}{% if 'y' in s %}{% endif %}{% if s is upper %}{% endif %}{% endfor %}".into()),
        ("deep parentheses", format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000))),
        ("deep blocks", "{% if 1 %}".repeat(100_000)),
        ("unclosed", "{% for".into()),
        ("include", "{% include 'chat template' %}".into()),
    ];
    for (name, source) in table {
        let begin = Instant::now();
        let result = render(source);
        assert!(result.is_err(), "{name}: rendered {} bytes", result.unwrap().len());
        let error = result.unwrap_err();
        println!("{name}: {} ms: {error}", begin.elapsed().as_millis());
        // It ended by itself, within the processor's time that it may take.
        assert!(!matches!(error, Error::Thread { .. }), "{name}: {error}");
        let error = error.to_string();
        assert!(error.len() < 400, "{name}: {error}");
    }
}

#[test]
fn errors_carry_the_line_and_the_templates_own_words() {
    let error = render("line one\n\n{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert_eq!(error, Error::Raised { line: 3, message: "roles must alternate".into() });
    assert_eq!(
        error.to_string(),
        "failed to render the chat template: line 3: the template says: roles must alternate"
    );
    let error = render("{% macro f(x) %}\n{{ raise_exception('no ' ~ x) }}{% endmacro %}\n\n{{ f(1) }}").unwrap_err();
    assert_eq!(error, Error::Raised { line: 2, message: "no 1".into() });
    assert!(matches!(render("a\n{% if %}").unwrap_err(), Error::Syntax { line: 2, .. }));
    assert!(matches!(render("a\n\n{{ messages[0].a.b }}").unwrap_err(), Error::Failed { line: 3, .. }));
    assert!(matches!(render(&" ".repeat(MAX_SOURCE_BYTES + 1)).unwrap_err(), Error::TooLong { .. }));
    assert!(matches!(
        render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        Err(Error::Limit { .. })
    ));
}

#[test]
fn variables_cannot_replace_the_budget() {
    let kwargs = json!({"charge!": 1});
    let messages = json!([]);
    let chat = Chat { kwargs: kwargs.as_object(), ..Chat::new(&messages) };
    let template = ChatTemplate::new("{{ 'a' ~ 'b' }}", "", "").unwrap();
    assert_eq!(template.render(&chat), Err(Error::Variable { name: "charge!".into() }));
}

#[test]
fn the_system_clock_is_used_when_none_is_given() {
    let year: i32 = render("{{ strftime_now('%Y') }}").unwrap().parse().unwrap();
    assert!((2024..2200).contains(&year));
    assert!(render("{{ strftime_now('%!') }}").is_err());
}
