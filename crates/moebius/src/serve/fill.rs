//! Filling a gap: the text between a prefix and a suffix, for models whose vocabulary has marks for it.

use std::sync::Arc;

use engine::tokenizer::{Encode, Tokenizer};

use super::app::App;
use super::body::Prompt;
use super::error::ApiError;
use super::prompt::Ready;

/// Marks of a model that was trained to fill gaps, and those between the files of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    prefix: u32,
    suffix: u32,
    middle: u32,
    /// Of a repository's name, and of each file's: `None` where the vocabulary lacks them.
    repository: Option<(u32, u32)>,
}

/// Files that a client sends along.
pub struct File<'a> {
    pub name: &'a str,
    pub text: &'a str,
}

impl Marks {
    /// Returns the marks that a vocabulary has.
    ///
    /// # Errors
    /// A sentence for the client, where it has none.
    pub fn of(tokenizer: &Tokenizer) -> Result<Marks, ApiError> {
        let [prefix, suffix, middle, _, repository, file] = tokenizer.fill_in();
        let (Some(prefix), Some(suffix), Some(middle)) = (prefix, suffix, middle) else {
            return Err(ApiError::bad("this model has no fill-in-the-middle (FIM) tokens"));
        };
        let repository = repository.zip(file);
        Ok(Marks { prefix, suffix, middle, repository })
    }

    /// Returns the tokens after which the model writes what stands between `prefix` and `suffix`. Files stand before,
    /// in the order of Qwen2.5-Coder's report where the vocabulary has its marks.
    pub fn prompt(&self, tokenizer: &Tokenizer, files: &[File<'_>], prefix: &str, suffix: &str) -> Vec<u32> {
        let mut tokens: Vec<u32> = tokenizer.bos().filter(|_| tokenizer.add_bos()).into_iter().collect();
        // What people write is text, whatever it looks like.
        let plain = Encode { add_special: false, parse_special: false };
        let add = |tokens: &mut Vec<u32>, text: &str| tokenizer.encode_into(text, plain, tokens);
        if let Some((repository, separator)) = self.repository.filter(|_| !files.is_empty()) {
            tokens.push(repository);
            add(&mut tokens, "project\n");
            for file in files {
                tokens.push(separator);
                add(&mut tokens, &format!("{}\n{}\n", file.name, file.text));
            }
            tokens.push(separator);
            add(&mut tokens, "current\n");
        } else {
            for file in files {
                add(&mut tokens, &format!("{}\n{}\n\n", file.name, file.text));
            }
        }
        tokens.push(self.prefix);
        add(&mut tokens, prefix);
        tokens.push(self.suffix);
        add(&mut tokens, suffix);
        tokens.push(self.middle);
        tokens
    }
}

/// Returns the tokens of texts that stand before a gap.
pub async fn gaps(app: &Arc<App>, prompts: Vec<Prompt>, suffix: &str) -> Result<Vec<Ready>, ApiError> {
    let marks = Marks::of(&app.tokenizer)?;
    let text = |prompt| match prompt {
        Prompt::Text(text) => Ok(text),
        Prompt::Ids(_) | Prompt::Mixed(_) | Prompt::Shown(_) => {
            Err(ApiError::field("prompt", "must be text if there is a `suffix`"))
        }
    };
    let texts = prompts.into_iter().map(text).collect::<Result<Vec<_>, _>>()?;
    let (shared, suffix) = (app.clone(), suffix.to_string());
    let fill = move |text: &String| {
        shared.check_length(text)?;
        shared.check_length(&suffix)?;
        Ok(Ready::shown(marks.prompt(&shared.tokenizer, &[], text, &suffix), text.clone()))
    };
    let bytes = texts.iter().map(String::len).sum();
    app.common.heavy(bytes, move || texts.iter().map(fill).collect()).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns a vocabulary of single letters and these marks.
    fn tokenizer(marks: &[&str]) -> Tokenizer {
        let letters = ["a", "b", "c", "\u{10a}", "<", "|", ">", "f", "i", "m"];
        let vocab: serde_json::Map<_, _> = letters.iter().enumerate().map(|(i, l)| (l.to_string(), json!(i))).collect();
        let mark = |(i, text): (usize, &&str)| {
            json!({"id": letters.len() + i, "content": text, "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
        };
        let file = json!({
            "added_tokens": marks.iter().enumerate().map(mark).collect::<Vec<_>>(),
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true, "trim_offsets": true},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        });
        let files = vec![
            ("config.json", b"{}".to_vec()),
            ("model.safetensors", b"\x02\0\0\0\0\0\0\0{}".to_vec()),
            ("tokenizer.json", file.to_string().into_bytes()),
        ];
        Tokenizer::load(&checkpoint::from_files("here", files).unwrap()).unwrap()
    }

    #[test]
    fn a_gap_stands_between_its_marks() {
        let names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"];
        let plain = tokenizer(&names);
        let marks = Marks::of(&plain).unwrap();
        // Letters are 0 and up, marks 10 and up.
        assert_eq!(marks.prompt(&plain, &[], "ab", "c"), [10, 0, 1, 11, 2, 12]);
        // What looks like a mark in the text is text.
        assert!(!marks.prompt(&plain, &[], "<fim_prefix>", "").iter().skip(1).any(|&id| id == 10));
        let qwen = tokenizer(&["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]);
        let tokens = Marks::of(&qwen).unwrap().prompt(&qwen, &[File { name: "a", text: "b" }], "a", "c");
        let order: Vec<u32> = tokens.into_iter().filter(|&id| id >= 10).collect();
        assert_eq!(order, [13, 14, 14, 10, 11, 12]);
        assert!(Marks::of(&tokenizer(&names[..2])).is_err());
        // GLM's names.
        let glm = tokenizer(&["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"]);
        assert_eq!(Marks::of(&glm).unwrap().prompt(&glm, &[], "ab", "c"), [10, 0, 1, 11, 2, 12]);
    }
}
