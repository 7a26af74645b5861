//! Files under a model: read without mapping, their pages, their identity, and what happens when they are cut in use.

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::gguf::Writer;
use checkpoint::{Checkpoint, Extents, Open};
use quant::WeightType;

const UNMAPPED: Open = Open { map: false, exact: false };

/// Bytes that tell their place.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i + seed) * 31 % 251) as u8 | 1).collect()
}

/// A GGUF file with two tensors of `n` floats each, and a vocabulary of `n_token` texts.
fn gguf(path: &Path, n: usize, n_token: usize) {
    let mut writer = Writer::new();
    let tokens: Vec<String> = (0..n_token).map(|i| format!("token {i}")).collect();
    writer.meta("general.architecture", "llama");
    writer.meta("tokens", tokens.iter().map(String::as_str).collect::<Vec<_>>());
    for (i, name) in ["a", "b"].into_iter().enumerate() {
        writer.tensor(name, &[n / 4, 4], WeightType::F32, pattern(4 * n, i));
    }
    writer.write(&mut fs::File::create(path).unwrap()).unwrap();
}

/// The same as two parts.
fn split(folder: &Path, n: usize) -> PathBuf {
    let path = |no| folder.join(format!("model-0000{no}-of-00002.gguf"));
    for (i, name) in ["a", "b"].into_iter().enumerate() {
        let mut writer = Writer::new();
        writer.meta("split.no", i as u16).meta("split.count", 2u16).meta("split.tensors.count", 2i32);
        writer.tensor(name, &[n / 4, 4], WeightType::F32, pattern(4 * n, i));
        writer.write(&mut fs::File::create(path(i + 1)).unwrap()).unwrap();
    }
    path(1)
}

/// A folder with a tensor in planes: 8 rows of 64 values of 4 bits in groups of 32.
fn mlx(folder: &Path) -> PathBuf {
    let config = r#"{"quantization": {"group_size": 32, "bits": 4}}"#;
    let header = r#"{"a.weight": {"dtype": "U32", "shape": [8, 8], "data_offsets": [0, 256]},
        "a.scales": {"dtype": "BF16", "shape": [8, 2], "data_offsets": [256, 288]},
        "a.biases": {"dtype": "BF16", "shape": [8, 2], "data_offsets": [288, 320]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(pattern(320, 0));
    fs::write(folder.join("config.json"), config).unwrap();
    fs::write(folder.join("model.safetensors"), file).unwrap();
    folder.into()
}

fn read(model: &Checkpoint, extents: &Extents) -> Vec<u8> {
    let mut bytes = vec![0; extents.len().total()];
    model.read(extents, &mut bytes).unwrap();
    bytes
}

#[test]
fn unmapped_is_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    let long = folder.path().join("long.gguf");
    gguf(&long, 64, 200_000); // a header longer than what is read of a file at first
    for path in [long, split(folder.path(), 64), mlx(folder.path())] {
        let (mapped, unmapped) = (checkpoint::open(&path).unwrap(), checkpoint::open_with(&path, UNMAPPED).unwrap());
        assert_eq!((mapped.is_mapped(), unmapped.is_mapped()), (true, false));
        assert!(mapped.meta().iter().eq(unmapped.meta().iter()), "{}", path.display());
        assert_eq!((mapped.tensors(), mapped.kind()), (unmapped.tensors(), unmapped.kind()));
        assert!(!mapped.tensors().is_empty());
        for tensor in mapped.tensors() {
            let planes = mapped.planes(tensor);
            let wanted = [planes.q, planes.scales, planes.biases].concat();
            assert_eq!(tensor.extents().len(), planes.len());
            assert_eq!(
                (read(&mapped, &tensor.extents()), read(&unmapped, &tensor.extents())),
                (wanted.clone(), wanted)
            );
            assert_eq!(unmapped.planes_at(&tensor.extents()), None);
            let row = tensor.dtype.plane_bytes(*tensor.shape.last().unwrap()).unwrap();
            let rows = tensor.extents().rows(row, 3..7).unwrap();
            assert_eq!(mapped.planes_at(&rows), Some(planes.rows(row, 3..7)));
            assert_eq!(tensor.extents().rows(row, 3..tensor.shape[0] + 1), None);
        }
        assert!(unmapped.files().iter().all(|file| file.bytes().is_none() && file.pages().is_none()));
        assert!(mapped.intact().is_ok() && unmapped.intact().is_ok());
    }
}

#[test]
fn a_model_in_memory_is_read_alike() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    gguf(&path, 64, 3);
    let model = checkpoint::from_bytes("memory", fs::read(&path).unwrap()).unwrap();
    let file = &model.files()[0];
    assert_eq!((file.pages(), file.identity(), file.is_unchanged().unwrap()), (None, None, true));
    let tensor = &model.tensors()[1];
    assert_eq!(read(&model, &tensor.extents()), model.bytes(tensor));
    let mut end = [0; 2];
    assert!(file.read_at(file.size() - 1, &mut end).is_err());
    file.read_at(file.size() - 2, &mut end).unwrap();
}

#[test]
fn pages_hold_the_whole_file() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint::open(&split(folder.path(), 5000)).unwrap();
    for file in model.files() {
        let (pages, page) = (file.pages().unwrap(), checkpoint::page_bytes());
        assert!(pages.base.addr().get().is_multiple_of(page) && pages.len.is_multiple_of(page));
        assert!(pages.len >= file.size() && pages.len - file.size() < page);
        assert_eq!(pages.base.as_ptr().cast_const(), file.bytes().unwrap().as_ptr());
        // SAFETY: the model is mapped, and these are its pages.
        let all = unsafe { std::slice::from_raw_parts(pages.base.as_ptr(), pages.len) };
        assert_eq!(&all[..file.size()], fs::read(file.path()).unwrap());
        assert!(all[file.size()..].iter().all(|&b| b == 0));
    }
}

#[test]
fn a_written_file_is_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    gguf(&path, 64, 3);
    for open in [UNMAPPED, Open::default()] {
        let model = checkpoint::open_with(&path, open).unwrap();
        let file = &model.files()[0];
        assert_eq!(file.identity().unwrap().size, file.size());
        assert!(file.is_unchanged().unwrap());
        // Another file of the same name leaves the one that is open alone.
        fs::rename(&path, folder.path().join("former")).unwrap();
        gguf(&path, 128, 3);
        assert!(file.is_unchanged().unwrap());
        let again = checkpoint::open_with(&path, open).unwrap();
        assert_ne!(again.files()[0].identity(), file.identity());
        fs::OpenOptions::new().append(true).open(&path).unwrap().set_len(9999).unwrap();
        assert!(!again.files()[0].is_unchanged().unwrap());
    }
}

/// A cut file gives zeros behind the cut, whichever thread reads, and an error that names it; others stay as they are.
#[test]
#[cfg(unix)]
fn a_file_cut_while_it_is_mapped() {
    const N: usize = 1 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = split(folder.path(), N);
    let other = folder.path().join("other.gguf");
    gguf(&other, N, 3);
    let (model, other) = (checkpoint::open(&path).unwrap(), checkpoint::open(&other).unwrap());
    let [a, b] = [&model.tensors()[0], &model.tensors()[1]];
    let cut = &model.files()[b.file];
    let kept = (b.offset + N).next_multiple_of(checkpoint::page_bytes());
    fs::OpenOptions::new().write(true).open(cut.path()).unwrap().set_len(kept as u64).unwrap();
    assert!(model.intact().is_ok(), "nothing was read yet");
    assert!(!cut.is_unchanged().unwrap());

    let wanted: Vec<u8> = (0..4 * N).map(|i| if b.offset + i < kept { pattern(1, i + 1)[0] } else { 0 }).collect();
    std::thread::scope(|scope| {
        for i in 0..4 {
            let (model, wanted) = (&model, &wanted);
            // Each begins elsewhere, so that the first reads behind the cut meet.
            scope.spawn(move || {
                for j in 0..4 {
                    let part = (i + j) % 4 * N..((i + j) % 4 + 1) * N;
                    assert!(model.bytes(b)[part.clone()] == wanted[part], "thread {i}, part {j}");
                }
            });
        }
    });
    let size = cut.size();
    let wanted = format!(
        "failed to read {} at byte {kept}: the file was cut from {size} to {kept} bytes while in use",
        cut.path().display()
    );
    assert_eq!(model.intact().unwrap_err().to_string(), wanted);
    assert!(model.files()[a.file].intact().is_ok());
    assert!(model.bytes(a) == pattern(4 * N, 0));
    // A read by call says so itself.
    let mut bytes = vec![0; 4 * N];
    let error = model.read(&b.extents(), &mut bytes).unwrap_err().to_string();
    assert!(error.contains("model-00002-of-00002.gguf: "), "{error}");

    assert!(other.bytes(&other.tensors()[1]) == pattern(4 * N, 1));
    assert!(other.intact().is_ok());
    // What takes the place of a broken model in the table is whole.
    drop(model);
    let path = split(folder.path(), N);
    let model = checkpoint::open(&path).unwrap();
    assert!(model.bytes(&model.tensors()[1]) == pattern(4 * N, 1));
    assert!(model.intact().is_ok());
}

/// Set for the child processes of these tests: what the child does, and in which folder.
#[cfg(unix)]
const CHILD: &str = "CHECKPOINT_TEST_CHILD";

/// How a process ends that reads from a cut file which is not a model's.
#[cfg(unix)]
fn end_of_child(test: &str) -> std::process::ExitStatus {
    let folder = tempfile::tempdir().unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let child = child.args(["--exact", &format!("files::{test}"), "--nocapture"]).env(CHILD, folder.path());
    let output = child.output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("the model is whole"), "{output:?}");
    output.status
}

/// What the child does: reads from a cut file of its own while a model is mapped, after a model was cut as well.
#[cfg(unix)]
fn child(folder: &Path) {
    let path = folder.join("model.gguf");
    gguf(&path, 1 << 16, 3);
    let model = checkpoint::open(&path).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    assert_eq!(model.bytes(&model.tensors()[1]).last(), Some(&0));
    assert!(model.intact().is_err());

    let own = folder.join("own");
    fs::write(&own, vec![1; 1 << 16]).unwrap();
    let file = fs::OpenOptions::new().read(true).write(true).open(&own).unwrap();
    // SAFETY: a read-only map of a file that this process alone knows.
    let map = unsafe { memmap2::Mmap::map(&file).unwrap() };
    file.set_len(0).unwrap();
    println!("the model is whole");
    println!("never reached: {}", std::hint::black_box(&map)[1 << 15]);
}

#[test]
#[cfg(unix)]
fn another_sigbus_still_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;
    if let Some(folder) = std::env::var_os(CHILD) {
        return child(Path::new(&folder));
    }
    assert_eq!(end_of_child("another_sigbus_still_ends_the_process").signal(), Some(libc::SIGBUS));
}

#[test]
#[cfg(unix)]
fn another_sigbus_goes_to_the_handler_before() {
    if let Some(folder) = std::env::var_os(CHILD) {
        extern "C" fn handler(_: libc::c_int) {
            // SAFETY: ends the process, as a handler may.
            unsafe { libc::_exit(42) }
        }
        // SAFETY: the handler does only what a handler may do.
        unsafe { libc::signal(libc::SIGBUS, handler as *const () as usize) };
        return child(Path::new(&folder));
    }
    assert_eq!(end_of_child("another_sigbus_goes_to_the_handler_before").code(), Some(42));
}
