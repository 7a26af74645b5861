//! Fuzz target: any bytes opened as a model end in a model or an error. `tests/fuzz_open.rs` is its quick form.
#![no_main]

#[allow(dead_code)] // the valid file is the quick form's
#[path = "../../tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::exercise(bytes.to_vec()));
