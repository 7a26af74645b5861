//! Tokenizers out of `tokenizer.json`: small ones of every kind against Hugging Face's tokenizers (made by
//! `tools/tokenizer_json_cases.py`), what folders say of their tokens, and files that lie.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use checkpoint::Checkpoint;
use checkpoint::gguf::Writer;
use engine::folder;
use engine::tokenizer::{Encode, TokenKind, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::fixtures;

const PLAIN: Encode = Encode { add_special: false, parse_special: false };
const PARSED: Encode = Encode { add_special: false, parse_special: true };
const SPECIAL: Encode = Encode { add_special: true, parse_special: true };

/// A folder without weights and with these texts beside them.
fn open(files: &[(&str, String)]) -> Checkpoint {
    let mut all = vec![("config.json", b"{}".to_vec()), ("model.safetensors", b"\x02\0\0\0\0\0\0\0{}".to_vec())];
    all.retain(|(name, _)| files.iter().all(|(other, _)| other != name));
    all.extend(files.iter().map(|(name, text)| (*name, text.clone().into_bytes())));
    checkpoint::from_files("here", all).unwrap()
}

fn load(tokenizer: &Value, config: &Value) -> Result<Tokenizer, String> {
    let files = [("tokenizer.json", tokenizer.to_string()), ("tokenizer_config.json", config.to_string())];
    Tokenizer::load(&open(&files)).map_err(|error| error.to_string())
}

/// The cases of a file that do not come out as Hugging Face has them.
fn differences(file: &Path) -> (usize, String) {
    let data: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let name = file.file_stem().unwrap().to_string_lossy().into_owned();
    let tokenizer = load(&data["tokenizer"], &data["config"]).map_err(|error| format!("{name}: {error}")).unwrap();
    let (mut n, mut wrong) = (0, String::new());
    for case in data["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let column = |keys: &[&str]| keys.iter().map(|key| &case[*key]).find(|ids| !ids.is_null()).unwrap().clone();
        for (what, how, expected) in [
            ("ids", PLAIN, column(&["ids"])),
            ("parsed", PARSED, column(&["parsed", "ids"])),
            ("special", SPECIAL, column(&["special", "parsed", "ids"])),
        ] {
            n += 1;
            let found = json!(tokenizer.encode(text, how));
            if found != expected {
                wrong += &format!("{name} {what} of {text:?}:\n  found    {found}\n  expected {expected}\n");
            }
        }
        let expected = case["decoded"].as_str().unwrap_or(text);
        let decoded = tokenizer.decode(&tokenizer.encode(text, PARSED));
        if decoded != expected {
            wrong += &format!("{name} decoded {text:?}:\n  found    {decoded:?}\n  expected {expected:?}\n");
        }
    }
    (n, wrong)
}

#[test]
fn ids_are_hugging_faces() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/json");
    let (mut n, mut wrong) = (0, String::new());
    for file in std::fs::read_dir(folder).unwrap() {
        let (m, differences) = differences(&file.unwrap().path());
        n += m;
        wrong += &differences;
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(n > 2000, "{n} comparisons");
}

#[test]
fn ranks_are_tiktokens() {
    let data: Value = serde_json::from_str(include_str!("../data/tiktoken.json")).unwrap();
    let lines: Vec<&str> = data["model"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect();
    let files =
        |lines: &[&str]| [("tiktoken.model", lines.join("\n")), ("tokenizer_config.json", data["config"].to_string())];
    let tokenizer = Tokenizer::load(&open(&files(&lines))).unwrap();
    assert_eq!(tokenizer.n_vocab(), lines.len() + 256);
    assert_eq!(tokenizer.eos(), tokenizer.token_to_id("<|im_end|>"));
    for case in data["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(json!(tokenizer.encode(text, PLAIN)), case["ids"], "{text:?}");
        assert_eq!(json!(tokenizer.encode(text, PARSED)), case["parsed"], "{text:?}");
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, PARSED)), text);
    }
    let long = format!("{} 0", "QUFB".repeat(400));
    for (lines, wanted) in [
        (vec!["YQ== 0", "YQ== 1"], "\"a\" is both token 0 and token 1"),
        (vec!["YQ== 0", "Yg== 2"], "line 2 has rank 2, 1 comes next"),
        (vec!["YQ== 0", "YWI= 1"], "token 1, \"ab\", does not split into two better ones"),
        (vec!["YQ== 0", "YWFh 1"], "token 1, \"aaa\", does not split into two better ones"),
        (vec!["YQ=== 0"], "is no token in base64 and its rank"),
        (vec!["Y*== 0"], "is no token in base64 and its rank"),
        (vec!["YQ== -1"], "is no token in base64 and its rank"),
        (vec![long.as_str()], "token 0 is 1200 bytes long, 1 to 1024 are allowed"),
        (vec![""], "it has no tokens"),
    ] {
        let found = Tokenizer::load(&open(&files(&lines))).unwrap_err().to_string();
        assert!(
            found.starts_with("failed to use here/tiktoken.model: ") && found.contains(wanted),
            "found {found}\nwanted {wanted}"
        );
    }
}

/// The files that MLX wrote beside its weights; their forms are in the tests around.
#[test]
fn fixtures_open() {
    let Some(models) = fixtures::more("../shared/fixtures/models") else { return };
    let mut n = 0;
    for folder in std::fs::read_dir(models).unwrap().map(|model| model.unwrap().path()) {
        let Ok(mlx) = checkpoint::open(&folder.join("mlx-mixed48")) else { continue };
        n += 1;
        let gguf = checkpoint::open(&folder.join("model-bf16.gguf")).unwrap();
        let (a, b) = (Tokenizer::load(&mlx).unwrap(), Tokenizer::load(&gguf).unwrap());
        let name = folder.display();
        assert_eq!((a.n_vocab(), a.eos()), (b.n_vocab(), b.eos()), "{name}");
        for text in ["Once upon a time there was a fox.", "12 plus 34 is <|im_start|> forty-six!\n\n  It's é 中."] {
            assert_eq!(a.encode(text, PARSED), b.encode(text, PARSED), "{name}: {text}");
        }
        assert!(a.is_end_of_generation(a.eos().unwrap()), "{name}");
        let (template, _) = (folder::chat_template(&mlx).unwrap(), folder::sampling(&mlx).unwrap());
        assert_eq!(template.is_some(), mlx.side_file("chat_template.jinja").unwrap().is_some(), "{name}");
    }
    assert!(n > 5, "{n} folders");
}

/// A vocabulary of bytes and one merge.
fn small() -> Value {
    let vocab: serde_json::Map<String, Value> =
        ["a", "b", "c", "ab", "Ġ", "</s>"].iter().enumerate().map(|(i, t)| (t.to_string(), json!(i))).collect();
    json!({
        "added_tokens": [{"id": 6, "content": "<s>", "special": true}, {"id": 7, "content": "<|end|>", "special": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]}
    })
}

#[test]
fn folders_say_which_tokens_have_a_role() {
    let files = |config: Value, generation: Value, model: Value| {
        let files = [
            ("tokenizer.json", small().to_string()),
            ("tokenizer_config.json", config.to_string()),
            ("generation_config.json", generation.to_string()),
            ("config.json", model.to_string()),
        ];
        Tokenizer::load(&open(&files)).map_err(|error| error.to_string())
    };
    let none = || json!({});
    let bos =
        json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": true, "add_eos_token": true});
    let tokenizer = files(bos, json!({"eos_token_id": [7, 2]}), json!({"eos_token_id": 1})).unwrap();
    assert_eq!(
        (tokenizer.bos(), tokenizer.eos(), tokenizer.ends_of_generation()),
        (Some(6), Some(5), &[1, 2, 5, 7][..])
    );
    assert_eq!(tokenizer.encode("ab c", SPECIAL), [6, 3, 4, 2, 5]);
    assert_eq!(
        (tokenizer.add_bos(), tokenizer.kind(7), tokenizer.kind(0)),
        (true, Some(TokenKind::Control), Some(TokenKind::Normal))
    );
    // An end that is no token is left out, with a word.
    let tokenizer = files(none(), json!({"eos_token_id": [8, 2]}), none()).unwrap();
    assert_eq!((tokenizer.eos(), tokenizer.ends_of_generation()), (Some(2), &[2, 7][..]));
    assert_eq!(tokenizer.unusable(), ["ignoring eos_token_id 8: the vocabulary has 8 tokens"]);
    // By id alone, and by a well-known name.
    let tokenizer = files(none(), json!({"eos_token_id": 2}), none()).unwrap();
    assert_eq!((tokenizer.eos(), tokenizer.bos(), tokenizer.ends_of_generation()), (Some(2), None, &[2, 7][..]));
    assert_eq!(tokenizer.encode("a<s>b", SPECIAL), [0, 6, 1]);

    for (config, generation, model, wanted) in [
        (
            none(),
            json!({"eos_token_id": "x"}),
            none(),
            "failed to use here/generation_config.json: eos_token_id is not a token's id or a list of them",
        ),
        (
            none(),
            none(),
            json!({"eos_token_id": "x"}),
            "failed to read here/config.json: key eos_token_id: found str \"x\", expected array of u32",
        ),
        (
            json!({"bos_token": 1}),
            none(),
            none(),
            "failed to use here/tokenizer_config.json: bos_token is not a token's text",
        ),
        (
            json!({"add_bos_token": 1}),
            none(),
            none(),
            "failed to use here/tokenizer_config.json: add_bos_token is not true or false",
        ),
        (json!([]), none(), none(), "failed to use here/tokenizer_config.json: invalid type: sequence"),
    ] {
        let found = files(config, generation, model).err().unwrap_or_default();
        assert!(found.contains(wanted), "found {found}\nwanted {wanted}");
    }
}

#[test]
fn templates_and_sampling() {
    let config = |value: Value| ("tokenizer_config.json", json!({"chat_template": value}).to_string());
    let jinja = ("chat_template.jinja", "from the file".to_string());
    let list = json!([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]);
    for (files, wanted) in [
        (vec![], None),
        (vec![config(json!("one"))], Some("one")),
        (vec![config(json!("one")), jinja], Some("from the file")),
        (vec![config(list)], Some("plain")),
        (vec![config(json!([{"name": "other", "template": "first"}]))], Some("first")),
        (vec![config(json!([]))], None),
        (vec![config(Value::Null)], None),
        (vec![config(json!(" \n"))], None),
        (vec![("chat_template.jinja", String::new())], None),
        (vec![("chat_template.json", json!({"chat_template": "of a processor"}).to_string())], Some("of a processor")),
        (vec![config(json!("one")), ("chat_template.json", json!({"chat_template": "two"}).to_string())], Some("one")),
    ] {
        assert_eq!(folder::chat_template(&open(&files)).unwrap().as_deref(), wanted);
    }
    for (source, wanted) in [("", None), (" ", None), ("x", Some("x"))] {
        let mut bytes = Vec::new();
        Writer::new().meta("tokenizer.chat_template", source).write(&mut bytes).unwrap();
        let file = checkpoint::from_bytes("test", bytes).unwrap();
        assert_eq!(folder::chat_template(&file).unwrap().as_deref(), wanted);
    }
    let error = folder::chat_template(&open(&[config(json!(1))])).unwrap_err().to_string();
    assert_eq!(error, "failed to use here/tokenizer_config.json: chat_template is not a text or a list of named texts");

    let generation = |value: Value| open(&[("generation_config.json", value.to_string())]);
    let found =
        folder::sampling(&generation(json!({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0}))).unwrap();
    assert_eq!(
        (found.temperature, found.top_k, found.top_p, found.min_p),
        (Some(0.6), Some(20), Some(0.95), Some(0.0))
    );
    assert_eq!(folder::sampling(&generation(json!({"do_sample": false, "top_p": 1}))).unwrap().temperature, Some(0.0));
    assert_eq!(folder::sampling(&open(&[])).unwrap(), folder::Sampling::default());
    let mut bytes = Vec::new();
    let mut writer = Writer::new();
    writer.meta("general.sampling.temp", 0.6f32).meta("general.sampling.top_k", 20i32);
    writer.meta("general.sampling.min_p", -1f32).write(&mut bytes).unwrap();
    let found = folder::sampling(&checkpoint::from_bytes("test", bytes).unwrap()).unwrap();
    assert_eq!((found.temperature, found.top_k, found.top_p, found.min_p), (Some(0.6), Some(20), None, None));
    let error = folder::sampling(&generation(json!({"temperature": -1}))).unwrap_err().to_string();
    assert_eq!(error, "failed to use here/generation_config.json: temperature is not a number from 0 on");
}

#[test]
fn files_that_lie_are_refused_by_name() {
    let deep = (0..20).fold(json!({"type": "NFC"}), |inner, _| json!({"type": "Sequence", "normalizers": [inner]}));
    let wide = json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFC"}); 5000]});
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"});
    let template = |ids: Value| json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}], "special_tokens": {"<s>": {"ids": ids}}});
    let charsmap = |bytes: &[u8]| json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(bytes)});
    // Every byte leads back to the root.
    let units = (0..256u32).flat_map(|byte| (byte << 10 | byte).to_le_bytes());
    let loops: Vec<u8> = 1024u32.to_le_bytes().into_iter().chain(units).collect();
    for (at, value, wanted) in [
        ("/model/type", json!("WordLevel"), "model type \"WordLevel\" is not supported, BPE, WordPiece and"),
        ("/model/vocab", json!([["a", 0.5]]), "the vocabulary of a Unigram model is a list"),
        ("/model/vocab", json!({}), "merge 0, \"a b\", names \"a\", which is no token"),
        ("/model/vocab/a", json!(1), "tokens \"a\" and \"b\" both have id 1"),
        ("/model/vocab/a", json!(-1), "invalid value: integer `-1`, expected u32"),
        ("/model/vocab/a", json!(4_000_000_000u32), "token \"a\" has id 4000000000, there are 8 tokens"),
        ("/model/vocab/a", json!("x"), "invalid type: string \"x\", expected u32"),
        ("/added_tokens/0/id", json!(0), "tokens \"a\" and \"<s>\" both have id 0"),
        ("/added_tokens/0/content", json!("a"), "\"a\" is both token 0 and token 6"),
        ("/added_tokens/0/id", json!(900_000), "token \"<s>\" has id 900000, there are 8 tokens"),
        ("/added_tokens/0", json!({"id": 6}), "missing field `content`"),
        ("/model/merges", json!([["a", "x"]]), "merge 0, \"a x\", names \"x\", which is no token"),
        ("/model/merges", json!([["b", "c"]]), "merge 0, \"b c\", names \"bc\", which is no token"),
        ("/model/merges", json!(["ab"]), "a merge has two sides"),
        ("/model/merges", json!(["a b c"]), "a merge has two sides"),
        ("/model/merges", json!([["a"]]), "a merge has two sides"),
        ("/model/merges", json!([["a", "b", "c"]]), "a merge has two sides"),
        ("/model/merges", json!([1]), "invalid type: integer `1`, expected a merge"),
        ("/model/unk_token", json!("?"), "unk_token \"?\" is no token"),
        ("/model/end_of_word_suffix", json!("</w>"), "model end_of_word_suffix is not supported"),
        ("/normalizer", deep, "normalizer: sequences nest more than 8 deep"),
        ("/normalizer", wide, "a step has more than 4096 values"),
        ("/normalizer", json!({"type": "Nmt"}), "normalizer \"Nmt\" is not known"),
        ("/normalizer", json!({"type": "Precompiled"}), "precompiled_charsmap is no text"),
        ("/normalizer", charsmap(&[0, 0, 0, 1]), "normalizer Precompiled: it ends before its tree does"),
        ("/normalizer", charsmap(&[0, 0, 0, 0, 255]), "normalizer Precompiled: its texts are not UTF-8"),
        ("/normalizer", charsmap(&loops), "normalizer Precompiled: its tree has loops"),
        (
            "/normalizer",
            json!({"type": "Prepend", "prepend": "x".repeat(65)}),
            "prepend is 65 bytes long, at most 64 are allowed",
        ),
        (
            "/normalizer",
            json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
            "replaces the empty text",
        ),
        ("/normalizer", json!({"type": "Sequence"}), "normalizer: a sequence has no normalizers"),
        ("/normalizer", json!([]), "normalizer: type is no text"),
        ("/pre_tokenizer", json!({"type": "Whitespace"}), "pre_tokenizer \"Whitespace\" is not known"),
        ("/pre_tokenizer", split("(a"), "pre_tokenizer Split: pattern unclosed group"),
        (
            "/pre_tokenizer",
            split("a(?=b)"),
            "pattern look-around, including look-ahead and look-behind, is not supported",
        ),
        ("/pre_tokenizer", split("[^a]?+b"), "pattern uses a possessive repetition, which is not supported"),
        ("/pre_tokenizer", split("(?m:a.b)"), "pattern uses a flag other than i, which is not supported"),
        (
            "/pre_tokenizer",
            split(r"(\p{L}{1000}){1000}"),
            "pattern heap usage during NFA compilation exceeded limit of 2097152",
        ),
        ("/pre_tokenizer", split(&"a".repeat(20_000)), "pattern is 20000 bytes long, at most 16384 are allowed"),
        (
            "/pre_tokenizer",
            json!({"type": "Split", "pattern": {"String": "a"}, "behavior": "Odd"}),
            "behavior \"Odd\" is not known",
        ),
        ("/pre_tokenizer", json!({"type": "Split", "behavior": "Isolated"}), "pre_tokenizer Split: has no pattern"),
        ("/pre_tokenizer", json!({"type": "ByteLevel", "use_regex": 1}), "use_regex is neither true nor false"),
        ("/pre_tokenizer", json!({"type": "Metaspace", "replacement": "_"}), "replacement is not \"▁\""),
        ("/post_processor", template(json!([9])), "post_processor: token 9 is put around texts, there are 8 tokens"),
        ("/post_processor", template(json!([])), "post_processor: token \"<s>\" has no ids"),
        ("/post_processor", json!({"type": "Odd"}), "post_processor \"Odd\" is not known"),
        ("/decoder", json!({"type": "WordPiece"}), "decoder \"WordPiece\" is not known in this form"),
    ] {
        let mut file = small();
        let (parent, key) = at.rsplit_once('/').unwrap();
        match file.pointer_mut(parent).unwrap() {
            Value::Array(list) => list[key.parse::<usize>().unwrap()] = value,
            object => object[key] = value,
        }
        let found = load(&file, &json!({})).err().unwrap_or_else(|| "no error".into());
        assert!(
            found.starts_with("failed to use here/tokenizer.json: ") && found.contains(wanted),
            "{at}:\nfound {found}\nwanted {wanted}"
        );
    }
    let missing = |name: &'static str| Tokenizer::load(&open(&[(name, "x".into())])).unwrap_err().to_string();
    let none =
        "failed to find the tokenizer of here: it has neither tokenizer.json nor tiktoken.model nor tokenizer.model";
    assert_eq!(missing("other"), none);
    assert_eq!(missing("tokenizer.model"), "failed to use here/tokenizer.model: it is cut, or no SentencePiece model");
    assert_eq!(
        missing("tiktoken.model"),
        "failed to use here/tiktoken.model: line 1, \"x\", is no token in base64 and its rank"
    );
    assert!(missing("tokenizer.json").contains("failed to use here/tokenizer.json: expected value at line 1 column 1"));
}

fn in_sequence(list: &str, steps: Vec<Value>) -> Value {
    json!({"type": "Sequence", list: steps})
}

/// Files that multiplied a text or took seconds and gigabytes to load.
#[test]
fn files_that_cost_too_much_are_refused() {
    let replace = |from: Value, to: usize| json!({"type": "Replace", "pattern": from, "content": "a".repeat(to)});
    let text = |to: usize| replace(json!({"String": "a"}), to);
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"});
    let growth = "normalizer: a text may become";
    for (part, steps, wanted) in [
        ("normalizer", in_sequence("normalizers", vec![text(64); 8]), growth),
        ("normalizer", in_sequence("normalizers", vec![text(8), text(8)]), growth),
        ("normalizer", replace(json!({"Regex": ""}), 64), growth),
        ("normalizer", in_sequence("normalizers", vec![replace(json!({"Regex": "x*"}), 8); 2]), growth),
        (
            "normalizer",
            in_sequence("normalizers", vec![json!({"type": "Prepend", "prepend": "a".repeat(60)}); 2]),
            growth,
        ),
        ("normalizer", in_sequence("normalizers", vec![json!({"type": "NFC"}); 4]), growth),
        (
            "normalizer",
            in_sequence("normalizers", vec![json!({"type": "Strip"}); 40]),
            "it has 40 steps, at most 32 are allowed",
        ),
        (
            "normalizer",
            in_sequence("normalizers", vec![replace(json!({"Regex": r"\p{L}{9}"}), 1); 17]),
            "more than 16 patterns",
        ),
        ("pre_tokenizer", in_sequence("pretokenizers", vec![split(r"\p{L}{9}"); 17]), "more than 16 patterns"),
        ("pre_tokenizer", split(r"\p{L}{600}"), "exceeded limit"),
    ] {
        let mut file = small();
        file[part] = steps;
        let found = load(&file, &json!({})).err().unwrap_or_else(|| "no error".into());
        assert!(found.contains(wanted), "{part}: found {found}, expected {wanted}");
    }
    // What files in use do stays allowed.
    let mut file = small();
    let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    file["normalizer"] =
        in_sequence("normalizers", vec![json!({"type": "NFKC"}), json!({"type": "Prepend", "prepend": "▁"}), spaces]);
    assert!(load(&file, &json!({})).is_ok());
}

/// A text above the bound makes more tokens than asked for; where text may become no token there is no bound.
#[test]
fn texts_can_be_refused_by_their_length() {
    // GPT-2's characters for bytes: 68 of them, those without a picture, are moved behind 255.
    let moved = |byte: u32| !matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut all: Vec<u32> = (0..256).filter(|&byte| !moved(byte)).collect();
    all.extend(256..256 + (0..256).filter(|&byte| moved(byte)).count() as u32);
    let mut file = small();
    let vocab = file["model"]["vocab"].as_object_mut().unwrap();
    for (i, c) in all.into_iter().filter_map(char::from_u32).enumerate() {
        vocab.entry(c.to_string()).or_insert(json!(i + 8));
    }
    let text = "ab<|end|> é日本\u{1}\u{ad} aaab<s>🦀";
    for (normalizer, times) in [(Value::Null, 1), (json!({"type": "NFC"}), 4)] {
        file["normalizer"] = normalizer;
        let tokenizer = load(&file, &json!({})).unwrap();
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let n = tokenizer.encode(&text[..end], PARSED).len();
            assert!(tokenizer.max_text_bytes(n).unwrap() >= end, "{end} bytes are {n} tokens");
        }
        assert_eq!(tokenizer.max_text_bytes(10), Some(10 * "<|end|>".len() * times));
    }
    file["normalizer"] = json!({"type": "Strip"});
    assert_eq!(load(&file, &json!({})).unwrap().max_text_bytes(10), None);
    assert_eq!(load(&small(), &json!({})).unwrap().max_text_bytes(10), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// A file changed in any way ends in an error or in a tokenizer that takes every text.
    #[test]
    fn changed_files(at in any::<prop::sample::Index>(), n in 0usize..12, new in "[-0-9{}\\[\\]\",:a-zA-Z▁Ġ\\\\()+*?]{0,12}", text in ".{0,20}") {
        let mut file = CHANGED.to_string();
        let start = file.floor_char_boundary(at.index(file.len() + 1));
        let end = file.floor_char_boundary((start + n).min(file.len()));
        file.replace_range(start..end, &new);
        if let Ok(tokenizer) = Tokenizer::load(&open(&[("tokenizer.json", file)])) {
            let ids = tokenizer.encode(&text, SPECIAL);
            prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
            tokenizer.decode(&ids);
        }
    }
}

/// A file with a step of every kind.
const CHANGED: &str = r#"{"added_tokens": [{"id": 6, "content": "<s>", "special": true, "lstrip": true}, {"id": 7, "content": "c a", "normalized": true, "rstrip": true}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"Regex": "x+"}, "content": "a"}]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true},
        {"type": "Split", "pattern": {"Regex": "[^\\s\\p{L}]?\\p{L}+|\\s+(?!\\S)|\\s+"}, "behavior": "MergedWithPrevious", "invert": false},
        {"type": "Digits", "individual_digits": true}]},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}], "special_tokens": {"<s>": {"ids": [6]}}},
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    "model": {"type": "BPE", "unk_token": "?", "byte_fallback": true, "fuse_unk": true, "vocab": {"a": 0, "b": 1, "ab": 2, "▁": 3, "<0x41>": 4, "?": 5}, "merges": [["a", "b"]]}}"#;
