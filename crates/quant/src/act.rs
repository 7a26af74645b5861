//! Activations as the dot products read them: quantised once per row by one defined rule.
//!
//! Rows are structures of arrays so that kernels load full vectors and broadcast scales.

/// How a weight type wants its activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActKind {
    /// Plain f32, for F32, F16 and BF16 weights.
    F32,
    /// 16-bit integers, one f32 scale and one i32 sum per 32 values.
    Block32,
    /// 8-bit integers, a 4-bit sub-scale per 32 values, one f32 scale per 256 values, u-scaled sums per 16 values.
    Block256,
}

/// One row of activations, `n` values, in the form of its [`ActKind`].
#[derive(Clone, Copy, Debug)]
pub enum ActRow<'a> {
    /// `x[n]`.
    F32(&'a [f32]),
    /// 32-blocks.
    Block32(Act32<'a>),
    /// 256-blocks.
    Block256(Act256<'a>),
}

/// A row of 32-blocks: `x[32·b + i] ≈ d[b] · q[32·b + i]`.
#[derive(Clone, Copy, Debug)]
pub struct Act32<'a> {
    /// Quantised values, `[n]`, in `-32767..=32767`.
    pub q: &'a [i16],
    /// Scale of each block, `[n/32]`. NaN when the block held a value that is not finite.
    pub d: &'a [f32],
    /// Sum of `q` over each block, `[n/32]`.
    pub sums: &'a [i32],
}

/// A row of 256-blocks: `x[256·b + 32·j + i] ≈ d[b] · u[8·b + j] · q[256·b + 32·j + i]`.
///
/// The sub-scale `u` costs a kernel nothing (it multiplies the weight's own integer sub-scale once per row and block)
/// and keeps one outlier from blunting the 224 values that do not share its sub-block.
#[derive(Clone, Copy, Debug)]
pub struct Act256<'a> {
    /// Quantised values, `[n]`, in `-127..=127`.
    pub q: &'a [i8],
    /// Sub-scales in `1..=15`, `[n/32]`.
    pub u: &'a [u8],
    /// Scale of each super-block, `[n/256]`. NaN when it held a value that is not finite.
    pub d: &'a [f32],
    /// `u · Σ q` over each 16 values, `[n/16]` (at most 15·16·127 = 30480, so i16 holds it).
    pub sums: &'a [i16],
}
