//! What changes from step to step: ids, positions, chunks and page tables, written to pinned memory and copied to the
//! device.
//!
//! Places depend on the numbers of tokens, rows and chunks alone, so that a graph captured for them stays right.

use std::sync::Arc;

use backend::{Batch, GivenRows};
use model::plan::N_AXES;

use super::args::{Chunk, Step};
use super::drafts::Slots;
use super::driver::{Context, DriverError, Memory, Pinned, Ptr, Stream};

/// Numbers of tokens, asked rows and chunks of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Counts {
    pub tokens: usize,
    pub rows: usize,
    pub chunks: usize,
}

impl Counts {
    /// Of a batch.
    pub fn of(batch: &Batch) -> Counts {
        Counts { tokens: batch.tokens.len(), rows: batch.rows.len(), chunks: batch.chunks.len() }
    }

    /// Where each table begins, in words; the last is where pages begin.
    fn places(self) -> [usize; 7] {
        let lens = [self.tokens, self.tokens, self.tokens, self.rows, self.chunks, CHUNK_WORDS * self.chunks];
        let mut at = [0; 7];
        for (i, len) in lens.into_iter().enumerate() {
            // Chunks are read as structs: every table begins at a multiple of 64 bytes.
            at[i + 1] = (at[i] + len).next_multiple_of(16);
        }
        at
    }
}

const CHUNK_WORDS: usize = size_of::<Chunk>() / 4;

/// A table in pinned and in device memory.
struct Mirror {
    host: Pinned,
    device: Memory,
}

impl Mirror {
    fn new(context: &Arc<Context>, words: usize) -> Result<Mirror, DriverError> {
        Ok(Mirror { host: Pinned::new(context, 4 * words)?, device: Memory::new(context, 4 * words)? })
    }

    fn words(&self) -> usize {
        self.device.bytes() / 4
    }
}

/// Where kernels find what a step is given; null where a program takes nothing, and `ends` where the step has no spans.
#[derive(Clone, Copy, Debug, Default)]
pub struct Given {
    pub places: Ptr,
    pub ends: Ptr,
    pub tokens: Ptr,
    pub rows: Ptr,
    /// Number of rows.
    pub n: usize,
    /// Numbers of a row.
    pub d_input: usize,
}

impl Given {
    /// Words for steps of `max_tokens` tokens: positions on each axis, ends, tokens and rows.
    pub fn words(max_tokens: usize, d_input: usize) -> usize {
        max_tokens.saturating_mul(N_AXES + 2).saturating_add(max_tokens.saturating_mul(d_input))
    }

    /// Where each table begins, in words, in a step of `n_tokens` tokens and `n` rows.
    fn places(n_tokens: usize, n: usize) -> [usize; 4] {
        let ends = n_tokens * N_AXES;
        [0, ends, ends + n_tokens, ends + n_tokens + n]
    }
}

/// The tables of a program.
pub struct Tables {
    context: Arc<Context>,
    main: Mirror,
    window: Mirror,
    has_window: bool,
    /// What steps are given, and the numbers of a row.
    given: Option<(Mirror, usize)>,
}

impl Tables {
    /// Room for steps of `max_tokens` tokens whose sequences share `n_pages` pages of either kind. Page tables of
    /// sequences that share pages may be longer together; then [`Tables::fill`] makes room.
    pub fn new(
        context: &Arc<Context>,
        max_tokens: usize,
        n_pages: [usize; 2],
        has_window: bool,
        d_input: Option<usize>,
    ) -> Result<Tables, DriverError> {
        let most = Counts { tokens: max_tokens, rows: max_tokens, chunks: max_tokens };
        let main = Mirror::new(context, most.places()[6] + n_pages[0].max(64))?;
        let window = Mirror::new(context, if has_window { n_pages[1].max(64) } else { 16 })?;
        let given = d_input.map(|d| Ok::<_, DriverError>((Mirror::new(context, Given::words(max_tokens, d))?, d)));
        Ok(Tables { context: Arc::clone(context), main, window, has_window, given: given.transpose()? })
    }

    /// Writes a batch's tables and queues their copy. Returns whether tables moved, so that captured graphs are stale.
    /// `slots` knows what the states of its chunks have to move past.
    pub fn fill(&mut self, batch: &Batch, slots: &Slots, stream: &Stream) -> Result<bool, DriverError> {
        let counts = Counts::of(batch);
        let at = counts.places();
        let words = at[6] + batch.pages.len();
        let window_words = if self.has_window { batch.window_pages.len() } else { 0 };
        let mut moved = false;
        for (mirror, words) in [(&mut self.main, words), (&mut self.window, window_words)] {
            if words > mirror.words() {
                *mirror = Mirror::new(&self.context, words.next_power_of_two())?;
                moved = true;
            }
        }
        let host = self.main.host.words_mut::<u32>();
        host[at[0]..][..counts.tokens].copy_from_slice(&batch.tokens);
        let mut singles = batch.chunks.iter().filter(|c| c.len == 1).map(|c| c.first);
        for (i, c) in batch.chunks.iter().enumerate() {
            let range = c.first as usize..(c.first + c.len) as usize;
            host[at[1]..][range.clone()].iter_mut().zip(c.pos..).for_each(|(to, pos)| *to = pos);
            host[at[2]..][range].fill(i as u32);
            let single = singles.next().unwrap_or(0);
            let chunk =
                [c.first, c.len, c.pos, c.first_page, c.first_window_page, c.first_window_block, c.state, single];
            let to = &mut host[at[5] + CHUNK_WORDS * i..][..CHUNK_WORDS];
            let (own, of_drafts) = to.split_at_mut(chunk.len());
            own.copy_from_slice(&chunk);
            of_drafts.copy_from_slice(&slots.words(c, batch.is_draft()));
        }
        host[at[3]..][..counts.rows].copy_from_slice(&batch.rows);
        host[at[4]..][..counts.chunks].fill(u32::MAX);
        host[at[6]..][..batch.pages.len()].copy_from_slice(&batch.pages);
        // SAFETY: the mirrors are as long as what is copied, and no step begins before the last one has ended.
        unsafe { stream.upload(self.main.device.ptr(), &self.main.host, 4 * words)? };
        if window_words > 0 {
            self.window.host.words_mut::<u32>()[..window_words].copy_from_slice(&batch.window_pages);
            // SAFETY: as above.
            unsafe { stream.upload(self.window.device.ptr(), &self.window.host, 4 * window_words)? };
        }
        self.fill_given(batch, stream)?;
        Ok(moved)
    }

    /// The same of what a step is given.
    fn fill_given(&mut self, batch: &Batch, stream: &Stream) -> Result<(), DriverError> {
        let Some((mirror, d_input)) = &mut self.given else { return Ok(()) };
        let GivenRows { rows, tokens, .. } = &batch.given;
        let [_, ends, to_tokens, to_rows] = Given::places(batch.tokens.len(), tokens.len());
        let host = mirror.host.words_mut::<u32>();
        host[..ends].as_chunks_mut().0.iter_mut().zip(batch.places()).for_each(|(to, place)| *to = place);
        host[ends..to_tokens].iter_mut().zip(batch.ends()).for_each(|(to, end)| *to = end);
        host[to_tokens..to_rows].copy_from_slice(tokens);
        host[to_rows..][..rows.len()].iter_mut().zip(rows).for_each(|(to, x)| *to = x.to_bits());
        // SAFETY: the mirror has room for a checked batch, and no step begins before the last one has ended.
        unsafe { stream.upload(mirror.device.ptr(), &mirror.host, 4 * (to_rows + tokens.len() * *d_input)) }
    }

    /// Where kernels find what a step is given.
    pub fn given(&self, batch: &Batch) -> Given {
        let Some((mirror, d_input)) = &self.given else { return Given::default() };
        let n = batch.given.tokens.len();
        let at = Given::places(batch.tokens.len(), n).map(|word| mirror.device.ptr() + 4 * word as Ptr);
        let ends = if batch.given.spans.is_empty() { 0 } else { at[1] };
        Given { places: at[0], ends, tokens: at[2], rows: at[3], n, d_input: *d_input }
    }

    /// Where kernels find the tables of a step.
    pub fn step(&self, counts: Counts) -> Step {
        let at = counts.places().map(|word| self.main.device.ptr() + 4 * word as Ptr);
        Step {
            ids: at[0],
            positions: at[1],
            chunk_of: at[2],
            rows: at[3],
            faults: at[4],
            chunks: at[5],
            pages: at[6],
            window_pages: self.window.device.ptr(),
        }
    }
}
