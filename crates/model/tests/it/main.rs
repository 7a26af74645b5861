//! Tests over headers made here.
#![allow(clippy::unwrap_used)]

mod header;
mod plans;
mod refusals;
