//! Routers of the original model code on 10,000 rows full of ties, for the tests of every backend's `route`.
//!
//! `tools/router_golden.py` made the answers; the rows are a hash that both compute.

use std::path::Path;

use model::plan::{GroupScore, Groups, Router, Score};
use safetensors::SafeTensors;

pub const N_ROWS: usize = 10_000;

/// A router, and the shape it is tried in.
struct Case {
    name: &'static str,
    n_expert: usize,
    n_used: usize,
    router: Router,
}

/// What a backend is asked: logits, router, bias, scale of each expert, ids and weights to fill; false for a fault.
pub type Route<'a> = &'a mut dyn FnMut(&[f32], &Router, Option<&[f32]>, Option<&[f32]>, &mut [u32], &mut [f32]) -> bool;

fn cases() -> [Case; 9] {
    let case = |name, n_expert, n_used, router| Case { name, n_expert, n_used, router };
    let groups = |n_group, n_used, score| Some(Groups { n_group, n_used, score });
    let v2 = Router::softmax(false, 16.0);
    let v3 = Router { score: Score::Sigmoid, renormalise: Some(1e-20), ..Router::softmax(false, 2.5) };
    [
        case("qwen3moe", 32, 4, Router::softmax(true, 1.0)),
        case("qwen3moe_plain", 33, 5, Router::softmax(false, 1.0)),
        case("deepseek_v2_lite", 64, 6, v2),
        case("deepseek_v2", 48, 6, Router { groups: groups(8, 3, GroupScore::Max), ..v2 }),
        case("deepseek_v3", 64, 8, Router { groups: groups(8, 4, GroupScore::TopTwo), ..v3 }),
        case("deepseek_v3_plain", 36, 3, Router { groups: groups(3, 1, GroupScore::TopTwo), renormalise: None, ..v3 }),
        case("glm4moe", 40, 8, Router { scale: 1.5, ..v3 }),
        case("gpt_oss", 32, 4, Router { score: Score::Raw, ..Router::softmax(false, 1.0) }),
        case("gemma4", 24, 8, Router::softmax(true, 1.0)),
    ]
}

/// What a backend is asked of all rows together: logits `[rows, n_expert]`, router, bias, scale of each expert, number
/// of experts a row; it returns ids and weights `[rows, n_used]`.
pub type RouteRows<'a> =
    &'a mut dyn FnMut(&[f32], &Router, Option<&[f32]>, Option<&[f32]>, usize) -> (Vec<u32>, Vec<f32>);

/// Holds `route` to the ids of every row, and to the weights within `tolerance` of their size.
pub fn check(tolerance: f64, route: Route) {
    check_rows(tolerance, N_ROWS, &mut |x, router, bias, scale, n_used| {
        let n_expert = x.len() / N_ROWS;
        let (mut ids, mut weights) = (vec![0; N_ROWS * n_used], vec![0.0; N_ROWS * n_used]);
        let rows = ids.chunks_exact_mut(n_used).zip(weights.chunks_exact_mut(n_used));
        for (row, (x, (ids, weights))) in x.chunks_exact(n_expert).zip(rows).enumerate() {
            assert!(route(x, router, bias, scale, ids, weights), "row {row}");
        }
        (ids, weights)
    });
}

/// The same of the first rows alone, a multiple of 16.
pub fn check_rows(tolerance: f64, n_rows: usize, route: RouteRows) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/tests/data/routers.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| -> Option<Vec<f32>> {
        let data = golden.tensor(name).ok()?.data().as_chunks().0.to_vec();
        Some(data.into_iter().map(f32::from_le_bytes).collect())
    };
    for Case { name, n_expert, n_used, router } in cases() {
        let [bias, scale] = ["bias", "expert_scale"].map(|key| floats(&format!("{name}.{key}")));
        let ids = golden.tensor(&format!("{name}.ids")).unwrap().data().as_chunks().0;
        let seed = golden.tensor(&format!("{name}.seed")).unwrap().data()[0];
        let mut sums = vec![0.0f64; n_rows / 16];
        let x: Vec<f32> =
            (0..n_rows).flat_map(|row| (0..n_expert).map(move |expert| logit(seed.into(), row, expert))).collect();
        let (all_ids, all_weights) = route(&x, &router, bias.as_deref(), scale.as_deref(), n_used);
        assert_eq!((all_ids.len(), all_weights.len()), (n_rows * n_used, n_rows * n_used), "{name}");
        for row in 0..n_rows {
            let (found, weights) = (&all_ids[row * n_used..][..n_used], &all_weights[row * n_used..][..n_used]);
            let x = &x[row * n_expert..][..n_expert];
            let digest = found.iter().fold(0, |digest, id| (digest * 1031 + id + 1) % 65521);
            assert_eq!(digest, u32::from(u16::from_le_bytes(ids[row])), "{name}, row {row}: {found:?} of {x:?}");
            let slots = weights.iter().zip(1..).map(|(&w, slot)| f64::from(w) * f64::from(slot));
            sums[row / 16] += slots.sum::<f64>();
        }
        for (i, (sum, wanted)) in sums.iter().zip(floats(&format!("{name}.sums")).unwrap()).enumerate() {
            let error = (sum / f64::from(wanted) - 1.0).abs();
            assert!(error < tolerance, "{name}, rows from {}: {sum}, {wanted} wanted", 16 * i);
        }
    }
}

/// A number on a grid of eighths from -8 to 8, and a bit.
fn logit(seed: u64, row: usize, expert: usize) -> f32 {
    let mut z = (seed << 32) + ((row as u64) << 10) + expert as u64;
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    let hash = (z ^ (z >> 31)) >> 40;
    (hash % 129) as f32 / 8.0 - 8.0 + 1.0 / 32.0
}
