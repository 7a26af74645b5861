//! Cosines and sines of rotary embeddings, for every backend: angles in f64, by the `libm` crate, so that they are the
//! same bits on every machine and exact to f32 at any position. Devices without f64 take the rows from the host.

use model::plan::{Growth, N_AXES, RopeDecl, RopePairing};

/// One rotary embedding of a plan.
#[derive(Clone, Debug)]
pub struct Angles {
    inv_freq: Vec<f64>, // [rotary / 2]
    factor: f64,
    growth: Option<Growth>,
    axes: Vec<u8>, // [rotary / 2], or none
    /// Which elements of a head form a pair.
    pub pairing: RopePairing,
}

impl Angles {
    /// Of a plan's declaration.
    pub fn new(decl: &RopeDecl) -> Angles {
        let RopeDecl { ref inv_freq, factor, growth, pairing, ref axes } = *decl;
        Angles { inv_freq: inv_freq.clone(), factor: f64::from(factor), growth, axes: axes.clone(), pairing }
    }

    /// Number of pairs that are rotated, `rotary / 2`.
    pub fn n_pairs(&self) -> usize {
        self.inv_freq.len()
    }

    /// Writes the cosines and sines of a position, times the embedding's factors, `[n_pairs]` each.
    pub fn fill(&self, pos: u32, cos: &mut [f32], sin: &mut [f32]) {
        self.fill_at([pos; N_AXES], cos, sin);
    }

    /// The same for a position on each axis.
    pub fn fill_at(&self, place: [u32; N_AXES], cos: &mut [f32], sin: &mut [f32]) {
        let factor = self.factor * self.growth.map_or(1.0, |growth| growth.at(place[0]));
        for (i, ((inv_freq, cos), sin)) in self.inv_freq.iter().zip(cos).zip(sin).enumerate() {
            let axis = self.axes.get(i).map_or(0, |&axis| usize::from(axis));
            let (s, c) = libm::sincos(f64::from(place[axis]) * inv_freq);
            (*cos, *sin) = ((c * factor) as f32, (s * factor) as f32);
        }
    }
}
