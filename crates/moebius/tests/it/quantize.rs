//! `quantize`, `compare` and `imatrix` end to end.

use std::path::{Path, PathBuf};

use checkpoint::gguf::Writer;
use quant::WeightType;

use crate::common::{as_text, error, moebius, stdout};
use crate::fixtures;

const EMBEDDED: &str = "models/fable-29m-a10m-q4_k_m.gguf";
const TINY: &str = "crates/conformance/tests/data/qwen3moe/model-bf16.gguf";
/// A model whose rows are blocks of 256.
const BLOCKS: &str = "crates/conformance/tests/data/types/qwen3moe-blocks256.gguf";
const TEXT: &str = "Once upon a time a fox lost his hat. He asked the owl, who had seen it in the old tree by the pond. \
                    The fox climbed up and found two small birds asleep in his hat, so he let them keep it.\n";

fn json(args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&stdout(&[args, &["--json"]].concat())).expect("JSON")
}

/// Names and types of all tensors.
fn types(file: &Path) -> Vec<(String, WeightType)> {
    let model = checkpoint::open(file).expect("open");
    let mut types: Vec<_> = model.tensors().iter().map(|t| (t.name.clone(), t.dtype)).collect();
    types.sort();
    types
}

/// Names of the files in a folder.
fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("folder");
    let mut names: Vec<_> = entries.map(|e| e.expect("entry").file_name().into_string().expect("UTF-8")).collect();
    names.sort();
    names
}

/// A model of one matrix, which is no model for running.
fn one_matrix(file: &Path, n_cols: usize, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut writer = Writer::new();
    writer.meta("general.architecture", "llama").meta("general.name", "one");
    writer.meta("llama.block_count", 1u32).meta("split.no", 0u16).meta("split.count", 1u16);
    writer.tensor("blk.0.ffn_up.weight", &[values.len() / n_cols, n_cols], WeightType::F32, bytes);
    writer.write(&mut std::fs::File::create(file).expect("create")).expect("write");
}

#[test]
fn mixes_are_those_of_llama_quantize() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let Some(models) = fixtures::more("../shared/fixtures/models") else { return };
    let mut n = 0;
    for arch in files(&models) {
        let arch = models.join(arch);
        for file in files(&arch) {
            // Files that llama-quantize made of the one in bf16.
            let Some(name) = file.strip_prefix("model-").and_then(|f| f.strip_suffix(".gguf")) else { continue };
            if name == "bf16" {
                continue;
            }
            let (from, to) = (arch.join("model-bf16.gguf"), folder.path().join("out.gguf"));
            stdout(&["quantize", as_text(&from), as_text(&to), "--type", name]);
            assert_eq!(types(&to), types(&arch.join(&file)), "{}", arch.join(&file).display());
            n += 1;
        }
    }
    assert!(n >= 10, "{n} files");
}

#[test]
fn the_file_is_the_same_whatever_the_threads_and_says_what_it_is() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (from, one, three) = (fixtures::root(TINY), folder.path().join("one.gguf"), folder.path().join("three.gguf"));
    let line = ["quantize", as_text(&from), as_text(&one), "--type", "q4_k_m", "--tensor", "ffn_down=Q6_K", "-t", "1"];
    let report = json(&line);
    stdout(&["quantize", as_text(&from), as_text(&three), "--type", "Q4_K", "--tensor", "ffn_down=q6_k", "-t", "3"]);
    assert_eq!(std::fs::read(&one).expect("read"), std::fs::read(&three).expect("read"));
    assert_eq!(files(folder.path()), ["one.gguf", "three.gguf"]);

    let (old, new) = (checkpoint::open(&from).expect("open"), checkpoint::open(&one).expect("open"));
    assert_eq!(new.meta().u32("general.file_type").expect("key"), 15);
    assert_eq!(new.meta().u32("general.quantization_version").expect("key"), 2);
    let is_kept = |key: &str| !["general.file_type", "general.quantization_version"].contains(&key);
    for (key, value) in old.meta().iter().filter(|(key, _)| is_kept(key)) {
        assert_eq!(new.meta().get(key), Some(value), "{key}");
    }
    assert_eq!(report["bytes"].as_u64().expect("bytes"), new.data_bytes() as u64);
    assert_eq!(report["bytes_before"].as_u64().expect("bytes"), old.data_bytes() as u64);
    let down = new.tensors().iter().filter(|t| t.name.contains("ffn_down"));
    assert!(down.clone().count() > 0 && down.clone().all(|t| [256, 32].contains(&t.dtype.block_len())), "{down:?}");

    // Nothing is written by a dry run, which knows the same sizes.
    let dry = json(&["quantize", as_text(&from), "--type", "Q4_K_M", "--tensor", "ffn_down=Q6_K", "--dry-run"]);
    assert_eq!(dry["bytes"], report["bytes"]);
}

#[test]
fn what_cannot_be_quantized_is_refused_by_name_and_leaves_the_old_file() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let (good, out) = (at("good.gguf"), at("out.gguf"));
    one_matrix(&good, 64, &[0.5; 256]);
    for (name, value) in [("nan", f32::NAN), ("inf", f32::INFINITY), ("large", 1e30)] {
        let mut values = vec![0.5; 256];
        values[200] = value;
        one_matrix(&at(name), 64, &values);
    }
    std::fs::write(&out, "the old file").expect("write");
    let (text, short) = (at("text"), at("short.dat"));
    std::fs::write(&text, "no model").expect("write");
    std::fs::write(&short, [9, 0, 0, 0, 200, 0, 0, 0, b'x']).expect("write");
    let (forced, many) = (at("forced.gguf"), at("many.gguf"));
    for (file, n_forced) in [(&forced, vec![2.0f32]), (&many, vec![1.0, 1.0])] {
        let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let mut writer = Writer::new();
        writer.meta("general.type", "imatrix");
        writer.tensor("blk.0.ffn_up.weight.in_sum2", &[1, 64], WeightType::F32, bytes(&[1.0; 64]));
        writer.tensor("blk.0.ffn_up.weight.counts", &[1, 1], WeightType::F32, bytes(&[1.0]));
        let name = "blk.0.ffn_up.weight.forced";
        writer.tensor(name, &[n_forced.len(), 1], WeightType::F32, bytes(&n_forced));
        writer.write(&mut std::fs::File::create(file).expect("create")).expect("write");
    }
    let before = files(folder.path());
    let [good, out, nan, inf, large, text, short, forced, many] =
        [&good, &out, &at("nan"), &at("inf"), &at("large"), &text, &short, &forced, &many]
            .map(|p| as_text(p).to_string());
    let cases: [(&[&str], &[&str]); 15] = [
        (&[&good, &out, "--type", "Q4_0", "--imatrix", &forced], &["ffn_up.weight.forced does not fit the 1 counts"]),
        (&[&good, &out, "--type", "Q4_0", "--imatrix", &many], &["ffn_up.weight.forced does not fit the 1 counts"]),
        (&[&nan, &out, "--type", "NVFP4"], &["tensor blk.0.ffn_up.weight: value 200 is NaN"]),
        (&[&inf, &out, "--type", "NVFP4"], &["tensor blk.0.ffn_up.weight: value 200 is inf"]),
        (&[&nan, &out, "--type", "Q8_0"], &["out.gguf", "tensor blk.0.ffn_up.weight: value 200 is NaN"]),
        (&[&inf, &out, "--type", "Q4_0"], &["tensor blk.0.ffn_up.weight: value 200 is inf"]),
        (&[&large, &out, "--type", "F16"], &["value 200 is", "f16 cannot hold"]),
        (&[&good, &out, "--type", "Q4_X"], &["Q4_X is none of", "Q4_K_M"]),
        (&[&good, &out, "--type", "Q4_0", "--tensor", "ffn_dawn=Q8_0"], &["ffn_dawn=Q8_0", "matches no matrix"]),
        (&[&good, &out, "--type", "Q4_0", "--tensor", "(=Q8_0"], &["unclosed group"]),
        (&[&good, &good, "--type", "Q4_0"], &["it is the input file"]),
        (&[&text, &out, "--type", "Q4_0"], &["failed to open", "text"]),
        (&[&good, &out, "--type", "Q4_0", "--imatrix", &short], &["short.dat", "ends early"]),
        (&[&good, &out, "--type", "Q4_0", "--imatrix", &good], &["general.type is model, expected imatrix"]),
        (&["no.gguf", &out, "--type", "Q4_0"], &["no.gguf"]),
    ];
    for (args, parts) in cases {
        let said = error(&[&["quantize"], args].concat());
        assert!(parts.iter().all(|part| said.contains(part)), "{args:?}: {said}");
    }
    assert_eq!(std::fs::read_to_string(&out).expect("read"), "the old file");
    assert_eq!(files(folder.path()), before);

    // Quantized weights need a word more.
    let embedded = fixtures::root(EMBEDDED);
    let line = ["quantize", as_text(&embedded), &out, "--type", "Q8_0"];
    let said = error(&line);
    assert!(said.contains("already") && said.contains("--allow-requantize"), "{said}");
    // A dry run promises nothing that the run refuses.
    assert_eq!(error(&[&line[..], &["--dry-run"]].concat()), said);
    stdout(&[&line[..], &["--allow-requantize"]].concat());
    assert!(types(Path::new(&out)).iter().any(|(_, t)| *t == WeightType::Q8_0));
}

#[test]
fn odd_rows_get_types_that_divide_them() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (from, to) = (folder.path().join("from.gguf"), folder.path().join("to.gguf"));
    let values: Vec<f32> = (0..7 * 288 * 13).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    for (n_cols, name, wanted) in [
        (288, "Q4_K_S", WeightType::Q5_0),
        (288, "Q6_K", WeightType::Q8_0),
        (288, "IQ4_XS", WeightType::IQ4_NL),
        (288, "Q2_K", WeightType::Q4_0),
        (288, "NVFP4", WeightType::IQ4_NL),
        (288, "IQ3_S", WeightType::IQ4_NL),
        (288, "IQ1_M", WeightType::IQ4_NL),
        (288, "TQ2_0", WeightType::Q4_0),
        (36, "Q4_0", WeightType::F16),
        (7, "Q8_0", WeightType::F16),
        (1, "Q8_0", WeightType::F16),
    ] {
        one_matrix(&from, n_cols, &values);
        stdout(&["quantize", as_text(&from), as_text(&to), "--type", name]);
        assert_eq!(types(&to), [("blk.0.ffn_up.weight".to_string(), wanted)], "{n_cols} {name}");
        let model = checkpoint::open(&to).expect("open");
        assert!(model.meta().get("split.count").is_none());
        let mut back = vec![0.0; values.len()];
        quant::decode_row(wanted, model.bytes(&model.tensors()[0]), &mut back);
        let far = values.iter().zip(&back).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 0.15, "{n_cols} {name}: {far}");
    }
}

/// Importances of every matrix of a model, no two columns alike.
fn importances(model: &Path, file: &Path) {
    let model = checkpoint::open(model).expect("open");
    let mut writer = Writer::new();
    writer.meta("general.type", "imatrix");
    for info in model.tensors().iter().filter(|info| info.shape.len() > 1) {
        let (n_cols, n_rows) = (info.shape[info.shape.len() - 1], info.shape[info.shape.len() - 2]);
        let n_mat = info.shape.iter().product::<usize>() / n_cols / n_rows;
        let sums: Vec<u8> = (0..n_mat * n_cols).flat_map(|i| (1.0 + (i * 37 % 101) as f32).to_le_bytes()).collect();
        let counts: Vec<u8> = (0..n_mat).flat_map(|_| 16f32.to_le_bytes()).collect();
        writer.tensor(&format!("{}.in_sum2", info.name), &[n_mat, n_cols], WeightType::F32, sums);
        writer.tensor(&format!("{}.counts", info.name), &[n_mat, 1], WeightType::F32, counts);
    }
    writer.write(&mut std::fs::File::create(file).expect("create")).expect("write");
}

/// Mixes of the smallest types, their most frequent type, its largest error over the values, and whether they want
/// importances.
const SMALLEST: [(&str, WeightType, f64, bool); 12] = [
    ("IQ1_S", WeightType::IQ1_S, 0.60, true),
    ("IQ1_M", WeightType::IQ1_M, 0.55, true),
    ("TQ1_0", WeightType::TQ1_0, 0.65, false),
    ("TQ2_0", WeightType::TQ2_0, 0.65, false),
    ("IQ2_XXS", WeightType::IQ2_XXS, 0.42, true),
    ("IQ2_XS", WeightType::IQ2_XS, 0.36, true),
    ("IQ2_S", WeightType::IQ2_XS, 0.36, true),
    ("IQ2_M", WeightType::IQ2_S, 0.30, true),
    ("IQ3_XXS", WeightType::IQ3_XXS, 0.20, true),
    ("IQ3_XS", WeightType::IQ3_S, 0.15, true),
    ("IQ3_S", WeightType::IQ3_S, 0.15, false),
    ("IQ3_M", WeightType::IQ3_S, 0.15, false),
];

#[test]
fn the_smallest_types_run_and_most_want_importances() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let (floats, sums, one, three, text) = (at("f.gguf"), at("sums"), at("one"), at("three"), at("text"));
    stdout(&["quantize", as_text(&fixtures::root(BLOCKS)), as_text(&floats), "--type", "F32", "--allow-requantize"]);
    importances(&floats, &sums);
    std::fs::write(&text, TEXT.repeat(4)).expect("write");
    // Of what is broken a sentence comes, and no file.
    let (short, nan, nan_sums, none) = (at("short"), at("nan"), at("nan_sums"), at("none"));
    let bytes = std::fs::read(&floats).expect("read");
    std::fs::write(&short, &bytes[..bytes.len() - 100]).expect("write");
    one_matrix(&nan, 256, &(0..512).map(|i| if i == 300 { f32::NAN } else { 0.5 }).collect::<Vec<_>>());
    importances(&nan, &nan_sums);
    for (name, base, most, wants_importances) in SMALLEST {
        let line = ["--type", name, "--imatrix", as_text(&sums)];
        let report = json(&[&["quantize", as_text(&floats), as_text(&one), "-t", "1"], &line[..]].concat());
        stdout(&[&["quantize", as_text(&floats), as_text(&three), "-t", "3"], &line[..]].concat());
        assert_eq!(std::fs::read(&one).expect("read"), std::fs::read(&three).expect("read"), "{name}");
        let dry = json(&[&["quantize", as_text(&floats), "--dry-run"], &line[..]].concat());
        assert_eq!((&dry["bytes"], &report["type"]), (&report["bytes"], &name.into()));
        let row = report["types"].as_array().expect("types").iter().find(|row| row["to"] == base.name());
        let lost = row.unwrap_or_else(|| panic!("{name}: no {base}"))["error"].as_f64().expect("error");
        assert!(lost > 0.05 && lost < most, "{name}: {lost}");
        assert!(types(&one).iter().filter(|(_, t)| *t == base).count() >= 2, "{name}: {:?}", types(&one));

        let compare = ["compare", "-m", as_text(&floats), "-m", as_text(&one), "-f", as_text(&text), "-c", "64"];
        let kl = json(&compare)["kl_mean"]["value"].as_f64().expect("KL");
        assert!(kl > 0.0 && kl.is_finite(), "{name}: {kl}");

        // Matrices that hold the type are kept when it is asked for again.
        stdout(&[&["quantize", as_text(&one), as_text(&three)], &line[..]].concat());
        assert_eq!(types(&one), types(&three), "{name}");

        let plain = ["quantize", as_text(&floats), as_text(&none), "--type", name];
        if wants_importances {
            let said = error(&plain);
            assert!(said.contains("--imatrix") && said.contains("quantize tensor blk.0."), "{name}: {said}");
            // A dry run shows the sizes of what the run would refuse, and refuses it too.
            let dry = moebius(&["quantize", as_text(&floats), "--type", name, "--dry-run"]);
            let said = String::from_utf8_lossy(&dry.stderr);
            assert!(!dry.status.success() && !dry.stdout.is_empty() && said.contains("--imatrix"), "{name}: {said}");
        } else {
            stdout(&plain);
            std::fs::remove_file(&none).expect("remove");
        }
        let said = error(&[&["quantize", as_text(&short), as_text(&none)], &line[..]].concat());
        assert!(said.contains("short"), "{name}: {said}");
        let line = ["--type", name, "--imatrix", as_text(&nan_sums)];
        let said = error(&[&["quantize", as_text(&nan), as_text(&none)], &line[..]].concat());
        assert!(said.contains("tensor blk.0.ffn_up.weight: value 300 is NaN"), "{name}: {said}");
        assert!(!none.exists(), "{name}");
    }
    for (line, part) in [
        (["--type", "Q4_K_M", "--tensor", "ffn_up=IQ1_M"], "ffn_up_exps.weight to iq1_m"),
        (["--type", "Q2_K_S", "--tensor", "ffn_up=Q8_0"], "to q2_k: so few bits want importances"),
    ] {
        let said = error(&[&["quantize", as_text(&floats), as_text(&none)], &line[..]].concat());
        assert!(said.contains(part) && !none.exists(), "{said}");
    }
}

#[test]
fn nvfp4_has_scales_of_its_matrices_and_runs() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let (tiny, embedded, text) = (fixtures::root(TINY), fixtures::root(EMBEDDED), at("text"));
    std::fs::write(&text, TEXT.repeat(6)).expect("write");
    for from in [&tiny, &embedded] {
        let (one, three) = (at("one.gguf"), at("three.gguf"));
        let line = ["--type", "nvfp4", "--allow-requantize"];
        let report = json(&[&["quantize", as_text(from), as_text(&one), "-t", "1"], &line[..]].concat());
        stdout(&[&["quantize", as_text(from), as_text(&three), "-t", "3"], &line[..]].concat());
        assert_eq!(std::fs::read(&one).expect("read"), std::fs::read(&three).expect("read"));
        let dry = json(&[&["quantize", as_text(from), "--dry-run"], &line[..]].concat());
        assert_eq!((&dry["bytes"], &dry["type"]), (&report["bytes"], &"NVFP4".into()));
        let rows = report["types"].as_array().expect("types").iter().filter(|row| row["to"] == "nvfp4");
        let errors: Vec<f64> = rows.map(|row| row["error"].as_f64().expect("error")).collect();
        assert!(!errors.is_empty() && errors.iter().all(|&e| e > 0.05 && e < 0.1), "{errors:?}");

        let (old, new) = (checkpoint::open(from).expect("open"), checkpoint::open(&one).expect("open"));
        assert_eq!(new.meta().u32("general.file_type").expect("key"), 39);
        // Tensors are aligned in the file, and the header lies before them.
        let (bytes, len) = (report["bytes"].as_u64().expect("bytes"), std::fs::metadata(&one).expect("file").len());
        assert!(bytes < len && len < bytes + (2 << 20), "{bytes} of {len}");
        let names = |model: &checkpoint::Checkpoint| {
            let mut names: Vec<String> = model.tensors().iter().map(|t| t.name.clone()).collect();
            names.sort();
            names
        };
        // Scales are joined to their matrices.
        assert_eq!(names(&old), names(&new));
        assert!(new.tensors().iter().all(|t| t.dtype != WeightType::NVFP4));
        let scaled = new.tensors().iter().filter(|t| t.dtype == WeightType::NVFP4_SCALED);
        assert!(scaled.clone().any(|t| t.shape.len() == 3) && scaled.clone().any(|t| t.shape.len() == 2));
        for kept in ["output.weight", "token_embd.weight"].iter().filter_map(|name| new.tensor(name)) {
            assert_eq!(kept.dtype, WeightType::Q8_0, "{}", kept.name);
        }

        // Read back, it is the floats that it stands for, and quantized already.
        let back = at("back.gguf");
        stdout(&["quantize", as_text(&one), as_text(&back), "--type", "F32", "--allow-requantize"]);
        let floats = checkpoint::open(&back).expect("open");
        new.hold_repacked().expect("memory");
        for tensor in scaled {
            let n_cols = *tensor.shape.last().expect("axes");
            let (mut row, planes) = (vec![0.0; n_cols], new.planes(tensor));
            let row_bytes = tensor.dtype.plane_bytes(n_cols).expect("blocks");
            let bytes = floats.bytes(floats.tensor(&tensor.name).expect("tensor"));
            for (i, found) in bytes.chunks_exact(4 * n_cols).enumerate() {
                quant::decode_row(tensor.dtype, planes.row(row_bytes, i), &mut row);
                let is_same = found.as_chunks().0.iter().zip(&row).all(|(a, b)| f32::from_le_bytes(*a) == *b);
                assert!(is_same, "{} row {i}", tensor.name);
            }
        }
    }
    let one = at("one.gguf");
    let said = error(&["quantize", as_text(&one), as_text(&at("no.gguf")), "--type", "Q8_0"]);
    assert!(said.contains("it is nvfp4") && said.contains("--allow-requantize"), "{said}");
    let compare = ["compare", "-m", as_text(&embedded), "-m", as_text(&one), "-f", as_text(&text)];
    let kl = json(&[&compare[..], &["-c", "128"]].concat())["kl_mean"]["value"].as_f64().expect("KL");
    // On this text 0.46, and 0.29 for Q4_0.
    assert!(kl > 0.0 && kl < 1.0, "{kl}");

    // A tensor of the model has the name that the scale would have.
    let (from, to) = (at("from.gguf"), at("to.gguf"));
    let values: Vec<u8> = (0..256).flat_map(|i| ((i * 37 % 101) as f32).to_le_bytes()).collect();
    let mut writer = Writer::new();
    writer.meta("general.architecture", "gemma4").meta("gemma4.block_count", 1u32);
    writer.tensor("blk.0.ffn_down_exps.weight", &[2, 2, 64], WeightType::F32, values);
    writer.tensor("blk.0.ffn_down_exps.scale", &[2], WeightType::F32, vec![0; 8]);
    writer.write(&mut std::fs::File::create(&from).expect("create")).expect("write");
    stdout(&["quantize", as_text(&from), as_text(&to), "--type", "NVFP4"]);
    let wanted = [("blk.0.ffn_down_exps.scale", WeightType::F32), ("blk.0.ffn_down_exps.weight", WeightType::IQ4_NL)];
    assert_eq!(types(&to), wanted.map(|(name, t)| (name.to_string(), t)));
}

#[test]
fn importances_are_summed_read_and_used() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let (text, sums) = (at("text"), at("imatrix.gguf"));
    std::fs::write(&text, TEXT.repeat(8)).expect("write");
    let embedded = fixtures::root(EMBEDDED);
    let report = json(&["imatrix", "-f", as_text(&text), "-o", as_text(&sums), "-c", "64"]);
    let file = checkpoint::open(&sums).expect("open");
    let numbers = |name: &str| -> Vec<f32> {
        let info = file.tensor(name).unwrap_or_else(|| panic!("{name} is missing"));
        file.bytes(info).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let n_tokens = report["tokens"].as_f64().expect("tokens") as f32;
    // 16 experts, 4 a token, in each of 8 layers.
    let stacks = report["experts"].as_array().expect("experts");
    assert_eq!(stacks.len(), 8);
    for layer in 0..8 {
        for name in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] {
            let counts = numbers(&format!("blk.{layer}.{name}.weight.counts"));
            assert_eq!((counts.len(), counts.iter().sum::<f32>()), (16, 4.0 * n_tokens), "{layer} {name}");
        }
        // A router's input is a norm's output, as the experts' is: over all experts each token counts four times.
        let router = numbers(&format!("blk.{layer}.ffn_gate_inp.weight.in_sum2"));
        let experts = numbers(&format!("blk.{layer}.ffn_gate_exps.weight.in_sum2"));
        for (c, &sum) in router.iter().enumerate() {
            let of_experts: f32 = (0..16).map(|e| experts[e * router.len() + c]).sum();
            assert!((of_experts - 4.0 * sum).abs() <= 1e-4 * of_experts, "layer {layer} column {c}");
        }
        let never: Vec<usize> =
            (0..16).filter(|&e| numbers(&format!("blk.{layer}.ffn_down_exps.weight.counts"))[e] == 0.0).collect();
        assert_eq!(stacks[layer]["unreached"], serde_json::json!(never));
    }

    // The older form says the same, and either changes the file.
    let dat = at("imatrix.dat");
    let mut bytes = Vec::new();
    let names: Vec<&str> = file.tensors().iter().filter_map(|t| t.name.strip_suffix(".in_sum2")).collect();
    bytes.extend((names.len() as i32).to_le_bytes());
    for name in &names {
        let (squares, counts) = (numbers(&format!("{name}.in_sum2")), numbers(&format!("{name}.counts")));
        let n_cols = squares.len() / counts.len();
        bytes.extend((name.len() as i32).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(7i32.to_le_bytes());
        bytes.extend((squares.len() as i32).to_le_bytes());
        let mean = |(i, v): (usize, &f32)| v / counts[i / n_cols].max(1.0) * 7.0;
        squares.iter().enumerate().map(mean).for_each(|v| bytes.extend(v.to_le_bytes()));
    }
    std::fs::write(&dat, bytes).expect("write");
    let quantize = |out: &str, more: &[&str]| {
        let out: PathBuf = at(out);
        stdout(
            &[&["quantize", as_text(&embedded), as_text(&out), "--type", "Q4_0", "--allow-requantize"], more].concat(),
        );
        out
    };
    let (plain, weighed, old) = (
        quantize("a", &[]),
        quantize("b", &["--imatrix", as_text(&sums)]),
        quantize("c", &["--imatrix", as_text(&dat)]),
    );
    let bytes = |file: &Path, tensor: &str| {
        let model = checkpoint::open(file).expect("open");
        model.bytes(model.tensor(tensor).expect("tensor")).to_vec()
    };
    let tensor = "blk.3.attn_q.weight";
    assert_ne!(bytes(&plain, tensor), bytes(&weighed, tensor));
    let (a, b) = (bytes(&weighed, tensor), bytes(&old, tensor));
    let n_same = a.iter().zip(&b).filter(|(a, b)| a == b).count();
    assert!(n_same as f64 > 0.999 * a.len() as f64, "{n_same} of {}", a.len());
    let meta = checkpoint::open(&weighed).expect("open");
    assert_eq!(meta.meta().str("quantize.imatrix.file").expect("key"), "imatrix.gguf");
}

/// The embedded model with the weights of the first expert in place of every expert's.
fn equal_experts(to: &Path) {
    let model = checkpoint::open(&fixtures::root(EMBEDDED)).expect("open");
    let mut writer = Writer::new();
    model.meta().iter().for_each(|(key, value)| _ = writer.meta(key, value.clone()));
    for info in model.tensors() {
        let mut bytes = model.bytes(info).to_vec();
        if info.name.contains("_exps") {
            let one = bytes[..bytes.len() / info.shape[0]].to_vec();
            bytes = one.repeat(info.shape[0]);
        }
        writer.tensor(&info.name, &info.shape, info.dtype, bytes);
    }
    writer.write(&mut std::fs::File::create(to).expect("create")).expect("write");
}

#[test]
fn experts_that_no_token_reaches_are_forced_and_marked() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (model, text) = (folder.path().join("equal.gguf"), folder.path().join("text"));
    equal_experts(&model);
    let embedded = fixtures::root(EMBEDDED);
    // Of a window of two tokens at most twice as many experts are chosen as a token has; of four words many never.
    for (model, words, n_ctx) in
        [(&model, "the fox ran", "2"), (&embedded, "the fox ran", "2"), (&embedded, TEXT, "16")]
    {
        std::fs::write(&text, words).expect("write");
        let out = folder.path().join("imatrix.gguf");
        let line = ["imatrix", "-m", as_text(model), "-f", as_text(&text), "-o", as_text(&out), "-c", n_ctx];
        let line = [&line[..], &["--chunks", "1"]].concat();
        let report = json(&line);
        if model == &embedded {
            // Experts that are read from disk when they are wanted give the same sums.
            let whole = std::fs::read(&out).expect("read");
            stdout(&[&line[..], &["--memory", "40M"]].concat());
            assert!(whole == std::fs::read(&out).expect("read"));
        }
        let said = stdout(&line);
        assert!(said.contains("unreached (forced tokens)") && said.contains("were never reached"), "{said}");
        let file = checkpoint::open(&out).expect("open");
        let numbers = |name: &str| -> Vec<f32> {
            let info = file.tensor(name).unwrap_or_else(|| panic!("{name} is missing"));
            file.bytes(info).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        let n_passes = file.meta().u32("moebius.imatrix.forced_chunk_count").expect("key") as f32;
        let n_tokens = report["tokens"].as_f64().expect("tokens") as f32;
        assert_eq!(report["forced_tokens"].as_f64().expect("tokens") as f32, n_passes * n_tokens);
        for stack in report["experts"].as_array().expect("experts") {
            let down = stack["name"].as_str().expect("name");
            let never: Vec<usize> = serde_json::from_value(stack["unreached"].clone()).expect("numbers");
            for name in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"].map(|n| down.replace("ffn_down_exps", n)) {
                if never.is_empty() {
                    assert!(file.tensor(&format!("{name}.forced")).is_none(), "{name}");
                    continue;
                }
                let [squares, counts, forced] =
                    ["in_sum2", "counts", "forced"].map(|kind| numbers(&format!("{name}.{kind}")));
                assert!(counts.iter().all(|&n| n > 0.0), "{name}: {counts:?}");
                let marked: Vec<usize> = (0..counts.len()).filter(|&e| forced[e] > 0.0).collect();
                assert!(marked == never && marked.iter().all(|&e| forced[e] == counts[e]), "{name}: {forced:?}");
                let natural: f32 = (0..counts.len()).map(|e| counts[e] - forced[e]).sum();
                let n_used = natural / n_tokens;
                let share = n_used.min(never.len() as f32) / n_used;
                assert_eq!(forced.iter().sum::<f32>(), share * natural * n_passes, "{name}");
                // Turns are even.
                let fewest = never.iter().map(|&e| forced[e]).fold(f32::INFINITY, f32::min);
                assert!(fewest >= 1.0 && never.iter().all(|&e| forced[e] <= fewest + 1.0), "{name}: {forced:?}");
                // Inputs of gate and up are the layer's; equal experts make the same inputs of down of them.
                if share < 1.0 || name.contains("down") && model == &embedded {
                    continue;
                }
                let n_cols = squares.len() / counts.len();
                for c in 0..n_cols {
                    let of = |is_forced: bool| -> f32 {
                        (0..counts.len())
                            .filter(|e| never.contains(e) == is_forced)
                            .map(|e| squares[e * n_cols + c])
                            .sum()
                    };
                    let (ours, wanted) = (of(true), n_passes * of(false));
                    assert!((ours - wanted).abs() <= 1e-3 * wanted + 1e-12, "{name} column {c}: {ours} {wanted}");
                }
            }
        }
        let out_file = folder.path().join("q.gguf");
        let line = ["quantize", as_text(model), as_text(&out_file), "--type", "Q4_0", "--allow-requantize"];
        stdout(&[&line[..], &["--imatrix", as_text(&out)]].concat());
    }
}

#[test]
fn a_comparison_finds_nothing_between_equals_and_more_the_fewer_bits() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let text = folder.path().join("text");
    std::fs::write(&text, TEXT.repeat(6)).expect("write");
    let base = fixtures::root(EMBEDDED);
    let compare = |other: &Path| {
        json(&["compare", "-m", as_text(&base), "-m", as_text(other), "-f", as_text(&text), "-c", "128"])
    };
    let same = compare(&base);
    assert_eq!((same["kl_max"].as_f64(), same["same_top"]["value"].as_f64()), (Some(0.0), Some(1.0)));
    assert_eq!(
        (same["perplexity_ratio"]["value"].as_f64(), same["perplexity_base"] == same["perplexity"]),
        (Some(1.0), true)
    );
    let mut before = 0.0;
    for name in ["Q8_0", "Q5_0", "Q2_K"] {
        let out = folder.path().join(name);
        stdout(&["quantize", as_text(&base), as_text(&out), "--type", name, "--allow-requantize"]);
        let found = compare(&out);
        let kl = found["kl_mean"]["value"].as_f64().expect("KL");
        assert!(kl > before && found["kl_max"].as_f64() >= found["kl_99"].as_f64(), "{name}: {found}");
        before = kl;
    }
    assert!(before > 0.05, "{before}");
    let other = fixtures::root(TINY);
    assert!(
        error(&["compare", "-m", as_text(&base), "-m", as_text(&other), "-f", as_text(&text), "-c", "128"])
            .contains("8192 tokens")
    );
    assert!(error(&["compare", "-m", as_text(&base), "-f", as_text(&text)]).contains("compare requires two models"));
}

/// Models whose tokens are others are not compared; a few may differ.
#[test]
fn a_comparison_requires_the_same_tokens() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (text, other) = (folder.path().join("text"), folder.path().join("other.gguf"));
    std::fs::write(&text, TEXT.repeat(6)).expect("write");
    let base = fixtures::root(EMBEDDED);
    let model = checkpoint::open(&base).expect("open");
    let tokens: Vec<&[u8]> = model.meta().strings("tokenizer.ggml.tokens").expect("tokens").iter().collect();
    let written = |tokens: &[&[u8]]| -> Vec<u8> {
        tokens.iter().flat_map(|t| [&(t.len() as u64).to_le_bytes()[..], t].concat()).collect()
    };
    let bytes = std::fs::read(&base).expect("read");
    for (n, fits) in [(40, true), (1000, false)] {
        // The tokens are the same ones, some in another order.
        let some = &tokens[4000..4000 + n];
        let (before, after) = (written(some), written(&some.iter().rev().copied().collect::<Vec<_>>()));
        let at = bytes.windows(before.len()).position(|window| window == before).expect("tokens");
        let mut changed = bytes.clone();
        changed[at..at + after.len()].copy_from_slice(&after);
        std::fs::write(&other, changed).expect("write");
        let args = ["compare", "-m", as_text(&base), "-m", as_text(&other), "-f", as_text(&text), "-c", "128"];
        match fits {
            true => assert!(stdout(&args).contains("KL mean")),
            false => assert!(error(&args).contains("1000 of 8192 tokens are others in")),
        }
    }
}

/// The first layer of the embedded model, in F16.
fn one_layer_in_f16(to: &Path) {
    let model = checkpoint::open(&fixtures::root(EMBEDDED)).expect("open");
    let mut writer = Writer::new();
    for (key, value) in model.meta().iter() {
        match key.ends_with(".block_count") {
            true => writer.meta(key, 1u32),
            false => writer.meta(key, value.clone()),
        };
    }
    let is_kept = |name: &str| !name.starts_with("blk.") || name.starts_with("blk.0.");
    for info in model.tensors().iter().filter(|info| is_kept(&info.name)) {
        writer.tensor(&info.name, &info.shape, info.dtype, model.bytes(info).to_vec());
    }
    let folder = tempfile::tempdir().expect("temporary folder");
    let small = folder.path().join("small.gguf");
    writer.write(&mut std::fs::File::create(&small).expect("create")).expect("write");
    stdout(&["quantize", as_text(&small), as_text(to), "--type", "F16", "--allow-requantize"]);
}

/// Types of fewer bits than Q2_K and of three bits, which `--target-size` takes only where importances are known.
const BY_IMPORTANCE: [WeightType; 4] = [WeightType::IQ2_XXS, WeightType::IQ2_S, WeightType::IQ3_XXS, WeightType::IQ3_S];

#[test]
fn a_file_of_a_size_takes_the_smallest_types_by_importance_alone_and_beats_mixes_of_them() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let (base, text, sums, mix, out) = (at("base.gguf"), at("text"), at("imatrix.gguf"), at("mix"), at("out.gguf"));
    one_layer_in_f16(&base);
    std::fs::write(&text, TEXT.repeat(3)).expect("write");
    let on_text = ["-f", as_text(&text), "-c", "64", "--chunks", "1"];
    stdout(&[&["imatrix", "-m", as_text(&base), "-o", as_text(&sums)], &on_text[..]].concat());
    let with_sums = ["--imatrix", as_text(&sums)];
    let of_size = |size: u64, more: &[&str]| {
        let size = size.to_string();
        json(&[&["quantize", as_text(&base), as_text(&out), "--target-size", &size], more].concat())
    };
    let size = |path: &Path| std::fs::metadata(path).expect("file").len();
    let kl = |path: &Path| {
        let found = json(&[&["compare", "-m", as_text(&base), "-m", as_text(path)], &on_text[..]].concat());
        found["kl_mean"]["value"].as_f64().expect("KL")
    };
    let n_small = || types(&out).iter().filter(|(_, t)| BY_IMPORTANCE.contains(t)).count();

    let least = "the smallest types take ";
    let said = error(&["quantize", as_text(&base), as_text(&out), "--target-size", "1000"]);
    let plain = said.split_once(least).unwrap_or_else(|| panic!("{said}")).1;
    let said = error(&[&["quantize", as_text(&base), as_text(&out), "--target-size", "1000"], &with_sums[..]].concat());
    assert!(said.contains(least) && !said.contains(plain), "{said}");

    // Q4_K, whose grid the weights lie on, costs nothing once it fits.
    for (name, is_small) in [("IQ3_XXS", true), ("IQ3_S", false)] {
        stdout(&[&["quantize", as_text(&base), as_text(&mix), "--type", name], &with_sums[..]].concat());
        let report = of_size(size(&mix), &with_sums);
        assert!(size(&out) <= size(&mix) && size(&out) > size(&mix) / 10 * 9, "{name}: {report}");
        assert_eq!(n_small() > 0, is_small, "{name}: {report}");
        let (ours, fixed) = (kl(&out), kl(&mix));
        assert!(ours < fixed, "{name}: {ours} {fixed} {report}");
    }
    of_size(size(&base) / 4, &[]);
    assert_eq!(n_small(), 0);
}

#[test]
fn the_smallest_file_within_a_kl_is_found() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let (base, text, sums) = (at("base.gguf"), at("text"), at("imatrix.gguf"));
    one_layer_in_f16(&base);
    std::fs::write(&text, TEXT.repeat(3)).expect("write");
    let on_text = ["-f", as_text(&text), "-c", "64", "--chunks", "1"];
    stdout(&[&["imatrix", "-m", as_text(&base), "-o", as_text(&sums)], &on_text[..]].concat());
    let (with_sums, mlx) = (["--imatrix", as_text(&sums)], at("mlx"));
    stdout(&["convert", as_text(&base), as_text(&mlx), "--to", "mlx"]);
    let mut sizes = Vec::new();
    for (from, target, more) in
        [(&base, "0.3", &[][..]), (&base, "0.03", &[]), (&base, "0.3", &with_sums), (&mlx, "0.3", &[])]
    {
        let out = at("out.gguf");
        let line = ["quantize", as_text(from), as_text(&out), "--target-kl", target];
        let report = json(&[&line[..], &on_text, more].concat());
        let found = json(&[&["compare", "-m", as_text(from), "-m", as_text(&out)], &on_text[..]].concat());
        let kl = found["kl_mean"]["value"].as_f64().expect("KL");
        let target: f64 = target.parse().expect("a number");
        assert!(kl > 0.0 && kl <= target, "{kl}: {report}");
        // The file is the best of those tried, and nothing else is left.
        let trials = report["trials"].as_array().expect("trials");
        assert!((2..=8).contains(&trials.len()), "{report}");
        let within = trials.iter().filter(|t| t["kl"].as_f64().expect("KL") <= target);
        let best = within.min_by_key(|t| t["bytes"].as_u64()).expect("one will do");
        let bytes = std::fs::metadata(&out).expect("file").len();
        assert_eq!((best["kl"].as_f64(), best["bytes"].as_u64()), (Some(kl), Some(bytes)), "{report}");
        assert_eq!(files(folder.path()), ["base.gguf", "imatrix.gguf", "mlx", "out.gguf", "text"]);
        sizes.push(bytes);
    }
    // A smaller KL takes more bytes, and importances make it in fewer.
    assert!(sizes[1] > sizes[0] && sizes[2] < sizes[0], "{sizes:?}");
}

#[test]
fn a_kl_that_cannot_be_reached_is_refused_and_leaves_the_old_file() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let (base, out, text) = (at("base.gguf"), at("out.gguf"), at("text"));
    one_layer_in_f16(&base);
    std::fs::write(&text, TEXT).expect("write");
    std::fs::write(&out, "the old file").expect("write");
    let [base, out, text] = [&base, &out, &text].map(|p| as_text(p).to_string());
    let on_text = ["-f", &text, "-c", "16", "--chunks", "1"];
    let cases: [(&[&str], &[&str]); 12] = [
        (&["--target-kl", "1e-9"], &["reach a mean KL of 0.000000001: the largest mix, ", " has 0.0"]),
        (&["--target-kl", "0"], &["--target-kl", "a number above 0"]),
        (&["--target-kl", "-1"], &["--target-kl", "a number above 0"]),
        (&["--target-kl", "NaN"], &["--target-kl", "a number above 0"]),
        (&["--target-kl", "0.1", "--type", "Q4_0"], &["--target-kl", "cannot be used with", "--type"]),
        (&["--target-kl", "0.1", "--target-size", "9M"], &["--target-kl", "cannot be used with", "--target-size"]),
        (&["--target-kl", "0.1", "--dry-run"], &["--target-kl", "cannot be used with", "--dry-run"]),
        (&["--type", "Q4_0"], &["--file", "require --target-kl"]),
        (&["--target-kl", "0.1", "-f", "no.txt"], &["no.txt"]),
        (&["--target-kl", "0.1"], &["--file"]),
        (&["--target-kl", "0.1", "-f", &text], &["at least 512 are required", "--ctx"]),
        (&["--target-kl", "0.1", "-f", &text, "--chunks", "0"], &["--chunks must be at least 1"]),
    ];
    for (i, (args, parts)) in cases.into_iter().enumerate() {
        let on_text = if i < 8 { &on_text[..] } else { &[] };
        let said = error(&[&["quantize", &base, &out], args, on_text].concat());
        assert!(parts.iter().all(|part| said.contains(part)), "{args:?}: {said}");
    }
    let said = error(&["quantize", &base, &base, "--target-kl", "0.1", "-f", &text]);
    assert!(said.contains("it is the input file"), "{said}");
    assert_eq!(std::fs::read_to_string(&out).expect("read"), "the old file");
    assert_eq!(files(folder.path()), ["base.gguf", "out.gguf", "text"]);
}
