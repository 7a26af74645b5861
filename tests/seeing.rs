//! Models that see, for the tests of crates: what the original code made of images, against what an encoder and a text
//! model make of them. Included by its path, as `fixtures.rs` is, which it requires as `crate::fixtures`.
//!
//! A fixture is a folder with `hf/`, `images/` and `golden.safetensors`: `pixel_values.IMAGE` and, of Qwen, the grid
//! `grid_thw.IMAGE`, `features.IMAGE`, `deepstack_N.IMAGE`; `tokens.PROMPT`, `position_ids.PROMPT` and
//! `logits.PROMPT`. `card.json` says which images a prompt has.
#![allow(dead_code)] // Each crate uses a part.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use backend::{Backend, Batch, Limits, PAGE, Tables};
use checkpoint::Checkpoint;
use engine::images::{Encoder, Features, Image, Pictures};
use model::plan::ValidPlan;
use model::vision::{self, Vision};
use safetensors::SafeTensors;

use crate::fixtures;

/// Fixtures next to the checkout, some of them in the tree too.
const MODELS: [&str; 3] = ["qwen3_vl_moe", "qwen3_5_moe", "gemma4"];

/// Error of features and logits over the standard deviation of the exact ones.
pub const REFERENCE: f64 = 1e-5;

pub struct Model {
    pub checkpoint: Arc<Checkpoint>,
    pub plan: ValidPlan,
    pub vision: Vision,
    pub folder: PathBuf,
    /// The file of the encoder.
    encoder: Arc<Checkpoint>,
    /// The token of a feature.
    pub feature: u32,
    golden: Vec<u8>,
}

impl Model {
    pub fn open(folder: &Path) -> Model {
        Model::of(folder, &folder.join("hf"), None)
    }

    /// The model of a fixture in other files: its text model, and its encoder where that is in a separate file.
    pub fn of(folder: &Path, text: &Path, encoder: Option<&Path>) -> Model {
        let checkpoint = Arc::new(checkpoint::open(text).unwrap());
        let encoder = encoder.map(|path| Arc::new(checkpoint::open(path).unwrap()));
        let plan = model::build(&checkpoint).unwrap();
        let (plan, vision) = vision::open(&checkpoint, &plan, encoder.as_deref()).unwrap().expect("a model that sees");
        let golden = std::fs::read(folder.join("golden.safetensors")).unwrap();
        let config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(folder.join("hf/config.json")).unwrap()).unwrap();
        let feature = config["image_token_id"].as_u64().unwrap() as u32;
        let encoder = encoder.unwrap_or_else(|| checkpoint.clone());
        Model { checkpoint, plan, vision, folder: folder.into(), encoder, feature, golden }
    }

    fn words(&self, name: &str) -> Option<(Vec<usize>, Vec<[u8; 4]>)> {
        let file = SafeTensors::deserialize(&self.golden).unwrap();
        let view = file.tensor(name).ok()?;
        Some((view.shape().to_vec(), view.data().as_chunks().0.to_vec()))
    }

    pub fn f32s(&self, name: &str) -> Option<Vec<f32>> {
        Some(self.words(name)?.1.into_iter().map(f32::from_le_bytes).collect())
    }

    pub fn u32s(&self, name: &str) -> Vec<u32> {
        self.words(name).unwrap_or_else(|| panic!("{name}")).1.into_iter().map(u32::from_le_bytes).collect()
    }

    pub fn encoder(&self, backend: Box<dyn Backend + Send>) -> Encoder {
        Encoder::new(self.vision.clone(), self.encoder.clone(), backend, 1 << 20).unwrap()
    }

    pub fn image(&self, name: &str) -> Option<Image> {
        let file = ["png", "jpg"].map(|end| self.folder.join(format!("images/{name}.{end}")));
        Some(Image::decode(&std::fs::read(file.iter().find(|file| file.exists())?).unwrap()).unwrap())
    }

    /// Prompts and the images in them.
    pub fn prompts(&self) -> Vec<(String, Vec<String>)> {
        let card = std::fs::read(self.folder.join("card.json")).unwrap();
        let card: serde_json::Value = serde_json::from_slice(&card).unwrap();
        let images = |of: &serde_json::Value| {
            of["images"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_string()).collect()
        };
        card["prompts"].as_object().unwrap().iter().map(|(name, of)| (name.clone(), images(of))).collect()
    }

    /// Names of the images whose pixels the golden file has.
    pub fn images(&self) -> Vec<String> {
        let file = SafeTensors::deserialize(&self.golden).unwrap();
        file.names().into_iter().filter_map(|name| name.strip_prefix("features.").map(String::from)).collect()
    }

    /// A prompt with its images, ready for a program.
    pub fn prompt(&self, encoder: &mut Encoder, name: &str, images: &[String]) -> (Vec<u32>, Pictures) {
        let tokens = self.u32s(&format!("tokens.{name}"));
        let features: Vec<Arc<Features>> =
            images.iter().map(|image| Arc::new(encoder.encode(&self.image(image).unwrap()).unwrap())).collect();
        let pictures = Pictures::place(&self.vision, self.feature, &tokens, features).unwrap();
        (tokens, pictures)
    }

    /// Holds the features of all images to those of the original code.
    pub fn check_features(&self, of: &str, backend: Box<dyn Backend + Send>, tolerance: f64) {
        let (d, d_all) = (self.plan.d_model, self.vision.d_features());
        let mut encoder = self.encoder(backend);
        for name in self.images().iter().filter(|name| *name != "jpeg") {
            let Some(image) = self.image(name) else { continue };
            let features = encoder.encode(&image).unwrap();
            for part in 0..d_all / d {
                let array = match part {
                    0 => format!("features.{name}"),
                    n => format!("deepstack_{}.{name}", n - 1),
                };
                let exact = self.f32s(&array).unwrap();
                let rows = features.rows.chunks_exact(d_all).flat_map(|row| &row[part * d..][..d]);
                let off = error(&rows.copied().collect::<Vec<_>>(), &exact);
                println!("{} {of} {array}: {off:.2e}", self.folder.display());
                assert!(off <= tolerance, "{} {of} {array}: {off:.2e}", self.folder.display());
            }
        }
    }

    /// Holds the logits of a prompt to those of the original code, and returns them.
    pub fn check_logits(
        &self,
        of: &str,
        backend: &dyn Backend,
        name: &str,
        (tokens, pictures): (&[u32], &Pictures),
        tolerance: f64,
    ) -> Vec<f32> {
        let found = self.logits(backend, tokens, pictures, usize::MAX);
        let off = error(&found, &self.f32s(&format!("logits.{name}")).unwrap());
        println!("{} {of} logits.{name}: {off:.2e}", self.folder.display());
        assert!(off <= tolerance, "{} {of} logits.{name}: {off:.2e}", self.folder.display());
        found
    }

    /// Logits of all positions, in chunks of about `cut` tokens.
    pub fn logits(&self, backend: &dyn Backend, tokens: &[u32], pictures: &Pictures, cut: usize) -> Vec<f32> {
        let n_pages = tokens.len().div_ceil(PAGE);
        let plan = backend.lower(self.plan.clone()).unwrap();
        let mut program = backend.compile(&plan, self.checkpoint.clone(), limits(tokens.len())).unwrap();
        let pages: Vec<u32> = (0..n_pages as u32).collect();
        let (mut at, mut logits) = (0, Vec::new());
        while at < tokens.len() {
            let n = pictures.whole(at, cut.min(tokens.len() - at));
            let mut batch = Batch::default();
            let tables = Tables { pages: &pages, window_pages: &pages, ..Tables::default() };
            batch.push(&tokens[at..at + n], at, tables, 0..n);
            pictures.fill(at..at + n, 0, &mut batch.tokens, &mut batch.given);
            batch.given.places.extend((at..at + n).map(|position| pictures.place_of(position)));
            logits.extend_from_slice(program.step(&batch).unwrap().logits);
            at += n;
        }
        logits
    }
}

/// Folders of the fixtures, those of Qwen first.
pub fn folders() -> Vec<PathBuf> {
    let of_tree = std::fs::read_dir(fixtures::root("crates/conformance/tests/data/images")).unwrap();
    let mut folders: Vec<PathBuf> = of_tree.map(|entry| entry.unwrap().path()).collect();
    folders.sort_by(|a, b| b.cmp(a));
    folders.extend(MODELS.iter().filter_map(|name| fixtures::more(&format!("../shared/fixtures/vision/{name}"))));
    folders
}

pub fn error(found: &[f32], exact: &[f32]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let n = exact.len() as f64;
    let mean = exact.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let variance = exact.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
    let off = found.iter().zip(exact).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>() / n;
    (off / variance).sqrt()
}

/// Limits for one sequence of `n` tokens, all of them in a step.
pub fn limits(n: usize) -> Limits {
    let n_pages = n.div_ceil(PAGE);
    Limits {
        max_tokens: n,
        max_outputs: n,
        n_pages,
        max_positions: n,
        n_window_pages: n_pages,
        n_states: 1,
        max_draft: 0,
    }
}
