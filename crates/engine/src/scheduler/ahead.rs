//! What a sequence keeps for the model's draft head. Knows neither the sequence nor the head.

/// What a sequence has to do with the head.
#[derive(Default)]
pub(super) struct Ahead {
    /// Rows of the last step that the head has not computed.
    pub fresh: Option<Fresh>,
    /// The hidden state of the last position, while the token after it is not known.
    pub kept: Vec<f32>,
    /// Drafts for the next step.
    pub guesses: Vec<u32>,
}

/// Hidden states of consecutive positions among those of the last step: row and position of the first, their number.
#[derive(Clone, Copy)]
pub(super) struct Fresh {
    pub row: usize,
    pub pos: usize,
    pub n: usize,
}

impl Ahead {
    /// Takes room for `n` drafts and a hidden state, so that decoding allocates nothing.
    pub fn reserve(&mut self, n: usize, d_model: usize) {
        self.guesses.reserve_exact(n);
        self.kept.reserve_exact(d_model);
    }

    /// The sequence starts anew.
    pub fn clear(&mut self) {
        self.fresh = None;
        self.kept.clear();
        self.guesses.clear();
    }

    /// The last step computed `n` positions from `pos` on, whose hidden states begin at `row`.
    pub fn computed(&mut self, row: usize, pos: usize, n: usize) {
        self.fresh = Some(Fresh { row, pos, n });
    }
}
