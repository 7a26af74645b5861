//! Launches of attention and of the head norms, ropes and append before it.

use super::super::args;
use super::super::driver::DriverError;
use super::super::launch::Launch;
use super::super::nodes::{AttentionNode, QkvNode, QkvPartNode, Tile};
use super::Encoder;

/// Which tokens attention is of, and where their own keys and values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keys {
    /// All of the step, one a sequence: products, which the launch appends.
    New,
    /// All of the step: the cache.
    Own,
    /// Single tokens alongside prompts: the cache, and queries come normed and rotated.
    OfSingles,
}

impl Encoder<'_> {
    pub(super) fn qkv(&mut self, node: &QkvNode) -> Result<(), DriverError> {
        let rows = self.counts.tokens;
        let n_heads: usize = node.parts.iter().map(|part| part.n_head).sum();
        let rope = node.rope.map(|rope| self.ropes[rope]);
        let mut args = args::Qkv {
            step: self.step,
            table: rope.map_or(0, |rope| rope.table),
            rows: rows as u32,
            n_heads: n_heads as u32,
            half: rope.map_or(0, |rope| rope.half as u32),
            interleaved: u32::from(rope.is_some_and(|rope| rope.interleaved)),
            windowed: u32::from(node.windowed),
            eps: node.eps,
            ..Default::default()
        };
        for (to, part) in args.parts.iter_mut().zip(&node.parts) {
            *to = qkv_part(part);
        }
        self.run(node.module, Launch::each("qkv", rows * n_heads * 32, 128), &args)
    }

    /// Copies blocks of the cache as floats, for chunks of more than one token or for all.
    fn widen(&mut self, node: &AttentionNode, singles: usize) -> Result<(), DriverError> {
        let (cache, Some(module)) = (node.cache, node.widen) else { return Ok(()) };
        let n_chunks = self.counts.chunks;
        let out = |is_blocks: bool, floats| if is_blocks { floats } else { 0 };
        let args = args::KvWiden {
            step: self.step,
            k: cache.k,
            v: cache.v,
            k_out: out(cache.has_key_blocks(), cache.floats[0]),
            v_out: out(cache.has_value_blocks() && !node.v_in_k, cache.floats[1]),
            n_kv: cache.n_kv as u32,
            d_k: cache.d_k as u32,
            d_v: cache.d_v as u32,
            window: node.window.min(u32::MAX as usize) as u32,
            windowed: u32::from(cache.windowed),
            singles: singles as u32,
        };
        let grid = [(4 * self.sms).div_ceil(n_chunks.max(1)) as u32, n_chunks as u32, 1];
        self.run(module, Launch { entry: "kv_widen", grid, block: 256, shared: 0 }, &args)
    }

    pub(super) fn attention(&mut self, node: &AttentionNode) -> Result<(), DriverError> {
        let (n_tokens, n_chunks) = (self.counts.tokens, self.counts.chunks);
        if node.chosen(self.most_pages).is_some() {
            self.widen(node, 0)?;
            return self.attention_rows(node, n_tokens, 0);
        }
        // Prompts: tiles of tokens of one chunk each. Single tokens next to them would leave theirs nearly empty.
        let (singles, prompts) = (self.singles, n_chunks - self.singles);
        let n_prompt = n_tokens - singles;
        let is_full = |tile: &Tile| n_prompt >= tile.tokens * prompts;
        let has_spans = node.sees_spans && self.given.ends != 0;
        let tile = node.wide.filter(|tile| !has_spans && is_full(tile)).or(node.tile);
        if let Some(tile) = tile.filter(|_| prompts > 0 && n_prompt >= 16 * prompts) {
            let attend = node.singles().filter(|_| node.singles.is_some_and(|of| singles <= of.most));
            self.widen(node, if attend.is_some() { singles } else { 0 })?;
            let mut args = self.attention_args(node, n_chunks, singles);
            // All rows are its own, and nothing else reads them.
            let is_packed = node.is_multiplied && singles == 0 && node.wide == Some(tile) && node.cache.d_v <= 128;
            let forms = self.forms_ahead(&node.out).filter(|forms| is_packed && forms[1].out == 0);
            if let Some(forms) = forms {
                args.packed = forms[0];
            }
            let grid = [node.cache.n_kv, n_prompt / tile.tokens + prompts, tile.heads].map(|n| n as u32);
            let (entry, block, shared) = (tile.entry, tile.block as u32, tile.shared as u32);
            self.run(tile.module, Launch { entry, grid, block, shared }, &args)?;
            self.set_ahead(node.out.ptr, 0, forms.unwrap_or_default());
            return match attend {
                _ if singles == 0 => Ok(()),
                Some(attend) => {
                    let n_splits = attend.splits(singles, self.most_pages, self.sms);
                    self.attend_rows(&attend, singles, n_splits, false, Keys::OfSingles)
                }
                None => self.attention_rows(node, singles, singles),
            };
        }
        self.widen(node, 0)?;
        self.attention_rows(node, n_tokens, 0)
    }

    /// Attention of all tokens by themselves, or of the `singles` alone.
    fn attention_rows(&mut self, node: &AttentionNode, n_tokens: usize, singles: usize) -> Result<(), DriverError> {
        let n_splits = self.attention_sums(node, n_tokens, singles)?;
        if n_splits == 1 {
            return Ok(());
        }
        let args = self.attention_args(node, n_splits, singles);
        let grid = [n_tokens, node.n_head, 1].map(|n| n as u32);
        self.run(node.module, Launch { entry: "attention_merge", grid, block: 128, shared: 0 }, &args)
    }

    /// Attention up to the sums of its splits, or to its output where there is one; how many there are.
    pub(super) fn attention_sums(
        &mut self,
        node: &AttentionNode,
        n_tokens: usize,
        singles: usize,
    ) -> Result<usize, DriverError> {
        if let Some(chosen) = node.chosen(self.most_pages) {
            return self.chosen_sums(node, &chosen, n_tokens);
        }
        let n_splits = node.splits(n_tokens, self.most_pages, self.sms);
        let args = self.attention_args(node, n_splits, singles);
        let grid = [n_tokens * node.tiles(), node.cache.n_kv, n_splits].map(|n| n as u32);
        self.run(node.module, Launch { entry: "attention", grid, block: 128, shared: 0 }, &args)?;
        Ok(n_splits)
    }

    /// The arguments of attention with so many splits.
    pub(super) fn attention_args(&self, node: &AttentionNode, n_splits: usize, singles: usize) -> args::Attention {
        args::Attention {
            step: self.step,
            q: node.q.ptr,
            k_cache: node.cache.floats[0],
            v_cache: node.cache.floats[1],
            sinks: node.sinks,
            out: node.out.ptr,
            partial: self.scratch.partial,
            ends: if node.sees_spans { self.given.ends } else { 0 },
            rows: self.counts.tokens as u32,
            n_head: node.n_head as u32,
            n_kv: node.cache.n_kv as u32,
            n_splits: n_splits as u32,
            window: node.window.min(u32::MAX as usize) as u32,
            windowed: u32::from(node.cache.windowed),
            scale: node.scale,
            softcap: node.softcap,
            singles: singles as u32,
            reach: node.reach as u32,
            packed: args::PackTo::default(),
        }
    }
}

pub(super) fn qkv_part(part: &QkvPartNode) -> args::QkvPart {
    args::QkvPart {
        x: part.x.ptr,
        w: part.w,
        cache: part.cache,
        n_head: part.n_head as u32,
        d_head: part.d_head as u32,
        is_normed: u32::from(part.is_normed),
        is_rotated: u32::from(part.is_rotated),
        is_blocks: u32::from(part.is_blocks),
        reserved: 0,
        shares: args::Shares::default(),
    }
}
