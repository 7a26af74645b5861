//! OLMo 2 and 3: norms after attention and feed-forward and none before them, all heads of q and of k normalized
//! at once. In OLMo 3 three of four layers see a window, and only the fourth has the scaling of a longer context.

use checkpoint::Checkpoint;

use super::keys::{Dims, Keys, Unsaid};
use super::parts::{self, Attention, QkNorm};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Plan, RopePairing};

const ARCH: &str = "olmo2";

const ALIASES: &[Alias] =
    &[("post_attention_norm", &["post_attention_layernorm"]), ("post_ffw_norm", &["post_feedforward_layernorm"])];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let dims = keys.dims()?;
    let dims = Dims { pre_norm: false, post_norm: Some(dims.eps), ..dims };
    let d_ff = keys.d_ff()?;
    let rope = keys.rope_of(Some("full_attention"), dims.d_k, RopePairing::Half)?;
    let rope_windowed = keys.rope_windowed(dims.d_k, RopePairing::Half, Unsaid::AsRest)?;
    let windows = windows(&keys, dims.n_layer, Unnamed::ButEvery(4))?;

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let (rope, rope_windowed) = (b.rope(rope), b.rope(rope_windowed));
    let x = parts::embed(&mut b, &dims)?;
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        let rope = if window.is_some() { rope_windowed } else { rope };
        let attn = Attention { qk_norm: Some(QkNorm::WHOLE), window, ..Attention::plain(rope, dims.d_k) };
        parts::attention(&mut b, &dims, attn, layer, x)?;
        parts::feed_forward(&mut b, &dims, d_ff, layer, x)?;
    }
    parts::head(b, &dims, x)
}
