//! The instruction set of the kernels, chosen once: the best of the machine, or the user's choice.
//!
//! Under the CPU law the choice changes speed and never a bit of a result.

use std::fmt;
use std::str::FromStr;

/// The name of an instruction set that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust; runs on every machine.
    Scalar,
    /// x86-64 with AVX2, FMA, F16C and BMI1/2.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI, and all of [`Isa::Avx2`].
    Avx512,
    /// aarch64 with NEON and the dot products of bytes of Armv8.4 (`dotprod`).
    Neon,
    /// aarch64 with the matrix products of bytes of Armv8.6 (`i8mm`), and all of [`Isa::Neon`].
    I8mm,
}

/// The proof that this machine has an instruction set: without one no kernel of it runs.
///
/// Only [`Isa::check`], [`CheckedIsa::best`] and [`CheckedIsa::all`] make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedIsa(Isa);

/// Why an instruction set cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// No such name.
    #[error("choose instruction set: {0:?} is unknown, the names are scalar, avx2, avx512, neon, i8mm")]
    Unknown(String),
    /// The machine does not have it.
    #[error("choose instruction set: this machine lacks {wanted}, the best it has is {best}")]
    Absent {
        /// The one requested.
        wanted: Isa,
        /// [`Isa::best`] of this machine.
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
        CheckedIsa::best().isa()
    }

    /// The proof that this machine has it.
    ///
    /// # Errors
    /// [`IsaError::Absent`] when it has not.
    pub fn check(self) -> Result<CheckedIsa, IsaError> {
        if self.available() { Ok(CheckedIsa(self)) } else { Err(IsaError::Absent { wanted: self, best: Isa::best() }) }
    }

    /// Name in tables and for `--isa`.
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

impl CheckedIsa {
    /// Plain Rust, which needs no check.
    pub const SCALAR: CheckedIsa = CheckedIsa(Isa::Scalar);

    /// All that this machine has, slowest first.
    pub fn all() -> impl DoubleEndedIterator<Item = CheckedIsa> {
        Isa::ALL.into_iter().filter(|isa| isa.available()).map(CheckedIsa)
    }

    /// The fastest that this machine has.
    pub fn best() -> CheckedIsa {
        CheckedIsa::all().next_back().unwrap_or(CheckedIsa::SCALAR)
    }

    /// Its name.
    pub fn isa(self) -> Isa {
        self.0
    }

    /// The proof without the check.
    ///
    /// # Safety
    /// The machine has `isa` wherever the proof is used.
    pub(crate) const unsafe fn assume(isa: Isa) -> CheckedIsa {
        CheckedIsa(isa)
    }
}

impl fmt::Display for CheckedIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
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

/// Defines a function that runs a generic kernel compiled for the instruction set given as the first argument. The
/// first type parameter of the kernel is a [`crate::lanes::Lanes`]. Kernels with an unsafe contract make an
/// `unsafe fn`.
macro_rules! on_isa {
    ($(#[$meta:meta])* $vis:vis unsafe fn $($rest:tt)*) => { on_isa! { @ [unsafe] $(#[$meta])* $vis fn $($rest)* } };
    ($(#[$meta:meta])* $vis:vis fn $($rest:tt)*) => { on_isa! { @ [] $(#[$meta])* $vis fn $($rest)* } };
    (@ [$($unsafe:tt)?] $(#[$meta:meta])* $vis:vis fn $name:ident $(<$t:ident: $bound:path>)?
     ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $kernel:ident) => {
        $(#[$meta])*
        #[inline]
        $vis $($unsafe)? fn $name $(<$t: $bound>)? (isa: $crate::isa::CheckedIsa, $($arg: $ty),*) $(-> $ret)? {
            // SAFETY of the inner functions and blocks: the contract of the kernel is that of this function.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
            $($unsafe)? fn avx2 $(<$t: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                $($unsafe)? { $kernel::<$crate::lanes::Avx2, $($t)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi1,bmi2")]
            $($unsafe)? fn avx512 $(<$t: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                $($unsafe)? { $kernel::<$crate::lanes::Avx512, $($t)?>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod")]
            $($unsafe)? fn neon $(<$t: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                $($unsafe)? { $kernel::<$crate::lanes::Neon, $($t)?>($($arg),*) }
            }
            match isa.isa() {
                // SAFETY: a `CheckedIsa` proves that the machine has these instructions.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Isa::Avx2 => unsafe { avx2 $(::<$t>)? ($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Isa::Avx512 => unsafe { avx512 $(::<$t>)? ($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "aarch64")]
                $crate::isa::Isa::Neon | $crate::isa::Isa::I8mm => unsafe { neon $(::<$t>)? ($($arg),*) },
                // Scalar; the instruction sets of other architectures never pass the check.
                _ => $($unsafe)? { $kernel::<$crate::lanes::Scalar, $($t)?>($($arg),*) },
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
            assert_eq!(isa.check().is_ok_and(|checked| checked.isa() == isa), isa.available());
        }
        assert_eq!(CheckedIsa::best(), Isa::best().check().unwrap());
        assert!("neon9".parse::<Isa>().unwrap_err().to_string().contains("neon9"));
    }

    /// Where `MOEBIUS_ISAS` names the instruction sets of the processor, best last, those are found.
    #[test]
    fn a_processor_is_refused_what_it_lacks() {
        let found: Vec<Isa> = CheckedIsa::all().map(CheckedIsa::isa).collect();
        if let Ok(names) = std::env::var("MOEBIUS_ISAS") {
            assert_eq!(found.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(" "), names);
        }
        let absent: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| !found.contains(isa)).collect();
        assert!(!absent.is_empty(), "no processor is of two architectures");
        for isa in absent {
            let refusal = isa.check().unwrap_err().to_string();
            let expected = format!("this machine lacks {isa}, the best it has is {}", found[found.len() - 1]);
            assert!(refusal.ends_with(&expected), "{refusal}");
        }
    }
}
