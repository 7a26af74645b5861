//! What the writer writes, the reader reads; and what the writer and the getters refuse.

use checkpoint::gguf::Writer;
use checkpoint::{Checkpoint, Error, Strings, Value};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use quant::WeightType;

fn read(writer: &Writer) -> Checkpoint {
    let mut file = Vec::new();
    writer.write(&mut file).unwrap();
    checkpoint::from_bytes("made", file).unwrap()
}

/// Single floats are finite, because they are compared with `==`; arrays compare by their bits.
fn value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        any::<u8>().prop_map(Value::from),
        any::<i8>().prop_map(Value::from),
        any::<u16>().prop_map(Value::from),
        any::<i16>().prop_map(Value::from),
        any::<u32>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        (-1e30f32..1e30).prop_map(Value::from),
        (-1e300..1e300).prop_map(Value::from),
        vec(any::<u8>(), 0..40).prop_map(|text| Value::from(&text[..])),
    ];
    let array = prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(Value::from),
        vec(any::<i8>(), 0..9).prop_map(Value::from),
        vec(any::<u16>(), 0..9).prop_map(Value::from),
        vec(any::<i16>(), 0..9).prop_map(Value::from),
        vec(any::<u32>(), 0..9).prop_map(Value::from),
        vec(any::<i32>(), 0..9).prop_map(Value::from),
        vec(any::<u64>(), 0..9).prop_map(Value::from),
        vec(any::<i64>(), 0..9).prop_map(Value::from),
        vec(any::<f32>(), 0..9).prop_map(Value::from),
        vec(any::<f64>(), 0..9).prop_map(Value::from),
        vec(any::<bool>(), 0..9).prop_map(Value::from),
        vec(vec(any::<u8>(), 0..20), 0..20).prop_map(|texts| Value::from(texts.iter().collect::<Strings>())),
    ];
    let nested = array.clone().prop_recursive(3, 12, 4, |inner| vec(inner, 0..4).prop_map(Value::Nested));
    prop_oneof![scalar, array, nested]
}

#[derive(Clone, Debug)]
struct Tensor {
    shape: Vec<usize>,
    dtype: WeightType,
    fill: u8,
}

impl Tensor {
    fn bytes(&self) -> Vec<u8> {
        let (row, outer) = self.shape.split_last().unwrap();
        vec![self.fill; outer.iter().product::<usize>() * self.dtype.row_bytes(*row).unwrap()]
    }
}

fn tensor() -> impl Strategy<Value = Tensor> {
    let dtype = prop::sample::select(WeightType::GGUF.to_vec());
    (vec(1usize..4, 0..4), 1usize..4, dtype, any::<u8>()).prop_map(|(mut shape, n_block, dtype, fill)| {
        shape.push(n_block * dtype.block_len());
        Tensor { shape, dtype, fill }
    })
}

proptest! {
    #[test]
    fn written_is_read(
        version in 2u32..4,
        alignment in prop::option::of(3u32..13),
        entries in btree_map("[a-z.]{1,20}|\\PC{1,20}", value(), 0..12),
        tensors in btree_map("[a-z0-9.]{1,64}", tensor(), 0..12),
    ) {
        let mut writer = Writer::new();
        writer.version(version);
        if let Some(alignment) = alignment {
            writer.alignment(1 << alignment);
        }
        for (key, value) in &entries {
            writer.meta(key, value.clone());
        }
        for (name, tensor) in &tensors {
            writer.tensor(name, &tensor.shape, tensor.dtype, tensor.bytes());
        }
        let model = read(&writer);

        let skip = usize::from(alignment.is_some()); // the writer's own key comes first
        let found: Vec<_> = model.meta().iter().skip(skip).collect();
        let wanted: Vec<_> = entries.iter().map(|(key, value)| (key.as_str(), value)).collect();
        prop_assert_eq!(&found, &wanted);
        prop_assert_eq!(model.tensors().len(), tensors.len());
        for (name, tensor) in &tensors {
            let info = model.tensor(name).unwrap();
            prop_assert_eq!(&info.shape, &tensor.shape);
            prop_assert_eq!(info.dtype, tensor.dtype);
            let bytes = model.bytes(info);
            prop_assert_eq!(bytes, &tensor.bytes()[..]);
            prop_assert_eq!(bytes.as_ptr().addr() % (1usize << alignment.unwrap_or(5).min(6)), 0);
        }
    }
}

/// Tensors whose bytes come behind the header, in pieces, make the same file; what is too long, too short or missing
/// makes none.
#[test]
fn streams_write_the_same_file() {
    let tensors =
        [("a", vec![3], WeightType::F32), ("b", vec![2, 64], WeightType::Q8_0), ("c", vec![1], WeightType::F16)];
    let bytes = |t: usize| -> Vec<u8> { (0..[12, 136, 2][t]).map(|i| (i * 7 + t) as u8).collect() };
    let (mut whole, mut wanted) = (Writer::new(), Vec::new());
    let mut announced = Writer::new();
    for (t, (name, shape, dtype)) in tensors.iter().enumerate() {
        whole.meta(name, t as u32).tensor(name, shape, *dtype, bytes(t));
        announced.meta(name, t as u32).announce(name, shape, *dtype);
    }
    whole.write(&mut wanted).unwrap();
    for piece in [1, 5, 1000] {
        let mut stream = announced.start(Vec::new()).unwrap();
        for t in 0..3 {
            bytes(t).chunks(piece).for_each(|piece| stream.write(piece).unwrap());
        }
        assert_eq!(stream.finish().unwrap(), wanted, "pieces of {piece}");
    }
    let mut stream = announced.start(Vec::new()).unwrap();
    assert_eq!(
        stream.write(&[0; 13]).unwrap_err().to_string(),
        "failed to write GGUF: tensor 0: 13 bytes for the last 12"
    );
    stream.write(&[0; 12]).unwrap();
    assert!(stream.finish().unwrap_err().to_string().contains("ends in tensor 1 of 3"));
    assert!(announced.write(&mut Vec::new()).unwrap_err().to_string().contains("tensor a: has no bytes"));
}

#[test]
fn writer_refuses() {
    let cases: [(fn(&mut Writer), &str); 15] = [
        (|w| _ = w.version(1), "version 1: versions 2 and 3 are written"),
        (|w| _ = w.alignment(12), "alignment 12: a power of two from 8 to 1048576 wanted"),
        (|w| _ = w.meta("general.alignment", 64u32), "key general.alignment: is set by alignment() alone"),
        (|w| _ = w.meta("", 1u8), "key : is 0 bytes long, 1 to 65535 are allowed"),
        (|w| _ = w.meta("k", 1u8).meta("k", 2u8), "key k: is added twice"),
        (|w| _ = w.meta("k", Value::Nested(vec![1u8.into()])), "key k: u8 1 is in an array of arrays"),
        (|w| _ = w.meta("k", (0..4).fold(vec![1u8].into(), |v, _| Value::Nested(vec![v]))), "nest more than 4 deep"),
        (|w| _ = w.tensor("", &[1], WeightType::F32, vec![0; 4]), "name is 0 bytes long, 1 to 64 are allowed"),
        (|w| _ = w.tensor(&"n".repeat(65), &[1], WeightType::F32, vec![0; 4]), "name is 65 bytes long"),
        (|w| _ = w.tensor("a", &[], WeightType::F32, vec![]), "tensor a: shape []: 1 to 4 axes wanted"),
        (|w| _ = w.tensor("a", &[2, 0], WeightType::F32, vec![]), "tensor a: shape [2, 0]: 1 to 4 axes wanted"),
        (|w| _ = w.tensor("a", &[2, 4], WeightType::F32, vec![0; 31]), "given 31 bytes, f32 [2, 4] needs 32"),
        (
            |w| _ = w.tensor("a", &[32], WeightType::MXFP4_PLANAR, vec![0; 16]),
            "tensor a: GGUF has no type mxfp4_planar",
        ),
        (|w| _ = w.tensor("a", &[100], WeightType::Q4_K, vec![]), "given 0 bytes, q4_k [100] cannot be encoded"),
        (
            |w| _ = w.tensor("a", &[1], WeightType::F32, vec![0; 4]).tensor("a", &[1], WeightType::F32, vec![0; 4]),
            "tensor a: is added twice",
        ),
    ];
    for (build, wanted) in cases {
        let (mut writer, mut file) = (Writer::new(), Vec::new());
        build(&mut writer);
        let error = writer.write(&mut file).unwrap_err().to_string();
        assert!(
            error.starts_with("failed to write GGUF: ") && error.contains(wanted),
            " found {error}\nwanted {wanted}"
        );
        assert!(file.is_empty(), "{wanted}");
    }
}

#[test]
fn full_disk() {
    struct Full;
    impl std::io::Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let error = Writer::new().write(&mut Full).unwrap_err();
    assert!(matches!(error, Error::Write { .. }), "{error}");
}

/// Each getter against values that fit and values that do not.
#[test]
fn getters() {
    let mut writer = Writer::new();
    writer.meta("u8", 7u8).meta("i64", -1i64).meta("u64", 1u64 << 40).meta("f32", 0.5f32).meta("f64", 0.25f64);
    writer.meta("nan", f32::NAN).meta("bool", true).meta("str", "text").meta("raw", &b"\xff"[..]);
    writer
        .meta("u16s", vec![1u16, 2])
        .meta("i32s", vec![-1i32, 2])
        .meta("f64s", vec![0.5f64])
        .meta("bools", vec![true]);
    writer.meta("strs", vec!["a", "b"]).meta("none", Vec::<u8>::new());
    let model = read(&writer);
    let meta = model.meta();

    assert_eq!((meta.u32("u8").unwrap(), meta.u64("u64").unwrap(), meta.i32("i64").unwrap()), (7, 1 << 40, -1));
    assert_eq!((meta.f32("f32").unwrap(), meta.f32("f64").unwrap(), meta.bool("bool").unwrap()), (0.5, 0.25, true));
    assert_eq!((meta.str("str").unwrap(), meta.strings("strs").unwrap().get(1)), ("text", &b"b"[..]));
    assert_eq!((meta.u32s("u16s").unwrap(), meta.i32s("i32s").unwrap()), (vec![1, 2], vec![-1, 2]));
    assert_eq!((meta.f32s("f64s").unwrap(), meta.bools("bools").unwrap()), (vec![0.5], vec![true]));
    assert_eq!((meta.f32s("none").unwrap(), meta.opt_u32("gone").unwrap()), (vec![], None));

    for (error, wanted) in [
        (meta.u32("gone").err(), "failed to read made: key gone: missing, expected u32"),
        (meta.strings("gone").err(), "failed to read made: key gone: missing, expected array of str"),
        (meta.u32("i64").err(), "failed to read made: key i64: found i64 -1, expected u32"),
        (meta.opt_u32("u64").err(), "failed to read made: key u64: found u64 1099511627776, expected u32"),
        (meta.u32("f32").err(), "failed to read made: key f32: found f32 0.5, expected u32"),
        (meta.u32("bool").err(), "failed to read made: key bool: found bool true, expected u32"),
        (meta.f32("nan").err(), "failed to read made: key nan: found f32 NaN, expected finite f32"),
        (meta.f32("bool").err(), "failed to read made: key bool: found bool true, expected finite f32"),
        (meta.bool("u8").err(), "failed to read made: key u8: found u8 7, expected bool"),
        (meta.str("raw").err(), "failed to read made: key raw: found str \"\u{fffd}\", expected UTF-8 str"),
        (meta.str("strs").err(), "failed to read made: key strs: found array of 2 str, expected UTF-8 str"),
        (meta.strings("str").err(), "failed to read made: key str: found str \"text\", expected array of str"),
        (meta.u32s("i32s").err(), "failed to read made: key i32s: found array of 2 i32, expected array of u32"),
        (meta.f32s("strs").err(), "failed to read made: key strs: found array of 2 str, expected array of f32"),
    ] {
        assert_eq!(error.unwrap().to_string(), wanted);
    }
}

#[test]
fn values_print() {
    for (value, wanted) in [
        (Value::from(1.5f32), "1.5"),
        (Value::from("two\nlines"), r#""two\nlines""#),
        (Value::from(vec![1u8, 2]), "[1, 2]"),
        (Value::from(vec!["a", "b", "c", "d", "e"]), r#"["a", "b", "c", "d", … 5 in all]"#),
        (Value::Nested(vec![vec![1u8].into(), vec!["x"].into()]), r#"[[1], ["x"]]"#),
        (Value::from("x".repeat(81).as_str()), &format!("\"{}…\"", "x".repeat(80))),
    ] {
        assert_eq!(value.to_string(), wanted);
    }
}
