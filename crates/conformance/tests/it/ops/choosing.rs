//! Cases of `choose`, seen through attention over what is chosen.

use model::plan::*;
use quant::WeightType::F32;

use super::case::{Build, Case, Fill, Tokens};

/// Index heads, their width, the most positions that are chosen, and the attention: a latent cache or a plain one, and
/// its heads.
#[derive(Clone, Copy, Debug)]
struct Choice {
    n_index: usize,
    d_index: usize,
    n: usize,
    latent: bool,
    n_head: usize,
}

/// That of 40 positions sees several segments of attention; that of 70 has latents as wide as models have them.
const CHOICES: [Choice; 9] = [
    Choice { n_index: 1, d_index: 1, n: 1, latent: true, n_head: 3 },
    Choice { n_index: 4, d_index: 64, n: 3, latent: false, n_head: 2 },
    Choice { n_index: 3, d_index: 20, n: 17, latent: true, n_head: 9 },
    Choice { n_index: 5, d_index: 33, n: 8, latent: true, n_head: 64 },
    Choice { n_index: 64, d_index: 128, n: 32, latent: true, n_head: 16 },
    Choice { n_index: 2, d_index: 96, n: 64, latent: false, n_head: 4 },
    Choice { n_index: 7, d_index: 32, n: 500, latent: true, n_head: 8 },
    Choice { n_index: 2, d_index: 32, n: 40, latent: true, n_head: 2 },
    Choice { n_index: 40, d_index: 128, n: 70, latent: true, n_head: 18 },
];

/// Index keys are halves, which caches of any floats hold: no choice hangs on their rounding.
pub fn choose(seed: u64) -> Vec<Case> {
    let case = |c: Choice| {
        let Choice { n_index, d_index: d, n, latent, n_head } = c;
        let mut b = Build::new(seed);
        let q = b.input(n_index * d, Fill::Uniform(1.0));
        let (k, weights) = (b.input(d, Fill::Ties), b.input(n_index, Fill::Uniform(1.0)));
        let cache = b.cache(CacheDecl { n_kv: 1, d_k: d, d_v: d, v_in_k: true, window: None });
        b.op(Op::KvAppend { cache, k, v: None });
        let out = b.m.typed(Rows::Tokens, n, Elem::U32);
        b.op(Op::Choose { cache, q, weights, out });
        let (d_k, d_v, n_kv) = match latent {
            true if n == 70 => (576, 512, 1),
            // Caches of blocks take these.
            true if d.is_multiple_of(32) => (64, 32, 1),
            true => (48, 40, 1),
            false => (24, 24, n_head / 2),
        };
        // Two layers see the same choice.
        let outs = [1, 2].map(|_| {
            let q = b.input(n_head * d_k, Fill::Uniform(1.0));
            let (k, v) = (b.input(n_kv * d_k, Fill::Uniform(1.0)), b.input(n_kv * d_v, Fill::Uniform(1.0)));
            let cache = b.cache(CacheDecl { n_kv, d_k, d_v, v_in_k: latent, window: None });
            b.op(Op::KvAppend { cache, k, v: (!latent).then_some(v) });
            let (chosen, o) = (Some(out), b.buf(Rows::Tokens, n_head * d_v));
            let (scale, window, chunked, softcap, sinks) = (0.5, None, false, None, None);
            b.op(Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out: o });
            o
        });
        let script = |t: &mut Tokens| match n {
            40 => vec![t.step(&[(0, 590)], 59), t.step(&[(1, 300), (0, 3)], 31), t.step(&[(0, 1), (1, 1)], 1)],
            70 => vec![t.step(&[(0, 120), (1, 9)], 4), t.step(&[(1, 20), (0, 1)], 7), t.step(&[(0, 1), (1, 1)], 1)],
            _ => t.grow(),
        };
        b.finish("choose", format!("{c:?}"), F32, &[("first", outs[0]), ("second", outs[1])], script)
    };
    CHOICES.map(case).into()
}
