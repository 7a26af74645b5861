//! Tests of the engine that can share a process. Tests whose allocator has limits for the process, or that measure it
//! as a whole, are separate programs next to this folder.
#![allow(clippy::unwrap_used)] // In a test, a panic is the report.

mod abuse;
mod allocation;
mod cpu_law;
mod drafts;
#[path = "../../../../tests/fixtures.rs"]
mod fixtures;
mod grammar;
mod heads;
mod heap;
mod late;
mod law;
mod memory;
mod metal;
mod models;
mod scheduler;
mod scores;
mod tokenizer;
mod tokenizer_goldens;
mod tokenizer_json;
mod toy;
mod wordpiece;
