//! Has a compiled kernel tell the runner how many floats it multiplies and how many instructions it runs: a call at the
//! end of each block of LLVM's text form.
//!
//! LLVM's instructions stand in for a GPU's: both have one for a load, an addition or a shift. What an Apple GPU does
//! in one and LLVM in two, or the other way, is not known here.

use std::fmt::Write;

/// What ends a block.
const ENDS: [&str; 4] = ["br ", "ret ", "switch ", "unreachable"];

/// Adds the calls to all functions but those that the simulator runs for a whole simdgroup.
pub fn instrument(code: &str) -> String {
    let mut out = String::with_capacity(code.len() * 5 / 4);
    let (mut is_counted, mut muls, mut instructions) = (false, 0, 0);
    for line in code.lines() {
        if line.starts_with("define ") {
            // `op(void**, unsigned)` of a collective's struct.
            is_counted = !line.contains("2opEPPvj");
            (muls, instructions) = (0, 0);
        }
        if let Some(what) = line.strip_prefix("  ").filter(|what| is_counted && !what.starts_with(' ')) {
            if ENDS.iter().any(|end| what.starts_with(end)) {
                let _ = writeln!(out, "  call void @sim_count(i32 {muls}, i32 {instructions})");
                (muls, instructions) = (0, 0);
            } else {
                muls += multiplications(what);
                instructions += u32::from(is_instruction(what));
            }
        }
        out.push_str(line);
        out.push('\n');
    }
    out.push_str("declare void @sim_count(i32, i32)\n");
    out
}

/// How many floats an instruction multiplies.
fn multiplications(what: &str) -> u32 {
    let is_mul = ["= fmul ", "@llvm.fma.", "@llvm.fmuladd."].iter().any(|name| what.contains(name));
    let width = || what.split_once('<')?.1.split_once(" x float>")?.0.parse().ok();
    if is_mul { width().unwrap_or(1) } else { 0 }
}

/// Whether it is one that a GPU would have too.
fn is_instruction(what: &str) -> bool {
    let none =
        ["phi ", "@__tsan_", "@llvm.dbg.", "@llvm.lifetime.", "@llvm.assume", "#dbg_", "= getelementptr ", "= alloca "];
    // Case labels of a switch, and its end.
    let is_label = what.starts_with(']') || what.starts_with("i32 ");
    !is_label && none.iter().all(|name| !what.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_tell_what_they_hold() {
        let code = "define void @f(ptr %0) {
  %2 = load <4 x float>, ptr %0
  call void @__tsan_read16(ptr %0)
  %3 = fmul <4 x float> %2, %2
  br label %4

4:
  %5 = phi i32 [ 0, %1 ], [ %6, %4 ]
  %6 = add i32 %5, 1
  %7 = fmul float 1.0, 2.0
  switch i32 %6, label %8 [
    i32 1, label %4
  ]

8:
  ret void
}
define void @_ZN5metal7msl_mma2opEPPvj(ptr %0) {
  %2 = fmul float 1.0, 2.0
  ret void
}
";
        let calls: Vec<String> = instrument(code)
            .lines()
            .filter_map(|line| Some(line.strip_prefix("  call void @sim_count(")?.to_string()))
            .collect();
        assert_eq!(calls, ["i32 4, i32 2)", "i32 1, i32 2)", "i32 0, i32 0)"]);
    }
}
