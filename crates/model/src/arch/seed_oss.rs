//! Seed-OSS (36B): Llama's layers with biases on q, k and v.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts;
use crate::Error;
use crate::names::Alias;
use crate::plan::{Plan, RopePairing};

const ARCH: &str = "seed_oss";

/// GGUF files call the norm before the feed-forward by its place after attention.
const ALIASES: &[Alias] = &[("ffn_norm", &["=post_attention_norm"])];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    parts::dense_model(keys, ARCH, keys.dims()?, RopePairing::Half)
}
