//! What `--version` says of the build: its commit and its target. Works without git, and without a repository. Packs
//! the page's texts.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=MOEBIUS_BUILD_COMMIT");
    println!("cargo::rustc-env=MOEBIUS_BUILD_TARGET={}", std::env::var("TARGET").unwrap_or_default());
    println!("cargo::rustc-env=MOEBIUS_BUILD_PROFILE={}", std::env::var("PROFILE").unwrap_or_default());
    println!("cargo::rustc-env=MOEBIUS_BUILD_COMMIT={}", commit().unwrap_or_default());
    embed();
    println!("cargo::rerun-if-changed=src/serve/page");
    let out = std::env::var("OUT_DIR").expect("cargo names it");
    pack(Path::new("src/serve/page"), &Path::new(&out).join("page")).expect("the page's files can be packed");
}

/// Files of the page below `from`, in gzip, for `serve/page.rs`. Fonts are packed by themselves.
fn pack(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default();
        if path.is_dir() {
            pack(&path, &to.join(name))?;
        } else if path.extension().is_none_or(|ending| ending != "woff2") {
            let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
            packed.write_all(&fs::read(&path)?)?;
            let name = format!("{}.gz", name.to_string_lossy());
            fs::write(to.join(name), packed.finish()?)?;
        }
    }
    Ok(())
}

/// The embedded model, where the feature is on and its file is there: packages of sources are smaller than it.
fn embed() {
    println!("cargo::rustc-check-cfg=cfg(embedded_model)");
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fable-29m-a10m-q4_k_m.gguf");
    if std::env::var_os("CARGO_FEATURE_EMBEDDED_MODEL").is_some() && model.exists() {
        println!("cargo::rerun-if-changed={}", model.display());
        println!("cargo::rustc-env=MOEBIUS_BUILD_MODEL={}", model.display());
        println!("cargo::rustc-cfg=embedded_model");
    }
}

/// The commit that a packager names, else that of the repository, else that which cargo has put into the package.
fn commit() -> Option<String> {
    let named = std::env::var("MOEBIUS_BUILD_COMMIT").ok().filter(|commit| !commit.is_empty());
    let commit = named.or_else(of_repository).or_else(of_package)?;
    let is_hash = commit.len() >= 7 && commit.bytes().all(|b| b.is_ascii_hexdigit());
    is_hash.then(|| commit[..commit.len().min(9)].to_string())
}

fn of_repository() -> Option<String> {
    // A package that was unpacked inside of another repository has none of its own.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    for file in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--path-format=absolute", "--git-path", file])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "HEAD"])
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_string())
}

fn of_package() -> Option<String> {
    let text = fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let (_, rest) = text.split_once("\"sha1\"")?;
    Some(rest.split('"').nth(1)?.to_string())
}
