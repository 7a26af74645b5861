//! `kv_append`: writes the step's keys and values into the paged cache.
//!
//! A page of a layer holds one tile for each kv head: keys `[d_k][32]`, so that the scores of 32 positions are lanes,
//! then values `[32][d_v]` with rows padded to whole lanes (the pad stays zero).
//!
//! A latent cache, whose values are a part of its keys, holds one copy of both: keys `[32][d_k]` with padded rows. Sums
//! over positions then find values as rows, and scores are dot products of rows.

use model::plan::CacheDecl;

use super::super::isa::on_isa;
use super::super::lanes::Lanes;
use super::super::mem::{View, over_rows};
use super::super::program::Run;
use crate::PAGE;

/// Element of a cache.
pub trait CacheElem: Copy + Send + Sync + 'static {
    /// Reads 16 values.
    ///
    /// # Safety
    /// `p` points to 16 readable elements.
    unsafe fn load<L: Lanes>(p: *const Self) -> L;
    /// Writes 16 values.
    ///
    /// # Safety
    /// `p` points to 16 writable elements.
    unsafe fn store<L: Lanes>(v: L, p: *mut Self);
    /// Zero.
    const ZERO: Self;
}

impl CacheElem for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f32) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(p) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(v: L, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { v.store(p) }
    }
    const ZERO: f32 = 0.0;
}

/// f16 as bits.
impl CacheElem for u16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u16) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(v: L, p: *mut u16) {
        // Values past the range of f16 become its largest: infinity would turn a whole softmax into NaN. NaN passes.
        let v = L::splat(-65504.0).max(L::splat(65504.0).min(v));
        // SAFETY: the caller's promise.
        unsafe { v.store_f16(p) }
    }
    const ZERO: u16 = 0;
}

/// One layer's cache.
pub struct CacheView {
    ptr: *mut u8,
    /// Kv heads.
    pub n_kv: usize,
    /// Width of a key head.
    pub d_k: usize,
    /// Width of a value head.
    pub d_v: usize,
    /// Its pages are window pages.
    pub windowed: bool,
    /// Values are the first `d_v` numbers of the keys.
    pub latent: bool,
    /// Elements are f16, otherwise f32.
    pub half: bool,
}

// SAFETY: an address; each access states its own promise.
unsafe impl Send for CacheView {}
// SAFETY: as above.
unsafe impl Sync for CacheView {}

impl CacheView {
    /// Bytes of a page of this layer, or none when the number does not exist.
    pub fn page_bytes(decl: &CacheDecl, half: bool) -> Option<usize> {
        let position = match decl.v_in_k {
            true => decl.d_k.checked_next_multiple_of(16)?,
            false => decl.d_v.checked_next_multiple_of(16)?.checked_add(decl.d_k)?,
        };
        let tile = position.checked_mul(PAGE)?;
        tile.checked_mul(decl.n_kv)?.checked_mul(if half { 2 } else { 4 })
    }

    /// # Safety
    /// `ptr` points to [`CacheView::page_bytes`] zeroed bytes for every page of the limits, as long as the view is
    /// used.
    pub unsafe fn new(ptr: *mut u8, decl: &CacheDecl, half: bool) -> CacheView {
        let (n_kv, d_k, d_v, windowed, latent) = (decl.n_kv, decl.d_k, decl.d_v, decl.window.is_some(), decl.v_in_k);
        CacheView { ptr, n_kv, d_k, d_v, windowed, latent, half }
    }

    /// Bytes of its pages, [`CacheView::page_bytes`] of its declaration.
    pub fn page_len(&self) -> usize {
        self.n_kv * (self.v_first() + PAGE * self.v_stride()) * if self.half { 2 } else { 4 }
    }

    /// The bytes of a page.
    ///
    /// # Safety
    /// `page` is within the limits, and no other code reads or writes the page while the slice lives.
    pub unsafe fn page<'a>(&self, page: u32) -> &'a mut [u8] {
        let bytes = self.page_len();
        // SAFETY: the caller's promise; the memory starts zeroed, so it is initialised.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(page as usize * bytes), bytes) }
    }

    /// Numbers of a value row, padded.
    pub fn v_width(&self) -> usize {
        self.d_v.next_multiple_of(16)
    }

    /// Value rows are this far apart.
    pub fn v_stride(&self) -> usize {
        if self.latent { self.d_k.next_multiple_of(16) } else { self.v_width() }
    }

    /// First element of the values of a tile, after that of its keys.
    pub fn v_first(&self) -> usize {
        if self.latent { 0 } else { PAGE * self.d_k }
    }

    /// First element of the keys of a tile.
    ///
    /// # Safety
    /// `page` and `head` are in range and `E` is the element type.
    pub unsafe fn tile<E: CacheElem>(&self, page: u32, head: usize) -> *mut E {
        let tile = self.v_first() + PAGE * self.v_stride();
        // SAFETY: the caller's promise.
        unsafe { self.ptr.cast::<E>().add((page as usize * self.n_kv + head) * tile) }
    }
}

/// Writes `k` `[T, n_kv·d_k]` and `v` `[T, n_kv·d_v]` at the step's positions; a latent cache takes no `v`.
pub fn kv_append(run: &mut Run, cache: &CacheView, k: View, v: Option<View>) {
    if cache.half { append::<u16>(run, cache, k, v) } else { append::<f32>(run, cache, k, v) }
}

fn append<E: CacheElem>(run: &mut Run, cache: &CacheView, k: View, v: Option<View>) {
    let (isa, step, batch) = (run.isa, run.step, run.batch);
    // A key's numbers go to a line of memory each.
    over_rows(run.pool, step.pos.len(), 32 * k.width + v.map_or(0, |v| v.width), |_, rows| {
        for t in rows {
            let chunk = &batch.chunks[step.chunk_of[t] as usize];
            let pos = step.pos[t] as usize;
            let page = batch.page(chunk, cache.windowed, pos / PAGE);
            for h in 0..cache.n_kv {
                // SAFETY: `Batch::check` saw the page; a token writes only its own position, so no two chunks meet.
                unsafe {
                    let tile = cache.tile::<E>(page, h);
                    let k = &k.row(t)[h * cache.d_k..(h + 1) * cache.d_k];
                    let row = tile.add(cache.v_first() + pos % PAGE * cache.v_stride());
                    let row = std::slice::from_raw_parts_mut(
                        row,
                        if v.is_some() { cache.v_width() } else { cache.v_stride() },
                    );
                    match v {
                        Some(v) => {
                            write_k(isa, k, tile.add(pos % PAGE));
                            write_row(isa, &v.row(t)[h * cache.d_v..(h + 1) * cache.d_v], row);
                        }
                        None => write_row(isa, k, row),
                    }
                }
            }
        }
    });
}

on_isa! {
    /// Writes a key head down a column of its tile, which begins at `out`.
    ///
    /// # Safety
    /// Of the tile's `[d_k][PAGE]` keys no other code reads or writes this column; `k` has `d_k` numbers.
    unsafe fn write_k<E: CacheElem>(k: &[f32], out: *mut E) = write_k_lanes
}
on_isa! {
    /// Writes a head and zeros to the end of its row, which is whole lanes long.
    fn write_row<E: CacheElem>(x: &[f32], out: &mut [E]) = write_row_lanes
}

/// # Safety
/// See [`write_k`].
#[inline(always)]
unsafe fn write_k_lanes<L: Lanes, E: CacheElem>(k: &[f32], out: *mut E) {
    let mut part = [E::ZERO; 16];
    for i in (0..k.len()).step_by(16) {
        // SAFETY: the array has 16 elements; the caller's promise: the column has one every PAGE for each of the key's.
        unsafe {
            E::store(L::load_at(k, i, 0.0), part.as_mut_ptr());
            for (j, &e) in part[..(k.len() - i).min(16)].iter().enumerate() {
                *out.add((i + j) * PAGE) = e;
            }
        }
    }
}

#[inline(always)]
fn write_row_lanes<L: Lanes, E: CacheElem>(x: &[f32], out: &mut [E]) {
    for (i, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // SAFETY: the array has 16 elements.
        unsafe { E::store(L::load_at(x, 16 * i, 0.0), out.as_mut_ptr()) };
    }
}
