//! A tokenizer as the `tokenizer.ggml` keys of a GGUF file, whatever it was read from, and the way back: those keys as
//! the `tokenizer.json` of a folder.
//!
//! GGUF names the way in which words are cut (`tokenizer.ggml.pre`) and holds no pattern. The name is found by trial:
//! texts in which the known ways differ are cut by each of them and by the tokenizer's own.

use checkpoint::{Metadata, Strings, Value};
use serde_json::json;

use super::bpe::{Bpe, Units};
use super::normalize::Step;
use super::pretokenize::{PreTokenizer, Whole};
use super::spm::Spm;
use super::vocab::Vocab;
use super::{Algorithm, Error, SPACE, TokenKind, Tokenizer};

/// Score of every token where merges say which pair joins first: what llama.cpp's converter writes.
const NO_SCORE: f32 = -1000.0;
/// The name of Gemma 4's way to cut words.
const GEMMA4: &str = "gemma4";

/// Texts in which all known ways of cutting differ: contractions in both cases, digits one by one and in threes, blanks
/// and line ends of all kinds, marks, scripts, punctuation in front of letters and in rows.
pub(super) const PROBES: &[&str] = &[
    "I've been 'told he's there, 'RE you sure? WE'LL see; I'M not, YOU'D know don't DON'T",
    "3 33 333 3333 33333 333333 3.3 3..3 3...3 ٣٣٣٣ 12ab34cd5678",
    "a\n \n\n \n\n\n \t \t\t \t\n  \n   \n    end  \r\n\r\n x\r\ry   \n",
    "нещо на Български កាន់តែពិសេសអាច e\u{301}e\u{301} नमस्ते \u{301}\u{301} cafe\u{301}s",
    "我想在apple工作1314151天～ ひらがなカタカナabc 한국어 한국 漢字かな混じり文",
    "------======= ''''''```````\"\"\"\"......!!!!!!?????? (normal) ✅ 🦙🦙 😶\u{200d}🌫️",
    "camelCase HTTPServer XMLHttpRequest getURLs x/y/z a//b/c\n// comment\n/* c */\n",
    "#define MAX(a,b) ((a)>(b)?(a):(b)) .method _under __dunder__ $var @at %d &amp; *p ^x ~y |z",
    "  two  spaces   three\u{a0}nbsp\u{3000}wide $5.00+£7=€12 ½ ² Ⅷ ①②③",
];

impl Tokenizer {
    /// Returns the `tokenizer.ggml` keys of this tokenizer with `n_vocab` tokens: those that the model has and the
    /// vocabulary has not are padding. `gemma4` says that a vocabulary of characters is Gemma 4's kind, which keeps its
    /// merges. `pre` names the way words are cut where it cannot be found.
    ///
    /// # Errors
    /// There are more than `n_vocab` tokens, or GGUF has no name for the way in which words are cut.
    pub fn to_gguf(&self, n_vocab: usize, gemma4: bool, pre: Option<&str>) -> Result<Vec<(String, Value)>, Error> {
        if self.n_vocab() > n_vocab {
            return Err(Error::Fewer { found: self.n_vocab(), n_vocab });
        }
        let bpe = match &self.algorithm {
            Algorithm::Bpe(bpe) => bpe,
            Algorithm::Spm(_) => return Err(Error::NoName { why: "it is of SentencePiece's kind already".into() }),
            Algorithm::WordPiece(_) | Algorithm::Unigram(_) => {
                return Err(Error::NoName { why: "WordPiece and Unigram are not written to GGUF".into() });
            }
        };
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let mut keys: Vec<(String, Value)> = Vec::new();
        let mut add = |name: &str, value: Value| keys.push((key(name), value));
        let is_bytes = bpe.units() == Units::Bytes;
        let texts = (0..n_vocab as u32).map(|id| self.written(id, is_bytes));
        let tokens: Strings = texts.collect();
        let kinds = (0..n_vocab as u32).map(|id| self.written_kind(id) as i32).collect::<Vec<_>>();
        match (is_bytes, gemma4) {
            (true, _) => {
                add("model", "gpt2".into());
                let found = pre.map_or_else(|| pre_name(bpe.pre(), self.add_bos()), |name| Ok(name.to_string()))?;
                add("pre", found.as_str().into());
            }
            (false, true) => add("model", "gemma4".into()),
            (false, false) => {
                add("model", "llama".into());
                add("pre", "default".into());
            }
        }
        add("tokens", tokens.into());
        if !is_bytes {
            let scores = if gemma4 { vec![NO_SCORE; n_vocab] } else { self.scores(bpe, n_vocab) };
            add("scores", scores.into());
        }
        add("token_type", kinds.into());
        if is_bytes || gemma4 {
            let side = |id: u32| self.vocab.text(id).unwrap_or_default();
            let merges = bpe.merges().map(|(left, right, _)| [side(left), b" ", side(right)].concat());
            add("merges", merges.collect::<Strings>().into());
        }
        let roles = [
            ("bos_token_id", self.bos()),
            ("eos_token_id", self.eos()),
            ("unknown_token_id", self.unknown()),
            ("padding_token_id", self.pad()),
            ("eot_token_id", self.eot()),
            ("eom_token_id", self.eom()),
        ];
        roles.into_iter().for_each(|(name, id)| id.into_iter().for_each(|id| add(name, id.into())));
        if !is_bytes {
            let adds = |step: &Step| match step {
                Step::Prepend(text) | Step::PrependFirst(text) | Step::PrependMissing(text) => text == SPACE,
                _ => false,
            };
            add("add_space_prefix", self.normalizer.0.iter().any(adds).into());
        }
        if self.bos().is_some() {
            add("add_bos_token", (self.add_bos() || gemma4).into());
        }
        if self.add_eos() {
            add("add_eos_token", true.into());
        }
        Ok(keys)
    }

    /// Returns a token's text as GGUF files have it.
    fn written(&self, id: u32, is_bytes: bool) -> Vec<u8> {
        let text = self.vocab.text(id).unwrap_or_default();
        match self.kind(id) {
            None | Some(TokenKind::Unused) if text.is_empty() => format!("[PAD{id}]").into_bytes(),
            // Strings that are looked for in a text are written as the text has them.
            Some(TokenKind::UserDefined) if !is_bytes => String::from_utf8_lossy(text).replace(SPACE, " ").into_bytes(),
            _ => text.to_vec(),
        }
    }

    fn written_kind(&self, id: u32) -> TokenKind {
        match self.kind(id) {
            None => TokenKind::Unused,
            // Some files call their control tokens ordinary added ones.
            Some(TokenKind::UserDefined) if looks_special(self.vocab.text(id).unwrap_or_default()) => {
                TokenKind::Control
            }
            Some(kind) => kind,
        }
    }

    /// Scores under which SentencePiece's rule, the best joined token first, joins what the merges join.
    fn scores(&self, bpe: &Bpe, n_vocab: usize) -> Vec<f32> {
        let mut scores = vec![0.0; n_vocab];
        let mut n_joined = 0;
        for (_, _, id) in bpe.merges() {
            let score = &mut scores[id as usize];
            if *score == 0.0 {
                n_joined += 1;
                *score = -(n_joined as f32);
            }
        }
        // Characters come behind all that is joined, as in SentencePiece's own files.
        for (id, score) in scores.iter_mut().enumerate() {
            if *score == 0.0 && self.kind(id as u32) == Some(TokenKind::Normal) {
                n_joined += 1;
                *score = -(n_joined as f32);
            }
        }
        scores
    }
}

/// What a folder says of a GGUF file's tokenizer.
pub struct FolderTexts {
    /// `tokenizer.json`.
    pub tokenizer: serde_json::Value,
    /// `tokenizer_config.json`.
    pub config: serde_json::Map<String, serde_json::Value>,
    /// Tokens that end an answer, which other files list: the file's EOS first, if it is one of them.
    pub ends: Vec<u32>,
}

/// Returns the texts of a GGUF file's tokenizer.
///
/// # Errors
/// The file has no tokenizer, or one that cannot be used; or one whose tokens do not cover all bytes.
pub fn folder_texts(meta: &Metadata) -> Result<FolderTexts, Error> {
    let tokenizer = Tokenizer::from_metadata(meta)?;
    let text = |id: u32| String::from_utf8_lossy(tokenizer.vocab.text(id).unwrap_or_default()).into_owned();
    let is_bytes = matches!(&tokenizer.algorithm, Algorithm::Bpe(bpe) if bpe.units() == Units::Bytes);
    if !is_bytes && (0..=255).any(|byte| tokenizer.vocab.byte_token(byte).is_none()) {
        return Err(Error::NoName { why: "it has no tokens for bytes, and tokenizer.json no other form".into() });
    }
    let is_added = |id: &u32| match tokenizer.kind(*id) {
        Some(TokenKind::Control | TokenKind::UserDefined) => true,
        Some(TokenKind::Unknown) => !is_bytes,
        _ => false,
    };
    let is_padding = |id: &u32| tokenizer.kind(*id) == Some(TokenKind::Unused);
    let ids = 0..tokenizer.n_vocab() as u32;
    let added = ids.clone().filter(is_added).map(|id| {
        json!({
            "id": id, "content": text(id), "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": tokenizer.kind(id) != Some(TokenKind::UserDefined),
        })
    });
    // Readers number the added tokens that the model's vocabulary lacks anew.
    let vocab: serde_json::Map<_, _> =
        ids.clone().filter(|id| !is_padding(id)).map(|id| (text(id), json!(id))).collect();
    let in_model = |id: &u32| !is_added(id) && !is_padding(id);
    let ordered = match &tokenizer.algorithm {
        Algorithm::Bpe(bpe) => bpe.merges().map(|(left, right, _)| (left, right)).collect(),
        Algorithm::Spm(spm) => joins(&tokenizer.vocab, spm, &in_model),
        Algorithm::WordPiece(_) | Algorithm::Unigram(_) => {
            return Err(Error::NoName { why: "it is no BPE, and stays as it is".into() });
        }
    };
    let merges: Vec<_> = ordered.into_iter().map(|(left, right)| json!([text(left), text(right)])).collect();
    let unknown = tokenizer.unknown().filter(|_| !is_bytes).map(text);
    let whole = matches!(&tokenizer.algorithm, Algorithm::Bpe(bpe) if bpe.pre().whole == Whole::Any);
    let Steps { normalizer, pre_tokenizer, post_processor, decoder } = Steps::of(&tokenizer, meta, is_bytes)?;
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": template(&tokenizer, &text).unwrap_or(post_processor),
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": !is_bytes, "byte_fallback": !is_bytes, "ignore_merges": whole,
            "vocab": vocab, "merges": merges,
        },
    });
    let mut config = serde_json::Map::new();
    config.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
    config.insert("add_bos_token".into(), json!(tokenizer.add_bos()));
    config.insert("clean_up_tokenization_spaces".into(), json!(false));
    let roles = [
        ("bos_token", tokenizer.bos()),
        ("eos_token", tokenizer.eos()),
        ("pad_token", tokenizer.pad()),
        ("unk_token", tokenizer.unknown()),
    ];
    for (name, id) in roles {
        config.insert(name.into(), id.map_or(serde_json::Value::Null, |id| json!(text(id))));
    }
    let mut ends = tokenizer.ends_of_generation().to_vec();
    ends.sort_by_key(|&id| (Some(id) != tokenizer.eos(), id));
    Ok(FolderTexts { tokenizer: file, config, ends })
}

/// The steps of a `tokenizer.json` around its model.
struct Steps {
    normalizer: serde_json::Value,
    pre_tokenizer: serde_json::Value,
    /// Where nothing is put around texts.
    post_processor: serde_json::Value,
    decoder: serde_json::Value,
}

impl Steps {
    fn of(tokenizer: &Tokenizer, meta: &Metadata, is_bytes: bool) -> Result<Steps, Error> {
        let split = |pattern: String| {
            let pattern = json!({"Regex": pattern});
            json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false})
        };
        if is_bytes {
            let pre = meta.opt_str("tokenizer.ggml.pre")?.unwrap_or("default");
            let mut cuts: Vec<serde_json::Value> = PreTokenizer::patterns(pre)?.into_iter().map(split).collect();
            cuts.push(
                json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
            );
            let byte_level =
                json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
            return Ok(Steps {
                normalizer: serde_json::Value::Null,
                pre_tokenizer: json!({"type": "Sequence", "pretokenizers": cuts}),
                post_processor: byte_level.clone(),
                decoder: byte_level,
            });
        }
        let prefix = tokenizer.add_space_prefix();
        let prepend = prefix.then(|| json!({"type": "Prepend", "prepend": SPACE}));
        let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        let changes: Vec<_> = prepend.into_iter().chain([spaces]).collect();
        let cuts: Vec<_> = match &tokenizer.algorithm {
            Algorithm::Spm(_) | Algorithm::WordPiece(_) | Algorithm::Unigram(_) => Vec::new(),
            Algorithm::Bpe(_) => PreTokenizer::patterns(GEMMA4)?.into_iter().map(split).collect(),
        };
        let mut shown = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        shown.extend(prefix.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})));
        Ok(Steps {
            normalizer: json!({"type": "Sequence", "normalizers": changes}),
            pre_tokenizer: match cuts.is_empty() {
                true => serde_json::Value::Null,
                false => json!({"type": "Sequence", "pretokenizers": cuts}),
            },
            post_processor: serde_json::Value::Null,
            decoder: json!({"type": "Sequence", "decoders": shown}),
        })
    }
}

/// Returns what is put around texts, where something is.
fn template(tokenizer: &Tokenizer, text: &dyn Fn(u32) -> String) -> Option<serde_json::Value> {
    let special = |id: u32| json!({"SpecialToken": {"id": text(id), "type_id": 0}});
    let around: Vec<u32> = tokenizer.before.iter().chain(&tokenizer.after).copied().collect();
    let mut single: Vec<_> = tokenizer.before.iter().map(|&id| special(id)).collect();
    single.push(json!({"Sequence": {"id": "A", "type_id": 0}}));
    single.extend(tokenizer.after.iter().map(|&id| special(id)));
    let specials: serde_json::Map<_, _> =
        around.iter().map(|&id| (text(id), json!({"id": text(id), "ids": [id], "tokens": [text(id)]}))).collect();
    (!around.is_empty()).then(|| {
        json!({
            "type": "TemplateProcessing", "single": single,
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": specials,
        })
    })
}

/// Returns the merges that SentencePiece's rule comes to: every way in which two tokens are a third, the best third
/// first.
fn joins(vocab: &Vocab, spm: &Spm, is_model: &dyn Fn(&u32) -> bool) -> Vec<(u32, u32)> {
    let mut found = Vec::new();
    for whole in (0..vocab.len() as u32).filter(is_model) {
        let Some(text) = vocab.text(whole).and_then(|text| std::str::from_utf8(text).ok()) else { continue };
        let Some(order) = spm.order(whole) else { continue };
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            let side = |text: &str| vocab.id(text.as_bytes()).filter(|id| is_model(id) && spm.order(*id).is_some());
            if let (Some(left), Some(right)) = (side(left), side(right)) {
                found.push((order, whole, left, right));
            }
        }
    }
    found.sort_unstable();
    found.into_iter().map(|(.., left, right)| (left, right)).collect()
}

/// Returns whether a token's name is that of a control token, by the rule of llama.cpp's converter.
fn looks_special(text: &[u8]) -> bool {
    let around = |before: &str, after: &str| text.starts_with(before.as_bytes()) && text.ends_with(after.as_bytes());
    matches!(text, b"<pad>" | b"<mask>" | b"<2mass>" | b"[@BOS@]")
        || around("<|", "|>")
        || around("<｜", "｜>")
        || around("<unused", ">")
}

/// GGUF's name of a way to cut words.
fn pre_name(own: &PreTokenizer, add_bos: bool) -> Result<String, Error> {
    let words = |pre: &PreTokenizer| {
        let mut words = Vec::new();
        PROBES.iter().for_each(|probe| {
            pre.split(probe, &mut |word| words.push(word.to_string()));
            words.push("\0".into());
        });
        words
    };
    let wanted = words(own);
    let mut best = None;
    for name in PreTokenizer::names() {
        let other = PreTokenizer::new(name)?;
        if words(&other) == wanted {
            let rank = (other.whole == own.whole, other.add_bos == add_bos);
            if best.as_ref().is_none_or(|(of, _)| rank > *of) {
                best = Some((rank, name));
            }
        }
    }
    match best {
        Some(((true, _), name)) => Ok(name.into()),
        Some((_, name)) => Err(Error::NoName {
            why: format!("its words are those of {name}, but it differs in which words it takes whole"),
        }),
        None => Err(Error::NoName { why: "GGUF has no name for the way in which it cuts words".into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_tell_all_ways_apart() {
        for name in PreTokenizer::names() {
            let pre = PreTokenizer::new(name).expect("a known name");
            assert_eq!(pre_name(&pre, pre.add_bos).expect("a name"), name);
        }
    }
}
