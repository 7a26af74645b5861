//! Models that see, against the original code: pixels to the bit, features and logits on the reference and the CPU.

use backend::reference::Reference;
use backend::{Backend, Batch, CacheType, GivenRows, Kinds, Limits, PAGE, StepError, Tables};
use conformance::backends::{cpu_with, gpu, isas, simulated, wide};
use cpu::Isa;
use engine::images::{Pictures, Rows};
use model::vision::{PixelOrder, Places, Vision};

use crate::seeing::{Model, REFERENCE, error, folders, limits};

/// As `REFERENCE`, of the CPU.
const CPU: f64 = 2e-5;

fn models() -> Vec<Model> {
    folders().iter().map(|folder| Model::open(folder)).collect()
}

/// The numbers of patches in the order of the original processor, and their places.
fn in_order(vision: &Vision, rows: &Rows) -> Vec<f32> {
    let (n, width) = (vision.n_pixels(), vision.n_pixels() + vision.patches.d_position);
    let mut patches: Vec<(usize, [u32; 2])> = rows.places.iter().copied().enumerate().collect();
    // Where patches are pooled, the original has them row after row.
    if matches!(vision.patches.order, PixelOrder::Pixels { .. }) {
        patches.sort_by_key(|&(_, place)| place);
    }
    patches.iter().flat_map(|&(i, _)| &rows.rows[i * width..][..n]).copied().collect()
}

#[test]
fn pixels_are_the_original_processors() {
    for model in models() {
        let encoder = model.encoder(Box::new(Reference));
        for name in model.images() {
            let (Some(image), Some(exact)) = (model.image(&name), model.f32s(&format!("pixel_values.{name}"))) else {
                continue;
            };
            let rows = encoder.processor().rows(&image).unwrap();
            let found = in_order(&model.vision, &rows);
            // Some models center them later than their processor.
            let center = |v: f32| if model.vision.is_centered { 2.0 * (v - 0.5) } else { v };
            let exact: Vec<f32> = exact.into_iter().map(center).collect();
            assert_eq!(found.len(), exact.len(), "{name}");
            check_pixels(&model, &name, &found, &exact);
        }
    }
}

/// All files but JPEG have one decoding: of those, decoders round differently (docs/models.md), by up to 12 of 256
/// levels here.
fn check_pixels(model: &Model, name: &str, found: &[f32], exact: &[f32]) {
    let n_off = found.iter().zip(exact).filter(|(a, b)| a != b).count();
    let most = found.iter().zip(exact).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("{} {name}: {n_off} of {} numbers differ, by {most:.4} at most", model.folder.display(), exact.len());
    if name == "jpeg" {
        assert!(most < 0.12, "{name}: off by {most}");
    } else {
        assert_eq!(n_off, 0, "{} {name}: {n_off} numbers differ, by {most} at most", model.folder.display());
    }
}

fn backends() -> Vec<(String, Box<dyn Backend + Send>, f64)> {
    let mut all: Vec<(String, Box<dyn Backend + Send>, f64)> =
        vec![("reference".into(), Box::new(Reference), REFERENCE)];
    for isa in isas().filter(|&isa| isa == Isa::Scalar || isa == Isa::best()) {
        all.push((format!("cpu {isa}"), Box::new(cpu_with(isa, 2, CacheType::F32)), CPU));
    }
    all
}

#[test]
fn features_are_the_original_encoders() {
    for model in models() {
        for (backend, row, tolerance) in backends() {
            model.check_features(&backend, row, tolerance);
        }
    }
}

/// Activations next to weights are rounded to bf16 there, queries and shares of attention to f16.
#[test]
fn gpus_find_features() {
    for model in models() {
        for cache in [CacheType::F32, CacheType::F16] {
            if let Some(cuda) = gpu(cache) {
                model.check_features(&format!("cuda, {cache} cache"), Box::new(cuda), 4e-2);
            }
        }
    }
}

#[test]
fn logits_are_the_original_models() {
    for model in models() {
        for (name, images) in model.prompts() {
            for ((backend, row, tolerance), (_, of_encoder, _)) in backends().into_iter().zip(backends()) {
                let mut encoder = model.encoder(of_encoder);
                let (tokens, pictures) = model.prompt(&mut encoder, &name, &images);
                if model.vision.places == Places::Grid {
                    let ids = model.u32s(&format!("position_ids.{name}"));
                    let n = tokens.len();
                    let wanted: Vec<[u32; 3]> = (0..n).map(|i| [ids[i], ids[n + i], ids[2 * n + i]]).collect();
                    let found: Vec<[u32; 3]> = (0..n).map(|i| pictures.place_of(i)).collect();
                    assert_eq!(found, wanted, "{name}");
                }
                let found = model.check_logits(&backend, &*row, &name, (&tokens, &pictures), tolerance);
                // The CPU's law holds for images too.
                if backend != "reference" {
                    let cut = model.logits(&*row, &tokens, &pictures, 7);
                    assert!(found.iter().zip(&cut).all(|(a, b)| a.to_bits() == b.to_bits()), "{backend} {name}: cut");
                }
            }
        }
    }
}

/// GPUs take the features that the CPU finds, whole and cut between images, token by token where that takes no
/// simulator.
#[test]
fn gpus_take_features() {
    let metal = simulated(CacheType::F32, metal_sim::Options::default());
    let metal = metal.map(|metal| ("metal", Box::new(metal) as Box<dyn Backend>, 1e-5, &[usize::MAX, 7][..]));
    let cuda = gpu(CacheType::F32);
    // Activations next to weights of bf16 are rounded to it: 2.5e-2 with Qwen3-VL-MoE.
    let cuda = cuda.map(|cuda| ("cuda", Box::new(cuda) as Box<dyn Backend>, 4e-2, &[usize::MAX, 7, 1][..]));
    let rows: Vec<_> = metal.into_iter().chain(cuda).collect();
    // Simulated, all others take minutes.
    for model in models().into_iter().take(if wide() { usize::MAX } else { 2 }) {
        let mut encoder = model.encoder(Box::new(Reference));
        let (name, images) = model.prompts().swap_remove(0);
        let (tokens, pictures) = model.prompt(&mut encoder, &name, &images);
        let exact = model.f32s(&format!("logits.{name}")).unwrap();
        for (backend, row, tolerance, cuts) in &rows {
            for &cut in *cuts {
                let off = error(&model.logits(&**row, &tokens, &pictures, cut), &exact);
                println!("{} {backend} logits.{name}, cut {cut}: {off:.2e}", model.folder.display());
                assert!(off <= *tolerance, "{} {backend} {name}, cut {cut}: {off:.2e}", model.folder.display());
            }
        }
    }
}

/// A GPU finds the features too.
#[test]
fn metal_finds_features() {
    let Some(metal) = simulated(CacheType::F32, metal_sim::Options::default()) else { return };
    // Those of the tree: simulated, larger ones take minutes.
    for model in models().into_iter().take(if wide() { usize::MAX } else { 3 }) {
        model.check_features("metal", Box::new(metal.clone()), 1e-5);
    }
}

/// A prompt without an image gives what it gives in a plan that sees none.
#[test]
fn text_is_as_it_was() {
    for model in models() {
        let tokens = model.u32s("tokens");
        let backend = cpu_with(Isa::best(), 2, CacheType::F32);
        let none = Pictures::at(&model.vision, model.feature, Vec::new());
        let seeing = model.logits(&backend, &tokens, &none, usize::MAX);
        let plan = backend.lower(model::build(&model.checkpoint).unwrap()).unwrap();
        assert!(plan.d_input().is_none());
        let n_pages = tokens.len().div_ceil(PAGE);
        let mut program = backend.compile(&plan, model.checkpoint.clone(), limits(tokens.len())).unwrap();
        let pages: Vec<u32> = (0..n_pages as u32).collect();
        let mut batch = Batch::default();
        let tables = Tables { pages: &pages, window_pages: &pages, ..Tables::default() };
        batch.push(&tokens, 0, tables, 0..tokens.len());
        let out = program.step(&batch).unwrap().logits.to_vec();
        assert!(out.iter().zip(&seeing).all(|(a, b)| a.to_bits() == b.to_bits()));
        // And it refuses rows.
        batch.given.places = vec![[0; 3]; tokens.len()];
        assert!(matches!(program.step(&batch), Err(StepError::Batch(why)) if why.contains("images")));
    }
}

/// What a batch says of images is checked before anything is computed.
#[test]
fn wrong_rows_are_refused() {
    let takes = backend::Takes { d_input: Some(2), ..backend::Takes::default() };
    let limits = Limits { max_tokens: 8, max_outputs: 8, n_pages: 4, max_positions: 64, ..Limits::default() };
    let right = GivenRows {
        rows: vec![0.0; 4],
        tokens: vec![1, 2],
        places: vec![[0; 3]; 5],
        spans: std::iter::once(1..3).collect(),
    };
    let check = |given: GivenRows| {
        let mut batch = Batch::default();
        for (first, n) in [(0u32, 3), (1, 2)] {
            batch.push(&vec![0; n], 0, Tables { pages: &[first], ..Tables::default() }, []);
        }
        batch.given = given;
        batch.check_with(limits, Kinds::default(), 1, takes)
    };
    assert_eq!(check(right.clone()), Ok(()));
    let cases: [(&str, GivenRows); 7] = [
        ("have 3", GivenRows { rows: vec![0.0; 3], ..right.clone() }),
        ("ascending", GivenRows { tokens: vec![2, 1], ..right.clone() }),
        ("ascending", GivenRows { tokens: vec![1, 5], ..right.clone() }),
        ("4 positions", GivenRows { places: vec![[0; 3]; 4], ..right.clone() }),
        ("one chunk", GivenRows { spans: std::iter::once(2..4).collect(), ..right.clone() }),
        ("one chunk", GivenRows { spans: std::iter::once(1..1).collect(), ..right.clone() }),
        ("ascending", GivenRows { spans: vec![1..3, 2..3], ..right }),
    ];
    for (why, given) in cases {
        let found = check(given.clone());
        assert!(matches!(&found, Err(StepError::Batch(text)) if text.contains(why)), "{given:?}: {found:?}");
    }
}
