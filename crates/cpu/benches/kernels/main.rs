//! Matrix products alone: weight type × columns × instruction set, on one thread.
//!
//! `cargo bench -p moebius-cpu --bench kernels -- [types] [columns] [isas] [shapes] [runs] [megabytes]`, lists with
//! commas or `-` for all (of the affine types those with groups of 64 and bf16 scales). Shapes are `ROWSxVALUES`, any
//! whose rows are whole blocks; more runs than two are for a busy machine, where figures are those of the fastest
//! product. Weights rotate over so many MB, in large pages as in the engine: 256 by default, more than any cache, so
//! that one column measures memory too; 1 stays in the second cache. The figure of one column is the median of the
//! products. With more columns it is the fastest tenth, as other programs may disturb the rest. GB/s are bytes of
//! weights, GMAC/s multiply-adds, and `of peak` is their share of what the same multiplications do from registers
//! ([`peak`]).

mod peak;

use std::time::Instant;

use cpu::isa::CheckedIsa;
use cpu::kernels::{ActsShared, Col, Kernels, Matrix, OutPtr, Scratch};
use memmap2::MmapMut;
use quant::act::ActKind;
use quant::{Planes, PlanesBuf, ScaleType, WeightType};

const TOTAL_MB: usize = 256;
/// Gate and up, down, and the attention's output of Qwen3-30B-A3B.
const SHAPES: [(usize, usize); 3] = [(768, 2048), (2048, 768), (2048, 4096)];
const COLS: [usize; 10] = [1, 2, 3, 4, 6, 8, 16, 32, 64, 96];
const RUNS: usize = 2;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let chosen = |i: usize, name: &str| {
        args.get(i).is_none_or(|list| list == "-" || list.split(',').any(|x| x.eq_ignore_ascii_case(name)))
    };
    let shape = |text: &str| {
        let (n, k) = text.split_once('x')?;
        Some((n.parse().ok()?, k.parse().ok()?))
    };
    let shapes = match args.get(3).map(String::as_str) {
        None | Some("-") => SHAPES.to_vec(),
        Some(list) => list.split(',').map(|text| shape(text).expect("a shape, such as 768x2048")).collect(),
    };
    let runs = args.get(4).map_or(RUNS, |runs| runs.parse().expect("a number of runs"));
    let total = args.get(5).map_or(TOTAL_MB, |mb| mb.parse().expect("a number of megabytes")) << 20;
    println!(
        "{:15} {:11} {:7} {:>5} {:>9} {:>9} {:>10} {:>8}",
        "type", "shape", "isa", "cols", "us", "GB/s", "GMAC/s", "of peak"
    );
    let isas: Vec<CheckedIsa> = CheckedIsa::all().filter(|isa| chosen(2, isa.isa().name())).collect();
    let peaks: Vec<_> = [ActKind::F32, ActKind::Block32, ActKind::Byte32, ActKind::Block256]
        .into_iter()
        .flat_map(|kind| isas.iter().map(move |&isa| ((kind, isa.isa()), peak::peak(kind, isa))))
        .collect();
    let peak_of = |key| peaks.iter().find(|(k, _)| *k == key).and_then(|(_, peak)| *peak);
    let all = args.first().is_none_or(|list| list == "-");
    let usual = |t: &WeightType| match t {
        WeightType::Affine(a) => a.group() == 64 && a.scales() == ScaleType::BF16,
        _ => true,
    };
    for t in WeightType::ALL.into_iter().filter(|t| if all { usual(t) } else { chosen(0, t.name()) }) {
        for &(n, k) in &shapes {
            let [q, scales, biases] = random(t, k, total);
            let rows = Planes { q: &q, scales: &scales, biases: &biases };
            for &isa in &isas {
                for n_cols in COLS.into_iter().filter(|c| chosen(1, &c.to_string())) {
                    measure(t, (n, k), rows, isa, n_cols, runs, peak_of((t.act(), isa.isa())));
                }
            }
        }
    }
}

/// Planes of rows of random numbers, `total` bytes in all; a few of them, again and again.
fn random(t: WeightType, k: usize, total: usize) -> [MmapMut; 3] {
    const UNIQUE: usize = 16;
    let mut s = 1u64;
    let mut next = || {
        s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((s >> 33) as u32 as f32 / 2f32.powi(31) - 0.5) * 0.1
    };
    let row = t.plane_bytes(k).expect("rows of whole blocks");
    let mut few = PlanesBuf::new(row.times(UNIQUE).unwrap_or_default());
    for i in 0..UNIQUE {
        let x: Vec<f32> = (0..k).map(|_| next()).collect();
        quant::encode_row(t, &x, few.get_mut().row_mut(row, i));
    }
    let copies = total / (row.total() * UNIQUE);
    [few.q, few.scales, few.biases].map(|plane| {
        let mut all = MmapMut::map_anon((plane.len() * copies).max(1)).expect("memory");
        #[cfg(target_os = "linux")]
        let _ = all.advise(memmap2::Advice::HugePage);
        if !plane.is_empty() {
            all.chunks_exact_mut(plane.len()).for_each(|copy| copy.copy_from_slice(&plane));
        }
        all
    })
}

fn measure(
    t: WeightType,
    (n, k): (usize, usize),
    all: Planes,
    isa: CheckedIsa,
    n_cols: usize,
    runs: usize,
    peak: Option<f64>,
) {
    let kernels = Kernels::new(isa);
    let x: Vec<f32> = (0..n_cols * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 17.0).collect();
    let mut acts = ActsShared::new(n_cols, k).expect("memory");
    acts.reshape(t.act(), n_cols, k);
    // SAFETY: there is one thread.
    unsafe { kernels.quantise(&x, k, 0..n_cols, &acts) };
    let cols: Vec<Col> = (0..n_cols as u32).map(|c| Col { act: c, out: c }).collect();
    let mut y = vec![0.0f32; n_cols * n];
    // SAFETY: `y` outlives the products and there is one thread.
    let out = unsafe { OutPtr::new(y.as_mut_ptr(), n_cols, n) };
    let mut scratch = Scratch::default();
    let size = t.plane_bytes(k).and_then(|row| row.times(n)).unwrap_or_default();
    let matrices = 0..all.q.len() / size.q;
    let matrices: Vec<Matrix> = matrices.map(|i| Matrix { dtype: t, n, k, planes: all.row(size, i) }).collect();
    // Enough work for some 30 ms at 50 GMAC/s, and all matrices when there is one column.
    let rounds = (1_000_000_000 / (k * n * n_cols)).max(4).max(if n_cols == 1 { matrices.len() } else { 0 });
    let rounds = if isa == CheckedIsa::SCALAR { 4 } else { rounds };
    let chunk = kernels.row_chunk(t, (n, k), 1, n_cols, 1);
    let mut times = Vec::with_capacity(rounds * runs);
    for w in matrices.iter().cycle().take(rounds * runs) {
        let start = Instant::now();
        for first in (0..n).step_by(chunk) {
            kernels.matmul(w, first..(first + chunk).min(n), &acts, &cols, out, &mut scratch);
        }
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let time = match n_cols {
        1 => times[times.len() / 2],
        _ if runs == RUNS => times[times.len() / 10],
        _ => times[0],
    };
    std::hint::black_box(&y);
    let gmacs = (k * n * n_cols) as f64 / time / 1e9;
    println!(
        "{:15} {:11} {:7} {n_cols:5} {:9.1} {:9.2} {gmacs:10.2} {:>8}",
        t.name(),
        format!("{n}x{k}"),
        isa.isa().name(),
        time * 1e6,
        size.total() as f64 / time / 1e9,
        peak.map_or(String::new(), |peak| format!("{:.0}%", 100.0 * gmacs / peak))
    );
}
