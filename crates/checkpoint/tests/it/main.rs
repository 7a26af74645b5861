//! Tests of model files, on the ones in the tree and on ones made here.
#![allow(clippy::unwrap_used)] // In a test, a panic is the report.

mod exercise;
mod exercise_folder;
mod files;
#[path = "../../../../tests/fixtures.rs"]
mod fixtures;
mod folders;
mod fuzz_open;
mod hostile;
mod real_files;
mod round_trip;
mod splits;
