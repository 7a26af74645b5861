//! Which instruction set the kernels use: chosen once, at the start or by hand.
//!
//! Under the CPU law the choice changes speed and never a bit of a result.

use std::fmt;
use std::str::FromStr;

/// An instruction set that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust; runs on every machine.
    Scalar,
    /// x86-64 with AVX2, FMA, F16C and BMI1/2.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI (and all that [`Isa::Avx2`] asks for).
    Avx512,
    /// aarch64 with NEON and the dot products of bytes that Armv8.4 asks for (`dotprod`).
    Neon,
    /// aarch64 with the matrix products of bytes that Armv8.6 asks for (`i8mm`, and all that [`Isa::Neon`] asks for).
    I8mm,
}

/// Why an instruction set cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// No such name.
    #[error("choose instruction set: {0:?} is unknown, the names are scalar, avx2, avx512, neon, i8mm")]
    Unknown(String),
    /// The machine does not have it.
    #[error("choose instruction set: this machine lacks {wanted}, the best it has is {best}")]
    Absent {
        /// Asked for.
        wanted: Isa,
        /// What [`Isa::best`] says.
        best: Isa,
    },
}

impl Isa {
    /// All of them, slowest of a machine first.
    pub const ALL: [Isa; 5] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Neon, Isa::I8mm];

    /// Whether this machine has it.
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar => true,
            Isa::Avx2 => has_avx2(),
            Isa::Avx512 => has_avx2() && has_avx512(),
            Isa::Neon => has_neon(),
            Isa::I8mm => has_neon() && has_i8mm(),
        }
    }

    /// The fastest that this machine has.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.available()).unwrap_or(Isa::Scalar)
    }

    /// Itself when the machine has it.
    pub fn check(self) -> Result<Isa, IsaError> {
        if self.available() { Ok(self) } else { Err(IsaError::Absent { wanted: self, best: Isa::best() }) }
    }

    /// Name for people and for `--isa`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
            Isa::I8mm => "i8mm",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(s: &str) -> Result<Isa, IsaError> {
        Isa::ALL.into_iter().find(|isa| isa.name() == s).ok_or_else(|| IsaError::Unknown(s.to_string()))
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}

#[cfg(target_arch = "aarch64")]
fn has_neon() -> bool {
    std::arch::is_aarch64_feature_detected!("neon") && std::arch::is_aarch64_feature_detected!("dotprod")
}

#[cfg(target_arch = "aarch64")]
fn has_i8mm() -> bool {
    std::arch::is_aarch64_feature_detected!("i8mm")
}

#[cfg(not(target_arch = "aarch64"))]
fn has_neon() -> bool {
    false
}

#[cfg(not(target_arch = "aarch64"))]
fn has_i8mm() -> bool {
    false
}

/// Defines a function that runs a generic kernel (its first type parameter is a [`crate::cpu::lanes::Lanes`]) compiled
/// for the instruction set given as the first argument.
///
/// The caller keeps one promise: an [`Isa`] that reaches a kernel has passed [`Isa::check`]; `Cpu::compile` and
/// `Kernels::new` are the doors where that happens.
macro_rules! on_isa {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$t:ident: $bound:path>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $kernel:ident) => {
        $(#[$meta])*
        #[inline]
        $vis fn $name $(<$t: $bound>)? (isa: $crate::cpu::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
            fn avx2 $(<$t: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                $kernel::<$crate::cpu::lanes::Avx2, $($t)?>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi1,bmi2")]
            fn avx512 $(<$t: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                $kernel::<$crate::cpu::lanes::Avx512, $($t)?>($($arg),*)
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod")]
            fn neon $(<$t: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                $kernel::<$crate::cpu::lanes::Neon, $($t)?>($($arg),*)
            }
            match isa {
                $crate::cpu::isa::Isa::Scalar => $kernel::<$crate::cpu::lanes::Scalar, $($t)?>($($arg),*),
                // SAFETY: an Isa that reaches a kernel has passed `Isa::check`, so the machine has these instructions.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::isa::Isa::Avx2 => unsafe { avx2 $(::<$t>)? ($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::isa::Isa::Avx512 => unsafe { avx512 $(::<$t>)? ($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "aarch64")]
                $crate::cpu::isa::Isa::Neon | $crate::cpu::isa::Isa::I8mm => unsafe { neon $(::<$t>)? ($($arg),*) },
                // What another architecture has never passes `Isa::check`.
                #[allow(unreachable_patterns)]
                _ => $kernel::<$crate::cpu::lanes::Scalar, $($t)?>($($arg),*),
            }
        }
    };
}
pub(crate) use on_isa;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_the_best_is_available() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse::<Isa>().unwrap(), isa);
            assert_eq!(isa.check().is_ok(), isa.available());
        }
        assert!(Isa::best().available());
        assert!("neon9".parse::<Isa>().unwrap_err().to_string().contains("neon9"));
    }
}
