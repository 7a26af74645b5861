//! What this program is: version, commit, target, and what it can compute with on this machine.

use std::sync::LazyLock;

use cpu::Isa;

/// The commit it was built from; empty where that is not known.
pub const COMMIT: &str = env!("MOEBIUS_BUILD_COMMIT");
/// As in `Cargo.toml`.
pub const NUMBER: &str = env!("CARGO_PKG_VERSION");
const TARGET: &str = env!("MOEBIUS_BUILD_TARGET");
const PROFILE: &str = env!("MOEBIUS_BUILD_PROFILE");

static SHORT: LazyLock<String> = LazyLock::new(|| match COMMIT {
    "" => NUMBER.into(),
    commit => format!("{NUMBER} ({commit})"),
});

static LONG: LazyLock<String> = LazyLock::new(|| {
    let here: Vec<&str> = Isa::ALL.into_iter().filter(|isa| isa.available()).map(Isa::name).collect();
    format!(
        "{}\ntarget    {TARGET}, {PROFILE}\nbackends  cpu, cuda (loaded when it is used), reference\n\
         cpu       {}; this machine has {}\nfeatures  {}",
        short(),
        Isa::best().name(),
        here.join(", "),
        features(),
    )
});

/// Version and commit.
pub fn short() -> &'static str {
    &SHORT
}

/// Returns all of it, a line each.
pub fn long() -> &'static str {
    &LONG
}

fn features() -> &'static str {
    if crate::embedded::IS_HERE { "embedded-model" } else { "none" }
}
