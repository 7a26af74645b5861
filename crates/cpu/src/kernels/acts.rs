//! Quantized activations of one step, shared by all workers.
//!
//! One allocation is cut into sections for every shape. Beside the form of [`quant::act`], a row has two sections for
//! the panel kernels of x86-64 and of scalar code:
//! * *wide*: 16-bit integers, every four values in the order 0, 2, 1, 3. In that order the even and odd bytes of a
//!   32-bit word of weights become pairs without a shuffle.
//! * *start*, of 8-bit activations: the terms that the sums of every 16-group start from; they take an offset of 32 (of
//!   256-blocks) or 16 (of 32-blocks) off the weights.
//!
//! AVX-512 has separate starts for super-blocks, the *parts*: the kernels of an instruction set read rows that were
//! quantized for it.

use quant::act::{Act32, Act256, ActKind, ActRow};

use backend::CompileError;
use sys::arena::{Zero, zeroed};

const ALIGN: usize = 64;

/// Activation rows `[rows, k]` in the form of one [`ActKind`], written by [`super::Kernels::quantise`].
#[derive(Debug)]
pub struct ActsShared {
    /// All memory, aligned to cache lines.
    mem: Vec<Line>,
    base: *mut u8,
    kind: ActKind,
    rows: usize,
    k: usize,
    /// Byte offsets of the sections in `mem`.
    q: usize,
    u: usize,
    d: usize,
    sums: usize,
    start: usize,
    wide: usize,
    parts: usize,
}

#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u8; ALIGN]);

// SAFETY: bytes.
unsafe impl Zero for Line {}

// SAFETY: `base` points into `mem`, which moves with the struct and is never reallocated. Shared writes go through
// `row_mut`, whose callers promise that no two of them touch the same row at once.
unsafe impl Send for ActsShared {}
// SAFETY: as above.
unsafe impl Sync for ActsShared {}

/// The sections of one row; the [`ActKind`] says which are used.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowPtr {
    /// `f32 [k]`, `i16 [k]` or `i8 [k]`.
    pub q: *mut u8,
    /// `u8 [k/32]`, super-blocks only.
    pub u: *mut u8,
    /// `f32 [k/32]` or `f32 [k/256]`.
    pub d: *mut f32,
    /// `i32 [k/32]` or `i16 [k/16]`.
    pub sums: *mut u8,
    /// `i16 [k/16][2]`, 8 bits only: of each 16-group, `Σ q` over values 0 and 1 of every four, and over 2 and 3, times
    /// -32 (256-blocks) or -16 (32-blocks).
    pub start: *mut i16,
    /// `i16 [k]` in panel order: `q`, of 256-blocks `u·q`.
    pub wide: *mut i16,
    /// AVX-512 only, of 256-blocks, `i32 [k/16][2]`: of each 16-group, `-32·Σ q` over the even words of four values and
    /// over the odd ones.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub parts: *mut i32,
}

fn up(n: usize) -> usize {
    n.next_multiple_of(ALIGN)
}

/// Byte sizes of the sections q, u, d, sums, start, wide, parts.
fn sections(kind: ActKind, rows: usize, k: usize) -> [usize; 7] {
    let n = rows * k;
    match kind {
        ActKind::F32 => [up(n * 4), 0, 0, 0, 0, 0, 0],
        ActKind::Block32 => [up(n * 2), 0, up(n / 8), up(n / 8), 0, up(n * 2), 0],
        ActKind::Byte32 => [up(n), 0, up(n / 8), up(n / 8), up(n / 4), up(n * 2), 0],
        ActKind::Block256 => {
            let parts = if cfg!(target_arch = "x86_64") { up(n / 2) } else { 0 };
            [up(n), up(n / 32), up(n / 64), up(n / 8), up(n / 4), up(n * 2), parts]
        }
    }
}

impl ActsShared {
    /// Bytes that [`ActsShared::new`] allocates.
    pub fn bytes(rows: usize, k: usize) -> usize {
        // Beyond this no sum of sections is a number.
        if rows.saturating_mul(k) > usize::MAX / 16 {
            return usize::MAX;
        }
        let kinds = [ActKind::F32, ActKind::Block32, ActKind::Byte32, ActKind::Block256];
        let most = kinds.map(|kind| sections(kind, rows, k).iter().sum::<usize>()).into_iter().max().unwrap_or(0);
        (most / ALIGN + 1) * ALIGN
    }

    /// Memory for up to `rows` rows of up to `k` values of any kind.
    ///
    /// # Errors
    /// There is no such memory.
    pub fn new(rows: usize, k: usize) -> Result<ActsShared, CompileError> {
        let mut mem = zeroed::<Line>("activations", ActsShared::bytes(rows, k) / ALIGN)?;
        let base = mem.as_mut_ptr().cast();
        let (q, u, d, sums, start, wide, parts) = (0, 0, 0, 0, 0, 0, 0);
        Ok(ActsShared { mem, base, kind: ActKind::F32, rows: 0, k: 0, q, u, d, sums, start, wide, parts })
    }

    /// Cuts the memory for `rows` rows of `k` values; their content is meaningless until it is written. Allocates
    /// nothing.
    ///
    /// # Panics
    /// When the shape exceeds that of [`ActsShared::new`], or `k` is not a multiple of the kind's block.
    pub fn reshape(&mut self, kind: ActKind, rows: usize, k: usize) {
        let block = kind.block_len();
        assert!(k.is_multiple_of(block), "row of {k} values is not a multiple of {block}");
        let size = sections(kind, rows, k);
        let total: usize = size.iter().sum();
        assert!(total <= self.mem.len() * ALIGN, "{rows} rows of {k} values need {total} bytes of activations");
        (self.kind, self.rows, self.k) = (kind, rows, k);
        self.q = 0;
        self.u = self.q + size[0];
        self.d = self.u + size[1];
        self.sums = self.d + size[2];
        self.start = self.sums + size[3];
        self.wide = self.start + size[4];
        self.parts = self.wide + size[5];
    }

    /// The kind it was last cut for.
    pub fn kind(&self) -> ActKind {
        self.kind
    }

    /// Number of rows it was last cut for.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values in a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Pointers of row `r`.
    pub(super) fn row_ptr(&self, r: usize) -> RowPtr {
        assert!(r < self.rows, "activation row {r} of {}", self.rows);
        let (q_bytes, d_block, sum_bytes) = match self.kind {
            ActKind::F32 => (4, 1, 0),
            ActKind::Block32 => (2, 32, self.k / 32 * 4),
            ActKind::Byte32 => (1, 32, self.k / 32 * 4),
            ActKind::Block256 => (1, 256, self.k / 16 * 2),
        };
        let only = |has: bool, at: usize| if has { self.base.wrapping_add(at) } else { std::ptr::null_mut() };
        // SAFETY: `reshape` made every section large enough for `rows` rows, and `r` is one of them.
        unsafe {
            RowPtr {
                q: self.base.add(self.q + r * self.k * q_bytes),
                u: self.base.add(self.u + r * (self.k / 32) * usize::from(self.kind == ActKind::Block256)),
                d: if self.kind == ActKind::F32 {
                    std::ptr::null_mut()
                } else {
                    self.base.add(self.d + r * (self.k / d_block) * 4).cast()
                },
                sums: self.base.add(self.sums + r * sum_bytes),
                start: only(matches!(self.kind, ActKind::Byte32 | ActKind::Block256), self.start + r * self.k / 4)
                    .cast(),
                wide: only(self.kind != ActKind::F32, self.wide + r * self.k * 2).cast(),
                parts: only(
                    cfg!(target_arch = "x86_64") && self.kind == ActKind::Block256,
                    self.parts + r * self.k / 2,
                )
                .cast(),
            }
        }
    }

    /// Row `r` as the scalar reference reads it.
    pub fn row(&self, r: usize) -> ActRow<'_> {
        let (p, k) = (self.row_ptr(r), self.k);
        // SAFETY: the sections hold these many initialised values (the memory starts as zeros and only numbers are
        // written), aligned by `up`; the caller of `quantise` promised not to write rows while they are read.
        unsafe {
            match self.kind {
                ActKind::F32 => ActRow::F32(std::slice::from_raw_parts(p.q.cast(), k)),
                ActKind::Block32 => ActRow::Block32(Act32 {
                    q: std::slice::from_raw_parts(p.q.cast(), k),
                    d: std::slice::from_raw_parts(p.d, k / 32),
                    sums: std::slice::from_raw_parts(p.sums.cast(), k / 32),
                }),
                ActKind::Byte32 => ActRow::Byte32(Act32 {
                    q: std::slice::from_raw_parts(p.q.cast(), k),
                    d: std::slice::from_raw_parts(p.d, k / 32),
                    sums: std::slice::from_raw_parts(p.sums.cast(), k / 32),
                }),
                ActKind::Block256 => ActRow::Block256(Act256 {
                    q: std::slice::from_raw_parts(p.q.cast(), k),
                    u: std::slice::from_raw_parts(p.u, k / 32),
                    d: std::slice::from_raw_parts(p.d, k / 256),
                    sums: std::slice::from_raw_parts(p.sums.cast(), k / 16),
                }),
            }
        }
    }
}
