//! Contexts that are stretched: tables by transformers' own code (`tools/rope_tables.py`), up to position 262,143.

use model::arch::{Stretch, StretchRule};
use model::plan::Plan;
use serde_json::Value;

use crate::header::{D_HEAD, Header};

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// The one rotary embedding of a plan is that of a case.
fn check(plan: &Plan, case: &Value, name: &str) {
    let rope = &plan.ropes[0];
    let expected = numbers(&case["inv_freq"]);
    assert_eq!((plan.ropes.len(), rope.inv_freq.len()), (1, expected.len()), "{name}");
    for (found, expected) in rope.inv_freq.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-12 * expected, "{name}: {found} {expected}");
    }
    assert!((f64::from(rope.factor) - case["attention_factor"].as_f64().unwrap()).abs() < 1e-6, "{name}");
    for (i, position) in numbers(&case["positions"]).into_iter().enumerate() {
        let [cos, sin] = ["cos", "sin"].map(|name| numbers(&case[name][i]));
        for (pair, inv_freq) in rope.inv_freq.iter().enumerate() {
            let (s, c) = (position * inv_freq).sin_cos();
            assert!((c - cos[pair]).abs() < 1e-6 && (s - sin[pair]).abs() < 1e-6, "{name}: {position}, pair {pair}");
        }
    }
}

/// What a file says and what a user says come to the same tables, which are those of transformers.
#[test]
fn tables_are_those_of_transformers() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../data/rope_tables.json")).unwrap();
    assert!(cases.len() > 4);
    for case in &cases {
        let rule = case["rule"].as_str().unwrap();
        let [factor, base] = ["factor", "base"].map(|name| case[name].as_f64().unwrap());
        let (n_ctx, n_orig) = (case["n_ctx"].as_u64().unwrap(), case["n_ctx_orig"].as_u64());
        let mut header = Header::qwen3(2);
        header.set("qwen3.context_length", n_ctx as u32).set("qwen3.rope.freq_base", base as f32);
        assert_eq!(case["d_head"], D_HEAD);

        let kind = if rule == "yarn" { StretchRule::Yarn } else { StretchRule::Linear };
        let mut checkpoint = header.open();
        let n_ctx_orig = n_orig.map(|n| n as usize);
        let plan = model::stretch(&mut checkpoint, Stretch { rule: kind, factor, n_ctx_orig }).unwrap();
        check(&plan, case, "said by a user");
        assert_eq!(plan.n_ctx_train as f64, n_orig.unwrap_or(n_ctx) as f64 * factor);
        // What is built of the checkpoint later is the same.
        assert_eq!(model::build(&checkpoint).unwrap().ropes, plan.ropes);

        header.set("qwen3.rope.scaling.type", rule).set("qwen3.rope.scaling.factor", factor as f32);
        if let Some(n) = n_orig {
            header.set("qwen3.rope.scaling.original_context_length", n as u32);
        }
        check(&model::build(&header.open()).unwrap(), case, "said by the file");
    }
}

#[test]
fn what_cannot_be_stretched_says_so() {
    let yarn = Stretch { rule: StretchRule::Yarn, factor: 4.0, n_ctx_orig: None };
    let linear = Stretch { rule: StretchRule::Linear, ..yarn };
    type Change = fn(&mut Header);
    let cases: &[(Change, Stretch, &str)] = &[
        (|h| _ = h.set("qwen3.rope.scaling.type", "linear"), yarn, "is linear, which yarn cannot replace"),
        (|h| _ = h.set("qwen3.rope.scaling.type", "yarn"), linear, "is yarn, which linear cannot replace"),
        (|_| (), Stretch { factor: 1e6, ..yarn }, "context_length: is 4096000000, expected 1 to 16777216"),
        (|_| (), Stretch { n_ctx_orig: Some(0), ..yarn }, "original_context_length: is 0, expected 1"),
    ];
    for (change, stretch, expected) in cases {
        let mut header = Header::qwen3(2);
        change(&mut header);
        let error = model::stretch(&mut header.open(), *stretch).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // A file's own YaRN may get another factor, from the context before.
    let mut header = Header::qwen3(2);
    header.set("qwen3.rope.scaling.type", "yarn").set("qwen3.rope.scaling.factor", 2f32);
    header.set("qwen3.rope.scaling.original_context_length", 2048u32);
    assert_eq!(model::stretch(&mut header.open(), yarn).unwrap().n_ctx_train, 8192);
}

/// Without `alpha`, a base that depends on the length is that of the file up to the trained context.
#[test]
fn dynamic_bases_are_the_files_own() {
    let plain = model::build(&Header::qwen3(2).open()).unwrap();
    let mut header = Header::qwen3(2);
    header.set("qwen3.rope.scaling.type", "dynamic").set("qwen3.rope.scaling.factor", 2f32);
    assert_eq!(model::build(&header.open()).unwrap().ropes, plain.ropes);
}
