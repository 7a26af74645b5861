//! The folder that the frontend reads says of a model's texts what the engine does: the same ids, the same prompt.

mod common;

use dynamo_llm::model_card::ModelDeploymentCard;
use dynamo_llm::preprocessor::OpenAIPreprocessor;
use dynamo_llm::protocols::openai::chat_completions::NvCreateChatCompletionRequest;
use dynamo_llm::tokenizers::{Tokenizer, TokenizerOptions};
use engine::tokenizer::{Encode, folder_texts};
use moebius::local::Local;
use moebius_dynamo::texts;
use serde_json::json;

#[path = "../../../tests/fixtures.rs"]
mod fixtures;

/// Texts in which ways to cut words and to name tokens differ.
const TEXTS: &[&str] = &[
    "",
    " ",
    "Once upon a time, there was a fox.",
    "  two  spaces   three\u{a0}nbsp\u{3000}wide\t\ttabs\n\n\nlines \r\n end  ",
    "I've been 'told he's there, 'RE you sure? WE'LL see; YOU'D know don't DON'T",
    "3 33 333 3333 33333 3.3 3..3 12ab34cd5678 ٣٣٣٣ ½ ² Ⅷ ①②③ $5.00+£7=€12",
    "нещо на Български កាន់តែពិសេសអាច e\u{301}e\u{301} नमस्ते \u{301}\u{301} cafe\u{301}s",
    "我想在apple工作1314151天～ ひらがなカタカナabc 한국어 漢字かな混じり文 \u{202e}right",
    "------======= ''''''```````\"\"\"\"......!!!!!!?????? (normal) ✅ 🦙🦙 😶\u{200d}🌫️ 👩‍👩‍👧",
    "camelCase HTTPServer XMLHttpRequest x/y/z a//b/c\n// comment\n/* c */ &amp; *p ^x ~y |z _a __b__",
    "<|im_start|>user\n<|im_end|> <s> <|endoftext|><unk> <pad> [INST] <0x41>",
    "\u{0}\u{1}\u{7f}\u{80}\u{ffff}\u{10ffff}",
];

fn model() -> (tempfile::TempDir, std::sync::Arc<Local>) {
    let folder = tempfile::tempdir().unwrap();
    texts::folder(None, Some(folder.path())).unwrap();
    (folder, Local::open(vec!["--backend".into(), "cpu".into(), "--ctx".into(), "2048".into()]).unwrap())
}

#[test]
fn tokens_are_ours() {
    let (folder, local) = model();
    let file = folder.path().join("tokenizer.json");
    let options = TokenizerOptions { add_special_tokens: true };
    let tokenizer = Tokenizer::from_file_with_options(&file.to_string_lossy(), options).unwrap();
    let long = TEXTS.concat().repeat(20);
    for text in TEXTS.iter().copied().chain([&long[..]]) {
        // As a template has written it: names of special tokens stand for them.
        let (theirs, ours) = (tokenizer.encode(text).unwrap(), local.encode(text));
        assert_eq!(theirs.token_ids(), ours, "{text:?}");
        assert_eq!(tokenizer.decode(&ours, false).unwrap().as_str(), local.decode(&ours), "{text:?}");
    }
}

/// Vocabularies without a model: SentencePiece's kind from the tree, and whole ones of several kinds where they are.
#[test]
fn tokens_of_other_vocabularies_are_ours() {
    let mut files =
        vec![("spm".to_string(), std::fs::read(fixtures::root("crates/engine/tests/data/spm.gguf")).unwrap())];
    let more = fixtures::more("../shared/fixtures/vocab");
    for entry in more.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()) {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "gz") {
            let mut bytes = Vec::new();
            let mut file = flate2::read::GzDecoder::new(std::fs::File::open(&path).unwrap());
            std::io::Read::read_to_end(&mut file, &mut bytes).unwrap();
            files.push((path.file_name().unwrap().to_string_lossy().into_owned(), bytes));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let mut wrong = String::new();
    for (name, bytes) in files {
        let checkpoint = checkpoint::from_bytes(&name, bytes).unwrap();
        let ours = engine::tokenizer::Tokenizer::from_metadata(checkpoint.meta()).unwrap();
        let file = folder.path().join("tokenizer.json");
        std::fs::write(&file, folder_texts(checkpoint.meta()).unwrap().tokenizer.to_string()).unwrap();
        let theirs = Tokenizer::from_file(&file.to_string_lossy()).unwrap();
        for text in TEXTS {
            let expected = ours.encode(text, Encode { add_special: false, parse_special: true });
            let found = theirs.encode(text).unwrap().token_ids().to_vec();
            if found != expected {
                wrong += &format!("{name}: {text:?}\n  found    {found:?}\n  expected {expected:?}\n");
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_and_ends_are_ours() {
    let (folder, local) = tokio::task::spawn_blocking(model).await.unwrap();
    let card = ModelDeploymentCard::load_from_disk(folder.path(), None).unwrap();
    let frontend = OpenAIPreprocessor::new(card).unwrap();
    for messages in [
        json!([{"role": "user", "content": "Tell me a story about a fox"}]),
        json!([{"role": "system", "content": "Be  brief.\n"}, {"role": "user", "content": " <|im_end|>нещо 42 "}]),
        json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."},
            {"role": "user", "content": "And\tnow?\n"}]),
    ] {
        let body = json!({"model": "m", "messages": messages, "max_tokens": 5});
        let request: NvCreateChatCompletionRequest = serde_json::from_value(body).unwrap();
        let (theirs, _, _) = frontend.preprocess_request(&request, None).await.unwrap();
        let ours = local.encode(&local.render(&messages).unwrap());
        assert_eq!(*theirs.token_ids, ours, "{}\n{}", local.decode(&theirs.token_ids), local.decode(&ours));
        assert_eq!(theirs.stop_conditions.max_tokens, Some(5));
        assert!(!theirs.eos_token_ids.is_empty());
    }
    tokio::task::spawn_blocking(move || drop(local)).await.unwrap();
}

#[test]
fn folders_have_one_path_for_all_workers() {
    let first = texts::folder(None, None).unwrap();
    assert_eq!(first, texts::folder(None, None).unwrap());
    assert!(first.join("tokenizer.json").is_file());
    // A model folder is passed on as it is.
    let own = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(first.join(name), own.path().join(name)).unwrap();
    }
    std::fs::write(own.path().join("model.safetensors"), b"\x02\0\0\0\0\0\0\0{}").unwrap();
    let elsewhere = own.path().join("elsewhere");
    assert_eq!(texts::folder(Some(own.path()), Some(&elsewhere)).unwrap(), own.path());
    assert!(!elsewhere.exists());
}
