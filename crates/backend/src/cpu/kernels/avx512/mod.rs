//! Kernels for AVX-512 with VNNI: 512-bit panels times columns, and the AVX2 matrix-vector kernels compiled with these
//! instructions (twice the registers, and `vpdpwssd` in the place of a product and an addition). Unpacking and
//! quantising are AVX2's own.

mod tile;

use super::avx2::formats;

pub(super) use tile::{add_scaled, tile};
