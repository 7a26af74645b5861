//! Tests of the program as a process.
#![allow(clippy::unwrap_used)] // In a test, a panic is the report.

mod cli;
mod common;
mod convert;
mod cuda;
mod drafts;
mod encoders;
#[path = "../../../../tests/fixtures.rs"]
mod fixtures;
mod memory;
mod mlx;
mod quantize;
#[path = "../../../../tests/seeing.rs"]
mod seeing;
mod serve;
mod stored;
