//! SECURITY.md promises nothing without a test: each row of its tables of promises names tests that exist.

use std::fs;
use std::path::{Path, PathBuf};

/// All Rust files below a folder.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

/// The names of functions that are marked as tests, in a source file.
fn tests(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut is_marked = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_marked = true;
        } else if let Some(rest) = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ") {
            if is_marked {
                names.extend(rest.split(['(', '<']).next());
            }
            is_marked = false;
        }
    }
    names
}

/// What stands between backquotes.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

#[test]
fn every_promise_names_its_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut paths = Vec::new();
    sources(&root.join("crates"), &mut paths);
    let texts: Vec<String> = paths.iter().map(|path| fs::read_to_string(path).expect("a source file")).collect();
    let known: Vec<&str> = texts.iter().flat_map(|text| tests(text)).collect();
    assert!(known.contains(&"every_promise_names_its_tests"));
    let document = fs::read_to_string(root.join("SECURITY.md")).expect("SECURITY.md");
    let (mut n_rows, mut is_table, mut missing) = (0, false, Vec::new());
    for line in document.lines() {
        is_table = line.starts_with('|') && (is_table || line == "| promise | bound | test |");
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [promise, _, named] = cells[..] else { continue };
        let is_heading = promise.starts_with("**") || named == "test" || named.starts_with("---");
        if !is_table || is_heading {
            continue;
        }
        n_rows += 1;
        let exists = |name: &&str| match name.contains('/') {
            true => root.join(name).is_file(),
            false => known.contains(name),
        };
        let names = quoted(named);
        // A bound that lints or the tests of the row above keep needs no name.
        let is_free = ["lints", "the same"].iter().any(|words| named.starts_with(words));
        if names.is_empty() && !is_free {
            missing.push(format!("no test: {promise}"));
        }
        missing.extend(names.iter().filter(|name| !exists(name)).map(|name| format!("{name}: {promise}")));
    }
    assert!(n_rows > 40, "{n_rows} rows");
    assert!(missing.is_empty(), "{missing:#?}");
}
