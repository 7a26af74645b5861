//! Token ids against llama.cpp's on whole vocabularies, from the fixtures that lie beside the project.

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use engine::tokenizer::{Encode, Tokenizer};

use crate::fixtures;

const VOCABULARIES: &[&str] = &["gpt-2", "llama-bpe", "qwen2", "deepseek-coder", "llama-spm", "gemma-4"];

/// Whole vocabularies, which add to the small ones in the tree (`tokenizer_json.rs`, `tokenizer.rs`).
fn vocabularies() -> Option<PathBuf> {
    fixtures::more("../shared/fixtures/vocab")
}

fn load(dir: &Path, name: &str) -> Tokenizer {
    let file = std::fs::File::open(dir.join(format!("ggml-vocab-{name}.gguf.gz"))).unwrap();
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    let checkpoint = checkpoint::from_bytes(name, bytes).unwrap();
    let start = Instant::now();
    let tokenizer = Tokenizer::from_metadata(checkpoint.meta()).unwrap();
    println!("{name}: {} tokens, loaded in {:.1} ms", tokenizer.n_vocab(), start.elapsed().as_secs_f64() * 1e3);
    tokenizer
}

/// Collects what differs, so that one run shows it all.
#[derive(Default)]
struct Differences(String, usize);

impl Differences {
    fn compare(&mut self, what: &str, text: &str, found: &[u32], expected: &[u32]) {
        self.1 += 1;
        if found != expected {
            writeln!(self.0, "{what}: {text:?}\n  found    {found:?}\n  expected {expected:?}").unwrap();
        }
    }
}

fn ids(value: &serde_json::Value) -> Option<Vec<u32>> {
    Some(value.as_array()?.iter().map(|id| id.as_u64().unwrap() as u32).collect())
}

#[test]
fn generation_ends_where_the_models_end_it() {
    let Some(dir) = vocabularies() else { return };
    let expected: &[(&str, &[&str])] = &[
        ("gpt-2", &["<|endoftext|>"]),
        ("llama-bpe", &["<|end_of_text|>", "<|eot_id|>"]),
        // Its `</s>` is a piece of HTML.
        ("qwen2", &["<|endoftext|>", "<|im_end|>"]),
        ("deepseek-coder", &["<｜end▁of▁sentence｜>"]),
        ("llama-spm", &["</s>"]),
        ("gemma-4", &["<eos>", "<|tool_response>", "<turn|>"]),
    ];
    for (name, names) in expected {
        let tokenizer = load(&dir, name);
        let ends = tokenizer.ends_of_generation().iter();
        let found: Vec<_> = ends.map(|&id| str::from_utf8(tokenizer.token_bytes(id).unwrap()).unwrap()).collect();
        assert_eq!(&found, names, "{name}");
    }
}

#[test]
fn ids_are_llama_cpps() {
    let Some(dir) = vocabularies() else { return };
    let mut differences = Differences::default();
    for name in VOCABULARIES {
        let tokenizer = load(&dir, name);
        let read = |file: String| std::fs::read_to_string(dir.join(file)).unwrap();

        let texts = read(format!("ggml-vocab-{name}.gguf.inp"));
        let expected = read(format!("ggml-vocab-{name}.gguf.out"));
        let texts: Vec<&str> = texts.split_terminator("\n__ggml_vocab_test__\n").collect();
        assert_eq!(texts.len(), expected.lines().count(), "{name}: texts and lines of ids");
        for (text, line) in texts.iter().zip(expected.lines()) {
            let expected: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
            differences.compare(name, text, &tokenizer.encode(text, Encode::default()), &expected);
        }

        let cases: serde_json::Value = serde_json::from_str(&read(format!("{name}.cases.json"))).unwrap();
        for case in cases["cases"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let plain = ids(&case["ids"]).unwrap();
            for (key, how) in [
                ("ids", Encode::default()),
                ("ids_add_special", Encode { add_special: true, ..Encode::default() }),
                ("ids_parse_special", Encode { parse_special: true, ..Encode::default() }),
            ] {
                let expected = ids(&case[key]).unwrap_or_else(|| plain.clone());
                differences.compare(&format!("{name} {key}"), text, &tokenizer.encode(text, how), &expected);
            }
        }
    }
    assert!(differences.0.is_empty(), "{}", differences.0);
    println!("{} comparisons", differences.1);
}
