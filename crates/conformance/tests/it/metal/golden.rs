//! Golden logits of whole models, and of prompts cut anywhere.

use super::planted::{Plant, Seen, planted};
use super::*;

/// Where a file's golden logits are, and what the array is called.
fn golden_of(path: &Path) -> (PathBuf, String) {
    let name = path.file_name().unwrap().to_str().unwrap();
    let beside = path.with_file_name("golden.safetensors");
    match name.strip_prefix("model-").and_then(|name| name.strip_suffix(".gguf")) {
        Some("bf16") => (beside, "logits".into()),
        Some(label) => (beside, format!("logits_{label}")),
        None if name == "hf" => (beside, "logits".into()),
        None if name.starts_with("mlx-") => (beside, "logits_mlx".into()),
        None => (path.with_extension("golden.safetensors"), "logits".into()),
    }
}

/// The files whose golden logits are run: a quantised one of each architecture; where there is time the exact ones,
/// folders and all types too.
fn golden_files() -> Vec<String> {
    if !wide() {
        // All types have met every op in `tests/ops` already.
        return FILES.iter().filter(|file| !file.starts_with("types/")).map(|file| file.to_string()).collect();
    }
    let mut files = vec!["types/qwen3-float.gguf".to_string()];
    for file in FILES {
        files.push(file.to_string());
        let Some((folder, _)) = file.split_once("/model-") else { continue };
        let others = ["model-bf16.gguf", "hf", "mlx-8bit"].map(|name| format!("{folder}/{name}"));
        files.extend(others.into_iter().filter(|file| data().join(file).exists()));
    }
    // Larger models, where they are; an absolute path stays as it is.
    let more = fixtures::more("../shared/fixtures/models").map(|root| {
        let inside = |folder: &Path| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let folders = inside(&root).filter(|path| path.is_dir());
        let all = folders.flat_map(|folder| inside(&folder).collect::<Vec<_>>());
        let is_model = |path: &PathBuf| path.is_dir() || path.extension().is_some_and(|end| end == "gguf");
        let mut all: Vec<String> = all.filter(is_model).map(|path| path.to_str().unwrap().to_string()).collect();
        all.sort();
        all
    });
    files.extend(more.into_iter().flatten());
    files
}

#[test]
fn golden_logits_of_whole_models() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let metal = Metal { tuning: Tuning { part: FINE.part, ..metal.tuning }, ..metal };
    // Weights are read where their files are mapped; cut prompts are run on copies.
    let seen = Arc::new(Mutex::new(Seen::default()));
    let mapped = Metal { maps_weights: true, ..planted(Plant::None, &seen) };
    for file in golden_files() {
        let begin = Instant::now();
        let (golden, array) = golden_of(&data().join(&file));
        let most = if array == "logits" && !file.starts_with("types/") { 1e-5 } else { 1e-4 };
        let golden = std::fs::read(golden).unwrap();
        let golden = safetensors::SafeTensors::deserialize(&golden).unwrap();
        let words = |name: &str| golden.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
        let tokens: Vec<u32> = words("tokens").into_iter().map(u32::from_le_bytes).collect();
        let exact: Vec<f32> = words(&array).into_iter().map(f32::from_le_bytes).collect();
        let model = of_file(&metal, &file);
        let whole = |metal: &Metal| Session::new(metal, &model, tokens.len()).step(&[(0, &tokens)]).to_vec();
        let first = whole(&mapped);
        let error = relative(&first, &exact);
        println!("{file}: {error:.2e}, {:.1?}", begin.elapsed());
        assert!(error <= most, "{file}: off by {error:e}, at most {most:e}");
        for &schedule in &schedules()[1..] {
            let begin = Instant::now();
            let other = simulated(CacheType::F32, scheduled(schedule)).unwrap();
            let found = whole(&Metal { tuning: mapped.tuning, maps_weights: true, ..other });
            assert_eq!(bits(&found), bits(&first), "{file}, {schedule:?}");
            println!("{file}, {schedule:?}: the same bits, {:.1?}", begin.elapsed());
        }
        // Cut anywhere, the same to rounding: products of many rows add up in another order. Without those, the same
        // bits.
        let cut = |metal: &Metal, n: usize| -> Vec<f32> {
            let mut session = Session::new(metal, &model, tokens.len());
            tokens.chunks(n).flat_map(|chunk| session.step(&[(0, chunk)]).to_vec()).collect()
        };
        // Pages, window pages, latent caches and recurrent states.
        let is_cut = ["qwen3moe", "gemma3", "deepseekv2", "qwen3next"].iter().any(|arch| file.starts_with(arch));
        if is_cut || wide() {
            let sevens = cut(&metal, 7);
            let error = relative(&sevens, &first);
            assert!(error <= 2e-5, "{file} in chunks of 7: {error:e}");
            assert_eq!(bits(&cut(&metal, 5)), bits(&sevens), "{file} in chunks of 5");
        }
        assert!(std::mem::take(&mut seen.lock().unwrap().n_mapped) > 0, "{file} has no aligned matrix");
    }
}
