//! A tokenizer out of a model file's metadata: every array against the number of tokens, every id against the
//! vocabulary, and the well-known names that say what files leave out.

use std::cell::RefCell;

use checkpoint::{Metadata, Strings, Value};

use super::bpe::{Bpe, Uncovered, Units, char_byte, two_sides};
use super::charsmap::Charsmap;
use super::normalize::{Normalizer, Step};
use super::pretokenize::{Behavior, PreTokenizer, Split, Whole};
use super::special::Specials;
use super::spm::Spm;
use super::unigram::{self, Unigram};
use super::vocab::{TokenKind, Vocab, show};
use super::wordpiece::{Cleaner, MAX_CHARS, WordPiece};
use super::{Algorithm, Error, Roles, SPACE, Tokenizer, normalize, roles};

/// Both a `tokenizer.ggml.model` and a `tokenizer.ggml.pre`.
const GEMMA4: &str = "gemma4";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";

/// The families of vocabularies that are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Model {
    ByteLevel,
    Gemma4,
    SentencePiece,
    WordPiece,
    Unigram,
}

/// How the texts of a vocabulary stand for bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Writing {
    /// A character for each byte, as GPT-2 has it.
    Bytes,
    /// As they are, but for `▁`, which is a space.
    Spaces,
    /// As they are.
    Plain,
    /// A space before all but those that begin with `##`, which is left out.
    Pieces,
}

impl Tokenizer {
    /// Reads the `tokenizer.ggml` keys of a model file.
    ///
    /// # Errors
    /// A key that is missing or of another type, a model or pre-tokenizer that is not known, arrays of different
    /// lengths, tokens that stand twice, merges of what is no token, scores that are not numbers. Each names the thing.
    pub fn from_metadata(meta: &Metadata) -> Result<Self, Error> {
        // Files from before the key existed are cut in the way that llama.cpp falls back to.
        let pre = meta.opt_str("tokenizer.ggml.pre")?.unwrap_or("default");
        let model = match meta.str("tokenizer.ggml.model")? {
            "gpt2" if pre == GEMMA4 => Model::Gemma4,
            "gpt2" => Model::ByteLevel,
            GEMMA4 => Model::Gemma4,
            "llama" => Model::SentencePiece,
            "bert" => Model::WordPiece,
            "t5" => Model::Unigram,
            other => return Err(Error::Model { found: other.into() }),
        };
        let tokens: Vec<&[u8]> = meta.strings("tokenizer.ggml.tokens")?.iter().collect();
        let n_vocab = tokens.len();
        let most = i32::MAX as usize;
        if n_vocab == 0 || n_vocab > most {
            return Err(Error::NoTokens { n_vocab, most });
        }
        let kinds = kinds(meta, n_vocab)?;
        let writing = if model == Model::ByteLevel { Writing::Bytes } else { Writing::Spaces };
        let mut vocab = Vocab::new(&tokens, kinds, |id, text, kind, out| piece(writing, id, text, kind, out))?;
        let roles = roles(meta, model, &mut vocab)?;

        let (algorithm, bos_by_default) = match model {
            Model::SentencePiece => {
                let scores = meta.f32s("tokenizer.ggml.scores")?;
                same_count("tokenizer.ggml.scores", scores.len(), n_vocab)?;
                (Algorithm::Spm(Spm::new(&vocab, &scores, roles.unknown)?), true)
            }
            Model::Unigram => {
                let scores = meta.f32s("tokenizer.ggml.scores")?;
                same_count("tokenizer.ggml.scores", scores.len(), n_vocab)?;
                let unknown = roles.unknown.ok_or(Error::MissingId { flag: "tokenizer.ggml.model", key: UNKNOWN })?;
                let split = Split::of_text(SPACE, Behavior::MergedWithNext, false);
                let split = split.map_err(|what| Error::Charsmap { what })?;
                let scores = unigram::scores_of(&vocab, scores.into_iter().map(f64::from))?;
                let pre = PreTokenizer::of(vec![split], Whole::No);
                (Algorithm::Unigram(Unigram::new(&vocab, pre, scores, unknown)?), false)
            }
            Model::WordPiece => {
                let unknown = roles.unknown.ok_or(Error::MissingId { flag: "tokenizer.ggml.model", key: UNKNOWN })?;
                // Converters write `▁` before what begins a word, and leave `##` out.
                (Algorithm::WordPiece(WordPiece::new([SPACE, ""], unknown, MAX_CHARS)), true)
            }
            Model::ByteLevel | Model::Gemma4 => {
                let merges = merges(meta.strings("tokenizer.ggml.merges")?)?;
                let units = if model == Model::Gemma4 { Units::Chars } else { Units::Bytes };
                let pre = PreTokenizer::new(if model == Model::Gemma4 { GEMMA4 } else { pre })?;
                let add_bos = pre.add_bos;
                (Algorithm::Bpe(Bpe::new(&vocab, units, pre, &merges, Uncovered::default())?), add_bos)
            }
        };
        // Gemma 4 speaks nonsense without its BOS, and there are files that say to leave it out.
        let says_bos = if model == Model::Gemma4 { Some(true) } else { meta.opt_bool(ADD_BOS)? };
        let is_encoder = matches!(model, Model::WordPiece | Model::Unigram);
        let says_eos = meta.opt_bool(ADD_EOS)?.or(is_encoder.then_some(true));
        for (says, id, flag, key) in [(says_bos, roles.bos, ADD_BOS, BOS), (says_eos, roles.eos, ADD_EOS, EOS)] {
            if says == Some(true) && id.is_none() && meta.get(key).is_none() {
                return Err(Error::MissingId { flag, key });
            }
        }
        let space_prefix = meta.opt_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let strips_right = strips_right(meta)?;
        let add_space_prefix = space_prefix && model == Model::SentencePiece;
        let spaces = || Step::ReplaceText(" ".into(), SPACE.into());
        Ok(Self {
            specials: Specials::new(&vocab, also_special(&vocab), strips_right)?,
            before: roles.bos.filter(|_| says_bos.unwrap_or(bos_by_default)).into_iter().collect(),
            after: roles.eos.filter(|_| says_eos.unwrap_or(false)).into_iter().collect(),
            normalizer: Normalizer(match model {
                Model::Gemma4 => vec![spaces()],
                // Files do not say; all models in use are of this kind, and llama.cpp knows no other.
                Model::WordPiece => vec![Step::Clean(Box::new(Cleaner::new(true, true, true, true)))],
                Model::Unigram => charsmap(meta)?.into_iter().chain([Step::Words(SPACE.into())]).collect(),
                Model::ByteLevel | Model::SentencePiece => Vec::new(),
            }),
            pair: roles.bos.zip(roles.eos).filter(|_| is_encoder).map(|(cls, sep)| {
                // RoBERTa has two marks between the texts.
                [vec![cls], vec![sep; if model == Model::Unigram { 2 } else { 1 }], vec![sep]]
            }),
            normalized: None,
            add_space_prefix,
            strips_space: add_space_prefix || is_encoder,
            vocab,
            algorithm,
            roles,
        })
    }
}

/// Left and right sides.
fn merges(texts: &Strings) -> Result<Vec<(&[u8], &[u8])>, Error> {
    let sides = texts.iter().enumerate().map(|(rank, merge)| {
        let bad = || Error::Merge { rank, merge: show(merge), why: "has no two sides".into() };
        two_sides(merge).ok_or_else(bad)
    });
    sides.collect()
}

/// SentencePiece's table of what characters become, where the file has one.
fn charsmap(meta: &Metadata) -> Result<Option<Step>, Error> {
    const KEY: &str = "tokenizer.ggml.precompiled_charsmap";
    if meta.get(KEY).is_none() {
        return Ok(None);
    }
    let bytes: Option<Vec<u8>> = meta.u32s(KEY)?.into_iter().map(|byte| u8::try_from(byte).ok()).collect();
    let map = bytes.ok_or_else(|| "it is no list of bytes".to_string()).and_then(|bytes| Charsmap::new(&bytes));
    let step = map.map(|map| Step::Map(Box::new(map)));
    let step = step.and_then(|step| normalize::check(std::iter::once(&step)).map(|()| step));
    step.map(Some).map_err(|what| Error::Charsmap { what })
}

fn same_count(key: &'static str, found: usize, n_vocab: usize) -> Result<(), Error> {
    if found == n_vocab { Ok(()) } else { Err(Error::Count { key, found, n_vocab }) }
}

fn kinds(meta: &Metadata, n_vocab: usize) -> Result<Vec<TokenKind>, Error> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let Some(ids) = meta.opt_i32s(KEY)? else { return Ok(vec![TokenKind::Normal; n_vocab]) };
    same_count(KEY, ids.len(), n_vocab)?;
    let kind = |(id, &found): (usize, &i32)| TokenKind::from_id(found).ok_or(Error::Kind { id: id as u32, found });
    ids.iter().enumerate().map(kind).collect()
}

/// Appends the bytes that a token stands for.
pub fn piece(writing: Writing, id: u32, text: &[u8], kind: TokenKind, out: &mut Vec<u8>) -> Result<(), Error> {
    match (kind, writing) {
        (TokenKind::Byte, _) => {
            let byte = text.strip_prefix(b"<0x").and_then(|rest| rest.strip_suffix(b">")).filter(|hex| hex.len() == 2);
            // `from_str_radix` takes a sign, which two hexadecimal digits do not have.
            let digits =
                byte.filter(|hex| hex.iter().all(u8::is_ascii_hexdigit)).and_then(|hex| str::from_utf8(hex).ok());
            let byte = digits.and_then(|hex| u8::from_str_radix(hex, 16).ok());
            out.push(byte.ok_or_else(|| Error::ByteToken { id, token: show(text) })?);
        }
        (TokenKind::Control | TokenKind::Unknown, _)
        | (TokenKind::UserDefined, Writing::Bytes)
        | (_, Writing::Plain) => {
            out.extend_from_slice(text);
        }
        (_, Writing::Pieces) => match text.strip_prefix(b"##") {
            Some(rest) => out.extend_from_slice(rest),
            None => {
                out.push(b' ');
                out.extend_from_slice(text);
            }
        },
        (_, Writing::Bytes) => {
            let start = out.len();
            // A text with a character that stands for no byte is an added token's and stands for itself.
            let bytes = str::from_utf8(text).ok().and_then(|text| {
                text.chars().map(char_byte).try_for_each(|byte| {
                    out.push(byte?);
                    Some(())
                })
            });
            if bytes.is_none() {
                out.truncate(start);
                out.extend_from_slice(text);
            }
        }
        (_, Writing::Spaces) => {
            let mut rest = text;
            while let Some((&byte, tail)) = rest.split_first() {
                if let Some(tail) = rest.strip_prefix(SPACE.as_bytes()) {
                    out.push(b' ');
                    rest = tail;
                } else {
                    out.push(byte);
                    rest = tail;
                }
            }
        }
    }
    Ok(())
}

/// Returns the roles the file gives, then those that well-known names give.
fn roles(meta: &Metadata, model: Model, vocab: &mut Vocab) -> Result<Roles, Error> {
    let n_vocab = vocab.len();
    let unusable = RefCell::new(Vec::new());
    // Converters write -1, as a number of 32 bits too, where a model has no such token.
    let role = |key: &'static str| match meta.get(key).and_then(Value::to_int) {
        Some(id) if !(0..n_vocab as i128).contains(&id) => {
            unusable.borrow_mut().push(format!("ignoring {key} {id}: the vocabulary has {n_vocab} tokens"));
            Ok(None)
        }
        _ => Ok(meta.opt_u32(key)?),
    };
    // The first SentencePiece files named no roles and all had these.
    let or_usual = |id: Option<u32>, usual: u32| {
        id.or_else(|| (model == Model::SentencePiece && (usual as usize) < n_vocab).then_some(usual))
    };
    let is_bert = model == Model::WordPiece;
    let named = |name: &str| vocab.id(name.as_bytes()).filter(|_| is_bert);
    // What begins and ends a text of BERT has separate names and keys; the second is spelled so by llama.cpp.
    let cls = role("tokenizer.ggml.cls_token_id")?.filter(|_| is_bert).or_else(|| named("[CLS]"));
    let sep = role("tokenizer.ggml.seperator_token_id")?.filter(|_| is_bert).or_else(|| named("[SEP]"));
    let mut roles = Roles {
        bos: cls.or(or_usual(role(BOS)?, 1)),
        eos: sep.or(or_usual(role(EOS)?, 2)),
        unknown: or_usual(role(UNKNOWN)?, 0).or_else(|| named("[UNK]")),
        eot: role("tokenizer.ggml.eot_token_id")?,
        eom: role("tokenizer.ggml.eom_token_id")?,
        pad: role("tokenizer.ggml.padding_token_id")?,
        ..Roles::default()
    };
    roles::complete(&mut roles, vocab, role)?;
    roles.unusable = unusable.into_inner();
    Ok(roles)
}

/// `</s>` is taken for the token in a template's text, even where the file calls it a piece of text; but not in the two
/// families whose tokenizers are known to do otherwise.
fn also_special(vocab: &Vocab) -> Option<u32> {
    let otherwise = ["<|tool_response>", "<|plamo:eos|>"].iter().any(|name| vocab.id(name.as_bytes()).is_some());
    vocab.id(b"</s>").filter(|_| !otherwise)
}

/// Returns which special tokens swallow the blanks after them. Files do not say; Phi-3's do.
fn strips_right(meta: &Metadata) -> Result<impl Fn(&[u8]) -> bool + use<>, Error> {
    // A name in another encoding than UTF-8 is none of theirs.
    let name = meta.opt_str("general.name").ok().flatten().unwrap_or_default().to_lowercase();
    let phi3 = name.contains("phi-3") || name.contains("phi3");
    Ok(move |text: &[u8]| phi3 && !matches!(text, b"<unk>" | b"<s>" | b"<|endoftext|>"))
}
