//! Folders made in memory, and what the fuzz target `folder` and its quick form under `cargo test` do with them.

#![allow(clippy::unwrap_used, dead_code)] // a panic is how both report; not every test uses all of it

/// A config with every kind of value, in which weights are quantized.
pub const CONFIG: &str = r#"{"model_type": "x", "n": 3, "eps": 1e-6, "names": ["a", "b"], "list": [1, 2.5], "odd": [1, null, {"x": 1}],
    "quantization": {"bits": 8, "group_size": 32, "b": {"bits": 4, "group_size": 64, "mode": "affine"}, "c": {"mode": "mxfp4"}},
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true, "weight_block_size": [128, 128]},
    "text_config": {"rope_parameters": {"theta": 10000}}}"#;

/// A header with every kind of weight, and one tensor that cannot be read. Its data has [`DATA`] bytes.
pub const HEADER: &str = r#"{"__metadata__":{"format":"mlx"},"a.weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},
    "b.weight":{"dtype":"U32","shape":[2,8],"data_offsets":[12,76]},"b.scales":{"dtype":"F16","shape":[2,1],"data_offsets":[76,80]},
    "b.biases":{"dtype":"F16","shape":[2,1],"data_offsets":[80,84]},"c.weight":{"dtype":"U32","shape":[2,4],"data_offsets":[84,116]},
    "c.scales":{"dtype":"U8","shape":[2,1],"data_offsets":[116,118]},"d_blocks":{"dtype":"U8","shape":[1,2,16],"data_offsets":[118,150]},
    "d_scales":{"dtype":"U8","shape":[1,2],"data_offsets":[150,152]},"e":{"dtype":"I64","shape":[1],"data_offsets":[152,160]},
    "f.weight":{"dtype":"F8_E4M3","shape":[2,128],"data_offsets":[160,416]},"f.weight_scale_inv":{"dtype":"F32","shape":[1,1],"data_offsets":[416,420]},
    "g.qweight":{"dtype":"I32","shape":[4,8],"data_offsets":[420,548]},"g.qzeros":{"dtype":"I32","shape":[1,1],"data_offsets":[548,552]},
    "g.scales":{"dtype":"F16","shape":[1,8],"data_offsets":[552,568]},"g.g_idx":{"dtype":"I32","shape":[32],"data_offsets":[568,696]}}"#;

/// Bytes behind the header of [`HEADER`].
pub const DATA: usize = 696;

/// A safetensors file whose first word says `len`, `n` zero bytes behind the header.
pub fn safetensors(len: u64, header: impl AsRef<[u8]>, n: usize) -> Vec<u8> {
    [&len.to_le_bytes()[..], header.as_ref(), &vec![0; n]].concat()
}

/// The same, with the header's own length.
pub fn sized(header: &str, n: usize) -> Vec<u8> {
    safetensors(header.len() as u64, header, n)
}

/// Opens a folder with one file of weights, and one with an index, which may fail; when it does not, reads all that the
/// folder holds.
pub fn exercise_folder(config: Vec<u8>, len: u64, header: Vec<u8>, index: Vec<u8>) {
    let weights = safetensors(len, header, DATA);
    let alone = vec![("config.json", config.clone()), ("model.safetensors", weights.clone())];
    let indexed =
        vec![("config.json", config), ("model-1.safetensors", weights), ("model.safetensors.index.json", index)];
    for files in [alone, indexed] {
        let model = match checkpoint::from_files("fuzz", files) {
            Ok(model) => model,
            Err(error) => {
                let names = |folder| error.to_string().replace(std::path::MAIN_SEPARATOR, "/").contains(folder);
                assert!(names("fuzz/") || names("fuzz: "), "{error}");
                continue;
            }
        };
        for (key, value) in model.meta().iter() {
            let _ = (value.to_string(), value.describe(), model.meta().u32s(key), model.meta().f32s(key));
        }
        if let Err(error) = model.hold_repacked() {
            assert!(error.to_string().contains("fuzz"), "{error}");
            continue;
        }
        for tensor in model.tensors() {
            let row = tensor.shape.last().unwrap();
            let rows = tensor.shape.iter().product::<usize>() / row;
            let each = tensor.dtype.plane_bytes(*row).unwrap();
            assert_eq!(
                (each.times(rows).unwrap(), each.total() * rows),
                (model.planes(tensor).len(), tensor.total_bytes())
            );
        }
        for other in model.unreadable() {
            assert!(model.find(&other.name).is_err() && model.tensor(&other.name).is_none());
        }
    }
}
