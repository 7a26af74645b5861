//! The CPU backend.

pub mod isa;
pub mod kernels;
pub mod lanes;
pub mod math;
pub mod pool;
