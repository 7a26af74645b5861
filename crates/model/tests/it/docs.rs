//! The documents of the repository: links lead somewhere, lengths stay within their bounds, the table of architectures
//! equals the code's.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use model::arch::ARCHS;

const FROM: &str = "<!-- archs: `UPDATE_EXPECT=1 cargo test -p moebius-model` writes this table -->\n";
const TO: &str = "<!-- /archs -->";

/// Documents with a maximum number of lines.
const LENGTHS: &[(&str, usize)] = &[("README.md", 150), ("ARCHITECTURE.md", 250)];

/// Documents whose paragraphs and list items have at most [`PARAGRAPH`] lines.
const SHORT_PARAGRAPHS: &[&str] = &["README.md", "ARCHITECTURE.md"];
const PARAGRAPH: usize = 8;

/// Maximum number of lines of an entry of the changelog.
const ENTRY: usize = 2;

/// Maximum number of columns, outside of tables.
const COLUMNS: usize = 120;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// All Markdown files below `folder` that are the project's, relative to the root.
fn documents(root: &Path, folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            // Built, or made by others. A link to a folder leads to what is listed anyway.
            let skipped = ["target", "dist", "work", "node_modules", "vendor", ".git"].contains(&name.as_str());
            if !skipped && !path.is_symlink() {
                documents(root, &path, out);
            }
        } else if name.ends_with(".md") {
            out.push(path.strip_prefix(root).unwrap().to_path_buf());
        }
    }
}

/// A document's lines outside of fenced code, with their numbers.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut fenced = false;
    let mut out = Vec::new();
    for (i, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            out.push((i + 1, line));
        }
    }
    out
}

/// The anchor that viewers make of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// The anchors of a document. Headings that repeat get a number, as viewers give them.
fn anchors(text: &str) -> Vec<String> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let headings = prose(text).into_iter().filter_map(|(_, line)| line.strip_prefix('#'));
    let numbered = headings.map(|line| {
        let name = anchor(line.trim_start_matches('#'));
        let n = seen.entry(name.clone()).or_default();
        *n += 1;
        if *n == 1 { name } else { format!("{name}-{}", *n - 1) }
    });
    numbered.collect()
}

/// Targets of the links in a line, `[text](target)`, outside of code.
fn targets(line: &str) -> Vec<&str> {
    let mut out = Vec::new();
    for (i, part) in line.split('`').enumerate() {
        if i % 2 == 0 {
            out.extend(part.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target));
        }
    }
    out
}

#[test]
fn links_lead_somewhere() {
    let root = root();
    let mut files = Vec::new();
    documents(&root, &root, &mut files);
    assert!(files.len() > 20, "{files:?}");
    let mut wrong = Vec::new();
    for file in &files {
        let text = read(&root.join(file));
        // A link's text may hold code, and a link may end on the next line.
        let lines = prose(&text);
        let joined: Vec<(usize, String)> =
            lines.iter().zip(lines.iter().skip(1).map(|l| l.1).chain([""])).map(|(a, b)| (a.0, pair(a.1, b))).collect();
        for (number, line) in &joined {
            for target in targets(line) {
                if target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                let (path, fragment) = target.split_once('#').map_or((target, None), |(path, f)| (path, Some(f)));
                let base = root.join(file);
                let at = if path.is_empty() { base } else { base.parent().unwrap().join(path) };
                if !at.exists() {
                    wrong.push(format!("{}:{number}: {target} does not exist", file.display()));
                } else if let Some(fragment) = fragment
                    && !anchors(&read(&at)).iter().any(|a| a == fragment)
                {
                    wrong.push(format!("{}:{number}: {target} is no heading", file.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A line with the rest of a link that its end cuts.
fn pair(line: &str, next: &str) -> String {
    let open = line.rfind('[').filter(|&i| !line[i..].contains(')'));
    match open.and(next.split_once(')')) {
        Some((rest, _)) if !rest.contains('[') => format!("{line} {})", rest.trim_start()),
        _ => line.to_string(),
    }
}

#[test]
fn lengths_stay_within_bounds() {
    let root = root();
    let mut wrong = Vec::new();
    for &(file, maximum) in LENGTHS {
        let n = read(&root.join(file)).lines().count();
        if n > maximum {
            wrong.push(format!("{file} has {n} lines, at most {maximum} are allowed"));
        }
    }
    for &file in SHORT_PARAGRAPHS {
        let text = read(&root.join(file));
        let mut n = 0;
        for (number, line) in prose(&text) {
            let bare = line.trim_start();
            n = match () {
                () if bare.is_empty() || bare.starts_with(['|', '#', '<']) => 0,
                () if bare.starts_with("- ") || bare.starts_with("* ") => 1,
                () => n + 1,
            };
            if n == PARAGRAPH + 1 {
                wrong.push(format!("{file}:{number}: a paragraph of more than {PARAGRAPH} lines"));
            }
        }
    }
    let mut n = 0;
    for (number, line) in prose(&read(&root.join("CHANGELOG.md"))) {
        n = match () {
            () if line.starts_with("- ") => 1,
            () if line.starts_with("  ") && n > 0 => n + 1,
            () => 0,
        };
        if n == ENTRY + 1 {
            wrong.push(format!("CHANGELOG.md:{number}: an entry of more than {ENTRY} lines"));
        }
    }
    let mut files = Vec::new();
    documents(&root, &root.join("docs"), &mut files);
    files.extend(["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(PathBuf::from));
    for file in files {
        for (number, line) in prose(&read(&root.join(&file))) {
            if line.chars().count() > COLUMNS && !line.starts_with('|') {
                wrong.push(format!("{}:{number}: more than {COLUMNS} columns", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_book_has_every_page() {
    let root = root();
    let mut pages = Vec::new();
    documents(&root, &root.join("docs"), &mut pages);
    let mut pages: Vec<String> = pages
        .iter()
        .map(|page| page.strip_prefix("docs").unwrap().to_string_lossy().replace('\\', "/"))
        .filter(|page| page != "SUMMARY.md")
        .collect();
    pages.sort();
    let summary = read(&root.join("docs/SUMMARY.md"));
    let mut listed: Vec<String> = summary.lines().flat_map(targets).map(str::to_string).collect();
    listed.sort();
    assert_eq!(listed, pages, "docs/SUMMARY.md lists every page of docs/ once");
}

#[test]
fn the_page_of_models_lists_the_architectures() {
    let path = root().join("docs/models.md");
    let page = read(&path);
    let code = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" ");
    let mut table = String::from("| models | GGUF | MLX and safetensors folders |\n|---|---|---|\n");
    for arch in ARCHS {
        table.push_str(&format!("| {} | {} | {} |\n", arch.models, code(arch.gguf), code(arch.folder)));
    }
    let start = page.find(FROM).unwrap() + FROM.len();
    let end = start + page[start..].find(TO).unwrap();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&path, format!("{}{table}{}", &page[..start], &page[end..])).unwrap();
        return;
    }
    assert_eq!(&page[start..end], table, "write it anew with UPDATE_EXPECT=1 cargo test -p moebius-model");
}
