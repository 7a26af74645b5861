//! Tests over headers made here.
#![allow(clippy::unwrap_used)]

mod costs;
mod header;
mod plans;
mod refusals;
mod rules;
