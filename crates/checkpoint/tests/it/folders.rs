//! Model folders: what is read of them, and what their files may lie about without harm.

use std::fs;
use std::path::Path;

use crate::exercise_folder::{safetensors, sized};
use checkpoint::{Checkpoint, Kind, Value};
use quant::{Affine, ScaleType, WeightType};

/// A folder of one file of weights with this header, `n` bytes of data behind it.
fn weights(header: &str, n: usize) -> Result<Checkpoint, checkpoint::Error> {
    folder(r#"{"model_type": "x"}"#, header, n)
}

fn folder(config: &str, header: &str, n: usize) -> Result<Checkpoint, checkpoint::Error> {
    let files = vec![("config.json", config.into()), ("model.safetensors", sized(header, n))];
    checkpoint::from_files("here", files)
}

fn message<T>(result: Result<T, checkpoint::Error>) -> String {
    result.err().map_or_else(|| "no error".into(), |error| slashes(&error.to_string()))
}

/// A text with paths as other systems than Windows write them.
fn slashes(text: &str) -> String {
    text.replace(std::path::MAIN_SEPARATOR, "/")
}

#[test]
fn config() {
    let text = r#"{"model_type": "whole", "none": null, "dot.ted": 1, "eps": 1e-6, "theta": 10000, "big": 18446744073709551615,
        "rope": {"factor": 2, "inner": {"on": true}}, "layers": ["a", "b"], "ints": [1, -2], "mixed": [1, 2.5], "empty": [],
        "flags": [true, false], "pairs": [[1, 2], [3, 4]], "objects": [{"x": 1}, {"x": 2}], "odd": [1, "two", null, 4],
        "text_config": {"model_type": "part", "hidden_size": 8, "rope": {"base": 3}, "sizes": {"a": 4}}}"#;
    let model = folder(text, "{}", 0).unwrap();
    let meta = model.meta();
    assert_eq!((model.kind(), slashes(meta.file())), (Kind::Hf, "here/config.json".into()));
    let (i64s, f64s): (fn(i64) -> Value, fn(Vec<f64>) -> Value) = (Value::from, Value::from);
    for (key, wanted) in [
        ("model_type", Value::from("whole")),
        ("dot.ted", i64s(1)),
        ("eps", Value::from(1e-6)),
        ("theta", i64s(10000)),
        ("big", Value::from(u64::MAX)),
        ("rope.factor", i64s(2)),
        ("rope.inner.on", Value::from(true)),
        ("layers", Value::from(vec!["a", "b"])),
        ("ints", Value::from(vec![1i64, -2])),
        ("mixed", f64s(vec![1.0, 2.5])),
        ("empty", Value::from(Vec::<&str>::new())),
        ("flags", Value::from(vec![true, false])),
        ("pairs", Value::Nested(vec![vec![1i64, 2].into(), vec![3i64, 4].into()])),
        ("objects.0.x", i64s(1)),
        ("objects.1.x", i64s(2)),
        ("odd.0", i64s(1)),
        ("odd.1", Value::from("two")),
        ("odd.3", i64s(4)),
        ("text_config.model_type", Value::from("part")),
        ("text_config.rope.base", i64s(3)),
        ("hidden_size", i64s(8)),
        ("sizes.a", i64s(4)),
    ] {
        assert_eq!(meta.get(key), Some(&wanted), "{key}");
    }
    for key in ["none", "rope.base", "odd", "odd.2", "objects", "text_config", "rope"] {
        assert_eq!(meta.get(key), None, "{key}");
    }
    assert_eq!((meta.f32("theta").unwrap(), meta.f32("eps").unwrap()), (10000.0, 1e-6));
    assert_eq!(message(meta.u32("gone")), "failed to read here/config.json: key gone: missing, expected u32");
    assert_eq!(
        message(meta.u32("layers")),
        "failed to read here/config.json: key layers: found array of 2 str, expected u32"
    );
}

#[test]
fn numbers_as_python_writes_them() {
    let text = r#"{"limit": [0, Infinity], "low": -Infinity, "none": NaN, "word": "NaN"}"#;
    let model = folder(text, "{}", 0).unwrap();
    let meta = model.meta();
    assert_eq!(meta.f32s("limit").unwrap(), [0.0, f32::INFINITY]);
    assert_eq!(meta.get("low"), Some(&Value::from(f64::NEG_INFINITY)));
    assert!(matches!(meta.get("none"), Some(Value::F64(v)) if v.is_nan()));
    assert_eq!(meta.get("word"), Some(&Value::from("NaN")));
    assert_eq!(
        message(meta.f32("low")),
        "failed to read here/config.json: key low: found f64 -inf, expected finite f32"
    );
}

#[test]
fn bad_configs() {
    let deep = |n: usize| format!("{}1{}", r#"{"a":"#.repeat(n), "}".repeat(n));
    let (long, many) = ("k".repeat(513), format!(r#"{{"a": [{}1]}}"#, "1,".repeat(100_000)));
    for (text, wanted) in [
        ("", "failed to open here/config.json: EOF while parsing a value at line 1 column 0"),
        ("[1]", "failed to open here/config.json: invalid type: sequence, expected an object"),
        ("{\"a\": 1", "failed to open here/config.json: EOF while parsing an object"),
        ("{\"a\": 1} x", "failed to open here/config.json: trailing characters"),
        ("{\"a\": NAN}", "failed to open here/config.json: expected value"),
        ("{\"a\": - Infinity}", "failed to open here/config.json: invalid number"),
        ("{\"a\": 1e999}", "failed to open here/config.json: number out of range"),
        ("{\"a\": 1, \"a\": 2}", "failed to open here/config.json: key a: is in the file twice"),
        ("{\"a.b\": 1, \"a\": {\"b\": 2}}", "failed to open here/config.json: key a.b: is in the file twice"),
        ("{\"\": 1}", "failed to open here/config.json: a key is empty"),
        (&deep(9), "failed to open here/config.json: key a.a.a.a.a.a.a.a.a: nests more than 8 deep"),
        (&deep(5000), "nests more than 8 deep"),
        (&format!("{{\"{long}\": 1}}"), "is 513 bytes long, at most 512 are allowed"),
        (&many, "failed to open here/config.json: key a.100000: comes after 100000 others, the maximum"),
    ] {
        let found = message(folder(text, "{}", 0));
        assert!(found.contains(&slashes(wanted)), "found {found}\nwanted {wanted}");
    }
    assert_eq!(message(folder(&deep(8), "{}", 0)), "no error");
}

const F32: &str = r#""dtype":"F32","shape":"#;

#[test]
fn bad_headers() {
    let one = |shape: &str, offsets: &str| format!(r#"{{"a":{{{F32}{shape},"data_offsets":{offsets}}}}}"#);
    let two = |first: &str, second: &str| {
        format!(r#"{{"a":{{{F32}[4],"data_offsets":{first}}},"b":{{{F32}[4],"data_offsets":{second}}}}}"#)
    };
    let twice = format!(r#"{{"a":{{{F32}[4],"data_offsets":[0,16]}},"a":{{{F32}[4],"data_offsets":[16,32]}}}}"#);
    let name = "n".repeat(257);
    for (header, wanted) in [
        (String::new(), "failed to open here/model.safetensors: header: EOF while parsing a value"),
        ("[]".into(), "header: invalid type: sequence, expected an object"),
        ("{\"a\":1}".into(), "header: tensor a: invalid type: integer `1`"),
        ("{\"a\":{}}".into(), "header: tensor a: missing field `dtype`"),
        (one("[-1]", "[0,4]"), "header: tensor a: invalid value: integer `-1`, expected u64"),
        (one("[1.5]", "[0,4]"), "header: tensor a: invalid type: floating point `1.5`, expected u64"),
        (one("[1]", "[0]"), "header: tensor a: invalid length 1, expected an array of length 2"),
        (one("[1]", "[0,4,8]"), "header: tensor a: trailing characters"),
        (format!("{{\"{name}\":{{}}}}"), "is 257 bytes long, 1 to 256 are allowed"),
        ("{\"\":{}}".into(), "name \"\" is 0 bytes long, 1 to 256 are allowed"),
        (twice, "tensor a: is in the file twice"),
        (one("[4]", "[16,0]"), "tensor a: begins at byte 16 of the data and ends at 0"),
        (one("[4]", "[56,72]"), "tensor a: file holds 64 bytes of data, F32 [4] ends at 72"),
        (one("[4]", "[0,18446744073709551615]"), "file holds 64 bytes of data, F32 [4] ends at 18446744073709551615"),
        (one("[4]", "[0,20]"), "tensor a: its offsets hold 20 bytes, F32 [4] needs 16"),
        (one("[2,3]", "[0,20]"), "tensor a: its offsets hold 20 bytes, F32 [2, 3] needs 24"),
        (one("[1,1,1,1,1,1,1,1,1]", "[0,4]"), "tensor a: has 9 axes, at most 8 are allowed"),
        (one("[18446744073709551615,2]", "[0,4]"), "shape [18446744073709551615, 2] has too many elements for F32"),
        (two("[0,16]", "[12,28]"), "tensor b: shares bytes with tensor a"),
        (two("[32,48]", "[32,48]"), "shares bytes with tensor"),
    ] {
        let found = message(weights(&header, 64));
        assert!(found.contains(&slashes(wanted)), "found {found}\nwanted {wanted}");
        assert!(found.contains("failed to open here/model.safetensors: "), "{found}");
    }
    for (bytes, wanted) in [
        (vec![], "length of the header needs 8 bytes, the file holds 0"),
        (vec![1; 7], "length of the header needs 8 bytes, the file holds 7"),
        (safetensors(1 << 40, "{}", 0), "header is 1099511627776 bytes long, at most 100000000 are allowed"),
        (safetensors(100, "{}", 8), "header is 100 bytes long, 10 are left in the file"),
        (safetensors(1, "{}", 8), "header: EOF while parsing an object"),
    ] {
        let found =
            message(checkpoint::from_files("here", vec![("config.json", b"{}".into()), ("model.safetensors", bytes)]));
        assert!(found.contains(&slashes(wanted)), "found {found}\nwanted {wanted}");
    }
}

#[test]
fn odd_but_good_headers() {
    let (odd, n) = (
        r#"{"__metadata__":{"format":"pt","more":"x"},"i":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},
            "new":{"dtype":"F2","shape":[3],"data_offsets":[16,17]},"scalar":{"dtype":"F32","shape":[],"data_offsets":[17,21]},
            "empty":{"dtype":"F32","shape":[0,4],"data_offsets":[21,21]},"f4":{"dtype":"F4","shape":[3],"data_offsets":[21,23]},
            "conv":{"dtype":"BF16","shape":[1,1,1,1,1,1],"data_offsets":[23,25]},
            "gap":{"dtype":"F16","shape":[1,2],"data_offsets":[27,31]}}"#,
        40,
    );
    let model = weights(odd, n).unwrap();
    assert_eq!(model.tensors().iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["scalar", "gap"]);
    let of = |i: usize| (&model.tensors()[i].shape[..], model.bytes(&model.tensors()[i]).len());
    assert_eq!((of(0), of(1), model.data_bytes()), ((&[1][..], 4), (&[1, 2][..], 4), 8));
    for (name, wanted) in [
        ("i", "failed to read here/model.safetensors: tensor i: type I64 is not supported"),
        ("new", "failed to read here/model.safetensors: tensor new: type F2 is not supported"),
        ("f4", "tensor f4: type F4 is not supported"),
        ("empty", "tensor empty: shape [0, 4] is not supported: up to 5 axes, none of them 0"),
        ("conv", "tensor conv: shape [1, 1, 1, 1, 1, 1] is not supported"),
    ] {
        let found = message(model.find(name));
        assert!(found.contains(&slashes(wanted)), "found {found}\nwanted {wanted}");
    }
    assert_eq!(model.unreadable().len(), 5);
}

/// A file of one f32 tensor of that name.
fn shard(name: &str) -> Vec<u8> {
    sized(&format!(r#"{{"{name}":{{{F32}[2],"data_offsets":[0,8]}}}}"#), 8)
}

#[test]
fn indexes() {
    let open = |index: &str| {
        let files = vec![
            ("config.json", b"{}".to_vec()),
            ("one.safetensors", shard("a")),
            ("two.safetensors", shard("b")),
            ("again.safetensors", shard("a")),
            ("short.safetensors", shard("c")[..67].to_vec()),
            ("model.safetensors.index.json", index.into()),
        ];
        checkpoint::from_files("here", files)
    };
    let model =
        open(r#"{"metadata":{"total_size":16},"weight_map":{"b":"two.safetensors","a":"one.safetensors"}}"#).unwrap();
    assert_eq!(
        model.files().iter().map(|f| slashes(f.path().to_str().unwrap())).collect::<Vec<_>>(),
        ["here/one.safetensors", "here/two.safetensors"]
    );
    assert_eq!((model.tensor("a").unwrap().file, model.tensor("b").unwrap().file), (0, 1));
    for (map, wanted) in [
        (
            r#""a":"gone.safetensors""#,
            "failed to open here/model.safetensors.index.json: file gone.safetensors is missing in the folder",
        ),
        (r#""a":"../one.safetensors""#, "file ../one.safetensors is not the name of a file in the folder"),
        (r#""a":"/etc/passwd""#, "file /etc/passwd is not the name of a file in the folder"),
        (r#""a":"..""#, "file .. is not the name of a file in the folder"),
        (r#""a":"C:\\one""#, "file C:\\one is not the name of a file in the folder"),
        (r#""a":"""#, "is not the name of a file in the folder"),
        ("", "failed to open here/model.safetensors.index.json: names 0 files, 1 to 4096 are allowed"),
        (r#""a":1"#, "tensor a: invalid type: integer `1`, expected a string"),
        (r#""a":"two.safetensors""#, "index.json: tensor a: is missing in two.safetensors"),
        (r#""a":"one.safetensors","x":"one.safetensors""#, "index.json: tensor x: is missing in one.safetensors"),
        (r#""a":"one.safetensors","a":"two.safetensors""#, "index.json: tensor a: is missing in two.safetensors"),
        (r#""a":"one.safetensors","b":"again.safetensors""#, "index.json: tensor b: is missing in again.safetensors"),
        (r#""c":"short.safetensors""#, "here/short.safetensors: tensor c: file holds"),
    ] {
        let found = message(open(&format!(r#"{{"weight_map":{{{map}}}}}"#)));
        assert!(found.contains(&slashes(wanted)), "found {found}\nwanted {wanted}");
    }
    assert!(message(open("{}")).contains("index.json: missing field `weight_map`"));
    let doubled = r#"{"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#;
    let files = vec![
        ("config.json", b"{}".to_vec()),
        ("one.safetensors", shard("a")),
        ("two.safetensors", {
            let two = format!(r#"{{"a":{{{F32}[2],"data_offsets":[0,8]}},"b":{{{F32}[2],"data_offsets":[8,16]}}}}"#);
            sized(&two, 16)
        }),
        ("model.safetensors.index.json", doubled.into()),
    ];
    assert_eq!(
        message(checkpoint::from_files("here", files)),
        "failed to open here/two.safetensors: tensor a: is in here/one.safetensors too"
    );
}

#[test]
fn folders_that_lack_files() {
    let open = |files: Vec<(&str, Vec<u8>)>| message(checkpoint::from_files("here", files));
    assert_eq!(open(vec![]), "failed to open here: is a folder without config.json");
    assert_eq!(
        open(vec![("config.json", b"{}".into())]),
        "failed to open here: has neither model.safetensors nor model.safetensors.index.json"
    );
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
    let with = |name, bytes: &[u8]| vec![("config.json", b"{}".to_vec()), (name, bytes.to_vec())];
    for (files, said) in [
        (vec![("config.json", lfs.to_vec())], "config.json: holds no text (it is a pointer of Git LFS"),
        (with("model.safetensors", lfs), "(it is a pointer of Git LFS: `git lfs pull` fetches the file)"),
        (with("model.safetensors", b"<!doctype html>"), "(it is a web page: the download went wrong)"),
        (with("model-00001-of-00002.safetensors", &shard("a")), "model-00002-of-00002.safetensors is missing in"),
    ] {
        let found = open(files);
        assert!(found.contains(said), "{found}");
    }
}

/// Files that their names number need no index.
#[test]
fn numbered_files_open() {
    let one = vec![("config.json", b"{}".to_vec()), ("model-00001-of-00001.safetensors", shard("a"))];
    assert_eq!(checkpoint::from_files("here", one).unwrap().tensors().len(), 1);
    let two = ["1", "2"].map(|i| format!("model-0000{i}-of-00002.safetensors"));
    let files = vec![("config.json", b"{}".to_vec()), (two[0].as_str(), shard("a")), (&two[1], shard("b"))];
    let names: Vec<_> =
        checkpoint::from_files("here", files).unwrap().tensors().iter().map(|t| t.name.to_string()).collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn side_files() {
    let files = vec![
        ("config.json", b"{}".to_vec()),
        ("model.safetensors", sized("{}", 0)),
        ("tokenizer.json", "{\"ä\": 1}".into()),
        ("chat_template.jinja", b"{{ \xff }}".to_vec()),
    ];
    let model = checkpoint::from_files("here", files).unwrap();
    let found = model.side_file("tokenizer.json").unwrap().unwrap();
    assert_eq!((&*slashes(found.name()), found.text()), ("here/tokenizer.json", "{\"ä\": 1}"));
    assert!(model.side_file("generation_config.json").unwrap().is_none());
    for (name, wanted) in [
        ("chat_template.jinja", "failed to open here/chat_template.jinja: is not UTF-8 at byte 3"),
        ("../tokenizer.json", "failed to open here/../tokenizer.json: is not the name of a file in the folder"),
    ] {
        assert_eq!(message(model.side_file(name)), wanted);
    }
}

#[test]
fn modules_have_weights_and_settings_in_folders() {
    let files = vec![
        ("config.json", b"{}".to_vec()),
        ("model.safetensors", shard("a")),
        ("1_Pooling/config.json", b"{}".to_vec()),
        ("3_Dense/model.safetensors", shard("linear.weight")),
        ("3_Dense/config.json", b"[]".to_vec()),
        ("4_Dense/model.safetensors", shard("linear.weight")),
    ];
    let model = checkpoint::from_files("here", files.clone()).unwrap();
    let names: Vec<&str> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["a", "3_Dense.linear.weight"]);
    let file = |name: &str| model.side_file(name).unwrap();
    assert_eq!(file("3_Dense/config.json").unwrap().text(), "[]");
    assert!(file("1_Pooling/config.json").is_some() && file("2_Dense/config.json").is_none());
    assert!(message(model.side_file("4_Dense/config.json")).ends_with("is not the name of a file in the folder"));
    // Files of modules are as hostile as others.
    let mut files = files;
    files[3].1.truncate(5);
    assert!(message(checkpoint::from_files("here", files)).contains("3_Dense"));
}

#[test]
fn paths_that_mean_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("config.json"), r#"{"quantization": {"bits": 4, "group_size": 64}}"#).unwrap();
    fs::write(at("model-00001-of-00001.safetensors"), shard("a")).unwrap();
    fs::write(at("model.safetensors.index.json"), r#"{"weight_map":{"a":"model-00001-of-00001.safetensors"}}"#)
        .unwrap();
    fs::write(at("tokenizer.json"), "{}").unwrap();
    for name in ["", "config.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors"] {
        let model = checkpoint::open(&at(name)).unwrap();
        assert_eq!((model.kind(), model.tensors().len()), (Kind::Mlx, 1), "{name}");
        assert_eq!(model.bytes(&model.tensors()[0]), [0; 8]);
        assert!(model.side_file("tokenizer.json").unwrap().is_some());
        assert!(model.side_file("chat_template.jinja").unwrap().is_none());
    }
    fs::remove_file(at("tokenizer.json")).unwrap();
    fs::create_dir(at("tokenizer.json")).unwrap();
    let error = checkpoint::open(folder.path()).unwrap().side_file("tokenizer.json").unwrap_err();
    assert!(error.to_string().ends_with("tokenizer.json: not a regular file"), "{error}");
    fs::remove_file(at("model-00001-of-00001.safetensors")).unwrap();
    assert!(message(checkpoint::open(folder.path())).ends_with("is missing in the folder"));
    assert!(Path::new("config.json").parent().is_some_and(|parent| parent == Path::new("")));
}

/// One weight in parts: `w` words a row, two rows.
fn packed(w: usize, scales: (&str, &str, usize), biases: Option<(&str, &str, usize)>) -> (String, usize) {
    let mut n = 8 * w;
    let mut header = format!(r#"{{"m.x.weight":{{"dtype":"U32","shape":[2,{w}],"data_offsets":[0,{n}]}}"#);
    let mut add = |name: &str, (dtype, shape, len): (&str, &str, usize)| {
        let part = format!(r#","m.x.{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{n},{}]}}"#, n + len);
        header += &part;
        n += len;
    };
    add("scales", scales);
    biases.into_iter().for_each(|biases| add("biases", biases));
    (header + "}", n)
}

#[test]
fn quantised() {
    let affine = |bits, group, scales| WeightType::Affine(Affine::new(bits, group, scales).unwrap());
    let bf16 = |groups: usize| ("BF16", if groups == 1 { "[2,1]" } else { "[2,2]" }, 4 * groups);
    let all = r#""bits": 4, "group_size": 64"#;
    // Words a row, scales, biases, what the config says, type and columns.
    for (w, scales, biases, said, wanted) in [
        (8, bf16(1), Some(bf16(1)), all, (affine(4, 64, ScaleType::BF16), 64)),
        (
            16,
            bf16(2),
            Some(bf16(2)),
            r#""bits": 4, "group_size": 64, "mode": "affine""#,
            (affine(4, 64, ScaleType::BF16), 128),
        ),
        (16, bf16(2), Some(bf16(2)), r#""bits": 8, "group_size": 32"#, (affine(8, 32, ScaleType::BF16), 64)),
        (
            12,
            ("F16", "[2,1]", 4),
            Some(("F16", "[2,1]", 4)),
            r#""bits": 3, "group_size": 128"#,
            (affine(3, 128, ScaleType::F16), 128),
        ),
        (
            12,
            ("F32", "[2,2]", 16),
            Some(("F32", "[2,2]", 16)),
            r#""bits": 6, "group_size": 32"#,
            (affine(6, 32, ScaleType::F32), 64),
        ),
        (
            8,
            ("U8", "[2,2]", 4),
            None,
            r#""bits": 4, "group_size": 32, "mode": "mxfp4""#,
            (WeightType::MXFP4_PLANAR, 64),
        ),
        // What holds for the module goes before what holds for all, and is complete.
        (
            16,
            bf16(1),
            Some(bf16(1)),
            r#""bits": 4, "group_size": 64, "m.x": {"bits": 8}"#,
            (affine(8, 64, ScaleType::BF16), 64),
        ),
        (
            8,
            bf16(1),
            Some(bf16(1)),
            r#""bits": 4, "group_size": 32, "mode": "mxfp4", "m.x": {"group_size": 64}"#,
            (affine(4, 64, ScaleType::BF16), 64),
        ),
        (
            16,
            bf16(1),
            Some(bf16(1)),
            r#""bits": 4, "group_size": 64, "x": {"bits": 8}"#,
            (affine(8, 64, ScaleType::BF16), 64),
        ),
        (
            16,
            bf16(1),
            Some(bf16(1)),
            r#""bits": 4, "group_size": 64, "language_model.m.x": {"bits": 8}"#,
            (affine(8, 64, ScaleType::BF16), 64),
        ),
        (
            8,
            bf16(1),
            Some(bf16(1)),
            r#""bits": 4, "group_size": 64, "m.x": true"#,
            (affine(4, 64, ScaleType::BF16), 64),
        ),
        (
            8,
            bf16(1),
            Some(bf16(1)),
            r#""bits": 4, "group_size": 64, "m.y": false"#,
            (affine(4, 64, ScaleType::BF16), 64),
        ),
    ] {
        let (header, n) = packed(w, scales, biases);
        let model = folder(&format!(r#"{{"quantization": {{{said}}}}}"#), &header, n)
            .map_err(|e| format!("{said}: {e}"))
            .unwrap();
        let tensor = model.tensor("m.x.weight").unwrap();
        assert_eq!((model.kind(), model.tensors().len(), model.unreadable().len()), (Kind::Mlx, 1, 0));
        assert_eq!((tensor.dtype, &tensor.shape[..], model.data_bytes()), (wanted.0, &[2, wanted.1][..], n), "{said}");
        assert_eq!(model.planes(tensor).len(), tensor.dtype.plane_bytes(wanted.1).unwrap().times(2).unwrap());
    }
}

#[test]
fn blocks_of_mxfp4() {
    let header = r#"{"g_blocks":{"dtype":"U8","shape":[2,3,2,16],"data_offsets":[0,192]},"g_scales":{"dtype":"U8","shape":[2,3,2],"data_offsets":[192,204]}}"#;
    let model = weights(header, 204).unwrap();
    let tensor = model.tensor("g").unwrap();
    assert_eq!((model.kind(), tensor.dtype, &tensor.shape[..]), (Kind::Hf, WeightType::MXFP4_PLANAR, &[2, 3, 64][..]));
    assert_eq!((model.planes(tensor).q.len(), model.planes(tensor).scales.len()), (192, 12));
    let short = header.replace("[2,3,2],\"data_offsets\":[192,204]", "[2,3,1],\"data_offsets\":[192,198]");
    assert!(message(weights(&short, 204)).contains(
        "tensor g_blocks: 4 bits make 64 columns of U8 [2, 3, 2, 16], scales [2, 3, 1] in groups of 32 make 32"
    ));
}

#[test]
fn parts_that_do_not_fit() {
    let bf16 = ("BF16", "[2,1]", 4);
    let all = r#""bits": 4, "group_size": 64"#;
    for (w, scales, biases, said, wanted) in [
        (
            8,
            bf16,
            Some(bf16),
            r#""bits": 8, "group_size": 64"#,
            "failed to open here/model.safetensors: tensor m.x.weight: 8 bits make 32 columns of U32 [2, 8], scales \
             [2, 1] in groups of 64 make 64",
        ),
        (
            8,
            bf16,
            Some(bf16),
            r#""bits": 4, "group_size": 32"#,
            "4 bits make 64 columns of U32 [2, 8], scales [2, 1] in groups of 32 make 32",
        ),
        (8, bf16, Some(bf16), r#""bits": 4, "group_size": 4294967295"#, "in groups of 4294967295 make 4294967295"),
        (8, bf16, Some(bf16), r#""bits": 0, "group_size": 64"#, "rows of 8 u32 are no whole number of 0 bits"),
        (8, bf16, Some(bf16), r#""bits": 3, "group_size": 64"#, "rows of 8 u32 are no whole number of 3 bits"),
        (8, bf16, Some(bf16), r#""bits": 64, "group_size": 64"#, "rows of 8 u32 are no whole number of 64 bits"),
        (8, ("BF16", "[1,2]", 4), Some(bf16), all, "tensor m.x.weight: is U32 [2, 8], scales are BF16 [1, 2]"),
        (
            8,
            ("BF16", "[1,1]", 2),
            Some(("BF16", "[1,1]", 2)),
            all,
            "tensor m.x.weight: is U32 [2, 8], scales are BF16 [1, 1]",
        ),
        (8, ("BF16", "[]", 2), Some(("BF16", "[]", 2)), all, "tensor m.x.weight: is U32 [2, 8], scales are BF16 []"),
        (8, bf16, Some(("F16", "[2,1]", 4)), all, "tensor m.x.weight: biases are F16 [2, 1], scales BF16 [2, 1]"),
        (8, bf16, Some(bf16), "", "failed to read here/config.json: key quantization.bits: missing, expected u32"),
        (
            8,
            bf16,
            Some(bf16),
            r#""bits": "4""#,
            "failed to read here/config.json: key quantization.bits: found str \"4\", expected u32",
        ),
        (
            8,
            bf16,
            Some(bf16),
            r#""bits": 4"#,
            "failed to read here/config.json: key quantization.group_size: missing, expected u32",
        ),
        (
            8,
            bf16,
            Some(bf16),
            r#""m.x": {"bits": -1}"#,
            "failed to read here/config.json: key quantization.m.x.bits: found i64 -1, expected u32",
        ),
        (
            8,
            bf16,
            Some(bf16),
            r#""bits": 4, "m.x": false"#,
            "failed to open here/config.json: key quantization.m.x: is false, tensor m.x.scales says otherwise",
        ),
    ] {
        let (header, n) = packed(w, scales, biases);
        let found = message(folder(&format!(r#"{{"quantization": {{{said}}}}}"#), &header, n));
        assert!(found.contains(&slashes(wanted)), "found {found}\nwanted {wanted}");
    }
    // Sound, but of no type that can be run: no fault of the file's.
    for (w, scales, biases, said, wanted) in [
        (8, bf16, None, all, "affine of 4 bits in groups of 64, BF16 scales, shape [2, 64], is not supported"),
        (14, bf16, Some(bf16), r#""bits": 7, "group_size": 64"#, "affine of 7 bits in groups of 64"),
        (
            8,
            ("U8", "[2,4]", 8),
            None,
            r#""bits": 4, "group_size": 16, "mode": "nvfp4""#,
            "nvfp4 of 4 bits in groups of 16, U8 scales",
        ),
        (8, ("I64", "[2,1]", 16), Some(("I64", "[2,1]", 16)), all, "affine of 4 bits in groups of 64, I64 scales"),
    ] {
        let (header, n) = packed(w, scales, biases);
        let model = folder(&format!(r#"{{"quantization": {{{said}}}}}"#), &header, n).unwrap();
        let found = message(model.find("m.x.weight"));
        assert!(found.contains(&slashes(wanted)), "found {found}\nwanted {wanted}");
        assert_eq!((model.tensors().len(), model.unreadable().len()), (0, 1));
    }
}
