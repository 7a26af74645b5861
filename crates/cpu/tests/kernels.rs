//! Matrix products and quantisers of every instruction set against the scalar reference, bit for bit.

use cpu::isa::{CheckedIsa, Isa};
use cpu::kernels::{ActsShared, Col, Gated, Kernels, Matrix, OutPtr, Scratch, gated};
use model::plan::Gate;
use quant::act::{ActKind, ActRow};
use quant::dot::dot_row;
use quant::{Affine, PlanesBuf, ScaleType, WeightType};

const ROWS: [usize; 7] = [1, 2, 3, 5, 8, 17, 64];
/// Every number of columns that the kernels of an instruction set take at once, alone or behind a whole group.
const COLS: [usize; 15] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 33, 64];
const MAX: usize = 64;

/// Row lengths of each block length, a last panel that is not full among them.
const LENGTHS: [(usize, &[usize]); 4] =
    [(1, &[1, 16, 40, 768, 2048]), (32, &[32, 64, 704, 2048]), (64, &[64, 704, 2048]), (256, &[256, 768, 2048])];
/// Row lengths of planar types by group: one group, and more than eight of them, whose scales are read together.
const PLANAR_LENGTHS: [(usize, &[usize]); 3] = [(32, &[32, 352]), (64, &[64, 704]), (128, &[128, 1152])];

/// Bytes of a block that hold f16 scales.
const SCALES: [(WeightType, &[usize]); 20] = [
    (WeightType::Q4_0, &[0]),
    (WeightType::Q4_1, &[0, 2]),
    (WeightType::Q5_0, &[0]),
    (WeightType::Q5_1, &[0, 2]),
    (WeightType::Q8_0, &[0]),
    (WeightType::Q2_K, &[80, 82]),
    (WeightType::Q3_K, &[108]),
    (WeightType::Q4_K, &[0, 2]),
    (WeightType::Q5_K, &[0, 2]),
    (WeightType::Q6_K, &[208]),
    (WeightType::IQ4_NL, &[0]),
    (WeightType::IQ4_XS, &[0]),
    (WeightType::IQ2_XXS, &[0]),
    (WeightType::IQ2_XS, &[0]),
    (WeightType::IQ2_S, &[0]),
    (WeightType::IQ3_XXS, &[0]),
    (WeightType::IQ3_S, &[0]),
    (WeightType::IQ1_S, &[0]),
    (WeightType::TQ1_0, &[52]),
    (WeightType::TQ2_0, &[64]),
];

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 ^ self.0 >> 29).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16
    }

    /// About normal, standard deviation 1.
    fn value(&mut self) -> f32 {
        (0..4).map(|_| (self.next() % 65536) as f32 / 65536.0 - 0.5).sum::<f32>() * 1.7
    }
}

/// Random rows; some blocks hold the extremes of their integers, some rows are zero.
fn weights(t: WeightType, n: usize, k: usize) -> PlanesBuf {
    let mut rng = Rng(t.index() as u64 * 1000 + k as u64);
    let (size, row) = (t.block_bytes(), t.row_bytes(k).expect("blocks divide the row"));
    let mut bytes: Vec<u8> = (0..n * row).map(|_| rng.next() as u8).collect();
    let n_scales = n * k / t.block_len();
    for (i, block) in bytes.chunks_exact_mut(size).enumerate() {
        match i % 7 {
            3 => block.fill(0xff),
            4 => block.fill(0x80),
            5 => block.fill(0),
            _ => {}
        }
        match t {
            WeightType::F32 => block.copy_from_slice(&rng.value().to_le_bytes()),
            WeightType::F16 => block.copy_from_slice(&half::f16::from_f32(rng.value()).to_le_bytes()),
            WeightType::BF16 => block.copy_from_slice(&half::bf16::from_f32(rng.value()).to_le_bytes()),
            WeightType::Affine(_) | WeightType::MXFP4_PLANAR => {}
            WeightType::NVFP4 | WeightType::NVFP4_SCALED => {}
            // No NaN, which would be all that there is to see.
            WeightType::F8_E4M3 => block.iter_mut().for_each(|b| *b = if *b & 0x7f == 0x7f { *b & 0xf7 } else { *b }),
            WeightType::MXFP4 => block[0] = if i % 5 == 0 { (i / 5 % 3) as u8 } else { 110 + (rng.next() % 30) as u8 },
            // The highest bits of its scale, of which four are in each of four words: an exponent near 2^-6.
            WeightType::IQ1_M => block[55] = block[55] & 0x8f | 0x20,
            _ => {
                let (_, at) = SCALES.iter().find(|s| s.0 == t).expect("every quantised type has scales");
                for &at in *at {
                    let scale = if i % 11 == 0 { f32::from_bits(0x3380_0000) } else { rng.value() * 0.1 };
                    block[at..at + 2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
                }
            }
        }
    }
    bytes[row * (n / 3)..][..row].fill(0);
    let (scales, biases) = match t {
        WeightType::Affine(a) => {
            [(); 2].map(|()| (0..n_scales).flat_map(|_| number(a, rng.value() * 0.1)).collect()).into()
        }
        WeightType::MXFP4_PLANAR => {
            let scale = |i| if i % 5 == 0 { (i / 5 % 3) as u8 } else { 110 + (rng.next() % 30) as u8 };
            ((0..n_scales).map(scale).collect(), Vec::new())
        }
        WeightType::F8_E4M3 | WeightType::NVFP4_SCALED => {
            ((0..n_scales).flat_map(|_| (rng.value() * 0.1).to_le_bytes()).collect(), Vec::new())
        }
        _ => (Vec::new(), Vec::new()),
    };
    PlanesBuf { q: bytes, scales, biases }
}

/// `x` in the type of the scales of `a`.
fn number(a: Affine, x: f32) -> Vec<u8> {
    match a.scales() {
        ScaleType::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
        ScaleType::BF16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        ScaleType::F32 => x.to_le_bytes().to_vec(),
    }
}

/// Random activations with outliers, a zero row, tiny and huge rows, and rows with NaN and inf.
fn activations(rows: usize, k: usize) -> Vec<f32> {
    let mut rng = Rng(k as u64 + 7);
    let mut x: Vec<f32> = (0..rows * k).map(|_| rng.value()).collect();
    for (r, x) in x.chunks_exact_mut(k).enumerate() {
        match r % 16 {
            3 => x.fill(0.0),
            4 => x[k / 2] = 1e6,
            5 => x.iter_mut().for_each(|x| *x *= 1e-30),
            6 => x.iter_mut().for_each(|x| *x *= 1e-42),
            7 => x.iter_mut().for_each(|x| *x *= 1e30),
            8 => x.fill(-3.25),
            9 => x[k - 1] = f32::NAN,
            10 => x[0] = f32::NEG_INFINITY,
            11 => x.iter_mut().enumerate().for_each(|(i, x)| *x = if i % 3 == 0 { f32::MAX } else { -f32::MAX }),
            12 => x.iter_mut().enumerate().for_each(|(i, x)| *x *= f32::powi(0.5, (i / 32 % 40) as i32)),
            13 => x.iter_mut().enumerate().for_each(|(i, x)| *x = ((i % 255) as f32 - 127.0) / 2.0),
            _ => {}
        }
    }
    x
}

fn isas() -> Vec<CheckedIsa> {
    for isa in Isa::ALL.into_iter().filter(|isa| !isa.available()) {
        println!("skipped {isa}: the machine lacks it");
    }
    CheckedIsa::all().collect()
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

fn quantised(kernels: &Kernels, kind: ActKind, x: &[f32], k: usize) -> ActsShared {
    let rows = x.len() / k;
    let mut acts = ActsShared::new(rows, k).expect("memory");
    acts.reshape(kind, rows, k);
    // SAFETY: no other thread knows them.
    unsafe { kernels.quantise(x, k, 0..rows, &acts) };
    acts
}

/// Activation row of column `c`: neither the column itself nor monotone.
fn act_of(c: usize) -> usize {
    c * 37 % MAX
}

/// Shapes that the slow scalar kernels also go through.
fn skip(isa: CheckedIsa, n: usize, cols: usize) -> bool {
    isa == CheckedIsa::SCALAR && !(matches!(n, 1 | 17) && matches!(cols, 1 | 2 | 5))
}

#[test]
fn products_equal_the_scalar_dot() {
    let isas = isas();
    for t in WeightType::ALL {
        let lengths = if t.ggml_id().is_some() { &LENGTHS[..] } else { &PLANAR_LENGTHS };
        let (_, lengths) = lengths.iter().find(|l| l.0 == t.block_len()).expect("a known block length");
        for &k in *lengths {
            let (w, x) = (weights(t, MAX, k), activations(MAX, k));
            let acts = quantised(&Kernels::new(CheckedIsa::SCALAR), t.act(), &x, k);
            let row = t.plane_bytes(k).expect("blocks divide the row");
            let want: Vec<f32> =
                (0..MAX * MAX).map(|i| dot_row(t, w.get().row(row, i % MAX), acts.row(act_of(i / MAX)))).collect(); // [column, row]
            for &isa in &isas {
                let kernels = Kernels::new(isa);
                let acts = quantised(&kernels, t.act(), &x, k);
                let mut scratch = Scratch::default();
                for (n, n_cols) in ROWS.into_iter().flat_map(|n| COLS.map(|c| (n, c))).filter(|s| !skip(isa, s.0, s.1))
                {
                    let matrix = Matrix { dtype: t, n: MAX, k, planes: w.get() };
                    // Columns go to scattered output rows; rows from 1 on where there is space: tiles begin anywhere.
                    let out_of = |c: usize| (n_cols - 1 - c) * 2;
                    let cols: Vec<Col> =
                        (0..n_cols).map(|c| Col { act: act_of(c) as u32, out: out_of(c) as u32 }).collect();
                    let first = usize::from(n < MAX);
                    let mut y = vec![-7.5f32; 2 * n_cols * MAX];
                    // SAFETY: `y` has these rows and only this thread uses it.
                    let out = unsafe { OutPtr::new(y.as_mut_ptr(), 2 * n_cols, MAX) };
                    kernels.matmul(&matrix, first..first + n, &acts, &cols, out, &mut scratch);
                    for c in 0..n_cols {
                        for r in 0..MAX {
                            let got = y[out_of(c) * MAX + r];
                            let want = if (first..first + n).contains(&r) { want[c * MAX + r] } else { -7.5 };
                            assert!(
                                same(got, want),
                                "{t} {isa} k {k} n {n} cols {n_cols}: row {r} column {c}: {got} {want}"
                            );
                        }
                        assert!(y[(out_of(c) + 1) * MAX..][..MAX].iter().all(|&y| y == -7.5), "row between outputs");
                    }
                }
            }
        }
    }
}

/// One column alone takes rows in pieces: rows whose blocks eight do not divide, and rows longer than a piece.
#[test]
fn long_rows_equal_the_scalar_dot() {
    const N: usize = 17;
    for t in WeightType::ALL {
        for k in [11, 20, 65].map(|blocks| 256 * blocks) {
            let (w, x) = (weights(t, N, k), activations(1, k));
            let acts = quantised(&Kernels::new(CheckedIsa::SCALAR), t.act(), &x, k);
            let row = t.plane_bytes(k).expect("blocks divide the row");
            let want: Vec<f32> = (0..N).map(|r| dot_row(t, w.get().row(row, r), acts.row(0))).collect();
            for isa in isas() {
                let acts = quantised(&Kernels::new(isa), t.act(), &x, k);
                for n in [1, 5, 12, N] {
                    let mut y = vec![-7.5f32; N];
                    // SAFETY: `y` is one row and only this thread uses it.
                    let out = unsafe { OutPtr::new(y.as_mut_ptr(), 1, N) };
                    let (matrix, mut scratch) = (Matrix { dtype: t, n: N, k, planes: w.get() }, Scratch::default());
                    Kernels::new(isa).matmul(&matrix, 0..n, &acts, &[Col { act: 0, out: 0 }], out, &mut scratch);
                    for (r, (got, want)) in y.iter().zip(&want).enumerate() {
                        let want = if r < n { *want } else { -7.5 };
                        assert!(same(*got, want), "{t} {isa} k {k} n {n}: row {r}: {got} {want}");
                    }
                }
            }
        }
    }
}

/// Where the sub-scales of a super-block lie, and its bytes.
const SUB_SCALES: [(WeightType, std::ops::Range<usize>); 9] = [
    (WeightType::Q2_K, 0..16),
    (WeightType::Q3_K, 96..108),
    (WeightType::Q4_K, 4..16),
    (WeightType::Q5_K, 4..16),
    (WeightType::Q6_K, 192..208),
    (WeightType::IQ4_XS, 2..8),
    (WeightType::IQ2_XS, 66..74),
    (WeightType::IQ2_S, 74..82),
    (WeightType::IQ3_S, 106..110),
];

/// Weights, sub-scales and activations that all are at their bounds, where sums of 16 bits are fullest.
#[test]
fn blocks_at_their_bounds_equal_the_scalar_dot() {
    const N: usize = 16;
    let k = 512;
    // Activations of the largest magnitude, with each of the signs that four neighbours can have; the last is any row.
    let mut x: Vec<f32> =
        (0..16).flat_map(|s| (0..k).map(move |i| if s >> (i % 4) & 1 == 0 { 2.5 } else { -2.5 })).collect();
    x.extend(&activations(1, k));
    let types = WeightType::ALL.into_iter().filter(|t| matches!(t.act(), ActKind::Byte32 | ActKind::Block256));
    for t in types {
        let row = t.plane_bytes(k).expect("blocks divide the row");
        let mut w = weights(t, N, k);
        for (i, block) in w.q.chunks_exact_mut(t.block_bytes()).enumerate() {
            block.fill([0x00, 0xff, 0x0f, 0xf0][i % 4]);
            if let Some((_, scales)) = SUB_SCALES.into_iter().find(|s| s.0 == t) {
                block[scales].fill([0x80, 0x7f, 0xff, 0x00, 0x3f, 0xdf, 0x20][i / 4 % 7]);
            }
            let halves = SCALES.iter().find(|s| s.0 == t).map_or(&[][..], |s| s.1);
            for &at in halves {
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(0.37).to_le_bytes());
            }
            if t == WeightType::MXFP4 {
                block[0] = 125;
            }
        }
        for isa in isas() {
            let kernels = Kernels::new(isa);
            let acts = quantised(&kernels, t.act(), &x, k);
            for n_cols in [1, 4, 9, 17] {
                let cols: Vec<Col> = (0..n_cols as u32).map(|c| Col { act: 16 - c, out: c }).collect();
                let mut y = vec![0.0f32; n_cols * N];
                // SAFETY: `y` has these rows and only this thread uses it.
                let out = unsafe { OutPtr::new(y.as_mut_ptr(), n_cols, N) };
                let matrix = Matrix { dtype: t, n: N, k, planes: w.get() };
                kernels.matmul(&matrix, 0..N, &acts, &cols, out, &mut Scratch::default());
                for (i, &got) in y.iter().enumerate() {
                    let want = dot_row(t, w.get().row(row, i % N), acts.row(16 - i / N));
                    assert!(same(got, want), "{t} {isa} row {} column {} of {n_cols}: {got} {want}", i % N, i / N);
                }
            }
        }
    }
}

#[test]
fn gated_products_equal_their_parts() {
    let affine = Affine::new(4, 64, ScaleType::BF16).expect("a type of MLX");
    let alike = [WeightType::Q4_K, WeightType::Q8_0, WeightType::BF16, WeightType::Affine(affine)].map(|t| (t, t));
    for (t, t_up) in
        alike.into_iter().chain([(WeightType::Q4_K, WeightType::Q6_K), (WeightType::Q6_K, WeightType::Q4_K)])
    {
        for isa in isas() {
            let (k, n) = (768, 40);
            let (wg, mut wu, x) = (weights(t, n, k), weights(t_up, n, k), activations(MAX, k));
            let row = t.plane_bytes(k).expect("blocks divide the row");
            let row_up = t_up.plane_bytes(k).expect("blocks divide the row");
            wu.q.rotate_left(5 * row_up.q);
            wu.biases.rotate_left(5 * row_up.biases);
            let kernels = Kernels::new(isa);
            let acts = quantised(&kernels, t.act(), &x, k);
            let mut scratch = Scratch::default();
            let clamped = Gate::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
            let bias: Vec<f32> = x[..2 * n].iter().map(|x| 3.0 * x).collect();
            for (act, n_cols, biases) in [
                (Gate::Silu, 1, None),
                (Gate::GeluTanh, 1, None),
                (Gate::Silu, 9, None),
                (Gate::GeluTanh, 64, None),
                (clamped, 1, Some([&bias[..n], &bias[n..]])),
                (clamped, 11, Some([&bias[n..], &bias[..n]])),
                (Gate::Silu, 33, None),
            ] {
                let cols: Vec<Col> = (0..n_cols).map(|c| Col { act: act_of(c) as u32, out: c as u32 }).collect();
                let mut y = vec![0.0f32; n_cols * n];
                // SAFETY: `y` has these rows and only this thread uses it.
                let out = unsafe { OutPtr::new(y.as_mut_ptr(), n_cols, n) };
                let gate = Matrix { dtype: t, n, k, planes: wg.get() };
                let up = Matrix { dtype: t_up, n, k, planes: wu.get() };
                let w = Gated { gate, up, act, biases };
                kernels.matmul_gated(&w, 0..n, &acts, &cols, out, &mut scratch);
                for (i, got) in y.iter().enumerate() {
                    let (c, r) = (i / n, i % n);
                    let x = acts.row(act_of(c));
                    let (g, u) = (dot_row(t, wg.get().row(row, r), x), dot_row(t_up, wu.get().row(row_up, r), x));
                    let (g, u) = biases.map_or((g, u), |[gate, up]| (g + gate[r], u + up[r]));
                    let want = gated(act, g, u);
                    assert!(same(*got, want), "{t} {t_up} {isa} {act:?} column {c} row {r}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn quantisers_are_equal_on_every_instruction_set() {
    for kind in [ActKind::F32, ActKind::Block32, ActKind::Byte32, ActKind::Block256] {
        let k = 768;
        let mut x = activations(MAX, k);
        // Values next to halves of a step, where rounding decides.
        for i in 0..k {
            x[k + i] = ((i % 97) as f32 + 0.5) / 127.0;
            x[2 * k + i] = f32::from_bits(0x0da2_4260 - 128 + (i as u32 % 256)); // about 1e-30
        }
        x[k] = 1.0;
        let want = quantised(&Kernels::new(CheckedIsa::SCALAR), kind, &x, k);
        for isa in isas() {
            let got = quantised(&Kernels::new(isa), kind, &x, k);
            for r in 0..MAX {
                match (got.row(r), want.row(r)) {
                    (ActRow::F32(a), ActRow::F32(b)) => assert!(a.iter().zip(b).all(|(a, b)| same(*a, *b))),
                    (ActRow::Block32(a), ActRow::Block32(b)) => {
                        assert_eq!((a.q, a.sums), (b.q, b.sums), "{isa} row {r}");
                        assert!(a.d.iter().zip(b.d).all(|(a, b)| same(*a, *b)), "{isa} row {r}");
                    }
                    (ActRow::Byte32(a), ActRow::Byte32(b)) => {
                        assert_eq!((a.q, a.sums), (b.q, b.sums), "{isa} row {r}");
                        assert!(a.d.iter().zip(b.d).all(|(a, b)| same(*a, *b)), "{isa} row {r}");
                    }
                    (ActRow::Block256(a), ActRow::Block256(b)) => {
                        assert_eq!((a.q, a.u, a.sums), (b.q, b.u, b.sums), "{isa} row {r}");
                        assert!(a.d.iter().zip(b.d).all(|(a, b)| same(*a, *b)), "{isa} row {r}: {:?} {:?}", a.d, b.d);
                    }
                    _ => panic!("kinds differ"),
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "q8_0 [1, 32] in PlaneBytes { q: 10,")]
fn short_weights_are_refused() {
    let kernels = Kernels::new(CheckedIsa::SCALAR);
    let acts = quantised(&kernels, ActKind::Block32, &[1.0; 32], 32);
    let mut y = [0.0f32; 1];
    // SAFETY: `y` has this row.
    let out = unsafe { OutPtr::new(y.as_mut_ptr(), 1, 1) };
    let w = Matrix { dtype: WeightType::Q8_0, n: 1, k: 32, planes: [0u8; 10].as_slice().into() };
    kernels.matmul(&w, 0..1, &acts, &[Col { act: 0, out: 0 }], out, &mut Scratch::default());
}

#[test]
fn chunks_are_whole_tiles() {
    let kernels = Kernels::new(CheckedIsa::SCALAR);
    for (t, k, n, stack, cols, workers, step) in [
        (WeightType::Q4_K, 2048, 768, 1, 1, 2, 16),
        (WeightType::Q8_0, 704, 5, 1, 64, 8, 16),
        (WeightType::F32, 0, 0, 0, 0, 0, 4),
        // A router is one chunk a thread and more; its kernel for many columns takes 16 rows.
        (WeightType::F32, 2048, 128, 1, 1, 16, 4),
        (WeightType::F32, 2048, 128, 1, 64, 16, 16),
        // Where a region has many matrices, a chunk may be all of one, and no more.
        (WeightType::Q4_K, 2048, 760, 100, 1, 2, 16),
    ] {
        let chunk = kernels.row_chunk(t, (n, k), stack, cols, workers);
        let longest = n.next_multiple_of(step).max(step);
        assert!(chunk >= step && chunk.is_multiple_of(step) && chunk <= longest, "{t}: {chunk}");
        if step == 4 && n > 0 {
            assert!(n.div_ceil(chunk) >= workers, "{t}: {chunk} rows leave threads without work");
        }
        // Chunks differ by less than a tile.
        let last = n - (n.div_ceil(chunk).max(1) - 1) * chunk;
        assert!(n == 0 || chunk - last < step * n.div_ceil(chunk), "{t}: chunks of {chunk} of {n}");
    }
}
