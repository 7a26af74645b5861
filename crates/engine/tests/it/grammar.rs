//! Constrained requests on the embedded model: what they write, alone and in company.

use std::path::Path;
use std::sync::Arc;

use backend::{Backend, Limits};
use cpu::Cpu;
use engine::grammar::{Constraint, Grammars, Lead, Rule};
use engine::scheduler::{Drafter, Engine, FinishReason, Options, Request};
use engine::tokenizer::{Encode, Tokenizer};
use serde_json::{Value, json};

use crate::toy::{Guesses, Known, answer, drain, run, sampling};

#[test]
fn constraints_hold_and_change_nothing_for_others() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fable-29m-a10m-q4_k_m.gguf");
    let checkpoint = Arc::new(checkpoint::open(&path).unwrap());
    let tokenizer = Arc::new(Tokenizer::from_metadata(checkpoint.meta()).unwrap());
    let grammars = Grammars::new(tokenizer.clone(), 2).unwrap();
    let engine = |limits, options| {
        let plan = model::build(&checkpoint).unwrap();
        let program = Cpu { threads: 2, ..Cpu::default() }.compile(&plan, checkpoint.clone(), limits).unwrap();
        Engine::new(program, tokenizer.clone(), options).unwrap()
    };
    // Nearly a page, so that an answer soon needs another.
    let mut prompt = tokenizer.encode(&"Once upon a time there was a fox. ".repeat(4), Encode::default());
    prompt.truncate(30);
    let request = |i: usize, rule: Option<&Rule>| Request {
        max_new_tokens: if rule.is_some() { 120 } else { 40 },
        sampling: sampling(if i.is_multiple_of(3) { 0.0 } else { 1.0 }, i as u64),
        constraint: rule.map(|rule| Constraint::new(grammars.compile(rule, Lead::None).unwrap())),
        ..Request::new(prompt.clone())
    };
    let short = json!({"type": "string", "pattern": "^[a-z ]{40,60}$"});
    let person = json!({
        "type": "object", "properties": {"name": short, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"], "additionalProperties": false,
    });
    let rules = [
        None,
        Some(Rule::JsonSchema(person)),
        Some(Rule::Regex("(a|the) [a-z]{2,8} (ran|sat|slept)\\.".into())),
        None,
        Some(Rule::Lark("start: \"[\" item (\",\" item){0,3} \"]\"\nitem: /0|[1-9][0-9]{0,2}/ | start".into())),
        None,
    ];
    let requests: Vec<Request> = rules.iter().enumerate().map(|(i, rule)| request(i, rule.as_ref())).collect();
    let roomy = Limits { max_tokens: 128, max_outputs: 8, n_pages: 32, max_positions: 160, ..Limits::default() };
    let alone: Vec<_> = requests.iter().map(|r| run(&mut engine(roomy, Options::default()), r.clone()).0).collect();
    for (rule, answer) in rules.iter().zip(&alone) {
        let text = &answer.text;
        let held = match rule {
            None => true,
            Some(Rule::JsonSchema(_)) => {
                serde_json::from_str::<Value>(text).is_ok_and(|v| v["age"].as_u64() < Some(100))
            }
            Some(Rule::Regex(regex)) => regex::Regex::new(&format!("^{regex}$")).unwrap().is_match(text),
            Some(_) => serde_json::from_str::<Vec<Value>>(text).is_ok(),
        };
        assert!(
            held && (rule.is_none() || answer.end == Some(Ok(FinishReason::Stop))),
            "{text:?} {:?} for {rule:?}",
            answer.end
        );
    }
    // In company, in small pieces, with too few pages for all, and with drafts that are wrong now and then.
    let known = alone.iter().map(|answer| [&prompt[..], &answer.tokens].concat()).collect::<Vec<_>>();
    for max_draft in [0, 4] {
        let tight = Limits { max_tokens: 16, n_pages: 5, max_draft, ..roomy };
        let mut engine = engine(tight, Options { chunk: 5, max_running: 4, ..Options::default() });
        let n_vocab = tokenizer.n_vocab();
        let guesses = Guesses { known: Known::new(known.clone().into()), seed: 5, n_vocab, never: None, wrong: 6 };
        engine.set_drafter(Some(Box::new(guesses)));
        let ids: Vec<_> = requests.iter().chain(&requests).map(|r| engine.submit(r.clone()).unwrap()).collect();
        let events = drain(&mut engine);
        for (i, &id) in ids.iter().enumerate() {
            assert_eq!(answer(&events, id).0, alone[i % alone.len()], "request {i}");
        }
        let stats = engine.stats();
        assert!(stats.preemptions > 0 && (stats.accepted > 50) == (max_draft > 0), "{stats:?}");
    }
}

/// Guesses nothing.
struct Never;

impl Drafter for Never {
    fn draft(&mut self, _: &[u32], _: usize, _: &mut Vec<u32>) {}
}

/// Tokens that a grammar forces are drafted without a guess: fewer steps, the same text.
#[test]
fn forced_tokens_are_drafted() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fable-29m-a10m-q4_k_m.gguf");
    let checkpoint = Arc::new(checkpoint::open(&path).unwrap());
    let tokenizer = Arc::new(Tokenizer::from_metadata(checkpoint.meta()).unwrap());
    let grammars = Grammars::new(tokenizer.clone(), 1).unwrap();
    let flag = json!({"type": "boolean"});
    let schema = json!({
        "type": "object", "additionalProperties": false,
        "properties": {"has_been_seen_in_the_forest": flag, "has_ever_wanted_to_fly_away": flag, "is_a_fox": flag},
        "required": ["has_been_seen_in_the_forest", "has_ever_wanted_to_fly_away", "is_a_fox"],
    });
    let grammar = grammars.compile(&Rule::JsonSchema(schema), Lead::None).unwrap();
    let request = |i: u64| Request {
        max_new_tokens: 100,
        sampling: sampling(if i == 0 { 0.0 } else { 1.0 }, i),
        constraint: Some(Constraint::new(grammar.clone())),
        ..Request::new(tokenizer.encode("A fox, as JSON:", Encode::default()))
    };
    let cpu = Cpu { threads: 2, ..Cpu::default() };
    let plan = cpu.lower(model::build(&checkpoint).unwrap()).unwrap();
    let answers = |max_draft: usize, is_adaptive: bool| {
        let limits =
            Limits { max_tokens: 32, max_outputs: 12, n_pages: 8, max_positions: 128, max_draft, ..Limits::default() };
        let program = cpu.compile(&plan, checkpoint.clone(), limits).unwrap();
        let mut engine = Engine::new(program, tokenizer.clone(), Options::default()).unwrap();
        engine.set_drafter(Some(Box::new(Never)));
        engine.set_adaptive(is_adaptive);
        let ids = [0, 1].map(|i| engine.submit(request(i)).unwrap());
        let events = drain(&mut engine);
        (ids.map(|id| answer(&events, id).0), engine.stats())
    };
    let (plain, without) = answers(0, false);
    assert!(plain[0].text.contains("has_ever_wanted_to_fly_away"), "{}", plain[0].text);
    // On a machine that is full of other work masks are late, and so are these drafts.
    let fewer = (0..5).any(|_| {
        let (drafted, with) = answers(4, false);
        assert_eq!(drafted, plain);
        with.accepted > 20 && with.steps < without.steps
    });
    assert!(fewer, "{without:?}");
    assert_eq!(answers(4, true).0, plain);
}
