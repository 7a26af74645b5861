//! The README's table of what runs is made of the table of architectures.

use model::arch::ARCHS;

const FROM: &str = "<!-- archs: `UPDATE_EXPECT=1 cargo test -p moebius-model` writes this table -->\n";
const TO: &str = "<!-- /archs -->";

#[test]
fn readme_lists_the_architectures() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
    let readme = std::fs::read_to_string(path).unwrap();
    let code = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" ");
    let mut table = String::from("| models | GGUF | MLX and safetensors folders |\n|---|---|---|\n");
    for arch in ARCHS {
        table.push_str(&format!("| {} | {} | {} |\n", arch.models, code(arch.gguf), code(arch.folder)));
    }
    let start = readme.find(FROM).unwrap() + FROM.len();
    let end = start + readme[start..].find(TO).unwrap();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(path, format!("{}{table}{}", &readme[..start], &readme[end..])).unwrap();
        return;
    }
    assert_eq!(&readme[start..end], table, "write it anew with UPDATE_EXPECT=1 cargo test -p moebius-model");
}
