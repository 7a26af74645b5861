//! The headers that CUDA and Metal kernels decode with (`kernels/quant`), compiled for this machine, against the crate:
//! the same bits for random blocks of every type. Skips where there is no C++ compiler.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use quant::{PlanesBuf, WeightType, decode_row};

/// Values a row: several blocks of every type, an odd number of 128-groups; floats also end within a unit.
fn lengths(t: WeightType) -> &'static [usize] {
    if t.block_len() == 1 { &[1280, 1, 17, 63] } else { &[1280] }
}

/// Compiles the decoder, `None` where no compiler is found.
fn compile(program: &Path) -> Option<()> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let compiler =
        std::env::var("CXX").ok().into_iter().chain(["c++", "g++", "clang++"].map(String::from)).find(|name| {
            let found = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
            found.is_ok_and(|status| status.success())
        })?;
    let status = Command::new(compiler)
        .args(["-std=c++14", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", "-I"])
        .arg(dir.join("../../kernels"))
        .arg(dir.join("tests/device_headers.cpp"))
        .arg("-o")
        .arg(program)
        .status()
        .expect("the compiler that told its version runs");
    assert!(status.success(), "the headers do not compile");
    Some(())
}

/// Bytes of every kind, from a multiplicative generator.
fn random(seed: &mut u64, bytes: &mut [u8]) {
    for b in bytes {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *b = (*seed >> 56) as u8;
    }
}

#[test]
fn headers_decode_as_the_crate_does() {
    let program: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).join("device_headers");
    if compile(&program).is_none() {
        eprintln!("skipped: no C++ compiler (CXX, c++, g++, clang++)");
        return;
    }
    let (mut seed, mut input, mut want) = (1, Vec::new(), Vec::new());
    for t in WeightType::ALL {
        for &n in lengths(t).iter().cycle().take(4) {
            let bytes = t.plane_bytes(n).unwrap();
            let mut row = PlanesBuf::new(bytes);
            [&mut row.q, &mut row.scales, &mut row.biases].into_iter().for_each(|plane| random(&mut seed, plane));
            for number in [t.index(), n, bytes.q, bytes.scales, bytes.biases] {
                input.extend((number as u32).to_le_bytes());
            }
            [&row.q, &row.scales, &row.biases].into_iter().for_each(|plane| input.extend(plane));
            let mut values = vec![0.0f32; n];
            decode_row(t, row.get(), &mut values);
            want.push((t, values));
        }
    }
    let mut child = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success(), "the decoder refuses a row");
    let mut got = output.stdout.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
    for (t, values) in want {
        for (i, want) in values.iter().enumerate() {
            let got = got.next().unwrap();
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(same, "{t} value {i} of {}: {got} is not {want}", values.len());
        }
    }
    assert_eq!(got.next(), None);
}
