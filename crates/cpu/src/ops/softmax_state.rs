//! Softmax states of `attention`: the running state of a query row, and the merge of two states. Knows no cache and no
//! order of work.

use super::super::isa::on_isa;
use super::super::lanes::{Float, Lanes};
use super::super::math;

/// Softmax state of query rows: running maximum, sum and weighted values. Each row is `2 + d_v` numbers, padded.
#[derive(Clone, Copy)]
pub struct State {
    pub ptr: *mut f32,
    pub stride: usize,
}

impl State {
    /// Numbers of a row: values on whole lanes, then 16 for m and l.
    pub fn stride(d_v: usize) -> usize {
        d_v.next_multiple_of(16) + 16
    }

    /// # Safety
    /// Row `r` exists.
    #[inline(always)]
    pub unsafe fn o(self, r: usize) -> *mut f32 {
        // SAFETY: the caller's promise.
        unsafe { self.ptr.add(r * self.stride) }
    }

    /// Maximum and sum.
    ///
    /// # Safety
    /// Row `r` exists and no other code uses it.
    #[inline(always)]
    pub unsafe fn ml<'a>(self, r: usize) -> &'a mut [f32; 2] {
        // SAFETY: the caller's promise; the last 16 numbers of a row.
        unsafe { &mut *self.ptr.add((r + 1) * self.stride - 16).cast() }
    }

    /// Rows from `r` on.
    ///
    /// # Safety
    /// Row `r` exists.
    pub unsafe fn at(self, r: usize) -> State {
        // SAFETY: the caller's promise.
        State { ptr: unsafe { self.ptr.add(r * self.stride) }, stride: self.stride }
    }

    /// # Safety
    /// `rows` rows exist and no other code uses them.
    pub unsafe fn reset(self, rows: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(self.ptr, rows * self.stride).fill(0.0);
            for r in 0..rows {
                self.ml(r)[0] = f32::NEG_INFINITY;
            }
        }
    }
}

/// A state that workers share, each its own rows.
#[derive(Clone, Copy)]
pub struct Shared(pub State);

// SAFETY: an address; each access states its own promise.
unsafe impl Sync for Shared {}

impl Shared {
    /// The state.
    pub fn get(&self) -> State {
        self.0
    }
}

on_isa! {
    /// Merges a segment into the total of the segments before it. A segment that a row does not see changes nothing.
    ///
    /// # Safety
    /// Both states have `rows` rows of values `v_width` wide, and no other code uses them.
    pub unsafe fn merge(total: State, segment: State, rows: usize, v_width: usize) = merge_lanes
}

/// # Safety
/// See [`merge`].
#[inline(always)]
unsafe fn merge_lanes<L: Lanes>(total: State, segment: State, rows: usize, v_width: usize) {
    for r in 0..rows {
        // SAFETY: the caller's promise.
        unsafe {
            let ([tm, tl], [sm, sl]) = (total.ml(r), segment.ml(r));
            if *sl == 0.0 {
                continue;
            }
            let (m, first) = (Float::max(*tm, *sm), *tl == 0.0);
            let (a, b) = (math::exp(*tm - m), math::exp(*sm - m));
            *tl = if first { *sl } else { tl.mul_add(a, *sl * b) };
            *tm = if first { *sm } else { m };
            for c in (0..v_width).step_by(16) {
                let (t, s) = (L::load(total.o(r).add(c)), L::load(segment.o(r).add(c)));
                let o = if first { s } else { t.fma(L::splat(a), s.mul(L::splat(b))) };
                o.store(total.o(r).add(c));
            }
        }
    }
}
