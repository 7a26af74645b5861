//! The embedded model, which runs if no other is given.

use std::path::Path;

use anyhow::Context;

/// Name shown for it.
pub const NAME: &str = "Fable 29M-A10M";

/// What it can do and what it cannot, wherever users meet it.
pub const ABOUT: &str = "a toy for stories, rhymes, small talk; do not rely on it";

/// The way to a real model.
pub const NEXT: &str = "for a real model: moebius pull Qwen/Qwen3-4B-GGUF:Q4_K_M, then -m Qwen/Qwen3-4B-GGUF:Q4_K_M";

/// Returns the note of a command that runs the embedded model because no other was given.
pub fn notice() -> String {
    format!("no model given (-m), so the built-in {NAME} answers: {ABOUT}\n{NEXT}")
}

/// Aligned as a mapped file would be.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

#[cfg(embedded_model)]
static FILE: Option<&Aligned<[u8]>> = Some(&Aligned(*include_bytes!(env!("MOEBIUS_BUILD_MODEL"))));
#[cfg(not(embedded_model))]
static FILE: Option<&Aligned<[u8]>> = None;

/// Whether this program has it.
pub const IS_HERE: bool = cfg!(embedded_model);

/// Returns the file's bytes, where they are part of this program.
fn bytes() -> Option<&'static [u8]> {
    FILE.map(|file| &file.0)
}

/// Opens the file or the model named, or the embedded model.
pub fn open(path: Option<&Path>) -> anyhow::Result<checkpoint::Checkpoint> {
    Ok(match path {
        Some(path) => checkpoint::open(&crate::find::resolve(path)?)?,
        None => {
            let bytes = bytes().context("this build has no embedded model: name a model with -m")?;
            checkpoint::from_static(NAME, bytes)?
        }
    })
}
