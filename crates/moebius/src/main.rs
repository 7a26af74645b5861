//! The program `moebius`: all of it is in the library, which the Python package shares.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: moebius::Allocator = moebius::Allocator;

fn main() -> ExitCode {
    moebius::main(std::env::args_os().collect()).into()
}
