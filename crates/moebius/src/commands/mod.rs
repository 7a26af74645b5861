//! One file a command.

pub mod bench;
pub mod chat;
pub mod compare;
pub mod completions;
pub mod config;
pub mod convert;
pub mod devices;
mod gap;
pub mod health;
pub mod imatrix;
pub mod inspect;
mod line;
pub mod logits;
pub mod man;
pub mod models;
pub mod perplexity;
pub mod plan;
pub mod pull;
pub mod quantize;
pub mod render;
pub mod run;
mod sight;
pub mod tokenize;
