//! The table of kernels: weight type × operation × instruction set -> function. The vector kernels of a weight type
//! come from the table in [`super::types`].

use model::plan::Gate;
use quant::WeightType;
use quant::act::ActKind;

use crate::isa::{CheckedIsa, Isa, on_isa};
use crate::lanes::Lanes;
use crate::math::gated;

use super::acts::RowPtr;
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::panel::{self, Panel, ROWS, UnpackFn};
use super::{ActsShared, ColPtr, RowSet, float, scalar};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// One column: writes the dot products of the set's rows; results behind the last row are meaningless.
///
/// # Safety
/// The set's rows are readable, `col` is a row of `acts`, both have k values of kinds that fit each other, and the
/// machine has the instruction set that the function is written for.
pub(super) type OneFn = unsafe fn(set: &RowSet, acts: &ActsShared, col: &ColPtr, out: &mut [f32; ROWS]);

/// Columns of a panel: adds to `acc` the products of `blocks` blocks, which begin at value `chunk` of the row.
///
/// # Safety
/// Every column has the blocks, `acc` is as long as `cols`, and the machine has the instruction set.
pub(super) type TileFn =
    unsafe fn(panel: &Panel, blocks: usize, chunk: usize, cols: &[ColPtr], acc: &mut [[f32; ROWS]]);

/// Many columns of float weights, at most [`super::COLS`].
///
/// # Safety
/// As [`OneFn`], for every column.
pub(super) type FloatFn = unsafe fn(set: &RowSet, cols: &[ColPtr], acc: &mut [[f32; ROWS]]);

/// Quantises a row.
///
/// # Safety
/// `row` points to sections for `x.len()` values that no other code reads or writes, and the machine has the
/// instruction set.
pub(super) type QuantiseFn = unsafe fn(x: &[f32], row: &RowPtr);

/// The kernel for more than one column.
#[derive(Clone, Copy, Debug)]
pub(super) enum Many {
    /// Integer panel, from `from` columns on; fewer go one by one.
    Panel { unpack: UnpackFn, tile: TileFn, from: usize },
    /// Lanes of f32.
    Float(FloatFn),
}

/// The kernels of a weight type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    pub one: OneFn,
    pub many: Many,
}

/// The quantisers.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuantiseFns {
    pub float: QuantiseFn,
    pub block32: QuantiseFn,
    pub byte32: QuantiseFn,
    pub block256: QuantiseFn,
}

/// The row of the table for `t` on `isa`.
pub(super) fn variant(t: WeightType, isa: CheckedIsa) -> Variant {
    if t.act() == ActKind::F32 {
        return float_variant(t, isa);
    }
    match isa.isa() {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Variant {
            one: avx2::one(t),
            many: Many::Panel { unpack: avx2::unpack(t), tile: avx2::tile(t), from: panel_from(t) },
        },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => Variant {
            one: avx2::one_avx512(t),
            many: Many::Panel {
                unpack: if t.act() == ActKind::Block256 { avx512::unpack(t) } else { avx2::unpack_bytes(t) },
                tile: avx512::tile(t),
                from: panel_from(t),
            },
        },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => neon_variant::<neon::Sdot>(t),
        #[cfg(target_arch = "aarch64")]
        Isa::I8mm => neon_variant::<neon::Smmla>(t),
        _ => Variant {
            one: scalar::one,
            many: Many::Panel { unpack: panel::plain(t), tile: scalar::tile_fn(t), from: 4 },
        },
    }
}

#[cfg(target_arch = "aarch64")]
fn neon_variant<M: neon::Products>(t: WeightType) -> Variant {
    let many = Many::Panel { unpack: neon::unpack::<M>(t), tile: neon::tile::<M>(t), from: panel_from(t) };
    Variant { one: neon::one(t), many }
}

/// Columns from which widening float rows costs less than a matrix-vector product for each column (measured on Zen 4).
pub(super) const FLOAT_FROM: usize = 5;

/// Columns from which unpacking a panel costs less than a matrix-vector product for each column. [768, 2048] on one
/// core of AMD EPYC 9004, two columns one by one and through a panel: q4_k 98 and 85 us, q6_k 124 and 111, q4_0 96 and
/// 97, q8_0 124 and 147. On NEON counts of instructions agree (qemu): two columns of super-blocks as a panel take 0.6
/// to 0.8 of the instructions of one by one, those of 32-blocks 0.7 to 1.02.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn panel_from(t: WeightType) -> usize {
    if t.act() == ActKind::Block256 { 2 } else { 3 }
}

fn float_variant(t: WeightType, isa: CheckedIsa) -> Variant {
    macro_rules! kernels {
        ($isa:path, $one:ident, $many:ident) => {{
            // SAFETY: the caller has proved that the machine has `isa`, which is this one.
            const ISA: CheckedIsa = unsafe { CheckedIsa::assume($isa) };
            Variant {
                // SAFETY: the contract of `OneFn`.
                one: |set, _, col, out| unsafe { float::$one(ISA, set, col, out) },
                // SAFETY: the contract of `FloatFn`.
                many: Many::Float(|set, cols, acc| unsafe { float::$many(ISA, set, cols, acc) }),
            }
        }};
    }
    macro_rules! on {
        ($isa:path) => {
            match t {
                WeightType::F32 => kernels!($isa, one_f32, many_f32),
                WeightType::F16 => kernels!($isa, one_f16, many_f16),
                WeightType::F8_E4M3 => kernels!($isa, one_f8, many_f8),
                WeightType::NVFP4 => kernels!($isa, one_nvfp4, many_nvfp4),
                WeightType::NVFP4_SCALED => kernels!($isa, one_nvfp4_scaled, many_nvfp4_scaled),
                _ => kernels!($isa, one_bf16, many_bf16),
            }
        };
    }
    match isa.isa() {
        Isa::Scalar => on!(Isa::Scalar),
        Isa::Avx2 => on!(Isa::Avx2),
        Isa::Avx512 => on!(Isa::Avx512),
        Isa::Neon | Isa::I8mm => on!(Isa::Neon),
    }
}

/// The quantisers of `isa`.
pub(super) fn quantise(isa: CheckedIsa) -> QuantiseFns {
    let plain = QuantiseFns {
        float: scalar::float,
        block32: scalar::block32,
        byte32: scalar::byte32,
        block256: scalar::block256,
    };
    match isa.isa() {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => QuantiseFns {
            block32: avx2::quantise::block32,
            byte32: avx2::quantise::byte32,
            block256: avx2::quantise::block256,
            ..plain
        },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => QuantiseFns {
            block32: avx2::quantise::block32,
            byte32: avx2::quantise::byte32,
            block256: avx512::quantise::block256,
            ..plain
        },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::I8mm => QuantiseFns {
            block32: neon::quantise::block32,
            byte32: neon::quantise::byte32,
            block256: neon::quantise::block256,
            ..plain
        },
        _ => plain,
    }
}

#[inline(always)]
fn gate_lanes<L: Lanes>(act: Gate, g: &[[f32; ROWS]], u: &mut [[f32; ROWS]]) {
    for (g, u) in g.iter().zip(u) {
        // SAFETY: both arrays have 16 values.
        unsafe { gated(act, L::load(g.as_ptr()), L::load(u.as_ptr())).store(u.as_mut_ptr()) }
    }
}

on_isa! {
    /// `u = act(g) ⊙ u`, for the columns of a tile.
    pub(super) fn gate(act: Gate, g: &[[f32; ROWS]], u: &mut [[f32; ROWS]]) = gate_lanes
}
