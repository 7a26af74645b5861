//! The best logits of rows, found on the device: what is asked goes up, what was found comes down, and the rest of a
//! row stays where it lies. Asks that the kernels do not answer (masks, many candidates) are answered from the row on
//! the host.

use std::sync::Arc;

use super::args;
use super::driver::{Context, DriverError, Memory, Pinned, Ptr, Stream};
use super::encode::PICK_PARTS;
use backend::pick::Best;
use backend::{Ask, Batch, Picks};

/// Maximum number of candidates of a row that the kernels find.
const MOST: usize = 64;

/// Words of what is found in a row: `Picked` of `args.h`.
const PICKED_WORDS: usize = 6 + 2 * MOST;

const ASK_WORDS: usize = size_of::<args::PickAsk>() / 4;

/// Memory for asks and finds.
pub struct Picker {
    context: Arc<Context>,
    n_vocab: usize,
    /// Asks, and behind them the listed tokens.
    up: Option<(Pinned, Memory)>,
    /// Finds, and behind them the listed logits.
    down: Option<(Pinned, Memory)>,
    scratch: Option<Memory>,
    /// Rows of this step that the kernels answer.
    rows: Vec<usize>,
    /// Rows whose logits travel, `[R]`.
    wanted: Vec<bool>,
    /// Listed logits of all rows together: rows may list the same tokens.
    n_listed: usize,
}

impl Picker {
    /// For a vocabulary.
    pub fn new(context: &Arc<Context>, n_vocab: usize) -> Picker {
        let context = Arc::clone(context);
        let (rows, wanted) = (Vec::new(), Vec::new());
        Picker { context, n_vocab, up: None, down: None, scratch: None, rows, wanted, n_listed: 0 }
    }

    /// Whether the kernels answer it.
    fn is_for_device(&self, ask: &Ask) -> bool {
        let fits = self.n_vocab.div_ceil(PICK_PARTS) * 4 <= 32 * 1024;
        matches!(*ask, Ask::Best { n, mask: None, .. } if fits && n as usize <= MOST)
    }

    /// Whether all logits of a row travel.
    pub fn is_row_wanted(&self, row: usize) -> bool {
        self.wanted[row]
    }

    /// Queues the copy of what a batch asks; the arguments of the kernels where they have something to do.
    pub fn fill(&mut self, batch: &Batch, stream: &Stream, logits: Ptr) -> Result<Option<args::Pick>, DriverError> {
        self.rows.clear();
        self.wanted.clear();
        for (row, ask) in batch.asks.iter().enumerate() {
            let on_device = self.is_for_device(ask);
            if on_device {
                self.rows.push(row);
            }
            self.wanted.push(!on_device && !matches!(ask, Ask::Hidden));
        }
        if self.rows.is_empty() {
            return Ok(None);
        }
        let n = self.rows.len();
        let (n_up, mut n_down) = (batch.listed.len(), 0);
        for &row in &self.rows {
            let Ask::Best { n_listed, .. } = batch.asks[row] else { continue };
            n_down += n_listed as usize;
        }
        self.n_listed = n_down;
        let context = &self.context;
        let grow = |pair: &mut Option<(Pinned, Memory)>, words: usize| {
            if pair.as_ref().is_none_or(|(_, memory)| memory.bytes() < 4 * words) {
                let bytes = 4 * words.next_power_of_two();
                *pair = Some((Pinned::new(context, bytes)?, Memory::new(context, bytes)?));
            }
            Ok::<_, DriverError>(())
        };
        grow(&mut self.up, ASK_WORDS * n + n_up)?;
        grow(&mut self.down, PICKED_WORDS * n + self.n_listed)?;
        let scratch_bytes = n * PICK_PARTS * (16 + 8 * MOST);
        if self.scratch.as_ref().is_none_or(|scratch| scratch.bytes() < scratch_bytes) {
            self.scratch = Some(Memory::new(context, scratch_bytes.next_power_of_two())?);
        }
        let (Some((host, up)), Some((_, down)), Some(scratch)) = (&mut self.up, &self.down, &self.scratch) else {
            return Ok(None);
        };
        let words = host.words_mut::<u32>();
        let mut first_out = 0;
        for (i, &row) in self.rows.iter().enumerate() {
            let Ask::Best { n, first_listed, n_listed, log_sum_exp, .. } = batch.asks[row] else { continue };
            let ask = [row as u32, n, first_listed, n_listed, u32::from(log_sum_exp), first_out];
            words[ASK_WORDS * i..][..ASK_WORDS].copy_from_slice(&ask);
            first_out += n_listed;
        }
        words[ASK_WORDS * n..][..n_up].copy_from_slice(&batch.listed);
        // SAFETY: both are as long as what is copied, and no step begins before the last one has ended.
        unsafe { stream.upload(up.ptr(), host, 4 * (ASK_WORDS * n + n_up))? };
        Ok(Some(args::Pick {
            logits,
            asks: up.ptr(),
            listed: up.ptr() + 4 * (ASK_WORDS * n) as u64,
            parts: scratch.ptr(),
            candidates: scratch.ptr() + (n * PICK_PARTS * 16) as u64,
            out: down.ptr(),
            listed_out: down.ptr() + 4 * (PICKED_WORDS * n) as u64,
            n_vocab: self.n_vocab as u32,
            rows: n as u32,
        }))
    }

    /// Queues the copy of what was found.
    pub fn fetch(&mut self, stream: &Stream) -> Result<(), DriverError> {
        match &mut self.down {
            Some((host, device)) if !self.rows.is_empty() => {
                let bytes = 4 * (PICKED_WORDS * self.rows.len() + self.n_listed);
                // SAFETY: the finds are so long, and are read only after the stream was waited for.
                unsafe { stream.download(host, 0, device.ptr(), bytes) }
            }
            _ => Ok(()),
        }
    }

    /// What was found in all rows of a batch, on the device or now in the rows that travelled.
    pub fn read(&self, batch: &Batch, logits: &[f32], picks: &mut Picks) {
        if self.rows.is_empty() {
            picks.fill(batch, logits, self.n_vocab);
            return;
        }
        let mut host = Picks::default();
        host.fill_rows(batch, logits, self.n_vocab, |row| self.wanted[row]);
        picks.clear();
        let words = self.down.as_ref().map_or(&[][..], |(host, _)| host.words::<u32>());
        let mut best = Vec::with_capacity(MOST);
        let mut first_out = PICKED_WORDS * self.rows.len();
        for row in 0..batch.asks.len() {
            let Ok(i) = self.rows.binary_search(&row) else {
                if let Some(found) = host.get(row) {
                    picks.push(row, found);
                }
                continue;
            };
            let Ask::Best { n_listed, log_sum_exp, .. } = batch.asks[row] else { continue };
            let found = &words[PICKED_WORDS * i..][..PICKED_WORDS];
            let (n, bad) = (found[2] as usize, found[3]);
            let bad = (bad != u32::MAX).then(|| (bad, f32::from_bits(found[4])));
            best.clear();
            if bad.is_none() {
                best.extend((0..n).map(|j| (found[6 + j], f32::from_bits(found[6 + MOST + j]))));
            }
            let sum = f64::from_bits(u64::from(found[0]) | u64::from(found[1]) << 32);
            let listed = &words[first_out..][..n_listed as usize];
            first_out += n_listed as usize;
            let listed: Vec<f32> = listed.iter().map(|&word| f32::from_bits(word)).collect();
            let log_sum_exp = if log_sum_exp && bad.is_none() { sum } else { f64::NAN };
            picks.push(row, Best { best: &best, listed: &listed, log_sum_exp, bad });
        }
    }
}
