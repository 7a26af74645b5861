//! Cosines and sines of rotary embeddings, for every backend: angles in f64, by the `libm` crate, so that they are the
//! same bits on every machine and exact to f32 at any position. Devices without f64 take the rows from the host.

use model::plan::{RopeDecl, RopePairing};

/// One rotary embedding of a plan.
#[derive(Clone, Debug)]
pub(crate) struct Angles {
    inv_freq: Vec<f64>, // [rotary / 2]
    factor: f64,
    pub pairing: RopePairing,
}

impl Angles {
    /// Of a plan's declaration.
    pub fn new(decl: &RopeDecl) -> Angles {
        Angles { inv_freq: decl.inv_freq.clone(), factor: f64::from(decl.factor), pairing: decl.pairing }
    }

    /// Number of pairs that are rotated, `rotary / 2`.
    pub fn n_pairs(&self) -> usize {
        self.inv_freq.len()
    }

    /// Writes the cosines and sines of a position, times the embedding's factor, `[n_pairs]` each.
    pub fn fill(&self, pos: u32, cos: &mut [f32], sin: &mut [f32]) {
        for ((inv_freq, cos), sin) in self.inv_freq.iter().zip(cos).zip(sin) {
            let (s, c) = libm::sincos(f64::from(pos) * inv_freq);
            (*cos, *sin) = ((c * self.factor) as f32, (s * self.factor) as f32);
        }
    }
}
