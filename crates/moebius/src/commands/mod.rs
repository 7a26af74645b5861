//! One file a command.

pub mod bench;
pub mod chat;
pub mod compare;
pub mod completions;
pub mod devices;
pub mod imatrix;
pub mod inspect;
pub mod logits;
pub mod models;
pub mod perplexity;
pub mod plan;
pub mod quantize;
pub mod render;
pub mod run;
pub mod tokenize;
