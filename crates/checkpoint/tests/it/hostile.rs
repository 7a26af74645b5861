//! Files that lie: each must end in an error that says why, never in a panic and never in a large allocation.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use crate::exercise_folder::{CONFIG, DATA, HEADER, safetensors, sized};
use checkpoint::gguf::Writer;
use checkpoint::{Error, Value};
use quant::WeightType;

/// A file built byte by byte, invalid where a case needs it.
#[derive(Clone)]
struct Raw(Vec<u8>);

const U8: u32 = 0;
const U32: u32 = 4;
const I32: u32 = 5;
const BOOL: u32 = 7;
const STR: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;

const F32: u32 = 0;
const Q4_K: u32 = 12;

impl Raw {
    fn head(n_tensor: u64, n_key: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(3).u64(n_tensor).u64(n_key)
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    fn u32(self, v: u32) -> Self {
        self.bytes(&v.to_le_bytes())
    }

    fn u64(self, v: u64) -> Self {
        self.bytes(&v.to_le_bytes())
    }

    fn text(self, text: impl AsRef<[u8]>) -> Self {
        let text = text.as_ref();
        self.u64(text.len() as u64).bytes(text)
    }

    /// Key and kind of a value; the value follows.
    fn key(self, key: &str, kind: u32) -> Self {
        self.text(key).u32(kind)
    }

    /// A key that is in order, for files that must be long enough to get to the fault.
    fn filler(self) -> Self {
        self.key("filler", STR).text([b'x'; 200])
    }

    /// Axes fastest first, as in the file.
    fn tensor(self, name: impl AsRef<[u8]>, axes: &[u64], dtype: u32, offset: u64) -> Self {
        let head = self.text(name).u32(axes.len() as u32);
        axes.iter().fold(head, |raw, &axis| raw.u64(axis)).u32(dtype).u64(offset)
    }

    /// Padding to 32, then `n` bytes of weights.
    fn data(mut self, n: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(32) + n, 0);
        self
    }
}

/// One tensor with the given entry, and 64 bytes of weights.
fn one(axes: &[u64], dtype: u32, offset: u64) -> Raw {
    Raw::head(1, 0).tensor("a", axes, dtype, offset).data(64)
}

/// One key with the given kind, its value to follow, behind a key that makes the file long enough.
fn key(key: &str, kind: u32) -> Raw {
    Raw::head(0, 2).filler().key(key, kind)
}

#[test]
fn bad_files() {
    let two = |axes: &[u64], first: u64, second: u64| {
        Raw::head(2, 0).tensor("a", axes, F32, first).tensor("b", axes, F32, second).data(128)
    };
    let nested =
        |depth: usize| (1..depth).fold(key("k", ARRAY), |raw, _| raw.u32(ARRAY).u64(1)).u32(U8).u64(1).bytes(b"x");
    let align = |kind, v: u32| key("general.alignment", kind).u32(v);
    let long = "n".repeat(65);

    // The file, and what its error must say.
    let cases: Vec<(Raw, &str)> = vec![
        (Raw(vec![]), "failed to open bad.gguf: magic at byte 0 needs 4 bytes, 0 are left"),
        (Raw(b"GGU".to_vec()), "magic at byte 0 needs 4 bytes, 3 are left"),
        (Raw(b"PK\x03\x04 a zip archive".to_vec()), r#"open bad.gguf: does not begin with "GGUF" as a GGUF file does"#),
        (Raw(b"version https://git-lfs.github.com/spec/v1".to_vec()), "it is a pointer of Git LFS: `git lfs pull`"),
        (Raw(b"<!DOCTYPE html><html>".to_vec()), "it is a web page"),
        (Raw(b"<html>".to_vec()), "it is a web page"),
        (Raw(b"GGUF".to_vec()), "version at byte 4 needs 4 bytes"),
        (Raw(b"GGUF".to_vec()).u32(1).u64(0).u64(0), "GGUF version 1: versions 2 and 3 are read"),
        (Raw(b"GGUF".to_vec()).u32(4).u64(0).u64(0), "GGUF version 4: versions 2 and 3 are read"),
        (Raw(b"GGUF\0\0\0\x03".to_vec()).u64(0).u64(0), "big-endian GGUF version 3: only little endian is read"),
        (Raw(b"GGUF".to_vec()).u32(3).u32(0), "count of tensors at byte 8 needs 8 bytes, 4 are left"),
        // Counts that the file cannot hold.
        (Raw::head(u64::MAX, 0), "count of tensors is 18446744073709551615, of at least 33 bytes each"),
        (Raw::head(2, 0).data(32), "count of tensors is 2"),
        (Raw::head(0, u64::MAX / 14), "count of keys is 1317624576693539401, of at least 14 bytes each"),
        (Raw::head(0, 3).u64(0).data(0), "count of keys is 3"),
        // Keys.
        (Raw::head(0, 1).u64(u64::MAX).data(32), "key 0 of 1: key at byte 24 is 18446744073709551615 bytes long"),
        (Raw::head(0, 1).u64(1000).data(32), "key 0 of 1: key at byte 24 is 1000 bytes long, 32 are left"),
        (Raw::head(0, 1).key("", U8).bytes(&[0; 9]), "key 0 of 1: key is 0 bytes long, 1 to 65535 are allowed"),
        (Raw::head(0, 1).key(&"k".repeat(65536), U8).bytes(&[0]), "key is 65536 bytes long, 1 to 65535"),
        (Raw::head(0, 1).text(b"a\xff\xfe").data(32), "is not UTF-8"),
        (Raw::head(0, 2).key("k", U32).u32(1).key("k", U32).u32(2), "key k: is in the file twice"),
        // Values.
        (key("k", 13).u64(0), "key k: value kind is 13, known are 0 to 12"),
        (key("k", u32::MAX).u64(0), "key k: value kind is 4294967295"),
        (key("k", U64).u32(0), "key k: u64 at byte 263 needs 8 bytes, 4 are left"),
        (key("k", BOOL).bytes(&[2]), "key k: bool is 2, expected 0 or 1"),
        (key("k", STR).u64(1 << 40).bytes(b"x"), "key k: text at byte 263 is 1099511627776 bytes long, 1 are left"),
        (key("k", STR).u32(0), "key k: text at byte 263 needs 8 bytes, 4 are left"),
        // Arrays.
        (key("k", ARRAY).u32(U32), "key k: array length at byte 267 needs 8 bytes, 0 are left"),
        (key("k", ARRAY).u32(99).u64(0), "key k: element kind is 99, known are 0 to 12"),
        (
            key("k", ARRAY).u32(U32).u64(u64::MAX),
            "key k: array length is 18446744073709551615, of at least 4 bytes each",
        ),
        (
            key("k", ARRAY).u32(I32).u64(3).u64(0),
            "key k: array length is 3, of at least 4 bytes each, but 8 bytes are left",
        ),
        (key("k", ARRAY).u32(STR).u64(1 << 61).u64(0), "key k: array length is 2305843009213693952"),
        (key("k", ARRAY).u32(STR).u64(2).text("four").u32(9), "key k: text at byte 287 needs 8 bytes, 4 are left"),
        (key("k", ARRAY).u32(STR).u64(1).u64(u64::MAX), "key k: text at byte 275 is 18446744073709551615 bytes long"),
        (key("k", ARRAY).u32(BOOL).u64(3).bytes(&[0, 1, 255]), "key k: bool is 255, expected 0 or 1"),
        (key("k", ARRAY).u32(ARRAY).u64(1 << 60).u64(0), "key k: array length is 1152921504606846976"),
        (nested(5), "key k: arrays nest more than 4 deep"),
        (nested(60), "key k: arrays nest more than 4 deep"),
        // Alignment.
        (align(U32, 0), "key general.alignment: found u32 0, expected a u32 power of two from 8 to 1048576"),
        (align(U32, 24), "found u32 24"),
        (align(U32, 4), "found u32 4"),
        (align(U32, 1 << 21), "found u32 2097152"),
        (align(I32, 32), "found i32 32, expected a u32 power of two"),
        (key("general.alignment", STR).text("32"), r#"found str "32""#),
        // Names, axes and types of tensors.
        (Raw::head(1, 0).tensor("", &[4, 4], F32, 0).data(64), "tensor 0 of 1: name \"\" is 0 bytes long, 1 to 64"),
        (Raw::head(1, 0).tensor(&long, &[4], F32, 0).data(64), "is 65 bytes long, 1 to 64 are allowed"),
        (Raw::head(1, 0).tensor(b"\xc3(", &[4], F32, 0).data(64), "tensor 0 of 1: name \"\u{fffd}(\" is not UTF-8"),
        (Raw::head(1, 0).u64(u64::MAX).data(64), "tensor 0 of 1: name at byte 24 is 18446744073709551615 bytes"),
        (
            Raw::head(2, 0).tensor("a", &[4], F32, 0).tensor("a", &[4], F32, 32).data(64),
            "tensor a: is in the file twice",
        ),
        (
            Raw::head(2, 0).tensor("a", &[4], 26, 0).tensor("a", &[4], F32, 32).data(64),
            "tensor a: is in the file twice",
        ),
        (one(&[], F32, 0), "tensor a: has 0 axes, 1 to 4 are allowed"),
        (one(&[1, 1, 1, 1, 1], F32, 0), "tensor a: has 5 axes, 1 to 4 are allowed"),
        (one(&[4, 0], F32, 0), "tensor a: shape [0, 4] has an axis of length 0"),
        (one(&[u64::MAX], F32, 0), "tensor a: shape [18446744073709551615] has too many elements for f32"),
        (one(&[1 << 32, 1 << 32], F32, 0), "has too many elements for f32"),
        (one(&[1 << 20, 1 << 20, 1 << 20, 16], F32, 0), "has too many elements for f32"),
        (one(&[1 << 62], F32, 0), "has too many elements for f32"),
        (one(&[100], Q4_K, 0), "tensor a: row of 100 values does not divide into q4_k blocks of 256"),
        // Places of tensors.
        (one(&[4], F32, 16), "tensor a: offset is not a multiple of the alignment 32"),
        (one(&[4], F32, u64::MAX - 31), "tensor a: file holds 0 bytes, f32 [4] needs 16"),
        (one(&[4], F32, 96), "tensor a: file holds 0 bytes, f32 [4] needs 16"),
        (one(&[8, 4], F32, 0), "tensor a: file holds 64 bytes, f32 [4, 8] needs 128"),
        (one(&[256, 2], Q4_K, 32), "tensor a: file holds 32 bytes, q4_k [2, 256] needs 288"),
        (two(&[16], 0, 32), "tensor b: shares bytes with tensor a"),
        (two(&[16], 32, 0), "tensor a: shares bytes with tensor b"),
        (two(&[16], 64, 64), "shares bytes with tensor"),
        // Splits.
        (key("split.count", U32).u32(3), "holds one part of 3 (split.no is 0, from 0)"),
        (key("split.count", STR).text("3"), r#"key split.count: found str "3", expected u64"#),
        // What names may do to a terminal.
        (key("\x1b[2J", 77).u64(0), r"key \u{1b}[2J: value kind is 77"),
    ];
    for (i, (raw, wanted)) in cases.into_iter().enumerate() {
        let found = checkpoint::from_bytes("bad.gguf", raw.0).map(|_| ()).unwrap_err().to_string();
        assert!(found.contains(wanted), "case {i}:\n found {found}\nwanted {wanted}");
        assert!(found.contains("bad.gguf: "), "case {i}: {found}");
    }
}

/// A tensor of an unsupported type is an error only when it is read.
#[test]
fn unreadable_tensors() {
    for (dtype, wanted) in [
        (9, "failed to read odd.gguf: tensor a: type Q8_1 (9) is not supported"),
        (26, "failed to read odd.gguf: tensor a: type I32 (26) is not supported"),
        (28, "failed to read odd.gguf: tensor a: type F64 (28) is not supported"),
        (4, "failed to read odd.gguf: tensor a: type Q4_2 (removed from GGUF) (4) is not supported"),
        (99, "failed to read odd.gguf: tensor a: type 99 is unknown"),
    ] {
        let raw = Raw::head(2, 0).tensor("a", &[7], dtype, 0).tensor("b", &[8], F32, 32).data(64);
        let model = checkpoint::from_bytes("odd.gguf", raw.0).unwrap();
        assert_eq!((model.tensors().len(), model.tensors()[0].name.as_str()), (1, "b"));
        assert_eq!((model.unreadable()[0].name.as_str(), &model.unreadable()[0].shape[..]), ("a", &[7][..]));
        assert_eq!(model.find("a").unwrap_err().to_string(), wanted);
        assert_eq!((model.tensor("a"), model.find("c").unwrap()), (None, None));
    }
}

/// The neighbors of the bad files, so that the checks are known to refuse no more than they should.
#[test]
fn odd_but_good_files() {
    let cases: Vec<(&str, Raw)> = vec![
        ("nothing in it", Raw::head(0, 0)),
        ("bytes behind the header", Raw::head(0, 0).data(100)),
        ("version 2", Raw(b"GGUF".to_vec()).u32(2).u64(0).u64(0)),
        ("weights to the last byte", Raw::head(1, 0).tensor("a", &[16], F32, 0).data(64)),
        ("axes of length 1", Raw::head(1, 0).tensor("a", &[16, 1, 1, 1], F32, 0).data(64)),
        ("a gap", Raw::head(1, 0).tensor("a", &[8], F32, 32).data(64)),
        ("out of order", Raw::head(2, 0).tensor("a", &[8], F32, 32).tensor("b", &[8], F32, 0).data(64)),
        ("64 bytes of name", Raw::head(1, 0).tensor("n".repeat(64), &[8], F32, 32).data(64)),
        ("a text that is not UTF-8", key("k", STR).text(b"\xff")),
        ("an empty array", key("k", ARRAY).u32(STR).u64(0)),
        ("an array of empty arrays", key("k", ARRAY).u32(ARRAY).u64(2).u32(U8).u64(0).u32(STR).u64(0)),
        ("arrays 4 deep", (1..4).fold(key("k", ARRAY), |raw, _| raw.u32(ARRAY).u64(1)).u32(U8).u64(1).bytes(b"x")),
        ("alignment 8", key("general.alignment", U32).u32(8)),
        ("a split of one part", key("split.count", U32).u32(1)),
    ];
    for (what, raw) in cases {
        checkpoint::from_bytes("odd.gguf", raw.0).map_err(|e| format!("{what}: {e}")).unwrap();
    }
    let model = checkpoint::from_bytes("odd.gguf", one(&[4, 2, 1], F32, 32).0).unwrap();
    assert_eq!((&model.tensors()[0].shape[..], model.tensors()[0].len), (&[1, 2, 4][..], 32));
}

#[test]
fn static_bytes_must_be_aligned() {
    let buffer: &'static [u8] = vec![0; 200].leak();
    let skip = 1 + buffer.as_ptr().addr().next_multiple_of(64) - buffer.as_ptr().addr();
    let error = checkpoint::from_static("built in", &buffer[skip..]).unwrap_err().to_string();
    assert_eq!(error, "failed to open built in: begins at an address that is no multiple of 64");
}

#[test]
fn not_files() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.gguf");
    for (path, wanted) in [(folder.path(), ": is a folder without config.json"), (missing.as_path(), "missing.gguf: ")]
    {
        let error = checkpoint::open(path).unwrap_err();
        assert!(matches!(error, Error::Io { .. } | Error::File { .. }));
        assert!(error.to_string().contains(wanted), "{error}");
        assert_eq!(error.to_string().ends_with("(os error 2)"), path == missing, "{error}");
    }
    let empty = folder.path().join("empty.gguf");
    std::fs::write(&empty, b"").unwrap();
    assert!(checkpoint::open(&empty).unwrap_err().to_string().contains("magic at byte 0 needs 4 bytes, 0 are left"));
}

/// A file on disk may be longer than memory without a byte of it being there.
#[test]
fn a_header_without_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hollow.gguf");
    let cases = [
        ("text", key("k", STR).u64(1 << 40)),
        ("numbers", key("k", ARRAY).u32(U8).u64(1 << 40)),
        ("texts", key("k", ARRAY).u32(STR).u64(1 << 37)),
    ];
    for (what, raw) in cases {
        std::fs::write(&path, &raw.0).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 41).unwrap();
        let mut message = String::new();
        let peak = peak_bytes(|| message = checkpoint::open(&path).unwrap_err().to_string());
        assert!(message.ends_with("header is longer than 268435456 bytes, which are allowed"), "{what}: {message}");
        assert!(peak < 1 << 30, "{what}: {peak} bytes allocated");
    }
}

/// A valid file with every kind of entry, and the length of its header without the padding.
fn valid() -> (Vec<u8>, usize) {
    let mut writer = Writer::new();
    writer.alignment(64).meta("general.architecture", "llama").meta("flag", true).meta("wide", -3i64);
    writer.meta("numbers", vec![1.0f32, -2.0]).meta("flags", vec![true, false]);
    writer.meta("tokens", vec!["a", "", "ccc"]).meta("nested", Value::Nested(vec![vec![1u8].into(), vec!["x"].into()]));
    writer.tensor("a", &[2, 8], WeightType::F32, vec![1; 64]);
    writer.tensor("b", &[3, 256], WeightType::Q4_K, vec![2; 3 * 144]);
    writer.tensor("end", &[4], WeightType::F16, vec![3; 8]);
    let mut file = Vec::new();
    writer.write(&mut file).unwrap();
    // The last entry of the header: name, count of axes, one axis, type, offset.
    let header_len = file.windows(3).position(|bytes| bytes == b"end").unwrap() + 3 + 4 + 8 + 4 + 8;
    (file, header_len)
}

#[test]
fn truncated_at_every_byte() {
    let (file, header_len) = valid();
    checkpoint::from_bytes("whole", file.clone()).unwrap();
    for len in 0..file.len() {
        let result = checkpoint::from_bytes("cut", file[..len].to_vec());
        // The last tensor is followed by padding, which may be missing.
        let needed = file.len() - 64 + 8;
        assert_eq!(result.is_err(), len < needed, "{len} of {} bytes, header {header_len}", file.len());
    }
}

/// What opening the file of [`valid`] may allocate, changed or not: a few times its header's length of 500 bytes.
const LIMIT: usize = 10_000;

#[test]
fn every_header_byte_changed() {
    let (file, header_len) = valid();
    for i in 0..header_len {
        for byte in [0, 1, 0x7f, 0x80, 0xff, file[i].wrapping_add(1), file[i].wrapping_sub(1)] {
            let mut changed = file.clone();
            changed[i] = byte;
            let peak = peak_bytes(|| touch(changed));
            assert!(peak < LIMIT, "byte {i} = {byte}: {peak} bytes allocated");
        }
    }
}

/// Eight bytes at a time, as counts and lengths are.
#[test]
fn every_header_word_changed() {
    let (file, header_len) = valid();
    for i in 0..header_len - 8 {
        for word in [0, 1, 1 << 16, 1 << 31, 1 << 32, 1 << 40, 1 << 61, 1 << 63, u64::MAX / 8, u64::MAX] {
            let mut changed = file.clone();
            changed[i..i + 8].copy_from_slice(&word.to_le_bytes());
            let peak = peak_bytes(|| touch(changed));
            assert!(peak < LIMIT, "bytes {i}.. = {word}: {peak} bytes allocated");
        }
    }
}

/// A folder is read through JSON, whose values take more room than their text: still a few times the texts' 1.5 kB.
#[test]
fn every_byte_of_a_folder_changed() {
    let open = |config: &[u8], header: &[u8]| {
        let weights = safetensors(header.len() as u64, header, DATA);
        let files = vec![("config.json", config.to_vec()), ("model.safetensors", weights)];
        checkpoint::from_files("changed", files).map(|model| model.meta().iter().len() + model.tensors().len())
    };
    assert!(open(CONFIG.as_bytes(), HEADER.as_bytes()).is_ok());
    for (text, in_config) in [(CONFIG, true), (HEADER, false)] {
        for i in 0..text.len() {
            for byte in *b"\0 \"{}[],:-9e\xff" {
                let mut changed = text.as_bytes().to_vec();
                changed[i] = byte;
                let peak = peak_bytes(|| match in_config {
                    true => open(&changed, HEADER.as_bytes()),
                    false => open(CONFIG.as_bytes(), &changed),
                });
                assert!(peak < 3 * LIMIT, "byte {i} = {byte}: {peak} bytes allocated");
            }
        }
    }
}

/// The length of a header may say anything.
#[test]
fn every_length_of_a_folders_header() {
    for len in (0..64).map(|shift| 1 << shift).chain([0, 7, u64::MAX, 99_999_999, 100_000_001]) {
        let files = vec![("config.json", CONFIG.into()), ("model.safetensors", safetensors(len, HEADER, DATA))];
        let peak = peak_bytes(|| assert!(checkpoint::from_files("long", files).is_err()));
        assert!(peak < 3 * LIMIT, "{len}: {peak} bytes allocated");
    }
}

/// The last tensor ends with the file, so every byte is missed.
#[test]
fn a_folders_file_truncated_at_every_byte() {
    let whole = sized(HEADER, DATA);
    for len in 0..=whole.len() {
        let files = vec![("config.json", CONFIG.into()), ("model.safetensors", whole[..len].to_vec())];
        assert_eq!(checkpoint::from_files("cut", files).is_err(), len < whole.len(), "{len} of {}", whole.len());
    }
}

#[test]
fn the_allocator_counts() {
    assert_eq!(peak_bytes(|| drop((vec![0u8; 12345], Vec::<u8>::with_capacity(10)))), 12355);
}

/// Opens the file and, when that succeeds, reads all that it holds.
fn touch(file: Vec<u8>) -> usize {
    let Ok(model) = checkpoint::from_bytes("changed", file) else { return 0 };
    let meta: usize = model.meta().iter().map(|(key, value)| key.len() + value.to_string().len()).sum();
    let tensors: usize =
        model.tensors().iter().map(|tensor| model.bytes(tensor).iter().map(|&b| b as usize).sum::<usize>()).sum();
    meta + tensors
}

/// Counts the bytes that each thread has allocated and not freed.
struct Counted;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.get().saturating_add_unsigned(layout.size());
        LIVE.set(live);
        PEAK.set(PEAK.get().max(live));
        // SAFETY: the caller's promise about `layout`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get().saturating_sub_unsigned(layout.size()));
        // SAFETY: the caller's promise that `at` came from here with `layout`, so from the system's allocator.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs `work` and says how many bytes more than before this thread held at most.
fn peak_bytes<T>(work: impl FnOnce() -> T) -> usize {
    let before = LIVE.get();
    PEAK.set(before);
    work();
    PEAK.get().abs_diff(before)
}
