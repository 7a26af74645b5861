//! WordPiece and Unigram against Hugging Face's tokenizers, from tokenizer.json and from GGUF's keys, and files that
//! lie.

use std::path::{Path, PathBuf};

use engine::scheduler::Pooling;
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

/// Tokenizers of other kinds, whose models embed texts.
#[test]
fn texts_for_other_encoders_have_their_marks() {
    let how = Encode { add_special: true, parse_special: true };
    for name in ["gemma_embedding", "modern_bert", "nomic_bert"] {
        for tokenizer in tokenizers(name) {
            let texts = json_of(&format!("{name}/golden.json"))["texts"].clone();
            for row in texts.as_array().unwrap() {
                assert_eq!(json!(tokenizer.encode(row["text"].as_str().unwrap(), how)), row["ids"], "{name} {row}");
            }
        }
    }
}

/// How a folder makes one vector of a text's rows, and modules that would change it.
#[test]
fn modules_that_are_not_computed_are_refused() {
    const FILES: [&str; 3] = ["config.json", "model.safetensors", "modules.json"];
    let folder = Path::new(DATA).join("gemma_embedding/hf");
    let pooling = |path: &str, change: &dyn Fn(&mut Value)| {
        let paths = FILES.iter().chain(&checkpoint::INNER_FILES).copied();
        let mut files: Vec<(&str, Vec<u8>)> =
            paths.map(|path| (path, std::fs::read(folder.join(path)).unwrap())).collect();
        let file = files.iter_mut().find(|(name, _)| *name == path).unwrap();
        let mut json: Value = serde_json::from_slice(&file.1).unwrap();
        change(&mut json);
        file.1 = json.to_string().into_bytes();
        let checkpoint = checkpoint::from_files("here", files).unwrap();
        engine::pooling::pooling(&checkpoint).map_err(|why| why.to_string())
    };
    assert_eq!(pooling("modules.json", &|_| ()), Ok(Some(Pooling::Mean)));
    let [modules, first, last] = ["modules.json", "2_Dense/config.json", "3_Dense/config.json"];
    type Change = fn(&mut Value);
    let cases: [(&str, &str, Change); 9] = [
        (
            modules,
            "the modules Dense are \"2_Dense\", those with a model.safetensors are \"2_Dense, 3_Dense\"",
            |list| {
                list.as_array_mut().unwrap().remove(3);
            },
        ),
        (modules, "the modules Dense are \"3_Dense, 2_Dense\"", |list| list.as_array_mut().unwrap().swap(2, 3)),
        (modules, "the modules Dense are \"../x, 3_Dense\"", |list| list[2]["path"] = json!("../x")),
        (modules, "module Dense follows Normalize", |list| list.as_array_mut().unwrap().swap(3, 4)),
        (modules, "module \"a.b.Router\" is not computed", |list| list[4]["type"] = json!("a.b.Router")),
        (modules, "it is no list", |list| *list = json!({})),
        (
            first,
            "2_Dense/config.json: activation_function \"torch.nn.modules.activation.Tanh\" is not computed",
            |file| {
                file["activation_function"] = json!("torch.nn.modules.activation.Tanh");
            },
        ),
        // That is what a file without one has.
        (last, "3_Dense/config.json: activation_function \"Tanh\"", |file| *file = json!({})),
        (last, "use_residual is not computed", |file| file["use_residual"] = json!(true)),
    ];
    for (path, what, change) in cases {
        let why = pooling(path, &change).unwrap_err().replace('\\', "/");
        assert!(why.contains(what), "{what}: {why}");
    }
    let why = pooling("1_Pooling/config.json", &|file| file["pooling_mode"] = json!("max")).unwrap_err();
    assert!(why.contains("pooling_mode max is not supported, cls, mean or lasttoken is"), "{why}");
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
