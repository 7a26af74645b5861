//! Build information for `--version` (commit and target; works without git, and without a repository), and the packed
//! files of the server's page.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=MOEBIUS_BUILD_COMMIT");
    println!("cargo::rustc-env=MOEBIUS_BUILD_TARGET={}", std::env::var("TARGET").unwrap_or_default());
    println!("cargo::rustc-env=MOEBIUS_BUILD_PROFILE={}", std::env::var("PROFILE").unwrap_or_default());
    println!("cargo::rustc-env=MOEBIUS_BUILD_COMMIT={}", commit().unwrap_or_default());
    embed();
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    pack_page(&out.join("page")).expect("the page's files can be packed");
}

/// Packs the page's files into `to`, with `files.rs`, the table of them that `serve/page.rs` includes: name below
/// `page/` and bytes, in gzip but for fonts, which are compressed already. The sources are `web/` of the repository;
/// a package of this crate holds a copy in the same place.
fn pack_page(to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    let mut names = Vec::new();
    for (folder, prefix) in [("web/src", ""), ("web/vendor", "vendor/")] {
        println!("cargo::rerun-if-changed={folder}");
        list(Path::new(folder), prefix, &mut names)?;
    }
    names.sort();
    let mut table = String::from("&[\n");
    for (i, (name, path)) in names.iter().enumerate() {
        let bytes = fs::read(path)?;
        let bytes = if name.ends_with(".woff2") {
            bytes
        } else {
            let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
            packed.write_all(&bytes)?;
            packed.finish()?
        };
        let file = to.join(i.to_string());
        fs::write(&file, bytes)?;
        table.push_str(&format!("    ({name:?}, include_bytes!({:?})),\n", file.display().to_string()));
    }
    table.push(']');
    fs::write(to.join("files.rs"), table)
}

/// Adds the files below `folder` to `names`, each as `prefix` and its path in the folder.
fn list(folder: &Path, prefix: &str, names: &mut Vec<(String, PathBuf)>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = format!("{prefix}{}", path.file_name().unwrap_or_default().to_string_lossy());
        if path.is_dir() {
            list(&path, &format!("{name}/"), names)?;
        } else {
            names.push((name, path));
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
