//! What a step computes: any mix of prefill chunks and decode tokens of several sequences.

use crate::{Limits, StepError};

/// Positions in a cache page. Attention's tiles are pages, so this number is part of the CPU law.
pub const PAGE: usize = 32;

/// One step's work. The vectors are reused from step to step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token ids, `[T]`, chunk after chunk.
    pub tokens: Vec<u32>,
    /// One per sequence in the step.
    pub chunks: Vec<Chunk>,
    /// Page tables of the chunks, one after the other.
    pub pages: Vec<u32>,
    /// Tokens (indices into `tokens`, strictly ascending) whose logits are wanted, `[R]`.
    pub rows: Vec<u32>,
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the first token in [`Batch::tokens`]; chunks follow each other without gaps.
    pub first: u32,
    /// Number of tokens, at least 1.
    pub len: u32,
    /// Position of the first token; earlier positions of the sequence are in the cache already.
    pub pos: u32,
    /// Index of the sequence's first page in [`Batch::pages`]. Position `p` lies in page `pages[first_page + p / PAGE]`.
    pub first_page: u32,
    /// Number of pages, at least enough for `pos + len` positions.
    pub n_pages: u32,
}

impl Batch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.chunks.clear();
        self.pages.clear();
        self.rows.clear();
    }

    /// Adds a chunk of a sequence with its page table; `rows` are the wanted logits as offsets into the chunk.
    pub fn push(&mut self, tokens: &[u32], pos: usize, pages: &[u32], rows: impl IntoIterator<Item = usize>) {
        let first = self.tokens.len() as u32;
        self.chunks.push(Chunk {
            first,
            len: tokens.len() as u32,
            pos: pos as u32,
            first_page: self.pages.len() as u32,
            n_pages: pages.len() as u32,
        });
        self.tokens.extend_from_slice(tokens);
        self.pages.extend_from_slice(pages);
        self.rows.extend(rows.into_iter().map(|r| first + r as u32));
    }

    /// Checks the batch against itself and the limits, once, before any backend computes.
    ///
    /// Two chunks must not write the same page; this checks every page id and every count.
    pub fn check(&self, limits: Limits, n_vocab: usize) -> Result<(), StepError> {
        let bad = |why: String| Err(StepError::Batch(why));
        if self.tokens.is_empty() {
            return bad("the batch is empty".into());
        }
        if self.tokens.len() > limits.max_tokens {
            return bad(format!("the batch has {} tokens, the limit is {}", self.tokens.len(), limits.max_tokens));
        }
        if self.rows.len() > limits.max_outputs {
            return bad(format!(
                "the batch asks for {} logits rows, the limit is {}",
                self.rows.len(),
                limits.max_outputs
            ));
        }
        if let Some(token) = self.tokens.iter().position(|&id| id as usize >= n_vocab) {
            return Err(StepError::TokenId { token, id: self.tokens[token], n_vocab });
        }
        let mut next = 0usize;
        for (i, c) in self.chunks.iter().enumerate() {
            let end = c.pos as usize + c.len as usize;
            if c.first as usize != next || c.len == 0 {
                return bad(format!(
                    "chunk {i} starts at token {} with {} tokens, expected start {next}",
                    c.first, c.len
                ));
            }
            if end > limits.max_positions {
                return bad(format!("chunk {i} ends at position {end}, the limit is {}", limits.max_positions));
            }
            if (c.n_pages as usize) < end.div_ceil(PAGE) {
                return bad(format!("chunk {i} needs {} pages, it has {}", end.div_ceil(PAGE), c.n_pages));
            }
            let table = self.pages.get(c.first_page as usize..c.first_page as usize + c.n_pages as usize);
            let Some(table) = table else {
                return bad(format!("chunk {i}'s page table ends past the {} pages of the batch", self.pages.len()));
            };
            if let Some(&page) = table.iter().find(|&&p| p as usize >= limits.n_pages) {
                return bad(format!("chunk {i} names page {page}, the cache has {}", limits.n_pages));
            }
            next += c.len as usize;
        }
        if next != self.tokens.len() {
            return bad(format!("the chunks cover {next} of {} tokens", self.tokens.len()));
        }
        if self.rows.windows(2).any(|w| w[0] >= w[1]) || self.rows.last().is_some_and(|&r| r as usize >= next) {
            return bad("the rows whose logits are asked for are not ascending token indices".into());
        }
        Ok(())
    }
}
