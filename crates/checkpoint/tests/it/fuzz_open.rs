//! The quick form of the fuzz targets `gguf` and `folder` (`crates/fuzz`): any bytes opened as a model, and a valid
//! file or folder changed in any way, end in a model or an error.

use crate::exercise_folder::{CONFIG, HEADER, exercise_folder};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::exercise::{exercise, valid};

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

fn changes() -> impl Strategy<Value = Vec<Change>> {
    vec((any::<usize>(), any::<u8>(), prop_oneof![word(), text_word()]), 0..3)
}

/// Eight bytes that a JSON text may hold.
fn text_word() -> impl Strategy<Value = u64> {
    "[-0-9{}\\[\\]\",:a-z]{8}".prop_map(|text| text.bytes().fold(0, |word, byte| word << 8 | u64::from(byte)))
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

    #[test]
    fn changed_folder(in_config in changes(), in_header in changes(), in_index in changes(), resized in 0u8..4) {
        let header = changed(HEADER.as_bytes(), &in_header);
        // Mostly the header's true length, so that its contents are read.
        let len = header.len() as u64 + u64::from(resized == 0);
        let index = changed(br#"{"weight_map":{"a.weight":"model-1.safetensors"}}"#, &in_index);
        exercise_folder(changed(CONFIG.as_bytes(), &in_config), len, header, index);
    }
}
