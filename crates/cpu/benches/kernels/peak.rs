//! What one core can do at best: multiply-adds from registers, by form and instruction set. Shares of these stand
//! beside the figures of the kernels. No kernel can reach them: weights and activations have to be loaded and unpacked.

use std::time::Instant;

use cpu::isa::{CheckedIsa, Isa};
use quant::act::ActKind;

/// Independent accumulators of a loop: more than latency times instructions a cycle anywhere.
const CHAINS: usize = 10;
const ROUNDS: usize = 2_000_000;

/// Multiply-adds a second, in billions, of the instructions that the kernels of `kind` are made of on `isa`; None for
/// plain Rust, whose instructions are the compiler's choice.
pub fn peak(kind: ActKind, isa: CheckedIsa) -> Option<f64> {
    let (run, macs) = chains(kind, isa.isa())?;
    let fastest = (0..5).map(|_| {
        let start = Instant::now();
        // SAFETY: the machine has the instruction set, as `isa` proves; the loop touches registers alone.
        unsafe { run(ROUNDS) };
        start.elapsed().as_secs_f64()
    });
    Some((ROUNDS * CHAINS * macs) as f64 / fastest.fold(f64::INFINITY, f64::min) / 1e9)
}

/// A loop that runs every chain once a round, and the multiply-adds of a chain.
type Chains = (unsafe fn(usize), usize);

/// A loop of `rounds` rounds whose body stands once for each of the ten chains, `\i` being the chain's register.
macro_rules! chains {
    ($name:ident: $body:literal, $step:literal, $jump:literal, $($register:tt)*) => {
        unsafe fn $name(rounds: usize) {
            // SAFETY: the caller's machine has the instructions; they touch the registers that are named and no memory.
            unsafe {
                std::arch::asm!(
                    "2:",
                    ".irp i, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9",
                    $body,
                    ".endr",
                    $step,
                    $jump,
                    n = inout(reg) rounds => _,
                    $(out($register) _,)*
                    options(nomem, nostack),
                )
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
fn chains(kind: ActKind, isa: Isa) -> Option<Chains> {
    macro_rules! x86 {
        ($name:ident, $body:literal) => {
            chains!($name: $body, "dec {n}", "jnz 2b",
                "xmm0" "xmm1" "xmm2" "xmm3" "xmm4" "xmm5" "xmm6" "xmm7" "xmm8" "xmm9" "xmm10");
        };
    }
    x86!(bytes, "vpmaddubsw ymm10, ymm14, ymm15\nvpaddw ymm\\i, ymm\\i, ymm10");
    x86!(words, "vpmaddwd ymm10, ymm14, ymm15\nvpaddd ymm\\i, ymm\\i, ymm10");
    x86!(floats, "vfmadd231ps ymm\\i, ymm14, ymm15");
    x86!(bytes512, "vpdpbusd zmm\\i, zmm14, zmm15");
    x86!(words512, "vpdpwssd zmm\\i, zmm14, zmm15");
    x86!(floats512, "vfmadd231ps zmm\\i, zmm14, zmm15");
    match (isa, kind) {
        (Isa::Scalar, _) => None,
        (Isa::Avx2, ActKind::F32) => Some((floats, 8)),
        (Isa::Avx2, ActKind::Block32) => Some((words, 16)),
        (Isa::Avx2, ActKind::Byte32 | ActKind::Block256) => Some((bytes, 32)),
        (_, ActKind::F32) => Some((floats512, 16)),
        (_, ActKind::Block32) => Some((words512, 32)),
        (_, ActKind::Byte32 | ActKind::Block256) => Some((bytes512, 64)),
    }
}

#[cfg(target_arch = "aarch64")]
fn chains(kind: ActKind, isa: Isa) -> Option<Chains> {
    macro_rules! arm {
        ($name:ident, $body:literal) => {
            chains!($name: $body, "subs {n}, {n}, #1", "b.ne 2b", "v0" "v1" "v2" "v3" "v4" "v5" "v6" "v7" "v8" "v9");
        };
    }
    arm!(bytes, ".arch_extension dotprod\nsdot v\\i\\().4s, v14.16b, v15.16b");
    arm!(matrices, ".arch_extension i8mm\nsmmla v\\i\\().4s, v14.16b, v15.16b");
    arm!(floats, "fmla v\\i\\().4s, v14.4s, v15.4s");
    match (isa, kind) {
        (Isa::Scalar, _) => None,
        (_, ActKind::F32) => Some((floats, 4)),
        // Of 16 bits high and low bytes are multiplied one after the other.
        (Isa::I8mm, ActKind::Block32) => Some((matrices, 16)),
        (Isa::I8mm, ActKind::Byte32 | ActKind::Block256) => Some((matrices, 32)),
        (_, ActKind::Block32) => Some((bytes, 8)),
        (_, ActKind::Byte32 | ActKind::Block256) => Some((bytes, 16)),
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn chains(_: ActKind, _: Isa) -> Option<Chains> {
    None
}
