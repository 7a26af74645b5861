//! A tokenizer out of `tiktoken.model`, as the folders of Kimi-K2 and Moonlight have it instead of a `tokenizer.json`:
//! a line a token, its bytes in base64 and its rank, which is its id and says how soon it joins.
//!
//! The file has neither pattern nor special tokens: the pattern is that of the models' own Python code, the tokens
//! stand in `tokenizer_config.json`, and ids that it does not name are `<|reserved_token_ID|>` as in that code.

use std::collections::HashMap;

use checkpoint::SideFile;

use super::bpe::{Bpe, Uncovered, Units, byte_char};
use super::load::{Writing, piece};
use super::normalize::Normalizer;
use super::pretokenize::PreTokenizer;
use super::special::{Special, Specials};
use super::vocab::{TokenKind, Vocab, show};
use super::{Algorithm, Error, Tokenizer, bad, roles};
use crate::folder;

/// Whose words the tokens are made of.
const PATTERN: &str = "kimi-k2";
/// Ids behind the ranks that are kept for special tokens.
const N_RESERVED: usize = 256;
/// Longest token, in bytes; the longest in use has some 130.
const MAX_TOKEN: usize = 1024;
/// Most squared lengths of tokens together, which is what finding the merges costs; those in use have some 10 million.
const MAX_WORK: usize = 1 << 30;

/// Reads the file; `tokens` is what the folder says of special tokens.
pub fn read(file: &SideFile, tokens: &folder::Tokens) -> Result<Tokenizer, Error> {
    let ranks = ranks(file)?;
    let merges = merges(file, &ranks)?;
    let mut texts: Vec<String> = ranks.iter().map(|bytes| bytes.iter().map(|&b| byte_char(b)).collect()).collect();
    let mut kinds = vec![TokenKind::Normal; texts.len()];
    let named: HashMap<u32, &folder::Added> = tokens.added.iter().map(|added| (added.id, added)).collect();
    for id in (ranks.len()..ranks.len() + N_RESERVED).map(|id| id as u32) {
        let (text, special) = match named.get(&id) {
            Some(added) => (added.text.clone(), added.special),
            None => (format!("<|reserved_token_{id}|>"), true),
        };
        texts.push(text);
        kinds.push(if special { TokenKind::Control } else { TokenKind::UserDefined });
    }
    let texts: Vec<&[u8]> = texts.iter().map(|text| text.as_bytes()).collect();
    let piece = |id, text: &[u8], kind, out: &mut Vec<u8>| piece(Writing::Bytes, id, text, kind, out);
    let mut vocab = Vocab::new(&texts, kinds, piece)?;
    let roles = roles::of_folder(tokens, &mut vocab)?;
    let written: Vec<(Vec<u8>, Vec<u8>)> =
        merges.iter().map(|&(left, right)| (texts[left as usize].to_vec(), texts[right as usize].to_vec())).collect();
    let merges: Vec<(&[u8], &[u8])> = written.iter().map(|(left, right)| (left.as_slice(), right.as_slice())).collect();
    let bpe = Bpe::new(&vocab, Units::Bytes, PreTokenizer::new(PATTERN)?, &merges, Uncovered::default())?;
    let special = |id: usize| Special {
        id: id as u32,
        text: texts[id].to_vec(),
        user_defined: vocab.kind(id as u32) == Some(TokenKind::UserDefined),
        ..Special::default()
    };
    let specials =
        Specials::leftmost((ranks.len()..texts.len()).map(special).filter(|s| !s.text.is_empty()).collect())?;
    Ok(Tokenizer {
        specials,
        normalized: None,
        normalizer: Normalizer::default(),
        before: roles.bos.filter(|_| tokens.add_bos == Some(true)).into_iter().collect(),
        after: roles.eos.filter(|_| tokens.add_eos == Some(true)).into_iter().collect(),
        add_space_prefix: false,
        strips_space: false,
        vocab,
        algorithm: Algorithm::Bpe(bpe),
        pair: None,
        roles,
    })
}

/// Returns the bytes of every rank; ranks have no gaps.
fn ranks(file: &SideFile) -> Result<Vec<Vec<u8>>, Error> {
    let mut ranks = Vec::new();
    for (i, line) in file.text().lines().filter(|line| !line.is_empty()).enumerate() {
        let parsed = line.split_once(' ').and_then(|(token, rank)| Some((decode(token)?, rank.parse::<usize>().ok()?)));
        let Some((bytes, rank)) = parsed else {
            return Err(bad(
                file,
                format!("line {}, {}, is no token in base64 and its rank", i + 1, show(line.as_bytes())),
            ));
        };
        if rank != i {
            return Err(bad(file, format!("line {} has rank {rank}, {i} comes next", i + 1)));
        }
        if bytes.is_empty() || bytes.len() > MAX_TOKEN {
            return Err(bad(file, format!("token {i} is {} bytes long, 1 to {MAX_TOKEN} are allowed", bytes.len())));
        }
        ranks.push(bytes);
    }
    let work = ranks.iter().map(|bytes| bytes.len() * bytes.len()).sum::<usize>();
    if work > MAX_WORK {
        return Err(bad(file, format!("squared lengths of its tokens make {work}, at most {MAX_WORK} are allowed")));
    }
    match ranks.is_empty() {
        true => Err(bad(file, "it has no tokens")),
        false => Ok(ranks),
    }
}

/// Returns the two tokens that join into each token of several bytes, in the order of ranks: what is left of its bytes
/// when only better ranks join.
fn merges(file: &SideFile, ranks: &[Vec<u8>]) -> Result<Vec<(u32, u32)>, Error> {
    let by_bytes: HashMap<&[u8], u32> = ranks.iter().zip(0..).map(|(bytes, rank)| (bytes.as_slice(), rank)).collect();
    let mut merges = Vec::new();
    for (token, rank) in ranks.iter().zip(0u32..).filter(|(token, _)| token.len() > 1) {
        // Where each part begins, and the end.
        let mut cuts: Vec<usize> = (0..=token.len()).collect();
        loop {
            let pairs = cuts.windows(3).enumerate();
            let joined = pairs.filter_map(|(i, cut)| Some((*by_bytes.get(&token[cut[0]..cut[2]])?, i)));
            match joined.filter(|&(other, _)| other < rank).min() {
                Some((_, i)) => drop(cuts.remove(i + 1)),
                None => break,
            }
        }
        let part = |from: usize, to: usize| by_bytes.get(&token[from..to]).copied();
        let two = match cuts[..] {
            [from, middle, to] => part(from, middle).zip(part(middle, to)),
            _ => None,
        };
        merges.push(
            two.ok_or_else(|| {
                bad(file, format!("token {rank}, {}, does not split into two better ones", show(token)))
            })?,
        );
    }
    Ok(merges)
}

/// Base64 with its padding.
fn decode(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    let (mut bytes, mut word, mut n_bit) = (Vec::with_capacity(digits.len() * 3 / 4), 0u32, 0);
    for digit in digits.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        word = word << 6 | u32::from(value);
        n_bit += 6;
        if n_bit >= 8 {
            n_bit -= 8;
            bytes.push((word >> n_bit) as u8);
        }
    }
    Some(bytes)
}
