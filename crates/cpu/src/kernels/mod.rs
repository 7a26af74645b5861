//! Matrix products: quantised or float weights times activations, one column or many.
//!
//! Every function here has, bit for bit, the results of [`quant::dot::dot_row`] (the CPU law in [`quant`]); [`Kernels`]
//! takes it from the table in [`variants`]. Work is done in tiles of 16 rows: one column goes through a matrix-vector
//! kernel, more columns through an integer panel ([`panel`]) that is unpacked once for all of them. Of plans it knows
//! the activation [`Gate`] only, and nothing of ops or threads: callers cut the rows and give every worker a
//! [`Scratch`].

/// An array, element by element. `std::array::from_fn` is compiled without the target features of its caller, so that a
/// closure with them becomes a call, and its vectors go through memory.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! array {
    (2, |$i:ident| $e:expr) => { array!(@ $i, $e, 0 1) };
    (4, |$i:ident| $e:expr) => { array!(@ $i, $e, 0 1 2 3) };
    (8, |$i:ident| $e:expr) => { array!(@ $i, $e, 0 1 2 3 4 5 6 7) };
    (@ $i:ident, $e:expr, $($n:literal)*) => { [$({ let $i: usize = $n; $e }),*] };
}

mod acts;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod bit_stream;
mod float;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod grid;
#[cfg(target_arch = "aarch64")]
mod neon;
mod panel;
mod prefetch;
mod scalar;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod types;
mod variants;

use std::ops::Range;

use model::plan::Gate;
use quant::act::ActKind;
use quant::{PlaneBytes, Planes, WeightType};

use super::isa::CheckedIsa;
pub use acts::ActsShared;
use acts::RowPtr;
use panel::{CHUNK, Panel, ROWS};
pub(super) use prefetch::{Hint, prefetch};
use sys::arena::Zero;
use variants::{Many, Variant};

/// Columns that share one unpacked panel: their part of the activations stays in the second-level cache.
pub const COLS: usize = 96;

/// Chunks for each worker in a region of enough rows. When one is late, the others take over all but its last chunk,
/// and wait for that one. On 16 cores of a Xeon of the Sapphire Rapids class, which are threads that share cores with
/// other machines, decode of 8 layers of Qwen3-30B-A3B's shape takes 181 tok/s with 8 chunks, 195 with 16, 198 with 32
/// and 196 with 64, and prompts of 64 tokens lose 4% with 32; on 2 cores all are alike.
const CHUNKS: usize = 16;

/// Weights `[n, k]`, rows of `dtype.plane_bytes(k)` bytes one after the other in every plane.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Type.
    pub dtype: WeightType,
    /// Rows (outputs).
    pub n: usize,
    /// Values in a row (inputs).
    pub k: usize,
    /// The rows.
    pub planes: Planes<'a>,
}

/// Gate and up of a gated activation: matrices of one shape. [`Kernels::matmul_gated`] needs one kind of activations
/// for both.
#[derive(Clone, Copy)]
pub struct Gated<'a> {
    /// Goes through the activation.
    pub gate: Matrix<'a>,
    /// Is multiplied with the result.
    pub up: Matrix<'a>,
    /// The activation.
    pub act: Gate,
    /// Of gate and up, `[n]` each.
    pub biases: Option<[&'a [f32]; 2]>,
}

/// A column of a product: which activation row it reads and which output row it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Col {
    /// Row of the activations.
    pub act: u32,
    /// Row of the output.
    pub out: u32,
}

// SAFETY: two numbers.
unsafe impl Zero for Col {}

/// Output `[rows, stride]` that several workers write at once.
#[derive(Clone, Copy, Debug)]
pub struct OutPtr {
    ptr: *mut f32,
    rows: usize,
    stride: usize,
}

// SAFETY: the caller of `new` promises that concurrent products write disjoint elements.
unsafe impl Send for OutPtr {}
// SAFETY: as above.
unsafe impl Sync for OutPtr {}

impl OutPtr {
    /// An output of `rows` rows, `stride` values apart.
    ///
    /// # Safety
    /// `ptr` is writable for `rows · stride` values as long as products write to it, no other code reads or writes the
    /// elements meanwhile, and concurrent products write different rows of their weights or different columns.
    pub unsafe fn new(ptr: *mut f32, rows: usize, stride: usize) -> OutPtr {
        OutPtr { ptr, rows, stride }
    }
}

/// Scratch of a worker; allocated once.
#[derive(Debug)]
pub struct Scratch {
    panel: Box<Panel>,
    /// Results of a tile, `[COLS][ROWS]`; `acc2` has those of the gate in a gated product.
    acc: Box<[[f32; ROWS]; COLS]>,
    acc2: Box<[[f32; ROWS]; COLS]>,
    cols: Box<[ColPtr; COLS]>,
}

impl Scratch {
    /// Bytes that one allocates.
    pub const BYTES: usize = size_of::<Panel>() + 2 * size_of::<[[f32; ROWS]; COLS]>() + size_of::<[ColPtr; COLS]>();
}

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch {
            panel: Panel::new(),
            acc: Box::new([[0.0; ROWS]; COLS]),
            acc2: Box::new([[0.0; ROWS]; COLS]),
            cols: Box::new([ColPtr::NULL; COLS]),
        }
    }
}

/// The activations of one column as the kernels read them.
#[derive(Clone, Copy, Debug)]
struct ColPtr {
    row: RowPtr,
    /// Index of the row.
    act: usize,
}

impl ColPtr {
    const NULL: ColPtr = ColPtr {
        row: RowPtr {
            q: std::ptr::null_mut(),
            u: std::ptr::null_mut(),
            d: std::ptr::null_mut(),
            sums: std::ptr::null_mut(),
            start: std::ptr::null_mut(),
            wide: std::ptr::null_mut(),
            parts: std::ptr::null_mut(),
        },
        act: 0,
    };
}

// SAFETY: the pointers in a scratch are set anew by every call that reads them.
unsafe impl Send for Scratch {}

/// Consecutive rows of a matrix, at most [`ROWS`].
#[derive(Clone, Copy, Debug)]
struct RowSet<'a> {
    dtype: WeightType,
    planes: Planes<'a>,
    /// Bytes of a row.
    bytes: PlaneBytes,
    n: usize,
    k: usize,
    /// The bytes that the same worker reads next, to be prefetched; the set's own where they are unknown.
    next: *const u8,
}

impl RowSet<'_> {
    /// Row `r` of plane `q`, or the last row when there are fewer: tiles are always full, and surplus rows are not
    /// stored.
    fn row(&self, r: usize) -> *const u8 {
        // SAFETY: rows up to `n` lie inside the matrix.
        unsafe { self.planes.q.as_ptr().add(r.min(self.n - 1) * self.bytes.q) }
    }

    /// As [`RowSet::row`], of the plane of scales.
    fn scales(&self, r: usize) -> *const u8 {
        // SAFETY: as above.
        unsafe { self.planes.scales.as_ptr().add(r.min(self.n - 1) * self.bytes.scales) }
    }

    /// As [`RowSet::row`], of the plane of biases.
    fn biases(&self, r: usize) -> *const u8 {
        // SAFETY: as above.
        unsafe { self.planes.biases.as_ptr().add(r.min(self.n - 1) * self.bytes.biases) }
    }
}

/// The kernels of one instruction set.
#[derive(Clone, Debug)]
pub struct Kernels {
    isa: CheckedIsa,
    table: Vec<Variant>,
    quantise: variants::QuantiseFns,
}

impl Kernels {
    /// The kernels of `isa`.
    pub fn new(isa: CheckedIsa) -> Kernels {
        Kernels {
            isa,
            table: WeightType::ALL.iter().map(|&t| variants::variant(t, isa)).collect(),
            quantise: variants::quantise(isa),
        }
    }

    /// The instruction set they are written for.
    pub fn isa(&self) -> CheckedIsa {
        self.isa
    }

    /// Writes rows `rows` of `x` `[_, k]` into the same rows of `acts`, in the form `acts` was cut for, for the
    /// products of this instruction set.
    ///
    /// # Safety
    /// No other thread reads or writes these rows of `acts` meanwhile.
    ///
    /// # Panics
    /// When `k` is not that of `acts`, or `rows` ends past `x` or `acts`.
    pub unsafe fn quantise(&self, x: &[f32], k: usize, rows: Range<usize>, acts: &ActsShared) {
        assert!(rows.end * k <= x.len(), "rows {rows:?} of {} activations", acts.rows());
        for r in rows {
            // SAFETY: the caller's promise.
            unsafe { self.quantize_row(&x[r * k..(r + 1) * k], r, acts) };
        }
    }

    /// Writes `x` `[k]` into row `r` of `acts`, in the same form.
    ///
    /// # Safety
    /// No other thread reads or writes this row of `acts` meanwhile.
    ///
    /// # Panics
    /// When `k` is not that of `acts`, or it has no such row.
    pub unsafe fn quantize_row(&self, x: &[f32], r: usize, acts: &ActsShared) {
        assert!(x.len() == acts.k() && r < acts.rows(), "activations are cut for other rows");
        let write = match acts.kind() {
            ActKind::F32 => self.quantise.float,
            ActKind::Block32 => self.quantise.block32,
            ActKind::Byte32 => self.quantise.byte32,
            ActKind::Block256 => self.quantise.block256,
        };
        // SAFETY: the row of `acts` is this thread's by the contract and as long as `x`.
        unsafe { write(x, &acts.row_ptr(r)) };
    }

    /// `y[col.out][r] = w[r]·acts[col.act]` for every `r` of `rows` and every column.
    ///
    /// # Panics
    /// When shapes disagree: row length, kind of activations, lengths of `w.planes`, a column or row out of range.
    pub fn matmul(
        &self,
        w: &Matrix,
        rows: Range<usize>,
        acts: &ActsShared,
        cols: &[Col],
        y: OutPtr,
        scratch: &mut Scratch,
    ) {
        check(w, &rows, acts, cols, &y);
        for cols in cols.chunks(COLS) {
            set_cols(cols, acts, scratch);
            for first in rows.clone().step_by(ROWS) {
                let set = row_set(w, first, rows.end);
                self.tile(&set, acts, cols.len(), scratch);
                store(&scratch.acc[..cols.len()], cols, first, set.n, y);
            }
        }
    }

    /// Gate and up at once: `y[col.out][r] = act(gate[r]·x) · (up[r]·x)`, each product plus its bias where there are
    /// biases.
    ///
    /// # Panics
    /// As [`Kernels::matmul`], for both matrices; when biases are shorter than the matrices.
    pub fn matmul_gated(
        &self,
        w: &Gated,
        rows: Range<usize>,
        acts: &ActsShared,
        cols: &[Col],
        y: OutPtr,
        scratch: &mut Scratch,
    ) {
        let Gated { gate, up, .. } = w;
        check(gate, &rows, acts, cols, &y);
        check(up, &rows, acts, cols, &y);
        for cols in cols.chunks(COLS) {
            set_cols(cols, acts, scratch);
            for first in rows.clone().step_by(ROWS) {
                let is_last = first + ROWS >= gate.n;
                let (gate, up) = (row_set(gate, first, rows.end), row_set(up, first, rows.end));
                // One stream of prefetches: the gate's rows, those of up, the gate's next.
                let next_gate = if is_last { up.next } else { gate.next };
                let (set, up) = (RowSet { next: up.row(0), ..gate }, RowSet { next: next_gate, ..up });
                self.tile(&set, acts, cols.len(), scratch);
                std::mem::swap(&mut scratch.acc, &mut scratch.acc2);
                self.tile(&up, acts, cols.len(), scratch);
                self.activate(w, first..first + set.n, cols.len(), scratch);
                store(&scratch.acc[..cols.len()], cols, first, set.n, y);
            }
        }
    }

    /// Biases, activation and product of a tile of gate and up, which is `rows`.
    fn activate(&self, w: &Gated, rows: Range<usize>, n_cols: usize, scratch: &mut Scratch) {
        let (gate, up) = (&mut scratch.acc2[..n_cols], &mut scratch.acc[..n_cols]);
        if let Some([of_gate, of_up]) = w.biases {
            add_bias(gate, &of_gate[rows.clone()]);
            add_bias(up, &of_up[rows]);
        }
        variants::gate(self.isa, w.act, gate, up);
    }

    /// Rows of a chunk of work: whole tiles (of few columns of floats, four rows), few enough that every worker gets
    /// several chunks of the region's `stack` matrices `[n, k]`, and many enough to outweigh the start of a chunk.
    pub fn row_chunk(
        &self,
        dtype: WeightType,
        (n, k): (usize, usize),
        stack: usize,
        cols: usize,
        workers: usize,
    ) -> usize {
        // At most about 4 MB of weights for one column, and less where a tile takes more work (Qwen3-30B-A3B's shape, 2
        // cores of AMD EPYC 9004: 8 sequences that decode together take 66 to 69 ms a step, with chunks a quarter as
        // long 77 to 79).
        let row = dtype.plane_bytes(k).map_or(k, PlaneBytes::total).max(1);
        let by_bytes = ((4 << 20) / row / cols.max(1)).max(4 * ROWS);
        let by_share = (n * stack).div_ceil(CHUNKS * workers.max(1)).clamp(1, n.max(1));
        let step = if dtype.act() == ActKind::F32 && cols < variants::FLOAT_FROM { 4 } else { ROWS };
        let chunk = by_bytes.min(by_share).next_multiple_of(step);
        // Chunks of about one length.
        n.div_ceil(n.div_ceil(chunk).max(1)).next_multiple_of(step).max(step)
    }

    /// Computes 16 rows by up to [`COLS`] columns into `scratch.acc`.
    fn tile(&self, set: &RowSet, acts: &ActsShared, n_cols: usize, scratch: &mut Scratch) {
        let variant = &self.table[set.dtype.index()];
        let (cols, acc) = (&scratch.cols[..n_cols], &mut scratch.acc[..n_cols]);
        match variant.many {
            Many::Panel { unpack, tile, from } if n_cols >= from => {
                let block = set.dtype.act().block_len();
                for a in acc.iter_mut() {
                    *a = [0.0; ROWS];
                }
                for chunk in (0..set.k).step_by(CHUNK) {
                    let blocks = (set.k - chunk).min(CHUNK) / block;
                    // SAFETY: the rows have these blocks; `new` checked the instruction set; the columns'
                    // rows have k values, of which chunk .. chunk + blocks·block are read.
                    unsafe {
                        unpack(set, chunk, blocks, &mut scratch.panel);
                        tile(&scratch.panel, blocks, chunk, cols, acc);
                    }
                }
            }
            // SAFETY: `check` compared the shapes, `new` the instruction set.
            Many::Float(many) if n_cols >= variants::FLOAT_FROM => unsafe { many(set, cols, acc) },
            _ => {
                for (col, acc) in cols.iter().zip(acc) {
                    // SAFETY: as above.
                    unsafe { (variant.one)(set, acts, col, acc) }
                }
            }
        }
    }
}

/// Checks, once per call, everything that raw pointers rely on.
fn check(w: &Matrix, rows: &Range<usize>, acts: &ActsShared, cols: &[Col], y: &OutPtr) {
    let need = w.dtype.plane_bytes(w.k).and_then(|row| row.times(w.n));
    let held = w.planes.len();
    assert!(
        need.is_some_and(|n| n.q <= held.q && n.scales <= held.scales && n.biases <= held.biases),
        "{} [{}, {}] in {held:?}",
        w.dtype,
        w.n,
        w.k,
    );
    assert!(acts.kind() == w.dtype.act() && acts.k() == w.k, "activations are not for {} rows of {}", w.dtype, w.k);
    assert!(rows.end <= w.n && rows.end <= y.stride, "rows {rows:?} of {} into outputs of {}", w.n, y.stride);
    for c in cols {
        assert!((c.act as usize) < acts.rows() && (c.out as usize) < y.rows, "column {c:?} is out of range");
    }
}

fn set_cols(cols: &[Col], acts: &ActsShared, scratch: &mut Scratch) {
    for (p, c) in scratch.cols.iter_mut().zip(cols) {
        *p = ColPtr { row: acts.row_ptr(c.act as usize), act: c.act as usize };
    }
}

fn row_set<'a>(w: &Matrix<'a>, first: usize, end: usize) -> RowSet<'a> {
    // `check` saw that the product does not overflow and that the type divides the row.
    let bytes = w.dtype.plane_bytes(w.k).unwrap_or_default();
    let n = (end - first).min(ROWS);
    // The rows past the end of a chunk are mostly the same worker's next.
    let next = if first + n < w.n { first + n } else { first };
    let next = w.planes.q.as_ptr().wrapping_add(next * bytes.q);
    RowSet { dtype: w.dtype, planes: w.planes.rows(bytes, first..first + n), bytes, n, k: w.k, next }
}

/// `act(g) · u` by the polynomials of the kernels, for tests.
#[doc(hidden)]
pub fn gated(act: Gate, g: f32, u: f32) -> f32 {
    super::math::gated(act, g, u)
}

/// Adds a bias to the first rows of a tile's columns.
fn add_bias(acc: &mut [[f32; ROWS]], bias: &[f32]) {
    for col in acc {
        col.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
    }
}

/// Writes the first `n` rows of a tile's columns.
fn store(acc: &[[f32; ROWS]], cols: &[Col], first: usize, n: usize, y: OutPtr) {
    for (a, c) in acc.iter().zip(cols) {
        // SAFETY: `check` saw that the column and the rows lie inside; `OutPtr::new` was promised that they are ours.
        unsafe {
            let out = y.ptr.add(c.out as usize * y.stride + first);
            match n {
                ROWS => out.cast::<[f32; ROWS]>().write_unaligned(*a),
                _ => std::ptr::copy_nonoverlapping(a.as_ptr(), out, n),
            }
        }
    }
}
