//! What GGUF files say of DeepSeek's sparse attention.

use anyhow::{Result, ensure};
use model::plan::Plan;

use super::keys::Keys;
use super::states::by_layer;

impl Keys<'_> {
    pub(super) fn indexer(&mut self, plan: Option<&Plan>, n_layer: u32) -> Result<()> {
        let shares = self.arch == "glm-dsa";
        let (name, usual) = ("indexer_rope_interleave", shares);
        ensure!(
            self.config.opt_bool(name)?.unwrap_or(usual) == usual,
            "failed to convert {}: {name} is not {usual}, which GGUF's {} has no form for",
            self.config.file(),
            self.arch
        );
        self.pass("attention.indexer.head_count", &["index_n_heads"])?;
        self.pass("attention.indexer.key_length", &["index_head_dim"])?;
        self.pass("attention.indexer.top_k", &["index_topk"])?;
        if let (Some(plan), true) = (plan, shares) {
            let own: Vec<bool> = by_layer(plan, n_layer, 1, &["indexer.attn_k"]).iter().map(|&n| n == 1).collect();
            self.add("attention.indexer.types", own);
        }
        Ok(())
    }
}
