//! `kv_append`: writes the step's keys and values into the paged cache.
//!
//! A page of a layer holds one tile for each kv head: keys `[d_k][32]`, so that the scores of 32 positions are lanes,
//! then values `[32][d_v]` with rows padded to whole lanes (the pad stays zero).
//!
//! A latent cache, whose values are a part of its keys, holds one copy of both: keys `[32][d_k]` with padded rows. Sums
//! over positions then find values as rows, and scores are dot products of rows.
//!
//! Types of blocks have the integers first and then their f16 scales. Keys are `[d_k/2][32][2]`, values
//! `[16][d_v][2]`: pairs of numbers of a key, and of positions of a value, are what one instruction multiplies and
//! adds. Scales are `[d/32][32]`. Rows of a latent cache are `[32][d_k]`, its scales `[32][d_k/32]`. Of 4 bits a byte
//! has two numbers of a block, 16 apart: the same orders with half as many bytes.

use model::plan::CacheDecl;

use super::super::isa::{CheckedIsa, on_isa};
use super::super::lanes::Lanes;
use super::super::mem::{View, over_rows};
use super::super::program::Run;
use backend::cache_type::{BLOCK, MAX_ROTATION, encode_block, rotate};
use backend::{CacheType, KvType, PAGE};

/// Float element of a cache.
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
    /// Types of its numbers.
    pub types: CacheType,
    /// Numbers of a head that are rotated together, of keys and of values; 1 where none are.
    pub rotations: [usize; 2],
    /// Bytes of the keys of a tile, of all of it where values are a part of them.
    key_bytes: usize,
    /// Bytes of a tile.
    pub tile_bytes: usize,
}

// SAFETY: an address; each access states its own promise.
unsafe impl Send for CacheView {}
// SAFETY: as above.
unsafe impl Sync for CacheView {}

/// Bytes of the keys of a tile and of its values, or none when the numbers do not exist.
fn tile_parts(decl: &CacheDecl, types: CacheType) -> Option<[usize; 2]> {
    let row = |t: KvType, width: usize| t.bytes(width)?.checked_mul(PAGE);
    let padded = |width: usize| width.checked_next_multiple_of(16);
    match decl.v_in_k {
        true => Some([row(types.k, padded(decl.d_k)?)?, 0]),
        false => Some([row(types.k, decl.d_k)?, row(types.v, padded(decl.d_v)?)?]),
    }
}

impl CacheView {
    /// Bytes of a page of this layer, or none when the number does not exist.
    pub fn page_bytes(decl: &CacheDecl, types: CacheType) -> Option<usize> {
        let [keys, values] = tile_parts(decl, types)?;
        keys.checked_add(values)?.checked_mul(decl.n_kv)
    }

    /// # Safety
    /// `ptr` points to [`CacheView::page_bytes`] zeroed bytes for every page of the limits, as long as the view is
    /// used; that number exists, and the heads fit the types.
    pub unsafe fn new(ptr: *mut u8, decl: &CacheDecl, types: CacheType) -> CacheView {
        let (n_kv, d_k, d_v, windowed, latent) = (decl.n_kv, decl.d_k, decl.d_v, decl.window.is_some(), decl.v_in_k);
        let [key_bytes, values] = tile_parts(decl, types).unwrap_or_default();
        let (rotations, tile_bytes) = (types.rotations(decl), key_bytes + values);
        CacheView { ptr, n_kv, d_k, d_v, windowed, latent, types, rotations, key_bytes, tile_bytes }
    }

    /// Bytes of its pages, [`CacheView::page_bytes`] of its declaration.
    pub fn page_len(&self) -> usize {
        self.n_kv * self.tile_bytes
    }

    /// The bytes of a page.
    ///
    /// # Safety
    /// `page` is within the limits, and no other code reads or writes the page while the slice lives.
    pub unsafe fn page<'a>(&self, page: u32) -> &'a mut [u8] {
        let bytes = self.page_len();
        // SAFETY: the caller's promise; the memory starts zeroed, so it is initialized.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(page as usize * bytes), bytes) }
    }

    /// Whether scores are products with blocks.
    pub fn has_key_blocks(&self) -> bool {
        self.types.k.block().is_some() && !self.latent
    }

    /// Numbers of a value row, padded.
    pub fn v_width(&self) -> usize {
        self.d_v.next_multiple_of(16)
    }

    /// Value rows are this far apart.
    pub fn v_stride(&self) -> usize {
        if self.latent { self.d_k.next_multiple_of(16) } else { self.v_width() }
    }

    /// First byte of the values of a tile, after that of its keys.
    pub fn v_first(&self) -> usize {
        if self.latent { 0 } else { self.key_bytes }
    }

    /// First byte of the keys of a tile.
    ///
    /// # Safety
    /// `page` and `head` are in range.
    pub unsafe fn tile(&self, page: u32, head: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.ptr.add((page as usize * self.n_kv + head) * self.tile_bytes) }
    }
}

/// Writes `k` `[T, n_kv·d_k]` and `v` `[T, n_kv·d_v]` at the step's positions; a latent cache takes no `v`.
pub fn kv_append(run: &mut Run, cache: &CacheView, k: View, v: Option<View>) {
    let (isa, step, batch) = (run.isa, run.step, run.batch);
    // A key's numbers go to a line of memory each.
    over_rows(run.pool, step.pos.len(), 32 * k.width + v.map_or(0, |v| v.width), |_, rows| {
        for t in rows {
            let chunk = &batch.chunks[step.chunk_of[t] as usize];
            let pos = step.pos[t] as usize;
            let page = batch.page(chunk, cache.windowed, pos / PAGE);
            // SAFETY: `Batch::check` saw the page; a token writes only its own position, so no two chunks meet; `k`
            // and `v` are not written during this op.
            unsafe {
                let place = Place { cache, tiles: cache.tile(page, 0), pos: pos % PAGE };
                match (cache.types.k, v) {
                    (KvType::F32, Some(_)) => place.keys::<f32>(isa, k.row(t)),
                    (KvType::F16, Some(_)) => place.keys::<u16>(isa, k.row(t)),
                    (KvType::F32, None) => place.rows::<f32>(isa, k.row(t), cache.d_k),
                    (KvType::F16, None) => place.rows::<u16>(isa, k.row(t), cache.d_k),
                    (KvType::Q8_0 | KvType::Q4_0, Some(_)) => place.key_blocks(k.row(t)),
                    (KvType::Q8_0 | KvType::Q4_0, None) => place.latent_blocks(k.row(t)),
                }
                match (cache.types.v, v) {
                    (_, None) => {}
                    (KvType::F32, Some(v)) => place.rows::<f32>(isa, v.row(t), cache.d_v),
                    (KvType::F16, Some(v)) => place.rows::<u16>(isa, v.row(t), cache.d_v),
                    (KvType::Q8_0 | KvType::Q4_0, Some(v)) => place.value_blocks(v.row(t)),
                }
            }
        }
    });
}

/// A position of a page. Every function writes to it alone, and requires that no other code reads or writes it.
struct Place<'a> {
    cache: &'a CacheView,
    /// The page's first tile.
    tiles: *mut u8,
    pos: usize,
}

impl Place<'_> {
    /// First byte of a head's keys.
    unsafe fn tile(&self, head: usize) -> *mut u8 {
        // SAFETY: the page has a tile for every head.
        unsafe { self.tiles.add(head * self.cache.tile_bytes) }
    }

    /// Key heads, each down a column of its tile.
    unsafe fn keys<E: CacheElem>(&self, isa: CheckedIsa, k: &[f32]) {
        for (h, k) in k.chunks_exact(self.cache.d_k).enumerate() {
            // SAFETY: the keys of a tile have a column for each position.
            unsafe { write_k(isa, k, self.tile(h).cast::<E>().add(self.pos)) };
        }
    }

    /// Heads of `width` numbers as rows.
    unsafe fn rows<E: CacheElem>(&self, isa: CheckedIsa, x: &[f32], width: usize) {
        let stride = self.cache.v_stride();
        for (h, x) in x.chunks_exact(width).enumerate() {
            // SAFETY: the values of a tile, or its latents, have a row for each position.
            let row = unsafe {
                let first = self.tile(h).add(self.cache.v_first()).cast::<E>().add(self.pos * stride);
                std::slice::from_raw_parts_mut(first, stride)
            };
            write_row(isa, x, row);
        }
    }

    unsafe fn key_blocks(&self, k: &[f32]) {
        let (pos, n) = (self.pos, self.cache.d_k / BLOCK);
        blocks(self.cache.types.k, self.cache.rotations[0], k, |b, scale, q| {
            let pairs = q.as_chunks::<2>().0;
            // SAFETY: keys are `[n][pairs][PAGE]` and scales `[n][PAGE]`, of two bytes.
            unsafe {
                let (tile, b) = (self.tile(b / n).cast::<[u8; 2]>(), b % n);
                for (i, pair) in pairs.iter().enumerate() {
                    *tile.add((pairs.len() * b + i) * PAGE + pos) = *pair;
                }
                *tile.add((pairs.len() * n + b) * PAGE + pos) = scale;
            }
        });
    }

    unsafe fn value_blocks(&self, v: &[f32]) {
        let (pos, n) = (self.pos, self.cache.d_v / BLOCK);
        blocks(self.cache.types.v, self.cache.rotations[1], v, |b, scale, q| {
            let row = n * q.len();
            // SAFETY: values are `[PAGE/2][row][2]` bytes and scales `[n][PAGE]` of two bytes.
            unsafe {
                let (tile, b) = (self.tile(b / n).add(self.cache.v_first()), b % n);
                for (i, &q) in q.iter().enumerate() {
                    *tile.add((pos / 2 * row + b * (row / n) + i) * 2 + pos % 2) = q;
                }
                *tile.add(PAGE * row).cast::<[u8; 2]>().add(PAGE * b + pos) = scale;
            }
        });
    }

    unsafe fn latent_blocks(&self, x: &[f32]) {
        let (pos, n) = (self.pos, self.cache.d_k / BLOCK);
        blocks(self.cache.types.k, self.cache.rotations[0], x, |b, scale, q| {
            let row = n * q.len();
            // SAFETY: latents are `[PAGE][row]` bytes and scales `[PAGE][n]` of two bytes.
            unsafe {
                let (tile, b) = (self.tile(b / n), b % n);
                std::ptr::copy_nonoverlapping(q.as_ptr(), tile.add(pos * row + b * (row / n)), q.len());
                *tile.add(PAGE * row).cast::<[u8; 2]>().add(n * pos + b) = scale;
            }
        });
    }
}

/// Encodes heads, rotated, and hands on each block: its index, its scale and its integers.
fn blocks(t: KvType, rotation: usize, x: &[f32], mut put: impl FnMut(usize, [u8; 2], &[u8])) {
    let (mut room, mut rotated) = ([0; _], [[0.0; BLOCK]; MAX_ROTATION / BLOCK]);
    let width = rotation.max(BLOCK);
    for (i, x) in x.chunks_exact(width).enumerate() {
        let rotated = &mut rotated.as_flattened_mut()[..width];
        rotated.copy_from_slice(x);
        rotate(rotated, rotation);
        for (j, x) in rotated.as_chunks().0.iter().enumerate() {
            let (scale, q) = encode_block(t, x, &mut room).split_at(2);
            put(i * (width / BLOCK) + j, [scale[0], scale[1]], q);
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Where block `b` of head `h` is stored at a position, whose integers have `m` bytes: the places of these, and
    /// that of its scale.
    type PlacesOf = fn(&CacheView, m: usize, h: usize, b: usize, pos: usize) -> (Vec<usize>, usize);

    const KEYS: PlacesOf = |c, m, h, b, pos| {
        let i = |i: usize| h * c.tile_bytes + (b * m + i) / 2 * 2 * PAGE + 2 * pos + i % 2;
        ((0..m).map(i).collect(), h * c.tile_bytes + PAGE * c.d_k / BLOCK * m + 2 * (PAGE * b + pos))
    };
    const VALUES: PlacesOf = |c, m, h, b, pos| {
        let (first, row) = (h * c.tile_bytes + c.v_first(), c.d_v / BLOCK * m);
        let i = |i: usize| first + pos / 2 * 2 * row + 2 * (b * m + i) + pos % 2;
        ((0..m).map(i).collect(), first + PAGE * row + 2 * (PAGE * b + pos))
    };
    const LATENTS: PlacesOf = |c, m, h, b, pos| {
        let (first, row) = (h * c.tile_bytes, c.d_k / BLOCK * m);
        let i = |i: usize| first + pos * row + b * m + i;
        ((0..m).map(i).collect(), first + PAGE * row + 2 * (pos * c.d_k / BLOCK + b))
    };

    /// Blocks in a page have the bytes of their encoding, and no other byte is written.
    #[test]
    fn blocks_lie_where_they_should() {
        let decl = |n_kv, d_k, d_v, v_in_k| CacheDecl { n_kv, d_k, d_v, v_in_k, window: None };
        let shapes =
            [decl(1, 32, 32, false), decl(3, 96, 64, false), decl(2, 320, 352, false), decl(1, 576, 512, true)];
        let halves = CacheType { k: KvType::Q8_0, v: KvType::Q4_0 };
        let all = [CacheType::Q8_0, CacheType::Q4_0, halves].map(|types| shapes.map(|decl| (types, decl)));
        for (i, &(types, decl)) in all.as_flattened().iter().enumerate().filter(|(_, (t, d))| !d.v_in_k || t.k == t.v) {
            let mut page = vec![0u8; CacheView::page_bytes(&decl, types).unwrap()];
            // SAFETY: the page has these bytes, and the test has one thread.
            let cache = unsafe { CacheView::new(page.as_mut_ptr(), &decl, types) };
            let head = |d: usize, seed: usize| -> Vec<f32> {
                (0..decl.n_kv * d).map(|j| ((i + seed + j * 7) as f32 * 0.13).sin() * (1 + j % 5) as f32).collect()
            };
            let mut wanted = page.clone();
            for pos in [0, 1, 17, 31] {
                let (k, v) = (head(decl.d_k, pos), head(decl.d_v, pos + 100));
                // SAFETY: as above.
                unsafe {
                    let place = Place { cache: &cache, tiles: cache.tile(0, 0), pos };
                    match decl.v_in_k {
                        true => place.latent_blocks(&k),
                        false => {
                            place.key_blocks(&k);
                            place.value_blocks(&v);
                        }
                    }
                }
                let [of_k, of_v] = types.rotations(&decl);
                let halves: &[(&[f32], KvType, usize, usize, PlacesOf)] = match decl.v_in_k {
                    true => &[(&k, types.k, of_k, decl.d_k, LATENTS)],
                    false => &[(&k, types.k, of_k, decl.d_k, KEYS), (&v, types.v, of_v, decl.d_v, VALUES)],
                };
                for &(x, t, rotation, d, places) in halves {
                    let mut x = x.to_vec();
                    x.chunks_exact_mut(d).for_each(|head| rotate(head, rotation));
                    for (b, x) in x.as_chunks().0.iter().enumerate() {
                        let mut room = [0; _];
                        let (scale, q) = encode_block(t, x, &mut room).split_at(2);
                        let (of_numbers, of_scale) = places(&cache, q.len(), b / (d / BLOCK), b % (d / BLOCK), pos);
                        of_numbers.iter().zip(q).for_each(|(&at, &byte)| wanted[at] = byte);
                        wanted[of_scale..of_scale + 2].copy_from_slice(scale);
                    }
                }
            }
            assert!(page == wanted, "{types} {decl:?}");
        }
    }
}
