//! Decoding against gguf-py and MLX and quantized activations against numpy, bit for bit.
//! `tools/golden_blocks.py`, `tools/golden_affine.py` and `tools/golden_acts.py` make the files.

use quant::act::{quantise32, quantise256};
use quant::{Affine, Planes, ScaleType, WeightType, decode_row};

const GOLDEN: &[u8] = include_bytes!("../data/golden_blocks.bin");

fn take<'a>(rest: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (head, tail) = rest.split_at(n);
    *rest = tail;
    head
}

fn take_u32(rest: &mut &[u8]) -> u32 {
    u32::from_le_bytes(take(rest, 4).as_chunks().0[0])
}

#[test]
fn every_type_decodes_as_gguf_py_does() {
    let mut rest = GOLDEN;
    let mut seen = Vec::new();
    while !rest.is_empty() {
        let [id, n_blocks, block_len, block_bytes] = [(); 4].map(|()| take_u32(&mut rest));
        let t = WeightType::from_ggml_id(id).unwrap();
        assert_eq!((t.block_len(), t.block_bytes()), (block_len as usize, block_bytes as usize), "{t}");
        let n = (n_blocks * block_len) as usize;
        let bytes = take(&mut rest, (n_blocks * block_bytes) as usize);
        let want = take(&mut rest, 4 * n).as_chunks::<4>().0;

        let mut got = vec![0.0f32; n];
        decode_row(t, bytes, &mut got);
        same_values(t, &got, want);
        seen.push(t);
    }
    seen.sort();
    assert_eq!(seen, WeightType::GGUF);
}

#[test]
fn every_planar_type_decodes_as_mlx_does() {
    let mut rest: &[u8] = include_bytes!("../data/golden_affine.bin");
    let mut seen = Vec::new();
    while !rest.is_empty() {
        let [bits, group, scales, n] = [(); 4].map(|()| take_u32(&mut rest) as usize);
        let t = match [ScaleType::F16, ScaleType::BF16, ScaleType::F32].get(scales) {
            Some(&scales) => WeightType::Affine(Affine::new(bits, group, scales).unwrap()),
            None => WeightType::MXFP4_PLANAR,
        };
        let bytes = t.plane_bytes(n).unwrap();
        let [q, scales, biases] = [bytes.q, bytes.scales, bytes.biases].map(|n| take(&mut rest, n));
        let mut got = vec![0.0f32; n];
        decode_row(t, Planes { q, scales, biases }, &mut got);
        same_values(t, &got, take(&mut rest, 4 * n).as_chunks().0);
        seen.push(t);
    }
    seen.sort();
    seen.dedup();
    let mut planar: Vec<WeightType> =
        WeightType::ALL.into_iter().filter(|t| t.ggml_id().is_none() && t.act() != quant::act::ActKind::F32).collect();
    planar.sort();
    assert_eq!(seen, planar);
}

fn same_values(t: WeightType, got: &[f32], want: &[[u8; 4]]) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let want = f32::from_le_bytes(*want);
        // Which NaN an operation makes is the machine's choice; that it is one is not.
        let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
        assert!(same, "{t} block {} value {}: {got} is not {want}", i / t.block_len(), i % t.block_len());
    }
}

#[test]
fn activations_are_quantised_as_the_rule_says() {
    let mut rest: &[u8] = include_bytes!("../data/golden_acts.bin");
    let mut row = 0;
    while !rest.is_empty() {
        let mut floats = |n: usize| -> Vec<f32> {
            take(&mut rest, 4 * n).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        let x = floats(256);
        let (mut q, mut d, mut sums) = (vec![0i16; 256], vec![0f32; 8], vec![0i32; 8]);
        quantise32(&x, &mut q, &mut d, &mut sums);
        let q: Vec<u8> = q.iter().flat_map(|q| q.to_le_bytes()).collect();
        let sums: Vec<u8> = sums.iter().flat_map(|s| s.to_le_bytes()).collect();
        assert_eq!(q, take(&mut rest, 512), "q of the 32-blocks of row {row}");
        same_scales(&d, take(&mut rest, 32), row);
        assert_eq!(sums, take(&mut rest, 32), "sums of the 32-blocks of row {row}");

        let (mut q, mut u, mut d, mut sums) = (vec![0i8; 256], vec![0u8; 8], vec![0f32; 1], vec![0i16; 16]);
        quantise256(&x, &mut q, &mut u, &mut d, &mut sums);
        let q: Vec<u8> = q.iter().map(|&q| q as u8).collect();
        let sums: Vec<u8> = sums.iter().flat_map(|s| s.to_le_bytes()).collect();
        assert_eq!(q, take(&mut rest, 256), "q of the super-block of row {row}");
        assert_eq!(u, take(&mut rest, 8), "sub-scales of row {row}");
        same_scales(&d, take(&mut rest, 4), row);
        assert_eq!(sums, take(&mut rest, 32), "sums of the super-block of row {row}");
        row += 1;
    }
    assert_eq!(row, 25);
}

/// Equal bits; the NaN of a broken block is the one of [`f32::NAN`].
fn same_scales(got: &[f32], want: &[u8], row: usize) {
    let got: Vec<u8> = got.iter().flat_map(|d| d.to_le_bytes()).collect();
    assert_eq!(got, want, "scales of row {row}");
}
