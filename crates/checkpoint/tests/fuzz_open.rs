//! The quick form of the fuzz target `fuzz/fuzz_targets/open.rs`: any bytes opened as a model, and a valid file changed
//! in any way, end in a model or an error.

mod exercise;

use exercise::{exercise, valid};
use proptest::collection::vec;
use proptest::prelude::*;

/// A change of a file: where, how, with what.
type Change = (usize, u8, u64);

/// Words that are often interesting as a length, a count or a kind, among words that are not.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..40,
        any::<u64>(),
        (0u32..64).prop_map(|shift| 1 << shift),
        (0u32..64).prop_map(|shift| u64::MAX >> shift)
    ]
}

fn changed(file: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut file = file.to_vec();
    for &(at, how, word) in changes {
        let at = at % (file.len() + 1);
        let len = usize::from(how >> 4).min(file.len() - at);
        let word = &word.to_le_bytes()[..len.min(8)];
        match how % 8 {
            0 => file.truncate(at),
            1 => drop(file.drain(at..at + len)),
            2 => drop(file.splice(at..at, word.iter().copied())),
            _ => file[at..at + word.len()].copy_from_slice(word),
        }
    }
    file
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn any_bytes(bytes in vec(any::<u8>(), 0..300), n_tensor in 0u64..3, n_key in 0u64..3) {
        let counts = [n_tensor.to_le_bytes(), n_key.to_le_bytes()].concat();
        exercise([b"GGUF\x03\0\0\0", &counts[..], &bytes].concat());
        exercise(bytes);
    }

    #[test]
    fn changed_file(changes in vec((any::<usize>(), any::<u8>(), word()), 1..6)) {
        exercise(changed(&valid(), &changes));
    }
}
