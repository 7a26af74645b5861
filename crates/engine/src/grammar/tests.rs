use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::sampler::{Sampler, SamplerParams};
use crate::tokenizer::{Decode, Encode};

/// The embedded model's vocabulary.
pub(crate) static FABLE: LazyLock<(Arc<Tokenizer>, Grammars)> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fable-29m-a10m-q4_k_m.gguf");
    let checkpoint = checkpoint::open(&path).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_metadata(checkpoint.meta()).unwrap());
    let grammars = Grammars::new(tokenizer.clone(), 1).unwrap();
    (tokenizer, grammars)
});

fn compile(rule: Rule, lead: Lead) -> Result<Grammar, Error> {
    FABLE.1.compile(&rule, lead)
}

fn schema(schema: Value) -> Rule {
    Rule::JsonSchema(schema)
}

/// Logits from a hash of the seed and the position; ends are likelier than others.
fn logits(tokenizer: &Tokenizer, seed: u64, pos: u64) -> Vec<f32> {
    let mut logits = vec![0.0; tokenizer.n_vocab()];
    let mut state = seed ^ pos.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for logit in &mut logits {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *logit = (state >> 40) as f32 / (1u64 << 24) as f32 * 4.0;
    }
    for &end in tokenizer.ends_of_generation() {
        logits[end as usize] += 3.0;
    }
    logits
}

/// Returns what a model of random logits writes under a constraint, `forced` tokens first, and whether it came to its
/// end.
pub(crate) fn answer(constraint: Constraint, forced: &[u32], seed: u64, most: u64) -> Result<(String, bool), Error> {
    answer_in(&FABLE.0, constraint, forced, seed, most).map(|(ids, ended)| (text(&ids), ended))
}

/// Waits for a guard's mask.
fn wait(guard: &mut Guard) -> Result<(), Error> {
    while !guard.ready(&mut Duration::from_millis(20))? {}
    Ok(())
}

/// Gives a guard its token, and waits until it is taken.
fn accept(guard: &mut Guard, token: u32) -> Result<bool, Error> {
    match guard.accept(token)? {
        Some(is_finished) => Ok(is_finished),
        None => taken_behind(guard),
    }
}

/// Waits until a guard's token is taken by a thread.
fn taken_behind(guard: &mut Guard) -> Result<bool, Error> {
    loop {
        if let Some(is_finished) = guard.taken(&mut Duration::from_millis(20))? {
            return Ok(is_finished);
        }
    }
}

/// As [`answer`], in a vocabulary of its own, as tokens.
fn answer_in(
    tokenizer: &Tokenizer,
    constraint: Constraint,
    forced: &[u32],
    seed: u64,
    most: u64,
) -> Result<(Vec<u32>, bool), Error> {
    let mut guard = Guard::new(constraint)?;
    let params = SamplerParams { seed, temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..SamplerParams::default() };
    let mut sampler = Sampler::new(params).unwrap();
    let mut ids = Vec::new();
    for pos in 0..most {
        let logits = logits(tokenizer, seed, pos);
        wait(&mut guard)?;
        let row = guard.mask(&logits)?;
        let token = match forced.get(pos as usize) {
            Some(&token) if row[token as usize].is_finite() => token,
            Some(&token) => return Err(Error::Broken(format!("token {token} is forbidden"))),
            None => sampler.sample(row).unwrap(),
        };
        let finished = accept(&mut guard, token)?;
        if tokenizer.is_end_of_generation(token) {
            return Ok((ids, true));
        }
        ids.push(token);
        if finished {
            return Ok((ids, true));
        }
    }
    Ok((ids, false))
}

fn text(ids: &[u32]) -> String {
    FABLE.0.decode_as(ids, Decode { skip_special: false, continues: true })
}

/// Returns whether a value satisfies a schema of the keywords that the tests use.
pub(crate) fn satisfies(value: &Value, schema: &Value) -> bool {
    let number = |key: &str| schema[key].as_f64();
    let count = |key: &str| schema[key].as_u64().map(|n| n as usize);
    let within = |n: usize, low: &str, high: &str| {
        count(low).is_none_or(|low| n >= low) && count(high).is_none_or(|high| n <= high)
    };
    if let Some(options) = schema["anyOf"].as_array() {
        return options.iter().any(|option| satisfies(value, option));
    }
    if let Some(options) = schema["enum"].as_array() {
        return options.contains(value);
    }
    match schema["type"].as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" | "number" => value.as_f64().is_some_and(|n| {
            let whole = schema["type"] == "number" || n.fract() == 0.0;
            whole && number("minimum").is_none_or(|low| n >= low) && number("maximum").is_none_or(|high| n <= high)
        }),
        "string" => value.as_str().is_some_and(|s| {
            let pattern = schema["pattern"].as_str().map(|p| regex::Regex::new(p).unwrap());
            within(s.chars().count(), "minLength", "maxLength") && pattern.is_none_or(|p| p.is_match(s))
        }),
        "array" => value.as_array().is_some_and(|items| {
            within(items.len(), "minItems", "maxItems") && items.iter().all(|item| satisfies(item, &schema["items"]))
        }),
        _ => value.as_object().is_some_and(|object| {
            let required = schema["required"].as_array().unwrap();
            object.iter().all(|(key, v)| schema["properties"].get(key).is_some_and(|s| satisfies(v, s)))
                && required.iter().all(|key| object.contains_key(key.as_str().unwrap()))
        }),
    }
}

fn any_schema() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!({"type": "null"})),
        Just(json!({"type": "boolean"})),
        (-500i64..500, 0i64..1000).prop_map(|(low, n)| json!({"type": "integer", "minimum": low, "maximum": low + n})),
        (0usize..4, 0usize..6).prop_map(|(low, n)| json!({"type": "string", "minLength": low, "maxLength": low + n})),
        Just(json!({"type": "string", "pattern": "^[a-f]{2,5}(-[0-9]+)?x$", "maxLength": 12})),
        Just(json!({"enum": ["red", "gr\"een", 7, null, "ünö"]})),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            (inner.clone(), 0usize..3, 0usize..3).prop_map(|(items, low, n)| {
                json!({"type": "array", "items": items, "minItems": low, "maxItems": low + n})
            }),
            prop::collection::vec(inner.clone(), 1..3).prop_map(|options| json!({"anyOf": options})),
            prop::collection::vec((inner, any::<bool>()), 0..4).prop_map(|properties| {
                let names = ["a", "name", "a b", "ß\\"];
                let required: Vec<_> = names.iter().zip(&properties).filter(|(_, p)| p.1).map(|(n, _)| n).collect();
                let properties: serde_json::Map<_, _> =
                    names.iter().zip(&properties).map(|(n, (s, _))| (n.to_string(), s.clone())).collect();
                json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_satisfies_its_schema(shape in any_schema(), seed: u64) {
        let grammar = compile(schema(shape.clone()), Lead::None).unwrap();
        let (text, ended) = answer(Constraint::new(grammar), &[], seed, 600).unwrap();
        match serde_json::from_str::<Value>(&text) {
            Ok(value) => prop_assert!(satisfies(&value, &shape), "{text} for {shape}"),
            // Blanks may go on for long, never past their bound; a random model does not always come to the end.
            Err(_) => prop_assert!(!ended, "{text} for {shape}"),
        }
    }

    #[test]
    fn what_is_written_matches_its_expression(which in 0..EXPRESSIONS.len(), seed: u64) {
        let grammar = compile(Rule::Regex(EXPRESSIONS[which].into()), Lead::None).unwrap();
        let (text, ended) = answer(Constraint::new(grammar), &[], seed, 300).unwrap();
        let whole = regex::Regex::new(&format!("^(?:{})$", EXPRESSIONS[which])).unwrap();
        prop_assert!(ended && whole.is_match(&text), "{text:?}");
    }
}

const EXPRESSIONS: &[&str] =
    &["[0-9]{4}-[01][0-9]-[0-3][0-9]", "yes|no|may ?be", "(é|日本|🦊){1,4}!", "[^a-z]{3,7}", "a{0}|(?i:Ok)"];

#[test]
fn a_finished_grammar_ends_the_answer() {
    let cases = [
        (schema(json!({"const": {"a": [1, "x"]}})), r#"{"a":[1,"x"]}"#),
        (Rule::Regex("ab+c".into()), "abc"),
        (Rule::Lark("start: \"a\" b\nb: \"(\" b \")\" | \"x\"".into()), "a((x))"),
    ];
    for (rule, expected) in cases {
        let forced = FABLE.0.encode(expected, Default::default());
        let grammar = compile(rule, Lead::None).unwrap();
        assert_eq!(answer(Constraint::new(grammar), &forced, 1, 60).unwrap(), (expected.to_owned(), true));
    }
}

#[test]
fn a_mark_is_its_token_and_not_its_letters() {
    let encode = |text: &str, parse_special| FABLE.0.encode(text, Encode { parse_special, ..Encode::default() });
    let text = "a<|im_start|>b";
    let grammar = |rule: &str| Constraint::new(compile(Rule::Lark(rule.into()), Lead::None).unwrap());
    let (token, letters) = (grammar("start: \"a\" <|im_start|> \"b\""), grammar("start: \"a<|im_start|>b\""));
    for (constraint, is_token) in [(token, true), (letters, false)] {
        let written = answer(constraint.clone(), &encode(text, is_token), 1, 40);
        assert_eq!(written, Ok((text.to_owned(), true)), "{is_token}");
        assert!(answer(constraint, &encode(text, !is_token), 1, 40).is_err(), "{is_token}");
    }
}

#[test]
fn what_cannot_be_met_is_refused_by_name() {
    let deep = (0..80).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}));
    let cases: Vec<(Rule, &str)> = vec![
        (schema(json!({"type": "integer", "minimum": 5, "maximum": 4})), "no text satisfies it"),
        (schema(json!({"type": "string", "minLength": 3, "maxLength": 2})), "minLength"),
        (schema(json!({"enum": []})), "no text satisfies it"),
        (schema(json!(false)), "no text satisfies it"),
        (schema(json!({"type": "strange"})), "strange"),
        (schema(json!(7)), "a schema is an object, true or false, not 7"),
        (schema(json!({"not": {"type": "string"}})), "not"),
        (schema(json!({"$ref": "https://example.org/x.json"})), "$ref"),
        (schema(json!({"$ref": "#/nowhere"})), "nowhere"),
        (schema(json!({"type": "string", "pattern": "a(?=b)"})), "look-around"),
        (schema(deep), "nests deeper than 64"),
        (schema(json!({"description": "x".repeat(300_000)})), "at most 262144"),
        (Rule::Regex("a(".into()), "regex parse error"),
        (Rule::Regex("(".repeat(100_000)), "nests deeper"),
        (Rule::Lark("start: nothing".into()), "nothing"),
        (Rule::Lark("start: <|nope|>".into()), "<|nope|>"),
        (Rule::Lark(String::new()), "start"),
    ];
    for (rule, expected) in cases {
        let shown: String = format!("{rule:?}").chars().take(100).collect();
        match compile(rule, Lead::None) {
            Ok(_) => panic!("{shown} was accepted"),
            Err(error) => assert!(error.to_string().contains(expected), "{shown}: {error}"),
        }
    }
}

/// Rules whose size or shape is out of proportion are compiled and can be followed, or refused; in either case soon.
#[test]
fn hostile_rules_end() {
    let many = |n: usize, value: &dyn Fn(usize) -> Value| -> Value { (0..n).map(value).collect() };
    let properties = |n: usize| -> Value {
        (0..n).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect::<serde_json::Map<_, _>>().into()
    };
    let one = |i: usize, value: Value| json!({"type": "object", "properties": {format!("k{i}"): value}});
    let nulls =
        json!({"type": "array", "items": {"type": "null"}, "minItems": 1_000_000_000, "maxItems": 2_000_000_000});
    let lists = json!({"type": "array", "items": {"type": "string"}, "maxItems": 100_000});
    let cycle = json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"});
    let product = json!({"allOf": many(400, &|i| json!({"anyOf": many(4, &|j| one(i, json!({"const": j})))}))});
    let cases: Vec<(Rule, &str)> = vec![
        // rule, and the error; none when it can be followed
        (schema(nulls), ""),
        (schema(json!({"type": "array", "items": lists, "maxItems": 100_000})), ""),
        (schema(json!({"type": "string", "minLength": 1_000_000_000, "maxLength": 2_000_000_000})), ""),
        (schema(json!({"type": "string", "pattern": "((a{0,1000}){0,1000}){0,1000}$"})), ""),
        (schema(json!({"type": "object", "properties": properties(400)})), ""),
        (schema(json!({"type": "object", "properties": properties(5000)})), "properties are 5000, at most 500"),
        (schema(json!({"anyOf": many(2000, &|i| one(i, json!({"type": "number"})))})), "anyOf are 2000, at most 500"),
        (schema(product), "schema too large"),
        (schema(json!({"enum": many(10_000, &|i| json!(format!("value {i}")))})), ""),
        (schema(cycle), "no text satisfies it"),
        (schema(json!({"type": "number", "minimum": -1e308, "maximum": 1e308, "multipleOf": 1e-300})), "digits"),
        (
            schema(
                json!({"type": "object", "patternProperties": {"^(a|b)*c(a|b){12}$": {}, "^(a|b)*d(a|b){12}$": {}}}),
            ),
            "",
        ),
        (Rule::Regex("(a|b)*c(a|b){30}".into()), ""),
        (Rule::Regex("[a-z]{1,1000000}[0-9]{1,1000000}".into()), ""),
        (Rule::Regex(r"\w+\s".repeat(1000)), ""),
        (Rule::Lark(format!("start: {}", "\"a\" | ".repeat(20_000) + "\"a\"")), "choices are 20000, at most 500"),
        (Rule::Lark("start: a{1,100000}\na: b{1,100000}\nb: \"x\"{1,100000}".into()), ""),
    ];
    for (rule, expected) in cases {
        let shown: String = format!("{rule:?}").chars().take(100).collect();
        let outcome = compile(rule, Lead::None).and_then(|grammar| answer(Constraint::new(grammar), &[], 3, 20));
        match (expected, outcome.map(|(text, _)| text.len())) {
            ("", Ok(n)) => assert!(n > 0, "{shown}"),
            (expected, Err(error)) if !expected.is_empty() => {
                assert!(error.to_string().contains(expected), "{shown}: {error}");
            }
            (expected, outcome) => panic!("{shown}: {outcome:?}, not {expected:?}"),
        }
    }
}

/// A full machine takes nothing from a rule's time: what counts is the processor's, and the clock only at last.
#[test]
fn waiting_for_a_core_takes_no_time_from_a_rule() {
    let seconds = Duration::from_secs;
    for (used, waited, expected) in [(Some(1), 29, false), (Some(11), 11, true), (Some(1), 31, true), (None, 29, false)]
    {
        assert_eq!(is_over(used.map(seconds), seconds(waited)), expected, "{used:?} of {waited} s");
    }
}

/// Expressions that must hold at once multiply, wherever they come together; those that stand apart do not.
#[test]
fn what_multiplies_is_refused_by_name() {
    let pattern = |i: usize| json!({"type": "string", "pattern": format!(".*{}.*", (b'a' + i as u8) as char)});
    let patterns = |n: usize| -> Vec<Value> { (0..n).map(pattern).collect() };
    let of = |name: &str, value: Value| json!({"type": "object", "properties": {name: value}});
    let same: Vec<Value> = patterns(26).into_iter().map(|p| of("x", p)).collect();
    let apart: Vec<Value> = patterns(26).into_iter().enumerate().map(|(i, p)| of(&format!("k{i}"), p)).collect();
    let lists: Vec<Value> = patterns(26).into_iter().map(|p| json!({"type": "array", "items": p})).collect();
    let chain: serde_json::Map<String, Value> = (0..26)
        .map(|i| {
            let mut def = pattern(i);
            def["$ref"] = json!(format!("#/$defs/d{}", i + 1));
            (format!("d{i}"), def)
        })
        .chain([("d26".to_string(), json!({}))])
        .collect();
    let referred: serde_json::Map<String, Value> =
        patterns(26).into_iter().enumerate().map(|(i, p)| (format!("d{i}"), p)).collect();
    let refs: Vec<Value> = (0..26).map(|i| json!({"$ref": format!("#/$defs/d{i}")})).collect();
    let nested = patterns(26).into_iter().fold(json!({}), |inner, p| json!({"allOf": [p, inner]}));
    let choices: Vec<Value> = (0..9).map(|_| json!({"anyOf": patterns(2)})).collect();
    let tree = (0..20).fold(json!({"type": "string"}), |inner, _| json!({"allOf": [inner.clone(), inner]}));
    let cases = [
        (json!({"allOf": patterns(26)}), "hold at once are 26, at most 8"),
        (json!({"allOf": same}), "hold at once are 26, at most 8"),
        (json!({"allOf": lists}), "hold at once are 26, at most 8"),
        (json!({"$defs": chain, "$ref": "#/$defs/d0"}), "at most 8"),
        (json!({"$defs": referred, "allOf": refs}), "hold at once are 26, at most 8"),
        (nested, "at most 8"),
        (json!({"allOf": choices}), "hold at once are 9, at most 8"),
        (tree, "at most 262144"),
        (json!({"type": "integer", "multipleOf": 1_000_003}), "multipleOf"),
        (json!({"type": "number", "multipleOf": 1.000_003}), "multipleOf"),
        (json!({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 1009}]}), "multipleOf"),
        (
            of(
                "a",
                json!({"prefixItems": (0..8).map(|i| json!({"type": "integer", "multipleOf": 99_991 - i})).collect::<Vec<_>>()}),
            ),
            "multipleOf",
        ),
        (json!({"allOf": patterns(3)}), ""),
        (json!({"allOf": apart}), ""),
        (json!({"type": "number", "multipleOf": 0.01}), ""),
        (json!({"type": "integer", "multipleOf": 86_400}), ""),
    ];
    for (value, expected) in cases {
        let shown: String = value.to_string().chars().take(100).collect();
        let begin = Instant::now();
        match (compile(schema(value), Lead::None), expected) {
            (Ok(_), "") => println!("{shown}: {:?}", begin.elapsed()),
            (Err(error), expected) if !expected.is_empty() => {
                assert!(error.to_string().contains(expected), "{shown}: {error}");
            }
            (outcome, _) => panic!("{shown}: {outcome:?}, not {expected:?}"),
        }
    }
}

/// A grammar of which every text has many readings ends the answer with an error, or is followed; in either case its
/// masks are late within bounds, and taking a token, which steps of others wait for, is short.
#[test]
fn ambiguous_grammars_are_ended() {
    let cases = [
        "start: e\ne: e e | e e e | /[a-z ]/ | \"\"",
        "start: e\ne: e e | e e e | e e e e | e e e e e | /[a-z ]/ | /[a-z ]+/ | \"\"",
        "start: a*\na: b*\nb: c*\nc: /[a-z ]*/ | c c",
    ];
    for lark in cases {
        let grammar = compile(Rule::Lark(lark.into()), Lead::None).unwrap();
        let mut guard = Guard::new(Constraint::new(grammar)).unwrap();
        let (begin, mut n, mut ended) = (Instant::now(), 0, None);
        let mut taking = Duration::ZERO;
        for pos in 0..300 {
            let row = logits(&FABLE.0, 5, pos);
            let step = (|| {
                // Ends are not chosen.
                wait(&mut guard)?;
                let allowed = guard.mask(&row)?;
                let goes_on = |&i: &usize| allowed[i].is_finite() && !FABLE.0.is_end_of_generation(i as u32);
                let token = (0..row.len()).filter(goes_on).max_by(|&a, &b| row[a].total_cmp(&row[b]));
                let taken = Instant::now();
                let at_once = guard.accept(token.unwrap_or(0) as u32);
                taking += taken.elapsed();
                match at_once? {
                    Some(is_finished) => Ok(is_finished),
                    None => taken_behind(&mut guard),
                }
            })();
            n += 1;
            match step {
                Ok(false) => {}
                Ok(true) => break,
                Err(error) => {
                    ended = Some(error);
                    break;
                }
            }
        }
        println!("{lark:?}: {n} tokens in {:?}, {taking:?} to take them; {ended:?}", begin.elapsed());
        // Of the processor's time: what gives way may wait for long on a busy machine.
        let most = guard::LATENESS + n * guard::LATENESS_PER_TOKEN + guard::MAX_MASK;
        let most_taking = guard::TAKING + n * guard::TAKING_PER_TOKEN + Duration::from_millis(500);
        assert!(taking < most_taking, "{lark:?}: {n} tokens taken in {taking:?}");
        assert!(guard.lateness() < most, "{lark:?}: {n} tokens, late by {:?}", guard.lateness());
    }
}

/// What is tried in a process of its own ends as it would here.
#[test]
fn trials_say_what_compilers_say() {
    struct Here(Mutex<Vec<Result<(), Error>>>);
    impl Trial for Here {
        fn attempt(&self, message: &str, stopped: &dyn Fn() -> bool) -> Result<(), Error> {
            let outcome = if stopped() { Err(Error::TooCostly("stopped".into())) } else { attempt(message) };
            self.0.lock().unwrap().push(outcome.clone());
            outcome
        }
    }
    let here = Arc::new(Here(Default::default()));
    let grammars = FABLE.1.clone().with_trial(here.clone());
    let rules = [
        schema(json!({"type": "object", "properties": {"a": {"type": "string"}}})),
        schema(json!({"type": "integer", "minimum": 5, "maximum": 4})),
        Rule::Regex("[a-z]{3}".into()),
        Rule::Lark("start: <|im_end|> | \"x\"".into()),
        Rule::Lark("start: <|nope|>".into()),
        Rule::Lark("start: nothing".into()),
    ];
    for rule in rules {
        let (alone, tried) = (FABLE.1.compile(&rule, Lead::Blanks), grammars.compile(&rule, Lead::Blanks));
        // Messages list special tokens, of which a trial has one more.
        let kind = |outcome: Option<Error>| outcome.map(|error| std::mem::discriminant(&error));
        let said = here.0.lock().unwrap().pop().unwrap();
        assert_eq!(kind(alone.as_ref().err().cloned()), kind(tried.err()), "{rule:?}");
        assert_eq!(kind(alone.err()), kind(said.err()), "{rule:?}");
    }
    let stop = Arc::new(AtomicBool::new(true));
    let stopped = grammars.until(stop).compile(&Rule::Regex("a".into()), Lead::None);
    assert!(matches!(stopped, Err(Error::TooCostly(_))));
}

#[test]
fn a_constraint_begins_behind_the_thought_or_a_trigger() {
    let thought = |opened| Some(FreeThought { open: "<b>".into(), close: "</b>".into(), opened, most_tokens: None });
    let compiled = |lead| compile(schema(json!({"enum": ["yes", "no"]})), lead).unwrap();
    let cases: &[(Option<FreeThought>, &[&str], &str, &str, bool)] = &[
        // thought, triggers, what is forced, a text that begins the answer, whether it comes under the grammar
        (thought(true), &[], "why {not} \"</b> \n\"no", "why {not} \"</b> \n\"no\"", true),
        (thought(true), &["call:"], "call:x </b> ah call:\"y", "call:x </b> ah call:\"yes\"", true),
        (None, &["call:", "do:"], "so: do:\"n", "so: do:\"no\"", true),
        (None, &["call:"], "so it is", "so it is", false),
    ];
    for (thought, triggers, forced, expected, held) in cases {
        let constraint = Constraint {
            grammar: compiled(Lead::Blanks),
            thought: thought.clone(),
            triggers: triggers.iter().map(|t| t.to_string()).collect(),
        };
        let forced = FABLE.0.encode(forced, Default::default());
        let (text, ended) = answer(constraint, &forced, 5, 60).unwrap();
        assert!(text.starts_with(expected), "{text:?} for {expected:?}");
        assert!(!held || ended && text == *expected, "{text:?} for {expected:?}");
    }
    // In a thought nothing ends the answer.
    let constraint = Constraint { thought: thought(true), ..Constraint::new(compiled(Lead::Blanks)) };
    let end = FABLE.0.ends_of_generation()[0];
    assert!(answer(constraint, &[end], 5, 60).unwrap_err().to_string().contains("forbidden"));
}

/// A thought is closed after its most tokens, whether the prompt opened it or the model does, with a grammar or without.
#[test]
fn a_long_thought_is_closed() {
    let yes = compile(schema(json!({"enum": ["yes"]})), Lead::Blanks).unwrap();
    for most in [0, 1, 7] {
        for (opened, held) in [(true, true), (true, false), (false, false)] {
            let (open, close) = ("<b>".into(), "</b>".into());
            let thought = Some(FreeThought { open, close, opened, most_tokens: Some(most) });
            let grammar = if held { yes.clone() } else { FABLE.1.free() };
            let begin = if opened { Vec::new() } else { FABLE.0.encode("<b>", Default::default()) };
            let within = vec![FABLE.0.encode(" a", Default::default())[0]; most];
            let forced = [&begin[..], &within[..]].concat();
            let (text, _) = answer(Constraint { thought, ..Constraint::new(grammar) }, &forced, 3, 60).unwrap();
            let expected = format!("{}{}</b>", if opened { "" } else { "<b>" }, " a".repeat(most));
            assert!(text.starts_with(&expected), "{most} {opened} {held}: {text}");
            assert!(!held || text.ends_with("\"yes\""), "{text}");
        }
    }
    // Without a bound, and with a thought that ends before it, nothing is forced.
    let thought = FreeThought { open: "<b>".into(), close: "</b>".into(), opened: true, most_tokens: Some(20) };
    let forced = FABLE.0.encode("so</b> it is", Default::default());
    let free = Constraint { thought: Some(thought), ..Constraint::new(FABLE.1.free()) };
    let (text, _) = answer(free, &forced, 3, 60).unwrap();
    assert!(text.starts_with("so</b> it is") && text.matches("</b>").count() == 1, "{text}");
}

/// What clients' libraries write compiles, and answers keep to it as far as it is enforced.
#[test]
fn schemas_of_generators_compile() {
    let bounds = json!({"type": "number", "format": "float", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38});
    let schemas = [
        json!({"type": "object", "properties": {"m": {"type": "object", "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "integer"}}}, "required": ["m"], "additionalProperties": false}),
        json!({"type": "string", "format": "password"}),
        json!({"$defs": {"a/b": {"type": "boolean"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a~1b"}}}),
        json!({"$defs": {"G<T>": {"type": "boolean"}}, "$ref": "#/$defs/G%3CT%3E"}),
        json!({"oneOf": [{"type": "string"}, {"type": "string", "enum": ["a", "b"]}]}),
        json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": null}}, "required": null}),
        bounds,
        json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}),
        json!({"type": "integer", "format": "uint64", "minimum": 0, "maximum": u64::MAX}),
        json!({"type": "number", "minimum": f64::MIN, "exclusiveMaximum": f64::MAX}),
        json!({"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}]}),
        json!({"type": "string", "format": "email",
            "pattern": "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"}),
        json!({"type": "object", "properties": {"score": {"type": "boolean"}}, "patternProperties": {"^score$":
            {"type": "boolean"}}, "additionalProperties": false}),
        json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true}),
        json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {"not": {}}}, "required": ["a"],
            "additionalProperties": false}),
    ];
    for shape in schemas {
        let grammar = compile(schema(shape.clone()), Lead::None).unwrap_or_else(|e| panic!("{shape}: {e}"));
        for seed in 0..3 {
            let (text, ended) = answer(Constraint::new(grammar.clone()), &[], seed, 300).unwrap();
            assert!(!ended || serde_json::from_str::<Value>(&text).is_ok(), "{shape}: {text}");
        }
    }
    for (shape, why) in [
        (json!({"not": {"type": "null"}}), "JSON schema keyword `not` is unsupported"),
        (json!({"pattern": "a(?<!b)c"}), "JSON schema keyword `pattern (look-around)` is unsupported"),
    ] {
        assert!(compile(schema(shape), Lead::None).err().unwrap().to_string().contains(why));
    }
}

/// One blank, or one line with its indentation, between the parts of a JSON text; numbers that 64 bits hold.
#[test]
fn json_has_few_blanks_and_short_numbers() {
    let shape = json!({"type": "array", "items": {"type": "integer"}, "minItems": 2});
    let rule = || compile(schema(shape.clone()), Lead::None).unwrap();
    for (text, fits) in [
        ("[1, 2,\n    3]", true),
        ("[\n1 ,2]", true),
        ("[1,  2]", false),
        ("[1,\n\n2]", false),
        ("[1, \n2]", false),
        ("[9223372036854775807, 2]", true),
        ("[9223372036854775808, 2]", false),
        ("[-99999999999999999999, 2]", false),
    ] {
        let forced = FABLE.0.encode(text, Default::default());
        assert_eq!(answer(Constraint::new(rule()), &forced, 1, forced.len() as u64).is_ok(), fits, "{text}");
    }
}

/// Vocabularies as GGUF files, with a template and its mark: SentencePiece with byte tokens, the same with marks that
/// are special tokens, byte-level; and whole ones of their kinds where they are beside the checkout.
fn vocabularies() -> Vec<(&'static str, &'static str, &'static str, Vec<u8>)> {
    const GEMMA: (&str, &str) = ("<|tool_call>call: <|channel>thought", "<|tool_call>");
    let spm = std::fs::read(crate::fixtures::root("crates/engine/tests/data/spm.gguf")).unwrap();
    let fable = std::fs::read(crate::fixtures::root("models/fable-29m-a10m-q4_k_m.gguf")).unwrap();
    let mut all = vec![
        ("our spm", "[TOOL_CALLS]", "[TOOL_CALLS]", spm.clone()),
        ("our spm with marks", GEMMA.0, GEMMA.1, with_marks(spm)),
        ("fable", "[TOOL_CALLS]", "[TOOL_CALLS]", fable),
    ];
    let Some(folder) = crate::fixtures::more("../shared/fixtures/vocab") else { return all };
    for (name, template, mark) in [
        ("qwen2", "<tool_call>", "<tool_call>"),
        ("llama-spm", "[TOOL_CALLS]", "[TOOL_CALLS]"),
        ("gemma-4", GEMMA.0, GEMMA.1),
    ] {
        let file = std::fs::File::open(folder.join(format!("ggml-vocab-{name}.gguf.gz"))).unwrap();
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(file), &mut bytes).unwrap();
        all.push((name, template, mark, bytes));
    }
    all
}

/// Returns the vocabulary with its last tokens made the marks of Gemma's calls, which are control tokens.
fn with_marks(file: Vec<u8>) -> Vec<u8> {
    const MARKS: [&str; 3] = ["<|tool_call>", "<tool_call|>", "<|\"|>"];
    const CONTROL: i32 = 3;
    let checkpoint = checkpoint::from_bytes("spm", file).unwrap();
    let meta = checkpoint.meta();
    let tokens: Vec<String> =
        meta.strings("tokenizer.ggml.tokens").unwrap().iter().map(|t| String::from_utf8(t.to_vec()).unwrap()).collect();
    let kept = tokens.len() - MARKS.len();
    let tokens: Vec<&str> = tokens[..kept].iter().map(String::as_str).chain(MARKS).collect();
    let mut types = meta.i32s("tokenizer.ggml.token_type").unwrap().to_vec();
    types[kept..].fill(CONTROL);
    let mut writer = checkpoint::gguf::Writer::new();
    for (key, value) in meta.iter() {
        match key {
            "tokenizer.ggml.tokens" => writer.meta(key, tokens.clone()),
            "tokenizer.ggml.token_type" => writer.meta(key, types.clone()),
            _ => writer.meta(key, value.clone()),
        };
    }
    let mut bytes = Vec::new();
    writer.write(&mut bytes).unwrap();
    bytes
}

/// Whole vocabularies: byte-level, SentencePiece with byte tokens, and with marks that are special tokens.
#[test]
fn real_vocabularies_hold_schemas_and_calls() {
    use crate::formats::{Ask, Choice, Event, Format, Hold, Parser, Tool};
    let shape = json!({
        "type": "object", "required": ["name", "n"], "additionalProperties": false, "properties": {
            "name": {"type": "string", "pattern": "^[A-Zäé日]{1,9}$"}, "n": {"type": "integer", "minimum": -9, "maximum": 1000},
        },
    });
    let tools = [Tool { name: "find".into(), parameters: shape.clone() }];
    for (name, template, mark, bytes) in vocabularies() {
        let tokenizer = Tokenizer::from_metadata(checkpoint::from_bytes(name, bytes).unwrap().meta()).unwrap();
        let tokenizer = Arc::new(tokenizer);
        let start = Instant::now();
        let grammars = Grammars::new(tokenizer.clone(), 1).unwrap();
        println!("{name}: {} tokens, trie in {:?}", tokenizer.n_vocab(), start.elapsed());
        let start = Instant::now();
        let grammar = grammars.compile(&schema(shape.clone()), Lead::None).unwrap();
        println!("{name}: schema compiled in {:?}", start.elapsed());
        for seed in 0..2 {
            let start = Instant::now();
            let (ids, ended) = answer_in(&tokenizer, Constraint::new(grammar.clone()), &[], seed, 400).unwrap();
            println!("{name}: {} tokens in {:?}", ids.len(), start.elapsed());
            let text = tokenizer.decode_as(&ids, Decode { skip_special: true, continues: true });
            assert!(!ended || satisfies(&serde_json::from_str(&text).unwrap(), &shape), "{name}: {text}");
        }
        let format = Format::detect(template);
        let ask = Ask { tools: &tools, choice: Choice::Required, most_calls: Some(1), ..Ask::default() };
        let constraint = format.constraint(&ask, &tokenizer, &grammars).unwrap().unwrap();
        // Where the mark is one token, that token is written, not its letters.
        let token = tokenizer.token_to_id(mark);
        assert_eq!(token.is_some(), template.starts_with("<|tool_call>"));
        let (ids, ended) = answer_in(&tokenizer, constraint, &[], 1, 400).unwrap();
        assert!(token.is_none_or(|id| ids.contains(&id)), "{name}: {ids:?}");
        // The parser sees what a request shows: special tokens are left out, but for the format's marks.
        let shown = format.shown(&tokenizer);
        let how = Decode { skip_special: true, continues: true };
        let (mut stream, mut text) = (crate::tokenizer::Detokenizer::showing(how, &shown), String::new());
        ids.iter().for_each(|&id| stream.push(&tokenizer, id, &mut text));
        stream.finish(&mut text);
        let events = Parser::new(format, &tools, false, Hold::Call, 1).parse(&text);
        let whole = events.iter().any(|e| matches!(e, Event::ToolCallEnd { complete: true, .. }));
        assert!(!ended || whole, "{name}: {text} {events:?}");
    }
}

/// Returns what a model writes that writes nothing but digits where it may.
fn digits_under(constraint: Constraint) -> String {
    let (tokenizer, _) = &*FABLE;
    let one = tokenizer.encode("1", Encode { add_special: false, parse_special: false })[0];
    let mut guard = Guard::new(constraint).unwrap();
    let logits = vec![0.0; tokenizer.n_vocab()];
    let mut ids = Vec::new();
    loop {
        assert!(guard.ready(&mut Duration::from_secs(10)).unwrap());
        let row = guard.mask(&logits).unwrap();
        let finite = |id: u32| row[id as usize].is_finite();
        let token = if finite(one) { one } else { (0..row.len() as u32).find(|&id| finite(id)).unwrap() };
        let is_finished = accept(&mut guard, token).unwrap();
        if !tokenizer.is_end_of_generation(token) {
            ids.push(token);
        }
        assert!(ids.len() < 900, "{}", text(&ids));
        if is_finished || tokenizer.is_end_of_generation(token) {
            return text(&ids);
        }
    }
}

#[test]
fn numbers_end() {
    for (rule, least) in [
        (json!({"type": "number"}), 1),
        (json!({"type": "integer"}), 1),
        (json!({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}), 3),
        // What asks for more digits gets them.
        (json!({"type": "integer", "minimum": 1e15 as u64}), 16),
        (json!({"enum": [format!("{}", "1".repeat(60))]}), 60),
    ] {
        let written = digits_under(Constraint::new(compile(schema(rule.clone()), Lead::None).unwrap()));
        assert!(written.len() >= least && serde_json::from_str::<Value>(&written).is_ok(), "{rule}: {written}");
    }
}

/// The same inside of the arguments of calls, in notations with and without quotes.
#[test]
fn numbers_of_calls_end() {
    use crate::formats::{Ask, Choice, Event, Format, Hold, Parser, Tool};
    let integer = json!({"type": "integer"});
    let parameters =
        json!({"type": "object", "properties": {"n": integer}, "required": ["n"], "additionalProperties": false});
    let tools = [Tool { name: "f".into(), parameters }];
    for (template, most) in [("<tool_call>", 24), ("[TOOL_CALLS]", 24), ("<tool_call><function=<parameter=", 256)] {
        let format = Format::detect(template);
        let ask = Ask { tools: &tools, choice: Choice::Required, most_calls: Some(1), ..Ask::default() };
        let constraint = format.constraint(&ask, &FABLE.0, &FABLE.1).unwrap().unwrap();
        let written = digits_under(constraint);
        let events = Parser::new(format, &tools, false, Hold::Call, 1).parse(&written);
        let whole = events.iter().any(|e| matches!(e, Event::ToolCallEnd { complete: true, .. }));
        let digits = written.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap();
        assert!(whole && (2..=most).contains(&digits), "{}: {digits} in {written}", format.name());
    }
}
