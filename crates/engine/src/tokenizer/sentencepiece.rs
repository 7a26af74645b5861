//! A tokenizer out of `tokenizer.model`, SentencePiece's own file, for folders without a `tokenizer.json`: its pieces,
//! scores and types as the keys of a GGUF file. Models of merges (BPE) are read, whose text is not changed first: Llama
//! 2, Mistral, Mixtral, Gemma.
//!
//! The file is a message of protobuf. The few fields that matter are read here, numbered as in SentencePiece's
//! `sentencepiece_model.proto`; every length is checked against what is left.

use checkpoint::{Checkpoint, Strings, Value};

use super::{Error, TokenKind};
use crate::folder;

const FILE: &str = "tokenizer.model";
/// Largest file, in bytes; Gemma's has 4 MB.
const MAX_BYTES: usize = 64 << 20;
/// Most pieces; Gemma has 262,144.
const MAX_PIECES: usize = 1 << 21;
/// How far added tokens may lie behind the pieces.
const MAX_GAPS: usize = 1 << 16;
/// Score of tokens that nothing joins to.
const NO_SCORE: f32 = -1000.0;
/// `model_type` of models of merges.
const BPE: u64 = 2;

/// What the file says.
#[derive(Debug)]
struct Model<'a> {
    pieces: Vec<Piece<'a>>,
    /// `unk_id`, `bos_id`, `eos_id`, `pad_id`; negative where there is none.
    ids: [i32; 4],
    is_bpe: bool,
    /// The text is rewritten by a table first.
    has_charsmap: bool,
    /// Blanks at the ends are dropped, and of several one stays.
    joins_blanks: bool,
    /// A text begins with a blank.
    adds_prefix: bool,
    /// Blanks are written `▁`, before a word.
    writes_blanks: bool,
}

#[derive(Debug)]
struct Piece<'a> {
    text: &'a [u8],
    score: f32,
    kind: TokenKind,
}

/// Returns the `tokenizer.ggml` keys of a folder's `tokenizer.model`, with the `n_vocab` tokens of the model where that
/// says: those that the vocabulary has not are padding. `None` where there is no such file.
///
/// # Errors
/// The file is damaged, or has what is not known here.
pub fn sentencepiece_keys(
    checkpoint: &Checkpoint,
    n_vocab: Option<usize>,
) -> Result<Option<Vec<(String, Value)>>, Error> {
    let Some((file, bytes)) = checkpoint.side_bytes(FILE)? else { return Ok(None) };
    let tokens = folder::tokens(checkpoint)?;
    keys(&bytes, &tokens, n_vocab).map(Some).map_err(|what| Error::Json { file, what })
}

fn keys(bytes: &[u8], tokens: &folder::Tokens, n_vocab: Option<usize>) -> Result<Vec<(String, Value)>, String> {
    let model = parse(bytes)?;
    if !model.is_bpe {
        return Err("its model is not one of merges (BPE), which is what is read".into());
    }
    for (is_other, what) in [
        (model.has_charsmap, "rewrites texts by a table (precompiled_charsmap)"),
        (model.joins_blanks, "drops blanks (remove_extra_whitespaces)"),
        (!model.writes_blanks, "keeps spaces as they are or puts them after words"),
    ] {
        if is_other {
            return Err(format!("it {what}, which is not known"));
        }
    }
    let n_pieces = model.pieces.len();
    let mut texts: Vec<Vec<u8>> = model.pieces.iter().map(|piece| piece.text.to_vec()).collect();
    let mut scores: Vec<f32> = model.pieces.iter().map(|piece| piece.score).collect();
    let mut kinds: Vec<TokenKind> = model.pieces.iter().map(|piece| piece.kind).collect();
    let mut pad_to = |texts: &mut Vec<Vec<u8>>, kinds: &mut Vec<TokenKind>, n: usize| {
        for id in texts.len()..n {
            texts.push(format!("[PAD{id}]").into_bytes());
            scores.push(NO_SCORE);
            kinds.push(TokenKind::Unused);
        }
    };
    for added in &tokens.added {
        let id = added.id as usize;
        if id >= n_pieces + MAX_GAPS {
            return Err(format!("it has {n_pieces} pieces, an added token is {id}"));
        }
        pad_to(&mut texts, &mut kinds, id + 1);
        let is_piece = id < n_pieces && texts[id] != added.text.as_bytes();
        if is_piece {
            let (ours, theirs) = (super::vocab::show(&texts[id]), super::vocab::show(added.text.as_bytes()));
            return Err(format!("piece {id} is {ours}, tokenizer_config.json says {theirs}"));
        }
        if id >= n_pieces {
            texts[id] = added.text.clone().into_bytes();
            kinds[id] = if added.special { TokenKind::Control } else { TokenKind::UserDefined };
        }
    }
    pad_to(&mut texts, &mut kinds, n_vocab.unwrap_or(0));
    let n = texts.len();
    if let Some(n_vocab) = n_vocab.filter(|&n_vocab| n > n_vocab) {
        return Err(format!("it has {n} tokens, the model {n_vocab}"));
    }
    let find = |text: &Option<String>| {
        let text = text.as_ref()?.as_bytes();
        texts.iter().position(|other| other == text).map(|id| id as u32)
    };
    let id = |id: i32| u32::try_from(id).ok().filter(|&id| (id as usize) < n_pieces);
    let [unknown, bos, eos, pad] = model.ids;
    let eos = find(&tokens.eos).or(id(eos));
    let bos = find(&tokens.bos).or(id(bos));
    // An answer may end with a token of its own.
    let eot = tokens.ends.iter().copied().find(|&end| Some(end) != eos && (end as usize) < n);
    let roles = [
        ("bos_token_id", bos),
        ("eos_token_id", eos),
        ("unknown_token_id", find(&tokens.unknown).or(id(unknown))),
        ("padding_token_id", find(&tokens.pad).or(id(pad))),
        ("eot_token_id", eot),
    ];
    let mut keys: Vec<(String, Value)> = Vec::new();
    let mut add = |name: &str, value: Value| keys.push((format!("tokenizer.ggml.{name}"), value));
    add("model", "llama".into());
    add("pre", "default".into());
    add("tokens", texts.iter().map(Vec::as_slice).collect::<Strings>().into());
    add("scores", scores.into());
    add("token_type", kinds.iter().map(|&kind| kind as i32).collect::<Vec<_>>().into());
    roles.into_iter().for_each(|(name, id)| id.into_iter().for_each(|id| add(name, id.into())));
    add("add_space_prefix", model.adds_prefix.into());
    if bos.is_some() {
        add("add_bos_token", tokens.add_bos.unwrap_or(true).into());
    }
    if eos.is_some() && tokens.add_eos == Some(true) {
        add("add_eos_token", true.into());
    }
    Ok(keys)
}

/// Reads the message `ModelProto`.
fn parse(bytes: &[u8]) -> Result<Model<'_>, String> {
    if bytes.len() > MAX_BYTES {
        return Err(format!("it is {} bytes long, at most {MAX_BYTES} are allowed", bytes.len()));
    }
    let mut model = Model {
        pieces: Vec::new(),
        ids: [0, 1, 2, -1],
        is_bpe: false,
        has_charsmap: false,
        joins_blanks: true,
        adds_prefix: true,
        writes_blanks: true,
    };
    for field in Fields(bytes) {
        match field? {
            (1, Wire::Bytes(piece)) => {
                if model.pieces.len() == MAX_PIECES {
                    return Err(format!("it has more than {MAX_PIECES} pieces"));
                }
                let id = model.pieces.len();
                model.pieces.push(self::piece(piece).map_err(|what| format!("piece {id}: {what}"))?);
            }
            (2, Wire::Bytes(trainer)) => {
                for field in Fields(trainer) {
                    match field? {
                        (3, Wire::Number(kind)) => model.is_bpe = kind == BPE,
                        (24, Wire::Number(behind)) => model.writes_blanks &= behind == 0,
                        // Negative numbers are those of 64 bits.
                        (at @ 40..=43, Wire::Number(id)) => model.ids[at as usize - 40] = id as i32,
                        _ => {}
                    }
                }
            }
            (3, Wire::Bytes(normalizer)) => {
                for field in Fields(normalizer) {
                    match field? {
                        (2, Wire::Bytes(table)) => model.has_charsmap = !table.is_empty(),
                        (3, Wire::Number(adds)) => model.adds_prefix = adds != 0,
                        (4, Wire::Number(joins)) => model.joins_blanks = joins != 0,
                        (5, Wire::Number(writes)) => model.writes_blanks &= writes != 0,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if model.pieces.is_empty() { Err("it has no pieces".into()) } else { Ok(model) }
}

fn piece(bytes: &[u8]) -> Result<Piece<'_>, String> {
    let mut piece = Piece { text: &[], score: 0.0, kind: TokenKind::Normal };
    for field in Fields(bytes) {
        match field? {
            (1, Wire::Bytes(text)) => piece.text = text,
            (2, Wire::Four(score)) => piece.score = f32::from_le_bytes(score),
            (3, Wire::Number(kind)) => {
                let known = i32::try_from(kind).ok().and_then(TokenKind::from_id).filter(|_| kind != 0);
                piece.kind = known.ok_or_else(|| format!("type {kind} is not known"))?;
            }
            _ => {}
        }
    }
    if std::str::from_utf8(piece.text).is_err() {
        return Err("its text is not UTF-8".into());
    }
    Ok(piece)
}

/// The value of a field on the wire.
enum Wire<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Four([u8; 4]),
    Eight,
}

/// The fields of a message, in its order.
struct Fields<'a>(&'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Wire<'a>), String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            // Nothing behind a broken field means anything.
            self.0 = &[];
        }
        Some(field.ok_or_else(|| "it is cut, or no SentencePiece model".into()))
    }
}

impl<'a> Fields<'a> {
    fn field(&mut self) -> Option<(u32, Wire<'a>)> {
        let tag = self.number()?;
        let wire = match tag & 7 {
            0 => Wire::Number(self.number()?),
            1 => self.take(8).map(|_| Wire::Eight)?,
            2 => {
                let len = usize::try_from(self.number()?).ok()?;
                Wire::Bytes(self.take(len)?)
            }
            5 => Wire::Four(self.take(4)?.try_into().ok()?),
            _ => return None,
        };
        Some((u32::try_from(tag >> 3).ok().filter(|&field| field > 0)?, wire))
    }

    /// Seven bits a byte, the lowest first; the last byte's highest bit is 0.
    fn number(&mut self) -> Option<u64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = *self.take(1)?.first()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }
}
