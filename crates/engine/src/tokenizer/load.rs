//! A tokenizer out of a model file's metadata: every array against the number of tokens, every id against the
//! vocabulary, and the well-known names that say what files leave out.

use checkpoint::Metadata;

use super::bpe::{Bpe, Units, char_byte};
use super::pretokenize::PreTokenizer;
use super::special::Specials;
use super::spm::Spm;
use super::vocab::{TokenKind, Vocab, show};
use super::{Algorithm, Error, Roles, SPACE, Tokenizer};

/// Both a `tokenizer.ggml.model` and a `tokenizer.ggml.pre`.
const GEMMA4: &str = "gemma4";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";

/// Names of a turn's last token, in order of preference where the file names none.
const EOT_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// Names that end a generation wherever they stand in a vocabulary.
const END_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Roles of code models: the key that names the token, the names it goes by otherwise, and whether it ends a
/// generation. Files often leave these as plain text, which they must not be.
const FILL_IN: &[(&str, &[&str], bool)] = &[
    (
        "tokenizer.ggml.fim_pre_token_id",
        &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ],
        false,
    ),
    (
        "tokenizer.ggml.fim_suf_token_id",
        &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ],
        false,
    ),
    (
        "tokenizer.ggml.fim_mid_token_id",
        &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ],
        false,
    ),
    ("tokenizer.ggml.fim_pad_token_id", &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"], true),
    ("tokenizer.ggml.fim_rep_token_id", &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"], true),
    ("tokenizer.ggml.fim_sep_token_id", &["<|file_sep|>"], true),
];

/// The three families of vocabularies that are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Model {
    ByteLevel,
    Gemma4,
    SentencePiece,
}

impl Tokenizer {
    /// Reads the `tokenizer.ggml` keys of a model file.
    ///
    /// # Errors
    /// A key that is missing or of another type, a model or pre-tokenizer that is not known, arrays of different
    /// lengths, tokens that stand twice, merges of what is no token, scores that are not numbers, ids past the
    /// vocabulary. Each names the thing.
    pub fn from_metadata(meta: &Metadata) -> Result<Self, Error> {
        // Files from before the key existed are cut in the way that llama.cpp falls back to.
        let pre = meta.opt_str("tokenizer.ggml.pre")?.unwrap_or("default");
        let model = match meta.str("tokenizer.ggml.model")? {
            "gpt2" if pre == GEMMA4 => Model::Gemma4,
            "gpt2" => Model::ByteLevel,
            GEMMA4 => Model::Gemma4,
            "llama" => Model::SentencePiece,
            other => return Err(Error::Model { found: other.into() }),
        };
        let tokens: Vec<&[u8]> = meta.strings("tokenizer.ggml.tokens")?.iter().collect();
        let n_vocab = tokens.len();
        let most = i32::MAX as usize;
        if n_vocab == 0 || n_vocab > most {
            return Err(Error::NoTokens { n_vocab, most });
        }
        let kinds = kinds(meta, n_vocab)?;
        let mut vocab = Vocab::new(&tokens, kinds, |id, text, kind, out| piece(model, id, text, kind, out))?;
        let roles = roles(meta, model, &mut vocab)?;

        let (algorithm, bos_by_default) = match model {
            Model::SentencePiece => {
                let scores = meta.f32s("tokenizer.ggml.scores")?;
                same_count("tokenizer.ggml.scores", scores.len(), n_vocab)?;
                (Algorithm::Spm(Spm::new(&vocab, &scores, roles.unknown)?), true)
            }
            Model::ByteLevel | Model::Gemma4 => {
                let merges: Vec<&[u8]> = meta.strings("tokenizer.ggml.merges")?.iter().collect();
                let units = if model == Model::Gemma4 { Units::Chars } else { Units::Bytes };
                let pre = PreTokenizer::new(if model == Model::Gemma4 { GEMMA4 } else { pre })?;
                let add_bos = pre.add_bos;
                (Algorithm::Bpe(Bpe::new(&vocab, units, pre, &merges)?), add_bos)
            }
        };
        // Gemma 4 speaks nonsense without its BOS, and there are files that say to leave it out.
        let says_bos = if model == Model::Gemma4 { Some(true) } else { meta.opt_bool(ADD_BOS)? };
        let says_eos = meta.opt_bool(ADD_EOS)?;
        for (says, id, flag, key) in [(says_bos, roles.bos, ADD_BOS, BOS), (says_eos, roles.eos, ADD_EOS, EOS)] {
            if says == Some(true) && id.is_none() {
                return Err(Error::MissingId { flag, key });
            }
        }
        let space_prefix = meta.opt_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let strips_right = strips_right(meta)?;
        Ok(Self {
            specials: Specials::new(&vocab, also_special(&vocab), strips_right),
            add_bos: says_bos.unwrap_or(bos_by_default),
            add_eos: says_eos.unwrap_or(false),
            add_space_prefix: space_prefix && model == Model::SentencePiece,
            vocab,
            algorithm,
            roles,
        })
    }
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
fn piece(model: Model, id: u32, text: &[u8], kind: TokenKind, out: &mut Vec<u8>) -> Result<(), Error> {
    match (kind, model) {
        (TokenKind::Control | TokenKind::Unknown, _) | (TokenKind::UserDefined, Model::ByteLevel) => {
            out.extend_from_slice(text);
        }
        (TokenKind::Byte, _) => {
            let byte = text.strip_prefix(b"<0x").and_then(|rest| rest.strip_suffix(b">")).filter(|hex| hex.len() == 2);
            // `from_str_radix` takes a sign, which two hexadecimal digits do not have.
            let digits =
                byte.filter(|hex| hex.iter().all(u8::is_ascii_hexdigit)).and_then(|hex| str::from_utf8(hex).ok());
            let byte = digits.and_then(|hex| u8::from_str_radix(hex, 16).ok());
            out.push(byte.ok_or_else(|| Error::ByteToken { id, token: show(text) })?);
        }
        (_, Model::ByteLevel) => {
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
        (_, Model::Gemma4 | Model::SentencePiece) => {
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

/// The roles the file gives, then those that well-known names give; tokens found by name become control tokens, as
/// files often call them plain text.
fn roles(meta: &Metadata, model: Model, vocab: &mut Vocab) -> Result<Roles, Error> {
    let n_vocab = vocab.len();
    let role = |key: &'static str| match meta.opt_u32(key)? {
        Some(id) if id as usize >= n_vocab => Err(Error::Id { key, id, n_vocab }),
        id => Ok(id),
    };
    // The first SentencePiece files named no roles and all had these.
    let or_usual = |id: Option<u32>, usual: u32| {
        id.or_else(|| (model == Model::SentencePiece && (usual as usize) < n_vocab).then_some(usual))
    };
    let mut roles = Roles {
        bos: or_usual(role(BOS)?, 1),
        eos: or_usual(role(EOS)?, 2),
        unknown: or_usual(role(UNKNOWN)?, 0),
        eot: role("tokenizer.ggml.eot_token_id")?,
        eom: role("tokenizer.ggml.eom_token_id")?,
        pad: role("tokenizer.ggml.padding_token_id")?,
        ends: Vec::new(),
    };
    let mut by_name = |names: &[&str]| {
        let id = names.iter().find_map(|name| vocab.id(name.as_bytes()))?;
        vocab.set_kind(id, TokenKind::Control);
        Some(id)
    };
    roles.eot = roles.eot.or_else(|| by_name(EOT_NAMES));
    roles.eom = roles.eom.or_else(|| by_name(&["<|eom_id|>"]));
    for (key, names, ends) in FILL_IN {
        let id = role(key)?.or_else(|| by_name(names));
        roles.ends.extend(id.filter(|_| *ends));
    }
    roles.ends.extend(END_NAMES.iter().filter_map(|name| by_name(&[name])));
    // To a byte-level vocabulary `</s>` may be a piece of HTML, so here the file's word counts.
    roles.ends.extend(vocab.id(b"</s>").filter(|&id| vocab.kind(id) == Some(TokenKind::Control)));
    roles.ends.extend([roles.eos, roles.eot, roles.eom].into_iter().flatten());
    roles.ends.sort_unstable();
    roles.ends.dedup();

    let has = |names: &[&str]| names.iter().any(|name| vocab.id(name.as_bytes()).is_some());
    // Where messages end with a call or a return, `<|end|>` only ends one of several messages of an answer.
    let calls = has(&["<|call|>", "<|calls|>"]) && has(&["<|return|>", "<|flush|>"]);
    if let Some(id) = vocab.id(b"<|end|>").filter(|_| calls) {
        roles.ends.retain(|&end| end != id);
        vocab.set_kind(id, TokenKind::UserDefined);
    }
    Ok(roles)
}

/// `</s>` is taken for the token in a template's text, even where the file calls it a piece of text; but not in the two
/// families whose tokenizers are known to do otherwise.
fn also_special(vocab: &Vocab) -> Option<u32> {
    let otherwise = ["<|tool_response>", "<|plamo:eos|>"].iter().any(|name| vocab.id(name.as_bytes()).is_some());
    vocab.id(b"</s>").filter(|_| !otherwise)
}

/// Which special tokens swallow the blanks after them. Files do not say; Phi-3's do.
fn strips_right(meta: &Metadata) -> Result<impl Fn(&[u8]) -> bool + use<>, Error> {
    let name = meta.opt_str("general.name")?.unwrap_or_default().to_lowercase();
    let phi3 = name.contains("phi-3") || name.contains("phi3");
    Ok(move |text: &[u8]| phi3 && !matches!(text, b"<unk>" | b"<s>" | b"<|endoftext|>"))
}
