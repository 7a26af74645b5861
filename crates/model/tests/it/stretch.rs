//! Contexts that are stretched: tables by transformers' own code (`tools/rope_tables.py`), up to position 262,143.

use model::arch::{Stretch, StretchRule};
use model::plan::Plan;
use serde_json::Value;

use crate::header::{D_HEAD, Header};

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// The one rotary embedding of a plan for `n_ctx` positions is that of a case.
fn check(plan: &Plan, n_ctx: u64, case: &Value, name: &str) {
    let rope = &plan.ropes_for(n_ctx as usize)[0];
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

        let rules = [StretchRule::Yarn, StretchRule::Linear, StretchRule::Dynamic];
        let kind = rules.into_iter().find(|kind| kind.name() == rule).unwrap();
        let n_orig_ctx = n_orig.unwrap_or(n_ctx);
        let (n_max, plain) = ((n_orig_ctx as f64 * factor) as u64, model::build(&header.open()).unwrap());
        // Dynamic NTK leaves contexts up to the first one as they are, and is the same beyond.
        let check_all = |plan: &Plan, name: &str| {
            let is_dynamic = kind == StretchRule::Dynamic;
            assert_eq!(plan.ropes_for(n_orig_ctx as usize) == plain.ropes, is_dynamic, "{name}");
            assert!(!is_dynamic || plan.n_ctx_max() as u64 == n_max, "{name}");
            check(plan, n_max, case, name);
            check(plan, n_orig_ctx + 1, case, name);
        };
        let mut checkpoint = header.open();
        let n_ctx_orig = n_orig.map(|n| n as usize);
        let plan = model::stretch(&mut checkpoint, Stretch { rule: kind, factor, n_ctx_orig }).unwrap();
        check_all(&plan, "said by a user");
        assert_eq!(plan.n_ctx_train as u64, n_max);
        // What is built of the checkpoint later is the same.
        let later = model::build(&checkpoint).unwrap();
        assert_eq!((&later.ropes, &later.long_ropes), (&plan.ropes, &plan.long_ropes));

        header.set("qwen3.rope.scaling.type", rule).set("qwen3.rope.scaling.factor", factor as f32);
        if let Some(n) = n_orig {
            header.set("qwen3.rope.scaling.original_context_length", n as u32);
        }
        check_all(&model::build(&header.open()).unwrap(), "said by the file");
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
        (|h| _ = h.set("qwen3.rope.scaling.type", "dynamic"), yarn, "is dynamic, which yarn cannot replace"),
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

/// A file's own factor may be said again, for its whole context; with `alpha` the base says it all.
#[test]
fn dynamic_rules_of_files() {
    let dynamic = Stretch { rule: StretchRule::Dynamic, factor: 2.0, n_ctx_orig: None };
    let mut header = Header::qwen3(2);
    header.set("qwen3.rope.scaling.type", "dynamic").set("qwen3.rope.scaling.factor", 2f32);
    let own = model::build(&header.open()).unwrap();
    assert_eq!((own.n_ctx_train, own.n_ctx_max()), (4096, 8192));
    let said = model::stretch(&mut header.open(), dynamic).unwrap();
    assert_eq!((said.n_ctx_train, &said.long_ropes), (8192, &own.long_ropes));
    // Absurd factors give numbers, and factors that stretch nothing no table.
    for (factor, n_ctx) in [(1e30, Some(1 << 24)), (1.0, None), (0.5, None), (0.0, None)] {
        header.set("qwen3.rope.scaling.factor", factor as f32);
        let plan = model::build(&header.open()).unwrap();
        assert_eq!(plan.long_ropes.as_ref().map(|long| long.n_ctx_max), n_ctx, "{factor}");
    }
}
