//! Steps that fail or are refused: which requests end, and where the others go on.

use backend::{Failure, StepError};

use super::{Engine, Error, Events, FinishReason};

/// Failed steps in a row after which the requests of the step end: what fails again and again is not tried for ever.
const MAX_FAILURES: usize = 3;

/// Failed steps that may send a request back to a checkpoint between two of its tokens.
const MAX_ROLLBACKS: usize = 8;

impl Engine {
    /// Ends the requests that a failed step has lost, and brings the others back to where they can be computed again.
    pub(super) fn roll_back(&mut self, failure: &Failure, events: &mut Events) {
        self.n_failures += 1;
        let all_lost = self.n_failures >= MAX_FAILURES;
        if all_lost {
            self.n_failures = 0;
        }
        let (mut chunk, mut i) = (0, 0);
        while i < self.running.len() {
            if self.running[i].planned == 0 {
                i += 1;
                continue;
            }
            let is_dirty = self.kinds.state && failure.dirty.contains(chunk);
            let sequence = &mut self.running[i];
            sequence.rollbacks += usize::from(is_dirty);
            let is_lost = all_lost || failure.lost.contains(chunk) || sequence.rollbacks > MAX_ROLLBACKS;
            chunk += 1;
            if is_lost {
                let mut sequence = self.running.remove(i);
                sequence.release(&mut self.memory);
                if !sequence.is_cancelled {
                    events.failed(sequence.id, Error::Step(StepError::Failed(failure.clone())));
                } else {
                    events.done(sequence.id, FinishReason::Cancelled, sequence.usage());
                }
            } else if is_dirty {
                self.send_to_checkpoint(i);
            } else {
                self.running[i].unplan(&mut self.memory);
                i += 1;
            }
        }
    }

    /// Sends a running sequence back to what the prefix cache has of it: its state is not what its position needs.
    fn send_to_checkpoint(&mut self, i: usize) {
        let mut sequence = self.running.remove(i);
        sequence.preempt(&mut self.memory);
        self.preemptions += 1;
        self.enqueue(sequence);
    }

    /// Ends the request whose token the program refused; the others stay as they were before the step.
    pub(super) fn refuse(&mut self, token: usize, id: u32, n_vocab: usize, events: &mut Events) -> Result<(), Error> {
        let chunk = self.batch.chunks.iter().position(|c| (c.first..c.first + c.len).contains(&(token as u32)));
        let planned = self.running.iter().enumerate().filter(|(_, s)| s.planned > 0);
        let culprit = chunk.and_then(|chunk| Some((self.batch.chunks[chunk], planned.map(|(i, _)| i).nth(chunk)?)));
        self.unplan();
        let Some((chunk, i)) = culprit else {
            return Err(Error::Step(StepError::TokenId { token, id, n_vocab }));
        };
        let mut sequence = self.running.remove(i);
        sequence.discard(&mut self.memory);
        let position = chunk.pos as usize + token - chunk.first as usize;
        events.failed(sequence.id, Error::Refused { position, id, n_vocab });
        Ok(())
    }

    /// Takes a plan back whose step ended with an error.
    pub(super) fn abandon(&mut self, error: &Error) {
        // Logits that are not those asked for come from a step that was made: its states have moved on to an
        // unknown position. Their sequences go back to their checkpoints.
        if self.kinds.state && matches!(error, Error::Logits { .. }) {
            while let Some(i) = self.running.iter().position(|s| s.planned > 0) {
                self.send_to_checkpoint(i);
            }
        }
        self.unplan();
    }
}
