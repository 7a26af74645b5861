//! `convert --mmproj` end to end: image encoders of folders, against llama.cpp's converter and the original code.

use std::path::{Path, PathBuf};

use backend::reference::Reference;
use checkpoint::{Checkpoint, Metadata};
use serde_json::Value;

use crate::common::tensors::DATA;
use crate::common::{as_text, error, stdout};
use crate::fixtures;
use crate::seeing::{Model, REFERENCE, folders};

/// Keys that llama.cpp's converter does not write, or fills from the folder's name.
const OURS: [&str; 6] = [
    "general.name",
    "general.size_label",
    "clip.vision.image_min_pixels",
    "clip.vision.image_max_pixels",
    "clip.vision.is_causal",
    "clip.vision.projector.scale_factor",
];

fn images(name: &str) -> PathBuf {
    fixtures::root(DATA).join("images").join(name)
}

/// CRC-32 as zlib has it.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    })
}

fn is_key(meta: &Metadata, key: &str, wanted: &Value) -> bool {
    match wanted {
        Value::Bool(wanted) => meta.bool(key).unwrap() == *wanted,
        Value::String(wanted) => meta.str(key).unwrap() == wanted,
        Value::Number(wanted) if wanted.is_u64() => u64::from(meta.u32(key).unwrap()) == wanted.as_u64().unwrap(),
        Value::Number(wanted) => meta.f32(key).unwrap() == wanted.as_f64().unwrap() as f32,
        Value::Array(list) if list.iter().all(Value::is_boolean) => {
            meta.opt_bools(key).unwrap().unwrap() == list.iter().map(|v| v.as_bool().unwrap()).collect::<Vec<_>>()
        }
        Value::Array(list) => {
            let wanted: Vec<f32> = list.iter().map(|v| v.as_f64().unwrap() as f32).collect();
            meta.opt_f32s(key).unwrap().unwrap() == wanted
        }
        _ => panic!("{key} is {wanted}"),
    }
}

fn described(file: &Checkpoint, name: &str) -> Option<String> {
    let info = file.tensor(name)?;
    let mut bytes = vec![0; info.extents().len().total()];
    file.read(&info.extents(), &mut bytes).unwrap();
    Some(format!("{} {:?} {:08x}", info.dtype.name().to_uppercase(), info.shape, crc32(&bytes)))
}

/// Keys, names, types, shapes and every bit of the tensors; the listings are `tools/mmproj_listing.py`'s.
#[test]
fn encoders_become_the_files_of_llama_cpps_converter() {
    let folder = tempfile::tempdir().unwrap();
    let listings = std::fs::read(fixtures::root("crates/moebius/tests/data/mmproj.json")).unwrap();
    let listings: Value = serde_json::from_slice(&listings).unwrap();
    let listings = listings.as_object().unwrap();
    assert!(listings.len() >= 9);
    for (of, wanted) in listings {
        let (model, dtype) = of.split_once(' ').unwrap();
        let out = folder.path().join("mmproj.gguf");
        stdout(&["convert", as_text(&images(model).join("hf")), as_text(&out), "--mmproj", "--type", dtype]);
        let file = checkpoint::open(&out).unwrap();
        let keys = wanted["keys"].as_object().unwrap();
        for (key, wanted) in keys.iter().filter(|(key, _)| !OURS.contains(&key.as_str())) {
            assert!(is_key(file.meta(), key, wanted), "{of}: {key} is {:?}, expected {wanted}", file.meta().get(key));
        }
        let further = file.meta().iter().find(|(key, _)| !keys.contains_key(*key) && !OURS.contains(key));
        assert!(further.is_none(), "{of}: {further:?}");
        let tensors = wanted["tensors"].as_object().unwrap();
        assert_eq!(file.tensors().len(), tensors.len(), "{of}");
        for (name, wanted) in tensors {
            assert_eq!(described(&file, name).as_deref(), wanted.as_str(), "{of} {name}");
        }
    }
}

/// The model's two files give the features and logits of the original code.
#[test]
fn converted_pairs_see_as_the_original_code() {
    let folder = tempfile::tempdir().unwrap();
    let [text, encoder] = ["model.gguf", "mmproj-model.gguf"].map(|name| folder.path().join(name));
    for of in folders() {
        let hf = of.join("hf");
        stdout(&["convert", as_text(&hf), as_text(&text)]);
        stdout(&["convert", as_text(&hf), as_text(&encoder), "--mmproj"]);
        let model = Model::of(&of, &text, Some(&encoder));
        model.check_features("reference", Box::new(Reference), REFERENCE);
        for (name, images) in model.prompts() {
            let (tokens, pictures) = model.prompt(&mut model.encoder(Box::new(Reference)), &name, &images);
            model.check_logits("reference", &Reference, &name, (&tokens, &pictures), REFERENCE);
        }
    }
}

/// The fixture with its tokens of images called as published vocabularies call them.
fn named(folder: &Path) -> PathBuf {
    let hf = folder.join("hf");
    std::fs::create_dir(&hf).unwrap();
    let names =
        [("<|endoftext|>", "<|image_pad|>"), ("<|im_start|>", "<|vision_start|>"), ("<|im_end|>", "<|vision_end|>")];
    let ids = [("image_token_id", 317), ("vision_start_token_id", 318), ("vision_end_token_id", 319)];
    for entry in std::fs::read_dir(images("qwen3_vl_moe").join("hf")).unwrap() {
        let (from, to) = (entry.as_ref().unwrap().path(), hf.join(entry.unwrap().file_name()));
        match from.extension().and_then(|end| end.to_str()) {
            Some("safetensors") => _ = std::fs::copy(&from, &to).unwrap(),
            _ => {
                let mut file = std::fs::read_to_string(&from).unwrap();
                names.iter().for_each(|(old, new)| file = file.replace(old, new));
                if from.ends_with("config.json") {
                    let mut config: Value = serde_json::from_str(&file).unwrap();
                    ids.iter().for_each(|(key, id)| config[*key] = Value::from(*id));
                    file = config.to_string();
                }
                std::fs::write(&to, file).unwrap();
            }
        }
    }
    hf
}

/// `run` finds the encoder by its name alongside the model, whatever other encoders are there.
#[test]
fn converted_pairs_run() {
    let folder = tempfile::tempdir().unwrap();
    let hf = named(folder.path());
    let [text, encoder] = ["model.gguf", "mmproj-model.gguf"].map(|name| folder.path().join(name));
    stdout(&["convert", as_text(&hf), as_text(&text)]);
    let image = images("qwen3_vl_moe").join("images/odd.png");
    let line = |model: &Path| {
        let line = ["run", "-m", as_text(model), "--image", as_text(&image), "-n", "8", "--temp", "0", "What?"];
        line.map(str::to_string)
    };
    let run = |model: &Path| stdout(&line(model).each_ref().map(String::as_str));
    let why = error(&line(&text).each_ref().map(String::as_str));
    assert!(why.contains("image"), "{why}");
    stdout(&["convert", as_text(&hf), as_text(&encoder), "--mmproj"]);
    std::fs::write(folder.path().join("mmproj-another.gguf"), "no encoder").unwrap();
    let (of_folder, of_pair) = (run(&hf), run(&text));
    assert!(!of_pair.is_empty());
    assert_eq!(of_pair, of_folder);
}

#[test]
fn what_has_no_encoder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("mmproj.gguf");
    let hf = images("gemma4").join("hf");
    let text = fixtures::root(DATA).join("published/phi3/hf");
    let gguf = fixtures::root(DATA).join("qwen3moe/model-bf16.gguf");
    let cases: [(&Path, &[&str], &str); 4] = [
        (&text, &[], "it has none"),
        (&hf, &["--type", "Q8_0"], "--type is q8_0, expected F32, F16 or BF16"),
        (&hf, &["--to", "mlx"], "it is already a folder"),
        (&gguf, &[], "--mmproj does not apply to MLX folders"),
    ];
    for (from, more, wanted) in cases {
        let why = error(&[&["convert", as_text(from), as_text(&out), "--mmproj"], more].concat());
        assert!(why.contains(wanted) && !out.exists(), "{}: {why}", from.display());
    }
}
