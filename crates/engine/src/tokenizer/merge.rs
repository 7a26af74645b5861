//! The merge loop that both kinds of vocabulary share: neighbors join, best pair first, until no pair is left.
//!
//! A linked list of symbols and a heap of candidate pairs, so n symbols cost O(n log n) whatever the text. Knows
//! nothing of tokens: what may join, and how good that is, the caller's `join` says.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No symbol, or no token.
pub const NONE: u32 = u32::MAX;

/// Longest word the loop takes, in bytes, so that positions fit 32 bits with room; longer words are cut by the caller.
pub const MAX_WORD: usize = 1 << 30;

/// A stretch of the word and the token it is so far.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// First byte in the word.
    pub start: u32,
    /// Length in bytes; 0 once the symbol has been joined to the one before it.
    pub len: u32,
    /// Its token, or [`NONE`].
    pub id: u32,
    prev: u32,
    next: u32,
}

/// What two neighbors become.
#[derive(Clone, Copy, Debug)]
pub struct Join {
    /// The lowest order joins first; the leftmost of equals.
    pub order: u32,
    /// The token of the joined symbol.
    pub id: u32,
}

/// A pair that may join: position and size tell whether it is still what it was when it was queued.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    key: u64, // order, then index of the left symbol
    len: u32,
    id: u32,
}

/// The loop's storage, kept between words.
#[derive(Default)]
pub struct Merger {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Forgets the last word.
    pub fn clear(&mut self) {
        self.symbols.clear();
        self.queue.clear();
    }

    /// Appends a symbol of `len` bytes.
    pub fn push(&mut self, len: usize, id: u32) {
        let i = self.symbols.len() as u32;
        let start = self.symbols.last().map_or(0, |last| last.start + last.len);
        if let Some(last) = self.symbols.last_mut() {
            last.next = i;
        }
        self.symbols.push(Symbol { start, len: len as u32, id, prev: i.wrapping_sub(1), next: NONE });
    }

    /// Joins until nothing joins, and calls `each` with the symbols that are left, in order.
    pub fn run(&mut self, join: impl Fn(&Symbol, &Symbol) -> Option<Join>, mut each: impl FnMut(&Symbol)) {
        for left in 0..self.symbols.len().saturating_sub(1) {
            self.consider(left as u32, &join);
        }
        while let Some(Reverse(best)) = self.queue.pop() {
            let left_idx = best.key as u32;
            let left = self.symbols[left_idx as usize];
            if left.len == 0 || left.next == NONE {
                continue;
            }
            let right = self.symbols[left.next as usize];
            // Symbols only ever grow, so an equal sum means that neither side has changed.
            if left.len + right.len != best.len {
                continue;
            }
            self.symbols[left.next as usize].len = 0;
            let joined = &mut self.symbols[left_idx as usize];
            (joined.len, joined.id, joined.next) = (best.len, best.id, right.next);
            if right.next != NONE {
                self.symbols[right.next as usize].prev = left_idx;
                self.consider(left_idx, &join);
            }
            if left.prev != NONE {
                self.consider(left.prev, &join);
            }
        }
        let mut i = 0;
        while let Some(symbol) = self.symbols.get(i as usize) {
            each(symbol);
            i = symbol.next;
        }
    }

    /// Queues the pair that starts at `left`, which has a neighbor, if it may join.
    fn consider(&mut self, left: u32, join: &impl Fn(&Symbol, &Symbol) -> Option<Join>) {
        let a = &self.symbols[left as usize];
        let b = &self.symbols[a.next as usize];
        if let Some(Join { order, id }) = join(a, b) {
            let key = u64::from(order) << 32 | u64::from(left);
            self.queue.push(Reverse(Candidate { key, len: a.len + b.len, id }));
        }
    }
}

/// Cuts a text into words that the loop can take, at character boundaries.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (word, tail) = rest.split_at(rest.floor_char_boundary(MAX_WORD));
        rest = tail;
        Some(word)
    })
}
