//! The embedded model: what runs when no file is named.

use std::path::Path;

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

static FILE: &Aligned<[u8]> = &Aligned(*include_bytes!("../../../models/fable-29m-a10m-q4_k_m.gguf"));

/// The file's bytes.
pub fn bytes() -> &'static [u8] {
    &FILE.0
}

/// Opens the file or the model named, or the embedded model.
pub fn open(path: Option<&Path>) -> anyhow::Result<checkpoint::Checkpoint> {
    Ok(match path {
        Some(path) => checkpoint::open(&crate::find::resolve(path)?)?,
        None => checkpoint::from_static(NAME, bytes())?,
    })
}
