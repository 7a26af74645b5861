//! Has a compiled kernel tell the runner how many floats it multiplies and how many instructions it runs: a call at the
//! end of each block of LLVM's text form.
//!
//! LLVM's instructions stand in for a GPU's: both have one for a load, an addition or a shift. A thread of a GPU
//! computes one number at a time and loads or stores up to four: an operation on a vector counts once for each number.
//! What an Apple GPU does in one and LLVM in two, or the other way, is not known here.

use std::collections::HashSet;
use std::fmt::Write;

/// What ends a block.
const ENDS: [&str; 4] = ["br ", "ret ", "switch ", "unreachable"];

/// Functions of `runtime/msl/matrix.h`: a lane's two numbers of a matrix that is loaded or stored.
const PIECES: [&str; 2] = ["msl_load_pieces", "msl_store_pieces"];

/// Adds the calls to all functions but those that the simulator runs for a whole simdgroup, those that hand a kernel
/// its parameters, and what a lane does of a load or store of a matrix ([`PIECES`]).
pub fn instrument(code: &str) -> String {
    let mut out = String::with_capacity(code.len() * 5 / 4);
    let (mut is_counted, mut muls, mut instructions) = (false, 0, 0);
    // Names of what functions of a simdgroup take and give in the simulator, which a GPU has in registers.
    let mut handed = HashSet::new();
    for line in code.lines() {
        if line.starts_with("define ") {
            // `op(void**, unsigned)` of a collective's struct; `sim_r0(sim::Ctx const&)`.
            is_counted = !["2opEPPvj", "RKN3sim3CtxE"].iter().chain(&PIECES).any(|name| line.contains(name));
            (muls, instructions) = (0, 0);
            handed.clear();
        }
        if let Some(what) = line.strip_prefix("  ").filter(|what| is_counted && !what.starts_with(' ')) {
            if ENDS.iter().any(|end| what.starts_with(end)) {
                let _ = writeln!(out, "  call void @sim_count(i32 {muls}, i32 {instructions})");
                (muls, instructions) = (0, 0);
            } else if !is_handed(what, &mut handed) {
                muls += multiplications(what);
                instructions += instructions_of(what);
            }
        }
        out.push_str(line);
        out.push('\n');
    }
    out.push_str("declare void @sim_count(i32, i32)\n");
    out
}

/// Whether this only hands something to a function of a simdgroup, or takes it; `handed` has the names so far.
fn is_handed<'a>(what: &'a str, handed: &mut HashSet<&'a str>) -> bool {
    let pointer = what.rsplit_once("ptr ").and_then(|(_, rest)| rest.split(',').next());
    let is_known = pointer.is_some_and(|name| handed.contains(name));
    let (name, made) = what.split_once(" = ").unwrap_or(("", what));
    let is_struct = ["::SimdArg", "::MmaArg", "::MatSync"].iter().any(|of| made.contains(of));
    if made.starts_with("alloca ") && is_struct || made.starts_with("getelementptr ") && is_known {
        return handed.insert(name);
    }
    is_known && (made.starts_with("load ") || made.starts_with("store "))
}

/// How many floats an instruction multiplies.
fn multiplications(what: &str) -> u32 {
    let is_mul = ["= fmul ", "@llvm.fma.", "@llvm.fmuladd."].iter().any(|name| what.contains(name));
    if is_mul { width(what) } else { 0 }
}

/// How many numbers an instruction has, by the first vector that it names.
fn width(what: &str) -> u32 {
    let vector = || what.split_once('<')?.1.split_once(" x ")?.0.parse().ok();
    vector().unwrap_or(1)
}

/// How many instructions a thread of a GPU has for one of LLVM's.
fn instructions_of(what: &str) -> u32 {
    // Names, addresses, where numbers lie in registers, what the simulator adds.
    const NONE: [&str; 14] = [
        "phi ",
        "@__tsan_",
        "@sim_perturb(",
        "@llvm.dbg.",
        "@llvm.lifetime.",
        "@llvm.assume",
        "#dbg_",
        "= getelementptr ",
        "= alloca ",
        "= bitcast ",
        "= freeze ",
        "= extractelement ",
        "= insertelement ",
        "= shufflevector ",
    ];
    // Case labels of a switch, and its end.
    let is_label = what.starts_with(']') || what.starts_with("i32 ");
    if is_label || NONE.iter().any(|name| what.contains(name)) {
        return 0;
    }
    if PIECES.iter().any(|name| what.contains(name)) {
        return 2;
    }
    let is_access = what.starts_with("store ") || what.contains("= load ");
    if is_access { width(what).div_ceil(4) } else { width(what) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_tell_what_they_hold() {
        let code = r#"define void @f(ptr %0) {
  %2 = load <4 x float>, ptr %0
  call void @__tsan_read16(ptr %0)
  %3 = fmul <4 x float> %2, %2
  %9 = extractelement <4 x float> %3, i64 2
  br label %4

4:
  %5 = phi i32 [ 0, %1 ], [ %6, %4 ]
  %6 = add i32 %5, 1
  %7 = fmul float 1.0, 2.0
  switch i32 %6, label %8 [
    i32 1, label %4
  ]

8:
  %10 = alloca %"struct.metal::SimdArg.3", align 4
  %11 = getelementptr inbounds i8, ptr %10, i64 4
  store float %7, ptr %11, align 4
  store float %7, ptr %12, align 4
  %13 = load float, ptr %11, align 4
  ret void
}
define void @_ZN5metal7msl_mma2opEPPvj(ptr %0) {
  %2 = fmul float 1.0, 2.0
  ret void
}
"#;
        let calls: Vec<String> = instrument(code)
            .lines()
            .filter_map(|line| Some(line.strip_prefix("  call void @sim_count(")?.to_string()))
            .collect();
        assert_eq!(calls, ["i32 4, i32 5)", "i32 1, i32 2)", "i32 0, i32 1)"]);
    }
}
