//! Launches of sparse attention: the choice of positions, and attention over them.

use super::super::args;
use super::super::chosen::{self, Slices};
use super::super::driver::DriverError;
use super::super::launch::Launch;
use super::super::nodes::{AttentionNode, ChooseNode, Chosen};
use super::Encoder;

impl Encoder<'_> {
    /// The positions that later attention sees. Where they are all of them, that does not ask.
    pub(super) fn choose(&mut self, node: &ChooseNode) -> Result<(), DriverError> {
        let (n_tokens, sms) = (self.counts.tokens, self.sms);
        let is_all = node.choice.is_all(self.most_pages);
        if is_all && !self.is_plain {
            return Ok(());
        }
        let n_ranks = self.scratch.n_ranks;
        let Slices { tokens, stride } = match is_all {
            true => Slices { tokens: n_tokens, stride: 0 },
            false => chosen::slices(node.choice, self.most_pages, n_tokens, n_ranks),
        };
        let n_head = node.weights.width;
        // Tokens of a block share a sequence, or have a block each.
        let per = node.per.map(|per| per.min(self.longest.max(1)));
        for first in (0..n_tokens).step_by(tokens.max(1)) {
            let slice = Slices { tokens: tokens.min(n_tokens - first), stride };
            let args = args::Choose {
                step: self.step,
                q: node.q.ptr,
                weights: node.weights.ptr,
                k_cache: node.cache.k,
                ranks: self.scratch.ranks,
                out: node.out.ptr,
                first: first as u32,
                n_tokens: slice.tokens as u32,
                n_head: n_head as u32,
                n: node.choice.n as u32,
                stride: stride as u32,
                per: per.unwrap_or(1) as u32,
            };
            if !is_all {
                let tile = per.map(|per| chosen::tile(n_head, node.cache.d_k, per));
                self.run(node.module, chosen::scores(slice, tile, sms), &args)?;
            }
            self.run(node.module, chosen::best(slice.tokens), &args)?;
        }
        Ok(())
    }

    /// Attention over chosen positions, up to the sums of its splits, or to its output where there is one; how many
    /// there are.
    pub(super) fn chosen_sums(
        &mut self,
        node: &AttentionNode,
        chosen: &Chosen,
        n_tokens: usize,
    ) -> Result<usize, DriverError> {
        let n_splits = node.chosen_splits(chosen, n_tokens, self.most_pages, self.sms);
        let op = self.attention_args(node, n_splits, 0);
        let args =
            args::AttentionChosen { op, chosen: chosen.list.ptr, n: chosen.choice.n as u32, ..Default::default() };
        let [blocks, splits] = [n_tokens * node.chosen_blocks(chosen), n_splits].map(|n| n as u32);
        let launch = match chosen.tile {
            Some((_, tile)) => Launch { grid: [blocks, 1, splits], ..tile },
            None => {
                let n_kv = node.cache.n_kv as u32;
                Launch { entry: "attention_chosen", grid: [blocks / n_kv, n_kv, splits], block: 128, shared: 0 }
            }
        };
        self.run(chosen.module, launch, &args)?;
        Ok(n_splits)
    }
}
