//! GLM-4-0414 and GLM-Z1, dense (9B, 32B): norms before and after attention and feed-forward, biases on q, k and
//! v, neighbors in half of each head rotated, gate and up in one tensor.

use checkpoint::Checkpoint;

use super::keys::{Dims, Keys};
use super::parts;
use crate::Error;
use crate::names::Alias;
use crate::plan::{Plan, RopePairing};

const ARCH: &str = "glm4";

const ALIASES: &[Alias] = &[
    ("post_attention_norm", &["post_self_attn_layernorm"]),
    ("post_ffw_norm", &["post_mlp_layernorm"]),
    ("ffn_gate", &["=ffn_up[0/2]", "mlp.gate_up_proj[0/2]"]),
    ("ffn_up", &["=ffn_up[1/2]", "mlp.gate_up_proj[1/2]"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let dims = keys.dims()?;
    parts::dense_model(keys, ARCH, Dims { post_norm: Some(dims.eps), ..dims }, RopePairing::Interleaved)
}
