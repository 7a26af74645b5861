//! Rows of weights as 16-bit integers with the sub-scales multiplied in: what matrix-matrix kernels unpack a tile to.
//!
//! With `w16` of a panel, the law's integer sums are plain dot products:
//! * 32-blocks: `isum = Σ w16·q_x`, and `Σ q_x` is [`Act32::sums`](crate::act::Act32::sums);
//! * super-blocks: `isum = Σ w16·(u·q_x)`, and `msum = Σ_g mins[g]·sums[g]`.
//!
//! `|w16| <= 4096` (Q6_K: 128·32), so i16 holds it; bounds of the sums are in [`crate::dot`].

use crate::act::ActKind;
use crate::block::Ints32;
use crate::planes::Planes;
use crate::types::{Codec, WeightType, planar};

/// One row of `n` weights, to be written. `B` is the block length of the type's activations, 32 or 256.
#[derive(Debug)]
pub struct PanelRow<'a> {
    /// `[n]`: 32-blocks: `q - offset` (or the table's value); super-blocks: that times the integer sub-scale.
    pub w16: &'a mut [i16],
    /// `[n/B]`: the scale of each block, `d`.
    pub d: &'a mut [f32],
    /// `[n/B]`: 32-blocks: the minimum `m`, which is added; super-blocks: the scale `dmin` of the minimums, which are
    /// subtracted. Zero for a type without minimum.
    pub m: &'a mut [f32],
    /// `[n/16]` for super-blocks: the integer minimum of each 16 values, zero for a type without. `[0]` for 32-blocks.
    pub mins: &'a mut [i16],
}

/// Unpacks a row of weights.
///
/// # Panics
/// When a length is not the one that [`PanelRow`] gives, or `t` is a float type, which has no integers.
pub fn unpack<'a>(t: WeightType, bytes: impl Into<Planes<'a>>, row: PanelRow<'_>) {
    let bytes = bytes.into();
    let PanelRow { w16, d, m, mins } = row;
    let (n, n_blocks) = (w16.len(), w16.len() / t.act().block_len());
    assert_eq!(Some(bytes.len()), t.plane_bytes(n), "bytes of a {t} row of {n} values");
    assert_eq!((d.len(), m.len()), (n_blocks, n_blocks), "scales of a {t} row of {n} values");
    let blocks = bytes.q.chunks_exact(t.block_bytes());
    let n_mins = if t.act() == ActKind::Block256 { n / 16 } else { 0 };
    assert_eq!(mins.len(), n_mins, "minimums of a {t} row of {n} values");
    match t.codec() {
        Codec::Float { .. } => panic!("{t} has no integers"),
        Codec::Small { unpack, .. } => small(blocks.map(unpack), w16, d, m),
        Codec::Mxfp4Planar => small((0..n_blocks).map(|b| planar::unpack_mxfp4(bytes, b)), w16, d, m),
        Codec::Affine(a) => small((0..n_blocks).map(|b| a.unpack(bytes, b)), w16, d, m),
        Codec::Super { unpack, .. } => {
            let parts = w16.as_chunks_mut::<256>().0.iter_mut().zip(mins.as_chunks_mut::<16>().0);
            for (((b, d), m), (w16, mins)) in blocks.zip(d).zip(m).zip(parts) {
                let w = unpack(b);
                *w16 = std::array::from_fn(|i| i16::from(w.sc[i / 16]) * i16::from(w.q[i]));
                *mins = w.mins.map(i16::from);
                (*d, *m) = (w.d, w.dmin);
            }
        }
    }
}

fn small<Q: Into<i16>>(blocks: impl Iterator<Item = Ints32<Q>>, w16: &mut [i16], d: &mut [f32], m: &mut [f32]) {
    for (((w, d), m), w16) in blocks.zip(d).zip(m).zip(w16.as_chunks_mut::<32>().0) {
        *w16 = w.q.map(Into::into);
        (*d, *m) = (w.d, w.m);
    }
}
