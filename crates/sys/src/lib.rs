//! What the project asks of the operating system and its allocator: the second room of unsafe code, next to the
//! kernels. It knows no tensor, no plan and no device.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod arena;
pub mod cores;
pub mod heap;
pub mod meter;
pub mod rank;
#[cfg(windows)]
pub mod windows;
