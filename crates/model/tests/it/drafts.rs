//! Draft heads: what plans have of them, where folders keep them, and what is refused.

use checkpoint::Checkpoint;
use model::names::Names;
use model::plan::{Access, Buf, Cache, Op, Plan, ValidPlan, memory, passes};

use crate::gated_delta;

fn drafting(checkpoint: &Checkpoint) -> Plan {
    model::build_drafting(checkpoint).unwrap().into_plan()
}

/// Without drafts a plan reads nothing of the head, and with them a token of the model costs what it did.
#[test]
fn plans_have_a_head_where_it_is_wanted() {
    let checkpoint = gated_delta::qwen35moe().open();
    let (plain, with) = (model::build(&checkpoint).unwrap(), drafting(&checkpoint));
    let of_head = |plan: &Plan| plan.weights.iter().filter(|w| w.name.starts_with("blk.8.")).count();
    assert_eq!((of_head(&plain), plain.draft.is_none()), (0, true));
    assert_eq!((of_head(&with), with.weights.len()), (20, plain.weights.len() + 20));
    assert_eq!((plain.caches.len() + 1, &plain.states), (with.caches.len(), &with.states));
    assert_eq!((plain.bytes_per_token(), plain.active_params()), (with.bytes_per_token(), with.active_params()));
    // The table and the output matrix are the model's.
    let draft = with.draft.as_ref().unwrap();
    let shared = |name: &str| draft.ops.iter().flat_map(Op::weights).any(|w| with.weight(w).name == name);
    assert!(shared("token_embd.weight") && shared("output.weight") && !shared("output_norm.weight"));
}

/// A file without the layer, or without its tensors, has none.
#[test]
fn files_without_the_layer_have_no_head() {
    let mut stripped = gated_delta::qwen35moe();
    stripped.drop_tensor("blk.8.nextn.eh_proj.weight");
    for header in [gated_delta::qwen35(), stripped, crate::header::Header::qwen3moe(2)] {
        let checkpoint = header.open();
        assert_eq!(drafting(&checkpoint), model::build(&checkpoint).unwrap().into_plan());
    }
    // Half of it is an error, and none to those who do not draft.
    let mut half = gated_delta::qwen35moe();
    half.drop_tensor("blk.8.nextn.hnorm.weight");
    let error = model::build_drafting(&half.open()).unwrap_err().to_string();
    assert!(error.contains("blk.8.nextn.hnorm.weight: is missing"), "{error}");
    assert!(model::build(&half.open()).is_ok());
    // So is a tensor in it that nothing reads.
    let mut more = gated_delta::qwen35moe();
    more.tensor("blk.8.nextn.other.weight", &[256], quant::WeightType::F32);
    let error = model::build_drafting(&more.open()).unwrap_err().to_string();
    assert!(error.contains("blk.8.nextn.other.weight: f32 [256] is in the file"), "{error}");
}

/// Memory of the head's step is used by the model's, but for what is given from one to the other.
#[test]
fn buffers_of_both_lie_apart_where_they_must() {
    let plan = model::build_drafting(&gated_delta::qwen35moe().open()).unwrap().rewrite(passes::fuse).unwrap();
    let (draft, placement) = (plan.draft.as_ref().unwrap(), memory::place(&plan, 8, 4));
    let span = |buf: Buf| {
        let at = placement.offset[buf.0 as usize];
        at..at + placement.len[buf.0 as usize]
    };
    let apart = |a: Buf, b: Buf| span(a).end <= span(b).start || span(b).end <= span(a).start;
    // What a step of the model returns is written by no later op of it, and so for the head.
    for (ops, kept) in [
        (&plan.ops, vec![plan.logits, plan.hidden().unwrap(), draft.source]),
        (&draft.ops, vec![draft.logits, plan.draft_hidden().unwrap()]),
    ] {
        for &kept in &kept {
            let writes = |op: &Op| op.bufs().iter().any(|&(buf, access)| buf == kept && access != Access::Read);
            let last = ops.iter().rposition(writes).unwrap();
            for (buf, access) in ops[last + 1..].iter().flat_map(Op::bufs) {
                assert!(access == Access::Read || buf == kept || apart(buf, kept));
            }
        }
    }
    // What the head is given is there until its last reader.
    let last = draft.ops.iter().rposition(|op| op.bufs().iter().any(|&(buf, _)| buf == draft.input)).unwrap();
    for (buf, access) in draft.ops[..=last].iter().flat_map(Op::bufs) {
        assert!(access == Access::Read || apart(buf, draft.input), "{}", plan.buf(buf).name);
    }
    let all: usize = placement.len.iter().sum();
    assert!(placement.bytes < all / 2, "{} of {all}", placement.bytes);
}

/// Breaks a head, and the error.
type Broken = (fn(&mut Plan), &'static str);

#[rustfmt::skip]
const BROKEN: &[Broken] = &[
    (|p| p.draft.as_mut().unwrap().source = Buf(9999), "hidden states are buffer 9999 of"),
    (|p| p.draft.as_mut().unwrap().input = Buf(9999), "hidden states are buffer 9999 of"),
    (|p| { let logits = p.logits; p.draft.as_mut().unwrap().source = logits }, "logits is F32 [Outputs, 96], expected F32 [Tokens, 256]"),
    (|p| { let input = p.draft.as_ref().unwrap().input; p.draft.as_mut().unwrap().source = input }, "no op writes the draft head's hidden states"),
    (|p| { let source = p.draft.as_ref().unwrap().source; p.draft.as_mut().unwrap().input = source }, "an op writes the draft head's input"),
    (|p| p.draft.as_mut().unwrap().logits = Buf(9999), "draft head's logits are buffer 9999 of"),
    (|p| { let logits = p.logits; p.draft.as_mut().unwrap().logits = logits }, "no op writes the draft head's logits"),
    (|p| _ = p.draft.as_mut().unwrap().layers.pop(), "number of layer marks is"),
    (|p| { let x = p.draft.as_ref().unwrap().source; replace(p, |op| matches!(op, Op::RmsNorm { .. }), |op| if let Op::RmsNorm { x: from, .. } = op { *from = x }) }, "reads final, which no op has written"),
    (|p| replace(p, |_| true, |op| match op { Op::KvAppend { cache, .. } | Op::Attention { cache, .. } => *cache = Cache(0), _ => {} }), "the draft head appends to cache 0 of the model"),
];

fn replace(plan: &mut Plan, which: impl Fn(&Op) -> bool, with: impl Fn(&mut Op)) {
    plan.draft.as_mut().unwrap().ops.iter_mut().filter(|op| which(op)).for_each(with);
}

#[test]
fn broken_heads_are_refused() {
    let good = drafting(&gated_delta::qwen35moe().open());
    for (i, (spoil, wanted)) in BROKEN.iter().enumerate() {
        let mut plan = good.clone();
        spoil(&mut plan);
        let error = ValidPlan::new(plan).unwrap_err().to_string();
        assert!(error.contains(wanted), "{i}: {error:?}, expected {wanted:?}");
    }
}

/// Qwen's folders keep the layers apart from the others, those of DeepSeek and GLM after them.
#[test]
fn folders_keep_the_layer_in_two_places() {
    const FOUND: [&str; 8] = [
        "mtp.fc",
        "mtp.pre_fc_norm_hidden",
        "mtp.norm",
        "mtp.layers.0.self_attn.q_proj",
        "model.norm",
        "model.layers.5.eh_proj",
        "model.layers.5.shared_head.norm",
        "model.layers.5.embed_tokens",
    ];
    let (mut writer, mut file) = (checkpoint::gguf::Writer::new(), Vec::new());
    for name in FOUND {
        writer.tensor(&format!("{name}.weight"), &[4], quant::WeightType::F32, vec![0; 16]);
    }
    writer.write(&mut file).unwrap();
    let checkpoint = checkpoint::from_bytes("folder", file).unwrap();
    let names = |n_layer| Names::new(&checkpoint, &[]).further_from(n_layer);
    let found = |n_layer: usize, name: &str| {
        let name = format!("blk.{name}.weight");
        names(n_layer).tensor(&name).map(|info| info.name.trim_end_matches(".weight").to_string())
    };
    for (n_layer, name, wanted) in [
        (3, "3.nextn.eh_proj", Some("mtp.fc")),
        (3, "3.nextn.hnorm", Some("mtp.pre_fc_norm_hidden")),
        (3, "3.nextn.enorm", None),
        (3, "3.nextn.shared_head_norm", Some("mtp.norm")),
        (3, "3.attn_q", Some("mtp.layers.0.self_attn.q_proj")),
        // A layer of the model, and the second that drafts.
        (4, "3.attn_q", None),
        (2, "3.attn_q", None),
        (5, "5.nextn.eh_proj", Some("model.layers.5.eh_proj")),
        (5, "5.nextn.shared_head_norm", Some("model.layers.5.shared_head.norm")),
        (5, "5.nextn.embed_tokens", Some("model.layers.5.embed_tokens")),
        (5, "5.nextn.shared_head_head", None),
    ] {
        assert_eq!(found(n_layer, name).as_deref(), wanted, "{name} of {n_layer} layers");
    }
}
