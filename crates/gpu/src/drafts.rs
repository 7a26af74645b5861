//! What drafts have left in the slots of recurrent states: how many were accepted and wait to be replayed. Knows no
//! device.

use backend::drafts::Uncommitted;
use backend::{Batch, Chunk, StepError};

/// The drafts of all slots; none where a plan has no states.
#[derive(Debug, Default)]
pub struct Slots {
    uncommitted: Uncommitted,
    /// Accepted drafts of a slot's last step, past which its state has not moved.
    n_replay: Vec<u32>,
}

impl Slots {
    /// For `n` slots.
    pub fn new(n: usize) -> Slots {
        Slots { uncommitted: Uncommitted::new(n), n_replay: vec![0; n] }
    }

    /// Refuses a batch that resumes from a state with uncommitted drafts.
    ///
    /// # Errors
    /// [`StepError::Batch`].
    pub fn check(&self, batch: &Batch) -> Result<(), StepError> {
        if batch.is_draft() { Ok(()) } else { self.uncommitted.check(batch) }
    }

    /// `n_draft` and `n_replay` of a chunk, as kernels have them; zero in a step of the draft head, which has no
    /// states.
    pub fn words(&self, c: &Chunk, is_head: bool) -> [u32; 2] {
        match self.n_replay.get(c.state as usize) {
            Some(&n) if !is_head => [c.n_draft, if c.pos == 0 { 0 } else { n }],
            _ => [0; 2],
        }
    }

    /// The step of a batch is queued: states have moved.
    pub fn computed(&mut self, batch: &Batch) {
        if !batch.is_draft() && !self.n_replay.is_empty() {
            self.uncommitted.computed(batch);
            batch.chunks.iter().for_each(|c| self.n_replay[c.state as usize] = 0);
        }
    }

    /// The drafts of a slot are judged.
    pub fn commit(&mut self, slot: u32, n_accepted: usize) {
        if self.uncommitted.commit(slot, n_accepted) {
            self.n_replay[slot as usize] = n_accepted as u32;
        }
    }

    /// A slot is to be copied to another, with this many drafts that it keeps.
    pub fn copied(&mut self, from: u32, to: u32) -> u32 {
        self.uncommitted.copied(from, to);
        let n = self.n_replay.get(from as usize).copied().unwrap_or(0);
        self.n_replay.get_mut(to as usize).into_iter().for_each(|to| *to = n);
        n
    }
}
