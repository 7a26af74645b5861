//! Plans: what a model computes, op by op, over named tensors and virtual buffers. No device, no IO.
#![forbid(unsafe_code)]

pub mod plan;
