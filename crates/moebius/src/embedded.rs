//! The embedded model: what runs when no file is named.

use std::path::Path;

use anyhow::Context;

/// Name shown for it.
pub const NAME: &str = "Fable 29M-A10M";

/// What it can do and what it cannot, wherever users meet it.
pub const ABOUT: &str = "a tiny model for a first try: simple stories, rhymes, small talk, everyday facts; \
                         no assistant, and often wrong beyond that";

/// The way to a real model.
pub const NEXT: &str = "for a real model: -m FILE.gguf (README, \"Models\", says how to get one)";

/// What a command says when it runs the embedded model for want of `-m`.
pub fn notice() -> String {
    format!("no -m: the embedded {NAME}, {ABOUT}\n{NEXT}")
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

/// The file's bytes, where they are part of this program.
fn bytes() -> Option<&'static [u8]> {
    FILE.map(|file| &file.0)
}

/// Opens the file or the model named, or the embedded model.
pub fn open(path: Option<&Path>) -> anyhow::Result<checkpoint::Checkpoint> {
    Ok(match path {
        Some(path) => checkpoint::open(&crate::find::resolve(path)?)?,
        None => {
            let bytes = bytes().context("run without -m: this build has no embedded model; name one with -m")?;
            checkpoint::from_static(NAME, bytes)?
        }
    })
}
