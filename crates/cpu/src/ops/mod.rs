//! The ops of the CPU backend, one file each (or a family that shares its loop).
//!
//! A function here runs one op of the plan as one or a few parallel regions. Shapes were checked by the plan's
//! validator and the batch by `Batch::check`, so nothing is checked again.

pub mod attention;
mod attention_tile;
pub mod causal_conv;
pub mod choose;
pub mod combine;
pub mod decay_beta;
pub mod delta_net;
pub mod elementwise;
pub mod embed;
pub mod experts;
pub mod experts_streamed;
pub mod head_linear;
pub mod heads;
pub mod kv_append;
pub mod linear;
pub mod norm;
pub mod rope;
pub mod route;
mod softmax_state;
