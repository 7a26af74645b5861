//! Decoding against gguf-py, block by block, bit for bit. `tools/golden_blocks.py` makes the file.

use quant::{WeightType, decode_row};

const GOLDEN: &[u8] = include_bytes!("data/golden_blocks.bin");

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
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let want = f32::from_le_bytes(*want);
            // Which NaN an operation makes is the machine's choice; that it is one is not.
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(same, "{t} block {} value {}: {got} is not {want}", i / t.block_len(), i % t.block_len());
        }
        seen.push(t);
    }
    seen.sort();
    assert_eq!(seen, WeightType::ALL);
}
