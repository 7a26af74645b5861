//! A dispatch of a plan, as data: what is bound where, its parameters and its grid. Only numbers of rows are open until
//! a step fills them in.

use model::plan::Rows;

use super::gpu::{Cmd, List, Pipe, Span, Use};
use super::tables::Table;
use crate::Batch;

/// Threads of a threadgroup: what every GPU allows every kernel.
pub const THREADS: u32 = 64;

/// What is bound to a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// The same in every step.
    Fixed(Span),
    /// As many rows as the step has, of this many bytes, from the span's begin; the span is what the limits allow.
    Rows(Span, Rows, u64),
    /// A table of the step's inputs.
    Table(Table),
}

/// A word of a kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Word {
    /// The same in every step.
    Is(u32),
    /// This many for each row.
    Each(Rows, u32),
}

/// An extent of a grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Extent {
    /// The same in every step.
    Is(u32),
    /// A threadgroup for so many things, of which a row has `each`.
    Of {
        /// Whose rows.
        rows: Rows,
        /// Things of a row.
        each: u32,
        /// Things of a threadgroup.
        per: u32,
    },
    /// A threadgroup for each chunk of the step.
    Chunks,
    /// A threadgroup for so many tokens of the step's longest chunk.
    Longest(u32),
}

/// A dispatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Name of the op.
    pub op: &'static str,
    /// Index of its unit; of its pipe once they are built.
    pub unit: usize,
    /// Slots.
    pub binds: Vec<(u8, Place, Use)>,
    /// Slot of the parameters.
    pub params_slot: u8,
    /// Parameters.
    pub params: Vec<Word>,
    /// Threadgroups.
    pub grid: [Extent; 3],
    /// Another kernel with the same slots and parameters, for many rows.
    pub many: Option<Many>,
}

/// A kernel that takes the place of a dispatch's own from so many rows on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Many {
    /// Which rows are counted.
    pub rows: Rows,
    /// From how many on.
    pub from: usize,
    /// Index of its unit.
    pub unit: usize,
    /// Threadgroups.
    pub grid: [Extent; 3],
    /// Threads of a threadgroup.
    pub threads: u32,
}

/// What a step fills in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Tokens.
    pub tokens: usize,
    /// Returned rows.
    pub outputs: usize,
    /// Chunks.
    pub chunks: usize,
    /// Tokens of the longest chunk.
    pub longest: usize,
}

impl Counts {
    /// The numbers of a batch.
    pub fn of_batch(batch: &Batch) -> Counts {
        Counts {
            tokens: batch.tokens.len(),
            outputs: batch.rows.len(),
            chunks: batch.chunks.len(),
            longest: batch.chunks.iter().map(|c| c.len as usize).max().unwrap_or(0),
        }
    }

    /// Number of rows.
    fn of(self, rows: Rows) -> u64 {
        rows.count(self.tokens, self.outputs) as u64
    }
}

impl Extent {
    fn count(self, counts: Counts) -> u32 {
        match self {
            Extent::Is(n) => n,
            // Compiling has checked that the numbers at the limits have 32 bits.
            Extent::Of { rows, each, per } => (counts.of(rows) * u64::from(each)).div_ceil(u64::from(per)) as u32,
            Extent::Chunks => counts.chunks as u32,
            Extent::Longest(per) => (counts.longest as u32).div_ceil(per),
        }
    }
}

impl Node {
    /// Appends its commands; nothing where it has no rows. Returns whether there are any.
    pub fn encode(
        &self,
        pipes: &[Pipe],
        counts: Counts,
        table: impl Fn(Table) -> Span,
        words: &mut Vec<u32>,
        list: &mut List,
    ) -> bool {
        let many = self.many.filter(|many| counts.of(many.rows) >= many.from as u64);
        let (unit, grid, threads) =
            many.map_or((self.unit, self.grid, THREADS), |many| (many.unit, many.grid, many.threads));
        let grid = grid.map(|extent| extent.count(counts));
        if grid.contains(&0) {
            return false;
        }
        list.cmds.push(Cmd::Pipe(pipes[unit]));
        for &(slot, place, used) in &self.binds {
            let span = match place {
                Place::Fixed(span) => span,
                Place::Rows(span, rows, bytes) => span.part(0, counts.of(rows) * bytes),
                Place::Table(name) => table(name),
            };
            list.cmds.push(Cmd::Bind { slot, span, used });
        }
        words.clear();
        words.extend(self.params.iter().map(|word| match *word {
            Word::Is(x) => x,
            Word::Each(rows, each) => (counts.of(rows) * u64::from(each)) as u32,
        }));
        list.params(self.params_slot, words);
        list.cmds.push(Cmd::Groups { grid, threads });
        true
    }

    /// Its largest numbers of things and of threadgroups, which must have 32 bits.
    pub fn largest(&self, limits: Counts) -> u64 {
        let words = self.params.iter().map(|word| match *word {
            Word::Is(_) => 0,
            Word::Each(rows, each) => limits.of(rows).saturating_mul(u64::from(each)),
        });
        let extents = self.grid.iter().map(|extent| match *extent {
            Extent::Is(n) => u64::from(n),
            Extent::Of { rows, each, .. } => limits.of(rows).saturating_mul(u64::from(each)),
            Extent::Chunks => limits.chunks as u64,
            Extent::Longest(_) => limits.longest as u64,
        });
        words.chain(extents).max().unwrap_or(0)
    }

    /// The spans it touches in memory that kernels write, as large as the limits allow. Tables are written by the host.
    fn spans(&self) -> impl Iterator<Item = (Span, Use)> + '_ {
        self.binds.iter().filter_map(|&(_, place, used)| match place {
            Place::Fixed(span) | Place::Rows(span, ..) => Some((span, used)),
            Place::Table(_) => None,
        })
    }
}

/// A dispatch that copies a slot of a recurrent state to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopySlot {
    /// Index of its unit.
    pub unit: usize,
    /// The state in all slots.
    pub slots: Span,
    /// Numbers of a slot.
    pub n: u32,
}

impl CopySlot {
    /// Appends its commands.
    pub fn encode(&self, pipes: &[Pipe], from: u32, to: u32, list: &mut List) {
        let slot = |i: u32| self.slots.part(4 * u64::from(self.n) * u64::from(i), 4 * u64::from(self.n));
        list.cmds.push(Cmd::Pipe(pipes[self.unit]));
        list.cmds.push(Cmd::Bind { slot: 0, span: slot(from), used: Use::Read });
        list.cmds.push(Cmd::Bind { slot: 1, span: slot(to), used: Use::Write });
        list.params(2, &[self.n]);
        list.cmds.push(Cmd::Groups { grid: [self.n.div_ceil(THREADS), 1, 1], threads: THREADS });
    }
}

/// Puts dispatches in levels: one of a level meets none of its level, and at least one of the level before, which a
/// barrier parts from it. Returns them in the order of levels, with the number of each level.
pub fn levels(nodes: Vec<Node>) -> Vec<Vec<Node>> {
    let mut levels: Vec<Vec<Node>> = Vec::new();
    for node in nodes {
        let meets = |other: &Node| {
            other.spans().any(|(a, a_used)| {
                node.spans().any(|(b, b_used)| (a_used, b_used) != (Use::Read, Use::Read) && a.overlaps(b))
            })
        };
        let level = levels.iter().rposition(|level| level.iter().any(meets)).map_or(0, |last| last + 1);
        if level == levels.len() {
            levels.push(Vec::new());
        }
        levels[level].push(node);
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::super::gpu::Buf;
    use super::*;

    /// Dispatches over words of one buffer: what each reads and what it writes.
    fn nodes(uses: &[(&[u64], &[u64])]) -> Vec<Node> {
        let span = |&word: &u64| Place::Fixed(Span { buf: Buf(0), at: 4 * word, len: 4 });
        let node = |(i, &(reads, writes)): (usize, &(&[u64], &[u64]))| {
            let reads = reads.iter().map(|word| (0, span(word), Use::Read));
            let binds = reads.chain(writes.iter().map(|word| (0, span(word), Use::Write))).collect();
            Node {
                op: "test",
                unit: i,
                binds,
                params_slot: 0,
                params: Vec::new(),
                grid: [Extent::Is(1); 3],
                many: None,
            }
        };
        uses.iter().enumerate().map(node).collect()
    }

    #[test]
    fn a_dispatch_comes_behind_what_it_meets_and_no_later() {
        // What dispatches read and write, and their levels.
        let cases: &[(&[(&[u64], &[u64])], &[&[usize]])] = &[
            (&[(&[0], &[1]), (&[0], &[2]), (&[1, 2], &[3])], &[&[0, 1], &[2]]),
            // Reads of one word do not meet; a write after them does.
            (&[(&[0], &[1]), (&[0], &[2]), (&[5], &[0])], &[&[0, 1], &[2]]),
            // A write after a write.
            (&[(&[], &[0]), (&[], &[0]), (&[], &[1])], &[&[0, 2], &[1]]),
            // Independent chains side by side.
            (&[(&[0], &[1]), (&[1], &[2]), (&[8], &[9]), (&[9], &[7])], &[&[0, 2], &[1, 3]]),
        ];
        for (uses, wanted) in cases {
            let found: Vec<Vec<usize>> =
                levels(nodes(uses)).iter().map(|level| level.iter().map(|node| node.unit).collect()).collect();
            assert_eq!(&found, wanted);
        }
    }
}
