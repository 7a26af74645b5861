//! WordPiece and Unigram against Hugging Face's tokenizers, from tokenizer.json and from GGUF's keys, and files that
//! lie.

use std::path::{Path, PathBuf};

use engine::tokenizer::{Encode, Tokenizer};
use serde_json::{Value, json};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../conformance/tests/data/encoders");

fn json_of(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(Path::new(DATA).join(path)).unwrap()).unwrap()
}

/// Names of a model that embeds and of one that ranks, and the strings of their tokenizer.
const KINDS: [(&str, &str, &str); 2] =
    [("bert", "bert_rerank", "strings.json"), ("xlmr", "xlmr_rerank", "strings_unigram.json")];

fn tokenizers(name: &str) -> [Tokenizer; 2] {
    let open = |path: PathBuf| Tokenizer::load(&checkpoint::open(&path).unwrap()).unwrap();
    ["hf", "model-f16.gguf"].map(|file| open(Path::new(DATA).join(name).join(file)))
}

/// Strings of accents, Chinese, emoji, control characters and long words.
#[test]
fn odd_strings_become_the_same_tokens() {
    for (name, tokenizer, strings) in
        KINDS.iter().flat_map(|(_, name, strings)| tokenizers(name).map(|tokenizer| (name, tokenizer, strings)))
    {
        let cases = json_of(strings);
        let mut wrong = String::new();
        for case in cases.as_array().unwrap() {
            let found = json!(tokenizer.encode(case[0].as_str().unwrap(), Encode::default()));
            if found != case[1] {
                wrong += &format!("{:?}:\n  found    {found}\n  expected {}\n", case[0], case[1]);
            }
        }
        assert!(cases.as_array().unwrap().len() == 400 && wrong.is_empty(), "{name}:\n{wrong}");
    }
}

#[test]
fn texts_and_pairs_have_their_marks() {
    let how = Encode { add_special: true, parse_special: true };
    for (embeds, ranks, tokenizer) in
        KINDS.iter().flat_map(|(embeds, ranks, _)| tokenizers(ranks).map(|tokenizer| (embeds, ranks, tokenizer)))
    {
        for row in json_of(&format!("{embeds}/golden.json"))["texts"].as_array().unwrap() {
            assert_eq!(json!(tokenizer.encode(row["text"].as_str().unwrap(), how)), row["ids"], "{}", row["text"]);
        }
        for row in json_of(&format!("{ranks}/golden.json"))["pairs"].as_array().unwrap() {
            let [query, document] = ["query", "document"].map(|key| row[key].as_str().unwrap());
            let (ids, second) = tokenizer.encode_pair(query, document).unwrap();
            assert_eq!((json!(ids), json!(second)), (row["ids"].clone(), row["second"].clone()), "{query}");
        }
        // Names of marks in a pair are text.
        let n_marks = |query: &str| {
            let (ids, _) = tokenizer.encode_pair(query, "x").unwrap();
            ids.iter().filter(|&&id| Some(id) == tokenizer.eos()).count()
        };
        assert_eq!([n_marks("[SEP]"), n_marks("</s>")], [n_marks("a"); 2], "{ranks}");
        let shown = if *embeds == "bert" { "the fox , ranking !" } else { "the fox, ranking!" };
        assert_eq!(tokenizer.decode(&tokenizer.encode("the fox, ranking!", Encode::default())), shown);
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
