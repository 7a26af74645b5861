//! From bytes to f32, in the order of float operations that the formats define.

use crate::block::{Ints32, Ints256};
use crate::planes::Planes;
use crate::types::{Codec, WeightType, planar, small_float};

/// Decodes a row of weights into `out`, whose length is the row's.
///
/// # Panics
/// When the planes are not exactly `t.plane_bytes(out.len())` long: sizes are checked where the bytes come from.
pub fn decode_row<'a>(t: WeightType, row: impl Into<Planes<'a>>, out: &mut [f32]) {
    let row = row.into();
    assert_eq!(Some(row.len()), t.plane_bytes(out.len()), "bytes of a {t} row of {} values", out.len());
    let blocks = row.q.chunks_exact(t.block_bytes());
    match t.codec() {
        Codec::Float { load, .. } => load(row.q, out),
        Codec::Small { unpack, has_min, .. } => {
            for (b, x) in blocks.zip(out.as_chunks_mut().0) {
                decode32(&unpack(b), has_min, x);
            }
        }
        Codec::Super { unpack, has_min, .. } => {
            for (b, x) in blocks.zip(out.as_chunks_mut().0) {
                decode256(&unpack(b), has_min, x);
            }
        }
        Codec::Grid { unpack, .. } => {
            for (b, x) in blocks.zip(out.as_chunks_mut().0) {
                decode256(&unpack(b), false, x);
            }
        }
        Codec::Fp4 { decode, .. } => {
            for (b, x) in blocks.zip(out.as_chunks_mut().0) {
                decode(b, x);
            }
        }
        Codec::Float8 => {
            for (g, x) in out.as_chunks_mut().0.iter_mut().enumerate() {
                small_float::decode_f8(row, g, x);
            }
        }
        Codec::Fp4Scaled => {
            for (b, x) in out.as_chunks_mut().0.iter_mut().enumerate() {
                small_float::decode_nvfp4_scaled(row, b, x);
            }
        }
        Codec::Mxfp4Planar => {
            for (b, x) in out.as_chunks_mut().0.iter_mut().enumerate() {
                decode32(&planar::unpack_mxfp4(row, b), false, x);
            }
        }
        Codec::Affine(a) => {
            for (b, x) in out.as_chunks_mut().0.iter_mut().enumerate() {
                decode32(&a.unpack(row, b), true, x);
            }
        }
    }
}

/// `d·q (+ m)`. Without a minimum nothing is added: `-0 + 0` would lose the sign.
fn decode32<Q: Copy + Into<f32>>(w: &Ints32<Q>, has_min: bool, x: &mut [f32; 32]) {
    for i in 0..32 {
        let dq = w.d * w.q[i].into();
        x[i] = if has_min { dq + w.m } else { dq };
    }
}

/// `(d·sc)·q (- dmin·min)`. `d·sc` is always exact (11 + 8 bits); only the order of signs and zeros depends on it.
fn decode256(w: &Ints256, has_min: bool, x: &mut [f32; 256]) {
    for g in 0..16 {
        let d = w.d * f32::from(w.sc[g]);
        let m = w.dmin * f32::from(w.mins[g]);
        for i in 16 * g..16 * g + 16 {
            let dq = d * f32::from(w.q[i]);
            x[i] = if has_min { dq - m } else { dq };
        }
    }
}
