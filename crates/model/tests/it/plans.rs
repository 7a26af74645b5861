//! Printed plans of tiny models of every architecture: `tests/plans/NAME.txt` as the architecture writes them, and
//! `NAME.fused.txt` after all passes where those differ in kind. `UPDATE_EXPECT=1 cargo test -p moebius-model` writes
//! the files.

use std::collections::BTreeSet;
use std::path::Path;

use crate::header::Header;
use crate::{gated_delta, latent, windowed};
use expect_test::expect_file;
use model::arch::ARCHS;
use model::plan::passes;

/// Names of files, and the headers that they are plans of.
const PLANS: &[(&str, fn() -> Header)] = &[
    ("llama", || Header::llama(2)),
    ("mixtral", || Header::mixtral(1)),
    ("qwen2", || windowed::qwen2(2)),
    ("qwen3", || Header::qwen3(3)),
    ("qwen3moe", || Header::qwen3moe(6)),
    ("qwen3next", gated_delta::qwen3next),
    ("qwen35", gated_delta::qwen35),
    ("qwen35moe", gated_delta::qwen35moe),
    ("deepseek2", latent::deepseek_v3),
    ("deepseek2_whole", latent::deepseek_v2_whole),
    ("glm4moe", latent::glm),
    ("gemma3", || windowed::gemma3(7)),
    ("gemma4", windowed::gemma4),
    ("gpt-oss", windowed::gpt_oss),
];

/// Names of files, and folders of `conformance/tests/data/published` that they are plans of.
const PUBLISHED: &[(&str, &str)] = &[
    ("minimax-01", "minimax"),
    ("minimax-m2", "minimax_m2"),
    ("ernie4_5", "ernie4_5"),
    ("ernie4_5-moe", "ernie4_5_moe"),
    ("dots1", "dots1"),
    ("olmoe", "olmoe"),
    ("hunyuan-moe", "hunyuan_v1_moe"),
    ("hy_v3", "hy_v3"),
    ("qwen3vl", "qwen3_vl"),
    ("qwen3vlmoe", "qwen3_vl_moe"),
    ("mistral4", "mistral4"),
    ("afmoe", "afmoe"),
    ("mellum", "mellum"),
    ("laguna", "laguna"),
    ("step35", "step3p7"),
    ("mimo2", "mimo_v2_flash"),
    ("muse-glimmer", "muse_glimmer"),
    ("smollm3", "smollm3"),
    ("seed_oss", "seed_oss"),
    ("olmo2", "olmo3"),
    ("glm4", "glm4"),
    ("granite", "granite"),
    ("granitemoe", "granitemoeshared"),
    ("phi3", "phi3"),
    ("cohere2", "cohere2"),
    ("arcee", "arcee"),
    ("mistral3", "ministral3"),
    ("llama4", "llama4"),
    ("lfm2", "lfm2"),
    ("lfm2moe", "lfm2_moe"),
    ("granitehybrid", "granitemoehybrid"),
    ("nemotron_h_moe", "nemotron_h_latent"),
    ("nemotron_h", "nemotron_h_dense"),
    ("falcon-h1", "falcon_h1"),
    ("kimi-linear", "kimi_linear"),
    ("bailingmoe3", "bailing_hybrid"),
    ("phimoe", "phimoe"),
    ("jamba", "jamba"),
    ("deepseek32", "deepseek_v32"),
    ("glm-dsa", "glm_moe_dsa_shared"),
    ("bert", "../encoders/bert_rerank"),
    ("gemma-embedding", "../encoders/gemma_embedding"),
    ("modern-bert", "../encoders/modern_bert"),
    ("nomic-bert", "../encoders/nomic_bert"),
];

/// Those that are written fused as well: latents with dense and routed layers, recurrent states, windows with norms
/// after each part.
const FUSED: [&str; 3] = ["deepseek2", "qwen35moe", "gemma4"];

/// Those that are written fused and with their draft head.
const DRAFTING: [&str; 1] = ["qwen35moe"];

#[test]
fn plans() {
    for (name, header) in PLANS {
        let checkpoint = header().open();
        let plain = model::build(&checkpoint).unwrap();
        expect_file![format!("../plans/{name}.txt")].assert_eq(&plain.to_string());
        // Every plan can be fused, whether its text is kept or not.
        let fused = crate::fused(&checkpoint).unwrap();
        assert!(fused.ops.len() < plain.ops.len(), "{name}: {} ops of {}", fused.ops.len(), plain.ops.len());
        if FUSED.contains(name) {
            expect_file![format!("../plans/{name}.fused.txt")].assert_eq(&fused.to_string());
        }
        if DRAFTING.contains(name) {
            let fused = model::build_drafting(&checkpoint).unwrap().rewrite(passes::fuse).unwrap();
            expect_file![format!("../plans/{name}.drafting.txt")].assert_eq(&fused.to_string());
        }
    }
}

#[test]
fn plans_of_published_folders() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/tests/data/published");
    for (name, folder) in PUBLISHED {
        let checkpoint = checkpoint::open(&root.join(folder).join("hf")).unwrap();
        let plain = model::build(&checkpoint).unwrap();
        assert_eq!(plain.arch, *name);
        expect_file![format!("../plans/{name}.txt")].assert_eq(&plain.to_string());
        let fused = crate::fused(&checkpoint).unwrap();
        assert!(fused.ops.len() < plain.ops.len(), "{name}: {} ops of {}", fused.ops.len(), plain.ops.len());
    }
}

/// No architecture lacks a plan, and no file is left of a plan that is gone.
#[test]
fn every_architecture_has_a_plan() {
    for name in ARCHS.iter().flat_map(|arch| arch.gguf) {
        let is_there =
            PLANS.iter().any(|(_, header)| header().arch() == *name) || PUBLISHED.iter().any(|(arch, _)| arch == name);
        assert!(is_there, "{name} has no printed plan");
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plans");
    let found = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names = PLANS.iter().map(|(name, _)| name).chain(PUBLISHED.iter().map(|(name, _)| name));
    let wanted = names.map(|name| format!("{name}.txt"));
    let wanted = wanted.chain(FUSED.iter().map(|name| format!("{name}.fused.txt")));
    let wanted = wanted.chain(DRAFTING.iter().map(|name| format!("{name}.drafting.txt")));
    assert_eq!(found.collect::<BTreeSet<_>>(), wanted.collect());
}
