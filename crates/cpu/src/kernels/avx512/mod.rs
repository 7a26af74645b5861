//! Kernels for AVX-512 with VNNI: 512-bit panels times columns, and the AVX2 matrix-vector kernels compiled with these
//! instructions (twice the registers, and of super-blocks `vpdpwssd` in the place of a product and an addition).
//! Super-blocks are unpacked 16 rows at a time; all else that unpacks, and most of quantising, is AVX2's own.

mod panel;
pub(super) mod quantise;
mod tile;

use super::avx2::formats;

pub(super) use panel::unpack;
pub(super) use tile::tile;
