//! The tokenizer on the project's own files: the embedded model's vocabulary against Hugging Face's tokenizers, a small
//! SentencePiece vocabulary against SentencePiece (both made by `tools/tokenizer_cases.py`), text and streams that
//! nobody planned for, and vocabularies that lie.

use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use checkpoint::Value;
use checkpoint::gguf::Writer;
use engine::scheduler::Vocabulary;
use engine::tokenizer::{Decode, Detokenizer, Encode, TokenKind, Tokenizer, sentencepiece_keys};
use proptest::prelude::*;

const PLAIN: Encode = Encode { add_special: false, parse_special: false };
const PARSED: Encode = Encode { add_special: false, parse_special: true };

static FABLE: LazyLock<Tokenizer> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fable-29m-a10m-q4_k_m.gguf");
    Tokenizer::from_metadata(checkpoint::open(&path).unwrap().meta()).unwrap()
});
static SPM: LazyLock<Tokenizer> = LazyLock::new(|| tokenizer(include_bytes!("../data/spm.gguf").to_vec()).unwrap());

fn tokenizer(file: Vec<u8>) -> Result<Tokenizer, String> {
    let checkpoint = checkpoint::from_bytes("test", file).unwrap();
    Tokenizer::from_metadata(checkpoint.meta()).map_err(|error| error.to_string())
}

fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn check(tokenizer: &Tokenizer, cases: &str, columns: &[(&str, Encode)]) {
    let cases: serde_json::Value = serde_json::from_str(cases).unwrap();
    let mut wrong = String::new();
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        for &(column, how) in columns {
            let (found, expected) = (tokenizer.encode(text, how), ids(&case[column]));
            if found != expected {
                wrong += &format!("{column} of {text:?}:\n  found    {found:?}\n  expected {expected:?}\n");
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn byte_level_ids_are_hugging_faces() {
    check(&FABLE, include_str!("../data/fable_ids.json"), &[("ids", PLAIN), ("parsed", PARSED)]);
}

#[test]
fn score_ids_are_sentencepieces() {
    check(&SPM, include_str!("../data/spm_ids.json"), &[("ids", PLAIN)]);
}

/// A folder with SentencePiece's own file, and what `tokenizer_config.json` says.
fn sentencepiece(model: &[u8], config: &str) -> checkpoint::Checkpoint {
    let files = vec![
        ("config.json", b"{}".to_vec()),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0{}".to_vec()),
        ("tokenizer.model", model.to_vec()),
        ("tokenizer_config.json", config.into()),
    ];
    checkpoint::from_files("here", files).unwrap()
}

const SPM_MODEL: &[u8] = include_bytes!("../data/spm.model");

#[test]
fn sentencepieces_own_file_is_the_same_vocabulary() {
    let folder = sentencepiece(SPM_MODEL, "{}");
    check(&Tokenizer::load(&folder).unwrap(), include_str!("../data/spm_ids.json"), &[("ids", PLAIN)]);
    let file = checkpoint::from_bytes("test", include_bytes!("../data/spm.gguf").to_vec()).unwrap();
    let keys = sentencepiece_keys(&folder, Some(700)).unwrap().unwrap();
    let found = |key: &str| keys.iter().find(|(name, _)| name == key).map(|(_, value)| value);
    for (key, value) in file.meta().iter().filter(|(key, _)| key.starts_with("tokenizer.ggml.")) {
        assert_eq!(found(key), Some(value), "{key}");
    }
    // The model has more tokens, and so has the other file.
    let added = r#"{"added_tokens_decoder": {"701": {"content": "<|x|>", "special": true},
        "2": {"content": "</s>", "special": true}, "702": {"content": "plain", "special": false}},
        "add_bos_token": false, "add_eos_token": true, "eos_token": "<|x|>"}"#;
    let folder = sentencepiece(SPM_MODEL, added);
    let tokenizer = Tokenizer::load(&folder).unwrap();
    assert_eq!(tokenizer.encode("a<|x|>", Encode { add_special: true, parse_special: true })[1..], [701, 701]);
    assert_eq!((tokenizer.n_vocab(), tokenizer.eos(), tokenizer.bos()), (703, Some(701), Some(1)));
    let kinds = [700, 701, 702].map(|id| tokenizer.kind(id));
    assert_eq!(kinds, [TokenKind::Unused, TokenKind::Control, TokenKind::UserDefined].map(Some));
    let fewer = sentencepiece_keys(&folder, Some(702)).unwrap_err().to_string();
    assert_eq!(fewer, "failed to use here/tokenizer.model: it has 703 tokens, the model 702");
    assert_eq!(sentencepiece_keys(&folder, Some(1000)).unwrap().unwrap().len(), keys.len() + 1);
}

#[test]
fn damaged_sentencepiece_files_are_refused() {
    let said = |model: &[u8], config: &str| match sentencepiece_keys(&sentencepiece(model, config), None) {
        Ok(keys) => format!("{} keys", keys.unwrap().len()),
        Err(error) => error.to_string().strip_prefix("failed to use here/tokenizer.model: ").unwrap().to_string(),
    };
    let with = |more: &[u8]| said(&[SPM_MODEL, more].concat(), "{}");
    let cut = "it is cut, or no SentencePiece model";
    for (more, wanted) in [
        (&b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"[..], cut),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", cut),
        (b"\x0a\x05abc", cut),
        (b"\x0b", cut),
        (b"\x00\x00", cut),
        (b"\x0a\x02\x18\x07", "piece 700: type 7 is not known"),
        (b"\x0a\x02\x18\x00", "piece 700: type 0 is not known"),
        (b"\x0a\x03\x0a\x01\xff", "piece 700: its text is not UTF-8"),
        (b"\x12\x02\x18\x01", "its model is not one of merges (BPE), which is what is read"),
        (b"\x1a\x03\x12\x01x", "it rewrites texts by a table (precompiled_charsmap), which is not known"),
        (b"\x1a\x02\x20\x01", "it drops blanks (remove_extra_whitespaces), which is not known"),
        (b"\x12\x03\xc0\x01\x01", "it keeps spaces as they are or puts them after words, which is not known"),
    ] {
        assert_eq!(with(more), wanted, "{more:?}");
    }
    assert_eq!(said(b"", "{}"), "it has no pieces");
    let far = r#"{"added_tokens_decoder": {"4000000000": {"content": "x"}}}"#;
    assert_eq!(said(SPM_MODEL, far), "it has 700 pieces, an added token is 4000000000");
    let other = r#"{"added_tokens_decoder": {"2": {"content": "<end>"}}}"#;
    assert_eq!(said(SPM_MODEL, other), "piece 2 is \"</s>\", tokenizer_config.json says \"<end>\"");
    // Nothing that is cut or changed ends the process.
    for n in (0..SPM_MODEL.len()).step_by(7) {
        let mut changed = SPM_MODEL.to_vec();
        changed[n] ^= 1 << (n % 8);
        let _ = Tokenizer::load(&sentencepiece(&changed, "{}"));
        let _ = Tokenizer::load(&sentencepiece(&SPM_MODEL[..n], "{}"));
    }
}

#[test]
fn roles_come_from_keys_and_names() {
    let end = FABLE.token_to_id("<|im_end|>").unwrap();
    let text_end = FABLE.token_to_id("<|endoftext|>").unwrap();
    assert_eq!((FABLE.eos(), FABLE.eot(), FABLE.n_vocab()), (Some(end), Some(end), 8192));
    assert_eq!(FABLE.ends_of_generation(), [text_end, end]);
    assert!(FABLE.is_end_of_generation(end) && !FABLE.is_end_of_generation(0) && !FABLE.is_end_of_generation(u32::MAX));
    assert_eq!(FABLE.kind(end), Some(TokenKind::Control));
    assert_eq!(FABLE.encode("a<|im_end|>", PARSED).last(), Some(&end));
    assert!(!FABLE.encode("a<|im_end|>", PLAIN).contains(&end));
    assert_eq!(FABLE.token_bytes(end), Some(&b"<|im_end|>"[..]));
    assert_eq!(FABLE.token_bytes(8192), None);

    let special = SPM.encode("a", Encode { add_special: true, parse_special: false });
    assert_eq!(special[0], SPM.bos().unwrap());
    assert_eq!(special[1..], SPM.encode("a", PLAIN));
    assert_eq!(SPM.token_bytes(SPM.token_to_id("<0x0A>").unwrap()), Some(&b"\n"[..]));
    // A user-defined token is one even in plain text, and the text after it starts with a space of its own.
    let inst = SPM.token_to_id("[INST]").unwrap();
    let around = [SPM.encode("the", PLAIN), vec![inst], SPM.encode("the", PLAIN)].concat();
    assert_eq!(SPM.encode("the[INST]the", PLAIN), around);
}

#[test]
fn the_leading_space_is_dropped_only_at_the_start() {
    let ids = SPM.encode("the work", PLAIN);
    assert_eq!(SPM.decode(&ids), "the work");
    assert_eq!(SPM.decode_as(&ids, Decode { continues: true, ..Decode::default() }), " the work");
    let with_bos = SPM.encode("the work", Encode { add_special: true, parse_special: false });
    assert_eq!(SPM.decode_as(&with_bos, Decode { skip_special: true, ..Decode::default() }), "the work");
}

#[test]
fn awkward_texts_take_linear_time() {
    // A quadratic step would take minutes here.
    const N: usize = 1 << 20;
    for unit in ["a", " ", "\n ", " \n", "abcdefghij", "é", "日", "<|im_end|>", "<|", "'", "1", "\u{301}", "a\u{301} "]
    {
        let text = unit.repeat(N / unit.len());
        for tokenizer in [&*FABLE, &*SPM] {
            let start = Instant::now();
            let ids = tokenizer.encode(&text, PARSED);
            assert!(tokenizer.decode(&ids) == text, "{unit:?} comes back");
            let seconds = start.elapsed().as_secs_f64();
            assert!(seconds < 30.0, "{unit:?} took {seconds} s");
        }
    }
}

/// Texts with special strings, odd blanks, and characters of every length in them.
fn any_text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "\\PC{0,8}",
        2 => "[a-zA-Z ]{1,12}",
        2 => prop::sample::select(vec!["<|im_start|>", "<|im_end|>", "[INST]", "<s>", "  ", "\r\n", "\u{2028}", "'ll", "\0", "<0x41>"])
            .prop_map(str::to_string),
        1 => any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_text_comes_back(text in any_text()) {
        for how in [PLAIN, PARSED] {
            prop_assert_eq!(&FABLE.decode(&FABLE.encode(&text, how)), &text);
        }
        // The sign for a space is a space afterwards, and a user-defined token puts a space before what follows.
        let text = text.replace(['▁', '['], "");
        prop_assert_eq!(SPM.decode(&SPM.encode(&text, PLAIN)), text);
    }

    #[test]
    fn plain_text_never_becomes_a_control_token(text in any_text()) {
        for tokenizer in [&*FABLE, &*SPM] {
            prop_assert!(tokenizer.encode(&text, PLAIN).iter().all(|&id| !tokenizer.is_special(id)));
        }
    }

    #[test]
    fn a_stream_is_the_whole(ids in prop::collection::vec(0u32..8200, 0..60), skip_special: bool, continues: bool) {
        let how = Decode { skip_special, continues };
        for tokenizer in [&*FABLE, &*SPM] {
            // Half of them from the first 300, where the single bytes are.
            let ids: Vec<u32> = ids.iter().map(|&id| if id % 2 == 0 { id / 2 % 300 } else { id }).collect();
            let mut stream = Detokenizer::new(how);
            let mut text = String::new();
            for &id in &ids {
                stream.push(tokenizer, id, &mut text);
            }
            stream.finish(&mut text);
            prop_assert_eq!(text, tokenizer.decode_as(&ids, how));
        }
    }
}

#[test]
fn the_scheduler_sees_text_without_control_tokens() {
    let spm: Arc<dyn Vocabulary> = Arc::new(tokenizer(include_bytes!("../data/spm.gguf").to_vec()).unwrap());
    assert_eq!(spm.n_vocab(), SPM.n_vocab());
    assert!(spm.is_end_of_generation(SPM.eos().unwrap()) && !spm.is_end_of_generation(SPM.bos().unwrap()));
    let mut ids = SPM.encode("é", Encode { add_special: true, parse_special: false });
    ids.push(SPM.eos().unwrap());
    // The answer goes on from the prompt, so its first space is its own.
    for (shown, expected) in [(vec![], " é"), (vec![SPM.eos().unwrap()], " é</s>")] {
        let how = Decode { skip_special: true, continues: true };
        let (mut stream, mut text) = (Arc::clone(&spm).text(how, &shown), String::new());
        ids.iter().for_each(|&id| stream.push(id, &mut text));
        stream.finish(&mut text);
        assert_eq!(text, expected);
    }
}

#[test]
fn a_character_comes_whole_or_not_at_all() {
    let ids: Vec<u32> = "🦊".bytes().map(|b| SPM.token_to_id(&format!("<0x{b:02X}>")).unwrap()).collect();
    let cases: &[(&[u32], &str)] = &[
        (&ids, "|||🦊|"),
        (&[ids[0], ids[1]], "||\u{FFFD}"),
        (&[ids[1], ids[0]], "\u{FFFD}||\u{FFFD}"),
        (&[ids[0], ids[0], ids[1], ids[2], ids[3]], "|\u{FFFD}|||🦊|"),
    ];
    for (ids, expected) in cases {
        let mut stream = Detokenizer::new(Decode::default());
        let mut shown = String::new();
        for &id in *ids {
            stream.push(&SPM, id, &mut shown);
            shown.push('|');
        }
        stream.finish(&mut shown);
        assert_eq!(&shown, expected);
    }
}

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";

/// A good vocabulary of either kind, with some keys changed, added or (`None`) left out.
fn small(model: &str, changes: &[(&str, Option<Value>)]) -> Result<Tokenizer, String> {
    let mut keys: Vec<(&str, Value)> = vec![
        (MODEL, model.into()),
        (PRE, "gpt-2".into()),
        (TOKENS, vec!["a", "b", "ab", "<e>"].into()),
        (TYPES, vec![1i32, 1, 1, 3].into()),
        (SCORES, vec![0f32, -1.0, -2.0, 0.0].into()),
        (MERGES, vec!["a b"].into()),
        (EOS, 3u32.into()),
    ];
    for (key, value) in changes {
        keys.retain(|(present, _)| present != key);
        keys.extend(value.clone().map(|value| (*key, value)));
    }
    let mut writer = Writer::new();
    for (key, value) in keys {
        writer.meta(key, value);
    }
    let mut bytes = Vec::new();
    writer.write(&mut bytes).unwrap();
    tokenizer(bytes)
}

#[test]
fn vocabularies_that_lie_are_refused_by_name() {
    let changes: &[(&str, &str, Option<Value>, &[&str])] = &[
        ("gpt2", MODEL, None, &[MODEL]),
        ("gpt2", MODEL, Some("rwkv".into()), &["\"rwkv\"", "gpt2, gemma4, llama"]),
        ("gpt2", MODEL, Some(7u32.into()), &[MODEL, "u32"]),
        ("gpt2", PRE, Some("gpt-9".into()), &[PRE, "\"gpt-9\"", "qwen2", "llama-bpe"]),
        ("gpt2", TOKENS, None, &[TOKENS]),
        ("gpt2", TOKENS, Some(Vec::<&str>::new().into()), &[TOKENS, "0 tokens"]),
        ("gpt2", TOKENS, Some(vec!["a", "b", "ab", "a"].into()), &[TOKENS, "\"a\"", "token 0", "token 3"]),
        ("gpt2", TOKENS, Some(vec!["a", "b", "c", "<e>"].into()), &[MERGES, "merge 0", "\"ab\"", "no token"]),
        ("gpt2", TYPES, Some(vec![1i32, 1, 1].into()), &[TYPES, "3 values", "4 tokens"]),
        ("gpt2", TYPES, Some(vec![1i32, 1, 1, 1, 1].into()), &[TYPES, "5 values", "4 tokens"]),
        ("gpt2", TYPES, Some(vec![1i32, 1, 9, 3].into()), &[TYPES, "token 2", "type 9"]),
        ("gpt2", TYPES, Some(vec![1i32, 6, 1, 3].into()), &["token 1", "\"b\"", "<0x00>"]),
        ("gpt2", TYPES, Some("x".into()), &[TYPES]),
        ("gpt2", MERGES, None, &[MERGES]),
        ("gpt2", MERGES, Some(vec!["a b", "ab"].into()), &[MERGES, "merge 1", "two sides"]),
        ("gpt2", MERGES, Some(vec![""].into()), &[MERGES, "merge 0", "two sides"]),
        ("gpt2", MERGES, Some(vec!["a x"].into()), &[MERGES, "merge 0", "\"x\""]),
        ("gpt2", MERGES, Some(vec![1u32].into()), &[MERGES]),
        ("gpt2", EOS, Some("x".into()), &[EOS]),
        ("gpt2", ADD_BOS, Some(true.into()), &[ADD_BOS, "bos_token_id"]),
        ("gpt2", ADD_BOS, Some(1u32.into()), &[ADD_BOS]),
        ("gemma4", ADD_BOS, Some(true.into()), &[ADD_BOS, "bos_token_id"]),
        ("llama", SCORES, None, &[SCORES]),
        ("llama", SCORES, Some(vec![0f32; 3].into()), &[SCORES, "3 values", "4 tokens"]),
        ("llama", SCORES, Some(vec![0f32, 0.0, f32::NAN, 0.0].into()), &[SCORES, "token 2"]),
    ];
    for (model, key, value, fragments) in changes {
        let error = small(model, &[(key, value.clone())]).expect_err(&format!("{key} = {value:?}"));
        for fragment in *fragments {
            assert!(error.contains(fragment), "{key} = {value:?}: {error:?} should say {fragment:?}");
        }
    }
    let long = "x".repeat(100_000);
    let error = small("gpt2", &[(MERGES, Some(vec![long.as_str()].into()))]).unwrap_err();
    assert!(error.len() < 300, "{} bytes of message", error.len());
}

/// Files in use have such ids, and other programs read them.
#[test]
fn ids_beyond_the_vocabulary_are_none() {
    let roles = ["bos", "eos", "eot", "eom", "unknown", "padding", "fim_pre", "fim_mid"];
    for (id, shown) in [(Value::from(4u32), "4"), (u32::MAX.into(), "4294967295"), ((-1i32).into(), "-1")] {
        for role in roles {
            let key = format!("tokenizer.ggml.{role}_token_id");
            let add = (ADD_BOS, Some((role == "bos").into()));
            let tokenizer = small("gpt2", &[(&key, Some(id.clone())), add]).unwrap();
            assert_eq!(tokenizer.unusable(), [format!("ignoring {key} {shown}: the vocabulary has 4 tokens")]);
            assert_eq!((tokenizer.bos(), tokenizer.eos()), (None, (role != "eos").then_some(3)), "{key}");
            assert_eq!(tokenizer.encode("ab", Encode { add_special: true, parse_special: true }), [2]);
        }
    }
    // SentencePiece's usual ids count then, as where a file names none.
    let tokenizer = small("llama", &[("tokenizer.ggml.unknown_token_id", Some(9u32.into()))]).unwrap();
    assert_eq!((tokenizer.unusable().len(), tokenizer.bos()), (1, Some(1)));
    let named = small("gpt2", &[("general.name", Some(b"Caf\xe9"[..].into()))]).unwrap();
    assert!(named.unusable().is_empty());
}

/// A text joins pair by pair: tokens without a bound on their length would let it join as often as it is long.
#[test]
fn tokens_that_join_too_often_are_refused() {
    let with = |n: usize| small("llama", &[(TOKENS, Some(vec!["a", "b", "c".repeat(n).as_str(), "<e>"].into()))]);
    assert!(with(512).is_ok());
    let error = with(513).unwrap_err();
    assert!(error.contains("token 2") && error.contains("513") && error.contains("512"), "{error}");
}

#[test]
fn poor_vocabularies_lose_only_what_they_cannot_say() {
    // There are no byte tokens: of this text, what has a token stays, and the rest is unknown where a token says so.
    for (model, expected) in [("gpt2", "abab"), ("llama", "<e><e><e>ab<e><e><e>ab")] {
        let poor = small(model, &[("tokenizer.ggml.unknown_token_id", Some(3u32.into()))]).unwrap();
        assert_eq!(poor.decode(&poor.encode("ab日ab", PLAIN)), expected, "{model}");
    }
    // Empty tokens are places that nothing is written to; there may be many.
    let holes =
        small("gpt2", &[(TOKENS, Some(vec!["", "", "", "<e>"].into())), (MERGES, Some(Vec::<&str>::new().into()))]);
    assert_eq!(holes.unwrap().encode("abc<e>", PARSED), [3]);
    // Infinite scores are in order, and a control token's never counts.
    let scores = vec![f32::NEG_INFINITY, 0.0, f32::INFINITY, f32::MAX];
    assert_eq!(small("llama", &[(SCORES, Some(scores.into()))]).unwrap().encode("ab", PLAIN).last(), Some(&2));
}

#[test]
fn a_longer_special_string_wins() {
    let cases: &[(&str, &[u32])] = &[
        ("<<<", &[0]),
        ("<<<<", &[0, 2]),
        ("<<", &[1]),
        ("a<b<a<", &[5, 2, 6, 3, 2]),
        ("<ab", &[3, 6]),
        ("<<ab", &[1, 5, 6]),
    ];
    let tokens = vec!["<<<", "<<", "<", "<a", "xy", "a", "b"];
    let specials = small(
        "gpt2",
        &[
            (TOKENS, Some(tokens.into())),
            (TYPES, Some(vec![4i32, 4, 4, 4, 4, 1, 1].into())),
            (MERGES, Some(Vec::<&str>::new().into())),
        ],
    )
    .unwrap();
    for (text, expected) in cases {
        assert_eq!(specials.encode(text, PLAIN), *expected, "{text:?}");
    }
}
