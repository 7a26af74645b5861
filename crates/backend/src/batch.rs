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
    /// Slot of the sequence's recurrent state, which stands at `pos` and is moved past the chunk; a chunk at position 0
    /// starts from zeros, whatever the slot held. Means nothing where the plan has no states.
    pub state: u32,
}

/// Where the memory of a sequence lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tables<'a> {
    /// Pages of its positions, in order.
    pub pages: &'a [u32],
    /// Slot of its recurrent state.
    pub state: u32,
}

impl Batch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.chunks.clear();
        self.pages.clear();
        self.rows.clear();
    }

    /// Adds a chunk of a sequence with its memory; `rows` are the wanted logits as offsets into the chunk.
    pub fn push(&mut self, tokens: &[u32], pos: usize, tables: Tables<'_>, rows: impl IntoIterator<Item = usize>) {
        let Tables { pages, state } = tables;
        let first = self.tokens.len() as u32;
        self.chunks.push(Chunk {
            first,
            len: tokens.len() as u32,
            pos: pos as u32,
            first_page: self.pages.len() as u32,
            n_pages: pages.len() as u32,
            state,
        });
        self.tokens.extend_from_slice(tokens);
        self.pages.extend_from_slice(pages);
        self.rows.extend(rows.into_iter().map(|r| first + r as u32));
    }

    /// The pages that a chunk writes, in order; the chunk's table is known to lie in the batch.
    fn written(&self, c: &Chunk) -> &[u32] {
        let (first, end) = (c.pos as usize / PAGE, (c.pos as usize + c.len as usize).div_ceil(PAGE));
        &self.pages[c.first_page as usize..][first..end]
    }

    /// The first page that is written at two places of the step, and by which chunks. Pairs are compared as they are:
    /// a step writes a page for each sequence and each 32 tokens, which are few.
    fn written_twice(&self) -> Option<(u32, usize, usize)> {
        for (i, c) in self.chunks.iter().enumerate() {
            let mine = self.written(c);
            for (n, page) in mine.iter().enumerate() {
                let others = self.chunks[i + 1..].iter().position(|other| self.written(other).contains(page));
                let other = if mine[n + 1..].contains(page) { Some(i) } else { others.map(|j| i + 1 + j) };
                if let Some(other) = other {
                    return Some((*page, i, other));
                }
            }
        }
        None
    }

    /// Checks the batch against itself and the limits, once, before any backend computes. Allocates nothing when all is
    /// well.
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
            if limits.n_states > 0 {
                if c.state as usize >= limits.n_states {
                    return bad(format!("chunk {i} names state {}, there are {}", c.state, limits.n_states));
                }
                if let Some(other) = self.chunks[..i].iter().position(|other| other.state == c.state) {
                    return bad(format!("chunks {other} and {i} both move state {} on", c.state));
                }
            }
            next += c.len as usize;
        }
        if next != self.tokens.len() {
            return bad(format!("the chunks cover {next} of {} tokens", self.tokens.len()));
        }
        if self.rows.windows(2).any(|w| w[0] >= w[1]) || self.rows.last().is_some_and(|&r| r as usize >= next) {
            return bad("the rows whose logits are asked for are not ascending token indices".into());
        }
        // Positions of two sequences in one page would race, and each would read the other's.
        if let Some((page, a, b)) = self.written_twice() {
            return bad(format!("page {page} is written at two places, by chunks {a} and {b}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { max_tokens: 200, max_outputs: 4, n_pages: 16, max_positions: 400, n_states: 0 };

    /// Chunks as (tokens, position, pages).
    fn check(chunks: &[(usize, usize, &[u32])]) -> Result<(), StepError> {
        let mut batch = Batch::default();
        for &(n, pos, pages) in chunks {
            batch.push(&vec![0; n], pos, Tables { pages, ..Tables::default() }, []);
        }
        batch.check(LIMITS, 1)
    }

    #[test]
    fn a_state_belongs_to_one_chunk() {
        let cases: &[(usize, &[u32], Option<&str>)] = &[
            (3, &[2, 0, 1], None),
            (3, &[2, 3], Some("chunk 1 names state 3, there are 3")),
            (3, &[1, 0, 1], Some("chunks 0 and 2 both move state 1 on")),
            // Without states the slots mean nothing.
            (0, &[7, 7], None),
        ];
        for &(n_states, slots, why) in cases {
            let mut batch = Batch::default();
            for (i, &state) in slots.iter().enumerate() {
                batch.push(&[0], 0, Tables { pages: &[i as u32], state }, []);
            }
            let expected = why.map_or(Ok(()), |why| Err(StepError::Batch(why.into())));
            assert_eq!(batch.check(Limits { n_states, ..LIMITS }, 1), expected, "{slots:?} of {n_states}");
        }
    }

    #[test]
    fn a_page_is_written_at_one_place() {
        let ok: &[&[(usize, usize, &[u32])]] = &[
            &[(1, 0, &[3]), (1, 0, &[4])],
            // What is read only may be shared, and what comes after the written pages is not touched.
            &[(1, 32, &[3, 4]), (1, 32, &[3, 5]), (40, 64, &[3, 3, 6, 7])],
            &[(32, 0, &[1, 2]), (32, 0, &[2, 1])],
            &[(64, 32, &[9, 8, 7, 7])],
        ];
        let twice: &[(&[(usize, usize, &[u32])], &str)] = &[
            (&[(1, 0, &[3]), (1, 0, &[3])], "page 3 is written at two places, by chunks 0 and 1"),
            (&[(1, 0, &[3]), (1, 5, &[4]), (1, 40, &[5, 4])], "page 4 is written at two places, by chunks 1 and 2"),
            (&[(33, 0, &[6, 7]), (100, 0, &[1, 2, 3, 7])], "page 7 is written at two places, by chunks 0 and 1"),
            (&[(64, 0, &[3, 3])], "page 3 is written at two places, by chunks 0 and 0"),
            (&[(1, 0, &[0]), (70, 40, &[9, 5, 6, 5])], "page 5 is written at two places, by chunks 1 and 1"),
        ];
        for chunks in ok {
            assert_eq!(check(chunks), Ok(()), "{chunks:?}");
        }
        for (chunks, why) in twice {
            assert_eq!(check(chunks), Err(StepError::Batch(why.to_string())), "{chunks:?}");
        }
    }
}
