//! A tokenizer out of the `tokenizer.json` of a model folder: every token against the others, every id against the
//! vocabulary, every step against those that are known. BPE models are read, on bytes (GPT-2, Qwen, Llama 3, DeepSeek,
//! GLM, gpt-oss) and on characters (Llama 2, Mistral, Gemma), WordPiece models
//! (BERT), and Unigram models (XLM-RoBERTa).

mod file;
mod steps;

use std::collections::HashMap;

use checkpoint::{Checkpoint, Metadata, SideFile};

use super::bpe::{Bpe, Uncovered, Units};
use super::load::{Writing, piece};
use super::normalize::Normalizer;
use super::pretokenize::{PreTokenizer, Whole};
use super::special::{Special, Specials};
use super::unigram::{self, Unigram};
use super::vocab::{TokenKind, Vocab, show};
use super::wordpiece::{MAX_CHARS, MAX_MAX_CHARS, WordPiece};
use super::{Algorithm, Error, Roles, Tokenizer, bad, normalize, roles, sentencepiece_keys, tiktoken};
use crate::folder;
use file::{Added, File, Model, Text};
use steps::{Around, Cuts, Shown};

const TOKENIZER: &str = "tokenizer.json";
const TIKTOKEN: &str = "tiktoken.model";
/// Largest `tokenizer.json`, in bytes; Gemma's has 33 MB.
const MAX_BYTES: usize = 128 << 20;
/// Ids may have gaps, but there may not be many more ids than tokens.
const MAX_GAPS: usize = 1 << 16;

/// Reads the tokenizer of a folder.
pub fn load(checkpoint: &Checkpoint) -> Result<Tokenizer, Error> {
    let tokens = folder::tokens(checkpoint)?;
    let (file, read): (_, fn(&SideFile, &folder::Tokens) -> Result<Tokenizer, Error>) =
        match (checkpoint.side_file(TOKENIZER)?, checkpoint.side_file(TIKTOKEN)?) {
            (Some(file), _) => (file, read),
            (None, Some(file)) => (file, tiktoken::read),
            (None, None) => {
                let keys = sentencepiece_keys(checkpoint, None)?;
                let keys = keys.ok_or_else(|| Error::NoFile { folder: checkpoint.name().into() })?;
                return Tokenizer::from_metadata(&Metadata::new(checkpoint.name(), keys)?);
            }
        };
    read(&file, &tokens).map_err(|error| match error {
        // Said by code that GGUF's keys share.
        Error::Duplicate { token, first, second } => {
            bad(&file, format!("{token} is both token {first} and token {second}"))
        }
        Error::Merge { rank, merge, why } => bad(&file, format!("merge {rank}, {merge}, {why}")),
        Error::TooLong => bad(&file, "the tokens are longer than 4 GiB together"),
        other => other,
    })
}

fn read(file: &SideFile, tokens: &folder::Tokens) -> Result<Tokenizer, Error> {
    let text = file.text();
    if text.len() > MAX_BYTES {
        return Err(bad(file, format!("it is {} bytes long, at most {MAX_BYTES} are allowed", text.len())));
    }
    let json: File = serde_json::from_str(text).map_err(|error| bad(file, error.to_string()))?;
    let step = |what: String| bad(file, what);
    let normalizer = steps::normalizer(&json.normalizer.0).map_err(step)?;
    let Cuts { changes, splits, byte_level, bert, .. } = steps::pre_tokenizer(&json.pre_tokenizer.0).map_err(step)?;
    normalize::check(normalizer.iter().chain(&changes)).map_err(step)?;
    let around = steps::post_processor(&json.post_processor.0).map_err(step)?;
    let shown = steps::decoder(&json.decoder.0).map_err(step)?;

    let added = json.added_tokens.unwrap_or_default();
    let is_pieces = json.model.kind.as_ref().is_some_and(|kind| kind.0 == "WordPiece");
    if is_pieces != bert {
        let has = if bert { "BertPreTokenizer" } else { "no BertPreTokenizer" };
        return Err(bad(file, format!("it has {has}, which WordPiece models need and no others have")));
    }
    let list = tokens_of(file, &json.model, is_pieces)?;
    let by_id = by_id(file, list, &added)?;
    let byte_fallback = json.model.byte_fallback == Some(true);
    let kinds = kinds(&by_id, &added, &json.model, byte_fallback);
    let writing = match () {
        () if byte_level || shown.byte_level => Writing::Bytes,
        () if shown.spaces => Writing::Spaces,
        () if shown.pieces => Writing::Pieces,
        () => Writing::Plain,
    };
    // A token that is looked for behind the normalizer is looked for, and shown, as the normalizer writes it.
    let normalizer = Normalizer(normalizer);
    let (marked, normalized): (Vec<&Added>, Vec<&Added>) =
        added.iter().partition(|a| normalizer.0.is_empty() || !a.normalized.unwrap_or(!a.special));
    let rewritten: HashMap<u32, String> =
        normalized.iter().map(|a| (a.id, normalizer.apply(&a.content.0, false).into())).collect();
    let texts: Vec<&[u8]> = by_id.iter().map(|text| text.unwrap_or_default().as_bytes()).collect();
    let mut vocab = Vocab::new(&texts, kinds, |id, text, kind, out| {
        let text = rewritten.get(&id).map_or(text, |text| text.as_bytes());
        piece(writing, id, text, kind, out)
    })?;
    let roles = roles::of_folder(tokens, &mut vocab)?;

    let whole = if json.model.ignore_merges == Some(true) { Whole::Any } else { Whole::No };
    let units = if byte_level { Units::Bytes } else { Units::Chars };
    let unknown = unknown(file, &json.model, &vocab)?;
    let uncovered = Uncovered { unknown, fused: json.model.fuse_unk == Some(true), no_bytes: !byte_fallback };
    let merges = json.model.merges.as_deref().unwrap_or_default();
    let merges: Vec<(&[u8], &[u8])> = merges.iter().map(|m| (m.0.0.as_bytes(), m.1.0.as_bytes())).collect();
    let algorithm = match is_pieces {
        true => Algorithm::WordPiece(word_piece(file, &json.model, unknown)?),
        false if json.model.vocab.scores.is_some() => {
            Algorithm::Unigram(unigram(file, &json.model, &vocab, PreTokenizer::of(splits, whole))?)
        }
        false => Algorithm::Bpe(Bpe::new(&vocab, units, PreTokenizer::of(splits, whole), &merges, uncovered)?),
    };

    let Around { before, after, pair } = around_text(file, around, &roles, tokens, vocab.len())?;
    let normalized = match normalized.is_empty() {
        true => None,
        false => Some(specials(&vocab, &normalized, |text| normalizer.apply(text, false).into())?),
    };
    let specials = specials(&vocab, &marked, str::to_string)?;
    let Shown { strips_space, .. } = shown;
    Ok(Tokenizer {
        specials,
        normalized,
        // What Metaspace changes comes behind the special strings of the second kind, whose texts have no blanks to
        // change.
        normalizer: Normalizer(normalizer.0.into_iter().chain(changes).collect()),
        before,
        after,
        pair,
        add_space_prefix: false,
        strips_space,
        vocab,
        algorithm,
        roles,
    })
}

/// Returns the cuts of a WordPiece model.
fn word_piece(file: &SideFile, model: &Model, unknown: Option<u32>) -> Result<WordPiece, Error> {
    let prefix = model.continuing_subword_prefix.as_ref().map_or("##", |prefix| &*prefix.0);
    if prefix != "##" {
        return Err(bad(file, format!("continuing_subword_prefix {} is not supported", show(prefix.as_bytes()))));
    }
    let max_chars = model.max_input_chars_per_word.unwrap_or(MAX_CHARS);
    if !(1..=MAX_MAX_CHARS).contains(&max_chars) {
        let what = format!("max_input_chars_per_word is {max_chars}, expected 1 to {MAX_MAX_CHARS}");
        return Err(bad(file, what));
    }
    let unknown = unknown.ok_or_else(|| bad(file, "it has no unk_token"))?;
    Ok(WordPiece::new(["", "##"], unknown, max_chars))
}

/// Returns the cuts of a Unigram model.
fn unigram(file: &SideFile, model: &Model, vocab: &Vocab, pre: PreTokenizer) -> Result<Unigram, Error> {
    let scores = model.vocab.scores.iter().flatten().copied();
    if model.byte_fallback == Some(true) {
        return Err(bad(file, "byte_fallback of a Unigram model is not supported"));
    }
    let unknown = model.unk_id.filter(|&id| (id as usize) < vocab.len());
    let unknown = unknown.ok_or_else(|| bad(file, "unk_id is missing, or no token"))?;
    Unigram::new(vocab, pre, unigram::scores_of(vocab, scores)?, unknown)
}

/// Returns the tokens of a BPE, WordPiece or Unigram model; other models are an error.
fn tokens_of<'m, 'a>(file: &SideFile, model: &'m Model<'a>, is_pieces: bool) -> Result<&'m [(Text<'a>, u32)], Error> {
    let kind = model.kind.as_ref().map(|kind| &*kind.0);
    let is_unigram = kind == Some("Unigram");
    if !is_pieces && !is_unigram && (!matches!(kind, None | Some("BPE")) || model.merges.is_none()) {
        let kind = show(kind.unwrap_or("without a name").as_bytes());
        return Err(bad(file, format!("model type {kind} is not supported, BPE, WordPiece and Unigram are")));
    }
    if is_unigram != model.vocab.scores.is_some() {
        return Err(bad(file, "the vocabulary of a Unigram model is a list, and those of others are objects"));
    }
    let list = &model.vocab.tokens;
    if is_pieces || is_unigram {
        return Ok(list);
    }
    for (name, value) in [
        ("continuing_subword_prefix", &model.continuing_subword_prefix),
        ("end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if value.as_ref().is_some_and(|value| !value.0.is_empty()) {
            return Err(bad(file, format!("model {name} is not supported")));
        }
    }
    Ok(list)
}

/// Returns the text of each id, `None` where the file leaves a gap.
fn by_id<'m>(
    file: &SideFile,
    list: &'m [(Text<'_>, u32)],
    added: &'m [Added<'_>],
) -> Result<Vec<Option<&'m str>>, Error> {
    let all = list.iter().map(|(text, id)| (&*text.0, *id)).chain(added.iter().map(|a| (&*a.content.0, a.id)));
    let most = (list.len() + added.len()).saturating_mul(2) + MAX_GAPS;
    let mut by_id: Vec<Option<&str>> = Vec::with_capacity(list.len() + added.len());
    for (text, id) in all {
        let i = id as usize;
        if i >= most {
            let n = list.len() + added.len();
            return Err(bad(file, format!("token {} has id {id}, there are {n} tokens", show(text.as_bytes()))));
        }
        if i >= by_id.len() {
            by_id.resize(i + 1, None);
        }
        match by_id[i] {
            // Added tokens often stand in the model's vocabulary too.
            Some(other) if other != text => {
                let (text, other) = (show(text.as_bytes()), show(other.as_bytes()));
                return Err(bad(file, format!("tokens {other} and {text} both have id {id}")));
            }
            _ => by_id[i] = Some(text),
        }
    }
    match by_id.is_empty() {
        true => Err(bad(file, "it has no tokens")),
        false => Ok(by_id),
    }
}

fn kinds(by_id: &[Option<&str>], added: &[Added], model: &Model, byte_fallback: bool) -> Vec<TokenKind> {
    let is_byte = |text: &str| text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
    let is_hex = |text: &str| text[3..5].bytes().all(|b| b.is_ascii_hexdigit());
    let unknown = model.unk_token.as_ref().map(|text| &*text.0);
    let kind = |text: &Option<&str>| match text {
        None => TokenKind::Unused,
        Some(text) if byte_fallback && is_byte(text) && is_hex(text) => TokenKind::Byte,
        Some(text) if unknown == Some(text) => TokenKind::Unknown,
        Some(_) => TokenKind::Normal,
    };
    let mut kinds: Vec<TokenKind> = by_id.iter().map(kind).collect();
    for token in added {
        kinds[token.id as usize] = if token.special { TokenKind::Control } else { TokenKind::UserDefined };
    }
    kinds
}

/// Returns the token for what no token covers.
fn unknown(file: &SideFile, model: &Model, vocab: &Vocab) -> Result<Option<u32>, Error> {
    let Some(text) = model.unk_token.as_ref().filter(|text| !text.0.is_empty()) else { return Ok(None) };
    let id = vocab.id(text.0.as_bytes());
    id.map(Some).ok_or_else(|| bad(file, format!("unk_token {} is no token", show(text.0.as_bytes()))))
}

/// What stands around a text's tokens: the file's word, unless the other file says otherwise of BOS and EOS.
fn around_text(
    file: &SideFile,
    mut around: Around,
    roles: &Roles,
    tokens: &folder::Tokens,
    n_vocab: usize,
) -> Result<Around, Error> {
    let pair = around.pair.iter().flatten().flatten();
    if let Some(id) = around.before.iter().chain(&around.after).chain(pair).find(|&&id| id as usize >= n_vocab) {
        return Err(bad(file, format!("post_processor: token {id} is put around texts, there are {n_vocab} tokens")));
    }
    for (says, id, list) in
        [(tokens.add_bos, roles.bos, &mut around.before), (tokens.add_eos, roles.eos, &mut around.after)]
    {
        let Some(id) = id else { continue };
        match says {
            Some(true) if !list.contains(&id) => list.insert(0, id),
            Some(false) => list.retain(|&other| other != id),
            _ => (),
        }
    }
    Ok(around)
}

/// Returns the strings of added tokens, each as `written` has it. What the tokens are is asked of the vocabulary, where
/// some are known by name for what the file does not say.
fn specials(vocab: &Vocab, added: &[&Added], written: impl Fn(&str) -> String) -> Result<Specials, Error> {
    let special = |token: &&Added| Special {
        id: token.id,
        text: written(&token.content.0).into_bytes(),
        user_defined: vocab.kind(token.id) == Some(TokenKind::UserDefined),
        strips_right: token.rstrip,
        strips_left: token.lstrip,
        single_word: token.single_word,
    };
    Specials::leftmost(added.iter().map(special).filter(|special| !special.text.is_empty()).collect())
}
