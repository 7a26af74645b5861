//! Models split over several files: any part opens all, and parts that contradict each other are refused.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use checkpoint::gguf::Writer;
use quant::WeightType;

/// One part as its file says it: number from 0, count of parts, count of tensors in all, and its tensor's name.
#[derive(Clone, Copy)]
struct Part {
    no: u16,
    count: u16,
    n_tensor: i32,
    tensor: &'static str,
}

const WHOLE: [Part; 3] = [
    Part { no: 0, count: 3, n_tensor: 3, tensor: "a" },
    Part { no: 1, count: 3, n_tensor: 3, tensor: "b" },
    Part { no: 2, count: 3, n_tensor: 3, tensor: "c" },
];

fn path(folder: &Path, no: usize) -> PathBuf {
    folder.join(format!("model-{no:05}-of-00003.gguf"))
}

fn write(path: &Path, part: &Part) {
    let mut writer = Writer::new();
    if part.no == 0 {
        writer.meta("general.architecture", "llama");
    } else {
        writer.alignment(8 << part.no); // parts may differ in their alignment
    }
    writer.meta("split.no", part.no).meta("split.count", part.count).meta("split.tensors.count", part.n_tensor);
    writer.tensor(part.tensor, &[4], WeightType::F32, vec![part.no as u8; 16]);
    writer.write(&mut File::create(path).unwrap()).unwrap();
}

fn folder_of(parts: &[Part]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (i, part) in parts.iter().enumerate() {
        write(&path(folder.path(), i + 1), part);
    }
    folder
}

#[test]
fn any_part_opens_all() {
    let folder = folder_of(&WHOLE);
    for no in 1..=3 {
        let model = checkpoint::open(&path(folder.path(), no)).unwrap();
        assert_eq!(model.meta().str("general.architecture").unwrap(), "llama");
        assert_eq!((model.files().len(), model.data_bytes()), (3, 48));
        assert_eq!(model.path(), path(folder.path(), 1));
        for (i, name) in ["a", "b", "c"].into_iter().enumerate() {
            let tensor = model.tensor(name).unwrap();
            assert_eq!((tensor.file, model.bytes(tensor)), (i, &[i as u8; 16][..]));
            assert_eq!(model.files()[i].path(), path(folder.path(), i + 1));
            assert_eq!(model.files()[i].size() as u64, fs::metadata(path(folder.path(), i + 1)).unwrap().len());
        }
    }
}

#[test]
fn parts_that_do_not_fit() {
    let with = |i: usize, part: Part| {
        let mut parts = WHOLE;
        parts[i] = part;
        parts
    };
    let [a, b, c] = WHOLE;
    // The parts, and what the error must say.
    let cases: Vec<(Vec<Part>, &str)> = vec![
        (vec![a, b], "model-00003-of-00003.gguf: "),
        (
            with(1, Part { no: 2, ..b }).into(),
            "model-00002-of-00003.gguf: the name says part 2 of 3, but split.no is 2",
        ),
        (with(2, Part { count: 4, ..c }).into(), "but split.no is 2 (from 0) and split.count 4"),
        (with(1, Part { n_tensor: 4, ..b }).into(), "split.tensors.count is 4, the first part says 3"),
        (WHOLE.map(|part| Part { n_tensor: 4, ..part }).into(), "split.tensors.count is 4, the 3 parts hold 3"),
        (with(0, Part { n_tensor: -3, ..a }).into(), "key split.tensors.count: found i32 -3, expected u64"),
        (with(2, Part { tensor: "a", ..c }).into(), "00003-of-00003.gguf: tensor a: is in "),
    ];
    for (parts, wanted) in cases {
        let folder = folder_of(&parts);
        let error = checkpoint::open(&path(folder.path(), 2)).unwrap_err().to_string();
        assert!(error.contains(wanted), " found {error}\nwanted {wanted}");
    }
}

#[test]
fn names_that_do_not_fit() {
    let folder = folder_of(&WHOLE);
    let single = Part { no: 0, count: 1, n_tensor: 1, tensor: "a" };
    // The name, the file under it, and what the error must say; no error where that is empty.
    for (name, part, wanted) in [
        ("renamed.gguf", WHOLE[0], "holds one part of 3 (split.no is 0, from 0): the parts are found by their names"),
        ("model-00004-of-00003.gguf", WHOLE[0], "the name says part 4 of 3"),
        ("model-00000-of-00003.gguf", WHOLE[0], "the name says part 0 of 3"),
        (
            "alone-00001-of-00002.gguf",
            single,
            "the name says part 1 of 2, but split.no is 0 (from 0) and split.count 1",
        ),
        ("alone-00001-of-00001.gguf", single, ""),
        ("story-1-of-3.gguf", single, ""),
        ("x-0001a-of-00003.gguf", single, ""),
    ] {
        let path = folder.path().join(name);
        write(&path, &part);
        let error = checkpoint::open(&path).err().map_or(String::new(), |e| e.to_string());
        assert!(error.contains(wanted) && error.is_empty() == wanted.is_empty(), " found {error}\nwanted {wanted}");
    }
    let mut plain = Writer::new();
    plain.meta("general.architecture", "llama");
    let path = folder.path().join("plain-00001-of-00002.gguf");
    plain.write(&mut File::create(&path).unwrap()).unwrap();
    let error = checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.ends_with("but split.no or split.count is missing in the file"), "{error}");
}
