//! Mistakes that kernels of this kind have had, built into those of the Metal backend: the cases of an op that every
//! run has must show each. Offsets past 32 bits and rows past 15 are in `metal_limits.rs`. Skips where there is no
//! clang.

use std::sync::Arc;

use gpu::metal::{Metal, Tuning};
use metal_sim::Options;

use super::traps::Cases;
use conformance::backends::{self, Row};

/// What a kernel does wrong, and how the op's cases tell.
struct Trap {
    name: &'static str,
    op: &'static str,
    kernel: &'static str,
    from: &'static str,
    to: &'static str,
    /// Part of the failure.
    why: &'static str,
}

const fn trap(
    name: &'static str,
    op: &'static str,
    kernel: &'static str,
    [from, to]: [&'static str; 2],
    why: &'static str,
) -> Trap {
    Trap { name, op, kernel, from, to, why }
}

const TRAPS: &[Trap] = &[
    trap(
        "a thread leaves before a barrier",
        "attention",
        "attention",
        ["for (uint i = t; i < D_K;", "if (t == 63) return; for (uint i = t; i < D_K;"],
        "[barrier-divergent]",
    ),
    trap(
        "a shared array is loaded in part",
        "attention",
        "attention",
        ["i < D_K; i += 64) query[i]", "i + 1 < D_K; i += 64) query[i]"],
        "[unwritten]",
    ),
    trap(
        "a fast simdgroup overwrites what a slow one reads",
        "linear",
        "linear",
        ["        threadgroup_barrier(mem_flags::mem_threadgroup);\n    }\n    // Outputs", "    }\n    // Outputs"],
        "[race]",
    ),
    trap(
        "an array in threadgroup memory is shorter than the row",
        "attention",
        "attention",
        ["threadgroup float4 pieces[(D_K + 3) / 4];", "threadgroup float4 pieces[4];"],
        "[out-of-bounds]",
    ),
    trap(
        "activations are staged as halves",
        "linear",
        "linear",
        ["= *(device const float4*)(x0 + first + k)", "= float4(half4(*(device const float4*)(x0 + first + k)))"],
        "[half-overflow]",
    ),
    trap(
        "a token's list of experts ends at 8",
        "route",
        "experts_sum",
        ["s < a.n_used; s++", "s < min(a.n_used, 8u); s++"],
        " wanted",
    ),
    trap(
        "a softplus overflows",
        "decay_beta",
        "decay_beta",
        ["a_log * softplus(x)", "a_log * precise::log(1.0f + precise::exp(x))"],
        " wanted",
    ),
    trap(
        "a share of zero meets NaN in a tile",
        "attention",
        "attention_tiles",
        ["if ((is_wild[0] | is_wild[1] | is_wild[2] | is_wild[3]) != 0) {", "if (false) {"],
        "NaN",
    ),
    trap(
        "a share of zero meets what was never written",
        "attention",
        "attention",
        ["for (uint i = from; i <= to; i++) {", "for (uint i = 0; i < PAGE; i++) {"],
        "[unwritten]",
    ),
    trap(
        "a row that sees nothing of a page takes exp(-inf + inf)",
        "attention",
        "attention_tiles",
        ["top[j] == -INFINITY ? 0.0f : precise::exp(top[j] - now)", "precise::exp(top[j] - now)"],
        "NaN",
    ),
    trap(
        "a tile of a delta rule multiplies NaN with 0",
        "delta_net",
        "delta_chunks",
        ["if (wild != 0) {", "if (false) {"],
        "NaN",
    ),
    trap(
        "a tile of a delta rule overwrites the one before, which others read",
        "delta_net",
        "delta_chunks",
        ["its sums.\n        threadgroup_barrier(mem_flags::mem_threadgroup);", "its sums."],
        "[race]",
    ),
    trap(
        "a state in memory is read without a fence of it",
        "delta_net",
        "delta_chunks",
        ["(mem_flags::mem_device);\n            for (uint r", "(mem_flags::mem_threadgroup);\n            for (uint r"],
        "[race-simdgroup]",
    ),
    trap(
        "a state in memory is read without a fence of it, behind the tile",
        "delta_net",
        "delta_chunks",
        ["(mem_flags::mem_device);\n            for (uint j", "(mem_flags::mem_threadgroup);\n            for (uint j"],
        "[race-simdgroup]",
    ),
    trap(
        "a NaN row of a router is no fault",
        "route",
        "route",
        ["faults[row] = is_bad ? 1 : 0", "faults[row] = 0"],
        "faults [], [Fault",
    ),
    trap(
        "NaN becomes the id of an expert",
        "route",
        "route",
        ["is_bad ? lane : id;", "is_bad ? 0x7fc00000u : id;"],
        "[undeclared] expert_groups",
    ),
    trap(
        "a tie of two lanes goes to the higher expert",
        "route",
        "route",
        ["simd_min(top == all ? at * 32 + lane : 0xffffffffu)", "simd_max(top == all ? at * 32 + lane : 0u)"],
        " wanted",
    ),
    trap(
        "a tie within a lane goes to the higher expert",
        "route",
        "route",
        ["if (key[j] > top) {", "if (key[j] >= top) {"],
        " wanted",
    ),
    trap(
        "an expert that is chosen already counts as near the next one",
        "route",
        "route",
        ["if (key[j] == 0 && e != index) continue;", "if (e >= N_EXPERT) continue;"],
        "the row is off",
    ),
    trap(
        "NaN is kept where a limit takes its place",
        "clamp",
        "clamp_rows",
        ["x[i] > low[0] ? x[i] : low[0]", "x[i] < low[0] ? low[0] : x[i]"],
        "the row is off",
    ),
];

#[test]
fn traps_built_into_kernels_are_caught() {
    let Some(first) = backends::metal_rows().into_iter().next() else { return };
    let (mut cases, mut missed) = (Cases::default(), Vec::new());
    for Trap { name, op, kernel, from, to, why } in TRAPS {
        let tuning = Tuning { many: 5, ..Tuning::default() };
        let metal = Metal { tuning, ..backends::rewritten(Options::default(), kernel, from, to) };
        let row = Row { name: (*name).into(), backend: Arc::new(metal), ..first.clone() };
        let found = cases.caught(&row, op);
        println!("{name}: {}", found.as_deref().unwrap_or("passes"));
        let is_caught = found.is_some_and(|failure| failure.contains(why) && !failure.contains("compile plan"));
        missed.extend((!is_caught).then_some((*name, *op)));
    }
    assert!(missed.is_empty(), "these pass, or fail for another reason: {missed:?}");
}
