//! A program's lists of nodes, and which of them a step takes.

use super::drafts::MAX_RUN;
use super::few::MAX_ROWS;
use super::nodes::{Node, View};
use super::tables::Counts;

/// A draft head.
pub struct Head {
    pub lists: Lists,
    /// The model's rows that it may be given.
    pub source: View,
    /// What a step of it is given.
    pub input: View,
    pub logits: View,
    pub hidden: Option<View>,
}

/// The nodes of a program.
pub struct Lists {
    /// Of steps of any number of tokens.
    pub nodes: Vec<Node>,
    /// Of steps of at most [`MAX_ROWS`] tokens.
    pub few: Vec<Node>,
    /// Of steps of up to `most` tokens; empty where such steps take `nodes`.
    pub batch: Vec<Node>,
    pub most: usize,
}

impl Lists {
    /// Those of a list.
    pub fn nodes(&self, list: List) -> &[Node] {
        match list {
            List::All => &self.nodes,
            List::Few => &self.few,
            List::Batch => &self.batch,
        }
    }

    /// All three, by the number of their list.
    pub fn all(&self) -> [&[Node]; 3] {
        [List::All, List::Few, List::Batch].map(|list| self.nodes(list))
    }
}

/// A program's list of nodes that a step takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    All = 0,
    Few = 1,
    Batch = 2,
}

/// The list that a step takes; `has_drafts`: its chunks are a token with drafts, or rows of a draft head. Short prompts
/// take that of long ones, whose products round activations less.
pub fn list(counts: Counts, longest: usize, has_drafts: bool, lists: &Lists) -> List {
    match counts.tokens {
        _ if longest > if has_drafts { MAX_RUN } else { 1 } => List::All,
        ..=MAX_ROWS => List::Few,
        n if n <= lists.most => List::Batch,
        _ => List::All,
    }
}
