//! What every backend must do alike, in one program: each module is a subject.
#![allow(clippy::unwrap_used)]

mod cpu_law;
mod cuda;
mod encoders;
mod golden;
mod hidden;
mod hybrid;
mod images;
mod inputs;
mod latent;
mod metal;
mod metal_limits;
mod ops;
mod parts;
mod routing;
#[path = "../../../../tests/seeing.rs"]
mod seeing;
mod streaming;
mod two_ops;

use conformance::fixtures;
