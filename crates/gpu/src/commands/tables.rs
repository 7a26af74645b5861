//! What changes from step to step: ids, positions, chunks, page tables and angles. The host writes them into one
//! buffer, in which each has its place.

use crate::drafts::Slots;
use backend::rope::Angles;
use backend::{Batch, Chunk, Kinds, Limits, PAGE};
use model::plan::{N_AXES, Op, Plan};

use super::layout::Layout;
use super::{Gpu, GpuError, Span};

/// A table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// Token ids, `[T]`.
    Ids,
    /// Position of each token, `[T]`.
    Positions,
    /// Chunk of each token, `[T]`.
    ChunkOf,
    /// `Chunk` of `kernels/metal/chunk.h`, `[chunks]`.
    Chunks,
    /// Tokens whose rows are returned, `[R]`.
    Rows,
    /// Page tables of the chunks.
    Pages,
    /// Window page tables of the chunks.
    WindowPages,
    /// Tokens of the rows that the step is given, `[G]`.
    GivenTokens,
    /// These rows, `[G, d_input]`.
    GivenRows,
    /// Position after the last that each token sees where spans are heeded, `[T]`.
    Ends,
    /// Rows of each token in tables of places, `[T, N_AXES]`.
    Places,
    /// Cosines and sines of a rotary embedding, `[T, pairs, 2]`.
    Angles(usize),
}

/// Words of a chunk.
const CHUNK_WORDS: usize = 9;

/// Which tables a plan has besides those of every step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Pages of caches with a window.
    pub has_window: bool,
    /// Numbers of a row that steps are given.
    pub d_input: Option<usize>,
    /// Ends of spans.
    pub has_ends: bool,
    /// Places of tokens.
    pub has_places: bool,
}

impl Kept {
    /// Those of a plan.
    pub fn of(plan: &Plan) -> Kept {
        let d_input = plan.d_input();
        Kept {
            has_window: Kinds::of(plan).window.is_some(),
            d_input,
            has_ends: crate::may_have_spans(plan),
            has_places: plan.ops.iter().any(|op| matches!(op, Op::EmbedPlace { .. })),
        }
    }
}

/// The tables of a program.
pub struct Tables {
    spans: Vec<Span>,
    /// Bytes of each that the step has filled.
    lens: Vec<u64>,
    ropes: Vec<Angles>,
    kept: Kept,
    /// Room to write a table in.
    bytes: Vec<u8>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Number of tables before those of angles.
const N_FIRST: usize = 11;

impl Table {
    fn index(self) -> usize {
        match self {
            Table::Ids => 0,
            Table::Positions => 1,
            Table::ChunkOf => 2,
            Table::Chunks => 3,
            Table::Rows => 4,
            Table::Pages => 5,
            Table::WindowPages => 6,
            Table::GivenTokens => 7,
            Table::GivenRows => 8,
            Table::Ends => 9,
            Table::Places => 10,
            Table::Angles(rope) => N_FIRST + rope,
        }
    }
}

/// Where the tables lie at these limits. Sequences may share pages, so each chunk's page table may be as long as a
/// sequence's.
pub fn layout(limits: Limits, ropes: &[Angles], kept: Kept, max_buffer: u64) -> Layout {
    let Limits { max_tokens, max_outputs, max_positions, .. } = limits;
    let Kept { has_window, d_input, has_ends, has_places } = kept;
    let pages = max_tokens.saturating_mul(max_positions.div_ceil(PAGE));
    let words = [
        max_tokens,
        max_tokens,
        max_tokens,
        max_tokens.saturating_mul(CHUNK_WORDS),
        max_outputs.max(1),
        pages,
        if has_window { pages } else { 1 },
        d_input.map_or(1, |_| max_tokens),
        d_input.map_or(1, |d_input| max_tokens.saturating_mul(d_input)),
        if has_ends { max_tokens } else { 1 },
        if has_places { max_tokens.saturating_mul(N_AXES) } else { 1 },
    ];
    let angles = ropes.iter().map(|rope| max_tokens.saturating_mul(2 * rope.n_pairs()));
    let mut layout = Layout::default();
    for words in words.into_iter().chain(angles) {
        layout.add(words.saturating_mul(4), max_buffer);
    }
    layout
}

impl Tables {
    /// In spans as [`layout`] has them.
    pub fn new(spans: Vec<Span>, ropes: Vec<Angles>, kept: Kept) -> Tables {
        let most = ropes.iter().map(Angles::n_pairs).max().unwrap_or(0);
        let longest = spans.iter().map(|span| span.len as usize).max().unwrap_or(0);
        Tables {
            lens: vec![0; spans.len()],
            ropes,
            kept,
            bytes: Vec::with_capacity(longest),
            cos: vec![0.0; most],
            sin: vec![0.0; most],
            spans,
        }
    }

    /// The part of a table that the step has filled.
    pub fn span(&self, table: Table) -> Span {
        let i = table.index();
        self.spans[i].part(0, self.lens[i])
    }

    /// Writes a checked batch's tables.
    pub fn fill(&mut self, gpu: &mut dyn Gpu, batch: &Batch, slots: &Slots) -> Result<(), GpuError> {
        let positions = || batch.chunks.iter().flat_map(|c| c.pos..c.pos + c.len);
        let chunk_of = batch.chunks.iter().zip(0..).flat_map(|(c, i)| (0..c.len).map(move |_| i));
        self.write(gpu, Table::Ids, batch.tokens.iter().copied())?;
        self.write(gpu, Table::Positions, positions())?;
        self.write(gpu, Table::ChunkOf, chunk_of)?;
        self.write(gpu, Table::Rows, batch.rows.iter().copied())?;
        // Of each page table, the pages of the chunk's positions.
        let (mut first, mut first_window) = (0, 0);
        let chunks = batch.chunks.iter().flat_map(|c| {
            let [n_draft, n_replay] = slots.words(c, batch.is_draft());
            let place = [first, first_window, c.first_window_block];
            let words = [c.first, c.len, c.pos, c.state, n_draft, n_replay];
            first += blocks(c);
            first_window += blocks(c).saturating_sub(c.first_window_block);
            place.into_iter().chain(words)
        });
        self.write(gpu, Table::Chunks, chunks)?;
        self.write(gpu, Table::Pages, batch.chunks.iter().flat_map(|c| pages_of(batch, c, false)))?;
        if self.kept.has_window {
            self.write(gpu, Table::WindowPages, batch.chunks.iter().flat_map(|c| pages_of(batch, c, true)))?;
        }
        let given = &batch.given;
        self.write(gpu, Table::GivenTokens, given.tokens.iter().copied())?;
        self.write(gpu, Table::GivenRows, given.rows.iter().map(|x| x.to_bits()))?;
        if self.kept.has_ends {
            self.write(gpu, Table::Ends, batch.ends())?;
        }
        if self.kept.has_places {
            self.write(gpu, Table::Places, batch.places().flatten())?;
        }
        for rope in 0..self.ropes.len() {
            let angles = &self.ropes[rope];
            let n = angles.n_pairs();
            self.bytes.clear();
            for place in batch.places() {
                angles.fill_at(place, &mut self.cos[..n], &mut self.sin[..n]);
                for (cos, sin) in self.cos[..n].iter().zip(&self.sin[..n]) {
                    self.bytes.extend([cos.to_le_bytes(), sin.to_le_bytes()].as_flattened());
                }
            }
            self.send(gpu, Table::Angles(rope))?;
        }
        Ok(())
    }

    fn write(&mut self, gpu: &mut dyn Gpu, table: Table, values: impl Iterator<Item = u32>) -> Result<(), GpuError> {
        self.bytes.clear();
        values.for_each(|value| self.bytes.extend(value.to_le_bytes()));
        self.send(gpu, table)
    }

    /// Sends the bytes at hand.
    fn send(&mut self, gpu: &mut dyn Gpu, table: Table) -> Result<(), GpuError> {
        let i = table.index();
        self.lens[i] = self.bytes.len() as u64;
        match self.bytes.is_empty() {
            true => Ok(()),
            false => gpu.write(self.span(table), &self.bytes),
        }
    }
}

/// Blocks of positions up to a chunk's end.
fn blocks(c: &Chunk) -> u32 {
    (c.pos + c.len).div_ceil(PAGE as u32)
}

/// Pages of a chunk's positions, in the caches with a window or in the others.
fn pages_of<'a>(batch: &'a Batch, c: &'a Chunk, windowed: bool) -> impl Iterator<Item = u32> + 'a {
    let first = if windowed { c.first_window_block } else { 0 };
    (first..blocks(c)).map(move |block| batch.page(c, windowed, block as usize))
}
