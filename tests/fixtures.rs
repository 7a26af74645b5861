//! Fixtures for the tests of every crate. Each test crate includes this file by its path: a crate of its own would be
//! an edge between crates whose order is strict, and a copy in each would drift.
//!
//! A test that finds nothing to test says that it skipped. `MOEBIUS_NO_SKIP=1` makes that a failure;
//! `MOEBIUS_NO_SKIP=all` also demands the larger fixtures beside the checkout, which only add to what the tree has.
#![allow(dead_code)] // Each crate uses a part.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// A path under the root of the checkout.
pub fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Says that a test skips, or fails where nothing may be skipped.
pub fn skip(why: impl Display) {
    assert!(std::env::var_os("MOEBIUS_NO_SKIP").is_none(), "skipped, which MOEBIUS_NO_SKIP forbids: {why}");
    println!("skipped: {why}");
}

/// A file or folder that adds to a test's fixtures in the tree; none, with a word about it, where it is absent.
pub fn more(path: &str) -> Option<PathBuf> {
    let path = root(path);
    if path.exists() {
        return Some(path);
    }
    let all = std::env::var_os("MOEBIUS_NO_SKIP").is_some_and(|value| value == "all");
    assert!(!all, "MOEBIUS_NO_SKIP=all demands {}", path.display());
    println!("without {}, which adds to the fixtures in the tree", path.display());
    None
}
