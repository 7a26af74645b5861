//! The CPU backend.

pub mod isa;
pub mod lanes;
pub mod math;
