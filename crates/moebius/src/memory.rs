//! The memory of sequences: what they take, and what an engine sets aside for them.
//!
//! Knows plans and limits, and nothing of weights, which stay mapped.

use backend::{Kinds, Limits, PAGE};
use model::plan::Plan;

/// Bytes that sequences of a model take.
#[derive(Clone, Copy, Debug)]
pub struct CacheBytes {
    /// For each position, in the layers that keep all positions.
    pub position: u64,
    /// For each position, in the layers that keep a window.
    pub window_position: u64,
    /// Recurrent state, for each sequence and each checkpoint.
    pub state: u64,
    kinds: Kinds,
}

impl CacheBytes {
    /// Of a plan whose caches have elements of so many bytes.
    pub fn of(plan: &Plan, element: usize) -> CacheBytes {
        CacheBytes {
            position: plan.kv_bytes_per_position(element) as u64,
            window_position: plan.window_bytes_per_position(element) as u64,
            state: plan.state_bytes() as u64,
            kinds: Kinds::of(plan),
        }
    }

    /// All memory that the limits ask for.
    pub fn total(&self, limits: &Limits) -> u64 {
        let pages = |n: usize, bytes: u64| ((n * PAGE) as u64).saturating_mul(bytes);
        pages(limits.n_pages, self.position)
            .saturating_add(pages(limits.n_window_pages, self.window_position))
            .saturating_add(self.state.saturating_mul(limits.n_states as u64))
    }

    /// What a sequence of up to `positions` takes however long it is: its window and its state.
    pub fn fixed(&self, positions: usize) -> u64 {
        ((self.window_pages(positions) * PAGE) as u64).saturating_mul(self.window_position).saturating_add(self.state)
    }

    /// What decoding the token behind `context` positions reads.
    pub fn read_per_token(&self, context: u64) -> u64 {
        let window = self.kinds.window.map_or(0, |window| context.min(window as u64));
        context * self.position + window * self.window_position + self.state
    }

    /// Window pages that a sequence of up to `positions` needs at a time when it decodes.
    pub fn window_pages(&self, positions: usize) -> usize {
        self.kinds.window_blocks().min(positions.div_ceil(PAGE))
    }

    /// Adds what `sequences` of up to `positions` need beside pages, and what checkpoints of cached prefixes may take: a
    /// sixteenth of the free memory for each kind, and no more than are of use.
    pub fn set_aside(&self, sequences: usize, positions: usize, free: Option<usize>, limits: Limits) -> Limits {
        let checkpoints = |bytes: u64| match free {
            Some(free) => (free as u64 / 16 / bytes.max(1)).clamp(MIN_CHECKPOINTS, MAX_CHECKPOINTS) as usize,
            None => MIN_CHECKPOINTS as usize,
        };
        let window = self.window_pages(positions);
        let n_window = window * (sequences + checkpoints((window * PAGE) as u64 * self.window_position));
        let chunk = if window > 0 { limits.max_tokens.div_ceil(PAGE) } else { 0 };
        Limits {
            // What a chunk writes is there beside the windows; no more than all positions ever have.
            n_window_pages: (n_window + chunk).min(limits.n_pages.max(window * sequences)),
            n_states: if self.kinds.state { sequences + checkpoints(self.state) } else { 0 },
            ..limits
        }
    }
}

/// Fewest checkpoints: the end of the last prompt and the end of its answer, of two conversations.
const MIN_CHECKPOINTS: u64 = 4;
/// Most checkpoints.
const MAX_CHECKPOINTS: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_set_aside_by_kind() {
        let kinds = |window, state| Kinds { window, state };
        let limits = Limits { max_tokens: 512, n_pages: 1000, ..Limits::default() };
        let cases = [
            // kinds, sequences, positions, free bytes, window pages, states
            (kinds(None, false), 3, 8192, Some(1 << 30), 0, 0),
            (kinds(None, true), 3, 8192, Some(1 << 30), 0, 3 + 64),
            (kinds(None, true), 3, 8192, Some(100 << 20), 0, 3 + 6),
            (kinds(None, true), 1, 8192, Some(0), 0, 1 + 4),
            (kinds(None, true), 1, 8192, None, 0, 1 + 4),
            // A window of 128 looks at 5 pages, of 1,000 bytes a position; a chunk writes 16.
            (kinds(Some(128), false), 1, 8192, Some(0), 5 * 5 + 16, 0),
            (kinds(Some(128), false), 2, 8192, Some(16 * 8 * 160_000), 10 * 5 + 16, 0),
            // A window wider than the context is no wider than it.
            (kinds(Some(4096), true), 1, 320, Some(0), 5 * 10 + 16, 5),
            // No more than all positions have.
            (kinds(Some(4096), false), 4, 32_000, Some(0), 1000, 0),
        ];
        for (kinds, sequences, positions, free, n_window_pages, n_states) in cases {
            let bytes = CacheBytes { position: 4000, window_position: 1000, state: 1 << 20, kinds };
            let found = bytes.set_aside(sequences, positions, free, limits);
            assert_eq!((found.n_window_pages, found.n_states), (n_window_pages, n_states), "{kinds:?} {free:?}");
        }
    }
}
