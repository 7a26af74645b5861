//! Every op on every backend, against the reference and, where a backend has one, against its twin to the bit. A new op
//! does not compile without cases ([`ops!`]); a new backend is a line in `common/backends.rs`.
mod case;
mod cases;
mod check;
mod choosing;
mod kernel_traps;
mod traps;

use std::collections::HashSet;

use case::Case;
use conformance::backends::{self, Row};
use model::plan::Op;
use quant::{ScaleType, WeightType};

/// The list of ops with their cases, a test for each, and a match that has no other arm.
macro_rules! ops {
    ($($variant:ident $name:ident),* $(,)?) => {
        /// Name and cases of every op.
        const OPS: &[(&str, fn(u64) -> Vec<Case>)] = &[$((stringify!($name), cases::$name)),*];

        /// Does not compile while an op stands in no line of the list.
        fn name_in_list(op: &Op) -> &'static str {
            match op {
                $(Op::$variant { .. } => stringify!($name),)*
                // Of plans of whole texts, which `encoders` tests.
                Op::EmbedPlace { .. } => "embed_place",
                // Of parts of plans, which `parts` tests.
                Op::AllReduce { .. } => "all_reduce",
            }
        }

        mod every_backend {
            $(#[test] fn $name() { super::check_op(stringify!($name), super::cases::$name); })*
        }
    };
}

ops! {
    Embed embed,
    Input input,
    AddBias add_bias,
    Gelu gelu,
    Clamp clamp,
    Constant constant,
    Linear linear,
    GatedLinear gated_linear,
    RmsNorm rms_norm,
    HeadNorm head_norm,
    Rope rope,
    Center center,
    SplitHeads split_heads,
    JoinHeads join_heads,
    HeadLinear head_linear,
    GatedAct gated_act,
    Add add,
    KvAppend kv_append,
    Choose choose,
    Attention attention,
    CausalConv causal_conv,
    DeltaNet delta_net,
    Route route,
    Experts experts,
    Combine combine,
    Select select,
    Scale scale,
    ScaleBy scale_by,
    GateBy gate_by,
    DecayBeta decay_beta,
    GatedNorm gated_norm,
    Softcap softcap,
}

/// Whether case `i` is run where that takes long: one of each type, all of types with all shapes. Of affine types one
/// of the three types of scales stands for the others, another for each width and group. Caches of f16 see a quarter of
/// the cases, and appends, which show in attention too, a third; ops without matrices see half of theirs.
fn is_sample(row: &Row, case: &Case, i: usize, is_first: bool) -> bool {
    let dtype = case.dtype;
    if cases::wide() {
        return true;
    }
    if !case.model.0.caches.is_empty() {
        let one_of = if row.ops.only_cached { 4 } else { 3 };
        return i.is_multiple_of(one_of) || (case.op == "attention" && !row.ops.only_cached);
    }
    if !["embed", "linear", "gated_linear", "head_linear", "experts"].contains(&case.op) {
        return i.is_multiple_of(2);
    }
    let scales = |scales| [ScaleType::F16, ScaleType::BF16, ScaleType::F32].iter().position(|s| *s == scales);
    let is_chosen = match dtype {
        WeightType::Affine(a) => scales(a.scales()) == Some((a.bits() + a.group() / 32) % 3),
        _ => true,
    };
    let has_all_shapes = matches!(dtype, WeightType::F32 | WeightType::Q8_0 | WeightType::Q4_K);
    is_chosen && (is_first || has_all_shapes)
}

/// Whether case `i` is in the part that `MOEBIUS_PART` asks for: `2/9` is the third of nine, where all takes too long.
fn is_in_part(i: usize) -> bool {
    let Some(part) = std::env::var("MOEBIUS_PART").ok() else { return true };
    let numbers = part.split_once('/').and_then(|(at, n)| Some((at.parse::<usize>().ok()?, n.parse::<usize>().ok()?)));
    let Some((at, n)) = numbers else { panic!("MOEBIUS_PART={part} is no part such as 2/9") };
    i % n == at
}

/// Runs the cases of an op on every backend and prints the largest error by type. Panics with all that fails.
fn check_op(name: &str, cases: fn(u64) -> Vec<Case>) {
    let rows = backends::rows_of_ops();
    let seeds = if cases::wide() { 1..6 } else { 1..2 };
    let mut failures = Vec::new();
    let mut worst: Vec<(String, f64)> = Vec::new();
    let mut seen = HashSet::new();
    for (i, case) in seeds.flat_map(cases).enumerate() {
        let is_first = seen.insert((case.dtype.to_string(), case.plain));
        let holds = case.model.0.ops.iter().any(|op| name_in_list(op) == name && op.name() == case.op);
        assert!(holds, "{case} holds no {name}");
        if !is_in_part(i) {
            continue;
        }
        let exact = check::exact(&case);
        let rounded = backends::BLOCKS.map(|cache| (cache, check::rounded(&case, cache)));
        let mut given = check::Given::default();
        for row in rows.iter().filter(|row| !row.is_simulated || is_sample(row, &case, i, is_first)) {
            let of_blocks = rounded.iter().find(|(cache, _)| row.blocks == Some(*cache));
            let exact = of_blocks.and_then(|(_, answers)| answers.as_ref()).unwrap_or(&exact);
            match check::check(row, &case, exact, &mut given) {
                Ok(error) => {
                    let key = format!("{}, {}{}", row.name, case.dtype, if case.plain { " read" } else { "" });
                    match worst.iter_mut().find(|(other, _)| *other == key) {
                        Some((_, most)) => *most = most.max(error),
                        None => worst.push((key, error)),
                    }
                }
                Err(failure) => failures.push(failure.to_string()),
            }
        }
    }
    worst.iter().for_each(|(key, error)| println!("{name}: {key}: {error:.2e}"));
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}
