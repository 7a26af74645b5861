//! A dispatch of a plan, as data: what is bound where, its parameters and its grid. Only numbers of rows are open until
//! a step fills them in.

use model::plan::Rows;

use super::tables::Table;
use super::{Cmd, List, Pipe, Span, Use};
use crate::drafts::Slots;
use backend::Batch;

/// Threads of a threadgroup: what every GPU allows every kernel.
pub const THREADS: u32 = 64;

/// What is bound to a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// The same in every step.
    Fixed(Span),
    /// As many rows as the step has, of this many bytes, from the span's begin; the span is what the limits allow.
    Rows(Span, Rows, u64),
    /// As many things as an extent counts, of this many bytes, from the span's begin.
    Sized(Span, Extent, u64),
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
    /// This many for each row that the step is given.
    Given(u32),
}

/// What the form of a dispatch depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// The step's rows of this kind.
    Rows(Rows),
    /// Tokens of the step's longest chunk.
    Longest,
    /// Positions of the step's longest sequence; 0 in steps of `below` tokens or more.
    Reach {
        /// Tokens from which steps count none.
        below: usize,
    },
    /// Spans of tokens that see each other.
    Spans,
    /// Drafts that recurrent states see.
    Drafts,
    /// Accepted drafts that recurrent states move past.
    Replays,
}

/// Steps in which something runs: `from <= count < to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct When {
    /// What is counted.
    pub count: Count,
    /// The least count.
    pub from: usize,
    /// The least count that is too large.
    pub to: usize,
}

impl When {
    fn holds(self, counts: Counts) -> bool {
        let n = match self.count {
            Count::Rows(rows) => counts.of(rows),
            Count::Longest => counts.longest as u64,
            Count::Reach { below } if counts.tokens >= below => 0,
            Count::Reach { .. } => counts.positions as u64,
            Count::Spans => counts.spans as u64,
            Count::Drafts => counts.drafts as u64,
            Count::Replays => counts.replays as u64,
        };
        self.from as u64 <= n && n < self.to as u64
    }
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
    /// Threadgroups of `per` things, of which a row that the step is given has `each`.
    Given {
        /// Things of a row.
        each: u32,
        /// Things of a threadgroup.
        per: u32,
    },
    /// A threadgroup for so many things, of which each token of the step's longest chunk has `each`.
    Longest {
        /// Things of a token.
        each: u32,
        /// Things of a threadgroup.
        per: u32,
    },
    /// A threadgroup for so many positions of the step's longest sequence.
    Parts {
        /// Positions.
        per: u32,
    },
    /// Slots of tiles of 32 things, of which a row has `each`, that are sorted to this many kinds.
    Tiles {
        /// Whose rows.
        rows: Rows,
        /// Things of a row.
        each: u32,
        /// Kinds.
        kinds: u32,
    },
}

/// A dispatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Name of the op.
    pub op: &'static str,
    /// Layer of the op; none before the first and behind the last.
    pub layer: Option<u32>,
    /// Bytes of matrices that it reads for one row.
    pub bytes: u64,
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
    /// Threads of a threadgroup.
    pub threads: u32,
    /// In which steps it runs; `None`: in all. One that begins at 0 has others that take its place where it ends.
    pub when: Option<When>,
    /// Of these, steps in which it does not run.
    pub unless: Option<When>,
    /// Other kernels with the same slots and parameters.
    pub forms: Vec<Form>,
}

/// A kernel that takes the place of a dispatch's own in some steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Form {
    /// In which.
    pub when: When,
    /// Index of its unit.
    pub unit: usize,
    /// Threadgroups.
    pub grid: [Extent; 3],
    /// Threads of a threadgroup.
    pub threads: u32,
}

/// What a step fills in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens.
    pub tokens: usize,
    /// Returned rows.
    pub outputs: usize,
    /// Chunks.
    pub chunks: usize,
    /// Tokens of the longest chunk.
    pub longest: usize,
    /// Positions of the longest sequence.
    pub positions: usize,
    /// Rows that the step is given.
    pub given: usize,
    /// Spans of tokens that see each other.
    pub spans: usize,
    /// Drafts that recurrent states see.
    pub drafts: usize,
    /// Accepted drafts that recurrent states move past.
    pub replays: usize,
}

impl Counts {
    /// The numbers of a batch, and of what slots keep for it.
    pub fn of_batch(batch: &Batch, slots: &Slots) -> Counts {
        let words = batch.chunks.iter().map(|c| slots.words(c, batch.is_draft()).map(|n| n as usize));
        let [drafts, replays] = words.fold([0; 2], |sum, n| [sum[0] + n[0], sum[1] + n[1]]);
        Counts {
            tokens: batch.tokens.len(),
            outputs: batch.rows.len(),
            chunks: batch.chunks.len(),
            longest: batch.chunks.iter().map(|c| c.len as usize).max().unwrap_or(0),
            positions: batch.chunks.iter().map(|c| (c.pos + c.len) as usize).max().unwrap_or(0),
            given: batch.given.tokens.len(),
            spans: batch.given.spans.len(),
            drafts,
            replays,
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
            Extent::Given { each, per } => (counts.given as u64 * u64::from(each)).div_ceil(u64::from(per)) as u32,
            Extent::Longest { each, per } => (counts.longest as u64 * u64::from(each)).div_ceil(u64::from(per)) as u32,
            Extent::Parts { per } => (counts.positions as u64).div_ceil(u64::from(per)) as u32,
            Extent::Tiles { rows, each, kinds } => (counts.of(rows) * u64::from(each) / 32) as u32 + kinds,
        }
    }
}

impl Node {
    /// Whether it is one of the dispatches of a step.
    fn is_due(&self, counts: Counts) -> bool {
        self.when.is_none_or(|when| when.holds(counts)) && !self.unless.is_some_and(|when| when.holds(counts))
    }

    /// What runs in a step: index of the unit, grid and threads. `None` where nothing does.
    pub fn dispatch(&self, counts: Counts) -> Option<(usize, [u32; 3], u32)> {
        if !self.is_due(counts) {
            return None;
        }
        let form = self.forms.iter().find(|form| form.when.holds(counts));
        let (unit, grid, threads) =
            form.map_or((self.unit, self.grid, self.threads), |form| (form.unit, form.grid, form.threads));
        let grid = grid.map(|extent| extent.count(counts));
        (!grid.contains(&0)).then_some((unit, grid, threads))
    }

    /// Appends its commands; nothing where it has no rows. Returns whether there are any.
    pub fn encode(
        &self,
        pipes: &[Pipe],
        counts: Counts,
        table: impl Fn(Table) -> Span,
        words: &mut Vec<u32>,
        list: &mut List,
    ) -> bool {
        let Some((unit, grid, threads)) = self.dispatch(counts) else { return false };
        list.cmds.push(Cmd::Pipe(pipes[unit]));
        for &(slot, place, used) in &self.binds {
            let span = match place {
                Place::Fixed(span) => span,
                Place::Rows(span, rows, bytes) => span.part(0, counts.of(rows) * bytes),
                Place::Sized(span, extent, bytes) => span.part(0, u64::from(extent.count(counts)) * bytes),
                Place::Table(name) => table(name),
            };
            list.cmds.push(Cmd::Bind { slot, span, used });
        }
        words.clear();
        words.extend(self.params.iter().map(|word| match *word {
            Word::Is(x) => x,
            Word::Each(rows, each) => (counts.of(rows) * u64::from(each)) as u32,
            Word::Given(each) => (counts.given as u64 * u64::from(each)) as u32,
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
            Word::Given(each) => (limits.given as u64).saturating_mul(u64::from(each)),
        });
        let extents =
            self.grid.iter().chain(self.forms.iter().flat_map(|form| &form.grid)).map(|extent| match *extent {
                Extent::Is(n) => u64::from(n),
                Extent::Of { rows, each, .. } => limits.of(rows).saturating_mul(u64::from(each)),
                Extent::Chunks => limits.chunks as u64,
                Extent::Given { each, .. } => (limits.given as u64).saturating_mul(u64::from(each)),
                Extent::Parts { .. } => limits.positions as u64,
                Extent::Longest { each, .. } => (limits.longest as u64).saturating_mul(u64::from(each)),
                Extent::Tiles { rows, each, kinds } => {
                    limits.of(rows).saturating_mul(u64::from(each)).saturating_add(u64::from(kinds))
                }
            });
        words.chain(extents).max().unwrap_or(0)
    }

    /// The spans it touches in memory that kernels write, as large as the limits allow. Tables are written by the host.
    fn spans(&self) -> impl Iterator<Item = (Span, Use)> + '_ {
        self.binds.iter().filter_map(|&(_, place, used)| match place {
            Place::Fixed(span) | Place::Rows(span, ..) | Place::Sized(span, ..) => Some((span, used)),
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
    /// Numbers of a state, of a draft kept after it, and of a slot.
    pub numbers: [u32; 3],
}

impl CopySlot {
    /// Appends its commands; `n_kept`: drafts that are copied along.
    pub fn encode(&self, pipes: &[Pipe], [from, to, n_kept]: [u32; 3], list: &mut List) {
        let [state, draft, slot] = self.numbers;
        let n = state + n_kept * draft;
        let slot = |i: u32| self.slots.part(4 * u64::from(slot) * u64::from(i), 4 * u64::from(n));
        list.cmds.push(Cmd::Pipe(pipes[self.unit]));
        list.cmds.push(Cmd::Bind { slot: 0, span: slot(from), used: Use::Read });
        list.cmds.push(Cmd::Bind { slot: 1, span: slot(to), used: Use::Write });
        list.params(2, &[n]);
        list.cmds.push(Cmd::Groups { grid: [n.div_ceil(THREADS), 1, 1], threads: THREADS });
    }
}

/// A plan's dispatches, and the order in which those of a step run.
pub struct Schedule {
    nodes: Vec<Node>,
    /// What the nodes' own differ in, each once.
    whens: Vec<When>,
    /// Which of `whens` hold, and the levels of the nodes that then run.
    known: Vec<(Vec<bool>, Vec<Vec<usize>>)>,
}

impl Schedule {
    /// Of dispatches in the plan's order.
    pub fn new(nodes: Vec<Node>) -> Schedule {
        let mut whens: Vec<When> = Vec::new();
        for when in nodes.iter().flat_map(|node| [node.when, node.unless]).flatten() {
            if !whens.contains(&when) {
                whens.push(when);
            }
        }
        Schedule { nodes, whens, known: Vec::new() }
    }

    /// The dispatches.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The dispatches, and those of a step in levels. A step of a new kind has its levels found.
    pub fn of_step(&mut self, counts: Counts) -> (&[Node], &[Vec<usize>]) {
        let Schedule { nodes, whens, known } = self;
        let holds = || whens.iter().map(|when| when.holds(counts));
        let i = known.iter().position(|(mask, _)| mask.iter().copied().eq(holds())).unwrap_or_else(|| {
            let runs = |i: &usize| nodes[*i].is_due(counts);
            known.push((holds().collect(), levels(nodes, (0..nodes.len()).filter(runs))));
            known.len() - 1
        });
        (nodes, &known[i].1)
    }
}

/// Puts dispatches in levels: one of a level meets none of its level, and at least one of the level before, which a
/// barrier parts from it. Returns them in the order of levels.
fn levels(nodes: &[Node], which: impl Iterator<Item = usize>) -> Vec<Vec<usize>> {
    let mut levels: Vec<Vec<usize>> = Vec::new();
    for i in which {
        let meets = |&other: &usize| {
            nodes[other].spans().any(|(a, a_used)| {
                nodes[i].spans().any(|(b, b_used)| (a_used, b_used) != (Use::Read, Use::Read) && a.overlaps(b))
            })
        };
        let level = levels.iter().rposition(|level| level.iter().any(meets)).map_or(0, |last| last + 1);
        if level == levels.len() {
            levels.push(Vec::new());
        }
        levels[level].push(i);
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
                layer: None,
                bytes: 0,
                unit: i,
                binds,
                params_slot: 0,
                params: Vec::new(),
                grid: [Extent::Is(1); 3],
                threads: THREADS,
                when: None,
                unless: None,
                forms: Vec::new(),
            }
        };
        uses.iter().enumerate().map(node).collect()
    }

    #[test]
    fn a_step_has_the_levels_of_what_runs_in_it() {
        let mut nodes = nodes(&[(&[0], &[1]), (&[0], &[1]), (&[1], &[2]), (&[1], &[3])]);
        let count = Count::Rows(Rows::Tokens);
        for (node, (from, to)) in nodes.iter_mut().zip([(0, 9), (9, usize::MAX), (9, usize::MAX)]) {
            node.when = Some(When { count, from, to });
        }
        let mut schedule = Schedule::new(nodes);
        let mut of = |tokens| {
            let positions = tokens;
            let counts = Counts { tokens, outputs: 1, chunks: 1, longest: tokens, positions, ..Counts::default() };
            schedule.of_step(counts).1.to_vec()
        };
        assert_eq!(of(8), [vec![0], vec![3]]);
        assert_eq!(of(9), [vec![1], vec![2, 3]]);
        assert_eq!(of(8), [vec![0], vec![3]]);
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
            assert_eq!(&levels(&nodes(uses), 0..uses.len()), wanted);
        }
    }
}
