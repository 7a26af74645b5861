//! Sparse attention: how the choice of positions and attention over them are cut into launches, and the scratch of the
//! choice. Knows no driver.

use model::plan::{CacheDecl, Op, Plan};

use super::launch::Launch;
use super::nodes::{ATTEND_PAGES, MAX_SPLITS};
use backend::{Limits, PAGE};

/// Ranks of positions that a slice of a step has room for, in all; one token of the longest context always has.
const MOST_RANKS: usize = 16 << 20;

/// Tokens of a slice: rows of a grid.
const MOST_TOKENS: usize = 65_535;

/// Threads of a block of `choose_scores` and of `choose_best`, and pages that the first takes at a time.
const SCORE_THREADS: u32 = 256;
const BEST_THREADS: u32 = 1024;
const PAGES: usize = 8;

/// Shared memory of a block of `choose_scores_tile`, so that a multiprocessor of Hopper has two.
const MOST_SHARED: usize = 100 << 10;

/// Bytes of a token's queries of index heads and their weights in shared memory, 16 heads after the other, each number
/// as two of f16.
fn token_bytes(n_head: usize, d: usize) -> usize {
    n_head.div_ceil(16).saturating_mul(64 * d + 64)
}

/// Tokens that a block of `choose_scores_tile` takes, by the condition in `choose.cu`; none without that kernel.
pub fn tokens_of_block(n_head: usize, d: usize, is_f16: bool, max_shared: usize) -> Option<usize> {
    let tokens = max_shared.min(MOST_SHARED.max(token_bytes(n_head, d))) / token_bytes(n_head, d);
    (is_f16 && d.is_multiple_of(32) && d <= 128 && tokens > 0).then_some(tokens.min(8))
}

/// What the choice among the positions of a plan's sequences depends on.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// Positions that are chosen.
    pub n: usize,
    /// Maximum number of positions of a sequence.
    pub most: usize,
}

impl Choice {
    /// Whether no token of a step sees more positions than it may choose; the bucket `most_pages` of its longest
    /// sequence has no end where it is the last one.
    pub fn is_all(self, most_pages: usize) -> bool {
        self.most <= self.n || (most_pages < ATTEND_PAGES * MAX_SPLITS && most_pages * PAGE <= self.n)
    }

    /// Pages that a row of ranks has room for, the same for all steps of a bucket.
    fn pages(self, most_pages: usize) -> usize {
        let all = self.most.div_ceil(PAGE).max(1);
        if most_pages < ATTEND_PAGES * MAX_SPLITS { all.min(most_pages) } else { all }
    }

    /// Ranks that a program has room for.
    fn ranks(self, max_tokens: usize) -> usize {
        let row = self.pages(usize::MAX) * PAGE;
        row.saturating_mul(max_tokens.min((MOST_RANKS / row).max(1)))
    }
}

/// Ranks that a plan has room for.
pub fn n_ranks(plan: &Plan, limits: Limits) -> usize {
    let of = |op: &Op| match *op {
        Op::Choose { out, .. } => Some(Choice { n: plan.buf(out).width, most: limits.max_positions }),
        _ => None,
    };
    let choices = plan.all_ops().filter_map(of).filter(|choice| choice.most > choice.n);
    choices.map(|choice| choice.ranks(limits.max_tokens)).max().unwrap_or(0)
}

/// What launches of the choice have in common with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slices {
    /// Tokens that are ranked at a time.
    pub tokens: usize,
    /// Ranks of a row.
    pub stride: usize,
}

/// The slices of a step of `n_tokens` with scratch for `n_ranks`.
pub fn slices(choice: Choice, most_pages: usize, n_tokens: usize, n_ranks: usize) -> Slices {
    let stride = choice.pages(most_pages) * PAGE;
    Slices { tokens: (n_ranks / stride).clamp(1, n_tokens.clamp(1, MOST_TOKENS)), stride }
}

/// Scores of a slice: with `per` tokens a block where there are tiles, of `shared` bytes each.
pub fn scores(slice: Slices, tile: Option<(usize, usize)>, sms: usize) -> Launch {
    let (entry, per, shared) = match tile {
        Some((per, bytes)) => ("choose_scores_tile", per, per * bytes),
        None => ("choose_scores", 1, 0),
    };
    let rows = slice.tokens.div_ceil(per);
    let shares = (4 * sms).div_ceil(rows).clamp(1, (slice.stride / PAGE).div_ceil(PAGES));
    Launch { entry, grid: [shares as u32, rows as u32, 1], block: SCORE_THREADS, shared: shared as u32 }
}

/// The best of each token of a slice.
pub fn best(n_tokens: usize) -> Launch {
    Launch { entry: "choose_best", grid: [n_tokens as u32, 1, 1], block: BEST_THREADS, shared: 0 }
}

/// Bytes of the queries of a token in shared memory, for [`scores`].
pub fn tile(n_head: usize, d: usize, per: usize) -> (usize, usize) {
    (per, token_bytes(n_head, d))
}

/// Query heads of a block of `attention_chosen_tile`, as in `attention_chosen.cu`.
const ROWS: usize = 64;

/// Blocks of attention over chosen positions for the heads of a token, and its launch for one share: on tensor cores,
/// by the condition in `attention_chosen.cu`. None where any dimensions take the plain kernel.
pub fn latent_tile(cache: &CacheDecl, n_head: usize, is_f16: bool, max_shared: usize) -> Option<(usize, Launch)> {
    let CacheDecl { n_kv, d_k, d_v, v_in_k, .. } = *cache;
    let is_tiled = |d: usize, most| d.is_multiple_of(32) && d <= most;
    let has_kernel = is_f16 && v_in_k && n_kv == 1 && is_tiled(d_k, 576) && is_tiled(d_v, 512);
    // Two blocks of rows of the cache and the queries, in f16, padded.
    let shared = 2 * (2 * PAGE + ROWS) * (d_k + 8);
    let block = if d_v > 256 { 256 } else { 128 };
    let launch = Launch { entry: "attention_chosen_tile", grid: [1; 3], block, shared: shared as u32 };
    (has_kernel && shared <= max_shared).then_some((n_head.div_ceil(ROWS), launch))
}

/// Shares that the chosen positions of a token are split into, where `blocks` take one each: as many as fill the device
/// twice, of two pages' worth at least.
pub fn splits(choice: Choice, blocks: usize, most_pages: usize, sms: usize) -> usize {
    let pages = choice.n.div_ceil(PAGE).min(choice.pages(most_pages));
    (2 * sms).div_ceil(blocks.max(1)).clamp(1, MAX_SPLITS).min(pages.div_ceil(2).next_power_of_two())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHOICE: Choice = Choice { n: 2048, most: 262_144 };

    /// Buckets up to the last tell whether a token chooses; the last holds any context.
    #[test]
    fn steps_that_choose() {
        assert!(CHOICE.is_all(1) && CHOICE.is_all(64) && !CHOICE.is_all(128) && !CHOICE.is_all(256));
        assert!(!Choice { n: 8192, ..CHOICE }.is_all(256) && Choice { n: 8192, most: 8192 }.is_all(256));
        assert!(!Choice { n: 1, most: 64 }.is_all(1));
    }

    /// However long a step and its contexts are, a slice has a token and fits the scratch.
    #[test]
    fn slices_fit_the_scratch() {
        for most in [1, 100, 8192, 262_144, 1 << 20, 1 << 26] {
            for max_tokens in [1, 64, 2048, 1 << 20] {
                let choice = Choice { n: 1, most };
                let n_ranks = choice.ranks(max_tokens);
                assert!(n_ranks <= MOST_RANKS.max(choice.pages(usize::MAX) * PAGE), "{most} {max_tokens}");
                for most_pages in (0..9).map(|bits| 1 << bits) {
                    for n_tokens in [1, 7, 64, max_tokens] {
                        let Slices { tokens, stride } = slices(choice, most_pages, n_tokens.min(max_tokens), n_ranks);
                        assert!((1..=MOST_TOKENS).contains(&tokens) && tokens * stride <= n_ranks);
                        assert!(stride >= most.min(most_pages * PAGE) && (most_pages < 256 || stride >= most));
                    }
                }
            }
        }
    }

    /// The dimensions of DeepSeek-V3.2 on Hopper, Ampere and cards with less shared memory.
    #[test]
    fn geometry() {
        let latents = CacheDecl { n_kv: 1, d_k: 576, d_v: 512, v_in_k: true, window: None };
        assert_eq!([227, 163, 99].map(|kb| tokens_of_block(64, 128, true, kb << 10)), [Some(3), Some(3), Some(3)]);
        assert_eq!(tokens_of_block(64, 128, false, 227 << 10), None);
        assert_eq!(tokens_of_block(256, 128, true, 227 << 10), Some(1));
        assert_eq!(tokens_of_block(4, 20, true, 227 << 10), None);
        let (tiles, launch) = latent_tile(&latents, 128, true, 163 << 10).unwrap();
        assert_eq!((tiles, launch.block, launch.shared), (2, 256, 149_504));
        assert!(latent_tile(&latents, 128, true, 99 << 10).is_none());
        assert_eq!([1, 8, 64, 2048].map(|n| splits(CHOICE, 2 * n, 256, 132)), [32, 17, 3, 1]);
        let slice = slices(CHOICE, 256, 100, CHOICE.ranks(2048));
        assert_eq!(slice, Slices { tokens: 64, stride: 262_144 });
        assert_eq!(scores(slice, Some(tile(64, 128, 3)), 132).grid, [24, 22, 1]);
        let slice = slices(CHOICE, 128, 1, CHOICE.ranks(2048));
        assert_eq!((slice.stride, scores(slice, None, 132).grid), (4096, [16, 1, 1]));
    }
}
