//! Tests over headers made here.
#![allow(clippy::unwrap_used)]

mod costs;
#[path = "../../../../tests/fixtures.rs"]
mod fixtures;
mod gated_delta;
mod header;
mod latent;
mod names;
mod plans;
mod readme;
mod refusals;
mod rules;
mod windowed;
