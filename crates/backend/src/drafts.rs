//! Which slots of recurrent state wait for [`Drafts::commit`](crate::Drafts::commit). Knows no numbers of a state.

use crate::{Batch, StepError};

/// Drafts of each slot that were computed and neither accepted nor dropped, `[n_slots]`.
#[derive(Debug, Default)]
pub struct Uncommitted(Vec<u32>);

impl Uncommitted {
    /// For `n_slots` slots; none where the plan has no states.
    pub fn new(n_slots: usize) -> Uncommitted {
        Uncommitted(vec![0; n_slots])
    }

    /// Refuses a batch that resumes from a state with uncommitted drafts.
    ///
    /// # Errors
    /// [`StepError::Batch`].
    pub fn check(&self, batch: &Batch) -> Result<(), StepError> {
        let waits = |slot: u32| self.0.get(slot as usize).is_some_and(|&n| n > 0);
        match batch.chunks.iter().position(|c| c.pos > 0 && waits(c.state)) {
            Some(i) => {
                let slot = batch.chunks[i].state;
                Err(StepError::Batch(format!("chunk {i} goes on from state {slot}, whose drafts are not committed")))
            }
            None => Ok(()),
        }
    }

    /// The step of a batch was computed.
    pub fn computed(&mut self, batch: &Batch) {
        if !self.0.is_empty() {
            batch.chunks.iter().for_each(|c| self.0[c.state as usize] = c.n_draft);
        }
    }

    /// The drafts of a slot are judged. Without states nothing happens, and the answer is false.
    pub fn commit(&mut self, slot: u32, n_accepted: usize) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let n = std::mem::take(&mut self.0[slot as usize]) as usize;
        assert!(n > 0, "state {slot} has no drafts to commit");
        assert!(n_accepted <= n, "state {slot}: {n_accepted} of {n} drafts accepted");
        true
    }

    /// Panics where the drafts of a slot are not judged.
    pub fn assert_committed(&self, slot: u32) {
        let n = self.0.get(slot as usize).copied().unwrap_or(0);
        assert!(n == 0, "state {slot} is copied, and its drafts are not committed");
    }

    /// A slot gets another state.
    pub fn forget(&mut self, slot: u32) {
        self.0.get_mut(slot as usize).into_iter().for_each(|n| *n = 0);
    }

    /// A slot is copied to another.
    pub fn copied(&mut self, from: u32, to: u32) {
        if !self.0.is_empty() {
            self.assert_committed(from);
            self.forget(to);
        }
    }
}
