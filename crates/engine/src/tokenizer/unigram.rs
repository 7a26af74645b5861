//! Unigram vocabularies (XLM-RoBERTa): of all ways to cut a word into tokens the one with the largest sum of scores
//! (arXiv 1804.10959). After `Unigram` of Hugging Face's library, whose sums are the same to the bit.

use super::merge::NONE;
use super::pretokenize::PreTokenizer;
use super::vocab::{Vocab, show};
use super::{Error, TokenKind};

/// How much less a character that no token covers is worth than the worst token.
const PENALTY: f64 = 10.0;
/// Longest token that text may become, in bytes; those in use have fifty. It bounds what a place of a text costs.
const MAX_TOKEN: usize = 512;
/// Most bytes of all tokens; XLM-RoBERTa's have 2 MB. Each may be a node of the tree.
const MAX_BYTES: usize = 8 << 20;
/// Longest part that is cut at a time, in bytes; it has more tokens than the models have positions.
const MAX_PART: usize = 256 << 10;

/// A place in the tree of all tokens.
#[derive(Clone, Copy)]
struct Node {
    /// The byte that leads to it.
    byte: u8,
    /// The token that ends here, or `NONE`.
    token: u32,
    /// Its children are next to each other, in order of their bytes.
    first: u32,
    n: u32,
}

/// The best way to a place of a text.
#[derive(Clone, Copy)]
struct Best {
    score: f64,
    /// Where its last token begins; `NONE` while there is no way.
    from: u32,
    token: u32,
}

/// How words become tokens.
pub struct Unigram {
    pre: PreTokenizer,
    nodes: Vec<Node>,
    scores: Vec<f64>, // [n_vocab]
    unknown: u32,
    unknown_score: f64,
}

impl Unigram {
    /// `scores` has one value a token, NaN for those that text does not become.
    pub fn new(vocab: &Vocab, pre: PreTokenizer, scores: Vec<f64>, unknown: u32) -> Result<Unigram, Error> {
        let least = scores.iter().copied().filter(|score| !score.is_nan()).fold(f64::INFINITY, f64::min);
        if !least.is_finite() {
            return Err(Error::Score { id: unknown });
        }
        let mut sorted: Vec<(&[u8], u32)> = Vec::with_capacity(scores.len());
        for id in (0..scores.len() as u32).filter(|&id| !scores[id as usize].is_nan()) {
            let text = vocab.text(id).unwrap_or_default();
            if text.len() > MAX_TOKEN {
                return Err(Error::LongToken { id, token: show(text), bytes: text.len(), most: MAX_TOKEN });
            }
            if !text.is_empty() {
                sorted.push((text, id));
            }
        }
        let found = sorted.iter().map(|(text, _)| text.len()).sum();
        if found > MAX_BYTES {
            return Err(Error::Bytes { found, most: MAX_BYTES });
        }
        sorted.sort_unstable();
        Ok(Unigram { pre, nodes: tree(&sorted), scores, unknown, unknown_score: least - PENALTY })
    }

    /// Appends the tokens of a text.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let mut best = Vec::new();
        self.pre.split(text, &mut |word| {
            let mut rest = word;
            while !rest.is_empty() {
                let (part, after) = rest.split_at(rest.floor_char_boundary(MAX_PART.min(rest.len())));
                self.cut(part, &mut best, out);
                rest = after;
            }
        });
    }

    fn cut(&self, part: &str, best: &mut Vec<Best>, out: &mut Vec<u32>) {
        best.clear();
        best.resize(part.len() + 1, Best { score: 0.0, from: NONE, token: NONE });
        for (at, c) in part.char_indices() {
            let before = best[at].score;
            let mut reach = |end: usize, token: u32, score: f64| {
                let (to, score) = (&mut best[end], score + before);
                if to.from == NONE || score > to.score {
                    *to = Best { score, from: at as u32, token };
                }
            };
            let mut is_covered = false;
            let mut node = self.nodes[0];
            for (i, byte) in part.as_bytes()[at..].iter().enumerate() {
                let children = &self.nodes[node.first as usize..][..node.n as usize];
                let Ok(child) = children.binary_search_by_key(byte, |child| child.byte) else { break };
                node = children[child];
                if node.token != NONE {
                    is_covered |= i + 1 == c.len_utf8();
                    reach(at + i + 1, node.token, self.scores[node.token as usize]);
                }
            }
            if !is_covered {
                reach(at + c.len_utf8(), self.unknown, self.unknown_score);
            }
        }
        let (first, mut at) = (out.len(), part.len());
        while at > 0 {
            let Best { from, token, .. } = best[at];
            // What is unknown side by side is one token.
            if token != self.unknown || out.len() == first || out[out.len() - 1] != token {
                out.push(token);
            }
            at = from as usize;
        }
        out[first..].reverse();
    }
}

/// Builds the tree of sorted texts, level by level, so that children are next to each other.
fn tree(sorted: &[(&[u8], u32)]) -> Vec<Node> {
    let leaf = |byte| Node { byte, token: NONE, first: 0, n: 0 };
    let mut nodes = vec![leaf(0)];
    // For each node the texts that go through it.
    let mut through: Vec<_> = std::iter::once(0..sorted.len()).collect();
    let (mut at, mut level_end, mut depth) = (0, 1, 0);
    while at < nodes.len() {
        if at == level_end {
            (level_end, depth) = (nodes.len(), depth + 1);
        }
        let mut range = through[at].clone();
        if let Some((_, id)) = sorted[range.clone()].first().filter(|(text, _)| text.len() == depth) {
            nodes[at].token = *id;
            range.start += 1;
        }
        nodes[at].first = nodes.len() as u32;
        while let Some((text, _)) = sorted[range.clone()].first() {
            let byte = text[depth];
            let n = sorted[range.clone()].partition_point(|(text, _)| text[depth] == byte);
            nodes.push(leaf(byte));
            through.push(range.start..range.start + n);
            nodes[at].n += 1;
            range.start += n;
        }
        at += 1;
    }
    nodes
}

/// The scores that a file gives, NaN for control tokens, which text never becomes.
pub fn scores_of(vocab: &Vocab, scores: impl Iterator<Item = f64>) -> Result<Vec<f64>, Error> {
    let one = |(id, score): (usize, f64)| {
        let id = id as u32;
        match vocab.kind(id).is_some_and(TokenKind::is_special) {
            _ if score.is_nan() => Err(Error::Score { id }),
            true => Ok(f64::NAN),
            false => Ok(score),
        }
    };
    scores.enumerate().map(one).collect()
}
