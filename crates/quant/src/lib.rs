//! Weight types: block layouts, decode, encode, and the scalar dot product that every kernel must equal.
//!
//! This crate is the oracle. It has no unsafe code, does no IO, and knows nothing of tensors, files or devices:
//! a row of weights is a byte slice ([`Planes`] of them for the types of MLX files), a row of activations is an
//! [`act::ActRow`].
//!
//! Where things are: the table of types and one file per family in [`types`]; the two integer forms that every block
//! unpacks to in [`block`]; the slices of a row in [`planes`]; what is computed from them in [`decode`], [`encode`] and
//! [`dot`]; activations in [`act`].
//!
//! ```
//! use quant::{PlanesBuf, WeightType, decode_row, encode_row};
//!
//! let x: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin()).collect();
//! let mut row = PlanesBuf::new(WeightType::Q8_0.plane_bytes(x.len()).unwrap());
//! encode_row(WeightType::Q8_0, &x, row.get_mut());
//!
//! let mut back = [0.0; 64];
//! decode_row(WeightType::Q8_0, row.get(), &mut back);
//! // An integer step of a block is its largest value over 127.
//! assert!(x.iter().zip(back).all(|(a, b)| (a - b).abs() < 1.0 / 254.0 + 1e-3));
//! ```
//!
//! # The CPU law, in one place
//! * Weights of 32-block types of at most 6 bits meet activations of [`act::ActKind::Byte32`]: 8-bit integers with one
//!   f32 scale per 32 values. Those of 8 bits meet [`act::ActKind::Block32`]: 16-bit integers with one f32 scale per 32
//!   values, since 8-bit activations would err as much as the weights do. Weights of 256-block types meet
//!   [`act::ActKind::Block256`]: 8-bit integers, a 4-bit integer sub-scale per 32 values and one f32 scale per 256
//!   values. F32, F16, BF16, 8-bit floats and NVFP4 meet plain f32 activations.
//! * 8-bit floats and NVFP4 are floats: a weight is the f32 nearest to the product of its code's number and its scale,
//!   which the format of NVFP4 makes exact.
//! * Inside a block (super-block) the dot product is exact in `i32`. Between blocks, in block order, the
//!   f32 accumulator takes one fused multiply-add: `acc = fma(d_w * d_x, isum as f32, acc)`; types with a minimum take
//!   a second one right after it: `acc = fma(-(m_w * d_x), msum as f32, acc)` (or `+` where the format adds it).
//! * Affine types are 32-block types whatever their group: every 32 values take
//!   `acc = fma(scale * d_x, isum as f32, acc)`, then `acc = fma(bias * d_x, xsum as f32, acc)`, with
//!   `isum = Σ q_w·q_x`, `xsum = Σ q_x` and the scale and bias of the group that they lie in, as f32.
//! * f32 dots use 16 virtual lanes: element `i` goes to lane `i % 16` by fused multiply-add, in order of `i`;
//!   the lanes are summed by the fixed tree of [`dot::tree_sum`].
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod act;
pub mod block;
pub mod decode;
pub mod dot;
pub mod encode;
mod level;
pub mod planes;
pub mod types;

pub use decode::decode_row;
pub use encode::{RowUse, encode_row, encode_row_for, square_sums};
pub use planes::{PlaneBytes, Planes, PlanesBuf, PlanesMut};
pub use types::WeightType;
pub use types::planar::{Affine, ScaleType};
pub use types::small_float::nvfp4_scale;
