//! What the tests of the program's commands share.

pub mod tensors;

use std::path::Path;
use std::process::{Command, Output};

pub fn moebius(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moebius")).args(args).output().expect("start moebius")
}

/// What a command that goes well prints.
pub fn stdout(args: &[&str]) -> String {
    let output = moebius(args);
    assert!(output.status.success(), "moebius {args:?} failed\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The error that a command ends with.
pub fn error(args: &[&str]) -> String {
    let output = moebius(args);
    assert!(!output.status.success(), "moebius {args:?} went well");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn as_text(path: &Path) -> &str {
    path.to_str().expect("path")
}
