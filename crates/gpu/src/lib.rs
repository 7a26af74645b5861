//! GPU backends: NVIDIA's through [`cuda`], Apple's through [`metal`], which is built on
//! [`commands`].
//!
//! Experts that a device has no room for are computed on the host by the kernels of the crate `cpu`. It knows nothing
//! of text, requests or sampling.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod commands;
pub mod cuda;
mod drafts;
pub mod metal;
mod quant_headers;

use backend::{CacheType, KvType};
use model::plan::Plan;

/// What kernels take for what a query sees: 0 for all positions, or the length of a window, with the highest bit where
/// it begins at a multiple of that.
fn window_word(window: Option<usize>, chunked: bool) -> u32 {
    let length = window.map_or(0, |n| n.min(i32::MAX as usize)) as u32;
    if chunked { length | 1 << 31 } else { length }
}

/// Why the kernels of `backend` read no cache of these types; `None` where they do.
fn unread(backend: &str, cache: CacheType) -> Option<String> {
    let is_unknown = [cache.k, cache.v].contains(&KvType::Q4_0);
    is_unknown.then(|| format!("keep a cache of type {cache}: {backend} supports f16, f32 and q8_0"))
}

/// Whether steps of a plan may have spans, whose tokens see each other: those of images and of whole texts.
fn may_have_spans(plan: &Plan) -> bool {
    plan.d_input().is_some() || plan.whole
}

/// Whether attention with this window heeds such spans.
fn heeds_spans(plan: &Plan, window: Option<usize>) -> bool {
    may_have_spans(plan) && plan.sees_spans(window)
}
