//! WordPiece against Hugging Face's tokenizers, from tokenizer.json and from GGUF's keys, and files that lie.

use std::path::{Path, PathBuf};

use engine::tokenizer::{Encode, Tokenizer};
use serde_json::{Value, json};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../conformance/tests/data/encoders");

fn json_of(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(Path::new(DATA).join(path)).unwrap()).unwrap()
}

fn tokenizers() -> [Tokenizer; 2] {
    let open = |path: PathBuf| Tokenizer::load(&checkpoint::open(&path).unwrap()).unwrap();
    ["bert_rerank/hf", "bert_rerank/model-f16.gguf"].map(|path| open(Path::new(DATA).join(path)))
}

/// Strings of accents, Chinese, emoji, control characters and long words.
#[test]
fn odd_strings_become_the_same_tokens() {
    let cases = json_of("strings.json");
    for tokenizer in tokenizers() {
        let mut wrong = String::new();
        for case in cases.as_array().unwrap() {
            let found = json!(tokenizer.encode(case[0].as_str().unwrap(), Encode::default()));
            if found != case[1] {
                wrong += &format!("{:?}:\n  found    {found}\n  expected {}\n", case[0], case[1]);
            }
        }
        assert!(cases.as_array().unwrap().len() == 400 && wrong.is_empty(), "{wrong}");
    }
}

#[test]
fn texts_and_pairs_have_their_marks() {
    let how = Encode { add_special: true, parse_special: true };
    for tokenizer in tokenizers() {
        for row in json_of("bert/golden.json")["texts"].as_array().unwrap() {
            assert_eq!(json!(tokenizer.encode(row["text"].as_str().unwrap(), how)), row["ids"], "{}", row["text"]);
        }
        for row in json_of("bert_rerank/golden.json")["pairs"].as_array().unwrap() {
            let [query, document] = ["query", "document"].map(|key| row[key].as_str().unwrap());
            let (ids, second) = tokenizer.encode_pair(query, document).unwrap();
            assert_eq!((json!(ids), json!(second)), (row["ids"].clone(), row["second"].clone()), "{query}");
        }
        // Names of marks in a pair are text.
        let (ids, _) = tokenizer.encode_pair("[SEP]", "x").unwrap();
        assert_eq!(ids.iter().filter(|&&id| Some(id) == tokenizer.eos()).count(), 2);
        assert_eq!(tokenizer.decode(&tokenizer.encode("The FOX, ranking!", Encode::default())), "the fox , ranking !");
    }
}

#[test]
fn processors_of_older_files_are_read() {
    let base = json_of("bert/hf/tokenizer.json");
    let load = |change: &dyn Fn(&mut Value)| {
        let mut file = base.clone();
        change(&mut file);
        let files = vec![
            ("config.json", b"{}".to_vec()),
            ("model.safetensors", b"\x02\0\0\0\0\0\0\0{}".to_vec()),
            ("tokenizer.json", file.to_string().into_bytes()),
        ];
        Tokenizer::load(&checkpoint::from_files("here", files).unwrap()).map_err(|error| error.to_string())
    };
    for (kind, between) in [("BertProcessing", 1), ("RobertaProcessing", 2)] {
        let processor = json!({"type": kind, "cls": ["[CLS]", 2], "sep": ["[SEP]", 3]});
        let tokenizer = load(&|file| file["post_processor"] = processor.clone()).unwrap();
        assert_eq!(tokenizer.encode_pair("a", "b").unwrap().1, 2 + between, "{kind}");
        assert_eq!(tokenizer.encode("a", Encode { add_special: true, ..Encode::default() }).len(), 3);
    }
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 7] = [
        ("cls or sep has no id", |f| f["post_processor"] = json!({"type": "BertProcessing", "cls": ["[CLS]", -1]})),
        ("there are 107 tokens", |f| {
            f["post_processor"] = json!({"type": "BertProcessing", "cls": ["[CLS]", 2], "sep": ["[SEP]", 107]})
        }),
        ("max_input_chars_per_word is 0", |f| f["model"]["max_input_chars_per_word"] = json!(0)),
        ("max_input_chars_per_word is 1001", |f| f["model"]["max_input_chars_per_word"] = json!(1001)),
        ("continuing_subword_prefix \"@@\"", |f| f["model"]["continuing_subword_prefix"] = json!("@@")),
        ("no BertPreTokenizer", |f| f["pre_tokenizer"] = Value::Null),
        ("unk_token \"[X]\" is no token", |f| f["model"]["unk_token"] = json!("[X]")),
    ];
    for (what, change) in cases {
        let why = load(&change).unwrap_err();
        assert!(why.contains(what), "{what}: {why}");
    }
}
