//! A simulated Apple GPU: runs the project's Metal kernels on Linux, through the real host code, and checks what they
//! do.
//!
//! `README.md` of this crate says what is checked and why it is built as it is. It knows no op and no model.

pub mod clang;
mod options;
mod protocol;
pub mod rewrite;
mod rules;
mod sim;

pub use options::{Call, Fault, Moment, Options, Schedule};
pub use sim::{Sim, Stats};
