//! From bytes to f32, in the order of float operations that the formats define.

use crate::block::{Ints32, Ints256};
use crate::types::{Codec, WeightType};

/// Decodes a row of weights into `out`, whose length is the row's.
///
/// # Panics
/// When `bytes` is not exactly `t.row_bytes(out.len())` long: sizes are checked where the bytes come from.
pub fn decode_row(t: WeightType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(Some(bytes.len()), t.row_bytes(out.len()), "bytes of a {t} row of {} values", out.len());
    let blocks = bytes.chunks_exact(t.block_bytes());
    match t.codec() {
        Codec::Float { load, .. } => load(bytes, out),
        Codec::Small { unpack, has_min, .. } => {
            for (b, x) in blocks.zip(out.as_chunks_mut().0) {
                decode32(&unpack(b), *has_min, x);
            }
        }
        Codec::Super { unpack, has_min, .. } => {
            for (b, x) in blocks.zip(out.as_chunks_mut().0) {
                decode256(&unpack(b), *has_min, x);
            }
        }
    }
}

/// `d·q (+ m)`. Without a minimum nothing is added: `-0 + 0` would lose the sign.
pub(crate) fn decode32(w: &Ints32, has_min: bool, x: &mut [f32; 32]) {
    for i in 0..32 {
        let dq = w.d * f32::from(w.q[i]);
        x[i] = if has_min { dq + w.m } else { dq };
    }
}

/// `(d·sc)·q (- dmin·min)`. `d·sc` is always exact (11 + 8 bits); only the order of signs and zeros depends on it.
pub(crate) fn decode256(w: &Ints256, has_min: bool, x: &mut [f32; 256]) {
    for g in 0..16 {
        let d = w.d * f32::from(w.sc[g]);
        let m = w.dmin * f32::from(w.mins[g]);
        for i in 16 * g..16 * g + 16 {
            let dq = d * f32::from(w.q[i]);
            x[i] = if has_min { dq - m } else { dq };
        }
    }
}
