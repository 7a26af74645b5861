//! The validator's rules: every case breaks one thing of a good plan, and the error names the op and the numbers.

use crate::header::Header;
use model::plan::GroupScore::{Max, TopTwo};
use model::plan::{
    Buf, Cache, ExpertBiases, Gate, GroupScore, Groups, Op, Plan, Rope, Router, Rows, StateDecl, ValidPlan, Weight,
};

/// Applies `spoil` to the first op of that name.
fn op(plan: &mut Plan, name: &str, spoil: impl FnOnce(&mut Op)) {
    spoil(plan.ops.iter_mut().find(|op| op.name() == name).unwrap());
}

/// Declares the first buffer of that name anew.
fn buf<'a>(plan: &'a mut Plan, name: &str) -> &'a mut model::plan::BufDecl {
    plan.bufs.iter_mut().find(|buf| buf.name == name).unwrap()
}

fn find(plan: &Plan, name: &str) -> Buf {
    Buf(plan.bufs.iter().position(|buf| buf.name == name).unwrap() as u32)
}

/// Changes the first router.
fn router(plan: &mut Plan, spoil: impl FnOnce(&mut Router)) {
    op(plan, "route", |op| {
        if let Op::Route { router, .. } = op {
            spoil(router)
        }
    });
}

fn groups(plan: &mut Plan, n_group: usize, n_used: usize, score: GroupScore) {
    router(plan, |r| r.groups = Some(Groups { n_group, n_used, score }));
}

/// Puts an op in front of the first `kv_append`.
fn insert(plan: &mut Plan, make: impl FnOnce(&Plan) -> Op) {
    let (at, op) = (plan.ops.iter().position(|op| op.name() == "kv_append").unwrap(), make(plan));
    plan.ops.insert(at, op);
    plan.layers.insert(at, Some(0));
}

fn choose(plan: &Plan) -> Op {
    Op::Choose { cache: Cache(0), q: find(plan, "q.0"), weights: find(plan, "k.0"), out: find(plan, "ids.0") }
}

/// Takes q.0 apart into parts of these widths.
fn split(plan: &mut Plan, n_head: usize, parts: Vec<(usize, &str)>) {
    insert(plan, |p| {
        let parts = parts.into_iter().map(|(width, name)| (width, find(p, name))).collect();
        Op::SplitHeads { x: find(p, "q.0"), n_head, parts }
    });
}

struct Case(fn(&mut Plan), &'static str);

#[rustfmt::skip]
const CASES: &[Case] = &[
    Case(|p| p.layers.truncate(3), "number of layer marks is 3"),
    Case(|p| p.n_vocab = 0, "n_vocab 0, d_model 256, n_ctx_train 4096: none may be 0"),
    Case(|p| p.n_vocab = 97, "op 0 (embed): table token_embd.weight has shape [96, 256], expected [97, 256]"),
    Case(|p| p.weights[0].shape = vec![96, 100], "token_embd.weight: q4_k [96, 100] cannot be: rows are whole blocks of 256"),
    Case(|p| p.weights[0].shape = vec![usize::MAX, 256], "token_embd.weight: q4_k [18446744073709551615, 256] cannot be"),
    Case(|p| p.caches[0].d_k = 0, "cache 0"),
    Case(|p| p.caches[0].window = Some(0), "cache 0"),
    Case(|p| p.caches[0].window = Some(9), "(attention): sees a window of None positions, cache 0 keeps Some(9)"),
    Case(|p| p.states.push(StateDecl { what: "delta", n: 0 }), "state 0 (delta) has no numbers"),
    Case(|p| p.states.push(StateDecl { what: "delta", n: 9 }), "no op uses state 0 (delta)"),
    Case(|p| p.ropes[0].inv_freq[3] = f64::NAN, "rope 0 has a frequency Some(NaN)"),
    Case(|p| p.ropes[0].inv_freq = vec![1.0; 17], "(rope): rotates 34 dims of heads of 32"),
    Case(|p| p.logits = Buf(999), "logits are buffer 999 of"),
    Case(|p| p.logits = find(p, "x"), "x is F32 [Tokens, 256], expected F32 [Outputs, 96]"),
    Case(|p| { p.ops.pop(); p.layers.pop(); }, "no op writes the logits"),
    Case(|p| { p.ops.remove(0); p.layers.remove(0); }, "op 0 (rms_norm): reads x, which no op has written"),
    Case(|p| { let x = find(p, "h.0"); op(p, "linear", |o| if let Op::Linear { parts, .. } = o { parts[0].out = x }) },
        "(linear): writes h.0 and names it twice"),
    Case(|p| op(p, "linear", |o| if let Op::Linear { parts, .. } = o { parts.clear() }), "(linear): has no parts"),
    Case(|p| op(p, "linear", |o| if let Op::Linear { parts, .. } = o { parts[0].w = Weight(999) }), "weight 999 of"),
    Case(|p| op(p, "linear", |o| if let Op::Linear { parts, .. } = o { parts.swap(0, 1); parts[0].out = parts[1].out }),
        "names it twice"),
    Case(|p| op(p, "embed", |o| if let Op::Embed { out, .. } = o { *out = Buf(999) }), "op 0 (embed): buffer 999 of"),
    Case(|p| op(p, "rope", |o| if let Op::Rope { rope, .. } = o { *rope = Rope(1) }), "(rope): rope 1 of 1"),
    Case(|p| op(p, "rope", |o| if let Op::Rope { n_head, .. } = o { *n_head = 5 }), "q.0 has width 128, expected 5 heads of 32"),
    Case(|p| op(p, "rms_norm", |o| if let Op::RmsNorm { eps, .. } = o { *eps = -1.0 }), "eps is -1, expected 0 or more"),
    Case(|p| op(p, "rms_norm", |o| if let Op::RmsNorm { w, .. } = o { *w = Weight(0) }), "expected [256]"),
    Case(|p| op(p, "kv_append", |o| if let Op::KvAppend { cache, .. } = o { *cache = Cache(1) }),
        "(attention): reads cache 0, which this step has not appended to"),
    Case(|p| op(p, "attention", |o| if let Op::Attention { n_head, .. } = o { *n_head = 3 }),
        "3 heads cannot share 2 key-value heads"),
    Case(|p| op(p, "attention", |o| if let Op::Attention { window, .. } = o { *window = Some(0) }), "window is 0"),
    Case(|p| op(p, "attention", |o| if let Op::Attention { softcap, .. } = o { *softcap = Some(-1.0) }), "softcap is -1"),
    Case(|p| op(p, "attention", |o| if let Op::Attention { scale, .. } = o { *scale = f32::NAN }), "scale is NaN"),
    Case(|p| op(p, "attention", |o| if let Op::Attention { sinks, .. } = o { *sinks = Some(Weight(0)) }),
        "sinks token_embd.weight has shape [96, 256], expected [4]"),
    Case(|p| { let x = find(p, "q.0"); op(p, "attention", |o| if let Op::Attention { chosen, .. } = o { *chosen = Some(x) }) },
        "(attention): q.0 holds no chosen positions"),
    Case(|p| insert(p, choose), "(choose): reads cache 0, which this step has not appended to"),
    Case(|p| { let choose = choose(p); op(p, "attention", |o| *o = choose) },
        "(choose): cache 0 is CacheDecl { n_kv: 2, d_k: 32, d_v: 32, v_in_k: false, window: None }, expected the keys of one"),
    Case(|p| op(p, "experts", |o| if let Op::Experts { act, .. } = o { *act = Gate::ClampedSwiglu { alpha: 1.0, limit: 0.0 } }),
        "limit is 0, expected more than 0"),
    Case(|p| op(p, "experts", |o| if let Op::Experts { biases, .. } = o {
            *biases = Some(ExpertBiases { gate: Weight(0), up: Weight(0), down: Weight(0) })
        }), "gate bias token_embd.weight has shape [96, 256], expected [8, 256]"),
    Case(|p| op(p, "combine", |o| { let Op::Combine { x, .. } = *o else { return }; *o = Op::ScaleBy { x, w: Weight(0) } }),
        "w token_embd.weight has shape [96, 256], expected [256]"),
    Case(|p| op(p, "route", |o| if let Op::Route { n_used, .. } = o { *n_used = 9 }), "uses 9 of 8 experts, 1 to 8 allowed"),
    Case(|p| op(p, "route", |o| if let Op::Route { n_used, .. } = o { *n_used = 0 }), "uses 0 of 8 experts, 1 to 8 allowed"),
    Case(|p| router(p, |r| r.scale = f32::NAN), "(route): scale is NaN"),
    Case(|p| router(p, |r| r.renormalise = Some(-1.0)), "(route): eps is -1"),
    Case(|p| router(p, |r| r.bias = Some(Weight(0))), "(route): bias token_embd.weight has shape [96, 256], expected [8]"),
    Case(|p| router(p, |r| r.expert_scale = Some(Weight(999))), "(route): weight 999 of"),
    Case(|p| groups(p, 3, 1, Max), "8 experts cannot be 3 groups of equal size"),
    Case(|p| groups(p, 0, 1, Max), "8 experts cannot be 0 groups of equal size"),
    Case(|p| groups(p, 4, 5, Max), "uses 5 of 4 groups, 1 to 4 allowed"),
    Case(|p| groups(p, 4, 0, Max), "uses 0 of 4 groups, 1 to 4 allowed"),
    Case(|p| groups(p, 8, 4, TopTwo), "8 groups of 1 experts have no two best"),
    Case(|p| groups(p, 8, 1, Max), "uses 2 experts of 1 groups of 1"),
    Case(|p| split(p, 4, vec![(16, "k.0"), (32, "v.0")]), "(split_heads): v.0 is F32 [Tokens, 64], expected F32 [Tokens, 128]"),
    Case(|p| split(p, 2, vec![(32, "k.0")]), "(split_heads): q.0 is F32 [Tokens, 128], expected F32 [Tokens, 64]"),
    Case(|p| split(p, 2, vec![(32, "k.0"), (32, "k.0")]), "(split_heads): writes k.0 and names it twice"),
    Case(|p| split(p, usize::MAX, vec![(32, "k.0")]), "(split_heads): k.0 is F32"),
    Case(|p| insert(p, |p| Op::HeadLinear { x: find(p, "q.0"), w: Weight(0), transposed: false, out: find(p, "k.0") }),
        "(head_linear): w has shape [96, 256], expected three axes"),
    Case(|p| insert(p, |p| {
        let w = Weight(p.weights.iter().position(|w| w.name == "blk.0.ffn_gate_exps.weight").unwrap() as u32);
        Op::HeadLinear { x: find(p, "q.0"), w, transposed: true, out: find(p, "k.0") }
    }), "(head_linear): q.0 is F32 [Tokens, 128], expected F32 [Tokens, 2048]"),
    Case(|p| insert(p, |p| Op::EmbedPlace { table: Weight(0), axis: 0, out: find(p, "x") }),
        "(embed_place): has tables of places, and steps of parts of texts"),
    Case(|p| { p.whole = true; insert(p, |p| Op::EmbedPlace { table: Weight(0), axis: 3, out: find(p, "x") }) },
        "(embed_place): places have 3 axes, this is 3"),
    Case(|p| { p.whole = true; insert(p, |p| Op::EmbedPlace { table: Weight(0), axis: 0, out: find(p, "k.0") }) },
        "(embed_place): table has shape [96, 256], expected rows of 64"),
    Case(|p| { p.whole = true; p.caches[0].window = Some(9) }, "a plan of whole texts has a draft head, images"),
    Case(|p| {
        p.whole = true;
        op(p, "attention", |o| if let Op::Attention { window, chunked, .. } = o { (*window, *chunked) = (Some(9), true) });
    }, "(attention): has chunks of whole texts"),
    Case(|p| p.caches[0].v_in_k = true, "(kv_append): gives values to cache 0, which has them in its keys"),
    Case(|p| op(p, "kv_append", |o| if let Op::KvAppend { v, .. } = o { *v = None }), "gives no values to cache 0"),
    Case(|p| { p.caches[0].v_in_k = true; p.caches[0].d_v = 33 }, "cache 0: values of 33 cannot be a part of keys of 32"),
    Case(|p| {
        let i = p.weights.iter().position(|w| w.name == "blk.0.ffn_gate_inp.weight").unwrap();
        p.weights[i].shape = vec![1025, 256];
        buf(p, "router.0").width = 1025;
    }, "1025 experts, at most 1024 allowed"),
    Case(|p| buf(p, "y.0").rows = Rows::Slots(33), "buffer y.0 has 33 slots, 1 to 32 allowed"),
    Case(|p| buf(p, "y.0").rows = Rows::Slots(3), "y.0 is F32 [Slots(3), 256], expected F32 [Slots(2), 256]"),
    Case(|p| buf(p, "k.0").width = 0, "buffer k.0 has width 0"),
    Case(|p| op(p, "experts", |o| if let Op::Experts { gate, down, .. } = o { *gate = Weight(0); *down = Weight(0) }),
        "gate has shape [96, 256], expected three axes"),
    Case(|p| {
        let i = p.weights.iter().position(|w| w.name == "blk.0.ffn_gate_exps.weight").unwrap();
        p.weights[i].shape = vec![7, 256, 256];
    }, "has 7 experts, the ids were routed over Some(8)"),
    Case(|p| op(p, "combine", |o| if let Op::Combine { norm: Some(n), .. } = o { n.eps = f32::INFINITY }), "eps is inf"),
];

#[test]
fn a_broken_plan_is_refused() {
    let good = crate::fused(&Header::qwen3moe(2).open()).unwrap();
    for (i, Case(spoil, wanted)) in CASES.iter().enumerate() {
        let mut plan = good.clone().into_plan();
        spoil(&mut plan);
        let error = match ValidPlan::new(plan) {
            Ok(_) => panic!("case {i}: no error, expected {wanted:?}"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(wanted), "case {i}: {error:?}, expected {wanted:?}");
    }
}
