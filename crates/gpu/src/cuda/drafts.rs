//! What drafts have left in the slots of recurrent states: how many were accepted and wait to be replayed, and where
//! the slot keeps what they move its state by. Knows no driver.

use model::plan::{Op, Plan, State};

use crate::drafts;
use backend::{Batch, Chunk, Limits, StepError};

/// Longest chunk of a step that takes the lists of few tokens: a token and eight drafts.
pub const MAX_RUN: usize = 9;

/// Numbers that a slot keeps of a draft's k, v, g and beta (`kernels/cuda/delta_net.cu`).
fn kept_row(n_k: usize, n_v: usize, n_g: usize, n_beta: usize) -> usize {
    n_k.saturating_add(n_v).saturating_add(n_g).saturating_add(n_beta).next_multiple_of(4)
}

/// Numbers of each state's slot, with what it keeps of up to `max_draft` drafts: the further inputs of a convolution,
/// and of a delta rule its inputs on two sides, since a step reads what the last one kept while it writes its own.
pub fn slot_lens(plan: &Plan, limits: Limits) -> Vec<usize> {
    let mut lens: Vec<usize> = plan.states.iter().map(|state| state.n).collect();
    let mut add = |state: State, n: usize| lens[state.0 as usize] = lens[state.0 as usize].saturating_add(n);
    for op in &plan.ops {
        match *op {
            Op::CausalConv { x, state, .. } => add(state, limits.max_draft.saturating_mul(plan.buf(x).width)),
            Op::DeltaNet { k, v, g, beta, state, .. } => {
                let [n_k, n_v, n_g, n_beta] = [k, v, g, beta].map(|buf| plan.buf(buf).width);
                add(state, limits.max_draft.saturating_mul(2).saturating_mul(kept_row(n_k, n_v, n_g, n_beta)));
            }
            _ => {}
        }
    }
    lens
}

/// The drafts of all slots; none where a plan has no states.
#[derive(Debug, Default)]
pub struct Slots {
    drafts: drafts::Slots,
    /// Where each slot keeps its drafts.
    sides: Vec<u32>,
}

impl Slots {
    /// For `n` slots.
    pub fn new(n: usize) -> Slots {
        Slots { drafts: drafts::Slots::new(n), sides: vec![0; n] }
    }

    /// Refuses a batch that resumes from a state with uncommitted drafts.
    ///
    /// # Errors
    /// [`StepError::Batch`].
    pub fn check(&self, batch: &Batch) -> Result<(), StepError> {
        self.drafts.check(batch)
    }

    /// `n_draft`, `n_replay` and `side` of a chunk, as kernels have them; zero in a step of the draft head, which has
    /// no states.
    pub fn words(&self, c: &Chunk, is_head: bool) -> [u32; 3] {
        let [n_draft, n_replay] = self.drafts.words(c, is_head);
        let side = self.sides.get(c.state as usize).filter(|_| !is_head);
        [n_draft, n_replay, side.copied().unwrap_or(0)]
    }

    /// Whether the step has drafts, or states that move past earlier ones.
    pub fn are_in(&self, batch: &Batch) -> bool {
        batch.chunks.iter().any(|c| self.drafts.words(c, batch.is_draft()) != [0; 2])
    }

    /// The step of a batch is queued: states have moved.
    pub fn computed(&mut self, batch: &Batch) {
        self.drafts.computed(batch);
        for c in batch.chunks.iter().filter(|c| !batch.is_draft() && c.n_draft > 0) {
            self.sides.get_mut(c.state as usize).into_iter().for_each(|side| *side ^= 1);
        }
    }

    /// The drafts of a slot are judged.
    pub fn commit(&mut self, slot: u32, n_accepted: usize) {
        self.drafts.commit(slot, n_accepted);
    }

    /// A slot is copied to another, with what it keeps.
    pub fn copied(&mut self, from: u32, to: u32) {
        self.drafts.copied(from, to);
        if let Some(&side) = self.sides.get(from as usize) {
            self.sides[to as usize] = side;
        }
    }
}

#[cfg(test)]
mod tests {
    use backend::Tables;

    use super::*;

    fn batch(pos: usize, n_draft: usize) -> Batch {
        let mut batch = Batch::default();
        batch.push(&[0], pos, Tables { state: 1, ..Tables::default() }, [0]);
        batch.push_drafts(&vec![0; n_draft]);
        batch
    }

    /// A step finds the accepted drafts of the one before on the side that it wrote, once.
    #[test]
    fn accepted_drafts_are_replayed_once() {
        let mut slots = Slots::new(2);
        let words = |slots: &Slots, batch: &Batch| slots.words(&batch.chunks[0], false);
        assert_eq!(words(&slots, &batch(0, 3)), [3, 0, 0]);
        slots.computed(&batch(0, 3));
        assert!(slots.check(&batch(1, 0)).is_err(), "uncommitted");
        slots.commit(1, 2);
        assert_eq!(words(&slots, &batch(3, 1)), [1, 2, 1]);
        assert!(slots.are_in(&batch(3, 0)), "two wait");
        assert_eq!(words(&slots, &batch(0, 1)), [1, 0, 1], "a new sequence");
        slots.copied(1, 0);
        slots.computed(&batch(3, 0));
        assert_eq!(words(&slots, &batch(4, 0)), [0, 0, 1]);
        let copy = Batch { chunks: vec![Chunk { state: 0, ..batch(3, 0).chunks[0] }], ..Batch::default() };
        assert_eq!(words(&slots, &copy), [0, 2, 1], "the copy still has to");
    }
}
